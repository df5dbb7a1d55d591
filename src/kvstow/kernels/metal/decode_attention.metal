// Attention of a few queries over a packed cache, without decoding it to memory: one split of it.
//
//   q . k = sum over groups of scale * (sum of q * code + zero * sum of q)
//   sums  = sum over tokens of 2^(score - greatest) * scale * centroids, in the rotated domain
//
// Each slot of a simdgroup (decode_shape.h) goes through its own tokens with its own softmax; slots
// meet at the end, splits in merge_splits.metal.
#pragma once
#include "decode_shape.h"
namespace kvstow {

// The softmax of one slot over the tokens it has seen, for one row, and a lane's dims of the sums.
struct OnlineSums {
  float greatest, total;  // score in powers of 2; sum of weights
  float sums[16];

  OnlineSums() : greatest(-INFINITY), total(0.f) {
    KVSTOW_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = 0.f;
  }
  void scale(float by) {
    total *= by;
    KVSTOW_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] *= by;
  }
  void add(float score, float value_scale, const thread float (&centroids)[16]) {
    if (!(score <= greatest)) {  // NaN too: it must not be lost
      scale(exp2(greatest - score));
      greatest = score;
    }
    const float weight = exp2(score - greatest), factor = weight * value_scale;
    total += weight;
    KVSTOW_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = fma(factor, centroids[i], sums[i]);
  }
  // Brings slots of `token_lanes` lanes together; all of them hold the result.
  void merge_slots(int token_lanes) {
    float top = greatest;
    for (int by = token_lanes; by < LANES; by *= 2) top = max(top, simd_shuffle_xor(top, ushort(by)));
    scale(greatest == -INFINITY ? 0.f : exp2(greatest - top));
    greatest = top;
    for (int by = token_lanes; by < LANES; by *= 2) {
      total += simd_shuffle_xor(total, ushort(by));
      KVSTOW_UNROLL
      for (int i = 0; i < 16; ++i) sums[i] += simd_shuffle_xor(sums[i], ushort(by));
    }
  }
};

// A lane's part of a token: 16 codes of a plane, half a group.
template <int BITS, bool SIGNED>
void read_codes(const device uchar* from, thread float (&codes)[16]) {
  const Bits<16 * BITS> bits(from);
  KVSTOW_UNROLL
  for (int i = 0; i < 16; ++i) {
    const uint code = bits.template code<BITS>(i);
    codes[i] = SIGNED ? float(int(code << (32 - BITS)) >> (32 - BITS)) : float(code);
  }
}
template <int BITS>
void read_centroids(const device uchar* from, const threadgroup float* table, thread float (&values)[16]) {
  const Bits<16 * BITS> bits(from);
  KVSTOW_UNROLL
  for (int i = 0; i < 16; ++i) values[i] = table[bits.template code<BITS>(i)];
}

// Queries times the factor of the scores, and the centroids, for the whole threadgroup.
template <class S, class Element, class Table>
void fill_shared(const thread DecodeArgs& args, const thread BlockRows<S>& rows,
                 const device Element* queries, Table centroids, threadgroup float* shared, int b,
                 int head, int thread_index) {
  for (int i = thread_index; i < S::ROWS * S::D; i += S::SIMDGROUPS * LANES) {
    const int r = i / S::D;
    float x = 0.f;
    if (r < rows.rows) x = float(queries[rows.index(args, b, head, r) * S::D + i % S::D]);
    shared[i] = x * args.scale_log2;
  }
  for (int i = thread_index; i < 1 << S::VALUE_BITS; i += S::SIMDGROUPS * LANES)
    shared[S::AT_TABLE + i] = centroids[i];
}

// Grid of threadgroups (ceil(n_splits / SIMDGROUPS), h * row_blocks, b).
//   queries  [b, hq, l, d]
//   sums     [b * hq * l, n_splits, d] not normalised, in the rotated domain; not written where no row
//            of the block sees a token of the split
//   weights  [b * hq * l, n_splits, 2] greatest score in powers of 2, sum of weights
template <class S, class Element, class Table>
void decode_split(const thread DecodeArgs& args, const device Element* queries, Table centroids,
                  device float* sums, device float* weights, threadgroup float* shared, uint3 block,
                  uint simdgroup, uint lane) {
  const int b = block.z, head = block.y / args.row_blocks;
  const int split = block.x * S::SIMDGROUPS + simdgroup;
  const BlockRows<S> rows(args, block.y % args.row_blocks);
  fill_shared(args, rows, queries, centroids, shared, b, head, simdgroup * LANES + lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (split >= args.n_splits) return;

  const int slot = lane / S::TOKEN_LANES, part = lane % S::TOKEN_LANES, group = part / 2;
  const threadgroup float* own_queries = shared + part * S::DIMS;  // of row 0
  const threadgroup float* table = shared + S::AT_TABLE;
  float query_sums[S::ROWS];
  OnlineSums state[S::ROWS];
  KVSTOW_UNROLL
  for (int r = 0; r < S::ROWS; ++r) {
    query_sums[r] = 0.f;
    KVSTOW_UNROLL
    for (int i = 0; i < S::DIMS; ++i) query_sums[r] += own_queries[r * S::D + i];
  }

  const ulong plane = (ulong(b) * args.n_kv_heads + head) * args.capacity;
  const int begin = rows.any_low + split * args.chunk, end = min(rows.any_high, begin + args.chunk);
  for (int first = begin; first < end; first += S::SLOTS) {
    const int token = first + slot;
    const bool inside = token < end;
    const ulong at = plane + token;
    float scores[S::ROWS];
    KVSTOW_UNROLL
    for (int r = 0; r < S::ROWS; ++r) scores[r] = 0.f;
    if (inside) {
      float codes[16];
      read_codes<S::KEY_BITS, S::KEY_BITS == 8>(
          args.key_codes + at * S::KEY_ROW + part * (2 * S::KEY_BITS), codes);
      const float scale = float(args.key_scales[at * S::GROUPS + group]);
      const float zero = float(args.key_zeros[at * S::GROUPS + group]);
      KVSTOW_UNROLL
      for (int r = 0; r < S::ROWS; ++r) {
        float x = zero * query_sums[r];
        KVSTOW_UNROLL
        for (int i = 0; i < S::DIMS; ++i) x = fma(own_queries[r * S::D + i], codes[i], x);
        scores[r] = scale * x;
      }
    }
    KVSTOW_UNROLL
    for (int r = 0; r < S::ROWS; ++r)
      for (int by = 1; by < S::TOKEN_LANES; by *= 2) scores[r] += simd_shuffle_xor(scores[r], ushort(by));
    if (inside) {
      float values[16];
      read_centroids<S::VALUE_BITS>(
          args.value_codes + at * S::VALUE_ROW + part * (2 * S::VALUE_BITS), table, values);
      const float scale = float(args.value_scales[at * S::GROUPS + group]);
      KVSTOW_UNROLL
      for (int r = 0; r < S::ROWS; ++r) {
        const int high = rows.high(args, r);
        if (token >= rows.low(args, high) && token < high) state[r].add(scores[r], scale, values);
      }
    }
  }

  KVSTOW_UNROLL
  for (int r = 0; r < S::ROWS; ++r) {
    state[r].merge_slots(S::TOKEN_LANES);
    if (r >= rows.rows || slot != 0) continue;
    const ulong to = rows.index(args, b, head, r) * args.n_splits + split;
    if (part == 0) {
      weights[to * 2] = state[r].greatest;
      weights[to * 2 + 1] = state[r].total;
    }
    if (begin >= end) continue;
    KVSTOW_UNROLL
    for (int i = 0; i < S::DIMS; ++i) sums[to * S::D + part * S::DIMS + i] = state[r].sums[i];
  }
}

}  // namespace kvstow
