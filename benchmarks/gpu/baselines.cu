/* The lower rungs of the GPU benchmark: what the product's kernels are measured against. Not shipped.
 *
 *   quantize_naive        one warp a block of 16, bf16; grid = ceil(n / 128)
 *   quantize_naive_mxfp4  one warp a block of 32, bf16; grid = ceil(n / 256)
 *   dequantize_naive      one thread an element, bf16; grid = ceil(n / 256)
 *   gemv_naive            one thread a row, byte by byte; grid = ceil(rows / 256)
 *   gemv_coalesced        one warp a row, 32 bits a lane; grid = ceil(rows / 8)
 *   gemv_one_tile         the product's arithmetic, each tile asked for when it is needed; grid = ceil(rows / 32)
 *   gemv_three_tiles      the same, two tiles on their way while one is computed; grid = ceil(rows / 32)
 *
 * 256 threads a block.  Arguments, bytes and products are those of quantize_nvfp4_bf16, quantize_mxfp4_bf16, dequantize_nvfp4_bf16
 * and gemv_nvfp4_fp16, for one vector of one matrix.  `#include "gemv.cu"` must stand alone on its line: device.py puts the text there.
 */
#include "gemv.cu"

KERNEL(1) quantize_naive(const u16 *x, i64 n, const float *amax, u8 *packed, u8 *block_scales) {
    int lane = threadIdx.x % WARP;
    i64 block = (i64)blockIdx.x * WARPS + threadIdx.x / WARP, element = block * UNIT + lane;
    if (block >= n / UNIT) return;
    float value = lane < UNIT ? fp4_from_bf16(x[element]) : 0.0f, global_scale = nvfp4_global_scale(*amax, NVFP4_AMAX);
    u32 block_amax = fp4_bits(value) & 0x7FFFFFFFu;
    for (int distance = UNIT / 2; distance; distance /= 2) block_amax = max(block_amax, __shfl_xor_sync(ALL_LANES, block_amax, distance));
    u32 stored = nvfp4_block_scale(fp4_float(block_amax), global_scale);
    u32 code = e2m1_encode(value / (e4m3_decode_positive(stored) * global_scale)), next = __shfl_xor_sync(ALL_LANES, code, 1);
    if (lane < UNIT && lane % 2 == 0) packed[element / 2] = (u8)(code | next << 4);
    if (lane == 0) block_scales[block] = (u8)stored;
}

KERNEL(1) quantize_naive_mxfp4(const u16 *x, i64 n, i64 rule, u8 *packed, u8 *block_scales) {
    int lane = threadIdx.x % WARP;
    i64 block = (i64)blockIdx.x * WARPS + threadIdx.x / WARP, element = block * WARP + lane;
    if (block >= n / WARP) return;
    float value = fp4_from_bf16(x[element]);
    u32 block_amax = fp4_bits(value) & 0x7FFFFFFFu;
    for (int distance = WARP / 2; distance; distance /= 2) block_amax = max(block_amax, __shfl_xor_sync(ALL_LANES, block_amax, distance));
    u32 stored = e8m0_encode(block_amax, rule);
    u32 code = e2m1_encode(value / e8m0_decode(stored)), next = __shfl_xor_sync(ALL_LANES, code, 1);
    if (lane % 2 == 0) packed[element / 2] = (u8)(code | next << 4);
    if (lane == 0) block_scales[block] = (u8)stored;
}

DEVICE float decode_by_branches(u32 code) {
    float magnitude = 0.0f;
    switch (code & 7u) {
    case 1: magnitude = 0.5f; break;
    case 2: magnitude = 1.0f; break;
    case 3: magnitude = 1.5f; break;
    case 4: magnitude = 2.0f; break;
    case 5: magnitude = 3.0f; break;
    case 6: magnitude = 4.0f; break;
    case 7: magnitude = 6.0f; break;
    }
    return code & 8u ? -magnitude : magnitude;
}

KERNEL(1) dequantize_naive(const u8 *packed, const u8 *block_scales, i64 n, const float *stored_global, i64 is_divisor, u16 *y) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float block_scale = e4m3_decode(block_scales[i / UNIT]);
    float step = is_divisor ? block_scale / *stored_global : block_scale * *stored_global;
    y[i] = fp4_to_bf16(decode_by_branches(packed[i / 2] >> i % 2 * 4) * step);
}

/* The product's arguments; those that one fp16 vector has no use for are not named. */
#define GEMV(name)                                                                                                             \
    KERNEL(1) gemv_##name(const u8 *packed, const u8 *block_scales, const float *stored_global, i64 is_divisor, i64 rows,     \
                          i64 columns, const u16 *x, const u8 *, const float *, i64, u16 *y)

DEVICE u16 result(float sum, const float *stored_global, i64 is_divisor) {
    return (u16)narrow2_fp16(__fmul_rn(sum, NvFp4Weights::global(stored_global, is_divisor)), 0.0f);
}

GEMV(naive) {
    i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (i64 column = 0; column < columns; column += 2) {
        u32 codes = packed[(row * columns + column) / 2];
        float block_scale = e4m3_decode(block_scales[(row * columns + column) / UNIT]);
        sum = __fmaf_rn(__fmul_rn(e2m1_decode(codes), block_scale), widen_fp16(x[column]), sum);
        sum = __fmaf_rn(__fmul_rn(e2m1_decode(codes >> 4), block_scale), widen_fp16(x[column + 1]), sum);
    }
    y[row] = result(sum, stored_global, is_divisor);
}

/* The lanes of a warp, added up; every lane has the sum. */
DEVICE float warp_sum(float sum) {
    for (int distance = WARP / 2; distance; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
    return sum;
}

GEMV(coalesced) {
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    float sum = 0.0f;
    for (i64 group = threadIdx.x % WARP; group < columns / 8; group += WARP) {
        u32 codes = ((const u32 *)packed)[row * (columns / 8) + group];
        float part = 0.0f, block_scale = e4m3_decode(block_scales[(row * (columns / 8) + group) / 2]);
        for (int i = 0; i < 8; i++) part = __fmaf_rn(e2m1_decode(codes >> 4 * i), widen_fp16(x[group * 8 + i]), part);
        sum = __fmaf_rn(part, block_scale, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) y[row] = result(sum, stored_global, is_divisor);
}

/* What a tile of four rows adds to their sums. */
DEVICE void add_tile(const WeightTile<NvFp4Weights> &now, i64 tile, const u16 *x, float *sums) {
#pragma unroll
    for (int block = 0; block < 2; block++) {
        HalfBlock<Fp16> part;
        part.load({x, 0, 0}, tile * 2 + block);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            u32 pairs[UNIT / 2];
            widen16(now.codes[r].w + 2 * block, pairs);
            sums[r] = __fmaf_rn(part.dot(pairs), NvFp4Weights::step(now.stored[r], block), sums[r]);
        }
    }
}

DEVICE void write_rows(const float *sums, i64 row, i64 rows, const float *stored_global, i64 is_divisor, u16 *y) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = warp_sum(sums[r]);
        if (threadIdx.x % WARP == r && row + r < rows) y[row + r] = result(sum, stored_global, is_divisor);
    }
}

GEMV(one_tile) {
    Matrix m = {packed, block_scales, rows, columns};
    i64 row = ((i64)blockIdx.x * WARPS + threadIdx.x / WARP) * ROWS;
    float sums[ROWS] = {};
    if (row >= rows) return;
#pragma unroll 1
    for (i64 tile = threadIdx.x % WARP; tile < columns / TILE; tile += WARP) {
        WeightTile<NvFp4Weights> now;
        now.load(m, row, tile);
        add_tile(now, tile, x, sums);
    }
    write_rows(sums, row, rows, stored_global, is_divisor, y);
}

GEMV(three_tiles) {
    Matrix m = {packed, block_scales, rows, columns};
    i64 row = ((i64)blockIdx.x * WARPS + threadIdx.x / WARP) * ROWS, tiles = columns / TILE, first = threadIdx.x % WARP;
    float sums[ROWS] = {};
    if (row >= rows) return;
    WeightTile<NvFp4Weights> now, next, last;
    if (first < tiles) now.load(m, row, first);
    if (first + WARP < tiles) next.load(m, row, first + WARP);
    for (i64 tile = first; tile < tiles; tile += WARP, now = next, next = last) {
        if (tile + 2 * WARP < tiles) last.load(m, row, tile + 2 * WARP);
        add_tile(now, tile, x, sums);
    }
    write_rows(sums, row, rows, stored_global, is_divisor, y);
}
