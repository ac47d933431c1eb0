#pragma once

#include <cstddef>
#include <cstdint>

#include "product/plan.hpp"

namespace metatomic_tc {

/// The operands of C = activation(Z) on a CUDA device with Z[M,N] = A[M,K]·B + bias: FP32,
/// row-major, device pointers.
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
    /// Elements between rows of C: its number of columns.
    int64_t ldc;
    /// That of the plan where it is fused, else none.
    Activation activation = Activation::none;
    /// [M,N], N elements between rows: where to keep Z, which the gradient of an activation needs.
    /// nullptr: Z is not kept. Not used without an activation.
    float *pre_activation = nullptr;
};

/// Whether rows of `ld` elements from `data` on can be read in vectors of 16 bytes; for `Problem`.
inline bool is_aligned(const void *data, int64_t ld = 4) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld % 4 == 0;
}

/// Enqueues the packing of B into `packed`, `plan.packed_size` bytes.
/// @throws std::logic_error where that is 0
/// @throws std::runtime_error when the launch fails
void gemm_pack(const Plan &plan, const Gemm &operands, void *packed, void *stream);

/// Whether a CUDA graph captures the `stream`, so that what is enqueued is not done now.
bool is_captured(void *stream);

/// Enqueues the product on `stream` (a `cudaStream_t`) of the current device. Nothing is allocated
/// on the device and nothing waits, so CUDA graphs can capture the call.
///
/// Rows of A or columns of B with Inf or NaN give what FP32 gives.
///
/// @param packed B as `gemm_pack` left it for a plan with the same kernel, tile_n, activation,
///     direction, N and K, which is read in its place; only one product at a time can use it.
///     nullptr: B is packed where it must be, behind the workspace.
/// @param workspace aligned to 256 bytes, of `plan.workspace_size` bytes, and `plan.packed_size`
///     more without `packed`
/// @throws std::runtime_error when the launch fails, or when the kernel needs CUDA and the library
///     was built without it
/// @throws std::logic_error when the operands are not those that were planned for
void gemm(const Plan &plan, const Gemm &operands, void *packed, void *workspace, void *stream);

/// The CUDA device number `index`.
/// @throws std::runtime_error when the library was built without CUDA or there is no such device.
Hardware cuda_hardware(int index);

/// Architectures the CUDA kernels were compiled for, e.g. "80 90a-real 100-real", or "" without
/// CUDA.
const char *cuda_architectures();

/// CUDA version the kernels were compiled with, 1000·major + 10·minor, or 0 without CUDA.
int cuda_toolkit_version();

} // namespace metatomic_tc
