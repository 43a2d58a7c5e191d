// The short convolutions before the recurrent states of `models/recurrent.py`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "functions.h"

namespace paceline {

// A causal depthwise convolution over the rows of a tree.
//
// before [width - 1, channels]: the entries before the tree. entries [*, channels]: of the tree's rows.
// history [rows, width]: for each row, the entries that it sees. Numbers below width - 1 are of `before`.
// weight [width, channels]; bias [channels] or null. activated: 1 for SiLU of the sum.
// out [rows, channels]: receives the results of `paceline_convolve`.
struct ShortConvolution {
    int32_t rows, width, channels, activated;
    const float *before, *entries, *weight, *bias;
    const int64_t* history;
    float* out;

    // Computes one row, `to` [channels]. Adds the products in order, so that the bits of a row do not depend on the other rows.
    [[gnu::flatten]] void run(int row, float* to) const {
        const int64_t* seen = history + int64_t(row) * width;
        for (int i = 0; i < channels; i += LANES) {
            const int count = std::min(LANES, channels - i);
            Floats total = part(entry(seen[0]) + i, count) * part(weight + i, count);
            for (int w = 1; w < width; w++) total = total + part(entry(seen[w]) + i, count) * part(weight + int64_t(w) * channels + i, count);
            if (bias) total = total + part(bias + i, count);
            if (activated) total = activate(SILU, total);
            float lanes[LANES];
            store(lanes, total);
            std::copy_n(lanes, count, to + i);
        }
    }

   private:
    const float* entry(int64_t number) const {
        return number < width - 1 ? before + number * channels : entries + (number - width + 1) * channels;
    }

    static Floats part(const float* x, int count) {
        if (count == LANES) return load<Floats>(x);
        float lanes[LANES] = {};
        std::copy_n(x, count, lanes);
        return load<Floats>(lanes);
    }
};

}  // namespace paceline
