/* Codes of NVFP4 blocks under given steps, rounded from |x| / step as float32 would have it, and no division.
 *
 *   quick_D(x, step, inverse, blocks, packed)              codes of the leading blocks, of those that are not quick wrong ones;
 *                                                          returns their number: pairs with AVX-512, fours with AVX2; else pairs of bf16
 *   is_quick(step, inverse, block_amax, LARGEST_STEP_D)    whether a block's codes by quick_D are right; inverse: 1.0f / step
 *
 * Codes equal encode_e2m1 in fp4convert/numerics/codec.py; tests/kernels/test_kernels.py compares the bytes, and test_nvfp4_encode.py
 * has the argument why nothing else can be wrong.
 * D is bf16, fp16 or fp32.  The E2M1 midpoints are .25, .75, 1.25, 1.75, 2.5, 3.5, 5; a tie stays at the first and every second,
 * and goes up at the others.
 */
#ifndef FP4_NVFP4_ENCODE_H
#define FP4_NVFP4_ENCODE_H

#include "block_amax.h"

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

#if WIDTH == 32
/* ------------------------------------------------------------------------------------------------------------ fixed point
 *
 * A quotient with twelve bits behind the point says the code, unless it is next to a midpoint.  There x / step comes from two
 * corrections of x * fl(1 / step).  The first brings it within one unit in its last place, so that its residual is exact, and
 * with a correctly rounded inverse the second rounds correctly (Markstein, IBM J. Res. Dev. 34, 1990): where residuals stay
 * normal, no x but zero underflows, no code saturates and the step's mantissa is not all ones. */
INLINE int is_quick(float step, float inverse, float block_amax, float largest_step) {
    int is_exact = (step >= 0x1p-100f) & (step <= largest_step) & ((fp4_bits(step) & 0x7FFFFFu) != 0x7FFFFFu);
    return is_exact & (block_amax * inverse < 6.9f);
}

#ifdef __AVX512BW__
/* -------------------------------------------------------------------------------------------------------- AVX-512: rounded down
 *
 * Two blocks to a 64-byte vector of 16-bit lanes: Q is 4096 * x * fl(1 / step), cut off to the integer below: negative where
 * x / step is, and not for -0.0.  Quick are blocks whose quotients are below 6.9, so that Q has 16 bits.  The inverse is off by
 * at most 2^-24 of itself, so what is cut off is by less than 0.002.  Every midpoint is a multiple of 1/4, 1024 in Q.  So the
 * upper six bits of Q, its cell, say the code, unless Q is the first number of a cell that begins with a midpoint, or the last of
 * one that ends with one: then the pair of blocks is worked out in float32 (tests/kernels/test_nvfp4_encode.py: no other code is wrong).
 * Of normally distributed weights 3 to 4 pairs in a hundred are. */
#define LARGEST_STEP_bf16 1.0f
#define LARGEST_STEP_fp16 1.0f
#define LARGEST_STEP_fp32 1.0f
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
            ask_for(x + (b + CHUNK) * 16, 32 * sizeof(type));                                                                 \
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
#else
/* --------------------------------------------------------------------------------------------------------- AVX2: to the nearest
 *
 * Q is 4096 * x * fl(1 / step) rounded to the nearest integer, off by at most 1/2 and less than 0.002.  So a |Q| that is not a
 * multiple of 1024 is on its quotient's side of every midpoint, and its upper bits, its cell, say the code.  Doubt is where a
 * cell begins with a midpoint and |Q| is its first number (tests/kernels/test_nvfp4_encode.py: no other code is wrong): then eight values
 * are worked out in float32.  Of normally distributed weights one such eight in two hundred is.  Signs are those of x. */
#define LARGEST_STEP_bf16 0x1p16f /* no x but zero underflows */
#define LARGEST_STEP_fp16 0x1p16f
#define LARGEST_STEP_fp32 1.0f

/* By min(cell, cell / 2 + 4, 15): the code, and 1 where a midpoint begins; twice, for the two halves of a vector. */
#define TWICE(...) {__VA_ARGS__, __VA_ARGS__}
static const u8v entry_codes = TWICE(0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7);
static const u8v entry_begins = TWICE(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0);

/* Of 16 values, in 16-bit lanes: Q; and what is above zero where they are below it, and for -0.0 is not. */
typedef struct { __m256i q, below; } fixed16;

INLINE __m256i fixed_point(__m256 x, float factor) { /* Q in the lower halves of the lanes, rounded once */
    return (__m256i)_mm256_fmadd_ps(x, _mm256_set1_ps(factor), _mm256_set1_ps(12582912.0f));
}
INLINE __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xD8); } /* instructions pack by halves */
INLINE __m256i lower_halves(__m256i first, __m256i second) {
    const __m256i lower = _mm256_set1_epi32(0xFFFF);
    return in_order(_mm256_packus_epi32(first & lower, second & lower));
}

INLINE fixed16 fixed16_bf16(const uint16_t *restrict x, float factor) {
    __m256i pairs = LOAD(__m256i, x);
    __m256i even = fixed_point((__m256)_mm256_slli_epi32(pairs, 16), factor);
    __m256i odd = fixed_point((__m256)(pairs & _mm256_set1_epi32((int)0xFFFF0000)), factor);
    return (fixed16){_mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA), pairs ^ _mm256_set1_epi16(INT16_MIN)};
}
INLINE fixed16 fixed16_fp16(const uint16_t *restrict x, float factor) {
    __m256i first = fixed_point((__m256)floats_fp16(x), factor), second = fixed_point((__m256)floats_fp16(x + 8), factor);
    return (fixed16){lower_halves(first, second), LOAD(__m256i, x) ^ _mm256_set1_epi16(INT16_MIN)};
}
INLINE fixed16 fixed16_fp32(const float *restrict x, float factor) {
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    __m256 first = (__m256)floats_fp32(x), second = (__m256)floats_fp32(x + 8);
    __m256i below = in_order(_mm256_packs_epi32((__m256i)first ^ sign, (__m256i)second ^ sign));
    return (fixed16){lower_halves(fixed_point(first, factor), fixed_point(second, factor)), below};
}

/* Packed codes of two blocks in 16-bit lanes, and a bit for every code in doubt; both in the order of packing: eight values of a,
 * eight of b, the other eight of a, the other eight of b. */
INLINE __m256i pair_codes(fixed16 a, fixed16 b, uint32_t *restrict doubts) {
    const __m256i ten_bits = _mm256_set1_epi16(1023), seven = _mm256_set1_epi8(7);
    __m256i first = _mm256_abs_epi16(a.q), second = _mm256_abs_epi16(b.q);
    __m256i cell = _mm256_packus_epi16(_mm256_srli_epi16(first, 10), _mm256_srli_epi16(second, 10));
    __m256i entry = _mm256_min_epu8(_mm256_min_epu8(cell, _mm256_avg_epu8(cell, seven)), _mm256_set1_epi8(15));
    __m256i past = _mm256_packs_epi16(first & ten_bits, second & ten_bits); /* the cell's beginning; held to 127 */
    *doubts = (uint32_t)_mm256_movemask_epi8(_mm256_sub_epi8(past, _mm256_shuffle_epi8((__m256i)entry_begins, entry)));
    __m256i is_below = _mm256_cmpgt_epi8(_mm256_packs_epi16(a.below, b.below), _mm256_setzero_si256());
    __m256i codes = _mm256_shuffle_epi8((__m256i)entry_codes, entry) | (is_below & _mm256_set1_epi8(8));
    return _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001)); /* even + 16 * odd */
}

INLINE void corrected8(f32s value, float step, float inverse, uint8_t *restrict packed) {
    __m256 s = _mm256_set1_ps(step), r = _mm256_set1_ps(inverse), v = (__m256)((i32s)value & INT32_MAX), q = v * r;
    q = _mm256_fmadd_ps(_mm256_fnmadd_ps(q, s, v), r, q);
    q = _mm256_fmadd_ps(_mm256_fnmadd_ps(q, s, v), r, q);
    __m256 fine = q * 2.0f + E2M1_INTEGERS, coarse = q * 0.5f + (E2M1_INTEGERS + 4.0f); /* as e2m1_round */
    __m256 rounded = _mm256_min_ps(_mm256_min_ps(fine, q + (E2M1_INTEGERS + 2.0f)), coarse);
    u32s sign = (u32s)(value + 0.0f) >> 28; /* -0.0 is not below zero */
    VECTOR(uint64_t, 32) codes = (VECTOR(uint64_t, 32))(((u32s)rounded & 7u) | (sign & 8u));
    codes |= codes >> 28;
    for (int j = 0; j < 4; j++) packed[j] = (uint8_t)codes[j];
}

#define DEFINE_QUICK(dtype, type)                                                                                             \
    INLINE int quick_##dtype(const type *restrict x, const float *restrict step, const float *restrict inverse, int blocks,   \
                             uint8_t *restrict packed) {                                                                      \
        float factor[CHUNK];                                                                                                  \
        uint64_t doubts[CHUNK / 4], doubtful = 0; /* doubts of four blocks; a bit for those that have any */                  \
        int fours = blocks / 4;                                                                                               \
        for (int b = 0; b < blocks; b++) factor[b] = inverse[b] * 4096.0f;                                                    \
        for (int f = 0; f < fours; f++) {                                                                                     \
            const type *p = x + f * 64;                                                                                       \
            const float *by = factor + f * 4;                                                                                 \
            uint32_t low, high;                                                                                               \
            __m256i first = pair_codes(fixed16_##dtype(p, by[0]), fixed16_##dtype(p + 16, by[1]), &low);                      \
            __m256i second = pair_codes(fixed16_##dtype(p + 32, by[2]), fixed16_##dtype(p + 48, by[3]), &high);               \
            i32v codes = (i32v)_mm256_packus_epi16(first, second);                                                            \
            STORE(packed + f * 32, SHUFFLE(codes, codes, 0, 4, 1, 5, 2, 6, 3, 7));                                            \
            doubts[f] = (uint64_t)high << 32 | low;                                                                           \
            doubtful |= (uint64_t)(doubts[f] != 0) << f;                                                                      \
        }                                                                                                                     \
        for (; doubtful; doubtful &= doubtful - 1) {                                                                          \
            int f = __builtin_ctzll(doubtful);                                                                                \
            for (uint64_t left = doubts[f]; left;) {                                                                          \
                int byte = __builtin_ctzll(left) / 8; /* eight values: of blocks 0, 1, 0, 1, 2, 3, 2, 3 */                    \
                int b = f * 4 + byte / 4 * 2 + byte % 2, half = byte / 2 % 2;                                                 \
                corrected8(floats_##dtype(x + b * 16 + half * 8), step[b], inverse[b], packed + b * 8 + half * 4);            \
                left &= ~((uint64_t)255 << byte * 8);                                                                         \
            }                                                                                                                 \
        }                                                                                                                     \
        return fours * 4;                                                                                                     \
    }
#endif
DEFINE_QUICK(bf16, uint16_t)
DEFINE_QUICK(fp16, uint16_t)
DEFINE_QUICK(fp32, float)
#else
/* ---------------------------------------------------------------------- narrower vectors, bf16: thresholds instead of quotients
 *
 * code(x) counts the midpoints B that fl(|x| / s) has passed.
 * fl(|x| / s) passes B exactly when |x| > s * (B + H), H half a float32 step above or below B; equality cannot occur, for the
 * right side has an odd factor beyond 2^8 and |x| has 8 bits.  So per block the seven bounds become seven bf16 magnitudes T,
 * each the largest that has not passed, and code = sum(|x| > T).  T is the bf16 value at or just below B * s, or its predecessor:
 * decided by the sign of an exact residual.
 * Quick are blocks where residuals stay normal and x / s cannot underflow. */

#define MIDPOINTS 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 8.0f
#define HALF_STEPS 0x1p-26f, -0x1p-25f, 0x1p-24f, -0x1p-24f, 0x1p-23f, -0x1p-23f, 0x1p-22f, 0.0f

/* T of each lane's midpoint, in the high half of the word. */
INLINE i32v thresholds(f32v B, f32v H, f32v step) {
    i32v candidate = (i32v)(B * (1.0f + 0x1p-20f) * step) & (int32_t)0xFFFF0000;
    f32v head = (f32v)((i32v)step & (int32_t)0xFFFFF000), tail = step - head; /* split so that both products are exact */
    f32v residual = ((f32v)candidate - B * head) - B * tail;
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
    uint32_t T[2][8];
    int b = 0;
    for (; b + 2 <= blocks; b += 2) {
        for (int i = 0; i < 2; i++) store_thresholds(step[b + i], T[i]);
        const uint16_t *p = x + b * 16;
        i16v c0 = codes_under(p, T[0]), c1 = codes_under(p + 8, T[0]);
        STORE(packed + b * 8, pack4(c0, c1, codes_under(p + 16, T[1]), codes_under(p + 24, T[1])));
    }
    return (void)inverse, b;
}

#define LARGEST_STEP_bf16 0x1p16f
#define LARGEST_STEP_fp16 0.0f
#define LARGEST_STEP_fp32 0.0f
INLINE int is_quick(float step, float inverse, float block_amax, float largest_step) {
    return (void)inverse, (void)block_amax, (step >= 0x1p-100f) & (step <= largest_step);
}
#define quick_fp16(x, step, inverse, blocks, packed) 0
#define quick_fp32(x, step, inverse, blocks, packed) 0
#endif
#endif
