/* The gate: whether tensors hold NaN or infinity, at a small part of the cost of measuring them. */
#include "elements.h"

#include <math.h>

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
        if (!isfinite(values_of_float8(kind)[((const uint8_t *)data)[i]]))
            return 1;
    return 0;
}

#define WHOLE 16384 /* elements up to which a tensor is checked completely */

/* Whether some tensor holds NaN or infinity: small ones whole, of large ones the slice of this turn.
   Returns 1 + the place of the first that does, 0 for none, -1 for an unknown kind. */
int64_t watchstep_nonfinite(int64_t n, const void *const *data, const int64_t *sizes, const int64_t *kinds,
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
