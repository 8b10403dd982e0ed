/* The largest magnitude of every block, as the CPU's vectors find it: from 16-bit types a tree of interleaves, no float conversions.
 * And values as float32 (widen), for what is worked out in that. */
#ifndef FP4_MAXIMA_H
#define FP4_MAXIMA_H

#include "vector.h"

INLINE i16v magnitude16(i16v x) { return x & (int16_t)0x7FFF; }

#if WIDTH == 32
INLINE i16v max16(i16v a, i16v b) { return (i16v)_mm256_max_epi16((__m256i)a, (__m256i)b); }
#elif defined(__clang__)
INLINE i16v max16(i16v a, i16v b) { return __builtin_elementwise_max(a, b); }
#else
INLINE i16v max16(i16v a, i16v b) { i16v greater = a > b; return (a & greater) | (b & ~greater); }
#endif

/* Magnitude bits, bf16 or fp16, of LANES consecutive blocks of `width` (16 or 32), as a tree of interleaves. */
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

/* Magnitude bits, bf16 or fp16, of every block. */
INLINE void block_maxima16(const uint16_t *restrict x, int blocks, int width, uint16_t *restrict maxima) {
    int b = 0;
    for (; b + LANES <= blocks; b += LANES) STORE(maxima + b, tree_maxima(x + b * width, width));
    for (; b < blocks; b++) {
        int16_t largest = 0;
        for (int j = 0; j < width; j++) {
            int16_t magnitude = (int16_t)(x[b * width + j] & 0x7FFF);
            largest = magnitude > largest ? magnitude : largest;
        }
        maxima[b] = (uint16_t)largest;
    }
}

/* n % 16 == 0; finite.  F16C's conversion is exact, subnormals too; compilers do not find it in the scalar form. */
INLINE const float *widen_fp16(const uint16_t *restrict x, int n, float *restrict wide) {
#ifdef __F16C__
    for (int i = 0; i < n; i += 8) STORE(wide + i, _mm256_cvtph_ps(LOAD(__m128i, x + i)));
#else
    for (int i = 0; i < n; i++) wide[i] = fp4_from_finite_fp16(x[i]);
#endif
    return wide;
}

INLINE const float *widen_fp32(const float *restrict x, int n, float *restrict wide) { (void)n, (void)wide; return x; }

INLINE const float *widen_bf16(const uint16_t *restrict x, int n, float *restrict wide) {
    for (int i = 0; i < n; i++) wide[i] = fp4_from_bf16(x[i]);
    return wide;
}

/* float32 magnitude bits of every block; blocks <= CHUNK */
INLINE void widen_maxima_bf16(const uint16_t *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    uint16_t narrow[CHUNK];
    block_maxima16(x, blocks, width, narrow);
    for (int b = 0; b < blocks; b++) maxima[b] = (uint32_t)narrow[b] << 16;
}

INLINE void widen_maxima_fp16(const uint16_t *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    uint16_t narrow[CHUNK];
    block_maxima16(x, blocks, width, narrow);
    for (int b = 0; b < blocks; b++) maxima[b] = fp4_bits(fp4_from_finite_fp16(narrow[b]));
}

INLINE void widen_maxima_fp32(const float *restrict x, int blocks, int width, uint32_t *restrict maxima) {
    for (int b = 0; b < blocks; b++) {
        uint32_t largest = 0;
        for (int j = 0; j < width; j++) {
            uint32_t magnitude = fp4_bits(x[b * width + j]) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        maxima[b] = largest;
    }
}

#endif
