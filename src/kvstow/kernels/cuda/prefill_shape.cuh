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
// And a block's shared memory. Rows of 2 D bytes are swizzled: chunk c of 16 bytes of row r lies at c ^ r % 8.
//
//   AT_QUERIES   ROWS rows of D float16
//   AT_TABLE     centroids, as in decode_shape.cuh
//   AT_HALVES    twice: TILE rows of decoded keys, then TILE rows of decoded values, D float16 each
//   AT_RING      WARPS rings
template <int HEAD_DIM, int KEY_BITS_, int VALUE_BITS_, int WARPS_>
struct PrefillShape {
  static constexpr int D = HEAD_DIM, KEY_BITS = KEY_BITS_, VALUE_BITS = VALUE_BITS_, WARPS = WARPS_;
  static constexpr int GROUPS = D / 32;
  static constexpr int ROWS = 16 * WARPS;               // query rows of a block, 16 for each warp
  static constexpr int OWN = 32 / GROUPS;               // tokens of a tile that a warp copies and decodes
  static constexpr int TILE = OWN * WARPS;
  static constexpr int AT_ONCE = least(TILE, D <= 128 ? 64 : 32);  // tokens between two changes of the softmax
  static constexpr int ROW_BYTES = 2 * D;               // of a query, a key or a value in float16

  struct Ring {  // what tile_ring.cuh asks for
    static constexpr int TILE = OWN, STEP = PrefillShape::TILE, STAGES = 2;
    static constexpr int KEY_ROW = D * KEY_BITS / 8, VALUE_ROW = D * VALUE_BITS / 8, SCALE_ROW = GROUPS * 2;
    static constexpr int AT_KEYS = 0, AT_KEY_SCALES = 128 * KEY_BITS, AT_KEY_ZEROS = AT_KEY_SCALES + 64;
    static constexpr int AT_VALUE_SCALES = AT_KEY_ZEROS + 64, AT_VALUES = AT_VALUE_SCALES + 64;
    static constexpr int STAGE_BYTES = 128 * (KEY_BITS + VALUE_BITS + 2);
    static constexpr bool SWIZZLED_KEYS = false, SWIZZLED_VALUES = false;
    KVSTOW_INLINE static constexpr int swizzle(int) { return 0; }
    KVSTOW_INLINE static constexpr int value_swizzle(int) { return 0; }
  };

  static constexpr int HALVES_BYTES = 2 * TILE * ROW_BYTES;  // of one tile's keys and values
  static constexpr int AT_QUERIES = 0, AT_TABLE = ROWS * ROW_BYTES;
  static constexpr int AT_HALVES = AT_TABLE + (VALUE_BITS <= 3 ? 0 : 128 << VALUE_BITS);
  static constexpr int AT_RING = AT_HALVES + 2 * HALVES_BYTES;
  static constexpr int SHARED_BYTES = AT_RING + WARPS * Ring::STAGES * Ring::STAGE_BYTES;

  static constexpr bool QUERIES_IN_REGISTERS = D <= 128;

  static_assert(D == 64 || D == 128 || D == 256, "sums of 16 rows of 512 do not fit in registers");
  static_assert(TILE % AT_ONCE == 0 && AT_ONCE % 16 == 0, "matrix instructions take 16 tokens");
};

}  // namespace kvstow
