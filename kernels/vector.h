/* Vector types of the CPU kernels: what one instruction set (FP4_LEVEL) holds in a register, in GCC's and clang's portable form. */
#ifndef FP4_VECTOR_H
#define FP4_VECTOR_H

#include <stdint.h>
#include <string.h>

#ifdef __SSE4_1__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "fp4.h"

#define PASTE_(name, level) name##_v##level
#define PASTE(name, level) PASTE_(name, level)
#define NAME(name) PASTE(name, FP4_LEVEL)
#define INLINE static inline __attribute__((always_inline, unused))

#ifdef __AVX2__
#define WIDTH 32 /* bytes in a vector; 32 without AVX2 would be taken apart into scalars */
#else
#define WIDTH 16
#endif
#define LANES (WIDTH / 2) /* 16-bit lanes */
#ifdef __AVX512BW__
#define SIDE 16 /* 32-bit lanes of the widest vector: blocks or elements side by side */
#else
#define SIDE (WIDTH / 4)
#endif
#define CHUNK 64 /* blocks whose scales are worked out together, small enough for the first cache */
#define VECTOR(type, bytes) type __attribute__((vector_size(bytes)))
typedef VECTOR(int16_t, WIDTH) i16v;
typedef VECTOR(uint16_t, WIDTH) u16v;
typedef VECTOR(int32_t, WIDTH) i32v;
typedef VECTOR(uint32_t, WIDTH) u32v;
typedef VECTOR(uint8_t, WIDTH) u8v;
typedef VECTOR(float, WIDTH) f32v;
typedef VECTOR(float, 4 * SIDE) f32s;
typedef VECTOR(int32_t, 4 * SIDE) i32s;
typedef VECTOR(uint32_t, 4 * SIDE) u32s;
typedef VECTOR(uint8_t, 8) u8x8;
typedef VECTOR(uint8_t, 16) u8x16;
typedef VECTOR(uint16_t, 16) u16x8;

#define LOAD(type, p) ({ type loaded; memcpy(&loaded, (p), sizeof loaded); loaded; })
#define STORE(p, value) do { __typeof__(value) stored = (value); memcpy((p), &stored, sizeof stored); } while (0)
#define SHUFFLE __builtin_shufflevector
/* Asks for the lines of what is used later; where no memory is, nothing is fetched. */
INLINE void ask_for(const void *restrict x, int nbytes) {
    for (int at = 0; at < nbytes; at += 64) __builtin_prefetch((const char *)x + at);
}

/* The larger and the lesser of signed words.  Written out where gcc takes lanes apart. */
#if SIDE == 16
INLINE i32s greater(i32s a, i32s b) { return (i32s)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE i32s lesser(i32s a, i32s b) { return (i32s)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#elif SIDE == 8
INLINE i32s greater(i32s a, i32s b) { return (i32s)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#elif defined(__SSE4_1__)
INLINE i32s greater(i32s a, i32s b) { return (i32s)_mm_max_epi32((__m128i)a, (__m128i)b); }
#else
INLINE i32s greater(i32s a, i32s b) { i32s is_a = a > b; return (a & is_a) | (b & ~is_a); }
#endif
#if SIDE != 16
INLINE i32s lesser(i32s a, i32s b) {
    i32s r;
    for (int l = 0; l < SIDE; l++) r[l] = a[l] < b[l] ? a[l] : b[l];
    return r;
}
#endif

/* The same of signed words of 16 and 32 bits, a vector of WIDTH bytes. */
#if WIDTH == 32
INLINE i16v max16(i16v a, i16v b) { return (i16v)_mm256_max_epi16((__m256i)a, (__m256i)b); }
INLINE i32v max32(i32v a, i32v b) { return (i32v)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#elif defined(__SSE4_1__)
INLINE i16v max16(i16v a, i16v b) { return (i16v)_mm_max_epi16((__m128i)a, (__m128i)b); }
INLINE i32v max32(i32v a, i32v b) { return (i32v)_mm_max_epi32((__m128i)a, (__m128i)b); }
#elif defined(__ARM_NEON)
INLINE i16v max16(i16v a, i16v b) { return (i16v)vmaxq_s16((int16x8_t)a, (int16x8_t)b); }
INLINE i32v max32(i32v a, i32v b) { return (i32v)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
#else
INLINE i16v max16(i16v a, i16v b) { i16v is_a = a > b; return (a & is_a) | (b & ~is_a); }
INLINE i32v max32(i32v a, i32v b) { i32v is_a = a > b; return (a & is_a) | (b & ~is_a); }
#endif

/* words_of16: SIDE words of 16 bits in lanes of 32; words_of8: eight bytes in lanes of 16.  gcc takes __builtin_convertvector apart. */
#if SIDE == 16
INLINE u32s words_of16(const uint16_t *restrict x) { return (u32s)_mm512_cvtepu16_epi32(LOAD(__m256i, x)); }
#elif SIDE == 8
INLINE u32s words_of16(const uint16_t *restrict x) { return (u32s)_mm256_cvtepu16_epi32(LOAD(__m128i, x)); }
#elif defined(__SSE4_1__)
INLINE u32s words_of16(const uint16_t *restrict x) { return (u32s)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)x)); }
#elif defined(__ARM_NEON)
INLINE u32s words_of16(const uint16_t *restrict x) { return (u32s)vmovl_u16(vld1_u16(x)); }
#else
INLINE u32s words_of16(const uint16_t *restrict x) { return __builtin_convertvector(LOAD(VECTOR(uint16_t, 8), x), u32s); }
#endif
#ifdef __SSE4_1__
INLINE u16x8 words_of8(const uint8_t *restrict x) { return (u16x8)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)x)); }
#elif defined(__ARM_NEON)
INLINE u16x8 words_of8(const uint8_t *restrict x) { return (u16x8)vmovl_u8(vld1_u8(x)); }
#else
INLINE u16x8 words_of8(const uint8_t *restrict x) { return __builtin_convertvector(LOAD(u8x8, x), u16x8); }
#endif

INLINE f32s all(float value) { return value - (f32s){0}; }
INLINE f32s either(i32s mask, f32s a, f32s b) { return (f32s)((mask & (i32s)a) | (~mask & (i32s)b)); }

/* As e2m1_encode and e2m1_decode. */
INLINE i32s e2m1_codes(f32s q) {
    f32s v = (f32s)((i32s)q & 0x7FFFFFFF), fine = v * 2.0f + E2M1_INTEGERS, coarse = v * 0.5f + (E2M1_INTEGERS + 4.0f);
    i32s rounded = lesser(lesser((i32s)fine, (i32s)(v + (E2M1_INTEGERS + 2.0f))), (i32s)coarse);
    return (lesser(rounded, (i32s)all(E2M1_INTEGERS + 7.0f)) & 7) | ((q < 0.0f) & 8);
}

INLINE f32s e2m1_values(i32s codes) {
    i32s magnitude = codes & 7;
    f32s normal = (f32s)((magnitude << 22) + (126 << 23)), subnormal = __builtin_convertvector(magnitude, f32s) * 0.5f;
    return (f32s)((i32s)either(magnitude < 2, subnormal, normal) | (codes & 8) << 28);
}

/* Whether a lane is not zero. */
#if SIDE == 16
INLINE int any(i32s mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }
#elif SIDE == 8
INLINE int any(i32s mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }
#else
INLINE int any(i32s mask) {
    int64_t words[SIDE / 2], found = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < SIDE / 2; i++) found |= words[i];
    return found != 0;
}
#endif

#if SIDE == 16
#define INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif SIDE == 8
#define INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define INTERLEAVE_LOW 0, 4, 1, 5
#define INTERLEAVE_HIGH 2, 6, 3, 7
#endif

INLINE void transpose(f32s *rows) { /* SIDE rows of SIDE */
    for (int stage = 1; stage < SIDE; stage *= 2) {
        f32s mixed[SIDE];
        for (int i = 0; i < SIDE / 2; i++) {
            mixed[2 * i] = SHUFFLE(rows[i], rows[i + SIDE / 2], INTERLEAVE_LOW);
            mixed[2 * i + 1] = SHUFFLE(rows[i], rows[i + SIDE / 2], INTERLEAVE_HIGH);
        }
        memcpy(rows, mixed, sizeof mixed);
    }
}

/* Sixteen entries of a table of sixteen bytes. */
#ifdef __SSSE3__
#define LOOKUP(table, index) ((u8x16)_mm_shuffle_epi8((__m128i)(table), (__m128i)(index)))
#elif !defined(__clang__)
#define LOOKUP(table, index) __builtin_shuffle(table, index)
#elif defined(__ARM_NEON)
#define LOOKUP(table, index) ((u8x16)vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)(index)))
#else
INLINE u8x16 LOOKUP(u8x16 table, u8x16 index) { u8x16 out; for (int j = 0; j < 16; j++) out[j] = table[index[j]]; return out; }
#endif

#endif
