// The mixer of a Mamba-2 layer, between its projections. See `Mamba2` of `models/mamba.py`.
#pragma once

#include <algorithm>
#include <vector>

#include "matrix_state.h"

namespace paceline {

// Weights and sizes. A row of the first projection's output has three parts: the gates of the outputs, the convolution's entry, and the
// time steps of the heads. A row of the convolution's output has the values, the keys (B) and the queries (C).
struct Mamba {
    const float *decay_rate, *step_bias;  // the rate A of the decay, which is negative, and the bias of the time step [heads]
    const float* skip;                    // `values * skip` is added to the outputs [heads]
    const float* output_norm;             // weights of the norm of the outputs [key heads, group_size()], each row padded; or null
    MatrixState state;
    float output_eps;
    int32_t norm_first;  // 1 if the norm is applied before the gates

    // Number of elements in a group of the output norm. A group is all heads that share a key head.
    int group_size() const { return state.value_size() / state.key_heads; }

    // Floats of scratch memory that a thread needs for a stretch.
    int64_t scratch_size(const Stretch& s) const { return std::max(state.scratch_size(s), int64_t(2 * padded_size(group_size()))); }
};

// Results that one stage leaves for the next.
struct MambaScratch {
    std::vector<float> steps;    // time steps [rows, heads], padded
    std::vector<float> skipped;  // values times `skip` [rows, heads, values]
    MatrixScratch matrices;

    void reserve(const Mamba& net, int rows) {
        grow(steps, rows, padded_size(net.state.heads)), grow(skipped, rows, net.state.value_size());
        matrices.reserve(net.state, rows);
    }
};

// The stages of a Mamba-2 mixer in one pass. Call them in the order of declaration, with `Stretches::keep_entries` between `enter` and
// `convolve`. Finish each stage before the next begins. Threads may divide the rows or heads of a stage among them.
class MambaTask {
   public:
    MambaTask(const Mamba& net, const Stretches& stretches, MambaScratch& scratch)
        : net_(net), state_(net.state), stretches_(stretches), s_(scratch) {}

    // Records a row's entry, its time steps and its decays. projected: the row's output of the first projection.
    [[gnu::flatten]] void enter(int row, const float* projected) const {
        const Stretch& stretch = stretches_.of(row);
        const int64_t at = stretch.place(row);
        const float* entry = projected + state_.value_size();
        std::copy_n(entry, state_.channels(), stretch.entries + at * state_.channels());
        float* steps = &s_.steps[int64_t(row) * padded_size(state_.heads)];
        copy_row(steps, entry + state_.channels(), state_.heads);
        for (int i = 0; i < state_.heads; i += LANES) {
            const Floats time = softplus(load<Floats>(steps + i) + load<Floats>(net_.step_bias + i));
            float decay[LANES];
            store(steps + i, time), store(decay, exponential(load<Floats>(net_.decay_rate + i) * time));
            std::copy_n(decay, std::min(LANES, state_.heads - i), stretch.decay + at * state_.heads + i);
        }
    }

    // Runs the convolution for a row, and splits the result into keys, queries and values. Multiplies the values by the time step for the
    // recurrence, and by `skip` for `finish`.
    void convolve(int row, float* scratch) const {
        const Stretch& stretch = stretches_.of(row);
        const int queries = state_.query_size(), values = state_.value_size();
        state_.convolve(stretch, row, scratch);
        std::copy_n(scratch + values, queries, stretch.keys + stretch.place(row) * queries);
        std::copy_n(scratch + values + queries, queries, &s_.matrices.queries[int64_t(row) * queries]);
        for (int head = 0; head < state_.heads; head++) {
            const int64_t first = int64_t(row) * values + head * state_.values;
            const float step = s_.steps[int64_t(row) * padded_size(state_.heads) + head];
            for (int i = 0; i < state_.values; i++) {
                const float value = scratch[head * state_.values + i];
                s_.matrices.values[first + i] = value * step, s_.skipped[first + i] = value * net_.skip[head];
            }
        }
    }

    // Runs the recurrence of one head over all rows.
    void run(int head, float* scratch) const {
        for (const Stretch& stretch : stretches_) s_.matrices.delta(state_, stretch, nullptr).run(head, scratch);
    }

    // Computes a row of the mixer's output and writes it to `to`. gates: the first part of the row's `projected`.
    [[gnu::flatten]] void finish(int row, const float* gates, float* to, float* scratch) const {
        const int size = net_.group_size(), padded = padded_size(size);
        float *x = scratch, *gate = scratch + padded;
        for (int group = 0; group < state_.key_heads; group++) {
            const int first = group * size;
            const int64_t at = int64_t(row) * state_.value_size() + first;
            copy_row(x, &s_.matrices.outputs[at], size), copy_row(gate, gates + first, size);
            for (int i = 0; i < size; i++) x[i] += s_.skipped[at + i];
            for (int i = 0; i < padded; i += LANES) {
                const Floats factor = activate(SILU, load<Floats>(gate + i));
                store(gate + i, factor);
                if (!net_.norm_first) store(x + i, load<Floats>(x + i) * factor);
            }
            if (net_.output_norm) normed(x, x, net_.output_norm + group * padded, size, net_.output_eps);
            for (int i = 0; net_.norm_first && i < padded; i += LANES) store(x + i, load<Floats>(x + i) * load<Floats>(gate + i));
            std::copy_n(x, size, to + first);
        }
    }

   private:
    const Mamba& net_;
    const MatrixState& state_;
    const Stretches& stretches_;
    MambaScratch& s_;
};

}  // namespace paceline
