#pragma once

// Launches the kernels of one mode; instantiated once per file.
#include <algorithm>

#include "cuda_status.hpp"
#include "wgmma.hpp"
#include "wgmma_kernel.cuh"
#include "wgmma_pack.cuh"

namespace metatomic_tc::wgmma {

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/// Hands out the parts of a workspace, each aligned to 256 bytes.
class Allocator {
  public:
    explicit Allocator(void *memory) : memory_(static_cast<unsigned char *>(memory)) {}

    template <typename T> T *take(int64_t count) {
        auto *result = reinterpret_cast<T *>(memory_ + used_);
        used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
        return result;
    }

    int64_t used() const {
        return used_;
    }

  private:
    unsigned char *memory_;
    int64_t used_ = 0;
};

/// What a launch needs besides the operands.
template <typename Mode, int TileN> struct Workspace {
    unsigned char *weight;
    float *weight_inverses;
    float *partial_sums;
    int *finished_parts;
    float *long_sums;
    /// A with rows aligned to 16 bytes, where those of the caller are not.
    float *rows;
    int64_t tiles_m, tiles_n, steps, splits, grid, rows_ld;
    std::size_t size;

    Workspace(const Gemm &problem, int splits_asked, void *memory) {
        auto columns = problem.activation == Activation::swiglu ? problem.N / 2 : problem.N;
        auto columns_per_tile = problem.activation == Activation::swiglu ? TileN / 2 : TileN;
        tiles_m = ceil_div(problem.M, tile_m);
        tiles_n = ceil_div(columns, columns_per_tile);
        steps = ceil_div(problem.K, step_k);
        splits = std::min<int64_t>(splits_asked, steps);
        auto allocator = Allocator(memory);
        weight = allocator.take<unsigned char>(tiles_n * steps * TileN * Mode::weight_row_bytes);
        weight_inverses = allocator.take<float>(Mode::scaled ? problem.N : 0);
        auto tiles = tiles_m * tiles_n;
        partial_sums = allocator.take<float>(splits > 1 ? tiles * splits * tile_m * TileN : 0);
        finished_parts = allocator.take<int>(splits > 1 ? 2 * tiles : 0);
        grid = std::min<int64_t>(tiles * splits, multiprocessors());
        auto is_long = ceil_div(steps, splits) > long_steps;
        long_sums = allocator.take<float>(is_long ? grid * tile_m * TileN : 0);
        auto aligned = reinterpret_cast<uintptr_t>(problem.A) % 16 == 0 && problem.lda % 4 == 0;
        rows_ld = aligned ? problem.lda : ceil_div(problem.K, 4) * 4;
        rows = aligned ? nullptr : allocator.take<float>(problem.M * rows_ld);
        size = allocator.used();
    }
};

template <typename Mode, int TileN> std::size_t workspace_size(const Gemm &problem, int splits) {
    return Workspace<Mode, TileN>(problem, splits, nullptr).size;
}

template <typename Mode, int TileN>
void launch(const Gemm &problem, int splits, void *memory, cudaStream_t stream) {
    auto workspace = Workspace<Mode, TileN>(problem, splits, memory);
    auto groups = workspace.tiles_n * TileN / 16;
    // enough blocks to keep the GPU busy, of four steps or more
    auto parts_of_k =
        std::clamp<int64_t>(4 * multiprocessors() / groups, 1, ceil_div(workspace.steps, 4));
    pack_kernel<Mode, TileN><<<dim3(groups, parts_of_k), 256, 0, stream>>>(
        problem,
        workspace.steps,
        workspace.weight,
        workspace.weight_inverses,
        workspace.finished_parts,
        workspace.splits > 1 ? 2 * workspace.tiles_m * workspace.tiles_n : 0
    );
    check(cudaGetLastError(), "packing the weight");

    const auto *rows = problem.A;
    if (workspace.rows != nullptr) {
        check(
            cudaMemcpy2DAsync(
                workspace.rows,
                workspace.rows_ld * sizeof(float),
                problem.A,
                problem.lda * sizeof(float),
                problem.K * sizeof(float),
                problem.M,
                cudaMemcpyDeviceToDevice,
                stream
            ),
            "aligning the input"
        );
        rows = workspace.rows;
    }
    auto aligned = [](const void *pointer) {
        return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    };
    auto parameters = Parameters();
    parameters.problem = problem;
    parameters.weight = workspace.weight;
    parameters.weight_scales = workspace.weight_inverses;
    parameters.tiles_m = workspace.tiles_m;
    parameters.tiles_n = workspace.tiles_n;
    parameters.steps = workspace.steps;
    parameters.splits = workspace.splits;
    parameters.partial_sums = workspace.partial_sums;
    parameters.finished_parts = workspace.finished_parts;
    parameters.long_sums = workspace.long_sums;
    parameters.aligned = problem.ldc % 4 == 0 && aligned(problem.C) && aligned(problem.bias) &&
                         aligned(problem.pre_activation) &&
                         problem.N % (problem.activation == Activation::swiglu ? 8 : 4) == 0;

    auto map = rows_map(rows, problem.M, problem.K, workspace.rows_ld);
    auto *kernel = &multiply_kernel<Mode, TileN>;
    constexpr auto bytes = shared_bytes<Mode, TileN>();
    static auto has_shared_memory = PerDevice<bool>();
    has_shared_memory([&](int) {
        check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "asking for shared memory (is the library compiled for this GPU, sm_90a?)"
        );
        return true;
    });
    // starts while the weight is being packed, and waits for that itself; a copy in between would
    // not be waited for
    auto early = cudaLaunchAttribute();
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    auto config = cudaLaunchConfig_t();
    config.gridDim = dim3(workspace.grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = workspace.rows == nullptr ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, map, parameters), "the product");
}

#define METATOMIC_TC_INSTANTIATE_WGMMA(Mode)                                                       \
    template std::size_t workspace_size<Mode, 64>(const Gemm &, int);                              \
    template std::size_t workspace_size<Mode, 128>(const Gemm &, int);                             \
    template void launch<Mode, 64>(const Gemm &, int, void *, cudaStream_t);                       \
    template void launch<Mode, 128>(const Gemm &, int, void *, cudaStream_t)

} // namespace metatomic_tc::wgmma
