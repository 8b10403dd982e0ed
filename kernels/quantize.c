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
 * Bytes equal quantize in fp4convert/codec.py.
 * Bytes moved per bf16 element: NVFP4 2 + 0.5625, MXFP4 2 + 0.53125.
 * The scales come first, CHUNK blocks at a time: from the blocks' largest magnitudes, or from search.c; then the codes.
 */
#include "maxima.h"
#include "search.h"

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

/* --------------------------------------------------------------------------- quantize from float32, any value range */

INLINE void pack_codes(const uint16_t *restrict codes, int n, uint8_t *restrict packed) { /* n % 16 == 0 */
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        STORE(packed + i / 2, pack4(LOAD(i16v, codes + i), LOAD(i16v, codes + i + LANES), LOAD(i16v, codes + i + 2 * LANES),
                                    LOAD(i16v, codes + i + 3 * LANES)));
    for (; i < n; i += 2) packed[i / 2] = (uint8_t)(codes[i] | (codes[i + 1] << 4));
}

/* sound_blocks: codes of as many leading blocks of a sound chunk as have a fast way; returns their number.
 *
 * A block to a 64-byte vector, and no division: x / step comes from two corrections of x * fl(1 / step).  The first brings it
 * within one unit in its last place, so that its residual is exact, and with a correctly rounded inverse the second rounds
 * correctly (Markstein, IBM J. Res. Dev. 34, 1990).  Sound blocks are those where residuals stay normal, no x but zero underflows,
 * no code saturates (6.9: the inverse is not exact) and the step's mantissa is not all ones. */
#ifdef __AVX512BW__
#define ALL16(value) _mm512_set1_ps(value)

INLINE int is_sound(float step, float inverse, float block_amax) {
    return (step >= 0x1p-100f) & (step <= 1.0f) & ((fp4_bits(step) & 0x7FFFFFu) != 0x7FFFFFu) & (block_amax * inverse < 6.9f);
}

INLINE int sound_blocks(const float *restrict x, const float *restrict step, const float *restrict inverse, int blocks,
                        uint8_t *restrict packed) {
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
    return blocks;
}
#else
INLINE int is_sound(float step, float inverse, float block_amax) { return (void)step, (void)inverse, (void)block_amax, 0; }
INLINE int sound_blocks(const float *x, const float *step, const float *inverse, int blocks, uint8_t *packed) {
    return (void)x, (void)step, (void)inverse, (void)blocks, (void)packed, 0;
}
#endif

/* Scales of at most CHUNK blocks, the first of which is number `first`; maxima: their largest magnitudes, as float32 bits. */
INLINE void nvfp4_scales(const float *restrict x, const uint32_t *restrict maxima, int64_t first, int blocks,
                         const Choice *choice, uint8_t *restrict block_scales) {
    if (choice->weights || choice->rule != NVFP4_AMAX) return NAME(choose_nvfp4)(x, first, blocks, choice, block_scales);
    for (int b = 0; b < blocks; b++) block_scales[b] = (uint8_t)nvfp4_block_scale(fp4_float(maxima[b]), choice->global_scale);
}

INLINE void mxfp4_scales(const float *restrict x, const uint32_t *restrict maxima, int64_t first, int blocks,
                         const Choice *choice, uint8_t *restrict block_scales) {
    if (choice->weights || choice->rule == MXFP4_MSE) return NAME(choose_mxfp4)(x, first, blocks, choice, block_scales);
    for (int b = 0; b < blocks; b++) block_scales[b] = (uint8_t)e8m0_encode(maxima[b], choice->rule);
}

/* Codes under given scales; blocks <= CHUNK */
static void nvfp4_chunk(const float *restrict x, const uint32_t *restrict maxima, int blocks, float global_scale,
                        const uint8_t *restrict block_scales, uint8_t *restrict packed) {
    float block_step[CHUNK], inverse[CHUNK];
    uint16_t codes[CHUNK * 16];
    int sound = 1, done = 0;
    for (int b = 0; b < blocks; b++) {
        block_step[b] = e4m3_decode_positive(block_scales[b]) * global_scale;
        inverse[b] = 1.0f / block_step[b];
        sound &= is_sound(block_step[b], inverse[b], fp4_float(maxima[b]));
    }
    if (sound) done = sound_blocks(x, block_step, inverse, blocks, packed);
    for (int b = done; b < blocks; b++)
        for (int j = b * 16; j < b * 16 + 16; j++) codes[j] = (uint16_t)e2m1_encode(x[j] / block_step[b]);
    pack_codes(codes + done * 16, (blocks - done) * 16, packed + done * 8);
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

#define DEFINE_QUANTIZE(dtype, type)                                                                                  \
    static void nvfp4_##dtype(const type *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,      \
                              uint8_t *restrict block_scales) {                                                       \
        uint32_t maxima[CHUNK];                                                                                       \
        float wide[CHUNK * 16];                                                                                       \
        for (int64_t start = 0; start < n; start += CHUNK * 16, packed += CHUNK * 8, block_scales += CHUNK) {         \
            int blocks = (int)(n - start < CHUNK * 16 ? n - start : CHUNK * 16) / 16;                                 \
            widen_maxima_##dtype(x + start, blocks, 16, maxima);                                                      \
            const float *values = widen_##dtype(x + start, blocks * 16, wide);                                        \
            nvfp4_scales(values, maxima, start / 16, blocks, choice, block_scales);                                   \
            nvfp4_chunk(values, maxima, blocks, choice->global_scale, block_scales, packed);                          \
        }                                                                                                             \
    }                                                                                                                 \
    static void mxfp4_##dtype(const type *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,      \
                              uint8_t *restrict block_scales) {                                                       \
        uint32_t maxima[CHUNK];                                                                                       \
        float wide[CHUNK * 32];                                                                                       \
        for (int64_t start = 0; start < n; start += CHUNK * 32, packed += CHUNK * 16, block_scales += CHUNK) {        \
            int blocks = (int)(n - start < CHUNK * 32 ? n - start : CHUNK * 32) / 32;                                 \
            widen_maxima_##dtype(x + start, blocks, 32, maxima);                                                      \
            const float *values = widen_##dtype(x + start, blocks * 32, wide);                                        \
            mxfp4_scales(values, maxima, start / 32, blocks, choice, block_scales);                                   \
            mxfp4_chunk(values, blocks, block_scales, packed);                                                        \
        }                                                                                                             \
    }
DEFINE_QUANTIZE(fp16, uint16_t)
DEFINE_QUANTIZE(fp32, float)

/* ------------------------------------------------------------------- quantize from bf16: thresholds instead of division
 *
 * code(x) counts the E2M1 midpoints B that fl(|x| / s) has passed; a tie goes up at .75, 1.75, 3.5 and stays at the others.
 * fl(|x| / s) passes B exactly when |x| > s * (B + H), H half a float32 step above or below B; equality cannot occur, for the
 * right side has an odd factor beyond 2^8 and |x| has 8 bits.  So per block the seven bounds become seven bf16 magnitudes T,
 * each the largest that has not passed, and code = sum(|x| > T).  T is the bf16 value at or just below B * s, or its predecessor:
 * decided by the sign of an exact residual.
 * Valid while the residual stays normal and x / s cannot underflow: s in [2^-100, 2^16]; other blocks take the chunk above. */

#define MIDPOINTS 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 8.0f
#define HALF_STEPS 0x1p-26f, -0x1p-25f, 0x1p-24f, -0x1p-24f, 0x1p-23f, -0x1p-23f, 0x1p-22f, 0.0f

/* candidate - B * step, exact: in one operation, or by splitting step so that both products are. */
#ifdef __FMA__
#define RESIDUAL(candidate, B, step, lanes)  \
    for (int j = 0; j < (lanes); j++) residual[j] = __builtin_fmaf(-(B)[j], (step)[j], (candidate)[j]);
#else
#define RESIDUAL(candidate, B, step, lanes)                                        \
    f32s head = (f32s)((i32s)(step) & (int32_t)0xFFFFF000), tail = (step) - head;  \
    residual = ((candidate) - (B) * head) - (B) * tail;
#endif

/* T of each lane's midpoint, in the high half of the word: `f32s` and `i32s` are vectors of any one width. */
#define DEFINE_THRESHOLDS(name, float_vector, int_vector, lanes)                      \
    INLINE int_vector name(float_vector B, float_vector H, float_vector step) {       \
        typedef float_vector f32s;                                                    \
        typedef int_vector i32s;                                                      \
        i32s candidate = (i32s)(B * (1.0f + 0x1p-20f) * step) & (int32_t)0xFFFF0000;  \
        f32s residual;                                                                \
        RESIDUAL((f32s)candidate, B, step, lanes)                                     \
        return candidate + ((i32s)(residual >= H * step) << 16);                      \
    }

/* nvfp4_fast_blocks: codes of as many leading blocks as whole vectors hold; returns their number. */
#if defined(__AVX512BW__) && !defined(__clang__)
/* Two blocks to a 64-byte vector: a binary search in both blocks' thresholds, three compares instead of seven. */
typedef VECTOR(int16_t, 64) i16x32;
typedef VECTOR(int32_t, 64) i32x16;
typedef VECTOR(uint32_t, 64) u32x16;
typedef VECTOR(float, 64) f32x16;
DEFINE_THRESHOLDS(thresholds_pair, f32x16, i32x16, 16)

INLINE i16x32 nvfp4_codes_pair(const uint16_t *restrict x, float s0, float s1) {
    const f32x16 B = {MIDPOINTS, MIDPOINTS}, H = {HALF_STEPS, HALF_STEPS};
    const f32x16 step = {s0, s0, s0, s0, s0, s0, s0, s0, s1, s1, s1, s1, s1, s1, s1, s1};
    const i16x32 middle = {7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,
                           23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23, 23}; /* T[3]: odd words hold T */
    i16x32 T = (i16x32)thresholds_pair(B, H, step), value = LOAD(i16x32, x);
    i16x32 u = value & (int16_t)0x7FFF, i = middle - 4;
    i += (u > __builtin_shuffle(T, middle)) & 8;
    i += (u > __builtin_shuffle(T, i)) & 4;
    i -= 2;
    i += (u > __builtin_shuffle(T, i)) & 2;
    return (((value ^ (int16_t)0x8000) > 0) & 8) | ((i >> 1) & 7);
}

INLINE int nvfp4_fast_blocks(const uint16_t *restrict x, const float *restrict block_step, int blocks, uint8_t *restrict packed) {
    int b = 0;
    for (; b + 2 <= blocks; b += 2) {
        u32x16 pairs = (u32x16)nvfp4_codes_pair(x + b * 16, block_step[b], block_step[b + 1]);
        STORE(packed + b * 8, __builtin_convertvector(pairs | (pairs >> 12), u8x16));
    }
    return b;
}
#else
/* One compare per threshold, each T spread over all lanes. */
DEFINE_THRESHOLDS(thresholds, f32v, i32v, WIDTH / 4)

INLINE void store_thresholds(float s, uint32_t *restrict out) { /* each T twice: in the low and in the high half */
    static const float B[8] = {MIDPOINTS}, H[8] = {HALF_STEPS};
    for (int i = 0; i < 8; i += WIDTH / 4) {
        u32v T = (u32v)thresholds(LOAD(f32v, B + i), LOAD(f32v, H + i), s - (f32v){0});
        STORE(out + i, T | (T >> 16));
    }
}

INLINE i16v spread(uint32_t pair) { return (i16v)(pair - (u32v){0}); }

INLINE i16v nvfp4_codes(const uint16_t *restrict x, const uint32_t *restrict T) {
    i16v value = LOAD(i16v, x), u = magnitude16(value);
    i16v passed = ((u > spread(T[0])) + (u > spread(T[1]))) + ((u > spread(T[2])) + (u > spread(T[3]))) +
                  ((u > spread(T[4])) + (u > spread(T[5]))) + (u > spread(T[6]));
    return sign16(value) - passed;
}

INLINE int nvfp4_fast_blocks(const uint16_t *restrict x, const float *restrict block_step, int blocks, uint8_t *restrict packed) {
    uint32_t T[4][8] __attribute__((aligned(32)));
    const int per_block = 16 / LANES;
    int b = 0;
    for (; b + WIDTH / 8 <= blocks; b += WIDTH / 8) { /* four vectors */
        for (int i = 0; i < WIDTH / 8; i++) store_thresholds(block_step[b + i], T[i]);
        const uint16_t *p = x + b * 16;
        STORE(packed + b * 8, pack4(nvfp4_codes(p, T[0]), nvfp4_codes(p + LANES, T[1 / per_block]),
                                    nvfp4_codes(p + 2 * LANES, T[2 / per_block]), nvfp4_codes(p + 3 * LANES, T[3 / per_block])));
    }
    return b;
}
#endif

INLINE const float *widen_bf16(const uint16_t *restrict x, int n, float *restrict wide) {
    for (int i = 0; i < n; i++) wide[i] = fp4_from_bf16(x[i]);
    return wide;
}

/* Blocks whose step lies outside the fast range, or that fill no vector, one by one. */
static __attribute__((noinline)) void nvfp4_slow_block(const uint16_t *restrict x, uint16_t maximum, float global_scale,
                                                       const uint8_t *restrict block_scale, uint8_t *restrict packed) {
    float wide[16];
    const uint32_t maxima[1] = {(uint32_t)maximum << 16};
    nvfp4_chunk(widen_bf16(x, 16, wide), maxima, 1, global_scale, block_scale, packed);
}

static void nvfp4_bf16(const uint16_t *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,
                       uint8_t *restrict block_scales) {
    uint16_t maxima[CHUNK];
    float wide[CHUNK * 16], block_step[CHUNK], global_scale = choice->global_scale;
    for (int64_t first = 0; first < n / 16; first += CHUNK, x += CHUNK * 16, packed += CHUNK * 8, block_scales += CHUNK) {
        int blocks = (int)(n / 16 - first < CHUNK ? n / 16 - first : CHUNK), b = 0, slow = 0;
        block_maxima16(x, blocks, 16, maxima);
        if (choice->weights || choice->rule != NVFP4_AMAX)
            NAME(choose_nvfp4)(widen_bf16(x, blocks * 16, wide), first, blocks, choice, block_scales);
        else
            for (int i = 0; i < blocks; i++) block_scales[i] = (uint8_t)nvfp4_block_scale(fp4_from_bf16(maxima[i]), global_scale);
        for (int i = 0; i < blocks; i++) {
            block_step[i] = e4m3_decode_positive(block_scales[i]) * global_scale;
            slow |= !(block_step[i] >= 0x1p-100f) | !(block_step[i] <= 0x1p16f);
        }
        if (!slow) b = nvfp4_fast_blocks(x, block_step, blocks, packed);
        for (; b < blocks; b++) nvfp4_slow_block(x + b * 16, maxima[b], global_scale, block_scales + b, packed + b * 8);
    }
}

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
    mxfp4_chunk(widen_bf16(x, 32, wide), 1, block_scale, packed);
}

static void mxfp4_bf16(const uint16_t *restrict x, int64_t n, const Choice *choice, uint8_t *restrict packed,
                       uint8_t *restrict block_scales) {
    uint16_t maxima[CHUNK];
    int16_t offset[CHUNK];
    float wide[CHUNK * 32];
    for (int64_t first = 0; first < n / 32; first += CHUNK, x += CHUNK * 32, packed += CHUNK * 16, block_scales += CHUNK) {
        int blocks = (int)(n / 32 - first < CHUNK ? n / 32 - first : CHUNK), b = 0, slow = 0;
        if (choice->weights || choice->rule == MXFP4_MSE)
            NAME(choose_mxfp4)(widen_bf16(x, blocks * 32, wide), first, blocks, choice, block_scales);
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
