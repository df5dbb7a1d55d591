// From a warp's sums to the output, or to a part of it where the tokens are split.
#pragma once
#include "prefill_rows.cuh"
namespace kvstow {

// The dim at this lane's position c & 1 of sums[m][n]: see prefill_decode.cuh.
KVSTOW_INLINE int dim_of_sum(int n, int c) { return n / 4 * 32 + n % 4 * 4 + (threadIdx.x & 3) + (c & 1) * 16; }

// The row of the block that this lane's sums[m][n][2 * half] is of.
template <class S>
KVSTOW_INLINE int row_of_sum(int m, int half) {
  return WarpRows<S>::first() + m * 16 + half * 8 + (threadIdx.x >> 2 & 7);
}

// As part `split` of what `finish` puts together.
template <class S>
KVSTOW_INLINE void write_part(const WarpRows<S>& own, const DecodeArgs& args, const BlockRows<S>& rows, int b,
                              int head, int split) {
  KVSTOW_UNROLL
  for (int m = 0; m < S::ROW_TILES; ++m) KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int r = row_of_sum<S>(m, half);
      const float total = own.whole_total(m, half);
      if (r >= rows.rows) continue;
      const u64 at = rows.index(args, b, head, r) * args.n_splits + split;
      if ((threadIdx.x & 3) == 0)
        args.weights[at * 2] = own.reference_log2(m, half), args.weights[at * 2 + 1] = total;
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
        for (int c = 2 * half; c < 2 * half + 2; ++c) args.sums[at * S::D + dim_of_sum(n, c)] = own.sums[m][n][c];
    }
}

// The Hadamard matrix, whose butterflies may come in any order: bits of n, of the position, of the lane.
template <int D>
KVSTOW_INLINE void unrotate(float (&sums)[D / 8][4]) {
  KVSTOW_UNROLL
  for (int h = 1; h < D / 8; h *= 2) KVSTOW_UNROLL
    for (int n = 0; n < D / 8; ++n)
      if (!(n & h)) KVSTOW_UNROLL
        for (int c = 0; c < 4; ++c) {
          const float a = sums[n][c], b = sums[n | h][c];
          sums[n][c] = a + b, sums[n | h][c] = a - b;
        }
  KVSTOW_UNROLL
  for (int n = 0; n < D / 8; ++n) {
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
template <class S, Dtype T>
KVSTOW_INLINE void write_output(WarpRows<S>& own, const DecodeArgs& args, const BlockRows<S>& rows, int b, int head) {
  KVSTOW_UNROLL
  for (int m = 0; m < S::ROW_TILES; ++m) {
    unrotate<S::D>(own.sums[m]);
    KVSTOW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int r = row_of_sum<S>(m, half);
      float total = own.whole_total(m, half);
      if (r >= rows.rows) continue;
      if (args.sinks) {
        const float base = own.finite(own.reference_log2(m, half));
        const int query_head = head * args.group + (rows.row + r) % args.group;
        total += exp2_approx(args.sinks[query_head] * LOG2_E - base + WEIGHT_LOG2);
      }
      constexpr float UNSCALED = 1.f / Codebook<S::VALUE_BITS>::FACTOR;
      const float norm = total == 0.f ? 0.f : rsqrtf((float)S::D) * UNSCALED / total;
      const u64 row = rows.index(args, b, head, r);
      KVSTOW_UNROLL
      for (int n = 0; n < S::D / 8; ++n) KVSTOW_UNROLL
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          const int d = dim_of_sum(n, c);
          set_element<T>(args.output, row * S::D + d, own.sums[m][n][c] * norm * (float)args.signs[d]);
        }
    }
  }
}

}  // namespace kvstow
