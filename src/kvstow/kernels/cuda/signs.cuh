// The signs of the rotation that a lane needs where it has the dims E * lane on of a vector.
#pragma once
#include "primitives.cuh"
namespace kvstow {

template <int D>
struct Signs {
  static constexpr int E = D / 32, WORDS = (E + 3) / 4;
  u32 bytes[WORDS];

  KVSTOW_INLINE explicit Signs(const signed char* signs) {
    const signed char* from = signs + (thread_index() & 31) * E;
    KVSTOW_UNROLL
    for (int w = 0; w < WORDS; ++w) bytes[w] = E == 2 ? *(const u16*)from : ((const u32*)from)[w];
  }
  KVSTOW_INLINE float times(float x, int e) const {  // a sign is +1 or -1
    return __uint_as_float(__float_as_uint(x) ^ (bytes[e / 4] << (24 - e % 4 * 8) & 0x80000000u));
  }
};

}  // namespace kvstow
