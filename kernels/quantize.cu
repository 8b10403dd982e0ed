/* amax and block quantization on the GPU: entry points of amax.c and quantize.c, with the same arguments and the same bytes.
 *
 *   amax_D(x, n, amax_bits)                               *amax_bits = max(*amax_bits, float32 bits of max |x|); NaN wins
 *   quantize_nvfp4_D(x, n, amax, packed, block_scales)    *amax: float32, largest |x| of the scale group, measured or given
 *   quantize_mxfp4_D(x, n, rule, packed, block_scales)    rule: FP4_FLOOR, FP4_EVEN, FP4_CEIL
 *
 * D is bf16, fp16 or fp32: the type of x, which quantize wants finite.  n % 16 == 0 (MXFP4: % 32), n > 0.  Launch and alignment: device.h.
 * Nothing is read on the host: *amax may come from a kernel earlier in the same stream.
 * Bytes equal quantize in fp4convert/numerics/codec.py.  Bytes moved per bf16 element: amax 2, NVFP4 2 + 0.5625, MXFP4 2 + 0.53125.
 *
 * A thread owns two units of 16 elements (FP4_UNITS), THREADS apart: an NVFP4 block each, or half an MXFP4 block whose amax two lanes share.
 */
#include "codes.cuh"

#ifndef QUANTIZE_BLOCKS
#define QUANTIZE_BLOCKS 5 /* to a multiprocessor; 4 leaves 64 registers instead of 48 */
#endif

template <class T> DEVICE void amax(const void *x, i64 n, u32 *amax_bits) {
    int last = units_here(n) - 1;
    u32 w[UNITS][T::WORDS], m = 0;
#pragma unroll
    for (int i = 0; i < UNITS; i++) load_unit<T>(x, min((int)threadIdx.x + i * THREADS, last), w[i]);
#pragma unroll
    for (int i = 0; i < UNITS; i++) m = max(m, largest(w[i], T()));
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) m = max(m, __shfl_xor_sync(ALL_LANES, m, distance));
    if (threadIdx.x % WARP == 0 && m > *amax_bits) atomicMax(amax_bits, m); /* an old *amax_bits costs one atomic more */
}

/* format_of: makes the format, after x is on its way; it may wait for *amax and divide by it. */
template <class T, class Make> DEVICE void quantize(const void *x, i64 n, Make format_of, u8 *packed, u8 *block_scales) {
    typedef decltype(format_of()) F;
    i64 start = (i64)blockIdx.x * LAUNCH_UNITS;
    int units = units_here(n), unit = threadIdx.x;
    u32 w[UNITS][T::WORDS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) load_unit<T>(x, min(unit + i * THREADS, units - 1), w[i]);
    F format = format_of();
#pragma unroll
    for (int i = 0; i < UNITS; i++, unit += THREADS) {
        u32 amax_bits = largest(w[i], T());
        if (F::LANES == 2) amax_bits = max(amax_bits, __shfl_xor_sync(ALL_LANES, amax_bits, 1));
        if (unit >= units) continue;
        Block b = format.block(format.scale(amax_bits), amax_bits, T());
        write_codes<T>(x, w[i], start + unit, b, format, packed);
        if (unit % F::LANES == 0) block_scales[start / F::LANES + unit / F::LANES] = (u8)b.stored;
    }
}

#define ENTRIES(dtype, T, blocks)                                                                                   \
    KERNEL(blocks) amax_##dtype(const void *x, i64 n, u32 *amax_bits) { amax<T>(x, n, amax_bits); }                 \
    KERNEL(blocks) quantize_nvfp4_##dtype(const void *x, i64 n, const float *amax, u8 *packed, u8 *block_scales) {  \
        auto format_of = [=] { return NvFp4<false>{nvfp4_global_scale(*amax, NVFP4_AMAX)}; };                       \
        quantize<T>(x, n, format_of, packed, block_scales);                                                         \
    }                                                                                                               \
    KERNEL(blocks) quantize_mxfp4_##dtype(const void *x, i64 n, i64 rule, u8 *packed, u8 *block_scales) {           \
        quantize<T>(x, n, [=] { return MxFp4{rule}; }, packed, block_scales);                                       \
    }
ENTRIES(bf16, Bf16, QUANTIZE_BLOCKS)
ENTRIES(fp16, Fp16, QUANTIZE_BLOCKS)
ENTRIES(fp32, Fp32, 4)
