#pragma once

// What the kernels of compute capability 9.0a do with the sums of a tile: bias, activation, stores,
// repair of Inf and NaN, and the sum of parts of K. A thread of a warpgroup has the sums of its 64
// rows where `wgmma` leaves them.
#include <type_traits>

#include "product/fp32_element.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace metatomic_tc::wgmma {

/// First column of C, bias and weight that belongs to the group `group` of 16 columns of a tile,
/// and that of the quad's thread `t` in it, of four. For SwiGLU the groups alternate between value
/// and gate, which a thread has to have both.
template <int TileN>
__host__ __device__ inline int64_t
first_column(Activation activation, int64_t N, int tile, int group, int t) {
    if (activation == Activation::swiglu) {
        return (group % 2) * (N / 2) + tile * (TileN / 2) + 16 * (group / 2) + 4 * t;
    }
    return static_cast<int64_t>(tile) * TileN + 16 * group + 4 * t;
}

/// End of the columns of a group: N, or for SwiGLU that of its half.
__host__ __device__ inline int64_t last_column(Activation activation, int64_t N, int group) {
    return activation == Activation::swiglu ? (group % 2 + 1) * (N / 2) : N;
}

/// Four values from `column` on; with `Whole` all of them exist and are aligned to 16 bytes.
template <bool Whole>
__device__ inline float4 load4(const float *values, int64_t column, int64_t end, float otherwise) {
    if constexpr (Whole) {
        return __ldg(reinterpret_cast<const float4 *>(values + column));
    }
    auto at = [&](int i) { return column + i < end ? __ldg(values + column + i) : otherwise; };
    return {at(0), at(1), at(2), at(3)};
}

__device__ inline void store4(float *values, int64_t column, int64_t end, const float4 &value) {
    const float elements[] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (column + i < end) {
            values[column + i] = elements[i];
        }
    }
}

__device__ inline float sigmoid(float x) {
    return __fdividef(1, 1 + expf(-x));
}

/// Adds NaN to `check` when a value is Inf or NaN, else zero.
__device__ inline void check_finite(const float4 &value, float &check) {
    check = fmaf(value.x, 0, check);
    check = fmaf(value.y, 0, check);
    check = fmaf(value.z, 0, check);
    check = fmaf(value.w, 0, check);
}

/// Where a warp stored Inf or NaN in its 16 rows: does these elements again in FP32, since slices
/// of Inf, or of numbers close to the largest one, give NaN where FP32 may not.
template <int TileN>
__device__ void repair(const Gemm &problem, int64_t first_row, int tile, int lane) {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * TileN; i += 32) {
        auto row = first_row + i / TileN;
        auto in_tile = i % TileN;
        auto swiglu = problem.activation == Activation::swiglu;
        if (swiglu && in_tile >= TileN / 2) {
            continue;
        }
        auto column = static_cast<int64_t>(tile) * (swiglu ? TileN / 2 : TileN) + in_tile;
        auto columns = swiglu ? problem.N / 2 : problem.N;
        if (row >= problem.M || column >= columns) {
            continue;
        }
        auto &output = problem.C[row * problem.ldc + column];
        auto *kept =
            problem.pre_activation == nullptr ? nullptr : problem.pre_activation + row * problem.N;
        auto kept_is_finite = kept == nullptr || (isfinite(kept[column]) &&
                                                  (!swiglu || isfinite(kept[column + columns])));
        if (isfinite(output) && kept_is_finite) {
            continue;
        }
        auto value = fp32_element(problem, row, column);
        auto gate = swiglu ? fp32_element(problem, row, column + columns) : value;
        output = problem.activation == Activation::none ? value : value * sigmoid(gate);
        if (kept != nullptr) {
            kept[column] = value;
            if (swiglu) {
                kept[column + columns] = gate;
            }
        }
    }
}

/// Stores `first` at `column` and `second` 16 columns behind it. `Whole`: eight threads write a
/// line of 128 bytes together, for which those of two neighbouring rows exchange what they have.
template <bool Whole>
__device__ inline void store_line(
    float *matrix,
    int64_t ld,
    int64_t row,
    int64_t column,
    int64_t end,
    const float4 &first,
    const float4 &second
) {
    if constexpr (!Whole) {
        store4(matrix + row * ld, column, end, first);
        store4(matrix + row * ld, column + 16, end, second);
        return;
    }
    auto odd = threadIdx.x / 4 % 2 == 1;
    auto exchange = [&](float first, float second) {
        return __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
    };
    auto other = float4{
        exchange(first.x, second.x),
        exchange(first.y, second.y),
        exchange(first.z, second.z),
        exchange(first.w, second.w)
    };
    auto select = [&](const float4 &a, const float4 &b) {
        return float4{odd ? a.x : b.x, odd ? a.y : b.y, odd ? a.z : b.z, odd ? a.w : b.w};
    };
    auto *values = matrix + (row - odd) * ld + column + 16 * odd;
    ptx::store_global4(values, select(other, first));
    ptx::store_global4(values + ld, select(second, other));
}

/// Bias, activation and stores of a thread's sums. `Whole`: the tile is inside of C, and aligned.
/// Returns 0, or NaN when a value was not finite.
template <typename Mode, int TileN, Activation A, bool Whole>
__device__ float store_tile(
    const Parameters &parameters,
    int tile_column,
    int64_t first_row,
    int t,
    const float (&sums)[TileN / 2]
) {
    const auto &problem = parameters.problem;
    auto check = 0.0f;
    auto load_scale = [&](int64_t column, int64_t end) {
        return Mode::scaled ? load4<Whole>(parameters.weight_scales, column, end, 1)
                            : float4{1, 1, 1, 1};
    };
    auto load_bias = [&](int64_t column, int64_t end) {
        return problem.bias == nullptr ? float4{0, 0, 0, 0}
                                       : load4<Whole>(problem.bias, column, end, 0);
    };
    // four columns of two rows of the thread, in the order of the packing, with scale and bias
    auto pre_activation = [&](int group, int64_t column, int64_t end, float4(&values)[2]) {
        auto scale = load_scale(column, end), bias = load_bias(column, end);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto *s = sums + 8 * group + 2 * i;
            auto v = float4{s[0], s[1], s[4], s[5]};
            if constexpr (Mode::scaled) {
                v = {v.x * scale.x, v.y * scale.y, v.z * scale.z, v.w * scale.w};
            }
            values[i] = {v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w};
            check_finite(values[i], check);
        }
    };
    auto multiply = [](const float4 &value, const float4 &gate) {
        return float4{
            value.x * sigmoid(gate.x),
            value.y * sigmoid(gate.y),
            value.z * sigmoid(gate.z),
            value.w * sigmoid(gate.w),
        };
    };
    auto *kept = problem.pre_activation;

    // two groups at a time, with SwiGLU those of the values and those of the gates
    constexpr auto swiglu = A == Activation::swiglu;
    constexpr auto distance = swiglu ? 2 : 1;
    auto end = swiglu ? problem.N / 2 : problem.N;
#pragma unroll
    for (int group = 0; group < TileN / 16; group += 2 * distance) {
        auto column = first_column<TileN>(A, problem.N, tile_column, group, t);
        float4 values[2][2], gates[2][2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            pre_activation(group + j * distance, column + 16 * j, end, values[j]);
            if constexpr (swiglu) {
                auto gate_column = column + 16 * j + end;
                pre_activation(group + j * distance + 1, gate_column, problem.N, gates[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            auto row = first_row + 8 * i;
            if (!Whole && row >= problem.M) {
                continue;
            }
            if constexpr (A != Activation::none) {
                auto gate = swiglu ? gates : values;
                if (kept != nullptr) {
                    store_line<Whole>(
                        kept, problem.N, row, column, end, values[0][i], values[1][i]
                    );
                    if constexpr (swiglu) {
                        store_line<Whole>(
                            kept, problem.N, row, column + end, problem.N, gates[0][i], gates[1][i]
                        );
                    }
                }
                values[0][i] = multiply(values[0][i], gate[0][i]);
                values[1][i] = multiply(values[1][i], gate[1][i]);
            }
            store_line<Whole>(problem.C, problem.ldc, row, column, end, values[0][i], values[1][i]);
        }
    }
    return check;
}

/// Stores a warpgroup's sums.
template <typename Mode, int TileN>
__device__ void store(
    const Parameters &parameters,
    int tile_row,
    int tile_column,
    int row_in_tile,
    int lane,
    const float (&sums)[TileN / 2]
) {
    const auto &problem = parameters.problem;
    auto first_row = static_cast<int64_t>(tile_row) * tile_m + row_in_tile;
    auto swiglu = problem.activation == Activation::swiglu;
    auto whole = parameters.aligned && (tile_row + 1) * tile_m <= problem.M &&
                 (tile_column + 1) * TileN <= (swiglu ? problem.N / 2 * 2 : problem.N);
    auto store_as = [&](auto activation) {
        constexpr auto A = decltype(activation)::value;
        return whole ? store_tile<Mode, TileN, A, true>(
                           parameters, tile_column, first_row, lane % 4, sums
                       )
                     : store_tile<Mode, TileN, A, false>(
                           parameters, tile_column, first_row, lane % 4, sums
                       );
    };
    auto check = 0.0f;
    if (problem.activation == Activation::none) {
        check = store_as(std::integral_constant<Activation, Activation::none>());
    } else if (problem.activation == Activation::silu) {
        check = store_as(std::integral_constant<Activation, Activation::silu>());
    } else {
        check = store_as(std::integral_constant<Activation, Activation::swiglu>());
    }
    if (__any_sync(0xffffffffu, check != 0)) {
        repair<TileN>(problem, first_row - lane / 4, tile_column, lane);
    }
}

/// Writes a thread's sums, neighbouring threads next to each other. `memory` is that of a tile.
template <int TileN>
__device__ void put_sums(float *memory, int thread, const float (&sums)[TileN / 2]) {
    auto *values = reinterpret_cast<float4 *>(memory) + thread;
#pragma unroll
    for (int i = 0; i < TileN / 8; i++) {
        __stcg(values + i * 256, {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    }
}

/// Adds what `put_sums` has written.
template <int TileN>
__device__ void add_sums(const float *memory, int thread, float (&sums)[TileN / 2]) {
    const auto *values = reinterpret_cast<const float4 *>(memory) + thread;
#pragma unroll
    for (int i = 0; i < TileN / 8; i++) {
        auto value = __ldcg(values + i * 256);
        sums[4 * i] += value.x;
        sums[4 * i + 1] += value.y;
        sums[4 * i + 2] += value.z;
        sums[4 * i + 3] += value.w;
    }
}

/// Adds up the parts of K in their order, so that the result does not depend on which block is
/// last. Returns false in all warpgroups but the last one of a tile, which goes on with the sums.
template <int TileN>
__device__ bool join_parts(
    const Parameters &parameters,
    const Work &work,
    int warpgroup,
    int thread,
    float (&sums)[TileN / 2]
) {
    __shared__ int arrivals[2];
    constexpr int64_t values = tile_m * TileN;
    auto tile = static_cast<int64_t>(work.item / parameters.splits);
    auto *parts = parameters.partial_sums + tile * parameters.splits * values;
    put_sums<TileN>(parts + work.split * values, thread, sums);
    __threadfence();
    ptx::warpgroup_barrier(1 + warpgroup);
    if (thread % 128 == 0) {
        // the last one sets it to 0 again
        arrivals[warpgroup] = static_cast<int>(atomicInc(
            parameters.finished_parts + 2 * tile + warpgroup,
            static_cast<unsigned>(parameters.splits) - 1
        ));
        __threadfence();
    }
    ptx::warpgroup_barrier(1 + warpgroup);
    if (arrivals[warpgroup] != parameters.splits - 1) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < TileN / 2; i++) {
        sums[i] = 0;
    }
#pragma unroll 1
    for (int split = 0; split < parameters.splits; split++) {
        add_sums<TileN>(parts + split * values, thread, sums);
    }
    return true;
}

} // namespace metatomic_tc::wgmma
