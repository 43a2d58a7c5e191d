// One decoder layer over the rows of a pass, or of a group of them.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_task.h"
#include "delta_net.h"
#include "experts.h"
#include "gated_convolution.h"
#include "low_rank.h"
#include "mamba.h"
#include "product.h"
#include "rows.h"

namespace paceline {

// The linear layers of a feed-forward network, or of one expert. In a network without a gate, `gate_up` is the up projection.
struct Expert {
    Matrix gate_up, down;
};

struct Layer {
    Matrix qkv, out;               // first and last linear layer of the mixer; `qkv.out` is 0 without a mixer
    Matrix router;                 // of a mixture of experts
    Matrix token_gate, token_out;  // see `LayerTask::add_token_embedding`; `token_gate.out` is 0 if the layer adds no token embeddings
    // All of the same kinds and sizes; a single one if this is not a mixture of experts; null without a feed-forward block.
    const Expert* experts;
    Routing routing;  // of a mixture of experts
    // Norm weights, or null. The `post` norms apply to the outputs of the mixer, the feed-forward network and the token embeddings.
    const float *mixer_norm, *mixer_post_norm, *mlp_norm, *mlp_post_norm, *token_post_norm, *query_norm, *key_norm, *value_norm;
    float eps, residual_scale, scale;  // `residual_scale`: factor of the outputs of mixer and feed-forward; `scale`: of the layer's output
    int32_t hidden, ffn, activation, head_dim;
    int32_t token_offset;  // index of the layer's first token embedding element in a row of `Pass::tokens`
    // Numbers of key heads and value heads that `qkv` outputs after the queries. If it outputs no values, the keys before norm and
    // rotation are the values. If it outputs no keys, the layer reads the keys and values of an earlier layer, whose `view` and `index`
    // it has.
    int32_t key_heads, value_heads;
    // `view`, `rotation`: indices into the pass's views and rotations. `index`: number of the layer among the layers of the view.
    // `state`: number of the layer among the recurrent layers.
    int32_t view, index, state, rotation;
    Heads heads;  // of the mixer (Mamba-2 and a convolution have one head of all outputs); `padded_dim` is `head_dim` padded to whole lanes
    // LoRA factors of each linear layer, one `LowRank` for each adapter; null if no adapter changes the linear layer.
    const LowRank *qkv_adapters, *out_adapters, *gate_up_adapters, *down_adapters, *token_gate_adapters, *token_out_adapters;
    int32_t gated_attention;  // 1 if `qkv` outputs each query head followed by the gate of that head's attention output
    const DeltaNet* delta;    // the mixer if it is Gated DeltaNet, or null. `qkv` is then its first projection
    // Computes the weight of the shared expert. Its kind is the router's. `shared_gate.out` is 0 if the weight is 1.
    Matrix shared_gate;
    // A dense network in parallel with the mixture of experts; `dense.down.out` is 0 if there is none. `mlp_norm` is then the norm of its
    // input, and the experts and the router have their own norms. `dense_post_norm` and `expert_post_norm` are null if the dense network is a
    // shared expert.
    Expert dense;
    int32_t dense_ffn;
    const float *expert_norm, *router_norm, *dense_post_norm, *expert_post_norm;
    const GatedConvolution* convolution;  // the mixer if it is a convolution, or null. `qkv` is then its first projection
    const Mamba* mamba;                   // the mixer if it is Mamba-2, alone or in parallel with attention, or null
    // If Mamba-2 runs in parallel with attention: its first and last linear layers, and their LoRA factors. If Mamba-2 is the only mixer,
    // its linear layers are `qkv` and `out`. `state_in.out` is 0 unless both run in parallel.
    Matrix state_in, state_out;
    const LowRank *state_in_adapters, *state_out_adapters;
    int32_t gated_ffn;  // 0 if the feed-forward networks have no gates

    bool mixes() const { return qkv.out > 0; }
    bool is_parallel() const { return state_in.out > 0; }
    bool attends() const { return mixes() && !delta && !convolution && (!mamba || is_parallel()); }
    bool feeds() const { return experts; }
    bool is_moe() const { return router.out > 0; }
    bool has_dense() const { return dense.down.out > 0; }

    // Number of blocks (LANES elements each) in a hidden row of a feed-forward network.
    int hidden_blocks(const Expert& network) const { return blocks_of(network.gate_up) / (1 + gated_ffn); }

    // Elements of a row of the mixer's output, with padded heads.
    int query_width() const { return heads.query_heads * heads.padded_dim; }

    // Room for a row of the output of `qkv`.
    int qkv_width() const {
        if (!attends()) return padded_size(delta ? delta->projection_width() : qkv.out);
        return (1 + gated_attention) * query_width() + (key_heads + value_heads) * heads.padded_dim;
    }
};

struct Pass {
    int32_t slots, rows, tensor_rows, threads;  // `rows`: of all slots; `tensor_rows`: rows of the tensors, including padding
    const int64_t* indices;                     // index of each row in the tensors
    const View* views;
    const Rotation* rotations;
    const int32_t* adapters;  // adapter number of each row, starting at 1, or 0 for no adapter; null if no row has one
    int32_t max_rank;         // the largest rank of all adapters
    int32_t token_width;
    const void* tokens;  // token embeddings of all layers [tensor_rows, token_width], of the stream's type; or null
    // The all-reduce of tensor parallelism, or null: adds the other ranks' numbers in place. Returns 1 on failure.
    int32_t (*reduce)(const void* context, float* numbers, int64_t count);
    const void* reduce_context;
    const Stretch* stretches;  // `stretch_count` for each recurrent layer; null if there are no recurrent layers
    int32_t stretch_count;

    Stretches stretches_of(const Layer& l) const { return {stretches + int64_t(l.state) * stretch_count, stretch_count}; }
};

// Memory of one thread.
struct ThreadScratch {
    std::vector<float> row;
    AttentionKernels attention_kernels;
    Inputs expert_input;  // the rows that chose one expert

    void reserve(const Layer& l, const Pass& pass) {
        grow(row, 1, std::max(padded_size(l.hidden), l.query_width()));
        if (l.is_moe()) expert_input.reserve(pass.rows, l.experts->gate_up);
        if (l.attends()) attention_kernels.reserve(pass.views[l.view], l.heads, pass.slots);
        if (l.delta) reserve_for(*l.delta, pass.stretches_of(l));
        if (l.mamba) reserve_for(*l.mamba, pass.stretches_of(l));
    }

   private:
    template <class Mixer>
    void reserve_for(const Mixer& mixer, const Stretches& stretches) {
        for (const Stretch& stretch : stretches) grow(row, 1, mixer.scratch_size(stretch));
    }
};

// Results that one stage of a layer leaves for the next. The caller keeps the memory for its next pass. All memory is allocated before
// the first stage, because a thread that runs a piece of a stage has no way to report a failure.
struct Scratch {
    std::vector<float> stream, qkv;                                  // [rows, *]
    std::vector<float> mixer_input;                                  // of the first layer, if it is not the normed stream [rows, *]
    std::vector<float> queries, mixer_output;                        // [rows, query heads, padded_dim]; queries after norm and rotation
    std::vector<float> addend;                                       // output of mixer or feed-forward, added to the stream [rows, hidden]
    std::vector<float> dense_output;                                 // of the dense network in parallel with the experts [rows, hidden]
    std::vector<float> router_logits, expert_weights, shared_gates;  // [rows, *]
    std::vector<float> partials;                                     // of attention [rows, query heads, blocks, partial_size]
    std::vector<float> lora_hidden;                                  // A x of the current linear layer [rows, max_rank]
    std::vector<int32_t> chosen;                                     // experts of each row [rows, top_k]
    std::vector<float> ffn_hidden;                                   // input of the down projection [rows * top_k, ffn]
    Inputs qkv_input, out_input, router_input, mlp_input, down_input;
    DeltaNetScratch delta;
    MambaScratch mamba;
    Routes routes;

    void reserve(const Layer& l, const Pass& pass, int width) {
        const int rows = pass.rows;
        grow(stream, rows, padded_size(l.hidden)), grow(mixer_input, rows, padded_size(width)), grow(addend, rows, padded_size(l.hidden));
        if (l.mixes()) reserve_mixer(l, pass);
        if (pass.adapters) grow(lora_hidden, rows, pass.max_rank);
        if (!l.feeds()) return;
        grow(ffn_hidden, rows * l.routing.per_row(), padded_size(l.ffn));
        mlp_input.reserve(rows, l.experts->gate_up), down_input.reserve(rows * l.routing.per_row(), l.experts->down);
        routes.reserve(l.routing.count(), size_t(rows) * l.routing.per_row());
        grow(ffn_hidden, rows, padded_size(l.token_gate.out));
        if (l.token_gate.out) mlp_input.reserve(rows, l.token_gate), down_input.reserve(rows, l.token_out);
        if (!l.is_moe()) return;
        if (l.has_dense()) {
            grow(dense_output, rows, padded_size(l.hidden)), grow(ffn_hidden, rows, padded_size(l.dense_ffn));
            mlp_input.reserve(rows, l.dense.gate_up), down_input.reserve(rows, l.dense.down);
        }
        grow(router_logits, rows, 3 * l.routing.padded_experts());
        grow(expert_weights, rows, l.routing.per_row()), grow(chosen, rows, l.routing.per_row());
        router_input.reserve(rows, l.router), grow(shared_gates, rows, padded_size(l.shared_gate.out));
    }

    void reserve_mixer(const Layer& l, const Pass& pass) {
        const int rows = pass.rows;
        grow(qkv, rows, l.qkv_width()), grow(queries, rows, l.query_width()), grow(mixer_output, rows, l.query_width());
        if (l.delta) delta.reserve(*l.delta, rows), router_input.reserve(rows, l.delta->beta);
        if (l.mamba) mamba.reserve(*l.mamba, rows);
        if (l.is_parallel()) {
            grow(qkv, rows, padded_size(l.state_in.out)), grow(mixer_output, rows, padded_size(l.state_out.in));
            router_input.reserve(rows, l.state_in), out_input.reserve(rows, l.state_out);
        }
        if (l.attends())
            grow(partials, WorkItems(pass.views[l.view], pass.slots, l.heads, pass.threads).partials(rows), partial_size(l.heads));
        qkv_input.reserve(rows, l.qkv), out_input.reserve(rows, l.out);
    }
};

// Runs a layer stage by stage. The team's threads share the rows, heads or outputs of each stage.
template <class Element>
class LayerTask {
    using Number = typename Element::Number;

   public:
    // `locals`: one for each thread of the team.
    LayerTask(const Layer& layer, const Pass& pass, Scratch& scratch, ThreadScratch* locals, Team& team)
        : l(layer), pass(pass), s(scratch), locals(locals), team(team), rows(pass.rows), hidden(padded_size(l.hidden)), query_width(l.query_width()),
          qkv_width(l.qkv_width()), adds_tokens(l.token_gate.out && pass.tokens) {}

    // `mixer_input` [rows, width] is the input of the mixer; null means the normed stream. Returns false if the all-reduce fails.
    bool run(const float* mixer_input, int width) {
        if (l.mixes() && !run_mixer(mixer_input, width)) return false;
        each_row([&](int row, ThreadScratch& local) {
            if (l.mixes()) add_to_stream(row, l.mixer_post_norm, l.residual_scale, !l.feeds());
            if (!l.feeds()) return;
            const float* x = normed_row(row, l.mlp_norm, local);
            set_input(s.mlp_input, l.has_dense() ? l.dense.gate_up : l.experts->gate_up, row, x, l.gate_up_adapters);
            if (l.is_moe() && !l.has_dense()) set_input(s.router_input, l.router, row, x, nullptr);
        });
        if (!l.feeds()) return true;
        if (l.has_dense()) run_dense();
        route();
        feed_forward({l.experts, l.ffn, l.is_moe()});
        if (!all_reduce()) return false;
        each_row([&](int row, ThreadScratch&) {
            if (l.expert_post_norm) add_dense_output(row);
            add_to_stream(row, l.mlp_post_norm, l.residual_scale, !adds_tokens);
            if (adds_tokens) set_token_input(row);
        });
        if (adds_tokens) add_token_embedding();
        return true;
    }

   private:
    // The networks of a feed-forward block: a dense one, or experts whose results are weighted.
    struct Networks {
        const Expert* each;
        int ffn;
        bool are_experts;
    };

    const Layer& l;
    const Pass& pass;
    Scratch& s;
    ThreadScratch* const locals;
    Team& team;
    const int rows, hidden, query_width, qkv_width;  // widths are padded to whole lanes
    const bool adds_tokens;                          // the layer adds per-layer token embeddings

    float* stream(int row) { return &s.stream[int64_t(row) * hidden]; }
    float* addend(int row) { return &s.addend[int64_t(row) * hidden]; }
    float* dense_output(int row) { return &s.dense_output[int64_t(row) * hidden]; }

    // Sums `addend` over all ranks. Returns false on failure.
    bool all_reduce() { return !pass.reduce || pass.reduce(pass.reduce_context, s.addend.data(), int64_t(rows) * hidden) == 0; }

    template <class Work>
    void each_row(Work work) {
        team.split(rows, [&](Range range, int thread) {
            for (int row = range.from; row < range.to; row++) work(row, locals[thread]);
        });
    }

    // Computes a linear layer: to [rows, stride] = x W^T + b, plus the rows' adapters.
    void multiply(const Matrix& m, const Inputs& x, float* to, int stride, const LowRank* adapters) {
        team.split(blocks_of(m), [&](Range blocks, int) {
            product(blocks, m, x, {0, rows}, [&](int row, int at, Floats y) {
                store(to + int64_t(row) * stride + at, plus_adapter(adapters, row, at, y));
            });
        });
    }

    // The factors of a row's adapter for a linear layer; null if there are none.
    const LowRank* adapter_of(const LowRank* adapters, int row) const {
        if (!adapters || !pass.adapters || !pass.adapters[row]) return nullptr;
        const LowRank* adapter = adapters + pass.adapters[row] - 1;
        return adapter->rank ? adapter : nullptr;
    }

    // Computes A x of the row's adapter, which `plus_adapter` needs.
    void shrink(const LowRank* adapters, int row, const float* x, int size) {
        if (const LowRank* adapter = adapter_of(adapters, row))
            adapter->template shrink<Element>(&s.lora_hidden[int64_t(row) * pass.max_rank], x, size);
    }

    // Returns y plus B A x of the row's adapter. y: the 16 outputs of a linear layer that begin at output `at`.
    Floats plus_adapter(const LowRank* adapters, int row, int at, const Floats& y) const {
        const LowRank* adapter = adapter_of(adapters, row);
        return adapter ? adapter->template expand<Element>(y, &s.lora_hidden[int64_t(row) * pass.max_rank], at) : y;
    }

    // A row of the stream, normalised if there is a norm.
    const float* normed_row(int row, const float* norm, ThreadScratch& local) {
        if (!norm) return stream(row);
        normed(local.row.data(), stream(row), norm, l.hidden, l.eps);
        return local.row.data();
    }

    // Sets a row of the input of a linear layer.
    void set_input(Inputs& to, const Matrix& m, int row, const float* x, const LowRank* adapters) {
        to.set({0, rows}, row, m, x, hidden, 0, hidden);
        shrink(adapters, row, x, hidden);
    }

    // Runs the mixer. Leaves its output in `addend`. Returns false if the all-reduce fails.
    bool run_mixer(const float* mixer_input, int width) {
        each_row([&](int row, ThreadScratch& local) {
            const float* x = mixer_input ? mixer_input + int64_t(row) * padded_size(width) : normed_row(row, l.mixer_norm, local);
            const int size = mixer_input ? padded_size(width) : hidden;
            s.qkv_input.set({0, rows}, row, l.qkv, x, size, 0, size);
            if (l.delta) s.router_input.set({0, rows}, row, l.delta->beta, x, size, 0, size);
            if (l.is_parallel()) s.router_input.set({0, rows}, row, l.state_in, x, size, 0, size);
            if (!mixer_input) shrink(l.qkv_adapters, row, x, hidden);
        });
        multiply(l.qkv, s.qkv_input, s.qkv.data(), qkv_width, l.qkv_adapters);
        if (l.delta)
            run_delta_net();
        else if (l.convolution)
            convolve();
        else if (l.attends())
            rotate_and_store(), attend();
        else
            run_mamba(qkv_width, query_width);
        each_row([&](int row, ThreadScratch& local) { set_out_input(row, local.row.data()); });
        multiply(l.out, s.out_input, s.addend.data(), hidden, l.out_adapters);
        if (l.is_parallel()) add_mamba();
        return all_reduce();
    }

    // Adds the output of Mamba-2 to the output of the attention in parallel with it.
    void add_mamba() {
        const int size = l.mamba->state.value_size(), width = padded_size(l.state_in.out), stride = padded_size(size);
        if (pass.adapters)  // `lora_hidden` holds A x of one linear layer at a time
            each_row([&](int row, ThreadScratch& local) { shrink(l.state_in_adapters, row, normed_row(row, l.mixer_norm, local), hidden); });
        multiply(l.state_in, s.router_input, s.qkv.data(), width, l.state_in_adapters);
        run_mamba(width, stride);
        each_row([&](int row, ThreadScratch& local) {
            copy_row(local.row.data(), &s.mixer_output[int64_t(row) * stride], size);
            s.out_input.set({0, rows}, row, l.state_out, local.row.data(), stride, 0, stride);
            shrink(l.state_out_adapters, row, local.row.data(), stride);
        });
        team.split(blocks_of(l.state_out), [&](Range blocks, int) {
            product(blocks, l.state_out, s.out_input, {0, rows}, [&](int row, int at, Floats y) {
                store(addend(row) + at, load<Floats>(addend(row) + at) + plus_adapter(l.state_out_adapters, row, at, y));
            });
        });
    }

    // Runs Gated DeltaNet between its projections.
    void run_delta_net() {
        const DeltaNet& net = *l.delta;
        const Stretches stretches = pass.stretches_of(l);
        const DeltaNetTask task(net, stretches, s.delta);
        multiply(net.beta, s.router_input, s.delta.beta_outputs.data(), padded_size(net.state.heads), nullptr);
        multiply(net.time_step, s.router_input, s.delta.step_outputs.data(), padded_size(net.state.heads), nullptr);
        run_stages(task, net.state, stretches, qkv_width, [&](int head, float* scratch) {
            task.run(head, scratch, s.mixer_output.data(), query_width, s.qkv.data(), qkv_width);
        });
    }

    // Runs Mamba-2 between its projections: from `qkv` [rows, width] to `mixer_output` [rows, stride].
    void run_mamba(int width, int stride) {
        const Mamba& net = *l.mamba;
        const Stretches stretches = pass.stretches_of(l);
        const MambaTask task(net, stretches, s.mamba);
        run_stages(task, net.state, stretches, width, [&](int head, float* scratch) { task.run(head, scratch); });
        each_row([&](int row, ThreadScratch& local) {
            task.finish(row, &s.qkv[int64_t(row) * width], &s.mixer_output[int64_t(row) * stride], local.row.data());
        });
    }

    // Runs the stages that all mixers with a matrix state have: `enter`, `convolve` and `run_head(head, scratch)`. `qkv` is [rows, width].
    template <class Task, class Run>
    void run_stages(const Task& task, const MatrixState& state, const Stretches& stretches, int width, Run run_head) {
        each_row([&](int row, ThreadScratch&) { task.enter(row, &s.qkv[int64_t(row) * width]); });
        stretches.keep_entries(state.conv_width, state.channels());
        each_row([&](int row, ThreadScratch& local) { task.convolve(row, local.row.data()); });
        team.split(state.heads, [&](Range heads, int thread) {
            for (int head = heads.from; head < heads.to; head++) run_head(head, locals[thread].row.data());
        });
    }

    // Runs a gated convolution between its projections.
    void convolve() {
        const GatedConvolution& convolution = *l.convolution;
        const Stretches stretches = pass.stretches_of(l);
        auto projected = [&](int row) { return &s.qkv[int64_t(row) * qkv_width]; };
        each_row([&](int row, ThreadScratch&) { convolution.enter(stretches, row, projected(row)); });
        stretches.keep_entries(convolution.width, convolution.channels);
        each_row([&](int row, ThreadScratch&) { convolution.run(stretches, row, projected(row), &s.mixer_output[int64_t(row) * query_width]); });
    }

    // Applies the attention gates to a row of the mixer's output, removes the padding of its heads, and sets the input of `out`.
    void set_out_input(int row, float* unpadded) {
        float* x = &s.mixer_output[int64_t(row) * query_width];
        for (int head = 0; l.gated_attention && head < l.heads.query_heads; head++)
            gate_head(x + head * l.heads.padded_dim, &s.qkv[int64_t(row) * qkv_width + (2 * head + 1) * l.head_dim]);
        const int size = l.head_dim * l.heads.query_heads;
        if (size < query_width) {
            for (int head = 0; head < l.heads.query_heads; head++)
                copy_row(unpadded + head * l.head_dim, x + head * l.heads.padded_dim, l.head_dim);
            std::fill(unpadded + size, unpadded + padded_size(size), 0.0f);
            x = unpadded;
        }
        s.out_input.set({0, rows}, row, l.out, x, padded_size(size), 0, padded_size(size));
        shrink(l.out_adapters, row, x, padded_size(size));
    }

    // Multiplies the padded output of a query head by the logistic function of its gates.
    [[gnu::flatten]] void gate_head(float* x, const float* gates) const {
        for (int i = 0; i < l.head_dim; i += LANES) {
            float part[LANES] = {};
            std::copy_n(gates + i, std::min(LANES, l.head_dim - i), part);
            store(x + i, load<Floats>(x + i) * logistic(load<Floats>(part)));
        }
    }

    void rotate_and_store() {
        team.split(l.heads.query_heads + (l.key_heads ? 2 * l.heads.kv_heads : 0), [&](Range heads, int thread) {
            for (int head = heads.from; head < heads.to; head++) rotate_and_store(head, locals[thread]);
        });
    }

    // Norms and rotates one head of all rows, numbered in the order queries, keys, values. Keys and values are stored in the cache.
    void rotate_and_store(int head, ThreadScratch& local) {
        if (head < l.heads.query_heads) {
            for (int row = 0; row < rows; row++) rotate_head(&s.queries[int64_t(row) * query_width + head * l.heads.padded_dim], row, head);
            return;
        }
        const bool is_value = head >= l.heads.query_heads + l.heads.kv_heads;
        const int kv_head = (head - l.heads.query_heads) % l.heads.kv_heads;
        store_head(local.attention_kernels, pass.views[l.view], pass.slots, l.index, l.heads, kv_head, is_value, [&](int row) {
            rotate_head(local.row.data(), row, head);
            return local.row.data();
        });
    }

    // Copies a head of a row from the output of `qkv` to x, padded, and applies its norm and rotation.
    void rotate_head(float* x, int row, int head) {
        const bool is_value = head >= l.heads.query_heads + l.heads.kv_heads;
        const int projected = is_value && !l.value_heads ? head - l.heads.kv_heads : head;  // keys may also be the values
        const int source = projected + l.gated_attention * std::min(projected, l.heads.query_heads);  // gates follow their queries
        copy_row(x, &s.qkv[int64_t(row) * qkv_width + source * l.head_dim], l.head_dim);
        const float* norm = is_value ? l.value_norm : head < l.heads.query_heads ? l.query_norm : l.key_norm;
        if (norm) normed(x, x, norm, l.head_dim, l.eps);
        if (!is_value) rotate(x, pass.rotations[l.rotation], pass.indices[row]);
    }

    // Computes attention for all queries.
    void attend() {
        const AttentionTask<Element> task(pass.views[l.view], pass.slots, l.index, l.heads, team.count());
        auto kernels_of = [&](int thread) -> AttentionKernels& { return locals[thread].attention_kernels; };
        task.run(s.queries.data(), s.mixer_output.data(), s.partials.data(), rows, team, kernels_of);
    }

    // Chooses the experts of each row.
    void route() {
        if (l.is_moe()) {
            const int width = 3 * l.routing.padded_experts(), each = l.routing.per_row();
            multiply(l.router, s.router_input, s.router_logits.data(), width, nullptr);
            if (l.shared_gate.out) multiply(l.shared_gate, s.router_input, s.shared_gates.data(), LANES, nullptr);
            each_row([&](int row, ThreadScratch&) {
                choose(&s.router_logits[int64_t(row) * width], l.routing, &s.chosen[row * each], &s.expert_weights[row * each]);
                if (l.shared_gate.out && !l.has_dense()) s.expert_weights[(row + 1) * each - 1] = shared_weight(row);
            });
        }
        s.routes.assign(l.routing.count(), rows, l.routing.per_row(), l.is_moe() ? s.chosen.data() : nullptr, s.expert_weights.data());
    }

    // The weight of the shared expert.
    float shared_weight(int row) const {
        return l.shared_gate.out ? logistic(load<Floats>(&s.shared_gates[int64_t(row) * LANES]))[0] : 1.0f;
    }

    // Runs the dense network in parallel with the experts, and sets the inputs of the experts and the router.
    void run_dense() {
        s.routes.assign(1, rows, 1, nullptr, nullptr);
        feed_forward({&l.dense, l.dense_ffn, false});
        each_row([&](int row, ThreadScratch& local) {
            if (l.dense_post_norm)
                normed(dense_output(row), addend(row), l.dense_post_norm, l.hidden, l.eps);
            else
                copy_row(dense_output(row), addend(row), l.hidden);
            set_input(s.mlp_input, l.experts->gate_up, row, normed_row(row, l.expert_norm, local), nullptr);
            set_input(s.router_input, l.router, row, normed_row(row, l.router_norm, local), nullptr);
        });
    }

    // Adds the normalised output of the dense network to the normalised output of the experts. Tensor parallelism does not
    // support such layers.
    void add_dense_output(int row) {
        float* y = addend(row);
        normed(y, y, l.expert_post_norm, l.hidden, l.eps);
        for (int i = 0; i < hidden; i += LANES) store(y + i, load<Floats>(dense_output(row) + i) + load<Floats>(y + i));
    }

    void feed_forward(const Networks& networks) {
        // The threads share units of two pairs of blocks: 32 gates and 32 ups. The units of one expert follow each other. Without gates,
        // a unit is two blocks of the up projection.
        const int pairs = l.hidden_blocks(*networks.each), each = (pairs + 1) / 2;
        team.split(s.routes.count() * each, [&](Range units, int thread) {
            for (int unit = units.from, count; unit < units.to; unit += count) {
                const int first = unit % each;
                count = std::min(each - first, units.to - unit);
                const Range part{2 * first, std::min(2 * (first + count), pairs)};
                compute_gate_up(networks, unit / each, part, locals[thread].expert_input);
            }
        });
        if (l.down_adapters && pass.adapters) {
            const int width = padded_size(networks.ffn);
            each_row([&](int row, ThreadScratch&) { shrink(l.down_adapters, row, &s.ffn_hidden[int64_t(row) * width], width); });
        }
        team.split(blocks_of(networks.each->down), [&](Range blocks, int) { add_down(networks, blocks); });
    }

    // Computes these blocks of the down projection. Sums the experts' results in the order of their numbers. If the dense network is a
    // shared expert, the sum starts with its weighted output.
    void add_down(const Networks& networks, Range blocks) {
        const bool is_shared = l.has_dense() && !l.expert_post_norm;
        for (int row = 0; row < rows && networks.are_experts; row++) {
            const float weight = is_shared ? shared_weight(row) : 0.0f;
            for (int i = blocks.from * LANES; i < blocks.to * LANES; i++) addend(row)[i] = is_shared ? weight * dense_output(row)[i] : 0.0f;
        }
        for (int i = 0; i < s.routes.count(); i++) {
            const Range entries = s.routes.of(i);
            product(blocks, networks.each[s.routes.active[i]].down, s.down_input, entries, [&](int entry, int at, Floats y) {
                const int row = s.routes.rows[entries.from + entry];
                float* to = addend(row) + at;
                const float weight = s.routes.weights[entries.from + entry];
                store(to, networks.are_experts ? fma(y, all(weight), load<Floats>(to)) : plus_adapter(l.down_adapters, row, at, y));
            });
        }
    }

    // Computes the gate and up projections and the activation of the i-th active expert, for these pairs of gate and up blocks. Without
    // gates, `pairs` is a range of blocks of the up projection.
    void compute_gate_up(const Networks& networks, int i, Range pairs, Inputs& expert_input) {
        const Routes& routes = s.routes;
        const Expert& expert = networks.each[routes.active[i]];
        const Range entries = routes.of(i);
        const int count = entries.to - entries.from, width = padded_size(networks.ffn);
        const bool gathers = count < rows;  // only some rows chose this expert
        for (int entry = 0; gathers && entry < count; entry++)
            expert_input.copy({0, count}, entry, expert.gate_up, s.mlp_input, {0, rows}, routes.rows[entries.from + entry]);
        auto hidden_of = [&](int entry) { return &s.ffn_hidden[int64_t(entries.from + entry) * width]; };
        const LowRank* adapters = networks.are_experts ? nullptr : l.gate_up_adapters;  // adapters change no expert; in a dense network, entries are rows
        const Inputs& input = gathers ? expert_input : s.mlp_input;
        if (l.gated_ffn)
            paired_product(pairs, expert.gate_up, input, count, [&](int entry, int at, Floats gate, Floats up) {
                gate = plus_adapter(adapters, entry, 2 * at, gate), up = plus_adapter(adapters, entry, 2 * at + LANES, up);
                store(hidden_of(entry) + at, gated(l.activation, gate, up));
            });
        else
            product(pairs, expert.gate_up, input, {0, count}, [&](int entry, int at, Floats up) {
                store(hidden_of(entry) + at, activate(l.activation, plus_adapter(adapters, entry, at, up)));
            });
        for (int entry = 0; entry < count; entry++) {
            float* x = hidden_of(entry);
            if (pairs.to * LANES > networks.ffn) std::fill(x + networks.ffn, x + width, 0.0f);
            s.down_input.set(entries, entry, expert.down, x, width, pairs.from * LANES, pairs.to * LANES);
        }
    }

    // The layer's token embedding of a row. `add_token_embedding` multiplies it by its gate in place.
    float* token_embedding(int row) { return &s.ffn_hidden[int64_t(row) * padded_size(l.token_gate.out)]; }

    void set_token_input(int row) {
        const Number* from = static_cast<const Number*>(pass.tokens) + pass.indices[row] * pass.token_width + l.token_offset;
        widen_row<Element>(token_embedding(row), from, l.token_gate.out);
        set_input(s.mlp_input, l.token_gate, row, stream(row), l.token_gate_adapters);
    }

    // Adds the layer's token embeddings to the stream: a feed-forward network in which they replace the up projection.
    void add_token_embedding() {
        const int width = padded_size(l.token_gate.out), blocks = blocks_of(l.token_gate);
        team.split((blocks + 1) / 2, [&](Range pairs, int) {
            const Range part{2 * pairs.from, std::min(2 * pairs.to, blocks)};
            product(part, l.token_gate, s.mlp_input, {0, rows}, [&](int row, int at, Floats gate) {
                float* x = token_embedding(row) + at;
                store(x, gated(l.activation, plus_adapter(l.token_gate_adapters, row, at, gate), load<Floats>(x)));
            });
            for (int row = 0; row < rows; row++)
                s.down_input.set({0, rows}, row, l.token_out, token_embedding(row), width, part.from * LANES, part.to * LANES);
        });
        if (l.token_out_adapters && pass.adapters)
            each_row([&](int row, ThreadScratch&) { shrink(l.token_out_adapters, row, token_embedding(row), width); });
        multiply(l.token_out, s.down_input, s.addend.data(), hidden, l.token_out_adapters);
        each_row([&](int row, ThreadScratch&) { add_to_stream(row, l.token_post_norm, 1.0f, true); });
    }

    // Adds a row of `addend` to the stream. At the end of every layer (`last`), the stream is scaled and rounded, so the result does not
    // depend on which layers one call runs.
    [[gnu::flatten]] void add_to_stream(int row, const float* norm, float factor, bool last) {
        float *to = stream(row), *y = addend(row);
        if (norm) normed(y, y, norm, l.hidden, l.eps);
        for (int i = 0; i < hidden; i += LANES) {
            Floats total = load<Floats>(to + i) + load<Floats>(y + i) * factor;
            Number rounded[LANES];
            Element::narrow(rounded, total * l.scale);
            store(to + i, last ? Element::widen(rounded) : total);
        }
    }
};

}  // namespace paceline
