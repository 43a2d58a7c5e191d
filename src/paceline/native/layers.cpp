// A run of decoder layers over the rows of one pass, and single products: what the Python files of this folder call.
#include <new>

#include "attention.h"
#include "noise.h"
#include "product.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

using namespace paceline;

namespace {

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

// The threads of a parallel region; one where the compiler has none (Apple's).
Team team_here() {
#if defined(_OPENMP)
    return {omp_get_thread_num(), omp_get_num_threads()};
#else
    return {0, 1};
#endif
}

Floats activate(int kind, Floats x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * fma(x * x * 0.044715f, x, x)));
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
}

void normed(float* to, const float* x, const float* weight, int size, float eps) {
    Floats squares{};
    for (int i = 0; i < size; i += LANES) squares = fma(load<Floats>(x + i), load<Floats>(x + i), squares);
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int i = 0; i < size; i += LANES) store(to + i, load<Floats>(x + i) * scale * load<Floats>(weight + i));
}

// What one thread works with.
struct Own {
    std::vector<float> line;  // a row
    Attention attention;
};

// What the stages of a layer hand on; kept for the next pass by the thread that runs them. All memory is had before
// the threads set out, since none of them could leave the others at a barrier.
struct Scratch {
    std::vector<float> stream, entry, qkv, mixed, added, inner;  // [rows, *]
    std::vector<bf16> heads;                                     // queries, keys and values [rows, *]
    Inputs to_mix, to_out, to_mlp, to_down;
    std::vector<Own> own;

    void reserve(const Layer& l, const Pass& pass, int width) {
        const int rows = pass.rows;
        const int q = l.heads.query * l.heads.size, all_heads = q + 2 * l.heads.kv * l.heads.size;
        grow(stream, rows, l.hidden), grow(entry, rows, width), grow(qkv, rows, all_heads), grow(heads, rows, all_heads);
        grow(mixed, rows, q), grow(added, rows, l.hidden), grow(inner, rows, l.ffn);
        to_mix.reserve(rows, l.qkv), to_out.reserve(rows, l.out);
        to_mlp.reserve(rows, l.gate_up), to_down.reserve(rows, l.down);
        if (own.size() < size_t(pass.threads)) own.resize(pass.threads);
        for (Own& o : own) grow(o.line, 1, l.hidden), o.attention.reserve(pass.views[l.view], l.heads, pass.slots);
    }

    template <class T>
    static void grow(std::vector<T>& v, int rows, int width) {
        if (v.size() < size_t(rows) * width) v.resize(size_t(rows) * width);
    }
};

// One thread's part of a layer. Rows, heads and outputs are shared out anew at every stage, a barrier between any two.
class Part {
   public:
    Part(const Layer& layer, const Pass& pass, Scratch& scratch, const Team& team)
        : l(layer), pass(pass), s(scratch), own(scratch.own[team.me]), team(team), rows(pass.rows), mine(team.share(rows)),
          queries(l.heads.query * l.heads.size), all_heads(queries + 2 * l.heads.kv * l.heads.size) {}

    // `entry` [rows, width]: what attention is made from, the normed stream where null.
    void run(const float* entry, int width) {
        for (int row = mine.from; row < mine.to; row++) {
            if (entry)
                give(s.to_mix, l.qkv, row, entry, width, nullptr);
            else
                give(s.to_mix, l.qkv, row, stream(0), l.hidden, l.before_mix);
        }
        barrier();
        product(team, l.qkv, s.to_mix, rows, [&](int row, int at, Floats y) { store(&s.qkv[int64_t(row) * all_heads + at], y); });
        barrier();
        Span heads = team.share(all_heads / l.heads.size);
        for (int head = heads.from; head < heads.to; head++) turn(head);
        barrier();
        attend();
        barrier();
        for (int row = mine.from; row < mine.to; row++) give(s.to_out, l.out, row, s.mixed.data(), queries, nullptr);
        barrier();
        add(l.out, s.to_out, l.after_mix, false);
        for (int row = mine.from; row < mine.to; row++) give(s.to_mlp, l.gate_up, row, stream(0), l.hidden, l.before_mlp);
        barrier();
        feed();
        barrier();
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

    static void barrier() {
#pragma omp barrier
    }

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
        product(team, m, x, rows, [&](int row, int at, Floats y) { store(&s.added[int64_t(row) * l.hidden + at], y); });
        barrier();
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

void widen_all(float* to, const bf16* from, size_t count) {
    for (size_t i = 0; i < count; i += LANES) store(to + i, widen(from + i));
}

}  // namespace

extern "C" {

// What this was compiled for, in words.
const char* paceline_built_for() {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define PACELINE_PROCESSOR "AVX-512 BF16/VNNI"
#elif defined(__AVX512VNNI__)
#define PACELINE_PROCESSOR "AVX-512 VNNI"
#elif defined(__AVX512F__)
#define PACELINE_PROCESSOR "AVX-512"
#elif defined(__AVX2__)
#define PACELINE_PROCESSOR "AVX2"
#else
#define PACELINE_PROCESSOR "generic instructions"
#endif
#if defined(_OPENMP)
    return PACELINE_PROCESSOR;
#else
    return PACELINE_PROCESSOR ", one thread";
#endif
}

// The pass's rows of x [room, hidden], in place, through `count` layers. `entry` [room, width]: what the first attention
// is made from, the normed stream where null. `heard` [taps, room, hidden] gets the stream after `taps[i]` layers
// (ascending, each of 1 to count - 1). 1: out of memory.
int paceline_layers(const Layer* layers, int count, const Pass* pass, bf16* x, const bf16* entry, int width,
                    const int32_t* taps, int tapped, bf16* heard) {
    static thread_local Scratch kept;
    Scratch& s = kept;
    const int rows = pass->rows, hidden = layers->hidden;
    try {
        for (int i = 0; i < count; i++) s.reserve(layers[i], *pass, entry ? width : 0);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    auto tell = [&](bf16* to, int row) {
        const float* from = &s.stream[int64_t(row) * hidden];
        to += pass->lines[row] * hidden;
        for (int i = 0; i < hidden; i += LANES) narrow(to + i, load<Floats>(from + i));
    };
    for (int row = 0; row < rows; row++) {
        widen_all(&s.stream[int64_t(row) * hidden], x + pass->lines[row] * hidden, hidden);
        if (entry) widen_all(&s.entry[int64_t(row) * width], entry + pass->lines[row] * width, width);
    }
#pragma omp parallel num_threads(pass->threads)
    {
        const Team team = team_here();
        const Span mine = team.share(rows);  // the rows that this thread has finished when a layer ends
        for (int i = 0, tap = 0; i < count; i++) {
            Part(layers[i], *pass, s, team).run(i ? nullptr : entry ? s.entry.data() : nullptr, width);
            const bool listens = tap < tapped && taps[tap] == i + 1;
            bf16* to = listens ? heard + int64_t(tap++) * pass->room * hidden : i + 1 == count ? x : nullptr;
            for (int row = mine.from; to && row < mine.to; row++) tell(to, row);
        }
    }
    return 0;
}

// See `contenders`.
int paceline_contenders(const float* scores, const int64_t* tokens, int n, uint64_t key, float bound, float highest,
                        int64_t* found) {
    return contenders(scores, tokens, n, key, bound, highest, found);
}

// y [rows, size]: rows of x by their root mean square, times `weight`. Whole lanes. 1: out of memory.
int paceline_norm(const bf16* x, int size, int64_t rows, const float* weight, float eps, bf16* y) {
    static thread_local std::vector<float> line;
    try {
        line.resize(std::max(line.size(), size_t(size)));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    for (int64_t first = 0; first < rows * size; first += size) {
        widen_all(line.data(), x + first, size);
        normed(line.data(), line.data(), weight, size, eps);
        for (int i = 0; i < size; i += LANES) narrow(y + first + i, load<Floats>(&line[i]));
    }
    return 0;
}

// y [rows, out] = x [rows, in] W^T + b, plus `residual` where given. Of two bytes, x and y of four where they are wide.
// `lines`: where the rows lie in x, y and `residual`; null: one after the other.
int paceline_linear(const Matrix* m, const void* x, int wide_x, int in, const int64_t* lines, int rows, void* y, int wide_y,
                    const bf16* residual, [[maybe_unused]] int threads) {
    static thread_local Inputs kept;
    static thread_local std::vector<float> widened_row;
    Inputs& inputs = kept;
    try {
        inputs.reserve(rows, *m);
        widened_row.resize(std::max(widened_row.size(), size_t(in)));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    auto line = [&](int row) { return lines ? lines[row] : int64_t(row); };
    for (int row = 0; row < rows; row++) {
        const int64_t first = line(row) * in;
        if (!wide_x) widen_all(widened_row.data(), static_cast<const bf16*>(x) + first, in);
        inputs.set(row, *m, wide_x ? static_cast<const float*>(x) + first : widened_row.data(), in, 0, in);
    }
#pragma omp parallel num_threads(threads)
    product(team_here(), *m, inputs, rows, [&](int row, int at, Floats v) {
        for (int i = 0, n = std::min(LANES, m->out - at); i < n; i++) {
            const int64_t to = line(row) * m->out + at + i;
            const float value = residual ? v[i] + widened(residual[to]) : v[i];
            if (wide_y)
                static_cast<float*>(y)[to] = value;
            else
                static_cast<bf16*>(y)[to] = narrowed(value);
        }
    });
    return 0;
}

}
