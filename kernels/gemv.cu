/* Products of packed matrices with vectors, on the GPU: y[v][row] = sum over columns of W[row][column] * x[v][column], in fp16.
 *
 *   gemv_W_X(packed, block_scales, stored_global, is_divisor, rows, columns, x, x_block_scales, x_global_scale, vectors, y)
 *
 *   W    nvfp4 or mxfp4, row-major, linear scales; columns % 64 == 0, so that rows of codes are whole sectors of 32 bytes;
 *        *stored_global a multiplier or, is_divisor, a divisor; unused by mxfp4
 *   X    bf16, fp16: x is (vectors, columns); x_block_scales and x_global_scale are unused
 *        nvfp4: x is packed (vectors, columns / 2), x_block_scales (vectors, columns / 16) E4M3, *x_global_scale a multiplier
 *   y    (vectors, rows) fp16, half to even; Inf from 65520 on
 *
 * Launch: 256 threads; grid.x = ceil(rows / 32), grid.y = ceil(vectors / 2), grid.z = matrices.  Pointers are 16-byte aligned.
 * A batch: of matrix z, packed codes, block scales, stored global scale, x with its scales, and y follow those of z - 1 without gaps.
 * The product of W as codec.dequantize has it, up to float32 rounding: a block of 16 is added up in float32 (exactly where X is
 * nvfp4), multiplied by its step, and added in float32; off by at most (columns + 4) * 2^-24 of the sum of magnitudes, before fp16.
 * The order of additions is fixed: lanes take every 32nd tile of 32 columns, then meet in a tree.
 * Bytes moved per element: NVFP4 0.5625, MXFP4 0.53125; the vectors stay in the caches.
 *
 * A warp owns four rows, so that a lane's piece of x serves four times; the next tile is on its way while this one is computed.
 */
#include "device.h"

enum { TILE = 32, ROWS = 4, WARPS = THREADS / WARP, VECTORS = 2 };

DEVICE void widen16(const u32 *codes, u32 *pairs) {
    widen8(codes[0], pairs);
    widen8(codes[1], pairs + 4);
}

/* ------------------------------------------------------------------------------------------- block scales of a tile of W */

struct NvFp4Weights {
    enum { SCALES = TILE / 16 }; /* of a tile */
    static MEMBER u32 load(const u8 *block_scales, i64 tile) { return ((const u16 *)block_scales)[tile]; }
    static MEMBER float step(u32 stored, int block) { return e4m3_decode(stored >> 8 * block & 0xFFu); }
    static MEMBER float global(const float *stored_global, i64 is_divisor) { return is_divisor ? 1.0f / *stored_global : *stored_global; }
};
struct MxFp4Weights {
    enum { SCALES = TILE / 32 };
    static MEMBER u32 load(const u8 *block_scales, i64 tile) { return block_scales[tile]; }
    static MEMBER float step(u32 stored, int) { return e8m0_decode(stored); }
    static MEMBER float global(const float *, i64) { return 1.0f; }
};

/* ------------------------------------------------------------------------------------------- 16 elements of a vector */

struct Vectors { const void *x; const u8 *block_scales; const float *global_scale; };

template <class T> struct HalfBlock {
    enum { NBYTES = UNIT * 2 }; /* of x */
    Words4 words[2];
    MEMBER void load(Vectors from, i64 block) {
        words[0] = ((const Words4 *)from.x)[block * 2];
        words[1] = ((const Words4 *)from.x)[block * 2 + 1];
    }
    /* pairs: the weights, as fp16 */
    MEMBER float dot(const u32 *pairs) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < UNIT / 2; i++) {
            u32 x = words[i / 4].w[i % 4];
            sum = __fmaf_rn(widen_fp16((u16)pairs[i]), T::low(x), sum);
            sum = __fmaf_rn(widen_fp16((u16)(pairs[i] >> 16)), T::high(x), sum);
        }
        return sum;
    }
    static MEMBER float global(Vectors) { return 1.0f; }
};

/* Products of two codes are multiples of 1/4 up to 36: eight of them add up exactly in fp16. */
struct NvFp4Block {
    enum { NBYTES = UNIT / 2 };
    Words2 codes;
    float block_scale;
    MEMBER void load(Vectors from, i64 block) {
        codes = ((const Words2 *)from.x)[block];
        block_scale = e4m3_decode(from.block_scales[block]);
    }
    MEMBER float dot(const u32 *pairs) const {
        u32 sums = 0, x[UNIT / 2];
        widen16(codes.w, x);
#pragma unroll
        for (int i = 0; i < UNIT / 2; i++) sums = fma2_fp16(pairs[i], x[i], sums);
        return __fmul_rn(__fadd_rn(widen_fp16((u16)sums), widen_fp16((u16)(sums >> 16))), block_scale);
    }
    static MEMBER float global(Vectors from) { return *from.global_scale; }
};

/* --------------------------------------------------------------------------------------------------------- the product */

struct Matrix { const u8 *packed, *block_scales; i64 rows, columns; };

/* A lane's tile of four rows. */
template <class W> struct WeightTile {
    Words4 codes[ROWS];
    u32 stored[ROWS];
    MEMBER void load(Matrix m, i64 row, i64 tile) {
        i64 tiles = m.columns / TILE;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            i64 at = (row + r < m.rows ? row + r : m.rows - 1) * tiles + tile;
            codes[r] = ((const Words4 *)m.packed)[at];
            stored[r] = W::load(m.block_scales, at);
        }
    }
};

/* Vectors first .. first + COUNT - 1, of which those beyond `vectors` are computed from the last one and dropped. */
template <class W, class X, int COUNT> DEVICE void gemv(Matrix m, float global_scale, Vectors x, i64 first, i64 vectors, u16 *y) {
    int lane = threadIdx.x % WARP;
    i64 row = ((i64)blockIdx.x * WARPS + threadIdx.x / WARP) * ROWS, tiles = m.columns / TILE;
    float sums[COUNT][ROWS] = {};
    if (row >= m.rows) return;
    WeightTile<W> now, next;
    if (lane < tiles) now.load(m, row, lane);
    for (i64 tile = lane; tile < tiles; tile += WARP, now = next) {
        if (tile + WARP < tiles) next.load(m, row, tile + WARP);
#pragma unroll
        for (int block = 0; block < 2; block++) {
            X part[COUNT];
#pragma unroll
            for (int v = 0; v < COUNT; v++) part[v].load(x, ((first + v < vectors ? first + v : vectors - 1) * tiles + tile) * 2 + block);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float step = __fmul_rn(W::step(now.stored[r], block), global_scale);
                u32 pairs[UNIT / 2];
                widen16(now.codes[r].w + 2 * block, pairs);
#pragma unroll
                for (int v = 0; v < COUNT; v++)
                    sums[v][r] = __fmaf_rn(part[v].dot(pairs), step, sums[v][r]);
            }
        }
    }
#pragma unroll
    for (int v = 0; v < COUNT; v++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float sum = sums[v][r];
#pragma unroll
            for (int distance = WARP / 2; distance; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
            if (lane == r && first + v < vectors && row + r < m.rows)
                y[(first + v) * m.rows + row + r] = (u16)narrow2_fp16(__fmul_rn(sum, X::global(x)), 0.0f);
        }
}

#define ENTRY(W, Weights, X, Block)                                                                                               \
    KERNEL(2) gemv_##W##_##X(const u8 *packed, const u8 *block_scales, const float *stored_global, i64 is_divisor, i64 rows,     \
                             i64 columns, const void *x, const u8 *x_block_scales, const float *x_global_scale, i64 vectors, u16 *y) {       \
        i64 z = blockIdx.z, tiles = z * rows * (columns / TILE), blocks = z * vectors * (columns / UNIT);                        \
        Matrix m = {packed + tiles * (TILE / 2), block_scales + tiles * Weights::SCALES, rows, columns};                         \
        Vectors own = {(const u8 *)x + blocks * Block::NBYTES, x_block_scales + blocks, x_global_scale + z};                     \
        float global_scale = Weights::global(stored_global + z, is_divisor);                                                     \
        y += z * vectors * rows;                                                                                                 \
        if (vectors == 1) gemv<Weights, Block, 1>(m, global_scale, own, 0, 1, y);                                                \
        else gemv<Weights, Block, VECTORS>(m, global_scale, own, (i64)blockIdx.y * VECTORS, vectors, y);                         \
    }
#define ENTRIES(W, Weights) ENTRY(W, Weights, bf16, HalfBlock<Bf16>) ENTRY(W, Weights, fp16, HalfBlock<Fp16>) ENTRY(W, Weights, nvfp4, NvFp4Block)
ENTRIES(nvfp4, NvFp4Weights)
ENTRIES(mxfp4, MxFp4Weights)
