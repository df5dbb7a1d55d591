// Centroids of value codes in float16, times a factor that merge.cuh takes out again.
//
// FACTOR keeps the product with any scale finite, and puts the centroids close to numbers that
// float16 has: 1e-5 of them off for 2 and 3 bits, 1e-4 to 2e-4 for the rest (root mean square).
#pragma once
#include "decode_shape.cuh"
namespace kvstow {

template <int VALUE_BITS>
struct Codebook {
  static constexpr float FACTOR = VALUE_BITS == 4   ? 0.09198f
                                  : VALUE_BITS == 5 ? 0.094224f
                                                    : 0.092482f;
  static constexpr u32 MASK = (1u << VALUE_BITS) - 1;
  u32 copy;  // this lane's of the table in shared memory

  KVSTOW_INLINE Codebook(const DecodeArgs&, u32 table) : copy(table + (thread_index() & 31) * 4) {}
  KVSTOW_INLINE static void write_table(const DecodeArgs& args, u32 table, int n_threads) {
    for (int i = thread_index(); i < 32 << VALUE_BITS; i += n_threads)
      store32(table + i * 4, two_halves(args.centroids[i / 32] * FACTOR, 0.f));
  }
  KVSTOW_INLINE u32 centroid(u32 code) const { return load32(copy + (code & MASK) * 128); }
};

// Three bits need no table in memory: the eight centroids are the bytes of four registers.
template <>
struct Codebook<3> {
  static constexpr float FACTOR = 0.23234842f;
  u32 low_bytes[2], high_bytes[2];  // of the centroids of codes 0..3 and 4..7

  KVSTOW_INLINE Codebook(const DecodeArgs& args, u32) {
    // FACTOR times 0.24509, 0.75601, 1.34391 and 2.15195; the negative ones mirror them.
    constexpr u32 c0 = 0x2B4A, c1 = 0x319F, c2 = 0x34FF, c3 = 0x3800;
    // It is zero, but the compiler must not know, nor that it is the same in all lanes: it would make the registers again
    // at each use.
    const u32 zero = (thread_index() + args.n_kv_heads) >> 31;
    low_bytes[1] = (c0 & 255) | (c1 & 255) << 8 | (c2 & 255) << 16 | (c3 & 255) << 24;
    high_bytes[1] = (c0 >> 8) | (c1 >> 8) << 8 | (c2 >> 8) << 16 | (c3 >> 8) << 24;
    low_bytes[0] = pick_bytes(low_bytes[1], 0, 0x0123) ^ zero;
    high_bytes[0] = (pick_bytes(high_bytes[1], 0, 0x0123) | 0x80808080u) ^ zero;
  }
  KVSTOW_INLINE static void write_table(const DecodeArgs&, u32, int) {}

  // Four codes of token A (bits 0..11) and of token B (bits 16..27): a pair (A, B) for each.
  KVSTOW_INLINE void four_pairs(u32 codes, u32 (&pairs)[4]) const {
    const u32 x = codes & 0x0FFF0FFFu;
    const u32 twos = (x & 0x0FC00FC0u) * 3 + x;        // bytes of two codes: a1a0 a3a2 b1b0 b3b2
    const u32 ones = (twos & 0x38383838u) + twos;      // nibbles of one: a0 a1 a2 a3 b0 b1 b2 b3
    const u32 first = pick_bytes(ones, ones, 0x0020), second = pick_bytes(ones, ones, 0x0031);
    const u32 low0 = pick_bytes(low_bytes[0], low_bytes[1], first);
    const u32 high0 = pick_bytes(high_bytes[0], high_bytes[1], first);
    const u32 low1 = pick_bytes(low_bytes[0], low_bytes[1], second);
    const u32 high1 = pick_bytes(high_bytes[0], high_bytes[1], second);
    pairs[0] = pick_bytes(low0, high0, 0x6240);
    pairs[1] = pick_bytes(low0, high0, 0x7351);
    pairs[2] = pick_bytes(low1, high1, 0x6240);
    pairs[3] = pick_bytes(low1, high1, 0x7351);
  }
};

// Two bits likewise: four centroids in two registers.
template <>
struct Codebook<2> {
  static constexpr float FACTOR = 0.1050256f;
  u32 low_bytes, high_bytes;

  KVSTOW_INLINE Codebook(const DecodeArgs& args, u32) {
    const u32 c01 = two_halves(args.centroids[0] * FACTOR, args.centroids[1] * FACTOR);
    const u32 c23 = two_halves(args.centroids[2] * FACTOR, args.centroids[3] * FACTOR);
    low_bytes = pick_bytes(c01, c23, 0x6420);
    high_bytes = pick_bytes(c01, c23, 0x7531);
  }
  KVSTOW_INLINE static void write_table(const DecodeArgs&, u32, int) {}

  // Four codes of token A (bits 0..7) and of token B (bits 16..23): a pair (A, B) for each.
  KVSTOW_INLINE void four_pairs(u32 codes, u32 (&pairs)[4]) const {
    const u32 x = codes & 0x00FF00FFu;
    const u32 twos = (x & 0x00F000F0u) * 15 + x;       // bytes of two codes: a1a0 a3a2 b1b0 b3b2
    const u32 ones = (twos & 0x0C0C0C0Cu) * 3 + twos;  // nibbles of one: a0 a1 a2 a3 b0 b1 b2 b3
    const u32 first = pick_bytes(ones, ones, 0x0020), second = pick_bytes(ones, ones, 0x0031);
    const u32 low0 = pick_bytes(low_bytes, 0, first), high0 = pick_bytes(high_bytes, 0, first);
    const u32 low1 = pick_bytes(low_bytes, 0, second), high1 = pick_bytes(high_bytes, 0, second);
    pairs[0] = pick_bytes(low0, high0, 0x6240);
    pairs[1] = pick_bytes(low0, high0, 0x7351);
    pairs[2] = pick_bytes(low1, high1, 0x6240);
    pairs[3] = pick_bytes(low1, high1, 0x7351);
  }
};

}  // namespace kvstow
