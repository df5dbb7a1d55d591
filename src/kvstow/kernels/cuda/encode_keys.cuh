// Keys: x = (code + zero) * scale per group. See reference.encode_keys.
#pragma once
#include "search.cuh"
namespace kvstow {

// As codec/affine.py: what is stored, and the numbers that codes are taken against.
struct Affine {
  u16 scale, zero;
  float divisor, offset;
};

template <int BITS>
struct KeyCodes {
  static constexpr int LEAST = BITS == 8 ? -127 : 0, MOST = BITS == 8 ? 127 : (1 << BITS) - 1;
  static constexpr float GUARD_STEPS = BITS == 8 ? 238.f : (float)MOST;
  static constexpr float ZERO_LIMIT = BITS == 8 ? 32768.f : 1024.f;

  KVSTOW_INLINE static Affine affine_of(float low, float high) {
    Affine a;
    const float scale = __fdiv_rn(__fsub_rn(high, low), (float)(MOST - LEAST));
    a.divisor = __fadd_rn(scale, EPS);
    const float middle = BITS == 8 ? __fadd_rn(high, low) : low;
    a.offset = rintf(__fdiv_rn(middle, BITS == 8 ? __fmul_rn(2.f, a.divisor) : a.divisor));
    a.scale = to_float16(scale), a.zero = to_float16(a.offset);
    return a;
  }

  // The code of a number of steps, as its lowest bits; of NaN it is 0.
  KVSTOW_INLINE static u32 whole_or_nan(float steps) {
    return (u32)most(LEAST, least(MOST, __float2int_rn(steps))) & ((1u << BITS) - 1);
  }
  // The same but for NaN: the sum has no place for a fraction, so it is rounded as it is made.
  KVSTOW_INLINE static u32 whole(float steps) {
    constexpr float NO_FRACTION = 0x1.8p23f;
    const float sum = __fadd_rn(fminf(fmaxf(steps, (float)LEAST), (float)MOST), NO_FRACTION);
    return __float_as_uint(sum) & (BITS == 8 ? 0xFFFFFFFFu : (1u << BITS) - 1);
  }

  // At 8 bits: the best of four zeros a quarter of a step apart, of a scale that leaves room for them.
  KVSTOW_INLINE static void search(Affine& a, const float (&x)[32], float low, float high,
                                   const u64* errors) {
    constexpr float STEPS = 253.f, RESOLUTION = 16.f, SHIFT = (2 - LEAST) * RESOLUTION;  // places
    constexpr u32 N_PLACES = (MOST - LEAST + 4) * 16;
    const bool safe = a.divisor >= 0x1p-15f && a.divisor < 0x1p15f && fabsf(a.offset) < 256.f;
    if (!safe) return;
    a.scale = to_float16(__fdiv_rn(__fsub_rn(high, low), STEPS));
    a.divisor = from_float16(a.scale);
    const float whole = rintf(__fdiv_rn(__fadd_rn(high, low), __fadd_rn(a.divisor, a.divisor)));
    const float per_step = __fdiv_rn(RESOLUTION, a.divisor);
    const float at_zero = __fsub_rn(SHIFT, __fmul_rn(whole, RESOLUTION));
    float places[32];
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) places[i] = __fadd_rn(__fmul_rn(x[i], per_step), at_zero);
    const u32 best = least_candidate<1>(places, errors, N_PLACES);
    a.zero = to_float16(__fadd_rn(whole, best * 0.25f - 0.5f));
    a.offset = from_float16(a.zero);
  }

  // A group that the parity encoder would lose: a scale rounded up and a fractional zero.
  KVSTOW_INLINE static void guard(Affine& a, float low, float high) {
    const float largest = fmaxf(-low, high);
    const bool sane = from_float16(a.scale) >= 0x1p-16f && is_finite16(a.scale) && is_finite16(a.zero);
    if (sane || !is_finite(low) || !is_finite(high) || largest == 0.f) return;
    const float range = __fsub_rn(__fdiv_rn(high, GUARD_STEPS), __fdiv_rn(low, GUARD_STEPS));
    const float wanted = fmaxf(range, __fdiv_rn(largest, ZERO_LIMIT));
    const float scale = fminf(fmaxf(wanted, 0x1p-24f), FLOAT16_MAX);
    a.scale = to_float16_above(scale);
    a.divisor = from_float16(a.scale);
    const float middle = BITS == 8 ? __fadd_rn(__fmul_rn(0.5f, low), __fmul_rn(0.5f, high)) : low;
    const float zero = __fdiv_rn(middle, a.divisor);
    a.zero = to_float16(fminf(fmaxf(zero, -FLOAT16_MAX), FLOAT16_MAX));
    a.offset = from_float16(a.zero);
  }
};

template <int D, int BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode_key_group(const EncodeArgs& args, u32 vector, int group) {
  using Codes = KeyCodes<BITS>;
  const Place place(args, vector, group);
  float x[32];
  load_group<T>(args.keys, place.from, x);
  float low = x[0], high = x[0];
  KVSTOW_UNROLL
  for (int i = 1; i < 32; ++i) low = least_or_nan(low, x[i]), high = most_or_nan(high, x[i]);
  Affine affine = Codes::affine_of(low, high);
  if (SEARCH && BITS == 8) Codes::search(affine, x, low, high, args.key_errors);
  if (GUARD) Codes::guard(affine, low, high);
  BitStream<BITS> stream;
  const Divider divider(affine.divisor, fmaxf(fabsf(low), fabsf(high)));
  divider.each(x, [&](int i, float steps) {
    const float code = __fsub_rn(steps, affine.offset);
    stream.put(i, divider.quick ? Codes::whole(code) : Codes::whole_or_nan(code));
  });
  stream.store(args.key_codes + place.row * (D * BITS / 8) + group * 4 * BITS);
  args.key_scales[place.row * (D / 32) + group] = affine.scale;
  args.key_zeros[place.row * (D / 32) + group] = affine.zero;
}

}  // namespace kvstow
