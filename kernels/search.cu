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
    MEMBER void find_heaviest(u32 amax_bits) {
        heaviest = WEIGHED ? v[0] : fp4_float(amax_bits), its_weight = WEIGHED ? w[0] : 1.0f;
#pragma unroll
        for (int j = 1; WEIGHED && j < UNIT; j++) {
            bool is_heavier = w[j] * v[j] * v[j] > its_weight * heaviest * heaviest;
            heaviest = is_heavier ? v[j] : heaviest;
            its_weight = is_heavier ? w[j] : its_weight;
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

/* ------------------------------------------------------------------------------------------------------------- NVFP4
 *
 * Three ways to a cost, each for the codes that the one before leaves open; nearly every block ends with the second.
 *
 *   in halves   fp16, two codes to a word: rule mse.  Weights are beyond fp16: rule importance begins with floats.
 *   in floats   with inverses, for the two or three codes that are left
 *   exactly     codec.py's own operations
 *
 * The first two take magnitudes u = x / global_scale, by a power of two, so that S, what a code is worth, is below 1.  Where
 * E2M1's 1 is the smallest normal number of a float type, E2M1 is that type's upper bits: one addition and one mask round a quotient.
 * The rounded one times S is taken from u by one fused operation; the cost is the sum of the squares, of one unit for all codes.
 *
 * How far the cost N that is found may be from T, the cost.  Let e be the type's 2^-11 or 2^-24, |u| the norm of a block, u off by
 * a|u|, inverses by b of themselves, products by e times the power of two below, or e below 1.  A wrong quotient picks a value
 * of E2M1 that is farther away than the right one by twice its error at most; it has crossed a midpoint, and the power of two below
 * a midpoint is 0.8 of it at most.  So, but for the rounding of differences and sums, (1 + ce) in all, and with |max(0.8 u, S)|^2 <= 0.64 |u|^2 + 16:
 *     sqrt(T) - a|u| <= sqrt(N) <= sqrt(T) + (a + 2b)|u| + 2e sqrt(0.64 |u|^2 + 16)
 * Code k is found to cost the least; for the best, T <= T_k.  So sqrt(N) <= sqrt(N_k) + M, where M = (2a + 2b)|u| + 2e sqrt(...), and
 * N <= N_k (1 + t) + M^2 (1 + 1/t) for any t > 0: the limit, beyond which no code is the best.
 *     halves   a = e, b = 0.63 e (of 8 / (8 + m)), c = 11, t = 2^-5: M^2 <= (25 |u|^2 + 160) e^2
 *     floats   a = 3e, b = 2e, c = 12 and as much in codec.py, t = 2^-16: M^2 <= (150 |u|^2 + 640) e^2, also of weights below 2 */
#define HALF_LIMIT (1.0f + 0x1.6p-5f)   /* (1 + t)(1 + 11e)^2 is 1 + 0x1.5bp-5 */
#define HALF_SLACK(norm2) __fmaf_rn(norm2, 0x1.cp-13f, 0x1.5p-10f) /* 33.4 * 25 e^2 is 0x1.a1p-13, which leaves 6 %; 33.4 * 160 e^2 */
#define HALF_BOUND(least, norm2) __fmaf_rn(least, 1.0f + 0x1p-6f, (norm2) * 0x1.2p-15f) /* of T: M is a|u|, t 2^-7 */
#define FLOAT_LIMIT (1.0f + 0x1p-15f)
#define FLOAT_SLACK(norm2) __fmaf_rn(norm2, 0x1p-23f, 0x1p-22f) /* 2^16 * 150 e^2 is 2^-24.7, 2^16 * 640 e^2 2^-22.7 */
#define FIRST_OFFSET 0x80000000u
enum { TOP_CODES = 8, TRIED_CODES = 10, LEAST_NORMAL_CODE = 8, OFFSETS = 32 };

/* Which codes may be the best: bit 31 - i for code highest - i. */
struct Open {
    float least, limit;
    u32 offsets;
    /* Sets the limit, beyond which all codes are that were open before a much lower cost. */
    MEMBER void lower(float lowest, float factor, float slack) {
        float before = least;
        least = fminf(least, lowest);
        limit = __fmaf_rn(least, factor, slack);
        offsets = before > limit ? 0 : offsets;
    }
    MEMBER void add(float cost, u32 offset) { offsets |= cost <= limit ? offset : 0; }
};

/* What code highest - i is worth, times 2^14; those of E4M3's subnormals are not tried.  Beyond the largest code: the largest. */
struct Worths {
    int highest;
    MEMBER float times_2_14(int offset) const {
        return fp4_float(((u32)min(highest - offset, (int)LARGEST_CODE) << 20) + ((140u - (u32)(highest >> 3)) << 23));
    }
    MEMBER float unit() const { return fp4_float((133u - (u32)(highest >> 3)) << 23); }
};

/* Costs of two codes. h: magnitudes; each code has a half of the other words: 2^-14 / S, and -S * 2^14. */
template <bool IS_CLIPPED> DEVICE u32 two_costs(const u32 *h, u32 inverses, u32 minus_steps) {
    u32 sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < UNIT; j++) {
        u32 u = j % 2 ? both_high(h[j / 2]) : both_low(h[j / 2]);
        u32 q = fma2_fp16(u, inverses, 0);
        if (IS_CLIPPED) q = min2_fp16(q, 0x0E000E00u); /* 6 * 2^-14 */
        u32 d = fma2_fp16((q + 0x01000100u) & 0xFE00FE00u, minus_steps, u);
        sums[j % 2] = fma2_fp16(d, d, sums[j % 2]);
    }
    return fma2_fp16(sums[0], 0x3C003C00u, sums[1]);
}
template <bool IS_CLIPPED> DEVICE u32 two_costs_from(const u32 *h, Worths worths, int offset) {
    float high = worths.times_2_14(offset), low = worths.times_2_14(offset + 1);
    return two_costs<IS_CLIPPED>(h, narrow2_fp16(reciprocal(high), reciprocal(low)), narrow2_fp16(high, low) ^ 0x80008000u);
}

template <bool WEIGHED> struct Nvfp4Search {
    Unit<WEIGHED> unit;
    float global_scale;

    MEMBER float exact_cost(int code) const {
        float value = e4m3_decode_positive((u32)code), step = __fmul_rn(value, global_scale), terms[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; j++) terms[j] = unit.term(j, unit.v[j] / step);
        return __fmul_rn(unit.sum(terms), __fmul_rn(value, value));
    }
    /* From the last code down, those that are open: bit 31 - i for code last - i; all of them where every bit is set. */
    MEMBER int exactly(int first, int last, u32 open) const {
        Found found = {INFINITE, first, first};
#pragma unroll 1
        for (int code = last; code > 0 && open; code--) {
            bool is_open = open & FIRST_OFFSET;
            open += ~open ? open : 0;
            if (!is_open) continue;
            float value = e4m3_decode_positive((u32)code);
            if (unit.clipping(unit.heaviest / (value * global_scale), value * value) > found.least * MARGIN) break;
            found.consider(exact_cost(code), code);
        }
        return found.best;
    }
};

/* u: magnitudes, as above. */
template <bool WEIGHED> struct Nvfp4Rough {
    Unit<WEIGHED> unit; /* of u */
    Worths worths;

    MEMBER float cost(int offset) const {
        float step = worths.times_2_14(offset), rounded[UNIT], sums[2] = {0.0f, 0.0f};
#ifdef FP4_CVT
        step *= 0x1p-14f;
        float inverse = reciprocal(step);
#pragma unroll
        for (int j = 0; j < UNIT; j += 2) {
            u32 both = round2_e2m1(unit.v[j] * inverse, unit.v[j + 1] * inverse);
            rounded[j] = widen_fp16((u16)both), rounded[j + 1] = widen_fp16((u16)(both >> 16));
        }
#else
        step *= 0x1p112f;
        float inverse = reciprocal(step);
#pragma unroll
        for (int j = 0; j < UNIT; j++)
            rounded[j] = fp4_float(min((fp4_bits(unit.v[j] * inverse) + 0x200000u) & 0xFFC00000u, 0x01C00000u)); /* 6 * 2^-126 */
#endif
#pragma unroll
        for (int j = 0; j < UNIT; j++) {
            float d = __fmaf_rn(rounded[j], -step, unit.v[j]);
            sums[j % 2] = __fmaf_rn(WEIGHED ? unit.w[j] * d : d, d, sums[j % 2]);
        }
        return sums[0] + sums[1];
    }
    /* Whether this code and all below it cost more than the limit, for one element that they clip. */
    MEMBER bool is_beyond(int offset, float limit) const {
        float clipped = fmaxf(__fmaf_rn(worths.times_2_14(offset), -6.0f * 0x1p-14f, unit.heaviest), 0.0f);
        return (WEIGHED ? unit.its_weight * clipped : clipped) * clipped > limit;
    }
    MEMBER bool is_tried(int offset) const { return offset < OFFSETS && worths.highest - offset >= LEAST_NORMAL_CODE; }
    /* Codes that fp16 leaves open; none where it cannot tell. */
    MEMBER u32 in_halves(const u32 *h, float norm2) const {
        float slack = HALF_SLACK(norm2);
        u32 costs[TRIED_CODES / 2];
        if (!is_tried(TRIED_CODES - 1)) return 0;
#pragma unroll
        for (int i = 0; i < TRIED_CODES / 2; i++)
            costs[i] = i < TOP_CODES / 2 ? two_costs_from<false>(h, worths, 2 * i) : two_costs_from<true>(h, worths, 2 * i);
        u32 lowest = costs[0];
#pragma unroll
        for (int i = 1; i < TRIED_CODES / 2; i++) lowest = min2_fp16(lowest, costs[i]);
        Open open = {fminf(widen_fp16((u16)lowest), widen_fp16((u16)(lowest >> 16))), 0.0f, 0};
        open.limit = __fmaf_rn(open.least, HALF_LIMIT, slack);
#pragma unroll
        for (int i = 0; i < TRIED_CODES; i++) open.add(widen_fp16((u16)(costs[i / 2] >> i % 2 * 16)), FIRST_OFFSET >> i);
        /* Where no quotient under the highest is above 3.5, half of it is as good, and nearer to the first: codec.py */
        bool is_doubled = unit.heaviest <= worths.times_2_14(0) * (3.49f * 0x1p-14f);
        open.offsets &= ~0u >> max(worths.highest - (int)LARGEST_CODE, (int)is_doubled);
#pragma unroll 1
        for (int offset = TRIED_CODES; !is_beyond(offset, HALF_BOUND(open.least, norm2)); offset += 2) {
            if (!is_tried(offset + 1)) return 0;
            u32 both = two_costs_from<true>(h, worths, offset);
            float cost = widen_fp16((u16)both), next = widen_fp16((u16)(both >> 16));
            open.lower(fminf(cost, next), HALF_LIMIT, slack);
            open.add(cost, FIRST_OFFSET >> offset);
            open.add(next, FIRST_OFFSET >> (offset + 1));
        }
        return open.offsets;
    }
    /* Codes that float32 leaves open of those that are. */
    MEMBER u32 in_floats(u32 left, float norm2) const {
        float slack = FLOAT_SLACK(norm2);
        Open open = {INFINITE, INFINITE, 0};
#pragma unroll 1
        while (left) {
            int offset = __clz((int)left);
            left &= ~(FIRST_OFFSET >> offset);
            if (WEIGHED) {
                if (is_beyond(offset, open.limit)) return open.offsets;
                if (!is_tried(offset)) return 0;
            }
            float found = cost(offset);
            open.lower(found, FLOAT_LIMIT, slack);
            open.add(found, FIRST_OFFSET >> offset);
        }
        return WEIGHED ? 0 : open.offsets;
    }
};

/* The code of least cost; w: the words of the unit. */
template <class T, bool WEIGHED>
DEVICE u32 choose(Unit<WEIGHED> &unit, const u32 *w, u32 amax_bits, float global_scale, i64 rule) {
    float amax = fp4_float(amax_bits), r = amax / (6.0f * global_scale);
    int first = (int)nvfp4_block_scale(amax, global_scale);
    if (r == 0.0f) return (u32)first;
    Worths worths = {max(first + CODES_PER_BINADE - 1, (int)ALL_CODES_BELOW - 1)};
    /* Where no square and no step is subnormal (codec.py), and under none of the top codes a quotient is 7 */
    float tiny = global_scale * (WEIGHED ? TINY_WEIGHTED : TINY), to_u = reciprocal(global_scale) * worths.unit();
    bool is_sound = global_scale >= LEAST_GLOBAL_SCALE & global_scale <= 0x1p100f & rule == NVFP4_MSE;
    is_sound &= amax * to_u <= worths.times_2_14(TOP_CODES - 1) * (6.9f * 0x1p-14f);
    if (!(smallest(w, T()) > tiny))
#pragma unroll
        for (int j = 0; j < UNIT; j++) is_sound &= unit.v[j] > tiny | unit.v[j] == 0.0f;
    u32 open = 0;
    if (is_sound) {
        Nvfp4Rough<WEIGHED> rough = {unit, worths};
#pragma unroll
        for (int j = 0; j < UNIT; j++) rough.unit.v[j] *= to_u;
        rough.unit.heaviest *= to_u;
        if (WEIGHED) open = rough.in_floats(~0u >> max(worths.highest - (int)LARGEST_CODE, 0), 16.0f * unit.its_weight * rough.unit.heaviest * rough.unit.heaviest);
        else {
            u32 h[UNIT / 2], squares = 0;
#pragma unroll
            for (int j = 0; j < UNIT / 2; j++) {
                h[j] = narrow2_fp16(rough.unit.v[2 * j], rough.unit.v[2 * j + 1]);
                squares = fma2_fp16(h[j], h[j], squares);
            }
            float norm2 = widen_fp16((u16)squares) + widen_fp16((u16)(squares >> 16));
            open = rough.in_halves(h, norm2);
            if (open & (open - 1)) open = rough.in_floats(open, norm2);
        }
        if (open && !(open & (open - 1))) return (u32)(worths.highest - __clz((int)open));
    }
    int last = open ? worths.highest : is_sound ? min(worths.highest, (int)LARGEST_CODE) : (int)LARGEST_CODE;
    if (rule == NVFP4_FOUR_OVER_SIX) {
        last = (int)e4m3_encode(fmaxf(fminf(1.5f * r, 448.0f), 0x1p-9f));
        open = FIRST_OFFSET | FIRST_OFFSET >> (last - first);
    }
    Nvfp4Search<WEIGHED> search = {unit, global_scale};
    magnitudes(w, search.unit.v, T());
    magnitudes(w + T::WORDS / 2, search.unit.v + UNIT / 2, T());
    return (u32)search.exactly(first, last, open ? open : ~0u);
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
        unit.find_heaviest(amax_bits);
        if (F::LANES == 1 && number >= units) continue;
        Block b = format.block(chosen(unit, w, amax_bits, T()), amax_bits, T());
        if (number >= units) continue;
        write_codes<T>(a.x, w, start + number, b, format, a.packed);
        if (number % F::LANES == 0) a.block_scales[(start + number) / F::LANES] = (u8)b.stored;
    }
}

template <bool WEIGHED> struct NvFp4Choice {
    float global_scale;
    i64 rule;
    template <class T> MEMBER u32 operator()(Unit<WEIGHED> &unit, const u32 *w, u32 amax_bits, T) const {
        return choose<T>(unit, w, amax_bits, global_scale, rule);
    }
};
template <bool WEIGHED> struct MxFp4Choice {
    template <class T> MEMBER u32 operator()(Unit<WEIGHED> &unit, const u32 *, u32 amax_bits, T) const {
        return choose_exponent(unit, amax_bits);
    }
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
