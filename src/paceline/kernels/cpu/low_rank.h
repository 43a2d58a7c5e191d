// What LoRA adapters add to a product, y = W x + B (A x), row by row: a row's bits depend on its own adapter alone.
#pragma once

#include "elements.h"

namespace paceline {

// Columns first..first + count - 1 of B, for 16 outputs: b [count, 16], of the stream's type.
struct LowRankBlock {
    const void* b;
    int32_t first, count;
};

// An adapter's part of one product. A [rank, in], of the stream's type: rank in fours, 0 where the adapter leaves the
// product as it is, `in` padded to whole lanes.
struct LowRank {
    const void* a;
    const LowRankBlock* blocks;
    int32_t rank;

    // to [rank] = A x, of `size` elements (whole lanes).
    template <class Element>
    [[gnu::flatten]] void shrink(float* to, const float* x, int size) const {
        for (int j = 0; j < rank; j += 4) {
            const auto* row = static_cast<const typename Element::Number*>(a) + int64_t(j) * size;
            Floats sums[4] = {};
            for (int k = 0; k < size; k += LANES) {
                const Floats part = load<Floats>(x + k);
                for (int i = 0; i < 4; i++) sums[i] = fma(part, Element::widen(row + int64_t(i) * size + k), sums[i]);
            }
            for (int i = 0; i < 4; i++) to[j + i] = sum(sums[i]);
        }
    }

    // y + B u for the 16 outputs from `at` on.
    template <class Element>
    [[gnu::flatten]] Floats grow(Floats y, const float* u, int at) const {
        const LowRankBlock& block = blocks[at / LANES];
        const auto* b = static_cast<const typename Element::Number*>(block.b);
        Floats sums[4] = {y};  // so that one product need not wait for the last
        int j = 0;
        for (; j + 4 <= block.count; j += 4)
            for (int i = 0; i < 4; i++) sums[i] = fma(Element::widen(b + (j + i) * LANES), all(u[block.first + j + i]), sums[i]);
        for (; j < block.count; j++) sums[0] = fma(Element::widen(b + j * LANES), all(u[block.first + j]), sums[0]);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

}  // namespace paceline
