#include "all_rows.hpp"

#include "product/cuda_status.hpp"

namespace metatomic_tc::pet {

namespace {

/// Warps of a block. One where every second row is skipped, whose warp would wait for the others.
template <class Rows> constexpr int warps = 8;
template <class T> constexpr int warps<ReversedPairNorm<T>> = 1;
template <class T> constexpr int warps<ReversedPairNormBackward<T>> = 1;

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
    check(cudaGetLastError(), "a row operation of PET");
}

#define INSTANTIATE(...) template void launch_rows(const __VA_ARGS__ &, int64_t, void *);
METATOMIC_TC_FOR_ALL_ROWS(INSTANTIATE)

} // namespace metatomic_tc::pet
