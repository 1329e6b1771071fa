/* Narrow element types as float32. */
#include "elements.h"

#include "chunk.h"

#include <math.h>
#include <string.h>

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

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t code = 0; code < 256; code++) {
        tables[0][code] = widened(code, 4, 3, 0);
        tables[1][code] = widened(code, 5, 2, 1);
    }
}

const float *values_of_float8(int kind)
{
    return tables[kind == FLOAT8_E5M2];
}

void widen(const void *data, int kind, size_t from, size_t n, float *out)
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
            out[i] = values_of_float8(kind)[bytes[i]];
}
