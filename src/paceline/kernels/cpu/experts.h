// Routing of rows to the experts of a mixture.
#pragma once

#include <algorithm>
#include <vector>

#include "functions.h"
#include "product.h"

namespace paceline {

// How rows choose `used` of `routed` experts: by softmax or by sigmoid. With sigmoid, rows may first choose among groups of
// experts (`groups` is 0 if there are none), `bias` may be added to the scores that are compared, and `scales` may multiply
// the results. `shared`: one additional expert, numbered last, is used by all rows.
struct Routing {
    int32_t routed, used, normalised, sigmoid, groups, groups_used, group_best, shared;
    const float *bias, *scales;  // [routed], or null

    int count() const { return routed + shared; }
    int each() const { return used + shared; }
    int width() const { return (routed + LANES - 1) / LANES * LANES; }
};

// True if entry i is among the `most` highest of `count` numbers. Of equal numbers, the first one counts as higher. A NaN
// counts as the highest, so exactly `most` entries are always chosen.
inline bool among(const float* x, int count, int i, int most) {
    int better = 0;
    for (int j = 0; j < count; j++) better += (x[j] > x[i]) | ((x[j] == x[i]) & (j < i));
    return better < most;
}

// Excludes all groups except the `groups_used` ones with the largest sums of their `group_best` highest scores. `totals` has
// room for one number per group.
inline void limit(float* scores, float* totals, const Routing& r) {
    const int size = r.routed / std::max(1, r.groups);
    for (int group = 0; group < r.groups; group++) {
        const float* own = scores + group * size;
        totals[group] = 0;
        for (int i = 0; i < size; i++)
            if (among(own, size, i, r.group_best)) totals[group] += own[i];
    }
    for (int group = 0; group < r.groups; group++)
        if (!among(totals, r.groups, group, r.groups_used)) std::fill_n(scores + group * size, size, -INFINITY);
}

// Chooses a row's experts: those with the highest scores, in ascending order, and their weights in the result. If
// `normalised`, the weights sum to 1 before the scales are applied. `scores` has room for three times the `width`. Scores are
// not rounded to the model's dtype, which would turn near-ties into ties.
inline void choose(float* scores, const Routing& r, int32_t* chosen, float* parts) {
    const int count = r.routed, width = r.width();
    for (int i = count; i < width; i++) scores[i] = -INFINITY;
    float *compared = scores, top = 0, total = 1, own = 0;
    if (r.sigmoid) {
        compared += width;
        for (int i = 0; i < width; i += LANES) {
            const Floats score = 1.0f / (exponential(-load<Floats>(scores + i)) + 1.0f);
            store(scores + i, score), store(compared + i, score);
        }
        for (int i = 0; r.bias && i < count; i++) compared[i] += r.bias[i];
        limit(compared, compared + width, r);
    } else {
        Floats tops = all(-INFINITY), totals{};
        for (int i = 0; i < width; i += LANES) {
            const Floats x = load<Floats>(scores + i);
            tops = select(x > tops, x, tops);
        }
        top = largest(tops);
        for (int i = 0; i < width; i += LANES) totals += exponential(load<Floats>(scores + i) - top);
        total = sum(totals);
    }
    for (int i = 0, found = 0; i < count && found < r.used; i++) {
        if (!among(compared, count, i, r.used)) continue;
        parts[found] = r.sigmoid ? scores[i] : exponential(all(scores[i] - top))[0];
        own += parts[found];
        chosen[found++] = i;
    }
    for (int i = 0; i < r.used; i++) parts[i] = parts[i] / (r.normalised ? own : total) * (r.scales ? r.scales[chosen[i]] : 1.0f);
    if (r.shared) chosen[r.used] = count, parts[r.used] = 1.0f;
}

// Rows grouped by expert. An entry is a pair of a row and an expert that it has chosen. Entries are sorted by expert.
struct Routes {
    std::vector<int32_t> active, first, rows;  // chosen experts; first entry of each; row of each entry
    std::vector<float> parts;                  // weight of each entry

    void reserve(int experts, size_t entries) {
        active.reserve(experts), first.reserve(experts + 1);
        if (rows.size() < entries) rows.resize(entries), parts.resize(entries);
    }

    int count() const { return int(active.size()); }
    // The entries of active expert i.
    Span of(int i) const { return {first[i], first[i + 1]}; }

    // `chosen`, `part` [count, used]. Without `chosen` there is one expert, for all rows.
    void assign(int experts, int count, int used, const int32_t* chosen, const float* part) {
        active.clear(), first.clear();
        int entries = 0;
        for (int expert = 0; expert < experts; expert++) {
            const int begin = entries;
            for (int i = 0; i < count * used; i++)
                if (!chosen || chosen[i] == expert) rows[entries] = i / used, parts[entries++] = chosen ? part[i] : 1.0f;
            if (entries > begin) active.push_back(expert), first.push_back(begin);
        }
        first.push_back(entries);
    }
};

}  // namespace paceline
