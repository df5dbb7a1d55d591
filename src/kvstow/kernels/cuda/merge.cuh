// From sums of a warp to sums of a split, and from those to the output.
//
// Every part holds a score near the greatest of its tokens, in powers of two, and sums of weights and of
// weighted values relative to it: its own weight would be 2^WEIGHT_LOG2. Parts with different ones are
// brought to the greatest one.
#pragma once
#include "shares.cuh"
#include "signs.cuh"
#include "value_sums.cuh"
namespace kvstow {

// Merges the warps of a block, through the memory of their rings: of the stage that each does not use yet, or of all.
// What they add up to is left in shared memory where it is all of a row, else where other blocks find it.
//   reference[i], weight[i]: of row 4i + t; `weight` is the part of tokens g + 8e
template <class S>
KVSTOW_INLINE void merge_warps(const DecodeArgs& args, const BlockRows<S>& rows, u32 shared,
                               const ValueSums<S>& values, const float (&reference)[S::ROW_QUADS],
                               float (&weight)[S::ROW_QUADS], const Split& split) {
  constexpr int AT_WEIGHTS = 128 * S::SUMS_PER_LANE;
  constexpr int STRIDE = S::MERGES_IN_STAGE ? S::STAGES * S::STAGE_BYTES : S::MERGE_BYTES;
  const int lane = thread_index() & 31, warp = thread_index() >> 5, g = lane >> 2, t = lane & 3;
  KVSTOW_UNROLL
  for (int i = 0; i < S::ROW_QUADS; ++i) KVSTOW_UNROLL
    for (int o = 4; o < 32; o <<= 1) weight[i] += __shfl_xor_sync(WHOLE_WARP, weight[i], o);
  u32 ring = shared + S::AT_RING;
  if (S::MERGES_IN_STAGE) {
    ring += (S::STAGES - 1) * S::STAGE_BYTES;
    __syncwarp();
  } else {
    wait_for_all_but<0>();
    __syncthreads();
  }
  const u32 mine = ring + warp * STRIDE;
  KVSTOW_UNROLL
  for (int i = 0; i < S::ROW_QUADS; ++i) {
    KVSTOW_UNROLL
    for (int m = 0; m < S::D / 16; ++m) {
      const u32 at = mine + (2 * m * S::ROW_QUADS + i) * 128 + lane * 4;
      store_float(at, values.sums[m][i / 2][i & 1]);
      store_float(at + S::ROW_QUADS * 128, values.sums[m][i / 2][2 + (i & 1)]);
    }
    if (g == 0) {
      store_float(mine + AT_WEIGHTS + (i * 4 + t) * 8, reference[i]);
      store_float(mine + AT_WEIGHTS + (i * 4 + t) * 8 + 4, weight[i]);
    }
  }
  __syncthreads();
  KVSTOW_UNROLL
  for (int i = 0; i < S::ROW_QUADS; ++i) {
    const int r = i * 4 + t;
    const u32 weights = ring + AT_WEIGHTS + r * 8;
    float factor[S::WARPS], top = minus_infinity(), total = 0.f;
    KVSTOW_UNROLL
    for (int w = 0; w < S::WARPS; ++w) {
      factor[w] = load_float(weights + w * STRIDE);
      top = fmaxf(top, factor[w]);
    }
    KVSTOW_UNROLL
    for (int w = 0; w < S::WARPS; ++w) {
      factor[w] = exp2_approx(factor[w] - (top == minus_infinity() ? 0.f : top));
      total = fmaf(factor[w], load_float(weights + w * STRIDE + 4), total);
    }
    if (r >= rows.rows) continue;
    const u64 at = rows.index(args, split.b, split.head, r) * args.n_splits + split.index;
    const bool whole = S::WHOLE_IN_SHARED && split.n_splits == 1;
    const u32 row = shared + S::AT_WHOLE + r * S::WHOLE_BYTES;
    if (warp == 0 && g == 0) {
      if (whole) store_float(row + 4 * S::D, top), store_float(row + 4 * S::D + 4, total);
      else *(float2*)(args.weights + at * 2) = make_float2(top, total);
    }
    KVSTOW_UNROLL
    for (int m = warp; m < S::D / 16; m += S::WARPS) {
      float x = 0.f, y = 0.f;
      KVSTOW_UNROLL
      for (int w = 0; w < S::WARPS; ++w) {
        const u32 from = ring + w * STRIDE + (2 * m * S::ROW_QUADS + i) * 128 + lane * 4;
        x = fmaf(factor[w], load_float(from), x);
        y = fmaf(factor[w], load_float(from + S::ROW_QUADS * 128), y);
      }
      const int d = g * S::DIMS + 2 * m;
      if (whole) store_float(row + 4 * d, x), store_float(row + 4 * d + 4, y);
      else *(float2*)(args.sums + at * S::D + d) = make_float2(x, y);
    }
  }
}

// The score of no token of a row, in powers of two.
KVSTOW_INLINE float sink_of(const DecodeArgs& args, u64 row) {
  return args.sinks ? args.sinks[(u32)row / args.n_queries % (args.n_kv_heads * args.group)] * LOG2_E : minus_infinity();
}

// Undoes the rotation of a row and writes the output, for one warp: dims E * lane on of its sums, and its whole weight.
template <class S, Dtype T>
KVSTOW_INLINE void write_row(const DecodeArgs& args, u64 row, float (&x)[S::D / 32], float total, const Signs<S::D>& signs) {
  constexpr int E = S::D / 32;
  const int lane = thread_index() & 31;
  // A row that sees no token is zero.
  constexpr float UNSCALED = 1.f / Codebook<S::VALUE_BITS>::FACTOR;
  const float norm = total == 0.f ? 0.f : rsqrtf((float)S::D) * UNSCALED / total;
  // The Hadamard matrix is symmetric, so the order of its butterflies is free.
  KVSTOW_UNROLL
  for (int h = 1; h < E; h *= 2) KVSTOW_UNROLL
    for (int e = 0; e < E; ++e)
      if (!(e & h)) {
        const float a = x[e], b = x[e + h];
        x[e] = a + b, x[e + h] = a - b;
      }
  KVSTOW_UNROLL
  for (int h = 1; h < 32; h *= 2) KVSTOW_UNROLL
    for (int e = 0; e < E; ++e) {
      const float y = __shfl_xor_sync(WHOLE_WARP, x[e], h);
      x[e] = lane & h ? y - x[e] : x[e] + y;
    }
  KVSTOW_UNROLL
  for (int e = 0; e < E; ++e) set_element<T>(args.output, row * S::D + lane * E + e, signs.times(x[e] * norm, e));
}

// Numbers beside each other that other blocks wrote: not from this processor's own cache; as one load where they fit.
template <int N>
KVSTOW_INLINE void load_written(const float* from, float (&x)[N]) {
  if constexpr (N == 2) {
    const float2 pair = __ldcg((const float2*)from);
    x[0] = pair.x, x[1] = pair.y;
  } else {
    KVSTOW_UNROLL
    for (int i = 0; i < N; i += 4) {
      const float4 four = __ldcg((const float4*)(from + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

// Merges the splits of a row, for one warp: dims E * lane on of its sums; gives its whole weight.
template <class S>
KVSTOW_INLINE float merge_splits(const DecodeArgs& args, u64 row, int n_splits, float sink, float (&x)[S::D / 32]) {
  constexpr int E = S::D / 32;  // dims of a lane, from E * lane on
  constexpr int BATCH = E <= 4 ? 16 : E <= 8 ? 8 : 4;  // splits whose loads are in flight together
  const int lane = thread_index() & 31;
  const float2* weights = (const float2*)args.weights + row * args.n_splits;
  const float2 none = make_float2(minus_infinity(), 0.f);
  const float* sums = args.sums + row * args.n_splits * S::D + lane * E;
  float y[BATCH][E];
  const auto load_sums = [&](int first) {
    KVSTOW_UNROLL
    for (int s = 0; s < BATCH; ++s) load_written(sums + least(first + s, n_splits - 1) * S::D, y[s]);
  };
  load_sums(0);  // with the weights
  const float2 own = lane < n_splits ? __ldcg(weights + lane) : none;
  float top = fmaxf(own.x, sink);
  KVSTOW_UNROLL
  for (int e = 0; e < E; ++e) x[e] = 0.f;
  KVSTOW_ROLLED
  for (int s = lane + 32; s < n_splits; s += 32) top = fmaxf(top, __ldcg(weights + s).x);
  KVSTOW_UNROLL
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(WHOLE_WARP, top, o));
  const float base = top == minus_infinity() ? 0.f : top;
  float total = lane == 0 ? exp2_approx(sink - base + WEIGHT_LOG2) : 0.f;
  float factor = 0.f;  // of split `lane` of 32; 0 behind the last one
  KVSTOW_ROLLED
  for (int first = 0; first < n_splits; first += BATCH) {
    if (first) load_sums(first);
    if (first % 32 == 0) {
      const float2 w = first == 0 ? own : first + lane < n_splits ? __ldcg(weights + first + lane) : none;
      factor = exp2_approx(w.x - base);
      total = fmaf(factor, w.y, total);
    }
    KVSTOW_UNROLL
    for (int s = 0; s < BATCH; ++s) {
      const float f = __shfl_sync(WHOLE_WARP, factor, first % 32 + s);  // 0: the last split's sums stand there
      KVSTOW_UNROLL
      for (int e = 0; e < E; ++e) x[e] = fmaf(f, y[s][e], x[e]);
    }
  }
  KVSTOW_UNROLL
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(WHOLE_WARP, total, o);
  return total;
}

// The same of a row that `merge_warps` left in shared memory.
template <class S>
KVSTOW_INLINE float read_whole(u32 from, float sink, float (&x)[S::D / 32]) {
  constexpr int E = S::D / 32;
  const float top = load_float(from + 4 * S::D), greatest = fmaxf(top, sink);
  const float base = greatest == minus_infinity() ? 0.f : greatest, factor = exp2_approx(top - base);
  KVSTOW_UNROLL
  for (int e = 0; e < E; ++e) x[e] = factor * load_float(from + ((thread_index() & 31) * E + e) * 4);
  return fmaf(factor, load_float(from + 4 * S::D + 4), exp2_approx(sink - base + WEIGHT_LOG2));
}

// The last split of a block's rows to arrive finishes them, so that one launch does it all.
//   shared: of the block; 4 bytes at `AT_LAST` say to all threads whether it is the last one
template <class S, Dtype T>
KVSTOW_INLINE void finish(const DecodeArgs& args, const Split& split, u32 shared) {
  const Signs<S::D> signs(args.signs);  // they come from memory, so they are asked for early
  __syncthreads();
  if (split.n_splits > 1) {
    if (threadIdx.x == 0) {
      int* arrived = args.arrivals + (split.b * args.n_kv_heads + split.head) * args.row_blocks + split.row_block;
      const bool is_last = count_in_order(arrived) == split.n_splits - 1;
      if (is_last) *arrived = 0;
      store32(shared + S::AT_LAST, is_last);
    }
    __syncthreads();
    if (!load32(shared + S::AT_LAST)) return;
  }
  const BlockRows<S> rows(args, split.b, split.row_block);
  for (int r = thread_index() / 32; r < rows.rows; r += S::WARPS) {
    const u64 row = rows.index(args, split.b, split.head, r);
    const float sink = sink_of(args, row);
    float x[S::D / 32], total;
    if (S::WHOLE_IN_SHARED && split.n_splits == 1)
      total = read_whole<S>(shared + S::AT_WHOLE + r * S::WHOLE_BYTES, sink, x);
    else
      total = merge_splits<S>(args, row, split.n_splits, sink, x);
    write_row<S, T>(args, row, x, total, signs);
  }
}

}  // namespace kvstow
