/* Block scales by search on the CPU: rules mse, four-over-six and importance; compiled once per instruction set, called by quantize.c.
 *
 * Bytes equal those that codec.py finds: the code of least cost, t * s^2, which codec.py defines to the last rounding.
 * SIDE blocks are searched side by side, one to a lane: v[j] holds element j of each, so that sums run down the lanes.
 *
 * NVFP4 takes two ways.  The rough one multiplies with an inverse and adds as it likes; what it finds is certain where no other code
 * comes within its error.  Blocks that stay in doubt, few of them, take the exact one: codec.py's own operations in its own order.
 * The rough cost's error: a quotient is off by less than 1.5 * 2^-23 of itself, a distance by as much, so t by less than
 * 2^-14 t + 2^-20 (from 2ab <= ha^2 + b^2/h with h = 2^-14 over 16 elements, weights below 2); DOUBT (fp4.h) is four times the
 * first, SLACK eight times the second.  A bound of one clipped element is off by 2^-13 of itself where it clips 2^-8 of its quotient
 * or more, else by 2^-23 top^2: less than what DOUBT and SLACK leave.
 *
 * Codes tried, from the top: codec._nvfp4_last says why none above can win; below, once the clipping of one element alone
 * costs more than the best code found, every lower code costs more too.
 */
#include "search.h"

enum { WIDEST = 64 }; /* elements of a block */

/* below: the lesser of unsigned words.  fused: a * b + c, rounded once where the processor can.
 * Written out for AVX-512, of whose sixteen lanes gcc makes sixteen scalars. */
#ifdef __AVX512BW__
INLINE u32s below(u32s a, u32s b) { return (u32s)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE f32s fused(f32s a, f32s b, f32s c) { return (f32s)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
INLINE u32s below(u32s a, u32s b) {
    u32s r;
    for (int l = 0; l < SIDE; l++) r[l] = a[l] < b[l] ? a[l] : b[l];
    return r;
}
INLINE f32s fused(f32s a, f32s b, f32s c) {
#ifdef __FMA__
    f32s sum;
    for (int l = 0; l < SIDE; l++) sum[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return sum;
#else
    return a * b + c;
#endif
}
#endif

/* Element j of SIDE rows of `width`, magnitudes. */
INLINE void load_magnitudes(const float *const *rows, int width, f32s *v) {
    for (int j = 0; j < width; j += SIDE) {
        for (int l = 0; l < SIDE; l++) v[j + l] = (f32s)(LOAD(i32s, rows[l] + j) & 0x7FFFFFFF);
        transpose(v + j);
    }
}

/* q - e2m1(q), exact, for q >= 0, but for the side to which ties go: with p the power of two at or below min(max(q, 1), 6), E2M1's
 * spacing at q is p / 2, the last place of 2^22 q (of 2^22 * 1.5 where q < 1.5).  So q - 2^22 q is rounded to that place.  It never
 * reaches 2^23 p; it falls below 2^22 p only where q is within two floats of p, and there the finer place gives the same result
 * (tests/kernels/test_search_remainder.py tries every float from 2^-30 to 64).  Unclipped: for q < 7. */
INLINE f32s remainder_of(f32s q, int is_clipped) {
    f32s held = is_clipped ? (f32s)lesser((i32s)q, (i32s)all(6.0f)) : q;
    f32s base = (f32s)greater((i32s)held, (i32s)all(1.5f));
#ifdef __FMA__
    return q - fused(base, all(0x1p22f), fused(base, all(-0x1p22f), held));
#else
    base *= 0x1p22f;
    return q - ((held - base) + base);
#endif
}

INLINE f32s weighted_square(f32s q, const f32s *weight) {
    f32s d = remainder_of(q, 1), square = d * d;
    return weight ? *weight * square : square;
}

/* The sum of all squares in codec.py's order: element j with j + width / 2, of those sums j with j + width / 4, down to one.
 * Worked out depth first (j with its bits reversed), so that few sums wait.  Quotients by `step`, or products with its inverse. */
INLINE f32s sum_by_halves(const f32s *v, const f32s *w, int width, f32s step, int is_inverse) {
    f32s waiting[5], sum = {0};
#pragma GCC unroll 16
    for (int n = 0; n < width / 2; n++) {
        int j = (n & 1) << 3 | (n & 2) << 1 | (n & 4) >> 1 | (n & 8) >> 3, i = width == 16 ? j >> 1 : j, k = i + width / 2;
        f32s low = weighted_square(is_inverse ? v[i] * step : v[i] / step, w ? w + i : NULL);
        sum = low + weighted_square(is_inverse ? v[k] * step : v[k] / step, w ? w + k : NULL);
        int level = 0;
#pragma GCC unroll 4
        for (; n >> level & 1; level++) sum = waiting[level] + sum;
        waiting[level] = sum;
    }
    return sum;
}

/* The same for any power of two up to WIDEST: small, and slower. */
INLINE f32s sum_of_terms(const f32s *v, const f32s *w, int width, f32s step, int is_inverse) {
    f32s terms[WIDEST];
    for (int j = 0; j < width; j++) terms[j] = weighted_square(is_inverse ? v[j] * step : v[j] / step, w ? w + j : NULL);
    for (int half = width / 2; half; half /= 2)
        for (int j = 0; j < half; j++) terms[j] += terms[j + half];
    return terms[0];
}

INLINE f32s rough_cost(const f32s *v, const f32s *w, f32s inverse, f32s factor, int is_clipped) {
    f32s sums[4] = {{0}};
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
        f32s d = remainder_of(v[j] * inverse, is_clipped);
        sums[j % 4] = fused(w ? w[j] * d : d, d, sums[j % 4]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor;
}

/* ------------------------------------------------------------------------------------------------------------- NVFP4 */

/* SIDE blocks of `width`. first: the codes that rule amax stores; last: the highest to try, 0 where there is nothing to choose. */
typedef struct {
    f32s v[WIDEST], w[WIDEST];
    f32s r; /* the largest over 6 global scales: what rule amax rounds */
    f32s heaviest, its_weight; /* the element whose clipping bounds the cost from below */
    i32s first, last, is_sound;
    int unclipped; /* how many codes, from the last down, clip no element */
    float global_scale;
} Side;

INLINE f32s e4m3_values(i32s codes) {
    f32s subnormal = __builtin_convertvector(codes, f32s) * 0x1p-9f, normal = (f32s)((codes << 20) + (120 << 23));
    return either(codes < 8, subnormal, normal);
}

/* As nvfp4_block_scale. */
INLINE i32s e4m3_codes(f32s r) {
    f32s held = (f32s)greater(lesser((i32s)r, (i32s)all(448.0f)), (i32s)all(0x1p-9f));
    i32s bits = (i32s)held, normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    i32s codes = (i32s)either(held < 0x1p-6f, (f32s)((i32s)(held + 16384.0f) - (i32s)all(16384.0f)), (f32s)normal);
    return (codes & (r > 0.0f)) | (0x38 & ~(r > 0.0f));
}

INLINE i32s distances(i32s codes, i32s first) { return greater(codes - first, first - codes); }

/* The best codes so far, their cost, and the next to that. */
typedef struct { i32s best; f32s least, second; } Found;

INLINE void consider(Found *found, f32s cost, i32s code) {
    i32s is_less = cost < found->least; /* Costs are >= 0: their bits order as they do.  NaN is of sides that are settled or not sound. */
    found->second = (f32s)lesser((i32s)found->second, greater((i32s)found->least, (i32s)cost));
    found->least = (f32s)lesser((i32s)found->least, (i32s)cost);
    found->best = (found->best & ~is_less) | (code & is_less);
}

/* ... of equal ones the nearest to the first, then the lower, which comes later. */
INLINE void consider_exactly(Found *found, f32s cost, i32s code, i32s first) {
    i32s is_nearer = distances(code, first) <= distances(found->best, first);
    i32s is_better = (cost < found->least) | ((cost == found->least) & is_nearer);
    found->least = either(is_better, cost, found->least);
    found->best = (found->best & ~is_better) | (code & is_better);
}

/* Whether this code or one below it may cost as little as `limit`; quotient: the heaviest element by the code's step. */
INLINE i32s is_open(const Side *side, i32s code, f32s quotient, f32s factor, int is_weighted, f32s limit) {
    f32s clipped = quotient - 6.0f, square = clipped * clipped;
    f32s bound = (is_weighted ? side->its_weight * square : square) * factor;
    return (code > 0) & ~((clipped > 0.0f) & (bound > limit));
}

/* What a code is tried with: the inverse of its step, and the square of what it stands for. */
typedef struct { f32s inverse, factor; } Trial;

INLINE Trial trial_of(const Side *side, i32s code) {
    f32s value = e4m3_values(code);
    return (Trial){1.0f / (value * side->global_scale), value * value};
}

INLINE f32s exact_cost_of(const Side *side, const f32s *w, int width, i32s code) {
    f32s value = e4m3_values(code);
    f32s step = value * side->global_scale;
    return (width == 16 ? sum_by_halves(side->v, w, 16, step, 0) : sum_of_terms(side->v, w, width, step, 0)) * (value * value);
}

/* What follows takes both, so compilers begin `sooner` before it; clang would put off that division until its result is used. */
#ifdef __SSE2__
INLINE void work_out(f32s *sooner, f32s *later) { __asm__("" : "+v"(*sooner), "+v"(*later)); }
#elif defined(__ARM_NEON)
INLINE void work_out(f32s *sooner, f32s *later) { __asm__("" : "+w"(*sooner), "+w"(*later)); }
#else
INLINE void work_out(f32s *sooner, f32s *later) { (void)sooner, (void)later; }
#endif

/* The next code's division is begun before a code is tried, so that none is waited for. */
INLINE i32s search_roughly(const Side *side, const f32s *w, i32s *is_certain) {
    f32s infinite = all(__builtin_inff()), top = e4m3_values(side->last), slack = SLACK * top * top;
    Found found = {side->first, infinite, infinite};
    i32s code = side->last;
    Trial trial = trial_of(side, code), next;
    for (int left = side->unclipped; left > 0; left--, code -= 1, trial = next) {
        next = trial_of(side, code - 1);
        work_out(&next.inverse, &trial.inverse);
        consider(&found, rough_cost(side->v, w, trial.inverse, trial.factor, 0), code);
    }
    for (;; code -= 1, trial = next) {
        f32s limit = (found.least + slack) * DOUBT;
        if (!any(is_open(side, code, side->heaviest * trial.inverse, trial.factor, w != NULL, limit))) break;
        next = trial_of(side, code - 1);
        work_out(&next.inverse, &trial.inverse);
        f32s cost = rough_cost(side->v, w, trial.inverse, trial.factor, 1);
        consider(&found, either(code > 0, cost, infinite), code);
    }
    *is_certain = (found.second > (found.least + slack) * DOUBT) & side->is_sound;
    return found.best;
}

INLINE i32s search_exactly(const Side *side, const f32s *w, int width) {
    Found found = {side->first, all(__builtin_inff()), {0}};
    for (i32s code = side->last;; code -= 1) {
        f32s value = e4m3_values(code), quotient = side->heaviest / (value * side->global_scale);
        if (!any(is_open(side, code, quotient, value * value, w != NULL, found.least * MARGIN))) break;
        f32s cost = either(code > 0, exact_cost_of(side, w, width, code), all(__builtin_nanf("")));
        consider_exactly(&found, cost, code, side->first);
    }
    return found.best;
}

INLINE void open_side(const float *const *rows, const float *const *weights, int width, float global_scale, Side *side) {
    load_magnitudes(rows, width, side->v);
    if (weights) load_magnitudes(weights, width, side->w);
    f32s largest = side->v[0], heaviest = largest, its_weight = weights ? side->w[0] : largest;
    u32s smallest = (u32s){0} - 1; /* but zeros, which wrap */
    for (int j = 0; j < width; j++) {
        largest = (f32s)greater((i32s)largest, (i32s)side->v[j]);
        smallest = below(smallest, (u32s)side->v[j] - 1);
        if (!weights) continue;
        i32s is_heavier = side->w[j] * side->v[j] * side->v[j] > its_weight * heaviest * heaviest;
        heaviest = either(is_heavier, side->v[j], heaviest);
        its_weight = either(is_heavier, side->w[j], its_weight);
    }
    side->heaviest = weights ? heaviest : largest;
    side->its_weight = its_weight;
    side->global_scale = global_scale;
    i32s is_tiny = smallest < (u32s)all(global_scale * (weights ? TINY_WEIGHTED : TINY));
    if (global_scale < LEAST_GLOBAL_SCALE) is_tiny = (i32s){0} == 0;
    f32s r = side->r = largest / (6.0f * global_scale);
    side->first = e4m3_codes(r);
    side->last = lesser(greater(side->first + (CODES_PER_BINADE - 1), (i32s){0} + (ALL_CODES_BELOW - 1)), (i32s){0} + LARGEST_CODE);
    side->last = ((side->last & ~is_tiny) | (LARGEST_CODE & is_tiny)) & (r > 0.0f);
    side->is_sound = ~is_tiny;
    i32s unclipped = (side->last - side->first + 1) & ~(r > 1.1f * e4m3_values(side->first));
    unclipped = (i32s)either(side->last == 0, (f32s)((i32s){0} + 16), (f32s)unclipped); /* those count for nothing */
    side->unclipped = 16;
    for (int l = 0; l < SIDE; l++) side->unclipped = unclipped[l] < side->unclipped ? unclipped[l] : side->unclipped;
}

INLINE i32s best_codes(const Side *side, const f32s *w) {
    i32s is_certain, is_settled = side->last == 0, best = search_roughly(side, w, &is_certain);
    if (any(~(is_certain | is_settled))) best = search_exactly(side, w, 16);
    return (best & ~is_settled) | (side->first & is_settled);
}

/* Functions of their own: within choose_nvfp4 gcc would keep no sum in a register. */
static __attribute__((noinline)) i32s best_plain(const Side *side) { return best_codes(side, NULL); }
static __attribute__((noinline)) i32s best_weighted(const Side *side) { return best_codes(side, side->w); }

INLINE i32s four_over_six(const Side *side, int width) {
    i32s four = e4m3_codes(1.5f * side->r);
    i32s is_less = exact_cost_of(side, NULL, width, four) < exact_cost_of(side, NULL, width, side->first);
    return (four & is_less) | (side->first & ~is_less);
}

/* ------------------------------------------------------------------------------------------------------------- MXFP4
 *
 * Products with the inverse of a power of two are the quotients, so that three exponents are tried exactly at once. */

INLINE i32s search_mxfp4_side(const f32s *v, const f32s *w, int width) {
    f32s largest = v[0], heaviest = v[0], its_weight = w ? w[0] : v[0];
    for (int j = 0; j < width; j++) {
        largest = (f32s)greater((i32s)largest, (i32s)v[j]);
        if (!w) continue;
        i32s is_heavier = w[j] * v[j] * v[j] > its_weight * heaviest * heaviest;
        heaviest = either(is_heavier, v[j], heaviest);
        its_weight = either(is_heavier, w[j], its_weight);
    }
    i32s first = greater(((i32s)largest >> 23) - 2, (i32s){0});
    Found found = {first, all(__builtin_inff()), {0}};
    for (int offset = 1; offset >= (w ? -LOWEST_EXPONENT : -1); offset--) {
        i32s code = first + offset, is_valid = (code >= 0) & (code <= FP4_E8M0_STORED_MAX);
        f32s inverse = (f32s)((254 - code) << 23), factor = all(fp4_float((unsigned)(127 + 2 * offset) << 23));
        if (w && offset < -1) {
            f32s clipped = heaviest * inverse - 6.0f, bound = its_weight * (clipped * clipped) * factor;
            if (!any(is_valid & ~((clipped > 0.0f) & (bound > found.least * MARGIN)))) break;
        }
        f32s cost = (width == 32 ? sum_by_halves(v, w, 32, inverse, 1) : sum_of_terms(v, w, width, inverse, 1)) * factor;
        consider_exactly(&found, either(is_valid, cost, all(__builtin_nanf(""))), code, first);
    }
    return found.best;
}

/* ------------------------------------------------------------------------------------------------------- entry points */

/* Where the blocks' elements and weights stand; lanes beyond the last block repeat it. */
INLINE void find_rows(const float *x, int64_t first, int here, int blocks, int width, const Choice *choice, const float **rows,
                      const float **weights) {
    for (int l = 0; l < SIDE; l++) {
        int own = here + l < blocks ? here + l : blocks - 1;
        rows[l] = x + own * width;
        weights[l] = choice->weights ? choice->weights + (first + own) * width % choice->columns : NULL;
    }
}

void NAME(choose_nvfp4)(const float *restrict x, int64_t first, int blocks, const Choice *choice, uint8_t *restrict block_scales) {
    for (int b = 0; b < blocks; b += SIDE) {
        const float *rows[SIDE], *weights[SIDE];
        find_rows(x, first, b, blocks, 16, choice, rows, weights);
        Side side;
        i32s best;
        if (choice->weights) {
            open_side(rows, weights, 16, choice->global_scale, &side);
            best = best_weighted(&side);
        } else {
            open_side(rows, NULL, 16, choice->global_scale, &side);
            best = choice->rule == NVFP4_MSE ? best_plain(&side) : four_over_six(&side, 16);
        }
        for (int l = 0; l < SIDE && b + l < blocks; l++) block_scales[b + l] = (uint8_t)best[l];
    }
}

void NAME(choose_mxfp4)(const float *restrict x, int64_t first, int blocks, const Choice *choice, uint8_t *restrict block_scales) {
    for (int b = 0; b < blocks; b += SIDE) {
        const float *rows[SIDE], *weights[SIDE];
        f32s v[32], w[32];
        find_rows(x, first, b, blocks, 32, choice, rows, weights);
        load_magnitudes(rows, 32, v);
        if (choice->weights) load_magnitudes(weights, 32, w);
        i32s best = choice->weights ? search_mxfp4_side(v, w, 32) : search_mxfp4_side(v, NULL, 32);
        for (int l = 0; l < SIDE && b + l < blocks; l++) block_scales[b + l] = (uint8_t)best[l];
    }
}

/* ----------------------------------------------------------------------------------- blocks that no engine reads */

/* x: float32; NVFP4 in blocks of 32 or 64, MXFP4 of 16 or 64; y: what they become, codec.dequantize of codec.quantize.
 * weights: NULL but for rule importance; amax: of NVFP4. */

/* The values of one block under its step. */
INLINE void round_block(const float *restrict x, int width, float step, float *restrict y) {
    for (int j = 0; j < width; j++) y[j] = e2m1_decode(e2m1_encode(x[j] / step)) * step;
}

INLINE f32s steps_of_nvfp4(const float *const *rows, const float *const *weights, int width, const Choice *choice) {
    Side side;
    open_side(rows, weights, width, choice->global_scale, &side);
    i32s best = side.first;
    if (weights || choice->rule == NVFP4_MSE) best = search_exactly(&side, weights ? side.w : NULL, width);
    else if (choice->rule == NVFP4_FOUR_OVER_SIX) best = four_over_six(&side, width);
    i32s is_settled = side.last == 0;
    return e4m3_values((best & ~is_settled) | (side.first & is_settled)) * choice->global_scale;
}

INLINE f32s steps_of_mxfp4(const float *const *rows, const float *const *weights, int width, const Choice *choice) {
    f32s v[WIDEST], w[WIDEST], steps;
    load_magnitudes(rows, width, v);
    if (weights) load_magnitudes(weights, width, w);
    i32s largest = (i32s)v[0], best = {0};
    for (int j = 1; j < width; j++) largest = greater(largest, (i32s)v[j]);
    if (weights || choice->rule == MXFP4_MSE) best = search_mxfp4_side(v, weights ? w : NULL, width);
    else for (int l = 0; l < SIDE; l++) best[l] = (int32_t)e8m0_encode((unsigned)largest[l], choice->rule);
    for (int l = 0; l < SIDE; l++) steps[l] = e8m0_decode((unsigned)best[l]);
    return steps;
}

#define DEFINE_STUDY(format, other)                                                                                         \
    INLINE void study_##format(const float *restrict x, int64_t blocks, int width, const Choice *choice, float *restrict y) { \
        for (int64_t b = 0; b < blocks; b += SIDE) {                                                                        \
            const float *rows[SIDE], *weights[SIDE];                                                                        \
            int here = (int)(blocks - b < SIDE ? blocks - b : SIDE);                                                        \
            find_rows(x + b * width, b, 0, here, width, choice, rows, weights);                                             \
            f32s steps = steps_of_##format(rows, choice->weights ? weights : NULL, width, choice);                          \
            for (int l = 0; l < here; l++) round_block(rows[l], width, steps[l], y + (b + l) * width);                      \
        }                                                                                                                   \
    }                                                                                                                       \
    void NAME(study_##format)(const float *restrict x, int64_t n, int64_t width, int64_t rule, const float *amax,           \
                              const float *weights, int64_t columns, float *restrict y) {                                   \
        Choice choice = {rule, nvfp4_global_scale(*amax, rule), weights, columns};                                          \
        if (width == 64) study_##format(x, n / 64, 64, &choice, y);                                                         \
        else study_##format(x, n / other, other, &choice, y);                                                               \
    }
DEFINE_STUDY(nvfp4, 32)
DEFINE_STUDY(mxfp4, 16)
