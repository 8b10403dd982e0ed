/* Codes and block scales that cost less under all of H, on the GPU: entry points of descend.c, with the same arguments and the same bytes.
 *
 *   descend_nvfp4(x, h, sizes, global_scale, packed, block_scales, found_packed, found_scales, room)    columns % 16 == 0
 *   descend_mxfp4(x, h, sizes, packed, block_scales, found_packed, found_scales, room)                  columns % 32 == 0
 *
 * x, h, packed, block_scales, found_packed, found_scales, sizes   as descend.c says; all rows are one panel, whatever sizes says
 * room          aligned to 16: ROOM_NBYTES for each column of a block of H, in each row of the grid's
 *
 * A lane has a column of a block of codes, so that 16 (MXFP4: 32) share a row; grid = ceil(rows / 16), MXFP4 ceil(rows / 8).
 * Rows beyond the last are the last one again, in room of their own, and write the same bytes.
 * Bytes equal descend in fp4convert/numerics/descent.py.  There, what has changed since a block of codes was looked at are the later
 * columns of one pass, then the earlier ones of the next: the order in which it happens.  So a row has one list, a ring of as many
 * changes as columns, and each block of codes knows how far the list was when it was there.
 * Bytes moved: of H 4 * width a row and column, from a cache but once, and as much for each change; of an element's room 18 a pass.
 */
#include "device.h"

enum { ROOM_NBYTES = 34, STRIPS = 4 /* blocks of codes whose pull is added up at once */ };

/* Scales of a format, what can be one, and how far off they are tried at first. */
struct NvFp4Scales : NvFp4Steps { enum { LOWEST = SMALLEST_CODE, HIGHEST = LARGEST_CODE, NEIGHBOURS = NVFP4_NEIGHBOURS }; };
struct MxFp4Scales : MxFp4Steps { enum { LOWEST = 0, HIGHEST = FP4_E8M0_STORED_MAX, NEIGHBOURS = MXFP4_NEIGHBOURS }; };

/* What the error of a column has grown by. */
struct alignas(16) Change { double delta; i64 column; };

/* A row at its columns in a block of H, as it came in and as it goes out. */
struct Part { const float *x; const u8 *packed, *scales; u8 *found_packed, *found_scales; };

/* Where it works.  moved: H times the changes that each block of codes has seen; errors, pulls: as it came in, and H times those. */
struct Room {
    Change *changes;
    double *moved;
    float *errors, *pulls;
    int *seen;
    u8 *codes, *scales;
    MEMBER Room(u8 *place, i64 n, int block) {
        changes = (Change *)place, moved = (double *)(changes + n), errors = (float *)(moved + n), pulls = errors + n;
        seen = (int *)(pulls + n), codes = (u8 *)(seen + n / block), scales = codes + n;
    }
};

DEVICE u32 code_at(const u8 *packed, int j) { return packed[j / 2] >> j % 2 * 4 & 15u; }

template <class S> struct Descent {
    enum { BLOCK = S::BLOCK_SIZE };
    S step_of;
    Part part;
    Room room;
    const float *h; /* the block of H, of `width` columns a row; the row has n */
    i64 width;
    int n, lane, count; /* count: of changes since the beginning */

    /* What the k-th lane of the row has. */
    template <class V> static MEMBER V from(int k, V value) { return __shfl_sync(ALL_LANES, value, k, BLOCK); }

    MEMBER void open() {
        for (int at = lane; at < n; at += BLOCK) {
            u8 stored = part.scales[at / BLOCK], code = (u8)code_at(part.packed, at);
            room.codes[at] = code, room.moved[at] = 0.0;
            room.errors[at] = part.x[at] - e2m1_decode(code) * step_of(stored);
            if (lane == 0) room.scales[at / BLOCK] = stored, room.seen[at / BLOCK] = 0;
        }
        count = 0;
    }

    /* H times the errors that came in, added column after column; where the blocks of codes end, the last one again. */
    MEMBER void pull() {
#pragma unroll 1
        for (int first = 0; first < n; first += STRIPS * BLOCK) {
            float sums[STRIPS] = {};
            const float *columns[STRIPS];
#pragma unroll
            for (int k = 0; k < STRIPS; k++) columns[k] = h + min(first + k * BLOCK, n - BLOCK) + lane;
#pragma unroll 4
            for (int j = 0; j < n; j++) {
                float error = room.errors[j];
#pragma unroll
                for (int k = 0; k < STRIPS; k++) sums[k] += error * columns[k][j * width];
            }
#pragma unroll
            for (int k = 0; k < STRIPS; k++) room.pulls[columns[k] - h] = sums[k];
        }
    }

    /* H times all changes, at the lane's column: what was there, and those since. */
    MEMBER double moved_at(int first) const {
        const float *column = h + first + lane;
        double sum = room.moved[first + lane];
        for (int since = room.seen[first / BLOCK]; since < count;) {
            int place = since % n, stop = min(place + count - since, n);
            since += stop - place;
#pragma unroll 8
            for (; place < stop; place++) {
                Change change = room.changes[place];
                sum += change.delta * (double)column[change.column * width];
            }
        }
        return sum;
    }

    /* The scale of a block of codes, and under it the codes, of least cost: every column in turn to the nearest value. */
    MEMBER void choose(int first, int tried, double moved) {
        int at = first + lane, own = room.scales[first / BLOCK], best = own;
        float before = e2m1_decode(room.codes[at]) * step_of((u32)own), after = before, least = 0.0f;
        float pulls = (float)(moved + (double)room.pulls[at]), diagonal = h[at * width + at], inverse = 1.0f / diagonal, column[BLOCK];
        u32 codes = room.codes[at];
#pragma unroll
        for (int j = 0; j < BLOCK; j++) column[j] = h[(first + j) * width + at];
#pragma unroll 1
        for (int k = 0; k < tried; k++) {
            int candidate = own + (k % 2 ? -(k + 1) / 2 : k / 2); /* 0, -1, 1, -2, 2 and so on beside the own one */
            float step = step_of((u32)candidate & 0xFFu), p = pulls, cost = 0.0f, value = before;
            u32 code = 0;
#pragma unroll
            for (int j = 0; j < BLOCK; j++) {
                u32 nearest = e2m1_encode((before + p * inverse) / step);
                float made = e2m1_decode(nearest) * step, delta = before - made, grown = delta * (2.0f * p + delta * diagonal);
                if (lane == j) code = nearest, value = made;
                cost += from(j, grown);
                p += from(j, delta) * column[j];
            }
            if (cost < least && candidate >= S::LOWEST && candidate <= S::HIGHEST) least = cost, best = candidate, codes = code, after = value;
        }
        __syncwarp(); /* what lanes read of the row they have read */
        u32 changed = __ballot_sync(ALL_LANES, after != before) >> (threadIdx.x % WARP - lane) & ALL_LANES >> (WARP - BLOCK);
        int place = count + __popc(changed & ((1u << lane) - 1));
        if (after != before) room.changes[place % n] = {(double)before - (double)after, at};
        room.codes[at] = (u8)codes, room.moved[at] = moved;
        if (lane == 0) room.scales[first / BLOCK] = (u8)best, room.seen[first / BLOCK] = count;
        count += __popc(changed);
        __syncwarp();
    }

    /* What a block of codes adds to what the row costs less what it cost, column after column. */
    MEMBER double add_cost(int first, double moved, double cost) const {
        int at = first + lane;
        double x = part.x[at], before = e2m1_decode(code_at(part.packed, at)) * step_of(part.scales[first / BLOCK]);
        double after = e2m1_decode(room.codes[at]) * step_of(room.scales[first / BLOCK]);
        double term = ((x - before) + (x - after)) * moved;
#pragma unroll
        for (int k = 0; k < BLOCK; k++) cost += from(k, term);
        return cost;
    }

    MEMBER void write(bool is_less) const {
        for (int at = lane; at < n; at += BLOCK) {
            if (lane % 2 == 0)
                part.found_packed[at / 2] = is_less ? (u8)(room.codes[at] | room.codes[at + 1] << 4) : part.packed[at / 2];
            if (lane == 0) part.found_scales[at / BLOCK] = (is_less ? room.scales : part.scales)[at / BLOCK];
        }
    }

    MEMBER void run(i64 passes) {
        double cost = 0.0;
        open();
        __syncwarp();
        pull();
#pragma unroll 1
        for (i64 pass = 0; pass <= passes; pass++) /* the last of them only finds what the others moved */
#pragma unroll 1
            for (int first = 0; first < n; first += BLOCK) {
                double moved = moved_at(first);
                if (pass < passes) choose(first, 1 + 2 * (pass ? 1 : (int)S::NEIGHBOURS), moved);
                else cost = add_cost(first, moved, cost);
            }
        write(cost < 0.0);
        __syncwarp();
    }
};

template <class S>
DEVICE void descend(S step_of, const i64 *sizes, const float *h, const Part &whole, u8 *place) {
    enum { BLOCK = S::BLOCK_SIZE };
    i64 rows = sizes[0], columns = sizes[1], width = sizes[2];
    i64 own = ((i64)blockIdx.x * THREADS + threadIdx.x) / BLOCK, row = own < rows ? own : rows - 1;
    int lane = (int)threadIdx.x % BLOCK;
#pragma unroll 1
    for (i64 first = 0; first < columns; first += width) {
        i64 i = row * columns + first, n = min(width, columns - first);
        Part part = {whole.x + i, whole.packed + i / 2, whole.scales + i / BLOCK, whole.found_packed + i / 2, whole.found_scales + i / BLOCK};
        Room room(place + own * width * ROOM_NBYTES, n, BLOCK);
        Descent<S> descent = {step_of, part, room, h + first * width, width, (int)n, lane, 0};
        descent.run(sizes[3]);
    }
}

KERNEL(2) descend_nvfp4(const float *x, const float *h, const i64 *sizes, const float *global_scale, const u8 *packed,
                        const u8 *block_scales, u8 *found_packed, u8 *found_scales, u8 *room) {
    descend(NvFp4Scales{{*global_scale, false}}, sizes, h, {x, packed, block_scales, found_packed, found_scales}, room);
}
KERNEL(2) descend_mxfp4(const float *x, const float *h, const i64 *sizes, const u8 *packed, const u8 *block_scales, u8 *found_packed,
                        u8 *found_scales, u8 *room) {
    descend(MxFp4Scales{}, sizes, h, {x, packed, block_scales, found_packed, found_scales}, room);
}
