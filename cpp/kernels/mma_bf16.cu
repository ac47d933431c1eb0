#include "mma_bf16.hpp"

#include "mma_bf16_kernel.cuh"
#include "nonfinite.hpp"

namespace metatomic_tc::mma_bf16 {

namespace {

/// Vector loads of four floats and stores of two need every row of the operands to begin at
/// multiples of 16 and 8 bytes.
bool is_aligned(const Gemm &problem) {
    auto aligned = [](const float *pointer, uintptr_t bytes) {
        return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
    };
    return problem.K % 4 == 0 && problem.N % 4 == 0 && problem.lda % 4 == 0 &&
           problem.ldb % 4 == 0 && problem.ldc % 2 == 0 && aligned(problem.A, 16) &&
           aligned(problem.B, 16) && aligned(problem.C, 8);
}

template <int Products, bool TransposeB>
void run_tile(bool large_tile, const Gemm &problem, int *nonfinite, cudaStream_t stream) {
    if (!is_aligned(problem)) {
        run<Products, 64, TransposeB, false>(problem, nonfinite, stream);
    } else if (large_tile) {
        run<Products, 128, TransposeB, true>(problem, nonfinite, stream);
    } else {
        run<Products, 64, TransposeB, true>(problem, nonfinite, stream);
    }
}

template <int Products>
void run_layout(bool large_tile, const Gemm &problem, int *nonfinite, cudaStream_t stream) {
    if (problem.transpose_b) {
        run_tile<Products, true>(large_tile, problem, nonfinite, stream);
    } else {
        run_tile<Products, false>(large_tile, problem, nonfinite, stream);
    }
}

} // namespace

void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream) {
    auto cuda_stream = static_cast<cudaStream_t>(stream);
    auto *nonfinite = static_cast<int *>(workspace);
    nonfinite::clear(nonfinite, cuda_stream);
    if (implementation == Implementation::mma_bf16x6_128x64 ||
        implementation == Implementation::mma_bf16x6_64x64) {
        auto large_tile = implementation == Implementation::mma_bf16x6_128x64;
        run_layout<6>(large_tile, problem, nonfinite, cuda_stream);
    } else {
        auto large_tile = implementation == Implementation::mma_bf16x9_128x64;
        run_layout<9>(large_tile, problem, nonfinite, cuda_stream);
    }
    nonfinite::repair(problem, nonfinite, cuda_stream);
}

} // namespace metatomic_tc::mma_bf16
