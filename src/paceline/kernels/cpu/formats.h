// Layouts of quantised matrices in memory: a `Format` for each kind.
//
// A block of 16 outputs is a sequence of units. A unit is one group of 32 inputs; or a header of 16 halves (32 with floors),
// followed by 8 groups with scales that are multiples of these halves. A group holds its codes in fours with one lane per
// output, then its scales.
#pragma once

#include "simd.h"

namespace paceline {

constexpr int GROUP = 32;  // elements of a row that share a scale

// Kinds of matrices: bfloat16, float16, float32; codes with a scale per group; codes with a scale and a floor. Kinds of 64 and
// above are GGUF's types, 64 + ggml's number.
enum Kind : int32_t {
    WIDE = 16, HALF = 17, FULL = 32, EIGHT = 8, EIGHT_AND_FLOOR = 9, FOUR_AND_FLOOR = 4, STACKED = 1,
    Q4_0 = 64 + 2, Q5_0 = 64 + 6, Q5_1 = 64 + 7, Q2_K = 64 + 10, Q3_K = 64 + 11, Q4_K = 64 + 12, Q5_K = 64 + 13,
    Q6_K = 64 + 14, IQ4_NL = 64 + 20, IQ4_XS = 64 + 23, MXFP4 = 64 + 39,
};

// Scales of a group. HALVES: float16. HALVES_AND_FLOORS: float16 scales and floors. POWERS: exponents of 2. SUPER: small
// integers times the unit's half. SUPER_AND_FLOORS: in addition, floors are small integers times another half of the unit,
// and are subtracted.
enum Scales { HALVES, HALVES_AND_FLOORS, POWERS, SUPER, SUPER_AND_FLOORS };

// Values of codes, plus OFFSET.
constexpr uint8_t NON_LINEAR[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FLOAT_4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// w = scale * (value - OFFSET) + floor. SPAN: elements that share a small integer. TABLE: code -> value, or null.
template <int BITS_, Scales SCALES_, int OFFSET_ = 0, int SPAN_ = GROUP, const uint8_t* TABLE_ = nullptr>
struct Format {
    static constexpr int BITS = BITS_, OFFSET = OFFSET_, SPAN = SPAN_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr const uint8_t* TABLE = TABLE_;
    static constexpr bool IN_UNITS = SCALES == SUPER || SCALES == SUPER_AND_FLOORS;
    static constexpr bool FLOORS = SCALES == HALVES_AND_FLOORS || SCALES == SUPER_AND_FLOORS;
    static constexpr int VALUE_BITS = OFFSET == 128 ? 8 : TABLE ? 5 : BITS;
    static constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2;  // low bits of all codes come first, then the remaining high bits
    static constexpr int UNIT = IN_UNITS ? 256 : GROUP;            // elements
    static constexpr int HEADER = IN_UNITS ? LANES * 2 * (1 + FLOORS) : 0;  // bytes of a unit before its groups
    static constexpr int CODES = BITS * GROUP * LANES / 8;                  // bytes of a group's codes
    static constexpr int BYTES =                                            // of a group
        CODES + LANES * (SCALES == POWERS ? 1 : !IN_UNITS ? 2 * (1 + FLOORS) : SPAN < GROUP ? 2 : 1 + FLOORS);

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
        case EIGHT: return use(Format<8, HALVES, 128>());
        case EIGHT_AND_FLOOR: return use(Format<8, HALVES_AND_FLOORS, 128>());
        case FOUR_AND_FLOOR: return use(Format<4, HALVES_AND_FLOORS>());
        case Q4_0: return use(Format<4, HALVES, 8>());
        case Q5_0: return use(Format<5, HALVES, 16>());
        case Q5_1: return use(Format<5, HALVES_AND_FLOORS>());
        case Q2_K: return use(Format<2, SUPER_AND_FLOORS, 0, 16>());
        case Q3_K: return use(Format<3, SUPER, 4, 16>());
        case Q4_K: return use(Format<4, SUPER_AND_FLOORS>());
        case Q5_K: return use(Format<5, SUPER_AND_FLOORS>());
        case Q6_K: return use(Format<6, SUPER, 32, 16>());
        case IQ4_NL: return use(Format<4, HALVES, 128, GROUP, NON_LINEAR>());
        case IQ4_XS: return use(Format<4, SUPER, 128, GROUP, NON_LINEAR>());
        case MXFP4: return use(Format<4, POWERS, 12, GROUP, FLOAT_4>());
    }
}

// 2^(exponent - 128). MXFP4's exponents are biased by 127, and the values in its table are doubled.
inline float power(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : uint32_t(exponent - 1) << 23;
    return read<float>(&bits);
}

// Scale and floor of a group. For groups of two spans: scale and floor of the unit, and the integers of the spans. A half
// times a small integer is exact in float32.
template <class F>
struct GroupScales {
    Floats scale, floor;
    Ints first, second, first_floor, second_floor;

    GroupScales(const uint8_t* header, const uint8_t* at) {
        const half* halves = reinterpret_cast<const half*>(F::IN_UNITS ? header : at);
        if constexpr (F::SCALES == POWERS) {
            const Ints e = from_bytes(at);
            scale = as<Floats>(select(e < 2, 0x200000 + (e & 1) * 0x200000, (e - 1) << 23));
            return;
        }
        scale = from_half(halves);
        if (F::FLOORS) floor = from_half(halves + LANES);
        if constexpr (F::IN_UNITS && F::FLOORS) {
            const Ints x = from_bytes(at), y = from_bytes(at + LANES);
            floor = -floor;
            if (F::SPAN == GROUP)
                scale = scale * convert<Floats>(x), floor = floor * convert<Floats>(y);
            else
                first = x & 15, second = y & 15, first_floor = x >> 4, second_floor = y >> 4;
        } else if constexpr (F::IN_UNITS) {
            first = from_bytes(at) << 24 >> 24;
            if (F::SPAN == GROUP)
                scale = scale * convert<Floats>(first);
            else
                second = from_bytes(at + LANES) << 24 >> 24;
        }
    }
};

}  // namespace paceline
