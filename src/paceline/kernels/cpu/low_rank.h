// What LoRA adapters add to a product, y = W x + B (A x), row by row: a row's bits depend on its own adapter alone.
#pragma once

#include "vectors.h"

namespace paceline {

// Columns first..first + count - 1 of B, for 16 outputs: b [count, 16].
struct LowRankBlock {
    const float* b;
    int32_t first, count;
};

// An adapter's part of one product. A [rank, in]: rank in fours, 0 where the adapter leaves the product as it is, `in`
// padded to whole lanes.
struct LowRank {
    const float* a;
    const LowRankBlock* blocks;
    int32_t rank;

    // to [rank] = A x, of `size` elements (whole lanes).
    void shrink(float* to, const float* x, int size) const {
        for (int j = 0; j < rank; j += 4) {
            const float* row = a + int64_t(j) * size;
            Floats sums[4] = {};
            for (int k = 0; k < size; k += LANES) {
                const Floats part = load<Floats>(x + k);
                for (int i = 0; i < 4; i++) sums[i] = fma(part, load<Floats>(row + int64_t(i) * size + k), sums[i]);
            }
            for (int i = 0; i < 4; i++) to[j + i] = sum(sums[i]);
        }
    }

    // y + B u for the 16 outputs from `at` on.
    Floats grow(Floats y, const float* u, int at) const {
        const LowRankBlock& block = blocks[at / LANES];
        for (int j = 0; j < block.count; j++) y = fma(load<Floats>(block.b + j * LANES), all(u[block.first + j]), y);
        return y;
    }
};

}  // namespace paceline
