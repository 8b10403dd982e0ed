/* A host compiler's stand-in for the CUDA that the .cu files use: every warp's 32 lanes run as coroutines that meet at each exchange.
 *
 *   g++ -x c++ -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -Ikernels -include simt.h quantize.cu
 *
 * What the hardware is free to choose is chosen here at its worst (reciprocal); a lane that misses an exchange ends the process.
 */
#pragma once
#include <cmath>
#include <cstring>

#include "warps.h"

#define fp4_fma(a, b, c) std::fma(a, b, c)
#include "fp4.h"

#define DEVICE static inline
#define MEMBER inline
#define KERNEL(blocks) extern "C" __attribute__((visibility("default"))) void
#define OPAQUE(word) (void)(word)
#define __shared__ static /* nothing in it goes from warp to warp, which run one after the other */

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = a | (unsigned long long)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = selector >> 4 * i & 15; /* 8 and above copy a byte's sign */
        unsigned byte = (unsigned)(both >> 8 * (pick & 7)) & 255u;
        result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

/* ------------------------------------------------------------------------------- the hardware's conversions, device.h */

static inline float widen_fp16(unsigned short bits) { return fp4_from_fp16(bits); }
static inline unsigned narrow2_bf16(float low, float high) { return fp4_to_bf16(low) | (unsigned)fp4_to_bf16(high) << 16; }
static inline unsigned narrow2_fp16(float low, float high) { return fp4_to_fp16(low) | (unsigned)fp4_to_fp16(high) << 16; }

/* Of magnitudes, whose bits order as they do, NaN last. */
static inline unsigned max2_bf16(unsigned a, unsigned b) { return max(a & 0xFFFFu, b & 0xFFFFu) | max(a & 0xFFFF0000u, b & 0xFFFF0000u); }
static inline unsigned max2_fp16(unsigned a, unsigned b) { return max2_bf16(a, b); }

/* In double, which holds what the kernels multiply and add here exactly. */
static inline float fma_exact(float a, float b, float c) { return (float)((double)a * b + (double)c); }
static inline unsigned fma2_bf16(unsigned a, unsigned b, unsigned c) {
    return narrow2_bf16(fma_exact(fp4_from_bf16(a & 0xFFFF), fp4_from_bf16(b & 0xFFFF), fp4_from_bf16(c & 0xFFFF)),
                        fma_exact(fp4_from_bf16(a >> 16), fp4_from_bf16(b >> 16), fp4_from_bf16(c >> 16)));
}
static inline unsigned fma2_fp16(unsigned a, unsigned b, unsigned c) {
    return narrow2_fp16(fma_exact(widen_fp16(a & 0xFFFF), widen_fp16(b & 0xFFFF), widen_fp16(c & 0xFFFF)),
                        fma_exact(widen_fp16(a >> 16), widen_fp16(b >> 16), widen_fp16(c >> 16)));
}

static inline unsigned min2_fp16(unsigned a, unsigned b) { return min(a & 0xFFFFu, b & 0xFFFFu) | min(a & 0xFFFF0000u, b & 0xFFFF0000u); }
static inline unsigned both_low(unsigned w) { return (w & 0xFFFFu) * 0x10001u; }
static inline unsigned both_high(unsigned w) { return (w >> 16) * 0x10001u; }
static inline int __popc(unsigned word) { return __builtin_popcount(word); }
static inline int __clz(int word) { return word ? __builtin_clz((unsigned)word) : 32; }

/* Off by one unit in the last place, up or down by a hash of v: the worst that the instruction may do. */
static inline float reciprocal(float v) {
    unsigned bits = fp4_bits(1.0f / v);
    return fp4_float(fp4_bits(v) * 2654435761u >> 31 ? bits + 1 : bits - 1);
}

template <class T> static inline void atomicAdd(T *place, T value) { *place += value; }
template <class T> static inline void atomicMax(T *place, T value) { *place = max(*place, value); }

/* ----------------------------------------------------------------------------------------------------------- exchanges */

static inline void __syncwarp() { simt::meet(0); }
static inline int __any_sync(unsigned, bool claim) {
    unsigned long long *slot = simt::meet(claim), found = 0;
    for (int i = 0; i < simt::LANES; i++) found |= slot[i];
    return found != 0;
}
static inline unsigned __ballot_sync(unsigned, bool claim) {
    unsigned long long *slot = simt::meet(claim);
    unsigned found = 0;
    for (int i = 0; i < simt::LANES; i++) found |= (unsigned)slot[i] << i;
    return found;
}
template <class T> static inline T from_lane(T value, int lane) {
    unsigned long long bits = 0;
    static_assert(sizeof value <= sizeof bits, "of 32 or of 64 bits");
    std::memcpy(&bits, &value, sizeof value);
    std::memcpy(&value, &simt::meet(bits)[lane], sizeof value);
    return value;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) { return from_lane(value, simt::current ^ mask); }
/* From a lane of as many that begin at a multiple of that. */
template <class T> static inline T __shfl_sync(unsigned, T value, int lane, int count) {
    return from_lane(value, simt::current / count * count + lane);
}
