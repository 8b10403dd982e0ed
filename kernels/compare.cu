/* How far values are from what was made of them, on the GPU: the entry points of compare.c, the same arguments and the same bits.
 *
 *   compare_nvfp4_D(x, rows, columns, packed, block_scales, stored_global, is_divisor, sums)    columns % 16 == 0
 *   compare_mxfp4_D(x, rows, columns, packed, block_scales, sums)                               columns % 32 == 0
 *   count_codes(packed, nbytes, counts)                                                         nbytes % 8 == 0; counts: int64[16]
 *
 * D is bf16, fp16 or fp32: the type of x, finite.  sums: double[rows][5]; compare.c says what they are, and in which order added.
 * Launch: 256 threads; compare grid = ceil(rows / 8), count_codes grid = ceil(nbytes / 65536), so that few atomics meet.
 * Bytes moved per bf16 element: NVFP4 2 + 0.5625, MXFP4 2 + 0.53125; count_codes 0.5.
 *
 * A warp owns a row, and each half of it every second group of 256 elements: a thread is one of the group's 16 lanes.
 */
#include "device.h"

enum { HALF = 16, GROUP = 256, SUMS = 5, ROWS_HERE = THREADS / WARP, CODES = 16, COUNT_NBYTES = 1 << 16 };
typedef unsigned long long u64;

struct NvFp4Steps {
    enum { BLOCK_SIZE = 16 };
    float stored_global;
    bool is_divisor;
    MEMBER float operator()(u32 stored) const {
        float block_scale = e4m3_decode(stored);
        return is_divisor ? block_scale / stored_global : __fmul_rn(block_scale, stored_global);
    }
};
struct MxFp4Steps {
    enum { BLOCK_SIZE = 32 };
    MEMBER float operator()(u32 stored) const { return e8m0_decode(stored); }
};

/* Three sums of squares: of x, of x - y, of y. */
template <class Real> struct Squares {
    Real signal, noise, output;
    MEMBER void add(float x, float difference, float y) {
        signal += (Real)x * (Real)x;
        noise += (Real)difference * (Real)difference;
        output += (Real)y * (Real)y;
    }
    MEMBER Squares with_lane(int distance) const {
        return {signal + __shfl_xor_sync(ALL_LANES, signal, distance), noise + __shfl_xor_sync(ALL_LANES, noise, distance),
                output + __shfl_xor_sync(ALL_LANES, output, distance)};
    }
    /* Lanes 2j and 2j + 1 added, then of these eight j and j + 4: every thread gets one of the four. */
    MEMBER Squares folded() const { return with_lane(1).with_lane(8); }
};

DEVICE bool is_held(Squares<float> s) { /* by float32: kernels/compare.c */
    const float fine = 0x1p-70f, coarse = 0x1p100f;
    return s.signal >= fine && s.noise >= fine && s.signal <= coarse && s.noise <= coarse && s.output <= coarse;
}

/* A lane of a group: elements start, start + 16, ... of n. */
template <class T, class Steps> struct Lane {
    const void *x;
    const u8 *packed, *block_scales;
    Steps step_of;
    u32 max_abs, clipped; /* the first as bits, of which those of NaN are the largest */
    bool is_coarse;

    template <class Real> MEMBER Squares<Real> add(i64 start, int n) {
        Squares<Real> sums = {0, 0, 0};
        for (int i = threadIdx.x % HALF; i < n; i += HALF) {
            float value = T::one(x, start + i), step = step_of(block_scales[(start + i) / Steps::BLOCK_SIZE]);
            float y = __fmul_rn(e2m1_decode(packed[(start + i) / 2] >> (i & 1) * 4 & 15u), step), difference = value - y;
            sums.add(value, difference, y);
            max_abs = max(max_abs, fp4_bits(fabsf(difference)));
            clipped += sizeof(Real) == 4 && fabsf(value) > fabsf(__fmul_rn(6.0f, step)); /* once, also where both sums are made */
            is_coarse = is_coarse && step >= 0x1p-50f;
        }
        return sums;
    }
};

template <class T, class Steps> DEVICE void compare(Lane<T, Steps> lane, i64 rows, i64 columns, double *sums) {
    int half = threadIdx.x % WARP / HALF;
    i64 row = (i64)blockIdx.x * ROWS_HERE + threadIdx.x / WARP;
    i64 start = min(row, rows - 1) * columns; /* of a warp without a row: it meets the others, and writes nothing */
    Squares<double> total = {0, 0, 0};
    for (i64 first = 0; first < columns; first += 2 * GROUP) {
        i64 own = first + half * GROUP, left = columns - own;
        int n = (int)max(min(left, (i64)GROUP), (i64)0);
        lane.is_coarse = true;
        Squares<float> fast = lane.template add<float>(start + own, n).folded();
        u32 is_sound = n == 0 || (lane.is_coarse && is_held(fast));
#pragma unroll
        for (int distance = 1; distance < HALF; distance *= 2) is_sound &= __shfl_xor_sync(ALL_LANES, is_sound, distance);
        Squares<double> found = {fast.signal, fast.noise, fast.output};
        if (!(is_sound & __shfl_xor_sync(ALL_LANES, is_sound, HALF))) {
            Squares<double> exact = lane.template add<double>(start + own, n).folded();
            if (!is_sound) found = exact;
        }
        Squares<double> other = {__shfl_xor_sync(ALL_LANES, found.signal, HALF), __shfl_xor_sync(ALL_LANES, found.noise, HALF),
                                 __shfl_xor_sync(ALL_LANES, found.output, HALF)};
        Squares<double> even = half ? other : found, odd = half ? found : other;
        total = {total.signal + even.signal, total.noise + even.noise, total.output + even.output};
        total = {total.signal + odd.signal, total.noise + odd.noise, total.output + odd.output};
    }
    total = total.with_lane(4).with_lane(2); /* the four as (0 + 2) + (1 + 3) */
    u32 max_abs = lane.max_abs, clipped = lane.clipped;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        max_abs = max(max_abs, __shfl_xor_sync(ALL_LANES, max_abs, distance));
        clipped += __shfl_xor_sync(ALL_LANES, clipped, distance);
    }
    if (threadIdx.x % WARP || row >= rows) return;
    double *own = sums + row * SUMS;
    own[0] = total.signal, own[1] = total.noise, own[2] = total.output, own[3] = fp4_float(max_abs), own[4] = clipped;
}

/* Adds how often each code is among 32. Bit b of every code goes to a word of its own; the codes k are where all four agree. */
DEVICE void count32(const u32 *codes, u32 *counts) {
    u32 bits[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        bits[b] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = b < i ? codes[i] << (i - b) : codes[i] >> (b - i);
            bits[b] |= word & 0x11111111u << i;
        }
    }
#pragma unroll
    for (int k = 0; k < CODES; k++) {
        u32 low = (k & 1 ? bits[0] : ~bits[0]) & (k & 2 ? bits[1] : ~bits[1]);
        u32 high = (k & 4 ? bits[2] : ~bits[2]) & (k & 8 ? bits[3] : ~bits[3]);
        counts[k] += (u32)__popc(low & high);
    }
}

KERNEL(4) count_codes(const u8 *packed, i64 nbytes, u64 *counts) {
    i64 first = (i64)blockIdx.x * COUNT_NBYTES, left = min(nbytes - first, (i64)COUNT_NBYTES);
    u32 own[CODES] = {};
#pragma unroll 2
    for (int at = (int)threadIdx.x * 16; at < left; at += THREADS * 16) {
        Words4 codes;
        if (left - at >= 16) codes = *(const Words4 *)(packed + first + at);
        else { /* 16 codes are left; the zeros beside them do not count */
            Words2 half = *(const Words2 *)(packed + first + at);
            codes = {half.w[0], half.w[1], 0, 0};
            own[0] -= 16;
        }
        count32(codes.w, own);
    }
#pragma unroll
    for (int k = 0; k < CODES / 2; k++) {
        u32 both = own[2 * k] | own[2 * k + 1] << 16; /* at most 512 in a thread, 16384 in a warp */
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) both += __shfl_xor_sync(ALL_LANES, both, distance);
        if (threadIdx.x % WARP == k) {
            atomicAdd(counts + 2 * k, (u64)(both & 0xFFFFu));
            atomicAdd(counts + 2 * k + 1, (u64)(both >> 16));
        }
    }
}

#define ENTRIES(dtype, T)                                                                                                       \
    KERNEL(4) compare_nvfp4_##dtype(const void *x, i64 rows, i64 columns, const u8 *packed, const u8 *block_scales,             \
                                    const float *stored_global, i64 is_divisor, double *sums) {                                 \
        NvFp4Steps steps = {*stored_global, is_divisor != 0};                                                                   \
        compare(Lane<T, NvFp4Steps>{x, packed, block_scales, steps, 0, 0, true}, rows, columns, sums);                       \
    }                                                                                                                           \
    KERNEL(4) compare_mxfp4_##dtype(const void *x, i64 rows, i64 columns, const u8 *packed, const u8 *block_scales,             \
                                    double *sums) {                                                                             \
        compare(Lane<T, MxFp4Steps>{x, packed, block_scales, MxFp4Steps(), 0, 0, true}, rows, columns, sums);                \
    }
ENTRIES(bf16, Bf16)
ENTRIES(fp16, Fp16)
ENTRIES(fp32, Fp32)
