// The mixer of a Gated DeltaNet layer, between its projections. See `DeltaNet` of `models/recurrent.py`.
#pragma once

#include <algorithm>
#include <vector>

#include "delta.h"
#include "inputs.h"
#include "rows.h"
#include "stretches.h"

namespace paceline {

// Weights and sizes.
struct DeltaNet {
    Matrix beta, time_step;                            // projections that compute beta and the decay's time step, both of one kind
    const float *decay_rate, *step_bias;               // the decay's negative rate A, and the bias of its time step [heads]
    const float *query_norm, *key_norm, *output_norm;  // norm weights
    const float *conv_weight, *conv_bias;              // see `ShortConvolution`
    float qk_eps, output_eps;                          // of the norms of queries and keys; of the outputs
    int32_t heads, key_heads, keys, values, conv_width, tiled, activated;  // `keys`, `values`: elements of a head

    int queries() const { return key_heads * keys; }
    int channels() const { return 2 * queries() + heads * values; }
    // Outputs of the first projection: queries, keys, values and the gates of the outputs.
    int projection_width() const { return channels() + heads * values; }

    // The arguments of the recurrence for a stretch, without queries, values, betas and outputs.
    Delta delta(const Stretch& s) const {
        return {heads, key_heads, keys, values, tiled, s.start + s.count, s.start, s.parents, s.before,
                nullptr, s.keys, nullptr, s.decay, nullptr, s.changes, nullptr, s.after};
    }

    // Floats of scratch memory that a thread needs for a stretch.
    int64_t scratch_size(const Stretch& s) const {
        return std::max({int64_t(padded_size(channels()) + padded_size(keys)), delta(s).scratch_size(), int64_t(padded_size(values))});
    }
};

// Results that one stage leaves for the next.
struct DeltaNetScratch {
    std::vector<float> beta_outputs, step_outputs;       // outputs of `beta` and `time_step` [rows, heads], padded
    std::vector<float> betas, queries, values, outputs;  // [rows, *]; `outputs`: of the recurrence

    void reserve(const DeltaNet& net, int rows) {
        grow(beta_outputs, rows, padded_size(net.heads)), grow(step_outputs, rows, padded_size(net.heads)), grow(betas, rows, net.heads);
        grow(queries, rows, net.queries()), grow(values, rows, net.heads * net.values), grow(outputs, rows, net.heads * net.values);
    }
};

// The stages of a pass, in the order of the functions. Threads may share each stage.
class DeltaNetTask {
   public:
    DeltaNetTask(const DeltaNet& net, const Stretches& stretches, DeltaNetScratch& scratch) : net_(net), stretches_(stretches), s_(scratch) {}

    // Records a row's entry and its decays, and computes its betas. projected: the row's output of the first projection.
    [[gnu::flatten]] void enter(int row, const float* projected) const {
        const Stretch& stretch = stretches_.of(row);
        const int64_t at = stretch.place(row);
        std::copy_n(projected, net_.channels(), stretch.entries + at * net_.channels());
        for (int i = 0; i < net_.heads; i += LANES) {
            const int64_t line = int64_t(row) * padded_size(net_.heads) + i;
            const Floats time = softplus(load<Floats>(&s_.step_outputs[line]) + load<Floats>(net_.step_bias + i));
            store(&s_.step_outputs[line], exponential(load<Floats>(net_.decay_rate + i) * time));
            store(&s_.beta_outputs[line], logistic(load<Floats>(&s_.beta_outputs[line])));
            const int count = std::min(LANES, net_.heads - i);
            std::copy_n(&s_.step_outputs[line], count, stretch.decay + at * net_.heads + i);
            std::copy_n(&s_.beta_outputs[line], count, &s_.betas[int64_t(row) * net_.heads + i]);
        }
    }

    // Runs the convolution for a row and norms its queries and keys.
    void convolve(int row, float* scratch) const {
        const Stretch& stretch = stretches_.of(row);
        const int64_t at = stretch.place(row);
        stretch.convolution(net_.conv_width, net_.channels(), net_.activated, net_.conv_weight, net_.conv_bias).run(row - stretch.first, scratch);
        float* head = scratch + padded_size(net_.channels());
        for (int i = 0; i < 2 * net_.key_heads; i++) {
            const bool is_query = i < net_.key_heads;
            copy_row(head, scratch + i * net_.keys, net_.keys);
            normed(head, head, is_query ? net_.query_norm : net_.key_norm, net_.keys, net_.qk_eps);
            float* to = is_query ? &s_.queries[int64_t(row) * net_.queries()] : stretch.keys + at * net_.queries();
            std::copy_n(head, net_.keys, to + i % net_.key_heads * net_.keys);
        }
        const int values = net_.heads * net_.values;
        std::copy_n(scratch + 2 * net_.queries(), values, &s_.values[int64_t(row) * values]);
    }

    // Advances the state of a head by all rows, then norms and gates the head's outputs: output [rows, stride], with padded heads.
    // projected [rows, width]: output of the first projection.
    void run(int head, float* scratch, float* output, int stride, const float* projected, int width) const {
        for (const Stretch& stretch : stretches_) {
            delta(stretch).run(head, scratch);
            for (int row = stretch.first; row < stretch.first + stretch.count; row++) {
                const float* gates = projected + int64_t(row) * width + net_.channels() + head * net_.values;
                finish(row, head, output + int64_t(row) * stride + head * padded_size(net_.values), gates, scratch);
            }
        }
    }

   private:
    const DeltaNet& net_;
    const Stretches& stretches_;
    DeltaNetScratch& s_;

    Delta delta(const Stretch& stretch) const {
        const int64_t first = stretch.first, values = first * net_.heads * net_.values;
        Delta all = net_.delta(stretch);
        all.q = &s_.queries[first * net_.queries()], all.v = &s_.values[values], all.beta = &s_.betas[first * net_.heads];
        all.out = &s_.outputs[values];
        return all;
    }

    [[gnu::flatten]] void finish(int row, int head, float* to, const float* gates, float* padded) const {
        copy_row(to, &s_.outputs[(int64_t(row) * net_.heads + head) * net_.values], net_.values);
        copy_row(padded, gates, net_.values);
        normed(to, to, net_.output_norm, net_.values, net_.output_eps);
        for (int i = 0; i < net_.values; i += LANES) store(to + i, load<Floats>(to + i) * activate(SILU, load<Floats>(padded + i)));
    }
};

}  // namespace paceline
