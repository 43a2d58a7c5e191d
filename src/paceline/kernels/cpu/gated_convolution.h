// The mixer of an LFM2 layer between its projections: a short convolution between two gates. See `ShortConv` of `models/recurrent.py`.
#pragma once

#include "stretches.h"

namespace paceline {

// A row of the first projection's output has three parts of `channels` elements: the gate before the convolution, the gate after it, and
// the row that the first gate multiplies.
struct GatedConvolution {
    const float *weight, *bias;  // see `ShortConvolution`
    int32_t channels, width;

    // Records a row's entry.
    void enter(const Stretches& stretches, int row, const float* projected) const {
        const Stretch& stretch = stretches.of(row);
        float* to = stretch.entries + stretch.place(row) * channels;
        for (int i = 0; i < channels; i++) to[i] = projected[i] * projected[2 * channels + i];
    }

    // Computes a row of the mixer's output [channels].
    void run(const Stretches& stretches, int row, const float* projected, float* to) const {
        const Stretch& stretch = stretches.of(row);
        stretch.convolution(width, channels, 0, weight, bias).run(row - stretch.first, to);
        for (int i = 0; i < channels; i++) to[i] *= projected[channels + i];
    }
};

}  // namespace paceline
