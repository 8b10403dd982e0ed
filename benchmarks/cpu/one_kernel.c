/* Calls one kernel once: one_kernel NAME ELEMENTS. Linked with one level of the kernels (FP4_LEVEL). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PASTE_(name, level) name##_v##level
#define PASTE(name, level) PASTE_(name, level)
#define NAME(name) PASTE(name, FP4_LEVEL)
#define IS(kernel) (strcmp(argv[1], #kernel) == 0)

#define DECLARE(d, t)                                                                                       \
    void NAME(amax_##d)(const t *, int64_t, uint32_t *);                                                    \
    void NAME(quantize_nvfp4_##d)(const t *, int64_t, const float *, uint8_t *, uint8_t *);                 \
    void NAME(quantize_mxfp4_##d)(const t *, int64_t, int64_t, uint8_t *, uint8_t *);                       \
    void NAME(search_nvfp4_##d)(const t *, int64_t, const float *, int64_t, uint8_t *, uint8_t *);          \
    void NAME(search_mxfp4_##d)(const t *, int64_t, uint8_t *, uint8_t *);                                  \
    void NAME(dequantize_nvfp4_##d)(const uint8_t *, const uint8_t *, int64_t, const float *, int64_t, t *); \
    void NAME(dequantize_mxfp4_##d)(const uint8_t *, const uint8_t *, int64_t, t *);
DECLARE(bf16, uint16_t)
DECLARE(fp16, uint16_t)
DECLARE(fp32, float)

/* Numbers between -1 and 1 in three types, of a generator that needs no library. */
static float next(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-31f;
}

#define RUN(d, t)                                                                                   \
    if (IS(amax_##d)) NAME(amax_##d)((const t *)x_##d, n, &bits);                                   \
    else if (IS(quantize_nvfp4_##d)) NAME(quantize_nvfp4_##d)((const t *)x_##d, n, &amax, packed, scales); \
    else if (IS(quantize_mxfp4_##d)) NAME(quantize_mxfp4_##d)((const t *)x_##d, n, 1, packed, scales);     \
    else if (IS(search_nvfp4_##d)) NAME(search_nvfp4_##d)((const t *)x_##d, n, &amax, 1, packed, scales);  \
    else if (IS(search_mxfp4_##d)) NAME(search_mxfp4_##d)((const t *)x_##d, n, packed, scales);            \
    else if (IS(dequantize_nvfp4_##d)) NAME(dequantize_nvfp4_##d)(packed, scales, n, &amax, 0, (t *)y);    \
    else if (IS(dequantize_mxfp4_##d)) NAME(dequantize_mxfp4_##d)(packed, scales, n, (t *)y);

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int64_t n = atoll(argv[2]), most = 1 << 12; /* as many are prepared, whatever is asked for */
    uint16_t *x_bf16 = malloc(2 * most), *x_fp16 = malloc(2 * most);
    float *x_fp32 = malloc(4 * most), amax = 1.0f;
    uint8_t *packed = malloc(most / 2), *scales = malloc(most / 16);
    void *y = malloc(4 * most);
    uint32_t bits = 0;
    if (n > most) return 2;
    for (int64_t i = 0; i < most; i++) {
        uint32_t word;
        x_fp32[i] = next();
        memcpy(&word, x_fp32 + i, 4);
        x_bf16[i] = (uint16_t)(word >> 16);
        x_fp16[i] = (uint16_t)((word >> 16 & 0x8000) | (0x2C00 + (word >> 8 & 0xFFF))); /* a tenth and more */
    }
    memset(packed, 0x35, most / 2);
    memset(scales, 0x38, most / 16);
    RUN(bf16, uint16_t)
    RUN(fp16, uint16_t)
    RUN(fp32, float)
    return 0;
}
