/* Sums blocks of numbers in double precision, for DMR's checks of what communication libraries have summed up. Uses
 * neither Python nor torch: native.py loads the library with ctypes.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* glibc chooses the version for the machine's vector instructions when the library is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

enum { LANES = 16 }; /* sums side by side, which hide the time that an addition takes */

FOR_EACH_MACHINE
static void sum_block(const float *values, uint64_t length, double *sum, double *magnitude) {
    double sums[LANES] = {0}, magnitudes[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= length; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const double value = values[i + lane];
            sums[lane] += value;
            magnitudes[lane] += fabs(value);
        }
    for (; i < length; i++) {
        sums[0] += values[i];
        magnitudes[0] += fabs((double)values[i]);
    }
    *sum = *magnitude = 0;
    for (int lane = 0; lane < LANES; lane++) {
        *sum += sums[lane];
        *magnitude += magnitudes[lane];
    }
}

/* Writes the sum of each of `blocks` blocks of `length` numbers, and the sum of their magnitudes. */
void ft_block_sums(const float *values, uint64_t blocks, uint64_t length, double *sums, double *magnitudes) {
    for (uint64_t block = 0; block < blocks; block++)
        sum_block(values + block * length, length, sums + block, magnitudes + block);
}
