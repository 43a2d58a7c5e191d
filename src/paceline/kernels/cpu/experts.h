// Which experts of a mixture each row chooses, and the rows of each expert.
#pragma once

#include <algorithm>
#include <vector>

#include "functions.h"
#include "product.h"

namespace paceline {

// A row's choice among `count` experts: those of the `used` highest scores, of equal ones the lower number, ascending; and
// their parts in the result by softmax, which sum to 1 if `normalised`. `scores` has room for whole lanes. They are not
// rounded to the model's dtype, where near-ties become ties.
inline void choose(float* scores, int count, int used, bool normalised, int32_t* chosen, float* parts) {
    for (int i = count; i % LANES; i++) scores[i] = -INFINITY;
    Floats tops = all(-INFINITY), totals{};
    for (int i = 0; i < count; i += LANES) {
        const Floats x = load<Floats>(scores + i);
        tops = select(x > tops, x, tops);
    }
    const float top = largest(tops);
    for (int i = 0; i < count; i += LANES) totals += exponential(load<Floats>(scores + i) - top);
    float total = sum(totals), own = 0;
    for (int i = 0, found = 0; i < count && found < used; i++) {
        int better = 0;  // no number is better than one that is not a number, so that `used` are always found
        for (int j = 0; j < count; j++) better += (scores[j] > scores[i]) | ((scores[j] == scores[i]) & (j < i));
        if (better >= used) continue;
        parts[found] = exponential(all(scores[i] - top))[0];
        own += parts[found];
        chosen[found++] = i;
    }
    for (int i = 0; i < used; i++) parts[i] /= normalised ? own : total;
}

// Rows by expert. An entry is a row that has chosen an expert; those of one expert follow each other.
struct Routes {
    std::vector<int32_t> active, first, rows;  // experts that some row has chosen; of each the first entry; of entries
    std::vector<float> parts;                  // of entries

    void reserve(int experts, size_t entries) {
        active.reserve(experts), first.reserve(experts + 1);
        if (rows.size() < entries) rows.resize(entries), parts.resize(entries);
    }

    int count() const { return int(active.size()); }
    // The entries of an active expert.
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
