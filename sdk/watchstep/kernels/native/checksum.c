/* Checksums of the bits of tensors; watchstep/kernels/checksum.py says what they are, and what they are worth. */
#include "elements.h"

#include <string.h>

#define BLOCK 1024 /* words */
#define STEP 0x9e3779b97f4a7c15u

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=skylake-avx512", "avx2", "default"), optimize("O3")))
#else
#define FOR_EACH_PROCESSOR
#endif

static uint32_t low_keys[BLOCK], high_keys[BLOCK];

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

__attribute__((constructor)) static void fill_keys(void)
{
    for (uint64_t place = 0; place < BLOCK; place++) {
        uint64_t key = mixed((place + 1) * STEP) | 1;
        low_keys[place] = (uint32_t)key;
        high_keys[place] = (uint32_t)(key >> 32);
    }
}

/* Sum of the products with the keys, of 64 bits, from products of 32 bits. */
FOR_EACH_PROCESSOR static uint64_t sum_of_block(const uint32_t *words)
{
    uint64_t low = 0, high = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t word = words[i] ^ words[i] >> 16;
        low += (uint64_t)word * low_keys[i];
        high += (uint64_t)word * high_keys[i];
    }
    return low + (high << 32);
}

FOR_EACH_PROCESSOR static void widen_words(const void *data, int width, size_t from, size_t n, uint32_t *words)
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
int64_t watchstep_checksum(int64_t n, const void *const *data, const int64_t *sizes, const int32_t *kinds,
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
