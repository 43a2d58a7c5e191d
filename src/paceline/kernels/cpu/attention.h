// Attention of a pass's rows over the slots of a cache (cache/slab.py).
//
// The columns of a text form blocks of 512 positions. Each block has a softmax of its own, and a row joins the results of its
// blocks in order (`join`). Within a block, sums run over the columns in the order of their positions. Hidden columns have
// weight 0, which does not change a bit. So threads may share queries and blocks in any way.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "elements.h"
#include "pool.h"

namespace paceline {

// Positions of a block. The rows of a draft never cross the end of a block (`BLOCK` in cache/attention.py).
constexpr int BLOCK = 512;

// A column of a slot, counted from its `length`, and the row or column that is written to it.
struct Write {
    int32_t column, source;
};

// The rows of one slot, starting at row `first` of the pass. They see the committed prefix in the slot's memory
// [layers, kv_heads, capacity, line], then `columns` columns that this pass and earlier passes have written.
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

// Positions `begin` to `end` - 1 of a text.
struct Positions {
    int64_t begin, end;

    int64_t first_block() const { return begin / BLOCK; }
    int blocks() const { return int((end + BLOCK - 1) / BLOCK - first_block()); }
};

// The slots of a pass, in layers with one kind of attention.
struct View {
    int32_t window;   // 0: none
    int32_t chunked;  // 1 if windows begin at multiples of `window`
    int32_t kind;     // of keys and values: a `Kind` of floats, or `EIGHT`
    const Slot* slots;

    // The first position that a row sees.
    int64_t lowest(const Slot& slot, int depth) const {
        const int64_t here = slot.length + depth;
        if (chunked) return here / window * window;
        return window ? std::max<int64_t>(0, here - window + 1) : 0;
    }

    // All positions that rows `from` to `to` - 1 of the slot see.
    Positions seen(const Slot& slot, int from, int to) const {
        const int depth = *std::min_element(slot.depth + from, slot.depth + to);
        int last = 0;
        for (int row = to - 1; row >= from; row--)  // the last row usually sees most columns
            for (int c = slot.columns - 1; c >= last; c--)
                if (slot.visible[int64_t(row) * slot.columns + c]) last = c + 1;
        return {std::min(lowest(slot, depth), slot.length), slot.length + last};
    }

    Positions seen(const Slot& slot) const { return seen(slot, 0, slot.rows); }
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

// Stores one key head of a slot's rows in `to`, the slot's keys or values. row(i) [D] is the head of row i of the pass.
template <class Element, class Row>
void write_head(const Slot& slot, void* to, int layer, const Heads& h, int head, Row row) {
    using Number = typename Element::Number;
    const int64_t size = Element::line(h.size);
    Number* strip = static_cast<Number*>(to) + layer * slot.layer_stride + head * slot.capacity * size;
    auto line = [&](int column) { return strip + (slot.length + column) % slot.capacity * size; };
    if (!slot.skipped)
        for (const Write* w = slot.copies; w < slot.copies + slot.copy_count; w++) std::copy_n(line(w->source), size, line(w->column));
    for (const Write* w = slot.stores; w < slot.stores + slot.store_count; w++) {
        const int own = w->source - slot.skipped;
        if (own >= 0 && own < slot.rows) Element::write(line(w->column), row(slot.first + own), h.size);
    }
}

// Some queries of a slot that share a key head, and part `span` of the blocks that they see.
struct AttentionPiece {
    const Slot* slot;
    int head, first, count, span;
};

// How the threads share the attention of a pass. Few queries are shared by blocks of columns too.
class AttentionPieces {
   public:
    static constexpr int QUERIES = 64;  // most queries of a piece

    AttentionPieces(const View& view, int slots, const Heads& h, int threads) : view_(view), slots_(slots), h_(h) {
        int blocks = 0;  // of all key heads
        for (int i = 0; i < slots; i++) {
            const int own = view.seen(view.slots[i]).blocks();
            most_blocks_ = std::max(most_blocks_, own), blocks += own * h.kv;
        }
        least_ = (threads + blocks - 1) / std::max(1, blocks);
        for (int i = 0; i < slots; i++) units_ += h.kv * shares(view.slots[i]);
        if (threads > 1 && units_ < 2 * threads) spans_ = std::min(most_blocks_, (4 * threads + units_ - 1) / units_);
    }

    int count() const { return units_ * spans_; }

    // Number of parts of the blocks. If it is above 1, the results of all blocks are kept until they are joined.
    int spans() const { return spans_; }
    int most_blocks() const { return most_blocks_; }

    // Number of results that are kept, for a pass of so many rows.
    int parts(int rows) const { return spans_ > 1 ? rows * h_.query * most_blocks_ : 0; }

    AttentionPiece operator[](int index) const {
        const int span = index % spans_;
        int unit = index / spans_;
        const Slot* slot = view_.slots;
        for (; unit >= h_.kv * shares(*slot); slot++) unit -= h_.kv * shares(*slot);
        const int count = shares(*slot);
        const Span own = share(unit % count, count, slot->rows * h_.group());
        return {slot, unit / count, own.from, own.to - own.from, span};
    }

   private:
    int shares(const Slot& slot) const {
        const int all = slot.rows * h_.group();
        return std::min(all, std::max(least_, (all + QUERIES - 1) / QUERIES));
    }

    const View& view_;
    const int slots_;
    const Heads& h_;
    int least_ = 1, units_ = 0, spans_ = 1, most_blocks_ = 1;
};

// The softmax of some scores: the largest, times log2(e), and the sum of the weights. Without scores, `top` is the least float.
struct Softmax {
    static constexpr float LOG2_E = 1.44269504f, LEAST = -std::numeric_limits<float>::max();
    float top = LEAST, total = 0;

    // The softmax of a query head before it has seen a column.
    static Softmax begin(const Heads& h, int head) { return h.sinks ? Softmax{h.sinks[head] * LOG2_E, 1} : Softmax{}; }
};

// Joins the softmax of a block and its weighted sum [size] with the blocks before it.
template <class Element>
[[gnu::flatten]] void join(Softmax& joined, float* mixed, const Softmax& block, const float* sum, int size) {
    const float top = std::max(joined.top, block.top);
    const Floats before = Element::power(all(joined.top - top)), own = Element::power(all(block.top - top));
    joined = {top, joined.total * before[0] + block.total * own[0]};
    for (int i = 0; i < size; i += LANES) store(mixed + i, fma(load<Floats>(sum + i), own, load<Floats>(mixed + i) * before));
}

// Floats of the result of a block that is kept: the sum, and the softmax.
inline int part_size(const Heads& h) { return h.size + LANES; }

inline void divide(float* mixed, float total, int size) {
    const float scale = 1 / total;
    for (int i = 0; i < size; i += LANES) store(mixed + i, load<Floats>(mixed + i) * scale);
}

// The attention of a piece's queries. Query i belongs to row (first + i) / group. A step takes 16 or 32 columns: the keys are
// transposed, or the values paired, once for all queries. Products are computed in tiles of a few queries and a few registers.
template <class Stored>
class Attention {
   public:
    using Element = Stored;
    using Number = typename Element::Number;
    using Operand = typename Element::Operand;
    using Pairs = typename Element::Pairs;

    // Allocates all memory for one pass, so that no thread allocates while others wait for it.
    void reserve(const View& view, const Heads& h, int slots) {
        int columns = 0;
        for (const Slot* s = view.slots; s < view.slots + slots; s++) columns = std::max(columns, s->columns);
        tail_.reserve(QUERIES * (columns + 2 * STEP)), gathered_.reserve(STEP * Element::line(h.size)), queries_.reserve(QUERIES * h.size);
        const int lines = (h.size / LANES + WIDE - 1) / WIDE * WIDE;
        turned_.reserve(lines * STEP / 2), sums_.reserve(QUERIES * lines * LANES);
        scores_.resize(QUERIES * STRIDE), weights_.resize(QUERIES * STRIDE);
    }

    // Prepares a piece whose queries see these positions. q [rows of the slot, `stride`]: each row begins with the query heads.
    void begin(const View& view, int layer, const Heads& h, const AttentionPiece& piece, const Positions& seen, const float* q, int64_t stride) {
        const Slot& slot = *piece.slot;
        h_ = &h, seen_ = seen, capacity_ = slot.capacity, count_ = piece.count, tiles_ = (count_ + TILE - 1) / TILE;
        lines_ = (h.size / LANES + WIDE - 1) / WIDE * WIDE;
        line_ = Element::line(h.size);
        const int64_t base = layer * slot.layer_stride + piece.head * slot.capacity * line_;
        keys_ = static_cast<const Number*>(slot.keys) + base, values_ = static_cast<const Number*>(slot.values) + base;
        queries_.resize(count_ * h.size), turned_.assign(lines_ * STEP / 2, Pairs()), sums_.resize(count_ * lines_ * LANES);
        for (int tile = 0; tile < tiles_; tile++) {
            const Span own = queries_of(tile);
            for (int i = own.from; i < own.to; i++) {
                const int query = piece.first + i, head = piece.head * h.group() + query % h.group();
                Operand* to = &queries_[own.from * h.size + (i - own.from) * 2];
                const float* from = q + query / h.group() * stride + head * h.size;
                for (int d = 0; d < h.size; d += LANES) {
                    Operand part[LANES];
                    Element::operands(part, load<Floats>(from + d));
                    for (int k = 0; k < LANES; k++) to[(d + k) / 2 * (own.to - own.from) * 2 + k % 2] = part[k];
                }
            }
        }
        plan(view, slot, piece);
    }

    // Computes the softmax and the weighted sum of all queries over one block.
    void run(int64_t block) {
        base_ = block * BLOCK;
        const int64_t begin = std::max(base_, seen_.begin / STEP * STEP), end = std::min(base_ + BLOCK, seen_.end);
        std::fill_n(top_, count_, all(Softmax::LEAST));
        for (int64_t at = begin; at < end; at += STEP) {
            prefetches_in_tiles() ? turn_keys<false>(at) : turn_keys<true>(at);
            for (int tile = 0; tile < tiles_; tile++) {
                prefetch_share(keys_, at, tile);
                score<TILE>(queries_of(tile), at);
            }
        }
        const int from = int(begin - base_), to = int((end - base_ + STEP - 1) / STEP * STEP);
        for (int i = 0; i < count_; i++) found_[i] = softmax(i, from, to);
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        for (int64_t at = begin; at < end; at += STEP) {
            prefetches_in_tiles() ? pair_values<false>(at) : pair_values<true>(at);
            if (masked(at) && !finite()) {
                // A weight of 0 is not enough to hide a column: 0 times a non-finite value is NaN.
                for (int i = 0; i < count_; i++) mix<1, true>({i, i + 1}, int(at - base_));
                continue;
            }
            for (int tile = 0; tile < tiles_; tile++) {
                prefetch_share(values_, at, tile);
                mix<TILE, false>(queries_of(tile), int(at - base_));
            }
        }
    }

    const Softmax& found(int query) const { return found_[query]; }
    const float* sum(int query) const { return &sums_[query * lines_ * LANES]; }

   private:
    static constexpr int QUERIES = AttentionPieces::QUERIES, COLUMNS_AHEAD = 128;
    // Queries and vectors of 16 lanes of a tile. Their sums fit into the registers with one operand of each vector.
    static constexpr int TILE = PARTS == 1 ? 8 : PARTS == 2 ? 6 : REGISTERS / 8, WIDE = PARTS == 1 ? 2 : 1;
    static constexpr int STEP = WIDE * LANES, STRIDE = BLOCK + LANES;  // columns; of scores and weights

    const Heads* h_;
    const Number *keys_, *values_;
    Positions seen_;
    int count_, tiles_, lines_;     // queries and their tiles; vectors of a value, padded to whole tiles
    int64_t capacity_, base_;       // of the slot; the first position of the block
    int64_t line_;                  // numbers of a key or value in memory
    int64_t full_from_, full_to_;   // all queries see these positions
    int64_t lowest_[QUERIES];       // the first position that each query sees, or the length
    const uint8_t* tail_of_[QUERIES];  // for each query, 1 for each position from `full_to_` on that it sees
    Floats top_[QUERIES];           // of each lane
    Softmax found_[QUERIES];
    std::vector<uint8_t> tail_;     // [rows, positions]
    Aligned<float> scores_;         // [queries, STRIDE]
    Aligned<Operand> weights_;      // [queries, STRIDE]
    std::vector<Number> gathered_;  // [STEP, line]
    std::vector<Operand> queries_;  // [D / 2, queries of the tile, 2] for each tile: pairs of dimensions
    std::vector<Pairs> turned_;     // of a step: keys [D / 2, WIDE], or values [lines / WIDE, STEP / 2, WIDE] in pairs of columns
    Aligned<float> sums_;           // [queries, lines * LANES]

    Span queries_of(int tile) const { return share(tile, tiles_, count_); }

    void plan(const View& view, const Slot& slot, const AttentionPiece& piece) {
        const int group = h_->group(), from = piece.first / group, to = (piece.first + count_ - 1) / group + 1;
        full_from_ = 0, full_to_ = slot.length / STEP * STEP;
        const int64_t size = (seen_.end - full_to_ + STEP - 1) / STEP * STEP, before = slot.length - full_to_, tail = seen_.end - slot.length;
        tail_.assign((to - from) * size, 0);
        for (int row = from; row < to; row++) {
            uint8_t* sees = &tail_[(row - from) * size];
            std::memset(sees, 1, before), sees += before;
            std::memcpy(sees, slot.visible + int64_t(row) * slot.columns, tail);
            const int64_t first = view.lowest(slot, slot.depth[row]) - slot.length;  // of the window, beyond `length`
            for (int c = 0; view.window && c < tail; c++) sees[c] &= slot.below[c] >= first;
        }
        for (int i = 0; i < count_; i++) {
            const int row = (piece.first + i) / group;
            lowest_[i] = std::min(view.lowest(slot, slot.depth[row]), slot.length), tail_of_[i] = &tail_[(row - from) * size];
            full_from_ = std::max(full_from_, lowest_[i]);
        }
    }

    // True if a query may not see all columns of the step at this position.
    bool masked(int64_t at) const { return at < full_from_ || at >= full_to_; }

    Ints sees(int query, int64_t at) const {
        static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int32_t hidden = int32_t(std::clamp<int64_t>(lowest_[query] - at, 0, LANES));
        const Ints sees = load<Ints>(NUMBERS) >= hidden;
        return at < full_to_ ? sees : sees & (convert<Ints>(load<Lanes<uint8_t>>(tail_of_[query] + (at - full_to_))) != 0);
    }

    // Prefetches `count` numbers: into the L2 cache `COLUMNS_AHEAD` columns ahead, and into L1 `near` columns ahead. The hardware prefetcher
    // cannot follow as many texts as a batch has, and a processor stalls if it prefetches a whole step at once. Inlined always,
    // because GCC drops calls of functions that only prefetch.
    [[gnu::always_inline]] void prefetch(const Number* here, int count, int near = LANES) const {
        const Number *second = here + COLUMNS_AHEAD * line_, *first = here + near * line_;
        for (int i = 0; i < count; i += 64 / int(sizeof(Number))) __builtin_prefetch(second + i, 0, 1), __builtin_prefetch(first + i, 0, 3);
    }

    // True if there are enough tiles to prefetch while they are computed. Otherwise keys are prefetched while others are
    // transposed, and values while others are paired, which then waits for memory.
    bool prefetches_in_tiles() const { return tiles_ >= 4; }

    // Prefetches a tile's share of the columns after those at this position.
    [[gnu::always_inline]] void prefetch_share(const Number* rows, int64_t at, int tile) const {
        if (!prefetches_in_tiles()) return;
        const int64_t from = STEP * line_ * tile / tiles_, to = STEP * line_ * (tile + 1) / tiles_;
        prefetch(rows + at % capacity_ * line_ + from, int(to - from), STEP);
    }

    // The lines of a step, contiguous. They are read in place, or copied at the end of the slot's memory.
    const Number* together(const Number* rows, int64_t at) {
        const Number* first = rows + at % capacity_ * line_;
        if (at % capacity_ + STEP <= capacity_) return first;
        gathered_.resize(STEP * line_);
        for (int i = 0; i < STEP; i++) std::copy_n(rows + std::min(at + i, seen_.end - 1) % capacity_ * line_, line_, &gathered_[i * line_]);
        return gathered_.data();
    }

    template <bool PREFETCH>
    [[gnu::noinline, gnu::flatten]] void turn_keys(int64_t at) {
        constexpr int TOGETHER = sizeof(Number) == 1 ? 16 : 8;
        const int size = h_->size, first = Element::first(size);
        const int64_t line = line_;
        const Number* rows = together(keys_, at);
        for (int v = 0; v < WIDE; v++, rows += LANES * line) {
            [[maybe_unused]] Floats scales[4];
            for (int d = 0; d < size; d += TOGETHER) {
                Pairs own[TOGETHER / 2];
                if constexpr (Element::SCALED) {
                    constexpr int FOUR = 4 * Element::BLOCK;
                    if (d % FOUR == 0) Element::transpose_scales(scales, rows, d, line);
                    Element::transpose(own, rows + first + d, line, scales[d % FOUR / Element::BLOCK]);
                } else {
                    Element::transpose(own, rows + d, line);
                }
                if constexpr (PREFETCH) prefetch(rows + d * LANES, TOGETHER * LANES);
                for (int i = 0; i < TOGETHER / 2; i++) turned_[(d / 2 + i) * WIDE + v] = own[i];
            }
        }
    }

    template <bool PREFETCH>
    [[gnu::noinline, gnu::flatten]] void pair_values(int64_t at) {
        const int size = h_->size, whole = size / LANES / WIDE * WIDE * LANES;
        const int64_t line = line_;
        const Number* row = together(values_, at);
        for (int pair = 0; pair < STEP / 2; pair++, row += 2 * line) {
            Pairs* to = &turned_[pair * WIDE];
            if constexpr (PREFETCH) prefetch(row, 2 * int(line));
            for (int d = 0; d < whole; d += WIDE * LANES, to += STEP / 2 * WIDE) interleave<WIDE>(to, row, d);
            if (whole < size) interleave<1>(to, row, whole);
        }
    }

    // Interleaves 16 N elements of two lines, from element d on.
    template <int N>
    [[gnu::always_inline]] void interleave(Pairs* to, const Number* even, int d) const {
        const Number *odd = even + line_, *from = even + Element::first(h_->size) + d;
        if constexpr (Element::SCALED) Element::template interleave<N>(to, from, from + line_, Element::scale(even, d), Element::scale(odd, d));
        else Element::template interleave<N>(to, from, from + line_);
    }

    bool finite() const {
        bool finite = true;
        for (const Pairs& pairs : turned_) finite &= paceline::finite(pairs);
        return finite;
    }

    // Adds the products of `count` pairs of each vector and pairs of Q queries, which are `NEXT_QUERY` and `NEXT` elements apart.
    template <int Q, int NEXT_QUERY, int NEXT, bool HIDDEN>
    [[gnu::always_inline]] static void multiply(Floats (&sums)[Q][WIDE], const Pairs* own, int count, const Operand* pair) {
        for (int i = 0; i < count; i++, own += WIDE, pair += NEXT) {
            Pairs shown[WIDE];
            for (int v = 0; v < WIDE && HIDDEN; v++) shown[v] = kept(own[v], pair);
            add_products(sums, HIDDEN ? shown : own, pair, NEXT_QUERY);
        }
    }

    template <int Q>
    [[gnu::noinline, gnu::flatten]] void score(Span queries, int64_t at) {
        if constexpr (Q > 1)
            if (queries.to - queries.from < Q) return score<Q - 1>(queries, at);
        Floats dots[Q][WIDE] = {};
        multiply<Q, 2, 2 * Q, false>(dots, turned_.data(), h_->size / 2, &queries_[queries.from * h_->size]);
        float* scores = &scores_[queries.from * STRIDE + (at - base_)];
#pragma GCC unroll 8
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
            for (int v = 0; v < WIDE; v++) store(scores + i * STRIDE + v * LANES, dots[i][v]);
        const bool hides = masked(at);
        for (int i = queries.from; i < queries.to; i++, scores += STRIDE)
            for (int v = 0; v < WIDE; v++) {
                Floats s = load<Floats>(scores + v * LANES);
                if (h_->softcap > 0) s = hyperbolic_tangent(s * (h_->scale / h_->softcap)) * h_->softcap;
                if (hides) s = select(sees(i, at + v * LANES), s, all(-INFINITY));
                top_[i] = select(s > top_[i], s, top_[i]);
                store(scores + v * LANES, s);
            }
    }

    // Turns a query's scores of columns `from` to `to` - 1 of the block into weights. Their sum adds multiples of 2^-23, which is
    // exact, so hidden columns do not change it.
    [[gnu::noinline, gnu::flatten]] Softmax softmax(int query, int from, int to) {
        const float factor = (h_->softcap > 0 ? 1.0f : h_->scale) * Softmax::LOG2_E;
        const float most = largest(top_[query]), top = most > Softmax::LEAST ? most * factor : most;
        const float* scores = &scores_[query * STRIDE];
        Operand* weights = &weights_[query * STRIDE];
        Ints total{};
        for (int i = from; i < to; i += LANES) {
            const Floats w = Element::power(fma(load<Floats>(scores + i), all(factor), all(-top)));
            total += as<Ints>(w + 1.0f) - 0x3f800000;
            Element::weights(weights + i, w);
        }
        return {top, float((int64_t(paceline::sum(total >> 16)) << 16) + paceline::sum(total & 0xffff)) * 0x1p-23f};
    }

    template <int Q, bool HIDDEN>
    [[gnu::noinline, gnu::flatten]] void mix(Span queries, int offset) {
        if constexpr (Q > 1)
            if (queries.to - queries.from < Q) return mix<Q - 1, HIDDEN>(queries, offset);
        const Operand* weights = &weights_[queries.from * STRIDE + offset];
        const Pairs* own = turned_.data();
        const int width = lines_ * LANES;
        float* to = &sums_[queries.from * width];
        for (int line = 0; line < lines_; line += WIDE, own += STEP / 2 * WIDE, to += WIDE * LANES) {
            Floats sums[Q][WIDE];
#pragma GCC unroll 8
            for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
                for (int v = 0; v < WIDE; v++) sums[i][v] = load<Floats>(to + i * width + v * LANES);
            multiply<Q, STRIDE, 2, HIDDEN>(sums, own, STEP / 2, weights);
#pragma GCC unroll 8
            for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
                for (int v = 0; v < WIDE; v++) store(to + i * width + v * LANES, sums[i][v]);
        }
    }
};

}  // namespace paceline
