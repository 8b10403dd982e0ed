/* What statistics on block scales add up, on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   sum_cells(codes, values, rows, blocks, runs, count, room, sums)
 *   count_bytes(bytes, n, counts)              counts[b] += how many of the n bytes are b; 256 int64
 *
 * codes is rows x blocks bytes, row-major, each of which stands for one of 256 values (double), less the mean of all that are
 * finite, or for 0 where its value is not.  A cell has `run` rows, for each of `count` runs (int64, 1 or more), and then every
 * p-th row, for p = 128, 64, ... 1; of these it has w blocks, for w = 1, 2, 4, ... 64.  Only whole cells and periods count.
 * sums begins with zeros.  Of every such choice of rows and every w it gets the squares of the sums of cells, all elements in
 * cells, and the squares of these, each added up: (count + 8) x 7 x 3 doubles, and behind them the squares of whole rows' sums.
 * room: rows * (blocks + 1) + (rows + 129) * 3 * min(blocks, 64) doubles, whatever they hold.  Codes need no alignment.
 * Bytes moved: count_bytes 1 a byte; sum_cells per code 2, and in doubles 8 to and 16 from its value, 24 to the sums above every
 * row, and 16 / run from these for every run.
 * tests/kernels/test_scale_variance.py defines both; fp4convert/numerics/layout_detection.py says what they are for.
 * Block scales are judged where they are read: there are no CUDA kernels for these.
 */
#include "vector.h"

/* CELL_WIDTHS and PERIODS in fp4convert/numerics/backends/cpu.py must say the same: 7 widths up to 64, 8 periods down from 128. */
enum { WIDTHS = 7, WIDEST = 1 << (WIDTHS - 1), LONGEST = 128, PERIODS = 8, FIGURES = 3, TABLES = 4 };

/* Neighbours are often equal: each of four has a table of its own, so that no count waits for the one before. */
void NAME(count_bytes)(const uint8_t *restrict bytes, int64_t n, int64_t *restrict counts) {
    int64_t held[TABLES][256] = {{0}}, i = 0;
    for (; i + TABLES <= n; i += TABLES)
        for (int t = 0; t < TABLES; t++) held[t][bytes[i + t]]++;
    for (; i < n; i++) counts[bytes[i]]++;
    for (int t = 0; t < TABLES; t++)
        for (int b = 0; b < 256; b++) counts[b] += held[t][b];
}

/* What each byte stands for among those: its value less the mean of the finite ones, and 0 where it is not finite. */
INLINE void center(const uint8_t *restrict codes, int64_t n, const double *restrict values, double *restrict around) {
    int64_t counts[256] = {0}, known = 0;
    double total = 0;
    NAME(count_bytes)(codes, n, counts);
    for (int b = 0; b < 256; b++)
        if (__builtin_isfinite(values[b])) total += (double)counts[b] * values[b], known += counts[b];
    double mean = known ? total / (double)known : 0;
    for (int b = 0; b < 256; b++) around[b] = __builtin_isfinite(values[b]) ? values[b] - mean : 0;
}

/* Behind a row's elements the sums of 2, 4, ... neighbours; returns how many there are in all, less than twice as many. */
INLINE int64_t join(double *row, int64_t blocks) {
    int64_t begin = 0;
    for (int k = 1; k < WIDTHS; k++, begin += blocks, blocks /= 2)
        for (int64_t j = 0; j < blocks / 2; j++) row[begin + blocks + j] = row[begin + 2 * j] + row[begin + 2 * j + 1];
    return begin + blocks;
}

INLINE void add_squares(const double *restrict above, const double *restrict below, int64_t n, double *restrict power) {
    for (int64_t j = 0; j < n; j++) power[j] += (below[j] - above[j]) * (below[j] - above[j]);
}

/* Of one choice of rows: `power` of its cells, joined, and what those rows hold, as add_up leaves it. */
INLINE void add_figures(const double *restrict power, const double *restrict held, int64_t blocks, double *restrict sums) {
    double total = 0, squares = 0;
    for (int k = 0; k < WIDTHS; k++)
        for (int64_t left = blocks >> k; left; left--) sums[k * FIGURES] += *power++;
    for (int64_t k = WIDTHS - 1, j = 0; k >= 0; k--) {
        for (; j < blocks >> k << k; j++) total += held[j], squares += held[2 * blocks + j];
        sums[k * FIGURES + 1] += total, sums[k * FIGURES + 2] += squares;
    }
}

/* Row r of `above`: the sums of all rows before r, joined, and from 2 * blocks on the sums of their squares; how many are joined. */
INLINE int64_t add_up(const double *restrict x, int64_t rows, int64_t pitch, int64_t blocks, double *restrict above,
                      double *restrict of_rows) {
    memset(above, 0, (size_t)(3 * blocks) * sizeof *above);
    int64_t joined = join(above, blocks);
    for (int64_t row = 0; row < rows; row++, x += pitch, above += 3 * blocks) {
        double *next = above + 3 * blocks;
        for (int64_t j = 0; j < blocks; j++) next[j] = above[j] + x[j];
        for (int64_t j = 0; j < blocks; j++) next[2 * blocks + j] = above[2 * blocks + j] + x[j] * x[j];
        for (int64_t j = 0; j < blocks; j++) of_rows[row] += x[j];
        join(next, blocks);
    }
    return joined;
}

/* Every p-th row, each from those of 2 p and the rows behind whole periods of 2 p; `held` has 128 rows for their sums. */
INLINE void sum_periods(const double *restrict x, int64_t rows, int64_t pitch, int64_t blocks, const double *restrict above,
                        double *restrict held, double *restrict sums) {
    const double none[2 * WIDEST] = {0};
    memset(held, 0, (size_t)(LONGEST * 3 * blocks) * sizeof *held);
    for (int64_t row = 0; row < rows / LONGEST * LONGEST; row++)
        for (int64_t j = 0; j < blocks; j++) held[row % LONGEST * 3 * blocks + j] += x[row * pitch + j];
    for (int64_t period = LONGEST; period; period /= 2, sums += WIDTHS * FIGURES) {
        double power[2 * WIDEST] = {0};
        for (int64_t row = 0; row < period; row++) {
            double *sum = held + row * 3 * blocks;
            add_squares(none, sum, join(sum, blocks), power);
        }
        int64_t half = period / 2, whole = rows / period * period;
        add_figures(power, above + whole * 3 * blocks, blocks, sums);
        for (int64_t row = 0; row < half; row++) {
            const double *rest = whole + half <= rows ? x + (whole + row) * pitch : none;
            double *sum = held + row * 3 * blocks;
            for (int64_t j = 0; j < blocks; j++) sum[j] += sum[half * 3 * blocks + j] + rest[j];
        }
    }
}

void NAME(sum_cells)(const uint8_t *restrict codes, const double *restrict values, int64_t rows, int64_t blocks,
                     const int64_t *restrict runs, int64_t count, double *restrict room, double *restrict sums) {
    double *x = room, *of_rows = x + rows * blocks, *above = of_rows + rows;
    double around[256];
    center(codes, rows * blocks, values, around);
    for (int64_t i = 0; i < rows * blocks; i++) x[i] = around[codes[i]];
    memset(of_rows, 0, (size_t)rows * sizeof *of_rows);
    for (int64_t first = 0; first < blocks; first += WIDEST) {
        int64_t width = blocks - first < WIDEST ? blocks - first : WIDEST, pitch = 3 * width;
        int64_t joined = add_up(x + first, rows, blocks, width, above, of_rows);
        for (int64_t k = 0; k < count; k++) {
            double power[2 * WIDEST] = {0};
            for (int64_t end = runs[k]; end <= rows; end += runs[k])
                add_squares(above + (end - runs[k]) * pitch, above + end * pitch, joined, power);
            add_figures(power, above + rows / runs[k] * runs[k] * pitch, width, sums + k * WIDTHS * FIGURES);
        }
        sum_periods(x + first, rows, blocks, width, above, above + (rows + 1) * pitch, sums + count * WIDTHS * FIGURES);
    }
    for (int64_t row = 0; row < rows; row++) sums[(count + PERIODS) * WIDTHS * FIGURES] += of_rows[row] * of_rows[row];
}
