// Attention of all rows of a pass in one layer, shared by the threads of a team.
#pragma once

#include <algorithm>
#include <tuple>

#include "attention.h"
#include "formats.h"

namespace paceline {

// Memory of one thread, for each type of keys and values.
class Attentions {
   public:
    void reserve(const View& view, const Heads& h, int slots) {
        with(view.kind, [&](auto& attention) { attention.reserve(view, h, slots); });
    }

    // Calls work(attention) with the attention for keys and values of this kind that is fastest on this processor.
    template <class Work>
    void with(int kind, Work work) {
        switch (kind) {
            case WIDE: return multiplies_pairs() ? work(paired_) : work(std::get<0>(each_));
            case HALF: return work(std::get<1>(each_));
            case FULL: return work(std::get<2>(each_));
            default: return work(std::get<3>(each_));
        }
    }

   private:
    std::tuple<Attention<BFloat16>, Attention<Float16>, Attention<Float32>, Attention<Int8>> each_;
    Attention<PairedBFloat16> paired_;
};

// Stores one key head of all slots' rows, as a key or as a value. row(i) [D] is the head of row i of the pass.
template <class Row>
void store_head(Attentions& attentions, const View& view, int slots, int layer, const Heads& h, int head, bool value, Row row) {
    attentions.with(view.kind, [&](auto& attention) {
        using Stored = typename std::decay_t<decltype(attention)>::Element;
        for (const Slot* slot = view.slots; slot < view.slots + slots; slot++)
            write_head<Stored>(*slot, value ? slot->values : slot->keys, layer, h, head, row);
    });
}

// Attention of one layer. `Element` is the type of the stream.
template <class Element>
class AttentionTask {
   public:
    AttentionTask(const View& view, int slots, int layer, const Heads& h, int threads)
        : view_(view), h_(h), layer_(layer), pieces_(view, slots, h, threads) {}

    // Computes mixed [rows, query heads, size] from the queries, of the same shape.
    // kept: room for the results of `parts(rows)` blocks, `part_size` each.
    // local(thread): the thread's `Attentions`.
    template <class Local>
    void run(const float* queries, float* mixed, float* kept, int rows, Team& team, Local local) const {
        const Numbers x{queries, mixed, kept};
        const int count = std::min(pieces_.count(), Pool::PIECES);
        team.run(count, [&](int index, int thread) {
            const Span own = share(index, count, pieces_.count());
            local(thread).with(view_.kind, [&](auto& attention) {
                for (int i = own.from; i < own.to; i++) attend(attention, pieces_[i], x);
            });
        });
        if (pieces_.spans() > 1) team.split(rows * h_.query, 1, [&](Span own, int) { join_parts(own, x); });
    }

    int parts(int rows) const { return pieces_.parts(rows); }

   private:
    struct Numbers {
        const float* queries;
        float *mixed, *kept;
    };

    const View& view_;
    const Heads& h_;
    const int layer_;
    const AttentionPieces pieces_;

    // Computes one piece. Joins the blocks at once, or keeps their results for `join_parts`.
    template <class Attending>
    void attend(Attending& attention, const AttentionPiece& piece, const Numbers& x) const {
        const Slot& slot = *piece.slot;
        const int size = h_.size, group = h_.group(), width = h_.query * size;
        const bool whole = pieces_.spans() == 1;
        const Positions seen = whole ? view_.seen(slot, piece.first / group, (piece.first + piece.count - 1) / group + 1) : view_.seen(slot);
        attention.begin(view_, layer_, h_, piece, seen, x.queries + int64_t(slot.first) * width, width);
        Softmax joined[AttentionPieces::QUERIES];
        auto query = [&](int i) {
            const int at = piece.first + i;
            return (slot.first + at / group) * h_.query + piece.head * group + at % group;
        };
        for (int i = 0; i < piece.count && whole; i++) joined[i] = begin_query(query(i), x);
        const Span blocks = share(piece.span, pieces_.spans(), seen.blocks());
        for (int block = blocks.from; block < blocks.to; block++) {
            attention.run(seen.first_block() + block);
            for (int i = 0; i < piece.count; i++) {
                if (whole) {
                    join<Element>(joined[i], mixed(query(i), x), attention.found(i), attention.sum(i), size);
                } else {
                    float* to = part(query(i), block, x);
                    std::copy_n(attention.sum(i), size, to);
                    to[size] = attention.found(i).top, to[size + 1] = attention.found(i).total;
                }
            }
        }
        for (int i = 0; i < piece.count && whole; i++) divide(mixed(query(i), x), joined[i].total, size);
    }

    // Joins the blocks of these queries of the pass.
    void join_parts(Span own, const Numbers& x) const {
        const Slot* slot = view_.slots;
        const int size = h_.size;
        int blocks = 0;
        for (int query = own.from; query < own.to; query++) {
            while (query >= (slot->first + slot->rows) * h_.query) slot++, blocks = 0;
            if (!blocks) blocks = view_.seen(*slot).blocks();
            Softmax joined = begin_query(query, x);
            for (int block = 0; block < blocks; block++) {
                const float* from = part(query, block, x);
                join<Element>(joined, mixed(query, x), {from[size], from[size + 1]}, from, size);
            }
            divide(mixed(query, x), joined.total, size);
        }
    }

    Softmax begin_query(int query, const Numbers& x) const {
        std::fill_n(mixed(query, x), h_.size, 0.0f);
        return Softmax::begin(h_, query % h_.query);
    }

    // The output of a query of the pass: rows times query heads.
    float* mixed(int query, const Numbers& x) const { return x.mixed + int64_t(query) * h_.size; }

    // Room for the result of a query in one block.
    float* part(int query, int block, const Numbers& x) const {
        return x.kept + (int64_t(query) * pieces_.most_blocks() + block) * part_size(h_);
    }
};

}  // namespace paceline
