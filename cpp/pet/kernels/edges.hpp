#pragma once

#include "rows/rows.hpp"

/// Pairs, edges and cutoffs of PET. Lengths are in the model's unit. Functions as in metatrain's
/// PET (pet/modules/structures.py, adaptive_cutoff.py and utilities.py), with analytic gradients.
namespace metatomic_tc::pet {

using namespace rows;

/// What keeps a distance from zero, as in metatrain.
constexpr double distance_offset = 1e-15;

/// Pairs in rows by their centre: those of atom i are `row_starts[i]` to `row_starts[i + 1]`.
template <class T> struct Pairs {
    /// [atoms, 3]
    const T *positions;
    /// [systems, 3, 3]
    const T *cells;
    const int *neighbors;
    /// [pairs, 3]
    const int *cell_shifts;
    const int *row_starts;
    /// of the atoms
    const int *system_indices;

    /// From the centre `atom` to the neighbor. That of the reverse pair is exactly its negative.
    METATOMIC_TC_HOST_DEVICE void vector(int64_t atom, int64_t pair, T result[3]) const {
        auto *cell = cells + 9 * static_cast<int64_t>(system_indices[atom]);
        auto *shift = cell_shifts + 3 * pair;
        auto *neighbor = positions + 3 * static_cast<int64_t>(neighbors[pair]);
        for (int k = 0; k < 3; k++) {
            auto offset =
                T(shift[0]) * cell[k] + T(shift[1]) * cell[3 + k] + T(shift[2]) * cell[6 + k];
            result[k] = neighbor[k] - positions[3 * atom + k] + offset;
        }
    }
};

template <class T> METATOMIC_TC_HOST_DEVICE T length(const T vector[3]) {
    return std::sqrt(vector[0] * vector[0] + vector[1] * vector[1] + vector[2] * vector[2]);
}

/// A smooth step from 1 at `cutoff - width` to 0 at `cutoff`.
template <class T> struct Cutoff {
    T width;
    /// else cosine
    bool bump;

    METATOMIC_TC_HOST_DEVICE T value(T distance, T cutoff) const {
        auto s = clamped((distance - (cutoff - width)) / width);
        return bump ? T(0.5) * (1 + std::tanh(1 / std::tan(T(M_PI) * s)))
                    : T(0.5) * (1 + std::cos(T(M_PI) * s));
    }

    /// The derivative with respect to the cutoff, which is minus that with respect to the distance.
    METATOMIC_TC_HOST_DEVICE T slope(T distance, T cutoff) const {
        auto scaled = (distance - (cutoff - width)) / width;
        auto s = clamped(scaled);
        if (s != scaled) {
            return 0;
        }
        if (!bump) {
            return T(M_PI / 2) / width * std::sin(T(M_PI) * s);
        }
        T step, slope;
        bump_at(s, step, slope);
        return slope;
    }

    /// The bump is (1 + step) / 2 at s in (0, 1), counted from the start of the step; `slope` is as
    /// above.
    METATOMIC_TC_HOST_DEVICE void bump_at(T s, T &step, T &slope) const {
        auto sine = std::sin(T(M_PI) * s);
        step = std::tanh(std::cos(T(M_PI) * s) / sine);
        slope = T(M_PI / 2) / width * (1 - step * step) / (sine * sine);
    }

    METATOMIC_TC_HOST_DEVICE T clamped(T scaled) const {
        auto margin = bump ? T(1e-6) : T(0);
        return scaled < margin ? margin : (scaled > 1 - margin ? 1 - margin : scaled);
    }
};

/// For each atom the cutoff within which it has `num_neighbors` neighbors: the root of
/// `sum of Cutoff(distance, r) + num_neighbors (r / max_cutoff)³ - num_neighbors`, by ten steps of
/// Newton's method that fall back to bisection, as in metatrain.
template <class T> struct AdaptiveCutoffs {
    Pairs<T> pairs;
    Cutoff<T> cutoff;
    T num_neighbors, max_cutoff;
    /// [pairs], working memory
    T *distances;
    /// [atoms] each: the results, the roots before the last correction, and what a change of the
    /// count of neighbors changes the result by (0 where it was clamped)
    T *cutoffs, *roots, *responses;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        int64_t begin = pairs.row_starts[atom], end = pairs.row_starts[atom + 1];
        for (auto pair = begin + lanes.index(); pair < end; pair += lanes.count) {
            T vector[3];
            pairs.vector(atom, pair, vector);
            distances[pair] = length(vector) + T(distance_offset);
        }
        T low = 0, high = max_cutoff, root = T(0.5) * high;
        T excess, slope;
        for (int step = 0; step < 10; step++) {
            count(begin, end, root, excess, slope, lanes);
            if (excess <= 0) {
                low = root;
            } else {
                high = root;
            }
            auto next = root - excess / (slope < T(1e-6) ? T(1e-6) : slope);
            root = next >= low && next <= high ? next : T(0.5) * (low + high);
        }
        count(begin, end, root, excess, slope, lanes);
        slope = slope < T(1e-6) ? T(1e-6) : slope;
        auto result = root - excess / slope;
        auto lowest = max_cutoff / 16;
        auto inside = result >= lowest && result <= max_cutoff;
        if (lanes.index() == 0) {
            cutoffs[atom] = inside ? result : (result < lowest ? lowest : max_cutoff);
            roots[atom] = root;
            responses[atom] = inside ? 1 / slope : T(0);
        }
    }

  private:
    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void
    count(int64_t begin, int64_t end, T root, T &excess, T &slope, Lanes lanes) const {
        T neighbors = 0, change = 0;
        for (auto pair = begin + lanes.index(); pair < end; pair += lanes.count) {
            auto scaled = (distances[pair] - (root - cutoff.width)) / cutoff.width;
            if (scaled <= 0) {
                neighbors += 1;
            } else if (scaled < 1) {
                T step, slope_of_pair;
                cutoff.bump_at(cutoff.clamped(scaled), step, slope_of_pair);
                neighbors += T(0.5) * (1 + step);
                change += slope_of_pair;
            }
        }
        auto x = root / max_cutoff;
        excess = lanes.sum(neighbors) + num_neighbors * x * x * x - num_neighbors;
        slope = lanes.sum(change) + 3 * num_neighbors * x * x / max_cutoff;
    }
};

/// Gradients of `AdaptiveCutoffs`, by the implicit function theorem. Needs a symmetric pair list: a
/// row then holds all that its atom's position contributes to, also as a neighbor.
template <class T> struct AdaptiveCutoffsBackward {
    Pairs<T> pairs;
    Cutoff<T> cutoff;
    const T *roots, *responses;
    /// [atoms]
    const T *gradient;
    /// [atoms, 3] and [atoms, 3, 3]: the cells' is summed over the atoms of a system elsewhere
    T *grad_positions, *grad_cells;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        T position[3] = {}, cell[9] = {};
        auto root = roots[atom], weight = gradient[atom] * responses[atom];
        int64_t end = pairs.row_starts[atom + 1];
        for (auto pair = pairs.row_starts[atom] + lanes.index(); pair < end; pair += lanes.count) {
            T vector[3];
            pairs.vector(atom, pair, vector);
            auto norm = length(vector), distance = norm + T(distance_offset);
            int64_t neighbor = pairs.neighbors[pair];
            auto own = weight * cutoff.slope(distance, root);
            auto other =
                gradient[neighbor] * responses[neighbor] * cutoff.slope(distance, roots[neighbor]);
            auto inverse = norm > 0 ? 1 / norm : T(0);
            for (int k = 0; k < 3; k++) {
                auto direction = vector[k] * inverse;
                position[k] -= (own + other) * direction;
                for (int row = 0; row < 3; row++) {
                    cell[3 * row + k] += own * direction * T(pairs.cell_shifts[3 * pair + row]);
                }
            }
        }
        store_sums(position, grad_positions + 3 * atom, lanes);
        store_sums(cell, grad_cells + 9 * atom, lanes);
    }
};

/// Sums of [atoms, 9] over the atoms of each system.
template <class T> struct SystemSums {
    const T *values;
    const int *system_indices;
    int64_t atoms;
    /// [systems, 9]
    T *sums;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t system, Lanes lanes) const {
        T result[9] = {};
        for (int64_t atom = lanes.index(); atom < atoms; atom += lanes.count) {
            if (system_indices[atom] == system) {
                for (int k = 0; k < 9; k++) {
                    result[k] += values[9 * atom + k];
                }
            }
        }
        store_sums(result, sums + 9 * system, lanes);
    }
};

/// Which pairs are within the mean of their atoms' cutoffs: first how many of each row, then, with
/// `edge_starts` given, their data.
template <class T> struct SelectEdges {
    Pairs<T> pairs;
    const T *cutoffs;
    /// [atoms], out
    int *counts;
    /// [atoms + 1] or null; then the following are written, where the starts leave room
    const int *edge_starts;
    int *neighbors, *cell_shifts;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        int64_t begin = pairs.row_starts[atom], end = pairs.row_starts[atom + 1];
        int found = 0;
        for (auto first = begin; first < end; first += lanes.count) {
            auto pair = first + lanes.index();
            auto keep = false;
            if (pair < end) {
                T vector[3];
                pairs.vector(atom, pair, vector);
                auto mean = (cutoffs[atom] + cutoffs[pairs.neighbors[pair]]) / 2;
                keep = length(vector) + T(distance_offset) <= mean;
            }
            int total;
            auto place = lanes.rank(keep, total);
            if (keep && edge_starts != nullptr) {
                int64_t edge = edge_starts[atom] + found + place;
                if (edge < edge_starts[atom + 1]) {
                    neighbors[edge] = pairs.neighbors[pair];
                    for (int k = 0; k < 3; k++) {
                        cell_shifts[3 * edge + k] = pairs.cell_shifts[3 * pair + k];
                    }
                }
            }
            found += total;
        }
        if (edge_starts == nullptr && lanes.index() == 0) {
            counts[atom] = found;
        }
    }
};

/// For each edge (i, j, shift) the index of (j, i, -shift), -1 where there is none.
struct ReverseEdges {
    const int *neighbors, *cell_shifts, *row_starts;
    int *reverse;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        for (auto edge = row_starts[atom]; edge < row_starts[atom + 1]; edge++) {
            auto *shift = cell_shifts + 3 * static_cast<int64_t>(edge);
            auto neighbor = neighbors[edge];
            auto found = -1;
            for (auto other = row_starts[neighbor] + lanes.index();
                 other < row_starts[neighbor + 1];
                 other += lanes.count) {
                auto *other_shift = cell_shifts + 3 * static_cast<int64_t>(other);
                if (neighbors[other] == atom && other_shift[0] == -shift[0] &&
                    other_shift[1] == -shift[1] && other_shift[2] == -shift[2]) {
                    found = other;
                }
            }
            found = lanes.maximum(found);
            if (lanes.index() == 0) {
                reverse[edge] = found;
            }
        }
    }
};

template <class T> struct EdgeVectors {
    Pairs<T> edges;
    /// [edges, 3]
    T *vectors;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        int64_t end = edges.row_starts[atom + 1];
        for (auto edge = edges.row_starts[atom] + lanes.index(); edge < end; edge += lanes.count) {
            edges.vector(atom, edge, vectors + 3 * edge);
        }
    }
};

template <class T> struct EdgeVectorsBackward {
    const int *cell_shifts, *row_starts, *reverse;
    /// [edges, 3]
    const T *gradient;
    /// as in `AdaptiveCutoffsBackward`
    T *grad_positions, *grad_cells;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        T position[3] = {}, cell[9] = {};
        int64_t end = row_starts[atom + 1];
        for (auto edge = row_starts[atom] + lanes.index(); edge < end; edge += lanes.count) {
            int64_t other = reverse[edge];
            for (int k = 0; k < 3; k++) {
                position[k] += gradient[3 * other + k] - gradient[3 * edge + k];
                for (int row = 0; row < 3; row++) {
                    cell[3 * row + k] += gradient[3 * edge + k] * T(cell_shifts[3 * edge + row]);
                }
            }
        }
        store_sums(position, grad_positions + 3 * atom, lanes);
        store_sums(cell, grad_cells + 9 * atom, lanes);
    }
};

/// The cutoff function of each edge, with the mean of its atoms' cutoffs.
template <class T> struct CutoffFactors {
    Cutoff<T> cutoff;
    /// [edges, 3] and [atoms]
    const T *vectors, *cutoffs;
    const int *neighbors, *row_starts;
    /// [edges]
    T *factors;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        int64_t end = row_starts[atom + 1];
        for (auto edge = row_starts[atom] + lanes.index(); edge < end; edge += lanes.count) {
            auto mean = (cutoffs[atom] + cutoffs[neighbors[edge]]) / 2;
            factors[edge] = cutoff.value(length(vectors + 3 * edge) + T(distance_offset), mean);
        }
    }
};

template <class T> struct CutoffFactorsBackward {
    Cutoff<T> cutoff;
    const T *vectors, *cutoffs;
    const int *neighbors, *row_starts, *reverse;
    /// [edges]
    const T *gradient;
    T *grad_vectors, *grad_cutoffs;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        T sum = 0;
        int64_t end = row_starts[atom + 1];
        for (auto edge = row_starts[atom] + lanes.index(); edge < end; edge += lanes.count) {
            auto mean = (cutoffs[atom] + cutoffs[neighbors[edge]]) / 2;
            auto norm = length(vectors + 3 * edge);
            auto slope = cutoff.slope(norm + T(distance_offset), mean);
            // the reverse edge has the same slope
            sum += slope * (gradient[edge] + gradient[reverse[edge]]);
            auto factor = norm > 0 ? -slope * gradient[edge] / norm : T(0);
            for (int k = 0; k < 3; k++) {
                grad_vectors[3 * edge + k] = factor * vectors[3 * edge + k];
            }
        }
        sum = lanes.sum(sum);
        if (lanes.index() == 0) {
            grad_cutoffs[atom] = sum / 2;
        }
    }
};

} // namespace metatomic_tc::pet
