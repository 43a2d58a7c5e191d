// The mixer of a Gated DeltaNet layer, between its projections. See `DeltaNet` of `models/recurrent.py`.
#pragma once

#include <algorithm>
#include <vector>

#include "convolution.h"
#include "delta.h"
#include "inputs.h"
#include "rows.h"

namespace paceline {

// Rows of one slot that a layer takes together, and the state before their tree. The first `start` rows of the tree belong to
// earlier passes.
struct Stretch {
    int32_t first, count, start;              // `first`: number of the first row in the pass
    const int32_t* parents;                   // [start + count]: see `Delta`
    const int64_t* history;                   // [count, width]: see `ShortConvolution`
    const float *entries_before, *before;     // the state: entries of the convolution [width - 1, channels], and the matrices
    float *entries, *decay, *keys, *changes;  // updates of all rows of the tree [start + count, *]: the first `start` are known
    float *last_entries, *after;              // receive the state after the last row of a chain; null for a tree
};

// Weights and sizes.
struct DeltaNet {
    Matrix share, step;                         // products for beta and for the time step of the decay, both of one kind
    const float *rate, *bias;                   // the decay's negative rate, and the bias of its time step [heads]
    const float *query_norm, *key_norm, *norm;  // of queries, keys and outputs
    const float *filter, *filter_bias;          // weight and bias of the convolution: see `ShortConvolution`
    float unit_eps, eps;                        // of the norms of queries and keys; of the outputs
    int32_t heads, key_heads, keys, values, width, tiled, activated;  // `keys`, `values`: elements of a head

    int queries() const { return key_heads * keys; }
    int channels() const { return 2 * queries() + heads * values; }
    // Outputs of the first projection: queries, keys, values and the gates of the outputs.
    int products() const { return channels() + heads * values; }

    // The call of the recurrence for a stretch, without queries, values, betas and outputs.
    Delta delta(const Stretch& own) const {
        return {heads, key_heads, keys, values, tiled, own.start + own.count, own.start, own.parents, own.before,
                nullptr, own.keys, nullptr, own.decay, nullptr, own.changes, nullptr, own.after};
    }

    // Floats of memory that a thread needs for a stretch.
    int64_t room(const Stretch& own) const {
        return std::max({int64_t(whole(channels()) + whole(keys)), delta(own).room(), int64_t(whole(values))});
    }
};

// Results that the stages hand on.
struct DeltaNetScratch {
    std::vector<float> shares, steps;                 // products of the gates [rows, heads], padded
    std::vector<float> betas, queries, values, read;  // [rows, *]; `read`: the queries' results

    void reserve(const DeltaNet& net, int rows) {
        grow(shares, rows, whole(net.heads)), grow(steps, rows, whole(net.heads)), grow(betas, rows, net.heads);
        grow(queries, rows, net.queries()), grow(values, rows, net.heads * net.values), grow(read, rows, net.heads * net.values);
    }
};

// The stages of a pass, in the order of the functions. Threads may share each stage.
class DeltaNetTask {
   public:
    DeltaNetTask(const DeltaNet& net, const Stretch* stretches, int count, DeltaNetScratch& scratch)
        : net_(net), stretches_(stretches), count_(count), s_(scratch) {}

    // Records a row's entries of the convolution and its decays, and computes its betas. products: the row of the projection.
    [[gnu::flatten]] void enter(int row, const float* products) const {
        const Stretch& own = of(row);
        const int64_t at = place(own, row);
        std::copy_n(products, net_.channels(), own.entries + at * net_.channels());
        for (int i = 0; i < net_.heads; i += LANES) {
            const int64_t line = int64_t(row) * whole(net_.heads) + i;
            const Floats time = softplus(load<Floats>(&s_.steps[line]) + load<Floats>(net_.bias + i));
            store(&s_.steps[line], exponential(load<Floats>(net_.rate + i) * time));
            store(&s_.shares[line], logistic(load<Floats>(&s_.shares[line])));
            const int count = std::min(LANES, net_.heads - i);
            std::copy_n(&s_.steps[line], count, own.decay + at * net_.heads + i);
            std::copy_n(&s_.shares[line], count, &s_.betas[int64_t(row) * net_.heads + i]);
        }
    }

    // Writes the entries after the last row of each chain. The next stretch of the slot may begin with them.
    void keep_entries() const {
        for (const Stretch& own : *this) {
            const int before = net_.width - 1, rows = own.start + own.count, channels = net_.channels();
            for (int i = 0; own.last_entries && i < before; i++) {
                const int number = rows + i;
                const float* from = number < before ? own.entries_before + int64_t(number) * channels
                                                    : own.entries + int64_t(number - before) * channels;
                std::copy_n(from, channels, own.last_entries + int64_t(i) * channels);
            }
        }
    }

    // Runs the convolution for a row and norms its queries and keys.
    void convolve(int row, float* room) const {
        const Stretch& own = of(row);
        const int64_t at = place(own, row);
        const ShortConvolution convolution{own.count, net_.width, net_.channels(), net_.activated, own.entries_before, own.entries,
                                           net_.filter, net_.filter_bias, own.history, nullptr};
        convolution.run(row - own.first, room);
        float* head = room + whole(net_.channels());
        for (int i = 0; i < 2 * net_.key_heads; i++) {
            const bool query = i < net_.key_heads;
            copy_row(head, room + i * net_.keys, net_.keys);
            normed(head, head, query ? net_.query_norm : net_.key_norm, net_.keys, net_.unit_eps);
            float* to = query ? &s_.queries[int64_t(row) * net_.queries()] : own.keys + at * net_.queries();
            std::copy_n(head, net_.keys, to + i % net_.key_heads * net_.keys);
        }
        const int values = net_.heads * net_.values;
        std::copy_n(room + 2 * net_.queries(), values, &s_.values[int64_t(row) * values]);
    }

    // Advances the state of a head by all rows, then norms and gates the head's outputs: mixed [*, stride], padded.
    // products [*, width]: of the projection.
    void run(int head, float* room, float* mixed, int stride, const float* products, int width) const {
        for (const Stretch& own : *this) {
            delta(own).run(head, room);
            for (int row = own.first; row < own.first + own.count; row++) {
                const float* gates = products + int64_t(row) * width + net_.channels() + head * net_.values;
                finish(row, head, mixed + int64_t(row) * stride + head * whole(net_.values), gates, room);
            }
        }
    }

   private:
    const DeltaNet& net_;
    const Stretch* const stretches_;
    const int count_;
    DeltaNetScratch& s_;

    const Stretch* begin() const { return stretches_; }
    const Stretch* end() const { return stretches_ + count_; }

    const Stretch& of(int row) const {
        const Stretch* own = stretches_;
        while (row >= own->first + own->count) own++;
        return *own;
    }

    // Number of a row in its tree.
    static int64_t place(const Stretch& own, int row) { return own.start + row - own.first; }

    Delta delta(const Stretch& own) const {
        const int64_t first = own.first, values = first * net_.heads * net_.values;
        Delta all = net_.delta(own);
        all.q = &s_.queries[first * net_.queries()], all.v = &s_.values[values], all.beta = &s_.betas[first * net_.heads];
        all.out = &s_.read[values];
        return all;
    }

    [[gnu::flatten]] void finish(int row, int head, float* to, const float* gates, float* padded) const {
        copy_row(to, &s_.read[(int64_t(row) * net_.heads + head) * net_.values], net_.values);
        copy_row(padded, gates, net_.values);
        normed(to, to, net_.norm, net_.values, net_.eps);
        for (int i = 0; i < net_.values; i += LANES) store(to + i, load<Floats>(to + i) * activate(SILU, load<Floats>(padded + i)));
    }
};

}  // namespace paceline
