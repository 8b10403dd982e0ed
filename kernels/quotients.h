/* Codes of NVFP4 blocks under given steps, rounded from |x| / step as float32 would have it, and no division.
 *
 *   quick_D(x, step, inverse, blocks, packed)   codes of as many leading blocks as have a fast way; returns their number:
 *                                               with AVX-512 an even one, of any type; else of bf16 alone, whole groups of four
 *                                               vectors (WIDTH / 8 blocks)
 *   is_quick(step, inverse, block_amax)         what all of them must be; inverse: 1.0f / step
 *
 * D is bf16, fp16 or fp32.  The E2M1 midpoints are .25, .75, 1.25, 1.75, 2.5, 3.5, 5; a tie stays at the first and every second,
 * and goes up at the others.
 */
#ifndef FP4_QUOTIENTS_H
#define FP4_QUOTIENTS_H

#include "maxima.h"

/* 8 in the lanes below zero, 0 elsewhere; bf16's -0.0 (0x8000) is not below zero. */
INLINE i16v sign16(i16v x) { return ((x ^ (int16_t)0x8000) > 0) & 8; }

/* Four vectors of codes in 16-bit lanes -> WIDTH packed bytes, low nibble first. */
INLINE u8v pack4(i16v c0, i16v c1, i16v c2, i16v c3) {
    u32v a = (u32v)(c0 | (c1 << 8)), b = (u32v)(c2 | (c3 << 8));
    a = (a | (a >> 12)) & 0xFFFFu;
    b = (b | (b >> 12)) << 16;
    u8v mixed = (u8v)(a | b);
#if WIDTH == 32
    return SHUFFLE(mixed, mixed, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29,
                   2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
#else
    return SHUFFLE(mixed, mixed, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#endif
}

#ifdef __AVX512BW__
/* ------------------------------------------------------------------------------- AVX-512: fixed point, and a place for doubt
 *
 * Two blocks to a 64-byte vector of 16-bit lanes: Q is 4096 * x * fl(1 / step), cut off to the integer below: negative where
 * x / step is, and not for -0.0.  Quick are blocks whose quotients are below 6.9, so that Q has 16 bits.  The inverse is off by
 * at most 2^-24 of itself, so what is cut off is by less than 0.002.  Every midpoint is a multiple of 1/4, 1024 in Q.  So the
 * upper six bits of Q, its cell, say the code, unless Q is the first number of a cell that begins with a midpoint, or the last of
 * one that ends with one: then the pair of blocks is worked out in float32 (tests/test_quotients.py: no other code is wrong).
 * Of normally distributed weights 3 to 4 pairs in a hundred are. */
typedef VECTOR(uint16_t, 64) u16x32;
_Static_assert(CHUNK <= 64, "doubtful has a bit for each block");

static const u16x32 even_lanes = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                  32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};

/* By the cell: bits 12-15 the code, bit 0 whether doubt is at the end; added to a doubtful Q, that makes its bits 0-9 zero.
 * No cell has two midpoints.  Those without have their doubt where no multiple of 1/2 is, which what was FP4 before would hit. */
#define BEGIN(code) (code) << 12
#define END(code) (code) << 12 | 1
static const u16x32 cells_from_zero = {
    END(0), BEGIN(1), END(1), BEGIN(2), END(2), BEGIN(3), END(3), BEGIN(4), END(4), END(4), BEGIN(5), BEGIN(5),
    END(5), END(5), BEGIN(6), BEGIN(6), END(6), BEGIN(6), END(6), END(6), BEGIN(7), BEGIN(7), END(7), BEGIN(7),
    END(7), BEGIN(7), END(7), BEGIN(7), END(7), BEGIN(7), END(7), BEGIN(7)};
static const u16x32 cells_to_zero = {
    END(15), BEGIN(15), END(15), BEGIN(15), END(15), BEGIN(15), END(15), BEGIN(15), END(15), BEGIN(15), END(15), END(15),
    BEGIN(14), BEGIN(14), END(14), BEGIN(14), END(14), END(14), BEGIN(13), BEGIN(13), END(13), END(13), BEGIN(12), BEGIN(12),
    END(12), BEGIN(11), END(11), BEGIN(10), END(10), BEGIN(9), END(9), BEGIN(8)};

INLINE int is_quick(float step, float inverse, float block_amax) {
    return (step >= 0x1p-100f) & (step <= 1.0f) & ((fp4_bits(step) & 0x7FFFFFu) != 0x7FFFFFu) & (block_amax * inverse < 6.9f);
}

/* x / step comes from two corrections of x * fl(1 / step).  The first brings it within one unit in its last place, so that its residual
 * is exact, and with a correctly rounded inverse the second rounds correctly (Markstein, IBM J. Res. Dev. 34, 1990): where residuals
 * stay normal, no x but zero underflows, no code saturates and the step's mantissa is not all ones. */
INLINE void corrected(const float *restrict x, float step, float inverse, uint8_t *restrict packed) {
    __m512 s = _mm512_set1_ps(step), r = _mm512_set1_ps(inverse), value = _mm512_loadu_ps(x), v = _mm512_abs_ps(value), q = v * r;
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, s, v), r, q);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, s, v), r, q);
    __m512 fine = q * 2.0f + E2M1_INTEGERS, coarse = q * 0.5f + (E2M1_INTEGERS + 4.0f); /* as e2m1_round */
    __m512 rounded = _mm512_min_ps(_mm512_min_ps(fine, q + (E2M1_INTEGERS + 2.0f)), coarse);
    __m512i sign = _mm512_srli_epi32((__m512i)(value + 0.0f), 28); /* -0.0 is not below zero */
    __m512i codes = ((__m512i)rounded & _mm512_set1_epi32(7)) | (sign & _mm512_set1_epi32(8));
    _mm_storel_epi64((__m128i *)packed, _mm512_cvtepi64_epi8(codes | _mm512_srli_epi64(codes, 28)));
}

/* Q in the lower halves of the lanes; a multiplication and an addition that are rounded once, downwards. */
INLINE __m512i fixed_point(f32s x, float inverse) {
    const __m512 integers = _mm512_set1_ps(12582912.0f);
    return (__m512i)_mm512_fmadd_round_ps((__m512)x, _mm512_set1_ps(inverse), integers, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

#define DEFINE_QUICK(dtype, type)                                                                                             \
    INLINE int quick_##dtype(const type *restrict x, const float *restrict step, const float *restrict inverse, int blocks,   \
                             uint8_t *restrict packed) {                                                                      \
        float factor[CHUNK];                                                                                                  \
        uint64_t doubtful = 0;                                                                                                \
        for (int b = 0; b < blocks; b++) factor[b] = inverse[b] * 4096.0f;                                                    \
        for (int b = 0; b + 2 <= blocks; b += 2) {                                                                            \
            __m512i first = fixed_point(floats_##dtype(x + b * 16), factor[b]);                                               \
            __m512i second = fixed_point(floats_##dtype(x + b * 16 + 16), factor[b + 1]);                                     \
            __m512i q = _mm512_permutex2var_epi16(first, (__m512i)even_lanes, second), cell = _mm512_srli_epi16(q, 10);       \
            __m512i entry = _mm512_permutex2var_epi16((__m512i)cells_from_zero, cell, (__m512i)cells_to_zero);                \
            int is_near = _mm512_testn_epi16_mask(_mm512_add_epi16(q, entry), _mm512_set1_epi16(1023)) != 0;                  \
            doubtful |= (uint64_t)is_near << b;                                                                               \
            __m512i codes = _mm512_srli_epi16(entry, 12);                                                                     \
            codes = codes | _mm512_srli_epi32(codes, 12);                                                                     \
            _mm_storeu_si128((__m128i *)(packed + b * 8), _mm512_cvtepi32_epi8(codes));                                       \
        }                                                                                                                     \
        for (; doubtful; doubtful &= doubtful - 1) {                                                                          \
            int b = __builtin_ctzll(doubtful);                                                                                \
            float wide[32];                                                                                                   \
            const float *values = float_array_##dtype(x + b * 16, 32, wide);                                                  \
            for (int i = 0; i < 2; i++) corrected(values + i * 16, step[b + i], inverse[b + i], packed + (b + i) * 8);        \
        }                                                                                                                     \
        return blocks & ~1;                                                                                                   \
    }
DEFINE_QUICK(bf16, uint16_t)
DEFINE_QUICK(fp16, uint16_t)
DEFINE_QUICK(fp32, float)
#else
/* ----------------------------------------------------------------------------------- bf16: thresholds instead of quotients
 *
 * code(x) counts the midpoints B that fl(|x| / s) has passed.
 * fl(|x| / s) passes B exactly when |x| > s * (B + H), H half a float32 step above or below B; equality cannot occur, for the
 * right side has an odd factor beyond 2^8 and |x| has 8 bits.  So per block the seven bounds become seven bf16 magnitudes T,
 * each the largest that has not passed, and code = sum(|x| > T).  T is the bf16 value at or just below B * s, or its predecessor:
 * decided by the sign of an exact residual.
 * Quick are blocks where residuals stay normal and x / s cannot underflow. */

#define MIDPOINTS 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 8.0f
#define HALF_STEPS 0x1p-26f, -0x1p-25f, 0x1p-24f, -0x1p-24f, 0x1p-23f, -0x1p-23f, 0x1p-22f, 0.0f

/* candidate - B * step, exact: in one operation, or by splitting step so that both products are. */
#ifdef __FMA__
#define RESIDUAL(candidate, B, step)  \
    for (int j = 0; j < WIDTH / 4; j++) residual[j] = __builtin_fmaf(-(B)[j], (step)[j], (candidate)[j]);
#else
#define RESIDUAL(candidate, B, step)                                               \
    f32v head = (f32v)((i32v)(step) & (int32_t)0xFFFFF000), tail = (step) - head;  \
    residual = ((candidate) - (B) * head) - (B) * tail;
#endif

/* T of each lane's midpoint, in the high half of the word. */
INLINE i32v thresholds(f32v B, f32v H, f32v step) {
    i32v candidate = (i32v)(B * (1.0f + 0x1p-20f) * step) & (int32_t)0xFFFF0000;
    f32v residual;
    RESIDUAL((f32v)candidate, B, step)
    return candidate + ((i32v)(residual >= H * step) << 16);
}

INLINE void store_thresholds(float s, uint32_t *restrict out) { /* each T twice: in the low and in the high half */
    static const float B[8] = {MIDPOINTS}, H[8] = {HALF_STEPS};
    for (int i = 0; i < 8; i += WIDTH / 4) {
        u32v T = (u32v)thresholds(LOAD(f32v, B + i), LOAD(f32v, H + i), s - (f32v){0});
        STORE(out + i, T | (T >> 16));
    }
}

INLINE i16v spread(uint32_t pair) { return (i16v)(pair - (u32v){0}); }

INLINE i16v codes_under(const uint16_t *restrict x, const uint32_t *restrict T) {
    i16v value = LOAD(i16v, x), u = magnitude16(value);
    i16v passed = ((u > spread(T[0])) + (u > spread(T[1]))) + ((u > spread(T[2])) + (u > spread(T[3]))) +
                  ((u > spread(T[4])) + (u > spread(T[5]))) + (u > spread(T[6]));
    return sign16(value) - passed;
}

INLINE int quick_bf16(const uint16_t *restrict x, const float *restrict step, const float *restrict inverse, int blocks,
                      uint8_t *restrict packed) {
    uint32_t T[4][8] __attribute__((aligned(32)));
    const int per_block = 16 / LANES;
    int b = 0;
    for (; b + WIDTH / 8 <= blocks; b += WIDTH / 8) { /* four vectors */
        for (int i = 0; i < WIDTH / 8; i++) store_thresholds(step[b + i], T[i]);
        const uint16_t *p = x + b * 16;
        STORE(packed + b * 8, pack4(codes_under(p, T[0]), codes_under(p + LANES, T[1 / per_block]),
                                    codes_under(p + 2 * LANES, T[2 / per_block]), codes_under(p + 3 * LANES, T[3 / per_block])));
    }
    return (void)inverse, b;
}

INLINE int is_quick(float step, float inverse, float block_amax) {
    return (void)inverse, (void)block_amax, (step >= 0x1p-100f) & (step <= 0x1p16f);
}
#define quick_fp16(x, step, inverse, blocks, packed) 0
#define quick_fp32(x, step, inverse, blocks, packed) 0
#endif
#endif
