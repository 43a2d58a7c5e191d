// Converts GGUF's blocks to the layouts of formats.h, and rows of these layouts to floats. ggml's `ggml-common.h` and
// `ggml-quants.c` define GGUF's blocks.
#pragma once

#include "elements.h"
#include "product.h"

namespace paceline {

// Codes and scales of 32 or 256 elements of one output, whatever their format.
struct Unit {
    uint8_t codes[256];
    half scale, offset;
    uint8_t scales[16], offsets[16];  // small integers of the sub-blocks; MXFP4 keeps its exponent in `scales[0]`
};

// Bytes and elements of a block of a GGUF type.
struct BlockSize {
    int bytes, elements;
};

inline BlockSize block_size(int kind) {
    switch (kind) {
        case Q4_0: return {18, 32};
        case INT4_OFFSET: return {20, 32};  // Q4_1
        case Q5_0: return {22, 32};
        case Q5_1: return {24, 32};
        case INT8: return {34, 32};  // Q8_0
        case Q2_K: return {84, 256};
        case Q3_K: return {110, 256};
        case Q4_K: return {144, 256};
        case Q5_K: return {176, 256};
        case Q6_K: return {210, 256};
        case IQ4_NL: return {18, 32};
        case IQ4_XS: return {136, 256};
        case MXFP4: return {17, 32};
    }
    return {0, 0};
}

// The kind that holds a ggml type unchanged, or 0 if there is none.
inline int kind_of_type(int type) {
    if (type == 3) return INT4_OFFSET;
    if (type == 8) return INT8;
    return block_size(64 + type).bytes ? 64 + type : 0;
}

// --- GGUF blocks ----------------------------------------------------------------------------------------------------

// Unpacks the low halves of n bytes, then the high halves.
inline void nibbles(uint8_t* __restrict to, const uint8_t* __restrict from, int n) {
    for (int i = 0; i < n; i++) to[i] = from[i] & 15;
    for (int i = 0; i < n; i++) to[i + n] = from[i] >> 4;
}

// Reads scales and offsets of 6 bits. GGUF stores the upper bits of half of them apart from the lower bits.
inline void six_bits(Unit& u, const uint8_t* p) {
    for (int i = 0; i < 4; i++) {
        u.scales[i] = p[i] & 63, u.scales[i + 4] = (p[i + 8] & 15) | (p[i] >> 6) << 4;
        u.offsets[i] = p[i + 4] & 63, u.offsets[i + 4] = p[i + 8] >> 4 | (p[i + 4] >> 6) << 4;
    }
}

inline void read_q2_k(Unit& u, const uint8_t* p) {
    for (int i = 0; i < 16; i++) u.scales[i] = p[i] & 15, u.offsets[i] = p[i] >> 4;
    for (int i = 0; i < 256; i++) u.codes[i] = p[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    u.scale = read<half>(p + 80), u.offset = read<half>(p + 82);
}

inline void read_q3_k(Unit& u, const uint8_t* p) {
    const uint8_t *low = p + 32, *scales = p + 96;
    for (int i = 0; i < 256; i++)
        u.codes[i] = (low[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) | (p[i % 32] >> (i / 32) & 1) << 2;
    for (int i = 0; i < 16; i++)
        u.scales[i] = ((scales[i % 8] >> (i / 8 * 4) & 15) | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32;
    u.scale = read<half>(p + 108);
}

inline void read_q4_k(Unit& u, const uint8_t* p, const uint8_t* codes) {
    u.scale = read<half>(p), u.offset = read<half>(p + 2);
    six_bits(u, p + 4);
    for (int i = 0; i < 4; i++) nibbles(u.codes + 64 * i, codes + 32 * i, 32);
}

inline void read_q6_k(Unit& u, const uint8_t* p) {
    for (int i = 0; i < 2; i++) {
        nibbles(u.codes + 128 * i, p + 64 * i, 64);
        for (int quarter = 0; quarter < 4; quarter++) {
            uint8_t* __restrict to = u.codes + 128 * i + 32 * quarter;
            const uint8_t* __restrict high = p + 128 + 32 * i;
            for (int k = 0; k < 32; k++) to[k] |= (high[k] >> 2 * quarter & 3) << 4;
        }
    }
    std::memcpy(u.scales, p + 192, 16);
    u.scale = read<half>(p + 208);
}

inline void read_iq4_xs(Unit& u, const uint8_t* p) {
    const unsigned high = read<uint16_t>(p + 2);
    u.scale = read<half>(p);
    for (int i = 0; i < 8; i++) {
        u.scales[i] = ((p[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32;
        nibbles(u.codes + 32 * i, p + 8 + 16 * i, 16);
    }
}

// Reads codes of 5 bits: four bytes with their fifth bits, then 16 bytes with two lower halves each.
inline void five_bits(Unit& u, const uint8_t* p) {
    const uint32_t fifth = read<uint32_t>(p);
    nibbles(u.codes, p + 4, 16);
    for (int i = 0; i < 32; i++) u.codes[i] |= (fifth >> i & 1) << 4;
}

// Reads one block of the GGUF type that `kind` holds.
inline void read_block(Unit& u, int kind, const uint8_t* p) {
    u.scale = read<half>(p);
    switch (kind) {
        case Q4_0: case IQ4_NL: return nibbles(u.codes, p + 2, 16);
        case INT4_OFFSET: u.offset = read<half>(p + 2); return nibbles(u.codes, p + 4, 16);
        case Q5_0: return five_bits(u, p + 2);
        case Q5_1: u.offset = read<half>(p + 2); return five_bits(u, p + 4);
        case INT8:
            for (int i = 0; i < 32; i++) u.codes[i] = p[2 + i] ^ 128;
            return;
        case Q2_K: return read_q2_k(u, p);
        case Q3_K: return read_q3_k(u, p);
        case Q4_K: return read_q4_k(u, p, p + 16);
        case Q5_K:
            read_q4_k(u, p, p + 48);
            for (int i = 0; i < 256; i++) u.codes[i] |= (p[16 + i % 32] >> (i / 32) & 1) << 4;
            return;
        case Q6_K: return read_q6_k(u, p);
        case IQ4_XS: return read_iq4_xs(u, p);
        case MXFP4: u.scales[0] = p[0]; return nibbles(u.codes, p + 1, 16);
    }
}

// --- units of a packed block ----------------------------------------------------------------------------------------

// Writes one output's codes of a group, four per word, in the layout that `Format::four` reads.
template <class F>
inline void write_codes(uint8_t* at, int lane, const uint8_t* codes) {
    uint32_t words[F::BITS] = {};
    for (int q = 0; q < 8; q++) {
        const uint32_t four = read<uint32_t>(codes + 4 * q);
        if (F::LOW == 8) words[q] = four;
        if (F::LOW == 4) words[q % 4] |= (four & 0x0f0f0f0f) << q / 4 * 4;
        if (F::LOW == 2) words[q / 4] |= (four & 0x03030303) << q % 4 * 2;
        if (F::BITS - F::LOW == 1) words[F::LOW] |= (four >> F::LOW & 0x01010101) << q;
        if (F::BITS - F::LOW == 2) words[F::LOW + q / 4] |= (four >> F::LOW & 0x03030303) << q % 4 * 2;
    }
    for (int i = 0; i < F::BITS; i++) std::memcpy(at + 64 * i + 4 * lane, &words[i], 4);
}

template <class F>
inline void read_codes(uint8_t* codes, const uint8_t* at, int lane) {
    for (int q = 0; q < 8; q++) {
        auto word = [&](int i) { return read<uint32_t>(at + 64 * i + 4 * lane); };
        uint32_t four = word(F::LOW == 8 ? q : F::LOW == 4 ? q % 4 : q / 4);
        if (F::LOW == 4) four = four >> q / 4 * 4 & 0x0f0f0f0f;
        if (F::LOW == 2) four = four >> q % 4 * 2 & 0x03030303;
        if (F::BITS - F::LOW == 1) four |= (word(F::LOW) >> q & 0x01010101) << F::LOW;
        if (F::BITS - F::LOW == 2) four |= (word(F::LOW + q / 4) >> q % 4 * 2 & 0x03030303) << F::LOW;
        std::memcpy(codes + 4 * q, &four, 4);
    }
}

// Calls `half_at` and `byte_at` with every number of a unit except its codes, and with the number's place. A byte may hold two
// numbers.
template <class F, class U, class Halves, class Bytes>
inline void each_scale(U& u, int lane, Halves half_at, Bytes byte_at) {
    const int halves = F::HEADER ? 0 : F::CODES;
    if (F::SCALES != POWERS) half_at(halves + 2 * lane, u.scale);
    if (F::HAS_OFFSETS) half_at(halves + 2 * (LANES + lane), u.offset);
    if (F::SCALES == POWERS) byte_at(F::CODES + lane, u.scales[0], nullptr);
    for (int g = 0; F::IN_UNITS && g < 8; g++) {
        const int at = F::HEADER + g * F::BYTES + F::CODES + lane;
        if (F::SUB_BLOCK == GROUP) {
            byte_at(at, u.scales[g], nullptr);
            if (F::HAS_OFFSETS) byte_at(at + LANES, u.offsets[g], nullptr);
        } else {
            for (int i = 0; i < 2; i++) byte_at(at + i * LANES, u.scales[2 * g + i], F::HAS_OFFSETS ? &u.offsets[2 * g + i] : nullptr);
        }
    }
}

template <class F>
inline void write_unit(uint8_t* to, int lane, const Unit& u) {
    for (int g = 0; g < F::UNIT / GROUP; g++) write_codes<F>(to + F::HEADER + g * F::BYTES, lane, u.codes + g * GROUP);
    each_scale<F>(
        u, lane, [&](int at, half x) { std::memcpy(to + at, &x, 2); },
        [&](int at, uint8_t low, const uint8_t* high) { to[at] = high ? low | *high << 4 : low; });
}

template <class F>
inline void read_unit(Unit& u, const uint8_t* from, int lane) {
    for (int g = 0; g < F::UNIT / GROUP; g++) read_codes<F>(u.codes + g * GROUP, from + F::HEADER + g * F::BYTES, lane);
    each_scale<F>(
        u, lane, [&](int at, half& x) { x = read<half>(from + at); },
        [&](int at, uint8_t& low, uint8_t* high) {
            low = high ? from[at] & 15 : from[at];
            if (high) *high = from[at] >> 4;
        });
}

inline float widened_half(half x) {
    half all[LANES] = {x};
    return from_half(all)[0];
}

// Decodes the weights of a unit, with the same order of operations as ggml's decoders.
template <class F>
inline void values(float* to, const Unit& u) {
    const float unit_scale = F::SCALES == POWERS ? power(u.scales[0]) : widened_half(u.scale);
    const float unit_offset = F::HAS_OFFSETS ? widened_half(u.offset) : 0;
    for (int i = 0; i < F::UNIT; i++) {
        const int sub_block = i / F::SUB_BLOCK;
        int value = u.codes[i];
        if constexpr (F::TABLE != nullptr) value = F::TABLE[value];
        float scale = unit_scale, offset = unit_offset;
        if (F::IN_UNITS) scale *= F::HAS_OFFSETS ? float(u.scales[sub_block]) : float(int8_t(u.scales[sub_block]));
        if (F::IN_UNITS && F::HAS_OFFSETS) offset *= -float(u.offsets[sub_block]);
        to[i] = scale * float(value - F::ZERO_POINT);
        if (F::HAS_OFFSETS) to[i] += offset;
    }
}

// --- whole matrices -------------------------------------------------------------------------------------------------

// Packs a block of 16 outputs from rows in the GGUF type that `kind` holds. A null row is zero.
inline void pack_block(int kind, int in, const uint8_t* const* rows, int count, uint8_t* to) {
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        const int bytes = block_size(kind).bytes;
        const Unit zeros{};
        Unit u{};
        for (int unit = 0; unit < in / F::UNIT; unit++, to += F::HEADER + F::UNIT / GROUP * F::BYTES)
            for (int lane = 0; lane < LANES; lane++) {
                const bool has_row = lane < count && rows[lane];
                if (has_row) read_block(u, kind, rows[lane] + size_t(unit) * bytes);
                write_unit<F>(to, lane, has_row ? u : zeros);
            }
    });
}

// Reads row `index` of a matrix of floats into `to` [in].
template <class Element>
inline void float_row(const Matrix& m, int64_t index, float* to) {
    using Number = typename Element::Number;
    const int adjacent = m.kind == BF16 ? 2 : 1;  // neighbouring inputs that are adjacent in memory
    const Number* from = reinterpret_cast<const Number*>(m.weights) + index / LANES * LANES * m.in + index % LANES * adjacent;
    for (int k = 0; k < m.in; k += LANES) {
        Number numbers[LANES];
        for (int i = 0; i < LANES; i++) numbers[i] = from[(k + i) / adjacent * adjacent * LANES + i % adjacent];
        store(to + k, Element::widen(numbers));
    }
}

// Reads row `index` of a matrix into `to` [in].
inline void row_of(const Matrix& m, int64_t index, float* to) {
    if (m.kind == BF16) return float_row<BFloat16>(m, index, to);
    if (m.kind == F16) return float_row<Float16>(m, index, to);
    if (m.kind == F32) return float_row<Float32>(m, index, to);
    if (m.kind == STACKED) return row_of(reinterpret_cast<const Matrix*>(m.weights)[index / LANES], index % LANES, to);
    with_format(m.kind, [&](auto format) {
        using F = decltype(format);
        const uint8_t* p = m.weights + index / LANES * F::block_bytes(m.in);
        for (int k = 0; k < m.in; k += F::UNIT, p += F::HEADER + F::UNIT / GROUP * F::BYTES) {
            Unit u;
            read_unit<F>(u, p, int(index % LANES));
            values<F>(to + k, u);
        }
    });
}

}  // namespace paceline
