// Entry points for Python: a run of decoder layers over the rows of one pass, single products, norms.
#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "groups.h"
#include "noise.h"
#include "floats.h"

using namespace paceline;

namespace {

void widen_all(float* to, const bf16* from, size_t count) {
    for (size_t i = 0; i < count; i += LANES) store(to + i, widen(from + i));
}

// Arguments of `paceline_layers`.
struct Run {
    const Layer* layers;
    int count;
    bf16* x;
    const bf16* entry;
    int width;
    const int32_t* taps;
    int tap_count;
    bf16* states;

    template <class Scratch, class... More>
    void reserve(Scratch& scratch, const Pass& pass, More... more) const {
        for (int i = 0; i < count; i++) scratch.reserve(layers[i], pass, more...);
    }

    void enter(Scratch& s, const Pass& pass) const {
        const int hidden = layers->hidden;
        for (int row = 0; row < pass.rows; row++) {
            widen_all(&s.stream[int64_t(row) * hidden], x + pass.indices[row] * hidden, hidden);
            if (entry) widen_all(&s.entry[int64_t(row) * width], entry + pass.indices[row] * width, width);
        }
    }

    // One thread's share of a layer, and of copying the stream after it to `states` or x.
    void layer(Scratch& s, const Pass& pass, int i, ThreadScratch& local, const Thread& thread) const {
        LayerTask(layers[i], pass, s, local, thread).run(i || !entry ? nullptr : s.entry.data(), width);
        const int tap = int(std::find(taps, taps + tap_count, i + 1) - taps), hidden = layers->hidden;
        bf16* to = tap < tap_count ? states + int64_t(tap) * pass.room * hidden : i + 1 == count ? x : nullptr;
        const Span mine = thread.share(pass.rows);  // rows finished by this thread when a layer ends
        for (int row = mine.from; to && row < mine.to; row++) {
            const float* from = &s.stream[int64_t(row) * hidden];
            for (int d = 0; d < hidden; d += LANES) narrow(to + pass.indices[row] * hidden + d, load<Floats>(from + d));
        }
    }
};

// Memory that a calling thread keeps for its next pass.
struct CallerState {
    Scratch scratch;
    Groups groups;
    Barrier barrier;
    std::vector<ThreadScratch> threads;
};

// Calls work(i) for 0 <= i < count, from several threads.
template <class Work>
inline void in_threads(int threads, int count, Work work) {
    std::atomic<int> next{0};
    auto run = [&] {
        for (int i; (i = next.fetch_add(1)) < count;) work(i);
    };
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < std::min(threads, count); i++) others.emplace_back(run);
    } catch (const std::exception&) {  // the system has no more threads or memory: the others do it
    }
    run();
    for (std::thread& other : others) other.join();
}

int views_of(const Layer* layers, int count) {
    int views = 0;
    for (const Layer* l = layers; l < layers + count; l++) views = std::max(views, l->view + 1);
    return views;
}

}  // namespace

extern "C" {

// Names the instructions that this was compiled for.
const char* paceline_built_for() {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define PACELINE_PROCESSOR "AVX-512 BF16/VNNI"
#elif defined(__AVX512VNNI__)
#define PACELINE_PROCESSOR "AVX-512 VNNI"
#elif defined(__AVX512F__)
#define PACELINE_PROCESSOR "AVX-512"
#elif defined(__AVXVNNI__)
#define PACELINE_PROCESSOR "AVX-VNNI"
#elif defined(__AVX2__)
#define PACELINE_PROCESSOR "AVX2"
#elif defined(__ARM_FEATURE_DOTPROD)
#define PACELINE_PROCESSOR "NEON"
#else
#define PACELINE_PROCESSOR "generic instructions"
#endif
#if defined(_OPENMP)
    return PACELINE_PROCESSOR;
#else
    return PACELINE_PROCESSOR ", one thread";
#endif
}

// Runs the pass's rows of x [room, hidden] through `count` layers, in place. `entry` [room, width]: input of the first
// attention; null: the normed stream. `states` [taps, room, hidden] gets the stream after `taps[i]` layers (ascending,
// each of 1 to count - 1). Returns 1 if out of memory.
int paceline_layers(const Layer* layers, int count, const Pass* pass, bf16* x, const bf16* entry, int width,
                    const int32_t* taps, int tap_count, bf16* states) {
    // By reference: inside the parallel region a thread_local name would mean each thread's own.
    static thread_local CallerState state_of_caller;
    CallerState& state = state_of_caller;
    Groups& groups = state.groups;
    const Run run{layers, count, x, entry, entry ? width : 0, taps, tap_count, states};
    bool apart = false;
    try {
        apart = groups.cut(*pass, views_of(layers, count), count);
        for (Group& group : groups) run.reserve(group.scratch, group.pass, run.width);
        if (!apart) run.reserve(state.scratch, *pass, run.width);
        if (state.threads.size() < size_t(pass->threads)) state.threads.resize(pass->threads);
        for (ThreadScratch& local : state.threads) run.reserve(local, *pass);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    if (!apart) run.enter(state.scratch, *pass);
#pragma omp parallel num_threads(pass->threads)
    {
        const Thread thread = this_thread(state.barrier);
        ThreadScratch& local = state.threads[thread.index];
        for (int i = 0; i < count && !apart; i++) run.layer(state.scratch, *pass, i, local, thread);
        for (Group* group = nullptr; apart && (group = groups.next(group));) {
            if (!group->done) run.enter(group->scratch, group->pass);
            run.layer(group->scratch, group->pass, group->done, local, {0, 1, nullptr});
        }
    }
    return 0;
}

// Number of groups that `paceline_layers` would cut a pass into; 0: none. For tests.
int paceline_groups(const Layer* layers, int count, const Pass* pass) {
    Groups groups;
    groups.cut(*pass, views_of(layers, count), count);
    return groups.count();
}

// See `candidates`.
int paceline_candidates(const float* scores, const int64_t* tokens, int n, uint64_t key, float bound, float highest,
                        int64_t* found) {
    return candidates(scores, tokens, n, key, bound, highest, found);
}

// RMS norm: y [rows, size] = x / rms(x) * weight, for whole lanes. Returns 1 if out of memory.
int paceline_norm(const bf16* x, int size, int64_t rows, const float* weight, float eps, bf16* y) {
    static thread_local std::vector<float> row;
    try {
        row.resize(std::max(row.size(), size_t(size)));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    for (int64_t first = 0; first < rows * size; first += size) {
        widen_all(row.data(), x + first, size);
        normed(row.data(), row.data(), weight, size, eps);
        for (int i = 0; i < size; i += LANES) narrow(y + first + i, load<Floats>(&row[i]));
    }
    return 0;
}

// y [rows, out] = x [rows, in] W^T + b, plus `residual` if given; bfloat16, but float32 for x and y if they are wide.
// `indices`: rows of x, y and `residual` to use; null: all in order. Returns 1 if out of memory.
int paceline_linear(const Matrix* m, const void* x, int wide_x, int in, const int64_t* indices, int rows, void* y, int wide_y,
                    const bf16* residual, int threads) {
    static thread_local Inputs inputs_of_caller;
    static thread_local std::vector<float> widened_row;
    Inputs& inputs = inputs_of_caller;
    try {
        inputs.reserve(rows, *m);
        widened_row.resize(std::max(widened_row.size(), size_t(in)));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    auto index = [&](int row) { return indices ? indices[row] : int64_t(row); };
    for (int row = 0; row < rows; row++) {
        const int64_t first = index(row) * in;
        if (!wide_x) widen_all(widened_row.data(), static_cast<const bf16*>(x) + first, in);
        inputs.set(row, *m, wide_x ? static_cast<const float*>(x) + first : widened_row.data(), in, 0, in);
    }
    auto take = [&](int row, int at, Floats v) {
        for (int i = 0, n = std::min(LANES, m->out - at); i < n; i++) {
            const int64_t to = index(row) * m->out + at + i;
            const float value = residual ? v[i] + widened(residual[to]) : v[i];
            if (wide_y)
                static_cast<float*>(y)[to] = value;
            else
                static_cast<bf16*>(y)[to] = narrowed(value);
        }
    };
    // Threads take piece after piece, so that one that the system has suspended delays no more than one piece.
    const int blocks = blocks_of(*m), piece = std::max(1, blocks / (16 * threads));
    std::atomic<int> next{0};
#pragma omp parallel num_threads(threads)
    for (int at; (at = next.fetch_add(piece)) < blocks;)
        product(Span{at, std::min(blocks, at + piece)}, *m, inputs, rows, take);
    return 0;
}

// Bytes of a matrix of codes; -1 for a kind or a width that there is not.
int64_t paceline_bytes(int kind, int out, int in) {
    int64_t bytes = -1;
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        if (out > 0 && in > 0 && in % F::UNIT == 0) bytes = int64_t((out + LANES - 1) / LANES) * F::block_bytes(in);
    });
    return bytes;
}

// Packs a matrix into `to`: the `paceline_bytes` of codes, or whole groups of bfloat16. Row i lies at rows[i], in the ggml
// type types[i]; null: zeros. Types: floats, or the one that `kind` holds. Returns 1 for another type, or for a width
// that it cannot have.
int paceline_pack(int kind, int out, int in, const uint8_t* const* rows, const int32_t* types, uint8_t* to, int threads) {
    const bool floats = std::all_of(types, types + out, is_float) && float_group_bytes(kind);
    for (int i = 0; i < out && !floats; i++)
        if (rows[i] && kind_of_type(types[i]) != kind) return 1;
    const int64_t width = (int64_t(in) + GROUP - 1) / GROUP, blocks = (int64_t(out) + LANES - 1) / LANES;
    const int64_t bytes = floats ? width * float_group_bytes(kind) : paceline_bytes(kind, out, in) / blocks;
    if (bytes <= 0) return 1;
    in_threads(threads, int(blocks), [&](int block) {
        const int first = block * LANES, count = std::min(LANES, out - first);
        if (floats)
            pack_float_block(kind, {rows + first, types + first, count, in}, to + bytes * block);
        else
            pack_block(kind, in, rows + first, count, to + bytes * block);
    });
    return 0;
}

// The kind that holds a ggml type as it is; 0: none.
int paceline_kind(int type) { return kind_of_type(type); }

// Rows of a matrix of codes, to [count, in], in float32.
void paceline_rows(const Matrix* m, const int64_t* indices, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) row_of(*m, indices[i], to + i * m->in);
}

// Rows of floats in ggml's types, each of `in` elements, as float32 [count, in].
void paceline_read_floats(const uint8_t* const* rows, const int32_t* types, int64_t count, int in, float* to) {
    for (int64_t row = 0; row < count; row++) read_row(to + row * in, types[row], rows[row], in);
}

}
