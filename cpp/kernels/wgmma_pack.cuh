#pragma once

// The weight as the kernels of compute capability 9.0a read it: for each tile of N and each step of
// K the slices as they lie in shared memory, one block of bytes after the other.
#include "wgmma_kernel.cuh"

namespace metatomic_tc::wgmma {

/// Row `row` of the weight, as [N,K], and element `k` of it.
__device__ inline float weight_element(const Gemm &problem, int64_t row, int64_t k) {
    return __ldg(
        problem.transpose_b ? problem.B + row * problem.ldb + k : problem.B + k * problem.ldb + row
    );
}

/// The power of two, and its inverse, by which each row of the weight is scaled. Blocks of 32 x 16
/// threads have 32 rows each.
template <typename Mode>
__global__ void scale_kernel(Gemm problem, float *scales, float *inverses) {
    __shared__ float largest[16][33];
    auto lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
    auto first = static_cast<int64_t>(blockIdx.x) * 32;
    // neighbouring threads read neighbouring elements in both layouts
    if (problem.transpose_b) {
        for (int i = warp; i < 32; i += 16) {
            auto value = 0.0f;
            if (first + i < problem.N) {
                for (int64_t k = lane; k < problem.K; k += 32) {
                    value = fmaxf(value, fabsf(weight_element(problem, first + i, k)));
                }
            }
            for (int offset = 16; offset > 0; offset /= 2) {
                value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
            }
            largest[0][i] = value;
        }
    } else {
        auto value = 0.0f;
        if (first + lane < problem.N) {
            for (int64_t k = warp; k < problem.K; k += 16) {
                value = fmaxf(value, fabsf(weight_element(problem, first + lane, k)));
            }
        }
        largest[warp][lane] = value;
    }
    __syncthreads();
    if (warp == 0 && first + lane < problem.N) {
        auto value = largest[0][lane];
        for (int i = 1; i < 16 && !problem.transpose_b; i++) {
            value = fmaxf(value, largest[i][lane]);
        }
        auto scale = Mode::scale(value);
        scales[first + lane] = scale;
        inverses[first + lane] = Mode::inverse(scale);
    }
}

/// Packs the weight; a block has one step of K of one tile of N. Also sets `finished_parts` to 0.
template <typename Mode, int TileN>
__global__ void pack_kernel(
    Gemm problem, int steps, const float *scales, unsigned char *packed, int *finished_parts, int parts
) {
    constexpr auto elements = step_k / Mode::pieces;
    auto tile = static_cast<int>(blockIdx.y), step = static_cast<int>(blockIdx.x);
    auto *block =
        packed + (static_cast<int64_t>(tile) * steps + step) * TileN * Mode::weight_row_bytes;
    for (int i = threadIdx.x; i < TileN * Mode::pieces; i += blockDim.x) {
        // neighbouring threads read neighbouring elements in both layouts
        auto row = problem.transpose_b ? i / Mode::pieces : i % TileN;
        auto piece = problem.transpose_b ? i % Mode::pieces : i / TileN;
        // the row of the weight whose product a thread finds at this place
        auto group = row / 16, within = row % 16;
        auto t = within % 8 / 2;
        auto weight_row =
            first_column<TileN>(problem.activation, problem.N, tile, group, t) +
            within / 8 * 2 + within % 2;
        auto exists = weight_row < last_column(problem.activation, problem.N, group);
        auto scale = Mode::scaled && exists ? scales[weight_row] : 1.0f;
        float values[elements];
        for (int j = 0; j < elements; j++) {
            auto k = static_cast<int64_t>(step) * step_k + Mode::weight_column(piece, j);
            values[j] =
                exists && k < problem.K ? weight_element(problem, weight_row, k) * scale : 0.0f;
        }
        uint4 slices[Mode::slice_count];
        Mode::pack(values, slices);
        for (int slice = 0; slice < Mode::slice_count; slice++) {
            *reinterpret_cast<uint4 *>(block + Mode::template offset<TileN>(slice, row, piece)) =
                slices[slice];
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = threadIdx.x; i < parts; i += blockDim.x) {
            finished_parts[i] = 0;
        }
    }
}

} // namespace metatomic_tc::wgmma
