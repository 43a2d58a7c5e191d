// Functions of 16 numbers, built from operations that round the same on every processor. The functions of C libraries may
// differ in the last bit.
#pragma once

#include <initializer_list>

#include "simd.h"

namespace paceline {

// Evaluates a polynomial. The highest power comes first.
inline Floats polynomial(const Floats& x, float first, std::initializer_list<float> others) {
    Floats y = all(first);
    for (float c : others) y = fma(y, x, all(c));
    return y;
}

inline Floats size_of(const Floats& x) { return as<Floats>(as<Ints>(x) & 0x7fffffff); }
inline Floats with_sign(const Floats& size, const Floats& x) {
    return as<Floats>(as<Ints>(size) | (as<Ints>(x) & int32_t(0x80000000)));
}

// e^x to about one unit in the last place. Returns 0 below -87, including -inf.
inline Floats exponential(Floats x) {
    const Ints vanishes = x < -87.0f;
    x = select(vanishes, all(-87.0f), select(x > 88.0f, all(88.0f), x));
    Floats turns = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Ints power = as<Ints>(turns) << 23;
    turns -= 12582912.0f;
    Floats r = fma(turns, all(-0.693359375f), x);
    r = fma(turns, all(2.12194440e-4f), r);
    Floats y = polynomial(r, 1.9875691500e-4f, {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                                5.0000001201e-1f});
    y = fma(y, r * r, r) + 1.0f;
    y = as<Floats>(as<Ints>(y) + power);
    return select(vanishes, Floats{}, y);
}

// 2^x to about 2^-18, for x up to 127. Returns 0 below -126, including -inf, and exactly 1 for 0. A NaN stays one.
inline Floats power_of_two(const Floats& x) {
    const Floats turns = x + 12582912.0f;
    const Ints power = as<Ints>(turns) << 23;
    const Floats r = x - (turns - 12582912.0f);
    const Floats y = polynomial(r, 9.58287326e-3f, {5.59064813e-2f, 2.40240986e-1f, 6.93124187e-1f, 1.0f});
    return as<Floats>((as<Ints>(y) + power) & ~(x < -126.0f));
}

// The polynomials of the next two functions are our own minimax fits (Remez), to 3e-9 and 1e-9.

// tanh(x) to about two units in the last place.
inline Floats hyperbolic_tangent(const Floats& x) {
    const Floats square = x * x, size = size_of(x);
    const Floats p = polynomial(square, -5.895625861e-3f, {2.079640952e-2f, -5.378397475e-2f, 1.333192608e-1f, -3.333329809e-1f});
    const Floats large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    return select(size < 0.6f, fma(p * square, x, x), with_sign(large, x));
}

// The error function to about two units in the last place. For x >= 1 it is 1 - e^-q, where q fits -log(1 - erf).
inline Floats error_function(const Floats& x) {
    const Floats square = x * x, size = size_of(x);
    const Floats p = polynomial(square, 7.85386118e-5f, {-8.010193569e-4f, 5.188327679e-3f, -2.685381193e-2f, 1.128358515e-1f,
                                                         -3.761262582e-1f, 1.128379166f});
    const Floats t = select(size > 4.0f, all(4.0f), size);  // 1 - erf(4) is below half a unit
    const Floats q = polynomial(t, -1.855739066e-4f, {2.939606335e-3f, -2.180531464e-2f, 1.030373615e-1f, 6.382256852e-1f,
                                                      1.127040032f, 3.537205307e-4f});
    return select(size < 1.0f, p * x, with_sign(1.0f - exponential(-q), x));
}

inline Floats logistic(const Floats& x) { return 1.0f / (1.0f + exponential(-x)); }

// log(1 + e^x) to about two units in the last place. With t = e^-|x|, log(1 + t) is 2 atanh(t / (2 + t)), by its power series.
inline Floats softplus(const Floats& x) {
    const Floats t = exponential(-size_of(x)), z = t / (2.0f + t), square = z * z;
    const Floats p = polynomial(square, 2.0f / 15, {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3});
    return select(x > 0.0f, x, Floats{}) + fma(p * square, z, 2.0f * z);
}

enum Activation : int32_t { SILU, GELU, GELU_TANH, CLAMPED, RELU_SQUARED };

inline Floats activate(int kind, const Floats& x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == RELU_SQUARED) return select(x < 0.0f, Floats{}, x * x);  // NaN stays NaN
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * fma(x * x * 0.044715f, x, x)));
    return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
}

// The gated activations of activations.py.
[[gnu::flatten]] inline Floats gated(int kind, const Floats& gate, const Floats& up) {
    if (kind != CLAMPED) return activate(kind, gate) * up;
    const Floats limit = all(7.0f), low = select(gate > limit, limit, gate);
    const Floats bounded = select(up > limit, limit, select(up < -limit, -limit, up));
    return (bounded + 1.0f) * (low / (1.0f + exponential(-1.702f * low)));
}

}  // namespace paceline
