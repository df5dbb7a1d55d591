// The best of several ways to code a group, from a table of whole-number errors: codec/candidates.py.
#pragma once
#include "group.h"
namespace kvstow {

// Two of four candidates of 16 bits lie in each half of a table's words of 64, so `table` is
// [N_WORDS, n_places, 2] and has 4 N_WORDS candidates. Sums of whole numbers are exact in any order. Of
// equal candidates the first is taken.
template <int N_WORDS>
int least_candidate(const thread float (&places)[32], const device uint* table, int n_places) {
  constexpr int N_HALVES = 2 * N_WORDS, N = 2 * N_HALVES;
  uint sums[N_HALVES];
  KVSTOW_UNROLL
  for (int k = 0; k < N_HALVES; ++k) sums[k] = 0;
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) {
    const float last = float(n_places - 1);
    const int at = places[i] > 0.f ? int(min(places[i], last)) : 0;  // NaN: 0
    KVSTOW_UNROLL
    for (int k = 0; k < N_HALVES; ++k) sums[k] += table[(k / 2 * n_places + at) * 2 + k % 2];
  }
  uint best = 0xFFFFFFFFu;
  KVSTOW_UNROLL
  for (int c = 0; c < N; ++c) best = min(best, (sums[c / 2] >> (c % 2 * 16) & 0xFFFFu) * N + c);
  return best % N;
}

// A sum of the halves, then of the halves of that, as search.halving_sum. Leaves it in x[0].
inline float halving_sum(thread float (&x)[32]) {
  KVSTOW_UNROLL
  for (int half_size = 16; half_size > 0; half_size /= 2) {
    KVSTOW_UNROLL
    for (int i = 0; i < half_size; ++i) x[i] = plus(x[i], x[i + half_size]);
  }
  return x[0];
}
inline float sum_of_products(const thread float (&a)[32], const thread float (&b)[32]) {
  float x[32];
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = times(a[i], b[i]);
  return halving_sum(x);
}

}  // namespace kvstow
