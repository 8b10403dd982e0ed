/* Codes of a block under a scale that is chosen: the two formats, for quantize.cu and search.cu.
 *
 * Almost every block takes the fast way; one that would need care takes the scalar functions of fp4.h, element by element.
 */
#ifndef FP4_CODES_CUH
#define FP4_CODES_CUH

#include "device.h"

/* ------------------------------------------------------------------------------------------------- the two formats
 *
 *   LANES          lanes that share a block
 *   MAY_REACH_7    whether a quotient of a fast block may be 7 or more, and must saturate
 *   scale          the byte that rules amax, floor, even and ceil store
 *   block          that byte, the step of the elements, its inverse and what that lacks, whether they may go the fast way
 *   quotient       |x| / step, or what lies on the same side of every midpoint
 *   exact          the code of x, by the codec's own operations
 */
struct Block { u32 stored; float step, inverse, rest; bool is_fast; };

/* Fast NVFP4: quotients that lie on the same side of every midpoint B as the codec's fl(x / step) does, or on it with that.
 *
 * 16-bit x: q = fl(x * inverse + fl(x * rest)), where inverse + rest is 1 / step within 2^-46: inverse may be off by a unit in its last
 * place, rest is what is then missing, to first order.  Before its last rounding q is within 2^-45 of x / step (relative), so that it
 * and the codec's quotient can part only where x / step is as close to B, moved by half a unit in its last place.  With x = X * 2^j,
 * step = S * 2^k and that place N * 2^l, this asks for |X * 2^m - N * S| <= 16; over all X of 8 and of 11 bits and all 8 values of N
 * this has one solution where q is wrong, S = 2^24 - 1 (tests/kernels/test_cuda_nvfp4_encode.py counts them).  Such steps go the exact way.
 *
 * float32 x: two corrections of x * fl(1 / step).  The first brings the quotient within one unit in its last place; then its residual
 * is exact, and with a correctly rounded inverse the second rounds correctly (Markstein, IBM J. Res. Dev. 34, 1990).
 *
 * Outside [2^-100, MAX_STEP] residuals leave the normal range or signs underflow, far beyond 6 quotients might; below 6.9 (the
 * inverse is not exact) none is 7, which would need saturation.  Other blocks go the exact way. */
template <bool SATURATES> struct NvFp4 {
    enum { LANES = 1 };
    static const bool MAY_REACH_7 = SATURATES;
    float global_scale;

    MEMBER u32 scale(u32 amax_bits) const { return nvfp4_block_scale(fp4_float(amax_bits), global_scale); }
    template <class T> MEMBER Block block(u32 stored, u32 amax_bits, T) const {
        float step = e4m3_decode_positive(stored) * global_scale, inverse = T::IS_HALF ? reciprocal(step) : 1.0f / step;
        float rest = __fmul_rn(__fmaf_rn(-step, inverse, 1.0f), inverse);
        bool is_sound = step >= 0x1p-100f && step <= fp4_float(T::MAX_STEP) && (fp4_bits(step) & 0x7FFFFFu) != 0x7FFFFFu;
        return {stored, step, inverse, rest, is_sound && fp4_float(amax_bits) * inverse < (SATURATES ? 0x1p20f : 6.9f)};
    }
    template <class T> MEMBER float quotient(float v, Block b, T) const {
        if (T::IS_HALF) return __fmaf_rn(v, b.inverse, __fmul_rn(v, b.rest));
        float q = __fmul_rn(v, b.inverse);
        q = __fmaf_rn(__fmaf_rn(-q, b.step, v), b.inverse, q);
        return __fmaf_rn(__fmaf_rn(-q, b.step, v), b.inverse, q);
    }
    MEMBER u32 exact(float x, Block b) const { return e2m1_encode(x / b.step); }
};

/* Fast MXFP4: the step is a power of two, so the product with its inverse is the quotient, and exact while it is normal. */
struct MxFp4 {
    enum { LANES = 2 };
    static const bool MAY_REACH_7 = true;
    i64 rule;

    MEMBER u32 scale(u32 amax_bits) const { return e8m0_encode(amax_bits, rule); }
    template <class T> MEMBER Block block(u32 stored, u32, T) const {
        u32 step_bits = stored << 23;
        return {stored, fp4_float(step_bits), fp4_float((254u - stored) << 23), 0.0f, step_bits <= (u32)T::MAX_STEP};
    }
    template <class T> MEMBER float quotient(float v, Block b, T) const { return __fmul_rn(v, b.inverse); }
    MEMBER u32 exact(float x, Block b) const { return e2m1_encode(x * b.inverse); }
};

/* Eight codes, element k in bits 4k..4k+3. */
template <class T, class F> DEVICE u32 fast_codes(const u32 *w, Block b, F format) {
    float v[8];
#ifdef FP4_CVT
    values(w, v, T());
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = format.quotient(v[i], b, T());
    return round8_e2m1(v);
#else
    u32 c[8];
    magnitudes(w, v, T());
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float rounded = e2m1_round(format.quotient(v[i], b, T()));
        c[i] = fp4_bits(F::MAY_REACH_7 ? fp4_min(rounded, E2M1_INTEGERS + 7.0f) : rounded); /* lowest byte: the code */
    }
    return low_bytes(c[0] + 16 * c[1], c[2] + 16 * c[3], c[4] + 16 * c[5], c[6] + 16 * c[7]) | signs(w, T());
#endif
}

/* The same from memory: rolled up, for it is rarely run. */
template <class T, class F> DEVICE u32 exact_codes(const void *x, i64 start, Block b, F format) {
    u32 codes = 0;
#pragma unroll 1
    for (int i = 0; i < 8; i++) codes |= format.exact(T::one(x, start + i), b) << 4 * i;
    return codes;
}

/* Codes of the unit whose words are w, to where they belong. */
template <class T, class F> DEVICE void write_codes(const void *x, const u32 *w, i64 unit, Block b, F format, u8 *packed) {
    Words2 codes;
    if (b.is_fast) {
        codes.w[0] = fast_codes<T>(w, b, format);
        codes.w[1] = fast_codes<T>(w + T::WORDS / 2, b, format);
    } else {
        codes.w[0] = exact_codes<T>(x, unit * UNIT, b, format);
        codes.w[1] = exact_codes<T>(x, unit * UNIT + 8, b, format);
    }
    ((Words2 *)packed)[unit] = codes;
}

#endif
