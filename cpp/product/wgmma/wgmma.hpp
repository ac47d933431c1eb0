#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "product/gemm.hpp"

/// Products in slices by `wgmma`, the product instruction of compute capability 9.0a.
namespace metatomic_tc::wgmma {

/// As `gemm_pack`.
void pack(const Plan &plan, const Gemm &problem, void *packed, void *stream);

/// As `metatomic_tc::gemm`. Without `packed` the weight is packed in each call, so that a changed
/// one is never mistaken for the old one.
void gemm(const Plan &plan, const Gemm &problem, void *packed, void *workspace, void *stream);

/// How the copy engine finds boxes of `rows_at_once` rows and 32 columns of a matrix with `M` rows
/// and `K` columns, aligned to 16 bytes.
CUtensorMap rows_map(const float *rows, int64_t M, int64_t K, int64_t ld, int rows_at_once);

} // namespace metatomic_tc::wgmma
