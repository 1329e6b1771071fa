/* Statistics of tensors in host memory, one row each: see watchstep/statistics.py for what the figures mean.

   A tensor is taken in chunks that stay in the first cache. Of each chunk of float32 one pass gives all sums as
   distances from a shift, the mean of the chunk before, which keeps the second moment from cancelling (Chan, Golub,
   LeVeque 1979). Where a chunk holds NaN or infinity, or squares that float32 cannot hold, it is taken again, slower.
   Chunks are merged in float64. Narrower types are widened into a chunk of float32, which holds them exactly. */
#include "chunk.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, KINDS };

#define BINS32 512
#define BINS64 4096
#define SMALL32 24 /* exponents of float32's subnormals: -149 ... -127 */
#define SMALL64 53 /* of float64's: -1074 ... -1023 */

typedef struct {
    int64_t count, nan, pos_inf, neg_inf, zero, negative;
    double min, max, abs_min;
    double finite, mean, m2, abs_sum, square_sum;
    uint64_t bins[BINS64];   /* by sign and exponent bits; float32 uses the first 512 */
    uint64_t small[2][SMALL64]; /* subnormals by sign and exponent, from the lowest up */
} Row;

static Pass best_pass(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return pass_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return pass_avx2;
#endif
    return pass_plain;
}

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

static void add_fast(Row *row, Pass by_chunk, const float *x, size_t n, float *shift)
{
    Chunk chunk;
    by_chunk(x, n, *shift, &chunk);
    if (chunk.zero == (int64_t)n) {
        row->zero += chunk.zero; /* all zero, as unused rows and dead units are */
        add_extremes(row, 0, 0, INFINITY);
        add_moments(row, (double)n, 0, 0);
        return;
    }
    if (is_exact_enough(&chunk, n) && chunk.shift_sum * chunk.shift_sum > 0.5 * (double)n * chunk.shift_square) {
        *shift += (float)(chunk.shift_sum / (double)n); /* far from this chunk's mean: once more, from there */
        by_chunk(x, n, *shift, &chunk);
    }
    if (!is_exact_enough(&chunk, n)) {
        add_slowly(row, x, n);
        return;
    }
    double by = *shift, away = chunk.shift_sum / (double)n;
    double m2 = chunk.shift_square - chunk.shift_sum * away;
    float least = INFINITY;
    if (chunk.abs_min_less_one != UINT32_MAX) {
        uint32_t bits = chunk.abs_min_less_one + 1u;
        memcpy(&least, &bits, sizeof least);
    }
    row->zero += chunk.zero;
    row->negative += chunk.negative;
    row->abs_sum += chunk.abs_sum;
    row->square_sum += chunk.shift_square + 2 * by * chunk.shift_sum + (double)n * by * by;
    add_extremes(row, chunk.min, chunk.max, least);
    add_moments(row, (double)n, by + away, m2 > 0 ? m2 : 0);
    *shift += (float)away;
}

/* Four private copies, so that equal bins in a row do not wait for each other. */
static void count_bits(const float *x, size_t n, uint32_t (*copies)[BINS32])
{
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

static void count_small32(Row *row, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits, fraction;
        memcpy(&bits, x + i, sizeof bits);
        fraction = bits & 0x7fffffffu;
        if (fraction != 0 && fraction < 0x00800000u)
            row->small[bits >> 31][31 - __builtin_clz(fraction)]++;
    }
}

static void add_chunk32(Row *row, Pass by_chunk, const float *x, size_t n, float *shift, uint32_t (*copies)[BINS32])
{
    int64_t zero = row->zero;
    uint64_t flat = 0;
    for (int k = 0; k < 4; k++)
        flat -= (uint64_t)copies[k][0] + copies[k][BINS32 / 2];
    count_bits(x, n, copies);
    for (int k = 0; k < 4; k++)
        flat += (uint64_t)copies[k][0] + copies[k][BINS32 / 2];
    add_fast(row, by_chunk, x, n, shift);
    if (flat != (uint64_t)(row->zero - zero))
        count_small32(row, x, n);
}

static void gather(Row *row, uint32_t (*copies)[BINS32])
{
    for (int k = 0; k < 4; k++)
        for (int bin = 0; bin < BINS32; bin++)
            row->bins[bin] += copies[k][bin];
    memset(copies, 0, 4 * sizeof *copies);
}

static float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A small float with this many exponent and fraction bits; e4m3fn has no infinity, and NaN in its last code only. */
static float widened(uint32_t code, int exponent_bits, int fraction_bits, int has_infinity)
{
    uint32_t sign = code >> (exponent_bits + fraction_bits), top = (1u << exponent_bits) - 1;
    uint32_t exponent = code >> fraction_bits & top, fraction = code & ((1u << fraction_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    float value;
    if (has_infinity && exponent == top)
        value = fraction ? NAN : INFINITY;
    else if (!has_infinity && exponent == top && fraction == (1u << fraction_bits) - 1)
        value = NAN;
    else if (exponent == 0)
        value = ldexpf((float)fraction, 1 - bias - fraction_bits);
    else
        value = float_of_bits((exponent + 127 - bias) << 23 | fraction << (23 - fraction_bits));
    return sign ? -value : value;
}

static float tables[2][256];
static Pass pass;

__attribute__((constructor)) static void prepare(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    pass = best_pass();
    for (uint32_t code = 0; code < 256; code++) {
        tables[0][code] = widened(code, 4, 3, 0);
        tables[1][code] = widened(code, 5, 2, 1);
    }
}

static void widen(const void *data, int kind, size_t from, size_t n, float *out)
{
    const uint16_t *halves = (const uint16_t *)data + from;
    const uint8_t *bytes = (const uint8_t *)data + from;
    if (kind == BFLOAT16)
        for (size_t i = 0; i < n; i++)
            out[i] = float_of_bits((uint32_t)halves[i] << 16);
#if defined(__x86_64__)
    else if (kind == FLOAT16 && __builtin_cpu_supports("f16c"))
        widen_half_f16c(halves, n, out);
#endif
    else if (kind == FLOAT16)
        for (size_t i = 0; i < n; i++) {
            uint32_t code = halves[i], size = (code & 0x7fffu) << 13;
            /* As float32's exponent bits, times 2^112; infinity and NaN need the highest exponent. */
            float value = float_of_bits(size) * 0x1p112f;
            value = (code & 0x7c00u) == 0x7c00u ? float_of_bits(size | 0x7f800000u) : value;
            out[i] = code & 0x8000u ? -value : value;
        }
    else
        for (size_t i = 0; i < n; i++)
            out[i] = tables[kind == FLOAT8_E5M2][bytes[i]];
}

static void measure32(Row *row, const void *data, size_t n, int kind, int with_histogram)
{
    uint32_t copies[4][BINS32];
    float held[CHUNK], shift = 0;
    memset(copies, 0, sizeof copies);
    for (size_t from = 0; from < n; from += CHUNK) {
        size_t size = n - from < CHUNK ? n - from : CHUNK;
        const float *x = (const float *)data + from;
        if (kind != FLOAT32) {
            widen(data, kind, from, size, held);
            x = held;
        }
        if (with_histogram)
            add_chunk32(row, pass, x, size, &shift, copies);
        else
            add_fast(row, pass, x, size, &shift);
        if ((from / CHUNK & 0xffff) == 0xffff)
            gather(row, copies); /* before 32 bits could overflow */
    }
    gather(row, copies);
}

static void measure64(Row *row, const double *data, size_t n)
{
    double kept[CHUNK];
    for (size_t from = 0; from < n; from += CHUNK) {
        size_t size = n - from < CHUNK ? n - from : CHUNK;
        for (size_t i = from; i < from + size; i++) {
            uint64_t bits, fraction;
            memcpy(&bits, data + i, sizeof bits);
            fraction = bits & 0x7fffffffffffffffu;
            row->bins[bits >> 52]++;
            if (fraction != 0 && fraction < 0x0010000000000000u)
                row->small[bits >> 63][63 - __builtin_clzll(fraction)]++;
        }
        add_wide(row, kept, keep_finite(row, data + from, size, kept));
    }
}

/* Write a row's histogram, ascending; how many bins it has. */
static int64_t write_bins(const Row *row, int wide, int16_t *bins, int64_t *counts)
{
    int top = wide ? 2047 : 255, bias = wide ? 1023 : 127, lowest = wide ? -1074 : -149;
    int small = wide ? 52 : 23;
    int64_t held = 0;
    for (int place = 0; place < small; place++)
        for (int sign = 0; sign < 2; sign++)
            if (row->small[sign][place]) {
                bins[held] = (int16_t)(2 * (lowest + place) + sign);
                counts[held++] = (int64_t)row->small[sign][place];
            }
    for (int exponent = 1; exponent < top; exponent++)
        for (int sign = 0; sign < 2; sign++) {
            uint64_t found = row->bins[sign * (top + 1) + exponent];
            if (found) {
                bins[held] = (int16_t)(2 * (exponent - bias) + sign);
                counts[held++] = (int64_t)found;
            }
        }
    return held;
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
   Returns 0, or 1 + the place of a tensor whose kind is unknown. */
int64_t watchstep_measure(int64_t n, const void *const *data, const int64_t *sizes, const int32_t *kinds,
                          int64_t with_histogram, int64_t *counts, double *values, int64_t *offsets, int16_t *bins,
                          int64_t *histogram_counts)
{
    Row row;
#if defined(__x86_64__)
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(0x1f80); /* subnormals count here, whatever the program set for itself */
#endif
    int64_t bad = 0;
    offsets[0] = 0;
    for (int64_t i = 0; i < n && !bad; i++) {
        if (kinds[i] < 0 || kinds[i] >= KINDS) {
            bad = 1 + i;
            break;
        }
        memset(&row, 0, sizeof row);
        row.min = row.abs_min = INFINITY;
        row.max = -INFINITY;
        if (kinds[i] == FLOAT64)
            measure64(&row, data[i], (size_t)sizes[i]);
        else
            measure32(&row, data[i], (size_t)sizes[i], kinds[i], with_histogram != 0);
        write_row(&row, sizes[i], counts + 6 * i, values + 7 * i);
        offsets[i + 1] = offsets[i] + write_bins(&row, kinds[i] == FLOAT64, bins + offsets[i],
                                                 histogram_counts + offsets[i]);
    }
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
    return bad;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define FOR_EACH_PROCESSOR
#endif

FOR_EACH_PROCESSOR static int any_nonfinite32(const uint32_t *bits, size_t n)
{
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t exponent = bits[i] & 0x7f800000u;
        top = exponent > top ? exponent : top;
    }
    return top == 0x7f800000u;
}

FOR_EACH_PROCESSOR static int any_nonfinite16(const uint16_t *bits, size_t n, uint16_t mask)
{
    uint16_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t exponent = bits[i] & mask;
        top = exponent > top ? exponent : top;
    }
    return top == mask;
}

static int any_nonfinite(const void *data, size_t from, size_t n, int kind)
{
    if (kind == FLOAT32)
        return any_nonfinite32((const uint32_t *)data + from, n);
    if (kind == FLOAT16 || kind == BFLOAT16)
        return any_nonfinite16((const uint16_t *)data + from, n, kind == FLOAT16 ? 0x7c00u : 0x7f80u);
    if (kind == FLOAT64) {
        for (size_t i = from; i < from + n; i++)
            if (!isfinite(((const double *)data)[i]))
                return 1;
        return 0;
    }
    for (size_t i = from; i < from + n; i++)
        if (!isfinite(tables[kind == FLOAT8_E5M2][((const uint8_t *)data)[i]]))
            return 1;
    return 0;
}

#define WHOLE 16384 /* elements up to which a tensor is looked at whole */

/* Whether some tensor holds NaN or infinity: small ones whole, of large ones the slice of this turn.
   Returns 1 + the place of the first that does, 0 for none, -1 for an unknown kind. */
int64_t watchstep_nonfinite(int64_t n, const void *const *data, const int64_t *sizes, const int32_t *kinds,
                            int64_t turn, int64_t slices)
{
    for (int64_t i = 0; i < n; i++) {
        size_t size = (size_t)sizes[i], from = 0, part = size;
        if (kinds[i] < 0 || kinds[i] >= KINDS)
            return -1;
        if (sizes[i] > WHOLE) {
            part = size / (size_t)slices + 1;
            from = part * (size_t)turn < size ? part * (size_t)turn : size;
            part = size - from < part ? size - from : part;
        }
        if (any_nonfinite(data[i], from, part, kinds[i]))
            return 1 + i;
    }
    return 0;
}
