// Routing of rows to the experts of a mixture.
#pragma once

#include <algorithm>
#include <vector>

#include "functions.h"
#include "product.h"

namespace paceline {

// How rows choose `top_k` of `routed` experts: by softmax or by sigmoid. With sigmoid, rows may first choose `groups_used` of `groups`
// groups of experts (`groups` is 0 if there are none), and `bias` may be added to the scores that are compared. `scales` may
// multiply the weights. `shared`: 1 if all rows also use one more expert, numbered last.
struct Routing {
    int32_t routed, top_k, normalised, sigmoid, groups, groups_used, group_best, shared;
    const float *bias, *scales;  // [routed], or null

    int count() const { return routed + shared; }   // experts
    int per_row() const { return top_k + shared; }  // experts of a row
    int padded_experts() const { return (routed + LANES - 1) / LANES * LANES; }
};

// True if entry i is among the `most` highest of `count` numbers. Of equal numbers, the first one counts as higher. A NaN
// counts as the highest, so exactly `most` entries are always chosen.
inline bool is_among_top(const float* x, int count, int i, int most) {
    int better = 0;
    for (int j = 0; j < count; j++) better += (x[j] > x[i]) | ((x[j] == x[i]) & (j < i));
    return better < most;
}

// Excludes all groups except the `groups_used` ones with the largest sums of their `group_best` highest scores. `sums` has room for
// one number per group.
inline void exclude_groups(float* scores, float* sums, const Routing& r) {
    const int size = r.routed / std::max(1, r.groups);
    for (int group = 0; group < r.groups; group++) {
        const float* group_scores = scores + group * size;
        sums[group] = 0;
        for (int i = 0; i < size; i++)
            if (is_among_top(group_scores, size, i, r.group_best)) sums[group] += group_scores[i];
    }
    for (int group = 0; group < r.groups; group++)
        if (!is_among_top(sums, r.groups, group, r.groups_used)) std::fill_n(scores + group * size, size, -INFINITY);
}

// Chooses a row's experts: those with the highest scores, in ascending order, and their weights in the result. If
// `normalised`, the weights sum to 1 before the scales are applied. `scores` has room for three times `padded_experts`. Scores are
// not rounded to the model's dtype, which would turn near-ties into ties.
inline void choose(float* scores, const Routing& r, int32_t* chosen, float* weights) {
    const int count = r.routed, width = r.padded_experts();
    for (int i = count; i < width; i++) scores[i] = -INFINITY;
    float *compared = scores, max = 0, denominator = 1, chosen_sum = 0;
    if (r.sigmoid) {
        compared += width;
        for (int i = 0; i < width; i += LANES) {
            const Floats score = 1.0f / (exponential(-load<Floats>(scores + i)) + 1.0f);
            store(scores + i, score), store(compared + i, score);
        }
        for (int i = 0; r.bias && i < count; i++) compared[i] += r.bias[i];
        exclude_groups(compared, compared + width, r);
    } else {
        Floats maxima = all(-INFINITY), sums{};
        for (int i = 0; i < width; i += LANES) {
            const Floats x = load<Floats>(scores + i);
            maxima = select(x > maxima, x, maxima);
        }
        max = largest(maxima);
        for (int i = 0; i < width; i += LANES) sums += exponential(load<Floats>(scores + i) - max);
        denominator = sum(sums);
    }
    for (int i = 0, found = 0; i < count && found < r.top_k; i++) {
        if (!is_among_top(compared, count, i, r.top_k)) continue;
        weights[found] = r.sigmoid ? scores[i] : exponential(all(scores[i] - max))[0];
        chosen_sum += weights[found];
        chosen[found++] = i;
    }
    for (int i = 0; i < r.top_k; i++)
        weights[i] = weights[i] / (r.normalised ? chosen_sum : denominator) * (r.scales ? r.scales[chosen[i]] : 1.0f);
    if (r.shared) chosen[r.top_k] = count, weights[r.top_k] = 1.0f;
}

// Rows grouped by expert. An entry is a pair of a row and an expert that it has chosen. Entries are sorted by expert.
struct Routes {
    std::vector<int32_t> active, first, rows;  // chosen experts; first entry of each; row of each entry
    std::vector<float> weights;                // weight of each entry

    void reserve(int experts, size_t entries) {
        active.reserve(experts), first.reserve(experts + 1);
        if (rows.size() < entries) rows.resize(entries), weights.resize(entries);
    }

    int count() const { return int(active.size()); }  // experts that any row has chosen

    // The entries of active expert i.
    Range of(int i) const { return {first[i], first[i + 1]}; }

    // `chosen`, `weight` [count, top_k]. Without `chosen` there is one expert, for all rows.
    void assign(int experts, int count, int top_k, const int32_t* chosen, const float* weight) {
        active.clear(), first.clear();
        int entries = 0;
        for (int expert = 0; expert < experts; expert++) {
            const int begin = entries;
            for (int i = 0; i < count * top_k; i++)
                if (!chosen || chosen[i] == expert) rows[entries] = i / top_k, weights[entries++] = chosen ? weight[i] : 1.0f;
            if (entries > begin) active.push_back(expert), first.push_back(begin);
        }
        first.push_back(entries);
    }
};

}  // namespace paceline
