/* Signed exponent histograms: what is counted while a tensor is measured, and how it is written. */
#ifndef WATCHSTEP_HISTOGRAM_H
#define WATCHSTEP_HISTOGRAM_H

#include "chunk.h"

#define BINS64 4096 /* signs and exponent bits of float64 */
#define SMALL32 23  /* exponents of float32's subnormals: -149 ... -127 */
#define SMALL64 52  /* of float64's: -1074 ... -1023 */

/* Counts of the elements of one tensor of float32, or of what was widened to it. Starts as all zeros. */
typedef struct {
    uint32_t copies[4][BINS32];     /* private ones, so that equal bins in a row do not wait for each other */
    uint64_t bins[BINS32];          /* what the copies held when they were last emptied */
    uint64_t small[2][SMALL32];     /* subnormals by sign and exponent, from the lowest up */
    int chunks;                     /* counted since the copies were emptied */
    int refused, wait;              /* for how many chunks codes did not pay and are left out; for how many still */
} Histogram32;

typedef struct {
    uint64_t bins[BINS64];
    uint64_t small[2][SMALL64];
} Histogram64;

/* Whether the next chunk, of n elements, is to be passed with codes. */
int wants_codes(Histogram32 *histogram, size_t n);

/* Count a chunk of n elements.
   chunk: what the pass gave of it. codes: what it gave too, NULL where they were not wanted. */
void count_chunk32(Histogram32 *histogram, const float *x, size_t n, const Chunk *chunk, Codes *codes);

void count_chunk64(Histogram64 *histogram, const double *x, size_t n);

/* Write the bins that hold something, ascending; how many there are. The magnitudes of all finite elements but zeros lie
   within abs_min and abs_max. Afterwards the histogram is empty. */
int64_t write_bins32(Histogram32 *histogram, double abs_min, double abs_max, int16_t *bins, int64_t *counts);
int64_t write_bins64(Histogram64 *histogram, double abs_min, double abs_max, int16_t *bins, int64_t *counts);

#endif
