// LoRA adapters: y = W x + B (A x), computed row by row, so that a row's result does not depend on the other rows or their adapters.
#pragma once

#include "elements.h"

namespace paceline {

// The part of B for 16 outputs: its columns `first` to `first` + `count` - 1, b [count, 16], as `Element::Number`. In a
// fused layer, such as query, key and value, each projection has columns of its own, and B is 0 elsewhere.
struct LowRankBlock {
    const void* b;
    int32_t first, count;
};

// An adapter's factors for one linear layer. A [rank, in] holds `Element::Number`, with `rank` a multiple of 4 and `in` padded to
// whole lanes. `rank` is 0 if the adapter does not change the linear layer.
struct LowRank {
    const void* a;
    const LowRankBlock* blocks;
    int32_t rank;

    // to [rank] = A x. x has `size` elements, padded to whole lanes.
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

    // Returns y + B u for the 16 outputs that begin at output `at`, where u = A x.
    template <class Element>
    [[gnu::flatten]] Floats expand(Floats y, const float* u, int at) const {
        const LowRankBlock& block = blocks[at / LANES];
        const auto* b = static_cast<const typename Element::Number*>(block.b);
        Floats sums[4] = {y};  // four sums, because each multiplication waits for the previous one of its sum
        int j = 0;
        for (; j + 4 <= block.count; j += 4)
            for (int i = 0; i < 4; i++) sums[i] = fma(Element::widen(b + (j + i) * LANES), all(u[block.first + j + i]), sums[i]);
        for (; j < block.count; j++) sums[0] = fma(Element::widen(b + j * LANES), all(u[block.first + j]), sums[0]);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

}  // namespace paceline
