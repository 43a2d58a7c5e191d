// Attention of a pass's rows over the slots of a cache (cache/slab.py).
//
// Terms, as in FlashAttention and split-KV decoding:
//
// - Slot: one text in the cache. A pass runs some rows of each of its slots.
// - Query: one query head of one row. A pass numbers its queries row by row: row * query_heads + head.
// - Column: the place of one position in a slot's memory. Line: a key or a value of one KV head there.
// - Block: 512 consecutive positions of a text. Each block has a softmax of its own.
// - Partial: the result of a query over one block. It consists of the values times their weights, not yet divided by the sum of
//   the weights, and of the softmax state: the largest score and that sum. A query's partials are merged in the order of the
//   blocks (`merge`).
// - KV split: a range of a slot's blocks. A pass with few queries has several splits, so that all threads have work.
// - Work item: up to 64 queries of a slot that share a KV head, over one KV split. One thread computes it.
//
// Within a block, sums run over the columns in the order of their positions. Hidden columns have weight 0, which does not change a
// bit. So neither the work items nor the KV splits change a result.
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
    int64_t layer_stride, capacity, length;  // numbers; columns, used as a ring; tokens of the committed prefix
    int32_t first, rows, columns;
    int32_t skipped;  // rows of the slot before `first`, which belong to another group (groups.h)
    int32_t store_count, copy_count;
    const Write *stores, *copies;  // rows to store in columns; columns to copy to columns, which happens first
    const uint8_t* visible;        // mask [rows, columns]
    const int32_t *row_depth, *column_depth;  // positions beyond `length`: of each row, and of the row in each column
};

// Positions `begin` to `end` - 1 of a text.
struct Positions {
    int64_t begin, end;

    int64_t first_block() const { return begin / BLOCK; }
    int blocks() const { return int((end + BLOCK - 1) / BLOCK - first_block()); }
};

// The slots of a pass, as layers with one kind of attention see them.
struct View {
    int32_t window;   // of sliding-window attention; 0: none
    int32_t chunked;  // 1 if windows begin at multiples of `window`
    int32_t kind;     // type of keys and values: a `Kind` of floats, or `INT8`
    const Slot* slots;

    // The first position that a row may see.
    int64_t window_start(const Slot& slot, int depth) const {
        const int64_t here = slot.length + depth;
        if (chunked) return here / window * window;
        return window ? std::max<int64_t>(0, here - window + 1) : 0;
    }

    // The smallest range of positions that contains all positions that rows `from` to `to` - 1 of the slot see.
    Positions visible_positions(const Slot& slot, int from, int to) const {
        const int depth = *std::min_element(slot.row_depth + from, slot.row_depth + to);
        int end = 0;
        for (int row = to - 1; row >= from; row--)  // the last row usually sees most columns
            for (int c = slot.columns - 1; c >= end; c--)
                if (slot.visible[int64_t(row) * slot.columns + c]) end = c + 1;
        return {std::min(window_start(slot, depth), slot.length), slot.length + end};
    }

    Positions visible_positions(const Slot& slot) const { return visible_positions(slot, 0, slot.rows); }
};

struct Heads {
    int32_t query_heads, kv_heads, padded_dim;  // `padded_dim`: elements of a head, padded to whole lanes
    float scale, softcap;                       // `softcap`: 0 for none
    const float* sinks;                         // attention sinks: a score without a value for each query head; or null

    // Number of query heads that share a KV head.
    int group_size() const { return query_heads / kv_heads; }
};

struct Rotation {
    const float *cosines, *signed_sines;  // [rows, rotated]; null without rotary embeddings
    int32_t rotated;
};

// "Rotate half": rotates the first `rotated` dimensions of a head, pairing dimension i with i + rotated / 2.
inline void rotate(float* head, const Rotation& rotation, int64_t line) {
    if (!rotation.cosines) return;
    const int n = rotation.rotated, middle = n / 2;
    const float *c = rotation.cosines + line * n, *s = rotation.signed_sines + line * n;
    for (int i = 0; i < middle; i++) {
        float a = head[i], b = head[i + middle];
        head[i] = a * c[i] + b * s[i];
        head[i + middle] = b * c[i + middle] + a * s[i + middle];
    }
}

// Stores one KV head of a slot's rows in `to`, the slot's keys or values. row(i) [D] is that head of row i of the pass.
template <class Element, class Row>
void write_head(const Slot& slot, void* to, int layer, const Heads& h, int head, Row row) {
    using Number = typename Element::Number;
    const int64_t size = Element::line_length(h.padded_dim);
    Number* lines = static_cast<Number*>(to) + layer * slot.layer_stride + head * slot.capacity * size;
    auto line = [&](int column) { return lines + (slot.length + column) % slot.capacity * size; };
    if (!slot.skipped)
        for (const Write* w = slot.copies; w < slot.copies + slot.copy_count; w++) std::copy_n(line(w->source), size, line(w->column));
    for (const Write* w = slot.stores; w < slot.stores + slot.store_count; w++) {
        const int index = w->source - slot.skipped;  // in these rows of the slot
        if (index >= 0 && index < slot.rows) Element::write(line(w->column), row(slot.first + index), h.padded_dim);
    }
}

// Queries `first_query` to `first_query` + `count` - 1 of a slot and a KV head, over KV split `split`. The queries of a slot that
// share a KV head are numbered row by row: row of the slot * group_size + number of the query head among those of the KV head.
struct WorkItem {
    const Slot* slot;
    int kv_head, first_query, count, split;
};

// The work items of a pass in one layer.
class WorkItems {
   public:
    static constexpr int QUERIES = 64;  // most queries of an item

    WorkItems(const View& view, int slots, const Heads& h, int threads) : view_(view), slots_(slots), h_(h) {
        int blocks = 0;  // of all slots and KV heads
        for (int i = 0; i < slots; i++) {
            const int slot_blocks = view.visible_positions(view.slots[i]).blocks();
            max_blocks_ = std::max(max_blocks_, slot_blocks), blocks += slot_blocks * h.kv_heads;
        }
        min_parts_ = (threads + blocks - 1) / std::max(1, blocks);
        for (int i = 0; i < slots; i++) items_per_split_ += h.kv_heads * query_parts(view.slots[i]);
        if (threads > 1 && items_per_split_ < 2 * threads)
            splits_ = std::min(max_blocks_, (4 * threads + items_per_split_ - 1) / items_per_split_);
    }

    int count() const { return items_per_split_ * splits_; }

    // Number of KV splits of each slot. If there are several, partials are kept until all splits are finished.
    int splits() const { return splits_; }

    // The largest number of blocks that the rows of a slot see.
    int max_blocks() const { return max_blocks_; }

    // Number of partials for which a pass of this many rows needs memory: 0 if there is a single KV split.
    int partials(int rows) const { return splits_ > 1 ? rows * h_.query_heads * max_blocks_ : 0; }

    WorkItem operator[](int index) const {
        const int split = index % splits_;
        int item = index / splits_;
        const Slot* slot = view_.slots;
        for (; item >= h_.kv_heads * query_parts(*slot); slot++) item -= h_.kv_heads * query_parts(*slot);
        const int count = query_parts(*slot);
        const Range queries = nth_part(item % count, count, slot->rows * h_.group_size());
        return {slot, item / count, queries.from, queries.to - queries.from, split};
    }

   private:
    // Number of items into which the queries of a slot and a KV head are divided.
    int query_parts(const Slot& slot) const {
        const int all = slot.rows * h_.group_size();
        return std::min(all, std::max(min_parts_, (all + QUERIES - 1) / QUERIES));
    }

    const View& view_;
    const int slots_;
    const Heads& h_;
    int min_parts_ = 1, items_per_split_ = 0, splits_ = 1, max_blocks_ = 1;
};

// State of a query's online softmax: its largest score times log2(e), and the sum of its weights 2^(score * log2(e) - max).
struct SoftmaxState {
    static constexpr float LOG2_E = 1.44269504f, LOWEST = -std::numeric_limits<float>::max();
    float max = LOWEST, denominator = 0;  // of no scores

    // The state of a query head before its first block.
    static SoftmaxState begin(const Heads& h, int head) { return h.sinks ? SoftmaxState{h.sinks[head] * LOG2_E, 1} : SoftmaxState{}; }
};

// Merges a block's partial, its softmax state and its weighted values [size], into the state and the output of the blocks before.
template <class Element>
[[gnu::flatten]] void merge(SoftmaxState& state, float* output, const SoftmaxState& block, const float* block_values, int size) {
    const float max = std::max(state.max, block.max);
    const Floats rescale = Element::power(all(state.max - max)), block_rescale = Element::power(all(block.max - max));
    state = {max, state.denominator * rescale[0] + block.denominator * block_rescale[0]};
    for (int i = 0; i < size; i += LANES)
        store(output + i, fma(load<Floats>(block_values + i), block_rescale, load<Floats>(output + i) * rescale));
}

// Floats of a partial in memory: the weighted values, and the softmax state.
inline int partial_size(const Heads& h) { return h.padded_dim + LANES; }

// Divides the weighted values of all blocks by the softmax denominator.
inline void normalise(float* output, float denominator, int size) {
    const float scale = 1 / denominator;
    for (int i = 0; i < size; i += LANES) store(output + i, load<Floats>(output + i) * scale);
}

// Computes the partials of a work item's queries, one block at a time. Query i of the item belongs to row
// (first_query + i) / group_size of the slot. A block is processed in steps of 16 or 32 columns: each step's keys are transposed, or
// its values paired, once for all queries, and then multiplied in tiles of a few queries and a few registers.
template <class Stored>
class AttentionKernel {
   public:
    using Element = Stored;
    using Number = typename Element::Number;
    using Operand = typename Element::Operand;
    using Pairs = typename Element::Pairs;

    // Allocates all memory for one pass, so that no thread allocates while others wait for it.
    void reserve(const View& view, const Heads& h, int slots) {
        int columns = 0;
        for (const Slot* s = view.slots; s < view.slots + slots; s++) columns = std::max(columns, s->columns);
        tail_mask_.reserve(QUERIES * (columns + 2 * STEP)), gathered_.reserve(STEP * Element::line_length(h.padded_dim));
        const int vectors = (h.padded_dim / LANES + VECTORS - 1) / VECTORS * VECTORS;
        queries_.reserve(QUERIES * h.padded_dim), step_pairs_.reserve(vectors * STEP / 2), weighted_values_.reserve(QUERIES * vectors * LANES);
        scores_.resize(QUERIES * STRIDE), weights_.resize(QUERIES * STRIDE);
    }

    // Prepares an item whose queries see these positions. q [rows of the slot, `stride`]: each row begins with the query heads.
    void begin(const View& view, int layer, const Heads& h, const WorkItem& item, const Positions& positions, const float* q, int64_t stride) {
        const Slot& slot = *item.slot;
        h_ = &h, positions_ = positions, capacity_ = slot.capacity, count_ = item.count, tiles_ = (count_ + TILE - 1) / TILE;
        value_vectors_ = (h.padded_dim / LANES + VECTORS - 1) / VECTORS * VECTORS;
        line_length_ = Element::line_length(h.padded_dim);
        const int64_t base = layer * slot.layer_stride + item.kv_head * slot.capacity * line_length_;
        keys_ = static_cast<const Number*>(slot.keys) + base, values_ = static_cast<const Number*>(slot.values) + base;
        queries_.resize(count_ * h.padded_dim), step_pairs_.assign(value_vectors_ * STEP / 2, Pairs());
        weighted_values_.resize(count_ * value_vectors_ * LANES);
        for (int tile = 0; tile < tiles_; tile++) {
            const Range range = tile_queries(tile);
            for (int i = range.from; i < range.to; i++) {
                const int query = item.first_query + i, head = item.kv_head * h.group_size() + query % h.group_size();
                Operand* to = &queries_[range.from * h.padded_dim + (i - range.from) * 2];
                const float* from = q + query / h.group_size() * stride + head * h.padded_dim;
                for (int d = 0; d < h.padded_dim; d += LANES) {
                    Operand part[LANES];
                    Element::operands(part, load<Floats>(from + d));
                    for (int k = 0; k < LANES; k++) to[(d + k) / 2 * (range.to - range.from) * 2 + k % 2] = part[k];
                }
            }
        }
        prepare_masks(view, slot, item);
    }

    // Computes the partials of all queries of the item over one block.
    void run(int64_t block) {
        base_ = block * BLOCK;
        const int64_t begin = std::max(base_, positions_.begin / STEP * STEP), end = std::min(base_ + BLOCK, positions_.end);
        std::fill_n(max_scores_, count_, all(SoftmaxState::LOWEST));
        for (int64_t at = begin; at < end; at += STEP) {
            prefetches_in_tiles() ? transpose_keys<false>(at) : transpose_keys<true>(at);
            for (int tile = 0; tile < tiles_; tile++) {
                prefetch_part(keys_, at, tile);
                score<TILE>(tile_queries(tile), at);
            }
        }
        const int from = int(begin - base_), to = int((end - base_ + STEP - 1) / STEP * STEP);
        for (int i = 0; i < count_; i++) states_[i] = weigh(i, from, to);
        std::fill(weighted_values_.begin(), weighted_values_.end(), 0.0f);
        for (int64_t at = begin; at < end; at += STEP) {
            prefetches_in_tiles() ? pair_values<false>(at) : pair_values<true>(at);
            if (has_hidden(at) && !finite()) {
                // A weight of 0 is not enough to hide a column: 0 times a non-finite value is NaN.
                for (int i = 0; i < count_; i++) add_values<1, true>({i, i + 1}, int(at - base_));
                continue;
            }
            for (int tile = 0; tile < tiles_; tile++) {
                prefetch_part(values_, at, tile);
                add_values<TILE, false>(tile_queries(tile), int(at - base_));
            }
        }
    }

    // The partial of a query of the item over the last block: its softmax state and its weighted values [padded_dim].
    const SoftmaxState& state(int query) const { return states_[query]; }
    const float* weighted_values(int query) const { return &weighted_values_[query * value_vectors_ * LANES]; }

   private:
    static constexpr int QUERIES = WorkItems::QUERIES, COLUMNS_AHEAD = 128;
    // Size of a tile: TILE queries times VECTORS vectors of 16 lanes. Its sums and one operand of each vector fit into the registers.
    static constexpr int TILE = PARTS == 1 ? 8 : PARTS == 2 ? 6 : REGISTERS / 8, VECTORS = PARTS == 1 ? 2 : 1;
    static constexpr int STEP = VECTORS * LANES, STRIDE = BLOCK + LANES;  // columns of a step; floats between queries' scores

    const Heads* h_;
    const Number *keys_, *values_;
    Positions positions_;
    int count_, tiles_, value_vectors_;          // queries and their tiles; vectors of a value, padded to whole tiles
    int64_t capacity_, base_;                    // of the slot; the first position of the block
    int64_t line_length_;                        // numbers of a key or value in memory
    int64_t all_visible_from_, all_visible_to_;  // all queries see all positions of this range
    int64_t first_visible_[QUERIES];             // the first position that each query sees, at most the slot's length
    const uint8_t* tail_masks_[QUERIES];         // for each query, its row of `tail_mask_`
    Floats max_scores_[QUERIES];                 // of each lane
    SoftmaxState states_[QUERIES];
    std::vector<uint8_t> tail_mask_;   // [rows, positions from `all_visible_to_` on]: 1 if the row sees the position
    Aligned<float> scores_;            // [queries, STRIDE]
    Aligned<Operand> weights_;         // [queries, STRIDE]
    std::vector<Number> gathered_;     // lines of a step that are not contiguous in the slot's ring [STEP, line]
    std::vector<Operand> queries_;     // for each tile, [D / 2, queries of the tile, 2]: pairs of dimensions
    // Operands of a step: keys [D / 2, VECTORS] as pairs of dimensions, or values [value_vectors / VECTORS, STEP / 2, VECTORS] as pairs
    // of columns.
    std::vector<Pairs> step_pairs_;
    Aligned<float> weighted_values_;  // [queries, value_vectors * LANES]

    Range tile_queries(int tile) const { return nth_part(tile, tiles_, count_); }

    // Prepares the masks of the positions that not all queries see.
    void prepare_masks(const View& view, const Slot& slot, const WorkItem& item) {
        const int group_size = h_->group_size(), from = item.first_query / group_size, to = (item.first_query + count_ - 1) / group_size + 1;
        all_visible_from_ = 0, all_visible_to_ = slot.length / STEP * STEP;
        const int64_t size = (positions_.end - all_visible_to_ + STEP - 1) / STEP * STEP;
        const int64_t before = slot.length - all_visible_to_, tail = positions_.end - slot.length;
        tail_mask_.assign((to - from) * size, 0);
        for (int row = from; row < to; row++) {
            uint8_t* mask = &tail_mask_[(row - from) * size];
            std::memset(mask, 1, before), mask += before;
            std::memcpy(mask, slot.visible + int64_t(row) * slot.columns, tail);
            const int64_t start = view.window_start(slot, slot.row_depth[row]) - slot.length;  // of the row's window, as a depth
            for (int c = 0; view.window && c < tail; c++) mask[c] &= slot.column_depth[c] >= start;
        }
        for (int i = 0; i < count_; i++) {
            const int row = (item.first_query + i) / group_size;
            first_visible_[i] = std::min(view.window_start(slot, slot.row_depth[row]), slot.length);
            tail_masks_[i] = &tail_mask_[(row - from) * size];
            all_visible_from_ = std::max(all_visible_from_, first_visible_[i]);
        }
    }

    // True if a query may not see all columns of the step that begins at this position.
    bool has_hidden(int64_t at) const { return at < all_visible_from_ || at >= all_visible_to_; }

    // Mask of the 16 positions from this position on that a query sees.
    Ints visible(int query, int64_t at) const {
        static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int32_t hidden = int32_t(std::clamp<int64_t>(first_visible_[query] - at, 0, LANES));
        const Ints mask = load<Ints>(NUMBERS) >= hidden;
        return at < all_visible_to_ ? mask : mask & (convert<Ints>(load<Lanes<uint8_t>>(tail_masks_[query] + (at - all_visible_to_))) != 0);
    }

    // Prefetches `count` numbers: into the L2 cache `COLUMNS_AHEAD` columns ahead, and into L1 `near` columns ahead. The hardware prefetcher
    // cannot follow as many texts as a batch has, and a processor stalls if it prefetches a whole step at once. Inlined always,
    // because GCC drops calls of functions that only prefetch.
    [[gnu::always_inline]] void prefetch(const Number* here, int count, int near = LANES) const {
        const Number *second = here + COLUMNS_AHEAD * line_length_, *first = here + near * line_length_;
        for (int i = 0; i < count; i += 64 / int(sizeof(Number))) __builtin_prefetch(second + i, 0, 1), __builtin_prefetch(first + i, 0, 3);
    }

    // True if there are enough tiles to prefetch while they are computed. Otherwise keys are prefetched while others are
    // transposed, and values while others are paired, which then waits for memory.
    bool prefetches_in_tiles() const { return tiles_ >= 4; }

    // Prefetches a tile's part of the step after the step that begins at this position.
    [[gnu::always_inline]] void prefetch_part(const Number* lines, int64_t at, int tile) const {
        if (!prefetches_in_tiles()) return;
        const int64_t from = STEP * line_length_ * tile / tiles_, to = STEP * line_length_ * (tile + 1) / tiles_;
        prefetch(lines + at % capacity_ * line_length_ + from, int(to - from), STEP);
    }

    // The lines of a step, contiguous: in place, or as a copy if the step wraps around the end of the slot's ring.
    const Number* contiguous(const Number* lines, int64_t at) {
        const Number* first = lines + at % capacity_ * line_length_;
        if (at % capacity_ + STEP <= capacity_) return first;
        gathered_.resize(STEP * line_length_);
        for (int i = 0; i < STEP; i++) {
            const int64_t column = std::min(at + i, positions_.end - 1) % capacity_;
            std::copy_n(lines + column * line_length_, line_length_, &gathered_[i * line_length_]);
        }
        return gathered_.data();
    }

    // Transposes the keys of a step: pairs of dimensions, with one column in each lane.
    template <bool PREFETCH>
    [[gnu::noinline, gnu::flatten]] void transpose_keys(int64_t at) {
        constexpr int DIMENSIONS = sizeof(Number) == 1 ? 16 : 8;  // transposed at a time
        const int size = h_->padded_dim, first = Element::code_offset(size);
        const int64_t stride = line_length_;
        const Number* lines = contiguous(keys_, at);
        for (int v = 0; v < VECTORS; v++, lines += LANES * stride) {
            [[maybe_unused]] Floats scales[4];
            for (int d = 0; d < size; d += DIMENSIONS) {
                Pairs pairs[DIMENSIONS / 2];
                if constexpr (Element::SCALED) {
                    constexpr int FOUR = 4 * Element::BLOCK;
                    if (d % FOUR == 0) Element::transpose_scales(scales, lines, d, stride);
                    Element::transpose(pairs, lines + first + d, stride, scales[d % FOUR / Element::BLOCK]);
                } else {
                    Element::transpose(pairs, lines + d, stride);
                }
                if constexpr (PREFETCH) prefetch(lines + d * LANES, DIMENSIONS * LANES);
                for (int i = 0; i < DIMENSIONS / 2; i++) step_pairs_[(d / 2 + i) * VECTORS + v] = pairs[i];
            }
        }
    }

    // Interleaves the values of neighbouring columns of a step.
    template <bool PREFETCH>
    [[gnu::noinline, gnu::flatten]] void pair_values(int64_t at) {
        const int size = h_->padded_dim, full_tiles = size / LANES / VECTORS * VECTORS * LANES;
        const int64_t stride = line_length_;
        const Number* even = contiguous(values_, at);
        for (int pair = 0; pair < STEP / 2; pair++, even += 2 * stride) {
            Pairs* to = &step_pairs_[pair * VECTORS];
            if constexpr (PREFETCH) prefetch(even, 2 * int(stride));
            for (int d = 0; d < full_tiles; d += VECTORS * LANES, to += STEP / 2 * VECTORS) interleave<VECTORS>(to, even, d);
            if (full_tiles < size) interleave<1>(to, even, full_tiles);
        }
    }

    // Interleaves 16 N elements of two lines, from element d on.
    template <int N>
    [[gnu::always_inline]] void interleave(Pairs* to, const Number* even, int d) const {
        const Number *odd = even + line_length_, *from = even + Element::code_offset(h_->padded_dim) + d;
        if constexpr (Element::SCALED) Element::template interleave<N>(to, from, from + line_length_, Element::scale(even, d), Element::scale(odd, d));
        else Element::template interleave<N>(to, from, from + line_length_);
    }

    bool finite() const {
        bool finite = true;
        for (const Pairs& pairs : step_pairs_) finite &= paceline::finite(pairs);
        return finite;
    }

    // Multiplies `count` pairs of each vector by the matching pair of each of Q queries, and adds up the results. `query_pairs`: the first
    // query's first pair. Neighbouring queries are NEXT_QUERY elements apart, neighbouring pairs of a query are NEXT elements apart.
    // HIDDEN: skip elements whose weight is 0, because they may not be finite.
    template <int Q, int NEXT_QUERY, int NEXT, bool HIDDEN>
    [[gnu::always_inline]] static void multiply(Floats (&sums)[Q][VECTORS], const Pairs* vectors, int count, const Operand* query_pairs) {
        for (int i = 0; i < count; i++, vectors += VECTORS, query_pairs += NEXT) {
            Pairs masked[VECTORS];
            for (int v = 0; v < VECTORS && HIDDEN; v++) masked[v] = zero_unweighted(vectors[v], query_pairs);
            add_products(sums, HIDDEN ? masked : vectors, query_pairs, NEXT_QUERY);
        }
    }

    // Computes the scores of up to Q queries, a tile, with the columns of a step.
    template <int Q>
    [[gnu::noinline, gnu::flatten]] void score(Range queries, int64_t at) {
        if constexpr (Q > 1)
            if (queries.to - queries.from < Q) return score<Q - 1>(queries, at);
        Floats dots[Q][VECTORS] = {};
        multiply<Q, 2, 2 * Q, false>(dots, step_pairs_.data(), h_->padded_dim / 2, &queries_[queries.from * h_->padded_dim]);
        float* scores = &scores_[queries.from * STRIDE + (at - base_)];
#pragma GCC unroll 8
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) store(scores + i * STRIDE + v * LANES, dots[i][v]);
        const bool hidden = has_hidden(at);
        for (int i = queries.from; i < queries.to; i++, scores += STRIDE)
            for (int v = 0; v < VECTORS; v++) {
                Floats s = load<Floats>(scores + v * LANES);
                if (h_->softcap > 0) s = hyperbolic_tangent(s * (h_->scale / h_->softcap)) * h_->softcap;
                if (hidden) s = select(visible(i, at + v * LANES), s, all(-INFINITY));
                max_scores_[i] = select(s > max_scores_[i], s, max_scores_[i]);
                store(scores + v * LANES, s);
            }
    }

    // Turns a query's scores of columns `from` to `to` - 1 of the block into weights. Their sum adds multiples of 2^-23, which is
    // exact, so hidden columns do not change it.
    [[gnu::noinline, gnu::flatten]] SoftmaxState weigh(int query, int from, int to) {
        const float factor = (h_->softcap > 0 ? 1.0f : h_->scale) * SoftmaxState::LOG2_E;
        const float largest_score = largest(max_scores_[query]);
        const float max = largest_score > SoftmaxState::LOWEST ? largest_score * factor : largest_score;
        const float* scores = &scores_[query * STRIDE];
        Operand* weights = &weights_[query * STRIDE];
        Ints sum{};
        for (int i = from; i < to; i += LANES) {
            const Floats w = Element::power(fma(load<Floats>(scores + i), all(factor), all(-max)));
            sum += as<Ints>(w + 1.0f) - 0x3f800000;
            Element::weights(weights + i, w);
        }
        return {max, float((int64_t(paceline::sum(sum >> 16)) << 16) + paceline::sum(sum & 0xffff)) * 0x1p-23f};
    }

    // Adds the values of a step, times the weights of up to Q queries. `offset`: the step's first column in the block.
    template <int Q, bool HIDDEN>
    [[gnu::noinline, gnu::flatten]] void add_values(Range queries, int offset) {
        if constexpr (Q > 1)
            if (queries.to - queries.from < Q) return add_values<Q - 1, HIDDEN>(queries, offset);
        const Operand* weights = &weights_[queries.from * STRIDE + offset];
        const Pairs* values = step_pairs_.data();
        const int width = value_vectors_ * LANES;
        float* to = &weighted_values_[queries.from * width];
        for (int vector = 0; vector < value_vectors_; vector += VECTORS, values += STEP / 2 * VECTORS, to += VECTORS * LANES) {
            Floats sums[Q][VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) sums[i][v] = load<Floats>(to + i * width + v * LANES);
            multiply<Q, STRIDE, 2, HIDDEN>(sums, values, STEP / 2, weights);
#pragma GCC unroll 8
            for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) store(to + i * width + v * LANES, sums[i][v]);
        }
    }
};

}  // namespace paceline
