// Which tokens a block takes: a split of one row of the batch, or where rows differ in length, a share of all.
//
// Rows behind each other are a line, once for each column: a KV head and a block of its query rows. In front of a
// row's tiles lies a pause, as many tiles as could be read in the time that it takes to begin and to end a row.
// Shares of the line are equally long, so that blocks end together however rows differ:
//
//   row 0, column 0         row 0, column 1         row 1, column 0    ...
//   | pause | tiles         | pause | tiles         | pause | tiles
//   | share 0        | share 1          | share 2           | share 3
//
// A share cuts its first and its last row into splits. Every block finds its own cuts, and those of the other
// blocks that matter to it, from starts and lengths alone: one launch does it all, and the host knows neither.
#pragma once
#include "decode_shape.cuh"
namespace kvstow {

struct Split {
  int b, head, row_block;
  int index, n_splits;       // which one of how many that the row is cut into for this column
  int begin, end;            // its tokens; a multiple of TILE, and what may lie behind the row

  // Registers are short while a warp works on its tiles: it leaves here what it must know again, but for the tokens.
  template <class S>
  KVSTOW_INLINE static u32 kept(u32 shared) {
    return shared + S::AT_KEPT + (thread_index() >> 5) * S::KEPT_BYTES;
  }
  template <class S>
  KVSTOW_INLINE void keep(u32 shared) const {
    if (thread_index() & 31) return;
    store128(kept<S>(shared), b, head, row_block, index);
    store32(kept<S>(shared) + 16, n_splits);
  }
  template <class S>
  KVSTOW_INLINE void recall(u32 shared) {
    u32 x[4];
    load128(kept<S>(shared), x[0], x[1], x[2], x[3]);
    b = x[0], head = x[1], row_block = x[2], index = x[3], n_splits = load32(kept<S>(shared) + 16);
  }
};

// The split of a block where the grid says which. Grid (n_splits, n_kv_heads * row_blocks, batch); false if this row
// has fewer splits. It is found anew at each call, so that prompts need no registers to keep it.
template <class S>
KVSTOW_INLINE bool find_split(const DecodeArgs& args, Split& split) {
  const u32 column = hidden(blockIdx.y);
  split.b = hidden(blockIdx.z), split.index = hidden(blockIdx.x);
  split.head = column / args.row_blocks, split.row_block = column % args.row_blocks;
  const BlockRows<S> rows(args, split.b, split.row_block);
  split.begin = rows.first_tile() + split.index * args.chunk, split.end = split.begin + args.chunk;
  split.n_splits = rows.splits(args);
  return split.index < split.n_splits;
}

// The share of a block. Grid (shares, 1, 1). Positions on the line are counted in tiles, so that they fit in 32 bits
// where the planes fit in memory.
template <class S>
struct Share {
  static constexpr int PAUSE_BYTES = 150 * 1024;  // what one of 132 processors reads in 4.5 us at 4.5 TB/s
  static constexpr int PAUSE = PAUSE_BYTES / S::STAGE_BYTES;
  int at, end, size;         // what is left of it, and how long every share is

  // Of row b + lane: its first tile that a query sees, its room on the line, and that of all rows from b up to it, in one
  // column; no room behind the batch.
  struct Rows {
    int first = 0, room = 0, upto;
    KVSTOW_INLINE Rows(const DecodeArgs& args, int b) {
      const int lane = thread_index() & 31;
      b += lane;
      if (b < args.batch) {
        const int length = least(args.lengths[b], args.length), start = args.starts ? most(0, args.starts[b]) : 0;
        const int low = args.window ? most(start, length - args.n_queries + 1 - args.window) : start;
        first = low / S::TILE;
        room = PAUSE + most(1, (length + S::TILE - 1) / S::TILE - first);  // a row that is empty has an output too
      }
      upto = room;
      KVSTOW_UNROLL
      for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(WHOLE_WARP, upto, o);
        upto += lane >= o ? other : 0;
      }
    }
  };

  // Also gives the first rows, which `next` needs first.
  KVSTOW_INLINE Rows find(const DecodeArgs& args) {
    const Rows first(args, 0);
    int total = __shfl_sync(WHOLE_WARP, first.upto, 31);
    KVSTOW_ROLLED
    for (int b = 32; b < args.batch; b += 32) total += __reduce_add_sync(WHOLE_WARP, Rows(args, b).room);
    total *= columns(args);
    size = most(args.chunk / S::TILE, (total + gridDim.x - 1) / (int)gridDim.x);
    at = least(blockIdx.x * size, total), end = least(at + size, total);
    return first;
  }

  // The next split, false if there is none. All warps of a block find the same.
  KVSTOW_INLINE bool next(const DecodeArgs& args, const Rows& first_rows, Split& split) {
    while (at < end) {
      const int n_columns = columns(args);
      // In one column: the room of rows before b; and how many of those from b on end before `at`.
      int before = 0, b = 0, i;
      Rows rows = first_rows;
      KVSTOW_ROLLED
      for (;;) {
        i = __reduce_add_sync(WHOLE_WARP, (int)((before + rows.upto) * n_columns <= at));
        if (i < 32) break;
        before += __shfl_sync(WHOLE_WARP, rows.upto, 31), b += 32;
        rows = Rows(args, b);
      }
      const int room = __shfl_sync(WHOLE_WARP, rows.room, i), first = __shfl_sync(WHOLE_WARP, rows.first, i);
      const int row = (before + __shfl_sync(WHOLE_WARP, rows.upto, i) - room) * n_columns;
      const int column = quotient(at - row, room);
      const int origin = row + column * room;  // where the row begins on the line, in this column
      const int shortest = args.chunk / S::TILE;
      // The first share that ends behind the row's first tile, as cut, and the last one that begins before its end.
      const int first_end = least(room, PAUSE + shortest);
      const int last_begin = most(room - shortest, first_end - 1);
      const int first_share = quotient(origin + first_end - 1, size), last_share = quotient(origin + last_begin, size);
      split.index = blockIdx.x - first_share, split.n_splits = last_share - first_share + 1;
      split.b = b + i, split.head = quotient(column, args.row_blocks);
      split.row_block = column - split.head * args.row_blocks;
      split.begin = (first + cut(at - origin, room, shortest)) * S::TILE;
      at = least(end, origin + room);
      split.end = (first + cut(at - origin, room, shortest)) * S::TILE;
      if (split.begin != split.end) return true;
    }
    return false;
  }

  KVSTOW_INLINE void keep(u32 shared) const {
    if ((thread_index() & 31) == 0) store128(Split::kept<S>(shared) + 32, at, end, size, 0);
  }
  KVSTOW_INLINE void recall(u32 shared) {
    u32 x[4];
    load128(Split::kept<S>(shared) + 32, x[0], x[1], x[2], x[3]);
    at = x[0], end = x[1], size = x[2];
  }

 private:
  KVSTOW_INLINE static int columns(const DecodeArgs& args) { return args.n_kv_heads * args.row_blocks; }

  // The tile at which a row is cut by shares that meet at x of its room. What would be too short joins its neighbour.
  KVSTOW_INLINE static int cut(int x, int room, int shortest) {
    if (x <= 0) return 0;
    const int tiles = room - PAUSE, tile = x - PAUSE;
    if (x >= room) return tiles;
    return tile < shortest ? 0 : tile > tiles - shortest ? tiles : tile;
  }
};

}  // namespace kvstow
