/* What one pass over a chunk of float32 gives, and the passes and counts for the instruction sets that there are. */
#ifndef WATCHSTEP_CHUNK_H
#define WATCHSTEP_CHUNK_H

#include <stddef.h>
#include <stdint.h>

/* Elements of a chunk. It stays in the first cache, and a lane adds at most 64 numbers in float32, so that sums
   carry a relative error of at most 64 * 2^-24 = 4e-6. */
#define CHUNK 2048
#define LANES 32

typedef struct {
    double shift_sum;    /* sum of x - shift */
    double shift_square; /* sum of (x - shift)^2; not finite where an element is not, or where it overflows */
    double abs_sum;
    float min, max;
    uint32_t abs_min_less_one; /* bits of the smallest non-zero magnitude, less one; all ones where there is none */
    int64_t zero, negative;
} Chunk;

#define BINS32 512 /* signs and exponent bits of float32 */

#define CODES_PADDING 192 /* so that counts may read whole groups of vectors */

/* Signs and exponents of the elements of a chunk: what is counted without the floats. Those of the last n % LANES
   elements are missing. The order need not be that of the elements. */
typedef struct {
    union { /* AVX-512: bits 31 to 24; AVX2: the exponent bits */
        _Alignas(64) uint8_t upper[CHUNK + CODES_PADDING];
        _Alignas(64) uint8_t exponents[CHUNK + CODES_PADDING];
    };
    union { /* AVX-512: bits 23 to 16; AVX2: 1, and 16 more where negative: sums hold two counts, four bits each */
        _Alignas(64) uint8_t lower[CHUNK + CODES_PADDING];
        _Alignas(64) uint8_t weights[CHUNK + CODES_PADDING];
    };
    size_t size, nonzero; /* elements; those among them that are not zero */
} Codes;

/* A pass; without codes (NULL), none are given. */
typedef void (*Pass)(const float *x, size_t n, float shift, Chunk *out, Codes *codes);

/* Count signs and exponents into bins, by exponent from top down; exponent bits 0 and 255 may be left out.
   Returns 0, having counted nothing, where they lie so far apart that counting one by one is cheaper. */
typedef int (*Count)(Codes *codes, int top, uint32_t *bins);

void pass_plain(const float *x, size_t n, float shift, Chunk *out, Codes *codes);
#if defined(__x86_64__)
/* The widest registers to use, in bits: tests build the library with fewer, so that every way is tried anywhere. */
#ifndef WATCHSTEP_WIDEST
#define WATCHSTEP_WIDEST 512
#endif

/* As of Ice Lake and Zen 4. */
static inline int has_avx512(void)
{
    return WATCHSTEP_WIDEST >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg") &&
           __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi");
}

static inline int has_avx2(void)
{
    return WATCHSTEP_WIDEST >= 256 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi");
}

void pass_avx2(const float *x, size_t n, float shift, Chunk *out, Codes *codes);
void pass_avx512(const float *x, size_t n, float shift, Chunk *out, Codes *codes);
int count_avx2(Codes *codes, int top, uint32_t *bins);
int count_avx512(Codes *codes, int top, uint32_t *bins);
void widen_half_f16c(const uint16_t *halves, size_t n, float *out);
#endif

#endif
