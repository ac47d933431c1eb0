#pragma once

#include "attention.hpp"

/// The attention of one atom at a time on the CPU.
namespace metatomic_tc::pet {

template <class T> T dot(const T *a, const T *b, int size) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

template <class T> void add_multiple(T *sum, T factor, const T *values, int size) {
#pragma omp simd
    for (int i = 0; i < size; i++) {
        sum[i] += factor * values[i];
    }
}

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
    auto size = attention.head_size;
    auto width = static_cast<int64_t>(attention.heads) * size;
    auto factors = token_factors(attention, atom);
    auto weights = std::vector<T>(tokens.count);
    for (int head = 0; head < attention.heads; head++) {
        auto *group = attention.qkv + head * size;
        for (int i = 0; i < tokens.count; i++) {
            auto row = tokens.row(i);
            auto *query = group + row * 3 * width;
            auto highest = -std::numeric_limits<T>::infinity();
            for (int j = 0; j < tokens.count; j++) {
                auto *key = group + width + tokens.row(j) * 3 * width;
                weights[j] = attention.scale * dot(query, key, size);
                highest = std::max(highest, weights[j]);
            }
            T denominator = 0;
            for (int j = 0; j < tokens.count; j++) {
                weights[j] = factors[j] * std::exp(weights[j] - highest);
                denominator += weights[j];
            }
            auto *output = attention.output + row * width + head * size;
            std::fill(output, output + size, T(0));
            for (int j = 0; j < tokens.count; j++) {
                auto *value = group + 2 * width + tokens.row(j) * 3 * width;
                add_multiple(output, weights[j] / denominator, value, size);
            }
            attention.log_sums[row * attention.heads + head] = highest + std::log(denominator);
        }
    }
}

template <class T> void attend_backward(const AttentionBackward<T> &backward, int64_t atom) {
    const auto &attention = backward.forward;
    auto tokens = AtomTokens<T>(attention, atom);
    auto size = attention.head_size;
    auto width = static_cast<int64_t>(attention.heads) * size;
    auto factors = token_factors(attention, atom);
    for (int i = 0; i < tokens.count; i++) {
        auto *row = backward.grad_qkv + tokens.row(i) * 3 * width;
        std::fill(row, row + 3 * width, T(0));
    }
    for (int head = 0; head < attention.heads; head++) {
        auto *group = attention.qkv + head * size;
        auto *result = backward.grad_qkv + head * size;
        for (int j = 0; j < tokens.count; j++) {
            backward.grad_log_factors[tokens.row(j) * attention.heads + head] = 0;
        }
        for (int i = 0; i < tokens.count; i++) {
            auto row = tokens.row(i);
            auto *query = group + row * 3 * width;
            auto *upper = backward.gradient + row * width + head * size;
            auto product = dot(attention.output + row * width + head * size, upper, size);
            auto log_sum = attention.log_sums[row * attention.heads + head];
            for (int j = 0; j < tokens.count; j++) {
                auto other = tokens.row(j);
                auto *key = group + width + other * 3 * width;
                auto score = attention.scale * dot(query, key, size);
                auto weight = factors[j] * std::exp(score - log_sum);
                auto change = weight * (dot(upper, key + width, size) - product);
                auto *grad_key = result + width + other * 3 * width;
                add_multiple(result + row * 3 * width, attention.scale * change, key, size);
                add_multiple(grad_key, attention.scale * change, query, size);
                add_multiple(grad_key + width, weight, upper, size);
                backward.grad_log_factors[other * attention.heads + head] += change;
            }
        }
    }
}

} // namespace metatomic_tc::pet
