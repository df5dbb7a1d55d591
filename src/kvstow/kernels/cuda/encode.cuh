// Keys and values of new tokens, encoded straight into the planes by one launch.
#pragma once
#include "encode_keys.cuh"
#include "encode_values.cuh"
namespace kvstow {

constexpr int ENCODE_THREADS = 128;

// What a block encodes, and which block of those it is. Keys wait for memory and values for instructions, so of a pair
// of blocks one takes keys and the other one values. A search takes all keys first, so that the table of one kind stays
// in the cache.
template <bool ALTERNATE>
struct Part {
  bool is_key;
  u32 block;
  KVSTOW_INLINE Part() {
    const u32 at = blockIdx.x, half = gridDim.x / 2;
    is_key = ALTERNATE ? at % 2 == 0 : at < half;
    block = ALTERNATE ? at / 2 : at < half ? at : at - half;
  }
};

// Grid 2 * ceil(n_vectors / (128 / groups)), one lane per group. `table` holds 2^VALUE_BITS floats in shared memory.
template <int D, int KEY_BITS, int VALUE_BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode(const EncodeArgs& args, float* table) {
  constexpr int GROUPS = D / 32, N_EDGES = (1 << VALUE_BITS) - 1;
  const Part<!SEARCH> part;
  // Lanes beyond the last vector write its bytes once more: so all lanes of a warp exchange.
  const u32 last = args.n_vectors - 1;
  const u32 vector = min(part.block * (ENCODE_THREADS / GROUPS) + threadIdx.x / GROUPS, last);
  const int group = threadIdx.x % GROUPS;
  if (part.is_key) {
    encode_key_group<D, KEY_BITS, T, GUARD, SEARCH>(args, vector, group);
    return;
  }
  if (VALUE_BITS > 3) {  // looked up by a number that differs from lane to lane
    KVSTOW_ROLLED
    for (int i = threadIdx.x; i < N_EDGES; i += ENCODE_THREADS) table[i] = args.boundaries[i];
    __syncthreads();
  }
  const float* edges = VALUE_BITS > 3 ? table : args.boundaries;
  encode_value_group<D, VALUE_BITS, T, GUARD, SEARCH>(args, edges, vector, group);
}

}  // namespace kvstow
