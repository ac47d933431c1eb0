#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "metatomic_tc/gemm.hpp"

/// Products in slices by `wgmma`, the product instruction of compute capability 9.0a.
namespace metatomic_tc::wgmma {

/// How a product is cut into the work of blocks: tiles of 128 x `tile_n`, and K into `splits`
/// parts.
struct Tiling {
    int tile_n;
    int splits;
};

/// The tiling that `gemm` uses, from the table in wgmma_tilings.inc.
Tiling tiling(Implementation implementation, const Gemm &problem);

/// As `gemm_packing`.
int packing(Implementation implementation, const Gemm &problem);

std::size_t packed_size(Implementation implementation, const Gemm &problem);

/// As `gemm_pack`.
void pack(Implementation implementation, const Gemm &problem, void *packed, void *stream);

std::size_t workspace_size(Implementation implementation, const Gemm &problem);

/// As `metatomic_tc::gemm`. Without `packed` the weight is packed in each call, so that a changed
/// one is never mistaken for the old one.
void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream);

/// How the copy engine finds boxes of `rows_at_once` rows and 32 columns of a matrix with `M` rows
/// and `K` columns, aligned to 16 bytes.
CUtensorMap rows_map(const float *rows, int64_t M, int64_t K, int64_t ld, int rows_at_once);

/// Number of multiprocessors of the current device.
int multiprocessors();

} // namespace metatomic_tc::wgmma
