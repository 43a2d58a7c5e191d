// AVX-512 and AVX-VNNI in plain C++, as their manual defines them, so that their kernels can be tested on any x86-64
// processor with AVX2: compile with `-include` of this file and -DEMULATED=1 for AVX-512, 2 with VNNI, 3 with BF16 too; 0 for
// AVX-VNNI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Only now, so that the compiler's own headers do not look for the instructions.
#if EMULATED == 0
#define __AVXVNNI__
#else
#define __AVX512F__
#define __AVX512BW__
#if EMULATED > 1
#define __AVX512VNNI__
#endif
#if EMULATED > 2
#define __AVX512BF16__
#endif
#endif

namespace emulated {

template <class T>
struct Of {
    T lane[64 / sizeof(T)];
    static constexpr int COUNT = 64 / sizeof(T);
    template <class V>
    Of(const V& v) {
        static_assert(sizeof(V) == 64, "");
        std::memcpy(lane, &v, 64);
    }
    template <class V>
    V to() const {
        V v;
        std::memcpy(&v, lane, 64);
        return v;
    }
};

template <class T, class V, class F>
V each(const V& like, F f) {
    Of<T> y(like);
    for (int i = 0; i < Of<T>::COUNT; i++) y.lane[i] = T(f(i));
    return y.template to<V>();
}

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each<float>(a, [&](int i) { return std::fma(a[i], b[i], c[i]); });
}
inline __mmask16 test_epi32_mask(__m512i a, __m512i b) {
    Of<int32_t> x(a), y(b);
    __mmask16 mask = 0;
    for (int i = 0; i < 16; i++) mask |= __mmask16((x.lane[i] & y.lane[i]) != 0) << i;
    return mask;
}
template <class T, class V, class F>
T reduce(const V& v, F f) {
    Of<T> x(v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x.lane[i] = f(x.lane[i], x.lane[i + width]);
    return x.lane[0];
}
inline float reduce_add_ps(__m512 v) { return reduce<float>(v, [](float a, float b) { return a + b; }); }
inline float reduce_max_ps(__m512 v) { return reduce<float>(v, [](float a, float b) { return a > b ? a : b; }); }
inline int32_t reduce_add_epi32(__m512i v) { return reduce<int32_t>(v, [](int32_t a, int32_t b) { return a + b; }); }
inline __m512 cvtph_ps(__m256i v) {
    __m512 y;
    for (int i = 0; i < 2; i++) {
        __m128i part;
        std::memcpy(&part, reinterpret_cast<const char*>(&v) + 16 * i, 16);
        const __m256 wide = _mm256_cvtph_ps(part);
        std::memcpy(reinterpret_cast<char*>(&y) + 32 * i, &wide, 32);
    }
    return y;
}
inline __m256bh cvtneps_pbh(__m512 v) {
    Of<uint32_t> x(v);
    uint16_t y[16];
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = x.lane[i], size = bits & 0x7fffffff;
        y[i] = size < 0x800000      ? bits >> 16 & 0x8000
               : size > 0x7f800000 ? bits >> 16 | 0x40
                                   : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    __m256bh to;
    std::memcpy(&to, y, 32);
    return to;
}
inline __m512i set1_epi32(int32_t x) {
    return each<int32_t>(__m512i{}, [&](int) { return x; });
}
inline __m512i set1_epi16(int16_t x) {
    return each<int16_t>(__m512i{}, [&](int) { return x; });
}
inline __m512i abs_epi8(__m512i v) {
    Of<int8_t> x(v);
    return each<int8_t>(v, [&](int i) { return std::abs(x.lane[i]); });
}
inline __mmask64 movepi8_mask(__m512i v) {
    Of<int8_t> x(v);
    __mmask64 mask = 0;
    for (int i = 0; i < 64; i++) mask |= __mmask64(x.lane[i] < 0) << i;
    return mask;
}
inline __m512i mask_sub_epi8(__m512i src, __mmask64 mask, __m512i a, __m512i b) {
    Of<int8_t> s(src), x(a), y(b);
    return each<int8_t>(src, [&](int i) { return mask >> i & 1 ? x.lane[i] - y.lane[i] : s.lane[i]; });
}
inline int saturated(int x) { return std::min(32767, std::max(-32768, x)); }
inline __m512i maddubs_epi16(__m512i a, __m512i b) {
    Of<uint8_t> x(a);
    Of<int8_t> y(b);
    auto product = [&](int i) { return x.lane[i] * y.lane[i]; };
    return each<int16_t>(a, [&](int i) { return saturated(product(2 * i) + product(2 * i + 1)); });
}
inline __m512i madd_epi16(__m512i a, __m512i b) {
    Of<int16_t> x(a), y(b);
    auto product = [&](int i) { return x.lane[i] * y.lane[i]; };
    return each<int32_t>(a, [&](int i) { return product(2 * i) + product(2 * i + 1); });
}
inline __m512i dpbusd_epi32(__m512i total, __m512i a, __m512i b) {
    Of<int32_t> t(total);
    Of<uint8_t> x(a);
    Of<int8_t> y(b);
    return each<int32_t>(total, [&](int i) {
        for (int j = 4 * i; j < 4 * i + 4; j++) t.lane[i] += x.lane[j] * y.lane[j];
        return t.lane[i];
    });
}
inline __m256i dpbusd_avx_epi32(__m256i total, __m256i a, __m256i b) {
    auto wide = [](__m256i v) {
        __m512i y{};
        std::memcpy(&y, &v, 32);
        return y;
    };
    const __m512i y = dpbusd_epi32(wide(total), wide(a), wide(b));
    std::memcpy(&total, &y, 32);
    return total;
}
// As two fused multiply-adds, the odd element first; numbers below 2^-126 are 0.
inline __m512 dpbf16_ps(__m512 total, __m512bh a, __m512bh b) {
    Of<uint32_t> x(a), y(b);
    auto number = [](uint32_t bits) {
        float v;
        if (!(bits & 0x7f800000)) bits &= 0x80000000;
        std::memcpy(&v, &bits, 4);
        return v;
    };
    auto flushed = [](float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; };
    return each<float>(total, [&](int i) {
        const float first = std::fma(number(x.lane[i] & 0xffff0000), number(y.lane[i] & 0xffff0000), flushed(total[i]));
        return flushed(std::fma(number(x.lane[i] << 16), number(y.lane[i] << 16), flushed(first)));
    });
}
inline __m512i castsi128_si512(__m128i v) {
    __m512i y{};
    std::memcpy(&y, &v, 16);
    return y;
}
inline __m512i mask_broadcast_i32x4(__m512i src, __mmask16 mask, __m128i v) {
    Of<int32_t> s(src), x(castsi128_si512(v));
    return each<int32_t>(src, [&](int i) { return mask >> i & 1 ? x.lane[i % 4] : s.lane[i]; });
}
inline __m512i broadcast_i32x4(__m128i v) { return mask_broadcast_i32x4(__m512i(), 0xffff, v); }
inline __m512i shuffle_epi8(__m512i table, __m512i at) {
    Of<uint8_t> t(table), x(at);
    return each<uint8_t>(at, [&](int i) { return x.lane[i] & 128 ? 0 : t.lane[(i & ~15) + (x.lane[i] & 15)]; });
}
inline __m512i cvtepu8_epi32(__m128i v) {
    Of<uint8_t> x(castsi128_si512(v));
    return each<int32_t>(__m512i(), [&](int i) { return x.lane[i]; });
}
// Lanes of every 128 bits: `half` of a and of b in turns.
template <class T>
inline __m512i unpack(__m512i a, __m512i b, int half) {
    Of<T> x(a), y(b);
    constexpr int N = 16 / sizeof(T);
    return each<T>(a, [&](int i) {
        const int from = i / N * N + half * N / 2 + i % N / 2;
        return i % 2 ? y.lane[from] : x.lane[from];
    });
}
inline __m512i unpacklo_epi32(__m512i a, __m512i b) { return unpack<int32_t>(a, b, 0); }
inline __m512i unpackhi_epi32(__m512i a, __m512i b) { return unpack<int32_t>(a, b, 1); }
inline __m512i unpacklo_epi64(__m512i a, __m512i b) { return unpack<int64_t>(a, b, 0); }
inline __m512i unpackhi_epi64(__m512i a, __m512i b) { return unpack<int64_t>(a, b, 1); }
template <class... X>
inline __m512i set_epi16(X... x) {
    int16_t last_first[] = {int16_t(x)...};
    return each<int16_t>(__m512i{}, [&](int i) { return last_first[31 - i]; });
}
inline __m512i add_epi16(__m512i a, __m512i b) {
    Of<int16_t> x(a), y(b);
    return each<int16_t>(a, [&](int i) { return x.lane[i] + y.lane[i]; });
}
inline __m512i loadu_si512(const void* from) {
    __m512i y;
    std::memcpy(&y, from, 64);
    return y;
}
inline __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    Of<int16_t> x(a), at(index), y(b);
    return each<int16_t>(a, [&](int i) { return at.lane[i] & 32 ? y.lane[at.lane[i] & 31] : x.lane[at.lane[i] & 31]; });
}

}  // namespace emulated

#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_test_epi32_mask emulated::test_epi32_mask
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_abs_epi8 emulated::abs_epi8
#define _mm512_movepi8_mask emulated::movepi8_mask
#define _mm512_mask_sub_epi8 emulated::mask_sub_epi8
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd_avx_epi32
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_castsi128_si512 emulated::castsi128_si512
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_mask_broadcast_i32x4 emulated::mask_broadcast_i32x4
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#define _mm512_set_epi16 emulated::set_epi16
#define _mm512_add_epi16 emulated::add_epi16
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_permutex2var_epi16 emulated::permutex2var_epi16
