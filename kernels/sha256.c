/* SHA-256 of one stream or of two side by side, by the instructions that processors have for it.
 *
 *   sha256_lanes()                             2; 0 where this processor, or the system's answer about it, has no such instructions
 *   sha256_blocks(one, a, other, b, blocks)    the hash of one stream goes on by 64 * blocks bytes at a, that of another at b
 *
 * one, other: 8 uint32 each, FIPS 180-4's H(i); b is 0 for one stream alone.  Bytes need no alignment.
 * One stream waits for its own last round most of the time: a second one takes a seventh more time, not twice as much.
 * fp4convert/storage/sha256.py begins, pads and ends; it takes hashlib where there are no lanes.  No CUDA kernel: bytes lie on a disk.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define TARGET __attribute__((target("sha,sse4.1")))
typedef __m128i words;
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
#ifdef __linux__
#include <sys/auxv.h>
#endif
#ifdef __clang__
#define TARGET __attribute__((target("sha2")))
#else
#define TARGET __attribute__((target("+crypto")))
#endif
#include <arm_neon.h>
typedef uint32x4_t words;
#endif

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

#ifndef TARGET
API int64_t sha256_lanes(void) { return 0; }
API void sha256_blocks(uint32_t *one, const uint8_t *a, uint32_t *other, const uint8_t *b, int64_t blocks) {
    (void)one, (void)a, (void)other, (void)b, (void)blocks;
}
#else
#define INLINE TARGET static inline __attribute__((always_inline))

static const uint32_t K[64] __attribute__((aligned(16))) = { /* FIPS 180-4, 4.2.2 */
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#ifdef __x86_64__
/* CPUID leaf 7 says SHA; the vectors it works on are those of every x86-64 system. */
API int64_t sha256_lanes(void) {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 ? 2 : 0;
}
/* The instructions want words of the hash as (a, b, e, f) and (c, d, g, h), the first of each uppermost. */
INLINE void load(const uint32_t *h, words *s) {
    words x = _mm_shuffle_epi32(_mm_loadu_si128((const words *)h), 0xB1);
    words y = _mm_shuffle_epi32(_mm_loadu_si128((const words *)(h + 4)), 0x1B);
    s[0] = _mm_alignr_epi8(x, y, 8), s[1] = _mm_blend_epi16(y, x, 0xF0);
}
INLINE void store(uint32_t *h, const words *s) {
    words x = _mm_shuffle_epi32(s[0], 0x1B), y = _mm_shuffle_epi32(s[1], 0xB1);
    _mm_storeu_si128((words *)h, _mm_blend_epi16(x, y, 0xF0)), _mm_storeu_si128((words *)(h + 4), _mm_alignr_epi8(y, x, 8));
}
INLINE words add(words a, words b) { return _mm_add_epi32(a, b); }
INLINE words constants(int round) { return _mm_load_si128((const words *)(K + 4 * round)); }
INLINE words message(const uint8_t *x) {
    return _mm_shuffle_epi8(_mm_loadu_si128((const words *)x), _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
}
INLINE words extend(words a, words b, words c, words d) {
    return _mm_sha256msg2_epu32(add(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4)), d);
}
INLINE void four_rounds(words *s, words w) {
    s[1] = _mm_sha256rnds2_epu32(s[1], s[0], w);
    s[0] = _mm_sha256rnds2_epu32(s[0], s[1], _mm_shuffle_epi32(w, 0x0E));
}
#else
API int64_t sha256_lanes(void) {
#ifdef __linux__
    return getauxval(AT_HWCAP) & HWCAP_SHA2 ? 2 : 0;
#else
    return 2; /* every Mac with such a processor has them */
#endif
}
INLINE void load(const uint32_t *h, words *s) { s[0] = vld1q_u32(h), s[1] = vld1q_u32(h + 4); }
INLINE void store(uint32_t *h, const words *s) { vst1q_u32(h, s[0]), vst1q_u32(h + 4, s[1]); }
INLINE words add(words a, words b) { return vaddq_u32(a, b); }
INLINE words constants(int round) { return vld1q_u32(K + 4 * round); }
INLINE words message(const uint8_t *x) { return vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(x))); }
INLINE words extend(words a, words b, words c, words d) { return vsha256su1q_u32(vsha256su0q_u32(a, b), c, d); }
INLINE void four_rounds(words *s, words w) {
    words before = s[0];
    s[0] = vsha256hq_u32(before, s[1], w), s[1] = vsha256h2q_u32(s[1], before, w);
}
#endif

/* Every loop has a fixed number of rounds, so that compilers keep m and s in registers. */
INLINE void go_on(int lanes, uint32_t *const *h, const uint8_t *const *x, int64_t blocks) {
    words s[2][2], before[2][2], m[2][4];
    for (int l = 0; l < lanes; l++) load(h[l], s[l]);
    for (int64_t at = 0; at < 64 * blocks; at += 64) {
        memcpy(before, s, sizeof s);
#pragma GCC unroll 16
        for (int round = 0; round < 16; round++)
#pragma GCC unroll 2
            for (int l = 0; l < lanes; l++) {
                words *w = m[l], *next = w + (round & 3);
                *next = round < 4 ? message(x[l] + at + 16 * round)
                                  : extend(*next, w[(round + 1) & 3], w[(round + 2) & 3], w[(round + 3) & 3]);
                four_rounds(s[l], add(*next, constants(round)));
            }
        for (int l = 0; l < lanes; l++) s[l][0] = add(s[l][0], before[l][0]), s[l][1] = add(s[l][1], before[l][1]);
    }
    for (int l = 0; l < lanes; l++) store(h[l], s[l]);
}

TARGET API void sha256_blocks(uint32_t *one, const uint8_t *a, uint32_t *other, const uint8_t *b, int64_t blocks) {
    uint32_t *const hashes[] = {one, other};
    const uint8_t *const streams[] = {a, b};
    if (b) go_on(2, hashes, streams, blocks);
    else go_on(1, hashes, streams, blocks);
}
#endif
