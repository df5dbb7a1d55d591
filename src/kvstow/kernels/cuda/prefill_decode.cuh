// Packed tokens to float16 in shared memory: a lane decodes one group of one token.
//
// Keys are rounded to float16, and saturate beyond it; values are in the rotated domain, times the
// codebook's FACTOR. Word j of a key's group is its dims 2j, 2j + 1; of a value's, dims j, j + 16,
// which are the pairs that the codebooks make.
#pragma once
#include "codebook.cuh"
#include "prefill_shape.cuh"
namespace kvstow {

// The words of one group's codes, BITS of them.
template <int BITS>
struct GroupCodes {
  u32 words[BITS];

  // Several words at once where one of each lane would be up to eight in a bank.
  KVSTOW_INLINE GroupCodes(u32 at) {
    if constexpr (BITS % 4 == 0) {
      KVSTOW_UNROLL
      for (int i = 0; i < BITS; i += 4) load128(at + i * 4, words[i], words[i + 1], words[i + 2], words[i + 3]);
    } else if constexpr (BITS == 2) {
      load64(at, words[0], words[1]);
    } else {
      KVSTOW_UNROLL
      for (int i = 0; i < BITS; ++i) words[i] = load32(at + i * 4);
    }
  }
  // At least n bits from bit `from` on.
  KVSTOW_INLINE u32 bits(int from, int n) const {
    const int word = from / 32, shift = from % 32;
    return shift + n > 32 ? shift_pair(words[word], words[least(word + 1, BITS - 1)], shift) : words[word] >> shift;
  }
  // NO_CODE and the code i above it, as a float whose bits they are: no conversion is needed. Codes of 8 bits are
  // signed, here plus 128, and go to its second byte: an offset takes NO_CODE out again without losing more than
  // a 512th of a code. Others are taken from 2^23, and NO_CODE is to be subtracted first.
  static constexpr float NO_CODE = BITS == 8 ? 32768.f + 128.f : 8388608.f;
  KVSTOW_INLINE float above_no_code(int i) const {
    if (BITS == 8) return __uint_as_float(pick_bytes(words[i / 4] ^ 0x80808080u, 0x47000000u, 0x7404 | (i % 4) << 4));
    return __uint_as_float(0x4B000000u | (bits(i * BITS, BITS) & ((1u << BITS) - 1)));
  }
};

// The row of a token of a tile of keys, or of values, and where in it a group begins.
template <class S>
struct GroupSlot {
  u32 row;
  int first;                 // where its first quarter lies, a chunk
  KVSTOW_INLINE GroupSlot(int token, int group)
      : row(token * S::ROW_BYTES), first(S::place(group * 4) ^ (token & 7)) {}
  KVSTOW_INLINE u32 at(int i) const { return row + (first ^ i) * 16; }  // a quarter of the group
};

template <class S>
KVSTOW_INLINE void decode_keys(u32 stage, u32 keys, const GroupSlot<S>& slot) {
  using Codes = GroupCodes<S::KEY_BITS>;
  const int lane = threadIdx.x & 31;
  const Codes codes(stage + S::Ring::AT_KEYS + lane * S::KEY_BITS * 4);
  const float scale = low_half(load16(stage + S::Ring::AT_KEY_SCALES + lane * 2));
  const float zero = low_half(load16(stage + S::Ring::AT_KEY_ZEROS + lane * 2));
  constexpr bool SUBTRACTS = S::KEY_BITS != 8;
  const float offset = SUBTRACTS ? scale * zero : fmaf(scale, -Codes::NO_CODE, scale * zero);
  const auto key = [&](int i) {
    const float code = codes.above_no_code(i);
    return fmaf(SUBTRACTS ? code - Codes::NO_CODE : code, scale, offset);
  };
  KVSTOW_UNROLL
  for (int i = 0; i < 4; ++i) {
    u32 pairs[4];
    KVSTOW_UNROLL
    for (int y = 0; y < 4; ++y) {
      const int at = 8 * i + 2 * y;
      pairs[y] = two_finite_halves(key(at), key(at + 1));
    }
    store128(keys + slot.at(i), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

template <class S>
KVSTOW_INLINE void decode_values(u32 stage, u32 values, const GroupSlot<S>& slot,
                                 const Codebook<S::VALUE_BITS>& codebook) {
  constexpr int BITS = S::VALUE_BITS;
  const int lane = threadIdx.x & 31;
  const GroupCodes<BITS> codes(stage + S::Ring::AT_VALUES + lane * BITS * 4);
  const u32 scale = load16(stage + S::Ring::AT_VALUE_SCALES + lane * 2), scales = pick_bytes(scale, 0, 0x1010);
  KVSTOW_UNROLL
  for (int i = 0; i < 4; ++i) {  // dims 4i .. 4i + 3 and 16 more
    u32 pairs[4];
    if constexpr (BITS <= 3) {
      constexpr int N = 4 * BITS;
      codebook.four_pairs(pick_bytes(codes.bits(i * N, N), codes.bits((i + 4) * N, N), 0x5410), pairs);
    } else {
      KVSTOW_UNROLL
      for (int y = 0; y < 4; ++y) {
        const int from = (4 * i + y) * BITS;
        const u32 a = codebook.centroid(codes.bits(from, BITS));
        const u32 b = codebook.centroid(codes.bits(from + 16 * BITS, BITS));
        pairs[y] = pick_bytes(a, b, 0x5410);
      }
    }
    KVSTOW_UNROLL
    for (int y = 0; y < 4; ++y) pairs[y] = multiply_halves(pairs[y], scales);
    store128(values + slot.at(i), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// The warp's tokens of a tile whose first token is `tile`: decoded, or zeros where none of them is before `end`.
template <class S>
KVSTOW_INLINE void decode_own_tokens(u32 stage, u32 halves, const Codebook<S::VALUE_BITS>& codebook, int tile,
                                     int end) {
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * S::OWN;
  const GroupSlot<S> slot(first + lane / S::GROUPS, lane % S::GROUPS);
  const u32 keys = halves, values = halves + S::TILE * S::ROW_BYTES;
  if (tile + first < end) {
    decode_keys<S>(stage, keys, slot);
    decode_values<S>(stage, values, slot, codebook);
  } else {
    KVSTOW_UNROLL
    for (int i = 0; i < 4; ++i) {
      store128(keys + slot.at(i), 0, 0, 0, 0);
      store128(values + slot.at(i), 0, 0, 0, 0);
    }
  }
}

}  // namespace kvstow
