/* Matrices to FP8 and MXFP8 on the GPU: entry points of fp8_int.c, with the same bytes.
 *
 *   grid_amax_D(x, grid, amax_bits)              as amax_D of quantize.cu, for each block: the bits lie as scales do
 *   quantize_fp8_D(x, scales, grid, codes)       code = e4m3(x / scale)
 *   row_costs_D(x, scales, grid, row_costs)      squared errors of those codes: double[rows][blocks across], of a block's row each
 *   add_costs(row_costs, grid, costs)            adds these to double costs, which lie as scales do, row after row: the two are
 *                                                fp8_costs_D of fp8_int.c, which says how a row is added
 *
 * D is bf16, fp16 or fp32: the type of x, finite (grid_amax: any).  grid: five int64 on the device, grid.cuh says what; scales: float32.
 * Pointers are 16-byte aligned, those of grids 8.  Launch: 256 threads; grid_amax, quantize_fp8 grid = ceil(rows * columns / 8192),
 * row_costs grid = ceil(rows * blocks across / 32), add_costs grid = ceil(blocks that the rows lie in / 256).
 * Bytes equal fp4convert/numerics/fp8_int.py.  Bytes moved per bf16 element: grid_amax 2, quantize_fp8 2 + 1, row_costs 2.
 *
 * E4M3 is rounded by fp4.h on every target: sm_80 has no instruction for it, and a copy over PCIe takes longer.
 */
#include "grid.cuh"

enum { COST_LANES = 8 }; /* threads that share a block's row */

template <class T> DEVICE void load(const void *x, i64 at, u32 *w) {
    const Words4 *from = (const Words4 *)x + at / UNIT * (T::WORDS / 4);
#pragma unroll
    for (int i = 0; i < T::WORDS / 4; i++) {
        Words4 v = from[i];
#pragma unroll
        for (int k = 0; k < 4; k++) w[4 * i + k] = v.w[k];
    }
}

template <class T> struct Largest {
    const void *x;
    u32 *amax_bits;
    MEMBER bool is_whole(u32) const { return true; }
    MEMBER void raise(i64 block, u32 m) const {
        if (m > amax_bits[block]) atomicMax(amax_bits + block, m); /* an old one costs one atomic more */
    }
    MEMBER void unit(Place place) const {
        u32 w[T::WORDS];
        load<T>(x, place.at, w);
        raise(place.block, largest(w, T()));
    }
    MEMBER void one(Place place) const { raise(place.block, fp4_bits(T::one(x, place.at)) & 0x7FFFFFFFu); }
};

template <class T> struct ToFp8 {
    const void *x;
    const float *scales;
    u8 *codes;
    MEMBER bool is_whole(u32) const { return true; }
    MEMBER void unit(Place place) const {
        u32 w[T::WORDS], packed[UNIT / 4];
        float step = scales[place.block];
        load<T>(x, place.at, w);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v[8];
            u32 c[8];
            widened(w + half * (T::WORDS / 2), v, T());
#pragma unroll
            for (int i = 0; i < 8; i++) c[i] = e4m3_encode_signed(v[i] / step);
            packed[2 * half] = low_bytes(c[0], c[1], c[2], c[3]);
            packed[2 * half + 1] = low_bytes(c[4], c[5], c[6], c[7]);
        }
        *(Words4 *)(codes + place.at) = {packed[0], packed[1], packed[2], packed[3]};
    }
    MEMBER void one(Place place) const { codes[place.at] = (u8)e4m3_encode_signed(T::one(x, place.at) / scales[place.block]); }
};

DEVICE i64 blocks_across(const Grid *grid) { return (grid->columns - 1) / grid->block_columns + 1; }

template <class T> DEVICE void row_costs(const void *x, const float *scales, const Grid *grid, double *costs) {
    const i64 columns = grid->columns, width = grid->block_columns, across = blocks_across(grid);
    const i64 item = ((i64)blockIdx.x * THREADS + threadIdx.x) / COST_LANES, row = item / across, block = item - row * across;
    const bool is_there = row < grid->rows;
    const i64 n = is_there ? min(width, columns - block * width) : 0, start = row * columns + block * width;
    const float step = is_there ? scales[(grid->first_row + row) / grid->block_rows * across + block] : 1.0f;
    double sum = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x % COST_LANES; i < n; i += COST_LANES) {
        float value = T::one(x, start + i);
        double difference = (double)value - (double)__fmul_rn(e4m3_decode(e4m3_encode_signed(value / step)), step);
        sum += difference * difference;
    }
#pragma unroll
    for (int half = COST_LANES / 2; half; half /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, half);
    if (is_there && threadIdx.x % COST_LANES == 0) costs[item] = sum;
}

KERNEL(4) add_costs(const double *row_costs, const Grid *grid, double *costs) {
    const i64 across = blocks_across(grid), height = grid->block_rows, first_row = grid->first_row, rows = grid->rows;
    const i64 item = (i64)blockIdx.x * THREADS + threadIdx.x, below = item / across, block = item - below * across;
    const i64 block_row = first_row / height + below, begin = max(block_row * height - first_row, (i64)0);
    const i64 end = min((block_row + 1) * height - first_row, rows);
    if (begin >= end) return;
    double total = costs[block_row * across + block];
#pragma unroll 16
    for (i64 row = begin; row < end; row++) total += row_costs[row * across + block];
    costs[block_row * across + block] = total;
}

#define ENTRIES(dtype, T)                                                                                               \
    KERNEL(4) grid_amax_##dtype(const void *x, const Grid *grid, u32 *amax_bits) { each_unit(grid, Largest<T>{x, amax_bits}); } \
    KERNEL(4) quantize_fp8_##dtype(const void *x, const float *scales, const Grid *grid, u8 *codes) {                   \
        each_unit(grid, ToFp8<T>{x, scales, codes});                                                                    \
    }                                                                                                                   \
    KERNEL(4) row_costs_##dtype(const void *x, const float *scales, const Grid *grid, double *costs) {                  \
        row_costs<T>(x, scales, grid, costs);                                                                           \
    }
ENTRIES(bf16, Bf16)
ENTRIES(fp16, Fp16)
ENTRIES(fp32, Fp32)
