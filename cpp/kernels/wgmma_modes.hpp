#pragma once

#include <cuda_runtime_api.h>

#include "metatomic_tc/gemm.hpp"

namespace metatomic_tc::wgmma {

// the modes, defined in wgmma_slices.cuh
struct Tf32x3;
struct Tf32x3TwoParts;
struct Fp16x3;
struct Bf16x6;
struct Bf16x6TwoParts;
struct Bf16x9;
struct Bf16x9TwoParts;

/// Bytes that `launch` needs.
template <typename Mode, int TileN> std::size_t workspace_size(const Gemm &problem, int splits);

/// Packs the weight and enqueues the product with tiles of 128 x `TileN` and K in `splits` parts.
template <typename Mode, int TileN>
void launch(const Gemm &problem, int splits, void *workspace, cudaStream_t stream);

} // namespace metatomic_tc::wgmma
