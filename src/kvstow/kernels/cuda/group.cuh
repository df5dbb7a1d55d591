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
  const float* boundaries;                // [2^value_bits - 1]
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
    const u32 b = plane / args.n_kv_heads, head = plane - b * args.n_kv_heads;
    from = b * args.batch_step + head * args.head_step + token * args.token_step + (u64)(group * 32);
    row = (u64)plane * args.capacity + args.position + token;
  }
};

KVSTOW_INLINE float negated(float x, u32 sign) { return __uint_as_float(__float_as_uint(x) ^ (sign & 0x80000000u)); }

// The 32 elements from `at` on; where there are signs [32], those with -1 negated.
template <Dtype T>
KVSTOW_INLINE void load_group(const void* p, u64 at, float (&x)[32], const signed char* signs = nullptr) {
  if (T == FLOAT32) {
    const float4* source = (const float4*)((const float*)p + at);
    KVSTOW_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float4 v = source[i];
      const u32 four = signs ? ((const u32*)signs)[i] : 0;  // a sign of -1 has its top bit set
      x[4 * i] = negated(v.x, four << 24), x[4 * i + 1] = negated(v.y, four << 16);
      x[4 * i + 2] = negated(v.z, four << 8), x[4 * i + 3] = negated(v.w, four);
    }
  } else {
    const uint4* source = (const uint4*)((const u16*)p + at);
    KVSTOW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint4 v = source[i];
      u32 pairs[4] = {v.x, v.y, v.z, v.w};
      KVSTOW_UNROLL
      for (int k = 0; k < 4; ++k) {
        if (signs) {
          const u32 four = ((const u32*)signs)[2 * i + k / 2];
          pairs[k] ^= pick_bytes(four, 0, k % 2 ? 0x3424 : 0x1404) & 0x80008000u;
        }
        x[8 * i + 2 * k] = T == BFLOAT16 ? __uint_as_float(pairs[k] << 16) : low_half(pairs[k]);
        x[8 * i + 2 * k + 1] = T == BFLOAT16 ? __uint_as_float(pairs[k] & 0xFFFF0000u) : high_half(pairs[k]);
      }
    }
  }
}

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
  // use(i, x[i] / divisor) for all elements
  template <class Use>
  KVSTOW_INLINE void each(const float (&x)[32], Use use) const {
    if (quick) {
      KVSTOW_UNROLL
      for (int i = 0; i < 32; ++i) {
        float q = __fmul_rn(x[i], reciprocal);
        q = __fmaf_rn(__fmaf_rn(-q, divisor, x[i]), reciprocal, q);
        use(i, __fmaf_rn(__fmaf_rn(-q, divisor, x[i]), reciprocal, q));
      }
    } else {
      KVSTOW_UNROLL
      for (int i = 0; i < 32; ++i) use(i, __fdiv_rn(x[i], divisor));
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
