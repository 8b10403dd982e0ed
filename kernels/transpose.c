/* Columns of a matrix as rows, on the CPU; compiled once per instruction set (FP4_LEVEL), entered through cpu.c.
 *
 *   transpose_N(x, rows, width, first, step, count, y)    N: 1, 2 or 4 bytes an element; nothing needs alignment
 *
 * x is rows x width, row-major; row k of y is column first + k * step of x, so y is count x rows.  Bytes equal transpose in
 * fp4convert/numerics/fp8_int.py.  Every tile is copied out of its rows before it is turned: in place, the lines of rows whose distance is a
 * power of two would drive each other out of the first cache.  Bytes moved per element: 2 N, and the columns stepped over.
 */
#include "vector.h"

enum { TILE_NBYTES = 256, TILE_COLUMNS = 32 }; /* of a row of y written at once; rows of y at once */

typedef VECTOR(uint16_t, 16) v2;
typedef VECTOR(uint32_t, 16) v4;
typedef u8x16 v1;
#define LOW1(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH1(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW2(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH2(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW4(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH4(a, b) SHUFFLE(a, b, 2, 6, 3, 7)

/* Interleaving the upper half of a square with its lower half, as often as its side is a power of two, turns it. */
#define DEFINE_TRANSPOSE(N, type)                                                                                           \
    enum { SIDE##N = 16 / N, HEIGHT##N = TILE_NBYTES / N };                                                                 \
    INLINE void turn_square##N(const type *restrict from, type *restrict y, int64_t pitch) {                                \
        v##N a[SIDE##N], b[SIDE##N];                                                                                        \
        for (int i = 0; i < SIDE##N; i++) a[i] = LOAD(v##N, from + i * TILE_COLUMNS);                                       \
        for (int level = 1; level < SIDE##N; level *= 2) {                                                                  \
            for (int i = 0; i < SIDE##N / 2; i++) {                                                                         \
                b[2 * i] = LOW##N(a[i], a[i + SIDE##N / 2]);                                                                \
                b[2 * i + 1] = HIGH##N(a[i], a[i + SIDE##N / 2]);                                                           \
            }                                                                                                               \
            memcpy(a, b, sizeof a);                                                                                         \
        }                                                                                                                   \
        for (int i = 0; i < SIDE##N; i++) STORE(y + i * pitch, a[i]);                                                       \
    }                                                                                                                       \
    INLINE void fetch##N(const type *restrict x, int64_t step, int columns, type *restrict tile) {                          \
        if (step == 1) memcpy(tile, x, (size_t)columns * N);                                                                \
        else if (step == 2 && columns == TILE_COLUMNS) for (int c = 0; c < TILE_COLUMNS; c++) tile[c] = x[2 * c];           \
        else for (int c = 0; c < columns; c++) tile[c] = x[c * step];                                                       \
    }                                                                                                                       \
    void NAME(transpose_##N)(const type *restrict x, int64_t rows, int64_t width, int64_t first, int64_t step,              \
                             int64_t count, type *restrict y) {                                                             \
        type tile[HEIGHT##N * TILE_COLUMNS];                                                                                \
        for (int64_t row = 0; row < rows; row += HEIGHT##N)                                                                 \
            for (int64_t k = 0; k < count; k += TILE_COLUMNS) {                                                             \
                int height = (int)(rows - row < HEIGHT##N ? rows - row : HEIGHT##N), r = 0;                                 \
                int columns = (int)(count - k < TILE_COLUMNS ? count - k : TILE_COLUMNS);                                   \
                const type *from = x + row * width + first + k * step;                                                      \
                type *to = y + k * rows + row;                                                                              \
                for (int i = 0; i < height; i++) fetch##N(from + i * width, step, columns, tile + i * TILE_COLUMNS);        \
                if (columns == TILE_COLUMNS) {                                                                              \
                    for (int c = 0; c < TILE_COLUMNS; c += SIDE##N)                                                         \
                        for (r = 0; r + SIDE##N <= height; r += SIDE##N)                                                    \
                            turn_square##N(tile + r * TILE_COLUMNS + c, to + c * rows + r, rows);                           \
                }                                                                                                           \
                for (int c = 0; c < columns; c++)                                                                           \
                    for (int i = r; i < height; i++) to[c * rows + i] = tile[i * TILE_COLUMNS + c];                         \
            }                                                                                                               \
    }
/* Elements at any address: of a plain uint16_t a compiler may believe that it is aligned. */
typedef uint16_t __attribute__((aligned(1))) any2;
typedef uint32_t __attribute__((aligned(1))) any4;
DEFINE_TRANSPOSE(1, uint8_t)
DEFINE_TRANSPOSE(2, any2)
DEFINE_TRANSPOSE(4, any4)
