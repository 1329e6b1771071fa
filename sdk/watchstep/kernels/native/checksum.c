/* Checksums of the bits of tensors; watchstep/kernels/array_kernel.py defines them. */
#include "chunk.h"
#include "elements.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK 1024 /* words */
#define STEP 0x9e3779b97f4a7c15u

static _Alignas(64) uint32_t low_keys[BLOCK], high_keys[BLOCK];

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Sum of the products with the keys, of 64 bits, from products of 32 bits. */
static uint64_t sum_plain(const uint32_t *words)
{
    uint64_t low = 0, high = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t word = words[i] ^ words[i] >> 16;
        low += (uint64_t)word * low_keys[i];
        high += (uint64_t)word * high_keys[i];
    }
    return low + (high << 32);
}

#if defined(__x86_64__)
/* Even words and odd ones apart: the processor multiplies the lower halves of 64 bits. */
__attribute__((target("avx2"))) static inline __m256i products(__m256i even, __m256i odd, const uint32_t *keys)
{
    __m256i held = _mm256_load_si256((const __m256i *)keys);
    return _mm256_add_epi64(_mm256_mul_epu32(even, held), _mm256_mul_epu32(odd, _mm256_srli_epi64(held, 32)));
}

__attribute__((target("avx2"))) static uint64_t sum_avx2(const uint32_t *words)
{
    __m256i low = _mm256_setzero_si256(), high = low;
    uint64_t lows[4], highs[4];
    for (int i = 0; i < BLOCK; i += 8) {
        __m256i even = _mm256_loadu_si256((const __m256i *)(words + i));
        even = _mm256_xor_si256(even, _mm256_srli_epi32(even, 16));
        __m256i odd = _mm256_srli_epi64(even, 32);
        low = _mm256_add_epi64(low, products(even, odd, low_keys + i));
        high = _mm256_add_epi64(high, products(even, odd, high_keys + i));
    }
    _mm256_storeu_si256((__m256i *)lows, low);
    _mm256_storeu_si256((__m256i *)highs, high);
    return lows[0] + lows[1] + lows[2] + lows[3] + ((highs[0] + highs[1] + highs[2] + highs[3]) << 32);
}
#endif

static uint64_t (*sum_of_block)(const uint32_t *words) = sum_plain;

__attribute__((constructor)) static void prepare(void)
{
    for (uint64_t place = 0; place < BLOCK; place++) {
        uint64_t key = mixed((place + 1) * STEP) | 1;
        low_keys[place] = (uint32_t)key;
        high_keys[place] = (uint32_t)(key >> 32);
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx2())
        sum_of_block = sum_avx2;
#endif
}

static void widen_words(const void *data, int width, size_t from, size_t n, uint32_t *words)
{
    if (width == 1)
        for (size_t i = 0; i < n; i++)
            words[i] = ((const uint8_t *)data)[from + i];
    else if (width == 2)
        for (size_t i = 0; i < n; i++)
            words[i] = ((const uint16_t *)data)[from + i];
    else
        memcpy(words, (const uint32_t *)data + from, n * sizeof *words);
}

static int64_t checksum(const void *data, size_t n, int width)
{
    uint64_t sum = 0, order = 0;
    for (size_t from = 0; from < n; from += BLOCK) {
        uint32_t held[BLOCK];
        const uint32_t *words = (const uint32_t *)data + from;
        size_t size = n - from < BLOCK ? n - from : BLOCK;
        if (width != 4 || size < BLOCK) {
            memset(held + size, 0, (BLOCK - size) * sizeof *held);
            widen_words(data, width, from, size, held);
            words = held;
        }
        order += STEP;
        sum += mixed(sum_of_block(words) + order);
    }
    return (int64_t)(mixed(sum + n * STEP) >> 11);
}

/* Checksums of n tensors.

   data, sizes, kinds: where each lies, how many elements it has, of which kind: only its width counts.
   Returns 0, or 1 + the place of a tensor whose kind is unknown. */
int64_t watchstep_checksum(int64_t n, const void *const *data, const int64_t *sizes, const int64_t *kinds,
                           int64_t *checksums)
{
    static const int widths[KINDS] = {[FLOAT32] = 4, [FLOAT64] = 8, [FLOAT16] = 2,
                                      [BFLOAT16] = 2, [FLOAT8_E4M3] = 1, [FLOAT8_E5M2] = 1};
    for (int64_t i = 0; i < n; i++) {
        if (kinds[i] < 0 || kinds[i] >= KINDS)
            return 1 + i;
        if (widths[kinds[i]] == 8)
            checksums[i] = checksum(data[i], 2 * (size_t)sizes[i], 4); /* low halves first, as they lie */
        else
            checksums[i] = checksum(data[i], (size_t)sizes[i], widths[kinds[i]]);
    }
    return 0;
}
