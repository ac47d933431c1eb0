#include "nonfinite.hpp"

#include <algorithm>

#include "cuda_status.hpp"
#include "fp32_element.cuh"

namespace metatomic_tc::nonfinite {

namespace {

__global__ void repair_kernel(Gemm problem, const int *flag) {
    if (flag != nullptr && *flag == 0) {
        return;
    }
    auto size = problem.M * problem.N;
    auto step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (auto i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
         i += step) {
        auto row = i / problem.N;
        auto column = i % problem.N;
        auto &output = problem.C[row * problem.ldc + column];
        if (!isfinite(output)) {
            output = fp32_element(problem, row, column);
        }
    }
}

} // namespace

void clear(int *flag, cudaStream_t stream) {
    check(cudaMemsetAsync(flag, 0, sizeof(int), stream), "clearing the flag of non-finite outputs");
}

void repair(const Gemm &problem, const int *flag, cudaStream_t stream) {
    constexpr int threads = 256;
    auto needed = (problem.M * problem.N + threads - 1) / threads;
    auto blocks = static_cast<unsigned>(std::min<int64_t>(needed, 1024));
    repair_kernel<<<blocks, threads, 0, stream>>>(problem, flag);
    check(cudaGetLastError(), "the repair of non-finite outputs");
}

} // namespace metatomic_tc::nonfinite
