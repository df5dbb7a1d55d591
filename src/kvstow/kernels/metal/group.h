// One group of 32 elements in one lane: exact arithmetic, loading, packing codes.
//
// The codec is defined bit for bit (codec/reference.py): float32, true division, sums in the stated
// order, no fused multiply-add. Safe math lets Metal's compiler fuse a product and a sum of one
// expression, so each operation is a function of its own, and fusing is forbidden.
#pragma once
#include "primitives.h"
#pragma METAL fp contract(off)
namespace kvstow {

constant constexpr float EPS = 1e-8f;
constant constexpr float FLOAT16_MAX = 65504.f;

inline float plus(float a, float b) { return a + b; }
inline float minus(float a, float b) { return a - b; }
inline float times(float a, float b) { return a * b; }
inline float over(float a, float b) { return a / b; }

// Unlike those of Metal, NaN if an element is.
inline float least(float a, float b) { return a != a || a < b ? a : b; }
inline float most(float a, float b) { return a != a || a > b ? a : b; }

inline ushort bits_of(half x) { return as_type<ushort>(x); }
inline bool is_finite(half x) { return (bits_of(x) & 0x7C00) != 0x7C00; }
inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7F800000u) != 0x7F800000u; }
// The least float16 not below a positive number within float16.
inline half half_above(float x) {
  const half nearest = half(x);
  return float(nearest) < x ? as_type<half>(ushort(bits_of(nearest) + 1)) : nearest;
}

template <class Element>
void load_group(const device Element* from, thread float (&x)[32]) {
  KVSTOW_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = float(from[i]);
}

// The 32 codes of a group as BITS words of one little-endian bit stream.
template <int BITS>
struct BitStream {
  uint words[BITS];
  BitStream() {
    KVSTOW_UNROLL
    for (int i = 0; i < BITS; ++i) words[i] = 0;
  }
  void put(int i, uint code) {  // code < 2^BITS
    const int at = i * BITS, word = at / 32, shift = at % 32;
    words[word] |= code << shift;
    if (shift + BITS > 32) words[min(word + 1, BITS - 1)] |= code >> (32 - shift);
  }
  void store(device uint* to) const {
    KVSTOW_UNROLL
    for (int i = 0; i < BITS; ++i) to[i] = words[i];
  }
};

}  // namespace kvstow
