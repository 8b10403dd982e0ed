/* Products with low-rank factors, and rounding that keeps what they say, on the CPU; compiled once per instruction set
 * (FP4_LEVEL), entered through cpu.c.
 *
 *   multiply(b, a, rows, inner, columns, y)     b: rows x inner, a: inner x columns, y: rows x columns; float32, row-major
 *   pull_to_nearest(x, steps, directions, pulls, sizes, y, pulled)
 *
 * multiply: y[i][j] begins at 0 and becomes fma(b[i][k], a[k][j], y[i][j]) for k = 0, 1, ...: one rounding each, in this order
 * on every level, which is what BLAS libraries do with few columns in b.
 *
 * pull_to_nearest: sizes is int64[4]: tiles of 16 rows, columns, rank, columns that share a step.  x and y are tiles x columns x
 * 16, steps is tiles x (columns / block) x 16: the rows of a tile lie side by side.  directions and pulls are columns x rank.
 * pulled is tiles x rank x 16: the sum over columns of (x - y) * directions, kept up to date.  For each column, in their order:
 * its own part is taken out of pulled; t = x + (pulled . pulls); y = e2m1(t / step) * step, half to even, saturating, +0 for
 * zeros; its new part is added.  Sums run over rank = 0, 1, ...; no fma, every operation is rounded to float32.
 *
 * Equal bit for bit to multiply and pull_to_nearest in fp4convert/numerics/low_rank.py.  Pointers are aligned to their types.
 * Bytes moved per element: multiply 4 for each of `inner` (from the first caches); the other 12 + 4 / block.
 * Adapters are merged where weights are read: there are no CUDA kernels for these.
 */
#include "vector.h"

enum { ROWS = 16, WIDE = 32 }; /* rows side by side; columns of y that stay in registers */

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
INLINE float fused(float b, float a, float c) { return __builtin_fmaf(b, a, c); }
#else
/* The product is exact in double; a sum that is not is rounded to odd, so that rounding it again to float32 is right. */
INLINE float fused(float b, float a, float c) {
    double product = (double)b * a, sum = product + c, rest = sum - product;
    double lost = (product - (sum - rest)) + (c - rest);
    int64_t bits = LOAD(int64_t, &sum);
    bits += (lost != 0) & ~bits & 1 ? ((lost > 0) == (sum > 0) ? 1 : -1) : 0;
    return (float)LOAD(double, &bits);
}
#endif

/* Sums of `height` rows, a constant, and of WIDE columns stay in registers. */
INLINE void multiply_tile(const float *restrict b, const float *restrict a, int height, int64_t inner, int64_t columns,
                          float *restrict y) {
    float sums[2][WIDE] = {{0}};
    for (int64_t k = 0; k < inner; k++)
        for (int i = 0; i < height; i++)
            for (int j = 0; j < WIDE; j++) sums[i][j] = fused(b[i * inner + k], a[k * columns + j], sums[i][j]);
    for (int i = 0; i < height; i++) memcpy(y + i * columns, sums[i], sizeof sums[i]);
}

void NAME(multiply)(const float *restrict b, const float *restrict a, int64_t rows, int64_t inner, int64_t columns,
                    float *restrict y) {
    int64_t wide = columns / WIDE * WIDE, i;
    memset(y, 0, (size_t)(rows * columns) * sizeof *y);
    for (int64_t first = 0; first < wide; first += WIDE) {
        for (i = 0; i + 2 <= rows; i += 2)
            multiply_tile(b + i * inner, a + first, 2, inner, columns, y + i * columns + first);
        if (i < rows) multiply_tile(b + i * inner, a + first, 1, inner, columns, y + i * columns + first);
    }
    for (i = 0; i < rows; i++)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t j = wide; j < columns; j++)
                y[i * columns + j] = fused(b[i * inner + k], a[k * columns + j], y[i * columns + j]);
}

/* Half to even among 0, 0.5, 1, 1.5, 2, 3, 4, 6: adding 1.5 * 2^23 units leaves whole units. */
INLINE float nearest(float q) {
    float magnitude = __builtin_fabsf(q), unit;
    magnitude = magnitude < 6 ? magnitude : 6;
    unit = magnitude < 2 ? 0.5f : magnitude < 4 ? 1.0f : 2.0f;
    float shift = 12582912.0f * unit;
    magnitude = (magnitude + shift) - shift;
    return q < 0 ? -magnitude : magnitude;
}

void NAME(pull_to_nearest)(const float *restrict x, const float *restrict steps, const float *restrict directions,
                           const float *restrict pulls, const int64_t *restrict sizes, float *restrict y, float *restrict pulled) {
    int64_t tiles = sizes[0], columns = sizes[1], rank = sizes[2], block = sizes[3];
    for (; tiles--; x += columns * ROWS, y += columns * ROWS, steps += columns / block * ROWS, pulled += rank * ROWS)
        for (int64_t j = 0; j < columns; j++) {
            const float *restrict d = directions + j * rank, *restrict p = pulls + j * rank;
            const float *restrict own = x + j * ROWS, *restrict step = steps + j / block * ROWS;
            float *restrict now = y + j * ROWS;
            float t[ROWS], error[ROWS];
            for (int l = 0; l < ROWS; l++) error[l] = own[l] - now[l], t[l] = own[l];
            for (int64_t k = 0; k < rank; k++) {
                float *restrict at = pulled + k * ROWS;
                for (int l = 0; l < ROWS; l++) at[l] = at[l] - error[l] * d[k];
                for (int l = 0; l < ROWS; l++) t[l] = t[l] + at[l] * p[k];
            }
            for (int l = 0; l < ROWS; l++) now[l] = nearest(t[l] / step[l]) * step[l] + 0.0f;
            for (int l = 0; l < ROWS; l++) error[l] = own[l] - now[l];
            for (int64_t k = 0; k < rank; k++)
                for (int l = 0; l < ROWS; l++) pulled[k * ROWS + l] = pulled[k * ROWS + l] + error[l] * d[k];
        }
}
