#pragma once

#include <vector>

#include "attention.hpp"
#include "rows/rows.hpp"

/// The attention of one atom at a time on the CPU.
namespace metatomic_tc::pet {

using namespace rows;

/// A matrix in rows, whose sizes are filled up with zeros to whole blocks.
template <class T> struct SmallMatrix {
    static constexpr int block = 8;
    int rows, columns;
    std::vector<T> values;

    SmallMatrix(int rows, int columns)
        : rows((rows + block - 1) / block * block), columns((columns + block - 1) / block * block),
          values(this->rows * this->columns) {}

    T *row(int i) {
        return values.data() + i * columns;
    }

    const T *row(int i) const {
        return values.data() + i * columns;
    }

    SmallMatrix transposed() const {
        auto result = SmallMatrix(columns, rows);
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < columns; j++) {
                result.row(j)[i] = row(i)[j];
            }
        }
        return result;
    }
};

/// A·B, or Aᵀ·B, a few rows and columns at a time, whose sums stay in registers.
template <class T>
SmallMatrix<T> multiply(const SmallMatrix<T> &a, const SmallMatrix<T> &b, bool transpose = false) {
    constexpr int block = SmallMatrix<T>::block, block_rows = 4;
    typedef T Vector
        __attribute__((vector_size(block * sizeof(T)), aligned(alignof(T)), may_alias));
    auto result = SmallMatrix<T>(transpose ? a.columns : a.rows, b.columns);
    auto row_stride = transpose ? 1 : a.columns, column_stride = transpose ? a.columns : 1;
    for (int i = 0; i < result.rows; i += block_rows) {
        for (int j = 0; j < result.columns; j += block) {
            Vector sums[block_rows] = {};
            for (int k = 0; k < b.rows; k++) {
                auto *left = a.row(0) + i * row_stride + k * column_stride;
                auto right = *reinterpret_cast<const Vector *>(b.row(k) + j);
                for (int r = 0; r < block_rows; r++) {
                    sums[r] += left[r * row_stride] * right;
                }
            }
            for (int r = 0; r < block_rows; r++) {
                *reinterpret_cast<Vector *>(result.row(i + r) + j) = sums[r];
            }
        }
    }
    return result;
}

/// One head of one atom: copies of its tokens' rows next to each other.
template <class T> struct AtomHead {
    const Attention<T> &attention;
    AtomTokens<T> tokens;
    int head;

    int64_t width() const {
        return static_cast<int64_t>(attention.heads) * attention.head_size;
    }

    /// The head's columns of `data` [atoms + edges, heads, head_size].
    SmallMatrix<T> load(const T *data, int64_t stride) const {
        auto size = attention.head_size;
        auto result = SmallMatrix<T>(tokens.count, size);
        for (int i = 0; i < tokens.count; i++) {
            auto *from = data + tokens.row(i) * stride + head * size;
            std::copy(from, from + size, result.row(i));
        }
        return result;
    }

    void store(const SmallMatrix<T> &matrix, T *data, int64_t stride) const {
        auto size = attention.head_size;
        for (int i = 0; i < tokens.count; i++) {
            auto *from = matrix.row(i);
            std::copy(from, from + size, data + tokens.row(i) * stride + head * size);
        }
    }

    /// 0, 1 and 2 for queries, keys and values.
    SmallMatrix<T> load_qkv(int part) const {
        return load(attention.qkv + part * width(), 3 * width());
    }

    T &log_sum(int i) const {
        return attention.log_sums[tokens.row(i) * attention.heads + head];
    }

    void forward(const std::vector<T> &factors) const {
        auto weights = multiply(load_qkv(0), load_qkv(1).transposed());
        for (int i = 0; i < tokens.count; i++) {
            auto *row = weights.row(i);
            auto highest = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : highest)
            for (int j = 0; j < tokens.count; j++) {
                row[j] *= attention.scale;
                highest = std::max(highest, row[j]);
            }
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < tokens.count; j++) {
                row[j] = factors[j] * exponential(row[j] - highest);
                sum += row[j];
            }
#pragma omp simd
            for (int j = 0; j < tokens.count; j++) {
                row[j] /= sum;
            }
            log_sum(i) = highest + std::log(sum);
        }
        store(multiply(weights, load_qkv(2)), attention.output, width());
    }

    void backward(const std::vector<T> &factors, const AttentionBackward<T> &backward) const {
        auto queries = load_qkv(0), keys = load_qkv(1), upper = load(backward.gradient, width());
        auto weights = multiply(queries, keys.transposed());
        // of the weights, and then of the scores
        auto gradients = multiply(upper, load_qkv(2).transposed());
        auto grad_log_factors = std::vector<T>(tokens.count);
        for (int i = 0; i < tokens.count; i++) {
            auto *weight = weights.row(i), *gradient = gradients.row(i);
            auto log_sum = this->log_sum(i);
            T sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
            for (int j = 0; j < tokens.count; j++) {
                weight[j] = factors[j] * exponential(attention.scale * weight[j] - log_sum);
                sum += weight[j];
                product += weight[j] * gradient[j];
            }
            // the sum is 1 but for the rounding of its logarithm
            auto mean = product / sum;
#pragma omp simd
            for (int j = 0; j < tokens.count; j++) {
                weight[j] /= sum;
                gradient[j] = weight[j] * (gradient[j] - mean);
                grad_log_factors[j] += gradient[j];
                gradient[j] *= attention.scale;
            }
        }
        auto *result = backward.grad_qkv;
        store(multiply(gradients, keys), result, 3 * width());
        store(multiply(gradients, queries, true), result + width(), 3 * width());
        store(multiply(weights, upper, true), result + 2 * width(), 3 * width());
        for (int j = 0; j < tokens.count; j++) {
            backward.grad_log_factors[tokens.row(j) * attention.heads + head] = grad_log_factors[j];
        }
    }
};

template <class T> std::vector<T> token_factors(const Attention<T> &attention, int64_t atom) {
    auto tokens = AtomTokens<T>(attention, atom);
    auto factors = std::vector<T>(tokens.count, T(1));
    for (int j = 1; j < tokens.count; j++) {
        factors[j] =
            std::max(attention.factors[tokens.row(j) - attention.atoms], T(smallest_factor));
    }
    return factors;
}

template <class T> void attend(const Attention<T> &attention, int64_t atom) {
    auto tokens = AtomTokens<T>(attention, atom);
    auto factors = token_factors(attention, atom);
    for (int head = 0; head < attention.heads; head++) {
        AtomHead<T>{attention, tokens, head}.forward(factors);
    }
}

template <class T> void attend_backward(const AttentionBackward<T> &backward, int64_t atom) {
    const auto &attention = backward.forward;
    auto tokens = AtomTokens<T>(attention, atom);
    auto factors = token_factors(attention, atom);
    for (int head = 0; head < attention.heads; head++) {
        AtomHead<T>{attention, tokens, head}.backward(factors, backward);
    }
}

} // namespace metatomic_tc::pet
