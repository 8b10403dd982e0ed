/* Block quantization under scales of least error, on the GPU: entry points of quantize.c, with the same arguments and the same bytes.
 *
 *   search_nvfp4_D(x, n, amax, rule, packed, block_scales)             rule: NVFP4_MSE, NVFP4_FOUR_OVER_SIX
 *   search_mxfp4_D(x, n, packed, block_scales)                         rule mse
 *   weigh_nvfp4_D(x, n, amax, weights, columns, packed, block_scales)  rule importance: weights of the squares, one to a column,
 *   weigh_mxfp4_D(x, n, weights, columns, packed, block_scales)        as codec.weigh makes them; n % columns == 0
 *
 * D, grid, lanes, alignment, tail and bytes moved as in quantize.cu, weights 4 more an element; packed and block_scales are written.
 * Bytes equal codec.quantize, rules mse, four-over-six and importance.  screening.cuh says which NVFP4 codes are weighed exactly.
 * A thread owns units of 16 elements, THREADS apart: an NVFP4 block each.  Two lanes share an MXFP4 block: the one takes its even
 * elements, the other the odd ones, so that only the last addition, which is theirs, goes from lane to lane.
 */
#include "screening.cuh"

/* q - e2m1(q), exact; as in search.c. */
DEVICE float remainder_of(float q) {
    float held = fminf(q, 6.0f), power = fp4_float(fp4_bits(fmaxf(held, 1.0f)) & 0x7F800000u);
    return __fadd_rn(q, -__fmaf_rn(power, -0x1p22f, __fmaf_rn(power, 0x1p22f, held)));
}

/* What codec.py adds up for element j, and in which order; and what clipping one element costs at least: 0 where it is not clipped. */
template <bool WEIGHED> DEVICE float term(const Elements<WEIGHED> &elements, int j, float q) {
    float d = remainder_of(q), square = __fmul_rn(d, d);
    return WEIGHED ? __fmul_rn(elements.weights[j], square) : square;
}
DEVICE float sum(const float *terms) {
    float t[UNIT / 2];
#pragma unroll
    for (int j = 0; j < UNIT / 2; j++) t[j] = __fadd_rn(terms[j], terms[j + UNIT / 2]);
#pragma unroll
    for (int half = UNIT / 4; half; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++) t[j] = __fadd_rn(t[j], t[j + half]);
    return t[0];
}
DEVICE float clipping(float weight, float q, float factor) {
    float clipped = fmaxf(q - 6.0f, 0.0f);
    return __fmul_rn(__fmul_rn(weight, __fmul_rn(clipped, clipped)), factor);
}

/* The least cost so far and its code; of equal costs the nearest to `first`, then the lower, which comes later. */
struct Found {
    float least;
    int best, first;
    MEMBER void consider(float cost, int code) {
        bool wins = cost < least || (cost == least && abs(code - first) <= abs(best - first));
        least = wins ? cost : least;
        best = wins ? code : best;
    }
};

/* ------------------------------------------------------------------------------------------------------------- NVFP4 */

template <bool WEIGHED> DEVICE float exact_cost(const Elements<WEIGHED> &elements, int code, float global_scale) {
    float value = e4m3_decode_positive((u32)code), step = __fmul_rn(value, global_scale), terms[UNIT];
#pragma unroll
    for (int j = 0; j < UNIT; j++) terms[j] = term(elements, j, elements.magnitudes[j] / step);
    return __fmul_rn(sum(terms), __fmul_rn(value, value));
}

/* From the last code down, those that are open: bit 31 - i for code last - i; all of them where every bit is set. */
template <bool WEIGHED> DEVICE int choose_exactly(const Elements<WEIGHED> &elements, float global_scale, int first, int last, u32 open) {
    Found found = {INFINITE, first, first};
#pragma unroll 1
    for (int code = last; code > 0 && open; code--) {
        bool is_open = open & FIRST_OFFSET;
        open += ~open ? open : 0;
        if (!is_open) continue;
        float value = e4m3_decode_positive((u32)code);
        float bound = clipping(elements.its_weight, elements.heaviest / (value * global_scale), value * value);
        if (bound > found.least * MARGIN) break;
        found.consider(exact_cost(elements, code, global_scale), code);
    }
    return found.best;
}

/* The code of least cost; words: the unit's. */
template <class T, bool WEIGHED>
DEVICE u32 choose(Elements<WEIGHED> &elements, const u32 *words, u32 amax_bits, float global_scale, i64 rule) {
    float amax = fp4_float(amax_bits), r = amax / (6.0f * global_scale);
    int first = (int)nvfp4_block_scale(amax, global_scale);
    if (r == 0.0f) return (u32)first;
    Worths worths = {max(first + CODES_PER_BINADE - 1, (int)ALL_CODES_BELOW - 1)};
    /* Where no square and no step is subnormal (codec.py), and under none of the top codes a quotient is 7 */
    float tiny = global_scale * (WEIGHED ? TINY_WEIGHTED : TINY), to_u = reciprocal(global_scale) * worths.power();
    bool is_sound = global_scale >= LEAST_GLOBAL_SCALE & global_scale <= 0x1p100f & rule == NVFP4_MSE;
    is_sound &= amax * to_u <= worths.times_2_14(TOP_CODES - 1) * (6.9f * 0x1p-14f);
    if (!(smallest(words, T()) > tiny))
#pragma unroll
        for (int j = 0; j < UNIT; j++) is_sound &= elements.magnitudes[j] > tiny | elements.magnitudes[j] == 0.0f;
    u32 open = 0;
    if (is_sound) {
        Screen<WEIGHED> screen = {elements, worths};
        screen.elements.multiply(to_u);
        open = screen.open_codes();
        if (open && !(open & (open - 1))) return (u32)(worths.highest - __clz((int)open));
    }
    int last = open ? worths.highest : is_sound ? min(worths.highest, (int)LARGEST_CODE) : (int)LARGEST_CODE;
    if (rule == NVFP4_FOUR_OVER_SIX) {
        last = (int)e4m3_encode(fmaxf(fminf(1.5f * r, 448.0f), 0x1p-9f));
        open = FIRST_OFFSET | FIRST_OFFSET >> (last - first);
    }
    Elements<WEIGHED> unscaled = elements;
    magnitudes(words, unscaled.magnitudes, T());
    magnitudes(words + T::WORDS / 2, unscaled.magnitudes + UNIT / 2, T());
    return (u32)choose_exactly(unscaled, global_scale, first, last, open ? open : ~0u);
}

/* ------------------------------------------------------------------------------------------------------------- MXFP4 */

/* From an unbroken half of a block to every second element of it: the even lane's from 0, the odd lane's from 1. */
DEVICE void deal(float *values) {
    bool is_odd = threadIdx.x & 1;
    float kept[UNIT / 2], got[UNIT / 2];
#pragma unroll
    for (int k = 0; k < UNIT / 2; k++) {
        got[k] = __shfl_xor_sync(ALL_LANES, is_odd ? values[2 * k] : values[2 * k + 1], 1);
        kept[k] = is_odd ? values[2 * k + 1] : values[2 * k];
    }
#pragma unroll
    for (int k = 0; k < UNIT / 2; k++) {
        values[k] = is_odd ? got[k] : kept[k];
        values[k + UNIT / 2] = is_odd ? kept[k] : got[k];
    }
}

/* All lanes of a warp together, for they exchange sums. */
template <bool WEIGHED> DEVICE u32 choose_exponent(const Elements<WEIGHED> &elements, u32 amax_bits) {
    int first = (int)e8m0_encode(amax_bits, FP4_FLOOR);
    Found found = {INFINITE, first, first};
#pragma unroll 1
    for (int offset = 1; offset >= (WEIGHED ? -LOWEST_EXPONENT : -1); offset--) {
        int code = first + offset;
        bool is_valid = code >= 0 && code <= FP4_E8M0_STORED_MAX;
        float inverse = fp4_float((u32)(254 - code) << 23), factor = fp4_float((u32)(127 + 2 * offset) << 23), terms[UNIT];
        if (WEIGHED && offset < -1) {
            float bound = clipping(elements.its_weight, elements.heaviest * inverse, factor);
            bound = fmaxf(bound, __shfl_xor_sync(ALL_LANES, bound, 1));
            if (!__any_sync(ALL_LANES, is_valid && !(bound > found.least * MARGIN))) break;
        }
#pragma unroll
        for (int j = 0; j < UNIT; j++) terms[j] = term(elements, j, elements.magnitudes[j] * inverse);
        float half = sum(terms), cost = __fmul_rn(__fadd_rn(half, __shfl_xor_sync(ALL_LANES, half, 1)), factor);
        if (is_valid) found.consider(cost, code);
    }
    return (u32)found.best;
}

/* ------------------------------------------------------------------------------------------------------- entry points */

/* Weights of 16 columns from `first` on; the pointer need not be aligned to more than a float. */
template <bool WEIGHED> DEVICE void load_weights(const float *weights, i64 first, Elements<WEIGHED> &elements) {
#pragma unroll
    for (int j = 0; j < UNIT; j++)
        if (WEIGHED) elements.weights[j] = weights[first + j];
}

struct Arguments {
    const void *x;
    i64 n;
    const float *weights;
    i64 columns;
    u8 *packed, *block_scales;
};

template <class T, bool WEIGHED, class F, class Chosen> DEVICE void quantize_blocks(const Arguments &a, F format, Chosen chosen) {
    i64 start = (i64)blockIdx.x * LAUNCH_UNITS;
    int units = units_here(a.n);
#pragma unroll 1
    for (int i = 0; i < UNITS; i++) {
        int number = (int)threadIdx.x + i * THREADS, held = min(number, units - 1);
        u32 words[T::WORDS], amax_bits;
        Elements<WEIGHED> elements;
        load_unit<T>(a.x, held, words);
        amax_bits = largest(words, T());
        magnitudes(words, elements.magnitudes, T());
        magnitudes(words + T::WORDS / 2, elements.magnitudes + UNIT / 2, T());
        if (WEIGHED) load_weights(a.weights, (start + held) * UNIT % a.columns, elements);
        if (F::LANES == 2) {
            amax_bits = max(amax_bits, __shfl_xor_sync(ALL_LANES, amax_bits, 1));
            deal(elements.magnitudes);
            if (WEIGHED) deal(elements.weights);
        }
        elements.find_heaviest(amax_bits);
        if (F::LANES == 1 && number >= units) continue;
        Block b = format.block(chosen(elements, words, amax_bits, T()), amax_bits, T());
        if (number >= units) continue;
        write_codes<T>(a.x, words, start + number, b, format, a.packed);
        if (number % F::LANES == 0) a.block_scales[(start + number) / F::LANES] = (u8)b.stored;
    }
}

template <bool WEIGHED> struct NvFp4Choice {
    float global_scale;
    i64 rule;
    template <class T> MEMBER u32 operator()(Elements<WEIGHED> &elements, const u32 *words, u32 amax_bits, T) const {
        return choose<T>(elements, words, amax_bits, global_scale, rule);
    }
};
template <bool WEIGHED> struct MxFp4Choice {
    template <class T> MEMBER u32 operator()(Elements<WEIGHED> &elements, const u32 *, u32 amax_bits, T) const {
        return choose_exponent(elements, amax_bits);
    }
};

template <class T, bool WEIGHED> DEVICE void search_nvfp4(const Arguments &a, float amax, i64 rule) {
    float global_scale = nvfp4_global_scale(amax, rule);
    quantize_blocks<T, WEIGHED>(a, NvFp4<true>{global_scale}, NvFp4Choice<WEIGHED>{global_scale, rule});
}

#define ENTRIES(dtype, T)                                                                                                     \
    KERNEL(3) search_nvfp4_##dtype(const void *x, i64 n, const float *amax, i64 rule, u8 *packed, u8 *block_scales) {         \
        search_nvfp4<T, false>({x, n, nullptr, 1, packed, block_scales}, *amax, rule);                                        \
    }                                                                                                                         \
    KERNEL(3) search_mxfp4_##dtype(const void *x, i64 n, u8 *packed, u8 *block_scales) {                                      \
        quantize_blocks<T, false>({x, n, nullptr, 1, packed, block_scales}, MxFp4{FP4_FLOOR}, MxFp4Choice<false>{});                   \
    }                                                                                                                         \
    KERNEL(2) weigh_nvfp4_##dtype(const void *x, i64 n, const float *amax, const float *weights, i64 columns, u8 *packed,     \
                                  u8 *block_scales) {                                                                         \
        search_nvfp4<T, true>({x, n, weights, columns, packed, block_scales}, *amax, NVFP4_MSE);                              \
    }                                                                                                                         \
    KERNEL(2) weigh_mxfp4_##dtype(const void *x, i64 n, const float *weights, i64 columns, u8 *packed, u8 *block_scales) {    \
        quantize_blocks<T, true>({x, n, weights, columns, packed, block_scales}, MxFp4{FP4_FLOOR}, MxFp4Choice<true>{});               \
    }
ENTRIES(bf16, Bf16)
ENTRIES(fp16, Fp16)
ENTRIES(fp32, Fp32)
