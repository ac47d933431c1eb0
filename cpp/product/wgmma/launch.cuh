#pragma once

// Launches the kernels of one mode; instantiated once per file.
#include <algorithm>

#include "kernel.cuh"
#include "modes.hpp"
#include "pack.cuh"
#include "product/cuda_status.hpp"
#include "shared_slices_kernel.cuh"
#include "wgmma.hpp"

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

/// Which kernel a mode has.
template <typename Mode, int TileN> struct KernelOf {
    static constexpr auto *function = &multiply_kernel<Mode, TileN>;
    static constexpr int shared_bytes = wgmma::shared_bytes<Mode, TileN>();
    static constexpr int threads = wgmma::threads;
    static constexpr int step_k = wgmma::step_k;
    static constexpr int rows_at_once = tile_m;
};

template <int TileN> struct KernelOf<Fp16x3Shared, TileN> {
    static constexpr auto *function = &shared_slices::multiply_kernel<Fp16x3Shared, TileN>;
    static constexpr int shared_bytes = shared_slices::Shared<TileN>::bytes;
    static constexpr int threads = shared_slices::threads;
    static constexpr int step_k = shared_slices::step_k;
    static constexpr int rows_at_once = shared_slices::unit_rows;
};

/// How many tiles and steps a product has.
template <typename Mode, int TileN> struct Extent {
    static constexpr int step_k = KernelOf<Mode, TileN>::step_k;
    /// Steps of the packed weight in one of the product.
    static constexpr int packed_steps = step_k / wgmma::step_k;
    int64_t tiles_m, tiles_n, steps, splits;

    explicit Extent(const Gemm &problem, int splits_asked = 1)
        : tiles_m(ceil_div(problem.M, tile_m)), steps(ceil_div(problem.K, step_k)),
          splits(std::min<int64_t>(splits_asked, steps)) {
        auto pairs = problem.activation == Activation::swiglu;
        tiles_n = ceil_div(pairs ? problem.N / 2 : problem.N, pairs ? TileN / 2 : TileN);
    }

    int64_t tiles() const {
        return tiles_m * tiles_n;
    }
};

/// The weight as the kernel reads it.
template <typename Mode, int TileN> struct Packed {
    unsigned char *weight;
    float *inverses;
    int64_t counters;
    /// 0 before and after a product
    unsigned *finished_parts;

    Packed(const Gemm &problem, int64_t counters, Allocator &allocator) : counters(counters) {
        auto extent = Extent<Mode, TileN>(problem);
        auto rows = extent.tiles_n * extent.steps * extent.packed_steps * TileN;
        weight = allocator.take<unsigned char>(rows * Mode::weight_row_bytes);
        inverses = allocator.take<float>(Mode::scaled ? problem.N : 0);
        finished_parts = allocator.take<unsigned>(counters);
    }

    /// Where `gemm_pack` puts it.
    static Packed of(const Gemm &problem, void *memory) {
        auto allocator = Allocator(memory);
        return Packed(problem, 2 * most_tiles_in_parts, allocator);
    }

    void fill(const Gemm &problem, cudaStream_t stream) const {
        auto extent = Extent<Mode, TileN>(problem);
        auto groups = extent.tiles_n * TileN / 16, steps = extent.steps * extent.packed_steps;
        // enough blocks to keep the GPU busy, of four steps or more
        auto parts_of_k =
            std::clamp<int64_t>(4 * multiprocessors() / groups, 1, ceil_div(steps, 4));
        pack_kernel<Mode, TileN><<<dim3(groups, parts_of_k), 256, 0, stream>>>(
            problem, steps, weight, inverses, finished_parts, counters
        );
        check(cudaGetLastError(), "packing the weight");
    }
};

template <typename Mode, int TileN> std::size_t packed_size(const Gemm &problem) {
    auto allocator = Allocator(nullptr);
    Packed<Mode, TileN>(problem, 2 * most_tiles_in_parts, allocator);
    return allocator.used();
}

template <typename Mode, int TileN>
void pack(const Gemm &problem, void *memory, cudaStream_t stream) {
    Packed<Mode, TileN>::of(problem, memory).fill(problem, stream);
}

/// What a launch needs besides the operands.
template <typename Mode, int TileN> struct Workspace {
    Extent<Mode, TileN> extent;
    Allocator allocator;
    Packed<Mode, TileN> packed;
    float *partial_sums;
    float *long_sums;
    /// A with rows aligned to 16 bytes, where those of the caller are not.
    float *rows;
    int64_t grid, rows_ld;

    Workspace(const Gemm &problem, int splits_asked, void *memory)
        : extent(problem, splits_asked), allocator(memory), packed(packed_of(problem)) {
        auto tiles = extent.tiles(), splits = extent.splits;
        partial_sums = allocator.take<float>(splits > 1 ? tiles * splits * tile_m * TileN : 0);
        grid = std::min<int64_t>(tiles * splits, multiprocessors());
        auto is_long = ceil_div(extent.steps, splits) * extent.step_k > long_k;
        long_sums = allocator.take<float>(is_long ? grid * tile_m * TileN : 0);
        auto aligned = reinterpret_cast<uintptr_t>(problem.A) % 16 == 0 && problem.lda % 4 == 0;
        rows_ld = aligned ? problem.lda : ceil_div(problem.K, 4) * 4;
        rows = aligned ? nullptr : allocator.take<float>(problem.M * rows_ld);
    }

  private:
    Packed<Mode, TileN> packed_of(const Gemm &problem) {
        if (problem.packed != nullptr) {
            return Packed<Mode, TileN>::of(problem, problem.packed);
        }
        return {problem, extent.splits > 1 ? 2 * extent.tiles() : 0, allocator};
    }
};

template <typename Mode, int TileN> std::size_t workspace_size(const Gemm &problem, int splits) {
    return Workspace<Mode, TileN>(problem, splits, nullptr).allocator.used();
}

template <typename Mode, int TileN>
void launch(const Gemm &problem, int splits, void *memory, cudaStream_t stream) {
    auto workspace = Workspace<Mode, TileN>(problem, splits, memory);
    if (problem.packed == nullptr) {
        workspace.packed.fill(problem, stream);
    }

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
    parameters.weight = workspace.packed.weight;
    parameters.weight_scales = workspace.packed.inverses;
    parameters.tiles_m = workspace.extent.tiles_m;
    parameters.tiles_n = workspace.extent.tiles_n;
    parameters.steps = workspace.extent.steps;
    parameters.splits = workspace.extent.splits;
    parameters.partial_sums = workspace.partial_sums;
    parameters.finished_parts = workspace.packed.finished_parts;
    parameters.long_sums = workspace.long_sums;
    parameters.aligned = problem.ldc % 4 == 0 && aligned(problem.C) && aligned(problem.bias) &&
                         aligned(problem.pre_activation) &&
                         problem.N % (problem.activation == Activation::swiglu ? 8 : 4) == 0;

    auto map = rows_map(
        rows, problem.M, problem.K, workspace.rows_ld, KernelOf<Mode, TileN>::rows_at_once
    );
    auto *kernel = KernelOf<Mode, TileN>::function;
    constexpr auto bytes = KernelOf<Mode, TileN>::shared_bytes;
    static auto has_shared_memory = PerDevice<bool>();
    has_shared_memory([&](int) {
        check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "asking for shared memory (is the library compiled for this GPU, sm_90a?)"
        );
        return true;
    });
    // starts while the weight is being packed, or the rows are computed, and waits for that itself;
    // a copy in between would not be waited for
    auto early = cudaLaunchAttribute();
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    auto config = cudaLaunchConfig_t();
    config.gridDim = dim3(workspace.grid);
    config.blockDim = dim3(KernelOf<Mode, TileN>::threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = workspace.rows == nullptr ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, map, parameters), "the product");
}

#define METATOMIC_TC_INSTANTIATE_WGMMA_TILE(Mode, TileN)                                           \
    template std::size_t packed_size<Mode, TileN>(const Gemm &);                                   \
    template void pack<Mode, TileN>(const Gemm &, void *, cudaStream_t);                           \
    template std::size_t workspace_size<Mode, TileN>(const Gemm &, int);                           \
    template void launch<Mode, TileN>(const Gemm &, int, void *, cudaStream_t)

#define METATOMIC_TC_INSTANTIATE_WGMMA(Mode)                                                       \
    METATOMIC_TC_INSTANTIATE_WGMMA_TILE(Mode, 64);                                                 \
    METATOMIC_TC_INSTANTIATE_WGMMA_TILE(Mode, 128)

} // namespace metatomic_tc::wgmma
