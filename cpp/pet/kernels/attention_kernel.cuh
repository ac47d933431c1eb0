#pragma once

#include "attention.hpp"

#include <type_traits>

#include "product/cuda_status.hpp"

/// A warp works on one head of one atom, without waiting for others. `Lanes` neighboring lanes
/// share a token, `columns` columns of the head each; the tokens of a warp, `rows` for each lane,
/// stay in registers, and all tokens of the atom pass by in shared memory, `Lanes` of them at a
/// time: lanes compute their part of these scores, and by adding them up each lane gets one of the
/// scores, of which it computes the exponential. So that no lane repeats the work of another.
namespace metatomic_tc::pet {

namespace {

constexpr int warps = 4;
/// on a multiprocessor
constexpr int resident_blocks = 3;
constexpr unsigned everyone = 0xffffffffu;

/// What one lane loads at once.
template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T values[size];
};

/// A head of `Columns * Lanes` columns, of which `head_size` are used. Neighboring lanes have
/// neighboring packs, so that they read shared memory without bank conflicts.
template <class T, int Columns, int Lanes> struct Head {
    static constexpr int columns = Columns;
    static constexpr int lanes = Lanes;
    static constexpr int size = Columns * Lanes;
    /// tokens side by side in a warp
    static constexpr int slots = 32 / Lanes;
    /// tokens in shared memory at a time
    static constexpr int chunk = 6 * 1024 / (size * static_cast<int>(sizeof(T)));
    static_assert(Columns % Pack<T>::size == 0);

    int part, slot;

    __device__ Head() : part(threadIdx.x % Lanes), slot(threadIdx.x % 32 / Lanes) {}

    __device__ int column(int i) const {
        return (i / Pack<T>::size * Lanes + part) * Pack<T>::size + i % Pack<T>::size;
    }

    /// From a row in global memory.
    __device__ void load(const T *row, int head_size, T (&result)[Columns]) const {
#pragma unroll
        for (int i = 0; i < Columns; i++) {
            result[i] = column(i) < head_size ? row[column(i)] : T(0);
        }
    }

    __device__ void store(T *row, int head_size, const T (&values)[Columns]) const {
#pragma unroll
        for (int i = 0; i < Columns; i++) {
            if (column(i) < head_size) {
                row[column(i)] = values[i];
            }
        }
    }

    /// From a row in shared memory.
    __device__ void read(const T *row, T (&result)[Columns]) const {
#pragma unroll
        for (int p = 0; p < Columns / Pack<T>::size; p++) {
            auto pack =
                *reinterpret_cast<const Pack<T> *>(row + (p * Lanes + part) * Pack<T>::size);
#pragma unroll
            for (int i = 0; i < Pack<T>::size; i++) {
                result[p * Pack<T>::size + i] = pack.values[i];
            }
        }
    }

    /// This lane's part of a scalar product.
    __device__ T partial_dot(const T (&a)[Columns], const T (&b)[Columns]) const {
        T sum = a[0] * b[0];
#pragma unroll
        for (int i = 1; i < Columns; i++) {
            sum += a[i] * b[i];
        }
        return sum;
    }

    /// The sum over the lanes of a token, the same in all of them.
    __device__ T sum(T value) const {
#pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2) {
            value += __shfl_xor_sync(everyone, value, step);
        }
        return value;
    }

    __device__ T maximum(T value) const {
#pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2) {
            value = max(value, __shfl_xor_sync(everyone, value, step));
        }
        return value;
    }

    /// Of the sums of `values[i]` over the lanes of a token the one with i = `part`.
    __device__ T sum_of_part(T (&values)[Lanes]) const {
#pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2) {
            auto upper = (part & step) != 0;
#pragma unroll
            for (int i = 0; i < step; i++) {
                auto other = upper ? values[i] : values[i + step];
                values[i] = upper ? values[i + step] : values[i];
                values[i] += __shfl_xor_sync(everyone, other, step);
            }
        }
        return values[0];
    }

    /// The value of the lane with this part.
    __device__ T from(T value, int other_part) const {
        return __shfl_sync(everyone, value, slot * Lanes + other_part);
    }
};

/// Two matrices and two vectors of up to `chunk` tokens in shared memory, of one warp.
template <class T, class Part> struct Shared {
    T *first, *second, *first_number, *second_number;

    static constexpr size_t bytes = sizeof(T) * Part::chunk * (2 * Part::size + 2);

    __device__ Shared() {
        extern __shared__ __align__(16) unsigned char memory[];
        first = reinterpret_cast<T *>(memory + threadIdx.x / 32 * bytes);
        second = first + Part::chunk * Part::size;
        first_number = second + Part::chunk * Part::size;
        second_number = first_number + Part::chunk;
    }

    /// Copies one head's columns of `count` tokens from `begin` on, padded with zeros.
    __device__ void fill(
        T *shared,
        const T *head,
        int64_t row_width,
        const AtomTokens<T> &tokens,
        int begin,
        int count,
        int head_size
    ) const {
        constexpr auto size = Part::size;
        constexpr auto packed = Pack<T>::size;
        int lane = threadIdx.x % 32;
        if (head_size == size && row_width % packed == 0) {
#pragma unroll 4
            for (int i = lane; i < count * (size / packed); i += 32) {
                auto token = i / (size / packed), column = i % (size / packed) * packed;
                *reinterpret_cast<Pack<T> *>(shared + token * size + column) =
                    *reinterpret_cast<const Pack<T> *>(
                        head + tokens.row(begin + token) * row_width + column
                    );
            }
            return;
        }
        for (int i = lane; i < count * size; i += 32) {
            auto token = i / size, column = i % size;
            shared[i] =
                column < head_size ? head[tokens.row(begin + token) * row_width + column] : T(0);
        }
    }
};

template <class T> __device__ T factor_of(const Attention<T> &attention, int64_t row) {
    return row < attention.atoms
               ? T(1)
               : max(attention.factors[row - attention.atoms], T(smallest_factor));
}

/// One head of one atom.
template <class T, class Part> struct Problem {
    const Attention<T> &attention;
    AtomTokens<T> tokens;
    int head;
    Part part;
    Shared<T, Part> shared;
    /// The chunk that begins at this token is in shared memory.
    int loaded = -1;

    __device__ Problem(const Attention<T> &attention, int64_t atom, int head)
        : attention(attention), tokens(attention, atom), head(head) {}

    __device__ int64_t width() const {
        return static_cast<int64_t>(attention.heads) * attention.head_size;
    }

    /// 0: queries, 1: keys, 2: values
    __device__ int64_t offset(int64_t row, int which) const {
        return (row * 3 + which) * width() + head * attention.head_size;
    }

    __device__ int64_t output_offset(int64_t row) const {
        return row * width() + head * attention.head_size;
    }

    __device__ int64_t number_offset(int64_t row) const {
        return row * attention.heads + head;
    }

    __device__ void load_keys_and_values(int begin, int count) {
        if (loaded == begin) {
            return;
        }
        __syncwarp();
        auto size = attention.head_size;
        shared.fill(
            shared.first, attention.qkv + offset(0, 1), 3 * width(), tokens, begin, count, size
        );
        shared.fill(
            shared.second, attention.qkv + offset(0, 2), 3 * width(), tokens, begin, count, size
        );
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            shared.first_number[i] = factor_of(attention, tokens.row(begin + i));
        }
        loaded = begin;
        __syncwarp();
    }

    /// This lane's parts of the scalar products of `rows` with the `Part::lanes` tokens of a shared
    /// matrix from j on; the last of its `count` tokens stands in for those beyond.
    template <int Rows>
    __device__ void partial_dots(
        const T (&rows)[Rows][Part::columns],
        const T *matrix,
        int j,
        int count,
        T (&result)[Rows][Part::lanes]
    ) const {
#pragma unroll
        for (int k = 0; k < Part::lanes; k++) {
            T other[Part::columns];
            part.read(matrix + min(j + k, count - 1) * Part::size, other);
#pragma unroll
            for (int r = 0; r < Rows; r++) {
                result[r][k] = part.partial_dot(rows[r], other);
            }
        }
    }

    /// Adds these tokens to `sums`, with the weights that the lanes have for one of them each.
    template <int Rows>
    __device__ void add_weighted(
        T (&sums)[Rows][Part::columns], const T (&weights)[Rows], const T *matrix, int j, int count
    ) const {
#pragma unroll
        for (int k = 0; k < Part::lanes; k++) {
            T other[Part::columns];
            part.read(matrix + min(j + k, count - 1) * Part::size, other);
#pragma unroll
            for (int r = 0; r < Rows; r++) {
                auto weight = part.from(weights[r], k);
#pragma unroll
                for (int i = 0; i < Part::columns; i++) {
                    sums[r][i] += weight * other[i];
                }
            }
        }
    }

    /// The output of the queries from `first` on, `Rows` for each lane.
    template <int Rows> __device__ void attend(int first) {
        T query[Rows][Part::columns], sum[Rows][Part::columns];
        T highest[Rows], denominator[Rows];
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto token = min(first + r * Part::slots + part.slot, tokens.count - 1);
            part.load(attention.qkv + offset(tokens.row(token), 0), attention.head_size, query[r]);
#pragma unroll
            for (int i = 0; i < Part::columns; i++) {
                query[r][i] *= attention.scale;
                sum[r][i] = 0;
            }
            highest[r] = -std::numeric_limits<T>::infinity();
            denominator[r] = 0;
        }
        for (int begin = 0; begin < tokens.count; begin += Part::chunk) {
            auto count = min(Part::chunk, tokens.count - begin);
            load_keys_and_values(begin, count);
            for (int j = 0; j < count; j += Part::lanes) {
                T scores[Rows][Part::lanes], weight[Rows];
                partial_dots(query, shared.first, j, count, scores);
                auto valid = j + part.part < count;
                // The reference of the exponentials may lag behind the maximum by this much.
                constexpr T slack = 20;
                auto rises = false;
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    auto score = part.sum_of_part(scores[r]);
                    weight[r] = valid ? score : -std::numeric_limits<T>::infinity();
                    rises = rises || weight[r] > highest[r] + slack;
                }
                if (__any_sync(everyone, rises)) {
#pragma unroll
                    for (int r = 0; r < Rows; r++) {
                        auto next = max(highest[r], part.maximum(weight[r]));
                        auto correction = exp(highest[r] - next);
                        highest[r] = next;
                        denominator[r] *= correction;
#pragma unroll
                        for (int i = 0; i < Part::columns; i++) {
                            sum[r][i] *= correction;
                        }
                    }
                }
                auto factor = valid ? shared.first_number[j + part.part] : T(0);
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    weight[r] = factor * exp(weight[r] - highest[r]);
                    denominator[r] += weight[r];
                }
                add_weighted(sum, weight, shared.second, j, count);
            }
        }
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto total = part.sum(denominator[r]);
            auto token = first + r * Part::slots + part.slot;
            if (token < tokens.count) {
                auto row = tokens.row(token);
                auto inverse = 1 / total;
#pragma unroll
                for (int i = 0; i < Part::columns; i++) {
                    sum[r][i] *= inverse;
                }
                part.store(attention.output + output_offset(row), attention.head_size, sum[r]);
                if (part.part == 0) {
                    attention.log_sums[number_offset(row)] = highest[r] + log(total);
                }
            }
        }
    }

    /// The gradient of the queries from `first` on; leaves the products of output and gradient.
    template <int Rows>
    __device__ void query_gradients(const AttentionBackward<T> &backward, int first) {
        T query[Rows][Part::columns], upper[Rows][Part::columns], sum[Rows][Part::columns];
        T log_sum[Rows], product[Rows];
        auto size = attention.head_size;
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto token = first + r * Part::slots + part.slot;
            auto row = tokens.row(min(token, tokens.count - 1));
            part.load(attention.output + output_offset(row), size, query[r]);
            part.load(backward.gradient + output_offset(row), size, upper[r]);
            product[r] = part.sum(part.partial_dot(query[r], upper[r]));
            part.load(attention.qkv + offset(row, 0), size, query[r]);
            log_sum[r] = attention.log_sums[number_offset(row)];
            if (part.part == 0 && token < tokens.count) {
                backward.products[number_offset(row)] = product[r];
            }
#pragma unroll
            for (int i = 0; i < Part::columns; i++) {
                sum[r][i] = 0;
            }
        }
        for (int begin = 0; begin < tokens.count; begin += Part::chunk) {
            auto count = min(Part::chunk, tokens.count - begin);
            load_keys_and_values(begin, count);
            for (int j = 0; j < count; j += Part::lanes) {
                T parts[Rows][Part::lanes], change[Rows];
                auto factor = j + part.part < count ? shared.first_number[j + part.part] : T(0);
                partial_dots(query, shared.first, j, count, parts);
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    auto score = part.sum_of_part(parts[r]) * attention.scale;
                    change[r] = factor * exp(score - log_sum[r]);
                }
                partial_dots(upper, shared.second, j, count, parts);
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    change[r] *= part.sum_of_part(parts[r]) - product[r];
                }
                add_weighted(sum, change, shared.first, j, count);
            }
        }
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto token = first + r * Part::slots + part.slot;
            if (token < tokens.count) {
#pragma unroll
                for (int i = 0; i < Part::columns; i++) {
                    sum[r][i] *= attention.scale;
                }
                part.store(backward.grad_qkv + offset(tokens.row(token), 0), size, sum[r]);
            }
        }
    }

    __device__ void
    load_queries_and_gradients(const AttentionBackward<T> &backward, int begin, int count) {
        if (loaded == begin) {
            return;
        }
        __syncwarp();
        auto size = attention.head_size;
        shared.fill(
            shared.first, attention.qkv + offset(0, 0), 3 * width(), tokens, begin, count, size
        );
        shared.fill(
            shared.second, backward.gradient + output_offset(0), width(), tokens, begin, count, size
        );
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            auto number = number_offset(tokens.row(begin + i));
            shared.first_number[i] = attention.log_sums[number];
            shared.second_number[i] = backward.products[number];
        }
        loaded = begin;
        __syncwarp();
    }

    /// The gradients of the keys and values from `first` on, and of the logarithms of their
    /// factors.
    template <int Rows>
    __device__ void key_gradients(const AttentionBackward<T> &backward, int first) {
        T key[Rows][Part::columns], value[Rows][Part::columns];
        T key_sum[Rows][Part::columns], value_sum[Rows][Part::columns];
        T factor[Rows], changes[Rows];
        auto size = attention.head_size;
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto row = tokens.row(min(first + r * Part::slots + part.slot, tokens.count - 1));
            part.load(attention.qkv + offset(row, 1), size, key[r]);
            part.load(attention.qkv + offset(row, 2), size, value[r]);
            factor[r] = factor_of(attention, row);
            changes[r] = 0;
#pragma unroll
            for (int i = 0; i < Part::columns; i++) {
                key_sum[r][i] = 0;
                value_sum[r][i] = 0;
            }
        }
        for (int begin = 0; begin < tokens.count; begin += Part::chunk) {
            auto count = min(Part::chunk, tokens.count - begin);
            load_queries_and_gradients(backward, begin, count);
            for (int j = 0; j < count; j += Part::lanes) {
                T parts[Rows][Part::lanes], weight[Rows], change[Rows];
                auto valid = j + part.part < count;
                auto mine = min(j + part.part, count - 1);
                auto log_sum = shared.first_number[mine], product = shared.second_number[mine];
                partial_dots(key, shared.first, j, count, parts);
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    auto score = part.sum_of_part(parts[r]) * attention.scale;
                    weight[r] = valid ? factor[r] * exp(score - log_sum) : T(0);
                }
#pragma unroll
                for (int k = 0; k < Part::lanes; k++) {
                    T upper[Part::columns];
                    part.read(shared.second + min(j + k, count - 1) * Part::size, upper);
#pragma unroll
                    for (int r = 0; r < Rows; r++) {
                        parts[r][k] = part.partial_dot(upper, value[r]);
                        auto w = part.from(weight[r], k);
#pragma unroll
                        for (int i = 0; i < Part::columns; i++) {
                            value_sum[r][i] += w * upper[i];
                        }
                    }
                }
#pragma unroll
                for (int r = 0; r < Rows; r++) {
                    change[r] = weight[r] * (part.sum_of_part(parts[r]) - product);
                    changes[r] += change[r];
                }
                add_weighted(key_sum, change, shared.first, j, count);
            }
        }
#pragma unroll
        for (int r = 0; r < Rows; r++) {
            auto total = part.sum(changes[r]);
            auto token = first + r * Part::slots + part.slot;
            if (token < tokens.count) {
                auto row = tokens.row(token);
#pragma unroll
                for (int i = 0; i < Part::columns; i++) {
                    key_sum[r][i] *= attention.scale;
                }
                part.store(backward.grad_qkv + offset(row, 1), size, key_sum[r]);
                part.store(backward.grad_qkv + offset(row, 2), size, value_sum[r]);
                if (part.part == 0) {
                    backward.grad_log_factors[number_offset(row)] = total;
                }
            }
        }
    }
};

/// Rows for each lane, as many as leave room for three blocks in the registers of a multiprocessor.
template <class T, class Part> struct Rows {
    static constexpr int of(int numbers) {
        auto registers = static_cast<int>(sizeof(T)) / 4 * numbers;
        return registers > 57 ? 1 : 115 / registers;
    }

    static constexpr int forward = of(2 * Part::columns + Part::lanes + 3);
    static constexpr int queries = of(3 * Part::columns + Part::lanes + 4);
    static constexpr int keys = of(4 * Part::columns + Part::lanes + 4);
};

/// Calls `work` with `std::integral_constant<int, rows>()`, so that it is compiled for each.
template <int Lowest, int Highest, class Work> __device__ void with_rows(int rows, Work work) {
    if constexpr (Lowest < Highest) {
        if (rows > Lowest) {
            with_rows<Lowest + 1, Highest>(rows, work);
            return;
        }
    }
    work(std::integral_constant<int, Lowest>());
}

/// Calls `work(rows, first)` so that all tokens have their turn, with the fewest rows that do it in
/// the fewest turns.
template <int Highest, int Slots, class Work> __device__ void for_all_tokens(int count, Work work) {
    auto turns = (count + Slots * Highest - 1) / (Slots * Highest);
    auto needed = (count + Slots * turns - 1) / (Slots * turns);
    // one row takes about as long as two
    constexpr int lowest = Highest < 2 ? Highest : 2;
    with_rows<lowest, Highest>(needed, [&](auto rows) {
        for (int first = 0; first < count; first += rows * Slots) {
            work(rows, first);
        }
    });
}

template <class T, class Part>
__global__ void __launch_bounds__(32 * warps, resident_blocks) forward_kernel(
    Attention<T> attention, int64_t count
) {
    auto index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (index >= count) {
        return;
    }
    auto problem = Problem<T, Part>(
        attention, index / attention.heads, static_cast<int>(index % attention.heads)
    );
    for_all_tokens<Rows<T, Part>::forward, Part::slots>(
        problem.tokens.count,
        [&](auto rows, int first) { problem.template attend<decltype(rows)::value>(first); }
    );
}

template <class T, class Part>
__global__ void __launch_bounds__(32 * warps, resident_blocks) backward_kernel(
    AttentionBackward<T> backward, int64_t count
) {
    auto index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (index >= count) {
        return;
    }
    const auto &attention = backward.forward;
    auto problem = Problem<T, Part>(
        attention, index / attention.heads, static_cast<int>(index % attention.heads)
    );
    for_all_tokens<Rows<T, Part>::queries, Part::slots>(
        problem.tokens.count, [&](auto rows, int first) {
            problem.template query_gradients<decltype(rows)::value>(backward, first);
        }
    );
    problem.loaded = -1;
    for_all_tokens<Rows<T, Part>::keys, Part::slots>(
        problem.tokens.count, [&](auto rows, int first) {
            problem.template key_gradients<decltype(rows)::value>(backward, first);
        }
    );
}

template <class Part, class T, class Kernel, class Arguments>
void launch(Kernel kernel, const Arguments &arguments, int64_t count, void *stream) {
    constexpr auto memory = warps * Shared<T, Part>::bytes;
    static auto has_shared_memory = PerDevice<bool>();
    has_shared_memory([&](int) {
        check(
            cudaFuncSetAttribute(
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory)
            ),
            "asking for shared memory for the attention of PET"
        );
        return true;
    });
    auto blocks = static_cast<unsigned>((count + warps - 1) / warps);
    kernel<<<blocks, 32 * warps, memory, static_cast<cudaStream_t>(stream)>>>(arguments, count);
    check(cudaGetLastError(), "the attention of PET");
}

template <class T, class Part> void launch_part(const Attention<T> &attention, void *stream) {
    launch<Part, T>(forward_kernel<T, Part>, attention, attention.atoms * attention.heads, stream);
}

template <class T, class Part>
void launch_part(const AttentionBackward<T> &attention, void *stream) {
    auto count = attention.forward.atoms * attention.forward.heads;
    launch<Part, T>(backward_kernel<T, Part>, attention, count, stream);
}

template <class T, class Arguments>
void launch_head_size(int head_size, const Arguments &arguments, void *stream) {
    if (head_size <= 16) {
        launch_part<T, Head<T, 8, 2>>(arguments, stream);
    } else if (head_size <= 32) {
        launch_part<T, Head<T, 8, 4>>(arguments, stream);
    } else if (head_size <= 48) {
        launch_part<T, Head<T, 12, 4>>(arguments, stream);
    } else if (head_size <= 64) {
        launch_part<T, Head<T, 8, 8>>(arguments, stream);
    } else {
        static_assert(largest_head_size == 16 * 8);
        launch_part<T, Head<T, 16, 8>>(arguments, stream);
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
