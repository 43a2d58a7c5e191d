// How the threads of a pass share its rows.
//
// Where there are few, all threads work on all of them, a stage of a layer at a time. Where there are many they are cut
// into groups, which need each other only as the rows of one text do, and a thread takes whichever group is furthest
// behind through its next layer. Nobody waits at barriers then, and a thread that the system has put aside holds up no
// more than the group in its hands.
#pragma once

#include <mutex>
#include <thread>

#include "layer.h"

namespace paceline {

// A part of a pass, as a pass of its own: whole slots, or a piece of a long one.
class Group {
   public:
    Pass pass;
    Scratch scratch;
    const Group* before = nullptr;  // the piece before it, whose keys and values its rows see
    int done = 0;                   // layers
    bool busy = false;

    // `from`, `to`: rows of all slots. `views`: how many there are.
    void become(const Pass& all, int views, int from, int to, const Group* piece_before) {
        before = piece_before, done = 0, busy = false;
        pass = all;
        pass.rows = to - from, pass.lines = all.lines + from;
        parts_.resize(views), views_.resize(views);
        for (int v = 0; v < views; v++) {
            views_[v] = all.views[v];
            parts_[v].become(views_[v], all.slots, from, to);
            pass.slots = int(parts_[v].slots.size());
        }
        pass.views = views_.data();
    }

   private:
    // What it has of a view.
    struct OfView {
        std::vector<Slot> slots;
        std::vector<int64_t> lines, sources, copied, copy_lines;

        void become(View& view, int count, int from, int to) {
            slots.clear(), lines.clear(), sources.clear(), copied.clear(), copy_lines.clear();
            for (const Slot* s = view.slots; s < view.slots + count; s++) {
                const int first = std::max(from, s->first), end = std::min(to, s->first + s->rows);
                if (first < end) take(view, *s, first - s->first, end - first, first - from);
            }
            for (int i = 0; i < view.stores; i++)
                if (view.sources[i] >= from && view.sources[i] < to)
                    lines.push_back(view.lines[i]), sources.push_back(view.sources[i] - from);
            view.slots = slots.data();
            view.stores = int(lines.size()), view.lines = lines.data(), view.sources = sources.data();
            view.copies = int(copied.size()), view.copied = copied.data(), view.copy_lines = copy_lines.data();
        }

        // `rows` of a slot without its first `skip`; they are `at` and those after it of the group.
        void take(const View& view, Slot slot, int skip, int rows, int at) {
            for (int i = 0; i < view.copies && !skip; i++)
                if (view.copied[i] / view.place_lines == slot.place)
                    copied.push_back(view.copied[i]), copy_lines.push_back(view.copy_lines[i]);
            slot.first = at, slot.rows = rows, slot.visible += int64_t(skip) * slot.columns, slot.depth += skip;
            slots.push_back(slot);
        }
    };

    std::vector<OfView> parts_;
    std::vector<View> views_;
};

class Groups {
   public:
    // False where barriers keep threads busier.
    bool cut(const Pass& pass, int views, int layers) {
        used_ = 0, layers_ = layers;
        if (!PARALLEL || pass.threads < 2 || pass.rows < ROWS * pass.threads) return false;
        if (groups_.size() < size_t(pass.rows / ROWS + 1)) groups_.resize(pass.rows / ROWS + 1);
        // As large as may be, since every group reads all weights, and so many that there is one to choose.
        const int each = std::max(ROWS, (pass.rows / (2 * pass.threads) + TILE - 1) / TILE * TILE);
        int from = 0, largest = 0, chain = 0, longest = 0;
        const Group* piece_before = nullptr;
        auto close = [&](int to, bool goes_on) {
            Group& group = groups_[used_++];
            group.become(pass, views, from, to, piece_before);
            chain = piece_before ? chain + 1 : 1, longest = std::max(longest, chain);
            largest = std::max(largest, to - from);
            piece_before = goes_on ? &group : nullptr, from = to;
        };
        for (const Slot* s = pass.views->slots; s < pass.views->slots + pass.slots; s++) {
            const int end = s->first + s->rows;
            const bool causal = is_causal(pass, views, int(s - pass.views->slots));
            while (causal && end - from >= each + ROWS) close(from + each, true);
            if (end - from >= each) close(end, false);
        }
        if (from < pass.rows) close(pass.rows, false);
        // A group cannot be shared out, and the pieces of a text set out one after the other: with few layers, alone.
        const bool uneven = 4 * pass.threads * largest > 5 * pass.rows;
        const bool in_turn = 4 * int64_t(pass.threads) * (longest + layers - 1) > 5 * int64_t(used_) * layers;
        if (used_ < pass.threads || uneven || in_turn) used_ = 0;
        return used_ > 0;
    }

    int count() const { return used_; }

    // The groups in turn, for what must be done before the threads set out.
    Group* begin() { return groups_.data(); }
    Group* end() { return groups_.data() + used_; }

    // The next for a thread that has taken `had` through a layer; null when the others can do without it.
    Group* next(Group* had) {
        for (;; std::this_thread::yield()) {
            std::lock_guard<std::mutex> hold(lock_);
            if (had) had->done++, had->busy = false, had = nullptr;
            Group* best = nullptr;
            bool all_held = true;
            for (Group& g : *this) {
                if (g.done == layers_ || g.busy) continue;
                all_held = false;
                if ((!g.before || g.before->done > g.done) && (!best || g.done < best->done)) best = &g;
            }
            if (best) best->busy = true;
            if (best || all_held) return best;
        }
    }

   private:
    // Where every row of a slot sees every row, in some layers, none can go ahead.
    static bool is_causal(const Pass& pass, int views, int slot) {
        for (int v = 0; v < views; v++) {
            const Slot& s = pass.views[v].slots[slot];
            if (s.visible[s.columns - 1]) return false;
        }
        return true;
    }

    static constexpr int ROWS = TILE;  // at least, in a group

    std::vector<Group> groups_;
    int used_ = 0, layers_ = 0;
    std::mutex lock_;
};

}  // namespace paceline
