// GEMMs of BF16 slices with `mma.sync`; each `mma_bf16x*.cu` instantiates them for one number of
// products and layout.
//
// An FP32 number is the sum of three BF16 slices, each the nearest to what the ones before it
// leave. The products of slices go from the smallest to the largest into a sum that starts at zero
// for every 32 of K and is then added in FP32: the Tensor Core truncates when it accumulates, and
// so it never accumulates for long.
//
// Four warps lie along M, so that no two of them split the same row of A: each thread copies the
// part of A that it multiplies, and splits it in registers. B is split once for all warps, in
// shared memory. K is permuted within every 16: lane t of four holds 4t ... 4t + 3 of an operand's
// row where the instruction has columns 2t, 2t + 1, 2t + 8, 2t + 9, so that the parts are of 16
// bytes.
//
// For 32 of K a warp of the 128 x 64 tile issues 192 (bf16x6) or 288 `mma.sync`, 8 clocks each on
// an A100, i.e. 1536 or 2304 clocks, and about 450 other instructions; the four warps together keep
// shared memory busy for 860 clocks. So the Tensor Cores bound it: 52 or 35 TFLOP/s on an A100,
// where FP32 has 19.5.
#pragma once

#include <stdexcept>
#include <string>

#include <cuda_runtime.h>

#include "bf16.hpp"
#include "product/bf16_products.hpp"

namespace metatomic_tc::mma_bf16 {

constexpr int warps = 4;
constexpr int threads = 32 * warps;
constexpr int tile_n = 64;
constexpr int tile_k = 32;
constexpr int slices = 3;
/// Rows and columns of C and columns of A in an `mma.sync`, and how many it takes for a tile.
constexpr int mma_m = 16;
constexpr int mma_n = 8;
constexpr int mma_k = 16;
constexpr int steps = tile_k / mma_k;

/// Shared memory for a slice of 64 columns and 32 k of B. Each element has the 8 k of one lane t,
/// and the order of the elements lets 8 lanes that read or 16 that write reach all 32 banks.
using SliceOfB = uint4[tile_n * 4];

__device__ inline int slice_index(int n, int t) {
    return n / 2 * 8 + ((n % 2 * 4 + t) ^ (n / 4 % 4 * 2));
}

/// Two BF16 numbers, nearest to `low` and `high`.
__device__ inline uint32_t round_to_bf16(float low, float high) {
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

/// sum += A·B for 16 rows, 8 columns and 16 of K.
__device__ inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Copies `Count` (1 or 4) values to shared memory in the background, zeros where not `inside`.
template <int Count> __device__ inline void copy(float *shared, const float *source, bool inside) {
    auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    auto bytes = inside ? 4 * Count : 0;
    if constexpr (Count == 4) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(address), "l"(source), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(address), "l"(source), "r"(bytes)
                     : "memory");
    }
}

/// The copies since the last call are a group.
__device__ inline void commit_copies() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

/// Waits for all groups of this thread but the last `Pending`.
template <int Pending> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

/// Copies `left`, at most 4, values that follow each other, and zeros behind them.
template <bool Aligned>
__device__ inline void copy_four(float4 &shared, const float *source, int left) {
    auto *values = reinterpret_cast<float *>(&shared);
    if constexpr (Aligned) {
        copy<4>(values, source, left > 0);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            copy<1>(values + i, source + i, left > i);
        }
    }
}

/// The slices of four numbers, two and two as in `round_to_bf16`.
__device__ inline void split(const float4 &values, uint2 (&result)[slices]) {
    auto rest = values;
#pragma unroll
    for (int slice = 0; slice < slices; slice++) {
        auto &[front, back] = result[slice];
        front = round_to_bf16(rest.x, rest.y);
        back = round_to_bf16(rest.z, rest.w);
        rest.x -= __uint_as_float(front << 16);
        rest.y -= __uint_as_float(front & 0xffff0000u);
        rest.z -= __uint_as_float(back << 16);
        rest.w -= __uint_as_float(back & 0xffff0000u);
    }
}

/// The part of A that a thread multiplies: `first_row` and every eighth row behind it. Rows beyond
/// M repeat the last one, and are not stored.
template <int Fragments, bool Aligned> class OperandA {
  public:
    /// What a thread block copies; no thread reads what another one copied.
    using Shared = float4[2 * Fragments][steps][threads];

    __device__ OperandA(const Gemm &problem, int first_row, int lane, Shared &shared)
        : shared_(shared) {
        auto k = lane % 4 * 4;
        left_ = static_cast<int>(problem.K) - k;
#pragma unroll
        for (int i = 0; i < 2 * Fragments; i++) {
            int64_t row = first_row + min(8 * i, static_cast<int>(problem.M) - 1 - first_row);
            sources_[i] = problem.A + row * problem.lda + k;
        }
    }

    /// Starts to copy the next 32 of K, zeros behind the end.
    __device__ void copy_next() {
#pragma unroll
        for (int i = 0; i < 2 * Fragments; i++) {
#pragma unroll
            for (int step = 0; step < steps; step++) {
                auto k = mma_k * step;
                copy_four<Aligned>(shared_[i][step][threadIdx.x], sources_[i] + k, left_ - k);
            }
            sources_[i] += tile_k;
        }
        left_ -= tile_k;
    }

    __device__ void split_copied(uint32_t (&result)[slices][Fragments][steps][4]) const {
#pragma unroll
        for (int i = 0; i < 2 * Fragments; i++) {
#pragma unroll
            for (int step = 0; step < steps; step++) {
                uint2 parts[slices];
                split(shared_[i][step][threadIdx.x], parts);
#pragma unroll
                for (int slice = 0; slice < slices; slice++) {
                    result[slice][i / 2][step][i % 2] = parts[slice].x;
                    result[slice][i / 2][step][i % 2 + 2] = parts[slice].y;
                }
            }
        }
    }

  private:
    Shared &shared_;
    const float *sources_[2 * Fragments];
    int left_;
};

/// The part of B that a thread splits: 4 columns of C by 4 of K. Columns beyond N repeat others,
/// and are not stored.
template <bool TransposeB, bool Aligned> class OperandB {
  public:
    /// What a thread block copies; no thread reads what another one copied.
    using Shared = float4[4][threads];

    __device__ OperandB(const Gemm &problem, int first_n, int warp, int lane, Shared &shared)
        : shared_(shared), stride_(problem.ldb) {
        // A warp takes 16 columns of C: in a copy four of them, with all 32 k, or all of them, with
        // every fourth k.
        n_ = 16 * warp + (TransposeB ? lane / 8 : lane % 4 * 4);
        t_ = TransposeB ? lane % 4 : lane / 4 % 2 + lane / 16 * 2;
        step_ = TransposeB ? lane / 4 % 2 : lane / 8 % 2;
        auto k = mma_k * step_ + 4 * t_;
        left_ = static_cast<int>(problem.K) - k;
        constexpr int width = !TransposeB && Aligned ? 4 : 1;
#pragma unroll
        for (int i = 0; i < sources; i++) {
            int64_t n = min(first_n + n_ + distance * i, static_cast<int>(problem.N) - width);
            sources_[i] = problem.B + (TransposeB ? n * stride_ + k : k * stride_ + n);
        }
    }

    /// Starts to copy the next 32 of K, zeros behind the end.
    __device__ void copy_next() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            auto &shared = shared_[i][threadIdx.x];
            if constexpr (TransposeB) {
                copy_four<Aligned>(shared, sources_[i], left_);
            } else if constexpr (Aligned) {
                copy_four<true>(shared, sources_[0] + i * stride_, left_ - i);
            } else {
                auto *values = reinterpret_cast<float *>(&shared);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    copy<1>(values + j, sources_[j] + i * stride_, left_ > i);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < sources; i++) {
            sources_[i] += TransposeB ? tile_k : tile_k * stride_;
        }
        left_ -= tile_k;
    }

    __device__ void split_copied(SliceOfB (&result)[slices]) const {
        float4 values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[i] = shared_[i][threadIdx.x];
        }
        if constexpr (!TransposeB) {
            const auto &[k0, k1, k2, k3] = values;
            float4 transposed[4] = {
                {k0.x, k1.x, k2.x, k3.x},
                {k0.y, k1.y, k2.y, k3.y},
                {k0.z, k1.z, k2.z, k3.z},
                {k0.w, k1.w, k2.w, k3.w},
            };
#pragma unroll
            for (int i = 0; i < 4; i++) {
                values[i] = transposed[i];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint2 parts[slices];
            split(values[i], parts);
            auto half = 2 * slice_index(n_ + distance * i, t_) + step_;
#pragma unroll
            for (int slice = 0; slice < slices; slice++) {
                reinterpret_cast<uint2 *>(result[slice])[half] = parts[slice];
            }
        }
    }

  private:
    /// Between the four columns of a thread.
    static constexpr int distance = TransposeB ? 4 : 1;
    static constexpr int sources = !TransposeB && Aligned ? 1 : 4;

    Shared &shared_;
    int64_t stride_;
    int n_;
    int t_;
    int step_;
    const float *sources_[sources];
    int left_;
};

/// Stores `left`, at most 2, outputs that follow each other, and says whether they are finite.
template <bool Aligned>
__device__ inline bool store(float *outputs, int left, float first, float second) {
    if constexpr (Aligned) {
        if (left > 0) {
            *reinterpret_cast<float2 *>(outputs) = {first, second};
        }
    } else {
        if (left > 0) {
            outputs[0] = first;
        }
        if (left > 1) {
            outputs[1] = second;
        }
    }
    return (left < 1 || isfinite(first)) && (left < 2 || isfinite(second));
}

/// A thread block computes `TileM` (128 or 64) rows and 64 columns of C. Aligned is for vector
/// loads and stores.
template <int Products, int TileM, bool TransposeB, bool Aligned>
__global__ void __launch_bounds__(threads, 2) multiply_kernel(const Gemm problem, int *nonfinite) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
    // the dispatch table has other kernels for these
    __trap();
#else
    constexpr int fragments = TileM / (warps * mma_m);
    // Four sums at a time: an `mma.sync` need not wait for the one before.
    constexpr int columns = 4 / fragments;
    __shared__ typename OperandA<fragments, Aligned>::Shared copied_a;
    __shared__ typename OperandB<TransposeB, Aligned>::Shared copied_b;
    __shared__ SliceOfB shared_b[2][slices];

    auto warp = static_cast<int>(threadIdx.x / 32);
    auto lane = static_cast<int>(threadIdx.x % 32);
    auto group = lane / 4;
    auto t = lane % 4;
    // blocks that run together read the same rows of A
    auto tiles_n = (static_cast<int>(problem.N) + tile_n - 1) / tile_n;
    auto tile = static_cast<int>(blockIdx.x);
    auto first_row = tile / tiles_n * TileM + warp * mma_m * fragments + group;
    auto first_column = tile % tiles_n * tile_n;

    auto a = OperandA<fragments, Aligned>(problem, first_row, lane, copied_a);
    auto b = OperandB<TransposeB, Aligned>(problem, first_column, warp, lane, copied_b);
    b.copy_next();
    commit_copies();
    a.copy_next();
    commit_copies();
    wait_for_copies<1>();
    b.split_copied(shared_b[0]);
    b.copy_next();
    commit_copies();
    __syncthreads();

    auto first_index = slice_index(group, t);
    float total[fragments][tile_n / mma_n][4] = {};
    auto stage = 0;
    for (int left = static_cast<int>(problem.K); left > 0; left -= tile_k) {
        wait_for_copies<1>();
        uint32_t a_slices[slices][fragments][steps][4];
        a.split_copied(a_slices);
        a.copy_next();
        commit_copies();
#pragma unroll
        for (int first = 0; first < tile_n / mma_n; first += columns) {
            uint4 b_slices[slices][columns];
#pragma unroll
            for (int slice = 0; slice < slices; slice++) {
#pragma unroll
                for (int j = 0; j < columns; j++) {
                    // slice_index(mma_n * (first + j) + group, t), in fewer registers
                    auto index = 4 * mma_n * (first + j) + (first_index ^ (first + j) % 2 * 4);
                    b_slices[slice][j] = shared_b[stage][slice][index];
                }
            }
            float sum[fragments][columns][4] = {};
#pragma unroll
            for (int product = 9 - Products; product < 9; product++) {
#pragma unroll
                for (int step = 0; step < steps; step++) {
#pragma unroll
                    for (int i = 0; i < fragments; i++) {
#pragma unroll
                        for (int j = 0; j < columns; j++) {
                            const auto &slice = a_slices[bf16_product(product).rows][i][step];
                            const auto &other = b_slices[bf16_product(product).weight][j];
                            multiply(
                                sum[i][j],
                                slice,
                                step == 0 ? other.x : other.z,
                                step == 0 ? other.y : other.w
                            );
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < fragments; i++) {
#pragma unroll
                for (int j = 0; j < columns; j++) {
#pragma unroll
                    for (int element = 0; element < 4; element++) {
                        total[i][first + j][element] += sum[i][j][element];
                    }
                }
            }
        }
        // what all warps read before the last barrier
        stage ^= 1;
        wait_for_copies<1>();
        b.split_copied(shared_b[stage]);
        b.copy_next();
        commit_copies();
        __syncthreads();
    }
    wait_for_copies<0>();

    auto finite = true;
    auto column = first_column + 2 * t;
    auto columns_left = static_cast<int>(problem.N) - column;
    auto rows_left = static_cast<int>(problem.M) - first_row;
    auto *outputs = problem.C + first_row * problem.ldc + column;
#pragma unroll
    for (int j = 0; j < tile_n / mma_n; j++) {
        auto left = columns_left - mma_n * j;
        float bias[2] = {};
        if (problem.bias != nullptr) {
            bias[0] = left > 0 ? problem.bias[column + mma_n * j] : 0.0f;
            bias[1] = left > 1 ? problem.bias[column + mma_n * j + 1] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * fragments; i++) {
            const auto *sums = &total[i / 2][j][i % 2 * 2];
            finite &= store<Aligned>(
                outputs + 8 * i * problem.ldc + mma_n * j,
                8 * i < rows_left ? left : 0,
                sums[0] + bias[0],
                sums[1] + bias[1]
            );
        }
    }
    if (!finite) {
        *nonfinite = 1;
    }
#endif
}

/// Enqueues `problem`; the kernel sets `nonfinite` to 1 when an output is Inf or NaN.
template <int Products, int TileM, bool TransposeB, bool Aligned>
void run(const Gemm &problem, int *nonfinite, cudaStream_t stream) {
    auto tiles = ((problem.M + TileM - 1) / TileM) * ((problem.N + tile_n - 1) / tile_n);
    multiply_kernel<Products, TileM, TransposeB, Aligned>
        <<<static_cast<unsigned>(tiles), threads, 0, stream>>>(problem, nonfinite);
    auto status = cudaGetLastError();
    if (status != cudaSuccess) {
        throw std::runtime_error(
            "The kernel of " + std::to_string(Products) + " BF16 products failed: " +
            cudaGetErrorString(status) + " for M = " + std::to_string(problem.M) +
            ", N = " + std::to_string(problem.N) + ", K = " + std::to_string(problem.K) + "."
        );
    }
}

template <int Products, bool TransposeB>
void run_layout(Kernel kernel, const Gemm &problem, int *nonfinite, cudaStream_t stream) {
    switch (kernel) {
    case Kernel::mma_bf16x6_64x64_unaligned:
    case Kernel::mma_bf16x9_64x64_unaligned:
        return run<Products, 64, TransposeB, false>(problem, nonfinite, stream);
    case Kernel::mma_bf16x6_128x64:
    case Kernel::mma_bf16x9_128x64:
        return run<Products, 128, TransposeB, true>(problem, nonfinite, stream);
    case Kernel::mma_bf16x6_64x64:
    case Kernel::mma_bf16x9_64x64:
        return run<Products, 64, TransposeB, true>(problem, nonfinite, stream);
    default:
        throw std::logic_error(to_string(kernel) + " is no kernel of BF16 by mma.sync.");
    }
}

} // namespace metatomic_tc::mma_bf16
