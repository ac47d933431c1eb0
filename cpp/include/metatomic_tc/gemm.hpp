#pragma once

#include <cstddef>
#include <cstdint>

#include "metatomic_tc/dispatch.hpp"

namespace metatomic_tc {

/// What follows a product Z = A·B + bias, element by element.
enum class Activation {
    /// Z itself.
    none,
    /// Z · sigmoid(Z).
    silu,
    /// V · sigmoid(G), where V is the left half of Z's columns and G the right half (N is even).
    swiglu,
};

/// C = activation(Z) on a CUDA device with Z[M,N] = A[M,K]·B + bias: FP32, row-major, device
/// pointers.
struct Gemm {
    int64_t M;
    int64_t N;
    int64_t K;
    const float *A;
    /// Elements between rows of A, >= K.
    int64_t lda;
    const float *B;
    /// Elements between rows of B.
    int64_t ldb;
    /// true: B is stored [N,K] and C = A·Bᵀ (a layer's forward); false: B is stored [K,N] and
    /// C = A·B (a layer's input gradient).
    bool transpose_b;
    /// N elements, or nullptr.
    const float *bias;
    /// [M,N], or [M,N/2] with `Activation::swiglu`.
    float *C;
    /// Elements between rows of C, at least its number of columns.
    int64_t ldc;
    /// Other than `none` only for implementations of which `fuses_activation` is true.
    Activation activation = Activation::none;
    /// [M,N], N elements between rows: where to keep Z, which the gradient of an activation needs.
    /// nullptr: Z is not kept. Not used without an activation.
    float *pre_activation = nullptr;
    /// For the kernels that have several: width of their tiles and number of parts of K; 0 for the
    /// choice that was measured to be best.
    int tile_n = 0;
    int splits = 0;
    /// B as `gemm_pack` left it, which is read in its place; nullptr: `gemm` packs B where it must.
    /// Only one product at a time can use it.
    void *packed = nullptr;
};

/// true when `gemm` computes activations with this implementation, in the pass that writes C.
bool fuses_activation(Implementation implementation);

/// How the implementation packs B before the product: problems with the same B, `transpose_b`, N, K
/// and activation and the same number here can share `Gemm::packed`. 0 where B is read as it is, or
/// is to be packed by `gemm` itself.
int gemm_packing(Implementation implementation, const Gemm &problem);

/// Bytes of device memory, aligned to 256, of `Gemm::packed`.
/// @throws std::logic_error where `gemm_packing` is 0
std::size_t gemm_packed_size(Implementation implementation, const Gemm &problem);

/// Enqueues the packing of B into `packed`.
/// @throws std::logic_error where `gemm_packing` is 0
/// @throws std::runtime_error when the launch fails
void gemm_pack(Implementation implementation, const Gemm &problem, void *packed, void *stream);

/// Whether a CUDA graph captures the `stream`, so that what is enqueued is not done now.
bool is_captured(void *stream);

/// Bytes of device memory, aligned to 256, that `gemm` needs as its workspace.
std::size_t gemm_workspace_size(Implementation implementation, const Gemm &problem);

/// Enqueues the product on `stream` (a `cudaStream_t`) of the current device. Nothing is allocated
/// on the device and nothing waits, so CUDA graphs can capture the call.
///
/// Rows of A or columns of B with Inf or NaN give what FP32 gives.
/// @throws std::runtime_error when the launch fails, or when `implementation` needs CUDA and the
///         library was built without it.
/// @throws std::logic_error for an activation that `implementation` does not fuse.
void gemm(
    Implementation implementation,
    const Gemm &problem,
    void *workspace,
    std::size_t workspace_size,
    void *stream
);

/// The CUDA device number `index` as the dispatch table sees it.
/// @throws std::runtime_error when the library was built without CUDA or there is no such device.
Hardware cuda_hardware(int index);

/// Architectures the CUDA kernels were compiled for, e.g. "80 90a-real 100-real", or "" without
/// CUDA.
const char *cuda_architectures();

/// CUDA version the kernels were compiled with, 1000·major + 10·minor, or 0 without CUDA.
int cuda_toolkit_version();

} // namespace metatomic_tc
