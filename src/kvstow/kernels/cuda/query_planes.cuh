// Queries as integers: n = 256 high + low, two planes of int8, and one power of two per row.
//
// A row's integers reach 2^13 to 2^14, so no element is off by more than 2^-14 of the greatest one.
// In operand B of the integer product, columns 2r and 2r + 1 are the planes of row r of four; the
// 32 elements of a group lie in the order in which key_scores.cuh finds the codes of a key.
#pragma once
#include "decode_shape.cuh"
namespace kvstow {

// Which of the 32 bytes of a column holds an element: 8 for each t, 4 for each half of the operand.
template <int KEY_BITS>
KVSTOW_INLINE int operand_byte(int element) {
  if (KEY_BITS == 8) return element % 16 / 4 * 8 + element / 16 * 4 + element % 4;
  if (KEY_BITS == 5) return element;
  if (KEY_BITS == 2) return element / 8 * 8 + element % 4 / 2 * 4 + element % 2 * 2 + element % 8 / 4;
  return element / 8 * 8 + element % 2 * 4 + element % 8 / 2;  // even elements, then odd ones
}

// The rows that a warp turns into planes. They are asked for here, before a caller asks for anything that there is
// more of, and waited for where they are written.
template <class S, Dtype T>
struct LoadedRows {
  static constexpr int PER_WARP = (S::ROWS + S::WARPS - 1) / S::WARPS;
  u32 bits[PER_WARP][S::GROUPS];  // of element `lane` of each group, as it is stored

  KVSTOW_INLINE void load(const DecodeArgs& args, const BlockRows<S>& rows, int b, int head) {
    const int lane = thread_index() & 31, warp = thread_index() >> 5;
    KVSTOW_UNROLL
    for (int k = 0; k < PER_WARP; ++k) {
      const int r = warp + k * S::WARPS;
      const bool is_row = r < rows.rows;
      const u64 from = rows.index(args, b, head, is_row ? r : 0) * S::D + lane;
      KVSTOW_UNROLL
      for (int j = 0; j < S::GROUPS; ++j) bits[k][j] = is_row ? element_bits<T>(args.queries, from + j * 32) : 0;
    }
  }

  // All warps of a block write; the caller waits for all.
  KVSTOW_INLINE void write(const DecodeArgs& args, u32 shared) const {
    const int lane = thread_index() & 31, warp = thread_index() >> 5, byte = operand_byte<S::KEY_BITS>(lane);
    KVSTOW_UNROLL
    for (int k = 0; k < PER_WARP; ++k) {
      const int r = warp + k * S::WARPS;
      if (S::ROWS % S::WARPS && r >= S::ROWS) break;
      float x[S::GROUPS];  // hidden before: the compiler would make them, and so wait, where they are asked for
      KVSTOW_UNROLL
      for (int j = 0; j < S::GROUPS; ++j) x[j] = from_bits<T>(hidden(bits[k][j]));
      u32 greatest = 0;  // as an integer: infinity and NaN are above every number
      KVSTOW_UNROLL
      for (int j = 0; j < S::GROUPS; ++j) greatest = max(greatest, __float_as_uint(x[j]) & 0x7FFFFFFFu);
      greatest = __reduce_max_sync(WHOLE_WARP, greatest);
      const bool lost = greatest >= 0x7F800000u;
      const u32 exponent = lost ? 0 : greatest & 0x7F800000u;
      const float step = __uint_as_float(max(exponent, 0x10000000u)) * 0x1p-13f;
      KVSTOW_UNROLL
      for (int j = 0; j < S::GROUPS; ++j) {
        const int n = lost ? 0 : __float2int_rn(x[j] / step), high = (n + 128) >> 8;
        const int sum = __reduce_add_sync(WHOLE_WARP, n);
        const u32 column = shared + S::AT_QUERIES + ((r / 4 * S::GROUPS + j) * 8 + r % 4 * 2) * 32;
        store8(column + byte, high);
        store8(column + 32 + byte, n - high * 256);
        // NaN here makes every score of the row NaN, as it is.
        const float kept = lost ? __uint_as_float(0x7FC00000u) : (float)sum;
        if (lane == 0) store_float(shared + S::AT_SUMS + (r * S::GROUPS + j) * 4, kept);
      }
      if (lane == 0) store_float(shared + S::AT_STEPS + r * 4, step * args.scale_log2);
    }
  }
};

// A lane's part of the planes. Row quad i is rows 4i .. 4i + 3, of which the lane's own is 4i + t.
template <class S>
struct Queries {
  static constexpr int KEPT_QUADS = S::QUERIES_IN_REGISTERS ? S::ROW_QUADS : 1;
  static constexpr int KEPT_GROUPS = S::QUERIES_IN_REGISTERS ? S::GROUPS : 1;
  u32 shared;
  u32 planes_[KEPT_QUADS][KEPT_GROUPS][2];
  float sums_[KEPT_QUADS][KEPT_GROUPS];
  float steps[S::ROW_QUADS];  // what an integer of the lane's own row is worth, in powers of two

  KVSTOW_INLINE Queries(u32 shared_) : shared(shared_) {
    const int lane = thread_index() & 31, t = lane & 3;
    KVSTOW_UNROLL
    for (int i = 0; i < S::ROW_QUADS; ++i) {
      steps[i] = load_float(shared + S::AT_STEPS + (i * 4 + t) * 4);
      if (S::QUERIES_IN_REGISTERS) KVSTOW_UNROLL
        for (int j = 0; j < S::GROUPS; ++j) read(lane, i, j, planes_[i][j], sums_[i][j]);
    }
  }
  // Operand B of quad i and group j, and the sum of the lane's own row.
  KVSTOW_INLINE void get(int i, int j, u32 (&planes)[2], float& sum) const {
    if (S::QUERIES_IN_REGISTERS) {
      planes[0] = planes_[i][j][0], planes[1] = planes_[i][j][1], sum = sums_[i][j];
    } else {
      read(threadIdx.x & 31, i, j, planes, sum);
    }
  }
  KVSTOW_INLINE void read(int lane, int i, int j, u32 (&planes)[2], float& sum) const {
    const int g = lane >> 2, t = lane & 3;
    const u32 at = shared + S::AT_QUERIES + ((i * S::GROUPS + j) * 8 + g) * 32 + t * 8;
    planes[0] = load32(at), planes[1] = load32(at + 4);
    sum = load_float(shared + S::AT_SUMS + ((i * 4 + t) * S::GROUPS + j) * 4);
  }
};

}  // namespace kvstow
