// Sixteen query rows of a warp: their scores, their softmax, their sums. Everything stays in registers.
//
// Query rows are the rows of the matrix products (FlashAttention-2, Dao 2023): lane 4g + t has
// rows g and g + 8, and of each eight columns 2t and 2t + 1. What a score's columns are tokens for is the
// operand of the next product as it is.
#pragma once
#include "merge.cuh"
#include "prefill_decode.cuh"
namespace kvstow {

template <class S>
struct WarpRows {
  static constexpr int KEPT = S::QUERIES_IN_REGISTERS ? S::D / 16 : 1;
  u32 queries_at;             // this lane's row of an operand in shared memory
  u32 queries[KEPT][4];
  float sums[S::D / 8][4];    // of rows g, g, g + 8, g + 8; positions 8n + 2t, 8n + 2t + 1
  float greatest[2], total[2];  // of rows g and g + 8; total: this lane's columns
  float unit[2];              // what a product is worth, in powers of two
  int low[2], high[2];        // the tokens that the rows see
  int any_low, any_high;      // no row of the warp sees a token outside
  int all_low, all_high;      // all of them see every token inside

  // Queries as float16, each row times a power of two that brings it to 2^14 .. 2^15.
  template <Dtype T>
  KVSTOW_INLINE void read(const DecodeArgs& args, const BlockRows<S>& rows, u32 shared, int b, int head) {
    constexpr int E = S::D / 32, BATCH = 4;  // elements of a lane; rows whose loads are in flight together
    const int lane = threadIdx.x & 31, g = lane >> 2, first = (threadIdx.x >> 5) * 16;
    const u32 block = shared + S::AT_QUERIES + first * S::ROW_BYTES;
    KVSTOW_ROLLED
    for (int i0 = 0; i0 < 16; i0 += BATCH) {
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
        const u32 at = block + row * S::ROW_BYTES + ((lane * E / 8) ^ (row & 7)) * 16 + lane * E % 8 * 2;
        KVSTOW_UNROLL
        for (int e = 0; e < E; e += 2)  // a row that is not finite makes its scores NaN, as they are
          store32(at + e * 2, lost ? 0x7FFF7FFFu : two_halves(x[i][e] / step, x[i][e + 1] / step));
        if (row == g) unit[0] = step * args.scale_log2;
        if (row == g + 8) unit[1] = step * args.scale_log2;
      }
    }
    __syncwarp();
    const int row = lane & 15;
    queries_at = block + row * S::ROW_BYTES;
    if (S::QUERIES_IN_REGISTERS) KVSTOW_UNROLL
      for (int k = 0; k < S::D / 16; ++k) read_operand(k, queries[k]);
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      high[half] = rows.high_of(args, first + half * 8 + g);
      low[half] = rows.low(args, high[half]);
      greatest[half] = minus_infinity(), total[half] = 0.f;
    }
    const int last = least(first + 16, rows.rows) - 1;
    all_high = rows.high_of(args, first), any_low = rows.low(args, all_high);
    any_high = rows.high_of(args, last), all_low = rows.low(args, any_high);
    if (last < first) any_high = any_low;  // no row at all
    KVSTOW_UNROLL
    for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
      for (int c = 0; c < 4; ++c) sums[n][c] = 0.f;
  }
  KVSTOW_INLINE void read_operand(int k, u32 (&a)[4]) const {  // dims 16k .. 16k + 15
    const int lane = threadIdx.x & 31;
    load_tiles(queries_at + (k * 32 ^ ((lane >> 4) ^ (lane & 7)) * 16), a);
  }

  // AT_ONCE tokens, the first of them `token`, whose decoded keys and values begin at the two addresses.
  KVSTOW_INLINE void take(u32 keys, u32 values, int token) {
    if (token >= any_high || token + S::AT_ONCE <= any_low) return;
    float scores[S::AT_ONCE / 8][4];
    multiply_keys(keys, scores);
    if (token < all_low || token + S::AT_ONCE > all_high) hide(scores, token);
    weigh(scores);
    add_values(values, scores);
  }

  KVSTOW_INLINE void multiply_keys(u32 keys, float (&scores)[S::AT_ONCE / 8][4]) const {
    const int lane = threadIdx.x & 31;
    const u32 row = keys + ((lane & 7) + (lane >> 4) * 8) * S::ROW_BYTES;
    const u32 chunk = ((lane >> 3 & 1) ^ (lane & 7)) * 16;
    KVSTOW_UNROLL
    for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
      for (int c = 0; c < 4; ++c) scores[n][c] = 0.f;
    KVSTOW_UNROLL
    for (int k = 0; k < S::D / 16; ++k) {
      u32 a[4];
      if (S::QUERIES_IN_REGISTERS) KVSTOW_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = queries[S::QUERIES_IN_REGISTERS ? k : 0][i];
      else read_operand(k, a);
      KVSTOW_UNROLL
      for (int n = 0; n < S::AT_ONCE / 16; ++n) {
        u32 tiles[4];  // two halves of the dims for eight tokens, then for eight more
        load_tiles(row + n * 16 * S::ROW_BYTES + (chunk ^ k * 32), tiles);
        const u32 first[2] = {tiles[0], tiles[1]}, second[2] = {tiles[2], tiles[3]};
        add_product_fp16(scores[2 * n], a[0], a[1], a[2], a[3], first);
        add_product_fp16(scores[2 * n + 1], a[0], a[1], a[2], a[3], second);
      }
    }
  }

  KVSTOW_INLINE void hide(float (&scores)[S::AT_ONCE / 8][4], int token) const {
    const int own = token + (threadIdx.x & 3) * 2;
    KVSTOW_UNROLL
    for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
      for (int c = 0; c < 4; ++c) {
        const int at = own + n * 8 + (c & 1);
        if (at < low[c >> 1] || at >= high[c >> 1]) scores[n][c] = minus_infinity();
      }
  }

  // Turns scores into weights up to 2^WEIGHT_LOG2, and sums relative to them.
  KVSTOW_INLINE void weigh(float (&scores)[S::AT_ONCE / 8][4]) {
    float shrink[2];
    bool changed = false;
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      float top = greatest[half];
      KVSTOW_UNROLL
      for (int n = 0; n < S::AT_ONCE / 8; ++n)
        top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      KVSTOW_UNROLL
      for (int o = 1; o < 4; o <<= 1) top = fmaxf(top, __shfl_xor_sync(WHOLE_WARP, top, o));
      changed |= top != greatest[half];
      const float finite = top == minus_infinity() ? 0.f : top;
      shrink[half] = exp2_approx((greatest[half] - finite) * unit[half]);
      greatest[half] = top;
      total[half] *= shrink[half];
      const float base = fmaf(finite, unit[half], -WEIGHT_LOG2);
      KVSTOW_UNROLL
      for (int n = 0; n < S::AT_ONCE / 8; ++n) KVSTOW_UNROLL
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          scores[n][c] = exp2_approx(fmaf(scores[n][c], unit[half], -base));
          total[half] += scores[n][c];
        }
    }
    if (!__any_sync(WHOLE_WARP, changed)) return;
    KVSTOW_UNROLL
    for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
      for (int c = 0; c < 4; ++c) sums[n][c] *= shrink[c >> 1];
  }

  KVSTOW_INLINE void add_values(u32 values, const float (&weights)[S::AT_ONCE / 8][4]) {
    const int lane = threadIdx.x & 31;
    const u32 row = values + (lane & 15) * S::ROW_BYTES, chunk = ((lane >> 4) ^ (lane & 7)) * 16;
    KVSTOW_UNROLL
    for (int k = 0; k < S::AT_ONCE / 16; ++k) {
      const float(&left)[4] = weights[2 * k], (&right)[4] = weights[2 * k + 1];
      const u32 a0 = two_halves(left[0], left[1]), a1 = two_halves(left[2], left[3]);
      const u32 a2 = two_halves(right[0], right[1]), a3 = two_halves(right[2], right[3]);
      KVSTOW_UNROLL
      for (int m = 0; m < S::D / 16; ++m) {
        u32 tiles[4];  // two halves of the tokens for eight positions, then for eight more
        load_tiles_transposed(row + k * 16 * S::ROW_BYTES + (chunk ^ m * 32), tiles);
        const u32 first[2] = {tiles[0], tiles[1]}, second[2] = {tiles[2], tiles[3]};
        add_product_fp16(sums[2 * m], a0, a1, a2, a3, first);
        add_product_fp16(sums[2 * m + 1], a0, a1, a2, a3, second);
      }
    }
  }

  // The dim at this lane's position c & 1 of sums[n]: see prefill_decode.cuh.
  KVSTOW_INLINE static int dim(int n, int c) { return n / 4 * 32 + n % 4 * 4 + (threadIdx.x & 3) + (c & 1) * 16; }

  // All tokens were taken: `greatest` in powers of two, `total` of all columns.
  KVSTOW_INLINE void conclude() {
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      greatest[half] *= unit[half];
      KVSTOW_UNROLL
      for (int o = 1; o < 4; o <<= 1) total[half] += __shfl_xor_sync(WHOLE_WARP, total[half], o);
    }
  }

  // As part `split` of what `finish` puts together.
  KVSTOW_INLINE void write_part(const DecodeArgs& args, const BlockRows<S>& rows, int b, int head, int split) const {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 16 + (lane >> 2);
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (first + half * 8 >= rows.rows) continue;
      const u64 at = rows.index(args, b, head, first + half * 8) * args.n_splits + split;
      if ((lane & 3) == 0) args.weights[at * 2] = greatest[half], args.weights[at * 2 + 1] = total[half];
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
        for (int c = 2 * half; c < 2 * half + 2; ++c) args.sums[at * S::D + dim(n, c)] = sums[n][c];
    }
  }

  // The Hadamard matrix, whose butterflies may come in any order: bits of n, of the position, of the lane.
  KVSTOW_INLINE void unrotate() {
    KVSTOW_UNROLL
    for (int h = 1; h < S::D / 8; h *= 2) KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n)
        if (!(n & h)) KVSTOW_UNROLL
          for (int c = 0; c < 4; ++c) {
            const float a = sums[n][c], b = sums[n | h][c];
            sums[n][c] = a + b, sums[n | h][c] = a - b;
          }
    KVSTOW_UNROLL
    for (int n = 0; n < S::D / 8; ++n) {
      KVSTOW_UNROLL
      for (int c = 0; c < 4; c += 2) {
        const float a = sums[n][c], b = sums[n][c + 1];
        sums[n][c] = a + b, sums[n][c + 1] = a - b;
      }
      KVSTOW_UNROLL
      for (int o = 1; o < 4; o <<= 1) KVSTOW_UNROLL
        for (int c = 0; c < 4; ++c) {
          const float y = __shfl_xor_sync(WHOLE_WARP, sums[n][c], o);
          sums[n][c] = threadIdx.x & o ? y - sums[n][c] : sums[n][c] + y;
        }
    }
  }

  // The output, where no other block has tokens of these rows. A row that sees no token is zero.
  template <Dtype T>
  KVSTOW_INLINE void write(const DecodeArgs& args, const BlockRows<S>& rows, int b, int head) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 16 + (lane >> 2);
    unrotate();
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (first + half * 8 >= rows.rows) continue;
      const u64 row = rows.index(args, b, head, first + half * 8);
      if (args.sinks) {
        const int query_head = head * args.group + (rows.row + first + half * 8) % args.group;
        const float base = greatest[half] == minus_infinity() ? 0.f : greatest[half];
        total[half] += exp2_approx(args.sinks[query_head] * LOG2_E - base + WEIGHT_LOG2);
      }
      constexpr float UNSCALED = 1.f / Codebook<S::VALUE_BITS>::FACTOR;
      const float norm = total[half] == 0.f ? 0.f : rsqrtf((float)S::D) * UNSCALED / total[half];
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          const int d = dim(n, c);
          set_element<T>(args.output, row * S::D + d, sums[n][c] * norm * (float)args.signs[d]);
        }
    }
  }
};

}  // namespace kvstow
