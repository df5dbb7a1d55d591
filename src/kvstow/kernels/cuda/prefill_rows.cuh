// The query rows of a warp: their scores, their softmax, their sums. Scores and sums stay in registers, and queries as far
// as there is room; what is known of a row lies in shared memory.
//
// Query rows are the rows of the matrix products (FlashAttention-2, Dao 2023), sixteen to a row tile: lane
// 4g + t has rows g and g + 8 of each, and of each eight columns 2t and 2t + 1. What a score's columns are tokens
// for is the operand of the next product as it is. An operand of keys or values is read once for all row tiles.
#pragma once
#include "merge.cuh"
#include "prefill_decode.cuh"
namespace kvstow {

template <class S>
struct WarpRows {
  static constexpr int M = S::ROW_TILES;
  using Scores = float[M][S::AT_ONCE / 8][4];
  u32 shared;                 // where the block's memory begins
  u32 rows_at, columns_at;    // this lane's part of the address of an operand
  u32 queries[most(1, S::QUERIES_KEPT)][M][4];
  float sums[M][S::D / 8][4];  // of rows g, g, g + 8, g + 8; positions 8n + 2t, 8n + 2t + 1
  float total[M][2];          // of rows g and g + 8, this lane's columns

  // Registers are short. What is known of a row is in shared memory, where a lane keeps it for its own rows:
  static constexpr int SEEN = 0;       // two int32: the first token that it sees, and the one behind the last
  static constexpr int REFERENCE = 8;  // a float: the score that weights are relative to
  static constexpr int UNIT = 12;      // a float: what a product is worth, in powers of two
  KVSTOW_INLINE u32 known() const {  // of row g
    const u32 thread = thread_index();
    return shared + S::AT_ROWS + (thread / 32 * S::WARP_ROWS + thread / 4 % 8) * 16;
  }
  KVSTOW_INLINE static constexpr u32 row(int m, int half) { return (m * 16 + half * 8) * 16; }  // from row g on
  KVSTOW_INLINE u32 queries_at() const {
    return shared + S::AT_QUERIES + thread_index() / 32 * (S::WARP_ROWS * S::ROW_BYTES) + rows_at;
  }
  KVSTOW_INLINE static int first() { return threadIdx.x / 32 * S::WARP_ROWS; }  // row of the block

  // Queries as float16, each row times a power of two that brings it to 2^14 .. 2^15.
  template <Dtype T>
  KVSTOW_INLINE void read(const DecodeArgs& args, const BlockRows<S>& rows, u32 shared_, int b, int head) {
    shared = shared_;
    constexpr int E = S::D / 32, BATCH = 4;  // elements of a lane; rows whose loads are in flight together
    const int lane = threadIdx.x & 31, first = this->first();
    const u32 block = shared + S::AT_QUERIES + first * S::ROW_BYTES, known = shared + S::AT_ROWS + first * 16;
    KVSTOW_ROLLED
    for (int i0 = 0; i0 < S::WARP_ROWS; i0 += BATCH) {
      float x[BATCH][E];
      KVSTOW_UNROLL
      for (int i = 0; i < BATCH; ++i) KVSTOW_UNROLL
        for (int e = 0; e < E; ++e) {
          const int r = first + i0 + i;
          x[i][e] = 0.f;
          if (r < rows.rows) x[i][e] = element<T>(args.queries, rows.index(args, b, head, r) * S::D + lane * E + e);
        }
      KVSTOW_UNROLL
      for (int i = 0; i < BATCH; ++i) {
        u32 most_bits = 0;  // as an integer: infinity and NaN are above every number
        KVSTOW_UNROLL
        for (int e = 0; e < E; ++e) most_bits = max(most_bits, __float_as_uint(x[i][e]) & 0x7FFFFFFFu);
        most_bits = __reduce_max_sync(WHOLE_WARP, most_bits);
        const bool lost = most_bits >= 0x7F800000u;
        const float step = __uint_as_float(max(lost ? 0 : most_bits & 0x7F800000u, 0x10000000u)) * 0x1p-14f;
        const int row = i0 + i;
        const u32 at = block + row * S::ROW_BYTES + (S::place(lane * E / 8) ^ (row & 7)) * 16 + lane * E % 8 * 2;
        KVSTOW_UNROLL
        for (int e = 0; e < E; e += 2)  // a row that is not finite makes its scores NaN, as they are
          store32(at + e * 2, lost ? 0x7FFF7FFFu : two_halves(x[i][e] / step, x[i][e + 1] / step));
        if (lane == 0) {
          const int high = rows.high_of(args, least(first + row, rows.rows - 1));
          const int low = first < rows.rows ? rows.low(args, high) : 0x7FFFFFFF;  // a warp without rows sees nothing
          const u32 reference = __float_as_uint(minus_infinity()), unit = __float_as_uint(step * args.scale_log2);
          store128(known + row * 16, low, high, reference, unit);
        }
      }
    }
    __syncwarp();
    rows_at = (lane & 15) * S::ROW_BYTES + ((lane >> 4) ^ (lane & 7)) * 16;
    columns_at = ((lane & 7) + (lane >> 4) * 8) * S::ROW_BYTES + ((lane >> 3 & 1) ^ (lane & 7)) * 16;
    KVSTOW_UNROLL
    for (int k = 0; k < S::QUERIES_KEPT; ++k) KVSTOW_UNROLL
      for (int m = 0; m < M; ++m) read_operand(queries_at(), k, m, queries[k][m]);
    KVSTOW_UNROLL
    for (int m = 0; m < M; ++m) {
      total[m][0] = total[m][1] = 0.f;
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
        for (int c = 0; c < 4; ++c) sums[m][n][c] = 0.f;
    }
  }

  KVSTOW_INLINE static void read_operand(u32 queries_at, int k, int m, u32 (&a)[4]) {  // dims 16k .. 16k + 15
    load_tiles(S::further(queries_at, 2 * k) + m * 16 * S::ROW_BYTES, a);
  }

  // A decoded tile, the first of whose tokens is `tile`: keys, and behind them values. Later rows see later tokens.
  KVSTOW_INLINE void take_tile(u32 keys, int tile) {
    const u32 known = shared + S::AT_ROWS + first() * 16, known_last = known + (S::WARP_ROWS - 1) * 16;
    u32 any_low, all_high, all_low, any_high;
    load64(known + SEEN, any_low, all_high);
    load64(known_last + SEEN, all_low, any_high);
    if (tile >= (int)any_high || tile + S::TILE <= (int)any_low) return;
    const bool whole = tile >= (int)all_low && tile + S::TILE <= (int)all_high;
    KVSTOW_ROLLED
    for (int at = 0; at < S::TILE; at += S::AT_ONCE) {
      Scores scores;
      multiply_keys(keys + at * S::ROW_BYTES, scores);
      if (!whole) hide(scores, tile + at);
      weigh(scores);
      add_values(keys + (S::TILE + at) * S::ROW_BYTES, scores);
    }
  }

  KVSTOW_INLINE void multiply_keys(u32 keys, Scores& scores) const {
    const u32 from = hidden(keys + columns_at), own = S::QUERIES_KEPT < S::D / 16 ? queries_at() : 0;
    KVSTOW_UNROLL
    for (int m = 0; m < M; ++m) KVSTOW_UNROLL
      for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
        for (int c = 0; c < 4; ++c) scores[m][n][c] = 0.f;
    KVSTOW_UNROLL
    for (int k = 0; k < S::D / 16; ++k) {
      u32 a[M][4];
      KVSTOW_UNROLL
      for (int m = 0; m < M; ++m)
        if (k < S::QUERIES_KEPT) KVSTOW_UNROLL
          for (int i = 0; i < 4; ++i) a[m][i] = queries[k < S::QUERIES_KEPT ? k : 0][m][i];
        else read_operand(own, k, m, a[m]);
      KVSTOW_UNROLL
      for (int n = 0; n < S::AT_ONCE / 16; ++n) {
        u32 tiles[4];  // two halves of the dims for eight tokens, then for eight more
        load_tiles(S::further(from, 2 * k) + n * 16 * S::ROW_BYTES, tiles);
        KVSTOW_UNROLL
        for (int m = 0; m < M; ++m) add_products(scores[m][2 * n], scores[m][2 * n + 1], a[m], tiles);
      }
    }
  }

  KVSTOW_INLINE void hide(Scores& scores, int token) const {
    const int own = token + (threadIdx.x & 3) * 2;
    const u32 known = this->known();
    KVSTOW_UNROLL
    for (int m = 0; m < M; ++m) KVSTOW_UNROLL
      for (int half = 0; half < 2; ++half) {
        u32 low, high;
        load64(known + row(m, half) + SEEN, low, high);
        KVSTOW_UNROLL
        for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
          for (int c = 0; c < 2; ++c) {
            const int at = own + n * 8 + c;
            if (at < (int)low || at >= (int)high) scores[m][n][2 * half + c] = minus_infinity();
          }
      }
  }

  // Turns scores into weights relative to a score near the greatest one. It is another one, and sums change with it,
  // where a lane has seen a score that is more than four times as heavy; see WEIGHT_LOG2.
  KVSTOW_INLINE void weigh(Scores& scores) {
    const u32 known = this->known();
    float reference[M][2], unit[M][2], top[M][2];
    bool outgrown = false;
    KVSTOW_UNROLL
    for (int m = 0; m < M; ++m) KVSTOW_UNROLL
      for (int half = 0; half < 2; ++half) {
        u32 bits[2];
        load64(known + row(m, half) + REFERENCE, bits[0], bits[1]);
        reference[m][half] = __uint_as_float(bits[0]), unit[m][half] = __uint_as_float(bits[1]);
        top[m][half] = scores[m][0][2 * half];
        KVSTOW_UNROLL
        for (int n = 0; n < S::AT_ONCE / 8; ++n)
          top[m][half] = fmaxf(top[m][half], fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        outgrown |= (top[m][half] - reference[m][half]) * unit[m][half] > 2.f;
      }
    if (__any_sync(WHOLE_WARP, outgrown)) {
      __syncwarp();  // the lanes of a row have read what is written now, and read it again later
      KVSTOW_UNROLL
      for (int m = 0; m < M; ++m) refer_to(top[m], unit[m], m, known, reference[m]);
      __syncwarp();
    }
    KVSTOW_UNROLL
    for (int m = 0; m < M; ++m) KVSTOW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float base = fmaf(finite(reference[m][half]), unit[m][half], -WEIGHT_LOG2);
        KVSTOW_UNROLL
        for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            scores[m][n][c] = exp2_approx(fmaf(scores[m][n][c], unit[m][half], -base));
            total[m][half] += scores[m][n][c];
          }
      }
  }
  // To the greatest score of all lanes, where that is greater.
  KVSTOW_INLINE void refer_to(const float (&top)[2], const float (&unit)[2], int m, u32 known, float (&reference)[2]) {
    float shrink[2];
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      float greatest = fmaxf(reference[half], top[half]);
      KVSTOW_UNROLL
      for (int o = 1; o < 4; o <<= 1) greatest = fmaxf(greatest, __shfl_xor_sync(WHOLE_WARP, greatest, o));
      shrink[half] = exp2_approx((reference[half] - finite(greatest)) * unit[half]);
      reference[half] = greatest;
      if ((threadIdx.x & 3) == 0) store_float(known + row(m, half) + REFERENCE, greatest);
      total[m][half] *= shrink[half];
    }
    KVSTOW_UNROLL
    for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
      for (int c = 0; c < 4; ++c) sums[m][n][c] *= shrink[c >> 1];
  }
  KVSTOW_INLINE static float finite(float x) { return x == minus_infinity() ? 0.f : x; }

  KVSTOW_INLINE void add_values(u32 values, const Scores& weights) {
    const u32 from = hidden(values + rows_at);
    KVSTOW_UNROLL
    for (int k = 0; k < S::AT_ONCE / 16; ++k) {
      u32 a[M][4];
      KVSTOW_UNROLL
      for (int m = 0; m < M; ++m) KVSTOW_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float(&pair)[4] = weights[m][2 * k + i / 2];
          a[m][i] = two_halves(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 16; ++n) {
        u32 tiles[4];  // two halves of the tokens for eight positions, then for eight more
        load_tiles_transposed(S::further(from, 2 * n) + k * 16 * S::ROW_BYTES, tiles);
        KVSTOW_UNROLL
        for (int m = 0; m < M; ++m) add_products(sums[m][2 * n], sums[m][2 * n + 1], a[m], tiles);
      }
    }
  }

  // Two products of one operand, side by side.
  KVSTOW_INLINE static void add_products(float (&left)[4], float (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    add_product_fp16(left, a[0], a[1], a[2], a[3], first);
    add_product_fp16(right, a[0], a[1], a[2], a[3], second);
  }

  // Once all tokens were taken: the sum of all columns, and the reference in powers of two.
  KVSTOW_INLINE float whole_total(int m, int half) const {
    float sum = total[m][half];
    KVSTOW_UNROLL
    for (int o = 1; o < 4; o <<= 1) sum += __shfl_xor_sync(WHOLE_WARP, sum, o);
    return sum;
  }
  KVSTOW_INLINE float reference_log2(int m, int half) const {
    const u32 at = known() + row(m, half);
    return load_float(at + REFERENCE) * load_float(at + UNIT);
  }
};

}  // namespace kvstow
