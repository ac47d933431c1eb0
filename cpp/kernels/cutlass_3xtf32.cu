#include "cutlass_3xtf32.hpp"

#include "cutlass_3xtf32_kernel.cuh"
#include "nonfinite.hpp"

namespace metatomic_tc::cutlass_3xtf32 {

namespace {

/// Vector loads of four floats need 16-byte addresses in every row of every operand.
bool is_aligned(const Gemm &problem) {
    auto aligned = [](const float *pointer) {
        return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    };
    return problem.K % 4 == 0 && problem.N % 4 == 0 && problem.lda % 4 == 0 &&
           problem.ldb % 4 == 0 && problem.ldc % 4 == 0 && aligned(problem.A) &&
           aligned(problem.B) && aligned(problem.C) && aligned(problem.bias);
}

template <typename LayoutB>
void run_layout(
    Implementation implementation, const Gemm &problem, int *nonfinite, cudaStream_t stream
) {
    if (!is_aligned(problem)) {
        run<Threadblock64x64SlicedK, Warp32x32, 4, 1, LayoutB>(problem, nonfinite, stream);
    } else if (implementation == Implementation::cutlass_3xtf32_128x64) {
        run<Threadblock128x64, Warp64x32, 3, 4, LayoutB>(problem, nonfinite, stream);
    } else if (implementation == Implementation::cutlass_3xtf32_128x64_sliced_k) {
        run<Threadblock128x64SlicedK, Warp64x32, 3, 4, LayoutB>(problem, nonfinite, stream);
    } else {
        run<Threadblock64x64SlicedK, Warp32x32, 4, 4, LayoutB>(problem, nonfinite, stream);
    }
}

} // namespace

void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream) {
    auto cuda_stream = static_cast<cudaStream_t>(stream);
    auto *nonfinite = static_cast<int *>(workspace);
    nonfinite::clear(nonfinite, cuda_stream);
    if (problem.transpose_b) {
        run_layout<Transposed>(implementation, problem, nonfinite, cuda_stream);
    } else {
        run_layout<Plain>(implementation, problem, nonfinite, cuda_stream);
    }
    nonfinite::repair(problem, nonfinite, cuda_stream);
}

} // namespace metatomic_tc::cutlass_3xtf32
