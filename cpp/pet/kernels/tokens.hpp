#pragma once

#include "rows/rows.hpp"

/// Row operations on the features of PET's nodes and edges: [rows, width], contiguous.
namespace metatomic_tc::pet {

using namespace rows;

/// Its numbers are those of `subtracts_mean`, whose machine code is that of a bool.
enum class NormKind : bool { rms = false, layer = true };

/// RMSNorm without a bias or LayerNorm of a row.
template <class T> struct Norm {
    const T *weight;
    /// null for none
    const T *bias;
    T epsilon;
    NormKind kind;
    int width;

    METATOMIC_TC_HOST_DEVICE bool subtracts_mean() const {
        return static_cast<bool>(kind);
    }

    /// `(x - mean) * scale` is the row before the weights. `row(c)` is its column c.
    template <class Row, class Lanes>
    METATOMIC_TC_HOST_DEVICE void statistics(Row row, T &mean, T &scale, Lanes lanes) const {
        mean = 0;
        if (subtracts_mean()) {
            T sum = 0;
            METATOMIC_TC_ADDS_TO(sum)
            for (int c = lanes.index(); c < width; c += lanes.count) {
                sum += row(c);
            }
            mean = lanes.sum(sum) / T(width);
        }
        T squares = 0;
        METATOMIC_TC_ADDS_TO(squares)
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto x = row(c) - mean;
            squares += x * x;
        }
        scale = 1 / std::sqrt(lanes.sum(squares) / T(width) + epsilon);
    }

    template <class Row, class Lanes>
    METATOMIC_TC_HOST_DEVICE void forward(Row row, T *output, Lanes lanes) const {
        T mean, scale;
        statistics(row, mean, scale, lanes);
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto value = (row(c) - mean) * scale * read(weight + c);
            output[c] = bias == nullptr ? value : value + read(bias + c);
        }
    }

    /// The means over the row of `gradient * weight` (0 for RMSNorm) and of that times the
    /// normalized row.
    template <class Row, class Gradient, class Lanes>
    METATOMIC_TC_HOST_DEVICE void
    moments(Row row, Gradient gradient, T mean, T scale, T &first, T &second, Lanes lanes) const {
        T sum = 0, product = 0;
        METATOMIC_TC_ADDS_TO(sum, product)
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto weighted = gradient(c) * read(weight + c);
            sum += weighted;
            product += weighted * (row(c) - mean);
        }
        first = subtracts_mean() ? lanes.sum(sum) / T(width) : T(0);
        second = lanes.sum(product) * scale / T(width);
    }
};

/// The norms of the rows of `first` [first_rows, width] and then of `second`.
template <class T> struct ConcatenatedNorm {
    Norm<T> norm;
    const T *first, *second;
    int64_t first_rows;
    /// [rows, width]
    T *output;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto *input =
            row < first_rows ? first + row * norm.width : second + (row - first_rows) * norm.width;
        norm.forward([=](int c) { return read(input + c); }, output + row * norm.width, lanes);
    }
};

template <class T> struct ConcatenatedNormBackward {
    Norm<T> norm;
    const T *first, *second;
    int64_t first_rows;
    const T *gradient;
    /// of `second` where it is used besides; null for zeros
    const T *grad_direct;
    T *grad_first, *grad_second;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto is_first = row < first_rows;
        auto offset = (is_first ? row : row - first_rows) * norm.width;
        auto *input = (is_first ? first : second) + offset;
        auto *output = (is_first ? grad_first : grad_second) + offset;
        auto *upper = gradient + row * norm.width;
        auto *besides = is_first || grad_direct == nullptr ? nullptr : grad_direct + offset;
        lanes.prefetch(upper, norm.width);
        lanes.prefetch(besides, norm.width);
        auto value = [=](int c) { return read(input + c); };
        T mean, scale, first_moment, second_moment;
        norm.statistics(value, mean, scale, lanes);
        norm.moments(
            value,
            [=](int c) { return read(upper + c); },
            mean,
            scale,
            first_moment,
            second_moment,
            lanes
        );
        for (int c = lanes.index(); c < norm.width; c += lanes.count) {
            auto normalized = (value(c) - mean) * scale;
            auto result = scale * (read(upper + c) * read(norm.weight + c) - first_moment -
                                   normalized * second_moment);
            output[c] = besides == nullptr ? result : result + read(besides + c);
        }
    }
};

/// Of `tokens` [nodes + edges, width] the first rows are copied into `nodes`; to the others `edges`
/// is added, giving `sums` and their norms.
template <class T> struct ResidualNorm {
    Norm<T> norm;
    const T *tokens, *edges;
    int64_t node_rows;
    T *nodes, *sums, *normed;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto *token = tokens + row * norm.width;
        if (row < node_rows) {
            for (int c = lanes.index(); c < norm.width; c += lanes.count) {
                nodes[row * norm.width + c] = read(token + c);
            }
            return;
        }
        auto offset = (row - node_rows) * norm.width;
        auto *edge = edges + offset;
        auto sum = [=](int c) { return read(token + c) + read(edge + c); };
        for (int c = lanes.index(); c < norm.width; c += lanes.count) {
            sums[offset + c] = sum(c);
        }
        norm.forward(sum, normed + offset, lanes);
    }
};

/// The gradient of `edges` is that of the later rows of `tokens`.
template <class T> struct ResidualNormBackward {
    Norm<T> norm;
    const T *sums;
    int64_t node_rows;
    /// null for zeros
    const T *grad_nodes, *grad_sums, *grad_normed;
    T *grad_tokens;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto *output = grad_tokens + row * norm.width;
        if (row < node_rows) {
            for (int c = lanes.index(); c < norm.width; c += lanes.count) {
                output[c] = grad_nodes == nullptr ? T(0) : read(grad_nodes + row * norm.width + c);
            }
            return;
        }
        auto offset = (row - node_rows) * norm.width;
        auto *direct = grad_sums + offset, *upper = grad_normed + offset;
        auto value = [this, offset](int c) { return read(sums + offset + c); };
        T mean = 0, scale = 0, first_moment = 0, second_moment = 0;
        if (grad_normed != nullptr) {
            lanes.prefetch(upper, norm.width);
            lanes.prefetch(grad_sums == nullptr ? nullptr : direct, norm.width);
            norm.statistics(value, mean, scale, lanes);
            norm.moments(
                value,
                [=](int c) { return read(upper + c); },
                mean,
                scale,
                first_moment,
                second_moment,
                lanes
            );
        }
        for (int c = lanes.index(); c < norm.width; c += lanes.count) {
            auto result = grad_sums == nullptr ? T(0) : read(direct + c);
            if (grad_normed != nullptr) {
                auto normalized = (value(c) - mean) * scale;
                result += scale * (read(upper + c) * read(norm.weight + c) - first_moment -
                                   normalized * second_moment);
            }
            output[c] = result;
        }
    }
};

/// Two edges that are each other's reverse, which read the same rows: the first of them does the
/// work of both.
struct EdgePair {
    int64_t partner;
    /// whether the work is another's
    bool skipped;
    /// whether the work is that of `partner`, too
    bool both;

    METATOMIC_TC_HOST_DEVICE EdgePair(const int *reverse, int64_t row)
        : partner(read(reverse + row)) {
        auto mutual = partner != row && read(reverse + partner) == row;
        skipped = mutual && partner < row;
        both = mutual && partner > row;
    }
};

/// The LayerNorm of each row of `values` [edges, width / 2] next to that of its reverse edge.
template <class T> struct ReversedPairNorm {
    Norm<T> norm;
    const T *values;
    const int *reverse;
    T *output;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto pair = EdgePair(reverse, row);
        if (pair.skipped) {
            return;
        }
        auto half = norm.width / 2;
        auto *own = values + row * half, *other = values + pair.partner * half;
        auto *result = output + row * norm.width, *reversed = output + pair.partner * norm.width;
        T mean, scale;
        norm.statistics(
            [=](int c) { return read(c < half ? own + c : other + (c - half)); }, mean, scale, lanes
        );
        for (int c = lanes.index(); c < half; c += lanes.count) {
            auto first = (read(own + c) - mean) * scale, second = (read(other + c) - mean) * scale;
            auto weight = read(norm.weight + c), other_weight = read(norm.weight + half + c);
            auto bias = read(norm.bias + c), other_bias = read(norm.bias + half + c);
            result[c] = first * weight + bias;
            result[half + c] = second * other_weight + other_bias;
            if (pair.both) {
                reversed[c] = second * weight + bias;
                reversed[half + c] = first * other_weight + other_bias;
            }
        }
    }
};

template <class T> struct ReversedPairNormBackward {
    Norm<T> norm;
    const T *values;
    const int *reverse;
    const T *gradient;
    /// of `values` where they are used besides; null for zeros
    const T *grad_direct;
    T *grad_values;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto pair = EdgePair(reverse, row);
        if (pair.skipped) {
            return;
        }
        auto half = norm.width / 2;
        auto *own = values + row * half, *other = values + pair.partner * half;
        auto *upper = gradient + row * norm.width,
             *other_upper = gradient + pair.partner * norm.width;
        auto direct_row = [this, half](int64_t of) {
            return grad_direct == nullptr ? nullptr : grad_direct + of * half;
        };
        lanes.prefetch(upper, norm.width);
        lanes.prefetch(other_upper, norm.width);
        lanes.prefetch(direct_row(row), half);
        if (pair.both) {
            lanes.prefetch(direct_row(pair.partner), half);
        }
        T mean, scale, first, second, other_first, other_second;
        auto value = [=](int c) { return read(c < half ? own + c : other + (c - half)); };
        // the reverse edge has the same two halves, and so the same statistics
        norm.statistics(value, mean, scale, lanes);
        norm.moments(
            value, [=](int c) { return read(upper + c); }, mean, scale, first, second, lanes
        );
        norm.moments(
            [=](int c) { return read(c < half ? other + c : own + (c - half)); },
            [=](int c) { return read(other_upper + c); },
            mean,
            scale,
            other_first,
            other_second,
            lanes
        );
        auto sum_first = first + other_first, sum_second = second + other_second;
        auto store = [&](int64_t to, const T *x, const T *direct, const T *reversed, int c) {
            auto normalized = (read(x + c) - mean) * scale;
            auto result = scale * (read(direct + c) * read(norm.weight + c) +
                                   read(reversed + half + c) * read(norm.weight + half + c) -
                                   sum_first - normalized * sum_second);
            auto *besides = direct_row(to);
            grad_values[to * half + c] = besides == nullptr ? result : result + read(besides + c);
        };
        for (int c = lanes.index(); c < half; c += lanes.count) {
            store(row, own, upper, other_upper, c);
            if (pair.both) {
                store(pair.partner, other, other_upper, upper, c);
            }
        }
    }
};

/// The first layer on edge features, whose parts from the geometry and from the neighbor's species
/// are a product with 4 columns and a table: `silu(messages + (x, y, z, distance)·Gᵀ + table)`.
template <class T> struct EdgeTokens {
    /// [edges, width], null for zeros
    const T *messages;
    /// [edges, 3]
    const T *vectors;
    /// [width, 4]
    const T *geometry_weight;
    /// [species, width]
    const T *neighbor_table;
    const int *neighbor_species;
    int width;
    T *output;

    struct Edge {
        T geometry[4];
        const T *message, *table;
    };

    struct Weights {
        T values[4];
    };

    METATOMIC_TC_HOST_DEVICE Weights weights(int c) const {
        Weights result;
        for (int k = 0; k < 4; k++) {
            result.values[k] = read(geometry_weight + 4 * c + k);
        }
        return result;
    }

    METATOMIC_TC_HOST_DEVICE Edge edge(int64_t row) const {
        auto *vector = vectors + 3 * row;
        auto squares = vector[0] * vector[0] + vector[1] * vector[1] + vector[2] * vector[2];
        return {
            {vector[0], vector[1], vector[2], std::sqrt(squares + T(1e-15))},
            messages == nullptr ? nullptr : messages + row * width,
            neighbor_table + read(neighbor_species + row) * width,
        };
    }

    METATOMIC_TC_HOST_DEVICE T
    before_activation(const Edge &edge, const Weights &weights, int c) const {
        auto result = read(edge.table + c);
        for (int k = 0; k < 4; k++) {
            result += weights.values[k] * edge.geometry[k];
        }
        return edge.message == nullptr ? result : result + read(edge.message + c);
    }

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto input = edge(row);
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto x = before_activation(input, weights(c), c);
            output[row * width + c] = x * sigmoid(x);
        }
    }
};

template <class T> struct EdgeTokensBackward {
    /// without its output
    EdgeTokens<T> tokens;
    const T *gradient;
    /// null if not needed
    T *grad_messages;
    T *grad_vectors;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto width = tokens.width;
        auto input = tokens.edge(row);
        T sums[4] = {};
        METATOMIC_TC_ADDS_TO(sums)
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto weights = tokens.weights(c);
            auto x = tokens.before_activation(input, weights, c);
            auto part = sigmoid(x);
            auto inner = read(gradient + row * width + c) * part * (1 + x * (1 - part));
            if (grad_messages != nullptr) {
                grad_messages[row * width + c] = inner;
            }
            for (int k = 0; k < 4; k++) {
                sums[k] += inner * weights.values[k];
            }
        }
        for (int k = 0; k < 4; k++) {
            sums[k] = lanes.sum(sums[k]);
        }
        if (lanes.index() == 0) {
            for (int k = 0; k < 3; k++) {
                grad_vectors[3 * row + k] =
                    sums[k] + sums[3] * input.geometry[k] / input.geometry[3];
            }
        }
    }
};

/// Sums of `factors[e] * values[e]` over the edges of each atom.
template <class T> struct SegmentSum {
    /// [edges, width] and [edges]
    const T *values, *factors;
    const int *row_starts;
    int width;
    /// [atoms, width]
    T *sums;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        int64_t begin = row_starts[atom], end = row_starts[atom + 1];
        if (width < lanes.count) {
            for (int c = 0; c < width; c++) {
                T sum = 0;
                for (auto edge = begin + lanes.index(); edge < end; edge += lanes.count) {
                    sum += factors[edge] * values[edge * width + c];
                }
                sum = lanes.sum(sum);
                if (lanes.index() == 0) {
                    sums[atom * width + c] = sum;
                }
            }
            return;
        }
        for (int c = lanes.index(); c < width; c += lanes.count) {
            T sum = 0;
            for (auto edge = begin; edge < end; edge++) {
                sum += factors[edge] * values[edge * width + c];
            }
            sums[atom * width + c] = sum;
        }
    }
};

template <class T> struct SegmentSumBackward {
    const T *values, *factors;
    const int *row_starts;
    int width;
    /// [atoms, width]
    const T *gradient;
    T *grad_values, *grad_factors;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t atom, Lanes lanes) const {
        auto *upper = gradient + atom * width;
        for (int64_t edge = row_starts[atom]; edge < row_starts[atom + 1]; edge++) {
            T sum = 0;
            METATOMIC_TC_ADDS_TO(sum)
            for (int c = lanes.index(); c < width; c += lanes.count) {
                grad_values[edge * width + c] = read(upper + c) * read(factors + edge);
                sum += read(upper + c) * read(values + edge * width + c);
            }
            sum = lanes.sum(sum);
            if (lanes.index() == 0) {
                grad_factors[edge] = sum;
            }
        }
    }
};

/// The mean of the row of an edge and another's row of its reverse edge; with `first` null half of
/// the latter, which is the gradient.
template <class T> struct AverageReversed {
    const T *first, *second;
    const int *reverse;
    int width;
    T *output;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto *other = second + static_cast<int64_t>(reverse[row]) * width;
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto sum = read(other + c);
            if (first != nullptr) {
                sum += read(first + row * width + c);
            }
            output[row * width + c] = T(0.5) * sum;
        }
    }
};

template <class T> struct Sum {
    const T *first, *second, *third;
    int width;
    T *output;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto begin = row * width;
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto at = begin + c;
            output[at] = read(first + at) + read(second + at) + read(third + at);
        }
    }
};

} // namespace metatomic_tc::pet
