// The dozen operations that differ between instruction sets, with intrinsics where they exist. All sets give the same bits, with
// two exceptions: x86-64 below AVX2 has no fused multiply-add, and AVX-512 BF16 treats tiny numbers differently (see `WidePairs`).
#pragma once

#include <array>

#include "vectors.h"

namespace paceline {

using bf16 = uint16_t;
using half = uint16_t;
using Shorts = Lanes<uint16_t>;

// a * b + c, rounded once. Processors without this instruction round twice, since emulating it takes twenty operations.
inline FloatPart fma(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline Floats fma(const Floats& a, const Floats& b, Floats c) {
    for (int i = 0; i < PARTS; i++) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
    return c;
}

// --- bfloat16 and float16 -------------------------------------------------------------------------------------------

// 16 numbers of two bytes.
inline Floats widen(const bf16* from) { return as<Floats>(convert<Ints>(load<Shorts>(from)) << 16); }

inline float widened(bf16 x) { return read<float>(std::array<bf16, 2>{0, x}.data()); }

// Rounds to nearest, ties to even. A NaN stays a NaN.
inline bf16 narrowed(float x) {
    const uint32_t bits = read<uint32_t>(&x);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Like `narrowed`, with the result in the high halves of the lanes. Numbers below 2^-126 become 0, as with AVX-512's instruction.
inline Ints rounded(const Floats& v) {
    const Ints bits = as<Ints>(v), size = bits & 0x7fffffff;
    const Ints near = select(size > 0x7f800000, bits | 0x400000, bits + 0x7fff + (as<Ints>(as<Unsigned>(bits) >> 16) & 1));
    return near & select(size < 0x800000, all(int32_t(0x80000000)), all(int32_t(0xffff0000)));
}

// Like `rounded`, in fewer operations: for weights of attention, which are 0 or at least 2^-126, or a NaN whose low 16 bits are 0.
inline Ints rounded_weights(const Floats& w) {
    const Ints bits = as<Ints>(w);
    return (bits + 0x7fff + (as<Ints>(as<Unsigned>(bits) >> 16) & 1)) & int32_t(0xffff0000);
}

inline void narrow(bf16* to, const Floats& v) {
#if defined(__AVX512BF16__)
    __m256bh y = _mm512_cvtneps_pbh(v.part[0]);
    std::memcpy(to, &y, 32);
#else
    store(to, convert<Shorts>(as<Unsigned>(rounded(v)) >> 16));
#endif
}

inline Floats from_half(const half* from) {
#if defined(__AVX2__)
    Floats v;
#if defined(__AVX512F__)
    v.part[0] = _mm512_cvtph_ps(read<__m256i>(from));
#else
    for (int i = 0; i < PARTS; i++) v.part[i] = _mm256_cvtph_ps(read<__m128i>(from + i * PART_LANES));
#endif
    return v;
#elif defined(__aarch64__)
    Floats v;
    for (int i = 0; i < PARTS; i++) v.part[i] = (FloatPart)vcvt_f32_f16((float16x4_t)vld1_u16(from + i * PART_LANES));
    return v;
#else
    // A multiplication converts exponents from 5 bits to 8 bits, also for subnormal numbers.
    const Ints x = convert<Ints>(load<Shorts>(from)), bits = (x & 0x7fff) << 13;
    const Floats size = as<Floats>(bits) * select(bits < 0x0f800000, all(0x1p112f), all(INFINITY));
    return as<Floats>(as<Ints>(size) | (x & 0x8000) << 16);
#endif
}

// Rounds to nearest, ties to even: by adding integers, or for subnormal numbers by adding a float whose last bit has the weight
// of their last bit.
inline void to_half(half* to, const Floats& v) {
    const Ints bits = as<Ints>(v), size = bits & 0x7fffffff;
    const Ints normal = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const Ints small = as<Ints>(as<Floats>(size) + 0.5f) - 0x3f000000;
    Ints y = select(size < 0x38800000, small, normal);
    y = select(size >= 0x477ff000, select(size > 0x7f800000, all(0x7e00), all(0x7c00)), y);
    store(to, convert<Shorts>(as<Unsigned>(y | ((bits >> 16) & 0x8000))));
}

// 16 numbers of one byte.
inline Ints from_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    Ints v;
    v.part[0] = (IntPart)_mm512_cvtepu8_epi32(read<__m128i>(from));
    return v;
#elif defined(__AVX2__)
    Ints v;
    for (int i = 0; i < PARTS; i++) v.part[i] = (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)));
    return v;
#elif defined(__SSE4_1__)
    Ints v;
    for (int i = 0; i < PARTS; i++) v.part[i] = (IntPart)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(read<int32_t>(from + 4 * i)));
    return v;
#else
    return convert<Ints>(load<Lanes<uint8_t>>(from));
#endif
}

// Forces x into a register. Otherwise compilers delay the additions until all products are in memory.
inline void keep([[maybe_unused]] IntPart& x) {
#if defined(EMULATED)  // in tests, where no register is this wide
#elif defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

// Makes compilers read the operands of many rows only when they are needed. Otherwise they read all of a group first, and run out
// of registers.
template <int ROWS>
inline void read_here() {
#if defined(__AVX512F__)
    constexpr int FIT = 8;
#elif defined(__ARM_FEATURE_DOTPROD)
    constexpr int FIT = 2;
#else
    constexpr int FIT = 0;
#endif
    if (ROWS > FIT) asm volatile("" ::: "memory");
}

// --- integer dot products of codes: exact ---------------------------------------------------------------------------------------

// 8-bit weight codes are 128 too high. `EXCESS` is the part of this that `Dots` does not remove.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PACELINE_VNNI
constexpr int32_t EXCESS = 128;
#else
constexpr int32_t EXCESS = 0;
#endif

// Rows and registers of outputs that are computed at a time. Their sums fit into registers together with the weights and one
// row's codes, which are read once for all these outputs.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS_TOGETHER = 8, PARTS_TOGETHER = 1;
#else
constexpr int ROWS_TOGETHER = 6, PARTS_TOGETHER = 2;
#endif

// True if `Dots` keeps 16-bit sums for small codes: one for the first two codes of each four, one for the last two.
#if defined(PACELINE_VNNI) || defined(__aarch64__)
constexpr bool PAIRED_SUMS = false;
#else
constexpr bool PAIRED_SUMS = true;
#endif

// A register of weight codes, prepared for the codes of many rows.
template <bool SMALL>
struct Weights {
    BytePart codes;  // without the excess
    BytePart sizes;  // absolute values, for instructions that multiply unsigned by signed bytes and saturate at 16 bits

    Weights() = default;
    explicit Weights(BytePart read) : codes(SMALL || EXCESS ? read : read ^ 128), sizes(codes) {
#if defined(__AVX512BW__)
        if (!SMALL && !EXCESS) sizes = (BytePart)_mm512_abs_epi8((__m512i)codes);
#elif defined(__AVX2__)
        if (!SMALL && !EXCESS) sizes = (BytePart)_mm256_abs_epi8((__m256i)codes);
#elif defined(__SSE4_1__)
        if (!SMALL) sizes = (BytePart)_mm_abs_epi8((__m128i)codes);
#endif
    }
};

// Sums of neighbouring numbers, each multiplied by its factor.
inline IntPart weighted(ShortPart x, ShortPart factor) {
#if defined(__AVX512BW__)
    return (IntPart)_mm512_madd_epi16((__m512i)x, (__m512i)factor);
#elif defined(__AVX2__)
    return (IntPart)_mm256_madd_epi16((__m256i)x, (__m256i)factor);
#elif defined(__SSE2__)
    return (IntPart)_mm_madd_epi16((__m128i)x, (__m128i)factor);
#elif defined(__aarch64__)
    const int16x8_t a = (int16x8_t)x, b = (int16x8_t)factor;
    return (IntPart)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
    const IntPart a = (IntPart)x, b = (IntPart)factor;
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Combines two 16-bit numbers in each lane.
inline ShortPart paired(IntPart first, IntPart second) { return (ShortPart)((first & 0xffff) | second << 16); }

// Looks up entries of a table of 16 bytes.
inline BytePart looked_up(const uint8_t* table, BytePart codes) {
#if defined(__AVX512BW__)
    return (BytePart)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(read<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
    return (BytePart)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(read<__m128i>(table)), (__m256i)codes);
#elif defined(__SSE4_1__)
    return (BytePart)_mm_shuffle_epi8(read<__m128i>(table), (__m128i)codes);
#elif defined(__aarch64__)
    return (BytePart)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
    for (int i = 0; i < REGISTER; i++) codes[i] = table[codes[i]];
    return codes;
#endif
}

// Number of fours of a sub-block's weight codes, of at most 8 bits, that `Dots` adds at a time. Where it keeps 16-bit sums, they must
// not overflow (8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 are all below 2^15).
constexpr int fours_at_once([[maybe_unused]] int bits, int sub_block) {
#if defined(PACELINE_VNNI) || defined(__ARM_FEATURE_DOTPROD)
    return sub_block / 4;
#elif defined(__aarch64__)
    const int most = bits <= 5 ? 8 : bits == 6 ? 4 : 2;  // without sums of two: 8 * 31 * 127, 4 * 63 * 127 and 2 * 128 * 127
    return most < sub_block / 4 ? most : sub_block / 4;
#else
    const int most = bits == 8 || bits <= 4 ? 8 : bits == 5 ? 4 : 2;
    return most < sub_block / 4 ? most : sub_block / 4;
#endif
}

// Number of adjacent fours of a row's codes: as many as one instruction takes from a row.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int FOURS_TOGETHER = 2;
#else
constexpr int FOURS_TOGETHER = 1;
#endif

// Sums with one lane for each output. Each step multiplies 4 weight codes by 4 signed codes of a row; there are `fours_at_once`
// steps. SMALL: the weight codes have fewer than 8 bits. A row's codes are the `i`-th four of `codes`.
#if defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
template <bool SMALL>
class Dots {
   public:
    void add(const Weights<SMALL>& w, const int8_t* codes, int i) {
        const int8x16_t weights = (int8x16_t)w.codes, x = (int8x16_t)vdupq_n_s32(read<int32_t>(codes + 4 * i));
        low_ = vmlal_s8(low_, vget_low_s8(weights), vget_low_s8(x));
        high_ = vmlal_high_s8(high_, weights, x);
    }

    IntPart total() const { return (IntPart)vpaddq_s32(vpaddlq_s16(low_), vpaddlq_s16(high_)); }
    IntPart total(IntPart factor) const { return total() * factor; }

   private:
    int16x8_t low_{}, high_{};  // half of the outputs each, with a lane for each of the four codes
};
#else
template <bool SMALL>
class Dots {
   public:
#if defined(__ARM_FEATURE_DOTPROD)
    void add(const Weights<SMALL>& w, const int8_t* codes, int i) {
        const int32x4_t sums = (int32x4_t)sums_;
        const int8x16_t weights = (int8x16_t)w.codes, x = vld1q_s8(codes + i / 4 * 16);
        switch (i % 4) {
            case 0: sums_ = (IntPart)vdotq_laneq_s32(sums, weights, x, 0); break;
            case 1: sums_ = (IntPart)vdotq_laneq_s32(sums, weights, x, 1); break;
            case 2: sums_ = (IntPart)vdotq_laneq_s32(sums, weights, x, 2); break;
            default: sums_ = (IntPart)vdotq_laneq_s32(sums, weights, x, 3);
        }
    }
#else
    void add(const Weights<SMALL>& w, const int8_t* codes, int i) { add(w, read<int32_t>(codes + 4 * i)); }
#endif

    IntPart total() const {
#if defined(PACELINE_VNNI) || defined(__ARM_FEATURE_DOTPROD)
        return sums_;
#else
        return SMALL ? weighted((ShortPart)sums_, ShortPart{} + 1) : sums_;
#endif
    }

    // The total of small codes times a small integer.
    IntPart total(IntPart factor) const {
#if defined(PACELINE_VNNI) || defined(__ARM_FEATURE_DOTPROD)
        return sums_ * factor;
#else
        return weighted((ShortPart)sums_, paired(factor, factor));
#endif
    }

    // Subtracts x from each of the 16-bit sums.
    void subtract(ShortPart x) { sums_ = (IntPart)((Wrapping)sums_ - (Wrapping)x); }

   private:
    typedef uint16_t Wrapping __attribute__((vector_size(REGISTER)));

    IntPart sums_{};  // with PAIRED_SUMS and small codes, each lane holds two 16-bit sums

#if defined(PACELINE_VNNI) && defined(__AVX512VNNI__)
    void add(const Weights<SMALL>& w, int32_t four) {
        sums_ = (IntPart)_mm512_dpbusd_epi32((__m512i)sums_, (__m512i)w.codes, _mm512_set1_epi32(four));
    }
#elif defined(PACELINE_VNNI)
    void add(const Weights<SMALL>& w, int32_t four) {
        sums_ = (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sums_, (__m256i)w.codes, _mm256_set1_epi32(four));
    }
#elif defined(__AVX512BW__)
    void add(const Weights<SMALL>& w, int32_t four) {
        __m512i x = _mm512_set1_epi32(four);
        if (!SMALL) x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask((__m512i)w.codes), __m512i{}, x);
        add(_mm512_maddubs_epi16((__m512i)w.sizes, x));
    }
#elif defined(__AVX2__)
    void add(const Weights<SMALL>& w, int32_t four) {
        __m256i x = _mm256_set1_epi32(four);
        if (!SMALL) x = _mm256_sign_epi8(x, (__m256i)w.codes);
        add(_mm256_maddubs_epi16((__m256i)w.sizes, x));
    }
#elif defined(__SSE4_1__)
    void add(const Weights<SMALL>& w, int32_t four) {
        __m128i x = _mm_set1_epi32(four);
        if (!SMALL) x = _mm_sign_epi8(x, (__m128i)w.codes);
        add(_mm_maddubs_epi16((__m128i)w.sizes, x));
    }
#else
    void add(const Weights<SMALL>& w, int32_t four) {
        // Even and odd bytes as 16-bit numbers.
        const ShortPart x = (ShortPart)(IntPart{} + four), y = (ShortPart)w.codes;
        add((x << 8 >> 8) * (y << 8 >> 8) + (x >> 8) * (y >> 8));
    }
#endif

    // Adds sums of two products. With small codes they may wrap around.
    template <class Pairs>
    void add(Pairs pairs) {
        sums_ = SMALL ? (IntPart)((Wrapping)sums_ + (Wrapping)pairs)
                      : sums_ + weighted((ShortPart)pairs, ShortPart{} + 1);
        keep(sums_);
    }
};
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Sums of two rows, computed by products of 2 x 8 codes. Each register holds two outputs of two rows.
class DotsOfTwo {
   public:
    // Adds two neighbouring fours of the weights times eight codes of each row.
    void add(BytePart first, BytePart second, int8x16_t rows) {
        const int32x4_t a = (int32x4_t)first, b = (int32x4_t)second;
        low_ = vmmlaq_s32(low_, (int8x16_t)vzip1q_s32(a, b), rows);
        high_ = vmmlaq_s32(high_, (int8x16_t)vzip2q_s32(a, b), rows);
    }

    IntPart first() const { return (IntPart)vuzp1q_s32(low_, high_); }
    IntPart second() const { return (IntPart)vuzp2q_s32(low_, high_); }

   private:
    int32x4_t low_{}, high_{};
};
#endif

// --- dot products of bfloat16 -------------------------------------------------------------------------------------------

// Operands of bfloat16 products: 16 pairs of neighbours, and one pair of a row. They use AVX-512's instruction or are widened to
// floats. That instruction is documented as the same two fused multiply-adds, except that it treats numbers below 2^-126 as 0.
// No other instruction set does.
struct WidePairs {
    Floats even, odd;
    WidePairs() = default;
    WidePairs(const Floats& even, const Floats& odd) : even(even), odd(odd) {}
    explicit WidePairs(const Ints& bits) : even(as<Floats>(bits << 16)), odd(as<Floats>(bits & int32_t(0xffff0000))) {}
};

inline Floats dot2(const Floats& total, const WidePairs& vector, const float* pair) {
    return fma(vector.even, all(pair[0]), fma(vector.odd, all(pair[1]), total));
}

// Adds `dot2` of V vectors and the pairs of Q rows, which are `stride` elements apart.
template <int Q, int V>
[[gnu::always_inline]] inline void add_products(Floats (&sums)[Q][V], const WidePairs* vectors, const float* pairs, int stride) {
#pragma GCC unroll 16  // early enough for registers
    for (int i = 0; i < Q; i++) {
        const Floats x = all(pairs[i * stride + 1]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[i][v] = fma(vectors[v].odd, x, sums[i][v]);
    }
    read_here<Q>();
#pragma GCC unroll 16
    for (int i = 0; i < Q; i++) {
        const Floats x = all(pairs[i * stride]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[i][v] = fma(vectors[v].even, x, sums[i][v]);
    }
}

inline bool finite(const WidePairs& x) { return !any(x.even * 0.0f + x.odd * 0.0f != 0.0f); }

// Sets numbers to 0 where the other operand, an attention weight, is 0: 0 times a non-finite number would be NaN.
inline WidePairs zero_unweighted(const WidePairs& x, const float* pair) {
    return {pair[0] != 0 ? x.even : Floats{}, pair[1] != 0 ? x.odd : Floats{}};
}

// True if products of bfloat16 pairs are faster than products of floats. Intel's processors (Sapphire Rapids) start one product
// of pairs every two cycles, but four products of floats.
inline bool multiplies_pairs() {
#if defined(__AVX512BF16__)
    static const bool intel = __builtin_cpu_is("intel");
    return !intel;
#else
    return false;
#endif
}

#if defined(__AVX512BF16__)
using Operand = bf16;

struct Pairs {
    Ints both;
    Pairs() = default;
    explicit Pairs(const Ints& bits) : both(bits) {}
};

inline Floats dot2(Floats total, const Pairs& vector, const Operand* pair) {
    const __m512i x = _mm512_set1_epi32(read<int32_t>(pair));
    total.part[0] = _mm512_dpbf16_ps(total.part[0], (__m512bh)vector.both.part[0], (__m512bh)x);
    return total;
}

template <int Q, int V>
[[gnu::always_inline]] inline void add_products(Floats (&sums)[Q][V], const Pairs* vectors, const Operand* pairs, int stride) {
#pragma GCC unroll 16  // early enough for registers
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[i][v] = dot2(sums[i][v], vectors[v], pairs + i * stride);
}

inline bool finite(const Pairs& x) {
    return !any(((x.both & 0x7f80) == 0x7f80) | ((x.both & 0x7f800000) == 0x7f800000));
}

inline Pairs zero_unweighted(const Pairs& x, const Operand* pair) {
    return Pairs(x.both & int32_t((pair[0] ? 0xffff : 0) | (pair[1] ? 0xffff0000 : 0)));
}
#else
using Operand = float;
using Pairs = WidePairs;

inline void narrow(Operand* to, const Floats& v) { store(to, rounded(v)); }
#endif

// Rounds to bfloat16 and widens again.
inline Floats rounded_to_bf16(const Floats& v) {
#if defined(__AVX512BF16__)
    bf16 y[LANES];
    narrow(y, v);
    return widen(y);
#else
    return as<Floats>(rounded(v));
#endif
}

// Transposes 4 x 4 numbers in 4 registers, or in each quarter of 4 registers.
[[gnu::always_inline]] inline void transpose(IntPart (&x)[4]) {
#if defined(__AVX512F__)
#define PACELINE_ZIP(bits, half, a, b) (IntPart) _mm512_unpack##half##_epi##bits((__m512i)a, (__m512i)b)
#elif defined(__AVX2__)
#define PACELINE_ZIP(bits, half, a, b) (IntPart) _mm256_unpack##half##_epi##bits((__m256i)a, (__m256i)b)
#elif defined(__SSE2__)
#define PACELINE_ZIP(bits, half, a, b) (IntPart) _mm_unpack##half##_epi##bits((__m128i)a, (__m128i)b)
#elif defined(__aarch64__)
#define PACELINE_ZIP(bits, half, a, b) (IntPart) zip##half##_##bits((int32x4_t)a, (int32x4_t)b)
    auto ziplo_32 = [](int32x4_t a, int32x4_t b) { return vzip1q_s32(a, b); };
    auto ziphi_32 = [](int32x4_t a, int32x4_t b) { return vzip2q_s32(a, b); };
    auto ziplo_64 = [](int32x4_t a, int32x4_t b) { return vzip1q_s64((int64x2_t)a, (int64x2_t)b); };
    auto ziphi_64 = [](int32x4_t a, int32x4_t b) { return vzip2q_s64((int64x2_t)a, (int64x2_t)b); };
#else
    constexpr int lo = 0, hi = 1;
    auto zip = [](int bits, int half, IntPart a, IntPart b) {
        const int i = 2 * half;
        return bits == 32 ? IntPart{a[i], b[i], a[i + 1], b[i + 1]} : IntPart{a[i], a[i + 1], b[i], b[i + 1]};
    };
#define PACELINE_ZIP(bits, half, a, b) zip(bits, half, a, b)
#endif
    const IntPart p = PACELINE_ZIP(32, lo, x[0], x[1]), q = PACELINE_ZIP(32, hi, x[0], x[1]);
    const IntPart r = PACELINE_ZIP(32, lo, x[2], x[3]), s = PACELINE_ZIP(32, hi, x[2], x[3]);
    x[0] = PACELINE_ZIP(64, lo, p, r), x[1] = PACELINE_ZIP(64, hi, p, r);
    x[2] = PACELINE_ZIP(64, lo, q, s), x[3] = PACELINE_ZIP(64, hi, q, s);
#undef PACELINE_ZIP
}

// Transposes 16 bytes of each of 16 rows, `stride` bytes apart, into 4 lines of 4 bytes with one lane per row.
[[gnu::always_inline]] inline void transpose(Ints (&lines)[4], const void* rows, int64_t stride) {
    for (int part = 0; part < PARTS; part++) {
        IntPart x[4];
        for (int i = 0; i < 4; i++) {
            auto at = [&](int j) { return static_cast<const uint8_t*>(rows) + (part * PART_LANES + 4 * j + i) * stride; };
#if defined(__AVX512F__)
            __m512i quad = _mm512_castsi128_si512(read<__m128i>(at(0)));
            for (int j = 1; j < 4; j++) quad = _mm512_mask_broadcast_i32x4(quad, 0xf << 4 * j, read<__m128i>(at(j)));
            x[i] = (IntPart)quad;
#elif defined(__AVX2__)
            x[i] = (IntPart)_mm256_inserti128_si256(_mm256_castsi128_si256(read<__m128i>(at(0))), read<__m128i>(at(1)), 1);
#else
            x[i] = read<IntPart>(at(0));
#endif
        }
        transpose(x);
        for (int i = 0; i < 4; i++) lines[i].part[part] = x[i];
    }
}

// Interleaves 16 N numbers of two rows.
template <int N>
[[gnu::always_inline]] inline void interleave(WidePairs* pairs, const bf16* even, const bf16* odd) {
    for (int i = 0; i < N; i++) pairs[i] = {widen(even + i * LANES), widen(odd + i * LANES)};
}

#if defined(__AVX512BF16__)
template <int N>
[[gnu::always_inline]] inline void interleave(Pairs* pairs, const bf16* even, const bf16* odd) {
    int i = 0;
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (; i + 1 < N; i += 2) {
        const __m512i a = _mm512_loadu_si512(even + i * LANES), b = _mm512_loadu_si512(odd + i * LANES);
        pairs[i].both.part[0] = (IntPart)_mm512_permutex2var_epi16(a, first, b);
        pairs[i + 1].both.part[0] = (IntPart)_mm512_permutex2var_epi16(a, second, b);
    }
    for (; i < N; i++)
        pairs[i].both = convert<Ints>(load<Shorts>(even + i * LANES)) | convert<Ints>(load<Shorts>(odd + i * LANES)) << 16;
}
#endif

}  // namespace paceline
