/* The largest magnitude of every block, as the CPU's vectors find it, and values as float32, for what is worked out in that.
 *
 *   floats_D(x)                                  SIDE values as a vector of float32
 *   float_array_D(x, n, wide)                    n values as float32: `wide` filled with them, or x itself where it is float32
 *   float_maxima_D(x, blocks, width, maxima)     of every block the float32 bits of its largest magnitude
 *   block_maxima16(x, blocks, width, maxima)     the same as bits of bf16 or fp16, whichever x is
 *
 * D is bf16, fp16 or fp32; values are finite.  Magnitudes are compared as integers, in a tree of interleaves, and of a block's the
 * largest alone becomes float32. */
#ifndef FP4_BLOCK_AMAX_H
#define FP4_BLOCK_AMAX_H

#include "vector.h"

INLINE i16v magnitude16(i16v x) { return x & (int16_t)0x7FFF; }

/* Magnitude bits, bf16 or fp16, of TOGETHER consecutive blocks of `width` (16 or 32), as a tree of interleaves. */
#if SIDE == 16
#define TOGETHER 32
INLINE __m512i eight_maxima(const uint16_t *restrict x) { /* of eight vectors, in every quarter of 16 bytes: a word for each */
    __m512i v[8];
    for (int i = 0; i < 8; i++) v[i] = LOAD(__m512i, x + i * 32) & _mm512_set1_epi16(INT16_MAX);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++)
            v[i] = _mm512_max_epi16(_mm512_unpacklo_epi16(v[i], v[i + half]), _mm512_unpackhi_epi16(v[i], v[i + half]));
    return v[0];
}
INLINE __m512i max_of_quarters(__m512i a, __m512i b) { /* of quarters 0 and 1, 2 and 3 of a, then of b */
    return _mm512_max_epi16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
}
INLINE __m512i tree_maxima(const uint16_t *restrict x, int width) {
    static const uint16_t even_then_odd[32] = {0,  8,  1,  9,  2,  10, 3,  11, 4,  12, 5,  13, 6,  14, 7,  15,
                                               16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31};
    __m512i first = max_of_quarters(eight_maxima(x), eight_maxima(x + 256));
    if (width == 16) return _mm512_permutexvar_epi16(LOAD(__m512i, even_then_odd), first);
    return max_of_quarters(first, max_of_quarters(eight_maxima(x + 512), eight_maxima(x + 768)));
}
#else
#define TOGETHER LANES
#if WIDTH == 32
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27)
#define HIGH(a, b) SHUFFLE(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif
INLINE i16v tree_maxima(const uint16_t *restrict x, int width) {
    i16v v[LANES];
    for (int i = 0; i < LANES; i++) {
        v[i] = magnitude16(LOAD(i16v, x + i * width));
        for (int k = LANES; k < width; k += LANES) v[i] = max16(v[i], magnitude16(LOAD(i16v, x + i * width + k)));
    }
#if WIDTH == 32
    for (int i = 0; i < 8; i++)
        v[i] = max16(SHUFFLE(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                     SHUFFLE(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#endif
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = max16(LOW(v[i], v[i + half]), HIGH(v[i], v[i + half]));
    return v[0];
}
#endif

/* Magnitude bits, bf16 or fp16, of every block. */
INLINE void block_maxima16(const uint16_t *restrict x, int blocks, int width, uint16_t *restrict maxima) {
    int b = 0;
    for (; b + TOGETHER <= blocks; b += TOGETHER) STORE(maxima + b, tree_maxima(x + b * width, width));
    for (; b < blocks; b++) {
        int16_t largest = 0;
        for (int j = 0; j < width; j++) {
            int16_t magnitude = (int16_t)(x[b * width + j] & 0x7FFF);
            largest = magnitude > largest ? magnitude : largest;
        }
        maxima[b] = (uint16_t)largest;
    }
}

/* Conversions are exact, subnormals too, and compilers do not find them in the scalar form. */
#if SIDE == 16
INLINE f32s floats_fp16(const uint16_t *restrict x) { return (f32s)_mm512_cvtph_ps(LOAD(__m256i, x)); }
#elif SIDE == 8
INLINE f32s floats_fp16(const uint16_t *restrict x) { return (f32s)_mm256_cvtph_ps(LOAD(__m128i, x)); }
#elif defined(__ARM_NEON)
INLINE f32s floats_fp16(const uint16_t *restrict x) { return (f32s)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
#else
INLINE f32s floats_fp16(const uint16_t *restrict x) { /* as fp4_from_finite_fp16 */
    u32s bits = words_of16(x);
    return (f32s)((u32s)((f32s)((bits & 0x7FFFu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
}
#endif
INLINE f32s floats_bf16(const uint16_t *restrict x) { return (f32s)(words_of16(x) << 16); }
INLINE f32s floats_fp32(const float *restrict x) { return LOAD(f32s, x); }

/* n % 16 == 0 */
INLINE const float *float_array_bf16(const uint16_t *restrict x, int n, float *restrict wide) {
    for (int i = 0; i < n; i += SIDE) STORE(wide + i, floats_bf16(x + i));
    return wide;
}

INLINE const float *float_array_fp16(const uint16_t *restrict x, int n, float *restrict wide) {
    for (int i = 0; i < n; i += SIDE) STORE(wide + i, floats_fp16(x + i));
    return wide;
}

INLINE const float *float_array_fp32(const float *restrict x, int n, float *restrict wide) { (void)n, (void)wide; return x; }

/* float32 magnitude bits of every block; blocks <= CHUNK */
INLINE void float_maxima_bf16(const uint16_t *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    uint16_t narrow[CHUNK];
    block_maxima16(x, blocks, width, narrow);
    for (int b = 0; b < blocks; b++) maxima[b] = (uint32_t)narrow[b] << 16;
}

INLINE void float_maxima_fp16(const uint16_t *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    uint16_t narrow[CHUNK];
    block_maxima16(x, blocks, width, narrow);
    for (int b = 0; b < blocks; b++) maxima[b] = fp4_bits(fp4_from_finite_fp16(narrow[b]));
}

/* float32 magnitude bits of SIDE consecutive blocks of `width` (16 or 32), as a tree of neighbours. */
#define HALVE(v, count, LOW, HIGH) \
    for (int i = 0; i < (count); i++) v[i] = greater(SHUFFLE(v[2 * i], v[2 * i + 1], LOW), SHUFFLE(v[2 * i], v[2 * i + 1], HIGH))
#if SIDE == 16
#define LOW_1 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_1 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#elif SIDE == 8
#define LOW_1 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_1 2, 10, 3, 11, 6, 14, 7, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#else
#define LOW_1 0, 4, 1, 5
#define HIGH_1 2, 6, 3, 7
#define LOW_2 0, 1, 4, 5
#define HIGH_2 2, 3, 6, 7
#endif
INLINE i32s tree_maxima32(const float *restrict x, int width) {
    i32s v[SIDE];
    for (int i = 0; i < SIDE; i++) {
        v[i] = LOAD(i32s, x + i * width) & 0x7FFFFFFF;
        for (int k = SIDE; k < width; k += SIDE) v[i] = greater(v[i], LOAD(i32s, x + i * width + k) & 0x7FFFFFFF);
        __asm__("" ::: "memory"); /* in this order: gcc's own defeats what processors fetch ahead */
    }
    HALVE(v, SIDE / 2, LOW_1, HIGH_1);
    HALVE(v, SIDE / 4, LOW_2, HIGH_2);
#if SIDE >= 8
    HALVE(v, SIDE / 8, LOW_4, HIGH_4);
#endif
#if SIDE == 16
    HALVE(v, 1, LOW_8, HIGH_8);
#endif
    return v[0];
}

INLINE void float_maxima_fp32(const float *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    int b = 0;
    for (; b + SIDE <= blocks; b += SIDE) STORE(maxima + b, tree_maxima32(x + b * width, width));
    for (; b < blocks; b++) {
        uint32_t largest = 0;
        for (int j = 0; j < width; j++) {
            uint32_t magnitude = fp4_bits(x[b * width + j]) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        maxima[b] = largest;
    }
}

#endif
