/* The pass over a chunk in plain C: for other processors, for the ends of chunks, and as the other passes' measure. */
#include "chunk.h"

#include <math.h>
#include <string.h>

void pass_plain(const float *x, size_t n, float shift, Chunk *out, Codes *codes)
{
    (void)codes; /* there is no count in plain C that would want them */
    double sum = 0, square = 0, magnitude_sum = 0;
    float low = INFINITY, high = -INFINITY;
    uint32_t least = UINT32_MAX;
    int64_t zero = 0, negative = 0;
    for (size_t i = 0; i < n; i++) {
        float value = x[i], distance = value - shift;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffffu;
        sum += distance;
        square += (double)distance * distance;
        magnitude_sum += fabsf(value);
        low = value < low ? value : low;
        high = value > high ? value : high;
        least = bits - 1u < least ? bits - 1u : least;
        zero += bits == 0;
        negative += value < 0;
    }
    out->shift_sum = sum;
    out->shift_square = square;
    out->abs_sum = magnitude_sum;
    out->min = low;
    out->max = high;
    out->abs_min_less_one = least;
    out->zero = zero;
    out->negative = negative;
}
