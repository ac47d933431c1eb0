#pragma once

#include <cuda_runtime_api.h>

#include "product/gemm.hpp"

namespace metatomic_tc::cutlass_3xtf32 {

/// `problem` in TF32x3 by CUTLASS's `OpMultiplyAddFastF32` (`mma.sync`, compute capability 8.0 and
/// newer), with the tile of `kernel` and a workspace of
/// 256 bytes.
void gemm(Kernel kernel, const Gemm &problem, void *workspace, void *stream);

/// The same without the repair: sets `nonfinite` to 1 when an output is Inf or NaN.
template <bool TransposeB>
void run_layout(Kernel kernel, const Gemm &problem, int *nonfinite, cudaStream_t stream);

} // namespace metatomic_tc::cutlass_3xtf32
