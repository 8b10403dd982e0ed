/* What the CUDA kernels share: types, wide loads, and the hardware's own conversions.
 *
 * Under a CUDA compiler the conversions are inline PTX; tests/support/simt.h gives the same names to a host compiler, so that the
 * kernels run there too.  FP4_CVT is set by the loader where the target can round to E2M1 itself (sm_100a, 103a, 110a, 120a, 121a).
 *
 * Elementwise kernels: 256 threads a block, 32 elements a thread, so grid = ceil(n / 8192); pointers are 16-byte aligned.
 */
#ifndef FP4_DEVICE_H
#define FP4_DEVICE_H

#include "fp4.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct alignas(8) Words2 { u32 w[2]; };
struct alignas(16) Words4 { u32 w[4]; };

/* Variants that only a GPU can choose between; the bytes are the same. Units: how many of 16 elements a thread of the elementwise
 * kernels takes, 1, 2 or 4; a grid is ceil(n / (4096 * units)). */
#ifndef FP4_UNITS
#define FP4_UNITS 2
#endif
enum { THREADS = 256, WARP = 32, UNIT = 16, UNITS = FP4_UNITS, LAUNCH_UNITS = THREADS * UNITS };
#define ALL_LANES 0xFFFFFFFFu

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks) /* that many to a multiprocessor */
/* Keeps the compiler from merging what is done to a word with how it was made, which would do both twice. */
#define OPAQUE(word) asm("" : "+r"(word))
/* Both halves of a word as bf16 or fp16, subnormals included: the larger, NaN wins; a * b + c. */
DEVICE u32 max2_bf16(u32 a, u32 b) { u32 r; asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 max2_fp16(u32 a, u32 b) { u32 r; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 fma2_bf16(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEVICE u32 fma2_fp16(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEVICE float widen_fp16(u16 bits) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits)); return f; }
DEVICE u32 min2_fp16(u32 a, u32 b) { u32 r; asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
/* One half of a word in both places; an operand of the instruction that takes it, without one of its own. */
DEVICE u32 both_low(u32 w) { u32 r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(w)); return r; }
DEVICE u32 both_high(u32 w) { u32 r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(w)); return r; }
/* Two floats as the halves of a word, nearest even. */
DEVICE u32 narrow2_bf16(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE u32 narrow2_fp16(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
/* 1 / v within one unit in the last place, both normal (PTX ISA, rcp.approx.ftz.f32: maximum error 1 ulp). */
DEVICE float reciprocal(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
#ifdef FP4_CVT
/* Eight floats to eight codes, element k in bits 4k..4k+3; half to even, saturating. */
DEVICE u32 round8_e2m1(const float *v) {
    u32 r;
    asm("{.reg .b8 a, b, c, d;\n"
        "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
        "mov.b32 %0, {a, b, c, d};}"
        : "=r"(r) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
    return r;
}
/* Two floats rounded to E2M1, as fp16. Codes that round8_e2m1 has packed must not go on to widen8_e2m1: ptxas 12.9 takes wrong bytes. */
DEVICE u32 round2_e2m1(float low, float high) {
    u32 r;
    asm("{.reg .b8 codes;\n"
        "cvt.rn.satfinite.e2m1x2.f32 codes, %2, %1; cvt.rn.f16x2.e2m1x2 %0, codes;}"
        : "=r"(r) : "f"(low), "f"(high));
    return r;
}
/* Eight codes to four words of two fp16. */
DEVICE void widen8_e2m1(u32 codes, u32 *pairs) {
    asm("{.reg .b8 a, b, c, d;\n"
        "mov.b32 {a, b, c, d}, %4;\n"
        "cvt.rn.f16x2.e2m1x2 %0, a; cvt.rn.f16x2.e2m1x2 %1, b; cvt.rn.f16x2.e2m1x2 %2, c; cvt.rn.f16x2.e2m1x2 %3, d;}"
        : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(codes));
}
#endif
#endif

/* How many of n's units lie in this block of threads. */
DEVICE int units_here(i64 n) {
    i64 left = n / UNIT - (i64)blockIdx.x * LAUNCH_UNITS;
    return left < LAUNCH_UNITS ? (int)left : LAUNCH_UNITS;
}

/* Bytes 0, 1, 2, 3 of the result: the lowest bytes of a, b, c, d. */
DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/* Eight codes to four words of two fp16. */
DEVICE void widen8(u32 codes, u32 *pairs) {
#ifdef FP4_CVT
    widen8_e2m1(codes, pairs);
#else /* a byte table of fp16's upper halves, looked up by the codes themselves; the signs come from where they are */
    u32 magnitudes = codes & 0x77777777u, shifted = codes << 4;
    u32 first = __byte_perm(0x3E3C3800u, 0x46444240u, magnitudes) | (__byte_perm(shifted, codes, 0x5140) & 0x80808080u);
    u32 last = __byte_perm(0x3E3C3800u, 0x46444240u, magnitudes >> 16) | (__byte_perm(shifted, codes, 0x7362) & 0x80808080u);
    pairs[0] = __byte_perm(first, 0, 0x1404);
    pairs[1] = __byte_perm(first, 0, 0x3424);
    pairs[2] = __byte_perm(last, 0, 0x1404);
    pairs[3] = __byte_perm(last, 0, 0x3424);
#endif
}

/* ------------------------------------------------------------------------------------------------- the types of x
 *
 *   WORDS         32-bit words in a unit
 *   IS_HALF       whether an element is 16 bits long
 *   MAX_STEP      float32 bits of the largest power of two by which no x but zero underflows to zero
 *   one           one element as float32
 *   largest       float32 bits of the largest magnitude in a unit; above infinity's where there is a NaN
 *   widened       x of the eight elements in w[0..WORDS / 2)
 *   magnitudes    |x| of those
 *   values        x of those, -0.0 as 0.0
 *   signs         bit 4k+3 is set iff element k of those is below zero
 */
template <int BITS_MAX_STEP> struct Half {
    enum { WORDS = 8, MAX_STEP = BITS_MAX_STEP };
    static const bool IS_HALF = true;
    static MEMBER u32 magnitude2(u32 w) { return w & 0x7FFF7FFFu; }
};

struct Bf16 : Half<0x47800000 /* 2^16 */> {
    static MEMBER float one(const void *x, i64 i) { return fp4_from_bf16(((const u16 *)x)[i]); }
    static MEMBER float low(u32 w) { return fp4_float(w << 16); }
    static MEMBER float high(u32 w) { return fp4_float(w & 0xFFFF0000u); }
    static MEMBER u32 max2(u32 a, u32 b) { return max2_bf16(a, b); }
    static MEMBER u32 without_negative_zero(u32 w) { return fma2_bf16(w, 0x3F803F80u, 0); }
};

struct Fp16 : Half<0x7E000000 /* 2^125 */> {
    static MEMBER float one(const void *x, i64 i) { return widen_fp16(((const u16 *)x)[i]); }
    static MEMBER float low(u32 w) { return widen_fp16((u16)w); }
    static MEMBER float high(u32 w) { return widen_fp16((u16)(w >> 16)); }
    static MEMBER u32 max2(u32 a, u32 b) { return max2_fp16(a, b); }
    static MEMBER u32 without_negative_zero(u32 w) { return fma2_fp16(w, 0x3C003C00u, 0); }
};

struct Fp32 {
    enum { WORDS = 16, MAX_STEP = 0x3F800000 /* 1 */ };
    static const bool IS_HALF = false;
    static MEMBER float one(const void *x, i64 i) { return ((const float *)x)[i]; }
};

DEVICE u32 largest(const u32 *w, Fp32) {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < Fp32::WORDS; i++) m = max(m, w[i] & 0x7FFFFFFFu);
    return m;
}
template <class T> DEVICE u32 largest(const u32 *w, T) {
    u32 m = T::magnitude2(w[0]);
#pragma unroll
    for (int i = 1; i < T::WORDS; i++) m = T::max2(m, T::magnitude2(w[i]));
    return fp4_bits(T::low(T::max2(m, m >> 16)));
}

/* The least magnitude in a unit. The order of bf16 is that of fp16, of which NaN gives way. */
DEVICE float smallest(const u32 *w, Fp32) {
    u32 m = 0x7FFFFFFFu;
#pragma unroll
    for (int i = 0; i < Fp32::WORDS; i++) m = min(m, w[i] & 0x7FFFFFFFu);
    return fp4_float(m);
}
template <class T> DEVICE float smallest(const u32 *w, T) {
    u32 m = T::magnitude2(w[0]);
#pragma unroll
    for (int i = 1; i < T::WORDS; i++) m = min2_fp16(m, T::magnitude2(w[i]));
    return fminf(T::low(m), T::high(m));
}

DEVICE void widened(const u32 *w, float *v, Fp32) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = fp4_float(w[i]);
}
template <class T> DEVICE void widened(const u32 *w, float *v, T) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = T::low(w[i]), v[2 * i + 1] = T::high(w[i]);
}

DEVICE void magnitudes(const u32 *w, float *v, Fp32) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = fp4_float(w[i] & 0x7FFFFFFFu);
}
template <class T> DEVICE void magnitudes(const u32 *w, float *v, T) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 both = T::magnitude2(w[i]);
        OPAQUE(both);
        v[2 * i] = T::low(both);
        v[2 * i + 1] = T::high(both);
    }
}

DEVICE void values(const u32 *w, float *v, Fp32) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fadd_rn(fp4_float(w[i]), 0.0f);
}
template <class T> DEVICE void values(const u32 *w, float *v, T) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 both = T::without_negative_zero(w[i]);
        v[2 * i] = T::low(both);
        v[2 * i + 1] = T::high(both);
    }
}

/* Sign bytes of elements 0 2 4 6 and 1 3 5 7, to bit 3 of each nibble. */
DEVICE u32 sign_nibbles(u32 even, u32 odd) { return (even >> 4 & 0x08080808u) | (odd & 0x80808080u); }
DEVICE u32 signs(const u32 *w, Fp32) {
    u32 t[8];
#pragma unroll
    for (int i = 0; i < 8; i++) t[i] = fp4_bits(__fadd_rn(fp4_float(w[i]), 0.0f)) >> 24;
    return sign_nibbles(low_bytes(t[0], t[2], t[4], t[6]), low_bytes(t[1], t[3], t[5], t[7]));
}
template <class T> DEVICE u32 signs(const u32 *w, T) {
    u32 t[4];
#pragma unroll
    for (int i = 0; i < 4; i++) t[i] = T::without_negative_zero(w[i]);
    u32 first = __byte_perm(t[0], t[1], 0x7531), last = __byte_perm(t[2], t[3], 0x7531);
    return sign_nibbles(__byte_perm(first, last, 0x6420), __byte_perm(first, last, 0x7531));
}

/* The 128-bit words of unit `unit`, counted from this block of threads' first. */
template <class T> DEVICE void load_unit(const void *x, int unit, u32 *w) {
    const Words4 *from = (const Words4 *)x + (i64)blockIdx.x * (LAUNCH_UNITS * (T::WORDS / 4)) + unit * (T::WORDS / 4);
#pragma unroll
    for (int i = 0; i < T::WORDS / 4; i++) {
        Words4 v = from[i];
#pragma unroll
        for (int k = 0; k < 4; k++) w[4 * i + k] = v.w[k];
    }
}

/* Steps of elements from stored block scales. */
struct NvFp4Steps {
    enum { BLOCK_SIZE = 16 };
    float stored_global;
    bool is_divisor;
    MEMBER float operator()(u32 stored) const {
        float block_scale = e4m3_decode(stored);
        return is_divisor ? block_scale / stored_global : block_scale * stored_global;
    }
};
struct MxFp4Steps {
    enum { BLOCK_SIZE = 32 };
    MEMBER float operator()(u32 stored) const { return e8m0_decode(stored); }
};

#endif
