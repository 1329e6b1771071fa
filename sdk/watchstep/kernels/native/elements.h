/* Element types, and how the narrow ones are widened to float32, which holds them exactly. */
#ifndef WATCHSTEP_ELEMENTS_H
#define WATCHSTEP_ELEMENTS_H

#include <stddef.h>
#include <stdint.h>

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, KINDS };

/* Write n elements, from the given place on, as float32. */
void widen(const void *data, int kind, size_t from, size_t n, float *out);

/* Every value of a float8 kind, by its code. */
const float *values_of_float8(int kind);

#endif
