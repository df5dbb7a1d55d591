// A warp's ring of tiles: it copies the next one while it works on this one.
//
// Nothing outside [low, high) is read, not even what lies in the same 16 bytes; zeros stand for it.
#pragma once
#include "decode_shape.cuh"
namespace kvstow {

template <class S>
struct TileRing {
  static constexpr int CHUNKS = S::KEY_ROW / 16;                      // of a key row
  static constexpr int KEY_CHUNKS = S::TILE * S::KEY_ROW / 16;        // of a tile
  static constexpr int VALUE_CHUNKS = S::TILE * S::VALUE_ROW / 16;
  static constexpr int SCALE_CHUNKS = S::TILE * S::SCALE_ROW / 16;    // of one of three planes
  static constexpr int KEY_COPIES = (KEY_CHUNKS + 31) / 32;           // of one lane
  static constexpr int VALUE_COPIES = (VALUE_CHUNKS + 31) / 32;
  static constexpr int SCALE_COPIES = (3 * SCALE_CHUNKS + 31) / 32;

  const u8 *keys, *values, *scales[SCALE_COPIES];  // what this lane copies next
  u32 key_slot, value_slot;                        // where its first chunks go in a stage
  u32 first, last, filling;                        // stages
  int tile, low, high, end;                        // token of the next tile; what is read; where to stop

  KVSTOW_INLINE explicit TileRing(u32 ring) {
    const int lane = thread_index() & 31;
    first = ring, last = ring + (S::STAGES - 1) * S::STAGE_BYTES;
    key_slot = lane * 16;
    if (S::SWIZZLED_KEYS) {
      const int row = lane / CHUNKS;
      key_slot = row * S::KEY_ROW + (lane % CHUNKS ^ S::swizzle(row)) * 16;
    }
    value_slot = S::AT_VALUES + lane * 16;
    if (S::SWIZZLED_VALUES) value_slot ^= S::value_swizzle(lane * 16 / S::VALUE_ROW) * 16;
  }

  // Copies tiles at, at + STEP, ... below end from here on, the first one to the first stage. The last stage is free until
  // the first `advance`.
  KVSTOW_INLINE void start(const DecodeArgs& args, u64 plane_row, int at, int low_, int high_, int end_) {
    const int lane = thread_index() & 31;
    const u64 token = plane_row * args.capacity + at;
    filling = first, tile = at, low = low_, high = high_, end = end_;
    keys = args.key_codes + token * S::KEY_ROW + lane * 16;
    values = args.value_codes + token * S::VALUE_ROW + lane * 16;
    KVSTOW_UNROLL
    for (int i = 0; i < SCALE_COPIES; ++i) {
      const int chunk = lane + 32 * i;  // compared, since NVRTC 13.0 crashes where it is divided
      const u64 plane = chunk < SCALE_CHUNKS       ? (u64)args.key_scales
                        : chunk < 2 * SCALE_CHUNKS ? (u64)args.key_zeros
                                                   : (u64)args.value_scales;
      scales[i] = (const u8*)(plane + token * S::SCALE_ROW + chunk % SCALE_CHUNKS * 16);
    }
    __syncwarp();  // the last tile of another split may be in use
    KVSTOW_UNROLL
    for (int i = 0; i < S::STAGES - 1; ++i) copy_next();
  }

  KVSTOW_INLINE u32 after(u32 stage) const { return stage == last ? first : stage + S::STAGE_BYTES; }

  // Waits for the oldest tile, which the caller then finds at `after` the one before, and copies on.
  KVSTOW_INLINE void advance() {
    wait_for_all_but<S::STAGES - 2>();
    __syncwarp();
    copy_next();
  }

  KVSTOW_INLINE void copy_next() {
    if (tile < end) {
      if (low <= tile && tile + S::TILE <= high) copy_whole();
      else copy_part();
      keys += S::STEP * S::KEY_ROW;
      values += S::STEP * S::VALUE_ROW;
      KVSTOW_UNROLL
      for (int i = 0; i < SCALE_COPIES; ++i) scales[i] += S::STEP * S::SCALE_ROW;
      tile += S::STEP;
      filling = after(filling);
    }
    commit_copies();
  }

  KVSTOW_INLINE u32 key_at(int i) const {  // the slots of a lane differ by bits that do not carry
    const u32 moved = S::SWIZZLED_KEYS ? key_slot ^ S::swizzle(i * 32 / CHUNKS) * 16 : key_slot;
    return filling + moved + i * 512;
  }

  KVSTOW_INLINE u32 value_at(int i) const {
    const u32 moved = S::SWIZZLED_VALUES ? value_slot ^ S::value_swizzle(i * 512 / S::VALUE_ROW) * 16 : value_slot;
    return filling + moved + i * 512;
  }

  KVSTOW_INLINE void copy_whole() {
    const int lane = threadIdx.x & 31;
    KVSTOW_UNROLL
    for (int i = 0; i < KEY_COPIES; ++i)
      if (KEY_CHUNKS % 32 == 0 || lane + 32 * i < KEY_CHUNKS) copy16<S::READ_ONCE>(key_at(i), keys + i * 512);
    KVSTOW_UNROLL
    for (int i = 0; i < VALUE_COPIES; ++i)
      if (VALUE_CHUNKS % 32 == 0 || lane + 32 * i < VALUE_CHUNKS)
        copy16<S::READ_ONCE>(value_at(i), values + i * 512);
    KVSTOW_UNROLL
    for (int i = 0; i < SCALE_COPIES; ++i)
      if (3 * SCALE_CHUNKS % 32 == 0 || lane + 32 * i < 3 * SCALE_CHUNKS)
        copy16<S::READ_ONCE>(filling + S::AT_KEY_SCALES + lane * 16 + i * 512, scales[i]);
  }

  KVSTOW_INLINE void copy_part() {
    const int lane = threadIdx.x & 31;
    const int from = most(low - tile, 0), to = most(least(high - tile, S::TILE), 0);  // tokens of the tile
    KVSTOW_ROLLED
    for (int i = 0; i < KEY_COPIES; ++i)
      if (lane + 32 * i < KEY_CHUNKS)
        copy_chunk(key_at(i), keys + i * 512, (lane + 32 * i) * 16, from * S::KEY_ROW, to * S::KEY_ROW);
    KVSTOW_ROLLED
    for (int i = 0; i < VALUE_COPIES; ++i)
      if (lane + 32 * i < VALUE_CHUNKS)
        copy_chunk(value_at(i), values + i * 512, (lane + 32 * i) * 16, from * S::VALUE_ROW, to * S::VALUE_ROW);
    KVSTOW_UNROLL
    for (int i = 0; i < SCALE_COPIES; ++i)
      if (lane + 32 * i < 3 * SCALE_CHUNKS)
        copy_chunk(filling + S::AT_KEY_SCALES + lane * 16 + i * 512, scales[i],
                   (lane + 32 * i) % SCALE_CHUNKS * 16, from * S::SCALE_ROW, to * S::SCALE_ROW);
  }

  // The 16 bytes at byte `at` of a plane's tile, of which [from, to) may be read.
  KVSTOW_INLINE static void copy_chunk(u32 slot, const u8* source, int at, int from, int to) {
    if (at >= from) {
      copy16_first(slot, source, most(0, least(16, to - at)));
    } else {  // rows are whole words, not whole chunks
      KVSTOW_UNROLL
      for (int w = 0; w < 16; w += 4)
        copy4_first(slot + w, source + w, at + w >= from && at + w < to ? 4 : 0);
    }
  }
};

}  // namespace kvstow
