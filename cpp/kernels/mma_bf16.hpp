#pragma once

#include "metatomic_tc/gemm.hpp"

namespace metatomic_tc::mma_bf16 {

/// Device memory for the flag that says whether an output is Inf or NaN.
constexpr std::size_t workspace_size = 256;

/// `problem` in bf16x6 or bf16x9 by `mma.sync` (compute capability 8.0 and newer), with the tile of
/// `implementation`.
void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream);

} // namespace metatomic_tc::mma_bf16
