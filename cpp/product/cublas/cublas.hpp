#pragma once

#include "product/gemm.hpp"

namespace metatomic_tc::cublas {

/// CUDA version of the cuBLASLt in this process, 1000·major + 10·minor.
/// @throws std::runtime_error when the process has no cuBLASLt.
int cuda_version();

/// `problem` by cuBLASLt, with the compute type of the plan's kernel. Outputs of BF16x9 that are
/// Inf or NaN are computed again in FP32.
void gemm(const Plan &plan, const Gemm &problem, void *workspace, void *stream);

} // namespace metatomic_tc::cublas
