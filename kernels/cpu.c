/* The CPU library's entry points: each picks the copy of its kernel made for this processor.
 * The other .c files say what names and arguments mean; kernels for other devices carry those of amax.c, quantize.c, dequantize.c and descend.c.
 */
#include <stdint.h>

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif
#define FOR_DTYPE(E, d, t)                                                                                              \
    E(amax_##d, (const t *x, int64_t n, uint32_t *amax_bits), (x, n, amax_bits))                                        \
    E(quantize_nvfp4_##d, (const t *x, int64_t n, const float *amax, uint8_t *p, uint8_t *s), (x, n, amax, p, s))       \
    E(quantize_mxfp4_##d, (const t *x, int64_t n, int64_t rule, uint8_t *p, uint8_t *s), (x, n, rule, p, s))            \
    E(search_nvfp4_##d, (const t *x, int64_t n, const float *amax, int64_t rule, uint8_t *p, uint8_t *s),               \
      (x, n, amax, rule, p, s))                                                                                         \
    E(search_mxfp4_##d, (const t *x, int64_t n, uint8_t *p, uint8_t *s), (x, n, p, s))                                  \
    E(weigh_nvfp4_##d, (const t *x, int64_t n, const float *amax, const float *w, int64_t c, uint8_t *p, uint8_t *s),   \
      (x, n, amax, w, c, p, s))                                                                                         \
    E(weigh_mxfp4_##d, (const t *x, int64_t n, const float *w, int64_t c, uint8_t *p, uint8_t *s), (x, n, w, c, p, s))  \
    E(dequantize_nvfp4_##d, (const uint8_t *p, const uint8_t *s, int64_t n, const float *g, int64_t is_divisor, t *y),  \
      (p, s, n, g, is_divisor, y))                                                                                      \
    E(dequantize_mxfp4_##d, (const uint8_t *p, const uint8_t *s, int64_t n, t *y), (p, s, n, y))                        \
    E(compare_nvfp4_##d, (const t *x, int64_t rows, int64_t columns, const uint8_t *p, const uint8_t *s, const float *g, \
                          int64_t is_divisor, double *sums), (x, rows, columns, p, s, g, is_divisor, sums))             \
    E(compare_mxfp4_##d, (const t *x, int64_t rows, int64_t columns, const uint8_t *p, const uint8_t *s, double *sums), \
      (x, rows, columns, p, s, sums))
#define COUNT_CODES(E) E(count_codes, (const uint8_t *p, int64_t nbytes, int64_t *counts), (p, nbytes, counts))
#define DESCENTS(E)                                                                                                     \
    E(descend_nvfp4, (const float *x, const float *h, const int64_t *z, const float *g, const uint8_t *p, const uint8_t *s,  \
                      uint8_t *fp, uint8_t *fs, uint8_t *room), (x, h, z, g, p, s, fp, fs, room))                       \
    E(descend_mxfp4, (const float *x, const float *h, const int64_t *z, const uint8_t *p, const uint8_t *s, uint8_t *fp,     \
                      uint8_t *fs, uint8_t *room), (x, h, z, p, s, fp, fs, room))
#define COMPENSATION(E)                                                                                                 \
    E(compensate, (float *w, const int64_t *z, const float *u, const float *s, const int64_t *b, float *e, uint8_t *c), \
      (w, z, u, s, b, e, c))
#define STUDIES(E, format)                                                                                              \
    E(study_##format, (const float *x, int64_t n, int64_t width, int64_t rule, const float *amax, const float *w, int64_t c, \
                       float *y), (x, n, width, rule, amax, w, c, y))
/* From here on, entry points that CUDA has no kernels for, but for decode_fp8, decode_int4, decode_int8, transpose_2, transpose_4,
 * grid_amax, quantize_fp8 and compare_values; fp8_costs are two kernels there. */
#define TO_FP8(E, d, t)                                                                                                 \
    E(grid_amax_##d, (const t *x, const void *grid, uint32_t *amax_bits), (x, grid, amax_bits))                         \
    E(quantize_fp8_##d, (const t *x, const float *s, const void *grid, uint8_t *c), (x, s, grid, c))                    \
    E(fp8_costs_##d, (const t *x, const float *s, const void *grid, double *costs), (x, s, grid, costs))                \
    E(compare_values_##d, (const t *x, int64_t rows, int64_t columns, const float *y, double *sums), (x, rows, columns, y, sums))
#define FOR_NBYTES(E, N, t)                                                                                             \
    E(transpose_##N, (const t *x, int64_t rows, int64_t width, int64_t first, int64_t step, int64_t count, t *y),       \
      (x, rows, width, first, step, count, y))
#define FOR_GRID(E)                                                                                                     \
    E(decode_fp8, (const uint8_t *c, const float *s, const void *grid, float *y), (c, s, grid, y))                      \
    E(amax_fp8, (const uint8_t *c, const float *s, const void *grid, uint32_t *amax_bits), (c, s, grid, amax_bits))     \
    E(decode_int4, (const uint8_t *p, const float *s, const float *z, const void *grid, float *y), (p, s, z, grid, y))  \
    E(decode_int8, (const uint8_t *p, const float *s, const float *z, const void *grid, float *y), (p, s, z, grid, y))  \
    E(round_bf16, (const float *x, int64_t n, uint16_t *y), (x, n, y))
#define FOR_CELLS(E)                                                                                                    \
    E(sum_cells, (const uint8_t *c, const double *v, int64_t rows, int64_t blocks, const int64_t *r, int64_t n, double *room, \
                  double *sums), (c, v, rows, blocks, r, n, room, sums))                                                \
    E(count_bytes, (const uint8_t *b, int64_t n, int64_t *counts), (b, n, counts))
#define FOR_LOW_RANK(E)                                                                                                 \
    E(multiply, (const float *b, const float *a, int64_t rows, int64_t inner, int64_t columns, float *y),               \
      (b, a, rows, inner, columns, y))                                                                                  \
    E(pull_to_nearest, (const float *x, const float *s, const float *d, const float *p, const int64_t *sizes, float *y, \
                        float *pulled), (x, s, d, p, sizes, y, pulled))
#define ENTRIES(E)                                                                                                      \
    FOR_DTYPE(E, bf16, uint16_t) FOR_DTYPE(E, fp16, uint16_t) FOR_DTYPE(E, fp32, float)                                 \
    TO_FP8(E, bf16, uint16_t) TO_FP8(E, fp16, uint16_t) TO_FP8(E, fp32, float)                                          \
    FOR_NBYTES(E, 1, uint8_t) FOR_NBYTES(E, 2, uint16_t) FOR_NBYTES(E, 4, uint32_t) FOR_GRID(E) FOR_CELLS(E)            \
    FOR_LOW_RANK(E)                                                                                                     \
    COUNT_CODES(E) DESCENTS(E) COMPENSATION(E) STUDIES(E, nvfp4) STUDIES(E, mxfp4)

#ifdef __x86_64__
static int level;
__attribute__((constructor)) static void pick(void) {
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
    level = v4 ? 4 : v3 ? 3 : 2;
}
/* The level in use; `want` below it (2, 3) lowers it, so that tests reach every copy. 0 only asks. */
API int fp4_level(int want) {
    if (want >= 2 && want < level) level = want;
    return level;
}
#define ENTRY(name, parameters, arguments)                          \
    void name##_v2 parameters; void name##_v3 parameters; void name##_v4 parameters; \
    API void name parameters {                                      \
        if (level == 4) name##_v4 arguments;                        \
        else if (level == 3) name##_v3 arguments;                   \
        else name##_v2 arguments;                                   \
    }
#else
API int fp4_level(int want) { (void)want; return 0; }
#define ENTRY(name, parameters, arguments) void name##_v0 parameters; API void name parameters { name##_v0 arguments; }
#endif
ENTRIES(ENTRY)
