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
        if (quick) done = quick_##dtype(x, step, inverse, blocks, packed);                                                    \
        for (int b = 0; quick < blocks && b < done; b++)                                                                      \
            if (!is_quick(step[b], inverse[b], fp4_float(maxima[b]), LARGEST_STEP_##dtype))                                   \
                divided(float_array_##dtype(x + b * 16, 16, wide), step + b, 1, packed + b * 8);                              \
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

/* A block scale is a power of two, which moves the exponent alone: so the midpoints are seven constants in 16-bit words of sign,
 * exponent and mantissa, bf16's or fp16's.  Of float32 it is the upper half, odd where a bit below is set: no midpoint is odd.
 *
 *   UNIT_D                by how much the word of twice a value is more
 *   FIRST_D, ONE_D        the block scale under which words stay as they are, and what 1 is then
 *   LEAST_D .. LARGEST_D  block scales under which midpoints are normal numbers, no value underflows and no difference overflows,
 *                         also where weights choose a scale 2^40 below; others are worked out in float32 */
enum { UNIT_bf16 = 1 << 7, FIRST_bf16 = 127, ONE_bf16 = 127 * UNIT_bf16, LEAST_bf16 = 3, LARGEST_bf16 = 143 };
enum { UNIT_fp16 = 1 << 10, FIRST_fp16 = 127 - 15, ONE_fp16 = 0, LEAST_fp16 = FIRST_fp16 + 3, LARGEST_fp16 = 142 };
enum { UNIT_fp32 = UNIT_bf16, FIRST_fp32 = 127, ONE_fp32 = ONE_bf16, LEAST_fp32 = 3, LARGEST_fp32 = 127 };

#if SIDE == 16
/* A block is one vector of words.  The word of every midpoint is that of 0.25 and some quarters of a UNIT.  So what a word is above
 * that of 0.25 is cut into cells, a quarter of a UNIT each: cell_codes has the code of each cell, and first_codes that of a cell's
 * first word, which differs where it is a midpoint whose tie goes down. */
static const uint16_t cell_codes[32] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
static const uint16_t first_codes[32] = {0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};

INLINE __m512i words_bf16(const uint16_t *restrict x) { return LOAD(__m512i, x); }
INLINE __m512i words_fp16(const uint16_t *restrict x) { return LOAD(__m512i, x); }
INLINE __m512i odd_where_cut(u32s bits) { return (__m512i)(bits | ((bits & 0xFFFFu) + 0xFFFFu)); }
INLINE __m512i words_fp32(const float *restrict x) {
    static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(odd_where_cut(LOAD(u32s, x)), LOAD(__m512i, upper), odd_where_cut(LOAD(u32s, x + 16)));
}

/* least: the word of a quarter of the step */
INLINE void mxfp4_codes(__m512i word, int16_t least, int quarter_bits, uint8_t *restrict packed) {
    __m512i above = _mm512_subs_epu16(word & _mm512_set1_epi16(INT16_MAX), _mm512_set1_epi16(least));
    __m512i cell = _mm512_min_epu16(_mm512_srli_epi16(above, quarter_bits), _mm512_set1_epi16(31));
    __mmask32 is_first = _mm512_testn_epi16_mask(above, _mm512_set1_epi16((int16_t)((1 << quarter_bits) - 1)));
    __m512i codes = _mm512_permutexvar_epi16(cell, LOAD(__m512i, cell_codes));
    codes = _mm512_mask_permutexvar_epi16(codes, is_first, cell, LOAD(__m512i, first_codes));
    __mmask32 is_below = _mm512_cmpgt_epu16_mask(word, _mm512_set1_epi16(INT16_MIN)); /* -0.0 is not */
    codes = _mm512_mask_add_epi16(codes, is_below, codes, _mm512_set1_epi16(8));
    STORE(packed, _mm512_cvtepi32_epi8(codes | _mm512_srli_epi32(codes, 12)));
}

#define DEFINE_MXFP4_BLOCKS(dtype, type, quarter_bits)                                                                        \
    INLINE int mxfp4_blocks_##dtype(const type *restrict x, const int16_t *restrict offset, int blocks, uint8_t *restrict packed) { \
        const int16_t least = ONE_##dtype - 2 * UNIT_##dtype;                                                                 \
        for (int b = 0; b < blocks; b++) {                                                                                    \
            ask_for(x + (b + CHUNK) * 32, 32 * sizeof(type));                                                                 \
            mxfp4_codes(words_##dtype(x + b * 32), (int16_t)(offset[b] + least), quarter_bits, packed + b * 16);              \
        }                                                                                                                     \
        return blocks;                                                                                                        \
    }
DEFINE_MXFP4_BLOCKS(bf16, uint16_t, 5)
DEFINE_MXFP4_BLOCKS(fp16, uint16_t, 8)
DEFINE_MXFP4_BLOCKS(fp32, float, 5)
#else
INLINE i16v words_bf16(const uint16_t *restrict x) { return LOAD(i16v, x); }
INLINE i16v words_fp16(const uint16_t *restrict x) { return LOAD(i16v, x); }
INLINE u32v odd_where_cut(u32v bits) { return bits | ((bits & 0xFFFFu) + 0xFFFFu); }
INLINE i16v words_fp32(const float *restrict x) {
    u32v a = odd_where_cut(LOAD(u32v, x)), b = odd_where_cut(LOAD(u32v, x + LANES / 2));
#if WIDTH == 32
    return (i16v)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16)), 0xD8);
#elif defined(__SSE4_1__)
    return (i16v)_mm_packus_epi32((__m128i)(a >> 16), (__m128i)(b >> 16));
#else
    return SHUFFLE((i16v)a, (i16v)b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

INLINE i16v mxfp4_codes(i16v word, int16_t offset, int16_t one, int16_t unit) {
    i16v u = magnitude16(word) - offset;
    int16_t two = (int16_t)(one + unit), half = unit / 2, quarter = unit / 4;
    i16v passed = ((u > (int16_t)(one - 2 * unit)) + (u >= (int16_t)(one - half))) +
                  ((u > (int16_t)(one + quarter)) + (u >= (int16_t)(one + half + quarter))) +
                  ((u > (int16_t)(two + quarter)) + (u >= (int16_t)(two + half + quarter))) + (u > (int16_t)(two + unit + quarter));
    return sign16(word) - passed;
}

#define CODES(dtype, x, offset) mxfp4_codes(words_##dtype(x), offset, ONE_##dtype, UNIT_##dtype)
#define DEFINE_MXFP4_BLOCKS(dtype, type)                                                                                      \
    INLINE int mxfp4_blocks_##dtype(const type *restrict x, const int16_t *restrict offset, int blocks, uint8_t *restrict packed) { \
        int b = 0;                                                                                                            \
        for (; b + WIDTH / 16 <= blocks; b += WIDTH / 16) { /* four vectors */                                                \
            const type *p = x + b * 32;                                                                                       \
            int16_t even = offset[b], odd = offset[b + WIDTH / 32];                                                           \
            STORE(packed + b * 16, pack4(CODES(dtype, p, even), CODES(dtype, p + LANES, even),                                \
                                         CODES(dtype, p + 2 * LANES, odd), CODES(dtype, p + 3 * LANES, odd)));                \
        }                                                                                                                     \
        return b;                                                                                                             \
    }
DEFINE_MXFP4_BLOCKS(bf16, uint16_t)
DEFINE_MXFP4_BLOCKS(fp16, uint16_t)
DEFINE_MXFP4_BLOCKS(fp32, float)
#endif

/* A product with a power of two is the division by its inverse. */
static __attribute__((noinline)) void mxfp4_block(const float *restrict x, uint8_t block_scale, uint8_t *restrict packed) {
    uint16_t codes[32];
    float inverse_step = fp4_float((254u - block_scale) << 23);
    for (int j = 0; j < 32; j++) codes[j] = (uint16_t)e2m1_encode(x[j] * inverse_step);
    pack_codes(codes, 32, packed);
}

/* At most CHUNK blocks, the first of which is number `first`. */
#define DEFINE_MXFP4(dtype, type)                                                                                             \
    INLINE void mxfp4_chunk_##dtype(const type *restrict x, int64_t first, int blocks, const Choice *choice,                  \
                                    uint8_t *restrict packed, uint8_t *restrict block_scales) {                               \
        uint32_t maxima[CHUNK];                                                                                               \
        int16_t offset[CHUNK];                                                                                                \
        float wide[CHUNK * 32];                                                                                               \
        int slow = 0;                                                                                                         \
        if (choice->weights || choice->rule == MXFP4_MSE)                                                                     \
            NAME(choose_mxfp4)(float_array_##dtype(x, blocks * 32, wide), first, blocks, choice, block_scales);               \
        else {                                                                                                                \
            float_maxima_##dtype(x, blocks, 32, maxima);                                                                      \
            for (int i = 0; i < blocks; i++) block_scales[i] = (uint8_t)e8m0_encode(maxima[i], choice->rule);                 \
        }                                                                                                                     \
        for (int i = 0; i < blocks; i++) {                                                                                    \
            int is_slow = (block_scales[i] < LEAST_##dtype) | (block_scales[i] > LARGEST_##dtype);                            \
            offset[i] = is_slow ? 0 : (int16_t)((block_scales[i] - FIRST_##dtype) * UNIT_##dtype);                              \
            slow += is_slow;                                                                                                  \
        }                                                                                                                     \
        int b = mxfp4_blocks_##dtype(x, offset, blocks, packed);                                                              \
        for (int i = slow ? 0 : b; i < blocks; i++)                                                                           \
            if (i >= b || block_scales[i] < LEAST_##dtype || block_scales[i] > LARGEST_##dtype)                               \
                mxfp4_block(float_array_##dtype(x + i * 32, 32, wide), block_scales[i], packed + i * 16);                     \
    }                                                                                                                         \
    static void mxfp4_##dtype(const type *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,              \
                              uint8_t *restrict block_scales) {                                                               \
        for (int64_t first = 0, blocks = n / 32; first < blocks; first += CHUNK)                                              \
            mxfp4_chunk_##dtype(x + first * 32, first, (int)(blocks - first < CHUNK ? blocks - first : CHUNK), choice,        \
                                packed + first * 16, block_scales + first);                                                   \
    }
DEFINE_MXFP4(bf16, uint16_t)
DEFINE_MXFP4(fp16, uint16_t)
DEFINE_MXFP4(fp32, float)

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
