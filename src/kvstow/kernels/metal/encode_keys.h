// Keys: x = (code + zero) * scale per group. See reference.encode_keys.
#pragma once
#include "search.h"
namespace kvstow {

// As codec/affine.py: what is stored, and the numbers that codes are taken against.
template <int BITS>
struct Affine {
  static constexpr constant int LEAST = BITS == 8 ? -127 : 0, MOST = BITS == 8 ? 127 : (1 << BITS) - 1;
  half scale, zero;
  float divisor, offset;

  // The minimum and the maximum as the ends of the range.
  Affine(float low, float high) {
    const float step = over(minus(high, low), float(MOST - LEAST));
    divisor = plus(step, EPS);
    if (BITS == 8) offset = rint(over(plus(high, low), times(2.f, divisor)));
    else offset = rint(over(low, divisor));
    scale = half(step), zero = half(offset);
  }

  // At 8 bits: the best of four zeros a quarter of a step apart, of a scale that leaves room for them.
  void search(const thread float (&x)[32], float low, float high, const device uint* errors) {
    constexpr float STEPS = 253.f, RESOLUTION = 16.f, SHIFT = (2 - LEAST) * 16.f;  // places
    constexpr float LEAST_DIVISOR = 0.000030517578125f, MOST_DIVISOR = 32768.f;    // 2^-15, 2^15
    if (!(divisor >= LEAST_DIVISOR && divisor < MOST_DIVISOR && fabs(offset) < 256.f)) return;
    scale = half(over(minus(high, low), STEPS));
    divisor = float(scale);
    const float whole = rint(over(plus(high, low), plus(divisor, divisor)));
    const float per_step = over(RESOLUTION, divisor);
    const float at_zero = minus(SHIFT, times(whole, RESOLUTION));
    float places[32];
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) places[i] = plus(times(x[i], per_step), at_zero);
    const int best = least_candidate<1>(places, errors, (MOST - LEAST + 4) * 16);
    zero = half(plus(whole, minus(times(float(best), 0.25f), 0.5f)));
    offset = float(zero);
  }

  // A group that would be lost: a scale rounded up and a fractional zero.
  void guard(float low, float high) {
    constexpr float GUARD_STEPS = BITS == 8 ? 238.f : (1 << BITS) - 1;
    constexpr float ZERO_LIMIT = BITS == 8 ? 32768.f : 1024.f;
    constexpr float GUARD_BELOW = 0.0000152587890625f, SMALLEST = 5.9604644775390625e-08f;  // 2^-16, 2^-24
    const bool sane = float(scale) >= GUARD_BELOW && is_finite(scale) && is_finite(zero);
    const float largest = max(-low, high);
    if (sane || !is_finite(low) || !is_finite(high) || largest == 0.f) return;
    const float range = minus(over(high, GUARD_STEPS), over(low, GUARD_STEPS));
    const float wanted = max(range, over(largest, ZERO_LIMIT));
    scale = half_above(clamp(wanted, SMALLEST, FLOAT16_MAX));
    divisor = float(scale);
    const float middle = BITS == 8 ? plus(times(0.5f, low), times(0.5f, high)) : low;
    zero = half(clamp(over(middle, divisor), -FLOAT16_MAX, FLOAT16_MAX));
    offset = float(zero);
  }

  uint code(float x) const {
    const float steps = minus(over(x, divisor), offset);
    const int whole = steps != steps ? 0 : int(clamp(rint(steps), float(LEAST), float(MOST)));
    return uint(whole) & ((1u << BITS) - 1);
  }
};

template <int BITS, bool SEARCH, class Element>
void encode_key_group(const device Element* from, const device uint* errors, bool is_mine,
                      device uint* codes, device half* scale, device half* zero) {
  float x[32];
  load_group(from, x);
  float low = x[0], high = x[0];
  KVSTOW_UNROLL
  for (int i = 1; i < 32; ++i) low = least(low, x[i]), high = most(high, x[i]);
  Affine<BITS> affine(low, high);
  if (SEARCH && BITS == 8) affine.search(x, low, high, errors);
  affine.guard(low, high);
  BitStream<BITS> stream;
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) stream.put(i, affine.code(x[i]));
  if (!is_mine) return;
  stream.store(codes);
  *scale = affine.scale;
  *zero = affine.zero;
}

}  // namespace kvstow
