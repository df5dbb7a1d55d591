// What a prefill kernel is specialised for, and how it lays out shared memory.
#pragma once
#include "decode_shape.cuh"
namespace kvstow {

// A tile of TILE tokens is copied as it is stored, each warp its own OWN tokens of it into a ring of its
// own (tile_ring.cuh), where a lane finds one group of one token:
//
//   AT_KEYS           32 groups of key codes, as stored
//   AT_KEY_SCALES     32 float16
//   AT_KEY_ZEROS      32 float16
//   AT_VALUE_SCALES   32 float16
//   AT_VALUES         32 groups of value codes, as stored
//
// And a block's shared memory. Rows of 2 D bytes are swizzled, see `place`.
//
//   AT_QUERIES   ROWS rows of D float16
//   AT_ROWS      what is known of each of ROWS rows, 16 bytes; see prefill_rows.cuh
//   AT_TABLE     centroids, as in decode_shape.cuh
//   AT_HALVES    twice: TILE rows of decoded keys, then TILE rows of decoded values, D float16 each
//   AT_RING      WARPS rings
template <int HEAD_DIM, int KEY_BITS_, int VALUE_BITS_, int ROW_TILES_, int WARPS_>
struct PrefillShape {
  static constexpr int D = HEAD_DIM, KEY_BITS = KEY_BITS_, VALUE_BITS = VALUE_BITS_, WARPS = WARPS_;
  static constexpr int ROW_TILES = ROW_TILES_;          // of 16 query rows, of a warp
  static constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARP_ROWS * WARPS;  // query rows of a warp, of a block
  static constexpr int GROUPS = D / 32;
  static constexpr int OWN = 32 / GROUPS;               // tokens of a tile that a warp copies and decodes
  static constexpr int TILE = OWN * WARPS;
  static constexpr int ROW_BYTES = 2 * D;               // of a query, a key or a value in float16

  // A lane's sums are ROW_TILES * D / 2 registers of 255. What else stays in registers takes what these leave.
  static constexpr int SUMS = ROW_TILES * D / 2;
  static constexpr int AT_ONCE = least(TILE, SUMS < 128 ? 64 : 32);  // tokens between two changes of the softmax
  static constexpr int QUERIES_KEPT = SUMS < 128 ? D / 16 : D == 128 ? 4 : 0;  // of D / 16 operands of a row tile

  struct Ring {  // what tile_ring.cuh asks for
    static constexpr int TILE = OWN, STEP = PrefillShape::TILE, STAGES = 2;
    static constexpr bool READ_ONCE = false;  // other query rows of the KV head need the tile too
    static constexpr int KEY_ROW = D * KEY_BITS / 8, VALUE_ROW = D * VALUE_BITS / 8, SCALE_ROW = GROUPS * 2;
    static constexpr int AT_KEYS = 0, AT_KEY_SCALES = 128 * KEY_BITS, AT_KEY_ZEROS = AT_KEY_SCALES + 64;
    static constexpr int AT_VALUE_SCALES = AT_KEY_ZEROS + 64, AT_VALUES = AT_VALUE_SCALES + 64;
    static constexpr int STAGE_BYTES = 128 * (KEY_BITS + VALUE_BITS + 2);
    static constexpr bool SWIZZLED_KEYS = false, SWIZZLED_VALUES = false;
    KVSTOW_INLINE static constexpr int swizzle(int) { return 0; }
    KVSTOW_INLINE static constexpr int value_swizzle(int) { return 0; }
  };

  // What merge.cuh asks for; the queries are not needed any more.
  static constexpr bool WHOLE_IN_SHARED = false;
  static constexpr int AT_LAST = 0, AT_WHOLE = 0, WHOLE_BYTES = 0;

  static constexpr int HALVES_BYTES = 2 * TILE * ROW_BYTES;  // of one tile's keys and values
  static constexpr int AT_QUERIES = 0, AT_ROWS = ROWS * ROW_BYTES, AT_TABLE = AT_ROWS + ROWS * 16;
  static constexpr int AT_HALVES = AT_TABLE + (VALUE_BITS <= 3 ? 0 : 128 << VALUE_BITS);
  static constexpr int AT_RING = AT_HALVES + 2 * HALVES_BYTES;
  static constexpr int SHARED_BYTES = AT_RING + WARPS * Ring::STAGES * Ring::STAGE_BYTES;

  static_assert(D == 64 || D == 128 || D == 256, "sums of 16 rows of 512 do not fit in registers");
  static_assert(ROW_TILES * D <= 256, "nor do those of 32 rows of 256");
  static_assert(TILE % AT_ONCE == 0 && AT_ONCE % 16 == 0, "matrix instructions take 16 tokens");

  // Chunk c of 16 bytes of row r lies at chunk place(c) ^ r % 8 of the row. So eight rows of one chunk, as matrix
  // operands are read, and what eight lanes write at once when they decode, each touch all banks once.
  KVSTOW_INLINE static constexpr int place(int c) { return c ^ (c >> 3) * (256 / D); }
  // The address of chunk c + x of a row, x < 2 and an even c, from that of chunk x of row 0 on: there are four that
  // differ by more than a constant. Rows begin at multiples of 128.
  KVSTOW_INLINE static constexpr u32 further(u32 at, int c) {
    return (at ^ place(c) % 8 * 16) + place(c) / 8 * 128;
  }
};

}  // namespace kvstow
