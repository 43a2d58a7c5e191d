// Matrix products whose every row has the same bits whatever rows travel with it: a row's sum runs over the same
// elements in the same order, with integers exactly.
#pragma once

#include <algorithm>
#include <vector>

#include "barrier.h"
#include "formats.h"

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
    std::vector<Operand> wide;  // in bfloat16's numbers
    std::vector<int8_t> codes;
    std::vector<float> scale, total;  // [rows, groups]; total: of a group, scaled
    std::vector<int32_t> steps;       // the sum of a group's codes, unscaled
    std::vector<int32_t> halves;      // the same of its two halves, 16 bits each

    void reserve(int rows, const Matrix& m) {
        size_t size = size_t(rows) * m.in;
        if (m.kind == WIDE) return wide.resize(std::max(wide.size(), size));
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
            if (m.kind != WIDE)
                encode((first + k) / GROUP, a, b);
            else
                narrow(&wide[first + k], a), narrow(&wide[first + k + LANES], b);
        }
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

template <int ROWS>
inline void wide_block(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    const uint8_t* p = m.weights + size_t(block) * m.in * LANES * 2;
    const Operand* left = &x.wide[size_t(row) * m.in];
    Floats sums[ROWS] = {};
    for (int k = 0; k < m.in; k += 2, p += 64) {
        __builtin_prefetch(p + AHEAD, 0, 0);
        const Pairs w(load<Ints>(p));
        for (int r = 0; r < ROWS; r++) sums[r] = dot2(sums[r], w, left + size_t(r) * m.in + k);
    }
    std::copy(sums, sums + ROWS, out);
}

template <int ROWS>
inline void block_of(const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    if (m.kind == WIDE) {
        // As many rows at a time as there are registers for.
        constexpr int FIRST = PARTS == 1 ? ROWS : std::min(ROWS, 4);
        wide_block<FIRST>(m, block, x, row, out);
        if constexpr (ROWS > FIRST) wide_block<ROWS - FIRST>(m, block, x, row + FIRST, out + FIRST);
        return;
    }
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

// x W^T + b for these blocks of the outputs, passed to `take(row, first output, 16 values)`.
template <class Take>
inline void product(Span blocks, const Matrix& m, const Inputs& x, int rows, Take take) {
    Floats out[TILE];
    for (int block = blocks.from; block < blocks.to; block++) {
        Floats bias = m.bias ? load<Floats>(m.bias + block * LANES) : Floats{};
        for (int row = 0; row < rows; row += TILE) {
            int count = std::min(TILE, rows - row);
            block_of(count, m, block, x, row, out);
            for (int r = 0; r < count; r++) take(row + r, block * LANES, out[r] + bias);
        }
    }
}

// Gate and up alternate block by block: `take` gets both. Returns the outputs of this thread, whole groups.
template <class Take>
inline Span paired_product(const Thread& thread, const Matrix& m, const Inputs& x, int rows, Take take) {
    Span pairs = thread.share(blocks_of(m) / 2, 2);
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
    return {pairs.from * LANES, pairs.to * LANES};
}

}  // namespace paceline
