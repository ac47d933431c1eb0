#pragma once

#include "product/cuda_status.hpp"
#include "rows.hpp"

/// `launch_rows` for explicit instantiations.
namespace metatomic_tc::rows {

/// Warps of a block.
template <class Rows> constexpr int warps = 8;

namespace {

template <class Rows>
__global__ void __launch_bounds__(32 * warps<Rows>) kernel(Rows rows, int64_t count) {
    auto row = static_cast<int64_t>(blockIdx.x) * warps<Rows> + threadIdx.x / 32;
    if (row < count) {
        rows(row, Warp());
    }
}

} // namespace

template <class Rows> void launch_rows(const Rows &rows, int64_t count, void *stream) {
    if (count == 0) {
        return;
    }
    constexpr int block = warps<Rows>;
    auto blocks = static_cast<unsigned>((count + block - 1) / block);
    kernel<<<blocks, 32 * block, 0, static_cast<cudaStream_t>(stream)>>>(rows, count);
    check(cudaGetLastError(), "a row operation");
}

} // namespace metatomic_tc::rows
