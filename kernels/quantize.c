/* Block quantization on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   quantize_nvfp4_D(x, n, amax, packed, block_scales)                   n % 16 == 0; *amax: float32, largest |x| of the scale group
 *   quantize_mxfp4_D(x, n, rule, packed, block_scales)                   n % 32 == 0; rule: FP4_FLOOR, FP4_EVEN, FP4_CEIL
 *   search_nvfp4_D(x, n, amax, rule, packed, block_scales)               rule: NVFP4_MSE, NVFP4_FOUR_OVER_SIX
 *   search_mxfp4_D(x, n, packed, block_scales)                           rule mse
 *   weigh_nvfp4_D(x, n, amax, weights, columns, packed, block_scales)    rule importance: weights of the squares, one to a column,
 *   weigh_mxfp4_D(x, n, weights, columns, packed, block_scales)          as codec.weigh makes them; n % columns == 0
 *
 * D is bf16, fp16 or fp32: the type of x, which is finite and aligned to its type; packed and block_scales need no alignment.
 * Bytes equal quantize in fp4convert/numerics/codec.py.
 * Bytes moved per bf16 element: NVFP4 2 + 0.5625, MXFP4 2 + 0.53125.
 * The scales come first, CHUNK blocks at a time: from the blocks' largest magnitudes, or from search.c; then the codes.
 */
#include "nvfp4_encode.h"
#include "search.h"

/* --------------------------------------------------------------------------- quantize from float32, any value range */

INLINE void pack_codes(const uint16_t *restrict codes, int n, uint8_t *restrict packed) { /* n % 16 == 0 */
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        STORE(packed + i / 2, pack4(LOAD(i16v, codes + i), LOAD(i16v, codes + i + LANES), LOAD(i16v, codes + i + 2 * LANES),
                                    LOAD(i16v, codes + i + 3 * LANES)));
    for (; i < n; i += 2) packed[i / 2] = (uint8_t)(codes[i] | (codes[i + 1] << 4));
}

/* --------------------------------------------------------------------------------------------------------------- NVFP4 */

static __attribute__((noinline)) void divided(const float *restrict x, const float *restrict step, int blocks,
                                              uint8_t *restrict packed) {
    uint16_t codes[CHUNK * 16];
    for (int b = 0; b < blocks; b++)
        for (int j = b * 16; j < b * 16 + 16; j++) codes[j] = (uint16_t)e2m1_encode(x[j] / step[b]);
    pack_codes(codes, blocks * 16, packed);
}

/* At most CHUNK blocks, the first of which is number `first`. */
#define DEFINE_NVFP4(dtype, type)                                                                                             \
    INLINE void nvfp4_chunk_##dtype(const type *restrict x, int64_t first, int blocks, const Choice *choice,                  \
                                    uint8_t *restrict packed, uint8_t *restrict block_scales) {                               \
        uint32_t maxima[CHUNK], scales[CHUNK];                                                                                \
        float wide[CHUNK * 16], step[CHUNK], inverse[CHUNK];                                                                  \
        int quick = 0, done = 0; /* counted, not and-ed: compilers make branches of that */                                   \
        float_maxima_##dtype(x, blocks, 16, maxima);                                                                          \
        if (choice->weights || choice->rule != NVFP4_AMAX) {                                                                  \
            NAME(choose_nvfp4)(float_array_##dtype(x, blocks * 16, wide), first, blocks, choice, block_scales);               \
            for (int b = 0; b < blocks; b++) scales[b] = block_scales[b];                                                     \
        } else {                                                                                                              \
            for (int b = 0; b < blocks; b++) scales[b] = nvfp4_block_scale(fp4_float(maxima[b]), choice->global_scale);       \
            for (int b = 0; b < blocks; b++) block_scales[b] = (uint8_t)scales[b];                                            \
        }                                                                                                                     \
        for (int b = 0; b < blocks; b++) {                                                                                    \
            step[b] = e4m3_decode_positive(scales[b]) * choice->global_scale;                                                 \
            inverse[b] = 1.0f / step[b];                                                                                      \
            quick += is_quick(step[b], inverse[b], fp4_float(maxima[b]), LARGEST_STEP_##dtype);                               \
        }                                                                                                                     \
        if (quick == blocks) done = quick_##dtype(x, step, inverse, blocks, packed);                                          \
        if (done == blocks) return;                                                                                           \
        divided(float_array_##dtype(x + done * 16, (blocks - done) * 16, wide),                                               \
                step + done, blocks - done, packed + done * 8);                                                               \
    }                                                                                                                         \
    static void nvfp4_##dtype(const type *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,              \
                              uint8_t *restrict block_scales) {                                                               \
        int64_t first = 0, blocks = n / 16;                                                                                   \
        for (; first + CHUNK <= blocks; first += CHUNK, x += CHUNK * 16, packed += CHUNK * 8, block_scales += CHUNK)          \
            nvfp4_chunk_##dtype(x, first, CHUNK, choice, packed, block_scales);                                               \
        if (first < blocks) nvfp4_chunk_##dtype(x, first, (int)(blocks - first), choice, packed, block_scales);               \
    }
DEFINE_NVFP4(bf16, uint16_t)
DEFINE_NVFP4(fp16, uint16_t)
DEFINE_NVFP4(fp32, float)

/* --------------------------------------------------------------------------------------------------------------- MXFP4 */

/* Scales of at most CHUNK blocks, the first of which is number `first`; maxima: their largest magnitudes, as float32 bits. */
INLINE void mxfp4_scales(const float *restrict x, const uint32_t *restrict maxima, int64_t first, int blocks,
                         const Choice *choice, uint8_t *restrict block_scales) {
    if (choice->weights || choice->rule == MXFP4_MSE) return NAME(choose_mxfp4)(x, first, blocks, choice, block_scales);
    for (int b = 0; b < blocks; b++) block_scales[b] = (uint8_t)e8m0_encode(maxima[b], choice->rule);
}

/* The same for MXFP4; a product with a power of two is the division by its inverse. */
static void mxfp4_chunk(const float *restrict x, int blocks, const uint8_t *restrict block_scales, uint8_t *restrict packed) {
    uint16_t codes[CHUNK * 32];
    for (int b = 0; b < blocks; b++) {
        float inverse_step = fp4_float((254u - block_scales[b]) << 23);
        for (int j = b * 32; j < b * 32 + 32; j++) codes[j] = (uint16_t)e2m1_encode(x[j] * inverse_step);
    }
    pack_codes(codes, blocks * 32, packed);
}

enum { PART = CHUNK / 2 }; /* blocks: 4 KB of float32, a page */

#define DEFINE_MXFP4(dtype, type)                                                                                     \
    static void mxfp4_##dtype(const type *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,      \
                              uint8_t *restrict block_scales) {                                                       \
        uint32_t maxima[PART];                                                                                        \
        float wide[PART * 32];                                                                                        \
        for (int64_t start = 0; start < n; start += PART * 32, packed += PART * 16, block_scales += PART) {           \
            int blocks = (int)(n - start < PART * 32 ? n - start : PART * 32) / 32;                                   \
            float_maxima_##dtype(x + start, blocks, 32, maxima);                                                      \
            const float *values = float_array_##dtype(x + start, blocks * 32, wide);                                  \
            mxfp4_scales(values, maxima, start / 32, blocks, choice, block_scales);                                   \
            mxfp4_chunk(values, blocks, block_scales, packed);                                                        \
        }                                                                                                             \
    }
DEFINE_MXFP4(fp16, uint16_t)
DEFINE_MXFP4(fp32, float)

/* A power-of-two block scale only moves the exponent, so the midpoints become seven constants in bf16 bits.
 * Valid for block_scales 3..143 (no subnormal quotient matters, none underflows); other blocks take the chunk above. */
INLINE i16v mxfp4_codes(const uint16_t *restrict x, int16_t offset) {
    i16v value = LOAD(i16v, x), u = magnitude16(value) - offset;
    i16v passed = ((u > (int16_t)0x3E80) + (u >= (int16_t)0x3F40)) + ((u > (int16_t)0x3FA0) + (u >= (int16_t)0x3FE0)) +
                  ((u > (int16_t)0x4020) + (u >= (int16_t)0x4060)) + (u > (int16_t)0x40A0);
    return sign16(value) - passed;
}

static __attribute__((noinline)) void mxfp4_slow_block(const uint16_t *restrict x, const uint8_t *restrict block_scale,
                                                       uint8_t *restrict packed) {
    float wide[32];
    mxfp4_chunk(float_array_bf16(x, 32, wide), 1, block_scale, packed);
}

static void mxfp4_bf16(const uint16_t *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,
                       uint8_t *restrict block_scales) {
    uint16_t maxima[CHUNK];
    int16_t offset[CHUNK];
    float wide[CHUNK * 32];
    for (int64_t first = 0; first < n / 32; first += CHUNK, x += CHUNK * 32, packed += CHUNK * 16, block_scales += CHUNK) {
        int blocks = (int)(n / 32 - first < CHUNK ? n / 32 - first : CHUNK), b = 0, slow = 0;
        if (choice->weights || choice->rule == MXFP4_MSE)
            NAME(choose_mxfp4)(float_array_bf16(x, blocks * 32, wide), first, blocks, choice, block_scales);
        else {
            block_maxima16(x, blocks, 32, maxima);
            for (int i = 0; i < blocks; i++) block_scales[i] = (uint8_t)e8m0_encode((uint32_t)maxima[i] << 16, choice->rule);
        }
        for (int i = 0; i < blocks; i++) {
            offset[i] = (int16_t)((block_scales[i] - 127) * 128);
            slow |= (block_scales[i] < 3) | (block_scales[i] > 143);
        }
        if (!slow)
            for (; b + WIDTH / 16 <= blocks; b += WIDTH / 16) { /* four vectors */
                const uint16_t *p = x + b * 32;
                int16_t even = offset[b], odd = offset[b + WIDTH / 32];
                STORE(packed + b * 16, pack4(mxfp4_codes(p, even), mxfp4_codes(p + LANES, even),
                                             mxfp4_codes(p + 2 * LANES, odd), mxfp4_codes(p + 3 * LANES, odd)));
            }
        for (; b < blocks; b++) mxfp4_slow_block(x + b * 32, block_scales + b, packed + b * 16);
    }
}

/* ------------------------------------------------------------------------------------------------------- entry points */

#define DEFINE_ENTRIES(dtype, type)                                                                                          \
    void NAME(quantize_nvfp4_##dtype)(const type *x, int64_t n, const float *amax, uint8_t *p, uint8_t *s) {                 \
        nvfp4_##dtype(x, n, &(const Choice){NVFP4_AMAX, nvfp4_global_scale(*amax, NVFP4_AMAX), NULL, 1}, p, s);              \
    }                                                                                                                        \
    void NAME(quantize_mxfp4_##dtype)(const type *x, int64_t n, int64_t rule, uint8_t *p, uint8_t *s) {                      \
        mxfp4_##dtype(x, n, &(const Choice){rule, 1.0f, NULL, 1}, p, s);                                                     \
    }                                                                                                                        \
    void NAME(search_nvfp4_##dtype)(const type *x, int64_t n, const float *amax, int64_t rule, uint8_t *p, uint8_t *s) {     \
        nvfp4_##dtype(x, n, &(const Choice){rule, nvfp4_global_scale(*amax, rule), NULL, 1}, p, s);                          \
    }                                                                                                                        \
    void NAME(search_mxfp4_##dtype)(const type *x, int64_t n, uint8_t *p, uint8_t *s) {                                      \
        mxfp4_##dtype(x, n, &(const Choice){MXFP4_MSE, 1.0f, NULL, 1}, p, s);                                                \
    }                                                                                                                        \
    void NAME(weigh_nvfp4_##dtype)(const type *x, int64_t n, const float *amax, const float *weights, int64_t columns,       \
                                   uint8_t *p, uint8_t *s) {                                                                 \
        nvfp4_##dtype(x, n, &(const Choice){NVFP4_MSE, nvfp4_global_scale(*amax, NVFP4_MSE), weights, columns}, p, s);       \
    }                                                                                                                        \
    void NAME(weigh_mxfp4_##dtype)(const type *x, int64_t n, const float *weights, int64_t columns, uint8_t *p, uint8_t *s) { \
        mxfp4_##dtype(x, n, &(const Choice){MXFP4_MSE, 1.0f, weights, columns}, p, s);                                       \
    }
DEFINE_ENTRIES(bf16, uint16_t)
DEFINE_ENTRIES(fp16, uint16_t)
DEFINE_ENTRIES(fp32, float)
