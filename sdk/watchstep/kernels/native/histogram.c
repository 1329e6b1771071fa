/* Signed exponent histograms. A chunk is counted by its codes where the processor can count many at once, unless its
   exponents are too many for that; else one by one. */
#include "histogram.h"

#include <math.h>
#include <string.h>

#define MOST_CHUNKS 0xffff /* before 32 bits could overflow */
#define LONGEST_WAIT 255   /* chunks counted one by one until codes are tried again */

static Count count;

__attribute__((constructor)) static void choose_count(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx512())
        count = count_avx512;
    else if (has_avx2())
        count = count_avx2;
#endif
}

static void count_one_by_one(Histogram32 *histogram, const float *x, size_t n)
{
    uint32_t (*copies)[BINS32] = histogram->copies;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t two[2];
        memcpy(two, x + i, sizeof two);
        copies[0][(uint32_t)two[0] >> 23]++;
        copies[1][two[0] >> 55]++;
        copies[2][(uint32_t)two[1] >> 23]++;
        copies[3][two[1] >> 55]++;
    }
    for (; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        copies[0][bits >> 23]++;
    }
}

static void count_small(Histogram32 *histogram, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits, fraction;
        memcpy(&bits, x + i, sizeof bits);
        fraction = bits & 0x7fffffffu;
        if (fraction != 0 && fraction < 0x00800000u)
            histogram->small[bits >> 31][31 - __builtin_clz(fraction)]++;
    }
}

static void empty_copies(Histogram32 *histogram)
{
    for (int k = 0; k < 4; k++)
        for (int bin = 0; bin < BINS32; bin++)
            histogram->bins[bin] += histogram->copies[k][bin];
    memset(histogram->copies, 0, sizeof histogram->copies);
    histogram->chunks = 0;
}

int wants_codes(Histogram32 *histogram, size_t n)
{
    if (histogram->wait) {
        histogram->wait--;
        return 0;
    }
    return count && n >= LANES;
}

/* Exponent bits of the largest magnitude; where the chunk holds NaN they may be too low or too high, which costs time. */
static int top_exponent(const Chunk *chunk)
{
    float most = fmaxf(-chunk->min, chunk->max);
    uint32_t bits;
    memcpy(&bits, &most, sizeof bits);
    bits = bits >> 23 & 0xff;
    return bits < 254 ? (int)bits : 254;
}

void count_chunk32(Histogram32 *histogram, const float *x, size_t n, const Chunk *chunk, Codes *codes)
{
    if (chunk->zero == (int64_t)n)
        return;
    if (codes && count(codes, top_exponent(chunk), histogram->copies[0])) {
        histogram->refused = 0;
        count_one_by_one(histogram, x + codes->size, n - codes->size);
    } else {
        if (codes) {
            histogram->refused = 2 * histogram->refused + 1;
            histogram->refused = histogram->refused < LONGEST_WAIT ? histogram->refused : LONGEST_WAIT;
            histogram->wait = histogram->refused;
        }
        count_one_by_one(histogram, x, n);
    }
    if (chunk->abs_min_less_one < 0x007fffffu)
        count_small(histogram, x, n);
    if (++histogram->chunks == MOST_CHUNKS)
        empty_copies(histogram);
}

void count_chunk64(Histogram64 *histogram, const double *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits, fraction;
        memcpy(&bits, x + i, sizeof bits);
        fraction = bits & 0x7fffffffffffffffu;
        histogram->bins[bits >> 52]++;
        if (fraction != 0 && fraction < 0x0010000000000000u)
            histogram->small[bits >> 63][63 - __builtin_clzll(fraction)]++;
    }
}

/* Where bins are written to, and how many have been. */
typedef struct {
    int16_t *bins;
    int64_t *counts, held;
} Output;

static void write(Output *to, int exponent, int sign, uint64_t found)
{
    if (found) {
        to->bins[to->held] = (int16_t)(2 * exponent + sign);
        to->counts[to->held++] = (int64_t)found;
    }
}

static void write_small(Output *to, uint64_t *small, int places, int lowest)
{
    for (int place = 0; place < places; place++)
        for (int sign = 0; sign < 2; sign++)
            write(to, lowest + place, sign, small[sign * places + place]);
    memset(small, 0, 2 * (size_t)places * sizeof *small);
}

/* Floor of the binary logarithm, no lower than that of the smallest number that is not subnormal. */
static int exponent_of(double size, int lowest)
{
    int exponent = size > 0 ? ilogb(size) : lowest;
    return exponent > lowest ? exponent : lowest;
}

/* Bins of exponents without numbers (of zeros, of infinities and NaN) are never read, and so never emptied. */
int64_t write_bins32(Histogram32 *histogram, double abs_min, double abs_max, int16_t *bins, int64_t *counts)
{
    Output to = {bins, counts, 0};
    histogram->refused = histogram->wait = 0;
    if (!isfinite(abs_min))
        return 0;
    if (abs_min < 0x1p-126)
        write_small(&to, histogram->small[0], SMALL32, -149);
    int last = exponent_of(abs_max, -126);
    for (int exponent = exponent_of(abs_min, -126); exponent <= last; exponent++)
        for (int sign = 0; sign < 2; sign++) {
            int bin = sign << 8 | (exponent + 127);
            uint64_t found = histogram->bins[bin];
            histogram->bins[bin] = 0;
            for (int k = 0; k < 4; k++) {
                found += histogram->copies[k][bin];
                histogram->copies[k][bin] = 0;
            }
            write(&to, exponent, sign, found);
        }
    return to.held;
}

int64_t write_bins64(Histogram64 *histogram, double abs_min, double abs_max, int16_t *bins, int64_t *counts)
{
    Output to = {bins, counts, 0};
    if (!isfinite(abs_min))
        return 0;
    if (abs_min < 0x1p-1022)
        write_small(&to, histogram->small[0], SMALL64, -1074);
    int last = exponent_of(abs_max, -1022);
    for (int exponent = exponent_of(abs_min, -1022); exponent <= last; exponent++)
        for (int sign = 0; sign < 2; sign++) {
            uint64_t *found = &histogram->bins[sign << 11 | (exponent + 1023)];
            write(&to, exponent, sign, *found);
            *found = 0;
        }
    return to.held;
}
