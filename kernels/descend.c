/* Codes and block scales that cost less under all of H, on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   descend_nvfp4(x, h, sizes, global_scale, packed, block_scales, found_packed, found_scales, room)    columns % 16 == 0
 *   descend_mxfp4(x, h, sizes, packed, block_scales, found_packed, found_scales, room)                  columns % 32 == 0
 *
 * x             float32 (rows, columns), finite
 * h             float32 (ceil(columns / width), width, width): blocks of H along its diagonal, symmetric, the diagonal above 0
 * sizes         int64 {rows, columns, width, passes, rows of a panel}; width: a multiple of the format's block; a panel's: of 16
 * packed        what came in, with its block scales; found_packed and found_scales: what goes out; they share no byte
 * room          whatever it holds, aligned to 64: as many bytes as descent.py says
 *
 * Equal bit for bit to descend in fp4convert/numerics/descent.py, which has the formulas, on every level: a row is a lane of its own,
 * and the order of its additions is fixed.
 * The columns of a block scale are a strip of H, turned, that all rows of a panel share.  The pull of what came in is one dense
 * product with each strip, in float32.  What changes later is little, so that rows keep lists of it; products with these are in double.
 * Bytes moved: of H 4 a pass and panel; of an element 13 a pass, and 4 * width / SIDE once.
 */
#include "vector.h"

enum { HALF = SIDE / 2, SUMS_AT_ONCE = SIDE == 16 ? 16 : 8 }; /* sums that registers hold beside the rest */

typedef VECTOR(double, 4 * SIDE) f64h; /* of HALF lanes */
typedef VECTOR(float, 2 * SIDE) f32h;
typedef VECTOR(uint8_t, SIDE) u8s;

/* Scales of a format: what one code unit is worth under each byte. */
typedef struct { float step[256]; int lowest, highest, neighbours; } steps256;

/* What the error of a column has grown by. */
typedef struct { double delta; int64_t column; } change;

/* Rows of a panel in one block of H, with n columns.
 * Side by side, [row / SIDE][column][row % SIDE]: errors and their pull (H e) as they came in; values, codes and scales as they are.
 * Row by row: moved, H times all changes; changes of the last pass and of this one, and how many.  passed: of the last pass's. */
typedef struct {
    int64_t rows, n, capacity;
    double *moved;
    change *changes[2];
    int64_t *counts[2], *passed;
    float *error, *pull, *value, *strip;
    uint8_t *codes, *scales;
} panel;

/* SIDE codes of a row, from an even one on. */
INLINE i32s codes_at(const uint8_t *packed) {
    i32s codes;
    for (int l = 0; l < SIDE; l++) codes[l] = packed[l / 2] >> l % 2 * 4 & 15;
    return codes;
}

/* h: rows of a block of H, the first of which is the strip's. */
INLINE void turn_strip(const float *restrict h, int64_t width, int64_t n, int block, float *restrict strip) {
    for (int64_t j = 0; j < n; j += SIDE)
        for (int i = 0; i < block; i += SIDE) {
            f32s tile[SIDE];
            for (int l = 0; l < SIDE; l++) tile[l] = LOAD(f32s, h + (i + l) * width + j);
            transpose(tile);
            for (int l = 0; l < SIDE; l++) STORE(strip + (j + l) * block + i, tile[l]);
        }
}

/* error: of SIDE rows; pull: of them at the strip's columns, in rows of n; added j after j. */
INLINE void pull_of(const float *restrict error, const float *restrict strip, int64_t n, int block, float *restrict pull) {
    for (int i = 0; i < block; i += SUMS_AT_ONCE) {
        f32s sums[SUMS_AT_ONCE] = {{0}};
        for (int64_t j = 0; j < n; j++) {
            f32s e = LOAD(f32s, error + j * SIDE);
#pragma GCC unroll 16
            for (int k = 0; k < SUMS_AT_ONCE; k++) sums[k] += e * strip[j * block + i + k];
        }
        for (int k = 0; k < SUMS_AT_ONCE; k += SIDE) {
            transpose(sums + k);
            for (int l = 0; l < SIDE; l++) STORE(pull + l * n + i + k, sums[k + l]);
        }
    }
}

/* moved: of a row at the strip's columns. */
INLINE void move(double *restrict moved, const change *restrict changes, int64_t count, const float *restrict strip, int block) {
    f64h sums[32 / HALF];
    for (int i = 0; i < block / HALF; i++) sums[i] = LOAD(f64h, moved + i * HALF);
    for (int64_t c = 0; c < count; c++) {
        const float *h = strip + changes[c].column * block;
        for (int i = 0; i < block / HALF; i++)
            sums[i] += changes[c].delta * __builtin_convertvector(LOAD(f32h, h + i * HALF), f64h);
    }
    for (int i = 0; i < block / HALF; i++) STORE(moved + i * HALF, sums[i]);
}

/* What changed since the strip that begins at `first` was here: of the last pass from it on, of this one before it. */
INLINE void catch_up(panel *p, int64_t row, int64_t first, int pass, int block) {
    const change *last = p->changes[(pass + 1) % 2] + row * p->capacity;
    int64_t passed = p->passed[row], count = p->counts[(pass + 1) % 2][row];
    while (passed < count && last[passed].column < first) passed++;
    p->passed[row] = passed;
    double *moved = p->moved + row * p->n + first;
    move(moved, last + passed, count - passed, p->strip, block);
    move(moved, p->changes[pass % 2] + row * p->capacity, p->counts[pass % 2][row], p->strip, block);
}

/* All that pulls at SIDE columns of a row. */
INLINE f32s pull_at(const panel *p, int64_t i) {
    f32s sum;
    for (int half = 0; half < SIDE; half += HALF) {
        f64h both = LOAD(f64h, p->moved + i + half) + __builtin_convertvector(LOAD(f32h, p->pull + i + half), f64h);
        STORE((float *)&sum + half, __builtin_convertvector(both, f32h));
    }
    return sum;
}

INLINE f32s gather(const float *table, i32s index) {
    f32s found;
    for (int l = 0; l < SIDE; l++) found[l] = table[index[l]];
    return found;
}

/* Every column in turn to the nearest value under these steps; what that adds to the cost. p: pulls, which follow.
 * own: the strip's own rows of H; inverse: of its diagonal. */
INLINE f32s sweep(f32s *restrict p, const f32s *restrict values, f32s step, const float *restrict own, const float *restrict inverse,
                  int block, i32s *restrict codes) {
    f32s cost = {0};
#pragma GCC unroll 16
    for (int j = 0; j < block; j++) {
        codes[j] = e2m1_codes((values[j] + p[j] * inverse[j]) / step);
        f32s delta = values[j] - e2m1_values(codes[j]) * step;
        cost += delta * (2.0f * p[j] + delta * own[j * block + j]);
#pragma GCC unroll 16
        for (int k = j + 1; k < block; k++) p[k] += delta * own[j * block + k];
    }
    return cost;
}

/* SIDE rows at a strip: the scale, and under it the codes, of least cost. */
INLINE void choose(panel *p, int64_t group, int64_t first, int pass, const steps256 *table, int block) {
    int neighbours = pass == 0 ? table->neighbours : 1;
    f32s pulls[32], values[32], least = {0};
    i32s codes[32], best[32], own, scale;
    float inverse[32];
    const float *strip = p->strip + first * block;
    int64_t at = (group * p->n + first) * SIDE, rows = p->rows - group * SIDE;
    uint8_t *scale_bytes = p->scales + at / block;
    own = scale = __builtin_convertvector(LOAD(u8s, scale_bytes), i32s);
    for (int j = 0; j < block; j++) {
        inverse[j] = 1.0f / strip[j * block + j];
        values[j] = LOAD(f32s, p->value + at + j * SIDE);
        best[j] = __builtin_convertvector(LOAD(u8s, p->codes + at + j * SIDE), i32s);
    }
    for (int j = 0; j < block; j += SIDE) {
        for (int l = 0; l < SIDE; l++) pulls[j + l] = pull_at(p, (group * SIDE + l) * p->n + first + j);
        transpose(pulls + j);
    }
    for (int tried = 0; tried <= 2 * neighbours; tried++) {
        f32s following[32];
        i32s candidate = own + (tried % 2 ? -(tried + 1) / 2 : tried / 2);
        i32s is_valid = (candidate >= table->lowest) & (candidate <= table->highest);
        memcpy(following, pulls, block * sizeof *pulls);
        f32s step = gather(table->step, candidate & 0xFF);
        f32s cost = sweep(following, values, step, strip, inverse, block, codes);
        i32s is_better = (cost < least) & is_valid;
        if (!any(is_better)) continue;
        least = either(is_better, cost, least);
        scale = (scale & ~is_better) | (candidate & is_better);
        for (int j = 0; j < block; j++) best[j] = (best[j] & ~is_better) | (codes[j] & is_better);
    }
    if (!any(least < 0.0f)) return;
    f32s step = gather(table->step, scale);
    STORE(scale_bytes, __builtin_convertvector(scale, u8s));
    for (int j = 0; j < block; j++) {
        f32s value = either(least < 0.0f, e2m1_values(best[j]) * step, values[j]);
        STORE(p->codes + at + j * SIDE, __builtin_convertvector(best[j], u8s));
        STORE(p->value + at + j * SIDE, value);
        if (!any(value != values[j])) continue;
        for (int l = 0; l < SIDE && l < rows; l++) {
            if (value[l] == values[j][l]) continue;
            int64_t row = group * SIDE + l, *count = &p->counts[pass % 2][row];
            p->changes[pass % 2][row * p->capacity + (*count)++] = (change){(double)values[j][l] - (double)value[l], first + j};
        }
    }
}

/* A pass over the strips; the last of them only finds what the others moved. */
INLINE void pass_over(panel *p, const float *h, int64_t width, int pass, int is_last, const steps256 *table, int block) {
    memset(p->counts[pass % 2], 0, p->rows * sizeof(int64_t));
    memset(p->passed, 0, p->rows * sizeof(int64_t));
    for (int64_t first = 0; first < p->n; first += block) {
        turn_strip(h + first * width, width, p->n, block, p->strip);
        for (int64_t group = 0; group * SIDE < p->rows; group++) {
            int64_t at = group * p->n * SIDE, row = group * SIDE, end = row + SIDE < p->rows ? row + SIDE : p->rows;
            if (pass == 0 && !is_last) pull_of(p->error + at, p->strip, p->n, block, p->pull + at + first);
            for (; row < end; row++) catch_up(p, row, first, pass, block);
            if (!is_last) choose(p, group, first, pass, table, block);
        }
    }
}

/* A matrix, and where a panel of it begins. */
typedef struct { const float *x; const uint8_t *packed, *scales; uint8_t *found_packed, *found_scales; } rows_of;

/* Values of SIDE columns of a row as they came in: of its c-th code on. */
INLINE f32s values_at(rows_of m, int64_t c, const steps256 *table, int block) {
    return e2m1_values(codes_at(m.packed + c / 2)) * table->step[m.scales[c / block]];
}

INLINE void open_panel(panel *p, rows_of m, int64_t columns, const steps256 *table, int block) {
    int64_t groups = (p->rows + SIDE - 1) / SIDE;
    memset(p->moved, 0, groups * SIDE * p->n * sizeof(double));
    memset(p->counts[1], 0, p->rows * sizeof(int64_t));
    memset(p->scales, table->lowest, groups * SIDE * (p->n / block));
    for (int64_t first = 0; first < p->rows; first += SIDE)
        for (int64_t j = 0; j < p->n; j += SIDE) {
            f32s codes[SIDE] = {{0}}, values[SIDE] = {{0}}, errors[SIDE] = {{0}};
            for (int l = 0; l < SIDE && first + l < p->rows; l++) {
                int64_t i = (first + l) * columns + j;
                codes[l] = (f32s)codes_at(m.packed + i / 2), values[l] = values_at(m, i, table, block);
                errors[l] = LOAD(f32s, m.x + i) - values[l];
                p->scales[first * p->n / block + j / block * SIDE + l] = m.scales[i / block];
            }
            transpose(codes), transpose(values), transpose(errors);
            for (int k = 0; k < SIDE; k++) {
                int64_t at = first * p->n + (j + k) * SIDE;
                STORE(p->codes + at, __builtin_convertvector((i32s)codes[k], u8s));
                STORE(p->value + at, values[k]);
                STORE(p->error + at, errors[k]);
            }
        }
}

/* What SIDE rows were made, where they cost less than what came in. */
INLINE void close_rows(const panel *p, int64_t first, rows_of m, int64_t columns, const steps256 *table, int block) {
    double cost[SIDE] = {0};
    int64_t rows = p->rows - first < SIDE ? p->rows - first : SIDE;
    for (int64_t j = 0; j < p->n; j += SIDE) {
        f32s values[SIDE];
        for (int k = 0; k < SIDE; k++) values[k] = LOAD(f32s, p->value + first * p->n + (j + k) * SIDE);
        transpose(values);
        for (int64_t l = 0; l < rows; l++) {
            f32s x = LOAD(f32s, m.x + l * columns + j), before = values_at(m, l * columns + j, table, block);
            const double *moved = p->moved + (first + l) * p->n + j;
            for (int k = 0; k < SIDE; k++) cost[l] += (((double)x[k] - before[k]) + ((double)x[k] - values[l][k])) * moved[k];
        }
    }
    for (int64_t l = 0; l < rows; l++) {
        if (!(cost[l] < 0)) continue;
        const uint8_t *codes = p->codes + first * p->n + l, *scales = p->scales + first * (p->n / block) + l;
        for (int64_t j = 0; j < p->n; j += 2)
            m.found_packed[(l * columns + j) / 2] = (uint8_t)(codes[j * SIDE] | codes[(j + 1) * SIDE] << 4);
        for (int64_t b = 0; b < p->n / block; b++) m.found_scales[l * columns / block + b] = scales[b * SIDE];
    }
}

/* Where everything lies in the room, for `rows` rows of `n` columns. */
INLINE panel laid_out(uint8_t *room, int64_t rows, int64_t n) {
    int64_t size = rows * n;
    panel p = {.capacity = n, .moved = (double *)room};
    p.changes[0] = (change *)(p.moved + size), p.changes[1] = p.changes[0] + size;
    p.counts[0] = (int64_t *)(p.changes[1] + size), p.counts[1] = p.counts[0] + rows, p.passed = p.counts[1] + rows;
    p.error = (float *)(p.passed + rows), p.pull = p.error + size, p.value = p.pull + size, p.strip = p.value + size;
    p.codes = (uint8_t *)(p.strip + n * 32), p.scales = p.codes + size;
    return p;
}

INLINE void descend(rows_of m, const float *h, const int64_t *sizes, const steps256 *table, int block, uint8_t *room) {
    int64_t rows = sizes[0], columns = sizes[1], width = sizes[2], passes = sizes[3], height = sizes[4];
    memcpy(m.found_packed, m.packed, rows * columns / 2);
    memcpy(m.found_scales, m.scales, rows * columns / block);
    panel p = laid_out(room, height, width);
    for (int64_t first = 0; first < columns; first += width)
        for (int64_t row = 0; row < rows; row += height) {
            int64_t i = row * columns + first;
            rows_of part = {m.x + i, m.packed + i / 2, m.scales + i / block, m.found_packed + i / 2, m.found_scales + i / block};
            p.rows = row + height < rows ? height : rows - row;
            p.n = first + width < columns ? width : columns - first;
            open_panel(&p, part, columns, table, block);
            for (int pass = 0; pass <= passes; pass++) pass_over(&p, h + first * width, width, pass, pass == passes, table, block);
            for (int64_t first = 0; first < p.rows; first += SIDE) {
                close_rows(&p, first, part, columns, table, block);
                part.x += SIDE * columns, part.packed += SIDE * columns / 2, part.scales += SIDE * columns / block;
                part.found_packed += SIDE * columns / 2, part.found_scales += SIDE * columns / block;
            }
        }
}

void NAME(descend_nvfp4)(const float *x, const float *h, const int64_t *sizes, const float *global_scale, const uint8_t *packed,
                         const uint8_t *block_scales, uint8_t *found_packed, uint8_t *found_scales, uint8_t *room) {
    steps256 table = {.lowest = SMALLEST_CODE, .highest = LARGEST_CODE, .neighbours = NVFP4_NEIGHBOURS};
    for (int byte = 0; byte < 256; byte++) table.step[byte] = e4m3_decode(byte) * *global_scale;
    descend((rows_of){x, packed, block_scales, found_packed, found_scales}, h, sizes, &table, 16, room);
}

void NAME(descend_mxfp4)(const float *x, const float *h, const int64_t *sizes, const uint8_t *packed, const uint8_t *block_scales,
                         uint8_t *found_packed, uint8_t *found_scales, uint8_t *room) {
    steps256 table = {.lowest = 0, .highest = FP4_E8M0_STORED_MAX, .neighbours = MXFP4_NEIGHBOURS};
    for (int byte = 0; byte < 256; byte++) table.step[byte] = e8m0_decode(byte);
    descend((rows_of){x, packed, block_scales, found_packed, found_scales}, h, sizes, &table, 32, room);
}
