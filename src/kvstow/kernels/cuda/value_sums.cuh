// Sums of values of one subtile of 16 tokens, weighted, in the rotated domain.
//
// Operand A holds values with dims as rows: lane 4g + t decodes DIMS dims from g * DIMS on, of
// tokens 2t, 2t + 1, 2t + 8 and 2t + 9, so that a register is one dim of two tokens. Operand B
// holds the weights, transposed from the scores' layout.
#pragma once
#include "pair_table.cuh"
namespace kvstow {

// The power of two that is the weight of the score which others are relative to. No weight is more than four
// times that, so this is the best use of float16's range.
constexpr float WEIGHT_LOG2 = 13.5f;

template <class S>
struct ValueReader {
  u32 at, scales_at;  // in a stage
  u32 shift;          // of the lane's first bit in its first word
  u32 outer, middle;  // for values of 6 bytes, see `six_bytes`

  KVSTOW_INLINE ValueReader() {
    const int lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
    const int byte = g * S::LANE_BITS / 8;
    at = S::AT_VALUES + 2 * t * S::VALUE_ROW + (byte & ~3);
    if (S::SWIZZLED_VALUES) at ^= S::value_swizzle(2 * t) * 16;
    scales_at = S::AT_VALUE_SCALES + 2 * t * S::SCALE_ROW + g * S::DIMS / 32 * 2;
    shift = (byte & 3) * 8;
    outer = g & 1 ? 0x7632 : 0x5410, middle = g & 1 ? 0x6543 : 0x4321;
    asm volatile("" : "+r"(at), "+r"(scales_at));  // kept in registers, not made again for every tile
  }
  KVSTOW_INLINE static int token(int k) { return (k >> 1) * 8 + (k & 1); }  // beside 2t
  // So many bytes further on in a tile. Those below 128 are zero in `at`, but for the swizzle.
  KVSTOW_INLINE u32 swizzled(u32 stage, int bytes) const { return stage + (at ^ bytes % 128) + bytes / 128 * 128; }

  // Scales of tokens 2t, 2t + 1 and of 2t + 8, 2t + 9.
  KVSTOW_INLINE void read_scales(u32 stage, int subtile, int piece, u32 (&pairs)[2]) const {
    KVSTOW_UNROLL
    for (int k = 0; k < 2; ++k) {
      const u32 from = stage + scales_at + (subtile * 16 + k * 8) * S::SCALE_ROW + piece * 2;
      pairs[k] = pick_bytes(load16(from), load16(from + S::SCALE_ROW), 0x5410);
    }
  }
  KVSTOW_INLINE void read_codes(u32 stage, int subtile, int piece, u32 (&words)[4][S::WORDS]) const {
    KVSTOW_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int ahead = (subtile * 16 + token(k)) * S::VALUE_ROW + piece * S::PIECE_BITS / 8;
      if constexpr (S::SWIZZLED_VALUES && S::WORDS % 4 == 0) {
        KVSTOW_UNROLL
        for (int x = 0; x < S::WORDS; x += 4)
          load128(swizzled(stage, ahead + x * 4), words[k][x], words[k][x + 1], words[k][x + 2], words[k][x + 3]);
      } else if constexpr (S::SWIZZLED_VALUES && S::WORDS == 2) {
        load64(swizzled(stage, ahead), words[k][0], words[k][1]);
      } else {
        const u32 from = S::SWIZZLED_VALUES ? swizzled(stage, ahead) : stage + at + ahead;
        KVSTOW_UNROLL
        for (int x = 0; x < S::WORDS; ++x) words[k][x] = load32(from + x * 4);
      }
    }
  }
};

// Decoded pairs of four dims at a time, from words as `ValueReader::read_codes` gives them.
template <class S>
struct ValueDecoder {
  static constexpr bool SIX_BYTES = S::VALUE_BITS == 3 && S::PIECE == 16;  // 48 bits in two words
  const ValueReader<S>& reader;
  using Centroids = typename PairsOf<S::VALUE_BITS>::Type;
  const Centroids& centroids;
  u32 (&words)[4][S::WORDS];
  u32 middles[4];

  KVSTOW_INLINE ValueDecoder(const ValueReader<S>& reader_, const Centroids& centroids_, u32 (&words_)[4][S::WORDS])
      : reader(reader_), centroids(centroids_), words(words_) {
    KVSTOW_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (SIX_BYTES) {
        middles[k] = pick_bytes(words[k][0], words[k][S::WORDS - 1], reader.middle);  // bytes 1..4
      } else if (S::PIECE_BITS % 32) {
        KVSTOW_UNROLL
        for (int x = 0; x < S::WORDS; ++x) words[k][x] = shifted(k, x, reader.shift, x + 1 < S::WORDS);
      }
    }
  }
  // Word x of token k from a bit on, with or without the next one above it.
  KVSTOW_INLINE u32 shifted(int k, int x, u32 shift, bool with_next) const {
    const u32 next = words[k][least(x + 1, S::WORDS - 1)];
    return with_next ? shift_pair(words[k][x], next, shift) : words[k][x] >> shift;
  }
  // At least n bits of token k, from bit `from` of the piece on.
  KVSTOW_INLINE u32 bits(int k, int from, int n) const {
    return shifted(k, from / 32, from % 32, from % 32 + n > 32);
  }
  // Dims 4w .. 4w + 3 of the piece, tokens k and k + 1.
  KVSTOW_INLINE void four_pairs(int w, int k, u32 (&pairs)[4]) const {
    if constexpr (SIX_BYTES) {  // whole bytes of two words: picking them needs no shift
      const u32 both = w == 0   ? pick_bytes(words[k][0], words[k + 1][0], reader.outer)
                       : w == 3 ? pick_bytes(words[k][S::WORDS - 1], words[k + 1][S::WORDS - 1], reader.outer)
                                : pick_bytes(middles[k], middles[k + 1], w == 1 ? 0x5410 : 0x7632);
      centroids.four_pairs(w & 1 ? both >> 4 : both, pairs);
    } else if constexpr (S::VALUE_BITS == 5) {
      const int from = 4 * w * 5;
      centroids.four_pairs({bits(k, from, 10), bits(k, from + 10, 10)}, {bits(k + 1, from, 10), bits(k + 1, from + 10, 10)},
                           pairs);
    } else if constexpr (S::PAIRED) {
      const int word = w * 4 * S::VALUE_BITS / 32;
      centroids.four_pairs(words[k][word], words[k + 1][word], w, pairs);
    } else if constexpr (S::VALUE_BITS == 3) {
      constexpr int N = 4 * S::VALUE_BITS;
      centroids.four_pairs(pick_bytes(bits(k, w * N, N), bits(k + 1, w * N, N), 0x5410), pairs);
    } else {
      KVSTOW_UNROLL
      for (int y = 0; y < 4; ++y) {
        const int from = (4 * w + y) * S::VALUE_BITS;
        const u32 a = centroids.centroid(bits(k, from, S::VALUE_BITS));
        const u32 b = centroids.centroid(bits(k + 1, from, S::VALUE_BITS));
        pairs[y] = pick_bytes(a, b, 0x5410);
      }
    }
  }
};

// sums[m][p] are dims g * DIMS + 2m, + 1 of rows 8p + t, 8p + 4 + t, as two matrix results.
template <class S>
struct ValueSums {
  float sums[S::D / 16][S::ROW_TILES][4];

  KVSTOW_INLINE ValueSums() {
    KVSTOW_UNROLL
    for (int m = 0; m < S::D / 16; ++m) KVSTOW_UNROLL
      for (int p = 0; p < S::ROW_TILES; ++p) KVSTOW_UNROLL
        for (int c = 0; c < 4; ++c) sums[m][p][c] = 0.f;
  }
  KVSTOW_INLINE void scale(const float (&by)[S::ROW_QUADS]) {
    KVSTOW_UNROLL
    for (int m = 0; m < S::D / 16; ++m) KVSTOW_UNROLL
      for (int i = 0; i < S::ROW_QUADS; ++i) {
        sums[m][i / 2][i & 1] *= by[i];
        sums[m][i / 2][2 + (i & 1)] *= by[i];
      }
  }
  // Weights of tokens g + 8e and rows 4i + t.
  KVSTOW_INLINE void add(const ValueReader<S>& reader, const typename PairsOf<S::VALUE_BITS>::Type& centroids,
                         u32 stage, int subtile, const float (&weights)[2][S::ROW_QUADS]) {
    u32 operand[S::ROW_TILES][2];
    KVSTOW_UNROLL
    for (int p = 0; p < S::ROW_TILES; ++p) KVSTOW_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int q = 2 * p, next = least(q + 1, S::ROW_QUADS - 1);
        const float lower = weights[e][q], upper = q + 1 < S::ROW_QUADS ? weights[e][next] : 0.f;
        operand[p][e] = transpose_tile(two_halves(lower, upper));
      }
    KVSTOW_UNROLL
    for (int piece = 0; piece < S::PIECES; ++piece) {
      u32 words[4][S::WORDS], scales[2];
      reader.read_codes(stage, subtile, piece, words);
      reader.read_scales(stage, subtile, piece, scales);
      const ValueDecoder<S> decoder(reader, centroids, words);
      KVSTOW_UNROLL
      for (int w = 0; w < S::PIECE / 4; ++w) {
        u32 a[2][4];  // of tokens 2t, 2t + 1 and of 2t + 8, 2t + 9; four dims each
        KVSTOW_UNROLL
        for (int k = 0; k < 2; ++k) {
          decoder.four_pairs(w, 2 * k, a[k]);
          KVSTOW_UNROLL
          for (int y = 0; y < 4; ++y) a[k][y] = multiply_halves(a[k][y], scales[k]);
        }
        KVSTOW_UNROLL
        for (int y = 0; y < 2; ++y) KVSTOW_UNROLL
          for (int p = 0; p < S::ROW_TILES; ++p)
            add_product_fp16(sums[piece * S::PIECE / 2 + 2 * w + y][p], a[0][2 * y], a[0][2 * y + 1],
                             a[1][2 * y], a[1][2 * y + 1], operand[p]);
      }
    }
  }
};

}  // namespace kvstow
