// Matrices, and the left operands of their products: rows of floats or of 8-bit codes.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "formats.h"
#include "pool.h"

namespace paceline {

constexpr int TILE = 8;  // rows of one pass over a block of weights

// W [out, in] in blocks of 16 outputs, as packed by `matrix.py` and `pack.h`. Both sizes are padded, `in` to whole groups.
// If `kind` is STACKED, `weights` points to an array of matrices, one for each block.
struct Matrix {
    int32_t kind, out, in;
    const uint8_t* weights;
    const float* bias;  // [out, padded], or null
};

inline int blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// Sums of the codes of a group and of its two halves. The low 16 bits sum the first two codes of each four, the high 16 bits
// the last two.
struct PairSums {
    int32_t whole, first, second;
};

// Left operands of products: rows of floats, or of 8-bit codes with a scale per group, as wide as the matrix.
//
// A product takes a span of rows, in tiles of up to 8. Within a tile the rows are interleaved in the units that are multiplied
// at a time (4 or 8 codes, or 2 floats), and their scales by group. So a loop over a tile reads at fixed distances.
struct Inputs {
    std::vector<Operand> wide;  // for bfloat16 weights, if `multiplies_pairs`
    std::vector<float> full;    // for float16 and float32 weights, or else for bfloat16 weights
    std::vector<int8_t> codes;
    std::vector<float> scale, total;  // of each group; `total` is the scaled sum of its codes
    std::vector<int32_t> steps;       // unscaled sum of each group's codes
    std::vector<int32_t> halves;      // the same for the group's two halves, 16 bits each
    std::vector<PairSums> pairs;      // if PAIRED_SUMS

    void reserve(int rows, const Matrix& m) {
        size_t size = size_t(rows) * m.in;
        if (in_pairs(m)) return wide.resize(std::max(wide.size(), size));
        if (of_floats(m)) return full.resize(std::max(full.size(), size));
        codes.resize(std::max(codes.size(), size));
        scale.resize(std::max(scale.size(), size / GROUP));
        total.resize(scale.size());
        steps.resize(scale.size());
        halves.resize(scale.size());
        if (PAIRED_SUMS) pairs.resize(scale.size());
    }

    // Sets elements `from` to `to` - 1 of row `row` of a span. x has `size` elements, a multiple of 16. `from` must be the
    // beginning of a group.
    [[gnu::noinline, gnu::flatten]] void set(Span rows, int row, const Matrix& m, const float* x, int size, int from, int to) {
        const Place place(rows, row, m);
        for (int k = from; k < to; k += GROUP) {
            const Floats a = load<Floats>(x + k), b = k + LANES < size ? load<Floats>(x + k + LANES) : Floats{};
            if (in_pairs(m))
                scatter<2>(wide, place, k, [&](Operand* y) { narrow(y, a), narrow(y + LANES, b); });
            else if (m.kind == WIDE)
                scatter<2>(full, place, k, [&](float* y) { store(y, rounded_to_bf16(a)), store(y + LANES, rounded_to_bf16(b)); });
            else if (of_floats(m))
                scatter<2>(full, place, k, [&](float* y) { store(y, a), store(y + LANES, b); });
            else
                scatter<4 * FOURS_TOGETHER>(codes, place, k, [&](int8_t* y) { encode(place.group(k), a, b, y); });
        }
    }

    // The operands for weights of type `Both`.
    template <class Both>
    auto* floats(size_t at) const {
        if constexpr (std::is_same<Both, WidePairs>())
            return &full[at];
        else
            return &wide[at];
    }

    // Copies row `source` of another span to row `row` of a span.
    void copy(Span rows, int row, const Matrix& m, const Inputs& x, Span others, int source) {
        const Place to(rows, row, m), from(others, source, m);
        for (int k = 0; k < m.in; k += GROUP) {
            auto part = [&](auto tag, auto& y, const auto& own) {
                scatter<decltype(tag)::value>(y, to, k, [&](auto* group) { gather<decltype(tag)::value>(group, own, from, k); });
            };
            if (in_pairs(m))
                part(std::integral_constant<int, 2>(), wide, x.wide);
            else if (of_floats(m))
                part(std::integral_constant<int, 2>(), full, x.full);
            else {
                const size_t i = to.group(k), j = from.group(k);
                part(std::integral_constant<int, 4 * FOURS_TOGETHER>(), codes, x.codes);
                scale[i] = x.scale[j], total[i] = x.total[j], steps[i] = x.steps[j], halves[i] = x.halves[j];
                if (PAIRED_SUMS) pairs[i] = x.pairs[j];
            }
        }
    }

   private:
    static bool in_pairs(const Matrix& m) { return m.kind == WIDE && multiplies_pairs(); }
    static bool of_floats(const Matrix& m) { return m.kind == WIDE || m.kind == HALF || m.kind == FULL; }

    // Position of a row in memory.
    struct Place {
        size_t tile;      // groups before its tile
        int lane, height;  // number of the row in its tile; rows of the tile

        Place(Span rows, int row, const Matrix& m) : lane(row % TILE) {
            const int first = rows.from + row - lane;
            tile = size_t(first) * (m.in / GROUP), height = std::min(TILE, rows.to - first);
        }

        size_t group(int k) const { return tile + size_t(k / GROUP) * height + lane; }
        // Offset of element k, if `together` elements of a row are adjacent.
        size_t element(int k, int together) const { return tile * GROUP + size_t(k) * height + lane * together; }
    };

    // Writes the 32 elements that `fill` produces, starting with element k, to their places.
    template <int TOGETHER, class T, class Fill>
    static void scatter(std::vector<T>& to, const Place& place, int k, Fill fill) {
        T group[GROUP];
        fill(group);
        T* y = &to[place.element(k, TOGETHER)];
        for (int i = 0; i < GROUP; i += TOGETHER, y += place.height * TOGETHER) std::memcpy(y, group + i, sizeof(T) * TOGETHER);
    }

    template <int TOGETHER, class T>
    static void gather(T* group, const std::vector<T>& from, const Place& place, int k) {
        const T* x = &from[place.element(k, TOGETHER)];
        for (int i = 0; i < GROUP; i += TOGETHER, x += place.height * TOGETHER) std::memcpy(group + i, x, sizeof(T) * TOGETHER);
    }

    void encode(size_t group, Floats a, Floats b, int8_t* to) {
        const Floats x = select(a < 0.0f, -a, a), y = select(b < 0.0f, -b, b);
        // A non-finite element makes its whole group non-finite, instead of being rounded to something finite.
        const float broken = sum(a * 0.0f + b * 0.0f);
        // The bound keeps the inverse finite, as in `round_activations`.
        const float top = std::max(largest(select(x > y, x, y)), 1e-30f);
        const Floats inverse = all(127.0f / top);
        Ints p{}, q{};
        if (broken == 0) p = nearest(a * inverse), q = nearest(b * inverse);
        store(to, convert<Lanes<int8_t>>(p));
        store(to + LANES, convert<Lanes<int8_t>>(q));
        const int32_t first = sum(p), second = sum(q);
        steps[group] = first + second;
        halves[group] = both(first, second);
        if (PAIRED_SUMS) {
            const Ints early = load<Ints>(EARLY);  // the first two codes of each four
            const int32_t a = sum(p & early), b = sum(q & early);
            pairs[group] = {both(a + b, first + second - a - b), both(a, first - a), both(b, second - b)};
        }
        scale[group] = top / 127.0f + broken;
        total[group] = scale[group] * float(steps[group]);
    }

    static constexpr int32_t EARLY[LANES] = {-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0};

    static int32_t both(int32_t low, int32_t high) { return (low & 0xffff) | high * 65536; }
    static Ints nearest(const Floats& x) { return convert<Ints>(x + 12582912.0f - 12582912.0f); }
};

}  // namespace paceline
