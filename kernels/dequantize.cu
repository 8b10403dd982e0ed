/* Dequantization on the GPU: the entry points of dequantize.c, with the same arguments and the same bytes.
 *
 *   dequantize_nvfp4_D(packed, block_scales, n, stored_global, is_divisor, y)    n % 16 == 0; *stored_global: float32
 *   dequantize_mxfp4_D(packed, block_scales, n, y)                               n % 32 == 0
 *
 * y = e2m1(code) * step in float32, then one rounding to D (bf16, fp16 or fp32); step is block_scale * stored_global,
 * or block_scale / stored_global where a divisor is stored.  n > 0.  Launch and alignment: device.h.
 * Bytes equal dequantize in fp4convert/numerics/codec.py; where a value is NaN it is NaN, with bits of the device's own.
 * Bytes moved per bf16 element: NVFP4 0.5625 + 2, MXFP4 0.53125 + 2.
 *
 * A thread owns groups of elements, THREADS apart, each of which becomes 16 bytes: a warp reads what it wants in a row, and
 * writes 512 bytes in a row.
 */
#include "device.h"

/* GROUP elements of 16 bytes. */
template <u32 NARROW2(float, float)> struct ToHalf {
    enum { GROUP = 8 };
    static MEMBER void store(void *y, i64 group, const float *v) {
        Words4 out;
#pragma unroll
        for (int i = 0; i < 4; i++) out.w[i] = NARROW2(v[2 * i], v[2 * i + 1]);
        ((Words4 *)y)[group] = out;
    }
};
struct ToFp32 {
    enum { GROUP = 4 };
    static MEMBER void store(void *y, i64 group, const float *v) {
        ((Words4 *)y)[group] = {fp4_bits(v[0]), fp4_bits(v[1]), fp4_bits(v[2]), fp4_bits(v[3])};
    }
};

template <class To, class Steps> DEVICE void dequantize(const u8 *packed, const u8 *block_scales, i64 n, Steps step_of, void *y) {
    const int GROUP = To::GROUP, GROUPS = UNIT * UNITS / GROUP, launched = THREADS * GROUPS, per_block = Steps::BLOCK_SIZE / GROUP;
    i64 start = (i64)blockIdx.x * launched, left = n / GROUP - start;
    int groups = left < launched ? (int)left : launched;
    u32 codes[GROUPS], stored[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        int group = min((int)threadIdx.x + i * THREADS, groups - 1);
        /* whole words: ptxas 12.9 crashes on codes of which it knows that the upper half is zero */
        codes[i] = ((const u32 *)packed)[(start + group) * GROUP / 8] >> group * GROUP % 8 * 4;
        stored[i] = block_scales[start / per_block + group / per_block];
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        int group = (int)threadIdx.x + i * THREADS;
        if (group >= groups) continue;
        float step = step_of(stored[i]), v[GROUP];
        u32 pairs[4];
        widen8(codes[i], pairs);
#pragma unroll
        for (int k = 0; k < GROUP; k++) v[k] = __fmul_rn(widen_fp16((u16)(pairs[k / 2] >> k % 2 * 16)), step);
        To::store(y, start + group, v);
    }
}

#define ENTRIES(dtype, To)                                                                                                       \
    KERNEL(4) dequantize_nvfp4_##dtype(const u8 *packed, const u8 *block_scales, i64 n, const float *stored_global, i64 is_divisor,\
                                       void *y) {                                                                                \
        dequantize<To>(packed, block_scales, n, NvFp4Steps{*stored_global, is_divisor != 0}, y);                                 \
    }                                                                                                                            \
    KERNEL(4) dequantize_mxfp4_##dtype(const u8 *packed, const u8 *block_scales, i64 n, void *y) {                               \
        dequantize<To>(packed, block_scales, n, MxFp4Steps(), y);                                                                \
    }
ENTRIES(bf16, ToHalf<narrow2_bf16>)
ENTRIES(fp16, ToHalf<narrow2_fp16>)
ENTRIES(fp32, ToFp32)
