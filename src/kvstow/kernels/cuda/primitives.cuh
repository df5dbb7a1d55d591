// Names for the instructions that the kernels are made of.
//
// Self-contained: no includes, so that NVRTC (which MLX and PyTorch use) and nvcc compile the same
// text for sm_80 and newer. Shared memory is addressed by 32-bit numbers, as its instructions do.
#pragma once
namespace kvstow {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KVSTOW_INLINE __device__ __forceinline__
#define KVSTOW_UNROLL _Pragma("unroll")
#define KVSTOW_ROLLED _Pragma("unroll 1")

[[maybe_unused]] constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;

[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f;

// The element type of arrays that come from the model.
enum Dtype { FLOAT16, BFLOAT16, FLOAT32 };

// The same number, of which the compiler does not know that: what follows from it is computed where it is used, rather
// than kept in registers while a block takes one split after the other.
KVSTOW_INLINE u32 hidden(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
KVSTOW_INLINE u32 thread_index() { return hidden(threadIdx.x); }

// ---- numbers -------------------------------------------------------------------------------------

KVSTOW_INLINE constexpr int least(int a, int b) { return a < b ? a : b; }
KVSTOW_INLINE constexpr int most(int a, int b) { return a > b ? a : b; }
KVSTOW_INLINE float minus_infinity() { return __uint_as_float(0xFF800000u); }

// Byte i of the result is byte (s >> 4i & 7) of the eight bytes of (b:a); with bit 3 set, its sign.
KVSTOW_INLINE u32 pick_bytes(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
// The low 32 bits of (high:low) >> n, n < 32.
KVSTOW_INLINE u32 shift_pair(u32 low, u32 high, u32 n) {
  u32 d;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(n));
  return d;
}
KVSTOW_INLINE float low_half(u32 pair) {
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
}
KVSTOW_INLINE float high_half(u32 pair) {
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
}
KVSTOW_INLINE u32 two_halves(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// The same, brought within float16's finite range; NaN stays.
KVSTOW_INLINE u32 two_finite_halves(float low, float high) {
  u32 d;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
KVSTOW_INLINE u32 multiply_halves(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
KVSTOW_INLINE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVSTOW_INLINE u16 to_float16(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
KVSTOW_INLINE float from_float16(u16 h) { return low_half(h); }
KVSTOW_INLINE u16 to_float16_above(float x) {  // rounds up
  u16 h;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
KVSTOW_INLINE u16 to_bfloat16(float x) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
// Minimum and maximum that are NaN if an element is, as numpy's are.
KVSTOW_INLINE float least_or_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
KVSTOW_INLINE float most_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// The same of pairs of 16-bit elements.
template <Dtype T>
KVSTOW_INLINE u32 least_pair_or_nan(u32 a, u32 b) {
  u32 d;
  if (T == BFLOAT16) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <Dtype T>
KVSTOW_INLINE u32 most_pair_or_nan(u32 a, u32 b) {
  u32 d;
  if (T == BFLOAT16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Of both halves, the lesser one of the lower 15 bits; those above 0x7C00 count as 0x7FFF.
KVSTOW_INLINE u32 least_fields(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; min.f16x2 %0, x, y;}" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
KVSTOW_INLINE u32 least_of_fields(u32 a, u32 b) {  // of what the other one gave
  u32 d;
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Within 2^-23 of it (one unit in the last place), of a number from 2^-126 to 2^126.
KVSTOW_INLINE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds one and gives what was there. What the block wrote before its last barrier is seen by whoever counts later, and
// what others wrote before they counted, by the block after its next barrier.
KVSTOW_INLINE int count_in_order(int* at) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

template <Dtype T>
KVSTOW_INLINE u32 element_bits(const void* p, u64 at) {
  return T == FLOAT32 ? ((const u32*)p)[at] : ((const u16*)p)[at];
}
template <Dtype T>
KVSTOW_INLINE float from_bits(u32 bits) {
  return T == FLOAT32 ? __uint_as_float(bits) : T == BFLOAT16 ? __uint_as_float(bits << 16) : low_half(bits);
}
template <Dtype T>
KVSTOW_INLINE float element(const void* p, u64 at) {
  return from_bits<T>(element_bits<T>(p, at));
}
template <Dtype T>
KVSTOW_INLINE void set_element(void* p, u64 at, float x) {
  if (T == FLOAT32) ((float*)p)[at] = x;
  else ((u16*)p)[at] = T == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

// ---- shared memory -------------------------------------------------------------------------------

KVSTOW_INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
KVSTOW_INLINE u32 load32(u32 at) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
KVSTOW_INLINE u32 load16(u32 at) {
  u16 v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
KVSTOW_INLINE void load64(u32 at, u32& a, u32& b) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}
KVSTOW_INLINE void load128(u32 at, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
}
KVSTOW_INLINE float load_float(u32 at) { return __uint_as_float(load32(at)); }
KVSTOW_INLINE void store32(u32 at, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v)); }
KVSTOW_INLINE void store8(u32 at, u32 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(v)); }
KVSTOW_INLINE void store_float(u32 at, float v) { store32(at, __float_as_uint(v)); }
KVSTOW_INLINE void store128(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d));
}

// ---- asynchronous copies from global to shared memory --------------------------------------------

// What is read ONCE leaves the L2 cache before anything else does.
template <bool ONCE>
KVSTOW_INLINE void copy16(u32 to, const void* from) {
  if (ONCE) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy));
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
  }
}
// Reads the first n bytes (0..16) and writes zeros for the rest.
KVSTOW_INLINE void copy16_first(u32 to, const void* from, int n) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
}
KVSTOW_INLINE void copy4_first(u32 to, const void* from, int n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n));
}
KVSTOW_INLINE void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N>
KVSTOW_INLINE void wait_for_all_but() {  // the last N groups of copies
  asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

// ---- matrix instructions, on fragments that are spread over a warp -------------------------------
//
// Lane 4g + t. Of a 16 x K operand A, r[0] holds row g and r[1] row g + 8 of the first half of K,
// r[2] and r[3] the same rows of the second half; of a K x 8 operand B, column g. Of the 16 x 8
// result, c[0], c[1] are row g, columns 2t, 2t + 1, and c[2], c[3] the same columns of row g + 8.

// Four 8 x 8 tiles of 16-bit elements; lane i gives the address of row i of the four in a column.
KVSTOW_INLINE void load_tiles(u32 row, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
KVSTOW_INLINE void load_tiles_transposed(u32 row, u32 (&r)[4]) {  // each of the four for itself
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
KVSTOW_INLINE u32 transpose_tile(u32 x) {  // an 8 x 8 tile of 16-bit elements
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// c = a b, 16 x 32 codes times 32 x 8 signed bytes. The codes are signed or not.
template <bool SIGNED>
KVSTOW_INLINE void multiply_int8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if (SIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
}
// c += a b, 16 x 16 times 16 x 8 in float16, added in float32.
KVSTOW_INLINE void add_product_fp16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

}  // namespace kvstow
