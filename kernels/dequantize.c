/* Dequantization on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   dequantize_nvfp4_D(packed, block_scales, n, stored_global, is_divisor, y)    n % 16 == 0; *stored_global: float32
 *   dequantize_mxfp4_D(packed, block_scales, n, y)                               n % 32 == 0
 *
 * y = e2m1(code) * step in float32, then one rounding to D (bf16, fp16 or fp32); step is block_scale * stored_global,
 * or block_scale / stored_global where a divisor is stored.  y is aligned to its type; packed and block_scales need no alignment.
 * Bytes equal dequantize in fp4convert/numerics/codec.py.  Bytes moved per bf16 element: NVFP4 0.5625 + 2, MXFP4 0.53125 + 2.
 */
#include "vector.h"

/* Two-byte values of the non-negative codes, their low bytes and their high bytes apart; entries 8-15 are their negatives. */
typedef struct { u8x16 low, high; } table16;

static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
static const u8x16 negative = {0, 0, 0, 0, 0, 0, 0, 0, 128, 128, 128, 128, 128, 128, 128, 128};

/* Lanes rounded like fp4_to_bf16, in bytes 2 and 3: a NaN step is quiet with its low half clear, so the carry leaves it alone. */
INLINE u8v lanes_bf16(f32v value) {
    u32v bits = (u32v)value;
    return (u8v)(bits + 0x7FFFu + ((bits >> 16) & 1u));
}

#ifndef __F16C__
/* Lanes rounded like fp4_to_fp16, in bytes 2 and 3. */
INLINE u8v lanes_fp16(f32v value) {
#ifdef __ARM_NEON
    return (u8v)((u32v)vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value))) << 16);
#else
    u32v bits = (u32v)value, magnitude = bits & 0x7FFFFFFFu;
    u32v normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    u32v subnormal = (u32v)((f32v)magnitude + 0.5f) - 0x3F000000u;
    u32v is_small = (u32v)((i32v)magnitude < 0x38800000), is_large = (u32v)((i32v)magnitude >= 0x47800000);
    u32v special = 0x7C00u | (0x200u & (u32v)((i32v)magnitude > FP4_INF_BITS));
    u32v finite = (subnormal & is_small) | (normal & ~is_small);
    return (u8v)((special & is_large) << 16 | (finite & ~is_large) << 16 | (bits & 0x80000000u));
#endif
}
#endif

#define DEFINE_TABLE(dtype)                                                                                               \
    INLINE table16 table_##dtype(float step) {                                                                            \
        u8v rounded[32 / WIDTH];                                                                                          \
        for (int i = 0; i < 32 / WIDTH; i++)                                                                              \
            rounded[i] = lanes_##dtype(LOAD(f32v, magnitudes + i * (WIDTH / 4)) * step);                                 \
        return table_of(rounded);                                                                                         \
    }
INLINE table16 table_of(const u8v *restrict rounded) {
    table16 t;
#if WIDTH == 32
    /* within halves, then across them; gcc takes more for one shuffle of bytes */
    const u8v bytes = {2, 6, 10, 14, 3, 7, 11, 15, 0, 0, 0, 0, 0, 0, 0, 0, 2, 6, 10, 14, 3, 7, 11, 15, 0, 0, 0, 0, 0, 0, 0, 0};
    const i32v words = {0, 4, 0, 4, 1, 5, 1, 5};
    __m256i both = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)rounded[0], (__m256i)bytes), (__m256i)words);
    memcpy(&t, &both, sizeof t);
#else
    t.low = SHUFFLE(rounded[0], rounded[1], 2, 6, 10, 14, 18, 22, 26, 30, 2, 6, 10, 14, 18, 22, 26, 30);
    t.high = SHUFFLE(rounded[0], rounded[1], 3, 7, 11, 15, 19, 23, 27, 31, 3, 7, 11, 15, 19, 23, 27, 31);
#endif
    t.high ^= negative;
    return t;
}
DEFINE_TABLE(bf16)
#ifdef __F16C__
INLINE table16 table_fp16(float step) {
    u8x16 words = (u8x16)_mm256_cvtps_ph((__m256)(LOAD(f32v, magnitudes) * step), _MM_FROUND_TO_NEAREST_INT);
    return (table16){SHUFFLE(words, words, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14),
                     SHUFFLE(words, words, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15) ^ negative};
}
#else
DEFINE_TABLE(fp16)
#endif

/* Two-byte values of sixteen codes. */
typedef struct { u16x8 first, second; } values16;

INLINE values16 look_up16(const uint8_t *restrict packed, table16 t) {
    u16x8 pairs = words_of8(packed);
    u8x16 codes = (u8x16)((pairs | (pairs << 4)) & 0x0F0F);
    u8x16 low = LOOKUP(t.low, codes), high = LOOKUP(t.high, codes);
    return (values16){(u16x8)SHUFFLE(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                      (u16x8)SHUFFLE(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}
INLINE void store16(values16 values, uint16_t *restrict y) { STORE(y, values.first); STORE(y + 8, values.second); }
/* Eight values of bf16, times a step. */
INLINE void store_floats8(u16x8 values, float step, float *restrict y) {
#if WIDTH == 32
    STORE(y, (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)values), 16) * step);
#else
    const u16x8 zeros = {0};
    STORE(y, (f32v)SHUFFLE(zeros, values, 0, 8, 1, 9, 2, 10, 3, 11) * step);
    STORE(y + 4, (f32v)SHUFFLE(zeros, values, 4, 12, 5, 13, 6, 14, 7, 15) * step);
#endif
}

/* One block of `width` codes. */
INLINE void block_bf16(const uint8_t *restrict packed, float step, int width, uint16_t *restrict y) {
    table16 t = table_bf16(step);
    for (int k = 0; k < width; k += 16) store16(look_up16(packed + k / 2, t), y + k);
}

INLINE void block_fp16(const uint8_t *restrict packed, float step, int width, uint16_t *restrict y) {
    table16 t = table_fp16(step);
    for (int k = 0; k < width; k += 16) store16(look_up16(packed + k / 2, t), y + k);
}

/* E2M1 values are exact in bf16: look those up, widen, multiply. */
INLINE void block_fp32(const uint8_t *restrict packed, float step, int width, float *restrict y) {
    const table16 exact = {{0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0},
                           {0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0}};
    for (int k = 0; k < width; k += 16) {
        values16 values = look_up16(packed + k / 2, exact);
        store_floats8(values.first, step, y + k);
        store_floats8(values.second, step, y + k + 8);
    }
}

#define DEFINE_DEQUANTIZE(dtype, type)                                                                                    \
    void NAME(dequantize_nvfp4_##dtype)(const uint8_t *restrict packed, const uint8_t *restrict block_scales, int64_t n,  \
                                        const float *restrict stored_global, int64_t is_divisor, type *restrict y) {      \
        const int width = 16;                                                                                             \
        float step[CHUNK];                                                                                                \
        for (; n > 0; n -= CHUNK * 16, packed += CHUNK * 8, block_scales += CHUNK, y += CHUNK * 16) {                     \
            int blocks = (int)(n < CHUNK * 16 ? n / 16 : CHUNK);                                                          \
            for (int b = 0; b < blocks; b++) step[b] = e4m3_decode(block_scales[b]);                                      \
            if (is_divisor) for (int b = 0; b < blocks; b++) step[b] /= *stored_global;                                   \
            else for (int b = 0; b < blocks; b++) step[b] *= *stored_global;                                              \
            for (int b = 0; b < blocks; b++) block_##dtype(packed + b * width / 2, step[b], width, y + b * width);        \
        }                                                                                                                 \
    }                                                                                                                     \
    void NAME(dequantize_mxfp4_##dtype)(const uint8_t *restrict packed, const uint8_t *restrict block_scales, int64_t n,  \
                                        type *restrict y) {                                                               \
        const int width = 32;                                                                                             \
        float step[CHUNK];                                                                                                \
        for (; n > 0; n -= CHUNK * 32, packed += CHUNK * 16, block_scales += CHUNK, y += CHUNK * 32) {                    \
            int blocks = (int)(n < CHUNK * 32 ? n / 32 : CHUNK);                                                          \
            for (int b = 0; b < blocks; b++) step[b] = e8m0_decode(block_scales[b]);                                      \
            for (int b = 0; b < blocks; b++) block_##dtype(packed + b * width / 2, step[b], width, y + b * width);        \
        }                                                                                                                 \
    }
DEFINE_DEQUANTIZE(bf16, uint16_t)
DEFINE_DEQUANTIZE(fp16, uint16_t)
DEFINE_DEQUANTIZE(fp32, float)
