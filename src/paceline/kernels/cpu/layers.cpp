// A run of decoder layers over the rows of one pass, and single products: what the Python files of this folder call.
#include <algorithm>
#include <atomic>
#include <new>

#include "groups.h"
#include "noise.h"

using namespace paceline;

namespace {

void widen_all(float* to, const bf16* from, size_t count) {
    for (size_t i = 0; i < count; i += LANES) store(to + i, widen(from + i));
}

// What `paceline_layers` is asked for.
struct Run {
    const Layer* layers;
    int count;
    bf16* x;
    const bf16* entry;
    int width;
    const int32_t* taps;
    int tapped;
    bf16* heard;

    template <class Kept, class... More>
    void reserve(Kept& kept, const Pass& pass, More... more) const {
        for (int i = 0; i < count; i++) kept.reserve(layers[i], pass, more...);
    }

    void enter(Scratch& s, const Pass& pass) const {
        const int hidden = layers->hidden;
        for (int row = 0; row < pass.rows; row++) {
            widen_all(&s.stream[int64_t(row) * hidden], x + pass.lines[row] * hidden, hidden);
            if (entry) widen_all(&s.entry[int64_t(row) * width], entry + pass.lines[row] * width, width);
        }
    }

    // A thread's part of a layer, and of telling what comes out of it to those who want it.
    void layer(Scratch& s, const Pass& pass, int i, Own& own, const Team& team) const {
        Part(layers[i], pass, s, own, team).run(i || !entry ? nullptr : s.entry.data(), width);
        const int tap = int(std::find(taps, taps + tapped, i + 1) - taps), hidden = layers->hidden;
        bf16* to = tap < tapped ? heard + int64_t(tap) * pass.room * hidden : i + 1 == count ? x : nullptr;
        const Span mine = team.share(pass.rows);  // the rows that this thread has finished when a layer ends
        for (int row = mine.from; to && row < mine.to; row++) {
            const float* from = &s.stream[int64_t(row) * hidden];
            for (int d = 0; d < hidden; d += LANES) narrow(to + pass.lines[row] * hidden + d, load<Floats>(from + d));
        }
    }
};

// What a thread that runs passes keeps for the next.
struct Kept {
    Scratch scratch;
    Groups groups;
    Barrier barrier;
    std::vector<Own> own;  // of each thread
};

int views_of(const Layer* layers, int count) {
    int views = 0;
    for (const Layer* l = layers; l < layers + count; l++) views = std::max(views, l->view + 1);
    return views;
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
    // By reference: a name of thread_local would be each thread's own.
    static thread_local Kept kept_here;
    Kept& kept = kept_here;
    Groups& groups = kept.groups;
    const Run run{layers, count, x, entry, entry ? width : 0, taps, tapped, heard};
    bool apart = false;
    try {
        apart = groups.cut(*pass, views_of(layers, count), count);
        for (Group& group : groups) run.reserve(group.scratch, group.pass, run.width);
        if (!apart) run.reserve(kept.scratch, *pass, run.width);
        if (kept.own.size() < size_t(pass->threads)) kept.own.resize(pass->threads);
        for (Own& own : kept.own) run.reserve(own, *pass);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    if (!apart) run.enter(kept.scratch, *pass);
#pragma omp parallel num_threads(pass->threads)
    {
        const Team team = team_here(kept.barrier);
        Own& own = kept.own[team.me];
        for (int i = 0; i < count && !apart; i++) run.layer(kept.scratch, *pass, i, own, team);
        for (Group* group = nullptr; apart && (group = groups.next(group));) {
            if (!group->done) run.enter(group->scratch, group->pass);
            run.layer(group->scratch, group->pass, group->done, own, {0, 1, nullptr});
        }
    }
    return 0;
}

// Into how many groups `paceline_layers` would cut a pass; 0: none. For tests.
int paceline_groups(const Layer* layers, int count, const Pass* pass) {
    Groups groups;
    groups.cut(*pass, views_of(layers, count), count);
    return groups.count();
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
                    const bf16* residual, int threads) {
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
    auto take = [&](int row, int at, Floats v) {
        for (int i = 0, n = std::min(LANES, m->out - at); i < n; i++) {
            const int64_t to = line(row) * m->out + at + i;
            const float value = residual ? v[i] + widened(residual[to]) : v[i];
            if (wide_y)
                static_cast<float*>(y)[to] = value;
            else
                static_cast<bf16*>(y)[to] = narrowed(value);
        }
    };
    // Piece by piece, whoever comes: a thread that the system has put aside holds up no more than one.
    const int blocks = blocks_of(*m), piece = std::max(1, blocks / (16 * threads));
    std::atomic<int> next{0};
#pragma omp parallel num_threads(threads)
    for (int at; (at = next.fetch_add(piece)) < blocks;)
        product(Span{at, std::min(blocks, at + piece)}, *m, inputs, rows, take);
    return 0;
}

}
