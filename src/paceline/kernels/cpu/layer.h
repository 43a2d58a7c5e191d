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
    // Norms' weights, null where there is none. `after`: of what a half adds to the stream.
    const float *before_mix, *after_mix, *before_mlp, *after_mlp, *query_norm, *key_norm;
    float eps;
    int32_t hidden, ffn, activation;
    int32_t view, index, rotation;  // of the pass's views and rotations; `index`: which layer of the slab
    Heads heads;
};

struct Pass {
    int32_t slots, rows, room, threads;  // rows of all slots; lines of the tensors, which may be more
    const int64_t* lines;                // where each row lies in the tensors
    const View* views;
    const Rotation* rotations;
};

inline Floats activate(int kind, Floats x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * fma(x * x * 0.044715f, x, x)));
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
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

// What one thread works with.
struct Own {
    std::vector<float> line;  // a row
    Attention attention;

    void reserve(const Layer& l, const Pass& pass) {
        grow(line, 1, l.hidden), attention.reserve(pass.views[l.view], l.heads, pass.slots);
    }
};

// What the stages of a layer hand on; kept for the next pass by the thread that runs them. All memory is had before
// the threads set out, since none of them could leave the others at a barrier.
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

// One thread's part of a layer. Rows, heads and outputs are shared out anew at every stage, a barrier between any two.
class Part {
   public:
    Part(const Layer& layer, const Pass& pass, Scratch& scratch, Own& own, const Team& team)
        : l(layer), pass(pass), s(scratch), own(own), team(team), rows(pass.rows), mine(team.share(rows)),
          queries(l.heads.query * l.heads.size), all_heads(queries + 2 * l.heads.kv * l.heads.size) {}

    // `entry` [rows, width]: what attention is made from, the normed stream where null.
    void run(const float* entry, int width) {
        for (int row = mine.from; row < mine.to; row++) {
            if (entry)
                give(s.to_mix, l.qkv, row, entry, width, nullptr);
            else
                give(s.to_mix, l.qkv, row, stream(0), l.hidden, l.before_mix);
        }
        team.wait();
        product(team.share(blocks_of(l.qkv)), l.qkv, s.to_mix, rows, [&](int row, int at, Floats y) { store(&s.qkv[int64_t(row) * all_heads + at], y); });
        team.wait();
        Span heads = team.share(all_heads / l.heads.size);
        for (int head = heads.from; head < heads.to; head++) turn(head);
        team.wait();
        attend();
        team.wait();
        for (int row = mine.from; row < mine.to; row++) give(s.to_out, l.out, row, s.mixed.data(), queries, nullptr);
        team.wait();
        add(l.out, s.to_out, l.after_mix, false);
        for (int row = mine.from; row < mine.to; row++) give(s.to_mlp, l.gate_up, row, stream(0), l.hidden, l.before_mlp);
        team.wait();
        feed();
        team.wait();
        add(l.down, s.to_down, l.after_mlp, true);
    }

   private:
    const Layer& l;
    const Pass& pass;
    Scratch& s;
    Own& own;
    const Team& team;
    const int rows;
    const Span mine;
    const int queries, all_heads;

    float* stream(int row) { return &s.stream[int64_t(row) * l.hidden]; }

    // A row as a product takes it, normed first where there is a norm.
    void give(Inputs& to, const Matrix& m, int row, const float* from, int size, const float* norm) {
        from += int64_t(row) * size;
        if (norm) {
            normed(own.line.data(), from, norm, size, l.eps);
            from = own.line.data();
        }
        to.set(row, m, from, size, 0, size);
    }

    // One head of all rows: norm and rotation of queries and keys; keys and values go to the cache.
    void turn(int head) {
        const int size = l.heads.size, at = head * size, first_value = l.heads.query + l.heads.kv;
        for (int row = 0; row < rows; row++) {
            float* x = &s.qkv[int64_t(row) * all_heads + at];
            const float* norm = head < l.heads.query ? l.query_norm : l.key_norm;
            if (head < first_value && norm) normed(x, x, norm, size, l.eps);
            if (head < first_value) rotate(x, pass.rotations[l.rotation], pass.lines[row]);
            for (int d = 0; d < size; d += LANES) narrow(&s.heads[int64_t(row) * all_heads + at + d], load<Floats>(x + d));
        }
        const View& view = pass.views[l.view];
        if (head >= first_value)
            write_head(view, view.values, l.index, l.heads, head - first_value, &s.heads[at], all_heads);
        else if (head >= l.heads.query)
            write_head(view, view.keys, l.index, l.heads, head - l.heads.query, &s.heads[at], all_heads);
    }

    // All queries of all key heads, in pieces that cost the same: one to a thread, or a few by turns where they are many,
    // because later rows see more.
    void attend() {
        const int pieces = ((rows * l.heads.query - 1) / (MANY * team.count) + 1) * team.count;
        for (int piece = team.me; piece < pieces; piece += team.count)
            attend(begin(piece, pieces), begin(piece + 1, pieces));
    }

    static constexpr int MANY = 256;

    // The first query of a piece, where each costs as much as its slot has columns.
    int begin(int64_t piece, int pieces) const {
        const View& view = pass.views[l.view];
        int64_t all = 0;
        for (int i = 0; i < pass.slots; i++) all += view.slots[i].rows * view.most(view.slots[i]);
        // In rows times columns; a query is a part of a row.
        int64_t cost = all * l.heads.query * piece / pieces;
        const Slot* slot = view.slots;
        for (; slot < view.slots + pass.slots - 1; slot++) {
            const int64_t of_slot = slot->rows * view.most(*slot) * l.heads.query;
            if (cost < of_slot) break;
            cost -= of_slot;
        }
        return slot->first * l.heads.query + int(cost / view.most(*slot));
    }

    void attend(int at, int end) {
        const View& view = pass.views[l.view];
        const Slot* slot = view.slots;
        for (int count; at < end; at += count) {
            while (at >= (slot->first + slot->rows) * l.heads.query) slot++;
            const int of_head = slot->rows * l.heads.group(), of_slot = at - slot->first * l.heads.query;
            const int head = of_slot / of_head;
            count = std::min({Attention::TILE, end - at, (head + 1) * of_head - of_slot});
            own.attention.run(view, l.index, l.heads, *slot, head, of_slot - head * of_head, count,
                              &s.heads[int64_t(slot->first) * all_heads], all_heads, &s.mixed[int64_t(slot->first) * queries]);
        }
    }

    void feed() {
        Span done = paired_product(team, l.gate_up, s.to_mlp, rows, [&](int row, int at, Floats gate, Floats up) {
            store(&s.inner[int64_t(row) * l.ffn + at], activate(l.activation, gate) * up);
        });
        for (int row = 0; row < rows; row++)
            s.to_down.set(row, l.down, &s.inner[int64_t(row) * l.ffn], l.ffn, done.from, done.to);
    }

    // stream += product. `last`: the stream leaves a layer as two bytes, wherever a run of layers begins or ends.
    void add(const Matrix& m, const Inputs& x, const float* norm, bool last) {
        product(team.share(blocks_of(m)), m, x, rows, [&](int row, int at, Floats y) { store(&s.added[int64_t(row) * l.hidden + at], y); });
        team.wait();
        for (int row = mine.from; row < mine.to; row++) {
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
