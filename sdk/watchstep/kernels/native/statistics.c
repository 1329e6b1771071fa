/* Statistics of tensors in host memory, one row each: see watchstep/statistics.py for what the figures mean.

   A tensor is taken in chunks that stay in the first cache. Of each chunk of float32 one pass gives all sums as
   distances from a shift, the mean of the chunk before, which keeps the second moment from cancelling (Chan, Golub,
   LeVeque 1979). Where a chunk holds NaN or infinity, or squares that float32 cannot hold, it is taken again, slower.
   Chunks are merged in float64. Narrower types are widened into a chunk of float32, which holds them exactly. */
#include "elements.h"
#include "histogram.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static Pass pass = pass_plain;

__attribute__((constructor)) static void choose_pass(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx512())
        pass = pass_avx512;
    else if (has_avx2())
        pass = pass_avx2;
#endif
}

typedef struct {
    int64_t nan, pos_inf, neg_inf, zero, negative;
    double min, max, abs_min;
    double finite, mean, m2, abs_sum, square_sum;
} Row;

/* Add a part of n finite elements to a row: counts, extremes and sums of magnitudes are the caller's. */
static void add_moments(Row *row, double n, double mean, double m2)
{
    double total = row->finite + n, distance = mean - row->mean;
    if (row->finite == 0) {
        row->mean = mean;
        row->m2 = m2;
    } else {
        row->mean += distance * (n / total);
        row->m2 += m2 + distance * distance * (row->finite * (n / total));
    }
    row->finite = total;
}

static void add_extremes(Row *row, double low, double high, double least)
{
    row->min = low < row->min ? low : row->min;
    row->max = high > row->max ? high : row->max;
    row->abs_min = least < row->abs_min ? least : row->abs_min;
}

/* Sums of finite float64 in two passes: for chunks that float32 sums cannot hold, and for float64 itself. */
static void add_wide(Row *row, const double *x, size_t n)
{
    double sum = 0, sizes = 0, squares = 0, m2 = 0, low = INFINITY, high = -INFINITY, least = INFINITY;
    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++) {
        double size = fabs(x[i]);
        sum += x[i] / n; /* cannot overflow */
        sizes += size;
        squares += size * size;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        if (size > 0 && size < least)
            least = size;
        row->zero += size == 0;
        row->negative += x[i] < 0;
    }
    for (size_t i = 0; i < n; i++)
        m2 += (x[i] - sum) * (x[i] - sum);
    row->abs_sum += sizes;
    row->square_sum += squares;
    add_extremes(row, low, high, least);
    add_moments(row, (double)n, sum, m2);
}

static size_t keep_finite(Row *row, const double *x, size_t n, double *kept)
{
    size_t held = 0;
    for (size_t i = 0; i < n; i++) {
        if (isfinite(x[i]))
            kept[held++] = x[i];
        else if (isnan(x[i]))
            row->nan++;
        else if (x[i] > 0)
            row->pos_inf++;
        else
            row->neg_inf++;
    }
    return held;
}

static void add_slowly(Row *row, const float *x, size_t n)
{
    double wide[CHUNK], kept[CHUNK];
    for (size_t i = 0; i < n; i++)
        wide[i] = x[i];
    add_wide(row, kept, keep_finite(row, wide, n, kept));
}

/* Whether float32 held the squares: neither overflown, nor so small that some were lost; and whether the shift was
   near enough to the mean. */
static int is_exact_enough(const Chunk *chunk, size_t n)
{
    return isfinite(chunk->shift_square) && chunk->shift_square > 1e-28 * (double)n && chunk->shift_square < 1e34;
}

/* All elements are the same, which float32 sums of their distances from anything near would not show. */
static void add_constant(Row *row, double value, size_t n, const Chunk *chunk)
{
    row->zero += chunk->zero;
    row->negative += chunk->negative;
    row->abs_sum += (double)n * fabs(value);
    row->square_sum += (double)n * value * value;
    add_extremes(row, value, value, value != 0 ? fabs(value) : INFINITY);
    add_moments(row, (double)n, value, 0);
}

/* Add a chunk of finite elements: counts and extremes as they were found, sums taken of elements divided by a unit. */
static void add_sums(Row *row, size_t n, const Chunk *found, const Chunk *sums, double shift, double unit)
{
    double by = shift * unit, away = sums->shift_sum * unit / (double)n, square = sums->shift_square * unit * unit;
    double m2 = square - sums->shift_sum * unit * away;
    float least = INFINITY;
    if (found->abs_min_less_one != UINT32_MAX) {
        uint32_t bits = found->abs_min_less_one + 1u;
        memcpy(&least, &bits, sizeof least);
    }
    row->zero += found->zero;
    row->negative += found->negative;
    row->abs_sum += sums->abs_sum * unit;
    row->square_sum += square + 2 * by * sums->shift_sum * unit + (double)n * by * by;
    add_extremes(row, found->min, found->max, least);
    add_moments(row, (double)n, by + away, m2 > 0 ? m2 : 0);
}

/* Whether the mean lies farther from the shift than the elements do from each other. */
static int is_far(const Chunk *chunk, size_t n)
{
    return is_exact_enough(chunk, n) && chunk->shift_sum * chunk->shift_sum > 0.5 * (double)n * chunk->shift_square;
}

/* Add a chunk whose squares float32 does not hold, as vanished gradients are: once more, its largest element made
   about one by a power of two. 0 where some element is not finite, or where that is no way either. */
static int add_scaled(Row *row, const float *x, size_t n, const Chunk *found)
{
    float top = found->max > -found->min ? found->max : -found->min, scaled[CHUNK], shift = 0;
    Chunk sums;
    if (!isfinite(found->shift_sum) || !isfinite(top) || top == 0)
        return 0;
    int exponent = ilogbf(top) < -126 ? -126 : ilogbf(top);
    float scale = ldexpf(1, -exponent);
    for (size_t i = 0; i < n; i++)
        scaled[i] = x[i] * scale;
    pass(scaled, n, shift, &sums, NULL);
    if (is_far(&sums, n)) {
        shift = (float)(sums.shift_sum / (double)n);
        pass(scaled, n, shift, &sums, NULL);
    }
    if (!is_exact_enough(&sums, n))
        return 0;
    add_sums(row, n, found, &sums, shift, ldexp(1, exponent));
    return 1;
}

/* Add a chunk. Without a histogram (NULL), none is counted. */
static void add_fast(Row *row, Histogram32 *histogram, const float *x, size_t n, float *shift)
{
    Chunk chunk;
    Codes codes;
    Codes *wanted = histogram && wants_codes(histogram, n) ? &codes : NULL;
    pass(x, n, *shift, &chunk, wanted);
    if (histogram)
        count_chunk32(histogram, x, n, &chunk, wanted);
    if (chunk.min == chunk.max && isfinite(chunk.shift_sum)) {
        add_constant(row, chunk.min, n, &chunk); /* unused rows, dead units, weights of a norm at the start */
        *shift = chunk.min;
        return;
    }
    if (is_far(&chunk, n)) {
        *shift += (float)(chunk.shift_sum / (double)n); /* once more, from there */
        pass(x, n, *shift, &chunk, NULL);
    }
    if (!is_exact_enough(&chunk, n)) {
        if (!add_scaled(row, x, n, &chunk))
            add_slowly(row, x, n);
        return;
    }
    add_sums(row, n, &chunk, &chunk, *shift, 1);
    *shift += (float)(chunk.shift_sum / (double)n);
}

static void measure32(Row *row, Histogram32 *histogram, const void *data, size_t n, int kind)
{
    float held[CHUNK], shift = 0;
    for (size_t from = 0; from < n; from += CHUNK) {
        size_t size = n - from < CHUNK ? n - from : CHUNK;
        const float *x = (const float *)data + from;
        if (kind != FLOAT32) {
            widen(data, kind, from, size, held);
            x = held;
        }
        add_fast(row, histogram, x, size, &shift);
    }
}

static void measure64(Row *row, Histogram64 *histogram, const double *data, size_t n)
{
    double kept[CHUNK];
    for (size_t from = 0; from < n; from += CHUNK) {
        size_t size = n - from < CHUNK ? n - from : CHUNK;
        count_chunk64(histogram, data + from, size);
        add_wide(row, kept, keep_finite(row, data + from, size, kept));
    }
}

/* float32's infinities and NaN were counted with the bits; where a chunk held some they were counted one by one. */
static void write_row(const Row *row, int64_t n, int64_t *counts, double *values)
{
    double none = NAN;
    int any = row->finite > 0;
    counts[0] = n;
    counts[1] = row->nan;
    counts[2] = row->pos_inf;
    counts[3] = row->neg_inf;
    counts[4] = row->zero;
    counts[5] = row->negative;
    values[0] = any ? row->min : none;
    values[1] = any ? row->max : none;
    values[2] = isfinite(row->abs_min) ? row->abs_min : none;
    values[3] = any ? row->mean : none;
    values[4] = row->m2;
    values[5] = row->abs_sum;
    values[6] = row->square_sum;
}

/* Measure n tensors.

   data, sizes, kinds: where each lies, how many elements it has, of which kind (FLOAT32 ...).
   with_histogram: 0 leaves the histograms of all but float64 empty.
   counts, values: n rows of 6 and of 7, in the order of statistics.py.
   offsets: n + 1 places of the histograms in bins and histogram_counts, which have room for 600 bins a tensor, 4300 if
   it is of float64, or as many as it has elements if that is less.
   Returns how many of them hold NaN or infinity, or less than zero: -1 - the place of a tensor whose kind is unknown. */
int64_t watchstep_measure(int64_t n, const void *const *data, const int64_t *sizes, const int64_t *kinds,
                          int64_t with_histogram, int64_t *counts, double *values, int64_t *offsets, int16_t *bins,
                          int64_t *histogram_counts)
{
    Histogram32 histogram32;
    Histogram64 histogram64;
    int64_t bad = 0, nonfinite = 0;
    int is_ready64 = 0;
#if defined(__x86_64__)
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(0x1f80); /* subnormals count here, whatever the program set for itself */
#endif
    memset(&histogram32, 0, sizeof histogram32);
    offsets[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        Row row = {.min = INFINITY, .max = -INFINITY, .abs_min = INFINITY};
        int16_t *own_bins = bins + offsets[i];
        int64_t *own_counts = histogram_counts + offsets[i], written = 0;
        if (kinds[i] < 0 || kinds[i] >= KINDS) {
            bad = -1 - i;
            break;
        }
        if (kinds[i] == FLOAT64) {
            if (!is_ready64++)
                memset(&histogram64, 0, sizeof histogram64);
            measure64(&row, &histogram64, data[i], (size_t)sizes[i]);
            written = write_bins64(&histogram64, row.abs_min, fmax(-row.min, row.max), own_bins, own_counts);
        } else {
            measure32(&row, with_histogram ? &histogram32 : NULL, data[i], (size_t)sizes[i], kinds[i]);
            if (with_histogram)
                written = write_bins32(&histogram32, row.abs_min, fmax(-row.min, row.max), own_bins, own_counts);
        }
        nonfinite += row.nan + row.pos_inf + row.neg_inf > 0;
        write_row(&row, sizes[i], counts + 6 * i, values + 7 * i);
        offsets[i + 1] = offsets[i] + written;
    }
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
    return bad ? bad : nonfinite;
}
