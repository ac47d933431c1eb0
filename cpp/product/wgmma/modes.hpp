#pragma once

#include <cuda_runtime_api.h>

#include "metatomic_tc/gemm.hpp"

namespace metatomic_tc::wgmma {

// the modes, defined in wgmma_slices.cuh
struct Tf32x3;
struct Tf32x3TwoParts;
struct Fp16x3;
struct Fp16x3Shared;
struct Bf16x6;
struct Bf16x6TwoParts;
struct Bf16x9;
struct Bf16x9TwoParts;

/// The largest K of products that keep slices of rows in shared memory.
constexpr int shared_slices_k = 256;

/// Tiles of a product whose K is in parts and that can use a packed weight.
constexpr int64_t most_tiles_in_parts = 1024;

/// Bytes that `pack` fills.
template <typename Mode, int TileN> std::size_t packed_size(const Gemm &problem);

/// Enqueues the packing of the weight for products with tiles of 128 x `TileN`.
template <typename Mode, int TileN>
void pack(const Gemm &problem, void *packed, cudaStream_t stream);

/// Bytes that `launch` needs.
template <typename Mode, int TileN> std::size_t workspace_size(const Gemm &problem, int splits);

/// Enqueues the product with tiles of 128 x `TileN` and K in `splits` parts, after the packing of
/// the weight if there is no packed one.
template <typename Mode, int TileN>
void launch(const Gemm &problem, int splits, void *workspace, cudaStream_t stream);

} // namespace metatomic_tc::wgmma
