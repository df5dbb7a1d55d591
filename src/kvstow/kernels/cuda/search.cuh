// The best of several ways to code a group, from a table of whole-number errors: codec/candidates.py.
#pragma once
#include "group.cuh"
namespace kvstow {

// A table has 4 N_WORDS candidates, four of 16 bits in one word, at each of `n_places` places. Sums
// of whole numbers are exact in any order. Of equal candidates the first is taken.
template <int N_WORDS>
KVSTOW_INLINE u32 least_candidate(const float (&places)[32], const u64* words, u32 n_places) {
  constexpr u32 N = 4 * N_WORDS;
  u64 sums[N_WORDS] = {};
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) {
    const u32 at = min(__float2uint_rz(places[i]), n_places - 1);  // NaN and below 0: 0
    KVSTOW_UNROLL
    for (int w = 0; w < N_WORDS; ++w) sums[w] += __ldg(words + w * n_places + at);
  }
  u32 least = 0xFFFFFFFFu;
  KVSTOW_UNROLL
  for (u32 c = 0; c < N; ++c) least = min(least, (u32)(sums[c / 4] >> (16 * (c % 4)) & 0xFFFFu) * N + c);
  return least % N;
}

template <int N>
KVSTOW_INLINE float folded(const float (&x)[N]) {
  float halves[N / 2];
  KVSTOW_UNROLL
  for (int i = 0; i < N / 2; ++i) halves[i] = __fadd_rn(x[i], x[i + N / 2]);
  return folded(halves);
}
template <>
KVSTOW_INLINE float folded(const float (&x)[1]) { return x[0]; }

// Of products a b: a sum of the halves, then of the halves of that, as search.halving_sum.
KVSTOW_INLINE float halving_sum(const float (&a)[32], const float (&b)[32]) {
  float x[32];
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = __fmul_rn(a[i], b[i]);
  return folded(x);
}

}  // namespace kvstow
