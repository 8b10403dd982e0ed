/* NVFP4 scales of least error, screened: which codes may cost the least, found in fp16, then in float32; for search.cu.
 *
 * A code is left out only where another costs less, or as much and is chosen before it.  What is left is weighed exactly in search.cu.
 *
 * What is compared.  Magnitudes are u = x / global_scale times a power of two, with which S, what a code is worth, is below 1 for every
 * code tried.  D is the distance of u from the nearest of S * {0, .5, 1, 1.5, 2, 3, 4, 6}.  T is a code's cost: the sum of D^2 over the
 * 16 elements; N is what is found for it.  |u| is the norm of the block, e the type's 2^-11 or 2^-24.
 *
 * 1. u is known within a |u|; D changes by no more than u does.
 * 2. The quotient u / S, of an inverse that is off by b of itself, is off by b u / S and by a rounding: e times the power of two below
 *    it, or e below 1 (for 1 is the type's smallest normal number here).  It picks another value than the nearest only across the
 *    midpoint between them, and then one that is farther away by twice what it is off, times S.  The midpoints .25 .75 1.25 1.75 2.5
 *    3.5 5 are at least 1.25 times the power of two below, if that is 1 or more.  So the distance is too large by
 *    2b u + 2e max(.8 u, S) at most, and never too small.
 * 3. The rounded value times S is exact, and taken from u by one fused operation; its square is added to seven others, and their sum to
 *    that of the other eight.  That is c roundings of numbers that are not below 0: factors between (1 - e)^c and (1 + e)^c.
 * 4. Norms add at most (Minkowski), |max(.8 u, S)|^2 <= .64 |u|^2 + 16, and so
 *        sqrt(T) - a |u|  <=  sqrt(N / (1 +- e)^c)  <=  sqrt(T) + (a + 2b) |u| + 2e sqrt(.64 |u|^2 + 16)
 * 5. Let code k be found to cost the least, N_k.  For the best code T <= T_k, so that, with M = (2a + 2b) |u| + 2e sqrt(.64 |u|^2 + 16),
 *        sqrt(N / (1 + e)^c) <= sqrt(N_k / (1 - e)^c) + M
 *    and, as (p + q)^2 <= p^2 (1 + t) + q^2 (1 + 1/t) for any t > 0,
 *        N  <=  N_k (1 + t) ((1 + e) / (1 - e))^c  +  M^2 (1 + 1/t) (1 + e)^c       the limit: a code above it is not the best
 * 6. One element that a code clips costs T (u - 6S)^2 or more, as it does under every code below.  None of them is the best where that
 *    is above T_k <= N_k (1 + t) / (1 - e)^c + (a |u|)^2 (1 + 1/t): 4. again, the bound.
 * 7. |u|^2 is itself found in fp16, of rounded halves: no smaller than (1 - e)^10 |u|^2. float32 computes the limit: off by
 *    less than 4 * 2^-24 of itself; and the bound with what is compared with it: 8 * 2^-24.
 * 8. fp16 results below 2^-14 are off by 2^-25, not by e of themselves. N and N_k have 17 sums each: 34 * 2^-25, and less than 2^-20 in all
 *    for u, distances and the norm; the limit adds both (HALF_REST). The bound adds nothing: |u| is 1.5 or more, for the largest element
 *    is near 6 times a code of 1/4 or more, and what BOUND_NORM has beyond 6. is then more than 8 * 2^-25. So much one of the two sums of
 *    eight is off where it stays below 2^-14; one that does not has a rounding less in c for each such result. Where both stay below,
 *    N_k <= 2^-13, and a |u| is so large beside it that 6. has room for all 17.
 *
 *    fp16     a = e + 12 * 2^-24 (float32: three roundings of u, and the rest for codec.py's), b = .625 e (over the eight mantissas),
 *             c = 11; t = 2^-5, of the bound 2^-7
 *    float32  a = 4e, b = 2e, c = 24 (12 here, 12 in codec.py), sums off by 2^-150; t = 2^-16; weights are below 2: S^2 sums to 32
 *
 * tests/kernels/test_screening.py finds 2. to hold for every fp16 number and every S, and the constants to follow from the rest: those of
 * fp16 to the last digit that they are written with. */
#ifndef FP4_SCREENING_CUH
#define FP4_SCREENING_CUH

#include "codes.cuh"

/* Of the limit: factors of N_k and of |u|^2, and what is added; of the bound: factors. */
#define HALF_LIMIT (1.0f + 0x1.5cp-5f)
#define HALF_NORM 0x1.9p-13f
#define HALF_REST 0x1.4fp-10f
#define BOUND_LIMIT (1.0f + 0x1.b2p-7f)
#define BOUND_NORM 0x1.05p-15f
#define FLOAT_LIMIT (1.0f + 0x1p-15f)
#define FLOAT_NORM 0x1p-23f
#define FLOAT_REST 0x1p-22f
#define INFINITE fp4_float(FP4_INF_BITS)
#define FIRST_OFFSET 0x80000000u
enum { TOP_CODES = 8, TRIED_CODES = 10, LEAST_NORMAL_CODE = 8, OFFSETS = 32 };

/* Sixteen elements of a block, or of half of one. */
template <bool WEIGHED> struct Elements {
    float magnitudes[UNIT], weights[WEIGHED ? UNIT : 1]; /* weights are unread where there are none */
    float heaviest, its_weight;                          /* the element whose clipping bounds the cost from below */

    MEMBER void find_heaviest(u32 amax_bits) {
        heaviest = WEIGHED ? magnitudes[0] : fp4_float(amax_bits), its_weight = WEIGHED ? weights[0] : 1.0f;
#pragma unroll
        for (int j = 1; WEIGHED && j < UNIT; j++) {
            bool is_heavier = weights[j] * magnitudes[j] * magnitudes[j] > its_weight * heaviest * heaviest;
            heaviest = is_heavier ? magnitudes[j] : heaviest;
            its_weight = is_heavier ? weights[j] : its_weight;
        }
    }
    MEMBER void multiply(float factor) {
#pragma unroll
        for (int j = 0; j < UNIT; j++) magnitudes[j] *= factor;
        heaviest *= factor;
    }
};

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

/* What code highest - i is worth, S, times 2^14; those of E4M3's subnormals are not tried.  Beyond the largest code: the largest. */
struct Worths {
    int highest;
    MEMBER float times_2_14(int offset) const {
        return fp4_float(((u32)min(highest - offset, (int)LARGEST_CODE) << 20) + ((140u - (u32)(highest >> 3)) << 23));
    }
    MEMBER float power() const { return fp4_float((133u - (u32)(highest >> 3)) << 23); } /* S by the code's E4M3 value */
};

/* Elements as halves, two to a word. Returns the square of their norm. */
DEVICE float narrow(const float *magnitudes, u32 *halves) {
    u32 squares = 0;
#pragma unroll
    for (int j = 0; j < UNIT / 2; j++) {
        halves[j] = narrow2_fp16(magnitudes[2 * j], magnitudes[2 * j + 1]);
        squares = fma2_fp16(halves[j], halves[j], squares);
    }
    return widen_fp16((u16)squares) + widen_fp16((u16)(squares >> 16));
}

/* What is left of one element, in both halves of u, under two codes: a half of the other words each, 2^-14 / S and -S * 2^14. */
template <bool IS_CLIPPED> DEVICE u32 two_distances(u32 u, u32 inverses, u32 minus_worths) {
    u32 q = fma2_fp16(u, inverses, 0);
    if (IS_CLIPPED) q = min2_fp16(q, 0x0E000E00u); /* 6 * 2^-14 */
    return fma2_fp16((q + 0x01000100u) & 0xFE00FE00u, minus_worths, u);
}
template <bool IS_CLIPPED> DEVICE u32 two_costs(const u32 *halves, Worths worths, int offset) {
    float high = worths.times_2_14(offset), low = worths.times_2_14(offset + 1);
    u32 inverses = narrow2_fp16(reciprocal(high), reciprocal(low)), minus_worths = narrow2_fp16(high, low) ^ 0x80008000u;
    u32 sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < UNIT; j++) {
        u32 d = two_distances<IS_CLIPPED>(j % 2 ? both_high(halves[j / 2]) : both_low(halves[j / 2]), inverses, minus_worths);
        sums[j % 2] = fma2_fp16(d, d, sums[j % 2]);
    }
    return fma2_fp16(sums[0], 0x3C003C00u, sums[1]);
}

/* elements: of u. */
template <bool WEIGHED> struct Screen {
    Elements<WEIGHED> elements;
    Worths worths;

    MEMBER float cost(int offset) const {
        float worth = worths.times_2_14(offset), rounded[UNIT], sums[2] = {0.0f, 0.0f};
#ifdef FP4_CVT
        worth *= 0x1p-14f;
        float inverse = reciprocal(worth);
#pragma unroll
        for (int j = 0; j < UNIT; j += 2) {
            u32 both = round2_e2m1(elements.magnitudes[j] * inverse, elements.magnitudes[j + 1] * inverse);
            rounded[j] = widen_fp16((u16)both), rounded[j + 1] = widen_fp16((u16)(both >> 16));
        }
#else /* E2M1 is the upper bits of a float32 where its 1 is the smallest normal number: 2^-126 */
        worth *= 0x1p112f;
        float inverse = reciprocal(worth);
#pragma unroll
        for (int j = 0; j < UNIT; j++)
            rounded[j] = fp4_float(min((fp4_bits(elements.magnitudes[j] * inverse) + 0x200000u) & 0xFFC00000u, 0x01C00000u)); /* 6 */
#endif
#pragma unroll
        for (int j = 0; j < UNIT; j++) {
            float d = __fmaf_rn(rounded[j], -worth, elements.magnitudes[j]);
            sums[j % 2] = __fmaf_rn(WEIGHED ? elements.weights[j] * d : d, d, sums[j % 2]);
        }
        return sums[0] + sums[1];
    }
    /* Whether this code and all below it cost more than the limit, for one element that they clip. */
    MEMBER bool is_beyond(int offset, float limit) const {
        float clipped = fmaxf(__fmaf_rn(worths.times_2_14(offset), -6.0f * 0x1p-14f, elements.heaviest), 0.0f);
        return (WEIGHED ? elements.its_weight * clipped : clipped) * clipped > limit;
    }
    MEMBER bool is_tried(int offset) const { return offset < OFFSETS && worths.highest - offset >= LEAST_NORMAL_CODE; }
    /* Codes that fp16 leaves open; none where it cannot tell. */
    MEMBER u32 in_halves(const u32 *halves, float norm2) const {
        float slack = __fmaf_rn(norm2, HALF_NORM, HALF_REST);
        u32 costs[TRIED_CODES / 2];
        if (!is_tried(TRIED_CODES - 1)) return 0;
#pragma unroll
        for (int i = 0; i < TRIED_CODES / 2; i++)
            costs[i] = i < TOP_CODES / 2 ? two_costs<false>(halves, worths, 2 * i) : two_costs<true>(halves, worths, 2 * i);
        u32 lowest = costs[0];
#pragma unroll
        for (int i = 1; i < TRIED_CODES / 2; i++) lowest = min2_fp16(lowest, costs[i]);
        Open open = {fminf(widen_fp16((u16)lowest), widen_fp16((u16)(lowest >> 16))), 0.0f, 0};
        open.limit = __fmaf_rn(open.least, HALF_LIMIT, slack);
#pragma unroll
        for (int i = 0; i < TRIED_CODES; i++) open.add(widen_fp16((u16)(costs[i / 2] >> i % 2 * 16)), FIRST_OFFSET >> i);
        /* Where no quotient under the highest is above 3.5, half of it is as good, and nearer to the first: codec.py */
        bool is_doubled = elements.heaviest <= worths.times_2_14(0) * (3.49f * 0x1p-14f);
        open.offsets &= ~0u >> max(worths.highest - (int)LARGEST_CODE, (int)is_doubled);
#pragma unroll 1
        for (int offset = TRIED_CODES; !is_beyond(offset, __fmaf_rn(open.least, BOUND_LIMIT, norm2 * BOUND_NORM)); offset += 2) {
            if (!is_tried(offset + 1)) return 0;
            u32 both = two_costs<true>(halves, worths, offset);
            float cost = widen_fp16((u16)both), next = widen_fp16((u16)(both >> 16));
            open.lower(fminf(cost, next), HALF_LIMIT, slack);
            open.add(cost, FIRST_OFFSET >> offset);
            open.add(next, FIRST_OFFSET >> (offset + 1));
        }
        return open.offsets;
    }
    /* Codes that float32 leaves open of those that are. */
    MEMBER u32 in_floats(u32 left, float norm2) const {
        float slack = __fmaf_rn(norm2, FLOAT_NORM, FLOAT_REST);
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
    /* Codes that may be the best, at least one; 0 where none is ruled out. */
    MEMBER u32 open_codes() const {
        if (WEIGHED) {
            float heaviest = elements.heaviest;
            return in_floats(~0u >> max(worths.highest - (int)LARGEST_CODE, 0), 16.0f * elements.its_weight * heaviest * heaviest);
        }
        u32 halves[UNIT / 2];
        float norm2 = narrow(elements.magnitudes, halves);
        u32 open = in_halves(halves, norm2);
        return open & (open - 1) ? in_floats(open, norm2) : open;
    }
};

#endif
