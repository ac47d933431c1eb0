#pragma once

#include <cuda_runtime_api.h>

#include "product/gemm.hpp"

namespace metatomic_tc::mma_bf16 {

/// `problem` in bf16x6 or bf16x9 by `mma.sync` (compute capability 8.0 to 9.0 and 12.x), with the
/// tile of `kernel` and a workspace of 256 bytes.
void gemm(Kernel kernel, const Gemm &problem, void *workspace, void *stream);

/// The same without the repair: sets `nonfinite` to 1 when an output is Inf or NaN.
template <int Products, bool TransposeB>
void run_layout(Kernel kernel, const Gemm &problem, int *nonfinite, cudaStream_t stream);

} // namespace metatomic_tc::mma_bf16
