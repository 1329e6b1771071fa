/* The pass over a chunk by AVX2 and AVX-512: 32 numbers a turn in two chains, float32 lanes, summed up in float64.
   The caller knows that the processor has the instructions. */
#if defined(__x86_64__)
#include "chunk.h"

#include <immintrin.h>
#include <math.h>

static void add_end(const float *x, size_t n, float shift, Chunk *out)
{
    Chunk end;
    pass_plain(x, n, shift, &end, NULL);
    out->shift_sum += end.shift_sum;
    out->shift_square += end.shift_square;
    out->abs_sum += end.abs_sum;
    out->min = end.min < out->min ? end.min : out->min;
    out->max = end.max > out->max ? end.max : out->max;
    if (end.abs_min_less_one < out->abs_min_less_one)
        out->abs_min_less_one = end.abs_min_less_one;
    out->zero += end.zero;
    out->negative += end.negative;
}

static double added(const float *lanes, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += lanes[i];
    return sum;
}

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,popcnt")))
#define AVX2 __attribute__((target("avx2,fma,popcnt")))

AVX512 static inline __attribute__((always_inline)) void
pass_avx512_with(const float *x, size_t n, float shift, Chunk *out, Codes *codes)
{
    const __m512 by = _mm512_set1_ps(shift), none = _mm512_setzero_ps();
    const __m512i unsigned_bits = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1);
    __m512 sum0 = none, sum1 = none, square0 = none, square1 = none, size0 = none, size1 = none;
    __m512 low = _mm512_set1_ps(INFINITY), high = _mm512_set1_ps(-INFINITY);
    __m512i least0 = _mm512_set1_epi32(-1), least1 = least0;
    int64_t zero = 0, negative = 0;
    uint8_t places[64];
    for (int k = 0; k < 32; k++) {
        places[k] = (uint8_t)(4 * k + 3);
        places[k + 32] = (uint8_t)(4 * k + 2);
    }
    const __m512i upper_then_lower = _mm512_loadu_si512(places);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m512 v = _mm512_loadu_ps(x + i), w = _mm512_loadu_ps(x + i + 16);
        __m512 dv = _mm512_sub_ps(v, by), dw = _mm512_sub_ps(w, by);
        __m512i mv = _mm512_and_si512(_mm512_castps_si512(v), unsigned_bits);
        __m512i mw = _mm512_and_si512(_mm512_castps_si512(w), unsigned_bits);
        sum0 = _mm512_add_ps(sum0, dv);
        sum1 = _mm512_add_ps(sum1, dw);
        square0 = _mm512_fmadd_ps(dv, dv, square0);
        square1 = _mm512_fmadd_ps(dw, dw, square1);
        size0 = _mm512_add_ps(size0, _mm512_castsi512_ps(mv));
        size1 = _mm512_add_ps(size1, _mm512_castsi512_ps(mw));
        low = _mm512_min_ps(low, _mm512_min_ps(v, w));
        high = _mm512_max_ps(high, _mm512_max_ps(v, w));
        least0 = _mm512_min_epu32(least0, _mm512_sub_epi32(mv, one));
        least1 = _mm512_min_epu32(least1, _mm512_sub_epi32(mw, one));
        zero += __builtin_popcount((uint32_t)_mm512_testn_epi32_mask(mv, mv) |
                                   (uint32_t)_mm512_testn_epi32_mask(mw, mw) << 16);
        negative += __builtin_popcount((uint32_t)_mm512_cmp_ps_mask(v, none, _CMP_LT_OQ) |
                                       (uint32_t)_mm512_cmp_ps_mask(w, none, _CMP_LT_OQ) << 16);
        if (codes) {
            __m512i bytes = _mm512_permutex2var_epi8(_mm512_castps_si512(v), upper_then_lower, _mm512_castps_si512(w));
            _mm256_store_si256((__m256i *)(codes->upper + i), _mm512_castsi512_si256(bytes));
            _mm256_store_si256((__m256i *)(codes->lower + i), _mm512_extracti64x4_epi64(bytes, 1));
        }
    }
    if (codes) {
        codes->size = i;
        codes->nonzero = i - (size_t)zero;
    }
    float lanes[16];
    _mm512_storeu_ps(lanes, sum0);
    out->shift_sum = added(lanes, 16);
    _mm512_storeu_ps(lanes, sum1);
    out->shift_sum += added(lanes, 16);
    _mm512_storeu_ps(lanes, square0);
    out->shift_square = added(lanes, 16);
    _mm512_storeu_ps(lanes, square1);
    out->shift_square += added(lanes, 16);
    _mm512_storeu_ps(lanes, size0);
    out->abs_sum = added(lanes, 16);
    _mm512_storeu_ps(lanes, size1);
    out->abs_sum += added(lanes, 16);
    out->min = _mm512_reduce_min_ps(low);
    out->max = _mm512_reduce_max_ps(high);
    out->abs_min_less_one = _mm512_reduce_min_epu32(_mm512_min_epu32(least0, least1));
    out->zero = zero;
    out->negative = negative;
    add_end(x + i, n - i, shift, out);
}

AVX512 void pass_avx512(const float *x, size_t n, float shift, Chunk *out, Codes *codes)
{
    if (codes)
        pass_avx512_with(x, n, shift, out, codes);
    else
        pass_avx512_with(x, n, shift, out, NULL);
}

AVX2 static inline __attribute__((always_inline)) void
pass_avx2_with(const float *x, size_t n, float shift, Chunk *out, Codes *codes)
{
    const __m256 by = _mm256_set1_ps(shift), none = _mm256_setzero_ps();
    const __m256i unsigned_bits = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi32(1);
    __m256 sum[4], square[4], size[4], low = _mm256_set1_ps(INFINITY), high = _mm256_set1_ps(-INFINITY);
    __m256i least = _mm256_set1_epi32(-1);
    int64_t zero = 0, negative = 0;
    size_t i = 0;
    for (int k = 0; k < 4; k++)
        sum[k] = square[k] = size[k] = none;
    for (; i + LANES <= n; i += LANES) {
        __m256i bits[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m256 v = _mm256_loadu_ps(x + i + 8 * k), d = _mm256_sub_ps(v, by);
            __m256i m = _mm256_and_si256(_mm256_castps_si256(v), unsigned_bits);
            sum[k] = _mm256_add_ps(sum[k], d);
            square[k] = _mm256_fmadd_ps(d, d, square[k]);
            size[k] = _mm256_add_ps(size[k], _mm256_castsi256_ps(m));
            low = _mm256_min_ps(low, v);
            high = _mm256_max_ps(high, v);
            least = _mm256_min_epu32(least, _mm256_sub_epi32(m, one));
            __m256i is_zero = _mm256_cmpeq_epi32(m, _mm256_setzero_si256());
            zero += __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(is_zero)));
            negative += __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(v, none, _CMP_LT_OQ)));
            bits[k] = _mm256_castps_si256(v);
        }
        if (codes) {
            __m256i signs[4], exponents[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                signs[k] = _mm256_srai_epi32(bits[k], 31);
                exponents[k] = _mm256_srli_epi32(_mm256_add_epi32(bits[k], bits[k]), 24);
            }
            __m256i negative = _mm256_packs_epi16(_mm256_packs_epi32(signs[0], signs[1]),
                                                  _mm256_packs_epi32(signs[2], signs[3]));
            negative = _mm256_and_si256(negative, _mm256_set1_epi8(16));
            _mm256_storeu_si256((__m256i *)(codes->weights + i), _mm256_or_si256(negative, _mm256_set1_epi8(1)));
            _mm256_storeu_si256((__m256i *)(codes->exponents + i),
                                _mm256_packus_epi16(_mm256_packus_epi32(exponents[0], exponents[1]),
                                                    _mm256_packus_epi32(exponents[2], exponents[3])));
        }
    }
    if (codes) {
        codes->size = i;
        codes->nonzero = i - (size_t)zero;
    }
    float lanes[8], lows[8], highs[8];
    uint32_t leasts[8];
    out->shift_sum = out->shift_square = out->abs_sum = 0;
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_ps(lanes, sum[k]);
        out->shift_sum += added(lanes, 8);
        _mm256_storeu_ps(lanes, square[k]);
        out->shift_square += added(lanes, 8);
        _mm256_storeu_ps(lanes, size[k]);
        out->abs_sum += added(lanes, 8);
    }
    _mm256_storeu_ps(lows, low);
    _mm256_storeu_ps(highs, high);
    _mm256_storeu_si256((__m256i *)leasts, least);
    out->min = INFINITY;
    out->max = -INFINITY;
    out->abs_min_less_one = UINT32_MAX;
    for (int k = 0; k < 8; k++) {
        out->min = lows[k] < out->min ? lows[k] : out->min;
        out->max = highs[k] > out->max ? highs[k] : out->max;
        out->abs_min_less_one = leasts[k] < out->abs_min_less_one ? leasts[k] : out->abs_min_less_one;
    }
    out->zero = zero;
    out->negative = negative;
    add_end(x + i, n - i, shift, out);
}

AVX2 void pass_avx2(const float *x, size_t n, float shift, Chunk *out, Codes *codes)
{
    if (codes)
        pass_avx2_with(x, n, shift, out, codes);
    else
        pass_avx2_with(x, n, shift, out, NULL);
}

__attribute__((target("avx,f16c"))) void widen_half_f16c(const uint16_t *halves, size_t n, float *out)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    for (; i < n; i++)
        out[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(halves[i])));
}
#endif
