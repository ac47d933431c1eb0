#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "metatomic_tc/hardware.hpp"
#include "metatomic_tc/modes.hpp"

/// Which kernel computes a product, and how. All of it is decided here, once for each product: what
/// runs it, and what reports it, go by the `Plan`.
namespace metatomic_tc {

/// A product is `rows · weightᵀ` (the forward of a layer) or `rows · weight` (the gradient with
/// respect to its input).
enum class Direction { forward, input_gradient };

/// What follows a product Z = A·B + bias, element by element.
enum class Activation {
    /// Z itself.
    none,
    /// Z · sigmoid(Z).
    silu,
    /// V · sigmoid(G), where V is the left half of Z's columns and G the right half (N is even).
    swiglu,
};

/// What is compiled on its own. Tiles of M x N are part of it where the table chooses them; the
/// wgmma kernels get theirs, and parts of K, from wgmma/tilings.inc.
enum class Kernel {
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
    /// CUTLASS OpMultiplyAddFastF32 (`mma.sync`). Sliced: K is shared by the warps. Unaligned:
    /// reads
    /// and writes single numbers.
    cutlass_3xtf32_128x64,
    cutlass_3xtf32_128x64_sliced_k,
    cutlass_3xtf32_64x64_sliced_k,
    cutlass_3xtf32_64x64_sliced_k_unaligned,
    /// Three BF16 slices by `mma.sync`, the six largest products or all nine.
    mma_bf16x6_128x64,
    mma_bf16x6_64x64,
    mma_bf16x6_64x64_unaligned,
    mma_bf16x9_128x64,
    mma_bf16x9_64x64,
    mma_bf16x9_64x64_unaligned,
    /// Own kernels for compute capability 9.0a. Two parts: the accumulator of the Tensor Cores is
    /// promoted twice in each step of K. Shared slices: those of 128 rows and all K are kept.
    wgmma_tf32x3,
    wgmma_tf32x3_two_parts,
    wgmma_fp16x3,
    wgmma_fp16x3_shared_slices,
    wgmma_bf16x6,
    wgmma_bf16x6_two_parts,
    wgmma_bf16x9,
    wgmma_bf16x9_two_parts,
};

/// What launches a kernel.
enum class Family { cpu, cublas, cutlass, mma, wgmma };

/// e.g. "wgmma-fp16x3-shared-slices".
std::string to_string(Kernel kernel);

/// The kernel called `name`.
/// @throws std::invalid_argument naming `name`.
Kernel parse_kernel(const std::string &name);

Family family_of(Kernel kernel);

/// One row of the table of kernels: the first row that fits decides.
struct KernelRule {
    Mode mode;
    bool cuda;
    /// Compute capabilities the row covers, both ends included.
    int min_compute_capability;
    int max_compute_capability;
    /// Oldest CUDA version, as in `Hardware`.
    int min_cuda_version;
    /// For operands whose rows can be read and written in vectors of 16 bytes only.
    bool aligned;
    /// For products with 128 rows or a part of them for every multiprocessor only.
    bool fills_multiprocessors;
    /// Smallest number of 128 x 64 output tiles.
    int64_t min_tiles;
    /// Smallest K.
    int64_t min_k;
    Kernel kernel;
};

const std::vector<KernelRule> &kernel_table();

/// Layers with fewer input or output features than this stay in FP32 in every mode: there is too
/// little arithmetic to gain from (in PET: 4 -> d, and the last layers d -> 1, 3 or 9).
constexpr int64_t minimum_features = 16;

/// true when a layer with `in_features` and `out_features` stays in FP32 whatever the mode.
bool stays_fp32(int64_t in_features, int64_t out_features);

/// A product, as far as the choice of its kernel depends on it. A is [M,K]; the result is
/// contiguous, aligned to 16 bytes, and [M,N], or [M,N/2] where swiglu is computed with it.
struct Problem {
    Mode mode = Mode::fp32;
    int64_t M = 0;
    int64_t N = 0;
    int64_t K = 0;
    Direction direction = Direction::forward;
    Activation activation = Activation::none;
    /// Whether A, the weight and the bias (if any) begin at multiples of 16 bytes, and their rows,
    /// too.
    bool aligned_a = true;
    bool aligned_weight = true;
    bool aligned_bias = true;
};

/// How a product is computed.
struct Plan {
    Problem problem;
    Kernel kernel = Kernel::cpu_fp32;
    /// Of the wgmma kernels, whose tiles are 128 x `tile_n`: 64 or 128. 0 for others.
    int tile_n = 0;
    /// Parts that K is cut into.
    int splits = 1;
    /// The activation is computed in the pass that writes the result; else it comes after.
    bool fuses_activation = false;
    /// Thread blocks of a wgmma kernel, and the multiprocessors that they are for.
    int64_t grid = 0;
    int multiprocessors = 0;
    /// Bytes of device memory, aligned to 256, for one launch.
    std::size_t workspace_size = 0;
    /// Bytes, aligned to 256, of the weight as the kernel reads it; 0 if it is read as it is.
    std::size_t packed_size = 0;
    /// A packed weight can be used again, by one product at a time with the same kernel, `tile_n`,
    /// weight, direction and activation.
    bool keeps_packed = false;

    /// What really runs, e.g. "wgmma-tf32x3-two-parts-128x64-split-k-4".
    std::string name() const;
};

/// How `problem` is computed on `hardware`. Never falls back: where no row of the table fits, the
/// error names the mode, the hardware and the modes that would work.
/// @throws std::runtime_error
Plan plan(const Problem &problem, const Hardware &hardware);

/// The same with this kernel, whatever the table and the mode say: for benchmarks and tests.
/// @param tile_n, splits of wgmma kernels; 0: what was measured to be best
/// @throws std::invalid_argument if the kernel cannot compute the problem so
Plan plan_with(
    Kernel kernel, const Problem &problem, const Hardware &hardware, int tile_n, int splits
);

/// What computes the attention of PET.
enum class AttentionKernel {
    cpu,
    /// In the type of the data, on CUDA devices.
    cuda,
    /// FP32 data, with products on Tensor Cores as three TF32 products each.
    cuda_tf32x3,
};

/// "attention-cpu", "attention-cuda" or "attention-cuda-tf32x3".
std::string to_string(AttentionKernel kernel);

/// Where attention has its products on Tensor Cores.
struct AttentionRule {
    Mode mode;
    int min_compute_capability;
    /// Columns of a head.
    int64_t head_size;
};

const std::vector<AttentionRule> &attention_table();

/// @param head_size columns of a head
/// @param fp32 whether the data are FP32
AttentionKernel
attention_kernel(Mode mode, const Hardware &hardware, int64_t head_size, bool fp32 = true);

} // namespace metatomic_tc
