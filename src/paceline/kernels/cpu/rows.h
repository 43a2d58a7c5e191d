// Rows of numbers in our own memory. They are padded with zeros to whole lanes, so that all loops run over whole lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace paceline {

constexpr int padded_size(int size) { return (size + LANES - 1) / LANES * LANES; }

// Converts `size` numbers of a tensor's row to floats, and pads them to whole lanes.
template <class Element>
[[gnu::flatten]] void widen_row(float* to, const typename Element::Number* from, int size) {
    for (int i = 0; i < size; i += LANES) {
        typename Element::Number part[LANES] = {};
        std::copy_n(from + i, std::min(LANES, size - i), part);
        store(to + i, Element::widen(part));
    }
}

// Converts a padded row of floats to `size` numbers of a tensor.
template <class Element>
[[gnu::flatten]] void narrow_row(typename Element::Number* to, const float* from, int size) {
    for (int i = 0; i < size; i += LANES) {
        typename Element::Number part[LANES];
        Element::narrow(part, load<Floats>(from + i));
        std::copy_n(part, std::min(LANES, size - i), to + i);
    }
}

// Copies `size` elements of a row and pads them to whole lanes.
inline void copy_row(float* to, const float* from, int size) {
    std::fill(std::copy_n(from, size, to), to + padded_size(size), 0.0f);
}

// RMS norm: to = x / rms(x) * weight.
[[gnu::flatten]] inline void normed(float* to, const float* x, const float* weight, int size, float eps) {
    Floats squares{};
    for (int i = 0; i < size; i += LANES) squares = fma(load<Floats>(x + i), load<Floats>(x + i), squares);
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int i = 0; i < size; i += LANES) store(to + i, load<Floats>(x + i) * scale * load<Floats>(weight + i));
}

// Enlarges v to at least `rows` * `width` elements.
template <class T>
void grow(std::vector<T>& v, int rows, int64_t width) {
    if (v.size() < size_t(rows * width)) v.resize(size_t(rows * width));
}

}  // namespace paceline
