#include "wgmma.hpp"

#include <stdexcept>
#include <string>

#include "layout.hpp"

namespace metatomic_tc::wgmma {

/// Of launch.cuh, compiled for the kernels in kernels.inc: enqueues the packing of the weight for
/// products with tiles of 128 x `TileN`.
template <typename Mode, int TileN>
void pack(const Plan &plan, const Gemm &problem, void *packed, cudaStream_t stream);

/// Enqueues such a product, after the packing of the weight if there is no packed one.
template <typename Mode, int TileN>
void launch(
    const Plan &plan, const Gemm &problem, void *packed, void *workspace, cudaStream_t stream
);

#define WGMMA_KERNEL(kernel, mode, ...) struct mode;
#include "kernels.inc"
#undef WGMMA_KERNEL

namespace {

struct Functions {
    void (*pack)(const Plan &, const Gemm &, void *, cudaStream_t);
    void (*launch)(const Plan &, const Gemm &, void *, void *, cudaStream_t);
};

template <typename Mode, int TileN> Functions functions_of_tile() {
    return {&pack<Mode, TileN>, &launch<Mode, TileN>};
}

template <typename Mode, bool HasNarrowTiles> Functions functions_of(const Plan &plan) {
    if constexpr (HasNarrowTiles) {
        if (plan.tile_n == 64) {
            return functions_of_tile<Mode, 64>();
        }
    }
    return functions_of_tile<Mode, 128>();
}

/// What was compiled for the kernel and the tile of `plan`.
Functions functions(const Plan &plan) {
#ifndef METATOMIC_TC_WGMMA
    throw std::runtime_error(
        "This build of metatomic-tc has CUDA kernels for the architectures " +
        std::string(cuda_architectures()) +
        ", but a GPU of compute capability 9.0 needs those for 90a; build it again with "
        "-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a-real, or without that option."
    );
#endif
    switch (plan.kernel) {
#define WGMMA_KERNEL(kernel, mode, tilings, k, row_bytes, scaled, narrow)                          \
    case Kernel::kernel:                                                                           \
        return functions_of<mode, narrow>(plan);
#include "kernels.inc"
#undef WGMMA_KERNEL
    default:
        throw std::logic_error(to_string(plan.kernel) + " does not use wgmma.");
    }
}

} // namespace

void pack(const Plan &plan, const Gemm &problem, void *packed, void *stream) {
    functions(plan).pack(plan, problem, packed, static_cast<cudaStream_t>(stream));
}

void gemm(const Plan &plan, const Gemm &problem, void *packed, void *workspace, void *stream) {
    functions(plan).launch(plan, problem, packed, workspace, static_cast<cudaStream_t>(stream));
}

CUtensorMap rows_map(const float *rows, int64_t M, int64_t K, int64_t ld, int rows_at_once) {
    // the driver is not linked: the library loads on machines without a GPU too
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const auto encode = [] {
        void *symbol = nullptr;
        auto found = cudaDriverEntryPointQueryResult();
        auto status = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found
        );
        if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
            throw std::runtime_error(
                "The CUDA driver here has no cuTensorMapEncodeTiled, which the kernels for compute "
                "capability 9.0 need; update the driver to one for CUDA 12 or newer."
            );
        }
        return reinterpret_cast<Encode>(symbol);
    }();
    auto map = CUtensorMap();
    cuuint64_t sizes[] = {static_cast<cuuint64_t>(K), static_cast<cuuint64_t>(M)};
    cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * sizeof(float)};
    cuuint32_t box[] = {32, static_cast<cuuint32_t>(rows_at_once)};
    cuuint32_t element_strides[] = {1, 1};
    // the type with a TF32 in its name would round the elements to TF32
    auto status = encode(
        &map,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        2,
        const_cast<float *>(rows),
        sizes,
        strides,
        box,
        element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    );
    if (status != CUDA_SUCCESS) {
        throw std::runtime_error(
            "CUDA failed with code " + std::to_string(status) +
            " in describing an input of shape [" + std::to_string(M) + ", " + std::to_string(K) +
            "] and leading dimension " + std::to_string(ld) + " to the copy engine."
        );
    }
    return map;
}

} // namespace metatomic_tc::wgmma
