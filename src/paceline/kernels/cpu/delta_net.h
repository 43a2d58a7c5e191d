// The mixer of a Gated DeltaNet layer, between its projections. See `DeltaNet` of `models/recurrent.py`.
#pragma once

#include <algorithm>
#include <vector>

#include "inputs.h"
#include "matrix_state.h"

namespace paceline {

// Weights and sizes.
struct DeltaNet {
    Matrix beta, time_step;                            // projections that compute beta and the decay's time step, both of one kind
    const float *decay_rate, *step_bias;               // the decay's negative rate A, and the bias of its time step [heads]
    const float *query_norm, *key_norm, *output_norm;  // norm weights
    MatrixState state;
    float qk_eps, output_eps;  // of the norms of queries and keys; of the outputs

    // Outputs of the first projection: queries, keys, values and the gates of the outputs.
    int projection_width() const { return state.channels() + state.value_size(); }

    // Floats of scratch memory that a thread needs for a stretch.
    int64_t scratch_size(const Stretch& s) const { return state.scratch_size(s) + std::max(padded_size(state.keys), padded_size(state.values)); }
};

// Results that one stage leaves for the next.
struct DeltaNetScratch {
    std::vector<float> beta_outputs, step_outputs;  // outputs of `beta` and `time_step` [rows, heads], padded
    std::vector<float> betas;                       // [rows, heads]
    MatrixScratch matrices;

    void reserve(const DeltaNet& net, int rows) {
        const int heads = padded_size(net.state.heads);
        grow(beta_outputs, rows, heads), grow(step_outputs, rows, heads), grow(betas, rows, net.state.heads);
        matrices.reserve(net.state, rows);
    }
};

// The stages of a Gated DeltaNet mixer in one pass. Call them in the order of declaration, with `Stretches::keep_entries` between `enter`
// and `convolve`. Finish each stage before the next begins. Threads may divide the rows or heads of a stage among them.
class DeltaNetTask {
   public:
    DeltaNetTask(const DeltaNet& net, const Stretches& stretches, DeltaNetScratch& scratch)
        : net_(net), state_(net.state), stretches_(stretches), s_(scratch) {}

    // Records a row's entry and its decays, and computes its betas. projected: the row's output of the first projection.
    [[gnu::flatten]] void enter(int row, const float* projected) const {
        const Stretch& stretch = stretches_.of(row);
        const int64_t at = stretch.place(row);
        std::copy_n(projected, state_.channels(), stretch.entries + at * state_.channels());
        for (int i = 0; i < state_.heads; i += LANES) {
            const int64_t line = int64_t(row) * padded_size(state_.heads) + i;
            const Floats time = softplus(load<Floats>(&s_.step_outputs[line]) + load<Floats>(net_.step_bias + i));
            store(&s_.step_outputs[line], exponential(load<Floats>(net_.decay_rate + i) * time));
            store(&s_.beta_outputs[line], logistic(load<Floats>(&s_.beta_outputs[line])));
            const int count = std::min(LANES, state_.heads - i);
            std::copy_n(&s_.step_outputs[line], count, stretch.decay + at * state_.heads + i);
            std::copy_n(&s_.beta_outputs[line], count, &s_.betas[int64_t(row) * state_.heads + i]);
        }
    }

    // Runs the convolution for a row and norms its queries and keys.
    void convolve(int row, float* scratch) const {
        const Stretch& stretch = stretches_.of(row);
        const int queries = state_.query_size();
        state_.convolve(stretch, row, scratch);
        float* head = scratch + padded_size(state_.channels());
        for (int i = 0; i < 2 * state_.key_heads; i++) {
            const bool is_query = i < state_.key_heads;
            copy_row(head, scratch + i * state_.keys, state_.keys);
            normed(head, head, is_query ? net_.query_norm : net_.key_norm, state_.keys, net_.qk_eps);
            float* to = is_query ? &s_.matrices.queries[int64_t(row) * queries] : stretch.keys + stretch.place(row) * queries;
            std::copy_n(head, state_.keys, to + i % state_.key_heads * state_.keys);
        }
        std::copy_n(scratch + 2 * queries, state_.value_size(), &s_.matrices.values[int64_t(row) * state_.value_size()]);
    }

    // Advances the state of a head by all rows, then norms and gates the head's outputs: output [rows, stride], with padded heads.
    // projected [rows, width]: output of the first projection.
    void run(int head, float* scratch, float* output, int stride, const float* projected, int width) const {
        for (const Stretch& stretch : stretches_) {
            s_.matrices.delta(state_, stretch, s_.betas.data()).run(head, scratch);
            for (int row = stretch.first; row < stretch.first + stretch.count; row++) {
                const float* gates = projected + int64_t(row) * width + state_.channels() + head * state_.values;
                finish(row, head, output + int64_t(row) * stride + head * padded_size(state_.values), gates, scratch);
            }
        }
    }

   private:
    const DeltaNet& net_;
    const MatrixState& state_;
    const Stretches& stretches_;
    DeltaNetScratch& s_;

    [[gnu::flatten]] void finish(int row, int head, float* to, const float* gates, float* padded) const {
        copy_row(to, &s_.matrices.outputs[(int64_t(row) * state_.heads + head) * state_.values], state_.values);
        copy_row(padded, gates, state_.values);
        normed(to, to, net_.output_norm, state_.values, net_.output_eps);
        for (int i = 0; i < state_.values; i += LANES) store(to + i, load<Floats>(to + i) * activate(SILU, load<Floats>(padded + i)));
    }
};

}  // namespace paceline
