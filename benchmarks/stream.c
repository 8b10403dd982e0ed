/* The memory's own speed, as STREAM measures it: one pass that only reads, and one that copies.

   stream_read  (x, n)     n bytes, a multiple of 512, aligned to 64; returns the OR of all, so that every byte is needed
   stream_copy  (y, x, n)  n bytes, as the C library copies them
*/
#include <stdint.h>
#include <string.h>

typedef uint64_t lane __attribute__((vector_size(64)));

uint64_t stream_read(const lane *x, int64_t n)
{
    lane a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t i = 0; i < n / 64; i += 8) {
        a |= x[i] | x[i + 1];
        b |= x[i + 2] | x[i + 3];
        c |= x[i + 4] | x[i + 5];
        d |= x[i + 6] | x[i + 7];
    }
    a |= b | c | d;
    uint64_t all = 0;
    for (int i = 0; i < 8; i++)
        all |= a[i];
    return all;
}

void stream_copy(void *y, const void *x, int64_t n)
{
    memcpy(y, x, n);
}
