/* What one pass over a chunk of float32 gives, and the passes for the instruction sets that there are. */
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

typedef void (*Pass)(const float *x, size_t n, float shift, Chunk *out);

void pass_plain(const float *x, size_t n, float shift, Chunk *out);
#if defined(__x86_64__)
void pass_avx2(const float *x, size_t n, float shift, Chunk *out);
void pass_avx512(const float *x, size_t n, float shift, Chunk *out);
void widen_half_f16c(const uint16_t *halves, size_t n, float *out);
#endif

#endif
