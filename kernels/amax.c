/* amax on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   amax_D(x, n, amax_bits)    *amax_bits = max(*amax_bits, float32 bits of max |x|); NaN wins
 *
 * D is bf16, fp16 or fp32: the type of x, which is aligned to it.  Bytes moved per bf16 element: 2.
 * Of signed words the largest is the largest magnitude without a sign, of unsigned ones that with a sign: two operations a vector,
 * as with a mask, but none waits for the other.  A page's first lines are asked for eight pages before, since what processors
 * fetch by themselves ends with a page; that may be behind the end, where nothing is fetched.
 */
#include "vector.h"

enum { PAGE = 4096, SPAN = 4 * PAGE, AHEAD = 8 * PAGE };

#define AS_IT_IS(word) (word)
#define AS_BF16(bits) fp4_bits(fp4_from_bf16(bits))
#define AS_FP16(bits) fp4_bits(fp4_from_fp16(bits))

/* bits_of: the word of an x; float_bits_of: float32 bits of the magnitude that such a word is */
#define DEFINE_AMAX(dtype, type, width, bits_of, float_bits_of)                                                         \
    INLINE uint##width##_t largest_##dtype(const type *restrict x, int64_t n, uint##width##_t largest) {                \
        int##width##_t positive = (int##width##_t)largest;                                                              \
        uint##width##_t negative = 0;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                                               \
            uint##width##_t word = bits_of(x[i]);                                                                       \
            positive = (int##width##_t)word > positive ? (int##width##_t)word : positive;                               \
            negative = word > negative ? word : negative;                                                               \
        }                                                                                                               \
        negative &= INT##width##_MAX;                                                                                   \
        return negative > (uint##width##_t)positive ? negative : (uint##width##_t)positive;                             \
    }                                                                                                                   \
    void NAME(amax_##dtype)(const type *restrict x, int64_t n, uint32_t *restrict amax_bits) {                          \
        const int64_t span = SPAN / sizeof(type);                                                                       \
        uint##width##_t largest = 0;                                                                                    \
        for (; n >= span; n -= span, x += span) {                                                                       \
            const char *page = (const char *)x + AHEAD, *end = page + SPAN;                                             \
            for (; page < end; page += PAGE) __builtin_prefetch(page, 0, 2), __builtin_prefetch(page + 64, 0, 2);       \
            largest = largest_##dtype(x, span, largest);                                                                \
        }                                                                                                               \
        uint32_t found = float_bits_of(largest_##dtype(x, n, largest));                                                 \
        *amax_bits = found > *amax_bits ? found : *amax_bits;                                                           \
    }
DEFINE_AMAX(bf16, uint16_t, 16, AS_IT_IS, AS_BF16)
DEFINE_AMAX(fp16, uint16_t, 16, AS_IT_IS, AS_FP16)
DEFINE_AMAX(fp32, float, 32, fp4_bits, AS_IT_IS)
