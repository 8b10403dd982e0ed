/* Block quantization under scales of least error, on the GPU: entry points of quantize.c, with the same arguments and the same bytes.
 *
 *   search_nvfp4_D(x, n, amax, rule, packed, block_scales)             rule: NVFP4_MSE, NVFP4_FOUR_OVER_SIX
 *   search_mxfp4_D(x, n, packed, block_scales)                         rule mse
 *   weigh_nvfp4_D(x, n, amax, weights, columns, packed, block_scales)  rule importance: weights of the squares, one to a column,
 *   weigh_mxfp4_D(x, n, weights, columns, packed, block_scales)        as codec.weigh makes them; n % columns == 0
 *
 * D, alignment and launch as in quantize.cu; search.c says how the best code is found, and why no other can be better.
 * A thread owns units of 16 elements, THREADS apart: an NVFP4 block each.  Two lanes share an MXFP4 block: the one takes its even
 * elements, the other the odd ones, so that only the last addition, which is theirs, goes from lane to lane.
 */
#include "codes.cuh"

#define INFINITE fp4_float(FP4_INF_BITS)

/* q - e2m1(q), exact; as in search.c. */
DEVICE float remainder_of(float q) {
    float held = fminf(q, 6.0f), power = fp4_float(fp4_bits(fmaxf(held, 1.0f)) & 0x7F800000u);
    return __fadd_rn(q, -__fmaf_rn(power, -0x1p22f, __fmaf_rn(power, 0x1p22f, held)));
}

/* Sixteen elements of a block, or of half of one. v: magnitudes; w: weights, unread where there are none. */
template <bool WEIGHED> struct Unit {
    float v[UNIT], w[WEIGHED ? UNIT : 1];
    float heaviest, its_weight; /* the element whose clipping bounds the cost from below */

    MEMBER float term(int j, float q) const {
        float d = remainder_of(q), square = __fmul_rn(d, d);
        return WEIGHED ? __fmul_rn(w[j], square) : square;
    }
    MEMBER void find_heaviest() {
        heaviest = v[0], its_weight = WEIGHED ? w[0] : 1.0f;
#pragma unroll
        for (int j = 1; j < UNIT; j++) {
            bool is_heavier = WEIGHED ? w[j] * v[j] * v[j] > its_weight * heaviest * heaviest : v[j] > heaviest;
            heaviest = is_heavier ? v[j] : heaviest;
            if (WEIGHED) its_weight = is_heavier ? w[j] : its_weight;
        }
    }
    MEMBER float clipping(float q, float factor) const { /* 0 where it is not clipped */
        float clipped = fmaxf(q - 6.0f, 0.0f);
        return __fmul_rn(__fmul_rn(its_weight, __fmul_rn(clipped, clipped)), factor);
    }
    MEMBER float sum(const float *term) const {
        float t[UNIT / 2];
#pragma unroll
        for (int j = 0; j < UNIT / 2; j++) t[j] = __fadd_rn(term[j], term[j + UNIT / 2]);
#pragma unroll
        for (int half = UNIT / 4; half; half /= 2)
#pragma unroll
            for (int j = 0; j < half; j++) t[j] = __fadd_rn(t[j], t[j + half]);
        return t[0];
    }
};

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

template <bool WEIGHED> struct Nvfp4Search {
    Unit<WEIGHED> unit;
    float global_scale;

    MEMBER float exact_cost(int code) const {
        float value = e4m3_decode_positive((u32)code), step = __fmul_rn(value, global_scale), terms[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; j++) terms[j] = unit.term(j, unit.v[j] / step);
        return __fmul_rn(unit.sum(terms), __fmul_rn(value, value));
    }
    MEMBER float rough_cost(float inverse, float factor) const {
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < UNIT; j++) {
            float d = remainder_of(unit.v[j] * inverse);
            sums[j % 2] = __fmaf_rn(WEIGHED ? unit.w[j] * d : d, d, sums[j % 2]);
        }
        return (sums[0] + sums[1]) * factor;
    }
    MEMBER bool is_sound() const { /* no square and no step is subnormal: codec.py */
        float tiny = global_scale * (WEIGHED ? TINY_WEIGHTED : TINY);
        bool is_sound = global_scale >= LEAST_GLOBAL_SCALE;
#pragma unroll
        for (int j = 0; j < UNIT; j++) is_sound = is_sound && (unit.v[j] > tiny || unit.v[j] == 0.0f);
        return is_sound;
    }
    /* From the last code down; of a pair, which four-over-six has to choose from, these two alone. */
    MEMBER int exactly(int first, int last, bool is_pair) const {
        Found found = {INFINITE, first, first};
#pragma unroll 1
        for (int code = last; code > 0; code = !is_pair ? code - 1 : code > first ? first : 0) {
            float value = e4m3_decode_positive((u32)code);
            if (unit.clipping(unit.heaviest / (value * global_scale), value * value) > found.least * MARGIN) break;
            found.consider(exact_cost(code), code);
        }
        return found.best;
    }
    /* The best code, 0 where it is not certain: this inverse is more than twice as wrong as search.c's, and covered twice. */
    MEMBER int roughly(int first, int last) const {
        int best = first;
        float top = e4m3_decode_positive((u32)last), slack = SLACK * top * top, least = INFINITE, second = INFINITE;
#pragma unroll 1
        for (int code = last; code > 0; code--) {
            float value = e4m3_decode_positive((u32)code), factor = value * value, inverse = reciprocal(value * global_scale);
            if (unit.clipping(unit.heaviest * inverse, factor) > (least + slack) * DOUBT) break;
            float cost = rough_cost(inverse, factor);
            second = cost < least ? least : fminf(second, cost);
            best = cost < least ? code : best;
            least = fminf(least, cost);
        }
        return second > (least + slack) * DOUBT ? best : 0;
    }
};

template <bool WEIGHED> DEVICE u32 choose(const Unit<WEIGHED> &unit, u32 amax_bits, float global_scale, i64 rule) {
    Nvfp4Search<WEIGHED> search = {unit, global_scale};
    float r = fp4_float(amax_bits) / (6.0f * global_scale), more = 1.5f * r;
    int first = (int)nvfp4_block_scale(fp4_float(amax_bits), global_scale);
    if (r == 0.0f) return (u32)first;
    bool is_pair = rule == NVFP4_FOUR_OVER_SIX, is_sound = search.is_sound();
    int four = (int)e4m3_encode(fmaxf(fminf(more, 448.0f), 0x1p-9f));
    int highest = min(max(first + CODES_PER_BINADE - 1, (int)ALL_CODES_BELOW - 1), (int)LARGEST_CODE);
    int found = is_sound && !is_pair ? search.roughly(first, highest) : 0;
    return (u32)(found ? found : search.exactly(first, is_pair ? four : is_sound ? highest : (int)LARGEST_CODE, is_pair));
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
template <bool WEIGHED> DEVICE u32 choose_exponent(const Unit<WEIGHED> &unit, u32 amax_bits) {
    int first = (int)e8m0_encode(amax_bits, FP4_FLOOR);
    Found found = {INFINITE, first, first};
#pragma unroll 1
    for (int offset = 1; offset >= (WEIGHED ? -LOWEST_EXPONENT : -1); offset--) {
        int code = first + offset;
        bool is_valid = code >= 0 && code <= FP4_E8M0_STORED_MAX;
        float inverse = fp4_float((u32)(254 - code) << 23), factor = fp4_float((u32)(127 + 2 * offset) << 23), terms[UNIT];
        if (WEIGHED && offset < -1) {
            float bound = unit.clipping(unit.heaviest * inverse, factor);
            bound = fmaxf(bound, __shfl_xor_sync(ALL_LANES, bound, 1));
            if (!__any_sync(ALL_LANES, is_valid && !(bound > found.least * MARGIN))) break;
        }
#pragma unroll
        for (int j = 0; j < UNIT; j++) terms[j] = unit.term(j, unit.v[j] * inverse);
        float half = unit.sum(terms), cost = __fmul_rn(__fadd_rn(half, __shfl_xor_sync(ALL_LANES, half, 1)), factor);
        if (is_valid) found.consider(cost, code);
    }
    return (u32)found.best;
}

/* ------------------------------------------------------------------------------------------------------- entry points */

/* Weights of 16 columns from `first` on; the pointer need not be aligned to more than a float. */
template <bool WEIGHED> DEVICE void load_weights(const float *weights, i64 first, Unit<WEIGHED> &unit) {
#pragma unroll
    for (int j = 0; j < UNIT; j++)
        if (WEIGHED) unit.w[j] = weights[first + j];
}

struct Arguments {
    const void *x;
    i64 n;
    const float *weights;
    i64 columns;
    u8 *packed, *block_scales;
};

template <class T, bool WEIGHED, class F, class Chosen> DEVICE void search(const Arguments &a, F format, Chosen chosen) {
    i64 start = (i64)blockIdx.x * LAUNCH_UNITS;
    int units = units_here(a.n);
#pragma unroll 1
    for (int i = 0; i < UNITS; i++) {
        int number = (int)threadIdx.x + i * THREADS, held = min(number, units - 1);
        u32 w[T::WORDS], amax_bits;
        Unit<WEIGHED> unit;
        load_unit<T>(a.x, held, w);
        amax_bits = largest(w, T());
        magnitudes(w, unit.v, T());
        magnitudes(w + T::WORDS / 2, unit.v + UNIT / 2, T());
        if (WEIGHED) load_weights(a.weights, (start + held) * UNIT % a.columns, unit);
        if (F::LANES == 2) {
            amax_bits = max(amax_bits, __shfl_xor_sync(ALL_LANES, amax_bits, 1));
            deal(unit.v);
            if (WEIGHED) deal(unit.w);
        }
        unit.find_heaviest();
        if (F::LANES == 1 && number >= units) continue;
        Block b = format.block(chosen(unit, amax_bits), amax_bits, T());
        if (number >= units) continue;
        write_codes<T>(a.x, w, start + number, b, format, a.packed);
        if (number % F::LANES == 0) a.block_scales[(start + number) / F::LANES] = (u8)b.stored;
    }
}

template <bool WEIGHED> struct NvFp4Choice {
    float global_scale;
    i64 rule;
    MEMBER u32 operator()(const Unit<WEIGHED> &unit, u32 amax_bits) const { return choose(unit, amax_bits, global_scale, rule); }
};
template <bool WEIGHED> struct MxFp4Choice {
    MEMBER u32 operator()(const Unit<WEIGHED> &unit, u32 amax_bits) const { return choose_exponent(unit, amax_bits); }
};

template <class T, bool WEIGHED> DEVICE void search_nvfp4(const Arguments &a, float amax, i64 rule) {
    float global_scale = nvfp4_global_scale(amax, rule);
    search<T, WEIGHED>(a, NvFp4<true>{global_scale}, NvFp4Choice<WEIGHED>{global_scale, rule});
}

#define ENTRIES(dtype, T)                                                                                                     \
    KERNEL(3) search_nvfp4_##dtype(const void *x, i64 n, const float *amax, i64 rule, u8 *packed, u8 *block_scales) {         \
        search_nvfp4<T, false>({x, n, nullptr, 1, packed, block_scales}, *amax, rule);                                        \
    }                                                                                                                         \
    KERNEL(3) search_mxfp4_##dtype(const void *x, i64 n, u8 *packed, u8 *block_scales) {                                      \
        search<T, false>({x, n, nullptr, 1, packed, block_scales}, MxFp4{FP4_FLOOR}, MxFp4Choice<false>{});                   \
    }                                                                                                                         \
    KERNEL(2) weigh_nvfp4_##dtype(const void *x, i64 n, const float *amax, const float *weights, i64 columns, u8 *packed,     \
                                  u8 *block_scales) {                                                                         \
        search_nvfp4<T, true>({x, n, weights, columns, packed, block_scales}, *amax, NVFP4_MSE);                              \
    }                                                                                                                         \
    KERNEL(2) weigh_mxfp4_##dtype(const void *x, i64 n, const float *weights, i64 columns, u8 *packed, u8 *block_scales) {    \
        search<T, true>({x, n, weights, columns, packed, block_scales}, MxFp4{FP4_FLOOR}, MxFp4Choice<true>{});               \
    }
ENTRIES(bf16, Bf16)
ENTRIES(fp16, Fp16)
ENTRIES(fp32, Fp32)
