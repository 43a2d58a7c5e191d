// Sixteen lanes in registers of this instruction set: one of 64 bytes, two of 32 or four of 16. `Lanes` is a structure of
// registers because compilers keep a vector that is wider than a register in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace paceline {

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int PARTS = 1;
#elif defined(__AVX2__)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int PART_LANES = LANES / PARTS;
constexpr int REGISTER = 64 / PARTS;  // bytes

template <class T>
struct Lanes {
    typedef T Part __attribute__((vector_size(sizeof(T) * PART_LANES)));
    Part part[PARTS];

    Lanes() = default;
    Lanes(T x) {
        for (Part& p : part) p = x - Part{};  // unlike 0 + x, x - 0 needs no instruction, as it keeps -0
    }

    T operator[](int i) const { return part[i / PART_LANES][i % PART_LANES]; }

// An operator on all lanes. A scalar operand is repeated in all of them.
#define PACELINE_OPERATOR(Result, symbol)                                      \
    friend inline Result operator symbol(const Lanes& a, const Lanes& b) {     \
        Result y;                                                              \
        for (int i = 0; i < PARTS; i++) y.part[i] = a.part[i] symbol b.part[i]; \
        return y;                                                              \
    }
    PACELINE_OPERATOR(Lanes, +)
    PACELINE_OPERATOR(Lanes, -)
    PACELINE_OPERATOR(Lanes, *)
    PACELINE_OPERATOR(Lanes, /)
    PACELINE_OPERATOR(Lanes, &)
    PACELINE_OPERATOR(Lanes, |)
    PACELINE_OPERATOR(Lanes, ^)
    PACELINE_OPERATOR(Lanes<int32_t>, <)
    PACELINE_OPERATOR(Lanes<int32_t>, >)
    PACELINE_OPERATOR(Lanes<int32_t>, <=)
    PACELINE_OPERATOR(Lanes<int32_t>, >=)
    PACELINE_OPERATOR(Lanes<int32_t>, ==)
    PACELINE_OPERATOR(Lanes<int32_t>, !=)
#undef PACELINE_OPERATOR

    friend inline Lanes operator-(Lanes a) {
        for (Part& p : a.part) p = -p;
        return a;
    }
    friend inline Lanes operator~(Lanes a) {
        for (Part& p : a.part) p = ~p;
        return a;
    }
    friend inline Lanes operator<<(Lanes a, int bits) {
        for (Part& p : a.part) p <<= bits;
        return a;
    }
    friend inline Lanes operator>>(Lanes a, int bits) {
        for (Part& p : a.part) p >>= bits;
        return a;
    }
    friend inline Lanes& operator+=(Lanes& a, const Lanes& b) { return a = a + b; }
    friend inline Lanes& operator-=(Lanes& a, const Lanes& b) { return a = a - b; }
    friend inline Lanes& operator&=(Lanes& a, const Lanes& b) { return a = a & b; }
    friend inline Lanes& operator|=(Lanes& a, const Lanes& b) { return a = a | b; }
};

using Floats = Lanes<float>;
using Ints = Lanes<int32_t>;
using Unsigned = Lanes<uint32_t>;
using FloatPart = Floats::Part;
using IntPart = Ints::Part;
typedef uint8_t BytePart __attribute__((vector_size(REGISTER)));
typedef int16_t ShortPart __attribute__((vector_size(REGISTER)));

template <class V, class T>
inline V read(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Loads all 16 lanes from unaligned memory.
template <class V, class T>
inline V load(const T* from) {
    using Part = typename V::Part;
    V v;
    for (int i = 0; i < PARTS; i++)
        v.part[i] = read<Part>(reinterpret_cast<const uint8_t*>(from) + i * sizeof(Part));
    return v;
}

template <class T, class U>
inline void store(T* to, const Lanes<U>& v) {
    for (int i = 0; i < PARTS; i++)
        std::memcpy(reinterpret_cast<uint8_t*>(to) + i * sizeof v.part[i], &v.part[i], sizeof v.part[i]);
}

// Reinterprets the bits as another type.
template <class To, class T>
inline To as(const Lanes<T>& v) {
    To y;
    for (int i = 0; i < PARTS; i++) y.part[i] = (typename To::Part)v.part[i];
    return y;
}

// Converts the numbers to another type, rounding toward zero.
template <class To, class T>
inline To convert(const Lanes<T>& v) {
    To y;
    for (int i = 0; i < PARTS; i++) y.part[i] = __builtin_convertvector(v.part[i], typename To::Part);
    return y;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC 12 needs four instructions for each register.
template <>
inline Ints convert<Ints>(const Lanes<uint16_t>& v) {
    Ints y;
    for (int i = 0; i < PARTS; i++) y.part[i] = (IntPart)_mm256_cvtepu16_epi32((__m128i)v.part[i]);
    return y;
}
#elif defined(__aarch64__)
// Compilers convert these lane by lane.
template <>
inline Ints convert<Ints>(const Lanes<uint16_t>& v) {
    Ints y;
    for (int i = 0; i < PARTS; i++) y.part[i] = (IntPart)vmovl_u16((uint16x4_t)v.part[i]);
    return y;
}

template <>
inline Ints convert<Ints>(const Lanes<uint8_t>& v) {
    const uint8x16_t bytes = read<uint8x16_t>(&v);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    Ints y;
    y.part[0] = (IntPart)vmovl_u16(vget_low_u16(low)), y.part[1] = (IntPart)vmovl_high_u16(low);
    y.part[2] = (IntPart)vmovl_u16(vget_low_u16(high)), y.part[3] = (IntPart)vmovl_high_u16(high);
    return y;
}

template <class To, class T>
inline To narrowed_lanes(const Lanes<T>& v) {
    To y;
    for (int i = 0; i < PARTS; i++) y.part[i] = (typename To::Part)vmovn_u32((uint32x4_t)v.part[i]);
    return y;
}

template <>
inline Lanes<uint16_t> convert<Lanes<uint16_t>>(const Ints& v) {
    return narrowed_lanes<Lanes<uint16_t>>(v);
}

template <>
inline Lanes<uint16_t> convert<Lanes<uint16_t>>(const Unsigned& v) {
    return narrowed_lanes<Lanes<uint16_t>>(v);
}

template <>
inline Lanes<int8_t> convert<Lanes<int8_t>>(const Ints& v) {
    auto halves = [&](int i) {
        return vmovn_u16(vcombine_u16(vmovn_u32((uint32x4_t)v.part[i]), vmovn_u32((uint32x4_t)v.part[i + 1])));
    };
    const uint8x16_t bytes = vcombine_u8(halves(0), halves(2));
    return read<Lanes<int8_t>>(&bytes);
}
#endif

template <class T>
inline Lanes<T> select(const Ints& mask, const Lanes<T>& yes, const Lanes<T>& no) {
    Lanes<T> y;
    for (int i = 0; i < PARTS; i++) y.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
    return y;
}

// A std::vector whose memory begins at a line of the caches, so that no register is stored in two lines.
template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
    void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
    friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
    friend bool operator!=(const LineAllocator&, const LineAllocator&) { return false; }
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

inline Floats all(float x) { return x; }
inline Ints all(int32_t x) { return x; }

inline bool any(const Ints& mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask.part[0], (__m512i)mask.part[0]);
#elif defined(__AVX2__)
    const __m256i some = (__m256i)(mask.part[0] | mask.part[1]);
    return !_mm256_testz_si256(some, some);
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)(mask.part[0] | mask.part[1] | mask.part[2] | mask.part[3])) != 0;
#else
    const IntPart some = mask.part[0] | mask.part[1] | mask.part[2] | mask.part[3];
    return some[0] | some[1] | some[2] | some[3];
#endif
}

// Adds lanes that are 8 apart, then 4, 2 and 1, on every instruction set.
#if defined(__AVX512F__)
inline float sum(const Floats& v) { return _mm512_reduce_add_ps(v.part[0]); }
inline int32_t sum(const Ints& v) { return _mm512_reduce_add_epi32((__m512i)v.part[0]); }
inline float largest(const Floats& v) { return _mm512_reduce_max_ps(v.part[0]); }
#else
template <class T, class Join>
inline T halved(Lanes<T> v, Join join) {
    typedef T Four __attribute__((vector_size(16)));
    Four fours[4];
    for (int i = 0; i < PARTS; i++) std::memcpy(&fours[i * 4 / PARTS], &v.part[i], sizeof v.part[i]);
    const Four four = join(join(fours[0], fours[2]), join(fours[1], fours[3]));
    const Four two = join(four, Four{four[2], four[3], four[2], four[3]});
    return join(two, Four{two[1], two[1], two[1], two[1]})[0];
}

template <class T>
inline T sum(const Lanes<T>& v) {
    return halved(v, [](auto a, auto b) { return a + b; });
}

inline float largest(const Floats& v) {
    return halved(v, [](auto a, auto b) { return a > b ? a : b; });
}
#endif

}  // namespace paceline
