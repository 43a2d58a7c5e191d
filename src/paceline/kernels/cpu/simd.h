// Sixteen lanes at a time. GCC's and Clang's vector types compile to the machine's instructions; only the operations that
// matter most use intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace paceline {

constexpr int LANES = 16;

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Unsigned = uint32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));
using bf16 = uint16_t;
using half = uint16_t;

template <class V, class T>
inline V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }

inline bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    int32_t some = 0;
    for (int i = 0; i < LANES; i++) some |= mask[i];
    return some;
#endif
}

// a * b + c, rounded once; twice on processors without such an instruction, where it would be a function call.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif !defined(__FMA__) && !defined(__aarch64__) && !defined(__FP_FAST_FMAF)
    return a * b + c;
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

#if defined(__AVX512F__)
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline int32_t sum(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }
#else
template <class V>
inline auto sum(V v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

inline float largest(Floats v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    return v[0];
}
#endif

// 16 numbers of two bytes.
inline Floats widen(const bf16* from) {
    return (Floats)(__builtin_convertvector(load<Shorts>(from), Ints) << 16);
}

inline float widened(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// To the nearest, ties to even; a NaN stays one.
inline bf16 narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void narrow(bf16* to, Floats v) {
#if defined(__AVX512BF16__)
    __m256bh y = _mm512_cvtneps_pbh(v);
    std::memcpy(to, &y, 32);
#else
    for (int i = 0; i < LANES; i++) to[i] = narrowed(v[i]);
#endif
}

inline Floats from_half(const half* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) {
        // A product turns exponents of 5 bits into 8 bits, for subnormals too.
        uint32_t bits = uint32_t(from[i] & 0x7fff) << 13, sign = uint32_t(from[i] & 0x8000) << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        y = bits < 0x0f800000 ? y * 0x1p112f : y * INFINITY;
        std::memcpy(&bits, &y, 4);
        bits |= sign;
        std::memcpy(&y, &bits, 4);
        v[i] = y;
    }
    return v;
#endif
}

// Each lane adds 4 unsigned bytes of its own times the 4 signed bytes of `quad`: exact.
inline Ints dot4(Ints total, Bytes own, int32_t quad) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)own, _mm512_set1_epi32(quad));
#else
    int8_t signs[4];
    std::memcpy(signs, &quad, 4);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) total[i] += int32_t(own[4 * i + j]) * signs[j];
    return total;
#endif
}

// Each lane adds 2 bfloat16 numbers of its own times the 2 of `pair`.
inline Floats dot2(Floats total, Ints own, int32_t pair) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(total, (__m512bh)own, (__m512bh)_mm512_set1_epi32(pair));
#else
    Floats odd = (Floats)(own & int32_t(0xffff0000)), even = (Floats)(own << 16);
    total = fma(odd, all(widened(bf16(uint32_t(pair) >> 16))), total);
    return fma(even, all(widened(bf16(pair))), total);
#endif
}

// 8 numbers of each of 16 rows, `stride` apart, as 4 pairs: a lane per row.
inline void transpose(Ints* pairs, const bf16* rows, int64_t stride) {
#if defined(__AVX512F__)
    const bf16* quarters[4] = {rows, rows + 4 * stride, rows + 8 * stride, rows + 12 * stride};
    __m512i quads[4], halves[4];
    for (int i = 0; i < 4; i++) {
        auto at = [&](int j) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(quarters[j] + i * stride)); };
        quads[i] = _mm512_castsi128_si512(at(0));
        for (int j = 1; j < 4; j++) quads[i] = _mm512_mask_broadcast_i32x4(quads[i], 0xf << 4 * j, at(j));
    }
    for (int i = 0; i < 4; i += 2) {
        halves[i] = _mm512_unpacklo_epi32(quads[i], quads[i + 1]);
        halves[i + 1] = _mm512_unpackhi_epi32(quads[i], quads[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        pairs[2 * i] = (Ints)_mm512_unpacklo_epi64(halves[i], halves[i + 2]);
        pairs[2 * i + 1] = (Ints)_mm512_unpackhi_epi64(halves[i], halves[i + 2]);
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) pairs[j][i] = load<int32_t>(rows + i * stride + 2 * j);
#endif
}

// 16 N numbers of two rows, those that stand above each other side by side.
template <int N>
inline void interleave(Ints* pairs, const bf16* even, const bf16* odd) {
    int i = 0;
#if defined(__AVX512BW__)
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (; i + 1 < N; i += 2) {
        const __m512i a = _mm512_loadu_si512(even + i * LANES), b = _mm512_loadu_si512(odd + i * LANES);
        pairs[i] = (Ints)_mm512_permutex2var_epi16(a, first, b);
        pairs[i + 1] = (Ints)_mm512_permutex2var_epi16(a, second, b);
    }
#endif
    for (; i < N; i++)
        pairs[i] = __builtin_convertvector(load<Shorts>(even + i * LANES), Ints) |
                   __builtin_convertvector(load<Shorts>(odd + i * LANES), Ints) << 16;
}

// e^x to about one unit in the last place; 0 below -87, -inf included.
inline Floats exponential(Floats x) {
    Ints vanishes = x < -87.0f;
    x = vanishes ? all(-87.0f) : x > 88.0f ? all(88.0f) : x;
    Floats turns = x * 1.44269504f + 12582912.0f;  // rounds: 1.5 * 2^23 leaves no bits behind the point
    Ints power = (Ints)turns << 23;
    turns -= 12582912.0f;
    Floats r = fma(turns, all(-0.693359375f), x);
    r = fma(turns, all(2.12194440e-4f), r);
    Floats y = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = fma(y, r, all(c));
    y = fma(y, r * r, r) + 1.0f;
    y = (Floats)((Ints)y + power);
    return vanishes ? Floats{} : y;
}

// 2^x to about 2^-18, for x up to 127; 0 below -127, -inf included, and exactly 1 for 0.
inline Floats power_of_two(Floats x) {
    x = x < -127.0f ? all(-127.0f) : x;  // a NaN stays one
    Floats turns = x + 12582912.0f;
    Ints power = (Ints)turns << 23;
    Floats r = x - (turns - 12582912.0f), y = all(9.58287326e-3f);
    for (float c : {5.59064813e-2f, 2.40240986e-1f, 6.93124187e-1f, 1.0f}) y = fma(y, r, all(c));
    return (Floats)((Ints)y + power);
}

inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

}  // namespace paceline
