/* Counting many exponents at once: sweeps over a chunk's codes, from the top exponent down, until no more than a few
   elements are left, which are counted one by one. Of usual numbers each exponent takes half of what is left. */
#if defined(__x86_64__)
#include "chunk.h"

#include <immintrin.h>
#include <string.h>

/* Where sweeps end, by measurement on a Zen 4: with so few left, after so many exponents; and with how many left it would
   have been cheaper to count all one by one. */
#define FEW512 0
#define FEW256 24
#define MOST512 40 /* at most 60: classes have 7 bits */
#define MOST256 15
#define TOO_MANY 96

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bitalg,gfni,avx2,bmi,popcnt")))
#define AVX2 __attribute__((target("avx2,bmi,popcnt")))

/* How many of the first three have each bit: twice the one returned, and what is left in sum. */
AVX512 static inline __m512i add_bits(__m512i *sum, __m512i a, __m512i b)
{
    __m512i twice = _mm512_ternarylogic_epi64(*sum, a, b, 0xe8);
    *sum = _mm512_ternarylogic_epi64(*sum, a, b, 0x96);
    return twice;
}

/* Bits of each qword, counted by their place in a byte: transposed, 8 by 8. */
AVX512 static inline __m512i bits_by_place(__m512i bits)
{
    const __m512i identity = _mm512_set1_epi64((int64_t)0x8040201008040201);
    return _mm512_popcnt_epi8(_mm512_gf2p8affine_epi64_epi8(identity, bits, 0));
}

AVX512 static inline __m512i wide_halves_added(__m512i bytes)
{
    return _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)),
                            _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(bytes, 1)));
}

/* Count signs of four exponents, eight classes: a table gives each element a byte with the bit of its class, and bits
   are added up in columns (Harley and Seal). classes: 512 * blocks of less than 128. first: the lowest due. */
AVX512 static inline uint32_t sweep_avx512(const uint8_t *classes, size_t blocks, int first, uint16_t *found)
{
    const __m512i none = _mm512_setzero_si512();
    const __m512i table = _mm512_maskz_set1_epi64((__mmask8)(1u << (first / 8 & 7)), (int64_t)0x8040201008040201);
    const __m512i lower = first < 64 ? table : none, upper = first < 64 ? none : table;
    __m512i sums[6] = {none, none, none, none, none, none};
    for (size_t block = 0; block < blocks; block++) {
        const uint8_t *at = classes + 512 * block;
        __m512i bits[8], twice[4], fourfold[2];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            bits[k] = _mm512_permutex2var_epi8(lower, _mm512_load_si512(at + 64 * k), upper);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            twice[k] = add_bits(&sums[0], bits[2 * k], bits[2 * k + 1]);
        fourfold[0] = add_bits(&sums[1], twice[0], twice[1]);
        fourfold[1] = add_bits(&sums[1], twice[2], twice[3]);
        __m512i carry = add_bits(&sums[2], fourfold[0], fourfold[1]);
#pragma GCC unroll 3
        for (int place = 3; place < 6; place++) {
            __m512i next = _mm512_and_si512(sums[place], carry);
            sums[place] = _mm512_xor_si512(sums[place], carry);
            carry = next;
        }
    }
    __m512i low = bits_by_place(sums[3]), high = bits_by_place(sums[5]);
    low = _mm512_add_epi8(_mm512_add_epi8(low, low), bits_by_place(sums[2]));
    low = _mm512_add_epi8(_mm512_add_epi8(low, low), bits_by_place(sums[1]));
    low = _mm512_add_epi8(_mm512_add_epi8(low, low), bits_by_place(sums[0]));
    high = _mm512_add_epi8(_mm512_add_epi8(high, high), bits_by_place(sums[4]));
    __m512i wide = _mm512_add_epi16(wide_halves_added(low), _mm512_slli_epi16(wide_halves_added(high), 4));
    __m256i half = _mm256_add_epi16(_mm512_castsi512_si256(wide), _mm512_extracti64x4_epi64(wide, 1));
    __m128i counts = _mm_add_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128((__m128i *)found, counts);
    counts = _mm_madd_epi16(counts, _mm_set1_epi16(1));
    counts = _mm_add_epi32(counts, _mm_unpackhi_epi64(counts, counts));
    return (uint32_t)(_mm_cvtsi128_si32(counts) + _mm_extract_epi32(counts, 1));
}

AVX512 static inline __m512i exponents_of(const Codes *codes, size_t at)
{
    const __m512i one = _mm512_set1_epi8(1);
    __m512i upper = _mm512_load_si512(codes->upper + at), lower = _mm512_load_si512(codes->lower + at);
    return _mm512_ternarylogic_epi64(_mm512_add_epi8(upper, upper), _mm512_srli_epi16(lower, 7), one, 0xf8);
}

/* Twice the distance from the top exponent, and one where negative; 126 and 127 are all that lie above or far below. */
AVX512 static inline void classify(const Codes *codes, int top, size_t blocks, uint8_t *classes)
{
    const __m512i from = _mm512_set1_epi8((char)top), most = _mm512_set1_epi8(63), one = _mm512_set1_epi8(1);
    for (size_t at = 0; at < 512 * blocks; at += 64) {
        __m512i below = _mm512_min_epu8(_mm512_sub_epi8(from, exponents_of(codes, at)), most);
        __m512i sign = _mm512_srli_epi16(_mm512_load_si512(codes->upper + at), 7);
        _mm512_store_si512(classes + at, _mm512_ternarylogic_epi64(_mm512_add_epi8(below, below), sign, one, 0xf8));
    }
}

/* Those not zero and of no class below the given. */
AVX512 static void count_rest_avx512(const Codes *codes, size_t blocks, const uint8_t *classes, int swept, uint32_t *bins)
{
    const __m512i from = _mm512_set1_epi8((char)swept);
    for (size_t at = 0; at < 512 * blocks; at += 64) {
        __m512i exponents = exponents_of(codes, at);
        uint64_t left = _mm512_cmpge_epu8_mask(_mm512_load_si512(classes + at), from);
        left &= _mm512_test_epi8_mask(exponents, exponents);
        for (; left; left &= left - 1) {
            size_t place = at + _tzcnt_u64(left);
            bins[codes->upper[place] << 1 | codes->lower[place] >> 7]++;
        }
    }
}

AVX512 int count_avx512(Codes *codes, int top, uint32_t *bins)
{
    size_t blocks = (codes->size + 511) / 512, left = codes->nonzero;
    _Alignas(64) uint8_t classes[CHUNK];
    uint16_t found[128];
    int swept = 0;
    memset(codes->upper + codes->size, 0, 512 * blocks - codes->size);
    memset(codes->lower + codes->size, 0, 512 * blocks - codes->size);
    classify(codes, top, blocks, classes);
    for (; left > FEW512 && swept < MOST512 && swept + 4 <= top; swept += 4)
        left -= sweep_avx512(classes, blocks, 2 * swept, found + 2 * swept);
    if (left > TOO_MANY)
        return 0;
    for (int k = 0; k < swept; k++) {
        bins[top - k] += found[2 * k];
        bins[top - k + BINS32 / 2] += found[2 * k + 1];
    }
    if (left)
        count_rest_avx512(codes, blocks, classes, 2 * swept, bins);
    return 1;
}

typedef struct {
    uint32_t all, negative;
} Found;

/* Places of those that no sweep counted. Bits are taken from a mask without asking whether there are any, as the
   processor could not foresee the answer. */
typedef struct {
    size_t held;
    uint16_t places[CHUNK + 4];
} Rest;

AVX2 static inline void add_rest(Rest *rest, uint64_t mask, size_t from)
{
    uint16_t *to = rest->places + rest->held;
    rest->held += (size_t)__builtin_popcountll(mask);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++, mask &= mask - 1)
        to[k] = (uint16_t)(from + _tzcnt_u64(mask));
    for (to += 4; mask; mask &= mask - 1)
        *to++ = (uint16_t)(from + _tzcnt_u64(mask));
}

static void count_rest(const Rest *rest, const Codes *codes, uint32_t *bins)
{
    for (size_t i = 0; i < rest->held; i++) {
        size_t place = rest->places[i];
        bins[codes->exponents[place] | (codes->weights[place] >> 4) << 8]++;
    }
}

AVX2 static inline uint32_t added(__m256i bytes)
{
    __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (uint32_t)(_mm_cvtsi128_si64(half) + _mm_cvtsi128_si64(_mm_unpackhi_epi64(half, half)));
}

#define CHAINS256 5 /* so that none adds more than 15 vectors, as four bits hold */

/* Count those of one exponent, by comparing. A byte of the sums holds two counts: all, and negative ones. */
AVX2 static inline uint32_t sweep_avx2(const Codes *codes, size_t vectors, int exponent, Found *found)
{
    const __m256i due = _mm256_set1_epi8((char)exponent), low = _mm256_set1_epi8(15), none = _mm256_setzero_si256();
    __m256i sums[CHAINS256] = {none, none, none, none, none}, all = none, negative = none;
    for (size_t k = 0; k < vectors; k += CHAINS256)
#pragma GCC unroll 5
        for (size_t chain = 0; chain < CHAINS256; chain++) {
            size_t at = 32 * (k + chain);
            __m256i equal = _mm256_cmpeq_epi8(_mm256_load_si256((const __m256i *)(codes->exponents + at)), due);
            __m256i weights = _mm256_load_si256((const __m256i *)(codes->weights + at));
            sums[chain] = _mm256_add_epi8(sums[chain], _mm256_and_si256(equal, weights));
        }
    for (int chain = 0; chain < CHAINS256; chain++) {
        all = _mm256_add_epi8(all, _mm256_and_si256(sums[chain], low));
        negative = _mm256_add_epi8(negative, _mm256_and_si256(_mm256_srli_epi16(sums[chain], 4), low));
    }
    found->all = added(all);
    found->negative = added(negative);
    return found->all;
}

AVX2 static inline uint32_t left_of(__m256i exponents, __m256i from, __m256i most)
{
    __m256i within = _mm256_cmpeq_epi8(_mm256_max_epu8(_mm256_sub_epi8(exponents, from), most), most);
    __m256i counted = _mm256_or_si256(within, _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256()));
    return ~(uint32_t)_mm256_movemask_epi8(counted);
}

AVX2 static void count_rest_avx2(const Codes *codes, size_t vectors, int low, int span, uint32_t *bins)
{
    const __m256i from = _mm256_set1_epi8((char)low), most = _mm256_set1_epi8((char)span);
    Rest rest;
    rest.held = 0;
    for (size_t k = 0; k < vectors; k += 2) {
        const __m256i *at = (const __m256i *)(codes->exponents + 32 * k);
        uint64_t mask = left_of(_mm256_load_si256(at), from, most);
        add_rest(&rest, mask | (uint64_t)left_of(_mm256_load_si256(at + 1), from, most) << 32, 32 * k);
    }
    count_rest(&rest, codes, bins);
}

AVX2 int count_avx2(Codes *codes, int top, uint32_t *bins)
{
    size_t vectors = codes->size / 32, left = codes->nonzero;
    Found found[MOST256];
    int swept = 0;
    memset(codes->exponents + codes->size, 0, CODES_PADDING);
    for (; left > FEW256 && swept < MOST256 && swept < top; swept++)
        left -= sweep_avx2(codes, vectors, top - swept, found + swept);
    if (left > TOO_MANY)
        return 0;
    for (int k = 0; k < swept; k++) {
        bins[top - k] += found[k].all - found[k].negative;
        bins[top - k + BINS32 / 2] += found[k].negative;
    }
    if (left)
        count_rest_avx2(codes, vectors, swept ? top - swept + 1 : 0, swept ? swept - 1 : 0, bins);
    return 1;
}
#endif
