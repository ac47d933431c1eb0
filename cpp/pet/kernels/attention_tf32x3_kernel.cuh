#pragma once

#include <cmath>

#include "attention.hpp"
#include "product/tf32.cuh"

/// Attention with 3xTF32 products on Tensor Cores (mma.sync m16n8k8), for heads of 16 or 32
/// columns: every factor is split into two TF32 numbers, and three of the four products are added
/// in FP32. A warp works on one head of one atom and takes all operands straight from global
/// memory, which the order of sums allows: the four lanes of a group have columns side by side, and
/// the pairs of tokens that a lane has of one product are those that it needs in the next.
namespace metatomic_tc::pet {

namespace {

namespace tf32x3 {

constexpr unsigned everyone = 0xffffffffu;

/// sum += a·b for a [16, 8] and b [8, 8]
__device__ inline void
multiply_tf32(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline float exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// Has the compiler keep a number in a register; it would rather compute it again in every step of
/// a loop.
__device__ inline void keep(unsigned &x) {
    asm volatile("" : "+r"(x));
}

/// x = high + low, both TF32, up to 2^-23 of x
struct Split {
    unsigned high, low;
};

__device__ inline Split split(float x) {
    auto high = round_to_tf32(x);
    // at most 12 bits, of which the product takes the first 11; NaN if x is
    return {__float_as_uint(high), __float_as_uint(x - high)};
}

/// A sum of few terms: the accumulator of a product drops the bits behind FP32's instead of
/// rounding, so that long sums are to be made by additions.
__device__ inline void multiply(float (&sum)[4], const Split (&a)[4], const Split (&b)[2]) {
    const unsigned a_high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
    const unsigned a_low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
    const unsigned b_high[2] = {b[0].high, b[1].high};
    const unsigned b_low[2] = {b[0].low, b[1].low};
    // the small terms first
    multiply_tf32(sum, a_low, b_high);
    multiply_tf32(sum, a_high, b_low);
    multiply_tf32(sum, a_high, b_high);
}

template <class Operation> __device__ float over_group(float x, Operation operation) {
    x = operation(x, __shfl_xor_sync(everyone, x, 1));
    return operation(x, __shfl_xor_sync(everyone, x, 2));
}

__device__ inline float group_sum(float x) {
    return over_group(x, [](float a, float b) { return a + b; });
}

__device__ inline float group_maximum(float x) {
    return over_group(x, [](float a, float b) { return a > b ? a : b; });
}

/// What one lane reads or writes at once.
template <int Count> struct alignas(4 * Count) Pack {
    float values[Count];
};

template <int Count> __device__ Pack<Count> pack_at(const float *from) {
    return *reinterpret_cast<const Pack<Count> *>(from);
}

/// One head of one atom. Products have 16 rows, of which a lane has those `group` and `group + 8`,
/// and 8 columns, of which it has `2 * part` and `2 * part + 1`.
template <int Columns> struct Problem {
    static constexpr int steps = Columns / 8;
    static constexpr int own = Columns / 4;

    const Attention<float> &attention;
    /// the row of the centre, and that of the first edge less one
    int atom, before_edges;
    int count, head, group, part;
    /// for exponentials to base 2
    float scale;

    __device__ Problem(const Attention<float> &attention, int64_t atom, int head)
        : attention(attention), atom(static_cast<int>(atom)), head(head),
          group(threadIdx.x % 32 / 4), part(threadIdx.x % 4),
          scale(attention.scale * 1.4426950408889634f) {
        auto tokens = AtomTokens<float>(attention, atom);
        before_edges = static_cast<int>(tokens.first_edge_row);
        count = tokens.count;
    }

    /// Of the last token, for those behind it.
    __device__ int row(int token) const {
        token = min(token, count - 1);
        return token == 0 ? atom : before_edges + token;
    }

    __device__ unsigned width() const {
        return static_cast<unsigned>(attention.heads * Columns);
    }

    __device__ static int64_t offset(int row, unsigned stride) {
        return static_cast<int64_t>(static_cast<uint64_t>(static_cast<unsigned>(row)) * stride);
    }

    /// 0: queries, 1: keys, 2: values
    __device__ int64_t offset_of(int row, int which) const {
        return offset(row, 3 * width()) + (which * width() + head * Columns);
    }

    __device__ int64_t output_offset(int row) const {
        return offset(row, width()) + head * Columns;
    }

    __device__ int64_t number_offset(int row) const {
        return offset(row, attention.heads) + head;
    }

    /// Of the token of a row.
    __device__ float factor(int row) const {
        auto edge = row - static_cast<int>(attention.atoms);
        return edge < 0 ? 1.0f : max(attention.factors[edge], static_cast<float>(smallest_factor));
    }

    /// This lane's columns of a row that is summed over columns.
    __device__ void load(const float *from, float (&values)[own]) const {
#pragma unroll
        for (int block = 0; block < own / 4; block++) {
            auto pack = pack_at<4>(from + 16 * block + 4 * part);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                values[4 * block + i] = pack.values[i];
            }
        }
    }

    /// Rows of the first factor, from two rows.
    __device__ void
    rows(const float (&first)[own], const float (&second)[own], Split (&a)[steps][4]) const {
#pragma unroll
        for (int s = 0; s < steps; s++) {
            a[s][0] = split(first[2 * s]);
            a[s][1] = split(second[2 * s]);
            a[s][2] = split(first[2 * s + 1]);
            a[s][3] = split(second[2 * s + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                keep(a[s][i].high);
                keep(a[s][i].low);
            }
        }
    }

    /// The products of rows of `a` with 8 rows, of which `from` is that of this group, summed over
    /// columns.
    __device__ void dots(float (&sum)[4], const Split (&a)[steps][4], const float *from) const {
        float values[own];
        load(from, values);
        float parts[steps][4] = {};
#pragma unroll
        for (int s = 0; s < steps; s++) {
            const Split b[2] = {split(values[2 * s]), split(values[2 * s + 1])};
            multiply(parts[s], a[s], b);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] = parts[0][i] + parts[1][i];
#pragma unroll
            for (int s = 2; s < steps; s += 2) {
                sum[i] += parts[s][i] + parts[s + 1][i];
            }
        }
    }

    /// Adds the sums of 8 rows with weights, as they came out of `dots`; `first` and `second` are
    /// the rows 2 * part and 2 * part + 1 of them.
    __device__ void weighted(
        float (&sum)[steps][4], const float (&weights)[4], const float *first, const float *second
    ) const {
        const Split a[4] = {
            split(weights[0]), split(weights[2]), split(weights[1]), split(weights[3])
        };
        auto one = pack_at<steps>(first + steps * group);
        auto other = pack_at<steps>(second + steps * group);
#pragma unroll
        for (int n = 0; n < steps; n++) {
            const Split b[2] = {split(one.values[n]), split(other.values[n])};
            float part[4] = {};
            multiply(part, a, b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[n][i] += part[i];
            }
        }
    }

    /// This lane's columns of a row that came out of `weighted`: `half` 0 for the row `group`, 1
    /// for `group + 8`.
    __device__ void store(float *to, const float (&sum)[steps][4], int half, float scale) const {
#pragma unroll
        for (int first = 0; first < own; first += 4) {
            Pack<4> pack;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                auto i = first + k;
                pack.values[k] = scale * sum[i % steps][2 * half + i / steps];
            }
            *reinterpret_cast<Pack<4> *>(to + own * part + first) = pack;
        }
    }

    __device__ const float *data(int row, int which) const {
        return attention.qkv + offset_of(row, which);
    }

    /// The output for queries from `begin` on.
    __device__ void attend(int begin) const {
        constexpr int tiles = 4;
        Split query[steps][4];
        {
            float first[own], second[own];
            load(data(row(begin + group), 0), first);
            load(data(row(begin + group + 8), 0), second);
            rows(first, second, query);
        }
        float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
        float sum[steps][4] = {};
        for (int key = 0; key < count; key += 8 * tiles) {
            float scores[tiles][4];
            float now[2] = {highest[0], highest[1]};
#pragma unroll
            for (int j = 0; j < tiles; j++) {
                if (key + 8 * j < count) {
                    dots(scores[j], query, data(row(key + 8 * j + group), 1));
                }
                for (int i = 0; i < 4; i++) {
                    auto token = key + 8 * j + 2 * part + i % 2;
                    scores[j][i] = token < count ? scale * scores[j][i] : -INFINITY;
                    now[i / 2] = max(now[i / 2], scores[j][i]);
                }
            }
            for (int half = 0; half < 2; half++) {
                now[half] = group_maximum(now[half]);
                auto correction = exp2(highest[half] - now[half]);
                highest[half] = now[half];
                total[half] *= correction;
#pragma unroll
                for (int n = 0; n < steps; n++) {
                    sum[n][2 * half] *= correction;
                    sum[n][2 * half + 1] *= correction;
                }
            }
#pragma unroll
            for (int j = 0; j < tiles; j++) {
                if (key + 8 * j >= count) {
                    continue;
                }
                auto token = key + 8 * j + 2 * part;
                const int at[2] = {row(token), row(token + 1)};
                const float factors[2] = {factor(at[0]), factor(at[1])};
                for (int i = 0; i < 4; i++) {
                    scores[j][i] = factors[i % 2] * exp2(scores[j][i] - highest[i / 2]);
                    total[i / 2] += scores[j][i];
                }
                weighted(sum, scores[j], data(at[0], 2), data(at[1], 2));
            }
        }
        for (int half = 0; half < 2; half++) {
            total[half] = group_sum(total[half]);
            auto token = begin + group + 8 * half;
            if (token < count) {
                auto at = row(token);
                store(attention.output + output_offset(at), sum, half, 1 / total[half]);
                if (part == 0) {
                    attention.log_sums[number_offset(at)] = highest[half] + log2(total[half]);
                }
            }
        }
    }

    /// The gradients of the queries from `begin` on; leaves the products of output and gradient.
    __device__ void query_gradients(const AttentionBackward<float> &backward, int begin) const {
        Split query[steps][4], upper[steps][4];
        float log_sum[2], product[2];
        {
            float first[2][own], second[2][own];
            for (int half = 0; half < 2; half++) {
                auto token = begin + group + 8 * half;
                auto at = row(token);
                load(attention.output + output_offset(at), first[half]);
                load(backward.gradient + output_offset(at), second[half]);
                float dot = 0;
#pragma unroll
                for (int i = 0; i < own; i++) {
                    dot += first[half][i] * second[half][i];
                }
                product[half] = group_sum(dot);
                log_sum[half] = attention.log_sums[number_offset(at)];
                if (part == 0 && token < count) {
                    backward.products[number_offset(at)] = product[half];
                }
                load(data(at, 0), first[half]);
            }
            rows(first[0], first[1], query);
            rows(second[0], second[1], upper);
        }
        float sum[steps][4] = {};
        for (int key = 0; key < count; key += 8) {
            float scores[4], changes[4];
            auto at = row(key + group);
            dots(scores, query, data(at, 1));
            dots(changes, upper, data(at, 2));
            auto token = key + 2 * part;
            const int pair[2] = {row(token), row(token + 1)};
            const float factors[2] = {factor(pair[0]), factor(pair[1])};
            for (int i = 0; i < 4; i++) {
                auto weight = factors[i % 2] * exp2(scale * scores[i] - log_sum[i / 2]);
                changes[i] = token + i % 2 < count ? weight * (changes[i] - product[i / 2]) : 0.0f;
            }
            weighted(sum, changes, data(pair[0], 1), data(pair[1], 1));
        }
        for (int half = 0; half < 2; half++) {
            auto token = begin + group + 8 * half;
            if (token < count) {
                auto *to = backward.grad_qkv + offset_of(row(token), 0);
                store(to, sum, half, attention.scale);
            }
        }
    }

    /// The gradients of the keys and values from `begin` on, and of the logarithms of their
    /// factors.
    __device__ void key_gradients(const AttentionBackward<float> &backward, int begin) const {
        Split key[steps][4], value[steps][4];
        float factors[2];
        {
            const int at[2] = {row(begin + group), row(begin + group + 8)};
            float first[own], second[own];
            load(data(at[0], 1), first);
            load(data(at[1], 1), second);
            rows(first, second, key);
            load(data(at[0], 2), first);
            load(data(at[1], 2), second);
            rows(first, second, value);
            factors[0] = factor(at[0]);
            factors[1] = factor(at[1]);
        }
        float key_sum[steps][4] = {}, value_sum[steps][4] = {}, total[2] = {0, 0};
        for (int query = 0; query < count; query += 8) {
            float weights[4], changes[4];
            auto at = row(query + group);
            dots(weights, key, data(at, 0));
            dots(changes, value, backward.gradient + output_offset(at));
            auto token = query + 2 * part;
            const int pair[2] = {row(token), row(token + 1)};
            float log_sum[2], product[2];
            for (int i = 0; i < 2; i++) {
                log_sum[i] = attention.log_sums[number_offset(pair[i])];
                product[i] = backward.products[number_offset(pair[i])];
            }
            for (int i = 0; i < 4; i++) {
                auto weight = factors[i / 2] * exp2(scale * weights[i] - log_sum[i % 2]);
                weights[i] = token + i % 2 < count ? weight : 0.0f;
                changes[i] = weights[i] * (changes[i] - product[i % 2]);
                total[i / 2] += changes[i];
            }
            const auto *gradient = backward.gradient;
            weighted(
                value_sum,
                weights,
                gradient + output_offset(pair[0]),
                gradient + output_offset(pair[1])
            );
            weighted(key_sum, changes, data(pair[0], 0), data(pair[1], 0));
        }
        for (int half = 0; half < 2; half++) {
            total[half] = group_sum(total[half]);
            auto token = begin + group + 8 * half;
            if (token < count) {
                auto at = row(token);
                store(backward.grad_qkv + offset_of(at, 1), key_sum, half, attention.scale);
                store(backward.grad_qkv + offset_of(at, 2), value_sum, half, 1.0f);
                if (part == 0) {
                    backward.grad_log_factors[number_offset(at)] = total[half];
                }
            }
        }
    }
};

} // namespace tf32x3

} // namespace

} // namespace metatomic_tc::pet
