// How the threads of a pass share its rows.
//
// With few rows, all threads work on all rows, one stage of a layer at a time. Many rows are cut into groups (micro-batches), and a free
// thread takes the group that is furthest behind through its next layer. Groups wait only for earlier rows of the same text.
// So no thread waits at the end of a stage, and a thread that the system suspends delays only its own group. A layer that shares
// an earlier layer's keys may read positions that a later group is writing at that moment. Its rows do not see these
// positions, so their weight is 0.
#pragma once

#include <mutex>
#include <thread>

#include "layer.h"

namespace paceline {

// A part of a pass, treated as a pass of its own: whole slots, or a chunk of a long slot's rows.
class Group {
   public:
    Pass pass;
    Scratch scratch;
    const Group* previous_chunk = nullptr;  // the preceding rows of the same slot: their keys and values must be written first
    int done = 0;                   // finished layers
    bool busy = false;

    // Takes rows `from` to `to` - 1 of the pass `all`, which has `views` views.
    void assign(const Pass& all, int views, int from, int to, const Group* previous) {
        previous_chunk = previous, done = 0, busy = false;
        pass = all;
        pass.rows = to - from, pass.indices = all.indices + from;
        pass.adapters = all.adapters ? all.adapters + from : nullptr;
        parts_.resize(views), views_.resize(views);
        for (int v = 0; v < views; v++) {
            views_[v] = all.views[v];
            cut(parts_[v], views_[v], all.slots, from, to);
            pass.slots = int(parts_[v].size());
        }
        pass.views = views_.data();
    }

   private:
    // Restricts a view's `count` slots to the rows `from` to `to` - 1 of the pass. The group numbers its rows from 0.
    static void cut(std::vector<Slot>& part, View& view, int count, int from, int to) {
        part.clear();
        for (const Slot* s = view.slots; s < view.slots + count; s++) {
            const int first = std::max(from, s->first), end = std::min(to, s->first + s->rows), skip = first - s->first;
            if (first >= end) continue;
            part.push_back(*s);
            Slot& slot = part.back();
            slot.first = first - from, slot.rows = end - first, slot.skipped = skip;
            slot.visible += int64_t(skip) * slot.columns, slot.row_depth += skip;
        }
        view.slots = part.data();
    }

    std::vector<std::vector<Slot>> parts_;  // of each view
    std::vector<View> views_;
};

class Groups {
   public:
    // Cuts a pass into groups. Returns false if stages keep the threads busier.
    bool cut(const Pass& pass, int views, int layers) {
        used_ = 0, layers_ = layers;
        if (pass.threads < 2 || pass.rows < ROWS * pass.threads) return false;
        if (groups_.size() < size_t(pass.rows / ROWS + 1)) groups_.resize(pass.rows / ROWS + 1);
        // Large groups are better, since every group reads all weights, but each thread needs several to choose from.
        const int each = std::max(ROWS, (pass.rows / (2 * pass.threads) + TILE - 1) / TILE * TILE);
        int from = 0, largest = 0, chain = 0, longest = 0;
        const Group* previous_chunk = nullptr;
        auto close = [&](int to, bool continues) {
            Group& group = groups_[used_++];
            group.assign(pass, views, from, to, previous_chunk);
            chain = previous_chunk ? chain + 1 : 1, longest = std::max(longest, chain);
            largest = std::max(largest, to - from);
            previous_chunk = continues ? &group : nullptr, from = to;
        };
        for (const Slot* s = pass.views->slots; s < pass.views->slots + pass.slots; s++) {
            const int end = s->first + s->rows;
            const bool causal = is_causal(pass, views, int(s - pass.views->slots));
            while (causal && end - from >= each + ROWS) close(from + each, true);
            if (end - from >= each) close(end, false);
        }
        if (from < pass.rows) close(pass.rows, false);
        // Groups are indivisible, so they should have similar sizes. The chunks of one text start one after the other, so
        // with few layers they hardly overlap.
        const bool uneven = 4 * pass.threads * largest > 5 * pass.rows;
        const bool serial = 4 * int64_t(pass.threads) * (longest + layers - 1) > 5 * int64_t(used_) * layers;
        if (used_ < pass.threads || uneven || serial) used_ = 0;
        return used_ > 0;
    }

    int count() const { return used_; }

    // The groups in order, to prepare them before the threads start.
    Group* begin() { return groups_.data(); }
    Group* end() { return groups_.data() + used_; }

    // Puts back `finished`, which this thread has taken through a layer, and takes the next group. Returns null if other threads hold
    // all remaining groups.
    Group* next(Group* finished) {
        for (;; std::this_thread::yield()) {
            std::lock_guard<std::mutex> hold(lock_);
            if (finished) finished->done++, finished->busy = false, finished = nullptr;
            Group* best = nullptr;
            bool all_held = true;
            for (Group& g : *this) {
                if (g.done == layers_ || g.busy) continue;
                all_held = false;
                if ((!g.previous_chunk || g.previous_chunk->done > g.done) && (!best || g.done < best->done)) best = &g;
            }
            if (best) best->busy = true;
            if (best || all_held) return best;
        }
    }

   private:
    // False if in some layer every row of the slot sees every other row: then no chunk can run ahead of another.
    static bool is_causal(const Pass& pass, int views, int slot) {
        for (int v = 0; v < views; v++) {
            const Slot& s = pass.views[v].slots[slot];
            if (s.visible[s.columns - 1]) return false;
        }
        return true;
    }

    static constexpr int ROWS = TILE;  // minimum rows of a group

    std::vector<Group> groups_;
    int used_ = 0, layers_ = 0;
    std::mutex lock_;
};

}  // namespace paceline
