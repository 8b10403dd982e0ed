/* Reads of a mapped file that has shrunk, or whose disk fails: the system sends SIGBUS, which ends a process.
 *
 *   outlive_bus_errors()    from now on such a page is zeros instead
 *   bus_errors()            pages that have become zeros so; what was read then is worth nothing
 *
 * A write to such a page ends the process still. Windows lets nobody shrink a file that is mapped.
 */
#include <stdint.h>

#ifdef _WIN32
__declspec(dllexport) void outlive_bus_errors(void) {}
__declspec(dllexport) int64_t bus_errors(void) { return 0; }
#else
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

static int64_t pages;
static long page_nbytes;
static struct sigaction before;
static int is_installed;

static void give_zeros(int number, siginfo_t *about, void *context) {
    (void)context;
    void *page = (void *)((uintptr_t)about->si_addr & -(uintptr_t)page_nbytes);
    if (about->si_code == BUS_ADRERR
        && mmap(page, page_nbytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page)
        __atomic_fetch_add(&pages, 1, __ATOMIC_RELAXED);
    else
        sigaction(number, &before, 0); /* it comes again, and does what it did before */
}

API void outlive_bus_errors(void) {
    if (__atomic_exchange_n(&is_installed, 1, __ATOMIC_ACQ_REL)) return; /* `before` is never this handler */
    page_nbytes = sysconf(_SC_PAGESIZE);
    struct sigaction handler = {.sa_sigaction = give_zeros, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGBUS, &handler, &before);
}

API int64_t bus_errors(void) { return __atomic_load_n(&pages, __ATOMIC_RELAXED); }
#endif
