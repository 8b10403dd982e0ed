/* amax on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   amax_D(x, n, amax_bits)    *amax_bits = max(*amax_bits, float32 bits of max |x|); NaN wins
 *
 * D is bf16, fp16 or fp32: the type of x, which is aligned to it.  Bytes moved per bf16 element: 2.
 */
#include "vector.h"

#define DEFINE_AMAX16(dtype)                                                                        \
    void NAME(amax_##dtype)(const uint16_t *restrict x, int64_t n, uint32_t *restrict amax_bits) {  \
        int16_t largest = 0;                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                           \
            int16_t magnitude = (int16_t)(x[i] & 0x7FFF);                                           \
            largest = magnitude > largest ? magnitude : largest;                                    \
        }                                                                                           \
        uint32_t bits = fp4_bits(fp4_from_##dtype((uint16_t)largest));                              \
        *amax_bits = bits > *amax_bits ? bits : *amax_bits;                                         \
    }
DEFINE_AMAX16(bf16)
DEFINE_AMAX16(fp16)

void NAME(amax_fp32)(const float *restrict x, int64_t n, uint32_t *restrict amax_bits) {
    int32_t largest = (int32_t)*amax_bits;
    for (int64_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(fp4_bits(x[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    *amax_bits = (uint32_t)largest;
}
