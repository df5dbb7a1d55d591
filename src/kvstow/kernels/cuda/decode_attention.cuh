// Attention of a few queries over a packed cache, without decoding it to memory.
//
// A block takes one KV head of one row of the batch, up to ROWS query rows, and one split of the
// tokens; or several such splits one after the other (shares.cuh). Its warps stream tiles of tokens,
// each through its own ring in shared memory, with its own softmax; they meet only at the end of a split.
// Tokens are the rows of the matrix products and queries the columns, so that eight query rows cost what
// one does.
//
//   scores[token, row] = keys . queries     int8 products of the stored codes      key_scores.cuh
//   weights = 2^(scores - reference)        float32                                here
//   sums[dim, row] += values . weights      float16 products of decoded centroids  value_sums.cuh
//   output = unrotate(sums / total)         once per row, by the last split        merge.cuh
#pragma once
#include "key_scores.cuh"
#include "merge.cuh"
#include "store.cuh"
#include "tile_ring.cuh"
namespace kvstow {

// A warp's softmax over the tokens it has seen. Weights are relative to a score that is at most SLACK below the
// greatest: as long as that holds, lanes need not tell each other what they have.
template <class S>
struct OnlineSoftmax {
  static constexpr float SLACK = 2.f, NO_SCORE = -3e38f;  // powers of two; finite, so that NaN cannot arise
  // Of row 4i + t: what a score in powers of two is less, to be the exponent of its weight; and the sum of
  // the weights of this lane's tokens.
  float base[S::ROW_QUADS], total[S::ROW_QUADS];

  KVSTOW_INLINE OnlineSoftmax() {
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) base[i] = NO_SCORE, total[i] = 0.f;
  }
  // Turns the scores of a tile into weights.
  KVSTOW_INLINE void take(float (&scores)[S::SUBTILES][2][S::ROW_QUADS], const Queries<S>& queries,
                          ValueSums<S>& values) {
    float top[S::ROW_QUADS];
    bool above = false;
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) {
      float greatest = minus_infinity();
      KVSTOW_UNROLL
      for (int sub = 0; sub < S::SUBTILES; ++sub)
        greatest = fmaxf(greatest, fmaxf(scores[sub][0][i], scores[sub][1][i]));
      top[i] = greatest * queries.steps[i];
      above |= top[i] - base[i] > WEIGHT_LOG2 + SLACK;
    }
    if (__any_sync(WHOLE_WARP, above)) raise(top, values);
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) KVSTOW_UNROLL
      for (int sub = 0; sub < S::SUBTILES; ++sub) KVSTOW_UNROLL
        for (int e = 0; e < 2; ++e) {
          scores[sub][e][i] = exp2_approx(fmaf(scores[sub][e][i], queries.steps[i], -base[i]));
          total[i] += scores[sub][e][i];
        }
  }
  // The greatest exponent of each row becomes WEIGHT_LOG2; a row whose own is no greater stays as it is.
  KVSTOW_INLINE void raise(float (&top)[S::ROW_QUADS], ValueSums<S>& values) {
    float shrink[S::ROW_QUADS];
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) {
      KVSTOW_UNROLL
      for (int o = 4; o < 32; o <<= 1) top[i] = fmaxf(top[i], __shfl_xor_sync(WHOLE_WARP, top[i], o));
      const float raised = fmaxf(top[i] - WEIGHT_LOG2, base[i]);
      shrink[i] = exp2_approx(base[i] - raised);
      base[i] = raised, total[i] *= shrink[i];
    }
    values.scale(shrink);
  }
  // The score, in powers of two, that has the weight 2^WEIGHT_LOG2; minus infinity if no token was seen.
  KVSTOW_INLINE float reference(int i) const { return base[i] == NO_SCORE ? minus_infinity() : base[i] + WEIGHT_LOG2; }
};

// Grid of shares where rows have lengths, else of splits; blocks of WARPS * 32 threads with SHARED_BYTES.
// With STORES there is one query token, and a token of each row is stored before it is read.
template <class S, Dtype T, bool STORES>
KVSTOW_INLINE void decode_attention(const DecodeArgs& args, char* shared_bytes) {
  using Centroids = typename PairsOf<S::VALUE_BITS>::Type;
  const int lane = thread_index() & 31, warp = thread_index() >> 5, g = lane >> 2, t = lane & 3;
  const u32 shared = shared_address(shared_bytes);
  TileRing<S> ring(shared + S::AT_RING + warp * (S::STAGES * S::STAGE_BYTES));
  LoadedRows<S, T> loaded;
  OnlineSoftmax<S> softmax;
  ValueSums<S> values;
  Share<S> share;
  Split next;
  bool begun = false, more = args.lengths ? share.next(args, share.find(args), next) : find_split<S>(args, next);
  if (!more) return;

  // What a warp copies and asks for of the next split.
  const auto start_next = [&]() {
    const BlockRows<S> rows(args, next.b, next.row_block);
    const int begin = most(next.begin, rows.first_tile()), end = least(next.end, rows.any_high);
    if (STORES) {
      const int token = args.stored < 0 ? rows.any_high - 1 : args.stored;
      if (most(begin, rows.any_low) <= token && token < end && (token - begin) / S::TILE % S::WARPS == warp)
        store_token<S, T>(args, next.b, next.head, token, ring.first);
    }
    loaded.load(args, rows, next.b, next.head);
    const u64 plane_row = (u64)next.b * args.n_kv_heads + next.head;
    ring.start(args, plane_row, begin + warp * S::TILE, rows.any_low, rows.any_high, end);
  };

  KVSTOW_ROLLED
  for (;;) {
    // Behind a split, the next one is on its way while this one is merged.
    if (S::MERGES_IN_STAGE && more) start_next();
    if (begun) {
      Split split;
      float reference[S::ROW_QUADS];
      KVSTOW_UNROLL
      for (int i = 0; i < S::ROW_QUADS; ++i) reference[i] = softmax.reference(i);
      split.recall<S>(shared);
      merge_warps(args, BlockRows<S>(args, split.b, split.row_block), shared, values, reference, softmax.total, split);
      // Warps with nothing to finish go on: what they write before they meet the others again is not in use.
      finish<S, T>(args, split, shared);
      if (!more) return;
    } else {
      Centroids::write_table(args, shared + S::AT_TABLE, S::WARPS * 32);
    }
    if (!S::MERGES_IN_STAGE) start_next();
    loaded.write(args, shared);
    if (args.lengths) share.keep(shared);
    next.keep<S>(shared);
    __syncthreads();

    {
      const BlockRows<S> rows(args, next.b, next.row_block);
      const int begin = most(next.begin, rows.first_tile()), end = least(next.end, rows.any_high);
      const Queries<S> queries(shared);
      const KeyReader<S> keys;
      const ValueReader<S> value_reader;
      const Centroids centroids(args, shared + S::AT_TABLE);
      softmax = OnlineSoftmax<S>();
      values = ValueSums<S>();
      u32 stage = ring.last;
      KVSTOW_ROLLED
      for (int tile = begin + warp * S::TILE; tile < end; tile += S::STEP) {
        ring.advance();
        stage = ring.after(stage);
        float scores[S::SUBTILES][2][S::ROW_QUADS];  // of tokens 16 sub + 8e + g and rows 4i + t
        KVSTOW_UNROLL
        for (int sub = 0; sub < S::SUBTILES; ++sub) score_subtile(queries, keys, stage, sub, scores[sub]);

        const bool whole = rows.all_low <= tile && tile + S::TILE <= rows.all_high;
        if (!whole) {
          KVSTOW_UNROLL
          for (int i = 0; i < S::ROW_QUADS; ++i) {
            const int high = rows.high_of(args, i * 4 + t), low = rows.low(args, high);
            KVSTOW_UNROLL
            for (int sub = 0; sub < S::SUBTILES; ++sub) KVSTOW_UNROLL
              for (int e = 0; e < 2; ++e) {
                const int token = tile + sub * 16 + e * 8 + g;
                if (token < low || token >= high) scores[sub][e][i] = minus_infinity();
              }
          }
        }
        softmax.take(scores, queries, values);
        KVSTOW_UNROLL
        for (int sub = 0; sub < S::SUBTILES; ++sub) values.add(value_reader, centroids, stage, sub, scores[sub]);
      }
    }
    more = false, begun = true;
    if (args.lengths) {
      share.recall(shared);
      // Rows are read from memory again, which a share at its end need not wait for.
      if (share.at < share.end) more = share.next(args, typename Share<S>::Rows(args, 0), next);
    }
  }
}

}  // namespace kvstow
