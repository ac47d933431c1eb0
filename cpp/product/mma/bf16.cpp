#include "bf16.hpp"

#include "product/nonfinite.hpp"

namespace metatomic_tc::mma_bf16 {

namespace {

template <int Products> auto *layout_of(const Gemm &problem) {
    return problem.transpose_b ? &run_layout<Products, true> : &run_layout<Products, false>;
}

} // namespace

void gemm(Kernel kernel, const Gemm &problem, void *workspace, void *stream) {
    auto six = kernel == Kernel::mma_bf16x6_128x64 || kernel == Kernel::mma_bf16x6_64x64 ||
               kernel == Kernel::mma_bf16x6_64x64_unaligned;
    nonfinite::repaired(problem, workspace, stream, [&](int *flag, cudaStream_t cuda_stream) {
        auto *run = six ? layout_of<6>(problem) : layout_of<9>(problem);
        run(kernel, problem, flag, cuda_stream);
    });
}

} // namespace metatomic_tc::mma_bf16
