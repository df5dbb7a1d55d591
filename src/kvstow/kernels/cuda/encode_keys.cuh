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
  // The same of a number that rounds to a code: the sum has no place for a fraction, so it is rounded as it is made.
  KVSTOW_INLINE static u32 whole_inside(float steps) {
    constexpr float NO_FRACTION = 0x1.8p23f;
    return __float_as_uint(__fadd_rn(steps, NO_FRACTION)) & (BITS == 8 ? 0xFFFFFFFFu : (1u << BITS) - 1);
  }
  KVSTOW_INLINE static u32 whole(float steps) {  // of a number
    return whole_inside(fminf(fmaxf(steps, (float)LEAST), (float)MOST));
  }

  // At 8 bits: the best of four zeros a quarter of a step apart, of a scale that leaves room for them.
  template <class Elements>
  KVSTOW_INLINE static void search(Affine& a, const Elements& x, float low, float high, const u64* errors) {
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

  // use(i, code of x[i]) for N elements of a group, as codes are defined.
  template <int N = 32, class Elements, class Use>
  KVSTOW_INLINE static void each(const Elements& x, const Affine& a, float low, float high, Use use) {
    const Divider divider(a.divisor, fmaxf(fabsf(low), fabsf(high)));
    divider.template each<N>(x, [&](int i, float steps) {
      const float code = __fsub_rn(steps, a.offset);
      use(i, divider.quick ? whole(code) : whole_or_nan(code));
    });
  }
};

// The same codes by one rounding of each element, where that leaves no doubt.
//
// The definition rounds v = RN(RN(x / d) - z) to a whole number, half to even. Here s = RN(x r + c), with r within
// 2^-23 of 1 / d (after a step of Newton's: nearly within 2^-24), and c = 384.5 - z + u exactly, where u = 2^-15 is the
// step of float32 from 256 to 512: bits 15 to 22 of s are code + 128, and bits 0 to 14 a fraction f. As |x / d| < 256,
// s is within u of x / d + c by r and within u / 2 by its own rounding, and v within u / 4 and u / 8 of x / d - z: s is
// less than 2 u from v + 384.5 + u. Ties are whole numbers of v + 384.5. If f >= 3 u, v is above the one below it; and
// below the next one anyway, which is at least u above s.
template <int BITS>
struct QuickCodes {
  static constexpr u32 MOST_DOUBTFUL = 2;  // steps of f
  static constexpr float ORIGIN = 384.5f + 0x1p-15f;
  // Between them numbers round to codes without being clipped.
  static constexpr float LOWER = 384.f + KeyCodes<BITS>::LEAST + 0x1p-14f, UPPER = 385.f + KeyCodes<BITS>::MOST;
  float reciprocal, shift;
  bool possible;

  KVSTOW_INLINE QuickCodes(const Affine& a, float low, float high) {
    const float near = reciprocal_approx(a.divisor);  // and one step of Newton's, as in __frcp_rn, without its branch
    reciprocal = __fmaf_rn(__fmaf_rn(-a.divisor, near, 1.f), near, near);
    shift = __fsub_rn(ORIGIN, a.offset);
    const bool exact = fabsf(a.offset) <= 127.f && __fsub_rn(ORIGIN, shift) == a.offset;
    possible = exact && sum(low) > LOWER && sum(high) < UPPER && a.divisor < 1e15f;
  }
  KVSTOW_INLINE float sum(float x) const { return __fmaf_rn(x, reciprocal, shift); }
  KVSTOW_INLINE static bool doubtful(u32 least) { return (least & 0x7FFFu) <= MOST_DOUBTFUL; }

  // Of a group where that is possible. Elements of bfloat16 lie on ties so often that most warps have some: only those
  // four are divided of which one is in doubt.
  template <class Elements>
  KVSTOW_INLINE void put(BitStream<BITS>& stream, const Elements& x, const Affine& a) const {
    u32 least[8];
    KVSTOW_UNROLL
    for (int i = 0; i < 8; ++i) {
      u32 four[4];
      KVSTOW_UNROLL
      for (int k = 0; k < 4; ++k) four[k] = __float_as_uint(sum(x[4 * i + k]));
      least[i] = least_of_fields(least_fields(four[0], four[1]), least_fields(four[2], four[3]));
      stream.put_four(4 * i, four);
    }
    u32 of_all = least[0];
    KVSTOW_UNROLL
    for (int i = 1; i < 8; ++i) of_all = least_of_fields(of_all, least[i]);
    if (!doubtful(of_all)) return;
    KVSTOW_UNROLL
    for (int i = 0; i < 8; ++i)
      if (doubtful(least[i])) {
        stream.clear_four(4 * i);
        KVSTOW_UNROLL
        for (int k = 4 * i; k < 4 * i + 4; ++k) {
          const float steps = Divider::divided(x[k], a.divisor, reciprocal);
          stream.put(k, KeyCodes<BITS>::whole_inside(__fsub_rn(steps, a.offset)));
        }
      }
  }
};

template <int D, int BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode_key_group(const EncodeArgs& args, u32 vector, int group) {
  using Codes = KeyCodes<BITS>;
  const Place place(args, vector, group);
  const Group<T> x(args.keys, place.from);
  float low, high;
  x.extremes(low, high);
  Affine affine = Codes::affine_of(low, high);
  if (SEARCH && BITS == 8) Codes::search(affine, x, low, high, args.key_errors);
  if (GUARD) Codes::guard(affine, low, high);
  BitStream<BITS> stream;
  const QuickCodes<BITS> quick(affine, low, high);
  if (quick.possible) quick.put(stream, x, affine);
  else Codes::each(x, affine, low, high, [&](int i, u32 code) { stream.put(i, code); });
  stream.store(args.key_codes + place.row * (D * BITS / 8) + group * 4 * BITS);
  args.key_scales[place.row * (D / 32) + group] = affine.scale;
  args.key_zeros[place.row * (D / 32) + group] = affine.zero;
}

}  // namespace kvstow
