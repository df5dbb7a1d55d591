// One group of 32 elements in one lane: loading it, dividing it exactly, packing its codes.
//
// The codec is defined bit for bit (codec/reference.py): float32, true division, sums in the stated
// order, no contraction to fused multiply-add. So products and sums are written as `_rn` intrinsics,
// which a compiler does not contract.
#pragma once
#include "primitives.cuh"
namespace kvstow {

constexpr float EPS = 1e-8f;
constexpr float FLOAT16_MAX = 65504.f;

struct EncodeArgs {
  const void *keys, *values;              // [b, h, n, d], steps of the axes below, in elements
  u8* key_codes;                          // planes as in DecodeArgs, written at tokens position ..
  u16 *key_scales, *key_zeros;
  u8* value_codes;
  u16* value_scales;
  const signed char* signs;               // [d] +-1
  const float* boundaries;                // [2^value_bits - 1]; those of up to 3 bits are known here
  const float* centroids;                 // [2^value_bits], for a search; null without
  const u64 *key_errors, *value_errors;   // tables of codec/candidates.py, for a search; null without
  u32 n_kv_heads, n_tokens, n_vectors;    // n_vectors = b * h * n, below 2^32
  u32 capacity, position;
  u64 batch_step, head_step, token_step;
};

// Where the group of a vector is read, and which row of the planes it is written to.
struct Place {
  u64 from, row;
  KVSTOW_INLINE Place(const EncodeArgs& args, u32 vector, int group) {
    const u32 plane = vector / args.n_tokens, token = vector - plane * args.n_tokens;
    // A batch of one takes one division less.
    const u32 b = plane < args.n_kv_heads ? 0 : plane / args.n_kv_heads, head = plane - b * args.n_kv_heads;
    from = b * args.batch_step + head * args.head_step + token * args.token_step + (u64)(group * 32);
    row = (u64)plane * args.capacity + args.position + token;
  }
};

// The 32 elements from `at` on, as memory holds them: two in a word, or one of float32.
template <Dtype T>
struct Group {
  static constexpr bool PAIRS = T != FLOAT32;
  static constexpr int WORDS = PAIRS ? 16 : 32;
  u32 words[WORDS];

  KVSTOW_INLINE Group(const void* p, u64 at) {
    const uint4* source = (const uint4*)((const char*)p + at * (PAIRS ? 2 : 4));
    KVSTOW_UNROLL
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 v = source[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  KVSTOW_INLINE float operator[](int i) const {
    if (!PAIRS) return __uint_as_float(words[i]);
    return i % 2 ? second(words[i / 2]) : first(words[i / 2]);
  }
  KVSTOW_INLINE void expand(float (&x)[32]) const {
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) x[i] = (*this)[i];
  }
  // The least and the greatest; NaN if an element is.
  KVSTOW_INLINE void extremes(float& low, float& high) const {
    u32 least = words[0], most = words[0];
    low = high = (*this)[0];
    KVSTOW_UNROLL
    for (int i = 1; i < WORDS; ++i) {
      if (PAIRS) least = least_pair_or_nan<T>(least, words[i]), most = most_pair_or_nan<T>(most, words[i]);
      else low = least_or_nan(low, (*this)[i]), high = most_or_nan(high, (*this)[i]);
    }
    if (PAIRS) low = least_or_nan(first(least), second(least)), high = most_or_nan(first(most), second(most));
  }
  // Negates those that have a sign of -1, of 32 signs.
  KVSTOW_INLINE void negate(const signed char* signs) {
    KVSTOW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint4 v = ((const uint4*)signs)[i];
      negate_four(4 * i, v.x), negate_four(4 * i + 1, v.y), negate_four(4 * i + 2, v.z), negate_four(4 * i + 3, v.w);
    }
  }

 private:
  KVSTOW_INLINE static float first(u32 pair) { return T == BFLOAT16 ? __uint_as_float(pair << 16) : low_half(pair); }
  KVSTOW_INLINE static float second(u32 pair) {
    return T == BFLOAT16 ? __uint_as_float(pair & 0xFFFF0000u) : high_half(pair);
  }
  KVSTOW_INLINE void negate_four(int i, u32 signs) {  // -1 has its top bit set
    if (PAIRS) {
      words[2 * i % WORDS] ^= pick_bytes(signs, 0, 0x1404) & 0x80008000u;
      words[(2 * i + 1) % WORDS] ^= pick_bytes(signs, 0, 0x3424) & 0x80008000u;
    } else KVSTOW_UNROLL
      for (int k = 0; k < 4; ++k) words[(4 * i + k) % WORDS] ^= (signs << (24 - 8 * k)) & 0x80000000u;
  }
};

KVSTOW_INLINE bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7F800000u); }
KVSTOW_INLINE bool is_finite16(u16 h) { return (h & 0x7C00u) != 0x7C00u; }

// Division of a whole group by one divisor, correctly rounded: a product with the reciprocal and two
// corrections by the exact remainder, where neither can leave the range of float32.
struct Divider {
  float divisor, reciprocal;
  bool quick;
  KVSTOW_INLINE Divider(float divisor_, float largest) : divisor(divisor_) {
    quick = divisor > 1e-18f && divisor < 1e18f && largest < 1e18f;
    reciprocal = quick ? __frcp_rn(divisor) : 0.f;
  }
  // One element, where it is known that neither leaves that range.
  KVSTOW_INLINE static float divided(float x, float divisor, float reciprocal) {
    float q = __fmul_rn(x, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
  }
  // use(i, x[i] / divisor) for N elements
  template <int N = 32, class Elements, class Use>
  KVSTOW_INLINE void each(const Elements& x, Use use) const {
    if (quick) {
      KVSTOW_UNROLL
      for (int i = 0; i < N; ++i) use(i, divided(x[i], divisor, reciprocal));
    } else {
      KVSTOW_UNROLL
      for (int i = 0; i < N; ++i) use(i, __fdiv_rn(x[i], divisor));
    }
  }
};

// The 32 codes of a group as BITS words of one little-endian bit stream.
template <int BITS>
struct BitStream {
  u32 words[BITS];
  KVSTOW_INLINE BitStream() {
    KVSTOW_UNROLL
    for (int i = 0; i < BITS; ++i) words[i] = 0;
  }
  KVSTOW_INLINE void put(int i, u32 code) {  // code < 2^BITS; of 8 bits, those above are not used
    if (BITS == 8) {
      words[i / 4] = pick_bytes(words[i / 4], code, 0x3210 + ((4 - i % 4) << i % 4 * 4));
      return;
    }
    const int from = i * BITS, word = from / 32, shift = from % 32;
    words[word] |= code << shift;
    if (shift + BITS > 32) words[word + 1 < BITS ? word + 1 : word] |= code >> (32 - shift);
  }
  KVSTOW_INLINE void clear_four(int i) {  // codes from i on
    KVSTOW_UNROLL
    for (int at = i * BITS; at < (i + 4) * BITS; ++at) words[at / 32] &= ~(1u << at % 32);
  }
  // Four codes from i on, of which bits 15 to 22 are code + 128, and bit 23 is set.
  KVSTOW_INLINE void put_four(int i, const u32 (&sums)[4]) {
    if (BITS == 8) {
      // Doubled, codes are bytes 1 and 3. The number added takes 128 from both, and a carry ends at what was bit 23.
      const u32 first = pick_bytes(sums[0], sums[1], 0x6521) * 2 + 0x7FFF8000u;
      const u32 second = pick_bytes(sums[2], sums[3], 0x6521) * 2 + 0x7FFF8000u;
      words[i / 4] = pick_bytes(first, second, 0x7531);
      return;
    }
    KVSTOW_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int from = (i + k) * BITS, word = from / 32, shift = from % 32;
      const u32 mask = (1u << BITS) - 1, bits = sums[k];
      words[word] |= (shift < 15 ? bits >> (15 - shift) : bits << (shift - 15)) & mask << shift;
      if (shift + BITS > 32) words[word + 1 < BITS ? word + 1 : word] |= bits >> (47 - shift) & mask >> (32 - shift);
    }
  }
  KVSTOW_INLINE void put_eight(int i, u32 codes) {  // of at most 4 bits, as one number
    const int from = i * BITS, word = from / 32, shift = from % 32;
    words[word] |= codes << shift;
    if (shift + 8 * BITS > 32) words[word + 1 < BITS ? word + 1 : word] |= codes >> (32 - shift);
  }
  KVSTOW_INLINE void store(u8* to) const {  // as wide as the row's alignment allows
    if (BITS % 4 == 0) KVSTOW_UNROLL
      for (int i = 0; i < BITS / 4; ++i)
        ((uint4*)to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    else if (BITS % 2 == 0) KVSTOW_UNROLL
      for (int i = 0; i < BITS / 2; ++i) ((uint2*)to)[i] = make_uint2(words[2 * i], words[2 * i + 1]);
    else KVSTOW_UNROLL
      for (int i = 0; i < BITS; ++i) ((u32*)to)[i] = words[i];
  }
};

}  // namespace kvstow
