#pragma once

// Launches the kernels; the instances are listed in cuda.cmake.
#include <algorithm>

#include "kernel.cuh"
#include "pack.cuh"
#include "product/cuda_status.hpp"
#include "shared_slices_kernel.cuh"
#include "wgmma.hpp"

namespace metatomic_tc::wgmma {

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
    static constexpr int step_k = shared_slices::double_step_k;
    static constexpr int rows_at_once = shared_slices::unit_rows;
};

/// The host's numbers for a kernel are the kernel's own.
template <typename Mode> constexpr bool has_form() {
    constexpr auto form = form_of(Mode::kernel);
    return form.step_k == KernelOf<Mode, 128>::step_k && form.scaled == Mode::scaled &&
           form.weight_row_bytes == Mode::weight_row_bytes;
}

/// The weight as the kernel reads it.
struct Packed {
    unsigned char *weight;
    float *inverses;
    /// 0 before and after a product
    unsigned *finished_parts;

    Packed(const PackedLayout &layout, void *memory) {
        auto *bytes = static_cast<unsigned char *>(memory);
        weight = bytes + layout.weight;
        inverses = reinterpret_cast<float *>(bytes + layout.inverses);
        finished_parts = reinterpret_cast<unsigned *>(bytes + layout.finished_parts);
    }
};

template <typename Mode, int TileN>
void pack(const Plan &plan, const Gemm &problem, void *memory, cudaStream_t stream) {
    static_assert(has_form<Mode>());
    auto layout = PackedLayout(plan);
    auto packed = Packed(layout, memory);
    auto extent = Extent(plan);
    auto groups = extent.tiles_n * TileN / 16, steps = extent.packed_steps;
    // enough blocks to keep the GPU busy, of four steps or more
    auto parts_of_k = std::clamp<int64_t>(4 * plan.multiprocessors / groups, 1, ceil_div(steps, 4));
    pack_kernel<Mode, TileN><<<dim3(groups, parts_of_k), 256, 0, stream>>>(
        problem, steps, packed.weight, packed.inverses, packed.finished_parts, layout.counters
    );
    check(cudaGetLastError(), "packing the weight");
}

template <typename Mode, int TileN>
void launch(
    const Plan &plan, const Gemm &problem, void *packed_before, void *memory, cudaStream_t stream
) {
    auto layout = WorkspaceLayout(plan);
    auto *bytes = static_cast<unsigned char *>(memory);
    auto *packed_memory = packed_before != nullptr ? packed_before : bytes + layout.size;
    if (packed_before == nullptr) {
        pack<Mode, TileN>(plan, problem, packed_memory, stream);
    }
    auto packed = Packed(PackedLayout(plan), packed_memory);

    const auto *rows = problem.A;
    auto rows_ld = problem.lda;
    auto copies_rows = !plan.problem.aligned_a;
    if (copies_rows) {
        rows = reinterpret_cast<float *>(bytes + layout.rows);
        rows_ld = layout.rows_ld;
        check(
            cudaMemcpy2DAsync(
                bytes + layout.rows,
                rows_ld * sizeof(float),
                problem.A,
                problem.lda * sizeof(float),
                problem.K * sizeof(float),
                problem.M,
                cudaMemcpyDeviceToDevice,
                stream
            ),
            "aligning the input"
        );
    }
    auto extent = Extent(plan);
    auto parameters = Parameters();
    parameters.problem = problem;
    parameters.weight = packed.weight;
    parameters.weight_scales = packed.inverses;
    parameters.tiles_m = extent.tiles_m;
    parameters.tiles_n = extent.tiles_n;
    parameters.steps = extent.steps;
    parameters.splits = plan.splits;
    parameters.partial_sums = reinterpret_cast<float *>(bytes + layout.partial_sums);
    parameters.finished_parts = packed.finished_parts;
    parameters.long_sums = reinterpret_cast<float *>(bytes + layout.long_sums);
    parameters.aligned = plan.problem.aligned_bias &&
                         problem.N % (problem.activation == Activation::swiglu ? 8 : 4) == 0;

    auto map = rows_map(rows, problem.M, problem.K, rows_ld, KernelOf<Mode, TileN>::rows_at_once);
    auto *kernel = KernelOf<Mode, TileN>::function;
    constexpr auto shared_bytes = KernelOf<Mode, TileN>::shared_bytes;
    static auto has_shared_memory = PerDevice<bool>();
    has_shared_memory([&](int) {
        check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
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
    config.gridDim = dim3(plan.grid);
    config.blockDim = dim3(KernelOf<Mode, TileN>::threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = copies_rows ? 0 : 1;
    check(cudaLaunchKernelEx(&config, kernel, map, parameters), "the product");
}

} // namespace metatomic_tc::wgmma
