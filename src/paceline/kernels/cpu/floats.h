// Packing of rows of floats, and of codes that are converted to another kind. `quantize.py` describes the rounding.
#pragma once

#include "pack.h"

namespace paceline {

// ggml's numbers of float types.
enum Type : int32_t { GGML_F32 = 0, GGML_F16 = 1, GGML_BF16 = 30 };

inline bool is_float(int type) { return type == GGML_F32 || type == GGML_F16 || type == GGML_BF16; }

// Up to 16 rows of `in` elements, the outputs of a block. A null row is zero.
struct BlockRows {
    const uint8_t* const* rows;
    const int32_t* types;
    int count, in;

    const uint8_t* row(int lane) const { return lane < count ? rows[lane] : nullptr; }
};

// Rounds to nearest, ties to even.
inline half to_half(float x) {
    const uint32_t bits = read<uint32_t>(&x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000) return half(sign | 0x7e00);
    if (size >= 0x477ff000) return half(sign | 0x7c00);
    if (size >= 0x38800000) return half(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    const float shifted = read<float>(&size) + 0.5f;  // rounds at the last bit of a float16
    return half(sign | (read<uint32_t>(&shifted) - 0x3f000000));
}

// Reads a group of floats starting at element k. Past the end of the row it repeats the last one, which does not change the
// group's range.
inline void read_group(float* to, int type, const uint8_t* row, int k, int in) {
    const int n = std::min(GROUP, in - k);
    if (type == GGML_F32) {
        std::memcpy(to, row + size_t(k) * 4, size_t(n) * 4);
    } else {
        uint16_t numbers[GROUP] = {};
        std::memcpy(numbers, row + size_t(k) * 2, size_t(n) * 2);
        for (int i = 0; i < GROUP; i += LANES) store(to + i, type == GGML_F16 ? from_half(numbers + i) : widen(numbers + i));
    }
    for (int i = n; i < GROUP; i++) to[i] = to[n - 1];
}

// One group of 16 rows of floats, one row per lane.
struct FloatGroup {
    alignas(64) float at[GROUP][LANES];

    FloatGroup(const BlockRows& block, int k) {
        float numbers[GROUP];
        for (int lane = 0; lane < LANES; lane++) {
            if (const uint8_t* row = block.row(lane))
                read_group(numbers, block.types[lane], row, k, block.in);
            else
                std::fill_n(numbers, GROUP, 0.0f);
            for (int i = 0; i < GROUP; i++) at[i][lane] = numbers[i];
        }
    }

    Floats operator[](int i) const { return load<Floats>(at[i]); }
};

inline Floats nearest_code(const Floats& x, float least, float most) {
    const Floats bounded = select(x > least, select(x < most, x, all(most)), all(least));  // a NaN becomes `least`
    return bounded + 12582912.0f - 12582912.0f;
}

// Stores scales as float16 and returns them as stored.
inline Floats stored_half(const Floats& x, uint8_t* to) {
    half numbers[LANES];
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = to_half(x[lane]);
    std::memcpy(to, numbers, sizeof numbers);
    return from_half(numbers);
}

inline Floats divisor(const Floats& scale) { return select(scale == 0.0f, all(INFINITY), scale); }

inline void store_codes(uint8_t* to, const Floats* codes, int count, int bits) {
    for (int i = 0; i < count; i++) {
        Ints code = convert<Ints>(codes[i]);
        if (bits == 4) code |= convert<Ints>(codes[i + count]) << 4;
        for (int lane = 0; lane < LANES; lane++) to[i / 4 * 64 + lane * 4 + i % 4] = uint8_t(code[lane]);
    }
}

inline void pack_int8(const FloatGroup& x, uint8_t* to) {
    Floats largest{}, codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const Floats size = select(x[i] < 0.0f, -x[i], x[i]);
        largest = select(largest > size, largest, size);
    }
    const Floats step = divisor(stored_half(largest / 127.0f, to + GROUP * LANES));
    for (int i = 0; i < GROUP; i++) codes[i] = nearest_code(x[i] / step, -127, 127) + 128.0f;
    store_codes(to, codes, GROUP, 8);
}

inline void pack_int4(const FloatGroup& x, uint8_t* to) {
    constexpr int FITS = 4;
    Floats low = x[0], high = x[0], mean{}, codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        low = select(low < x[i], low, x[i]), high = select(high > x[i], high, x[i]);
        mean += x[i];
    }
    mean = mean * (1.0f / GROUP);
    Floats scale = (high - low) / 15.0f, offset = low;
    for (int fit = 0; fit < FITS; fit++) {
        // Choose the nearest codes, then fit the line with the least squared error to them.
        const Floats step = divisor(scale);
        Floats middle{}, products{}, squares{};
        for (int i = 0; i < GROUP; i++) middle += codes[i] = nearest_code((x[i] - offset) / step, 0, 15);
        middle = middle * (1.0f / GROUP);
        for (int i = 0; i < GROUP; i++) {
            const Floats off = codes[i] - middle;
            products = fma(off, x[i], products), squares = fma(off, off, squares);
        }
        scale = products / select(squares > 1e-9f, squares, all(1e-9f));
        offset = mean - scale * middle;
    }
    uint8_t* scales = to + GROUP * LANES / 2;
    scale = stored_half(scale, scales), offset = stored_half(offset, scales + 2 * LANES);
    const Floats step = divisor(scale);
    for (int i = 0; i < GROUP; i++) codes[i] = nearest_code((x[i] - offset) / step, 0, 15);
    store_codes(to, codes, GROUP / 2, 4);
}

// The IQ4_NL value nearest to x, and its code.
struct NearestIq4 {
    Floats value = all(IQ4_VALUES[0] - 128.0f), code{};

    explicit NearestIq4(const Floats& x) {
        for (int i = 0; i < 15; i++) {
            const float low = IQ4_VALUES[i] - 128.0f, high = IQ4_VALUES[i + 1] - 128.0f;
            const auto above = x > (low + high) / 2;
            value = select(above, all(high), value), code = select(above, all(i + 1.0f), code);
        }
    }
};

inline void pack_iq4_nl(const FloatGroup& x, uint8_t* to) {
    constexpr int FITS = 2;
    Floats largest{}, codes[GROUP];
    for (int i = 0; i < GROUP; i++) largest = select(x[i] * x[i] > largest * largest, x[i], largest);
    Floats scale = largest / -127.0f;  // -127 is the value furthest from 0
    for (int fit = 0; fit < FITS; fit++) {
        const Floats step = divisor(scale);
        Floats products{}, squares{};
        for (int i = 0; i < GROUP; i++) {
            const Floats value = NearestIq4(x[i] / step).value;
            products = fma(value, x[i], products), squares = fma(value, value, squares);
        }
        scale = products / squares;
    }
    const Floats step = divisor(stored_half(scale, to + GROUP * LANES / 2));
    for (int i = 0; i < GROUP; i++) codes[i] = NearestIq4(x[i] / step).code;
    store_codes(to, codes, GROUP / 2, 4);
}

// Packs pairs of neighbouring inputs with one lane per output, and zeros past the end.
inline void pack_bf16(const BlockRows& block, int k, uint8_t* to) {
    const int n = std::min(GROUP, block.in - k);
    for (int lane = 0; lane < LANES; lane++) {
        bf16 numbers[GROUP] = {};
        const uint8_t* row = block.row(lane);
        if (row && block.types[lane] == GGML_BF16) {
            std::memcpy(numbers, row + size_t(k) * 2, size_t(n) * 2);
        } else if (row) {
            float x[GROUP];
            read_group(x, block.types[lane], row, k, block.in);
            for (int i = 0; i < n; i++) numbers[i] = narrowed(x[i]);
        }
        for (int i = 0; i < GROUP; i += 2) std::memcpy(to + i / 2 * 64 + lane * 4, numbers + i, 4);
    }
}

// Packs single inputs with one lane per output, and zeros past the end.
template <class Number, class Convert>
inline void pack_single(const BlockRows& block, int k, uint8_t* to, Convert convert) {
    const int n = std::min(GROUP, block.in - k);
    for (int lane = 0; lane < LANES; lane++) {
        Number numbers[GROUP] = {};
        float x[GROUP];
        if (const uint8_t* row = block.row(lane)) {
            read_group(x, block.types[lane], row, k, block.in);
            for (int i = 0; i < n; i++) numbers[i] = convert(x[i]);
        }
        for (int i = 0; i < GROUP; i++) std::memcpy(to + (i * LANES + lane) * sizeof(Number), numbers + i, sizeof(Number));
    }
}

// Bytes of one group of 16 rows, for the kinds that floats can be packed to; 0 for other kinds.
inline int float_group_bytes(int kind) {
    switch (kind) {
        case F32: return LANES * GROUP * 4;
        case BF16: case F16: return LANES * GROUP * 2;
        case INT8: return LANES * (GROUP + 2);
        case INT4_OFFSET: return LANES * (GROUP / 2 + 4);
        case IQ4_NL: return LANES * (GROUP / 2 + 2);
    }
    return 0;
}

// Reads a row of floats or codes as floats. Codes are read in whole units.
inline void read_row(float* to, int type, const uint8_t* row, int in) {
    const int kind = kind_of_type(type);
    for (int k = 0; !kind && k < in; k += GROUP) {
        float group[GROUP];
        read_group(group, type, row, k, in);
        std::copy_n(group, std::min(GROUP, in - k), to + k);
    }
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        for (int k = 0; k < in; k += F::UNIT, row += block_size(kind).bytes) {
            Unit u;
            read_block(u, kind, row);
            values<F>(to + k, u);
        }
    });
}

// Packs a block of rows of floats or codes. `decoded` has room for 16 rows, and is used for codes.
inline void pack_float_block(int kind, BlockRows block, uint8_t* to, float* decoded) {
    const uint8_t* rows[LANES];
    int32_t types[LANES];
    for (int lane = 0; decoded && lane < block.count; lane++) {
        float* row = decoded + size_t(lane) * block.in;
        if (block.rows[lane]) read_row(row, block.types[lane], block.rows[lane], block.in);
        rows[lane] = block.rows[lane] ? reinterpret_cast<const uint8_t*>(row) : nullptr, types[lane] = GGML_F32;
    }
    if (decoded) block.rows = rows, block.types = types;
    for (int k = 0; k < block.in; k += GROUP, to += float_group_bytes(kind)) {
        switch (kind) {
            case F32: pack_single<float>(block, k, to, [](float x) { return x; }); break;
            case F16: pack_single<half>(block, k, to, [](float x) { return to_half(x); }); break;
            case BF16: pack_bf16(block, k, to); break;
            case INT8: pack_int8(FloatGroup(block, k), to); break;
            case IQ4_NL: pack_iq4_nl(FloatGroup(block, k), to); break;
            default: pack_int4(FloatGroup(block, k), to);
        }
    }
}

}  // namespace paceline
