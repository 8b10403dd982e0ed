/* Matrices of FP8 and of integer codes on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   decode_fp8(codes, scales, grid, y)                     y = e4m3(code) * scale
 *   amax_fp8(codes, scales, grid, amax_bits)               *amax_bits = max(*amax_bits, float32 bits of max |y|); NaN wins
 *   decode_int4(packed, scales, zero_points, grid, y)      y = (code - 8 - zero_point) * scale; zero_points may be null: all 0
 *   decode_int8(packed, scales, zero_points, grid, y)      y = (code - 128 - zero_point) * scale
 *   grid_amax_D(x, grid, amax_bits)                        as amax_D, for each block: the bits lie as scales do
 *   quantize_fp8_D(x, scales, grid, codes)                 code = e4m3(x / scale); x is finite
 *   fp8_costs_D(x, scales, grid, costs)                    adds the squared errors of those codes to float64 costs, which lie as
 *                                                          scales do: of a block's row in eight lanes (element i in lane i % 8),
 *                                                          then by halves, then row after row
 *   round_bf16(x, n, y)                                    half to even; NaN stays NaN
 *
 * grid: five int64, rows, columns, block_rows, block_columns and the first row's distance from the first row that scales covers.
 * Row r, column c has scale [(first_row + r) / block_rows][c / block_columns], so edge blocks may be cut.  Rows of int4 and int8
 * codes begin at whole 32-bit items, low codes first.  D is bf16, fp16 or fp32; x, y, scales and zero_points are aligned to their
 * type, codes and packed need not be.  Bytes equal fp4convert/numerics/fp8_int.py.  Bytes moved per element: FP8 1 + 4, int4 0.5 + 4.
 * decode.cu has those that decode; where an FP8 matrix is on a GPU already, amax is found in its float32.
 */
#include "vector.h"

typedef struct { int64_t rows, columns, block_rows, block_columns, first_row; } Grid;

enum { PIECE = 512 }; /* integer codes unpacked at once */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The grid row of each row in turn, as scales of its blocks. */
INLINE const float *scales_of_row(const Grid *grid, const float *scales, int64_t row) {
    int64_t width = (grid->columns + grid->block_columns - 1) / grid->block_columns;
    return scales + (grid->first_row + row) / grid->block_rows * width;
}

/* --------------------------------------------------------------------------------------------------------------- FP8 */

INLINE void decode_span(const uint8_t *restrict codes, int64_t n, float step, float *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = e4m3_decode(codes[i]) * step;
}

void NAME(decode_fp8)(const uint8_t *restrict codes, const float *restrict scales, const Grid *restrict grid, float *restrict y) {
    for (int64_t row = 0; row < grid->rows; row++, codes += grid->columns, y += grid->columns) {
        const float *step = scales_of_row(grid, scales, row);
        for (int64_t start = 0; start < grid->columns; start += grid->block_columns, step++)
            decode_span(codes + start, smaller(grid->block_columns, grid->columns - start), *step, y + start);
    }
}

/* Rounding is monotone, so the largest code of a block makes its largest value. */
void NAME(amax_fp8)(const uint8_t *restrict codes, const float *restrict scales, const Grid *restrict grid,
                    uint32_t *restrict amax_bits) {
    uint32_t largest = *amax_bits;
    for (int64_t row = 0; row < grid->rows; row++, codes += grid->columns) {
        const float *step = scales_of_row(grid, scales, row);
        for (int64_t start = 0; start < grid->columns; start += grid->block_columns, step++) {
            int64_t n = smaller(grid->block_columns, grid->columns - start);
            uint8_t code = 0;
            for (int64_t i = start; i < start + n; i++) {
                uint8_t magnitude = codes[i] & 0x7F;
                code = magnitude > code ? magnitude : code;
            }
            uint32_t bits = fp4_bits(e4m3_decode(code) * *step) & 0x7FFFFFFFu;
            largest = bits > largest ? bits : largest;
        }
    }
    *amax_bits = largest;
}

/* ---------------------------------------------------------------------------------------------------------- integers */

/* n codes from the item at `packed` on; n is even or the row ends there. */
INLINE void unpack4(const uint8_t *restrict packed, int64_t n, uint8_t *restrict codes) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        u16x8 pairs = words_of8(packed + i / 2);
        STORE(codes + i, (pairs | (pairs << 4)) & 0x0F0F);
    }
    for (; i < n; i++) codes[i] = (packed[i / 2] >> (i % 2 * 4)) & 15;
}

INLINE void unpack8(const uint8_t *restrict packed, int64_t n, uint8_t *restrict codes) { memcpy(codes, packed, (size_t)n); }

/* Integers below 2^24: every difference is exact. */
#define DEFINE_DECODE_INTEGERS(bits)                                                                                         \
    void NAME(decode_int##bits)(const uint8_t *restrict packed, const float *restrict scales, const float *restrict zeros,   \
                                const Grid *restrict grid, float *restrict y) {                                              \
        const int64_t columns = grid->columns, width = grid->block_columns, row_nbytes = (columns * bits + 31) / 32 * 4;     \
        uint8_t codes[PIECE];                                                                                                \
        for (int64_t row = 0; row < grid->rows; row++, packed += row_nbytes, y += columns)                                   \
            for (int64_t first = 0; first < columns; first += PIECE) {                                                       \
                int64_t last = smaller(first + PIECE, columns);                                                              \
                unpack##bits(packed + first * bits / 8, last - first, codes);                                                \
                for (int64_t start = first, end; start < last; start = end) {                                                \
                    int64_t block = start / width, here = scales_of_row(grid, scales, row) - scales + block;                 \
                    float step = scales[here], origin = (float)(1 << (bits - 1)) + (zeros ? zeros[here] : 0.0f);             \
                    end = smaller((block + 1) * width, last);                                                                \
                    for (int64_t i = start; i < end; i++) y[i] = ((float)(int)codes[i - first] - origin) * step;             \
                }                                                                                                            \
            }                                                                                                                \
    }
DEFINE_DECODE_INTEGERS(4)
DEFINE_DECODE_INTEGERS(8)

/* --------------------------------------------------------------------------------------------------- to FP8, to bf16 */

INLINE float fp4_from_fp32(float value) { return value; }

/* Bits of the largest magnitude of n values, as float32; NaN wins. */
#define DEFINE_LARGEST(dtype)                                                        \
    INLINE uint32_t largest_##dtype(const uint16_t *restrict x, int64_t n) {         \
        uint16_t largest = 0;                                                        \
        for (int64_t i = 0; i < n; i++) {                                            \
            uint16_t magnitude = x[i] & 0x7FFF;                                      \
            largest = magnitude > largest ? magnitude : largest;                     \
        }                                                                            \
        return fp4_bits(fp4_from_##dtype(largest)) & 0x7FFFFFFFu;                    \
    }
DEFINE_LARGEST(bf16)
DEFINE_LARGEST(fp16)
INLINE uint32_t largest_fp32(const float *restrict x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = fp4_bits(x[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Runs the statement for every row's part of a block: n values from x on, whose block is number `at` of the grid. */
#define EACH_SPAN(statement)                                                                     \
    const int64_t columns = grid->columns, width = (columns + grid->block_columns - 1) / grid->block_columns; \
    for (int64_t row = 0; row < grid->rows; row++) {                                             \
        int64_t at = (grid->first_row + row) / grid->block_rows * width;                         \
        for (int64_t start = 0; start < columns; start += grid->block_columns, at++) {           \
            int64_t n = smaller(grid->block_columns, columns - start), here = row * columns + start; \
            statement                                                                            \
        }                                                                                        \
    }

enum { COST_LANES = 8 };

INLINE double squared_error(float x, float step) {
    double difference = (double)x - (double)(e4m3_decode(e4m3_encode_signed(x / step)) * step);
    return difference * difference;
}

#define DEFINE_TO_FP8(dtype, type)                                                                                         \
    void NAME(grid_amax_##dtype)(const type *restrict x, const Grid *restrict grid, uint32_t *restrict amax_bits) {        \
        EACH_SPAN(uint32_t bits = largest_##dtype(x + here, n); amax_bits[at] = bits > amax_bits[at] ? bits : amax_bits[at];) \
    }                                                                                                                      \
    void NAME(quantize_fp8_##dtype)(const type *restrict x, const float *restrict scales, const Grid *restrict grid,       \
                                    uint8_t *restrict codes) {                                                             \
        EACH_SPAN(float step = scales[at]; for (int64_t i = here; i < here + n; i++)                                       \
                      codes[i] = (uint8_t)e4m3_encode_signed(fp4_from_##dtype(x[i]) / step);)                              \
    }                                                                                                                      \
    INLINE double cost_##dtype(const type *restrict x, int64_t n, float step) {                                            \
        double lanes[COST_LANES] = {0};                                                                                         \
        int64_t i = 0;                                                                                                     \
        for (; i + COST_LANES <= n; i += COST_LANES)                                                                                 \
            for (int lane = 0; lane < COST_LANES; lane++) lanes[lane] += squared_error(fp4_from_##dtype(x[i + lane]), step);    \
        for (int lane = 0; i + lane < n; lane++) lanes[lane] += squared_error(fp4_from_##dtype(x[i + lane]), step);        \
        for (int half = COST_LANES / 2; half; half /= 2)                                                                        \
            for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];                                     \
        return lanes[0];                                                                                                   \
    }                                                                                                                      \
    void NAME(fp8_costs_##dtype)(const type *restrict x, const float *restrict scales, const Grid *restrict grid,          \
                                 double *restrict costs) {                                                                 \
        EACH_SPAN(costs[at] += cost_##dtype(x + here, n, scales[at]);)                                                     \
    }

DEFINE_TO_FP8(bf16, uint16_t)
DEFINE_TO_FP8(fp16, uint16_t)
DEFINE_TO_FP8(fp32, float)

void NAME(round_bf16)(const float *restrict x, int64_t n, uint16_t *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = fp4_to_bf16(x[i]);
}
