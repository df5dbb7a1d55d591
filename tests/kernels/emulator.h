// Runs the device source on a CPU: stands for primitives.cuh, and for what CUDA itself provides.
//
// A block's threads are fibers (fibers.h). Where the threads of a warp exchange something, each leaves
// its part, waits until all have, and takes what it needs. Matrix instructions are written out after
// their description in primitives.cuh. Copies are done when they are waited for, so a missing wait
// is found here, and a missing barrier mostly not; nothing is said of speed.
#include "fibers.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define KVSTOW_INLINE inline
#define KVSTOW_UNROLL
#define KVSTOW_ROLLED

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

inline uint32_t left[32][32][6];  // by warp and lane

template <class T>
T exchange(unsigned mask, T x, unsigned from) {
  static_assert(sizeof(T) == 4);
  std::memcpy(left[warp()][lane()], &x, 4);
  meet_lanes(mask);
  T got;
  std::memcpy(&got, left[warp()][from % 32], 4);
  meet_lanes(mask);
  return got;
}

}  // namespace emulator

#define threadIdx (emulator::thread)
#define blockIdx (emulator::block)
#define gridDim (emulator::grid)

// ---- what CUDA provides ----------------------------------------------------------------------------

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by) {
  return emulator::exchange(mask, x, emulator::lane() ^ by);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by) {
  const int lane = emulator::lane();
  return emulator::exchange(mask, x, lane < by ? lane : lane - by);
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  return emulator::exchange(mask, x, from);
}
template <class T, class F>
T reduce(unsigned mask, T x, F f) {
  emulator::left[emulator::warp()][emulator::lane()][0] = (uint32_t)x;
  emulator::meet_lanes(mask);
  T result = x;
  bool first = true;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      const T other = (T)emulator::left[emulator::warp()][i][0];
      result = first ? other : f(result, other);
      first = false;
    }
  emulator::meet_lanes(mask);
  return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return reduce(mask, x, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline int __reduce_add_sync(unsigned mask, int x) {
  return reduce(mask, x, [](int a, int b) { return a + b; });
}
inline bool __any_sync(unsigned mask, bool x) {
  return reduce(mask, (unsigned)x, [](unsigned a, unsigned b) { return a | b; });
}
inline void __syncwarp() { emulator::meet_lanes(0xFFFFFFFFu); }
inline void __syncthreads() { emulator::meet(emulator::of_block, (int)emulator::fibers.size()); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned __float_as_uint(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
// Products and sums of two float32 are exact enough in 113 bits to be rounded once more, downwards.
inline float rounded_down(__float128 exact) {
  const float nearest = (float)exact;
  return nearest > exact ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __fmul_rd(float a, float b) { return rounded_down((__float128)a * b); }
inline float __fmaf_rd(float a, float b, float c) { return rounded_down((__float128)a * b + c); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int __float2int_rn(float x) {  // saturates; NaN becomes 0
  if (x != x) return 0;
  if (x >= 2147483648.f) return 2147483647;
  return x <= -2147483648.f ? -2147483647 - 1 : (int)std::nearbyint(x);
}
inline unsigned __float2uint_rz(float x) {
  if (!(x > 0.f)) return 0;
  return x >= 4294967296.f ? 0xFFFFFFFFu : (unsigned)x;
}

// ---- primitives.cuh --------------------------------------------------------------------------------

namespace kvstow {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.4426950408889634f;
enum Dtype { FLOAT16, BFLOAT16, FLOAT32 };

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }
inline u32 hidden(u32 x) { return x; }
inline u32 thread_index() { return threadIdx.x; }
inline float minus_infinity() { return -INFINITY; }

inline u16 to_float16(float x) {
  const _Float16 h = (_Float16)x;
  u16 bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}
inline float from_float16(u16 bits) {
  _Float16 h;
  std::memcpy(&h, &bits, 2);
  return (float)h;
}
inline u16 to_float16_above(float x) {  // of a positive number within float16
  const u16 nearest = to_float16(x);
  return from_float16(nearest) < x ? nearest + 1 : nearest;
}
inline u16 to_bfloat16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float least_or_nan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
inline float most_or_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float low_half(u32 pair) { return from_float16((u16)pair); }
inline float high_half(u32 pair) { return from_float16((u16)(pair >> 16)); }
inline u32 two_halves(float low, float high) { return to_float16(low) | (u32)to_float16(high) << 16; }
inline u32 multiply_halves(u32 a, u32 b) {
  return two_halves(low_half(a) * low_half(b), high_half(a) * high_half(b));
}
inline u32 two_finite_halves(float low, float high) {
  u16 halves[2] = {to_float16(low), to_float16(high)};
  for (u16& h : halves)
    if (from_float16(h) > 65504.f || from_float16(h) < -65504.f) h = h & 0x8000 ? 0xFBFF : 0x7BFF;
  return halves[0] | (u32)halves[1] << 16;
}
// use(a, b) of the lower halves and of the upper ones
template <class Use>
u32 of_halves(u32 a, u32 b, Use use) {
  return use((u16)a, (u16)b) | (u32)use((u16)(a >> 16), (u16)(b >> 16)) << 16;
}
template <Dtype T>
float narrow(u16 bits) {
  return T == BFLOAT16 ? __uint_as_float((u32)bits << 16) : from_float16(bits);
}
template <Dtype T>
u32 least_pair_or_nan(u32 a, u32 b) {
  return of_halves(a, b, [](u16 x, u16 y) {
    const float least = least_or_nan(narrow<T>(x), narrow<T>(y));
    return T == BFLOAT16 ? to_bfloat16(least) : to_float16(least);
  });
}
template <Dtype T>
u32 most_pair_or_nan(u32 a, u32 b) {
  return of_halves(a, b, [](u16 x, u16 y) {
    const float most = most_or_nan(narrow<T>(x), narrow<T>(y));
    return T == BFLOAT16 ? to_bfloat16(most) : to_float16(most);
  });
}
inline u32 least_fields(u32 a, u32 b) {  // float16 without signs, the other one where one is NaN
  return of_halves(a, b, [](u16 x, u16 y) {
    const u16 least = (x & 0x7FFF) < (y & 0x7FFF) ? x & 0x7FFF : y & 0x7FFF;
    return (u16)(least > 0x7C00 ? 0x7FFF : least);
  });
}
inline u32 least_of_fields(u32 a, u32 b) { return least_fields(a, b); }
inline int reciprocal_is_off = 0;  // units in the last place: the instruction may err by one
inline int count_in_order(int* at) { return (*at)++; }
inline float reciprocal_approx(float x) {
  return __uint_as_float(__float_as_uint(1.f / x) + reciprocal_is_off);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline u32 pick_bytes(u32 a, u32 b, u32 s) {
  const u64 bytes = a | (u64)b << 32;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 pick = s >> 4 * i & 15, byte = (u32)(bytes >> 8 * (pick & 7)) & 255;
    d |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return d;
}
inline u32 shift_pair(u32 low, u32 high, u32 n) { return (u32)((low | (u64)high << 32) >> (n & 31)); }

template <Dtype T>
u32 element_bits(const void* p, u64 at) {
  return T == FLOAT32 ? ((const u32*)p)[at] : ((const u16*)p)[at];
}
template <Dtype T>
float from_bits(u32 bits) {
  return T == FLOAT32 ? __uint_as_float(bits) : T == BFLOAT16 ? __uint_as_float(bits << 16) : low_half(bits);
}
template <Dtype T>
float element(const void* p, u64 at) {
  return from_bits<T>(element_bits<T>(p, at));
}
template <Dtype T>
void set_element(void* p, u64 at, float x) {
  if (T == FLOAT32) ((float*)p)[at] = x;
  else ((u16*)p)[at] = T == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

inline u32 shared_address(const void* p) { return (u32)((const char*)p - emulator::shared.data()); }
template <class T>
T load(u32 at) {
  T x;
  std::memcpy(&x, &emulator::shared.at(at + sizeof(T) - 1) - (sizeof(T) - 1), sizeof(T));
  return x;
}
template <class T>
void store(u32 at, T x) {
  std::memcpy(&emulator::shared.at(at + sizeof(T) - 1) - (sizeof(T) - 1), &x, sizeof(T));
}
inline u32 load32(u32 at) { return load<u32>(at); }
inline u32 load16(u32 at) { return load<u16>(at); }
inline void load64(u32 at, u32& a, u32& b) { a = load32(at), b = load32(at + 4); }
inline void load128(u32 at, u32& a, u32& b, u32& c, u32& d) { load64(at, a, b), load64(at + 8, c, d); }
inline float load_float(u32 at) { return load<float>(at); }
inline void store32(u32 at, u32 v) { store(at, v); }
inline void store8(u32 at, u32 v) { store(at, (u8)v); }
inline void store_float(u32 at, float v) { store(at, v); }
inline void store128(u32 at, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[4] = {a, b, c, d};
  for (u32 i = 0; i < 4; ++i) store(at + 4 * i, words[i]);
}

// Copies are done as late as may be, when a thread waits for them: what is read before is not there yet.
inline void copy_later(u32 to, const void* from, int n, int size) {
  emulator::fibers[emulator::current].copies.back().push_back({to, from, n, size});
}
inline void copy16_first(u32 to, const void* from, int n) { copy_later(to, from, n, 16); }
template <bool>
void copy16(u32 to, const void* from) { copy_later(to, from, 16, 16); }
inline void copy4_first(u32 to, const void* from, int n) { copy_later(to, from, n, 4); }
inline void commit_copies() { emulator::fibers[emulator::current].copies.emplace_back(); }
template <int N>
void wait_for_all_but() {
  auto& groups = emulator::fibers[emulator::current].copies;
  for (; groups.size() > N + 1; groups.pop_front())
    for (const emulator::Copy& copy : groups.front()) {
      char* to = &emulator::shared.at(copy.to + copy.size - 1) - (copy.size - 1);
      std::memset(to, 0, copy.size);
      if (copy.n) std::memcpy(to, copy.from, copy.n);
    }
}

inline void load_tiles(u32 row, u32 (&r)[4]) {
  const u32 lane = emulator::lane();
  auto& left = emulator::left[emulator::warp()];
  left[lane][0] = row;
  __syncwarp();
  for (int i = 0; i < 4; ++i) r[i] = load32(left[8 * i + lane / 4][0] + lane % 4 * 4);
  __syncwarp();
}
inline void load_tiles_transposed(u32 row, u32 (&r)[4]) {
  const u32 lane = emulator::lane();
  auto& left = emulator::left[emulator::warp()];
  left[lane][0] = row;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {  // rows 2 (lane % 4), + 1 of column lane / 4
    const u32 first = 8 * i + lane % 4 * 2, at = lane / 4 * 2;
    r[i] = load16(left[first][0] + at) | load16(left[first + 1][0] + at) << 16;
  }
  __syncwarp();
}
inline u32 transpose_tile(u32 x) {
  const u32 lane = emulator::lane();
  auto& left = emulator::left[emulator::warp()];
  left[lane][0] = x;
  __syncwarp();
  u32 y = 0;
  for (u32 i = 0; i < 2; ++i) {  // row lane / 4, column 2 (lane % 4) + i of the transposed tile
    const u32 row = lane % 4 * 2 + i, column = lane / 4;
    y |= (left[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xFFFF) << 16 * i;
  }
  __syncwarp();
  return y;
}
// use(row, column, index, factor of a, factor of b) for the sums of this lane's four results
template <class Use>
void multiply(u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[2], Use use) {
  const u32 lane = emulator::lane(), g = lane / 4, t = lane % 4;
  auto& left = emulator::left[emulator::warp()];
  const u32 own[6] = {a0, a1, a2, a3, b[0], b[1]};
  std::memcpy(left[lane], own, sizeof own);
  __syncwarp();
  for (u32 i = 0; i < 4; ++i)
    for (u32 half = 0; half < 2; ++half)
      for (u32 k = 0; k < 4; ++k) {  // lanes that hold a quarter of the half
        const u32 column = 2 * t + i % 2;
        use(i, left[g * 4 + k][half * 2 + i / 2], left[column * 4 + k][4 + half]);
      }
  __syncwarp();
}
template <bool SIGNED>
void multiply_int8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  for (int& x : c) x = 0;
  multiply(a[0], a[1], a[2], a[3], b, [&](u32 i, u32 x, u32 y) {
    for (int k = 0; k < 32; k += 8) {
      const int code = SIGNED ? (int)(signed char)(x >> k) : (int)(u8)(x >> k);
      c[i] += code * (signed char)(y >> k);
    }
  });
}
inline void add_product_fp16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[2]) {
  multiply(a0, a1, a2, a3, b, [&](u32 i, u32 x, u32 y) {
    c[i] += low_half(x) * low_half(y);
    c[i] += high_half(x) * high_half(y);
  });
}

}  // namespace kvstow
