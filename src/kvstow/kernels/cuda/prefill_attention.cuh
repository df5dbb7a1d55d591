// Attention of many queries, a chunk of a prompt, over a packed cache.
//
// A block takes one KV head of one row of the batch, ROWS query rows, and one split of the tokens. A tile of
// tokens is decoded to shared memory once for all of them, which is what makes it worth it: its bytes
// are read from the cache packed, and nothing is decoded to global memory.
//
//   copy      a tile's packed bytes, each warp its own tokens                 tile_ring.cuh
//   decode    the next tile, each warp its own tokens, to float16       prefill_decode.cuh
//   attend    to this tile, each warp its own 16 or 32 query rows             prefill_rows.cuh
//   write     what their sums are, un-rotated                                 prefill_output.cuh
//
// There are two decoded tiles, and one barrier for each. Between two barriers half of the warps attend
// first and the others decode first, so that matrix units and the rest are busy at the same time.
#pragma once
#include "prefill_output.cuh"
#include "tile_ring.cuh"
namespace kvstow {

template <class S>
KVSTOW_INLINE void take_tiles(const DecodeArgs& args, const BlockRows<S>& rows, WarpRows<S>& own, u32 shared,
                              u64 plane_row, int begin, int end) {
  const int warp = threadIdx.x >> 5;
  const u32 own_ring = shared + S::AT_RING + warp * (S::Ring::STAGES * S::Ring::STAGE_BYTES);
  TileRing<typename S::Ring> ring(own_ring);
  ring.start(args, plane_row, begin + warp * S::OWN, rows.any_low, end, end);
  Codebook<S::VALUE_BITS>::write_table(args, shared + S::AT_TABLE, S::WARPS * 32);
  __syncthreads();
  const Codebook<S::VALUE_BITS> codebook(args, shared + S::AT_TABLE);

  u32 stage = ring.last, full = shared + S::AT_HALVES, empty = full + S::HALVES_BYTES;
  const auto decode_next = [&](u32 to, int tile) {
    ring.advance();
    stage = ring.after(stage);
    decode_own_tokens<S>(stage, to, codebook, tile, end);
  };
  decode_next(full, begin);
  __syncthreads();
  KVSTOW_ROLLED
  for (int tile = begin; tile < end; tile += S::TILE) {
    KVSTOW_ROLLED
    for (int phase = 0; phase < 2; ++phase) {
      if ((phase ^ warp >> 2) & 1) {
        if (tile + S::TILE < end) decode_next(empty, tile + S::TILE);
      } else {
        own.take_tile(full, tile);
      }
    }
    __syncthreads();
    const u32 other = full;
    full = empty, empty = other;
  }
}

// Grid (n_splits, n_kv_heads * row_blocks, b), blocks of WARPS * 32 threads with SHARED_BYTES.
template <class S, Dtype T>
KVSTOW_INLINE void prefill_attention(const DecodeArgs& args, char* shared_bytes) {
  WarpRows<S> own;
  Split split;
  {
    if (!find_split<S>(args, split)) return;
    const BlockRows<S> rows(args, split.b, split.row_block);
    const u32 shared = shared_address(shared_bytes);
    const int begin = split.begin, end = least(rows.any_high, split.end);
    own.template read<T>(args, rows, shared, split.b, split.head);
    if (begin < end)
      take_tiles(args, rows, own, shared, (u64)split.b * args.n_kv_heads + split.head, begin, end);
  }
  find_split<S>(args, split);  // once more: registers are short while tiles are taken
  const BlockRows<S> rows(args, split.b, split.row_block);
  if (args.n_splits == 1) return write_output<S, T>(own, args, rows, split.b, split.head);
  write_part(own, args, rows, split.b, split.head, split.index);
  finish<S, T>(args, split, shared_address(shared_bytes));
}

}  // namespace kvstow
