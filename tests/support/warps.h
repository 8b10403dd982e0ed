/* Warps on the host: 32 lanes run as coroutines that meet at each exchange.  Shared by simt.h and ptx.h. */
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx;

namespace simt {
enum { LANES = 32, STACK_NBYTES = 1 << 17 };
typedef void (*Kernel)(long, long, long, long, long, long, long, long, long, long, long);
enum State { READY, WAITING, DONE };
struct Lane { jmp_buf at; ucontext_t context; State state; unsigned exchanges; };
static Lane lanes[LANES];
static char stacks[LANES][STACK_NBYTES];
static jmp_buf scheduler;
static ucontext_t start;
static Kernel kernel;
static long arguments[11];
static int places[2][LANES];
static unsigned long long slots[2][LANES]; /* two, so that a lane may write its next value before the others have read this one */
static int current;

static void body() {
    for (;;) {
        const long *a = arguments;
        kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
        lanes[current].state = DONE;
        if (!_setjmp(lanes[current].at)) _longjmp(scheduler, 1);
    }
}

/* Publishes a lane's value, and returns when all 32 lanes have published theirs; they must all be at this place of the code. */
static unsigned long long *meet(unsigned long long value, int place = 0) {
    Lane &me = lanes[current];
    int turn = me.exchanges++ & 1;
    slots[turn][current] = value;
    places[turn][current] = place;
    me.state = WAITING;
    if (!_setjmp(me.at)) _longjmp(scheduler, 1);
    for (int i = 0; i < LANES; i++)
        if (places[turn][i] != place) std::fprintf(stderr, "lanes meet at different exchanges\n"), std::abort();
    return slots[turn];
}

static void resume(int lane, unsigned warp) {
    current = lane;
    threadIdx.x = warp * LANES + lane;
    if (!_setjmp(scheduler)) _longjmp(lanes[lane].at, 1);
}

static void run_warp(unsigned warp) {
    for (int i = 0; i < LANES; i++) lanes[i].state = READY, lanes[i].exchanges = 0;
    for (int done = 0; done < LANES;) {
        done = 0;
        for (int i = 0; i < LANES; i++) {
            resume(i, warp);
            done += lanes[i].state == DONE;
        }
        if (done % LANES) std::fprintf(stderr, "%d of 32 lanes missed an exchange\n", done), std::abort();
    }
}

static void create_lanes() {
    static bool is_done = false;
    if (is_done) return;
    for (int i = 0; i < LANES; i++) {
        getcontext(&lanes[i].context);
        lanes[i].context.uc_stack.ss_sp = stacks[i];
        lanes[i].context.uc_stack.ss_size = STACK_NBYTES;
        makecontext(&lanes[i].context, [] {
            if (!_setjmp(lanes[current].at)) swapcontext(&lanes[current].context, &start);
            body();
        }, 0);
        current = i;
        swapcontext(&start, &lanes[i].context);
    }
    is_done = true;
}
}

/* Runs a kernel, of whose grid columns 0 .. first_x - 1 are left out; its arguments are 64-bit words, of which it takes as many as it
 * has. Not for two threads at once. */
extern "C" __attribute__((visibility("default"))) void simt_launch(simt::Kernel kernel, long first_x, long grid_x, long grid_y, long grid_z,
                                                                   long threads, const long *arguments) {
    simt::create_lanes();
    simt::kernel = kernel;
    std::memcpy(simt::arguments, arguments, sizeof simt::arguments);
    for (blockIdx.z = 0; blockIdx.z < grid_z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
            for (blockIdx.x = first_x; blockIdx.x < grid_x; blockIdx.x++)
                for (unsigned warp = 0; warp < threads / simt::LANES; warp++) simt::run_warp(warp);
}
