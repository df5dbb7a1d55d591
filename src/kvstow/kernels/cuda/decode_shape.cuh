// What a decode kernel is specialised for, what it is called with, and who sees which token.
#pragma once
#include "primitives.cuh"
namespace kvstow {

// A stage of a warp's ring in shared memory holds one tile: TILE tokens of one KV head.
//
//   AT_KEYS           TILE rows of key codes, 16-byte chunks of a row swizzled (5 bits: as stored)
//   AT_VALUES         TILE rows of value codes, 16-byte chunks swizzled (3 and 5 bits: as stored)
//   AT_KEY_SCALES     TILE x GROUPS float16
//   AT_KEY_ZEROS      TILE x GROUPS float16
//   AT_VALUE_SCALES   TILE x GROUPS float16
//
// And a block's shared memory, the queries as int8 planes in front (see query_planes.cuh):
//
//   AT_QUERIES   ROW_QUADS x GROUPS x 8 columns x 32 bytes
//   AT_SUMS      ROWS x GROUPS float32: what a query's integers add up to in each group
//   AT_STEPS     ROWS float32: what an integer is worth
//   AT_KEPT      WARPS x KEPT_BYTES: what each warp must know again after its tiles; see shares.cuh
//   AT_LAST      whether the block is the last of its row to arrive; nothing else may lie there
//   AT_WHOLE     ROWS x WHOLE_BYTES: sums of rows that have one split, their reference and weight; with WHOLE_IN_SHARED
//   AT_TABLE     centroids, so many copies that each lane has banks to itself; none for 3 bits
//   AT_RING      WARPS x STAGES stages; behind a split, what the warps have to merge
template <int HEAD_DIM, int KEY_BITS_, int VALUE_BITS_, int ROW_QUADS_, int WARPS_, int TILE_>
struct DecodeShape {
  static constexpr int D = HEAD_DIM, KEY_BITS = KEY_BITS_, VALUE_BITS = VALUE_BITS_;
  static constexpr int ROW_QUADS = ROW_QUADS_, ROWS = 4 * ROW_QUADS;  // query rows of a block
  static constexpr int WARPS = WARPS_, STAGES = 2, TILE = TILE_, STEP = WARPS * TILE;
  static constexpr int SUBTILES = TILE / 16;               // of 16 tokens, as a matrix instruction takes
  static constexpr int GROUPS = D / 32;                    // of elements with one scale
  static constexpr int ROW_TILES = (ROW_QUADS + 1) / 2;    // of 8 rows, as a matrix instruction takes

  // Bytes of one token in each plane.
  static constexpr int KEY_ROW = D * KEY_BITS / 8, VALUE_ROW = D * VALUE_BITS / 8, SCALE_ROW = GROUPS * 2;

  // Values: lane 4g + t decodes DIMS elements from g * DIMS on, PIECE at a time.
  static constexpr int DIMS = D / 8, PIECE = DIMS < 32 ? DIMS : 32, PIECES = DIMS / PIECE;
  static constexpr int LANE_BITS = DIMS * VALUE_BITS, PIECE_BITS = PIECE * VALUE_BITS;
  // Aligned words that hold a piece, wherever it begins.
  static constexpr int WORDS =
      (PIECE_BITS + (PIECE_BITS % 32 == 0 ? 0 : PIECE_BITS % 16 == 0 ? 16 : 24) + 31) / 32;

  static constexpr int AT_KEYS = 0, AT_VALUES = TILE * KEY_ROW;  // words read past the last value are not used
  static constexpr int AT_KEY_SCALES = AT_VALUES + TILE * VALUE_ROW;
  static constexpr int AT_KEY_ZEROS = AT_KEY_SCALES + TILE * SCALE_ROW;
  static constexpr int AT_VALUE_SCALES = AT_KEY_ZEROS + TILE * SCALE_ROW;
  static constexpr int STAGE_BYTES = (AT_VALUE_SCALES + TILE * SCALE_ROW + 127) / 128 * 128;

  static constexpr int AT_QUERIES = 0, AT_SUMS = ROWS * 2 * D, AT_STEPS = AT_SUMS + ROWS * GROUPS * 4;
  static constexpr int KEPT_BYTES = 48;
  static constexpr int AT_KEPT = AT_STEPS + ROWS * 4, AT_LAST = AT_KEPT + WARPS * KEPT_BYTES;
  static constexpr bool PAIRED = VALUE_BITS == 2 || VALUE_BITS == 4;  // see pair_table.cuh
  static constexpr int TABLE_BYTES = VALUE_BITS == 3 ? 0 : VALUE_BITS == 5 ? 65536 : 32768;
  static constexpr int SUMS_PER_LANE = DIMS * ROW_QUADS;
  static constexpr int MERGE_BYTES = (32 * SUMS_PER_LANE + 2 * ROWS) * 4;  // of one warp
  // Whether what a warp has to merge has room in one stage, and registers for what is to be done at the same time: the
  // ring goes on to the next split meanwhile.
  static constexpr bool MERGES_IN_STAGE = MERGE_BYTES <= STAGE_BYTES && SUMS_PER_LANE < 64;
  static constexpr bool WHOLE_IN_SHARED = MERGES_IN_STAGE && D <= 128;
  static constexpr int AT_WHOLE = (AT_LAST + 4 + 15) / 16 * 16, WHOLE_BYTES = 4 * D + 16;
  static constexpr int AT_TABLE = (AT_WHOLE + (WHOLE_IN_SHARED ? ROWS * WHOLE_BYTES : 0) + 127) / 128 * 128;
  static constexpr int AT_RING = AT_TABLE + TABLE_BYTES;
  static constexpr int SHARED_BYTES = AT_RING + WARPS * most(STAGES * STAGE_BYTES, MERGE_BYTES);

  static constexpr bool READ_ONCE = true;     // most tiles are needed by one block alone
  static constexpr bool QUERIES_IN_REGISTERS = ROW_QUADS * GROUPS <= 8;
  static constexpr bool SWIZZLED_KEYS = KEY_BITS != 5;  // its rows are no power of two
  static constexpr bool SWIZZLED_VALUES = VALUE_BITS != 3 && VALUE_BITS != 5;

  static_assert(D == 64 || D == 128 || D == 256 || D == 512, "no such head_dim");
  static_assert(TILE % 16 == 0 && TILE * SCALE_ROW % 16 == 0, "a copy moves 16 bytes");
  static_assert(!SWIZZLED_KEYS || TILE * KEY_ROW % 512 == 0, "keys are copied by whole warps");

  // Chunk c of key row r lies at chunk c ^ swizzle(r): eight rows then touch all banks once.
  KVSTOW_INLINE static constexpr int swizzle(int row) {
    return KEY_ROW >= 128 ? row & 7 : row / (128 / KEY_ROW) & (KEY_ROW / 16 - 1);
  }
  // The same of values, where `row` and the chunk count from the 128 bytes on that hold it: what lanes of
  // tokens 2t, t = 0 .. 3, read at once lies in different banks.
  KVSTOW_INLINE static constexpr int value_swizzle(int row) {
    const int t = row >> 1 & 3;
    return VALUE_ROW >= 256 ? (t & 1) | (t & 2) << 1 : VALUE_ROW >= 64 ? 2 * t : VALUE_ROW == 32 ? t & 2 : 0;
  }
};

// Axes: b rows of the batch, h KV heads, hq = h * group query heads, l query tokens, d head_dim,
// g = d / 32 groups. A query row r of a KV head is query token r / group of head r % group.
struct DecodeArgs {
  const u8* key_codes;       // [b, h, capacity, d * key_bits / 8]
  const u16* key_scales;     // [b, h, capacity, g] float16
  const u16* key_zeros;      // [b, h, capacity, g] float16
  const u8* value_codes;     // [b, h, capacity, d * value_bits / 8]
  const u16* value_scales;   // [b, h, capacity, g] float16
  const void* queries;       // [b, hq, l, d]
  const float* centroids;    // [2^value_bits]
  const signed char* signs;  // [d] +-1
  const float* sinks;        // [hq] a score of no token, whose weight has no value; null: none
  const int* starts;         // [b] the first token; null: 0
  const int* lengths;        // [b] tokens from 0 on, those of this step included; null: length
  void* output;              // [b, hq, l, d], in the dtype of the queries
  float* sums;               // [b * hq * l, n_splits, d] not normalised, in the rotated domain
  float* weights;            // [b * hq * l, n_splits, 2] greatest score in powers of 2, sum of weights
  int* arrivals;             // [b * h * row_blocks] zeros, left at zero; unused with one split
  const void *new_keys, *new_values;  // [b, h, 1, d] each row's new token, where the kernel is to store it
  const float* boundaries;   // [2^value_bits - 1], for that
  int batch, n_kv_heads, group, n_queries, capacity;
  int length;                // of every row, or of the longest
  int row_blocks;            // blocks of ROWS that the group * l rows of a KV head take
  int n_splits, chunk;       // most splits of a row; tokens of one, a multiple of TILE (in shares: the least)
  int window;                // a query token sees so many tokens, itself included; 0: all
  int stored;                // where the new token of each row comes to be; below 0: it is the last one
  float scale_log2;          // factor of the scores, times log2(e)
};

// a / b rounded down, of numbers from 0 and 1 on, where it is below 2^20: faster than the division of the language.
KVSTOW_INLINE int quotient(int a, int b) {
  const int q = (int)((float)a * reciprocal_approx((float)b)), rest = a - q * b;
  return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}

// The query rows of one block, and the tokens they see.
template <class S>
struct BlockRows {
  int row, rows;             // the first row of the KV head, and how many
  int any_low, any_high;     // a token outside is seen by no row
  int all_low, all_high;     // a token inside is seen by every row
  int start, row_high;       // row 0 of the KV head sees the tokens [low(row_high), row_high)

  KVSTOW_INLINE BlockRows(const DecodeArgs& args, int b, int row_block) {
    // A row that claims more than the caller was told of is cut, not read beyond the planes.
    start = args.starts ? most(0, args.starts[b]) : 0;
    const int longest = hidden(args.length), length = args.lengths ? least(args.lengths[b], longest) : longest;
    row = row_block * S::ROWS;
    rows = least(S::ROWS, args.group * (int)hidden(args.n_queries) - row);
    row_high = length - args.n_queries + 1;
    all_high = high_of(args, 0);
    any_high = high_of(args, rows - 1);
    any_low = low(args, all_high), all_low = low(args, any_high);
  }
  KVSTOW_INLINE int low(const DecodeArgs& args, int high) const {
    return args.window ? most(start, high - args.window) : start;
  }
  KVSTOW_INLINE int high_of(const DecodeArgs& args, int r) const { return row_high + quotient(row + r, args.group); }
  KVSTOW_INLINE int first_tile() const { return any_low / S::TILE * S::TILE; }
  // Splits of `chunk` tokens that hold one, at least one; the rest do nothing.
  KVSTOW_INLINE int splits(const DecodeArgs& args) const {
    return most(1, (any_high - first_tile() + args.chunk - 1) / args.chunk);
  }
  // Where row r of this block lies in arrays of [b, hq, l].
  KVSTOW_INLINE u64 index(const DecodeArgs& args, int b, int head, int r) const {
    const u32 at = row + r, group = args.group, query_token = quotient(at, group);
    const u64 query_head = ((u64)(u32)b * (u32)args.n_kv_heads + (u32)head) * group + (at - query_token * group);
    return query_head * (u32)args.n_queries + query_token;
  }
};

}  // namespace kvstow
