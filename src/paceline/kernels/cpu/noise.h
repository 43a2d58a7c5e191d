// Columns that a position's noise may raise to the top: the inner loop of `sampling/noise.py`, with the same hash.
#pragma once

#include <algorithm>

#include "functions.h"

namespace paceline {

// Three rounds of xor, shift and multiply ("triple32", Wellons 2018).
inline Unsigned triple32(Unsigned x) {
    x = (x ^ x >> 17) * 0xED5AD4BBu;
    x = (x ^ x >> 11) * 0xAC4C1B51u;
    x = (x ^ x >> 15) * 0x31848BABu;
    return x ^ x >> 14;
}

// Finds the columns of scores [n] that noise may raise above `bound`, in ascending order. `tokens` holds the token id of each
// column; null means that ids equal column numbers. Returns the number of columns written to `found`.
inline int candidates(const float* scores, const int64_t* tokens, int n, uint64_t key, float bound, float highest,
                      int64_t* found) {
    int count = 0;
    for (int first = 0; first < n; first += LANES) {
        const int here = std::min(LANES, n - first);
        float last[LANES];
        if (here < LANES) std::copy_n(scores + first, here, std::fill_n(last, LANES, -INFINITY) - LANES);
        const Floats s = load<Floats>(here < LANES ? last : scores + first);
        Ints open = s >= bound - highest;
        if (!any(open)) continue;
        uint32_t ids[LANES];
        for (int i = 0; i < LANES; i++) ids[i] = uint32_t(tokens && i < here ? tokens[first + i] : first + i);
        const Unsigned id = load<Unsigned>(ids);
        const Unsigned hashed = triple32(triple32(id ^ uint32_t(key)) ^ uint32_t(key >> 32)) ^ 0x80000000u;
        // 1 - u, minus the rounding error of float32.
        const Floats missing = (1.0f - 0x1p-22f) - convert<Floats>(hashed) * 0x1p-32f;
        const Floats reach = s - bound;
        open &= missing <= exponential(select(reach < 0.0f, reach, Floats{})) * 1.00001f;
        if (!any(open)) continue;
        for (int i = 0; i < here; i++)
            if (open[i]) found[count++] = first + i;
    }
    return count;
}

}  // namespace paceline
