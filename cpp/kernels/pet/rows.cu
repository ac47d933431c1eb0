#include "all_rows.hpp"

#include "../cuda_status.hpp"

namespace metatomic_tc::pet {

namespace {

constexpr int warps = 8;

template <class Rows>
__global__ void __launch_bounds__(32 * warps) kernel(Rows rows, int64_t count) {
    auto row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (row < count) {
        rows(row, Warp());
    }
}

} // namespace

template <class Rows> void launch_rows(const Rows &rows, int64_t count, void *stream) {
    if (count == 0) {
        return;
    }
    auto blocks = static_cast<unsigned>((count + warps - 1) / warps);
    kernel<<<blocks, 32 * warps, 0, static_cast<cudaStream_t>(stream)>>>(rows, count);
    check(cudaGetLastError(), "a row operation of PET");
}

#define INSTANTIATE(...) template void launch_rows(const __VA_ARGS__ &, int64_t, void *);
METATOMIC_TC_FOR_ALL_ROWS(INSTANTIATE)

} // namespace metatomic_tc::pet
