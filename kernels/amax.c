/* amax on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   amax_D(x, n, amax_bits)    *amax_bits = max(*amax_bits, float32 bits of max |x|); NaN wins
 *
 * D is bf16, fp16 or fp32: the type of x, which is aligned to it.  Bytes moved per bf16 element: 2.
 * Magnitudes are compared as integers, four vectors side by side, so that none waits for another.  Lines are asked for AHEAD of
 * their use, also across the end of a page, where what processors fetch by themselves ends; behind the end nothing is fetched.
 */
#include "vector.h"

enum { AHEAD = 4096 };

#define AS_IT_IS(word) (word)
#define AS_BF16(bits) fp4_bits(fp4_from_bf16(bits))
#define AS_FP16(bits) fp4_bits(fp4_from_fp16(bits))

/* bits_of: the word of an x; float_bits_of: float32 bits of the magnitude that such a word is */
#define DEFINE_AMAX(dtype, type, width, bits_of, float_bits_of)                                                        \
    void NAME(amax_##dtype)(const type *restrict x, int64_t n, uint32_t *restrict amax_bits) {                         \
        enum { LENGTH = WIDTH / sizeof(type), WHOLE = 4 * LENGTH };                                                    \
        i##width##v v[4] = {{0}};                                                                                      \
        for (; n >= WHOLE; n -= WHOLE, x += WHOLE) {                                                                   \
            ask_for((const char *)x + AHEAD, 4 * WIDTH);                                                               \
            for (int s = 0; s < 4; s++)                                                                                \
                v[s] = max##width(v[s], LOAD(i##width##v, x + s * LENGTH) & INT##width##_MAX);                         \
        }                                                                                                              \
        uint##width##_t found[WHOLE], largest = 0;                                                                     \
        memcpy(found, v, sizeof v);                                                                                    \
        for (int i = 0; i < WHOLE; i++) largest = found[i] > largest ? found[i] : largest;                             \
        for (int i = 0; i < n; i++) {                                                                                  \
            uint##width##_t magnitude = bits_of(x[i]) & INT##width##_MAX;                                              \
            largest = magnitude > largest ? magnitude : largest;                                                       \
        }                                                                                                              \
        uint32_t bits = float_bits_of(largest);                                                                        \
        *amax_bits = bits > *amax_bits ? bits : *amax_bits;                                                            \
    }
DEFINE_AMAX(bf16, uint16_t, 16, AS_IT_IS, AS_BF16)
DEFINE_AMAX(fp16, uint16_t, 16, AS_IT_IS, AS_FP16)
DEFINE_AMAX(fp32, float, 32, fp4_bits, AS_IT_IS)
