#pragma once

#include <cuda_runtime_api.h>

#include "product/gemm.hpp"

namespace metatomic_tc::wgmma {

// one for each kernel, defined in slices.cuh
struct Tf32x3;
struct Tf32x3TwoParts;
struct Fp16x3;
struct Fp16x3Shared;
struct Bf16x6;
struct Bf16x6TwoParts;
struct Bf16x9;
struct Bf16x9TwoParts;

/// Enqueues the packing of the weight for products with tiles of 128 x `TileN`.
template <typename Mode, int TileN>
void pack(const Plan &plan, const Gemm &problem, void *packed, cudaStream_t stream);

/// Enqueues the product with tiles of 128 x `TileN`, after the packing of the weight if there is no
/// packed one.
template <typename Mode, int TileN>
void launch(
    const Plan &plan, const Gemm &problem, void *packed, void *workspace, cudaStream_t stream
);

} // namespace metatomic_tc::wgmma
