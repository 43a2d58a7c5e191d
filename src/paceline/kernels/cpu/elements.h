// Number types of the residual stream, and of keys and values: how to read, write and multiply them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "functions.h"

namespace paceline {

// A key or a value of floats in the cache.
template <class Own, class Number>
struct FloatLine {
    static constexpr bool SCALED = false;

    // Numbers of a line with `size` elements, and the index of its first element.
    static int64_t line_length(int size) { return size; }
    static int code_offset(int) { return 0; }

    static void write(Number* to, const float* x, int size) {
        for (int i = 0; i < size; i += LANES) Own::narrow(to + i, load<Floats>(x + i));
    }
};

// `Number` is the stored type. `Operand` and `Pairs` are operands of products (see `dot2`). Queries and attention weights are
// rounded like keys and values.
template <class OwnOperand, class OwnPairs>
struct BFloat16With : FloatLine<BFloat16With<OwnOperand, OwnPairs>, bf16> {
    using Number = bf16;
    using Operand = OwnOperand;
    using Pairs = OwnPairs;

    static Floats widen(const Number* from) { return paceline::widen(from); }
    static void narrow(Number* to, const Floats& v) { paceline::narrow(to, v); }
    static Floats power(const Floats& x) { return power_of_two(x); }

    static void operands(Operand* to, const Floats& v) {
        if constexpr (std::is_same<Operand, float>()) store(to, rounded_to_bf16(v));
        else paceline::narrow(to, v);
    }

    // Stores results of `power`. A NaN among them comes from keys or queries, so its low half is 0.
    static void weights(Operand* to, const Floats& w) {
        if constexpr (std::is_same<Operand, float>()) store(to, as<Floats>(rounded_weights(w)));
        else paceline::narrow(to, w);
    }

    // Transposes 8 numbers of each of 16 rows, `stride` apart, into 4 pairs with one lane per row.
    [[gnu::always_inline]] static void transpose(Pairs* pairs, const Number* rows, int64_t stride) {
        Ints lines[4];
        paceline::transpose(lines, rows, 2 * stride);
        for (int i = 0; i < 4; i++) pairs[i] = Pairs(lines[i]);
    }

    // Interleaves 16 N numbers of two rows.
    template <int N>
    [[gnu::always_inline]] static void interleave(Pairs* pairs, const Number* even, const Number* odd) {
        paceline::interleave<N>(pairs, even, odd);
    }
};

using BFloat16 = BFloat16With<float, WidePairs>;
#if defined(__AVX512BF16__)
// With AVX-512's instruction for products of pairs, see `multiplies_pairs`.
using PairedBFloat16 = BFloat16With<paceline::Operand, paceline::Pairs>;
#else
using PairedBFloat16 = BFloat16;
#endif

// Common code of number types that are widened to float for products.
template <class Own>
struct Widened {
    using Operand = float;
    using Pairs = WidePairs;

    static void operands(float* to, const Floats& v) { store(to, v); }
    static void weights(float* to, const Floats& w) { store(to, w); }
    static Floats power(const Floats& x) { return exponential(x * 0.69314718f); }

    template <int N, class Number>
    [[gnu::always_inline]] static void interleave(Pairs* pairs, const Number* even, const Number* odd) {
        for (int i = 0; i < N; i++) pairs[i] = {Own::widen(even + i * LANES), Own::widen(odd + i * LANES)};
    }
};

struct Float16 : Widened<Float16>, FloatLine<Float16, half> {
    using Number = half;

    static Floats widen(const Number* from) { return from_half(from); }
    static void narrow(Number* to, const Floats& v) { to_half(to, v); }

    [[gnu::always_inline]] static void transpose(Pairs* pairs, const Number* rows, int64_t stride) {
        Ints lines[4];
        paceline::transpose(lines, rows, 2 * stride);
        auto numbers = [](const Ints& x) {
            half part[LANES];
            store(part, convert<Shorts>(x));
            return from_half(part);
        };
        for (int i = 0; i < 4; i++) pairs[i] = {numbers(lines[i] & 0xffff), numbers((lines[i] >> 16) & 0xffff)};
    }
};

struct Float32 : Widened<Float32>, FloatLine<Float32, float> {
    using Number = float;

    static Floats widen(const Number* from) { return load<Floats>(from); }
    static void narrow(Number* to, const Floats& v) { store(to, v); }

    [[gnu::always_inline]] static void transpose(Pairs* pairs, const Number* rows, int64_t stride) {
        for (int half = 0; half < 2; half++) {
            Ints lines[4];
            paceline::transpose(lines, rows + 4 * half, 4 * stride);
            for (int i = 0; i < 2; i++) pairs[2 * half + i] = {as<Floats>(lines[2 * i]), as<Floats>(lines[2 * i + 1])};
        }
    }
};

// Keys and values as integers from -127 to 127 times a float32 scale for each block (cache/kv_types.py). The scales
// of a line come before its integers. Operands are floats, whatever the dtype of the model.
struct Int8 {
    using Number = int8_t;
    using Operand = float;
    using Pairs = WidePairs;

    static constexpr bool SCALED = true;
    static constexpr int BLOCK = 32;

    static Floats power(const Floats& x) { return power_of_two(x); }
    static void operands(float* to, const Floats& v) { store(to, v); }
    static void weights(float* to, const Floats& w) { store(to, w); }
    static int code_offset(int size) { return (size + BLOCK - 1) / BLOCK * int(sizeof(float)); }
    static int64_t line_length(int size) { return code_offset(size) + size; }
    static float scale(const Number* line, int d) { return read<float>(line + d / BLOCK * sizeof(float)); }

    // A block with infinities or NaN gets such a scale, and codes of 0.
    [[gnu::flatten]] static void write(Number* line, const float* x, int size) {
        Number* codes = line + code_offset(size);
        for (int from = 0; from < size; from += BLOCK) {
            const int to = std::min(from + BLOCK, size);
            Ints top{};  // as integers, NaN and infinity are the largest sizes
            for (int i = from; i < to; i += LANES) {
                const Ints bits = as<Ints>(load<Floats>(x + i)) & 0x7fffffff;
                top = select(bits > top, bits, top);
            }
            int32_t most = 0;
            for (int i = 0; i < LANES; i++) most = std::max(most, top[i]);
            float scale = read<float>(&most) / 127;
            if (scale < 0x1p-126f) scale = 0;
            const Ints coded = all(scale > 0 && scale < INFINITY ? -1 : 0);
            for (int i = from; i < to; i += LANES) {
                const Floats y = load<Floats>(x + i) / scale + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, ties to even
                store(codes + i, convert<Lanes<int8_t>>((as<Ints>(y) - 0x4b400000) & coded));
            }
            std::memcpy(line + from / BLOCK * sizeof scale, &scale, sizeof scale);
        }
    }

    // The scales of four blocks from `d` on, of 16 lines: one line in each lane.
    [[gnu::always_inline]] static void transpose_scales(Floats (&scales)[4], const Number* lines, int d, int64_t stride) {
        Ints transposed[4];
        paceline::transpose(transposed, lines + d / BLOCK * sizeof(float), stride);
        for (int i = 0; i < 4; i++) scales[i] = as<Floats>(transposed[i]);
    }

    // Transposes 16 numbers of each of 16 rows, `stride` apart, into 8 pairs with one lane per row.
    [[gnu::always_inline]] static void transpose(Pairs* pairs, const Number* rows, int64_t stride, const Floats& scale) {
        Ints lines[4];
        paceline::transpose(lines, rows, stride);
        auto number = [&](int i, int byte) { return convert<Floats>(lines[i] << (24 - 8 * byte) >> 24) * scale; };
        for (int i = 0; i < 4; i++) pairs[2 * i] = {number(i, 0), number(i, 1)}, pairs[2 * i + 1] = {number(i, 2), number(i, 3)};
    }

    // Interleaves 16 N numbers of two rows, all of one block.
    template <int N>
    [[gnu::always_inline]] static void interleave(Pairs* pairs, const Number* even, const Number* odd, float even_scale, float odd_scale) {
        auto numbers = [](const Number* from) { return convert<Floats>(from_bytes(reinterpret_cast<const uint8_t*>(from)) << 24 >> 24); };
        for (int i = 0; i < N; i++) pairs[i] = {numbers(even + i * LANES) * even_scale, numbers(odd + i * LANES) * odd_scale};
    }
};

}  // namespace paceline
