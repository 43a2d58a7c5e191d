// Rows of weights as files have them, in ggml's types: read as floats, or as codes with a scale.
#pragma once

#include "product.h"

namespace paceline {

// Types of a row's elements, by ggml's numbers. Layouts: ggml's `ggml-common.h`.
enum Type : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30
};

inline bool is_float(int type) { return type == F32 || type == F16 || type == BF16; }
inline bool has_four_bits(int type) { return type == Q4_0 || type == Q4_1 || type == Q4_K; }
inline bool has_floors(int type) { return has_four_bits(type) || type == Q5_1 || type == Q5_K; }
inline bool is_placed(int type) { return has_floors(type) || type == Q5_0 || type == Q8_0; }
inline bool is_coded(int type) { return is_placed(type) || type == Q6_K; }

inline float half_at(const uint8_t* from) {
    half lanes[LANES] = {read<half>(from)};
    return from_half(lanes)[0];
}

// 32 elements of a row: w = scale * (code - centre) + floor, with a scale for each half.
struct CodeGroup {
    uint8_t codes[GROUP];
    float scale[2], floor = 0;
    int centre = 0;

    CodeGroup(int type, const uint8_t* row, int k) {
        const int group = k / GROUP;
        switch (type) {
            case Q4_0: simple(row + group * 18), nibbles(row + group * 18 + 2), floor = -8 * scale[0]; break;
            case Q4_1: simple(row + group * 20), nibbles(row + group * 20 + 4), floor = half_at(row + group * 20 + 2); break;
            case Q5_0: five(row + group * 22, 2), centre = 16; break;
            case Q5_1: five(row + group * 24, 4), floor = half_at(row + group * 24 + 2); break;
            case Q8_0: eight(row + group * 34); break;
            case Q4_K: four_k(row + group / 8 * 144, 16, group % 8); break;
            case Q5_K: five_k(row + group / 8 * 176, group % 8); break;
            default: six_k(row + group / 8 * 210, group % 8);
        }
    }

    void to_floats(float* to) const {
        for (int i = 0; i < GROUP; i++) to[i] = scale[i / 16] * float(int(codes[i]) - centre) + floor;
    }

   private:
    void simple(const uint8_t* block) { scale[0] = scale[1] = half_at(block); }

    // The low halves of 16 bytes, then the high ones.
    void nibbles(const uint8_t* from) {
        for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
    }

    void five(const uint8_t* block, int at) {
        simple(block), nibbles(block + at + 4);
        const uint32_t fifth = read<uint32_t>(block + at);
        for (int i = 0; i < GROUP; i++) codes[i] |= (fifth >> i & 1) << 4;
    }

    void eight(const uint8_t* block) {
        simple(block), centre = 128;
        for (int i = 0; i < GROUP; i++) codes[i] = block[2 + i] ^ 128;
    }

    // Scale and floor: halves of the block of 8 groups times 6 bits each, partly scattered.
    void scales_k(const uint8_t* block, int group) {
        const uint8_t* packed = block + 4;
        const int i = group % 4;
        int s = packed[i] & 63, f = packed[i + 4] & 63;
        if (group >= 4) s = (packed[i + 8] & 15) | packed[i] >> 6 << 4, f = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
        scale[0] = scale[1] = half_at(block) * float(s);
        floor = -(half_at(block + 2) * float(f));
    }

    // Each 32 bytes have a group in their low halves, and the next one.
    void four_k(const uint8_t* block, int at, int group) {
        scales_k(block, group);
        const uint8_t* from = block + at + group / 2 * GROUP;
        const int shift = group % 2 * 4;
        for (int i = 0; i < GROUP; i++) codes[i] = from[i] >> shift & 15;
    }

    // Bit j of the 32 bytes after the scales is the fifth bit of group j.
    void five_k(const uint8_t* block, int group) {
        four_k(block, 48, group);
        for (int i = 0; i < GROUP; i++) codes[i] |= (block[16 + i] >> group & 1) << 4;
    }

    // Two halves of 128 elements: 64 bytes with the low 4 bits of groups 0 and 2, 1 and 3, then 32 with two bits of each.
    void six_k(const uint8_t* block, int group) {
        const uint8_t *low = block + group / 4 * 64 + group % 2 * 32, *high = block + 128 + group / 4 * 32;
        const int shift = group % 4 / 2 * 4, up = group % 4 * 2;
        for (int i = 0; i < GROUP; i++) codes[i] = uint8_t((low[i] >> shift & 15) | (high[i] >> up & 3) << 4);
        for (int i = 0; i < 2; i++) scale[i] = half_at(block + 208) * float(int8_t(block[192 + group * 2 + i]));
        centre = 32;
    }
};

// Elements k.. of a row; beyond its end the last one again, which changes no group's range.
inline void read_group(float* to, int type, const uint8_t* row, int k, int in) {
    const int n = std::min(GROUP, in - k);
    if (!is_float(type)) return CodeGroup(type, row, k).to_floats(to);  // always whole groups
    if (type == F32) {
        std::memcpy(to, row + size_t(k) * 4, size_t(n) * 4);
    } else {
        uint16_t own[GROUP] = {};
        std::memcpy(own, row + size_t(k) * 2, size_t(n) * 2);
        for (int i = 0; i < GROUP; i += LANES) store(to + i, type == F16 ? from_half(own + i) : widen(own + i));
    }
    for (int i = n; i < GROUP; i++) to[i] = to[n - 1];
}

// Elements of a row, as floats.
inline void read_row(float* to, int type, const uint8_t* row, int in) {
    float group[GROUP];
    for (int k = 0; k < in; k += GROUP) {
        read_group(group, type, row, k, in);
        std::copy_n(group, std::min(GROUP, in - k), to + k);
    }
}

}  // namespace paceline
