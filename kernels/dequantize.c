/* Dequantization on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   dequantize_nvfp4_D(packed, block_scales, n, global, is_divisor, y)    n % 16 == 0; *global: float32, as stored
 *   dequantize_mxfp4_D(packed, block_scales, n, y)                        n % 32 == 0
 *
 * y = e2m1(code) * step in float32, then one rounding to D (bf16, fp16 or fp32); step is block_scale * global, or
 * block_scale / global where a divisor is stored.  y is aligned to its type; packed and block_scales need no alignment.
 * Bytes equal dequantize in fp4convert/codec.py.  Bytes moved per bf16 element: NVFP4 0.5625 + 2, MXFP4 0.53125 + 2.
 */
#include "vector.h"

#ifndef __clang__
#define LOOKUP(table, index) __builtin_shuffle(table, index)
#elif defined(__SSSE3__)
typedef char c8x16 __attribute__((vector_size(16)));
#define LOOKUP(table, index) ((u8x16)__builtin_ia32_pshufb128((c8x16)(table), (c8x16)(index)))
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define LOOKUP(table, index) ((u8x16)vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)(index)))
#else
INLINE u8x16 LOOKUP(u8x16 table, u8x16 index) { u8x16 out; for (int j = 0; j < 16; j++) out[j] = table[index[j]]; return out; }
#endif

/* 16 codes -> 16 two-byte values, from the 8 values of the non-negative codes, split into a table of low and one of high bytes. */
INLINE void expand16(const uint8_t *restrict packed, const uint16_t *restrict values, uint16_t *restrict y) {
    const u8x16 sign = {0, 0, 0, 0, 0, 0, 0, 0, 128, 128, 128, 128, 128, 128, 128, 128};
    u8x16 bytes = LOAD(u8x16, values);
    u8x16 low = SHUFFLE(bytes, bytes, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    u8x16 high = SHUFFLE(bytes, bytes, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15) ^ sign;
    u16x8 pairs = __builtin_convertvector(LOAD(u8x8, packed), u16x8);
    u8x16 codes = (u8x16)((pairs | (pairs << 4)) & 0x0F0F);
    u8x16 l = LOOKUP(low, codes), h = LOOKUP(high, codes);
    STORE(y, SHUFFLE(l, h, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    STORE(y + 8, SHUFFLE(l, h, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}

INLINE void expand16_fp32(const uint8_t *restrict packed, float step, float *restrict y) {
    for (int j = 0; j < 8; j++) {
        y[2 * j] = e2m1_decode(packed[j] & 15u) * step;
        y[2 * j + 1] = e2m1_decode((unsigned)packed[j] >> 4) * step;
    }
}

#define EXPAND_TABLE(to)                                                                        \
    {                                                                                           \
        uint16_t values[8];                                                                     \
        for (int c = 0; c < 8; c++) values[c] = to(e2m1_decode((unsigned)c) * step[b]);         \
        for (int k = 0; k < width; k += 16)                                                     \
            expand16(packed + (b * width + k) / 2, values, y + b * width + k);                  \
    }
#define EXPAND_bf16 EXPAND_TABLE(fp4_to_bf16)
#define EXPAND_fp16 EXPAND_TABLE(fp4_to_fp16)
#define EXPAND_fp32 \
    for (int k = 0; k < width; k += 16) expand16_fp32(packed + (b * width + k) / 2, step[b], y + b * width + k);

#define DEFINE_DEQUANTIZE(dtype, type)                                                                                  \
    void NAME(dequantize_nvfp4_##dtype)(const uint8_t *restrict packed, const uint8_t *restrict scales, int64_t n,      \
                                        const float *restrict global, int64_t is_divisor, type *restrict y) {           \
        const int width = 16;                                                                                           \
        float step[CHUNK];                                                                                              \
        for (; n > 0; n -= CHUNK * 16, packed += CHUNK * 8, scales += CHUNK, y += CHUNK * 16) {                         \
            int blocks = (int)(n < CHUNK * 16 ? n / 16 : CHUNK);                                                        \
            for (int b = 0; b < blocks; b++) step[b] = e4m3_decode(scales[b]);                                          \
            if (is_divisor) for (int b = 0; b < blocks; b++) step[b] /= *global;                                        \
            else for (int b = 0; b < blocks; b++) step[b] *= *global;                                                   \
            for (int b = 0; b < blocks; b++) EXPAND_##dtype                                                             \
        }                                                                                                               \
    }                                                                                                                   \
    void NAME(dequantize_mxfp4_##dtype)(const uint8_t *restrict packed, const uint8_t *restrict scales, int64_t n,      \
                                        type *restrict y) {                                                             \
        const int width = 32;                                                                                           \
        float step[CHUNK];                                                                                              \
        for (; n > 0; n -= CHUNK * 32, packed += CHUNK * 16, scales += CHUNK, y += CHUNK * 32) {                        \
            int blocks = (int)(n < CHUNK * 32 ? n / 32 : CHUNK);                                                        \
            for (int b = 0; b < blocks; b++) step[b] = e8m0_decode(scales[b]);                                          \
            for (int b = 0; b < blocks; b++) EXPAND_##dtype                                                             \
        }                                                                                                               \
    }
DEFINE_DEQUANTIZE(bf16, uint16_t)
DEFINE_DEQUANTIZE(fp16, uint16_t)
DEFINE_DEQUANTIZE(fp32, float)
