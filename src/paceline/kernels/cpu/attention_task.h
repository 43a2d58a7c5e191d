// Attention of all rows of a pass in one layer, shared by the threads of a team. attention.h defines the terms.
#pragma once

#include <algorithm>
#include <tuple>

#include "attention.h"
#include "formats.h"

namespace paceline {

// A thread's attention kernels, with their memory: one for each type of keys and values.
class AttentionKernels {
   public:
    void reserve(const View& view, const Heads& h, int slots) {
        with(view.kind, [&](auto& kernel) { kernel.reserve(view, h, slots); });
    }

    // Calls work(kernel) with the fastest kernel on this processor for keys and values of this kind.
    template <class Work>
    void with(int kind, Work work) {
        switch (kind) {
            case BF16: return multiplies_pairs() ? work(paired_) : work(std::get<0>(each_));
            case F16: return work(std::get<1>(each_));
            case F32: return work(std::get<2>(each_));
            default: return work(std::get<3>(each_));
        }
    }

   private:
    std::tuple<AttentionKernel<BFloat16>, AttentionKernel<Float16>, AttentionKernel<Float32>, AttentionKernel<Int8>> each_;
    AttentionKernel<PairedBFloat16> paired_;
};

// Stores one KV head of all slots' rows, as a key or as a value. row(i) [D] is that head of row i of the pass.
template <class Row>
void store_head(AttentionKernels& kernels, const View& view, int slots, int layer, const Heads& h, int head, bool is_value, Row row) {
    kernels.with(view.kind, [&](auto& kernel) {
        using Stored = typename std::decay_t<decltype(kernel)>::Element;
        for (const Slot* slot = view.slots; slot < view.slots + slots; slot++)
            write_head<Stored>(*slot, is_value ? slot->values : slot->keys, layer, h, head, row);
    });
}

// Attention of one layer. `Element` is the type of the stream.
template <class Element>
class AttentionTask {
   public:
    AttentionTask(const View& view, int slots, int layer, const Heads& h, int threads)
        : view_(view), h_(h), layer_(layer), items_(view, slots, h, threads) {}

    // Computes the output [rows, query heads, padded_dim] from the queries, of the same shape.
    // partials: memory for `partials(rows)` partials of `partial_size` floats.
    // kernels_of(thread): the thread's `AttentionKernels`.
    template <class KernelsOf>
    void run(const float* queries, float* output, float* partials, int rows, Team& team, KernelsOf kernels_of) const {
        const Buffers buffers{queries, output, partials};
        const int pieces = std::min(items_.count(), Pool::PIECES);
        team.run(pieces, [&](int piece, int thread) {
            const Range items = nth_part(piece, pieces, items_.count());
            kernels_of(thread).with(view_.kind, [&](auto& kernel) {
                for (int i = items.from; i < items.to; i++) attend(kernel, items_[i], buffers);
            });
        });
        if (items_.splits() > 1) team.split(rows * h_.query_heads, [&](Range queries, int) { merge_partials(queries, buffers); });
    }

    // Number of partials that `run` keeps for this many rows.
    int partials(int rows) const { return items_.partials(rows); }

   private:
    struct Buffers {
        const float* queries;
        float *output, *partials;
    };

    const View& view_;
    const Heads& h_;
    const int layer_;
    const WorkItems items_;

    // Computes one work item. With a single KV split, the item has all blocks of its queries, so it merges each partial into the
    // output as soon as it is computed. With several splits, it stores the partials for `merge_partials`.
    template <class Kernel>
    void attend(Kernel& kernel, const WorkItem& item, const Buffers& buffers) const {
        const Slot& slot = *item.slot;
        const int size = h_.padded_dim, group_size = h_.group_size(), width = h_.query_heads * size;
        const bool unsplit = items_.splits() == 1;
        // Stored partials are indexed by block. So all queries of the slot must count its blocks from the same first block.
        const int first_row = item.first_query / group_size, end_row = (item.first_query + item.count - 1) / group_size + 1;
        const Positions positions = unsplit ? view_.visible_positions(slot, first_row, end_row) : view_.visible_positions(slot);
        kernel.begin(view_, layer_, h_, item, positions, buffers.queries + int64_t(slot.first) * width, width);
        SoftmaxState states[WorkItems::QUERIES];
        // Number, in the pass, of query i of the item.
        auto query_of = [&](int i) {
            const int query = item.first_query + i;
            return (slot.first + query / group_size) * h_.query_heads + item.kv_head * group_size + query % group_size;
        };
        if (unsplit)
            for (int i = 0; i < item.count; i++) states[i] = begin_query(query_of(i), buffers);
        const Range blocks = nth_part(item.split, items_.splits(), positions.blocks());
        for (int block = blocks.from; block < blocks.to; block++) {
            kernel.run(positions.first_block() + block);
            for (int i = 0; i < item.count; i++) {
                if (unsplit) {
                    merge<Element>(states[i], output_of(query_of(i), buffers), kernel.state(i), kernel.weighted_values(i), size);
                } else {
                    float* to = partial(query_of(i), block, buffers);
                    std::copy_n(kernel.weighted_values(i), size, to);
                    to[size] = kernel.state(i).max, to[size + 1] = kernel.state(i).denominator;
                }
            }
        }
        if (unsplit)
            for (int i = 0; i < item.count; i++) normalise(output_of(query_of(i), buffers), states[i].denominator, size);
    }

    // Merges the stored partials of these queries of the pass, in the order of the blocks.
    void merge_partials(Range queries, const Buffers& buffers) const {
        const Slot* slot = view_.slots;
        const int size = h_.padded_dim;
        int blocks = 0;
        for (int query = queries.from; query < queries.to; query++) {
            while (query >= (slot->first + slot->rows) * h_.query_heads) slot++, blocks = 0;
            if (!blocks) blocks = view_.visible_positions(*slot).blocks();
            SoftmaxState state = begin_query(query, buffers);
            for (int block = 0; block < blocks; block++) {
                const float* from = partial(query, block, buffers);
                merge<Element>(state, output_of(query, buffers), {from[size], from[size + 1]}, from, size);
            }
            normalise(output_of(query, buffers), state.denominator, size);
        }
    }

    SoftmaxState begin_query(int query, const Buffers& buffers) const {
        std::fill_n(output_of(query, buffers), h_.padded_dim, 0.0f);
        return SoftmaxState::begin(h_, query % h_.query_heads);
    }

    // The output of a query of the pass.
    float* output_of(int query, const Buffers& buffers) const { return buffers.output + int64_t(query) * h_.padded_dim; }

    // The memory for the partial of a query of the pass over a block of its slot.
    float* partial(int query, int block, const Buffers& buffers) const {
        return buffers.partials + (int64_t(query) * items_.max_blocks() + block) * partial_size(h_);
    }
};

}  // namespace paceline
