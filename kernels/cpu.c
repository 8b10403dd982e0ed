/* The CPU library's entry points: each picks the copy of quantize.c and dequantize.c made for this processor.
 * quantize.c and dequantize.c say what names and arguments mean; kernels for other devices carry the same.
 */
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define FOR_DTYPE(E, d, t)                                                                                              \
    E(amax_##d, (const t *x, int64_t n, uint32_t *amax_bits), (x, n, amax_bits))                                        \
    E(quantize_nvfp4_##d, (const t *x, int64_t n, const float *amax, uint8_t *p, uint8_t *s), (x, n, amax, p, s))       \
    E(quantize_mxfp4_##d, (const t *x, int64_t n, int64_t rule, uint8_t *p, uint8_t *s), (x, n, rule, p, s))            \
    E(dequantize_nvfp4_##d, (const uint8_t *p, const uint8_t *s, int64_t n, const float *g, int64_t is_divisor, t *y),  \
      (p, s, n, g, is_divisor, y))                                                                                      \
    E(dequantize_mxfp4_##d, (const uint8_t *p, const uint8_t *s, int64_t n, t *y), (p, s, n, y))
#define ENTRIES(E) FOR_DTYPE(E, bf16, uint16_t) FOR_DTYPE(E, fp16, uint16_t) FOR_DTYPE(E, fp32, float)

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
