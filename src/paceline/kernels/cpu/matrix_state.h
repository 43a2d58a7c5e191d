// The short convolution and the recurrence, shared by the mixers with a matrix state (Gated DeltaNet and Mamba-2). See `MatrixState` of
// `models/recurrent.py`.
#pragma once

#include <algorithm>
#include <vector>

#include "delta.h"
#include "rows.h"
#include "stretches.h"

namespace paceline {

struct MatrixState {
    const float *conv_weight, *conv_bias;  // see `ShortConvolution`
    // `keys`, `values`: elements of a key head and of a value head. `tiled`: see `Delta`. `activated`: see `ShortConvolution`.
    int32_t heads, key_heads, keys, values, conv_width, tiled, activated;

    // Elements in a row of queries. A row of keys has the same size.
    int query_size() const { return key_heads * keys; }

    // Elements in a row of values.
    int value_size() const { return heads * values; }

    // Elements in a row of the convolution: values, keys and queries.
    int channels() const { return 2 * query_size() + value_size(); }

    // Floats of scratch memory that a thread needs for a stretch.
    int64_t scratch_size(const Stretch& s) const { return std::max(int64_t(padded_size(channels())), delta(s).scratch_size()); }

    // The arguments of the recurrence for a stretch, without queries, values, betas and outputs.
    Delta delta(const Stretch& s) const {
        return {heads, key_heads, keys, values, tiled, s.start + s.count, s.start, s.parents, s.before,
                nullptr, s.keys, nullptr, s.decay, nullptr, s.changes, nullptr, s.after};
    }

    // Computes a row of the convolution's output and writes it to `to`.
    void convolve(const Stretch& s, int row, float* to) const {
        s.convolution(conv_width, channels(), activated, conv_weight, conv_bias).run(row - s.first, to);
    }
};

// Inputs and outputs of the recurrence [rows, *].
struct MatrixScratch {
    std::vector<float> queries, values, outputs;

    void reserve(const MatrixState& state, int rows) {
        grow(queries, rows, state.query_size()), grow(values, rows, state.value_size()), grow(outputs, rows, state.value_size());
    }

    // The arguments of the recurrence for a stretch. betas [rows, heads]: see `Delta`.
    Delta delta(const MatrixState& state, const Stretch& stretch, const float* betas) {
        const int64_t first = stretch.first, at = first * state.value_size();
        Delta all = state.delta(stretch);
        all.q = &queries[first * state.query_size()], all.v = &values[at], all.out = &outputs[at];
        all.beta = betas ? betas + first * state.heads : nullptr;
        return all;
    }
};

}  // namespace paceline
