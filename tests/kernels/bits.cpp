// Runs the kernels on fixed numbers and prints a name and a hash per result: `test_bits.py` compares them between instruction
// sets, emulated ones too. Linked with the library, which is compiled as users have it.
#include <cstdio>
#include <string>

#include "layer.h"

using namespace paceline;

extern "C" {
int paceline_layers(const Layer*, int, const Pass*, int, void*, const void*, int, const int32_t*, int, void*);
int paceline_candidates(const float*, const int64_t*, int, uint64_t, float, float, int64_t*);
int paceline_norm(const void*, int, int, int64_t, const float*, float, void*);
int paceline_linear(const Matrix*, const void*, int, int, const int64_t*, int, void*, int, const bf16*, int);
int64_t paceline_bytes(int, int, int);
int paceline_pack(int, int, int, const uint8_t* const*, const int32_t*, uint8_t*, int);
int paceline_kind(int);
void paceline_rows(const Matrix*, const int64_t*, int64_t, float*);
void paceline_read_rows(const uint8_t* const*, const int32_t*, int64_t, int, float*);
void paceline_softcap(float*, int64_t, float);
}

namespace {

// --- fixed numbers, and hashes --------------------------------------------------------------------------------------

struct Random {
    uint64_t state;

    explicit Random(uint64_t seed) : state(seed * 2 + 1) {}
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint64_t x = (state >> 33 ^ state) * 0xff51afd7ed558ccdu;
        return uint32_t(x >> 32);
    }
    // From -1 to 1: exact in any arithmetic.
    float number() { return (int32_t(bits() >> 7) - (1 << 24)) * 0x1p-24f; }
};

std::vector<float> numbers(size_t count, uint64_t seed, float size = 1) {
    Random random(seed);
    std::vector<float> x(count);
    for (float& one : x) one = random.number() * size;
    return x;
}

std::vector<bf16> rounded_numbers(const std::vector<float>& x) {
    std::vector<bf16> y;
    for (float one : x) y.push_back(narrowed(one));
    return y;
}

template <class T>
void report(const std::string& name, const std::vector<T>& result) {
    // Two processors' NaN may differ, and would prove nothing.
    for (T x : result)
        if (x != x) return void(std::printf("%s\tNaN\n", name.c_str()));
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < result.size() * sizeof(T); i++)
        hash = (hash ^ reinterpret_cast<const uint8_t*>(result.data())[i]) * 0x100000001b3u;
    std::printf("%s\t%016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

// --- matrices -------------------------------------------------------------------------------------------------------

// A ggml type, and where its blocks have halves.
struct Source {
    const char* name;
    int type, bytes, elements;
    std::vector<int> halves;
};

const Source SOURCES[] = {
    {"F32", 0, 4, 1, {}},
    {"F16", 1, 2, 1, {0}},
    {"BF16", 30, 2, 1, {}},
    {"Q4_0", 2, 18, 32, {0}},
    {"Q4_1", 3, 20, 32, {0, 2}},
    {"Q5_0", 6, 22, 32, {0}},
    {"Q5_1", 7, 24, 32, {0, 2}},
    {"Q8_0", 8, 34, 32, {0}},
    {"Q2_K", 10, 84, 256, {80, 82}},
    {"Q3_K", 11, 110, 256, {108}},
    {"Q4_K", 12, 144, 256, {0, 2}},
    {"Q5_K", 13, 176, 256, {0, 2}},
    {"Q6_K", 14, 210, 256, {208}},
    {"IQ4_NL", 20, 18, 32, {0}},
    {"IQ4_XS", 23, 136, 256, {0}},
    {"MXFP4", 39, 17, 32, {}},
};
const Source &F32_SOURCE = SOURCES[0], &Q8_SOURCE = SOURCES[7], &Q4_K_SOURCE = SOURCES[10], &Q6_K_SOURCE = SOURCES[12];

// A matrix, packed from rows of its own.
struct Packed {
    std::vector<uint8_t> source, packed;
    std::vector<const uint8_t*> rows;
    std::vector<int32_t> types;
    std::vector<float> bias;
    Matrix matrix;

    // `kind`: 0 for the type's own.
    Packed(const Source& from, int kind, int out, int in, uint64_t seed, float size = 0.05f)
        : types(out, from.type), bias(numbers(padded_size(out), seed + 1)) {
        const size_t blocks = size_t(out) * in / from.elements;
        Random random(seed);
        for (size_t block = 0; block < blocks; block++) {
            const size_t at = source.size();
            for (int i = 0; i < from.bytes; i++) source.push_back(uint8_t(random.bits() >> 24));
            auto put = [&](int offset, auto x) { std::memcpy(&source[at + offset], &x, sizeof x); };
            for (int offset : from.halves) put(offset, half_of(random.number() * size));
            if (from.type == 0) put(0, random.number() * size);
            if (from.type == 30) put(0, narrowed(random.number() * size));
            if (from.type == 39) put(0, uint8_t(120 + random.bits() % 8));
        }
        for (int row = 0; row < out; row++) rows.push_back(&source[size_t(row) * in / from.elements * from.bytes]);
        if (!kind) kind = from.type == 0 ? F32 : from.type == 1 ? F16 : from.type == 30 ? BF16 : paceline_kind(from.type);
        const int width = (in + GROUP - 1) / GROUP * GROUP;
        packed.resize(paceline_bytes(kind, out, width));
        if (paceline_pack(kind, out, in, rows.data(), types.data(), packed.data(), 1)) std::puts("pack\tfailed");
        matrix = {kind, out, width, packed.data(), bias.data()};
    }

    static half half_of(float x) {
        half y[LANES];
        to_half(y, all(x));
        return y[0];
    }
};

void products_of(const std::string& name, const Packed& w, int in, std::initializer_list<float> sizes) {
    std::vector<float> y;
    for (int i = 0; i < 10 * int(sizes.size()); i++) {
        const int rows = i % 10 < 9 ? i % 10 + 1 : 29;
        const float size = sizes.begin()[i / 10];
        const auto x = numbers(size_t(rows) * in, rows, size);
        const auto narrow = rounded_numbers(x);
        std::vector<float> own(size_t(rows) * w.matrix.out);
        std::vector<bf16> residual(own.size(), narrowed(0.37f)), last(own.size());
        Matrix matrix = w.matrix;
        if (i % 2) matrix.bias = nullptr;  // beside which small sums would not show
        paceline_linear(&matrix, x.data(), 1, in, nullptr, rows, own.data(), 1, nullptr, 2);
        paceline_linear(&matrix, narrow.data(), 0, in, nullptr, rows, last.data(), 0, residual.data(), 1);
        y.insert(y.end(), own.begin(), own.end());
        for (bf16 one : last) y.push_back(widened(one));
    }
    report("product " + name, y);
}

void matrices() {
    for (const Source& source : SOURCES) {
        const int in = source.elements == 256 ? 512 : source.elements == 32 ? 96 : 75, out = 37;
        const Packed w(source, 0, out, in, 5);
        report(std::string("packed ") + source.name, w.packed);
        std::vector<float> back(size_t(out) * w.matrix.in), read(size_t(out) * in);
        std::vector<int64_t> all_rows;
        for (int row = 0; row < out; row++) all_rows.push_back(row);
        paceline_rows(&w.matrix, all_rows.data(), out, back.data());
        paceline_read_rows(w.rows.data(), w.types.data(), out, in, read.data());
        report(std::string("rows ") + source.name, back);
        report(std::string("read ") + source.name, read);
        products_of(source.name, w, in, {1.0f, 1e-3f, 1e4f});
    }
    for (const Source* source : {&F32_SOURCE, &Q6_K_SOURCE})
        for (int kind : {int(INT8), int(INT4_OFFSET), int(IQ4_NL), int(BF16), int(F16), int(F32)}) {
            const Packed w(*source, kind, 37, 256, 6);
            const std::string name = std::string(source->name) + " to " + std::to_string(kind);
            report("packed " + name, w.packed);
            products_of(name, w, 256, {1});
        }
    // Sums below 2^-126, where AVX-512 BF16 has 0.
    products_of("BF16 vanishing", Packed(SOURCES[2], 0, 37, 64, 7, 1e-20f), 64, {1e-20f});
}

// --- functions ------------------------------------------------------------------------------------------------------

template <class F>
void function(const char* name, F f) {
    std::vector<float> y(1 << 17);
    Random random(3);
    for (size_t i = 0; i < y.size(); i += LANES) {
        float x[LANES];
        for (float& one : x) one = random.number() * (1 << i % 8);
        if (i == 0) x[0] = 0, x[1] = INFINITY, x[2] = -INFINITY, x[3] = 1e-40f, x[4] = 1e30f, x[5] = -1e30f, x[6] = 4;
        store(&y[i], f(load<Floats>(x)));
    }
    report(std::string("function ") + name, y);
}

void functions() {
    function("exponential", exponential);
    function("power_of_two", [](const Floats& x) { return power_of_two(select(x > 127.0f, all(127.0f), x)); });
    function("hyperbolic_tangent", hyperbolic_tangent);
    function("error_function", error_function);
    // Not for infinity, which is times 0 here.
    auto bounded = [](const Floats& x) { return select(x > -1e9f, select(x < 1e9f, x, all(1e9f)), all(-1e9f)); };
    for (int kind : {SILU, GELU, GELU_TANH})
        function(("activation " + std::to_string(kind)).c_str(), [&](const Floats& x) { return activate(kind, bounded(x)); });
    function("to float16 and back", [](const Floats& x) {
        half y[LANES];
        to_half(y, x);
        return from_half(y);
    });
    function("to bfloat16 and back", [](const Floats& x) {
        bf16 y[LANES];
        paceline::narrow(y, x);
        return widen(y);
    });
    auto x = numbers(1000, 8, 30);
    paceline_softcap(x.data(), 1000, 20);
    report("softcap", x);
    for (float size : {1.0f, 1e-18f, 1e15f}) {
        const auto rows = rounded_numbers(numbers(5 * 77, 9, size));
        auto weight = numbers(padded_size(77), 10);
        std::vector<bf16> y(rows.size());
        paceline_norm(rows.data(), BF16, 77, 5, weight.data(), 1e-5f, y.data());
        report("norm of " + std::to_string(size), y);
    }
    const auto scores = numbers(5000, 11, 8);
    std::vector<int64_t> found(scores.size());
    found.resize(paceline_candidates(scores.data(), nullptr, 5000, 0x1234567890abcdef, 6, 22.87f, found.data()));
    report("candidates", found);
    for (int used : {1, 2, 4})
        for (bool scored : {false, true}) {
            const auto bias = numbers(40, 12);
            const Routing routing = scored ? Routing{40, used, used > 1, 1, 5, 2, 2, 1, bias.data(), bias.data()}
                                           : Routing{40, used, used > 1, 0, 0, 0, 0, 0, nullptr, nullptr};
            std::vector<int32_t> chosen(routing.per_row());
            std::vector<float> parts(routing.per_row()), ties(3 * routing.padded_experts());
            for (int i = 0; i < 40; i++) ties[i] = float(i * 7 % 11);
            choose(ties.data(), routing, chosen.data(), parts.data());
            const std::string name = "experts " + std::to_string(used) + (scored ? " by sigmoid, of groups" : "");
            report(name, chosen);
            report("parts of " + name, parts);
        }
}

// --- layers, with attention -----------------------------------------------------------------------------------------

// What differs between models.
struct Model {
    const char* name;
    Activation activation;
    int head_dim, window, experts;
    float softcap;
    bool norms;
    int shared;  // 1: the last of the experts is every row's, and the others are chosen by sigmoid
    int given;   // size of token embeddings; with them, values are normed keys, and a second layer reads the first one's
    int gated;   // 1: attention is gated, and a recurrent layer follows
};

const Model MODELS[] = {
    {"llama", SILU, 64, 0, 1, 0, false, 0},
    {"gemma", GELU_TANH, 64, 24, 1, 20, true, 0},
    {"odd heads", GELU, 40, 0, 1, 0, false, 0},
    {"mixture", SILU, 64, 0, 4, 0, true, 0},
    {"mixture by sigmoid", SILU, 64, 0, 5, 0, true, 1},
    {"gpt-oss", CLAMPED, 64, 24, 1, 0, false, 0},  // with sinks
    {"gemma 4", GELU_TANH, 64, 24, 1, 0, true, 0, 40},
    {"qwen 3.5", SILU, 40, 0, 1, 0, true, 0, 0, 1},
};

constexpr int HIDDEN = 256, FFN = 256, QUERY = 4, KV = 2, CAPACITY = 2048, LONG = 1500;

// Keys or values of a cache.
template <class Stored>
std::vector<typename Stored::Number> stored_lines(int count, int size, uint64_t seed) {
    const auto x = numbers(size_t(count) * size, seed);
    std::vector<typename Stored::Number> lines(count * Stored::line_length(size));
    for (int i = 0; i < count; i++) Stored::write(&lines[i * Stored::line_length(size)], &x[size_t(i) * size], size);
    return lines;
}

// A recurrent layer's mixer and its state, of sizes that fill no whole lanes.
class Recurrence {
   public:
    static constexpr int HEADS = 6, KEY_HEADS = 3, KEYS = 24, VALUES = 48, WIDTH = 4, CHANNELS = 2 * KEY_HEADS * KEYS + HEADS * VALUES;

    Recurrence() {
        for (float& rate : rate_) rate = -1 - rate;
        const MatrixState state{weight_.data(), nullptr, HEADS, KEY_HEADS, KEYS, VALUES, WIDTH, 1, 1};
        net = {share_.matrix, step_.matrix, rate_.data(), bias_.data(), unit_.data(), unit_.data(), norm_.data(), state, 1e-6f, 1e-6f};
    }

    // The rows of a pass: a chain, or a binary tree.
    Stretch stretch(int rows, bool tree) {
        parents_.clear(), history_.clear();
        for (int row = 0; row < rows; row++) {
            parents_.push_back(tree && row ? (row - 1) / 2 : row - 1);
            for (int i = 0; i < WIDTH; i++) {
                int back = WIDTH - 1 - i, at = row;
                while (back && at >= 0) at = parents_[at], back--;
                history_.push_back(WIDTH - 1 + at - back);
            }
        }
        entries_.resize(rows * CHANNELS), decay_.resize(rows * HEADS), keys_.resize(rows * KEY_HEADS * KEYS), changes_.resize(rows * HEADS * VALUES);
        return {0, rows, 0, parents_.data(), history_.data(), before_[0].data(), before_[1].data(), entries_.data(), decay_.data(),
                keys_.data(), changes_.data(), tree ? nullptr : after_[0].data(), tree ? nullptr : after_[1].data()};
    }

    void advance() {
        for (int i = 0; i < 2; i++) before_[i].swap(after_[i]);
    }

    DeltaNet net;

   private:
    Packed share_{F32_SOURCE, F32, HEADS, HIDDEN, 70}, step_{F32_SOURCE, F32, HEADS, HIDDEN, 71};
    std::vector<float> unit_ = std::vector<float>(padded_size(KEYS), 0.2f);  // longer keys let the state grow without bound
    std::vector<float> rate_ = numbers(LANES, 72), bias_ = numbers(LANES, 73), norm_ = numbers(VALUES, 74), weight_ = numbers(WIDTH * CHANNELS, 75);
    std::vector<float> before_[2] = {numbers((WIDTH - 1) * CHANNELS, 76), numbers(HEADS * KEYS * VALUES, 77)}, after_[2] = {before_[0], before_[1]};
    std::vector<float> entries_, decay_, keys_, changes_;
    std::vector<int32_t> parents_;
    std::vector<int64_t> history_;
};

template <class Element, class Stored>
class Text {
    using Number = typename Element::Number;

   public:
    Text(const Model& model, const Source& codes, int kind, const Source& head)
        : size_(padded_size(model.head_dim)), mix_(QUERY * model.head_dim), given_(model.given), gated_(model.gated),
          qkv_(codes, kind, (QUERY * (1 + gated_) + (given_ ? KV : 2 * KV)) * model.head_dim, HIDDEN, 20), query_(codes, kind, mix_, HIDDEN, 27),
          gate_(codes, kind, given_ ? given_ : LANES, HIDDEN, 28), embedding_(F32_SOURCE, F32, HIDDEN, given_ ? given_ : LANES, 29),
          out_(mix_ % 256 && head.elements == 256 ? Q8_SOURCE : head, kind, HIDDEN, mix_, 21), router_(F32_SOURCE, F32, model.experts - model.shared, HIDDEN, 22, 1),
          first_(codes, kind, gated_ ? recurrence_.net.projection_width() : LANES, HIDDEN, 18),
          last_(head.elements == 256 ? Q8_SOURCE : head, kind, HIDDEN, Recurrence::HEADS * Recurrence::VALUES, 19),
          norm_(numbers(HIDDEN, 23)), rotation_(numbers(2 * CAPACITY * model.head_dim, 24)),
          keys_(KV * CAPACITY * Stored::line_length(size_)), values_(keys_.size()) {
        for (float& w : norm_) w += 1;
        for (int i = 0; i < model.experts; i++) {
            gate_up_.emplace_back(codes, kind, 2 * FFN, HIDDEN, 30 + i), down_.emplace_back(head, kind, HIDDEN, FFN, 40 + i);
            experts_.push_back({gate_up_.back().matrix, down_.back().matrix});
        }
        const float* inner = model.norms ? norm_.data() : nullptr;
        const int groups = 2 * model.shared;
        const Routing routing{model.experts - model.shared, model.experts > 1 ? 2 : 1, 1, model.shared, groups, groups / 2, 1,
                              model.shared, nullptr, nullptr};
        layers_[0] = {qkv_.matrix, out_.matrix, model.experts > 1 ? router_.matrix : Matrix{}, given_ ? gate_.matrix : Matrix{}, embedding_.matrix, experts_.data(), routing,
                      norm_.data(), inner, norm_.data(), inner, inner, inner, inner, given_ ? inner : nullptr,
                      1e-6f, 1.0f, given_ ? 0.7f : 1.0f, HIDDEN, FFN, model.activation, model.head_dim, 0, KV, given_ ? 0 : KV, 0, 0, 0, 0,
                      {QUERY, KV, size_, 0.125f, model.softcap, model.activation == CLAMPED ? norm_.data() : nullptr}};
        layers_[0].gated_attention = gated_, layers_[0].gated_ffn = 1, layers_[1] = layers_[0];
        if (gated_) {
            layers_[1].qkv = first_.matrix, layers_[1].out = last_.matrix, layers_[1].delta = &recurrence_.net;
            layers_[1].head_dim = Recurrence::VALUES, layers_[1].heads = {Recurrence::HEADS, 0, padded_size(Recurrence::VALUES)};
        } else {
            layers_[1].qkv = query_.matrix, layers_[1].key_heads = 0, layers_[1].token_offset = given_;
        }
        view_.window = model.window, view_.kind = kind_of<Stored>();
    }

    // Some passes over a text: a prompt, single rows, and trees of which nothing is kept.
    std::vector<float> run(int threads) {
        std::vector<float> y;
        for (int rows : {70, 1, 1, 2, 5, 9, 40, 3}) pass(rows, rows > 4 && rows < 10, threads, y);
        return y;
    }

    // The same after a text of several blocks, up to the end of the cache's ring and over it.
    std::vector<float> run_long(int threads) {
        std::vector<float> y;
        keys_ = stored_lines<Stored>(KV * CAPACITY, size_, 25), values_ = stored_lines<Stored>(KV * CAPACITY, size_, 26);
        for (int length : {LONG, view_.window ? 3 * CAPACITY - 4 : CAPACITY - 17}) {
            length_ = length;
            for (int rows : {1, 5, 9}) pass(rows, rows == 5, threads, y);
        }
        return y;
    }

   private:
    int size_, mix_, given_, gated_, length_ = 0;
    Packed qkv_, query_, gate_, embedding_, out_, router_;
    Recurrence recurrence_;
    Packed first_, last_;
    std::vector<Packed> gate_up_, down_;
    std::vector<Expert> experts_;
    std::vector<float> norm_, rotation_;
    std::vector<typename Stored::Number> keys_, values_;
    Layer layers_[2];
    View view_{};

    void pass(int rows, bool tree, int threads, std::vector<float>& y) {
        std::vector<uint8_t> visible(size_t(rows) * rows);
        std::vector<int32_t> depth(rows);
        std::vector<int64_t> indices(rows);
        std::vector<Write> stores(rows);
        for (int row = 0; row < rows; row++) {
            const int parent = tree ? (row - 1) / 2 : row - 1;
            if (row) std::copy_n(&visible[size_t(parent) * rows], rows, &visible[size_t(row) * rows]), depth[row] = depth[parent] + 1;
            visible[size_t(row) * rows + row] = 1, indices[row] = row, stores[row] = {row, row};
        }
        const Slot slot{keys_.data(), values_.data(), int64_t(keys_.size()), CAPACITY, length_, 0, rows, rows, 0, rows, 0,
                        stores.data(), nullptr, visible.data(), depth.data(), depth.data()};
        view_.slots = &slot;
        const Rotation rotation{rotation_.data(), rotation_.data() + rotation_.size() / 2, layers_->head_dim};
        auto x = drawn(rows * HIDDEN, 50 + length_), embeddings = drawn(rows * 2 * given_, 51 + length_);
        const Stretch stretch = recurrence_.stretch(rows, tree);
        const Pass pass{1, rows, rows, threads, indices.data(), &view_, &rotation, nullptr, 0, 2 * given_, embeddings.data(), nullptr, nullptr, &stretch, 1};
        if (paceline_layers(layers_, given_ || gated_ ? 2 : 1, &pass, kind_of<Element>(), x.data(), nullptr, 0, nullptr, 0, nullptr)) std::puts("layers\tfailed");
        const size_t at = y.size();
        y.resize(at + x.size());
        for (size_t i = 0; i < x.size(); i += LANES) store(&y[at + i], Element::widen(&x[i]));
        if (!tree) length_ += rows, recurrence_.advance();
    }

    static std::vector<Number> drawn(int count, uint64_t seed) {
        const auto from = numbers(count, seed);
        std::vector<Number> x(count);
        for (int i = 0; i < count; i += LANES) Element::narrow(&x[i], load<Floats>(&from[i]));
        return x;
    }

    template <class Type>
    static int kind_of() {
        return std::is_same<Type, BFloat16>() ? BF16 : std::is_same<Type, Float16>() ? F16 : std::is_same<Type, Float32>() ? F32 : INT8;
    }
};

// `Stored`: type of keys and values.
template <class Element, class Stored = Element>
void layers_in(const std::string& dtype, const Source& own) {
    for (const Model& model : MODELS) {
        const std::string name = std::string(model.name) + " " + dtype;
        report("layer " + name, Text<Element, Stored>(model, own, 0, own).run(1));
        if (model.experts > 1) continue;  // experts are all of one kind
        for (int threads : {1, 3}) report("long text, threads: " + std::to_string(threads) + " " + name, Text<Element, Stored>(model, own, 0, own).run_long(threads));
        report("layer in codes " + name, Text<Element, Stored>(model, Q4_K_SOURCE, 0, Q6_K_SOURCE).run(2));
        report("layer in codes of 8 bits " + name, Text<Element, Stored>(model, F32_SOURCE, INT8, F32_SOURCE).run(1));
    }
}

// Attention by itself, with both kinds of products.
template <class Element>
void attention(const char* name) {
    constexpr int SIZE = 80, ROWS = 11, GROUP_SIZE = 3;
    auto keys = stored_lines<Element>(CAPACITY, SIZE, 60), values = stored_lines<Element>(CAPACITY, SIZE, 61);
    const auto q = numbers(ROWS * GROUP_SIZE * SIZE, 62);
    const std::vector<uint8_t> visible(ROWS * ROWS, 1);
    const std::vector<int32_t> depth(ROWS);
    Slot slot{};
    slot.keys = keys.data(), slot.values = values.data();
    slot.capacity = CAPACITY, slot.length = LONG, slot.rows = slot.columns = ROWS;
    slot.visible = visible.data(), slot.row_depth = slot.column_depth = depth.data();
    const View view{0, 0, 0, &slot};
    const Heads heads{GROUP_SIZE, 1, SIZE, 0.5f, 0, nullptr};
    const WorkItems items(view, 1, heads, 1);
    AttentionKernel<Element> kernel;
    kernel.reserve(view, heads, 1);
    std::vector<float> y(q.size());
    for (int i = 0; i < items.count(); i++) {
        const Positions positions = view.visible_positions(slot);
        kernel.begin(view, 0, heads, items[i], positions, q.data(), GROUP_SIZE * SIZE);
        for (int query = 0; query < items[i].count; query++) {
            SoftmaxState state;
            for (int block = 0; block < positions.blocks(); block++) {
                kernel.run(block);
                merge<Element>(state, &y[query * SIZE], kernel.state(query), kernel.weighted_values(query), SIZE);
            }
            normalise(&y[query * SIZE], state.denominator, SIZE);
        }
    }
    report(std::string("attention ") + name, y);
}

void layers() {
    attention<BFloat16>("of floats");
    attention<PairedBFloat16>("of pairs");
    attention<Int8>("of int8");
    layers_in<BFloat16>("bfloat16", SOURCES[2]);
    layers_in<Float16>("float16", SOURCES[1]);
    layers_in<Float32>("float32", F32_SOURCE);
    layers_in<BFloat16, Int8>("bfloat16 with int8 keys", SOURCES[2]);
    layers_in<Float32, Int8>("float32 with int8 keys", F32_SOURCE);
    layers_in<BFloat16, Float16>("bfloat16 with float16 keys", SOURCES[2]);
}

}  // namespace

int main() {
    matrices();
    functions();
    layers();
}
