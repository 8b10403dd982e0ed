/* Codes of NVFP4 blocks under given steps, rounded from |x| / step as float32 would have it, and no division.
 *
 *   quick_D(x, maxima, step, inverse, blocks, packed)   codes of as many leading blocks as have a fast way; returns their number
 *   is_quick(step, inverse, block_amax)                 what all of them must be; inverse: 1.0f / step
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
/* ------------------------------------------------------------------------------------------- float32: corrected products
 *
 * A block to a 64-byte vector.  x / step comes from two corrections of x * fl(1 / step).  The first brings it within one unit in
 * its last place, so that its residual is exact, and with a correctly rounded inverse the second rounds correctly (Markstein,
 * IBM J. Res. Dev. 34, 1990).  Quick are blocks where residuals stay normal, no x but zero underflows, no code saturates (6.9: the
 * inverse is not exact) and the step's mantissa is not all ones. */
#define ALL16(value) _mm512_set1_ps(value)

INLINE int is_quick(float step, float inverse, float block_amax) {
    return (step >= 0x1p-100f) & (step <= 1.0f) & ((fp4_bits(step) & 0x7FFFFFu) != 0x7FFFFFu) & (block_amax * inverse < 6.9f);
}

INLINE int quick_fp32(const float *restrict x, const uint32_t *restrict maxima, const float *restrict step,
                      const float *restrict inverse, int blocks, uint8_t *restrict packed) {
    for (int b = 0; b < blocks; b++) {
        __m512 s = ALL16(step[b]), r = ALL16(inverse[b]), value = _mm512_loadu_ps(x + b * 16), v = _mm512_abs_ps(value), q = v * r;
        q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, s, v), r, q);
        q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, s, v), r, q);
        __m512 fine = _mm512_fmadd_ps(q, ALL16(2.0f), ALL16(E2M1_INTEGERS)); /* as e2m1_round */
        __m512 coarse = _mm512_fmadd_ps(q, ALL16(0.5f), ALL16(E2M1_INTEGERS + 4.0f));
        __m512 rounded = _mm512_min_ps(_mm512_min_ps(fine, q + (E2M1_INTEGERS + 2.0f)), coarse);
        __m512i sign = _mm512_srli_epi32((__m512i)(value + 0.0f), 28); /* -0.0 is not below zero */
        __m512i codes = ((__m512i)rounded & _mm512_set1_epi32(7)) | (sign & _mm512_set1_epi32(8));
        _mm_storel_epi64((__m128i *)(packed + b * 8), _mm512_cvtepi64_epi8(codes | _mm512_srli_epi64(codes, 28)));
    }
    return (void)maxima, blocks;
}

/* ------------------------------------------------------------------------- 16-bit types: fixed point, and a place for doubt
 *
 * Two blocks to a 64-byte vector.  E is the exponent of a block's largest magnitude, and F the mantissa of an x, its leading one at
 * bit 15, shifted right by what its exponent lacks: |x| = F * 2^(E - 15), cut off.  With R = 2^(E + 13) / step, Q = F * R >> 16 is
 * 4096 |x| / step, at most two too small, and one too large where R was rounded up.  What is cut off from F is below the first
 * midpoint and stays there: |x| < 2^(E - 8) in bf16, 2^(E - 5) in fp16, and 2^E / step < 6.9.
 * Every midpoint is a multiple of 1/4, 1024 in Q.  So the upper six bits of Q + 2 say the code, unless Q + 2 is one of the four
 * numbers at a midpoint: then the pair of blocks is worked out in float32.  About one pair in twenty is
 * (tests/test_quotients.py: how far Q can be off, and that no other code is wrong).
 * fp16's subnormals have the smallest exponent and no leading one.  Those of bf16 are nothing beside a step of 2^-100. */
enum { BF16_MANTISSA = 7, FP16_MANTISSA = 10, FP16_BIAS = 127 - 15, NEAR = 1024 - 4, NONE = -1 };
typedef VECTOR(int16_t, 64) i16x32;
_Static_assert(CHUNK <= 64, "doubtful has a bit for each block");
#define ALL32(value) _mm512_set1_epi16((short)(value))

/* By the upper bits of Q + 2: the code; the bits that are all zero near a midpoint, NONE where there is none. */
static const i16x32 code_of = {0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
static const i16x32 near_of = {NONE, NEAR, NONE, NEAR, NONE, NEAR, NONE, NEAR, NONE, NONE, NEAR, NONE, NONE, NONE, NEAR, NONE,
                               NONE, NONE, NONE, NONE, NEAR, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE};

INLINE __m512i each_of_two(const uint32_t *restrict of_blocks) {
    __m256i low = _mm256_set1_epi16((short)of_blocks[0]), high = _mm256_set1_epi16((short)of_blocks[1]);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Q + 2 of two blocks; top: their largest exponents, with every bit of a mantissa. */
INLINE __m512i quotients(__m512i x, const uint32_t *restrict top, const uint32_t *restrict factor, int mantissa) {
    __m512i u = x & ALL32(0x7FFF), F = _mm512_slli_epi16(x, 15 - mantissa) | ALL32(0x8000);
    if (mantissa == FP16_MANTISSA) {
        const __m512i least = ALL32(1 << FP16_MANTISSA);
        F = _mm512_mask_sub_epi16(F, _mm512_cmplt_epu16_mask(u, least), F, ALL32(0x8000));
        u = _mm512_max_epu16(u, least);
    }
    F = _mm512_srlv_epi16(F, _mm512_srli_epi16(each_of_two(top) - u, mantissa));
    return _mm512_add_epi16(_mm512_mulhi_epu16(F, each_of_two(factor)), ALL32(2));
}

#define DEFINE_QUICK(dtype, mantissa, bias, least)                                                                             \
    INLINE int quick_##dtype(const uint16_t *restrict x, const uint32_t *restrict maxima, const float *restrict step,          \
                             const float *restrict inverse, int blocks, uint8_t *restrict packed) {                            \
        uint32_t top[CHUNK], factor[CHUNK];                                                                                    \
        uint64_t doubtful = 0;                                                                                                 \
        int fits = 0; /* 16 bits; not where all of a block are subnormal */                                                    \
        for (int b = 0; b < blocks; b++) {                                                                                     \
            int biased = (int)(maxima[b] >> 23) - bias;                                                                        \
            biased = biased > least ? biased : least;                                                                          \
            float R = fp4_float((unsigned)(biased + bias) << 23) * 0x1p13f * inverse[b];                                       \
            fits += (R < 65536.0f) | (maxima[b] == 0);                                                                         \
            top[b] = (uint32_t)(((biased + 1) << mantissa) - 1);                                                               \
            factor[b] = (uint32_t)(int)R;                                                                                      \
        }                                                                                                                      \
        if (fits < blocks) return 0;                                                                                           \
        for (int b = 0; b + 2 <= blocks; b += 2) {                                                                             \
            __m512i value = _mm512_loadu_si512(x + b * 16), q = quotients(value, top + b, factor + b, mantissa);               \
            __m512i at = _mm512_srli_epi16(q, 10), codes = _mm512_permutexvar_epi16(at, (__m512i)code_of);                     \
            int is_near = _mm512_testn_epi16_mask(q, _mm512_permutexvar_epi16(at, (__m512i)near_of)) != 0;                     \
            doubtful |= (uint64_t)is_near << b;                                                                                \
            codes = _mm512_mask_add_epi16(codes, _mm512_cmpgt_epu16_mask(value, ALL32(0x8000)), codes, ALL32(8));              \
            codes = codes | _mm512_srli_epi32(codes, 12);                                                                      \
            _mm_storeu_si128((__m128i *)(packed + b * 8), _mm512_cvtepi32_epi8(codes));                                        \
        }                                                                                                                      \
        for (; doubtful; doubtful &= doubtful - 1) {                                                                           \
            int b = __builtin_ctzll(doubtful);                                                                                 \
            float wide[32];                                                                                                    \
            quick_fp32(widen_##dtype(x + b * 16, 32, wide), maxima, step + b, inverse + b, 2, packed + b * 8);                 \
        }                                                                                                                      \
        return blocks & ~1;                                                                                                    \
    }
DEFINE_QUICK(bf16, BF16_MANTISSA, 0, 0)
DEFINE_QUICK(fp16, FP16_MANTISSA, FP16_BIAS, 1)
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

INLINE int quick_bf16(const uint16_t *restrict x, const uint32_t *restrict maxima, const float *restrict step,
                      const float *restrict inverse, int blocks, uint8_t *restrict packed) {
    uint32_t T[4][8] __attribute__((aligned(32)));
    const int per_block = 16 / LANES;
    int b = 0;
    for (; b + WIDTH / 8 <= blocks; b += WIDTH / 8) { /* four vectors */
        for (int i = 0; i < WIDTH / 8; i++) store_thresholds(step[b + i], T[i]);
        const uint16_t *p = x + b * 16;
        STORE(packed + b * 8, pack4(codes_under(p, T[0]), codes_under(p + LANES, T[1 / per_block]),
                                    codes_under(p + 2 * LANES, T[2 / per_block]), codes_under(p + 3 * LANES, T[3 / per_block])));
    }
    return (void)maxima, (void)inverse, b;
}

INLINE int is_quick(float step, float inverse, float block_amax) {
    return (void)inverse, (void)block_amax, (step >= 0x1p-100f) & (step <= 0x1p16f);
}
#define quick_fp16(x, maxima, step, inverse, blocks, packed) 0
#define quick_fp32(x, maxima, step, inverse, blocks, packed) 0
#endif
#endif
