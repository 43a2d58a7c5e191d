// Matrix multiplications in which a row's result has the same bits whatever other rows are in the pass: its sum runs over the same
// elements in the same order, and sums of integers are exact.
#pragma once

#include "inputs.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace paceline {

constexpr int L1_DISTANCE = 2048, L2_DISTANCE = 16384;  // prefetch distances for weights, in bytes

// True if weights are prefetched into the first cache only. On AMD processors this leaves the larger caches to other data. On
// Intel processors it would limit a core to some 10 GB/s, since only the first cache's fetches would be in flight.
#if defined(__x86_64__)
inline const bool L1_ONLY = [] {
    unsigned int a, b = 0, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541;  // "Auth", of AuthenticAMD
}();
#else
constexpr bool L1_ONLY = false;
#endif

// Prefetches the weights that follow the `bytes` at p, which are read now.
inline void fetch_ahead(const uint8_t* p, int bytes) {
    for (int line = 0; line < bytes; line += 64)
        if (L1_ONLY)
            __builtin_prefetch(p + L1_DISTANCE + line, 0, 0);
        else
            __builtin_prefetch(p + L2_DISTANCE + line, 0, 2), __builtin_prefetch(p + L1_DISTANCE + line, 0, 3);
}

// Index, in fours, of the four codes `q` of row `r` in a group of a tile of `rows` rows.
constexpr int four_at(int rows, int r, int q) {
    return (q / FOURS_TOGETHER * rows + r) * FOURS_TOGETHER + q % FOURS_TOGETHER;
}

// The codes, scales and sums of a tile's rows for one group.
struct TileGroup {
    const int8_t* codes;
    const float *scale, *scaled_sum;
    const int32_t *code_sum, *half_sums;
    const PairSums* pair_sums;

    TileGroup(const Inputs& x, size_t at)
        : codes(&x.codes[at * GROUP]), scale(&x.scale[at]), scaled_sum(&x.scaled_sum[at]), code_sum(&x.code_sum[at]),
          half_sums(&x.half_sums[at]), pair_sums(x.pair_sums.data() + (PAIRED_SUMS ? at : 0)) {}

    // Moves to the next group.
    void advance(int rows) {
        codes += rows * GROUP;
        scale += rows, scaled_sum += rows, code_sum += rows, half_sums += rows, pair_sums += rows;
    }
};

// True if the zero point is subtracted from 16-bit sums. The final sums then fit 16 bits for a whole sub-block, although they wrap
// around before the subtraction.
template <class F>
constexpr bool subtracts_zero_point() {
    constexpr bool is = PAIRED_SUMS && F::ZERO_POINT > 0 && F::VALUE_BITS < 8;
    static_assert(!is || F::SUB_BLOCK / 2 * F::ZERO_POINT * 127 < 1 << 15, "");  // values are at most ZERO_POINT away from 0
    return is;
}

// The part of a group's sum that comes from the zero point and is not subtracted yet, for one register of outputs.
template <class F>
inline IntPart excess(const GroupScales<F>& scales, int part, int32_t code_sum, int32_t half_sums) {
    if constexpr (F::ZERO_POINT == 0 || subtracts_zero_point<F>() || (F::ZERO_POINT == 128 && !EXCESS)) return IntPart{};
    if constexpr (F::SUB_BLOCK == GROUP) return IntPart{} + F::ZERO_POINT * code_sum;
    return F::ZERO_POINT * weighted(paired(scales.first.part[part], scales.second.part[part]), (ShortPart)(IntPart{} + half_sums));
}

// A part of a tile of ROWS rows, whose sums fit into registers: COUNT rows from row FIRST on, for COLUMNS registers of outputs.
template <class F, int ROWS_, int FIRST_ = 0>
struct MicroTile {
    static constexpr int ROWS = ROWS_, FIRST = FIRST_, COLUMNS = PARTS_TOGETHER;
    static constexpr int COUNT = FIRST ? ROWS - FIRST : ROWS <= ROWS_TOGETHER ? ROWS : (ROWS + 1) / 2;
    static constexpr bool LAST = FIRST + COUNT == ROWS;
    // Values that take many operations to decode are decoded once for all rows.
    static constexpr bool DECODES_ONCE = COUNT < ROWS && (F::BITS > F::LOW || F::BITS < 4 || F::TABLE != nullptr) && F::VALUE_BITS < 8;
    using Values = BytePart[DECODES_ONCE ? GROUP / 4 : 1][COLUMNS];
    using Totals = IntPart[COUNT][COLUMNS];
};

// Adds up a group's values times the rows' codes. The sums of sub-blocks are multiplied by their integers.
template <class F, class P>
inline void dot(const uint8_t* p, const GroupScales<F>& scales, int part, const TileGroup& x, typename P::Values& values,
                typename P::Totals& totals) {
    constexpr bool SMALL = F::VALUE_BITS < 8;
    constexpr int STEP = subtracts_zero_point<F>() ? F::SUB_BLOCK / 4 : fours_at_once(F::VALUE_BITS, F::SUB_BLOCK);
#pragma GCC unroll 4
    for (int from = 0; from < GROUP / 4; from += STEP) {
        Dots<SMALL> dots[P::COUNT][P::COLUMNS];
#pragma GCC unroll 8
        for (int q = from; q < from + STEP; q++) {
            read_here<P::ROWS>();
            Weights<SMALL> w[P::COLUMNS];
#pragma GCC unroll 2
            for (int c = 0; c < P::COLUMNS; c++) {
                const BytePart value = P::DECODES_ONCE && P::FIRST ? values[q % 8][c] : F::four(p, q, part + c);
                if (P::DECODES_ONCE && !P::FIRST) values[q % 8][c] = value;
                w[c] = Weights<SMALL>(value);
            }
#pragma GCC unroll 8
            for (int r = 0; r < P::COUNT; r++)
#pragma GCC unroll 2
                for (int c = 0; c < P::COLUMNS; c++) dots[r][c].add(w[c], x.codes, four_at(P::ROWS, P::FIRST + r, q));
        }
#pragma GCC unroll 8
        for (int r = 0; r < P::COUNT; r++) {
            [[maybe_unused]] ShortPart zero_term;
            if constexpr (subtracts_zero_point<F>()) {
                const PairSums& sums = x.pair_sums[P::FIRST + r];
                zero_term = (ShortPart)(IntPart{} + (F::SUB_BLOCK == GROUP ? sums.whole : from ? sums.second : sums.first)) * int16_t(F::ZERO_POINT);
            }
#pragma GCC unroll 2
            for (int c = 0; c < P::COLUMNS; c++) {
                if constexpr (subtracts_zero_point<F>()) dots[r][c].subtract(zero_term);
                IntPart sum;
                if constexpr (F::SUB_BLOCK == GROUP)
                    sum = dots[r][c].total();
                else
                    sum = dots[r][c].total((4 * from < F::SUB_BLOCK ? scales.first : scales.second).part[part + c]);
                totals[r][c] = from ? totals[r][c] + sum : sum;
            }
        }
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Like `dot` for one register of outputs, two rows at a time. An odd last row is paired with itself.
template <class F, int ROWS>
inline void dot_of_pairs(const uint8_t* p, const GroupScales<F>& scales, int part, const int8_t* codes,
                         IntPart (&totals)[ROWS][1]) {
    constexpr int PAIRS = (ROWS + 1) / 2, STEP = F::SUB_BLOCK / 4;
    auto values = [&](int q) { return Weights<(F::VALUE_BITS < 8)>(F::four(p, q, part)).codes; };
#pragma GCC unroll 2
    for (int from = 0; from < GROUP / 4; from += STEP) {
        DotsOfTwo dots[PAIRS];
#pragma GCC unroll 4
        for (int q = from; q < from + STEP; q += 2) {
            read_here<ROWS>();
            const BytePart first = values(q), second = values(q + 1);
#pragma GCC unroll 4
            for (int pair = 0; pair < PAIRS; pair++) {
                const int8_t* own = codes + 4 * four_at(ROWS, 2 * pair, q);
                const bool both = 2 * pair + 1 < ROWS;
                dots[pair].add(first, second, both ? vld1q_s8(own) : vcombine_s8(vld1_s8(own), vld1_s8(own)));
            }
        }
        for (int r = 0; r < ROWS; r++) {
            IntPart sum = r % 2 ? dots[r / 2].second() : dots[r / 2].first();
            if constexpr (F::SUB_BLOCK < GROUP) sum *= (from ? scales.second : scales.first).part[part];
            totals[r][0] = from ? totals[r][0] + sum : sum;
        }
    }
}
#endif

// Adds one group to the sums of a tile of P::ROWS rows, for some registers of outputs.
template <class F, class P>
inline void add_group(const uint8_t* p, const GroupScales<F>& scales, int part, const TileGroup& x, typename P::Values& values, Floats* sums) {
    typename P::Totals totals;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (P::ROWS > 1)
        dot_of_pairs<F, P::ROWS>(p, scales, part, x.codes, totals);
    else
#endif
        dot<F, P>(p, scales, part, x, values, totals);
#pragma GCC unroll 8
    for (int i = 0; i < P::COUNT; i++)
#pragma GCC unroll 2
        for (int c = part; c < part + P::COLUMNS; c++) {
            const int r = P::FIRST + i;
            FloatPart& sum = sums[r].part[c];
            const IntPart dot = totals[i][c - part] - excess(scales, c, x.code_sum[r], x.half_sums[r]);
            sum = fma(__builtin_convertvector(dot, FloatPart) * x.scale[r], scales.scale.part[c], sum);
            if constexpr (F::HAS_OFFSETS && F::SUB_BLOCK == GROUP) sum = fma(all(x.scaled_sum[r]).part[0], scales.offset.part[c], sum);
            if constexpr (F::HAS_OFFSETS && F::SUB_BLOCK < GROUP) {
                const ShortPart pair = paired(scales.first_offset.part[c], scales.second_offset.part[c]);
                const IntPart offset = weighted(pair, (ShortPart)(IntPart{} + x.half_sums[r]));
                sum = fma(__builtin_convertvector(offset, FloatPart) * x.scale[r], scales.offset.part[c], sum);
            }
        }
    if constexpr (!P::LAST) add_group<F, MicroTile<F, P::ROWS, P::COUNT>>(p, scales, part, x, values, sums);
}

// Multiplies a block of codes with a tile of rows. `at`: groups of the inputs before this tile.
template <class F, int ROWS>
[[gnu::noinline, gnu::flatten]] void quantised_block(const Matrix& m, int block, const Inputs& x, size_t at, Floats* out) {
    const uint8_t *p = m.weights + block * F::block_bytes(m.in), *header = p;
    TileGroup tile(x, at);
    Floats sums[ROWS] = {};  // a local array, since the compiler must assume that `out` may alias the weights
    for (int g = 0, groups = m.in / GROUP; g < groups; g++, p += F::BYTES, tile.advance(ROWS)) {
        if (F::HEADER && g % (F::UNIT / GROUP) == 0) header = p, p += F::HEADER;
        fetch_ahead(p, F::BYTES);
        const GroupScales<F> scales(header, p + F::CODES);
        for (int part = 0; part < PARTS; part += PARTS_TOGETHER) {
            typename MicroTile<F, ROWS>::Values values;
            add_group<F, MicroTile<F, ROWS>>(p, scales, part, tile, values, sums);
        }
    }
    std::copy(sums, sums + ROWS, out);
}

// Two inputs of 16 outputs. In bfloat16 they are adjacent.
template <int KIND>
inline auto pairs_at(const uint8_t* p) {
    if constexpr (KIND == BF16)
        return load<Ints>(p);
    else if constexpr (KIND == F32)
        return WidePairs(load<Floats>(p), load<Floats>(p + 64));
    else
        return WidePairs(from_half(reinterpret_cast<const half*>(p)), from_half(reinterpret_cast<const half*>(p + 32)));
}

// Multiplies a block of floats with ROWS rows of a tile of `height` rows, starting with row `lane`.
template <class PairType, int KIND, int ROWS>
[[gnu::noinline, gnu::flatten]] void float_block(const Matrix& m, int block, const Inputs& x, size_t at, int height, int lane, Floats* out) {
    constexpr int BYTES = KIND == F32 ? 128 : 64;
    const uint8_t* p = m.weights + size_t(block) * (m.in / 2) * BYTES;
    const auto* row_pairs = x.operands<PairType>(at * GROUP) + 2 * lane;
    // Without loops that are unrolled early, compilers keep the sums in memory.
    Floats sums[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
    for (int k = 0; k < m.in; k += 2, p += BYTES, row_pairs += 2 * height) {
        fetch_ahead(p, BYTES);
        const PairType w(pairs_at<KIND>(p));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r] = dot2(sums[r], w, row_pairs + 2 * r);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) out[r] = sums[r];
}

// Takes as many rows at a time as the registers allow.
template <class PairType, int KIND, int ROWS>
inline void float_blocks(const Matrix& m, int block, const Inputs& x, size_t at, Floats* out) {
    constexpr int FIRST = PARTS == 1 ? ROWS : std::min(ROWS, 4);
    float_block<PairType, KIND, FIRST>(m, block, x, at, ROWS, 0, out);
    if constexpr (ROWS > FIRST) float_block<PairType, KIND, ROWS - FIRST>(m, block, x, at, ROWS, FIRST, out + FIRST);
}

template <int ROWS>
inline void block_of(const Matrix& m, int block, const Inputs& x, size_t at, Floats* out) {
    if (m.kind == BF16 && multiplies_pairs()) return float_blocks<Pairs, BF16, ROWS>(m, block, x, at, out);
    if (m.kind == BF16) return float_blocks<WidePairs, BF16, ROWS>(m, block, x, at, out);
    if (m.kind == F16) return float_blocks<WidePairs, F16, ROWS>(m, block, x, at, out);
    if (m.kind == F32) return float_blocks<WidePairs, F32, ROWS>(m, block, x, at, out);
    with_format(m.kind, [&](auto format) { quantised_block<decltype(format), ROWS>(m, block, x, at, out); });
}

// Multiplies a block with the tile that begins at row `row`.
inline void block_of(int rows, const Matrix& m, int block, const Inputs& x, int row, Floats* out) {
    if (m.kind == STACKED) return block_of(rows, reinterpret_cast<const Matrix*>(m.weights)[block], 0, x, row, out);
    const size_t at = size_t(row) * (m.in / GROUP);
    switch (rows) {
        case 1: return block_of<1>(m, block, x, at, out);
        case 2: return block_of<2>(m, block, x, at, out);
        case 3: return block_of<3>(m, block, x, at, out);
        case 4: return block_of<4>(m, block, x, at, out);
        case 5: return block_of<5>(m, block, x, at, out);
        case 6: return block_of<6>(m, block, x, at, out);
        case 7: return block_of<7>(m, block, x, at, out);
        default: return block_of<8>(m, block, x, at, out);
    }
}

// Computes x W^T + b for these blocks of outputs and passes it to `take(row, first output, 16 values)`. `row` counts from the
// beginning of the range.
template <class Take>
inline void product(Range blocks, const Matrix& m, const Inputs& x, Range rows, Take take) {
    Floats out[TILE];
    for (int block = blocks.from; block < blocks.to; block++) {
        Floats bias = m.bias ? load<Floats>(m.bias + block * LANES) : Floats{};
        for (int row = rows.from; row < rows.to; row += TILE) {
            int count = std::min(TILE, rows.to - row);
            block_of(count, m, block, x, row, out);
            for (int r = 0; r < count; r++) take(row - rows.from + r, block * LANES, out[r] + bias);
        }
    }
}

// Like `product` for a matrix in which blocks of gate and up alternate: `take` gets both.
template <class Take>
inline void paired_product(Range pairs, const Matrix& m, const Inputs& x, int rows, Take take) {
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
