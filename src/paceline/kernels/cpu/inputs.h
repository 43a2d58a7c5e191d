// Weight matrices, and the inputs of their linear layers: rows of floats or of 8-bit codes.
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

// Rows x of x W^T, padded to the matrix's width: floats, or 8-bit codes with a scale per group.
//
// A matrix multiplication takes a range of rows, in tiles of up to 8. Within a tile the rows are interleaved in the units that are
// multiplied at a time (4 or 8 codes, or 2 floats), and their scales by group. So a loop over a tile reads at fixed distances.
struct Inputs {
    std::vector<Operand> bf16_rows;  // for bfloat16 weights, if `multiplies_pairs`
    std::vector<float> float_rows;   // for float16 and float32 weights, and for bfloat16 weights without `multiplies_pairs`
    std::vector<int8_t> codes;       // for quantised weights; so are all that follow
    std::vector<float> scale, scaled_sum;  // of each group; `scaled_sum`: scale times the sum of its codes
    std::vector<int32_t> code_sum;         // sum of each group's codes
    std::vector<int32_t> half_sums;        // sums of the codes of a group's two halves, 16 bits each
    std::vector<PairSums> pair_sums;       // if PAIRED_SUMS

    void reserve(int rows, const Matrix& m) {
        size_t size = size_t(rows) * m.in;
        if (in_pairs(m)) return bf16_rows.resize(std::max(bf16_rows.size(), size));
        if (of_floats(m)) return float_rows.resize(std::max(float_rows.size(), size));
        codes.resize(std::max(codes.size(), size));
        scale.resize(std::max(scale.size(), size / GROUP));
        scaled_sum.resize(scale.size());
        code_sum.resize(scale.size());
        half_sums.resize(scale.size());
        if (PAIRED_SUMS) pair_sums.resize(scale.size());
    }

    // Sets elements `from` to `to` - 1 of row `row` of a range. x has `size` elements, a multiple of 16. `from` must be the
    // beginning of a group.
    [[gnu::noinline, gnu::flatten]] void set(Range rows, int row, const Matrix& m, const float* x, int size, int from, int to) {
        const Place place(rows, row, m);
        for (int k = from; k < to; k += GROUP) {
            const Floats a = load<Floats>(x + k), b = k + LANES < size ? load<Floats>(x + k + LANES) : Floats{};
            if (in_pairs(m))
                scatter<2>(bf16_rows, place, k, [&](Operand* y) { narrow(y, a), narrow(y + LANES, b); });
            else if (m.kind == BF16)
                scatter<2>(float_rows, place, k, [&](float* y) { store(y, rounded_to_bf16(a)), store(y + LANES, rounded_to_bf16(b)); });
            else if (of_floats(m))
                scatter<2>(float_rows, place, k, [&](float* y) { store(y, a), store(y + LANES, b); });
            else
                scatter<4 * FOURS_TOGETHER>(codes, place, k, [&](int8_t* y) { encode(place.group(k), a, b, y); });
        }
    }

    // The rows in the form that weights of type `PairType` (`Pairs` or `WidePairs`) are multiplied by, from element `at` on.
    template <class PairType>
    auto* operands(size_t at) const {
        if constexpr (std::is_same<PairType, WidePairs>())
            return &float_rows[at];
        else
            return &bf16_rows[at];
    }

    // Copies row `source` of another range of rows to row `row` of a range.
    void copy(Range rows, int row, const Matrix& m, const Inputs& x, Range others, int source) {
        const Place to(rows, row, m), from(others, source, m);
        for (int k = 0; k < m.in; k += GROUP) {
            auto copy_group = [&](auto tag, auto& y, const auto& others) {
                scatter<decltype(tag)::value>(y, to, k, [&](auto* group) { gather<decltype(tag)::value>(group, others, from, k); });
            };
            if (in_pairs(m))
                copy_group(std::integral_constant<int, 2>(), bf16_rows, x.bf16_rows);
            else if (of_floats(m))
                copy_group(std::integral_constant<int, 2>(), float_rows, x.float_rows);
            else {
                const size_t i = to.group(k), j = from.group(k);
                copy_group(std::integral_constant<int, 4 * FOURS_TOGETHER>(), codes, x.codes);
                scale[i] = x.scale[j], scaled_sum[i] = x.scaled_sum[j], code_sum[i] = x.code_sum[j], half_sums[i] = x.half_sums[j];
                if (PAIRED_SUMS) pair_sums[i] = x.pair_sums[j];
            }
        }
    }

   private:
    static bool in_pairs(const Matrix& m) { return m.kind == BF16 && multiplies_pairs(); }
    static bool of_floats(const Matrix& m) { return m.kind == BF16 || m.kind == F16 || m.kind == F32; }

    // Position of a row in memory.
    struct Place {
        size_t tile;      // groups before its tile
        int lane, height;  // number of the row in its tile; rows of the tile

        Place(Range rows, int row, const Matrix& m) : lane(row % TILE) {
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
        code_sum[group] = first + second;
        half_sums[group] = both(first, second);
        if (PAIRED_SUMS) {
            const Ints early = load<Ints>(EARLY);  // the first two codes of each four
            const int32_t a = sum(p & early), b = sum(q & early);
            pair_sums[group] = {both(a + b, first + second - a - b), both(a, first - a), both(b, second - b)};
        }
        scale[group] = top / 127.0f + broken;
        scaled_sum[group] = scale[group] * float(code_sum[group]);
    }

    static constexpr int32_t EARLY[LANES] = {-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0};

    static int32_t both(int32_t low, int32_t high) { return (low & 0xffff) | high * 65536; }
    static Ints nearest(const Floats& x) { return convert<Ints>(x + 12582912.0f - 12582912.0f); }
};

}  // namespace paceline
