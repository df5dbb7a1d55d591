// From sums of the splits of a query row to its output.
//
// Metal orders nothing between threadgroups of one launch, so this is a launch of its own.
#pragma once
#include "primitives.h"
namespace kvstow {

// A simdgroup takes one row; lane i holds the D / 32 dims from i * (D / 32) on.
//   sums, weights  as decode_split leaves them
//   sink           a score of no token, whose weight has no value; -INFINITY: none
//   signs          [d] +-1
//   output         [b, hq, l, d]
template <int D, class Weights, class Element>
void merge_splits(const device float* sums, Weights weights, int n_splits, float sink,
                  const device int8_t* signs, device Element* output, ulong row, uint lane) {
  constexpr int DIMS = D / LANES;
  const Weights own_weights = weights + row * n_splits * 2;
  const device float* own_sums = sums + row * n_splits * D + lane * DIMS;
  const float sink_log2 = sink * LOG2_E;
  float top = sink_log2;
  for (int s = lane; s < n_splits; s += LANES) top = max(top, own_weights[2 * s]);
  for (int by = 1; by < LANES; by *= 2) top = max(top, simd_shuffle_xor(top, ushort(by)));

  float total = sink_log2 == -INFINITY ? 0.f : exp2(sink_log2 - top), x[DIMS];
  KVSTOW_UNROLL
  for (int e = 0; e < DIMS; ++e) x[e] = 0.f;
  for (int s = 0; s < n_splits; ++s) {
    const float greatest = own_weights[2 * s];
    if (greatest == -INFINITY) continue;  // it saw no token, and may have no sums
    const float factor = exp2(greatest - top);
    total = fma(factor, own_weights[2 * s + 1], total);
    KVSTOW_UNROLL
    for (int e = 0; e < DIMS; ++e) x[e] = fma(factor, own_sums[s * D + e], x[e]);
  }

  // The rotation undone. The Hadamard matrix is symmetric, so the order of its butterflies is free.
  KVSTOW_UNROLL
  for (int h = 1; h < DIMS; h *= 2) {
    KVSTOW_UNROLL
    for (int e = 0; e < DIMS; ++e)
      if (!(e & h)) {
        const float a = x[e], b = x[e + h];
        x[e] = a + b, x[e + h] = a - b;
      }
  }
  KVSTOW_UNROLL
  for (int h = 1; h < LANES; h *= 2) {
    KVSTOW_UNROLL
    for (int e = 0; e < DIMS; ++e) {
      const float other = simd_shuffle_xor(x[e], ushort(h));
      x[e] = lane & h ? other - x[e] : x[e] + other;
    }
  }
  const float norm = total == 0.f ? 0.f : inverse_root<D>() / total;  // a row without tokens is zero
  KVSTOW_UNROLL
  for (int e = 0; e < DIMS; ++e) {
    const int d = lane * DIMS + e;
    output[row * D + d] = Element(x[e] * norm * float(signs[d]));
  }
}

}  // namespace kvstow
