#pragma once

// C = rows · weightᵀ in slices, for compute capability 9.0a. One block per multiprocessor works
// through tiles of 128 rows: a warpgroup whose first thread keeps a ring of steps of K filled, and
// two warpgroups with 64 rows each, which slice the rows in registers and multiply them by the
// packed weight. While the Tensor Cores work on one step, the next one is sliced.
//
// The Tensor Cores of Hopper cut sums off after 25 bits, so their accumulator is added to one in
// FP32 after each step of K ("promotion": Ootomo and Yokota, arXiv 2203.03341).
#include <type_traits>

#include "epilogue.cuh"
#include "slices.cuh"
#include "work.cuh"

namespace metatomic_tc::wgmma {

constexpr int threads = 384;
constexpr int rows_bytes = tile_m * step_k * 4;
constexpr int long_steps = long_k / step_k;

template <typename Mode, int TileN> constexpr int stage_bytes() {
    return rows_bytes + TileN * Mode::weight_row_bytes;
}

/// Shared memory of a block; its alignment to 1024 bytes is part of it.
template <typename Mode, int TileN> constexpr int shared_bytes() {
    return Mode::stages * stage_bytes<Mode, TileN>() + 2 * Mode::stages * 8 + 1024;
}

/// Addresses of a block's shared memory.
template <typename Mode, int TileN> struct Shared {
    using Stage = Ring<Mode::stages>;

    uint32_t base;

    __device__ explicit Shared(const unsigned char *memory)
        : base((ptx::shared_address(memory) + 1023) & ~1023u) {}

    __device__ uint32_t rows(const Stage &stage) const {
        return base + stage.index * stage_bytes<Mode, TileN>();
    }

    __device__ uint32_t weight(const Stage &stage) const {
        return rows(stage) + rows_bytes;
    }

    /// Completes when a stage has been filled.
    __device__ uint32_t full(const Stage &stage) const {
        return base + Mode::stages * stage_bytes<Mode, TileN>() + stage.index * 8;
    }

    /// Completes when all warps have done with a stage.
    __device__ uint32_t empty(const Stage &stage) const {
        return full(stage) + Mode::stages * 8;
    }
};

/// Fills the stages. After the last step comes one more, which the consumers start on but do not
/// use: so they need no condition around their products.
template <typename Mode, int TileN>
__device__ void produce(
    const Shared<Mode, TileN> &shared, const CUtensorMap *rows_map, const Parameters &parameters
) {
    auto stage = Ring<Mode::stages>();
    auto fill = [&](const Work &work, int step) {
        ptx::barrier_wait(shared.empty(stage), stage.parity ^ 1);
        auto full = shared.full(stage);
        ptx::barrier_expect(full, stage_bytes<Mode, TileN>());
        ptx::copy_box(shared.rows(stage), rows_map, step * step_k, work.tile_row * tile_m, full);
        constexpr auto bytes = TileN * Mode::weight_row_bytes;
        auto block = static_cast<int64_t>(work.tile_column) * parameters.steps + step;
        ptx::copy_bytes(shared.weight(stage), parameters.weight + block * bytes, bytes, full);
        stage.advance();
    };
    auto work = Work(parameters);
    auto last = work;
    for (; !work.done(parameters); work.next(parameters)) {
        for (int step = 0; step < work.steps; step++) {
            fill(work, work.first_step + step);
        }
        last = work;
    }
    fill(last, last.first_step);
}

/// Loads this thread's elements of two rows, `row` and `row` + 8 of the tile.
template <typename Mode, int TileN>
__device__ inline void load_rows(
    const Shared<Mode, TileN> &shared,
    const Ring<Mode::stages> &stage,
    int row,
    int lane,
    float (&values)[2][8]
) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        load_row(shared.rows(stage) + (row + 8 * i) * 128, row & 7, lane % 4, values[i]);
    }
}

/// Starts all products of a part of a step.
template <typename Mode, int TileN, int Part, int Registers>
__device__ inline void start_products(
    const Shared<Mode, TileN> &shared,
    const Ring<Mode::stages> &stage,
    const uint32_t (&fragments)[Mode::slice_count][Registers],
    float (&sums)[TileN / 2]
) {
    auto tile = static_cast<uint64_t>((shared.weight(stage) & 0x3ffff) >> 4);
    ptx::products_begin();
#pragma unroll
    for (int i = 0; i < Mode::products_in(Part); i++) {
        auto product = Mode::product(Part, i);
        const auto *a = fragments[product.rows] + 4 * product.instruction;
        auto b = tile + Mode::template descriptor<TileN>(product.weight, product.instruction);
        if (i == 0) {
            ptx::multiply<Mode::element, TileN, false>(sums, a, b);
        } else {
            ptx::multiply<Mode::element, TileN, true>(sums, a, b);
        }
    }
    ptx::products_commit();
}

template <typename Mode, int TileN>
__device__ void consume(const Shared<Mode, TileN> &shared, const Parameters &parameters) {
    constexpr int registers = 4 * step_k / Mode::instruction_k;
    // the same in all threads of a warp, and the compiler knows
    auto warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - 4, 0);
    auto lane = static_cast<int>(threadIdx.x) % 32;
    auto row = warp * 16 + lane / 4;

    // two sets, since the Tensor Cores read one while the other one is written
    uint32_t fragments[2][Mode::slice_count][registers];
    float inverses[2][2];
    float step_sums[TileN / 2], sums[TileN / 2];
#pragma unroll
    for (int i = 0; i < TileN / 2; i++) {
        step_sums[i] = ptx::opaque_zero();
        sums[i] = 0;
    }

    auto thread = static_cast<int>(threadIdx.x) - 128;
    auto *long_sums = parameters.long_sums + static_cast<int64_t>(blockIdx.x) * tile_m * TileN;

    auto work = Work(parameters), upcoming = work;
    auto remaining = work.steps, steps_in_sums = 0;
    auto stage = Ring<Mode::stages>(), next = stage;

    // adds the sums of the products that are under way with the fragments `Set`
    auto promote = [&](auto set, [[maybe_unused]] auto part) {
        constexpr int Set = decltype(set)::value;
        ptx::products_wait<0>();
#pragma unroll
        for (int i = 0; i < TileN / 2; i++) {
            ptx::pin(step_sums[i]);
        }
#pragma unroll
        for (int slice = 0; slice < Mode::slice_count; slice++) {
#pragma unroll
            for (int i = 0; i < registers; i++) {
                ptx::pin(fragments[Set][slice][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < TileN / 2; i++) {
            if constexpr (Mode::scaled) {
                auto scale = inverses[Set][i / 2 % 2] * Mode::part_scale(decltype(part)::value);
                sums[i] = fmaf(step_sums[i], scale, sums[i]);
            } else {
                sums[i] += step_sums[i];
            }
            // not after the next products, which would need a copy
            ptx::pin(sums[i]);
        }
    };
    auto start = [&](auto set, auto part, const Ring<Mode::stages> &at) {
        start_products<Mode, TileN, decltype(part)::value>(
            shared, at, fragments[decltype(set)::value], step_sums
        );
    };
    float values[2][8];
    auto load = [&] {
        ptx::barrier_wait(shared.full(next), next.parity);
        load_rows<Mode, TileN>(shared, next, row, lane, values);
    };
    auto split = [&](auto set) {
        constexpr int Set = decltype(set)::value;
        Mode::split(values[0], 0, fragments[Set], inverses[Set][0]);
        Mode::split(values[1], 1, fragments[Set], inverses[Set][1]);
    };
    constexpr auto part_0 = std::integral_constant<int, 0>();
    constexpr auto part_1 = std::integral_constant<int, Mode::parts - 1>();
    // finishes the step whose products are under way with the fragments `Set`, and starts the next
    // one, which is sliced while the products are under way
    auto advance = [&](auto set) {
        constexpr auto other = std::integral_constant<int, 1 - decltype(set)::value>();
        if constexpr (Mode::parts == 2) {
            promote(set, part_0);
            start(set, part_1, stage);
        }
        load();
        split(other);
        promote(set, part_1);
        if (lane == 0) {
            ptx::barrier_arrive(shared.empty(stage));
        }
        start(other, part_0, next);
    };
    constexpr auto set_0 = std::integral_constant<int, 0>();
    load();
    split(set_0);
    start(set_0, part_0, next);
    for (auto odd = false; !work.done(parameters); odd = !odd) {
        next.advance();
        if (odd) {
            advance(std::integral_constant<int, 1>());
        } else {
            advance(std::integral_constant<int, 0>());
        }
        stage = next;
        remaining--;
        if (remaining == work.steps - 1) {
            // early, while there is something else to do
            upcoming.next(parameters);
        }
        steps_in_sums++;
        if (steps_in_sums == long_steps && remaining > 0) {
            steps_in_sums = 0;
            if (work.steps - remaining > long_steps) {
                add_sums<TileN>(long_sums, thread, sums);
            }
            put_sums<TileN>(long_sums, thread, sums);
#pragma unroll
            for (int i = 0; i < TileN / 2; i++) {
                sums[i] = 0;
            }
        }
        if (remaining == 0) {
            if (work.steps > long_steps) {
                add_sums<TileN>(long_sums, thread, sums);
            }
            if (parameters.splits == 1 ||
                join_parts<TileN>(parameters, work, warp / 4, thread, sums)) {
                store<Mode, TileN>(parameters, work.tile_row, work.tile_column, row, lane, sums);
            }
#pragma unroll
            for (int i = 0; i < TileN / 2; i++) {
                sums[i] = 0;
            }
            work = upcoming;
            remaining = work.steps;
            steps_in_sums = 0;
        }
    }
    ptx::products_wait<0>();
}

template <typename Mode, int TileN>
__global__ void __launch_bounds__(threads, 1) multiply_kernel(
    const __grid_constant__ CUtensorMap rows_map, const __grid_constant__ Parameters parameters
) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    auto shared = Shared<Mode, TileN>(memory);
    if (threadIdx.x == 0) {
        auto stage = Ring<Mode::stages>();
        for (int i = 0; i < Mode::stages; i++) {
            ptx::barrier_init(shared.full(stage), 1);
            ptx::barrier_init(shared.empty(stage), consumer_warps);
            stage.advance();
        }
        ptx::barrier_init_fence();
    }
    __syncthreads();
    ptx::previous_kernel_wait();
    if (threadIdx.x < 128) {
        ptx::give_registers<24>();
        if (threadIdx.x == 0) {
            produce<Mode, TileN>(shared, &rows_map, parameters);
        }
    } else {
        ptx::take_registers<240>();
        consume<Mode, TileN>(shared, parameters);
    }
#else
    // the host does not launch it
    __trap();
#endif
}

} // namespace metatomic_tc::wgmma
