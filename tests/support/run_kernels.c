/* Runs every entry point of the CPU library on one file of inputs and writes all outputs: for a processor that only an emulator has.
 *
 *   in   int64 n; n bf16; n fp16; n fp32; float32 amax of the three; n weights of columns for NVFP4, n for MXFP4
 *   out  for each type: amax bits; NVFP4 packed, scales; MXFP4 packed, scales for rules 0, 1, 2;
 *        then for each type: NVFP4 (multiplier, divisor) and MXFP4 of the bf16 input, dequantized to it;
 *        then for each type, of four rows in blocks of 32 columns: amax bits, FP8 codes under scales of 1, their costs;
 *        then the bytes of the fp32 input as 4 rows of n FP8 codes in blocks of 3 x 100 under the first fp32 values as scales: their
 *        amax bits, their values; as int4 of 2 n columns in groups of 100, as int8 of n; the fp32 input as bf16;
 *        the fp32 input as 8 rows of n / 8, every second column as a row; the same of its first half as two bytes, its first quarter as one;
 *        then for each type: packed, scales of rules NVFP4_MSE, NVFP4_FOUR_OVER_SIX, of MXFP4_MSE, and by weights of n columns, then of 32,
 *        in NVFP4 and MXFP4; then for each type, of one row: sums against NVFP4 under its global scale, that / 2^60, its reciprocal as
 *        a divisor; against MXFP4 (floor), against its codes under scales of 1; of 8 rows against the fp32 input; counts of those codes
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DECLARE(d, t)                                                                                                           \
    void amax_##d(const t *, int64_t, uint32_t *);                                                                              \
    void quantize_nvfp4_##d(const t *, int64_t, const float *, uint8_t *, uint8_t *);                                           \
    void quantize_mxfp4_##d(const t *, int64_t, int64_t, uint8_t *, uint8_t *);                                                 \
    void dequantize_nvfp4_##d(const uint8_t *, const uint8_t *, int64_t, const float *, int64_t, t *);                          \
    void dequantize_mxfp4_##d(const uint8_t *, const uint8_t *, int64_t, t *);                                                  \
    void grid_amax_##d(const t *, const void *, uint32_t *);                                                                    \
    void quantize_fp8_##d(const t *, const float *, const void *, uint8_t *);                                                   \
    void fp8_costs_##d(const t *, const float *, const void *, double *);                                                       \
    void search_nvfp4_##d(const t *, int64_t, const float *, int64_t, uint8_t *, uint8_t *);                                    \
    void search_mxfp4_##d(const t *, int64_t, uint8_t *, uint8_t *);                                                            \
    void weigh_nvfp4_##d(const t *, int64_t, const float *, const float *, int64_t, uint8_t *, uint8_t *);                      \
    void weigh_mxfp4_##d(const t *, int64_t, const float *, int64_t, uint8_t *, uint8_t *);                                     \
    void compare_nvfp4_##d(const t *, int64_t, int64_t, const uint8_t *, const uint8_t *, const float *, int64_t, double *);    \
    void compare_mxfp4_##d(const t *, int64_t, int64_t, const uint8_t *, const uint8_t *, double *);                            \
    void compare_values_##d(const t *, int64_t, int64_t, const float *, double *);
DECLARE(bf16, uint16_t)
DECLARE(fp16, uint16_t)
DECLARE(fp32, float)
void count_codes(const uint8_t *, int64_t, int64_t *);
void decode_fp8(const uint8_t *, const float *, const void *, float *);
void amax_fp8(const uint8_t *, const float *, const void *, uint32_t *);
void decode_int4(const uint8_t *, const float *, const float *, const void *, float *);
void decode_int8(const uint8_t *, const float *, const float *, const void *, float *);
void round_bf16(const float *, int64_t, uint16_t *);
void transpose_1(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, uint8_t *);
void transpose_2(const uint16_t *, int64_t, int64_t, int64_t, int64_t, int64_t, uint16_t *);
void transpose_4(const uint32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t *);

#define QUANTIZE(d, t, x, amax)                                 \
    {                                                           \
        uint32_t bits = 0;                                      \
        amax_##d(x, n, &bits);                                  \
        fwrite(&bits, 4, 1, out);                               \
        quantize_nvfp4_##d(x, n, &(amax), packed, scales);      \
        fwrite(packed, 1, n / 2, out);                          \
        fwrite(scales, 1, n / 16, out);                         \
        for (int64_t rule = 0; rule < 3; rule++) {              \
            quantize_mxfp4_##d(x, n, rule, packed, scales);     \
            fwrite(packed, 1, n / 2, out);                      \
            fwrite(scales, 1, n / 32, out);                     \
        }                                                       \
    }

#define DEQUANTIZE(d, t)                                                            \
    for (int64_t is_divisor = 0; is_divisor < 2; is_divisor++) {                    \
        quantize_nvfp4_bf16(bf16, n, amax, packed, scales);                         \
        dequantize_nvfp4_##d(packed, scales, n, amax, is_divisor, (t *)values);     \
        fwrite(values, sizeof(t), n, out);                                          \
    }                                                                               \
    quantize_mxfp4_bf16(bf16, n, 1, packed, scales);                                \
    dequantize_mxfp4_##d(packed, scales, n, (t *)values);                           \
    fwrite(values, sizeof(t), n, out);

#define TO_FP8(d, t)                                                        \
    {                                                                       \
        const int64_t grid[5] = {4, n / 4, 1, 32, 0};                       \
        const int64_t blocks = 4 * ((n / 4 + 31) / 32);                     \
        float *ones = malloc(4 * blocks);                                   \
        uint32_t *bits = calloc(blocks, 4);                                 \
        double *costs = calloc(blocks, 8);                                  \
        for (int64_t i = 0; i < blocks; i++) ones[i] = 1.0f;                \
        grid_amax_##d(d, grid, bits);                                       \
        fwrite(bits, 4, blocks, out);                                       \
        quantize_fp8_##d(d, ones, grid, codes);                             \
        fwrite(codes, 1, n, out);                                           \
        fp8_costs_##d(d, ones, grid, costs);                                \
        fwrite(costs, 8, blocks, out);                                      \
        free(ones), free(bits), free(costs);                                \
    }

#define WRITE_BLOCKS(width)             \
    fwrite(packed, 1, n / 2, out);      \
    fwrite(scales, 1, n / (width), out);

#define SEARCH(d, amax)                                                             \
    for (int64_t rule = 1; rule < 3; rule++) {                                      \
        search_nvfp4_##d(d, n, &(amax), rule, packed, scales);                      \
        WRITE_BLOCKS(16)                                                            \
    }                                                                               \
    search_mxfp4_##d(d, n, packed, scales);                                         \
    WRITE_BLOCKS(32)                                                                \
    for (int64_t columns = n; columns >= 32; columns = columns == n ? 32 : 0) {     \
        weigh_nvfp4_##d(d, n, &(amax), weights, columns, packed, scales);           \
        WRITE_BLOCKS(16)                                                            \
        weigh_mxfp4_##d(d, n, weights + n, columns, packed, scales);                \
        WRITE_BLOCKS(32)                                                            \
    }

#define COMPARE(d, amax)                                                                            \
    {                                                                                               \
        double sums[8][5];                                                                          \
        int64_t counts[16] = {0};                                                                   \
        const float global_scale = (amax) / 2688.0f;                                                \
        const float stored[3] = {global_scale, global_scale * 0x1p-60f, 1.0f / global_scale};       \
        quantize_nvfp4_##d(d, n, &(amax), packed, scales);                                          \
        for (int i = 0; i < 3; i++) {                                                               \
            compare_nvfp4_##d(d, 1, n, packed, scales, stored + i, i == 2, sums[0]);                \
            fwrite(sums, 8, 5, out);                                                                \
        }                                                                                           \
        quantize_mxfp4_##d(d, n, 0, packed, scales);                                                \
        compare_mxfp4_##d(d, 1, n, packed, scales, sums[0]);                                        \
        fwrite(sums, 8, 5, out);                                                                    \
        memset(scales, 127, n / 32);                                                                \
        compare_mxfp4_##d(d, 1, n, packed, scales, sums[0]);                                        \
        fwrite(sums, 8, 5, out);                                                                    \
        compare_values_##d(d, 8, n / 8, fp32, sums[0]);                                             \
        fwrite(sums, 8, 40, out);                                                                   \
        count_codes(packed, n / 2, counts);                                                         \
        fwrite(counts, 8, 16, out);                                                                 \
    }

static void run_grids(const float *fp32, int64_t n, FILE *out) {
    float *values = malloc(32 * n);
    const uint8_t *stored = (const uint8_t *)fp32;
    const int64_t fp8[5] = {4, n, 3, 100, 1}, int4[5] = {4, 2 * n, 1, 100, 0}, int8[5] = {4, n, 1, 100, 0};
    uint32_t bits = 0;
    amax_fp8(stored, fp32, fp8, &bits);
    fwrite(&bits, 4, 1, out);
    decode_fp8(stored, fp32, fp8, values);
    fwrite(values, 4, 4 * n, out);
    decode_int4(stored, fp32, NULL, int4, values);
    fwrite(values, 4, 8 * n, out);
    decode_int8(stored, fp32, NULL, int8, values);
    fwrite(values, 4, 4 * n, out);
    round_bf16(fp32, n, (uint16_t *)values);
    fwrite(values, 2, n, out);
    transpose_4((const uint32_t *)fp32, 8, n / 8, 0, 2, n / 16, (uint32_t *)values);
    fwrite(values, 4, n / 2, out);
    transpose_2((const uint16_t *)fp32, 8, n / 8, 0, 2, n / 16, (uint16_t *)values);
    fwrite(values, 2, n / 2, out);
    transpose_1(stored, 8, n / 8, 0, 2, n / 16, (uint8_t *)values);
    fwrite(values, 1, n / 2, out);
}

int main(int argc, char **argv) {
    FILE *in = argc == 3 ? fopen(argv[1], "rb") : NULL, *out = argc == 3 ? fopen(argv[2], "wb") : NULL;
    int64_t n;
    float amax[3];
    if (!in || !out || fread(&n, 8, 1, in) != 1) return 2;
    uint16_t *bf16 = malloc(2 * n), *fp16 = malloc(2 * n);
    float *fp32 = malloc(4 * n), *weights = malloc(8 * n);
    uint8_t *packed = malloc(n / 2), *scales = malloc(n / 16), *codes = malloc(n);
    void *values = malloc(4 * n);
    size_t want = (size_t)n;
    if (fread(bf16, 2, want, in) != want || fread(fp16, 2, want, in) != want || fread(fp32, 4, want, in) != want) return 2;
    if (fread(amax, 4, 3, in) != 3 || fread(weights, 8, want, in) != want) return 2;
    QUANTIZE(bf16, uint16_t, bf16, amax[0])
    QUANTIZE(fp16, uint16_t, fp16, amax[1])
    QUANTIZE(fp32, float, fp32, amax[2])
    DEQUANTIZE(bf16, uint16_t)
    DEQUANTIZE(fp16, uint16_t)
    DEQUANTIZE(fp32, float)
    TO_FP8(bf16, uint16_t)
    TO_FP8(fp16, uint16_t)
    TO_FP8(fp32, float)
    run_grids(fp32, n, out);
    SEARCH(bf16, amax[0])
    SEARCH(fp16, amax[1])
    SEARCH(fp32, amax[2])
    COMPARE(bf16, amax[0])
    COMPARE(fp16, amax[1])
    COMPARE(fp32, amax[2])
    return fclose(out) != 0;
}
