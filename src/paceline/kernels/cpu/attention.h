// Attention of a pass's rows over the slots of a cache (cache/slab.py). A row's sums run over its visible columns in the
// order of their positions. Hidden columns have weight 0, which does not change a bit.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "elements.h"

namespace paceline {

// A column of a slot, counted from its `length`, and the row or column that is written to it.
struct Write {
    int32_t column, source;
};

// The rows of one slot, starting at row `first` of the pass. They see the committed prefix in the slot's memory
// [layers, kv_heads, capacity, D], then `columns` columns that this pass and earlier passes have written.
struct Slot {
    void *keys, *values;
    int64_t layer_stride, capacity, length;  // elements; positions; tokens
    int32_t first, rows, columns;
    int32_t skipped;  // rows of the slot before `first`, which belong to another piece
    int32_t store_count, copy_count;
    const Write *stores, *copies;  // rows to store in columns; columns to copy to columns, which happens first
    const uint8_t* visible;        // [rows, columns]
    const int32_t *depth, *below;  // positions beyond `length`, of each row and of each column's row
};

// The slots of a pass, in layers with one kind of attention.
struct View {
    int32_t window;  // 0: none
    const Slot* slots;

    // Upper bound of the number of columns that a row of the slot sees.
    int64_t max_columns(const Slot& slot) const {
        return (window ? std::min<int64_t>(slot.length, window + 1) : slot.length) + slot.columns;
    }
};

struct Heads {
    int32_t query, kv, size;
    float scale, softcap;  // 0: no cap
    const float* sinks;    // for each query head, the score of a column without a value; or null
    int group() const { return query / kv; }
};

struct Rotation {
    const float *cosines, *signed_sines;  // [rows, rotated]; null without rotary embeddings
    int32_t rotated;
};

// "Rotate half": rotates the first `rotated` dimensions of a head, pairing dimension i with i + rotated / 2.
inline void rotate(float* head, const Rotation& turn, int64_t line) {
    if (!turn.cosines) return;
    const int n = turn.rotated, middle = n / 2;
    const float *c = turn.cosines + line * n, *s = turn.signed_sines + line * n;
    for (int i = 0; i < middle; i++) {
        float a = head[i], b = head[i + middle];
        head[i] = a * c[i] + b * s[i];
        head[i + middle] = b * c[i + middle] + a * s[i + middle];
    }
}

// Stores one key head x [rows of all slots, D] of a slot's rows in `to`, the slot's keys or values. Rows of x are `stride`
// elements apart.
template <class Number>
void write_head(const Slot& slot, void* to, int layer, const Heads& h, int head, const Number* x, int64_t stride) {
    Number* strip = static_cast<Number*>(to) + layer * slot.layer_stride + head * slot.capacity * h.size;
    auto line = [&](int column) { return strip + (slot.length + column) % slot.capacity * h.size; };
    if (!slot.skipped)
        for (const Write* w = slot.copies; w < slot.copies + slot.copy_count; w++) std::copy_n(line(w->source), h.size, line(w->column));
    for (const Write* w = slot.stores; w < slot.stores + slot.store_count; w++) {
        const int row = w->source - slot.skipped;
        if (row >= 0 && row < slot.rows) std::copy_n(x + (slot.first + row) * stride, h.size, line(w->column));
    }
}

// Up to 16 queries of one slot that share a key head; query i belongs to row (first + i) / group. Scores are computed for
// 16 columns at a time, one in each lane. Values are mixed in pairs of neighbouring columns. Both begin at an even position.
template <class Element>
class Attention {
   public:
    using Number = typename Element::Number;
    using Operand = typename Element::Operand;
    using Pairs = typename Element::Pairs;

    static constexpr int TILE = 16;

    // Allocates all memory for one pass, so that no thread allocates while others wait for it.
    void reserve(const View& view, const Heads& h, int slots) {
        int64_t columns = 0;
        for (const Slot* s = view.slots; s < view.slots + slots; s++) columns = std::max(columns, view.max_columns(*s));
        const size_t size = (columns / 1024 + 1) * 1024 * TILE + LANES * TILE;  // rounded up, since a text grows token by token
        seen_.reserve(size), gathered_.reserve(LANES * h.size), queries_.reserve(h.size * TILE), turned_.reserve(h.size / 2), sums_.reserve(h.size / LANES * TILE);
        if (scores_.size() < size) scores_.resize(size), weights_.resize(size);
    }

    // q [rows of the slot, `stride`]: each row begins with the query heads. mixed [rows of the slot, query heads * D].
    void run(const View& view, int layer, const Heads& h, const Slot& slot, int kv_head, int first, int count,
             const Number* q, int64_t stride, float* mixed) {
        count_ = count;
        plan(view, h, slot, first);
        queries_.resize(h.size * count);
        for (int i = 0; i < count; i++) {
            const int query = first + i, row = query / h.group(), head = kv_head * h.group() + query % h.group();
            const int from = i / SCORED * SCORED, width = std::min(SCORED, count - from);
            for (int d = 0; d < h.size; d++)
                queries_[from * h.size + (d / 2 * width + i - from) * 2 + d % 2] = Element::operand(q[row * stride + head * h.size + d]);
            seen_by_[i] = seen_.data() + (row - first / h.group()) * (blocks_ - masked_) * LANES;
            mixed_[i] = mixed + (int64_t(row) * h.query + head) * h.size;
        }
        const int64_t base = layer * slot.layer_stride + kv_head * slot.capacity * h.size;
        score_all(static_cast<const Number*>(slot.keys) + base, h);
        for (int i = 0; i < count; i++) {
            const float sink = h.sinks ? h.sinks[kv_head * h.group() + (first + i) % h.group()] : -INFINITY;
            softmax_weights(i, (h.softcap > 0 ? 1.0f : h.scale) * LOG2_E, sink * LOG2_E);
        }
        const Number* values = static_cast<const Number*>(slot.values) + base;
        PARTS > 1 ? mix_blocks(values, h.size) : mix(values, h.size);
    }

   private:
    static constexpr float LOG2_E = 1.44269504f;
    static constexpr int COLUMNS_AHEAD = 32;  // distance of prefetches, which may go past the last column
    // Queries scored at a time, and queries and vectors of values mixed at a time. The registers hold this many sums.
    static constexpr int SCORED = PARTS == 1 ? TILE : PARTS == 2 ? 4 : 2, MIXED = PARTS == 1 ? 6 : 4, MIXED_WIDTH = PARTS == 1 ? 4 : 1;

    int count_ = 0;
    // `columns_` columns begin at line `line_`. They form blocks of 16. Rows of scores and weights are `width_` apart.
    int64_t line_, capacity_, columns_, blocks_, width_;
    int64_t masked_;             // the first block with a column that is hidden from some row
    std::vector<uint8_t> seen_;  // [rows, columns of block `masked_` and later]
    std::vector<float> scores_;  // [queries, width]
    std::vector<Operand> weights_;  // [queries, width]
    std::vector<Number> gathered_; // [16, D]
    std::vector<Operand> queries_; // [D / 2, queries, 2] for each SCORED queries: pairs of dimensions
    std::vector<Pairs> turned_;    // a block's keys [D / 2], one in each lane; or its values [D / 16, 8] in pairs of columns
    std::vector<Floats> sums_;     // [queries, D / 16]
    const uint8_t* seen_by_[TILE];
    float* mixed_[TILE];
    Floats top_[TILE];
    float scale_[TILE];  // 1 / sum of the weights

    void plan(const View& view, const Heads& h, const Slot& slot, int first) {
        const int from = first / h.group(), to = (first + count_ - 1) / h.group() + 1;
        const auto depths = std::minmax_element(slot.depth + from, slot.depth + to);
        const int64_t edge = slot.length - view.window + 1;  // plus its depth: the first position that a row sees
        // Even, and at most `length`: a long pass may push its own first rows out of the window, but they are masked instead.
        const int64_t begin = view.window ? std::clamp<int64_t>(edge + *depths.first, 0, slot.length) & ~int64_t(1) : 0;
        int last = 0;
        for (int row = from; row < to; row++)
            for (int c = slot.columns - 1; c >= last; c--)
                if (slot.visible[int64_t(row) * slot.columns + c]) last = c + 1;
        const int64_t before = slot.length - begin;
        line_ = begin % slot.capacity, capacity_ = slot.capacity, columns_ = before + last;
        blocks_ = (columns_ + LANES - 1) / LANES, width_ = (blocks_ | 1) * LANES;
        masked_ = view.window && edge + *depths.second > begin ? 0 : before / LANES;
        const int64_t skipped = masked_ * LANES, size = (blocks_ - masked_) * LANES;
        seen_.assign((to - from) * size, 0);
        for (int row = from; row < to; row++) {
            uint8_t* seen = seen_.data() + (row - from) * size;
            const int32_t passed = slot.depth[row] - view.window;  // the last position out of the window, beyond `length`
            int64_t at = skipped;
            if (view.window) at = std::min(before, std::max(at, before + passed + 1));
            std::memset(seen + at - skipped, 1, before - at);
            std::memcpy(seen + before - skipped, slot.visible + int64_t(row) * slot.columns, last);
            for (int c = 0; view.window && c < last; c++) seen[before - skipped + c] &= slot.below[c] > passed;
        }
    }

    // Index of a column's line in the slot's memory. Columns past the end read the last one.
    int64_t line(int64_t column) const {
        const int64_t at = line_ + std::min(column, columns_ - 1);
        return at < capacity_ ? at : at - capacity_;
    }

    // Prefetches into the second cache. The hardware prefetcher cannot follow as many texts as a batch has.
    static void prefetch(const Number* from, int size) {
        for (int i = 0; i < size; i += 64 / sizeof(Number)) __builtin_prefetch(from + i, 0, 1);
    }

    // The rows of a block, contiguous. They are read in place, or copied at the end and where a ring wraps around.
    const Number* together(const Number* rows, int64_t block, int size) {
        const int64_t at = block * LANES, first = line(at);
        if (line(at + LANES - 1) == first + LANES - 1) return rows + first * size;
        gathered_.resize(LANES * size);
        for (int i = 0; i < LANES; i++) std::copy_n(rows + line(at + i) * size, size, &gathered_[i * size]);
        return gathered_.data();
    }

    // Computes all scores block by block. A block that several groups of queries need is transposed once for all of them.
    void score_all(const Number* keys, const Heads& h) {
        std::fill_n(top_, count_, all(-INFINITY));
        for (int64_t block = 0; block < blocks_; block++) {
            const Number* k = together(keys, block, h.size);
            prefetch(k + COLUMNS_AHEAD * h.size, LANES * h.size);
            if (count_ <= SCORED) {
                score<SCORED, false>(k, h, 0, count_, block);
                continue;
            }
            turned_.resize(h.size / 2);
            for (int d = 0; d < h.size; d += 8) Element::transpose(&turned_[d / 2], k + d, h.size);
            for (int from = 0; from < count_; from += SCORED) score<SCORED, true>(k, h, from, std::min(SCORED, count_ - from), block);
        }
    }

    // Scores one block for N queries, starting with query `from`.
    template <int N, bool TURNED>
    [[gnu::noinline, gnu::flatten]] void score(const Number* k, const Heads& h, int from, int count, int64_t block) {
        if constexpr (N > 1)
            if (count < N) return score<N - 1, TURNED>(k, h, from, count, block);
        Floats dots[N];
#pragma GCC unroll 16  // so that the sums stay in registers
        for (int i = 0; i < N; i++) dots[i] = all(0.0f);
        const Operand* query = &queries_[from * h.size];
        for (int d = 0; d < h.size; d += 8) {
            Pairs own[4];
            if constexpr (!TURNED) Element::transpose(own, k + d, h.size);
            const Pairs* pairs = TURNED ? &turned_[d / 2] : own;
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++, query += 2 * N)
#pragma GCC unroll 16
                for (int i = 0; i < N; i++) dots[i] = dot2(dots[i], pairs[j], query + 2 * i);
        }
        float* scores = &scores_[from * width_ + block * LANES];
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) store(scores + i * width_, dots[i]);
        for (int i = from; i < from + N; i++, scores += width_) {
            Floats s = load<Floats>(scores);
            if (h.softcap > 0) s = hyperbolic_tangent(s * (h.scale / h.softcap)) * h.softcap;
            if (block >= masked_) s = select(sees(i, block), s, all(-INFINITY));
            top_[i] = select(s > top_[i], s, top_[i]);
            store(scores, s);
        }
    }

    Ints sees(int query, int64_t block) const {
        return convert<Ints>(load<Lanes<uint8_t>>(seen_by_[query] + (block - masked_) * LANES)) != 0;
    }

    // Computes softmax weights. Their sum adds multiples of 2^-23, which is exact, so hidden columns do not change it.
    [[gnu::noinline, gnu::flatten]] void softmax_weights(int query, float factor, float sink) {
        constexpr int64_t EXACT = 64;  // sums of this many blocks fit 32 bits
        const float top = std::max(largest(top_[query]) * factor, sink);
        const float* scores = &scores_[query * width_];
        Operand* weights = &weights_[query * width_];
        int64_t total = as<Ints>(Element::power(all(sink - top)) + 1.0f)[0] - 0x3f800000;
        for (int64_t block = 0; block < blocks_;) {
            Ints part{};
            for (const int64_t end = std::min(blocks_, block + EXACT); block < end; block++) {
                Floats w = Element::power(fma(load<Floats>(scores + block * LANES), all(factor), all(-top)));
                part += as<Ints>(w + 1.0f) - 0x3f800000;
                Element::operands(weights + block * LANES, w);
            }
            total += (int64_t(sum(part >> 16)) << 16) + sum(part & 0xffff);
        }
        scale_[query] = 0x1p23f / float(total);
    }

    void mix(const Number* values, int size) const {
        const int parts = (count_ + MIXED - 1) / MIXED;
        for (int part = 0; part < parts; part++) {
            const int from = count_ * part / parts, to = count_ * (part + 1) / parts;
            int d = 0;
            for (; d + MIXED_WIDTH * LANES <= size; d += MIXED_WIDTH * LANES)
                gather<MIXED, MIXED_WIDTH>(values + d, size, from, to, d);
            for (; d < size; d += LANES) gather<MIXED, 1>(values + d, size, from, to, d);
        }
    }

    // Like `mix` with fewer registers, block by block. A block's pairs are built once for all groups of queries, and the
    // sums stay in memory between blocks.
    [[gnu::flatten]] void mix_blocks(const Number* values, int size) {
        const int lines = size / LANES, parts = (count_ + MIXED - 1) / MIXED;
        sums_.assign(count_ * lines, Floats{}), turned_.resize(size / 2);
        for (int64_t block = 0; block < blocks_; block++) {
            const int pairs = int(std::min<int64_t>(columns_ - block * LANES, LANES) + 1) / 2;
            bool hidden = false;
            for (int p = 0; p < pairs; p++)
                for (int d = 0; d < lines; d++) {
                    Pairs* made = &turned_[d * LANES / 2 + p];
                    pairs_of<1>(made, values + d * LANES, size, block * LANES + 2 * p);
                    if (block >= masked_) hidden |= !finite<1>(made);
                }
            for (int part = 0, from = 0; part < parts; part++) {
                const int to = count_ * (part + 1) / parts;
                hidden ? add_block<MIXED, true>(from, to - from, lines, block, pairs) : add_block<MIXED, false>(from, to - from, lines, block, pairs);
                from = to;
            }
        }
        for (int i = 0; i < count_; i++)
            for (int d = 0; d < lines; d++) store(mixed_[i] + d * LANES, sums_[i * lines + d] * scale_[i]);
    }

    template <int Q, bool HIDDEN>
    [[gnu::noinline, gnu::flatten]] void add_block(int from, int count, int lines, int64_t block, int pairs) {
        if constexpr (Q > 1)
            if (count < Q) return add_block<Q - 1, HIDDEN>(from, count, lines, block, pairs);
        const Pairs* own = turned_.data();
        for (int d = 0; d < lines; d++, own += LANES / 2) {
            const Operand* weights = &weights_[from * width_ + block * LANES];
            Floats sums[Q];
#pragma GCC unroll 8  // early enough for registers
            for (int i = 0; i < Q; i++) sums[i] = sums_[(from + i) * lines + d];
            for (int p = 0; p < pairs; p++, weights += 2)
#pragma GCC unroll 8
                for (int i = 0; i < Q; i++) {
                    const Operand* pair = weights + i * width_;
                    sums[i] = dot2(sums[i], HIDDEN ? kept(own[p], pair) : own[p], pair);
                }
#pragma GCC unroll 8
            for (int i = 0; i < Q; i++) sums_[(from + i) * lines + d] = sums[i];
        }
    }

    // Interleaves 16 N values of two columns.
    template <int N>
    [[gnu::always_inline]] void pairs_of(Pairs* pairs, const Number* values, int size, int64_t column) const {
        const Number *even = values + line(column) * size, *odd = values + line(column + 1) * size;
        prefetch(even + COLUMNS_AHEAD * size, N * LANES), prefetch(odd + COLUMNS_AHEAD * size, N * LANES);
        Element::template interleave<N>(pairs, even, odd);
    }

    template <int Q, int N>
    [[gnu::noinline, gnu::flatten]] void gather(const Number* values, int size, int from, int to, int d) const {
        if constexpr (Q > 1)
            if (to - from < Q) return gather<Q - 1, N>(values, size, from, to, d);
        Floats sums[Q][N] = {};
        auto add = [&](auto some_hidden, int64_t c, int64_t end) __attribute__((always_inline)) {
            const Operand* weights = &weights_[from * width_ + c];
            for (; c < end; c += 2, weights += 2) {
                Pairs pairs[N];
                pairs_of<N>(pairs, values, size, c);
#pragma GCC unroll 8  // early enough for registers
                for (int i = 0; i < Q; i++) {
                    const Operand* pair = weights + i * width_;
#pragma GCC unroll 4
                    for (int j = 0; j < N; j++)
                        sums[i][j] = dot2(sums[i][j], some_hidden.value ? kept(pairs[j], pair) : pairs[j], pair);
                }
            }
        };
        // A weight of 0 is not enough to hide a column: 0 times a non-finite value is NaN.
        int64_t certain = columns_;
        for (int64_t c = std::min(columns_, masked_ * LANES); c < certain; c += 2) {
            Pairs pairs[N];
            pairs_of<N>(pairs, values, size, c);
            if (!finite<N>(pairs)) certain = c;
        }
        add(std::false_type(), 0, certain);
        add(std::true_type(), certain, columns_);
        for (int i = 0; i < Q; i++)
            for (int j = 0; j < N; j++) store(mixed_[from + i] + d + j * LANES, sums[i][j] * scale_[from + i]);
    }
};

}  // namespace paceline
