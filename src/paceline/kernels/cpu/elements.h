// Number types of the residual stream and of keys and values: how to read, write and multiply them.
#pragma once

#include <type_traits>

#include "functions.h"

namespace paceline {

// `Number` is the stored type. `Operand` and `Pairs` are operands of products (see `dot2`). Attention weights are rounded
// like attention values.
template <class OwnOperand, class OwnPairs>
struct BFloat16With {
    using Number = bf16;
    using Operand = OwnOperand;
    using Pairs = OwnPairs;

    static Floats widen(const Number* from) { return paceline::widen(from); }
    static void narrow(Number* to, const Floats& v) { paceline::narrow(to, v); }
    static Floats power(const Floats& x) { return power_of_two(x); }

    static Operand operand(Number x) {
        if constexpr (std::is_same<Operand, float>()) return widened(x);
        else return x;
    }

    static void operands(Operand* to, const Floats& v) {
        if constexpr (std::is_same<Operand, float>()) store(to, rounded_to_bf16(v));
        else paceline::narrow(to, v);
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

// True if products of bfloat16 pairs are faster than products of floats. Intel's processors (Sapphire Rapids) start one product
// of pairs every two cycles, but four products of floats.
inline bool multiplies_pairs() {
#if defined(__AVX512BF16__)
    static const bool intel = __builtin_cpu_is("intel");
    return !intel;
#else
    return false;
#endif
}

// Common code of number types that are widened to float for products.
template <class Own>
struct Widened {
    using Operand = float;
    using Pairs = WidePairs;

    static void operands(float* to, const Floats& v) { store(to, v); }
    static Floats power(const Floats& x) { return exponential(x * 0.69314718f); }

    template <int N, class Number>
    [[gnu::always_inline]] static void interleave(Pairs* pairs, const Number* even, const Number* odd) {
        for (int i = 0; i < N; i++) pairs[i] = {Own::widen(even + i * LANES), Own::widen(odd + i * LANES)};
    }
};

struct Float16 : Widened<Float16> {
    using Number = half;

    static Floats widen(const Number* from) { return from_half(from); }
    static void narrow(Number* to, const Floats& v) { to_half(to, v); }
    static float operand(Number x) {
        const Number one[LANES] = {x};
        return from_half(one)[0];
    }

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

struct Float32 : Widened<Float32> {
    using Number = float;

    static Floats widen(const Number* from) { return load<Floats>(from); }
    static void narrow(Number* to, const Floats& v) { store(to, v); }
    static float operand(Number x) { return x; }

    [[gnu::always_inline]] static void transpose(Pairs* pairs, const Number* rows, int64_t stride) {
        for (int half = 0; half < 2; half++) {
            Ints lines[4];
            paceline::transpose(lines, rows + 4 * half, 4 * stride);
            for (int i = 0; i < 2; i++) pairs[2 * half + i] = {as<Floats>(lines[2 * i]), as<Floats>(lines[2 * i + 1])};
        }
    }
};

}  // namespace paceline
