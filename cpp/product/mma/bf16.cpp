#include "bf16.hpp"

#include "product/nonfinite.hpp"

namespace metatomic_tc::mma_bf16 {

namespace {

template <int Products> auto *layout_of(const Gemm &problem) {
    return problem.transpose_b ? &run_layout<Products, true> : &run_layout<Products, false>;
}

} // namespace

void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream) {
    using I = Implementation;
    auto large_tile =
        implementation == I::mma_bf16x6_128x64 || implementation == I::mma_bf16x9_128x64;
    auto six = implementation == I::mma_bf16x6_128x64 || implementation == I::mma_bf16x6_64x64;
    nonfinite::repaired(problem, workspace, stream, [&](int *flag, cudaStream_t cuda_stream) {
        auto *run = six ? layout_of<6>(problem) : layout_of<9>(problem);
        run(large_tile, problem, flag, cuda_stream);
    });
}

} // namespace metatomic_tc::mma_bf16
