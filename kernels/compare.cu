/* How far values are from what was made of them, on the GPU: the entry points of compare.c, the same arguments and the same bits.
 *
 *   compare_nvfp4_D(x, rows, columns, packed, block_scales, stored_global, is_divisor, sums)    columns % 16 == 0
 *   compare_mxfp4_D(x, rows, columns, packed, block_scales, sums)                               columns % 32 == 0
 *   compare_values_D(x, rows, columns, y, sums)                                                 y: float32, what became of x
 *   count_codes(packed, nbytes, counts)                                                         nbytes % 8 == 0; counts: int64[16]
 *
 * D is bf16, fp16 or fp32: the type of x, finite.  sums: double[rows][5]; compare.c says what they are, and in which order added.
 * Launch: 256 threads; compare grid = ceil(rows / 8), count_codes grid = ceil(nbytes / 65536), so that few atomics meet.
 * Bytes moved per bf16 element: NVFP4 2 + 0.5625, MXFP4 2 + 0.53125, values 2 + 4; count_codes 0.5.
 *
 * A warp owns a row, or up to 16 that are short.  It takes 16 groups of 256 elements at a time: two threads a group, eight of its 16
 * lanes each, which lie beside each other and are read at once.  What groups add to their row goes through shared memory, and from
 * there to the row's sums in order.
 */
#include "device.h"

enum { GROUP_LANES = 16, LANES_HERE = 8, SLOTS = WARP * LANES_HERE / GROUP_LANES, SQUARES = 3, QUARTERS = 4 };
enum { ROWS_HERE = THREADS / WARP, CODES = 16, COUNT_NBYTES = 1 << 16 };
#ifndef COMPARE_UNROLL
#define COMPARE_UNROLL 2 /* 1 or 2: units of 16 elements that a thread has on their way; the bytes are the same */
#endif

/* Sums of squares of a group, each as its four: of x, of x - y, of y. */
struct Slot { double sums[SQUARES][QUARTERS]; };

/* What became of x: one value; or those of a thread's lanes in the units after a start, whose step is returned. */
template <class Steps> struct FromCodes {
    const u8 *packed, *block_scales;
    Steps step_of;
    static MEMBER bool is_aligned(i64) { return true; } /* blocks are whole */
    struct Cursor { const u32 *codes; const u8 *stored; };
    MEMBER Cursor begin(i64 start) const { return {(const u32 *)packed + start / LANES_HERE, block_scales + start / Steps::BLOCK_SIZE}; }
    MEMBER float next(Cursor &cursor, u32 unit, float *y) const {
        u32 halves[LANES_HERE / 2];
        float step = step_of(cursor.stored[unit * UNIT / Steps::BLOCK_SIZE]);
        widen8(*cursor.codes, halves);
        cursor.codes += UNIT / LANES_HERE;
#pragma unroll
        for (int k = 0; k < LANES_HERE; k++) y[k] = __fmul_rn(widen_fp16((u16)(halves[k / 2] >> k % 2 * 16)), step);
        return step;
    }
    MEMBER float one(i64 at) const {
        return __fmul_rn(e2m1_decode(packed[at / 2] >> at % 2 * 4 & 15u), step_of(block_scales[at / Steps::BLOCK_SIZE]));
    }
};
struct FromValues {
    const float *values;
    static MEMBER bool is_aligned(i64 start) { return start % LANES_HERE == 0; }
    typedef const Words4 *Cursor;
    MEMBER Cursor begin(i64 start) const { return (const Words4 *)(values + start); }
    static MEMBER float next(Cursor &cursor, u32, float *y) {
#pragma unroll
        for (int i = 0; i < LANES_HERE / 4; i++) {
            Words4 four = cursor[i];
#pragma unroll
            for (int k = 0; k < 4; k++) y[4 * i + k] = fp4_float(four.w[k]);
        }
        cursor += UNIT / 4;
        return fp4_float(FP4_INF_BITS); /* no step is known: none is small, and nothing clipped */
    }
    MEMBER float one(i64 at) const { return values[at]; }
};

/* Eight of a group's 16 lanes: elements start + 0..7, start + 16 + 0..7, ... below start + n. */
template <class T, class Made> struct Lanes {
    const void *x;
    Made made;
    u32 max_abs, clipped; /* the first as bits, of which those of NaN are the largest */

    /* In float32: sums of two lanes each. Returns whether no step is too small. */
    MEMBER bool add(i64 start, u32 n, float (*pairs)[QUARTERS]) {
        float lanes[SQUARES][LANES_HERE] = {}, largest = 0.0f, least_step = SMALLEST_STEP; /* NaN gets lost here: no sum holds it */
        const Words4 *from = (const Words4 *)x + start / LANES_HERE * (T::WORDS / 8);
        const bool is_aligned = Made::is_aligned(start);
        typename Made::Cursor cursor = made.begin(start);
#pragma unroll COMPARE_UNROLL
        for (u32 unit = 0; unit < n / UNIT; unit++, from += T::WORDS / 4) {
            u32 w[T::WORDS / 2];
            float v[LANES_HERE], y[LANES_HERE], step;
            if (is_aligned) {
#pragma unroll
                for (int i = 0; i < T::WORDS / 8; i++) {
                    Words4 four = from[i];
#pragma unroll
                    for (int k = 0; k < 4; k++) w[4 * i + k] = four.w[k];
                }
                widened(w, v, T());
                step = made.next(cursor, unit, y);
            } else {
#pragma unroll
                for (int k = 0; k < LANES_HERE; k++) v[k] = T::one(x, start + unit * UNIT + k), y[k] = made.one(start + unit * UNIT + k);
                step = fp4_float(FP4_INF_BITS);
            }
            float limit = fabsf(__fmul_rn(6.0f, step));
            least_step = fminf(least_step, step);
#pragma unroll
            for (int k = 0; k < LANES_HERE; k++) {
                float difference = __fadd_rn(v[k], -y[k]);
                lanes[0][k] = __fadd_rn(lanes[0][k], __fmul_rn(v[k], v[k]));
                lanes[1][k] = __fadd_rn(lanes[1][k], __fmul_rn(difference, difference));
                lanes[2][k] = __fadd_rn(lanes[2][k], __fmul_rn(y[k], y[k]));
                largest = fmaxf(largest, fabsf(difference));
                clipped += fabsf(v[k]) > limit;
            }
        }
        max_abs = max(max_abs, fp4_bits(largest));
#pragma unroll
        for (int s = 0; s < SQUARES; s++)
#pragma unroll
            for (int k = 0; k < QUARTERS; k++) pairs[s][k] = __fadd_rn(lanes[s][2 * k], lanes[s][2 * k + 1]);
        return least_step >= SMALLEST_STEP;
    }
    /* In double: the four sums, with the lanes of the thread beside, which finds the same ones; to `slot` where it is wanted. */
    MEMBER void add_exactly(i64 start, u32 n, bool is_wanted, Slot *slot) {
#pragma unroll 1
        for (u32 k = 0; k < QUARTERS; k++) {
            double two[2][SQUARES] = {};
#pragma unroll 1
            for (u32 i = 2 * k; i < n; i += GROUP_LANES)
#pragma unroll
                for (u32 j = 0; j < 2 && i + j < n; j++) {
                    i64 at = start + i + j;
                    float value = T::one(x, at), y = made.one(at), difference = value - y;
                    two[j][0] += (double)value * value;
                    two[j][1] += (double)difference * difference;
                    two[j][2] += (double)y * y;
                    max_abs = max(max_abs, fp4_bits(fabsf(difference)));
                }
#pragma unroll
            for (int s = 0; s < SQUARES; s++) {
                double pair = two[0][s] + two[1][s];
                pair += __shfl_xor_sync(ALL_LANES, pair, 1);
                if (is_wanted) slot->sums[s][k] = pair;
            }
        }
    }
};

/* A thread's sums of two lanes to the group's four, two of which it writes; whether float32 holds them. */
DEVICE bool fold(const float (*pairs)[QUARTERS], bool is_second, Slot *slot) {
    bool is_held = true;
#pragma unroll
    for (int s = 0; s < SQUARES; s++) {
        float four[QUARTERS];
#pragma unroll
        for (u32 k = 0; k < QUARTERS; k++) {
            four[k] = __fadd_rn(pairs[s][k], __shfl_xor_sync(ALL_LANES, pairs[s][k], 1));
            is_held = is_held && four[k] <= COARSE && (s == 2 || four[k] >= FINE);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) slot->sums[s][is_second * 2 + k] = is_second ? four[k + 2] : four[k];
    }
    return is_held;
}

template <class T, class Made> DEVICE void compare(Lanes<T, Made> lanes, i64 rows, i64 columns, double *sums) {
    __shared__ Slot all_slots[ROWS_HERE][SLOTS];
    Slot *slots = all_slots[threadIdx.x / WARP];
    const u32 lane = threadIdx.x % WARP, slot = lane / 2, groups = (u32)((columns + SUM_GROUP - 1) / SUM_GROUP);
    const u32 shift = groups > 1 ? min(32 - __clz((int)(groups - 1)), 4) : 0, row_slots = 1u << shift; /* a power of two, up to SLOTS */
    const i64 first_row = ((i64)blockIdx.x * ROWS_HERE + threadIdx.x / WARP) * (SLOTS >> shift);
    if (first_row >= rows) return;
    const i64 row = first_row + (slot >> shift);
    const u32 rows_here = (u32)min(rows - first_row, (i64)(SLOTS >> shift));
    const double *own = &slots->sums[0][0] + min(lane, (u32)(SQUARES * QUARTERS - 1));
    double total = 0;
    for (u32 first = 0; first < groups; first += row_slots) {
        i64 at = (i64)(first + (slot & (row_slots - 1))) * SUM_GROUP, start = row * columns + at + lane % 2 * LANES_HERE;
        u32 n = row < rows && at < columns ? (u32)min(columns - at, (i64)SUM_GROUP) : 0;
        float pairs[SQUARES][QUARTERS];
        bool is_coarse = lanes.add(start, n, pairs), is_held = fold(pairs, lane % 2, slots + slot);
        bool is_exact = n && (n % GROUP_LANES || !(is_coarse && is_held));
        u32 others = lane % 2 * LANES_HERE; /* lanes of the thread before, which has the first elements */
        if (__any_sync(ALL_LANES, is_exact)) {
            __syncwarp(); /* what fold has written is there, and is written over */
            lanes.add_exactly(start, n > others ? n - others : 0, is_exact && lane % 2 == 0, slots + slot);
        }
        __syncwarp();
        for (u32 r = 0; r < rows_here; r++) {
            const double *group = own + (r << shift) * (SQUARES * QUARTERS);
#pragma unroll 4
            for (u32 s = 0; s < min(row_slots, groups - first); s++, group += SQUARES * QUARTERS) total += *group;
            if (first + row_slots < groups) continue;
            total += __shfl_xor_sync(ALL_LANES, total, 2); /* the four as (0 + 2) + (1 + 3) */
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            if (lane % QUARTERS == 0 && lane < SQUARES * QUARTERS) sums[(first_row + r) * SUMS + lane / QUARTERS] = total;
            total = 0;
        }
        __syncwarp();
    }
    u32 max_abs = lanes.max_abs, clipped = lanes.clipped;
#pragma unroll 1
    for (u32 distance = 1; distance < 2 * row_slots; distance *= 2) {
        max_abs = max(max_abs, __shfl_xor_sync(ALL_LANES, max_abs, distance));
        clipped += __shfl_xor_sync(ALL_LANES, clipped, distance);
    }
    if (lane & (2 * row_slots - 1) || row >= rows) return;
    sums[row * SUMS + SQUARES] = fp4_float(max_abs), sums[row * SUMS + SQUARES + 1] = clipped;
}

/* Adds how often each code is among 32. Bit b of every code goes to a word of its own; the codes k are where all four agree. */
DEVICE void count32(const u32 *codes, u32 *counts) {
    u32 bits[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        bits[b] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = b < i ? codes[i] << (i - b) : codes[i] >> (b - i);
            bits[b] |= word & 0x11111111u << i;
        }
    }
#pragma unroll
    for (int k = 0; k < CODES; k++) {
        u32 low = (k & 1 ? bits[0] : ~bits[0]) & (k & 2 ? bits[1] : ~bits[1]);
        u32 high = (k & 4 ? bits[2] : ~bits[2]) & (k & 8 ? bits[3] : ~bits[3]);
        counts[k] += (u32)__popc(low & high);
    }
}

KERNEL(4) count_codes(const u8 *packed, i64 nbytes, u64 *counts) {
    i64 first = (i64)blockIdx.x * COUNT_NBYTES, left = min(nbytes - first, (i64)COUNT_NBYTES);
    u32 own[CODES] = {};
#pragma unroll 2
    for (int at = (int)threadIdx.x * 16; at < left; at += THREADS * 16) {
        Words4 codes;
        if (left - at >= 16) codes = *(const Words4 *)(packed + first + at);
        else { /* 16 codes are left; the zeros beside them do not count */
            Words2 half = *(const Words2 *)(packed + first + at);
            codes = {half.w[0], half.w[1], 0, 0};
            own[0] -= 16;
        }
        count32(codes.w, own);
    }
#pragma unroll
    for (int k = 0; k < CODES / 2; k++) {
        u32 both = own[2 * k] | own[2 * k + 1] << 16; /* at most 512 in a thread, 16384 in a warp */
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) both += __shfl_xor_sync(ALL_LANES, both, distance);
        if (threadIdx.x % WARP == k) {
            atomicAdd(counts + 2 * k, (u64)(both & 0xFFFFu));
            atomicAdd(counts + 2 * k + 1, (u64)(both >> 16));
        }
    }
}

#define ENTRIES(dtype, T)                                                                                                       \
    KERNEL(3) compare_nvfp4_##dtype(const void *x, i64 rows, i64 columns, const u8 *packed, const u8 *block_scales,             \
                                    const float *stored_global, i64 is_divisor, double *sums) {                                 \
        NvFp4Steps steps = {*stored_global, is_divisor != 0};                                                                   \
        compare(Lanes<T, FromCodes<NvFp4Steps>>{x, {packed, block_scales, steps}, 0, 0}, rows, columns, sums);                  \
    }                                                                                                                           \
    KERNEL(3) compare_mxfp4_##dtype(const void *x, i64 rows, i64 columns, const u8 *packed, const u8 *block_scales,             \
                                    double *sums) {                                                                             \
        compare(Lanes<T, FromCodes<MxFp4Steps>>{x, {packed, block_scales, MxFp4Steps()}, 0, 0}, rows, columns, sums);           \
    }                                                                                                                           \
    KERNEL(3) compare_values_##dtype(const void *x, i64 rows, i64 columns, const float *y, double *sums) {                      \
        compare(Lanes<T, FromValues>{x, {y}, 0, 0}, rows, columns, sums);                                                       \
    }
ENTRIES(bf16, Bf16)
ENTRIES(fp16, Fp16)
ENTRIES(fp32, Fp32)
