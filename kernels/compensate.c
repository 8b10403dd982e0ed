/* GPTQ over a group of columns, on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   compensate(w, sizes, upper, steps, block_of, errors, codes)
 *
 * sizes     int64 {k, n, rows, first, last}: the group is columns first to last - 1 of each of k blocks, 64 or fewer
 * w         float32 (k, n, rows), with the errors of earlier groups made up for; those of the group are as they are rounded
 * upper     float32 (k, n, n), the factor; steps: float32 (any, rows); block_of: int64 (k, n), the row of steps for a column
 * errors    float32 (k, last - first, rows), what each column lost over its diagonal; codes: uint8 (k, n, rows)
 *
 * fp4convert/calibration/methods/gptq.py has the formulas, and moves what lies behind the group.  Rows lie side by side: a column
 * of a tile gathers the errors of the columns before it, one after the other, fused where the processor can, as torch adds them.
 * Bytes moved: 13 an element of the group.
 */
#include "vector.h"

enum { MOST = 64, PARTS = 4, TILE = PARTS * SIDE }; /* columns of a group; vectors and rows of a tile */

INLINE f32s minus_product(f32s sum, float u, f32s e) {
#ifdef __FMA__
    for (int l = 0; l < SIDE; l++) sum[l] = __builtin_fmaf(-u, e[l], sum[l]);
    return sum;
#else
    return sum - u * e;
#endif
}

/* turned: the factor's columns of the group, each in a row of MOST; addresses: of the tile's first row; here: its rows. */
INLINE void round_tile(int columns, int64_t rows, size_t here, const float *restrict turned, const float *restrict steps,
                       const int64_t *restrict block_of, float *restrict w, float *restrict errors, uint8_t *restrict codes) {
    f32s lost[MOST][PARTS], x[PARTS], step[PARTS];
    for (int j = 0; j < columns; j++) {
        for (int p = 0; p < PARTS; p++) step[p] = all(1.0f), x[p] = all(0.0f);
        memcpy(x, w + j * rows, here * sizeof *w);
        memcpy(step, steps + block_of[j] * rows, here * sizeof *steps);
        for (int i = 0; i < j; i++)
            for (int p = 0; p < PARTS; p++) x[p] = minus_product(x[p], turned[j * MOST + i], lost[i][p]);
        memcpy(w + j * rows, x, here * sizeof *w);
        uint8_t found[TILE];
        for (int p = 0; p < PARTS; p++) {
            i32s code = e2m1_codes(x[p] / step[p]);
            lost[j][p] = (x[p] - e2m1_values(code) * step[p]) / turned[j * MOST + j];
            for (int l = 0; l < SIDE; l++) found[p * SIDE + l] = (uint8_t)code[l];
        }
        memcpy(errors + j * rows, lost[j], here * sizeof *errors);
        memcpy(codes + j * rows, found, here);
    }
}

void NAME(compensate)(float *restrict w, const int64_t *restrict sizes, const float *restrict upper, const float *restrict steps,
                      const int64_t *restrict block_of, float *restrict errors, uint8_t *restrict codes) {
    int64_t n = sizes[1], rows = sizes[2], first = sizes[3];
    int columns = (int)(sizes[4] - first);
    float turned[MOST * MOST];
    for (int64_t block = 0; block < sizes[0]; block++) {
        int64_t at = block * n + first;
        for (int j = 0; j < columns; j++)
            for (int i = 0; i <= j; i++) turned[j * MOST + i] = upper[(at + i) * n + first + j];
        for (int64_t row = 0; row < rows; row += TILE) {
            float *own = w + at * rows + row, *lost = errors + block * columns * rows + row;
            uint8_t *found = codes + at * rows + row;
            if (row + TILE <= rows) round_tile(columns, rows, TILE, turned, steps + row, block_of + at, own, lost, found);
            else round_tile(columns, rows, (size_t)(rows - row), turned, steps + row, block_of + at, own, lost, found);
        }
    }
}
