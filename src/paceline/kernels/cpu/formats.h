// Layouts of quantised matrices in memory: a `Format` for each kind.
//
// A block of 16 outputs is a sequence of units. A unit is one group of 32 inputs; or, like a super-block of GGUF's K-quants, a header
// of 16 float16 numbers (32 with offsets), followed by 8 groups whose scales are small integers times these numbers. A group holds
// its codes in fours with one lane per output, then its scales. In some formats, a group consists of two sub-blocks, each with a
// small integer of its own.
#pragma once

#include "simd.h"

namespace paceline {

constexpr int GROUP = 32;  // elements of a row that share a scale

// Kinds of matrices: floats; 8-bit codes with a scale per group, without or with an offset; 4-bit codes with a scale and an offset.
// STACKED: see `Matrix`. Kinds of 64 and above are GGUF's types, 64 + ggml's number. GGUF's Q8_0 is INT8, and its Q4_1 is INT4_OFFSET.
enum Kind : int32_t {
    BF16 = 16, F16 = 17, F32 = 32, INT8 = 8, INT8_OFFSET = 9, INT4_OFFSET = 4, STACKED = 1,
    Q4_0 = 64 + 2, Q5_0 = 64 + 6, Q5_1 = 64 + 7, Q2_K = 64 + 10, Q3_K = 64 + 11, Q4_K = 64 + 12, Q5_K = 64 + 13,
    Q6_K = 64 + 14, IQ4_NL = 64 + 20, IQ4_XS = 64 + 23, MXFP4 = 64 + 39,
};

// Scales of a group. HALVES: float16. HALVES_AND_OFFSETS: float16 scales and offsets. POWERS: exponents of 2. SUPER: small
// integers times the unit's float16 scale. SUPER_AND_OFFSETS: in addition, offsets are small integers times the unit's second float16
// number, and are subtracted.
enum Scales { HALVES, HALVES_AND_OFFSETS, POWERS, SUPER, SUPER_AND_OFFSETS };

// Values of 4-bit codes, plus the format's zero point.
constexpr uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// w = scale * (value - ZERO_POINT) + offset. SUB_BLOCK: elements that share a small integer. TABLE: code -> value; null if they are equal.
template <int BITS_, Scales SCALES_, int ZERO_POINT_ = 0, int SUB_BLOCK_ = GROUP, const uint8_t* TABLE_ = nullptr>
struct Format {
    static constexpr int BITS = BITS_, ZERO_POINT = ZERO_POINT_, SUB_BLOCK = SUB_BLOCK_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr const uint8_t* TABLE = TABLE_;
    static constexpr bool IN_UNITS = SCALES == SUPER || SCALES == SUPER_AND_OFFSETS;
    static constexpr bool HAS_OFFSETS = SCALES == HALVES_AND_OFFSETS || SCALES == SUPER_AND_OFFSETS;
    static constexpr int VALUE_BITS = ZERO_POINT == 128 ? 8 : TABLE ? 5 : BITS;
    static constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2;  // low bits of all codes come first, then the remaining high bits
    static constexpr int UNIT = IN_UNITS ? 256 : GROUP;            // elements
    static constexpr int HEADER = IN_UNITS ? LANES * 2 * (1 + HAS_OFFSETS) : 0;  // bytes of a unit before its groups
    static constexpr int CODES = BITS * GROUP * LANES / 8;                  // bytes of a group's codes
    static constexpr int BYTES =                                            // of a group
        CODES + LANES * (SCALES == POWERS ? 1 : !IN_UNITS ? 2 * (1 + HAS_OFFSETS) : SUB_BLOCK < GROUP ? 2 : 1 + HAS_OFFSETS);

    static size_t block_bytes(int in) { return size_t(in) / GROUP * BYTES + size_t(in) / UNIT * HEADER; }

    // The values of the four codes `q` of 16 outputs, one register (`part`) of them.
    static BytePart four(const uint8_t* codes, int q, int part) {
        auto at = [&](int i) { return read<BytePart>(codes + 64 * i + part * REGISTER); };
        BytePart low = at(LOW == 8 ? q : LOW == 4 ? q % 4 : q / 4);
        if constexpr (LOW == 4) low = (q < 4 ? low : (BytePart)((ShortPart)low >> 4)) & 15;
        if constexpr (LOW == 2) low = (BytePart)((ShortPart)low >> 2 * (q % 4)) & 3;
        if constexpr (BITS - LOW == 1) low |= moved(at(LOW), LOW - q) & (1 << LOW);
        if constexpr (BITS - LOW == 2) low |= moved(at(LOW + q / 4), LOW - 2 * (q % 4)) & (3 << LOW);
        if constexpr (TABLE != nullptr) low = looked_up(TABLE, low);
        return low;
    }

   private:
    static BytePart moved(BytePart x, int up) {
        return (BytePart)(up > 0 ? (ShortPart)x << up : (ShortPart)x >> -up);  // bits that cross into another byte are masked off
    }
};

// Calls `use` with the format of a quantised kind.
template <class Use>
inline void with_format(int kind, const Use& use) {
    switch (kind) {
        case INT8: return use(Format<8, HALVES, 128>());
        case INT8_OFFSET: return use(Format<8, HALVES_AND_OFFSETS, 128>());
        case INT4_OFFSET: return use(Format<4, HALVES_AND_OFFSETS>());
        case Q4_0: return use(Format<4, HALVES, 8>());
        case Q5_0: return use(Format<5, HALVES, 16>());
        case Q5_1: return use(Format<5, HALVES_AND_OFFSETS>());
        case Q2_K: return use(Format<2, SUPER_AND_OFFSETS, 0, 16>());
        case Q3_K: return use(Format<3, SUPER, 4, 16>());
        case Q4_K: return use(Format<4, SUPER_AND_OFFSETS>());
        case Q5_K: return use(Format<5, SUPER_AND_OFFSETS>());
        case Q6_K: return use(Format<6, SUPER, 32, 16>());
        case IQ4_NL: return use(Format<4, HALVES, 128, GROUP, IQ4_VALUES>());
        case IQ4_XS: return use(Format<4, SUPER, 128, GROUP, IQ4_VALUES>());
        case MXFP4: return use(Format<4, POWERS, 12, GROUP, MXFP4_VALUES>());
    }
}

// 2^(exponent - 128). MXFP4's exponents are biased by 127, and the values in its table are doubled.
inline float power(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : uint32_t(exponent - 1) << 23;
    return read<float>(&bits);
}

// Scale and offset of a group. For groups of two sub-blocks: scale and offset of the unit, and the integers of both sub-blocks.
// A float16 number times a small integer is exact in float32.
template <class F>
struct GroupScales {
    Floats scale, offset;
    Ints first, second, first_offset, second_offset;

    GroupScales(const uint8_t* header, const uint8_t* at) {
        const half* halves = reinterpret_cast<const half*>(F::IN_UNITS ? header : at);
        if constexpr (F::SCALES == POWERS) {
            const Ints e = from_bytes(at);
            scale = as<Floats>(select(e < 2, 0x200000 + (e & 1) * 0x200000, (e - 1) << 23));
            return;
        }
        scale = from_half(halves);
        if (F::HAS_OFFSETS) offset = from_half(halves + LANES);
        if constexpr (F::IN_UNITS && F::HAS_OFFSETS) {
            const Ints x = from_bytes(at), y = from_bytes(at + LANES);
            offset = -offset;
            if (F::SUB_BLOCK == GROUP)
                scale = scale * convert<Floats>(x), offset = offset * convert<Floats>(y);
            else
                first = x & 15, second = y & 15, first_offset = x >> 4, second_offset = y >> 4;
        } else if constexpr (F::IN_UNITS) {
            first = from_bytes(at) << 24 >> 24;
            if (F::SUB_BLOCK == GROUP)
                scale = scale * convert<Floats>(first);
            else
                second = from_bytes(at + LANES) << 24 >> 24;
        }
    }
};

}  // namespace paceline
