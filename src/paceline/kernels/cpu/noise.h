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

// An upper bound of e^x for x <= 0, at most 6.2 % too high: 2^(i + f) <= 2^i (1 + f), whose bits grow linearly in i + f.
inline Floats exponential_bound(const Floats& x) {
    const Floats turns = select(x < -87.0f, all(-87.0f), x) * 1.442694f + 127.0f;
    return as<Floats>(convert<Ints>(turns * 0x1p23f)) * 1.0001f;  // more than all rounding errors
}

// Finds a few columns of scores [n], in ascending order, that include all columns that noise may raise above `bound`. `tokens`
// holds the token id of each column; null means that ids equal column numbers. Returns the number of columns written to
// `found`.
inline int candidates(const float* scores, const int64_t* tokens, int n, uint64_t key, float bound, float highest,
                      int64_t* found) {
    constexpr uint32_t COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int count = 0;
    for (int first = 0; first < n; first += LANES) {
        const int here = std::min(LANES, n - first);
        float last[LANES];
        if (here < LANES) std::copy_n(scores + first, here, std::fill_n(last, LANES, -INFINITY) - LANES);
        const Floats s = load<Floats>(here < LANES ? last : scores + first);
        Ints open = s >= bound - highest;
        if (!any(open)) continue;
        Unsigned id = load<Unsigned>(COUNT) + uint32_t(first);
        if (tokens) {
            uint32_t ids[LANES] = {};
            for (int i = 0; i < here; i++) ids[i] = uint32_t(tokens[first + i]);
            id = load<Unsigned>(ids);
        }
        const Unsigned hashed = triple32(triple32(id ^ uint32_t(key)) ^ uint32_t(key >> 32)) ^ 0x80000000u;
        // A lower bound of 1 - u = (2^32 - hashed - 1/2) / 2^32.
        const Floats missing = convert<Floats>(as<Ints>((hashed ^ 0xffffffffu) >> 1)) * 0x1p-31f;
        const Floats reach = s - bound;
        open &= missing <= exponential_bound(select(reach < 0.0f, reach, Floats{}));
        if (!any(open)) continue;
        for (int i = 0; i < here; i++)
            if (open[i]) found[count++] = first + i;
    }
    return count;
}

}  // namespace paceline
