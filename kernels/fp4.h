/* E2M1, E4M3 and E8M0, encoded and decoded one value at a time: the only scalar conversions in the project, for host and device.
 *
 * Every function is IEEE float32, round to nearest even, denormals kept; compile without fast-math, without contraction of
 * a*b+c and without flush to zero.  Each gives what fp4convert/numerics/codec.py gives for the same value.
 *
 *   E2M1  s ee m        0 .5 1 1.5 2 3 4 6 and their negatives; no Inf, no NaN
 *   E4M3  s eeee mmm    e4m3fn: bias 7, largest 448 (0x7E), NaN 0x7F, no Inf
 *   E8M0  eeeeeeee      2^(byte - 127), NaN 0xFF; no sign, no zero
 */
#ifndef FP4_H
#define FP4_H

#ifdef __CUDACC__
#define FP4_FN static __device__ __forceinline__
#define fp4_bits(value) __float_as_uint(value)
#define fp4_float(bits) __uint_as_float(bits)
#define fp4_fma(a, b, c) __fmaf_rn(a, b, c)
#define fp4_min(a, b) fminf(a, b)
#else
#define FP4_FN static inline __attribute__((always_inline, unused))
FP4_FN unsigned fp4_bits(float value) { unsigned bits; __builtin_memcpy(&bits, &value, 4); return bits; }
FP4_FN float fp4_float(unsigned bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
#ifndef fp4_fma
#define fp4_fma(a, b, c) ((a) * (b) + (c)) /* in C only where a * b is exact, so that fused or not is the same */
#endif
#define fp4_min(a, b) ((a) < (b) ? (a) : (b))
#endif

/* Scale rules of NVFP4 and of MXFP4, in the order of fp4convert/numerics/formats.py; rule importance has entry points of its own. */
enum { NVFP4_AMAX = 0, NVFP4_MSE = 1, NVFP4_FOUR_OVER_SIX = 2 };
enum { FP4_FLOOR = 0, FP4_EVEN = 1, FP4_CEIL = 2, MXFP4_MSE = 3 };
enum { FP4_INF_BITS = 0x7F800000, FP4_E8M0_STORED_MAX = 252 }; /* 6 * 2^(252-127) is finite */

FP4_FN float fp4_from_bf16(unsigned short bits) { return fp4_float((unsigned)bits << 16); }

/* Exact: the exponent is re-biased by one multiplication, which also normalises fp16 subnormals. */
FP4_FN float fp4_from_finite_fp16(unsigned short bits) {
    unsigned magnitude = bits & 0x7FFFu, sign = (unsigned)(bits & 0x8000u) << 16;
    return fp4_float(fp4_bits(fp4_float(magnitude << 13) * 0x1p112f) | sign);
}

FP4_FN float fp4_from_fp16(unsigned short bits) {
    unsigned special = ((bits & 0x7FFFu) << 13) | FP4_INF_BITS | (unsigned)(bits & 0x8000u) << 16;
    return (bits & 0x7FFFu) >= 0x7C00u ? fp4_float(special) : fp4_from_finite_fp16(bits);
}

FP4_FN unsigned short fp4_to_bf16(float value) {
    unsigned bits = fp4_bits(value), magnitude = bits & 0x7FFFFFFFu;
    unsigned rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (unsigned short)(magnitude > FP4_INF_BITS ? (bits >> 16) | 0x40u : rounded);
}

/* Beyond 65504 + half a step: Inf. */
FP4_FN unsigned short fp4_to_fp16(float value) {
    unsigned bits = fp4_bits(value), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
    unsigned normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    unsigned subnormal = fp4_bits(fp4_float(magnitude) + 0.5f) - 0x3F000000u; /* ulp of [.5, 1) is 2^-24, fp16's smallest */
    unsigned finite = magnitude < 0x38800000u ? subnormal : normal;
    unsigned special = magnitude > FP4_INF_BITS ? 0x7E00u : 0x7C00u;
    return (unsigned short)(sign | (magnitude >= 0x47800000u ? special : finite));
}

/* v >= 0 rounded half to even to E2M1's grid: the integer 0-7 that is its code, plus E2M1_INTEGERS; above 7 from v = 7 on.
 * The values 0 .5 1 1.5 2 3 4 6 become 0..7 under min(2v, v + 2, v / 2 + 4); adding 1.5 * 2^23 rounds that to an integer, once. */
#define E2M1_INTEGERS 12582912.0f
FP4_FN float e2m1_round(float v) {
    float fine = fp4_fma(v, 2.0f, E2M1_INTEGERS), coarse = fp4_fma(v, 0.5f, E2M1_INTEGERS + 4.0f);
    return fp4_min(fp4_min(fine, v + (E2M1_INTEGERS + 2.0f)), coarse);
}

/* Half to even, saturating at 6; the sign bit is set iff q < 0, so -0.0 gives code 0. */
FP4_FN unsigned e2m1_encode(float q) {
    float rounded = e2m1_round(q < 0.0f ? -q : q);
    return (fp4_bits(fp4_min(rounded, E2M1_INTEGERS + 7.0f)) & 7u) | (q < 0.0f ? 8u : 0u);
}

/* The code's bits as a float32 are its magnitude times 2^-126, subnormal for 0.5. */
FP4_FN float e2m1_decode(unsigned code) {
    return fp4_float(fp4_bits(fp4_float((code & 7u) << 22) * 0x1p126f) | (code & 8u) << 28);
}

/* v in [0, 448]. Subnormals (below 2^-6) are rounded by the adder: the ulp of 16384 is E4M3's smallest step, 2^-9. */
FP4_FN unsigned e4m3_encode(float v) {
    unsigned bits = fp4_bits(v);
    unsigned normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    unsigned subnormal = fp4_bits(v + 16384.0f) - fp4_bits(16384.0f);
    return v < 0x1p-6f ? subnormal : normal;
}

/* Any q but NaN, half to even, saturating at 448; the sign is kept, also of zero. */
FP4_FN unsigned e4m3_encode_signed(float q) {
    unsigned bits = fp4_bits(q);
    return e4m3_encode(fp4_min(fp4_float(bits & 0x7FFFFFFFu), 448.0f)) | (bits >> 24 & 0x80u);
}

/* byte in 0..0x7E */
FP4_FN float e4m3_decode_positive(unsigned byte) {
    float subnormal = (float)(int)byte * 0x1p-9f;
    return byte < 8u ? subnormal : fp4_float((byte << 20) + (120u << 23));
}

FP4_FN float e4m3_decode(unsigned byte) {
    unsigned m = byte & 0x7Fu, magnitude = fp4_bits(e4m3_decode_positive(m));
    return fp4_float((m == 0x7Fu ? 0x7FC00000u : magnitude) | (byte & 0x80u) << 24);
}

/* Scale exponent of a block from the bits of its amax, by rule; OCP MX v1.0 section 6.3 (floor), and the two in common use. */
FP4_FN unsigned e8m0_encode(unsigned amax_bits, long long rule) {
    int exponent = (int)(amax_bits >> 23) - 2;
    if (rule == FP4_EVEN) exponent = (int)((amax_bits + 0x200000u) >> 23) - 2;
    if (rule == FP4_CEIL) exponent += (amax_bits & 0x7FFFFFu) > 0x400000u;
    exponent = exponent > 0 ? exponent : 0;
    return (unsigned)(exponent < FP4_E8M0_STORED_MAX ? exponent : FP4_E8M0_STORED_MAX);
}

FP4_FN float e8m0_decode(unsigned byte) {
    unsigned finite = byte ? byte << 23 : 1u << 22; /* byte 0 is 2^-127, a subnormal */
    return fp4_float(byte == 0xFFu ? 0x7FC00000u : finite);
}

/* max(amax / 2688, 2^-126), under rule four-over-six of 1536; 1 for an all-zero group. */
FP4_FN float nvfp4_global_scale(float amax, long long rule) {
    float global_scale = amax / (rule == NVFP4_FOUR_OVER_SIX ? 1536.0f : 2688.0f);
    global_scale = global_scale > 0x1p-126f ? global_scale : 0x1p-126f;
    return amax == 0.0f ? 1.0f : global_scale;
}

/* Rule amax. r == 0 (an all-zero or underflowing block) stores 1.0, like ModelOpt. */
FP4_FN unsigned nvfp4_block_scale(float block_amax, float global_scale) {
    float r = block_amax / (6.0f * global_scale);
    float v = r < 448.0f ? r : 448.0f;
    v = v > 0x1p-9f ? v : 0x1p-9f;
    unsigned scale = e4m3_encode(v);
    return r == 0.0f ? 0x38u : scale;
}

/* Searches for the scale of least error, in search.c and search.cu: which codes are tried, and what rounding may hide.
 *
 *   DOUBT, SLACK       what a rough cost of search.c is trusted to: (cost + SLACK * top^2) * DOUBT, top the highest scale tried
 *   MARGIN             what the rounding of a bound is given, so that no code is left out which costs as little as the best
 *
 * codec.py has the others, by the same names, and where they come from. */
enum { LARGEST_CODE = 126, CODES_PER_BINADE = 8, ALL_CODES_BELOW = 16, LOWEST_EXPONENT = 40 };
#define DOUBT (1.0f + 0x1p-12f)
#define SLACK 0x1p-17f
#define MARGIN (1.0f + 0x1p-18f)
#define TINY 0x1p-53f
#define TINY_WEIGHTED 0x1p-34f
#define LEAST_GLOBAL_SCALE 0x1p-60f

/* Scales that descend.c and descend.cu try on either side, and the lowest of NVFP4; descent.py has the same. */
enum { NVFP4_NEIGHBOURS = 3, MXFP4_NEIGHBOURS = 1, SMALLEST_CODE = 1 };

/* What values lose, in compare.c and compare.cu; fp4convert/numerics/error_sums.py says why.
 *
 *   SUM_GROUP          elements of a row whose squares are added in float32
 *   FINE, COARSE       sums that float32 holds; SMALLEST_STEP: steps from which on it does
 *   SUMS               of a row */
enum { SUM_GROUP = 256, SUMS = 5 };
#define FINE 0x1p-70f
#define COARSE 0x1p100f
#define SMALLEST_STEP 0x1p-50f

#endif
