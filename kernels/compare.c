/* How far values are from what was made of them; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   compare_nvfp4_D(x, rows, columns, packed, block_scales, stored_global, is_divisor, sums)    columns % 16 == 0
 *   compare_mxfp4_D(x, rows, columns, packed, block_scales, sums)                               columns % 32 == 0
 *   compare_values_D(x, rows, columns, y, sums)                                                 y: float32, any columns
 *   count_codes(packed, nbytes, counts)                                                         counts: int64[16], added to
 *
 * D is bf16, fp16 or fp32: the type of x, finite and aligned to its type; packed and block_scales need no alignment, sums that of
 * a double.  y = e2m1(code) * step in float32, step as in dequantize.c.  sums: double[rows][5], a row's own
 *
 *   sum x^2, sum (x - y)^2, sum y^2, max |x - y|, how many |x| > 6 * step (compare_values: 0)
 *
 * Equal bit for bit to compare in fp4convert/numerics/error_sums.py on every level, and on the GPU, for the order of addition is fixed.
 * A row is taken in groups of 256 elements, element i of a group to lane i % 16.  A group adds its squares in float32: each lane,
 * then lanes 2j and 2j + 1, then of these eight j and j + 4.  Its four sums are added to four doubles of the row, which in the end
 * are (0 + 2) + (1 + 3).  Eighteen roundings to float32 are off by less than 7e-7 together.
 * A group with a step below SMALLEST_STEP, or with sums outside FINE..COARSE, is added in double instead, in the same order.
 * Bytes moved per bf16 element: NVFP4 2 + 0.5625, MXFP4 2 + 0.53125; count_codes 0.5.
 */
#include "block_amax.h"

enum { PARTS = 16 / SIDE };

typedef VECTOR(float, 16) f32x4;
typedef VECTOR(float, 32) f32x8;
typedef VECTOR(int64_t, 16) i64x2;
typedef struct { f32s part[PARTS]; } sixteen;

/* Of a group: lanes of squares.  Of several: the largest (x - y)^2, and how many x^2 lie beyond (6 * step)^2. */
typedef struct { sixteen signal, noise, output; } squares;
typedef struct { f32s largest; i32s clipped; } extremes;
/* Of a row; max_abs and clipped of what is added in double. */
typedef struct { double signal[4], noise[4], output[4]; extremes seen; float max_abs; int64_t clipped; } row_sums;

/* What compilers do not find: the larger of two that are not below zero; SIDE signed 8-bit integers widened. */
#if defined(__AVX512BW__)
INLINE f32s larger(f32s a, f32s b) { return (f32s)_mm512_max_ps((__m512)a, (__m512)b); }
#elif WIDTH == 32
INLINE f32s larger(f32s a, f32s b) { return (f32s)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE i32s widened(const uint8_t *restrict bytes) { return (i32s)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)); }
#elif defined(__SSE4_1__)
INLINE f32s larger(f32s a, f32s b) { return (f32s)_mm_max_ps((__m128)a, (__m128)b); }
INLINE i32s widened(const uint8_t *restrict bytes) { return (i32s)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(LOAD(int32_t, bytes))); }
#else
INLINE f32s larger(f32s a, f32s b) { i32s is_a = a > b; return (f32s)(((i32s)a & is_a) | ((i32s)b & ~is_a)); }
INLINE i32s widened(const uint8_t *restrict bytes) { return __builtin_convertvector(LOAD(VECTOR(int8_t, SIDE), bytes), i32s); }
#endif

INLINE sixteen ordered16_bf16(const uint16_t *restrict x) {
    sixteen wide;
    for (int p = 0; p < PARTS; p++) wide.part[p] = floats_bf16(x + p * SIDE);
    return wide;
}
INLINE sixteen load16_fp16(const uint16_t *restrict x) {
    sixteen wide;
    for (int p = 0; p < PARTS; p++) wide.part[p] = floats_fp16(x + p * SIDE);
    return wide;
}
INLINE sixteen load16_fp32(const float *restrict x) {
    sixteen wide;
    for (int p = 0; p < PARTS; p++) wide.part[p] = floats_fp32(x + p * SIDE);
    return wide;
}

/* twice_of: twice the values of a group's codes, integers, as bytes in `room`; with AVX-512 the packed codes themselves.
 * decode16: e2m1(code) * step of the 16 from the i-th on, of these; half the step is exact.
 * fold: lanes 2j and 2j + 1 added, then of these eight j and j + 4. */
#ifdef __AVX512BW__
enum { APART_bf16 = 0, APART_fp16 = 0, APART_fp32 = 0 };
#define load16_bf16 ordered16_bf16

INLINE const uint8_t *twice_of(const uint8_t *restrict packed, size_t n, int is_apart, uint8_t *restrict room) {
    return (void)n, (void)is_apart, (void)room, packed;
}
INLINE sixteen decode16(const uint8_t *restrict packed, size_t i, float half_step, int is_apart) {
    const __m512 twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const __m512i halves = {0, 0, 0, 0, 0x100000001, 0x100000001, 0x100000001, 0x100000001};
    const __m512i shifts = _mm512_broadcast_i32x8((__m256i){0x400000000, 0xC00000008, 0x1400000010, 0x1C00000018});
    __m512i words = _mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(packed + i / 2))));
    return (void)is_apart, (sixteen){{_mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), twice) * half_step}};
}
INLINE f32x4 fold(sixteen lanes, int is_apart) {
    f32s all = lanes.part[0];
    f32x8 eight = SHUFFLE(all, all, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(all, all, 1, 3, 5, 7, 9, 11, 13, 15);
    return (void)is_apart, SHUFFLE(eight, eight, 0, 1, 2, 3) + SHUFFLE(eight, eight, 4, 5, 6, 7);
}
#else /* bf16 is cheapest apart: even elements before odd ones.  The others are in order. */
enum { APART_bf16 = 1, APART_fp16 = 0, APART_fp32 = 0 };

INLINE sixteen load16_bf16(const uint16_t *restrict x) {
    sixteen wide;
    for (int p = 0; p < PARTS / 2; p++) {
        u32s pairs = LOAD(u32s, x + 2 * p * SIDE);
        wide.part[p] = (f32s)(pairs << 16);
        wide.part[p + PARTS / 2] = (f32s)(pairs & 0xFFFF0000u);
    }
    return wide;
}
#if WIDTH == 32
#define LOOKUPS(table, index) ((u8v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)(table)), (__m256i)(index)))
#else
#define LOOKUPS LOOKUP
#endif
INLINE const uint8_t *twice_of(const uint8_t *restrict packed, size_t n, int is_apart, uint8_t *restrict room) {
    const u8x16 twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
    uint8_t padded[SUM_GROUP / 2]; /* whole vectors are read */
    if (n < SUM_GROUP) {
        memset(padded, 0, sizeof padded);
        packed = memcpy(padded, packed, n / 2);
    }
    if (is_apart) {
        for (int i = 0; i < SUM_GROUP / 2; i += WIDTH) {
            u8v pairs = LOAD(u8v, packed + i);
            STORE(room + i, LOOKUPS(twice, pairs & 15));
            STORE(room + SUM_GROUP / 2 + i, LOOKUPS(twice, (u8v)((u16v)pairs >> 4) & 15));
        }
    } else {
        for (int i = 0; i < SUM_GROUP / 2; i += WIDTH / 2) {
            u16v pairs = __builtin_convertvector(LOAD(VECTOR(uint8_t, WIDTH / 2), packed + i), u16v);
            STORE(room + 2 * i, LOOKUPS(twice, (u8v)((pairs | pairs << 4) & 0x0F0F)));
        }
    }
    return room;
}
INLINE sixteen decode16(const uint8_t *restrict twice, size_t i, float half_step, int is_apart) {
    const uint8_t *first = twice + (is_apart ? i / 2 : i), *second = first + (is_apart ? SUM_GROUP / 2 : 8);
    sixteen y;
    for (int p = 0; p < PARTS; p++) {
        const uint8_t *bytes = (p < PARTS / 2 ? first : second) + p % (PARTS / 2) * SIDE;
        y.part[p] = __builtin_convertvector(widened(bytes), f32s) * half_step;
    }
    return y;
}
INLINE f32x4 fold(sixteen lanes, int is_apart) {
    float all[16], eight[8];
    memcpy(all, &lanes, sizeof all);
    for (int j = 0; j < 8; j++) eight[j] = is_apart ? all[j] + all[j + 8] : all[2 * j] + all[2 * j + 1];
    return LOAD(f32x4, eight) + LOAD(f32x4, eight + 4);
}
#endif
#define ordered16_fp16 load16_fp16
#define ordered16_fp32 load16_fp32

INLINE void add16(squares *restrict sums, extremes *restrict seen, sixteen x, sixteen y, float limit) {
    for (int p = 0; p < PARTS; p++) {
        f32s difference = x.part[p] - y.part[p], noise = difference * difference, signal = x.part[p] * x.part[p];
        sums->signal.part[p] += signal;
        sums->noise.part[p] += noise;
        sums->output.part[p] += y.part[p] * y.part[p];
        seen->largest = larger(noise, seen->largest);
        seen->clipped -= signal > limit;
    }
}

/* A group's sums into its row's; 0, and nothing added, where float32 does not hold them. */
INLINE int add_group(row_sums *restrict row, const squares *restrict group, const extremes *restrict seen, int is_apart) {
    f32x4 signal = fold(group->signal, is_apart), noise = fold(group->noise, is_apart), output = fold(group->output, is_apart);
    i64x2 is_held = (i64x2)((signal >= FINE) & (noise >= FINE) & (signal <= COARSE) & (noise <= COARSE) & (output <= COARSE));
    if ((is_held[0] & is_held[1]) != -1) return 0;
    for (int j = 0; j < 4; j++) row->signal[j] += signal[j], row->noise[j] += noise[j], row->output[j] += output[j];
    row->seen = *seen;
    return 1;
}

/* The same in double, element by element, with any values. */
INLINE void add_lane(row_sums *restrict row, double (*restrict lanes)[16], int lane, float x, float y) {
    double difference = (double)(x - y);
    lanes[0][lane] += (double)x * x, lanes[1][lane] += difference * difference, lanes[2][lane] += (double)y * y;
    float distance = __builtin_fabsf(x - y);
    row->max_abs = distance > row->max_abs || distance != distance ? distance : row->max_abs;
}

INLINE void add_lanes(row_sums *restrict row, double (*restrict lanes)[16]) {
    double *totals[3] = {row->signal, row->noise, row->output};
    for (int k = 0; k < 3; k++)
        for (int j = 0, i = 0; j < 4; j++, i += 2)
            totals[k][j] += (lanes[k][i] + lanes[k][i + 1]) + (lanes[k][i + 8] + lanes[k][i + 9]);
}

INLINE double four(const double *restrict lanes) { return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]); }

INLINE void store_row(const row_sums *restrict row, double *restrict sums) {
    float largest = 0.0f, max_abs;
    int64_t clipped = row->clipped;
    for (int j = 0; j < SIDE; j++) {
        largest = row->seen.largest[j] > largest ? row->seen.largest[j] : largest;
        clipped += row->seen.clipped[j];
    }
    max_abs = __builtin_sqrtf(largest); /* of a float32's own rounded square: that float32 */
    max_abs = max_abs >= row->max_abs ? max_abs : row->max_abs;
    double found[SUMS] = {four(row->signal), four(row->noise), four(row->output), max_abs, (double)clipped};
    memcpy(sums, found, sizeof found);
}

/* What the bytes of a block scale stand for: the step; half of it, NaN where it is too small for float32 sums; (6 * step)^2. */
typedef struct { float step[256], half[256], limit[256]; } table256;

INLINE void set(table256 *restrict table, int byte, float step) {
    table->step[byte] = step;
    table->half[byte] = step >= SMALLEST_STEP ? 0.5f * step : __builtin_nanf("");
    table->limit[byte] = (6.0f * step) * (6.0f * step);
}

INLINE float fp4_from_fp32(float value) { return value; }

#define DEFINE_COMPARE(dtype, type)                                                                                         \
    static __attribute__((noinline)) void exact_##dtype(row_sums *restrict row, const type *restrict x, size_t n,           \
                                                        const uint8_t *restrict packed, const uint8_t *restrict block_scales, \
                                                        size_t width, const float *restrict step) {                         \
        double lanes[3][16] = {{0}};                                                                                        \
        for (size_t i = 0; i < n; i++) {                                                                                    \
            float value = fp4_from_##dtype(x[i]), s = step[block_scales[i / width]];                                        \
            add_lane(row, lanes, i % 16, value, e2m1_decode(packed[i / 2] >> i % 2 * 4 & 15u) * s);                         \
            row->clipped += __builtin_fabsf(value) > __builtin_fabsf(6.0f * s);                                             \
        }                                                                                                                   \
        add_lanes(row, lanes);                                                                                              \
    }                                                                                                                       \
    INLINE void group_##dtype(row_sums *restrict row, const type *restrict x, size_t n, const uint8_t *restrict packed,     \
                              const uint8_t *restrict block_scales, size_t width, const table256 *restrict table) {         \
        squares group = {0};                                                                                                \
        extremes seen = row->seen;                                                                                          \
        uint8_t room[SUM_GROUP];                                                                                                \
        const uint8_t *twice = twice_of(packed, n, APART_##dtype, room);                                                    \
        for (size_t i = 0; i < n; i += 16) {                                                                                \
            size_t byte = block_scales[i / width];                                                                          \
            sixteen y = decode16(twice, i, table->half[byte], APART_##dtype);                                               \
            add16(&group, &seen, load16_##dtype(x + i), y, table->limit[byte]);                                             \
        }                                                                                                                   \
        if (!add_group(row, &group, &seen, APART_##dtype))                                                                  \
            exact_##dtype(row, x, n, packed, block_scales, width, table->step);                                             \
    }                                                                                                                       \
    INLINE void compare_##dtype(const type *restrict x, int64_t rows, int64_t columns, const uint8_t *restrict packed,      \
                                const uint8_t *restrict block_scales, size_t width, const table256 *restrict table,         \
                                double *restrict sums) {                                                                    \
        for (int64_t r = 0; r < rows; r++, sums += SUMS) {                                                                  \
            row_sums row = {0};                                                                                             \
            for (int64_t left = columns; left > 0; left -= SUM_GROUP) {                                                         \
                size_t n = left < SUM_GROUP ? (size_t)left : SUM_GROUP;                                                             \
                group_##dtype(&row, x, n, packed, block_scales, width, table);                                              \
                x += n, packed += n / 2, block_scales += n / width;                                                         \
            }                                                                                                               \
            store_row(&row, sums);                                                                                          \
        }                                                                                                                   \
    }                                                                                                                       \
    void NAME(compare_nvfp4_##dtype)(const type *restrict x, int64_t rows, int64_t columns, const uint8_t *restrict packed, \
                                     const uint8_t *restrict block_scales, const float *restrict stored_global,             \
                                     int64_t is_divisor, double *restrict sums) {                                           \
        table256 table;                                                                                                     \
        for (int byte = 0; byte < 256; byte++)                                                                              \
            set(&table, byte, is_divisor ? e4m3_decode(byte) / *stored_global : e4m3_decode(byte) * *stored_global);        \
        compare_##dtype(x, rows, columns, packed, block_scales, 16, &table, sums);                                          \
    }                                                                                                                       \
    void NAME(compare_mxfp4_##dtype)(const type *restrict x, int64_t rows, int64_t columns, const uint8_t *restrict packed, \
                                     const uint8_t *restrict block_scales, double *restrict sums) {                         \
        table256 table;                                                                                                     \
        for (int byte = 0; byte < 256; byte++) set(&table, byte, e8m0_decode(byte));                                        \
        compare_##dtype(x, rows, columns, packed, block_scales, 32, &table, sums);                                          \
    }                                                                                                                       \
    void NAME(compare_values_##dtype)(const type *restrict x, int64_t rows, int64_t columns, const float *restrict y,       \
                                      double *restrict sums) {                                                              \
        for (int64_t r = 0; r < rows; r++, sums += SUMS) {                                                                  \
            row_sums row = {0};                                                                                             \
            for (int64_t left = columns; left > 0; left -= SUM_GROUP) {                                                         \
                int n = left < SUM_GROUP ? (int)left : SUM_GROUP;                                                                   \
                double lanes[3][16] = {{0}};                                                                                \
                squares group = {0};                                                                                        \
                extremes seen = row.seen;                                                                                   \
                for (int i = 0; n % 16 == 0 && i < n; i += 16)                                                              \
                    add16(&group, &seen, ordered16_##dtype(x + i), load16_fp32(y + i), __builtin_inff());                   \
                if (n % 16 || !add_group(&row, &group, &seen, 0)) {                                                            \
                    for (int i = 0; i < n; i++) add_lane(&row, lanes, i % 16, fp4_from_##dtype(x[i]), y[i]);                \
                    add_lanes(&row, lanes);                                                                                 \
                }                                                                                                           \
                x += n, y += n;                                                                                             \
            }                                                                                                               \
            store_row(&row, sums);                                                                                          \
        }                                                                                                                   \
    }
DEFINE_COMPARE(bf16, uint16_t)
DEFINE_COMPARE(fp16, uint16_t)
DEFINE_COMPARE(fp32, float)

/* How often each code occurs, from how often its bits do: for every set of bits, the codes that have all of them, counted in four
 * bits a code, then in bytes.  Those that have them and no others follow by inclusion and exclusion. */
enum { NIBBLE_ROUNDS = 15, BYTE_ROUNDS = 8 * NIBBLE_ROUNDS };
#ifdef __AVX512BW__
enum { COUNTED = 64 }; /* bytes in a vector */
#else
enum { COUNTED = WIDTH };
#endif
typedef VECTOR(uint8_t, COUNTED) u8c;
typedef VECTOR(uint16_t, COUNTED) u16c;

INLINE void add_nibbles(const uint8_t *restrict packed, int vectors, u8c *restrict bytes) {
    u8c c[16] = {{0}}, b[16];
    for (int i = 0; i < vectors; i++) {
        u8c v = LOAD(u8c, packed + i * COUNTED);
        b[1] = v & 0x11, b[2] = (u8c)((u16c)v >> 1) & 0x11, b[4] = (u8c)((u16c)v >> 2) & 0x11, b[8] = (u8c)((u16c)v >> 3) & 0x11;
        b[3] = b[1] & b[2], b[5] = b[1] & b[4], b[6] = b[2] & b[4], b[7] = b[3] & b[4];
        for (int s = 9; s < 16; s++) b[s] = b[s - 8] & b[8];
        for (int s = 1; s < 16; s++) c[s] += b[s];
    }
    for (int s = 1; s < 16; s++) bytes[s] += (c[s] & 15) + (c[s] >> 4);
}

void NAME(count_codes)(const uint8_t *restrict packed, int64_t nbytes, int64_t *restrict counts) {
    int64_t have[16] = {0}, vectors = nbytes / COUNTED, done = 0;
    while (done < vectors) {
        u8c bytes[16] = {{0}};
        int64_t end = done + BYTE_ROUNDS < vectors ? done + BYTE_ROUNDS : vectors;
        for (; done < end; done += NIBBLE_ROUNDS)
            add_nibbles(packed + done * COUNTED, (int)(end - done < NIBBLE_ROUNDS ? end - done : NIBBLE_ROUNDS), bytes);
        done = end;
        for (int s = 1; s < 16; s++)
            for (int j = 0; j < COUNTED; j++) have[s] += bytes[s][j];
    }
    have[0] = 2 * COUNTED * vectors;
    for (int bit = 1; bit < 16; bit *= 2)
        for (int s = 0; s < 16; s++)
            if (!(s & bit)) have[s] -= have[s | bit];
    for (int64_t i = vectors * COUNTED; i < nbytes; i++) have[packed[i] & 15]++, have[packed[i] >> 4]++;
    for (int s = 0; s < 16; s++) counts[s] += have[s];
}
