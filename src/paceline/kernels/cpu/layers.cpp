// Entry points for Python: consecutive decoder layers over the rows of a pass, single linear layers, norms.
#include <algorithm>
#include <new>

#include "convolution.h"
#include "delta.h"
#include "exchange.h"
#include "groups.h"
#include "noise.h"
#include "floats.h"

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

using namespace paceline;

namespace {

// Arguments of `paceline_layers`.
template <class Element>
struct LayersCall {
    using Number = typename Element::Number;

    const Layer* layers;
    int count;
    Number* x;
    const Number* mixer_input;
    int mixer_width;
    const int32_t* taps;
    int tap_count;
    Number* states;

    template <class Scratch, class... More>
    void reserve(Scratch& scratch, const Pass& pass, More... more) const {
        for (int i = 0; i < count; i++) scratch.reserve(layers[i], pass, more...);
    }

    // Copies the inputs of the pass's rows.
    void enter(Scratch& s, const Pass& pass) const {
        const int hidden = layers->hidden;
        for (int row = 0; row < pass.rows; row++) {
            widen_row<Element>(&s.stream[int64_t(row) * padded_size(hidden)], x + pass.indices[row] * hidden, hidden);
            if (!mixer_input) continue;
            float* to = &s.mixer_input[int64_t(row) * padded_size(mixer_width)];
            widen_row<Element>(to, mixer_input + pass.indices[row] * mixer_width, mixer_width);
        }
    }

    // Runs layer i and copies the stream after it to `states` or x, if the caller needs it. Returns false if the all-reduce fails.
    bool layer(Scratch& s, const Pass& pass, int i, ThreadScratch* locals, Team& team) const {
        LayerTask<Element> task(layers[i], pass, s, locals, team);
        if (!task.run(i == 0 && mixer_input ? s.mixer_input.data() : nullptr, mixer_width)) return false;
        const int tap = int(std::find(taps, taps + tap_count, i + 1) - taps), hidden = layers->hidden;
        Number* to = tap < tap_count ? states + int64_t(tap) * pass.tensor_rows * hidden : i + 1 == count ? x : nullptr;
        for (int row = 0; to && row < pass.rows; row++)
            narrow_row<Element>(to + pass.indices[row] * hidden, &s.stream[int64_t(row) * padded_size(hidden)], hidden);
        return true;
    }
};

// Memory that a calling thread reuses for its next pass.
struct CallerState {
    Scratch scratch;
    Groups groups;
    std::vector<ThreadScratch> threads;
};

thread_local CallerState state_of_caller;

// Arguments of `paceline_attend`.
struct AttendArguments {
    const View* view;
    const Heads* heads;
    const int64_t* indices;    // index of each row in the tensors
    const void *q, *k, *v;     // [tensor rows, heads, D]
    void* output;              // [tensor rows, query heads, D]
    int32_t slots, rows, layer, head_dim, threads;  // `layer`: number of the layer in the view; `head_dim`: D
};

// Memory that a calling thread reuses for its next attention.
struct AttentionState {
    struct Local {
        AttentionKernels kernels;
        std::vector<float> head;
    };

    std::vector<float> queries, output, partials;
    std::vector<Local> locals;
};

thread_local AttentionState attention_of_caller;

// Copies head `head` of a row of x [tensor rows, heads, D] to y, padded.
template <class Element>
void load_head(float* y, const AttendArguments& a, const void* x, int row, int head, int heads) {
    widen_row<Element>(y, static_cast<const typename Element::Number*>(x) + (a.indices[row] * heads + head) * a.head_dim, a.head_dim);
}

template <class Element>
void store_rows(const AttendArguments& a, std::vector<AttentionState::Local>& locals, Team& team) {
    const int kv = a.heads->kv_heads;
    team.split(a.v ? 2 * kv : kv, [&](Range heads, int thread) {
        AttentionState::Local& local = locals[thread];
        for (int i = heads.from; i < heads.to; i++)  // keys, then values
            store_head(local.kernels, *a.view, a.slots, a.layer, *a.heads, i % kv, i >= kv, [&](int row) {
                load_head<Element>(local.head.data(), a, i < kv ? a.k : a.v, row, i % kv, kv);
                return local.head.data();
            });
    });
}

template <class Element>
int attend(const AttendArguments& a) {
    AttentionState& s = attention_of_caller;  // by reference: see `run_layers`
    const Heads& h = *a.heads;
    Team team(a.threads);
    const AttentionTask<Element> task(*a.view, a.slots, a.layer, h, team.count());
    try {
        grow(s.queries, a.rows, h.query_heads * h.padded_dim), grow(s.output, a.rows, h.query_heads * h.padded_dim);
        grow(s.partials, task.partials(a.rows), partial_size(h));
        if (s.locals.size() < size_t(team.count())) s.locals.resize(team.count());
        for (AttentionState::Local& local : s.locals) local.kernels.reserve(*a.view, h, a.slots), grow(local.head, 1, h.padded_dim);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    team.split(a.rows, [&](Range rows, int) {
        for (int i = rows.from * h.query_heads; i < rows.to * h.query_heads; i++)
            load_head<Element>(&s.queries[int64_t(i) * h.padded_dim], a, a.q, i / h.query_heads, i % h.query_heads, h.query_heads);
    });
    if (a.k) store_rows<Element>(a, s.locals, team);
    auto kernels_of = [&](int thread) -> AttentionKernels& { return s.locals[thread].kernels; };
    task.run(s.queries.data(), s.output.data(), s.partials.data(), a.rows, team, kernels_of);
    auto* output = static_cast<typename Element::Number*>(a.output);
    team.split(a.rows, [&](Range rows, int) {
        for (int i = rows.from * h.query_heads; i < rows.to * h.query_heads; i++) {
            const int64_t query = a.indices[i / h.query_heads] * h.query_heads + i % h.query_heads;  // in the tensor
            narrow_row<Element>(output + query * a.head_dim, &s.output[int64_t(i) * h.padded_dim], a.head_dim);
        }
    });
    return 0;
}

template <class Element>
int norm_rows(const void* x, int size, int64_t rows, const float* weight, float eps, void* y) {
    using Number = typename Element::Number;
    static thread_local std::vector<float> row;
    try {
        row.resize(std::max(row.size(), size_t(padded_size(size))));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    for (int64_t first = 0; first < rows * size; first += size) {
        widen_row<Element>(row.data(), static_cast<const Number*>(x) + first, size);
        normed(row.data(), row.data(), weight, size, eps);
        narrow_row<Element>(static_cast<Number*>(y) + first, row.data(), size);
    }
    return 0;
}

// Memory of one thread that multiplies the rows of a head.
struct HeadRows {
    Inputs inputs;
    std::vector<float> row;
};

thread_local std::vector<HeadRows> head_rows_of_caller;

template <class Element>
int multiply_heads(const Matrix& m, int heads, const void* x, int in, int rows, void* y, int threads) {
    using Number = typename Element::Number;
    std::vector<HeadRows>& locals = head_rows_of_caller;  // by reference: see `run_layers`
    Team team(threads);
    try {
        if (locals.size() < size_t(team.count())) locals.resize(team.count());
        for (HeadRows& local : locals) local.inputs.reserve(rows, m), grow(local.row, 1, padded_size(in));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    const int blocks = blocks_of(m) / heads;
    team.split(heads, [&](Range part, int thread) {
        HeadRows& local = locals[thread];
        for (int head = part.from; head < part.to; head++) {
            for (int row = 0; row < rows; row++) {
                widen_row<Element>(local.row.data(), static_cast<const Number*>(x) + (int64_t(row) * heads + head) * in, in);
                local.inputs.set({0, rows}, row, m, local.row.data(), padded_size(in), 0, padded_size(in));
            }
            product({head * blocks, (head + 1) * blocks}, m, local.inputs, {0, rows}, [&](int row, int at, Floats v) {
                Element::narrow(static_cast<Number*>(y) + int64_t(row) * m.out + at, v);
            });
        }
    });
    return 0;
}

bool cut(Groups& groups, const Pass& pass, const Layer* layers, int count) {
    if (pass.reduce) return false;  // all processes must exchange sums in the same order
    int views = 0;
    for (const Layer* l = layers; l < layers + count; l++) {
        // Groups do not help a mixture of experts, since each group would read the weights of nearly all experts. The stretches of a
        // recurrent layer cannot be cut, and a layer without a mixer has no views to cut.
        if (l->is_moe() || !l->attends() || l->is_parallel()) return false;
        views = std::max(views, l->view + 1);
    }
    return groups.cut(pass, views, count);
}

template <class Element>
int run_layers(const Layer* layers, int count, Pass pass, void* x, const void* mixer_input, int mixer_width, const int32_t* taps,
               int tap_count, void* states) {
    using Number = typename Element::Number;
    // A reference, since in a lambda that another thread runs, the thread_local name refers to that thread's state.
    CallerState& state = state_of_caller;
    Groups& groups = state.groups;
    const LayersCall<Element> call{layers, count, static_cast<Number*>(x), static_cast<const Number*>(mixer_input), mixer_width, taps, tap_count,
                           static_cast<Number*>(states)};
    // Feed-forward blocks of layers whose mixers torch runs are called one at a time, and are too many for a thread count each. All of them
    // use all threads.
    static const char without_mixer = 0;
    const bool mixes = std::any_of(layers, layers + count, [](const Layer& l) { return l.mixes(); });
    const void* work = mixes ? static_cast<const void*>(layers) : &without_mixer;
    Team team(pass.threads, work);
    pass.threads = team.count();
    bool in_groups = false;
    try {
        in_groups = cut(groups, pass, layers, count);
        if (!in_groups) call.reserve(state.scratch, pass, call.mixer_width);
        for (Group* group = groups.begin(); in_groups && group < groups.end(); group++)
            call.reserve(group->scratch, group->pass, call.mixer_width);
        if (state.threads.size() < size_t(pass.threads)) state.threads.resize(pass.threads);
        for (ThreadScratch& local : state.threads) call.reserve(local, pass);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    if (in_groups) {
        team.run(team.count(), [&](int, int thread) {
            Team alone;  // this thread runs all stages of its group
            for (Group* group = nullptr; (group = groups.next(group));) {
                if (!group->done) call.enter(group->scratch, group->pass);
                call.layer(group->scratch, group->pass, group->done, &state.threads[thread], alone);
            }
        });
    } else {
        call.enter(state.scratch, pass);
        for (int i = 0; i < count; i++)
            if (!call.layer(state.scratch, pass, i, state.threads.data(), team)) return 2;
    }
    if (mixes) team.passed(pass.rows);
    return 0;
}

}  // namespace

extern "C" {

// Names the instruction set that this library was compiled for.
EXPORTED const char* paceline_built_for() {
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
#elif defined(__SSE4_1__)
#define PACELINE_PROCESSOR "SSE4.1"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define PACELINE_PROCESSOR "NEON I8MM"
#elif defined(__ARM_FEATURE_DOTPROD)
#define PACELINE_PROCESSOR "NEON dot product"
#elif defined(__aarch64__)
#define PACELINE_PROCESSOR "NEON"
#else
#define PACELINE_PROCESSOR "generic instructions"
#endif
    return PACELINE_PROCESSOR;
}

// Runs the pass's rows of x [tensor rows, hidden] through `count` layers, in place.
// mixer_input [tensor rows, mixer_width]: input of the first layer's mixer; null means the normed stream.
// states [taps, tensor rows, hidden]: receives the stream after `taps[i]` layers (ascending, 1 to count - 1).
// element: type of all of these, as the `Kind` of its weights.
// Returns 1 if out of memory, 2 if `reduce` failed.
EXPORTED int paceline_layers(const Layer* layers, int count, const Pass* pass, int element, void* x, const void* mixer_input,
                             int mixer_width, const int32_t* taps, int tap_count, void* states) {
    mixer_width = mixer_input ? mixer_width : 0;
    switch (element) {
        case BF16: return run_layers<BFloat16>(layers, count, *pass, x, mixer_input, mixer_width, taps, tap_count, states);
        case F16: return run_layers<Float16>(layers, count, *pass, x, mixer_input, mixer_width, taps, tap_count, states);
        default: return run_layers<Float32>(layers, count, *pass, x, mixer_input, mixer_width, taps, tap_count, states);
    }
}

// Stores the keys and values of a pass's rows, unless `k` is null, and computes their attention in one layer. Keys are also the
// values if `v` is null and the view's keys and values are the same memory. Returns 1 if out of memory.
EXPORTED int paceline_attend(const AttendArguments* arguments, int element) {
    switch (element) {
        case BF16: return attend<BFloat16>(*arguments);
        case F16: return attend<Float16>(*arguments);
        default: return attend<Float32>(*arguments);
    }
}

// Number of groups into which `paceline_layers` would cut a pass, or 0 if it would not cut it. Used by tests.
EXPORTED int paceline_groups(const Layer* layers, int count, const Pass* pass) {
    Groups groups;
    cut(groups, *pass, layers, count);
    return groups.count();
}

// Size in bytes of the memory that the ranks of one machine share.
EXPORTED int64_t paceline_exchange_bytes(int ranks) { return Exchange::bytes(ranks); }

// See `Exchange::join`.
EXPORTED void paceline_join(const void* exchange) { static_cast<const Exchange*>(exchange)->join(); }

// See `Exchange::leave`.
EXPORTED void paceline_leave(const void* exchange) { static_cast<const Exchange*>(exchange)->leave(); }

// Adds the other ranks' numbers to x [n]. Returns 1 if one of them has ended or left.
EXPORTED int32_t paceline_sum(const void* exchange, float* x, int64_t n) {
    return static_cast<const Exchange*>(exchange)->sum(x, n) ? 0 : 1;
}

// See `candidates`.
EXPORTED int paceline_candidates(const float* scores, const int64_t* tokens, int n, uint64_t key, float bound,
                                 float highest, int64_t* found) {
    return candidates(scores, tokens, n, key, bound, highest, found);
}

// Returns 1 if out of memory.
EXPORTED int paceline_delta(const Delta* delta, int threads) {
    Team team(threads);
    std::vector<float> scratch;
    try {
        scratch.resize(size_t(team.count()) * delta->scratch_size());
    } catch (const std::bad_alloc&) {
        return 1;
    }
    team.split(delta->heads, [&](Range heads, int thread) {
        for (int head = heads.from; head < heads.to; head++) delta->run(head, &scratch[size_t(thread) * delta->scratch_size()]);
    });
    return 0;
}

// See `ShortConvolution`.
EXPORTED void paceline_convolve(const ShortConvolution* convolution, int threads) {
    Team team(threads);
    team.split(convolution->rows, [&](Range rows, int) {
        for (int row = rows.from; row < rows.to; row++) convolution->run(row, convolution->out + int64_t(row) * convolution->channels);
    });
}

// RMS norm: y [rows, size] = x / rms(x) * weight. `weight` is padded to whole lanes. element: type of x and y, as the `Kind`
// of its weights. Returns 1 if out of memory.
EXPORTED int paceline_norm(const void* x, int element, int size, int64_t rows, const float* weight, float eps, void* y) {
    switch (element) {
        case BF16: return norm_rows<BFloat16>(x, size, rows, weight, eps, y);
        case F16: return norm_rows<Float16>(x, size, rows, weight, eps, y);
        default: return norm_rows<Float32>(x, size, rows, weight, eps, y);
    }
}

// x [n] = cap * tanh(x / cap), in place.
EXPORTED void paceline_softcap(float* x, int64_t n, float cap) {
    for (int64_t i = 0; i < n; i += LANES) {
        float part[LANES] = {};
        const int count = int(std::min<int64_t>(LANES, n - i));
        std::copy_n(x + i, count, part);
        store(part, hyperbolic_tangent(load<Floats>(part) / cap) * cap);
        std::copy_n(part, count, x + i);
    }
}

// y [rows, blocks, 16] = the gated activation of x [rows, blocks, 2, 16], which holds gates and ups in turn.
EXPORTED void paceline_gated(const float* x, int activation, int rows, int blocks, float* y, int threads) {
    Team team(threads);
    team.split(rows, [&](Range range, int) {
        for (int64_t i = int64_t(range.from) * blocks * LANES, end = int64_t(range.to) * blocks * LANES; i < end; i += LANES)
            store(y + i, gated(activation, load<Floats>(x + 2 * i), load<Floats>(x + 2 * i + LANES)));
    });
}

// y [rows, out] = x [rows, in] W^T + b, plus `residual` unless it is null.
// x_is_float32, y_is_float32: 1 for float32, 0 for bfloat16.
// indices: the rows of x, y and `residual` to use; null means all rows in order.
// Returns 1 if out of memory.
EXPORTED int paceline_linear(const Matrix* m, const void* x, int x_is_float32, int in, const int64_t* indices, int rows, void* y,
                             int y_is_float32, const bf16* residual, int threads) {
    static thread_local Inputs inputs_of_caller;
    static thread_local std::vector<float> padded_row;
    Inputs& inputs = inputs_of_caller;
    try {
        inputs.reserve(rows, *m);
        padded_row.resize(std::max(padded_row.size(), size_t(padded_size(in))));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    auto index = [&](int row) { return indices ? indices[row] : int64_t(row); };
    for (int row = 0; row < rows; row++) {
        const int64_t first = index(row) * in;
        if (x_is_float32)
            copy_row(padded_row.data(), static_cast<const float*>(x) + first, in);
        else
            widen_row<BFloat16>(padded_row.data(), static_cast<const bf16*>(x) + first, in);
        inputs.set({0, rows}, row, *m, padded_row.data(), padded_size(in), 0, padded_size(in));
    }
    auto take = [&](int row, int at, Floats v) {
        for (int i = 0, n = std::min(LANES, m->out - at); i < n; i++) {
            const int64_t to = index(row) * m->out + at + i;
            const float value = residual ? v[i] + widened(residual[to]) : v[i];
            if (y_is_float32)
                static_cast<float*>(y)[to] = value;
            else
                static_cast<bf16*>(y)[to] = narrowed(value);
        }
    };
    Team team(threads);
    team.split(blocks_of(*m), [&](Range blocks, int) { product(blocks, *m, inputs, {0, rows}, take); });
    return 0;
}

// y [rows, heads, n] = x [rows, heads, in], where each head is multiplied by its own part [n, in] of W. n must be a multiple of 16.
// element: type of x and y, as the `Kind` of its weights. Returns 1 if out of memory.
EXPORTED int paceline_head_linear(const Matrix* m, int heads, const void* x, int element, int in, int rows, void* y, int threads) {
    switch (element) {
        case BF16: return multiply_heads<BFloat16>(*m, heads, x, in, rows, y, threads);
        case F16: return multiply_heads<Float16>(*m, heads, x, in, rows, y, threads);
        default: return multiply_heads<Float32>(*m, heads, x, in, rows, y, threads);
    }
}

// Bytes of a matrix, or -1 if the kind does not exist or does not support the width.
EXPORTED int64_t paceline_bytes(int kind, int out, int in) {
    int64_t block = 0;
    if (in > 0 && in % GROUP == 0) block = int64_t(in / GROUP) * float_group_bytes(kind);
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        block = in > 0 && in % F::UNIT == 0 ? int64_t(F::block_bytes(in)) : 0;
    });
    return out > 0 && block ? (int64_t(out) + LANES - 1) / LANES * block : -1;
}

// Packs a matrix into `to`, which has room for `paceline_bytes` of codes or for whole groups of floats. Row i has the ggml type
// types[i] and begins at rows[i]; null means zeros. Types other than the one that `kind` holds are converted to the nearest
// codes. Returns 1 if a type or the width is not supported, 2 if out of memory.
EXPORTED int paceline_pack(int kind, int out, int in, const uint8_t* const* rows, const int32_t* types, uint8_t* to,
                           int threads) {
    auto unchanged = [&](int type) { return kind_of_type(type) == kind; };
    auto coded = [&](int type) { return kind_of_type(type) != 0; };
    const bool converts = !std::all_of(types, types + out, unchanged), decodes = converts && std::any_of(types, types + out, coded);
    if (converts && !float_group_bytes(kind)) return 1;
    for (int i = 0; i < out; i++) {
        if (!is_float(types[i]) && paceline_bytes(kind_of_type(types[i]), LANES, in) < 0) return 1;
    }
    const int64_t blocks = (int64_t(out) + LANES - 1) / LANES, groups = (int64_t(in) + GROUP - 1) / GROUP;
    const int64_t bytes = paceline_bytes(kind, LANES, converts ? int(groups * GROUP) : in);
    if (bytes <= 0) return 1;
    Team team(threads);
    std::vector<float> decoded;
    try {
        decoded.resize(decodes ? size_t(team.count()) * LANES * in : 0);
    } catch (const std::bad_alloc&) {
        return 2;
    }
    team.split(int(blocks), [&](Range part, int thread) {
        float* scratch = decodes ? &decoded[size_t(thread) * LANES * in] : nullptr;
        for (int block = part.from; block < part.to; block++) {
            const int first = block * LANES, count = std::min(LANES, out - first);
            if (converts)
                pack_float_block(kind, {rows + first, types + first, count, in}, to + bytes * block, scratch);
            else
                pack_block(kind, in, rows + first, count, to + bytes * block);
        }
    });
    return 0;
}

// The kind of 4-bit codes for draft models. IQ4_NL's values are not evenly spaced, so they are multiplied as whole bytes, which is fast
// only on processors with byte dot products.
EXPORTED int paceline_fewest_bits() {
#if defined(PACELINE_VNNI) || defined(__ARM_FEATURE_DOTPROD)
    return IQ4_NL;
#else
    return INT4_OFFSET;
#endif
}

// The kind that holds a ggml type unchanged, or 0 if there is none.
EXPORTED int paceline_kind(int type) { return kind_of_type(type); }

// Reads rows of a matrix as float32 into `to` [count, in].
EXPORTED void paceline_rows(const Matrix* m, const int64_t* indices, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) row_of(*m, indices[i], to + i * m->in);
}

// Reads rows of `in` floats or codes in ggml's types as float32 into `to` [count, in].
EXPORTED void paceline_read_rows(const uint8_t* const* rows, const int32_t* types, int64_t count, int in, float* to) {
    for (int64_t row = 0; row < count; row++) read_row(to + row * in, types[row], rows[row], in);
}

}
