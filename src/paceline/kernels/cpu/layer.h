// One decoder layer over the rows of a pass, or of a group of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "product.h"

namespace paceline {

enum Activation : int32_t { SILU, GELU, GELU_TANH };

// All sizes are multiples of 16.
struct Layer {
    Matrix qkv, out, gate_up, down;
    // Weights of norms, or null. `after`: norms of what attention and feed-forward add to the stream.
    const float *before_mix, *after_mix, *before_mlp, *after_mlp, *query_norm, *key_norm;
    float eps;
    int32_t hidden, ffn, activation;
    int32_t view, index, rotation;  // of the pass's views and rotations; `index`: which layer of the slab
    Heads heads;
};

struct Pass {
    int32_t slots, rows, room, threads;  // rows of all slots; rows of the tensors, padding included
    const int64_t* indices;              // of each row in the tensors
    const View* views;
    const Rotation* rotations;
};

inline Floats activate(int kind, const Floats& x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * fma(x * x * 0.044715f, x, x)));
    float y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return load<Floats>(y);
}

inline void normed(float* to, const float* x, const float* weight, int size, float eps) {
    Floats squares{};
    for (int i = 0; i < size; i += LANES) squares = fma(load<Floats>(x + i), load<Floats>(x + i), squares);
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int i = 0; i < size; i += LANES) store(to + i, load<Floats>(x + i) * scale * load<Floats>(weight + i));
}

template <class T>
void grow(std::vector<T>& v, int rows, int width) {
    if (v.size() < size_t(rows) * width) v.resize(size_t(rows) * width);
}

// Memory of one thread.
struct ThreadScratch {
    std::vector<float> row;
    Attention attention;

    void reserve(const Layer& l, const Pass& pass) {
        grow(row, 1, l.hidden), attention.reserve(pass.views[l.view], l.heads, pass.slots);
    }
};

// Results that the stages of a layer pass on; kept for the caller's next pass. All memory is allocated before the threads
// start, since none of them could leave the others at a barrier.
struct Scratch {
    std::vector<float> stream, entry, qkv, mixed, added, inner;  // [rows, *]
    std::vector<bf16> heads;                                     // queries, keys and values [rows, *]
    Inputs to_mix, to_out, to_mlp, to_down;

    void reserve(const Layer& l, const Pass& pass, int width) {
        const int rows = pass.rows;
        const int q = l.heads.query * l.heads.size, all_heads = q + 2 * l.heads.kv * l.heads.size;
        grow(stream, rows, l.hidden), grow(entry, rows, width), grow(qkv, rows, all_heads), grow(heads, rows, all_heads);
        grow(mixed, rows, q), grow(added, rows, l.hidden), grow(inner, rows, l.ffn);
        to_mix.reserve(rows, l.qkv), to_out.reserve(rows, l.out);
        to_mlp.reserve(rows, l.gate_up), to_down.reserve(rows, l.down);
    }
};

// One thread's share of a layer. Rows, heads and outputs are divided anew at every stage, with a barrier after each.
class LayerTask {
   public:
    LayerTask(const Layer& layer, const Pass& pass, Scratch& scratch, ThreadScratch& local, const Thread& thread)
        : l(layer), pass(pass), s(scratch), local(local), thread(thread), rows(pass.rows), my_rows(thread.share(rows)),
          queries(l.heads.query * l.heads.size), all_heads(queries + 2 * l.heads.kv * l.heads.size) {}

    // `entry` [rows, width]: input of attention; null: the normed stream.
    void run(const float* entry, int width) {
        for (int row = my_rows.from; row < my_rows.to; row++) {
            if (entry)
                load_row(s.to_mix, l.qkv, row, entry, width, nullptr);
            else
                load_row(s.to_mix, l.qkv, row, stream(0), l.hidden, l.before_mix);
        }
        thread.wait();
        product(thread.share(blocks_of(l.qkv)), l.qkv, s.to_mix, rows, [&](int row, int at, Floats y) { store(&s.qkv[int64_t(row) * all_heads + at], y); });
        thread.wait();
        Span heads = thread.share(all_heads / l.heads.size);
        for (int head = heads.from; head < heads.to; head++) rotate_and_store(head);
        thread.wait();
        attend();
        thread.wait();
        for (int row = my_rows.from; row < my_rows.to; row++) load_row(s.to_out, l.out, row, s.mixed.data(), queries, nullptr);
        thread.wait();
        add(l.out, s.to_out, l.after_mix, false);
        for (int row = my_rows.from; row < my_rows.to; row++) load_row(s.to_mlp, l.gate_up, row, stream(0), l.hidden, l.before_mlp);
        thread.wait();
        feed_forward();
        thread.wait();
        add(l.down, s.to_down, l.after_mlp, true);
    }

   private:
    const Layer& l;
    const Pass& pass;
    Scratch& s;
    ThreadScratch& local;
    const Thread& thread;
    const int rows;
    const Span my_rows;
    const int queries, all_heads;

    float* stream(int row) { return &s.stream[int64_t(row) * l.hidden]; }

    // Converts a row to the input of a product, normed first if there is a norm.
    void load_row(Inputs& to, const Matrix& m, int row, const float* from, int size, const float* norm) {
        from += int64_t(row) * size;
        if (norm) {
            normed(local.row.data(), from, norm, size, l.eps);
            from = local.row.data();
        }
        to.set(row, m, from, size, 0, size);
    }

    // Norm and rotation of one head of all rows; keys and values go to the cache.
    void rotate_and_store(int head) {
        const int size = l.heads.size, at = head * size, first_value = l.heads.query + l.heads.kv;
        for (int row = 0; row < rows; row++) {
            float* x = &s.qkv[int64_t(row) * all_heads + at];
            const float* norm = head < l.heads.query ? l.query_norm : l.key_norm;
            if (head < first_value && norm) normed(x, x, norm, size, l.eps);
            if (head < first_value) rotate(x, pass.rotations[l.rotation], pass.indices[row]);
            for (int d = 0; d < size; d += LANES) narrow(&s.heads[int64_t(row) * all_heads + at + d], load<Floats>(x + d));
        }
        const View& view = pass.views[l.view];
        if (head >= first_value)
            write_head(view, view.values, l.index, l.heads, head - first_value, &s.heads[at], all_heads);
        else if (head >= l.heads.query)
            write_head(view, view.keys, l.index, l.heads, head - l.heads.query, &s.heads[at], all_heads);
    }

    // All queries of all key heads, in pieces of equal cost: one per thread, or several in turn where there are many,
    // because later rows see more.
    void attend() {
        const int pieces = ((rows * l.heads.query - 1) / (MANY * thread.count) + 1) * thread.count;
        for (int piece = thread.index; piece < pieces; piece += thread.count)
            attend(begin(piece, pieces), begin(piece + 1, pieces));
    }

    static constexpr int MANY = 256;

    // The first query of a piece, if a query costs as much as its slot has columns.
    int begin(int64_t piece, int pieces) const {
        const View& view = pass.views[l.view];
        int64_t all = 0;
        for (int i = 0; i < pass.slots; i++) all += view.slots[i].rows * view.max_columns(view.slots[i]);
        // In rows times columns; a query is a part of a row.
        int64_t cost = all * l.heads.query * piece / pieces;
        const Slot* slot = view.slots;
        for (; slot < view.slots + pass.slots - 1; slot++) {
            const int64_t of_slot = slot->rows * view.max_columns(*slot) * l.heads.query;
            if (cost < of_slot) break;
            cost -= of_slot;
        }
        return slot->first * l.heads.query + int(cost / view.max_columns(*slot));
    }

    void attend(int at, int end) {
        const View& view = pass.views[l.view];
        const Slot* slot = view.slots;
        for (int count; at < end; at += count) {
            while (at >= (slot->first + slot->rows) * l.heads.query) slot++;
            const int of_head = slot->rows * l.heads.group(), of_slot = at - slot->first * l.heads.query;
            const int head = of_slot / of_head;
            count = std::min({Attention::TILE, end - at, (head + 1) * of_head - of_slot});
            local.attention.run(view, l.index, l.heads, *slot, head, of_slot - head * of_head, count,
                              &s.heads[int64_t(slot->first) * all_heads], all_heads, &s.mixed[int64_t(slot->first) * queries]);
        }
    }

    void feed_forward() {
        Span done = paired_product(thread, l.gate_up, s.to_mlp, rows, [&](int row, int at, Floats gate, Floats up) {
            store(&s.inner[int64_t(row) * l.ffn + at], activate(l.activation, gate) * up);
        });
        for (int row = 0; row < rows; row++)
            s.to_down.set(row, l.down, &s.inner[int64_t(row) * l.ffn], l.ffn, done.from, done.to);
    }

    // stream += product. `last`: at a layer's end the stream is rounded to bfloat16, wherever a run of layers ends.
    void add(const Matrix& m, const Inputs& x, const float* norm, bool last) {
        product(thread.share(blocks_of(m)), m, x, rows, [&](int row, int at, Floats y) { store(&s.added[int64_t(row) * l.hidden + at], y); });
        thread.wait();
        for (int row = my_rows.from; row < my_rows.to; row++) {
            float *to = stream(row), *y = &s.added[int64_t(row) * l.hidden];
            if (norm) normed(y, y, norm, l.hidden, l.eps);
            for (int i = 0; i < l.hidden; i += LANES) {
                Floats total = load<Floats>(to + i) + load<Floats>(y + i);
                bf16 bits[LANES];
                narrow(bits, total);
                store(to + i, last ? widen(bits) : total);
            }
        }
    }
};

}  // namespace paceline
