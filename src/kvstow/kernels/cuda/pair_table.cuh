// Centroids of two tokens at one look, for values of 2 and 4 bits: a table of all combinations of 8 bits.
//
//   4 bits   the codes of one dim: token A, token B            one pair of float16
//   2 bits   the codes of two dims: A, B, then A, B again      two pairs
//
// An entry is 128 bytes of copies, so that no two lanes (two of 16, which is how 8 bytes are read) meet in a bank.
#pragma once
#include "codebook.cuh"
namespace kvstow {

template <int BITS>
struct PairTable {
  static_assert(BITS == 2 || BITS == 4, "8 bits hold a pair of these");
  static constexpr u32 TOKEN_A = BITS == 4 ? 0x0F0F0F0Fu : 0x33333333u;  // every other code
  u32 table, copy;  // in shared memory, and this lane's copy in an entry

  KVSTOW_INLINE PairTable(const DecodeArgs&, u32 table_)
      : table(table_), copy(BITS == 4 ? (threadIdx.x & 31) * 4 : (threadIdx.x & 15) * 8) {}

  KVSTOW_INLINE static void write_table(const DecodeArgs& args, u32 table, int n_threads) {
    constexpr u32 MASK = (1u << BITS) - 1;
    const int lane = threadIdx.x & 31;
    const float own = args.centroids[lane & MASK] * Codebook<BITS>::FACTOR;
    KVSTOW_ROLLED
    for (int entry = threadIdx.x / 32; entry < 256; entry += n_threads / 32) {
      const u32 codes = BITS == 2 && (lane & 1) ? entry >> 4 : entry;
      const float a = __shfl_sync(WHOLE_WARP, own, codes & MASK);
      const float b = __shfl_sync(WHOLE_WARP, own, codes >> BITS & MASK);
      store32(table + entry * 128 + lane * 4, two_halves(a, b));
    }
  }

  // Pairs of dims 4w .. 4w + 3, from the words that hold their codes: a of token A, b of token B.
  KVSTOW_INLINE void four_pairs(u32 a, u32 b, int w, u32 (&pairs)[4]) const {
    const u32 even = (a & TOKEN_A) | (b << BITS & ~TOKEN_A), odd = (a >> BITS & TOKEN_A) | (b & ~TOKEN_A);
    if constexpr (BITS == 4) {
      const int byte = 2 * w % 4;
      pairs[0] = load32(entry(even, byte)), pairs[1] = load32(entry(odd, byte));
      pairs[2] = load32(entry(even, byte + 1)), pairs[3] = load32(entry(odd, byte + 1));
    } else {
      load64(entry(even, w % 4), pairs[0], pairs[2]);
      load64(entry(odd, w % 4), pairs[1], pairs[3]);
    }
  }
  KVSTOW_INLINE u32 entry(u32 codes, int byte) const {
    const u32 at = byte ? codes >> (8 * byte - 7) : codes << 7;
    return table + ((at & 0x7F80u) | copy);
  }
};

// What turns a kernel's value codes into centroids.
template <int BITS>
struct PairsOf {
  using Type = Codebook<BITS>;
};
template <>
struct PairsOf<2> {
  using Type = PairTable<2>;
};
template <>
struct PairsOf<4> {
  using Type = PairTable<4>;
};

}  // namespace kvstow
