// Attention of a pass's rows over the slab cache (cache.py). A row's sums run over the columns it sees in the order of
// their positions; columns that it does not see weigh 0, which changes no bit.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace paceline {

// What one slot's rows see: its committed prefix, then `columns` that this pass and those before it wrote.
struct Slot {
    int64_t place, length;
    int32_t columns;
    const uint8_t* visible;        // [rows, columns]
    const int32_t *depth, *below;  // of each row, and of each column's row: positions beyond `length`
};

// One slab [layers, places, kv_heads, capacity, D], and where a pass writes and reads in it.
struct View {
    bf16 *keys, *values;
    int64_t layer_stride, capacity;  // elements; positions
    int32_t window;                  // 0: none
    int32_t stores, copies;
    // Lines of the slab (of its first key head) that get the rows `sources`, and the lines that are copied before that.
    const int64_t *lines, *sources, *copied, *copy_lines;
    const Slot* slots;
};

struct Heads {
    int32_t query, kv, size;
    float scale, softcap;  // 0: no cap
    int group() const { return query / kv; }
};

struct Rotation {
    const float *cosines, *signed_sines;  // [rows of all slots, rotated]; null where positions are not encoded
    int32_t rotated;
};

// "Rotate half": the first dimensions of a head turn against each other.
inline void rotate(float* head, const Rotation& turn, int row) {
    if (!turn.cosines) return;
    const int n = turn.rotated, middle = n / 2;
    const float *c = turn.cosines + int64_t(row) * n, *s = turn.signed_sines + int64_t(row) * n;
    for (int i = 0; i < middle; i++) {
        float a = head[i], b = head[i + middle];
        head[i] = a * c[i] + b * s[i];
        head[i + middle] = b * c[i + middle] + a * s[i + middle];
    }
}

// What a pass writes of one key head, keys or values: x [rows of all slots, D], `stride` elements to a row.
inline void write_head(const View& view, bf16* slab, int layer, const Heads& h, int head, const bf16* x, int64_t stride) {
    slab += layer * view.layer_stride + head * view.capacity * h.size;
    for (int i = 0; i < view.copies; i++)
        std::memcpy(slab + view.copy_lines[i] * h.size, slab + view.copied[i] * h.size, sizeof(bf16) * h.size);
    for (int i = 0; i < view.stores; i++)
        std::memcpy(slab + view.lines[i] * h.size, x + view.sources[i] * stride, sizeof(bf16) * h.size);
}

// Up to 16 queries of one slot that share a key head: query i is of row (first + i) / group.
class Attention {
   public:
    // Room for one pass, so that nothing is allocated while threads wait for each other.
    void reserve(const View& view, const Heads& h, int slots) {
        size_t most = 0;
        for (const Slot* s = view.slots; s < view.slots + slots; s++)
            most = std::max<size_t>(most, (view.window ? std::min<int64_t>(s->length, view.window) : s->length) + s->columns);
        most = (most + 1023) / 1024 * 1024;  // a text grows token by token
        columns_.reserve(most), hidden_.reserve(most), weights_.reserve(most), queries_.reserve(h.size / 2);
    }

    // q [rows of the slot, `stride`], whose rows begin with the query heads; mixed [rows of the slot, query heads * D].
    void run(const View& view, int layer, const Heads& h, const Slot& slot, int rows, int kv_head, int first,
             const bf16* q, int64_t stride, float* mixed) {
        count_ = std::min(LANES, rows * h.group() - first);
        plan(view, h, slot, first);
        const int64_t base = layer * view.layer_stride + (slot.place * h.kv + kv_head) * view.capacity * h.size;
        transpose(h, kv_head, first, q, stride);
        score(view.keys + base, h);
        soften();
        mix(view.values + base, h, kv_head, first, mixed);
    }

   private:
    int count_ = 0;
    std::vector<int64_t> columns_;  // in the order of positions
    std::vector<Ints> hidden_;      // per column, lanes that do not see it; only from `masked_` on
    size_t masked_ = 0;
    std::vector<Ints> queries_;   // [D / 2]: pairs of dimensions, a lane per query
    std::vector<Floats> weights_; // per column
    Floats total_;

    void plan(const View& view, const Heads& h, const Slot& slot, int first) {
        columns_.clear();
        hidden_.clear();
        Ints depth;
        int last = 0;
        for (int i = 0; i < LANES; i++) depth[i] = slot.depth[row_of(h, first, i)];
        int64_t lowest = 0;
        if (view.window) {
            int nearest = depth[0], farthest = depth[0];
            for (int i = 1; i < count_; i++) nearest = std::min(nearest, depth[i]), farthest = std::max(farthest, depth[i]);
            auto begins = [&](int at) { return std::clamp<int64_t>(slot.length + at - view.window + 1, 0, slot.length); };
            lowest = begins(nearest);
            masked_ = begins(farthest) > lowest ? 0 : slot.length - lowest;
        } else {
            masked_ = slot.length;
        }
        for (int64_t at = lowest; at < slot.length; at++) {
            columns_.push_back(at % view.capacity);
            if (columns_.size() > masked_)
                hidden_.push_back(int32_t(at - slot.length) <= depth - view.window);
        }
        for (int i = 0; i < count_; i++)
            for (int c = slot.columns - 1; c >= last; c--)
                if (slot.visible[int64_t(row_of(h, first, i)) * slot.columns + c]) last = c + 1;
        for (int c = 0; c < last; c++) {
            columns_.push_back((slot.length + c) % view.capacity);
            Ints hides;
            for (int i = 0; i < LANES; i++) hides[i] = -!slot.visible[int64_t(row_of(h, first, i)) * slot.columns + c];
            if (view.window) hides |= slot.below[c] <= depth - view.window;
            hidden_.push_back(hides);
        }
    }

    // Lanes beyond the last query repeat it.
    int row_of(const Heads& h, int first, int lane) const { return (first + std::min(lane, count_ - 1)) / h.group(); }

    // Where a lane's query begins, in rows of `stride`.
    int64_t at(const Heads& h, int kv_head, int first, int lane, int64_t stride) const {
        int query = first + std::min(lane, count_ - 1);
        return query / h.group() * stride + (kv_head * h.group() + query % h.group()) * h.size;
    }

    void transpose(const Heads& h, int kv_head, int first, const bf16* q, int64_t stride) {
        queries_.resize(h.size / 2);
        for (int lane = 0; lane < LANES; lane++) {
            const bf16* from = q + at(h, kv_head, first, lane, stride);
            for (int d = 0; d < h.size / 2; d++) queries_[d][lane] = load<int32_t>(from + 2 * d);
        }
    }

    void score(const bf16* keys, const Heads& h) {
        constexpr int AT_ONCE = 8;
        size_t n = columns_.size();
        weights_.resize(n);
        for (size_t c = 0; c < n; c += AT_ONCE) {
            const bf16* k[AT_ONCE];
            for (int j = 0; j < AT_ONCE; j++) k[j] = keys + columns_[std::min(c + j, n - 1)] * h.size;
            Floats dots[AT_ONCE] = {};
            for (int d = 0; d < h.size / 2; d++)
                for (int j = 0; j < AT_ONCE; j++) dots[j] = dot2(dots[j], queries_[d], load<int32_t>(k[j] + 2 * d));
            for (size_t j = 0; j < AT_ONCE && c + j < n; j++) {
                Floats s = dots[j] * h.scale;
                if (h.softcap > 0) s = hyperbolic_tangent(s / h.softcap) * h.softcap;
                if (c + j >= masked_) s = hidden_[c + j - masked_] ? all(-INFINITY) : s;
                weights_[c + j] = s;
            }
        }
    }

    void soften() {
        Floats top = all(-INFINITY);
        for (Floats s : weights_) top = s > top ? s : top;
        total_ = Floats{};
        for (Floats& s : weights_) {
            s = exponential(s - top);
            total_ += s;
        }
    }

    static constexpr int QUERIES = 5, WIDTH = 4;  // 20 of 32 registers hold sums

    void mix(const bf16* values, const Heads& h, int kv_head, int first, float* mixed) const {
        const int64_t stride = h.query * h.size;
        for (int lane = 0; lane < count_; lane += QUERIES) {
            float* to[QUERIES];
            for (int i = 0; i < QUERIES; i++) to[i] = mixed + at(h, kv_head, first, lane + i, stride);
            int d = 0;
            for (; d + WIDTH * LANES <= h.size; d += WIDTH * LANES) gather<WIDTH>(values + d, h.size, lane, to, d);
            for (; d < h.size; d += LANES) gather<1>(values + d, h.size, lane, to, d);
        }
    }

    template <int N>
    void gather(const bf16* values, int size, int lane, float* const* to, int d) const {
        Floats sums[QUERIES][N] = {};
        int lanes[QUERIES];
        for (int i = 0; i < QUERIES; i++) lanes[i] = std::min(lane + i, count_ - 1);
        auto add = [&](size_t begin, size_t end, auto masked) {
            for (size_t c = begin; c < end; c++) {
                const bf16* from = values + columns_[c] * size;
                const Floats w = weights_[c];
                Floats v[N];
                for (int j = 0; j < N; j++) v[j] = widen(from + j * LANES);
                for (int i = 0; i < QUERIES; i++) {
                    // A weight of 0 would do, were it not that 0 times what is not finite is NaN.
                    if (masked && hidden_[c - masked_][lanes[i]]) continue;
                    for (int j = 0; j < N; j++) sums[i][j] = fma(all(w[lanes[i]]), v[j], sums[i][j]);
                }
            }
        };
        const size_t open = std::min(masked_, columns_.size());
        add(0, open, std::false_type{});
        add(open, columns_.size(), std::true_type{});
        for (int i = 0; i < QUERIES; i++)
            for (int j = 0; j < N; j++) store(to[i] + d + j * LANES, sums[i][j] / total_[lanes[i]]);
    }
};

}  // namespace paceline
