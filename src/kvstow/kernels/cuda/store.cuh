// The new token of a row, encoded into the planes by the warp of a block that reads it there.
//
// Its block would wait for a launch of `encode` otherwise. Where several blocks read a token, because a KV head has
// more query rows than one of them takes, each writes it for itself: the same bytes.
//
// The others wait for this warp, so a key and a value are spread over all its lanes: lane l has the E elements from E l on, and
// LANES of them, a group, find out together what encode_keys.cuh and encode_values.cuh find out in one lane.
#pragma once
#include "decode_shape.cuh"
#include "encode_keys.cuh"
#include "encode_values.cuh"
#include "signs.cuh"
namespace kvstow {

// What `merge` makes of the numbers of so many neighbouring lanes.
template <int LANES, class Merge>
KVSTOW_INLINE float of_lanes(float x, Merge merge) {
  KVSTOW_UNROLL
  for (int o = 1; o < LANES; o <<= 1) x = merge(x, __shfl_xor_sync(WHOLE_WARP, x, o));
  return x;
}

template <class S, Dtype T>
struct TokenStore {
  static constexpr int E = S::D / 32, LANES = 32 / E;
  // Codes wait in shared memory, a word each, until lanes make words of the planes of them.
  static_assert(8 * S::D <= S::STAGE_BYTES, "those of a key and a value fit in a stage");
  const DecodeArgs& args;
  u64 row;      // of the planes
  u32 staging;
  int lane;

  KVSTOW_INLINE void store(u64 vector) const {
    float key[E], value[E];
    KVSTOW_UNROLL
    for (int e = 0; e < E; ++e) {
      key[e] = element<T>(args.new_keys, vector * S::D + lane * E + e);
      value[e] = element<T>(args.new_values, vector * S::D + lane * E + e);
    }
    const Signs<S::D> signs(args.signs);
    store_key(key);
    store_value(value, signs);
    __syncwarp();
    write<S::KEY_BITS>((u8*)args.key_codes + row * S::KEY_ROW, staging);
    write<S::VALUE_BITS>((u8*)args.value_codes + row * S::VALUE_ROW, staging + 4 * S::D);
    __syncwarp();
  }

 private:
  KVSTOW_INLINE bool speaks() const { return lane % LANES == 0; }  // for its group
  KVSTOW_INLINE u64 group() const { return row * S::GROUPS + lane / LANES; }
  KVSTOW_INLINE u32 slot(int e) const { return staging + (lane * E + e) * 4; }

  KVSTOW_INLINE void store_key(const float (&x)[E]) const {
    using Codes = KeyCodes<S::KEY_BITS>;
    float low = x[0], high = x[0];
    KVSTOW_UNROLL
    for (int e = 1; e < E; ++e) low = least_or_nan(low, x[e]), high = most_or_nan(high, x[e]);
    low = of_lanes<LANES>(low, least_or_nan), high = of_lanes<LANES>(high, most_or_nan);
    Affine affine = Codes::affine_of(low, high);
    Codes::guard(affine, low, high);
    Codes::template each<E>(x, affine, low, high, [&](int e, u32 code) { store32(slot(e), code); });
    if (!speaks()) return;
    ((u16*)args.key_scales)[group()] = affine.scale;
    ((u16*)args.key_zeros)[group()] = affine.zero;
  }

  KVSTOW_INLINE void store_value(const float (&exact)[E], const Signs<S::D>& signs) const {
    float x[E], squares[E];
    KVSTOW_UNROLL
    for (int e = 0; e < E; ++e) x[e] = signs.times(exact[e], e);
    Rotation<S::D, E>::rotate(x);
    KVSTOW_UNROLL
    for (int e = 0; e < E; ++e) squares[e] = __fmul_rn(x[e], x[e]);
    float sum = 0.f;  // one element after the other, as it is defined
    KVSTOW_UNROLL
    for (int i = 0; i < 32; ++i) sum = __fadd_rn(sum, __shfl_sync(WHOLE_WARP, squares[i % E], lane / LANES * LANES + i / E));
    const float rms = __fsqrt_rn(__fmul_rn(sum, 0x1p-5f));
    u16 scale = to_float16(rms);
    float divisor = __fadd_rn(rms, EPS);
    const bool saturated = (scale & 0x7FFFu) == 0x7C00u;
    if (__any_sync(WHOLE_WARP, saturated)) {
      float largest = 0.f;
      KVSTOW_UNROLL
      for (int e = 0; e < E; ++e) largest = most_or_nan(largest, fabsf(exact[e]));
      largest = of_lanes<32>(largest, most_or_nan);
      if (saturated && largest <= LARGEST_CODABLE) scale = 0x7BFF, divisor = FLOAT16_MAX;  // 65504
    }
    Boundaries<S::VALUE_BITS> boundaries(args.boundaries);
    const auto put = [&](int e, float units) { store32(slot(e) + 4 * S::D, boundaries.code(units)); };
    if (boundaries.can_multiply(divisor)) {
      boundaries.multiply(divisor);
      KVSTOW_UNROLL
      for (int e = 0; e < E; ++e) put(e, x[e]);
    } else {
      Divider(divisor, rms).template each<E>(x, put);
    }
    if (speaks()) ((u16*)args.value_scales)[group()] = scale;
  }

  // The little-endian bit stream of D codes, a word of it from one lane.
  template <int BITS>
  KVSTOW_INLINE void write(u8* to, u32 codes) const {
    constexpr int WORDS = S::D * BITS / 32;
    constexpr int TOUCHED = 32 % BITS ? (32 + 2 * (BITS - 1)) / BITS : 32 / BITS;  // codes of a word, at most
    KVSTOW_UNROLL
    for (int at = lane; at < WORDS; at += 32) {
      const int first = at * 32 / BITS;
      u32 word = 0;
      KVSTOW_UNROLL
      for (int k = 0; k < TOUCHED; ++k) {
        const int shift = (first + k) * BITS - at * 32;  // the first code may begin in the word before
        if (shift >= 32) continue;
        const u32 code = load32(codes + (first + k) * 4) & (1u << BITS) - 1;
        word |= shift < 0 ? code >> -shift : code << shift;
      }
      ((u32*)to)[at] = word;
    }
  }
};

// All lanes of a warp call it, and see what was written.
//   staging: of a stage that is not in use
template <class S, Dtype T>
KVSTOW_INLINE void store_token(const DecodeArgs& args, int b, int head, int token, u32 staging) {
  const u64 vector = (u64)b * args.n_kv_heads + head;
  TokenStore<S, T>{args, vector * args.capacity + token, staging, (int)(thread_index() & 31)}.store(vector);
}

}  // namespace kvstow
