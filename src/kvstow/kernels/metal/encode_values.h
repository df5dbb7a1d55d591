// Values: signs, Walsh-Hadamard, root mean square, codebook. See reference.encode_values.
//
// The D / 32 groups of a vector lie in neighbouring lanes: butterflies up to 16 stay in a lane, the
// others exchange lanes, in the order of the definition.
#pragma once
#include "search.h"
namespace kvstow {

template <int D>
void rotate(thread float (&x)[32], const device int8_t* signs, uint lane) {
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = times(x[i], float(signs[i]));
  KVSTOW_UNROLL
  for (int h = 1; h < 32; h *= 2) {
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i)
      if (!(i & h)) {
        const float a = x[i], b = x[i + h];
        x[i] = plus(a, b), x[i + h] = minus(a, b);
      }
  }
  KVSTOW_UNROLL
  for (int h = 1; h < D / 32; h *= 2) {
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) {
      const float other = simd_shuffle_xor(x[i], ushort(h));
      x[i] = lane & h ? minus(other, x[i]) : plus(x[i], other);
    }
  }
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = times(x[i], inverse_root<D>());
}

// Whether the vector of a group is finite and small enough for its rotation to be.
template <int D>
bool is_codable(const thread float (&x)[32]) {
  float largest = 0.f;
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) largest = most(largest, fabs(x[i]));
  KVSTOW_UNROLL
  for (int h = 1; h < D / 32; h *= 2) {
    const float other = simd_shuffle_xor(largest, ushort(h));
    largest = most(largest, other);
  }
  return largest <= 1.2676506e30f;  // 2^100
}

// How many of the 2^BITS - 1 edges lie strictly below a number: its code, a tie the lower one; NaN: 0.
template <int BITS>
uint code_of(float x, const threadgroup float* edges) {
  uint below = 0;
  KVSTOW_UNROLL
  for (int step = 1 << (BITS - 1); step > 0; step /= 2) below += edges[below + step - 1] < x ? step : 0;
  return below;
}

constant constexpr float MULTIPLES[8] = {0.7f, 0.8f, 0.87f, 0.94f, 1.f, 1.07f, 1.15f, 1.25f};

// The best of eight multiples of the root mean square: divides `units` by it, and returns what is
// stored for the scale, so that what is read back has no bias along the group.
template <int BITS, class Table>
half search_values(thread float (&units)[32], float divisor, const threadgroup float* edges,
                   Table centroids, const device uint* errors) {
  float x[32];
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = plus(times(units[i], 128.f), 768.f);  // places
  const float multiple = MULTIPLES[least_candidate<2>(x, errors, 1536)];
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) units[i] = over(units[i], multiple);
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = centroids[code_of<BITS>(units[i], edges)];
  const float fit = sum_of_products(units, x);
  const float least_squares = over(fit, sum_of_products(x, x));
  const float unbiased = over(sum_of_products(units, units), fit);
  const float ratio = min(unbiased, plus(least_squares, least_squares));
  return half(times(times(divisor, multiple), ratio));
}

template <int D, int BITS, bool SEARCH, class Element, class Table>
void encode_value_group(const device Element* from, const device int8_t* signs,
                        const threadgroup float* edges, Table centroids, const device uint* errors,
                        bool is_mine, uint lane, device uint* codes, device half* scale) {
  float x[32];
  load_group(from, x);
  const bool codable = is_codable<D>(x);
  rotate<D>(x, signs, lane);
  float sum = times(x[0], x[0]);
  KVSTOW_UNROLL
  for (int i = 1; i < 32; ++i) sum = plus(sum, times(x[i], x[i]));
  const float rms = precise::sqrt(over(sum, 32.f));
  half stored = half(rms);
  float divisor = plus(rms, EPS);
  if ((bits_of(stored) & 0x7FFF) == 0x7C00 && codable) {
    divisor = FLOAT16_MAX;
    stored = half(divisor);
  }
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = over(x[i], divisor);
  const bool safe = divisor >= 0.0001220703125f && divisor < 16384.f;  // 2^-13, 2^14
  if (SEARCH && safe) stored = search_values<BITS>(x, divisor, edges, centroids, errors);
  BitStream<BITS> stream;
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) stream.put(i, code_of<BITS>(x[i], edges));
  if (!is_mine) return;
  stream.store(codes);
  *scale = stored;
}

}  // namespace kvstow
