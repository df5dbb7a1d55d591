// Names and small functions that all kernels use.
//
// For Metal 3.1 and newer, C++14. What MLX puts in front of a kernel has `bfloat16_t`. Math is safe:
// -INFINITY and NaN mean something here.
#pragma once
#include <metal_stdlib>
#pragma METAL fp math_mode(safe)
namespace kvstow {
using namespace metal;

#define KVSTOW_UNROLL _Pragma("clang loop unroll(full)")

constant constexpr float LOG2_E = 1.4426950408889634f;
constant constexpr int LANES = 32;  // of a simdgroup

// 1 / sqrt(D), rounded to float32.
template <int D>
constexpr float inverse_root() {
  return D == 64 ? 0.125f : D == 128 ? 0.088388346f : D == 256 ? 0.0625f : 0.044194173f;
}

// The first N_BITS bits of a stream, in words. It begins at an even address, and no other byte is read.
template <int N_BITS>
struct Bits {
  static constexpr constant int N_WORDS = (N_BITS + 31) / 32;
  uint words[N_WORDS];

  Bits(const device uchar* from) {
    if (N_BITS % 32 == 0) {
      const device uint* source = (const device uint*)from;
      KVSTOW_UNROLL
      for (int i = 0; i < N_WORDS; ++i) words[i] = source[i];
    } else {
      const device ushort* source = (const device ushort*)from;
      KVSTOW_UNROLL
      for (int i = 0; i < N_WORDS; ++i) words[i] = 0;
      KVSTOW_UNROLL
      for (int i = 0; i < N_BITS / 16; ++i) words[i / 2] |= uint(source[i]) << (i % 2 * 16);
    }
  }
  // Code i of BITS bits each; a code may lie in two words.
  template <int BITS>
  uint code(int i) const {
    const int at = i * BITS, word = at / 32, shift = at % 32;
    uint x = words[word] >> shift;
    if (shift + BITS > 32) x |= words[min(word + 1, N_WORDS - 1)] << (32 - shift);
    return x & ((1u << BITS) - 1);
  }
};

}  // namespace kvstow
