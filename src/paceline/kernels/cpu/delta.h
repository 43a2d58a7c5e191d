// Gated DeltaNet and Mamba-2 over the rows of a tree, row by row. See `models/recurrent.py`.
//
// A state is a matrix [keys, values] for each head. All sums run over the keys in order, and no product is fused with a
// sum. So the bits of a row depend only on its ancestors, on every processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"

namespace paceline {

// One call of the recurrence.
//
// before [heads, keys, values]: the state before the tree.
// after  [heads, keys, values]: receives the state after the last row of a chain; null for a tree.
// parents [rows]: the parent of each row, or -1.
// start: number of rows whose changes are known, because earlier passes have computed them. They come first.
// k [rows, key_heads, keys], decay [rows, heads], changes [rows, heads, values]: of all rows.
// q [rows - start, key_heads, keys], v and out [rows - start, heads, values], beta [rows - start, heads]: of the other rows.
//     Without `beta` (Mamba-2), a row's change is its value.
// tiled: head h uses key head h modulo `key_heads`.
struct Delta {
    int32_t heads, key_heads, keys, values, tiled, rows, start;
    const int32_t* parents;
    const float *before, *q, *k, *v, *decay, *beta;
    float *changes, *out, *after;

    int64_t size() const { return int64_t(keys) * values; }

    // Floats of scratch memory for one head.
    int64_t scratch_size() const { return values + (after ? 0 : rows * size()); }

    void run(int head, float* scratch) const {
        float *sums = scratch, *states = after ? after + head * size() : scratch + values;
        for (int row = 0; row < rows; row++) {
            const int parent = parents[row];
            const float* from = parent < 0 ? before + head * size() : states + (after ? 0 : parent * size());
            step(head, row, from, states + (after ? 0 : row * size()), sums);
        }
    }

   private:
    void step(int head, int row, const float* from, float* to, float* __restrict sums) const {
        const int key_head = tiled ? head % key_heads : head / (heads / key_heads), fresh = row - start;
        const float keep = decay[int64_t(row) * heads + head];
        const float* __restrict key = k + (int64_t(row) * key_heads + key_head) * keys;
        float* __restrict change = changes + (int64_t(row) * heads + head) * values;
        if (fresh < 0) {
            for (int i = 0; i < keys; i++) write(from + int64_t(i) * values, to + int64_t(i) * values, keep, key[i], change);
            return;
        }
        const float* __restrict value = v + (int64_t(fresh) * heads + head) * values;
        if (beta) {
            std::fill_n(sums, values, 0.0f);
            for (int i = 0; i < keys; i++) {
                const float* __restrict line = from + int64_t(i) * values;
                for (int j = 0; j < values; j++) sums[j] += line[j] * keep * key[i];
            }
            const float weight = beta[int64_t(fresh) * heads + head];
            for (int j = 0; j < values; j++) change[j] = (value[j] - sums[j]) * weight;
        } else {
            std::copy_n(value, values, change);
        }
        const float* __restrict query = q + (int64_t(fresh) * key_heads + key_head) * keys;
        float* __restrict y = out + (int64_t(fresh) * heads + head) * values;
        std::fill_n(y, values, 0.0f);
        for (int i = 0; i < keys; i++) {
            float* __restrict line = to + int64_t(i) * values;
            write(from + int64_t(i) * values, line, keep, key[i], change);
            for (int j = 0; j < values; j++) y[j] += line[j] * query[i];
        }
    }

    // Updates one line of a state, in place if `from` equals `to`.
    void write(const float* from, float* __restrict to, float keep, float key, const float* __restrict change) const {
        if (from != to) std::copy_n(from, values, to);
        for (int j = 0; j < values; j++) to[j] = to[j] * keep + key * change[j];
    }
};

}  // namespace paceline
