/* Instructions of PTX as C++ functions of the same names, for what ptx.py makes of a kernel.
 *
 * Written after the PTX ISA 8.8 and not after fp4.h, so that a wrong idea of an instruction there is not repeated here. Registers
 * are words of bits, floats too. What is not here does not compile: among others add, mul and fma without .rn, which ptxas
 * may contract, and everything with .ftz but the reciprocal that the kernels ask for.
 */
#pragma once
#include <cmath>
#include <cstdint>

#include "warps.h"

typedef uint8_t B8;
typedef uint16_t B16;
typedef uint32_t B32;
typedef uint64_t B64;
typedef bool PRED;

namespace ptx {
static inline void must(bool holds, const char *what) {
    if (!holds) std::fprintf(stderr, "%s\n", what), std::abort();
}
template <class To, class From> static inline To cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline float f32(B32 bits) { return cast<float>(bits); }
static inline double f64(B64 bits) { return cast<double>(bits); }
static inline B32 of(float value) { return cast<B32>(value); }
static inline B64 of(double value) { return cast<B64>(value); }

/* ------------------------------------------------------------------------------------------------------------ integers */

#define OPERATION(name, type, expression) \
    static inline type name(type a, type b) { return (type)(expression); }
#define SAME_IN_BOTH(name, n, expression) OPERATION(name##_s##n, B##n, expression) OPERATION(name##_u##n, B##n, expression)
#define BITWISE(n) OPERATION(and_b##n, B##n, a & b) OPERATION(or_b##n, B##n, a | b) OPERATION(xor_b##n, B##n, a ^ b)
#define EXTREMES(type, T, B)                                              \
    OPERATION(min_##type, B, (T)a < (T)b ? a : b)                        \
    OPERATION(max_##type, B, (T)a > (T)b ? a : b)
SAME_IN_BOTH(add, 32, a + b)
SAME_IN_BOTH(add, 64, a + b)
SAME_IN_BOTH(sub, 32, a - b)
SAME_IN_BOTH(sub, 64, a - b)
SAME_IN_BOTH(mul_lo, 32, a *b)
SAME_IN_BOTH(mul_lo, 64, a *b)
BITWISE(16)
BITWISE(32)
BITWISE(64)
OPERATION(and_pred, PRED, a && b)
OPERATION(or_pred, PRED, a || b)
OPERATION(xor_pred, PRED, a != b)
EXTREMES(s32, int32_t, B32)
EXTREMES(u32, uint32_t, B32)
EXTREMES(s64, int64_t, B64)
EXTREMES(u64, uint64_t, B64)
/* By zero the result is unspecified. */
OPERATION(div_u32, B32, (must(b, "a division by zero"), a / b))
OPERATION(div_u64, B64, (must(b, "a division by zero"), a / b))
OPERATION(div_s64, B64, (must(b, "a division by zero"), (int64_t)a / (int64_t)b))
OPERATION(rem_u32, B32, a % b)
OPERATION(rem_s32, B32, (int32_t)a % (int32_t)b)
OPERATION(rem_s64, B64, (int64_t)a % (int64_t)b)
static inline B32 mad_lo_s32(B32 a, B32 b, B32 c) { return a * b + c; }
static inline B32 mul_wide_u16(B16 a, B16 b) { return (B32)a * b; }
static inline B64 mul_wide_u32(B32 a, B32 b) { return (B64)a * b; }
static inline B64 mul_wide_s32(B32 a, B32 b) { return (B64)((int64_t)(int32_t)a * (int32_t)b); }
static inline B32 not_b32(B32 a) { return ~a; }
static inline B64 not_b64(B64 a) { return ~a; }
static inline PRED not_pred(PRED a) { return !a; }
static inline B32 neg_s32(B32 a) { return 0u - a; }
static inline B64 neg_s64(B64 a) { return 0u - a; }
static inline B32 popc_b32(B32 a) { return __builtin_popcount(a); }
static inline B32 clz_b32(B32 a) { return a ? __builtin_clz(a) : 32; }
static inline B32 abs_s32(B32 a) { return a >> 31 ? 0u - a : a; }

/* Shifts by the width or more give 0, or copies of the sign. */
static inline B32 shl_b32(B32 a, B32 by) { return by > 31 ? 0 : a << by; }
static inline B64 shl_b64(B64 a, B32 by) { return by > 63 ? 0 : a << by; }
static inline B32 shr_u32(B32 a, B32 by) { return by > 31 ? 0 : a >> by; }
static inline B64 shr_u64(B64 a, B32 by) { return by > 63 ? 0 : a >> by; }
static inline B16 shl_b16(B16 a, B32 by) { return by > 15 ? 0 : a << by; }
static inline B16 shr_u16(B16 a, B32 by) { return by > 15 ? 0 : a >> by; }
static inline B32 shr_s32(B32 a, B32 by) { return (B32)((int32_t)a >> (by > 31 ? 31 : by)); }
static inline B64 shr_s64(B64 a, B32 by) { return (B64)((int64_t)a >> (by > 63 ? 63 : by)); }

/* Four bytes of eight, picked by nibbles; with bit 3 a byte of copies of the picked one's sign. */
static inline B32 prmt_b32(B32 a, B32 b, B32 selector) {
    B64 eight = (B64)b << 32 | a;
    B32 result = 0;
    for (int place = 0; place < 32; place += 8, selector >>= 4) {
        B32 byte = (B32)(eight >> 8 * (selector & 7)) & 0xFFu;
        if (selector & 8) byte = byte >> 7 ? 0xFFu : 0;
        result |= byte << place;
    }
    return result;
}

#define COMPARED(type, T, B)                                                      \
    static inline PRED setp_eq_##type(B a, B b) { return (T)a == (T)b; }          \
    static inline PRED setp_ne_##type(B a, B b) { return (T)a != (T)b; }          \
    static inline PRED setp_lt_##type(B a, B b) { return (T)a < (T)b; }           \
    static inline PRED setp_le_##type(B a, B b) { return (T)a <= (T)b; }          \
    static inline PRED setp_gt_##type(B a, B b) { return (T)a > (T)b; }           \
    static inline PRED setp_ge_##type(B a, B b) { return (T)a >= (T)b; }
COMPARED(s16, int16_t, B16)
COMPARED(u16, uint16_t, B16)
COMPARED(s32, int32_t, B32)
COMPARED(u32, uint32_t, B32)
COMPARED(b32, uint32_t, B32)
COMPARED(s64, int64_t, B64)
COMPARED(u64, uint64_t, B64)

#define MOVED(type, B)                                                      \
    static inline B mov_##type(B a) { return a; }                           \
    static inline B selp_##type(B a, B b, PRED chosen) { return chosen ? a : b; }
MOVED(u16, B16)
MOVED(b16, B16)
MOVED(u32, B32)
MOVED(b32, B32)
MOVED(f32, B32)
MOVED(u64, B64)
MOVED(b64, B64)
MOVED(f64, B64)
static inline PRED mov_pred(PRED a) { return a; }
static inline B64 cvta_to_global_u64(B64 address) { return address; }

/* The first part lies in the lowest bits. */
template <class Word, class Part, class... Parts> static inline Word pack(Part first, Parts... rest) {
    if constexpr (sizeof...(rest) == 0) return first;
    else return (Word)((Word)first | pack<Word>(rest...) << 8 * sizeof(Part));
}
template <class Word, class Part, class... Parts> static inline void unpack(Word word, Part &first, Parts &...rest) {
    first = (Part)word;
    if constexpr (sizeof...(rest) > 0) unpack((Word)(word >> 8 * sizeof(Part)), rest...);
}

/* -------------------------------------------------------------------------------------------------------------- floats */

OPERATION(add_rn_f32, B32, of(f32(a) + f32(b)))
OPERATION(sub_rn_f32, B32, of(f32(a) - f32(b)))
OPERATION(mul_rn_f32, B32, of(f32(a) * f32(b)))
OPERATION(div_rn_f32, B32, of(f32(a) / f32(b)))
OPERATION(add_rn_f64, B64, of(f64(a) + f64(b)))
OPERATION(sub_rn_f64, B64, of(f64(a) - f64(b)))
OPERATION(mul_rn_f64, B64, of(f64(a) * f64(b)))
static inline B32 fma_rn_f32(B32 a, B32 b, B32 c) { return of(std::fma(f32(a), f32(b), f32(c))); }
static inline B32 rcp_rn_f32(B32 a) { return of(1.0f / f32(a)); }
static inline B32 neg_f32(B32 a) { return a ^ 0x80000000u; }
static inline B32 abs_f32(B32 a) { return a & 0x7FFFFFFFu; }

/* The other operand where one is NaN; -0.0 is below +0.0. */
static inline B32 min_f32(B32 a, B32 b) {
    float x = f32(a), y = f32(b);
    if (x != x || y != y) return x != x ? b : a;
    return x < y || (x == y && a >> 31) ? a : b;
}
static inline B32 max_f32(B32 a, B32 b) {
    float x = f32(a), y = f32(b);
    if (x != x || y != y) return x != x ? b : a;
    return x > y || (x == y && b >> 31) ? a : b;
}

static inline B32 flushed(B32 a) { return std::fpclassify(f32(a)) == FP_SUBNORMAL ? a & 0x80000000u : a; }
/* Within one unit in the last place of normal numbers: one off, up or down as the bits fall. Subnormals are flushed. */
static inline B32 rcp_approx_ftz_f32(B32 a) {
    B32 nearest = flushed(of((float)(1.0 / f32(flushed(a)))));
    if (!std::isnormal(f32(nearest))) return nearest;
    return (a ^ a >> 7 ^ a >> 15) & 1 ? nearest + 1 : nearest - 1;
}

#define ORDERED(name, sign)                                                                                                  \
    static inline PRED setp_##name##_f32(B32 a, B32 b) { return f32(a) sign f32(b); }                                        \
    static inline PRED setp_##name##u_f32(B32 a, B32 b) { return f32(a) != f32(a) || f32(b) != f32(b) || f32(a) sign f32(b); }
ORDERED(eq, ==)
ORDERED(lt, <)
ORDERED(le, <=)
ORDERED(gt, >)
ORDERED(ge, >=)
static inline PRED setp_lt_f64(B64 a, B64 b) { return f64(a) < f64(b); }
static inline PRED setp_geu_f64(B64 a, B64 b) { return !(f64(a) < f64(b)); }
static inline PRED setp_neu_f32(B32 a, B32 b) { return !(f32(a) == f32(b)); }

/* ------------------------------------------------------------------------------------------------------ small floats */

/* A float format: significand bits with the leading one, exponent of the smallest step, largest finite value. */
struct Small { int precision, least; double largest; };
static const Small FP16 = {11, -24, 65504.0}, BF16 = {8, -133, 0x1.FEp127};

/* Half to even, once; beyond the largest by half a step or more to infinity. */
static inline double round_to(Small format, double value) {
    if (!std::isfinite(value) || value == 0) return value;
    int step = std::ilogb(value) + 1 - format.precision;
    step = step < format.least ? format.least : step;
    double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
    return std::fabs(rounded) > format.largest ? std::copysign(INFINITY, value) : std::copysign(rounded, value);
}
static inline double widen_fp16(B16 h) {
    int exponent = h >> 10 & 31, fraction = h & 0x3FF;
    double magnitude = exponent ? std::ldexp(fraction | 0x400, exponent - 25) : std::ldexp(fraction, -24);
    if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
    return h >> 15 ? -magnitude : magnitude;
}
static inline double widen_bf16(B16 h) { return f32((B32)h << 16); }
static inline B16 narrow_fp16(double value) {
    if (std::isnan(value)) return 0x7FFF;
    double rounded = round_to(FP16, value), magnitude = std::fabs(rounded);
    B16 sign = std::signbit(rounded) ? 0x8000 : 0;
    if (std::isinf(rounded)) return sign | 0x7C00;
    if (magnitude < 0x1p-14) return sign | (B16)std::ldexp(magnitude, 24);
    int exponent = std::ilogb(magnitude);
    return sign | (B16)((exponent + 15) << 10) | (B16)(std::ldexp(magnitude, 10 - exponent) - 0x400);
}
static inline B16 narrow_bf16(double value) {
    return std::isnan(value) ? 0x7FFF : (B16)(of((float)round_to(BF16, value)) >> 16);
}

static inline B32 cvt_f32_f16(B16 h) { return of((float)widen_fp16(h)); }
/* The first source goes to the upper half. */
static inline B32 cvt_rn_f16x2_f32(B32 high, B32 low) { return pack<B32>(narrow_fp16(f32(low)), narrow_fp16(f32(high))); }
static inline B32 cvt_rn_bf16x2_f32(B32 high, B32 low) { return pack<B32>(narrow_bf16(f32(low)), narrow_bf16(f32(high))); }

template <double WIDEN(B16), B16 NARROW(double)> static inline B32 fma2(B32 a, B32 b, B32 c) {
    B16 half[2];
    for (int i = 0; i < 2; i++) /* what the kernels multiply and add is exact in double */
        half[i] = NARROW(std::fma(WIDEN(a >> 16 * i), WIDEN(b >> 16 * i), WIDEN(c >> 16 * i)));
    return pack<B32>(half[0], half[1]);
}
static inline B32 fma_rn_f16x2(B32 a, B32 b, B32 c) { return fma2<widen_fp16, narrow_fp16>(a, b, c); }
static inline B32 fma_rn_bf16x2(B32 a, B32 b, B32 c) { return fma2<widen_bf16, narrow_bf16>(a, b, c); }
template <double WIDEN(B16)> static inline B32 max2_nan(B32 a, B32 b) {
    B16 half[2];
    for (int i = 0; i < 2; i++) {
        B16 first = a >> 16 * i, second = b >> 16 * i;
        double x = WIDEN(first), y = WIDEN(second);
        half[i] = x > y || (x == y && second >> 15) ? first : second;
        if (x != x || y != y) half[i] = 0x7FFF;
    }
    return pack<B32>(half[0], half[1]);
}
/* The other half where one is NaN. */
template <double WIDEN(B16)> static inline B32 min2(B32 a, B32 b) {
    B16 half[2];
    for (int i = 0; i < 2; i++) {
        B16 first = a >> 16 * i, second = b >> 16 * i;
        double x = WIDEN(first), y = WIDEN(second);
        half[i] = x < y || (x == y && first >> 15) ? first : second;
        if (x != x || y != y) half[i] = x == x ? first : y == y ? second : 0x7FFF;
    }
    return pack<B32>(half[0], half[1]);
}
static inline B32 min_f16x2(B32 a, B32 b) { return min2<widen_fp16>(a, b); }
static inline B32 max_NaN_f16x2(B32 a, B32 b) { return max2_nan<widen_fp16>(a, b); }
static inline B32 max_NaN_bf16x2(B32 a, B32 b) { return max2_nan<widen_bf16>(a, b); }

/* The nearest of E2M1's magnitudes, of two as near the one with an even code; 6 beyond; the sign as it is, of zero too. */
static const float E2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
static inline B8 narrow_e2m1(B32 bits) {
    float magnitude = f32(bits & 0x7FFFFFFFu);
    int code = 0;
    if (magnitude != magnitude) return 7; /* of NaN the positive largest */
    while (code < 7) { /* up, as long as the midpoint is passed */
        float midpoint = (E2M1[code] + E2M1[code + 1]) / 2;
        if (magnitude < midpoint || (magnitude == midpoint && code % 2 == 0)) break;
        code++;
    }
    return (B8)(bits >> 31 << 3 | (B32)code);
}
static inline B8 cvt_rn_satfinite_e2m1x2_f32(B32 high, B32 low) { return (B8)(narrow_e2m1(high) << 4 | narrow_e2m1(low)); }
static inline B16 widen_e2m1(B8 code) { return narrow_fp16(code & 8 ? -E2M1[code & 7] : E2M1[code & 7]); }
static inline B32 cvt_rn_f16x2_e2m1x2(B8 codes) { return pack<B32>(widen_e2m1(codes & 15), widen_e2m1(codes >> 4)); }

static inline B64 cvt_f64_f32(B32 a) { return of((double)f32(a)); }
static inline B32 cvt_rn_f32_f64(B64 a) { return of((float)f64(a)); }
static inline B64 cvt_rn_f64_u32(B32 a) { return of((double)a); }
static inline B32 cvt_rn_f32_s32(B32 a) { return of((float)(int32_t)a); }
static inline B32 cvt_rn_f32_u32(B32 a) { return of((float)a); }
static inline B32 cvt_rn_f32_u16(B16 a) { return of((float)a); }
static inline B64 cvt_s64_s32(B32 a) { return (B64)(int64_t)(int32_t)a; }
static inline B64 cvt_u64_u32(B32 a) { return a; }
static inline B32 cvt_u32_u64(B64 a) { return (B32)a; }
static inline B32 cvt_u32_u16(B16 a) { return a; }
static inline B16 cvt_u16_u32(B32 a) { return (B16)a; }

/* -------------------------------------------------------------------------------------------------------------- memory */

template <class Word> static inline Word *at(B64 address, int words = 1) {
    must(address % (words * sizeof(Word)) == 0, "an access that is not aligned");
    return (Word *)address;
}
#define LOADED(type, B)                                                                   \
    static inline B ld_##type(B64 address) { return *at<B>(address); }                    \
    static inline void st_##type(B64 address, B64 value) { *at<B>(address) = (B)value; }
LOADED(global_u8, B8)
static inline B16 ld_global_s8(B64 address) { return (B16)(int16_t)*at<int8_t>(address); }
LOADED(global_u16, B16)
LOADED(global_u32, B32)
LOADED(global_f32, B32)
LOADED(global_u64, B64)
LOADED(global_f64, B64)
LOADED(shared_f64, B64) /* static: nothing in it goes from warp to warp, which run one after the other */
static inline void ld_global_v2_u64(B64 address, B64 &a, B64 &b) { B64 *from = at<B64>(address, 2); a = from[0], b = from[1]; }
static inline void st_global_v2_u64(B64 address, B64 a, B64 b) { B64 *to = at<B64>(address, 2); to[0] = a, to[1] = b; }
#define VECTORS(type)                                                                                                          \
    static inline void ld_global_v2_##type(B64 address, B32 &a, B32 &b) { B32 *from = at<B32>(address, 2); a = from[0], b = from[1]; } \
    static inline void ld_global_v4_##type(B64 address, B32 &a, B32 &b, B32 &c, B32 &d) {                                      \
        B32 *from = at<B32>(address, 4);                                                                                       \
        a = from[0], b = from[1], c = from[2], d = from[3];                                                                    \
    }                                                                                                                          \
    static inline void st_global_v2_##type(B64 address, B32 a, B32 b) { B32 *to = at<B32>(address, 2); to[0] = a, to[1] = b; } \
    static inline void st_global_v4_##type(B64 address, B32 a, B32 b, B32 c, B32 d) {                                          \
        B32 *to = at<B32>(address, 4);                                                                                         \
        to[0] = a, to[1] = b, to[2] = c, to[3] = d;                                                                            \
    }
VECTORS(u32)
VECTORS(f32)
static inline B32 atom_global_max_u32(B64 address, B32 value) {
    B32 *place = at<B32>(address), before = *place;
    *place = max_u32(before, value);
    return before;
}
static inline B64 atom_global_add_u64(B64 address, B64 value) {
    B64 *place = at<B64>(address), before = *place;
    *place = before + value;
    return before;
}

/* ----------------------------------------------------------------------------------------------------------- exchanges */

static inline B32 shfl_sync_bfly_b32(int place, B32 value, B32 mask, B32 clamp, B32 lanes) {
    must(clamp == 31 && lanes == ~0u && mask < 32, "an exchange of fewer than 32 lanes");
    return (B32)simt::meet(value, place)[simt::current ^ (int)mask];
}
/* The lane of its segment: bits 8 to 12 of the clamp are those of the number that lanes keep. */
static inline B32 shfl_sync_idx_b32(int place, B32 value, B32 lane, B32 clamp, B32 lanes) {
    must((clamp & 31) == 31 && lanes == ~0u, "an exchange of fewer than 32 lanes");
    B32 kept = clamp >> 8 & 31;
    return (B32)simt::meet(value, place)[(simt::current & kept) | (lane & ~kept & 31)];
}
static inline void bar_warp_sync(int place, B32 lanes) {
    must(lanes == ~0u, "a meeting of fewer than 32 lanes");
    simt::meet(0, place);
}
static inline B32 vote_sync_ballot_b32(int place, PRED claim, B32 lanes) {
    must(lanes == ~0u, "a vote of fewer than 32 lanes");
    unsigned long long *claims = simt::meet(claim, place);
    B32 found = 0;
    for (int i = 0; i < simt::LANES; i++) found |= (B32)claims[i] << i;
    return found;
}
static inline PRED vote_sync_any_pred(int place, PRED claim, B32 lanes) {
    must(lanes == ~0u, "a vote of fewer than 32 lanes");
    unsigned long long *claims = simt::meet(claim, place), any = 0;
    for (int i = 0; i < simt::LANES; i++) any |= claims[i];
    return any != 0;
}
}
