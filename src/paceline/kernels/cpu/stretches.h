// The rows of a pass in a recurrent layer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "convolution.h"

namespace paceline {

// Rows of one slot that a layer processes together, and the state before their tree. The first `start` rows of the tree belong to
// earlier passes. An entry is a row of the convolution's input.
struct Stretch {
    int32_t first, count, start;              // the rows are `first` to `first` + `count` - 1 of the pass
    const int32_t* parents;                   // [start + count]: see `Delta`
    const int64_t* history;                   // [count, width]: see `ShortConvolution`
    // A gated convolution has no matrices, decays, keys and changes.
    const float *entries_before, *before;     // the state: the last entries [width - 1, channels], and the matrices
    float *entries, *decay, *keys, *changes;  // updates by all rows of the tree [start + count, *]: the first `start` are known
    float *last_entries, *after;              // receive the state after the last row of a chain; null for a tree

    // Number of a row in its tree.
    int64_t place(int row) const { return start + row - first; }

    // The convolution of these rows. See `ShortConvolution`.
    ShortConvolution convolution(int width, int channels, int activated, const float* weight, const float* bias) const {
        return {count, width, channels, activated, entries_before, entries, weight, bias, history, nullptr};
    }
};

// All stretches of a pass in one layer.
struct Stretches {
    const Stretch* first;
    int count;

    const Stretch* begin() const { return first; }
    const Stretch* end() const { return first + count; }

    // The stretch of a row of the pass.
    const Stretch& of(int row) const {
        const Stretch* stretch = first;
        while (row >= stretch->first + stretch->count) stretch++;
        return *stretch;
    }

    // Writes the entries after the last row of each chain. The next stretch of the slot may begin with them.
    void keep_entries(int width, int channels) const {
        for (const Stretch& stretch : *this) {
            const int before = width - 1, rows = stretch.start + stretch.count;
            for (int i = 0; stretch.last_entries && i < before; i++) {
                const int number = rows + i;
                const float* from = number < before ? stretch.entries_before + int64_t(number) * channels
                                                    : stretch.entries + int64_t(number - before) * channels;
                std::copy_n(from, channels, stretch.last_entries + int64_t(i) * channels);
            }
        }
    }
};

}  // namespace paceline
