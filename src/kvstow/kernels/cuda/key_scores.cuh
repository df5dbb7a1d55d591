// Scores of one subtile of 16 tokens, from the stored codes: integers first, the scales afterwards.
//
//   q . k = sum over groups of scale * (sum of q * code + zero * sum of q)
//
// The inner sum is exact, on int8 matrix units; the rest is one float32 product and sum per group.
#pragma once
#include "query_planes.cuh"
namespace kvstow {

// The codes of the two groups 2j, 2j + 1 as operands A: rows are tokens, 32 codes per row.
template <class S>
struct KeyReader {
  u32 at, scales_at;  // in a stage

  KVSTOW_INLINE KeyReader() {
    const int lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
    if (S::KEY_BITS >= 8 || S::KEY_BITS == 4)
      at = (lane & 15) * S::KEY_ROW + ((lane >> 4) ^ S::swizzle(lane & 15)) * 16;
    else if (S::KEY_BITS == 5)
      at = g * S::KEY_ROW + t * 4;
    else
      at = g * S::KEY_ROW + S::swizzle(g) * 16 + t * 2;
    scales_at = S::AT_KEY_SCALES + g * S::SCALE_ROW;
    asm volatile("" : "+r"(at), "+r"(scales_at));  // kept in registers, not made again for every tile
  }

  KVSTOW_INLINE void read(u32 stage, int subtile, int pair, u32 (&even)[4], u32 (&odd)[4]) const {
    const u32 rows = subtile * 16 * S::KEY_ROW;
    if constexpr (S::KEY_BITS == 8) {
      load_tiles(stage + (at ^ pair * 64) + rows, even);
      load_tiles(stage + (at ^ (pair * 64 + 32)) + rows, odd);
    } else if constexpr (S::KEY_BITS == 4) {  // a byte is an even code and, above it, an odd one
      u32 both[4];
      load_tiles(stage + (at ^ pair * 32) + rows, both);
      spread(both[0], both[1], even, 4, 0x0F0F0F0Fu);
      spread(both[2], both[3], odd, 4, 0x0F0F0F0Fu);
    } else if constexpr (S::KEY_BITS == 5) {
      read5(stage + at + rows + pair * 40, even);
      read5(stage + at + rows + pair * 40 + 20, odd);
    } else {
      const u32 chunk = stage + (at ^ pair * 16) + rows;
      read2(chunk, even);
      read2(chunk + 8, odd);
    }
  }

  KVSTOW_INLINE static void spread(u32 upper, u32 lower, u32 (&a)[4], int shift, u32 mask) {
    a[0] = upper & mask, a[1] = lower & mask;
    a[2] = upper >> shift & mask, a[3] = lower >> shift & mask;
  }

  // Lane t's eight codes are 40 bits from bit 8t of word t of the group's five words.
  KVSTOW_INLINE static void read5(u32 word, u32 (&a)[4]) {
    const u32 shift = (threadIdx.x & 3) * 8;
    KVSTOW_UNROLL
    for (int e = 0; e < 2; ++e) {
      const u32 low = load32(word + e * 8 * S::KEY_ROW), high = load32(word + e * 8 * S::KEY_ROW + 4);
      const u32 first = shift_pair(low, high, shift), rest = high >> shift;
      a[e] = bytes_of_5(first);
      a[2 + e] = bytes_of_5(shift_pair(first, rest, 20));
    }
  }
  KVSTOW_INLINE static u32 bytes_of_5(u32 x) {  // four codes from bit 0 on, one in each byte
    const u32 tens = (x & 0x3FFu) + (x & 0xFFC00u) * 64;   // bits 0..9 and 16..25
    const u32 upper = tens & 0x03E003E0u;
    return tens + upper * 7;                               // bits 5..9 of each move up by three
  }

  // Lane t's eight codes are the two bytes 2t, 2t + 1 of the group's eight. Codes 0, 4, 1, 5 become four bytes, and so do
  // 2, 6, 3, 7: two of either are in place, the others 14 bits further down, and what is between is masked.
  KVSTOW_INLINE static void read2(u32 at, u32 (&a)[4]) {
    KVSTOW_UNROLL
    for (int e = 0; e < 2; ++e) {
      const u32 both = load16(at + e * 8 * S::KEY_ROW);
      a[e] = (both | both << 14) & 0x03030303u;
      a[2 + e] = (both >> 4 | both << 10) & 0x03030303u;
    }
  }
};

// Scores of tokens g + 8e and the lane's own rows 4i + t, in units of the row's step.
template <class S>
KVSTOW_INLINE void score_subtile(const Queries<S>& queries, const KeyReader<S>& reader, u32 stage,
                                 int subtile, float (&scores)[2][S::ROW_QUADS]) {
  constexpr int PAIRS = S::GROUPS / 2;
  constexpr bool AHEAD = PAIRS * S::ROW_QUADS <= 8;  // read all scales first, where registers allow
  u32 scales[2][AHEAD ? PAIRS : 1], zeros[2][AHEAD ? PAIRS : 1];
  auto read_scales = [&](int pair, int slot) {
    KVSTOW_UNROLL
    for (int e = 0; e < 2; ++e) {
      const u32 at = stage + reader.scales_at + (subtile * 16 + e * 8) * S::SCALE_ROW + pair * 4;
      scales[e][slot] = load32(at);
      zeros[e][slot] = load32(at + S::TILE * S::SCALE_ROW);
    }
  };
  if (AHEAD) KVSTOW_UNROLL
    for (int pair = 0; pair < PAIRS; ++pair) read_scales(pair, pair);
  auto add_group = [&](int group, int slot, const u32 (&codes)[4]) {
    float scale[2], zero[2];
    KVSTOW_UNROLL
    for (int e = 0; e < 2; ++e) {
      scale[e] = group & 1 ? high_half(scales[e][slot]) : low_half(scales[e][slot]);
      zero[e] = group & 1 ? high_half(zeros[e][slot]) : low_half(zeros[e][slot]);
    }
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) {
      u32 planes[2];
      float sum;
      queries.get(i, group, planes, sum);
      int c[4];
      multiply_int8<S::KEY_BITS == 8>(c, codes, planes);
      KVSTOW_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float x = fmaf(zero[e], sum, (float)(c[2 * e] * 256 + c[2 * e + 1]));
        scores[e][i] = group ? fmaf(scale[e], x, scores[e][i]) : scale[e] * x;
      }
    }
  };
  KVSTOW_UNROLL
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int slot = AHEAD ? pair : 0;
    if (!AHEAD) read_scales(pair, slot);
    u32 even[4], odd[4];
    reader.read(stage, subtile, pair, even, odd);
    add_group(2 * pair, slot, even);
    add_group(2 * pair + 1, slot, odd);
  }
}

}  // namespace kvstow
