#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metatomic_tc/modes.hpp"

namespace metatomic_tc {

/// What a linear layer runs on, as far as the dispatch table needs to know it.
struct Hardware {
    /// true for a CUDA device, false for the CPU.
    bool cuda = false;
    /// 10·major + minor, e.g. 90 for an H200; 0 on the CPU.
    int compute_capability = 0;
    /// CUDA version of cuBLAS in this process, 1000·major + 10·minor, e.g. 13000; 0 on the CPU.
    int cuda_version = 0;
    /// e.g. "NVIDIA H200", or "CPU".
    std::string name = "CPU";
    /// 32 hexadecimal digits, the same for the same GPU in every process; "" on the CPU.
    std::string uuid;

    /// "CPU", or e.g. "NVIDIA H200 (compute capability 9.0, CUDA 13.0)".
    std::string description() const;
};

/// The code that computes a product.
enum class Implementation {
    /// PyTorch's FP32 on the CPU.
    cpu_fp32,
    /// The mode's slices and products on the CPU, each product by FP32 BLAS.
    cpu_emulated,
    /// cuBLASLt, CUBLAS_COMPUTE_32F.
    cublas_fp32,
    /// cuBLASLt, CUBLAS_COMPUTE_32F_FAST_TF32.
    cublas_tf32,
    /// cuBLASLt, CUBLAS_COMPUTE_32F_EMULATED_16BFX9, strategy performant.
    cublas_bf16x9_performant,
    /// cuBLASLt, CUBLAS_COMPUTE_32F_EMULATED_16BFX9, strategy eager.
    cublas_bf16x9_eager,
    /// CUTLASS OpMultiplyAddFastF32, threadblock tile 128 x 64 x 16.
    cutlass_3xtf32_128x64,
    /// CUTLASS OpMultiplyAddFastF32, threadblock tile 128 x 64 x 32, K sliced between warps.
    cutlass_3xtf32_128x64_sliced_k,
    /// CUTLASS OpMultiplyAddFastF32, threadblock tile 64 x 64 x 32, K sliced between warps.
    cutlass_3xtf32_64x64_sliced_k,
    /// Own kernels for compute capability 9.0a, one for each mode.
    wgmma_tf32x3,
    wgmma_fp16x3,
    wgmma_bf16x6,
    wgmma_bf16x9,
    /// Three BF16 slices by `mma.sync`, the six largest products, threadblock tile 128 x 64.
    mma_bf16x6_128x64,
    /// Three BF16 slices by `mma.sync`, the six largest products, threadblock tile 64 x 64.
    mma_bf16x6_64x64,
    /// Three BF16 slices by `mma.sync`, all nine products, threadblock tile 128 x 64.
    mma_bf16x9_128x64,
    /// Three BF16 slices by `mma.sync`, all nine products, threadblock tile 64 x 64.
    mma_bf16x9_64x64,
};

std::string to_string(Implementation implementation);

/// The implementation called `name`.
/// @throws std::invalid_argument naming `name`.
Implementation parse_implementation(const std::string &name);

/// One row of the dispatch table: the first row that fits decides.
struct DispatchRule {
    Mode mode;
    bool cuda;
    /// Compute capabilities the row covers, both ends included.
    int min_compute_capability;
    int max_compute_capability;
    /// Oldest CUDA version, as in `Hardware`.
    int min_cuda_version;
    /// Smallest number of 128 x 64 output tiles.
    int64_t min_tiles;
    /// Smallest K.
    int64_t min_k;
    Implementation implementation;
};

const std::vector<DispatchRule> &dispatch_table();

/// Layers with fewer input or output features than this stay in FP32 in every mode: there is too
/// little arithmetic to gain from (in PET: 4 -> d, and the last layers d -> 1, 3 or 9).
constexpr int64_t minimum_features = 16;

/// true when a layer with `in_features` and `out_features` stays in FP32 whatever the mode.
bool stays_fp32(int64_t in_features, int64_t out_features);

/// Whether the attention of PET in FP32 has its products on Tensor Cores, as three TF32 products
/// each: in the FP32-level modes but bf16x9, for heads of 16 or 32 columns.
bool attention_on_tensor_cores(Mode mode, const Hardware &hardware, int64_t head_size);

/// The implementation of C[M,N] = A[M,K]·B in `mode` on `hardware`. Never falls back: where no row
/// of the table fits, the error names the mode, the hardware and the modes that would work.
/// @throws std::runtime_error
Implementation
select_implementation(Mode mode, const Hardware &hardware, int64_t M, int64_t N, int64_t K);

/// The modes `select_implementation` accepts on `hardware`.
std::vector<Mode> supported_modes(const Hardware &hardware);

/// The mode to use when `mode` was asked for: `mode` itself where `hardware` supports it, else
/// `fp32` if `fallback` is true.
/// @throws std::runtime_error when `hardware` does not support `mode` and `fallback` is false.
Mode resolve_mode(Mode mode, const Hardware &hardware, bool fallback);

} // namespace metatomic_tc
