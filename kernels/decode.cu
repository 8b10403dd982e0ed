/* Packed weights on the GPU: entry points of fp8_int.c and transpose.c, with the same arguments and the same bytes.
 *
 *   decode_fp8(codes, scales, grid, y)                    y = e4m3(code) * scale
 *   decode_int4(packed, scales, zero_points, grid, y)     y = (code - 8 - zero_point) * scale; zero_points may be null: all 0
 *   decode_int8(packed, scales, zero_points, grid, y)     y = (code - 128 - zero_point) * scale
 *   transpose_2(x, rows, width, first, step, count, y)    of 2 bytes an element; row k of y is column first + k * step of x
 *   transpose_4(x, rows, width, first, step, count, y)    of 4 bytes
 *
 * codes, packed: bytes; scales, zero_points, y: float32; grid: five int64, grid.cuh says what.
 * x is rows x width, y count x rows, row-major.  Pointers are 16-byte aligned; rows of integers begin at whole 32-bit items.
 * Launch: 256 threads; decode grid = ceil(rows * columns / 8192), transpose grid = (ceil(rows / T), ceil(count / T)), T = 256 / N.
 * Any shape: a unit of 16 elements that lies in several rows or blocks, or is cut, goes by single elements; so does a square of
 * transpose (16 bytes wide and high) at an edge, where step * N > 4, or where rows of x or of y begin at no whole 16 bytes.
 * Bytes equal fp4convert/numerics/fp8_int.py; where a value is NaN it is NaN, with bits of the device's own.
 * Bytes moved per element: FP8 1 + 4, int4 0.5 + 4, int8 1 + 4, transpose N * step + N.
 */
#include "grid.cuh"

DEVICE void store4(float *y, const float *v) {
    *(Words4 *)y = {fp4_bits(v[0]), fp4_bits(v[1]), fp4_bits(v[2]), fp4_bits(v[3])};
}

/* What stands in a row: its codes, their 32-bit words where a unit begins at one, and values under the scale of a block. */
struct Fp8 {
    enum { WORDS = 4 };
    const u8 *codes;
    struct Step { float scale; };
    MEMBER Step step(const float *scales, i64 block) const { return {scales[block]}; }
    MEMBER bool is_whole(u32) const { return true; } /* units are counted through all rows, and so are codes */
    MEMBER void load(i64, u32, i64 at, u32 *w) const {
        Words4 v = *(const Words4 *)(codes + at);
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[k] = v.w[k];
    }
    MEMBER u32 one(i64, u32, i64 at) const { return codes[at]; }
    static MEMBER u32 pick(const u32 *w, int i) { return w[i / 4] >> i % 4 * 8 & 255u; }
    static MEMBER float value(u32 code, Step step) { return __fmul_rn(e4m3_decode(code), step.scale); }
};

template <int BITS> struct Integers {
    enum { PER_WORD = 32 / BITS, WORDS = UNIT / PER_WORD };
    const u32 *packed;
    const float *zero_points;
    i64 row_words;
    struct Step { float scale, origin; };
    MEMBER Step step(const float *scales, i64 block) const {
        float middle = (float)(1 << (BITS - 1));
        return {scales[block], zero_points ? __fadd_rn(middle, zero_points[block]) : middle};
    }
    MEMBER bool is_whole(u32 column) const { return column % PER_WORD == 0; }
    MEMBER void load(i64 row, u32 column, i64, u32 *w) const {
        const u32 *from = packed + row * row_words + column / PER_WORD;
        if ((u64)from % 16 == 0 && WORDS == 4) {
            Words4 v = *(const Words4 *)from;
#pragma unroll
            for (int k = 0; k < WORDS; k++) w[k] = v.w[k];
        } else {
#pragma unroll
            for (int k = 0; k < WORDS; k++) w[k] = from[k];
        }
    }
    MEMBER u32 one(i64 row, u32 column, i64) const { return pick(packed + row * row_words + column / PER_WORD, column % PER_WORD); }
    static MEMBER u32 pick(const u32 *w, int i) { return w[i / PER_WORD] >> i % PER_WORD * BITS & ((1u << BITS) - 1u); }
    static MEMBER float value(u32 code, Step step) { return __fmul_rn(__fadd_rn((float)(int)code, -step.origin), step.scale); }
};

template <class Codes> struct Decoding {
    Codes codes;
    const float *scales;
    float *y;
    MEMBER bool is_whole(u32 column) const { return codes.is_whole(column); }
    MEMBER void unit(Place place) const {
        typename Codes::Step step = codes.step(scales, place.block);
        u32 w[Codes::WORDS];
        codes.load(place.row, place.column, place.at, w);
#pragma unroll
        for (int k = 0; k < UNIT; k += 4) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = Codes::value(Codes::pick(w, k + j), step);
            store4(y + place.at + k, v);
        }
    }
    MEMBER void one(Place place) const {
        y[place.at] = Codes::value(codes.one(place.row, place.column, place.at), codes.step(scales, place.block));
    }
};

template <class Codes> DEVICE void decode(Codes codes, const float *scales, const Grid *grid, float *y) {
    each_unit(grid, Decoding<Codes>{codes, scales, y});
}

KERNEL(4) decode_fp8(const u8 *codes, const float *scales, const Grid *grid, float *y) { decode(Fp8{codes}, scales, grid, y); }
KERNEL(4) decode_int4(const u32 *packed, const float *scales, const float *zero_points, const Grid *grid, float *y) {
    decode(Integers<4>{packed, zero_points, (grid->columns + 7) / 8}, scales, grid, y);
}
KERNEL(4) decode_int8(const u32 *packed, const float *scales, const float *zero_points, const Grid *grid, float *y) {
    decode(Integers<8>{packed, zero_points, (grid->columns + 3) / 4}, scales, grid, y);
}

/* ---------------------------------------------------------------------------------------------------------- transpose
 *
 * A thread turns a square of 16 bytes by 16 bytes in its registers.  Eight lanes write 128 bytes of a row of y, four read 64 of x.
 */
enum { ALONG = 8, TILE_SQUARES = 16 }; /* lanes of a warp along rows of y; squares of a block of threads either way */

template <class Element> struct Square {
    enum { N = sizeof(Element), SIDE = 16 / N };

    /* 16 bytes of each row, of 2 bytes an element also every second out of 32; rows are so many times 16 bytes apart. */
    static MEMBER void load(const Words4 *x, i64 row_units, int step, int odd, u32 (*w)[4]) {
#pragma unroll
        for (int i = 0; i < SIDE; i++, x += row_units) {
            Words4 a = x[0];
            if (N == 2 && step == 2) {
                Words4 b = x[1];
                u32 keep = odd ? 0x7632u : 0x5410u;
                a = {__byte_perm(a.w[0], a.w[1], keep), __byte_perm(a.w[2], a.w[3], keep),
                     __byte_perm(b.w[0], b.w[1], keep), __byte_perm(b.w[2], b.w[3], keep)};
            }
#pragma unroll
            for (int k = 0; k < 4; k++) w[i][k] = a.w[k];
        }
    }
    static MEMBER Words4 column(u32 (*w)[4], int c) {
        if (N == 4) return {w[0][c], w[1][c], w[2 % SIDE][c], w[3 % SIDE][c]};
        u32 keep = c % 2 ? 0x7632u : 0x5410u;
        Words4 out;
#pragma unroll
        for (int k = 0; k < 4; k++) out.w[k] = __byte_perm(w[2 * k % SIDE][c / 2], w[(2 * k + 1) % SIDE][c / 2], keep);
        return out;
    }
};

template <class Element> DEVICE void transpose(const Element *x, i64 rows, i64 width, i64 first, i64 step, i64 count, Element *y) {
    typedef Square<Element> Turned;
    const int side = Turned::SIDE, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 row = ((i64)blockIdx.x * TILE_SQUARES + warp % 2 * ALONG + lane % ALONG) * side;
    const i64 k = ((i64)blockIdx.y * TILE_SQUARES + warp / 2 * (WARP / ALONG) + lane / ALONG) * side;
    if (row >= rows || k >= count) return;
    const i64 column = first + k * step;
    const int odd = step == 2 ? (int)(column % 2) : 0;
    const bool is_within = k + side <= count && column - odd + side * step <= width;
    if (is_within && step <= 4 / Turned::N && (column - odd) % side == 0 && width % side == 0 && rows % side == 0) {
        u32 w[side][4];
        const i64 read_units = width / side, written_units = rows / side;
        Turned::load((const Words4 *)x + row * read_units + (column - odd) / side, read_units, (int)step, odd, w);
        Words4 *to = (Words4 *)y + k * written_units + row / side;
#pragma unroll
        for (int c = 0; c < side; c++, to += written_units) *to = Turned::column(w, c);
    } else {
#pragma unroll 1
        for (int c = 0; c < side && k + c < count; c++)
#pragma unroll 1
            for (int i = 0; i < side && row + i < rows; i++) y[(k + c) * rows + row + i] = x[(row + i) * width + column + c * step];
    }
}

KERNEL(3) transpose_2(const u16 *x, i64 rows, i64 width, i64 first, i64 step, i64 count, u16 *y) {
    transpose(x, rows, width, first, step, count, y);
}
KERNEL(3) transpose_4(const u32 *x, i64 rows, i64 width, i64 first, i64 step, i64 count, u32 *y) {
    transpose(x, rows, width, first, step, count, y);
}
