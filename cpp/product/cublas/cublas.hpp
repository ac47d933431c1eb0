#pragma once

#include <cstddef>

#include "metatomic_tc/gemm.hpp"

namespace metatomic_tc::cublas {

/// Device memory for cuBLASLt's own use: NVIDIA's recommendation for compute capability 9.0 and
/// newer, and more than enough below.
constexpr std::size_t workspace_size = 32 << 20;

/// CUDA version of the cuBLASLt in this process, 1000·major + 10·minor.
/// @throws std::runtime_error when the process has no cuBLASLt.
int cuda_version();

/// `problem` by cuBLASLt, with the compute type of `implementation`.
void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream);

} // namespace metatomic_tc::cublas
