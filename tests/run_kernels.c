/* Runs every entry point of the CPU library on one file of inputs and writes all outputs: for a processor that only an emulator has.
 *
 *   in   int64 n; n bf16; n fp16; n fp32; float32 amax of the three
 *   out  for each type: amax bits; NVFP4 packed, scales; MXFP4 packed, scales for rules 0, 1, 2;
 *        then for each type: NVFP4 (multiplier, divisor) and MXFP4 of the bf16 input, dequantized to it
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define DECLARE(d, t)                                                                                        \
    void amax_##d(const t *, int64_t, uint32_t *);                                                           \
    void quantize_nvfp4_##d(const t *, int64_t, const float *, uint8_t *, uint8_t *);                        \
    void quantize_mxfp4_##d(const t *, int64_t, int64_t, uint8_t *, uint8_t *);                              \
    void dequantize_nvfp4_##d(const uint8_t *, const uint8_t *, int64_t, const float *, int64_t, t *);       \
    void dequantize_mxfp4_##d(const uint8_t *, const uint8_t *, int64_t, t *);
DECLARE(bf16, uint16_t)
DECLARE(fp16, uint16_t)
DECLARE(fp32, float)

#define QUANTIZE(d, t, x, amax)                                     \
    {                                                               \
        uint32_t bits = 0;                                          \
        amax_##d(x, n, &bits);                                      \
        fwrite(&bits, 4, 1, out);                                   \
        quantize_nvfp4_##d(x, n, &(amax), packed, scales);          \
        fwrite(packed, 1, n / 2, out);                              \
        fwrite(scales, 1, n / 16, out);                             \
        for (int64_t rule = 0; rule < 3; rule++) {                  \
            quantize_mxfp4_##d(x, n, rule, packed, scales);         \
            fwrite(packed, 1, n / 2, out);                          \
            fwrite(scales, 1, n / 32, out);                         \
        }                                                           \
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

int main(int argc, char **argv) {
    FILE *in = argc == 3 ? fopen(argv[1], "rb") : NULL, *out = argc == 3 ? fopen(argv[2], "wb") : NULL;
    int64_t n;
    float amax[3];
    if (!in || !out || fread(&n, 8, 1, in) != 1) return 2;
    uint16_t *bf16 = malloc(2 * n), *fp16 = malloc(2 * n);
    float *fp32 = malloc(4 * n);
    uint8_t *packed = malloc(n / 2), *scales = malloc(n / 16);
    void *values = malloc(4 * n);
    size_t want = (size_t)n;
    if (fread(bf16, 2, want, in) != want || fread(fp16, 2, want, in) != want || fread(fp32, 4, want, in) != want) return 2;
    if (fread(amax, 4, 3, in) != 3) return 2;
    QUANTIZE(bf16, uint16_t, bf16, amax[0])
    QUANTIZE(fp16, uint16_t, fp16, amax[1])
    QUANTIZE(fp32, float, fp32, amax[2])
    DEQUANTIZE(bf16, uint16_t)
    DEQUANTIZE(fp16, uint16_t)
    DEQUANTIZE(fp32, float)
    return fclose(out) != 0;
}
