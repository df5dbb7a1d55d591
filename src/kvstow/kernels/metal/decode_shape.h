// What a decode kernel is specialised for, what it is called with, and who sees which token.
#pragma once
#include "primitives.h"
namespace kvstow {

// A simdgroup takes one split of the tokens for ROWS query rows of one KV head. A lane holds 16 of
// the D dims, so that a token takes D / 16 lanes and a simdgroup several tokens at once:
//
//   D    64: 8 tokens of  4 lanes      lane      0     1   ...    D/16 - 1  |  D/16 ...
//   D   128: 4 tokens of  8 lanes      token     t     t   ...        t     |  t + 1 ...
//   D   256: 2 tokens of 16 lanes      dims    0..15 16..31 ...   D-16..D-1 |  0..15 ...
//   D   512: 1 token  of 32 lanes      slot      0     0   ...        0     |    1   ...
//
// A threadgroup has SIMDGROUPS neighbouring splits, and in its memory ROWS x D queries in float32 and
// behind them the 2^VALUE_BITS centroids.
template <int HEAD_DIM, int KEY_BITS_, int VALUE_BITS_, int ROWS_, int SIMDGROUPS_>
struct DecodeShape {
  static constexpr constant int D = HEAD_DIM, KEY_BITS = KEY_BITS_, VALUE_BITS = VALUE_BITS_;
  static constexpr constant int ROWS = ROWS_, SIMDGROUPS = SIMDGROUPS_;
  static constexpr constant int DIMS = 16;            // of a lane
  static constexpr constant int TOKEN_LANES = D / DIMS, SLOTS = LANES / TOKEN_LANES;
  static constexpr constant int GROUPS = D / 32;      // of elements with one scale
  // Bytes of a token in each plane of codes.
  static constexpr constant int KEY_ROW = D * KEY_BITS / 8, VALUE_ROW = D * VALUE_BITS / 8;
  static constexpr constant int AT_TABLE = ROWS * D;  // in the threadgroup's memory, in floats
};

// Axes: b rows of the batch, h KV heads, hq = h * group query heads, l query tokens, d head_dim,
// g = d / 32 groups. A query row r of a KV head is query token r / group of head r % group.
struct DecodeArgs {
  const device uchar* key_codes;    // [b, h, capacity, d * key_bits / 8]
  const device half* key_scales;    // [b, h, capacity, g]
  const device half* key_zeros;     // [b, h, capacity, g]
  const device uchar* value_codes;  // [b, h, capacity, d * value_bits / 8]
  const device half* value_scales;  // [b, h, capacity, g]
  int batch, n_kv_heads, group, n_queries, capacity;
  int length;        // of this row of the batch: tokens from 0 on, those of this step included
  int row_blocks;    // blocks of ROWS that the group * l rows of a KV head take
  int n_splits, chunk;  // a split takes chunk tokens
  int window;        // a query token sees so many tokens, itself included; 0: all
  int start;         // of this row of the batch: its first token
  float scale_log2;  // factor of the scores, times log2(e)
};

// The query rows of one block, and the tokens they see.
template <class S>
struct BlockRows {
  int row, rows;           // the first row of the KV head, and how many
  int any_low, any_high;   // a token outside is seen by no row
  int start, row_high;     // row 0 of the KV head sees the tokens [low(row_high), row_high)

  BlockRows(const thread DecodeArgs& args, int row_block) {
    row = row_block * S::ROWS;
    rows = min(S::ROWS, args.group * args.n_queries - row);
    start = max(0, args.start);
    row_high = args.length - args.n_queries + 1;
    any_high = high(args, rows - 1);
    any_low = low(args, high(args, 0));
  }
  // Row r of the block sees the tokens [low(high), high).
  int high(const thread DecodeArgs& args, int r) const { return row_high + (row + r) / args.group; }
  int low(const thread DecodeArgs& args, int high_of_row) const {
    return args.window ? max(start, high_of_row - args.window) : start;
  }
  // Where row r of this block lies in arrays of [b, hq, l].
  ulong index(const thread DecodeArgs& args, int b, int head, int r) const {
    const int at = row + r;
    const ulong query_head = (ulong(b) * args.n_kv_heads + head) * args.group + at % args.group;
    return query_head * args.n_queries + at / args.group;
  }
};

}  // namespace kvstow
