// Matrix products whose every row has the same bits whatever rows travel with it: a row's sum runs over the same
// elements in the same order, with integers exactly.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "formats.h"
#include "pool.h"

namespace paceline {

constexpr int TILE = 8;    // rows of one pass over a block of weights
constexpr int AHEAD = 2048;  // bytes that weights are prefetched ahead

// W [out, in] in blocks of 16 outputs, as `matrix.py` and `pack.h` lay it; both sizes are padded, `in` to whole groups.
// STACKED: `weights` are matrices of codes of the same width, whole blocks each (but the last) and without bias.
struct Matrix {
    int32_t kind, out, in;
    const uint8_t* weights;
    const float* bias;  // [out, padded], or null
};

inline int blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// Left operands of products: rows of bfloat16, or of 8 bits with a scale per group; as wide as the matrix.
struct Inputs {
    std::vector<Operand> wide;  // in bfloat16's numbers, for weights of bfloat16
    std::vector<float> full;    // for float16 and float32
    std::vector<int8_t> codes;
    std::vector<float> scale, total;  // [rows, groups]; total: of a group, scaled
    std::vector<int32_t> steps;       // the sum of a group's codes, unscaled
    std::vector<int32_t> halves;      // the same of its two halves, 16 bits each

    void reserve(int rows, const Matrix& m) {
        size_t size = size_t(rows) * m.in;
        if (m.kind == WIDE) return wide.resize(std::max(wide.size(), size));
        if (m.kind == HALF || m.kind == FULL) return full.resize(std::max(full.size(), size));
        codes.resize(std::max(codes.size(), size));
        scale.resize(std::max(scale.size(), size / GROUP));
        total.resize(scale.size());
        steps.resize(scale.size());
        halves.resize(scale.size());
    }

    // Sets elements from..to of a row of `size` (whole vectors of 16); `from` is the beginning of a group.
    void set(int row, const Matrix& m, const float* x, int size, int from, int to) {
        size_t first = size_t(row) * m.in;
        for (int k = from; k < to; k += GROUP) {
            const Floats a = load<Floats>(x + k), b = k + LANES < size ? load<Floats>(x + k + LANES) : Floats{};
            if (m.kind == WIDE)
                narrow(&wide[first + k], a), narrow(&wide[first + k + LANES], b);
            else if (m.kind == HALF || m.kind == FULL)
                store(&full[first + k], a), store(&full[first + k + LANES], b);
            else
                encode((first + k) / GROUP, a, b);
        }
    }

    template <int KIND>
    auto* wide_row(size_t at) const {
        if constexpr (KIND == WIDE)
            return &wide[at];
        else
            return &full[at];
    }

    // Copies a row of inputs of such a matrix.
    void copy(int row, const Matrix& m, const Inputs& x, int source) {
        auto part = [&](auto& to, const auto& from, size_t size) { std::copy_n(&from[source * size], size, &to[row * size]); };
        if (m.kind == WIDE) return part(wide, x.wide, m.in);
        if (m.kind == HALF || m.kind == FULL) return part(full, x.full, m.in);
        part(codes, x.codes, m.in), part(scale, x.scale, m.in / GROUP);
        part(total, x.total, m.in / GROUP), part(steps, x.steps, m.in / GROUP), part(halves, x.halves, m.in / GROUP);
    }

   private:
    void encode(size_t group, Floats a, Floats b) {
        const Floats x = select(a < 0.0f, -a, a), y = select(b < 0.0f, -b, b);
        // A non-finite element makes its whole group non-finite, instead of being rounded to something finite.
        const float broken = sum(a * 0.0f + b * 0.0f);
        // The bound keeps the inverse finite, as in `round_activations`.
        const float top = std::max(largest(select(x > y, x, y)), 1e-30f);
        const Floats inverse = all(127.0f / top);
        Ints p{}, q{};
        if (broken == 0) p = nearest(a * inverse), q = nearest(b * inverse);
        int8_t* to = &codes[group * GROUP];
        store(to, convert<Lanes<int8_t>>(p));
        store(to + LANES, convert<Lanes<int8_t>>(q));
        const int32_t first = sum(p), second = sum(q);
        steps[group] = first + second;
        halves[group] = (first & 0xffff) | second * 65536;
        scale[group] = top / 127.0f + broken;
        total[group] = scale[group] * float(steps[group]);
    }

    static Ints nearest(const Floats& x) { return convert<Ints>(x + 12582912.0f - 12582912.0f); }
};

// What the offset of the values adds to a group's sum, for a part of the outputs.
template <class F>
inline IntPart excess(const GroupScales<F>& scales, int part, const Inputs& x, size_t group) {
    if constexpr (F::OFFSET == 0 || (F::OFFSET == 128 && !EXCESS)) return IntPart{};
    if constexpr (F::SPAN == GROUP) return IntPart{} + F::OFFSET * x.steps[group];
    const ShortPart halves = (ShortPart)(IntPart{} + x.halves[group]);
    return F::OFFSET * weighted(paired(scales.first.part[part], scales.second.part[part]), halves);
}

// The sums of a group's values times the codes of ROWS rows, for a part of the outputs; spans times their integers.
template <class F, int ROWS, class Quad>
inline void dot(const uint8_t* p, const GroupScales<F>& scales, int part, Quad quad, IntPart* totals) {
    constexpr bool SMALL = F::VALUE_BITS < 8;
    constexpr int STEP = fours_at_once(F::VALUE_BITS, F::SPAN);
#pragma GCC unroll 4
    for (int from = 0; from < GROUP / 4; from += STEP) {
        Dots<SMALL> dots[ROWS];
        for (int r = 0; r < ROWS; r++) dots[r].start(0);
#pragma GCC unroll 8
        for (int q = from; q < from + STEP; q++) {
            asm volatile("" ::: "memory");  // else compilers read the rows' codes for all of it first, and run out of registers
            const Weights<SMALL> w(F::four(p, q, part));
            for (int r = 0; r < ROWS; r++) dots[r].add(w, quad(r, q));
        }
        for (int r = 0; r < ROWS; r++) {
            IntPart sum;
            if constexpr (F::SPAN == GROUP)
                sum = dots[r].total();
            else
                sum = dots[r].total((4 * from < F::SPAN ? scales.first : scales.second).part[part]);
            totals[r] = from ? totals[r] + sum : sum;
        }
    }
}

template <class F, int ROWS>
inline void coded_block(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    const int groups = m.in / GROUP;
    const uint8_t *p = m.weights + block * F::block_bytes(m.in), *header = p;
    const int8_t* codes = &x.codes[size_t(row) * m.in];
    Floats sums[ROWS] = {};  // not `out`, which might alias the weights for all the compiler knows
    for (int g = 0; g < groups; g++, p += F::BYTES) {
        if (F::HEADER && g % (F::UNIT / GROUP) == 0) header = p, p += F::HEADER;
        for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(p + AHEAD + line, 0, 0);
        const GroupScales<F> scales(header, p + F::CODES);
        auto quad = [&](int r, int q) { return read<int32_t>(codes + size_t(r) * m.in + g * GROUP + 4 * q); };
        // A part of the outputs at a time, so that the sums of 8 rows fit into 16 registers.
        for (int part = 0; part < PARTS; part++) {
            IntPart totals[ROWS];
            dot<F, ROWS>(p, scales, part, quad, totals);
            for (int r = 0; r < ROWS; r++) {
                const size_t at = size_t(row + r) * groups + g;
                FloatPart& sum = sums[r].part[part];
                const IntPart own = totals[r] - excess(scales, part, x, at);
                sum = fma(__builtin_convertvector(own, FloatPart) * x.scale[at], scales.scale.part[part], sum);
                if constexpr (F::FLOORS && F::SPAN == GROUP)
                    sum = fma(FloatPart{} + x.total[at], scales.floor.part[part], sum);
                if constexpr (F::FLOORS && F::SPAN < GROUP) {
                    const IntPart floor = weighted(paired(scales.first_floor.part[part], scales.second_floor.part[part]),
                                                   (ShortPart)(IntPart{} + x.halves[at]));
                    sum = fma(__builtin_convertvector(floor, FloatPart) * x.scale[at], scales.floor.part[part], sum);
                }
            }
        }
    }
    std::copy(sums, sums + ROWS, out);
}

// Two inputs of 16 outputs; bfloat16 has them side by side.
template <int KIND>
inline auto pairs_at(const uint8_t* p) {
    if constexpr (KIND == WIDE)
        return load<Ints>(p);
    else if constexpr (KIND == FULL)
        return WidePairs(load<Floats>(p), load<Floats>(p + 64));
    else
        return WidePairs(from_half(reinterpret_cast<const half*>(p)), from_half(reinterpret_cast<const half*>(p + 32)));
}

template <int KIND, int ROWS>
inline void wide_block(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    using Both = std::conditional_t<KIND == WIDE, Pairs, WidePairs>;
    constexpr int BYTES = KIND == FULL ? 128 : 64;
    const uint8_t* p = m.weights + size_t(block) * (m.in / 2) * BYTES;
    const auto* left = x.wide_row<KIND>(size_t(row) * m.in);
    Floats sums[ROWS] = {};
    for (int k = 0; k < m.in; k += 2, p += BYTES) {
        for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + AHEAD + line, 0, 0);
        const Both w(pairs_at<KIND>(p));
        for (int r = 0; r < ROWS; r++) sums[r] = dot2(sums[r], w, left + size_t(r) * m.in + k);
    }
    std::copy(sums, sums + ROWS, out);
}

// As many rows at a time as there are registers for.
template <int KIND, int ROWS>
inline void wide_blocks(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    constexpr int FIRST = PARTS == 1 ? ROWS : std::min(ROWS, 4);
    wide_block<KIND, FIRST>(m, block, x, row, out);
    if constexpr (ROWS > FIRST) wide_block<KIND, ROWS - FIRST>(m, block, x, row + FIRST, out + FIRST);
}

template <int ROWS>
inline void block_of(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    if (m.kind == WIDE) return wide_blocks<WIDE, ROWS>(m, block, x, row, out);
    if (m.kind == HALF) return wide_blocks<HALF, ROWS>(m, block, x, row, out);
    if (m.kind == FULL) return wide_blocks<FULL, ROWS>(m, block, x, row, out);
    with_format(m.kind, [&](auto format) { coded_block<decltype(format), ROWS>(m, block, x, row, out); });
}

inline void block_of(int rows, const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    if (m.kind == STACKED) {
        const Matrix* part = reinterpret_cast<const Matrix*>(m.weights);
        for (; block >= blocks_of(*part); part++) block -= blocks_of(*part);
        return block_of(rows, *part, block, x, row, out);
    }
    switch (rows) {
        case 1: return block_of<1>(m, block, x, row, out);
        case 2: return block_of<2>(m, block, x, row, out);
        case 3: return block_of<3>(m, block, x, row, out);
        case 4: return block_of<4>(m, block, x, row, out);
        case 5: return block_of<5>(m, block, x, row, out);
        case 6: return block_of<6>(m, block, x, row, out);
        case 7: return block_of<7>(m, block, x, row, out);
        default: return block_of<8>(m, block, x, row, out);
    }
}

// x W^T + b for these blocks of the outputs, passed to `take(row, first output, 16 values)`; for `rows` rows of x, which
// begin at row `first`.
template <class Take>
inline void product(Span blocks, const Matrix& m, const Inputs& x, int rows, Take take, int first = 0) {
    Floats out[TILE];
    for (int block = blocks.from; block < blocks.to; block++) {
        Floats bias = m.bias ? load<Floats>(m.bias + block * LANES) : Floats{};
        for (int row = 0; row < rows; row += TILE) {
            int count = std::min(TILE, rows - row);
            block_of(count, m, block, x, first + row, out);
            for (int r = 0; r < count; r++) take(row + r, block * LANES, out[r] + bias);
        }
    }
}

// Gate and up alternate block by block: `take` gets both.
template <class Take>
inline void paired_product(Span pairs, const Matrix& m, const Inputs& x, int rows, Take take) {
    Floats gate[TILE], up[TILE];
    for (int pair = pairs.from; pair < pairs.to; pair++) {
        const float* bias = m.bias ? m.bias + 2 * pair * LANES : nullptr;
        Floats first = bias ? load<Floats>(bias) : Floats{}, second = bias ? load<Floats>(bias + LANES) : Floats{};
        for (int row = 0; row < rows; row += TILE) {
            int count = std::min(TILE, rows - row);
            block_of(count, m, 2 * pair, x, row, gate);
            block_of(count, m, 2 * pair + 1, x, row, up);
            for (int r = 0; r < count; r++) take(row + r, pair * LANES, gate[r] + first, up[r] + second);
        }
    }
}

}  // namespace paceline
