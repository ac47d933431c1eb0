#pragma once

#include "attention.hpp"

#include <stdexcept>
#include <string>

/// One block works on one atom and as many heads as fill `group_width` columns. A thread, or a few
/// neighboring ones where a head is large, has one token of one head in registers and goes through
/// all others, which lie in shared memory and are read by all lanes of a warp at once.
namespace metatomic_tc::pet {

namespace {

constexpr int group_width = 128;
constexpr int threads = 160;

/// What one lane loads at once.
template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T values[size];
};

/// Tokens in shared memory at a time.
template <class T> constexpr int chunk = sizeof(T) == 4 ? 48 : 24;

/// How the columns of a head, padded to `Size`, are spread over `Lanes` neighboring lanes: in packs
/// that take turns, so that the lanes read shared memory without bank conflicts.
template <class T, int Size, int Lanes> struct Head {
    static constexpr int lanes = Lanes;
    static constexpr int local = Size / Lanes;
    static constexpr int packs = local / Pack<T>::size;
    static constexpr int heads = group_width / Size;
    static_assert(packs * Pack<T>::size == local);

    int part;

    __device__ int column(int i) const {
        return (i / Pack<T>::size * Lanes + part) * Pack<T>::size + i % Pack<T>::size;
    }

    __device__ void load(const T *row, int size, T (&result)[local]) const {
        for (int i = 0; i < local; i++) {
            result[i] = column(i) < size ? row[column(i)] : T(0);
        }
    }

    __device__ void store(T *row, int size, const T (&values)[local]) const {
        for (int i = 0; i < local; i++) {
            if (column(i) < size) {
                row[column(i)] = values[i];
            }
        }
    }

    /// From shared memory.
    __device__ void read(const T *row, T (&result)[local]) const {
#pragma unroll
        for (int p = 0; p < packs; p++) {
            auto pack =
                *reinterpret_cast<const Pack<T> *>(row + (p * Lanes + part) * Pack<T>::size);
#pragma unroll
            for (int i = 0; i < Pack<T>::size; i++) {
                result[p * Pack<T>::size + i] = pack.values[i];
            }
        }
    }

    /// The sum over the lanes of the head.
    __device__ T sum(T value) const {
#pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, step);
        }
        return value;
    }

    __device__ T dot(const T (&a)[local], const T (&b)[local]) const {
        T even = 0, odd = 0;
#pragma unroll
        for (int i = 0; i < local; i += 2) {
            even += a[i] * b[i];
            odd += a[i + 1] * b[i + 1];
        }
        return sum(even + odd);
    }
};

/// Copies a head group's columns of up to `chunk` tokens from `first` on into `shared`, padded with
/// zeros. `row_width` is that of `matrix`.
template <class T, int Size>
__device__ void fill(
    T *shared,
    const T *matrix,
    int64_t row_width,
    const AtomTokens<T> &tokens,
    int first,
    int heads,
    int head_size
) {
    auto count = min(chunk<T>, tokens.count - first);
    for (int i = threadIdx.x; i < count * group_width; i += threads) {
        auto token = i / group_width, column = i % group_width;
        auto head = column / Size, inner = column % Size;
        shared[i] = head < heads && inner < head_size
                        ? matrix[tokens.row(first + token) * row_width + head * head_size + inner]
                        : T(0);
    }
}

template <class T> __device__ T factor_of(const Attention<T> &attention, int64_t row) {
    return row < attention.atoms
               ? T(1)
               : max(attention.factors[row - attention.atoms], T(smallest_factor));
}

template <class T, int Size, int Lanes>
__global__ void __launch_bounds__(threads) forward_kernel(Attention<T> attention) {
    using Part = Head<T, Size, Lanes>;
    extern __shared__ __align__(16) unsigned char memory[];
    auto *keys = reinterpret_cast<T *>(memory);
    auto *values = keys + chunk<T> * group_width;
    auto *factors = values + chunk<T> * group_width;

    auto tokens = AtomTokens<T>(attention, blockIdx.x);
    auto first_head = static_cast<int>(blockIdx.y) * Part::heads;
    auto heads = min(Part::heads, attention.heads - first_head);
    auto size = attention.head_size;
    int64_t width = static_cast<int64_t>(attention.heads) * size;
    auto *group = attention.qkv + first_head * size;
    auto part = Part{static_cast<int>(threadIdx.x) % Lanes};
    auto items = tokens.count * heads;
    auto loaded = -1;

    for (int first_item = 0; first_item < items; first_item += threads / Lanes) {
        auto item = first_item + static_cast<int>(threadIdx.x) / Lanes;
        auto active = item < items;
        auto head = active ? item / tokens.count : 0;
        auto row = tokens.row(active ? item % tokens.count : 0);
        T query[Part::local], sum[Part::local] = {};
        part.load(group + row * 3 * width + head * size, size, query);
        for (auto &x : query) {
            x *= attention.scale;
        }
        T highest = -std::numeric_limits<T>::infinity(), denominator = 0;
        for (int first = 0; first < tokens.count; first += chunk<T>) {
            if (loaded != first) {
                __syncthreads();
                fill<T, Size>(keys, group + width, 3 * width, tokens, first, heads, size);
                fill<T, Size>(values, group + 2 * width, 3 * width, tokens, first, heads, size);
                for (int i = threadIdx.x; i < min(chunk<T>, tokens.count - first); i += threads) {
                    factors[i] = factor_of(attention, tokens.row(first + i));
                }
                loaded = first;
                __syncthreads();
            }
            auto count = min(chunk<T>, tokens.count - first);
            constexpr int step = 4;
            for (int j = 0; j < count; j += step) {
                T scores[step];
                auto next = highest;
#pragma unroll
                for (int k = 0; k < step; k++) {
                    T key[Part::local];
                    part.read(keys + min(j + k, count - 1) * group_width + head * Size, key);
                    scores[k] = part.dot(query, key);
                    next = max(next, scores[k]);
                }
                auto correction = exp(highest - next);
                highest = next;
                denominator *= correction;
#pragma unroll
                for (auto &x : sum) {
                    x *= correction;
                }
#pragma unroll
                for (int k = 0; k < step; k++) {
                    if (j + k < count) {
                        auto weight = factors[j + k] * exp(scores[k] - highest);
                        denominator += weight;
                        T value[Part::local];
                        part.read(values + (j + k) * group_width + head * Size, value);
#pragma unroll
                        for (int i = 0; i < Part::local; i++) {
                            sum[i] += weight * value[i];
                        }
                    }
                }
            }
        }
        if (active) {
            for (auto &x : sum) {
                x /= denominator;
            }
            head += first_head;
            part.store(attention.output + row * width + head * size, size, sum);
            if (part.part == 0) {
                attention.log_sums[row * attention.heads + head] = highest + log(denominator);
            }
        }
    }
}

template <class T, int Size, int Lanes>
__global__ void __launch_bounds__(threads) backward_kernel(AttentionBackward<T> backward) {
    using Part = Head<T, Size, Lanes>;
    extern __shared__ __align__(16) unsigned char memory[];
    auto *first_matrix = reinterpret_cast<T *>(memory);
    auto *second_matrix = first_matrix + chunk<T> * group_width;
    // of keys the factors; of queries, for each head, the logarithms of the denominators and the
    // products of output and gradient
    auto *numbers = second_matrix + chunk<T> * group_width;

    const auto &attention = backward.forward;
    auto tokens = AtomTokens<T>(attention, blockIdx.x);
    auto first_head = static_cast<int>(blockIdx.y) * Part::heads;
    auto heads = min(Part::heads, attention.heads - first_head);
    auto size = attention.head_size;
    int64_t width = static_cast<int64_t>(attention.heads) * size;
    auto *group = attention.qkv + first_head * size;
    auto *group_gradient = backward.gradient + first_head * size;
    auto *group_result = backward.grad_qkv + first_head * size;
    auto part = Part{static_cast<int>(threadIdx.x) % Lanes};
    auto items = tokens.count * heads;
    auto loaded = -1;

    // queries
    for (int first_item = 0; first_item < items; first_item += threads / Lanes) {
        auto item = first_item + static_cast<int>(threadIdx.x) / Lanes;
        auto active = item < items;
        auto head = active ? item / tokens.count : 0;
        auto row = tokens.row(active ? item % tokens.count : 0);
        T query[Part::local], upper[Part::local], sum[Part::local] = {};
        part.load(attention.output + row * width + (first_head + head) * size, size, query);
        part.load(group_gradient + row * width + head * size, size, upper);
        auto product = part.dot(query, upper);
        auto number = row * attention.heads + first_head + head;
        auto log_sum = attention.log_sums[number];
        if (active && part.part == 0) {
            backward.products[number] = product;
        }
        part.load(group + row * 3 * width + head * size, size, query);
        for (int first = 0; first < tokens.count; first += chunk<T>) {
            auto count = min(chunk<T>, tokens.count - first);
            if (loaded != first) {
                __syncthreads();
                fill<T, Size>(first_matrix, group + width, 3 * width, tokens, first, heads, size);
                fill<T, Size>(
                    second_matrix, group + 2 * width, 3 * width, tokens, first, heads, size
                );
                for (int i = threadIdx.x; i < count; i += threads) {
                    numbers[i] = factor_of(attention, tokens.row(first + i));
                }
                loaded = first;
                __syncthreads();
            }
#pragma unroll 2
            for (int j = 0; j < count; j++) {
                T key[Part::local], value[Part::local];
                part.read(first_matrix + j * group_width + head * Size, key);
                part.read(second_matrix + j * group_width + head * Size, value);
                auto score = part.dot(query, key) * attention.scale;
                auto weight = numbers[j] * exp(score - log_sum);
                auto change = weight * (part.dot(upper, value) - product);
#pragma unroll
                for (int i = 0; i < Part::local; i++) {
                    sum[i] += change * key[i];
                }
            }
        }
        if (active) {
            for (auto &x : sum) {
                x *= attention.scale;
            }
            part.store(group_result + row * 3 * width + head * size, size, sum);
        }
    }

    // keys and values
    loaded = -1;
    auto *log_sums = numbers;
    auto *products = numbers + chunk<T> * Part::heads;
    for (int first_item = 0; first_item < items; first_item += threads / Lanes) {
        auto item = first_item + static_cast<int>(threadIdx.x) / Lanes;
        auto active = item < items;
        auto head = active ? item / tokens.count : 0;
        auto row = tokens.row(active ? item % tokens.count : 0);
        T key[Part::local], value[Part::local];
        T key_sum[Part::local] = {}, value_sum[Part::local] = {}, changes = 0;
        part.load(group + width + row * 3 * width + head * size, size, key);
        part.load(group + 2 * width + row * 3 * width + head * size, size, value);
        auto factor = factor_of(attention, row);
        for (int first = 0; first < tokens.count; first += chunk<T>) {
            auto count = min(chunk<T>, tokens.count - first);
            if (loaded != first) {
                __syncthreads();
                fill<T, Size>(first_matrix, group, 3 * width, tokens, first, heads, size);
                fill<T, Size>(second_matrix, group_gradient, width, tokens, first, heads, size);
                for (int i = threadIdx.x; i < count * heads; i += threads) {
                    auto number = tokens.row(first + i / heads) * attention.heads + first_head;
                    log_sums[i / heads * Part::heads + i % heads] =
                        attention.log_sums[number + i % heads];
                    products[i / heads * Part::heads + i % heads] =
                        backward.products[number + i % heads];
                }
                loaded = first;
                __syncthreads();
            }
#pragma unroll 2
            for (int j = 0; j < count; j++) {
                T query[Part::local], upper[Part::local];
                part.read(first_matrix + j * group_width + head * Size, query);
                part.read(second_matrix + j * group_width + head * Size, upper);
                auto score = part.dot(query, key) * attention.scale;
                auto weight = factor * exp(score - log_sums[j * Part::heads + head]);
                auto change = weight * (part.dot(upper, value) - products[j * Part::heads + head]);
                changes += change;
#pragma unroll
                for (int i = 0; i < Part::local; i++) {
                    value_sum[i] += weight * upper[i];
                    key_sum[i] += change * query[i];
                }
            }
        }
        if (active) {
            for (auto &x : key_sum) {
                x *= attention.scale;
            }
            part.store(group_result + width + row * 3 * width + head * size, size, key_sum);
            part.store(group_result + 2 * width + row * 3 * width + head * size, size, value_sum);
            if (part.part == 0) {
                backward.grad_log_factors[row * attention.heads + first_head + head] = changes;
            }
        }
    }
}

inline void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(
            std::string("CUDA failed in the attention of PET: ") + cudaGetErrorString(status)
        );
    }
}

template <class Kernel, class Arguments>
void launch(
    Kernel kernel,
    const Arguments &arguments,
    int64_t atoms,
    int groups,
    size_t memory,
    void *stream
) {
    check(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory)
    ));
    auto grid = dim3(static_cast<unsigned>(atoms), static_cast<unsigned>(groups));
    kernel<<<grid, threads, memory, static_cast<cudaStream_t>(stream)>>>(arguments);
    check(cudaGetLastError());
}

/// Lanes for one token of a head of this size, of which each has up to `columns` columns.
constexpr int lanes_for(int size, int columns) {
    return size <= columns ? 1 : size / columns;
}

template <class T, int Size> void launch_size(const Attention<T> &attention, void *stream) {
    constexpr int lanes = lanes_for(Size, sizeof(T) == 4 ? 32 : 16);
    constexpr int heads = group_width / Size;
    constexpr size_t memory = sizeof(T) * chunk<T> * (2 * group_width + 1);
    launch(
        forward_kernel<T, Size, lanes>,
        attention,
        attention.atoms,
        (attention.heads + heads - 1) / heads,
        memory,
        stream
    );
}

template <class T, int Size> void launch_size(const AttentionBackward<T> &attention, void *stream) {
    constexpr int lanes = lanes_for(Size, sizeof(T) == 4 ? 16 : 8);
    constexpr int heads = group_width / Size;
    constexpr size_t memory = sizeof(T) * chunk<T> * (2 * group_width + 2 * heads);
    launch(
        backward_kernel<T, Size, lanes>,
        attention,
        attention.forward.atoms,
        (attention.forward.heads + heads - 1) / heads,
        memory,
        stream
    );
}

template <class T, class Arguments>
void launch_head_size(int head_size, const Arguments &arguments, void *stream) {
    if (head_size <= 8) {
        launch_size<T, 8>(arguments, stream);
    } else if (head_size <= 16) {
        launch_size<T, 16>(arguments, stream);
    } else if (head_size <= 32) {
        launch_size<T, 32>(arguments, stream);
    } else if (head_size <= 64) {
        launch_size<T, 64>(arguments, stream);
    } else {
        launch_size<T, 128>(arguments, stream);
    }
}

} // namespace

template <class T> void launch_attention(const Attention<T> &attention, void *stream) {
    if (attention.atoms > 0) {
        launch_head_size<T>(attention.head_size, attention, stream);
    }
}

template <class T> void launch_attention(const AttentionBackward<T> &attention, void *stream) {
    if (attention.forward.atoms > 0) {
        launch_head_size<T>(attention.forward.head_size, attention, stream);
    }
}

} // namespace metatomic_tc::pet
