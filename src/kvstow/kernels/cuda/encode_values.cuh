// Values: signs, Walsh-Hadamard, root mean square, codebook. See reference.encode_values.
//
// Vectors lie in neighbouring lanes, a group in each.
#pragma once
#include "search.cuh"
namespace kvstow {

// The Walsh-Hadamard transform of vectors that lie in neighbouring lanes, N elements in each, once signs are applied: in
// the order of the definition, of which the first steps stay in a lane.
template <int D, int N>
struct Rotation {
  static constexpr int LANES = D / N;
  static constexpr float NORM = D == 64    ? 0.125f
                                : D == 128 ? 0x1.6a09e6p-4f
                                : D == 256 ? 0.0625f
                                           : 0x1.6a09e6p-5f;

  KVSTOW_INLINE static void rotate(float (&x)[N]) {
    KVSTOW_UNROLL
    for (int h = 1; h < N; h *= 2) KVSTOW_UNROLL
      for (int i = 0; i < N; ++i)
        if (!(i & h)) {
          const float a = x[i], b = x[i + h];
          x[i] = __fadd_rn(a, b), x[i + h] = __fsub_rn(a, b);
        }
    KVSTOW_UNROLL
    for (int h = 1; h < LANES; h *= 2) {
      const float sign = threadIdx.x & h ? -1.f : 1.f;  // own + other, or other - own: one rounding
      KVSTOW_UNROLL
      for (int i = 0; i < N; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(WHOLE_WARP, x[i], h));
    }
    KVSTOW_UNROLL
    for (int i = 0; i < N; ++i) x[i] = __fmul_rn(x[i], NORM);
  }
};

// How many boundaries lie strictly below a number: its code, a tie the lower one; NaN: 0.
template <int BITS>
struct Boundaries {
  static constexpr int KEPT = BITS <= 3 ? (1 << BITS) - 1 : 0;  // in registers
  const float* edges;
  float kept[KEPT ? KEPT : 1];

  KVSTOW_INLINE Boundaries(const float* edges_) : edges(edges_) {
    KVSTOW_UNROLL
    for (int i = 0; i < KEPT; ++i) kept[i] = narrow_edge(i);
  }
  // The boundaries of widths that are kept, lloyd-max-v1: known here, they take no loads.
  KVSTOW_INLINE static float narrow_edge(int i) {
    constexpr float TWO_BITS[3] = {-0x1.f902b0p-1f, -0x1.3a5c40p-8f, 0x1.f5f5dcp-1f};
    constexpr float THREE_BITS[7] = {-0x1.bf7858p0f, -0x1.0cca2ep0f, -0x1.004816p-1f, 0.f,
                                     0x1.004816p-1f, 0x1.0cca2ep0f,  0x1.bf7858p0f};
    return BITS == 3 ? THREE_BITS[i] : TWO_BITS[i % 3];
  }
  // Boundaries for numbers that are not divided yet: x / divisor, rounded, is above an edge just if it lies above
  // the middle between the edge and the next number of float32. That is one bit longer than a float32, so that
  // no x is equal to divisor times it, and x may be compared with the product rounded down.
  KVSTOW_INLINE void multiply(float divisor) {
    KVSTOW_UNROLL
    for (int i = 0; i < KEPT; ++i) {
      const float edge = narrow_edge(i);
      const u32 bits = __float_as_uint(edge);
      const float half_step = 0.5f * (__uint_as_float(edge < 0.f ? bits - 1 : bits + 1) - edge);
      kept[i] = edge == 0.f ? __fmul_rd(divisor * 0x1p-75f, 0x1p-75f) : __fmaf_rd(divisor, edge, divisor * half_step);
    }
  }
  // Whether that is so, for any x: nothing leaves the range of float32.
  KVSTOW_INLINE static bool can_multiply(float divisor) { return KEPT && divisor >= 1e-9f && divisor < 1e30f; }

  KVSTOW_INLINE u32 code(float x) const {
    if (KEPT) return (u32)added(0.f, x, 1.f);
    u32 below = 0;
    KVSTOW_UNROLL
    for (int step = 1 << (BITS - 1); step; step >>= 1) below += edges[below + step - 1] < x ? step : 0;
    return below;
  }
  // A sum of whole numbers, and the code of x times a weight.
  KVSTOW_INLINE float added(float sum, float x, float weight) const {
    if (BITS == 3) {
      const bool p = kept[3] < x, q = (p ? kept[5] : kept[1]) < x;
      const bool r = (p ? (q ? kept[6] : kept[4]) : (q ? kept[2] : kept[0])) < x;
      if (p) sum += 4.f * weight;
      if (q) sum += 2.f * weight;
      if (r) sum += weight;
      return sum;
    }
    const bool p = kept[1] < x, q = (p ? kept[2] : kept[0]) < x;
    if (p) sum += 2.f * weight;
    if (q) sum += weight;
    return sum;
  }
};

// The rotation of a vector without greater elements is finite.
constexpr float LARGEST_CODABLE = 0x1p100f;

// Whether a vector is one of those; all its lanes ask together.
template <int D, Dtype T>
KVSTOW_INLINE bool is_codable(const EncodeArgs& args, const Place& place) {
  float largest = 0.f;
  const Group<T> x(args.values, place.from);
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) largest = most_or_nan(largest, fabsf(x[i]));
  KVSTOW_UNROLL
  for (int h = 1; h < D / 32; h *= 2) largest = most_or_nan(largest, __shfl_xor_sync(WHOLE_WARP, largest, h));
  return largest <= LARGEST_CODABLE;
}

// The best of eight multiples of the root mean square: divides `units` by it, and returns what is
// stored for the scale, so that what is read back has no bias along the group.
template <int BITS>
KVSTOW_INLINE u16 search_values(const EncodeArgs& args, const Boundaries<BITS>& boundaries,
                                float (&units)[32], float divisor) {
  constexpr float RESOLUTION = 128.f, SHIFT = 768.f;  // places of a unit; of unit 0
  float x[32];
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = __fadd_rn(__fmul_rn(units[i], RESOLUTION), SHIFT);
  const u32 best = least_candidate<2>(x, args.value_errors, 1536);
  const float multiple = best < 4 ? (best < 2 ? (best == 0 ? 0.7f : 0.8f) : (best == 2 ? 0.87f : 0.94f))
                                  : (best < 6 ? (best == 4 ? 1.f : 1.07f) : (best == 6 ? 1.15f : 1.25f));
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) units[i] = __fdiv_rn(units[i], multiple);
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = __ldg(args.centroids + boundaries.code(units[i]));
  const float fit = halving_sum(units, x);
  const float least_squares = __fdiv_rn(fit, halving_sum(x, x));
  const float unbiased = __fdiv_rn(halving_sum(units, units), fit);
  const float ratio = fminf(unbiased, __fadd_rn(least_squares, least_squares));
  return to_float16(__fmul_rn(__fmul_rn(divisor, multiple), ratio));
}

template <int D, int BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode_value_group(const EncodeArgs& args, const float* edges, u32 vector, int group) {
  const Place place(args, vector, group);
  Group<T> values(args.values, place.from);
  values.negate(args.signs + group * 32);
  float x[32];
  values.expand(x);
  Rotation<D, 32>::rotate(x);
  float sum = __fmul_rn(x[0], x[0]);
  KVSTOW_UNROLL
  for (int i = 1; i < 32; ++i) sum = __fadd_rn(sum, __fmul_rn(x[i], x[i]));
  const float rms = __fsqrt_rn(__fmul_rn(sum, 0x1p-5f));
  u16 scale = to_float16(rms);
  float divisor = __fadd_rn(rms, EPS);
  if (GUARD) {
    const bool saturated = (scale & 0x7FFFu) == 0x7C00u;
    if (__any_sync(WHOLE_WARP, saturated) && is_codable<D, T>(args, place) && saturated) {
      scale = 0x7BFF;  // 65504
      divisor = FLOAT16_MAX;
    }
  }
  Boundaries<BITS> boundaries(edges);
  BitStream<BITS> stream;
  if (SEARCH) {
    float units[32];
    Divider(divisor, rms).each(x, [&](int i, float u) { units[i] = u; });
    const bool safe = divisor >= 0x1p-13f && divisor < 0x1p14f;
    if (safe) scale = search_values<BITS>(args, boundaries, units, divisor);
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) stream.put(i, boundaries.code(units[i]));
  } else if (boundaries.can_multiply(divisor)) {
    boundaries.multiply(divisor);
    KVSTOW_UNROLL
    for (int i = 0; i < 32; i += 8) {  // eight codes fit into the 24 bits of a float32
      float sum = 0.f;
      KVSTOW_UNROLL
      for (int k = 0; k < 8; ++k) sum = boundaries.added(sum, x[i + k], (float)(1u << k * BITS % 24));
      stream.put_eight(i, (u32)sum);
    }
  } else {
    Divider(divisor, rms).each(x, [&](int i, float units) { stream.put(i, boundaries.code(units)); });
  }
  stream.store(args.value_codes + place.row * (D * BITS / 8) + group * 4 * BITS);
  args.value_scales[place.row * (D / 32) + group] = scale;
}

}  // namespace kvstow
