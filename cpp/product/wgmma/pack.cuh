#pragma once

// The weight as the kernels of compute capability 9.0a read it: for each tile of N and each step of
// K the slices as they lie in shared memory, one block of bytes after the other.
#include "epilogue.cuh"
#include "slices.cuh"
#include "work.cuh"

namespace metatomic_tc::wgmma {

/// Row `row` of the weight, as [N,K], and element `k` of it.
__device__ inline float weight_element(const Gemm &problem, int64_t row, int64_t k) {
    return __ldg(
        problem.transpose_b ? problem.B + row * problem.ldb + k : problem.B + k * problem.ldb + row
    );
}

/// Packs the weight: blocks (i, j) of 256 threads have the group `i` of 16 rows of the packed
/// weight and a part of K. Where the mode scales the weight, writes the inverse scale of each row.
/// Also sets `finished_parts` to 0.
template <typename Mode, int TileN>
__global__ void pack_kernel(
    Gemm problem,
    int steps,
    unsigned char *packed,
    float *inverses,
    unsigned *finished_parts,
    int parts
) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::next_kernel_start();
    constexpr auto groups = TileN / 16, elements = step_k / Mode::pieces;
    auto tile = static_cast<int>(blockIdx.x) / groups,
         group = static_cast<int>(blockIdx.x) % groups;
    auto thread = static_cast<int>(threadIdx.x);
    // the 16 rows of the group are 16 rows of the weight in another order
    auto first_row = first_column<TileN>(problem.activation, problem.N, tile, group, 0);
    auto end = last_column(problem.activation, problem.N, group);

    __shared__ float scales[16];
    if constexpr (Mode::scaled) {
        // neighbouring threads read neighbouring elements in both layouts
        auto lane = thread % 32, warp = thread / 32;
        __shared__ float largest[16][16];
        if (problem.transpose_b) {
            for (int i = warp; i < 16; i += 8) {
                auto value = 0.0f;
                if (first_row + i < end) {
                    for (int64_t k = lane; k < problem.K; k += 32) {
                        value = fmaxf(value, fabsf(weight_element(problem, first_row + i, k)));
                    }
                }
                for (int offset = 16; offset > 0; offset /= 2) {
                    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
                }
                if (lane < 16) {
                    largest[lane][i] = value;
                }
            }
        } else {
            auto i = thread % 16;
            auto value = 0.0f;
            if (first_row + i < end) {
                for (int64_t k = thread / 16; k < problem.K; k += 16) {
                    value = fmaxf(value, fabsf(weight_element(problem, first_row + i, k)));
                }
            }
            largest[thread / 16][i] = value;
        }
        __syncthreads();
        if (thread < 16) {
            auto value = 0.0f;
            for (int i = 0; i < 16; i++) {
                value = fmaxf(value, largest[i][thread]);
            }
            scales[thread] = Mode::scale(value);
            if (blockIdx.y == 0 && first_row + thread < end) {
                inverses[first_row + thread] = Mode::inverse_of(scales[thread]);
            }
        }
        __syncthreads();
    }

    auto first_step = static_cast<int>(blockIdx.y) * steps / static_cast<int>(gridDim.y);
    auto last_step = (static_cast<int>(blockIdx.y) + 1) * steps / static_cast<int>(gridDim.y);
    auto per_step = 16 * Mode::pieces;
    for (int i = thread; i < (last_step - first_step) * per_step; i += 256) {
        auto step = first_step + i / per_step;
        auto within = i % per_step;
        auto row = problem.transpose_b ? within / Mode::pieces : within % 16;
        auto piece = problem.transpose_b ? within % Mode::pieces : within / 16;
        // the row of the weight whose product a thread finds at this place
        auto place = row % 8 / 2 * 4 + row / 8 * 2 + row % 2;
        float values[elements];
        for (int j = 0; j < elements; j++) {
            auto k = static_cast<int64_t>(step) * step_k + Mode::weight_column(piece, j);
            auto exists = first_row + place < end && k < problem.K;
            values[j] = exists ? weight_element(problem, first_row + place, k) : 0.0f;
            if constexpr (Mode::scaled) {
                values[j] *= scales[place];
            }
        }
        uint4 slices[Mode::slice_count];
        Mode::pack(values, slices);
        auto *block =
            packed + (static_cast<int64_t>(tile) * steps + step) * TileN * Mode::weight_row_bytes;
        for (int slice = 0; slice < Mode::slice_count; slice++) {
            auto offset = Mode::template offset<TileN>(slice, 16 * group + row, piece);
            *reinterpret_cast<uint4 *>(block + offset) = slices[slice];
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = thread; i < parts; i += 256) {
            finished_parts[i] = 0;
        }
    }
#else
    // the host does not launch it
    __trap();
#endif
}

} // namespace metatomic_tc::wgmma
