// Two or four centroids at one look, for values of 2, 4 and 5 bits: a table of all combinations of some codes.
//
//   4 bits   the codes of one dim of tokens A and B            the pair A, B, in float16
//   2 bits   the codes of two dims: A, B, then A, B again      two pairs
//   5 bits   the codes of two dims of one token                two halves, of which two tokens make two pairs
//
// An entry is 128 bytes of copies, so that no two lanes (two of 16, which is how 8 bytes are read) meet in a
// bank. Of 5 bits it is 64, since there are 1024, and lanes meet in twos.
#pragma once
#include "codebook.cuh"
namespace kvstow {

template <int BITS>
struct PairTable {
  static_assert(BITS == 2 || BITS == 4 || BITS == 5, "no table of these");
  static constexpr int INDEX_BITS = BITS == 5 ? 10 : 8, ENTRY_LOG2 = BITS == 5 ? 6 : 7;
  static constexpr int BYTES = 1 << (INDEX_BITS + ENTRY_LOG2);
  static constexpr u32 MASK = (1u << BITS) - 1;
  u32 table, copy;  // in shared memory, and this lane's copy in an entry

  KVSTOW_INLINE PairTable(const DecodeArgs&, u32 table_)
      : table(table_), copy(((thread_index() & 31) * (BITS == 2 ? 8 : 4)) & ((1 << ENTRY_LOG2) - 1)) {}

  KVSTOW_INLINE static void write_table(const DecodeArgs& args, u32 table, int n_threads) {
    constexpr int PER_STORE = 128 >> ENTRY_LOG2;  // entries that a warp writes at once
    const int lane = thread_index() & 31;
    const float own = args.centroids[lane & MASK] * Codebook<BITS>::FACTOR;
    KVSTOW_ROLLED
    for (int at = thread_index() / 32; at < BYTES / 128; at += n_threads / 32) {
      const u32 entry = at * PER_STORE + lane / (32 / PER_STORE);
      const u32 codes = BITS == 2 && (lane & 1) ? entry >> 4 : entry;
      const float a = __shfl_sync(WHOLE_WARP, own, codes & MASK);
      const float b = __shfl_sync(WHOLE_WARP, own, codes >> BITS & MASK);
      store32(table + at * 128 + lane * 4, two_halves(a, b));
    }
  }
  // Where the entry of some codes lies, whose first bit is bit `from` of a word; bits around them do not matter.
  KVSTOW_INLINE u32 entry(u32 word, int from) const {
    constexpr u32 PLACE = ((1u << INDEX_BITS) - 1) << ENTRY_LOG2;
    const u32 at = from < ENTRY_LOG2 ? word << (ENTRY_LOG2 - from) : word >> (from - ENTRY_LOG2);
    return table + ((at & PLACE) | copy);
  }

  // Pairs of dims 4w .. 4w + 3, from the words that hold their codes: a of token A, b of token B.
  KVSTOW_INLINE void four_pairs(u32 a, u32 b, int w, u32 (&pairs)[4]) const {
    constexpr u32 OF_A = BITS == 4 ? 0x0F0F0F0Fu : 0x33333333u;  // every other code
    const u32 even = (a & OF_A) | (b << BITS & ~OF_A), odd = (a >> BITS & OF_A) | (b & ~OF_A);
    const int from = w * 4 * BITS % 32;
    if constexpr (BITS == 4) {
      pairs[0] = load32(entry(even, from)), pairs[1] = load32(entry(odd, from));
      pairs[2] = load32(entry(even, from + 8)), pairs[3] = load32(entry(odd, from + 8));
    } else {
      load64(entry(even, from), pairs[0], pairs[2]);
      load64(entry(odd, from), pairs[1], pairs[3]);
    }
  }
  // The same of 5 bits, from words that begin with the codes of dims 4w, 4w + 1 and of 4w + 2, 4w + 3.
  KVSTOW_INLINE void four_pairs(const u32 (&a)[2], const u32 (&b)[2], u32 (&pairs)[4]) const {
    KVSTOW_UNROLL
    for (int y = 0; y < 2; ++y) {
      const u32 of_a = load32(entry(a[y], 0)), of_b = load32(entry(b[y], 0));
      pairs[2 * y] = pick_bytes(of_a, of_b, 0x5410);
      pairs[2 * y + 1] = pick_bytes(of_a, of_b, 0x7632);
    }
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
template <>
struct PairsOf<5> {
  using Type = PairTable<5>;
};

}  // namespace kvstow
