#pragma once

#include <cuda_runtime_api.h>

#include "metatomic_tc/gemm.hpp"

namespace metatomic_tc::mma_bf16 {

/// `problem` in bf16x6 or bf16x9 by `mma.sync` (compute capability 8.0 to 9.0 and 12.x), with the
/// tile of `implementation` and a workspace of `nonfinite::workspace_size`.
void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream);

/// The same without the repair: sets `nonfinite` to 1 when an output is Inf or NaN.
template <int Products, bool TransposeB>
void run_layout(bool large_tile, const Gemm &problem, int *nonfinite, cudaStream_t stream);

} // namespace metatomic_tc::mma_bf16
