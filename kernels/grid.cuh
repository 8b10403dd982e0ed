/* Matrices whose blocks of rows and columns have a scale each: how the elements are shared out, for decode.cu and fp8.cu.
 *
 * Row r, column c is in block [(first_row + r) / block_rows][c / block_columns]; columns and blocks are below 2^31.
 * Launch: 256 threads, grid = ceil(rows * columns / 8192).  Any shape: units of 16 elements are counted through all rows; one that
 * lies in several rows or blocks, or is cut, goes by single elements.
 */
#ifndef FP4_GRID_CUH
#define FP4_GRID_CUH

#include "device.h"

struct Grid { i64 rows, columns, block_rows, block_columns, first_row; };

/* Place of an element: counted through all rows, by row and column, and the number of its block in the grid. */
struct Place { i64 at, row; u32 column; i64 block; };

/*   is_whole(column)   whether a unit that begins in this column may be taken at once
 *   unit(place)        does that
 *   one(place)         does it for one element */
template <class Work> DEVICE void each_unit(const Grid *grid, Work work) {
    const i64 n = grid->rows * grid->columns, start = (i64)blockIdx.x * (LAUNCH_UNITS * UNIT), first_row = grid->first_row;
    const u32 columns = (u32)grid->columns, width = (u32)grid->block_columns, height = (u32)grid->block_rows;
    const u32 across = (columns - 1) / width + 1;
    const i64 row_here = start / columns; /* the row, and the column, of this block of threads' first element */
    const u32 column_here = (u32)(start - row_here * columns);
#pragma unroll 1
    for (int i = 0; i < UNITS; i++) {
        const u32 within = (threadIdx.x + i * THREADS) * UNIT;
        const i64 at = start + within;
        if (at >= n) return;
        const u32 below = (column_here + within) / columns;
        i64 row = row_here + below;
        u32 column = column_here + within - below * columns, block = column / width;
        const u32 block_left = width - (column - block * width), left = min(block_left, columns - column);
        if (left >= UNIT && work.is_whole(column)) {
            work.unit(Place{at, row, column, (i64)((u64)(first_row + row) / height) * across + block});
        } else {
#pragma unroll 1
            for (int k = 0; k < UNIT && at + k < n; k++) {
                work.one(Place{at + k, row, column, (i64)((u64)(first_row + row) / height) * across + column / width});
                if (++column == columns) column = 0, row++;
            }
        }
    }
}

#endif
