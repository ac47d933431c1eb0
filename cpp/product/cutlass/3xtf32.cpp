#include "3xtf32.hpp"

#include "product/nonfinite.hpp"

namespace metatomic_tc::cutlass_3xtf32 {

void gemm(Kernel kernel, const Gemm &problem, void *workspace, void *stream) {
    nonfinite::repaired(problem, workspace, stream, [&](int *flag, cudaStream_t cuda_stream) {
        auto *run = problem.transpose_b ? &run_layout<true> : &run_layout<false>;
        run(kernel, problem, flag, cuda_stream);
    });
}

} // namespace metatomic_tc::cutlass_3xtf32
