// One decoder layer over the rows of a pass, or of a group of them.
#pragma once

#include <algorithm>
#include <vector>

#include "attending.h"
#include "delta_net.h"
#include "experts.h"
#include "low_rank.h"
#include "product.h"
#include "rows.h"

namespace paceline {

// A feed-forward network, or one expert of a mixture.
struct Expert {
    Matrix gate_up, down;
};

struct Layer {
    Matrix qkv, out, router;  // `router` is used in a mixture
    Matrix token_gate, token_out;  // see `LayerTask::add_token`; `token_gate.out` is 0 if the layer adds no token embeddings
    const Expert* experts;    // all of the same kinds and sizes; a single one if this is not a mixture
    Routing routing;          // used in a mixture
    // Norm weights, or null. The `after` norms apply to the outputs of attention, feed-forward and token embeddings.
    const float *before_mix, *after_mix, *before_mlp, *after_mlp, *after_token, *query_norm, *key_norm, *value_norm;
    float eps, residual_scale, scale;  // factor of the outputs of attention and feed-forward; factor of the layer's output
    int32_t hidden, ffn, activation, head_dim;
    int32_t token_first;  // where the layer's embedding begins in a row of `Pass::tokens`
    // Heads that `qkv` outputs after the queries. Without values, the keys before norm and rotation are the values. Without
    // keys, the layer writes nothing: `view` and `index` are those of an earlier layer.
    int32_t keys, values;
    // Numbers of the pass's view and rotation. `index`: number of the layer in the view, or among the recurrent layers.
    int32_t view, index, rotation;
    Heads heads;  // `head_dim` elements, padded to whole lanes
    // For each adapter; null if no adapter changes the product.
    const LowRank *on_qkv, *on_out, *on_gate_up, *on_down, *on_token_gate, *on_token_out;
    int32_t gated;          // 1 if `qkv` outputs each query head followed by the gate of that head's attention
    const DeltaNet* delta;  // a recurrent layer's mixer, or null. `qkv` is then its first projection
    // Product for the weight of a mixture's shared expert, of the router's kind. `shared_weight.out` is 0 if the weight is 1.
    Matrix shared_weight;

    bool mixture() const { return routing.count() > 1; }
    int queries() const { return heads.query * heads.size; }
    int all_heads() const { return delta ? whole(delta->products()) : (1 + gated) * queries() + (keys + values) * heads.size; }
};

struct Pass {
    int32_t slots, rows, room, threads;  // rows of all slots; rows of the tensors including padding
    const int64_t* indices;              // index of each row in the tensors
    const View* views;
    const Rotation* rotations;
    const int32_t* adapters;  // adapter number of each row, starting at 1, or 0 for no adapter; null if no row has one
    int32_t rank;             // the largest rank of all adapters
    int32_t token_width;
    const void* tokens;  // token embeddings of all layers [room, token_width], of the stream's type; or null
    // Adds the numbers of the other processes that share the model. Returns 1 on failure. Null if there are none.
    int32_t (*reduce)(const void* ranks, float* numbers, int64_t count);
    const void* ranks;
    const Stretch* stretches;  // of each recurrent layer, `stretch_count` each; null if there are none
    int32_t stretch_count;

    const Stretch* of(const Layer& l) const { return stretches + int64_t(l.index) * stretch_count; }
};

// Memory of one thread.
struct ThreadScratch {
    std::vector<float> row;
    Attentions attentions;
    Inputs gathered;  // the rows of one expert

    void reserve(const Layer& l, const Pass& pass) {
        grow(row, 1, std::max(whole(l.hidden), l.queries()));
        if (l.mixture()) gathered.reserve(pass.rows, l.experts->gate_up);
        if (!l.delta) return attentions.reserve(pass.views[l.view], l.heads, pass.slots);
        for (const Stretch* own = pass.of(l); own < pass.of(l) + pass.stretch_count; own++) grow(row, 1, int(l.delta->room(*own)));
    }
};

// Results that the stages of a layer hand on, kept for the caller's next pass. All memory is allocated before the first stage,
// because a piece of work has no way to report a failure.
struct Scratch {
    std::vector<float> stream, entry, qkv, mixed, added, scores, parts, shares;  // [rows, *]
    std::vector<float> attended;                                         // results of blocks [rows, query heads, blocks, *]
    std::vector<float> shrunk;                                           // A x of the current product [rows, rank]
    std::vector<int32_t> chosen;                                         // chosen experts [rows, used]
    std::vector<float> inner;                                            // [rows * used, ffn]
    std::vector<float> heads;                                            // queries, rotated [rows, *]
    Inputs to_mix, to_out, to_route, to_mlp, to_down;
    DeltaNetScratch delta;
    Routes routes;

    void reserve(const Layer& l, const Pass& pass, int width) {
        const int rows = pass.rows;
        grow(stream, rows, whole(l.hidden)), grow(entry, rows, whole(width)), grow(added, rows, whole(l.hidden));
        grow(qkv, rows, l.all_heads()), grow(heads, rows, l.queries()), grow(mixed, rows, l.queries());
        grow(inner, rows * l.routing.each(), whole(l.ffn));
        if (l.delta)
            delta.reserve(*l.delta, rows), to_route.reserve(rows, l.delta->share);
        else
            grow(attended, AttentionPieces(pass.views[l.view], pass.slots, l.heads, pass.threads).parts(rows), part_size(l.heads));
        if (pass.adapters) grow(shrunk, rows, pass.rank);
        to_mix.reserve(rows, l.qkv), to_out.reserve(rows, l.out);
        to_mlp.reserve(rows, l.experts->gate_up), to_down.reserve(rows * l.routing.each(), l.experts->down);
        routes.reserve(l.routing.count(), size_t(rows) * l.routing.each());
        grow(inner, rows, whole(l.token_gate.out));
        if (l.token_gate.out) to_mlp.reserve(rows, l.token_gate), to_down.reserve(rows, l.token_out);
        if (!l.mixture()) return;
        grow(scores, rows, 3 * l.routing.width()), grow(parts, rows, l.routing.each()), grow(chosen, rows, l.routing.each());
        to_route.reserve(rows, l.router), grow(shares, rows, whole(l.shared_weight.out));
    }
};

// Runs a layer stage by stage. The team's threads share the rows, heads or outputs of each stage.
template <class Element>
class LayerTask {
    using Number = typename Element::Number;

   public:
    // `locals`: one for each thread of the team.
    LayerTask(const Layer& layer, const Pass& pass, Scratch& scratch, ThreadScratch* locals, Team& team)
        : l(layer), pass(pass), s(scratch), locals(locals), team(team), rows(pass.rows), hidden(whole(l.hidden)), queries(l.queries()), all_heads(l.all_heads()),
          fed(l.token_gate.out && pass.tokens) {}

    // `entry` [rows, width] is the input of the mixer; null means the normed stream. Returns false if another process is lost.
    bool run(const float* entry, int width) {
        each_row([&](int row, ThreadScratch& local) {
            const float* x = entry ? entry + int64_t(row) * whole(width) : normed_row(row, l.before_mix, local);
            const int size = entry ? whole(width) : hidden;
            s.to_mix.set({0, rows}, row, l.qkv, x, size, 0, size);
            if (l.delta) s.to_route.set({0, rows}, row, l.delta->share, x, size, 0, size);
            if (!entry) shrink(l.on_qkv, row, x, hidden);
        });
        multiply(l.qkv, s.to_mix, s.qkv.data(), all_heads, l.on_qkv);
        if (l.delta)
            recur();
        else
            rotate_and_store(), attend();
        each_row([&](int row, ThreadScratch& local) { set_mixed(row, local.row.data()); });
        multiply(l.out, s.to_out, s.added.data(), hidden, l.on_out);
        if (!summed()) return false;
        each_row([&](int row, ThreadScratch& local) {
            add(row, l.after_mix, l.residual_scale, false);
            const float* x = normed_row(row, l.before_mlp, local);
            set(s.to_mlp, l.experts->gate_up, row, x, l.on_gate_up);
            if (l.mixture()) set(s.to_route, l.router, row, x, nullptr);
        });
        route();
        feed_forward();
        if (!summed()) return false;
        each_row([&](int row, ThreadScratch&) {
            add(row, l.after_mlp, l.residual_scale, !fed);
            if (fed) set_token(row);
        });
        if (fed) add_token();
        return true;
    }

   private:
    const Layer& l;
    const Pass& pass;
    Scratch& s;
    ThreadScratch* const locals;
    Team& team;
    const int rows, hidden, queries, all_heads;
    const bool fed;  // token embeddings are added

    float* stream(int row) { return &s.stream[int64_t(row) * hidden]; }
    float* added(int row) { return &s.added[int64_t(row) * hidden]; }

    bool summed() { return !pass.reduce || pass.reduce(pass.ranks, s.added.data(), int64_t(rows) * hidden) == 0; }

    template <class Work>
    void each_row(Work work) {
        team.split(rows, 1, [&](Span mine, int thread) {
            for (int row = mine.from; row < mine.to; row++) work(row, locals[thread]);
        });
    }

    // to [rows, stride] = x W^T + b, plus the adapters' terms.
    void multiply(const Matrix& m, const Inputs& x, float* to, int stride, const LowRank* on) {
        team.split(blocks_of(m), 1, [&](Span blocks, int) {
            product(blocks, m, x, {0, rows}, [&](int row, int at, Floats y) {
                store(to + int64_t(row) * stride + at, grown(on, row, at, y));
            });
        });
    }

    // The factors of a row's adapter for a product; null if there are none.
    const LowRank* low_rank(const LowRank* on, int row) const {
        if (!on || !pass.adapters || !pass.adapters[row]) return nullptr;
        const LowRank* own = on + pass.adapters[row] - 1;
        return own->rank ? own : nullptr;
    }

    void shrink(const LowRank* on, int row, const float* x, int size) {
        if (const LowRank* own = low_rank(on, row)) own->template shrink<Element>(&s.shrunk[int64_t(row) * pass.rank], x, size);
    }

    // Adds the term of the row's adapter to y, the 16 outputs of a product that begin at output `at`.
    Floats grown(const LowRank* on, int row, int at, const Floats& y) const {
        const LowRank* own = low_rank(on, row);
        return own ? own->template grow<Element>(y, &s.shrunk[int64_t(row) * pass.rank], at) : y;
    }

    // A row of the stream, normalised if there is a norm.
    const float* normed_row(int row, const float* norm, ThreadScratch& local) {
        if (!norm) return stream(row);
        normed(local.row.data(), stream(row), norm, l.hidden, l.eps);
        return local.row.data();
    }

    void set(Inputs& to, const Matrix& m, int row, const float* x, const LowRank* on) {
        to.set({0, rows}, row, m, x, hidden, 0, hidden);
        shrink(on, row, x, hidden);
    }

    // Runs a recurrent layer's mixer between its projections.
    void recur() {
        const DeltaNet& net = *l.delta;
        const DeltaNetTask task(net, pass.of(l), pass.stretch_count, s.delta);
        multiply(net.share, s.to_route, s.delta.shares.data(), whole(net.heads), nullptr);
        multiply(net.step, s.to_route, s.delta.steps.data(), whole(net.heads), nullptr);
        each_row([&](int row, ThreadScratch&) { task.enter(row, &s.qkv[int64_t(row) * all_heads]); });
        task.keep_entries();
        each_row([&](int row, ThreadScratch& local) { task.convolve(row, local.row.data()); });
        team.split(net.heads, 1, [&](Span mine, int thread) {
            for (int head = mine.from; head < mine.to; head++)
                task.run(head, locals[thread].row.data(), s.mixed.data(), queries, s.qkv.data(), all_heads);
        });
    }

    // Copies a row of the mixer's output, without the padding of its heads, to the input of the next product.
    void set_mixed(int row, float* joined) {
        float* x = &s.mixed[int64_t(row) * queries];
        for (int head = 0; l.gated && head < l.heads.query; head++)
            gate_head(x + head * l.heads.size, &s.qkv[int64_t(row) * all_heads + (2 * head + 1) * l.head_dim]);
        const int size = l.head_dim * l.heads.query;
        if (size < queries) {
            for (int head = 0; head < l.heads.query; head++) copy_row(joined + head * l.head_dim, x + head * l.heads.size, l.head_dim);
            std::fill(joined + size, joined + whole(size), 0.0f);
            x = joined;
        }
        s.to_out.set({0, rows}, row, l.out, x, whole(size), 0, whole(size));
        shrink(l.on_out, row, x, whole(size));
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
        team.split(l.heads.query + (l.keys ? 2 * l.heads.kv : 0), 1, [&](Span mine, int thread) {
            for (int head = mine.from; head < mine.to; head++) rotate_and_store(head, locals[thread]);
        });
    }

    // Norms and rotates one head of all rows. Keys and values are stored in the cache.
    void rotate_and_store(int head, ThreadScratch& local) {
        if (head < l.heads.query) {
            for (int row = 0; row < rows; row++) rotate_head(&s.heads[int64_t(row) * queries + head * l.heads.size], row, head);
            return;
        }
        const bool value = head >= l.heads.query + l.heads.kv;
        const int kv_head = (head - l.heads.query) % l.heads.kv;
        store_head(local.attentions, pass.views[l.view], pass.slots, l.index, l.heads, kv_head, value, [&](int row) {
            rotate_head(local.row.data(), row, head);
            return local.row.data();
        });
    }

    // Copies a head of a row to x, padded, and applies its norm and rotation.
    void rotate_head(float* x, int row, int head) {
        const bool value = head >= l.heads.query + l.heads.kv;
        const int place = value && !l.values ? head - l.heads.kv : head;
        const int source = place + l.gated * std::min(place, l.heads.query);
        copy_row(x, &s.qkv[int64_t(row) * all_heads + source * l.head_dim], l.head_dim);
        const float* norm = value ? l.value_norm : head < l.heads.query ? l.query_norm : l.key_norm;
        if (norm) normed(x, x, norm, l.head_dim, l.eps);
        if (!value) rotate(x, pass.rotations[l.rotation], pass.indices[row]);
    }

    // Runs attention for all queries of all key heads.
    void attend() {
        const AttentionTask<Element> task(pass.views[l.view], pass.slots, l.index, l.heads, team.count());
        task.run(s.heads.data(), s.mixed.data(), s.attended.data(), rows, team, [&](int thread) -> Attentions& { return locals[thread].attentions; });
    }

    // Chooses the experts of each row.
    void route() {
        if (l.mixture()) {
            const int width = 3 * l.routing.width(), each = l.routing.each();
            multiply(l.router, s.to_route, s.scores.data(), width, nullptr);
            if (l.shared_weight.out) multiply(l.shared_weight, s.to_route, s.shares.data(), LANES, nullptr);
            each_row([&](int row, ThreadScratch&) {
                choose(&s.scores[int64_t(row) * width], l.routing, &s.chosen[row * each], &s.parts[row * each]);
                if (l.shared_weight.out) s.parts[(row + 1) * each - 1] = logistic(load<Floats>(&s.shares[int64_t(row) * LANES]))[0];
            });
        }
        s.routes.assign(l.routing.count(), rows, l.routing.each(), l.mixture() ? s.chosen.data() : nullptr, s.parts.data());
    }

    void feed_forward() {
        // In units of 32 outputs. The units of one expert follow each other.
        const int pairs = blocks_of(l.experts->gate_up) / 2, each = (pairs + 1) / 2;
        team.split(s.routes.count() * each, 1, [&](Span units, int thread) {
            for (int unit = units.from, count; unit < units.to; unit += count) {
                const int first = unit % each;
                count = std::min(each - first, units.to - unit);
                first_half(unit / each, {2 * first, std::min(2 * (first + count), pairs)}, locals[thread].gathered);
            }
        });
        if (l.on_down && pass.adapters) {
            const int width = whole(l.ffn);
            each_row([&](int row, ThreadScratch&) { shrink(l.on_down, row, &s.inner[int64_t(row) * width], width); });
        }
        team.split(blocks_of(l.experts->down), 1, [&](Span blocks, int) { second_half(blocks); });
    }

    // Adds the results of the experts in the order of their numbers.
    void second_half(Span blocks) {
        for (int row = 0; row < rows && l.mixture(); row++)
            std::fill(added(row) + blocks.from * LANES, added(row) + blocks.to * LANES, 0.0f);
        for (int i = 0; i < s.routes.count(); i++) {
            const Span entries = s.routes.of(i);
            product(blocks, l.experts[s.routes.active[i]].down, s.to_down, entries, [&](int entry, int at, Floats y) {
                const int row = s.routes.rows[entries.from + entry];
                float* to = added(row) + at;
                store(to, l.mixture() ? fma(y, all(s.routes.parts[entries.from + entry]), load<Floats>(to)) : grown(l.on_down, row, at, y));
            });
        }
    }

    // Computes gate and up of one expert for these pairs of blocks.
    void first_half(int i, Span pairs, Inputs& gathered) {
        const Routes& routes = s.routes;
        const Expert& expert = l.experts[routes.active[i]];
        const Span entries = routes.of(i);
        const int count = entries.to - entries.from, width = whole(l.ffn);
        const bool some = count < rows;
        for (int entry = 0; some && entry < count; entry++)
            gathered.copy({0, count}, entry, expert.gate_up, s.to_mlp, {0, rows}, routes.rows[entries.from + entry]);
        auto inner = [&](int entry) { return &s.inner[int64_t(entries.from + entry) * width]; };
        const LowRank* on = l.mixture() ? nullptr : l.on_gate_up;  // adapters change no expert; without a mixture, entries are rows
        paired_product(pairs, expert.gate_up, some ? gathered : s.to_mlp, count, [&](int entry, int at, Floats gate, Floats up) {
            gate = grown(on, entry, 2 * at, gate), up = grown(on, entry, 2 * at + LANES, up);
            store(inner(entry) + at, gated(l.activation, gate, up));
        });
        for (int entry = 0; entry < count; entry++) {
            float* x = inner(entry);
            if (pairs.to * LANES > l.ffn) std::fill(x + l.ffn, x + width, 0.0f);
            s.to_down.set(entries, entry, expert.down, x, width, pairs.from * LANES, pairs.to * LANES);
        }
    }

    // The token embedding of a row, then the product of its gate with it.
    float* token(int row) { return &s.inner[int64_t(row) * whole(l.token_gate.out)]; }

    void set_token(int row) {
        const Number* from = static_cast<const Number*>(pass.tokens) + pass.indices[row] * pass.token_width + l.token_first;
        widen_row<Element>(token(row), from, l.token_gate.out);
        set(s.to_mlp, l.token_gate, row, stream(row), l.on_token_gate);
    }

    // Adds the layer's token embeddings to the stream: a feed-forward network in which they replace the up projection.
    void add_token() {
        const int width = whole(l.token_gate.out), blocks = blocks_of(l.token_gate);
        team.split((blocks + 1) / 2, 1, [&](Span pairs, int) {
            const Span own{2 * pairs.from, std::min(2 * pairs.to, blocks)};
            product(own, l.token_gate, s.to_mlp, {0, rows}, [&](int row, int at, Floats gate) {
                float* x = token(row) + at;
                store(x, gated(l.activation, grown(l.on_token_gate, row, at, gate), load<Floats>(x)));
            });
            for (int row = 0; row < rows; row++)
                s.to_down.set({0, rows}, row, l.token_out, token(row), width, own.from * LANES, own.to * LANES);
        });
        if (l.on_token_out && pass.adapters) each_row([&](int row, ThreadScratch&) { shrink(l.on_token_out, row, token(row), width); });
        multiply(l.token_out, s.to_down, s.added.data(), hidden, l.on_token_out);
        each_row([&](int row, ThreadScratch&) { add(row, l.after_token, 1.0f, true); });
    }

    // Adds a row to the stream. At the end of every layer (`last`), the stream is scaled and rounded, so it does not matter where
    // a run of layers ends.
    [[gnu::flatten]] void add(int row, const float* norm, float factor, bool last) {
        float *to = stream(row), *y = added(row);
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
