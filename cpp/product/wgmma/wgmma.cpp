#include "wgmma.hpp"

#include <limits>
#include <stdexcept>
#include <string>

#include "modes.hpp"
#include "product/cuda_status.hpp"

namespace metatomic_tc::wgmma {

namespace {

struct Functions {
    /// As `gemm_packing`, where the weight can be packed in advance.
    int packing;
    std::size_t (*packed_size)(const Gemm &);
    void (*pack)(const Gemm &, void *, cudaStream_t);
    std::size_t (*workspace_size)(const Gemm &, int);
    void (*launch)(const Gemm &, int, void *, cudaStream_t);
};

template <typename Mode, int TileN> Functions functions_of_tile(int packing = TileN) {
    return {
        packing,
        &packed_size<Mode, TileN>,
        &pack<Mode, TileN>,
        &workspace_size<Mode, TileN>,
        &launch<Mode, TileN>
    };
}

template <typename Mode> Functions functions(int tile_n) {
    return tile_n == 64 ? functions_of_tile<Mode, 64>() : functions_of_tile<Mode, 128>();
}

/// Whether the slices of rows stay in shared memory: where those of all K have room there, and
/// every multiprocessor has rows of its own.
bool keeps_slices(const Tiling &tiling, const Gemm &problem) {
    return tiling.tile_n == 128 && tiling.splits == 1 && problem.K <= shared_slices_k &&
           problem.M > 128 * int64_t(multiprocessors() - 1);
}

/// The kernels of an implementation for products with this K. Those in two parts cut the
/// accumulator off half as often, for a few percent of the speed: where the others would be less
/// accurate than native FP32, which is best in short sums and, as cuBLAS splits K, in long ones.
Functions functions(Implementation implementation, const Tiling &tiling, const Gemm &problem) {
#ifndef METATOMIC_TC_WGMMA
    throw std::runtime_error(
        "This build of metatomic-tc has CUDA kernels for the architectures " +
        std::string(cuda_architectures()) +
        ", but a GPU of compute capability 9.0 needs those for 90a; build it again with "
        "-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a-real, or without that option."
    );
#endif
    auto tile_n = tiling.tile_n;
    auto K = problem.K;
    switch (implementation) {
    case Implementation::wgmma_tf32x3:
        return K < 128 || K >= 1024 ? functions<Tf32x3TwoParts>(tile_n) : functions<Tf32x3>(tile_n);
    case Implementation::wgmma_fp16x3:
        // of another order of K
        return keeps_slices(tiling, problem) ? functions_of_tile<Fp16x3Shared, 128>(-128)
                                             : functions<Fp16x3>(tile_n);
    case Implementation::wgmma_bf16x6:
        return K <= 64 ? functions<Bf16x6TwoParts>(tile_n) : functions<Bf16x6>(tile_n);
    case Implementation::wgmma_bf16x9:
        return K <= 64 ? functions<Bf16x9TwoParts>(tile_n) : functions<Bf16x9>(tile_n);
    default:
        throw std::logic_error(to_string(implementation) + " does not use wgmma.");
    }
}

/// For products of up to `max_tiles` tiles of 128 x 128 and `max_steps` steps of K; the first row
/// that fits counts.
struct TilingRule {
    Implementation implementation;
    int64_t max_tiles;
    int64_t max_steps;
    int tile_n;
    int splits;
};

constexpr auto no_limit = std::numeric_limits<int64_t>::max();

constexpr TilingRule tiling_rules[] = {
#include "tilings.inc"
};

} // namespace

Tiling tiling(Implementation implementation, const Gemm &problem) {
    if (problem.tile_n != 0) {
        return {problem.tile_n, problem.splits};
    }
    auto tiles = (problem.M + 127) / 128 * ((problem.N + 127) / 128);
    auto steps = (problem.K + 31) / 32;
    for (const auto &rule : tiling_rules) {
        if (rule.implementation == implementation && tiles <= rule.max_tiles &&
            steps <= rule.max_steps) {
            return {rule.tile_n, rule.splits};
        }
    }
    throw std::logic_error("wgmma_tilings.inc has no row for " + to_string(implementation) + ".");
}

int packing(Implementation implementation, const Gemm &problem) {
    auto chosen = tiling(implementation, problem);
    auto tiles = (problem.M + 127) / 128 * ((problem.N + chosen.tile_n - 1) / chosen.tile_n);
    if (chosen.splits > 1 && tiles > most_tiles_in_parts) {
        return 0;
    }
    return functions(implementation, chosen, problem).packing;
}

/// The functions for a weight that is packed in advance.
static Functions packed_functions(Implementation implementation, const Gemm &problem) {
    if (packing(implementation, problem) == 0) {
        throw std::logic_error("A weight is to be packed in advance where gemm_packing is 0.");
    }
    return functions(implementation, tiling(implementation, problem), problem);
}

std::size_t packed_size(Implementation implementation, const Gemm &problem) {
    return packed_functions(implementation, problem).packed_size(problem);
}

void pack(Implementation implementation, const Gemm &problem, void *packed, void *stream) {
    packed_functions(implementation, problem)
        .pack(problem, packed, static_cast<cudaStream_t>(stream));
}

std::size_t workspace_size(Implementation implementation, const Gemm &problem) {
    auto chosen = tiling(implementation, problem);
    return functions(implementation, chosen, problem).workspace_size(problem, chosen.splits);
}

void gemm(Implementation implementation, const Gemm &problem, void *workspace, void *stream) {
    auto chosen = tiling(implementation, problem);
    functions(implementation, chosen, problem)
        .launch(problem, chosen.splits, workspace, static_cast<cudaStream_t>(stream));
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

int multiprocessors() {
    static auto counts = PerDevice<int>();
    return counts([](int device) {
        auto count = 0;
        check(
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
            "asking for the number of multiprocessors"
        );
        return count;
    });
}

} // namespace metatomic_tc::wgmma
