// Keys and values of new tokens, encoded straight into planes by one launch.
//
// A thread takes one group. Grid of threadgroups (ceil(groups / ENCODE_THREADS), 2): keys, then values.
#pragma once
#include "encode_keys.h"
#include "encode_values.h"
namespace kvstow {

constant constexpr int ENCODE_THREADS = 128;

// Which group a thread encodes, among those of all vectors, keys and values alike.
template <int D>
struct Place {
  ulong group;
  int of_vector;  // among the D / 32 groups of its vector
  bool is_mine;   // not of threads behind the last group, which do the work of the last vector again

  Place(uint threadgroup_index, uint thread_index, ulong n_vectors) {
    constexpr int GROUPS = D / 32;
    const ulong first = ulong(threadgroup_index) * ENCODE_THREADS;
    of_vector = thread_index % GROUPS;
    group = first + thread_index;
    is_mine = group / GROUPS < n_vectors;
    if (!is_mine) group = (n_vectors - 1) * GROUPS + of_vector;
  }
};

// The edges of value codes, for the whole threadgroup; the caller waits.
template <int BITS, class Table>
void fill_edges(Table boundaries, threadgroup float* edges, uint thread_index) {
  for (int i = thread_index; i < (1 << BITS) - 1; i += ENCODE_THREADS) edges[i] = boundaries[i];
}

}  // namespace kvstow
