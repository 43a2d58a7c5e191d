// Matrices in the layout of `Matrix`, made of rows in memory: of a mapped file, say, in the types that files have.
#pragma once

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "rows.h"

namespace paceline {

// Up to 16 rows of `in` elements, the outputs of a block. Null: zeros.
struct BlockRows {
    const uint8_t* const* rows;
    const int32_t* types;
    int count, in;

    const uint8_t* row(int lane) const { return lane < count ? rows[lane] : nullptr; }
};

inline size_t block_bytes(int kind, int in) {
    const size_t groups = (size_t(in) + GROUP - 1) / GROUP;
    return groups * (kind == WIDE ? GROUP * LANES * 2 : bytes_of_group(kind));
}

// To the nearest, ties to even.
inline half to_half(float x) {
    const uint32_t bits = read<uint32_t>(&x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000) return half(sign | 0x7e00);
    if (size >= 0x477ff000) return half(sign | 0x7c00);
    if (size >= 0x38800000) return half(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    const float shifted = read<float>(&size) + 0.5f;  // its last bit is float16's
    return half(sign | (read<uint32_t>(&shifted) - 0x3f000000));
}

// A group of 16 rows of floats, a lane for each.
struct FloatGroup {
    alignas(64) float at[GROUP][LANES];

    FloatGroup(const BlockRows& block, int k) {
        float own[GROUP];
        for (int lane = 0; lane < LANES; lane++) {
            if (const uint8_t* row = block.row(lane))
                read_group(own, block.types[lane], row, k, block.in);
            else
                std::fill_n(own, GROUP, 0.0f);
            for (int i = 0; i < GROUP; i++) at[i][lane] = own[i];
        }
    }

    Floats operator[](int i) const { return load<Floats>(at[i]); }
};

// --- floats to codes: `quantize.py` describes them ------------------------------------------------------------------

inline Floats nearest_code(const Floats& x, float least, float most) {
    const Floats bounded = select(x > least, select(x < most, x, all(most)), all(least));  // a NaN is the least
    return bounded + 12582912.0f - 12582912.0f;
}

// The scale as it is stored, and by what to divide: infinity for 0.
inline Floats stored_half(const Floats& x, uint8_t* to) {
    half own[LANES];
    for (int lane = 0; lane < LANES; lane++) own[lane] = to_half(x[lane]);
    std::memcpy(to, own, sizeof own);
    return from_half(own);
}

inline Floats divisor(const Floats& scale) { return select(scale == 0.0f, all(INFINITY), scale); }

inline void store_codes(uint8_t* to, const Floats* codes, int count, int bits) {
    for (int i = 0; i < count; i++) {
        Ints code = convert<Ints>(codes[i]);
        if (bits == 4) code |= convert<Ints>(codes[i + count]) << 4;
        for (int lane = 0; lane < LANES; lane++) to[i / 4 * 64 + lane * 4 + i % 4] = uint8_t(code[lane]);
    }
}

inline void pack_eight(const FloatGroup& x, uint8_t* to) {
    Floats largest{}, codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const Floats size = select(x[i] < 0.0f, -x[i], x[i]);
        largest = select(largest > size, largest, size);
    }
    const Floats step = divisor(stored_half(largest / 127.0f, to + bytes_of_codes(EIGHT)));
    for (int i = 0; i < GROUP; i++) codes[i] = nearest_code(x[i] / step, -127, 127) + 128.0f;
    store_codes(to, codes, GROUP, 8);
}

inline void pack_four(const FloatGroup& x, uint8_t* to) {
    constexpr int FITS = 4;
    Floats low = x[0], high = x[0], mean{}, codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        low = select(low < x[i], low, x[i]), high = select(high > x[i], high, x[i]);
        mean += x[i];
    }
    mean = mean * (1.0f / GROUP);
    Floats scale = (high - low) / 15.0f, floor = low;
    for (int fit = 0; fit < FITS; fit++) {
        // The line of least squared error for the codes nearest the last one.
        const Floats step = divisor(scale);
        Floats middle{}, products{}, squares{};
        for (int i = 0; i < GROUP; i++) middle += codes[i] = nearest_code((x[i] - floor) / step, 0, 15);
        middle = middle * (1.0f / GROUP);
        for (int i = 0; i < GROUP; i++) {
            const Floats off = codes[i] - middle;
            products = fma(off, x[i], products), squares = fma(off, off, squares);
        }
        scale = products / select(squares > 1e-9f, squares, all(1e-9f));
        floor = mean - scale * middle;
    }
    uint8_t* scales = to + bytes_of_codes(FOUR_AND_FLOOR);
    scale = stored_half(scale, scales), floor = stored_half(floor, scales + 2 * LANES);
    const Floats step = divisor(scale);
    for (int i = 0; i < GROUP; i++) codes[i] = nearest_code((x[i] - floor) / step, 0, 15);
    store_codes(to, codes, GROUP / 2, 4);
}

// Pairs of neighbouring inputs, a lane per output; zeros beyond the end.
inline void pack_wide(const BlockRows& block, int k, uint8_t* to) {
    const int n = std::min(GROUP, block.in - k);
    for (int lane = 0; lane < LANES; lane++) {
        bf16 own[GROUP] = {};
        const uint8_t* row = block.row(lane);
        if (row && block.types[lane] == BF16) {
            std::memcpy(own, row + size_t(k) * 2, size_t(n) * 2);
        } else if (row) {
            float x[GROUP];
            read_group(x, block.types[lane], row, k, block.in);
            for (int i = 0; i < n; i++) own[i] = narrowed(x[i]);
        }
        for (int i = 0; i < GROUP; i += 2) std::memcpy(to + i / 2 * 64 + lane * 4, own + i, 4);
    }
}

// --- codes as they are ----------------------------------------------------------------------------------------------

// A group of one row, as it lies in lane `lane` of the group at `to`: in 8 bits the floor's code is 128.
inline void place(int kind, const CodeGroup& own, int lane, uint8_t* to) {
    uint8_t codes[GROUP];
    int count = GROUP;
    if (kind == FOUR_AND_FLOOR) {
        count = GROUP / 2;
        for (int i = 0; i < count; i++) codes[i] = uint8_t(own.codes[i] | own.codes[i + count] << 4);
    } else {
        for (int i = 0; i < count; i++) codes[i] = uint8_t(own.codes[i] + 128 - own.centre);
    }
    for (int i = 0; i < count; i += 4) std::memcpy(to + i / 4 * 64 + lane * 4, codes + i, 4);
    const half scale = to_half(own.scale[0]), floor = to_half(own.floor);
    uint8_t* scales = to + bytes_of_codes(kind) + 2 * lane;
    std::memcpy(scales, &scale, 2);
    if (has_floor(kind)) std::memcpy(scales + 2 * LANES, &floor, 2);
}

// --- all blocks -----------------------------------------------------------------------------------------------------

// Whether rows of this type can become a matrix of this kind.
inline bool packs(int kind, int type) {
    if (kind == WIDE) return is_float(type);
    if (kind == FOUR_AND_FLOOR) return is_float(type) || has_four_bits(type);
    return is_float(type) || (is_coded(type) && (kind == EIGHT_AND_FLOOR || !has_floors(type)));
}

// Rows without codes that the kind could hold are quantised together, the others are placed.
inline void pack_group(int kind, const BlockRows& block, int k, uint8_t* to) {
    bool some = false;
    for (int lane = 0; lane < LANES; lane++) some |= !block.row(lane) || !is_placed(block.types[lane]);
    if (some && kind == FOUR_AND_FLOOR) pack_four(FloatGroup(block, k), to);
    if (some && kind != FOUR_AND_FLOOR) pack_eight(FloatGroup(block, k), to);
    if (some && kind == EIGHT_AND_FLOOR) {  // its scales lie where those of EIGHT do
        std::memset(to + bytes_of_codes(kind) + 2 * LANES, 0, 2 * LANES);
    }
    for (int lane = 0; lane < block.count; lane++) {
        if (block.row(lane) && is_placed(block.types[lane]))
            place(kind, CodeGroup(block.types[lane], block.row(lane), k), lane, to);
    }
}

inline void pack_block(int kind, const BlockRows& block, uint8_t* to) {
    const size_t bytes = block_bytes(kind, GROUP);
    for (int k = 0; k < block.in; k += GROUP, to += bytes) kind == WIDE ? pack_wide(block, k, to) : pack_group(kind, block, k, to);
}

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

// Writes all blocks of a matrix. Returns whether there is a way from every row's type to the kind.
inline bool pack(int kind, int out, int in, const uint8_t* const* rows, const int32_t* types, uint8_t* to, int threads) {
    for (int row = 0; row < out; row++)
        if (rows[row] && !packs(kind, types[row])) return false;
    const size_t bytes = block_bytes(kind, in);
    in_threads(threads, (out + LANES - 1) / LANES, [&](int block) {
        const int first = block * LANES;
        pack_block(kind, {rows + first, types + first, std::min(LANES, out - first), in}, to + block * bytes);
    });
    return true;
}

}  // namespace paceline
