#pragma once

// C = rows · weightᵀ in two slices of 16 bits, for compute capability 9.0a, with K so small that
// the slices of 128 rows fit into shared memory. One block per multiprocessor works through tiles
// next to each other, so that rows are sliced once for all their tiles: a thread that keeps a ring
// of the weight filled, seven warps that slice the rows into another ring, and two warpgroups with
// 64 rows each, which multiply. A warpgroup has one accumulator for hi·hi and one for the products
// with a low slice: while the Tensor Cores fill one, the other is added to the sums in FP32.
#include "epilogue.cuh"
#include "slices.cuh"
#include "work.cuh"

namespace metatomic_tc::wgmma::shared_slices {

constexpr int threads = 512;
constexpr int slicing_warps = 7;
/// A step is two halves of 32 elements of K, each with its own scales.
constexpr int halves = 2;
constexpr int double_step_k = halves * wgmma::step_k;
/// Steps of sliced rows that there is room for.
constexpr int slots = shared_slices_k / double_step_k;
/// Bytes of a row's two slices in half a step.
constexpr int row_bytes = 128;
constexpr int half_bytes = tile_m * row_bytes;
constexpr int slot_bytes = halves * half_bytes;
/// Halves of steps of the weight.
constexpr int weight_stages = 4;
/// What a warp slices at once: 16 rows of half a step. Each warp has two on their way.
constexpr int unit_rows = 16;
constexpr int unit_bytes = unit_rows * wgmma::step_k * 4;
constexpr int units = halves * tile_m / unit_rows;
constexpr int units_in_flight = 2;

/// The tiles of a block, row by row.
struct Tiles {
    int item, end;
    int tile_row, tile_column;

    __device__ explicit Tiles(const Parameters &parameters) {
        auto tiles = static_cast<int64_t>(parameters.tiles_m) * parameters.tiles_n;
        item = static_cast<int>(blockIdx.x * tiles / gridDim.x);
        end = static_cast<int>((blockIdx.x + 1) * tiles / gridDim.x);
        tile_row = item / parameters.tiles_n;
        tile_column = item % parameters.tiles_n;
    }

    __device__ bool done() const {
        return item >= end;
    }

    /// true when the next tile, if any, has other rows
    __device__ bool ends_rows(const Parameters &parameters) const {
        return item + 1 == end || tile_column + 1 == parameters.tiles_n;
    }

    __device__ void next(const Parameters &parameters) {
        item++;
        tile_column++;
        if (tile_column == parameters.tiles_n) {
            tile_column = 0;
            tile_row++;
        }
    }

    __device__ void next_rows(const Parameters &parameters) {
        tile_row++;
        tile_column = 0;
        item = min(tile_row * parameters.tiles_n, end);
    }
};

/// Addresses of a block's shared memory.
template <int TileN> struct Shared {
    static constexpr int stage_bytes = TileN * row_bytes;
    static constexpr int rows_offset = weight_stages * stage_bytes;
    static constexpr int units_offset = rows_offset + slots * slot_bytes;
    static constexpr int inverses_offset =
        units_offset + slicing_warps * units_in_flight * unit_bytes;
    static constexpr int barriers_offset = inverses_offset + slots * halves * tile_m * 4;
    static constexpr int barriers = 2 * (weight_stages + slots) + slicing_warps * units_in_flight;
    /// with the alignment to 1024 bytes
    static constexpr int bytes = barriers_offset + 8 * barriers + 1024;

    uint32_t base;

    __device__ explicit Shared(const unsigned char *memory)
        // not computed again and again
        : base(__shfl_sync(0xffffffffu, (ptx::shared_address(memory) + 1023) & ~1023u, 0)) {}

    __device__ uint32_t weight(int stage) const {
        return base + stage * stage_bytes;
    }

    __device__ uint32_t rows(int slot) const {
        return base + rows_offset + slot * slot_bytes;
    }

    /// Rows on their way to a slicing warp.
    __device__ uint32_t unit(int warp, int index) const {
        return base + units_offset + (warp * units_in_flight + index) * unit_bytes;
    }

    /// Inverse scales of the rows in a slot, those of the second half after those of the first.
    __device__ uint32_t inverses(int slot) const {
        return base + inverses_offset + slot * halves * tile_m * 4;
    }

    __device__ uint32_t weight_full(int stage) const {
        return base + barriers_offset + stage * 8;
    }

    __device__ uint32_t weight_empty(int stage) const {
        return weight_full(weight_stages + stage);
    }

    __device__ uint32_t rows_full(int slot) const {
        return weight_full(2 * weight_stages + slot);
    }

    __device__ uint32_t rows_empty(int slot) const {
        return rows_full(slots + slot);
    }

    __device__ uint32_t unit_full(int warp, int index) const {
        return rows_full(2 * slots + warp * units_in_flight + index);
    }

    /// Of one thread.
    __device__ void init_barriers() const {
        for (int i = 0; i < weight_stages; i++) {
            ptx::barrier_init(weight_full(i), 1);
            ptx::barrier_init(weight_empty(i), consumer_warps);
        }
        for (int i = 0; i < slots; i++) {
            ptx::barrier_init(rows_full(i), units);
            ptx::barrier_init(rows_empty(i), consumer_warps);
        }
        for (int i = 0; i < slicing_warps * units_in_flight; i++) {
            ptx::barrier_init(unit_full(0, i), 1);
        }
        ptx::barrier_init_fence();
    }
};

/// Fills the stages of the weight; of one thread. Also has the rows after the present ones brought
/// to the L2 cache.
template <int TileN>
__device__ void load_weight(
    const Shared<TileN> &shared,
    const CUtensorMap *rows_map,
    Tiles work,
    const Parameters &parameters
) {
    auto stage = Ring<weight_stages>();
    auto starts_rows = true;
    for (; !work.done(); work.next(parameters)) {
        auto block = static_cast<int64_t>(work.tile_column) * parameters.steps;
        const auto *source = parameters.weight + block * halves * shared.stage_bytes;
        auto ends_rows = work.ends_rows(parameters);
        for (int i = 0; i < parameters.steps * halves; i++) {
            ptx::barrier_wait(shared.weight_empty(stage.index), stage.parity ^ 1);
            auto full = shared.weight_full(stage.index);
            ptx::barrier_expect(full, shared.stage_bytes);
            ptx::copy_bytes(shared.weight(stage.index), source, shared.stage_bytes, full);
            source += shared.stage_bytes;
            stage.advance();
            if (starts_rows && work.tile_row + 1 < parameters.tiles_m) {
                for (int j = 0; j < tile_m; j += unit_rows) {
                    auto row = (work.tile_row + 1) * tile_m + j;
                    ptx::prefetch_box(rows_map, i * wgmma::step_k, row);
                }
            }
        }
        starts_rows = ends_rows;
    }
}

/// Slices every seventh unit; of one warp.
template <typename Mode, int TileN>
__device__ void slice(
    const Shared<TileN> &shared,
    const CUtensorMap *rows_map,
    const Tiles &work,
    const Parameters &parameters,
    int warp,
    int lane
) {
    // neither the loads nor the stores of a warp meet in a bank
    auto quad = lane / 4, t = lane % 4;
    auto row = quad / 2 ^ (quad % 2 * 5);

    // the unit to ask for next: tile, step and place in it
    auto coming = work;
    auto step = 0, index = warp, to = 0;
    auto request = [&] {
        if (coming.done()) {
            return;
        }
        if (lane == 0) {
            auto full = shared.unit_full(warp, to);
            ptx::barrier_expect(full, unit_bytes);
            auto column = step * double_step_k + index % halves * wgmma::step_k;
            auto first_row = coming.tile_row * tile_m + index / halves * unit_rows;
            ptx::copy_box(shared.unit(warp, to), rows_map, column, first_row, full);
        }
        to = to + 1 == units_in_flight ? 0 : to + 1;
        index += slicing_warps;
        if (index >= units) {
            index -= units;
            step++;
            if (step == parameters.steps) {
                step = 0;
                coming.next_rows(parameters);
            }
        }
    };
    for (int i = 0; i < units_in_flight; i++) {
        request();
    }

    auto steps = 0;
    for (auto counted = work; !counted.done(); counted.next_rows(parameters)) {
        steps += parameters.steps;
    }
    auto from = 0;
    uint32_t parity = 0;
    for (int unit = warp; unit < steps * units; unit += slicing_warps) {
        float values[2][8];
        ptx::barrier_wait(shared.unit_full(warp, from), parity);
        auto source = shared.unit(warp, from) + row * 128;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_row(source + 8 * 128 * i, row, t, values[i]);
        }
        uint4 slices[2][Mode::slice_count];
        float inverses[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            inverses[i] = Mode::scale_row(values[i]);
            Mode::pack(values[i], slices[i]);
        }
        from++;
        if (from == units_in_flight) {
            from = 0;
            parity ^= 1;
        }

        auto count = unit / units, slot = count % slots;
        auto half = unit % halves, row_in_tile = unit % units / halves * unit_rows + row;
        auto target = shared.rows(slot) + half * half_bytes;
        ptx::barrier_wait(shared.rows_empty(slot), count / slots % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int s = 0; s < Mode::slice_count; s++) {
                auto offset = Mode::template offset<TileN>(s, row_in_tile + 8 * i, t);
                ptx::store4(target + offset, slices[i][s]);
            }
            if (t == 0) {
                auto place = half * tile_m + row_in_tile + 8 * i;
                ptx::store(shared.inverses(slot) + place * 4, inverses[i]);
            }
        }
        ptx::products_read_fence();
        __syncwarp();
        if (lane == 0) {
            ptx::barrier_arrive(shared.rows_full(slot));
        }
        // in place of this unit
        request();
    }
}

/// Multiplies; of two warpgroups.
template <typename Mode, int TileN>
__device__ void consume(const Shared<TileN> &shared, Tiles work, const Parameters &parameters) {
    // the same in all threads of a warp, and the compiler knows
    auto warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - 8, 0);
    auto lane = static_cast<int>(threadIdx.x) % 32;
    auto row = warp * 16 + lane / 4;

    float high_sums[TileN / 2], low_sums[TileN / 2], sums[TileN / 2];
#pragma unroll
    for (int i = 0; i < TileN / 2; i++) {
        high_sums[i] = ptx::opaque_zero();
        low_sums[i] = ptx::opaque_zero();
    }

    auto upcoming = work;
    auto steps = 0, count = 0;
    // two stages, one step, at a time
    auto stage = Ring<weight_stages / halves>();
    // 16-byte addresses of the operands
    uint32_t rows_address, weight_address;
    auto locate = [&] {
        auto rows_of_warpgroup = shared.rows(count % slots) + warp / 4 * (half_bytes / 2);
        rows_address = rows_of_warpgroup >> 4;
        weight_address = shared.weight(halves * stage.index) >> 4;
    };
    auto product = [&](auto accumulate, float (&result)[TileN / 2], int half, int a, int b, int i) {
        ptx::multiply_shared<TileN, decltype(accumulate)::value>(
            result,
            Mode::template descriptor<TileN>(a, i) + (rows_address + half * (half_bytes >> 4)),
            Mode::template descriptor<TileN>(b, i) +
                (weight_address + half * (shared.stage_bytes >> 4))
        );
    };
    constexpr auto first = std::false_type();
    constexpr auto more = std::true_type();
    auto start_high = [&](int half) {
        ptx::products_begin();
        product(first, high_sums, half, 0, 0, 0);
        product(more, high_sums, half, 0, 0, 1);
        ptx::products_commit();
    };
    auto start_low = [&](int half) {
        ptx::products_begin();
        product(first, low_sums, half, 1, 0, 0);
        product(more, low_sums, half, 1, 0, 1);
        product(more, low_sums, half, 0, 1, 0);
        product(more, low_sums, half, 0, 1, 1);
        ptx::products_commit();
    };
    auto add = [&](float (&products)[TileN / 2], const float (&inverses)[2], float factor) {
#pragma unroll
        for (int i = 0; i < TileN / 2; i++) {
            ptx::pin(products[i]);
        }
        const float scales[] = {inverses[0] * factor, inverses[1] * factor};
#pragma unroll
        for (int i = 0; i < TileN / 2; i++) {
            sums[i] = fmaf(products[i], scales[i / 2 % 2], sums[i]);
            // not after the next products, which would need a copy
            ptx::pin(sums[i]);
        }
    };

    locate();
    ptx::barrier_wait(shared.weight_full(0), 0);
    ptx::barrier_wait(shared.rows_full(0), 0);
    while (!work.done()) {
        start_high(0);
        start_low(0);

        // while they are under way, all that is needed later; stores of the last tile may have kept
        // the sums until now
        if (steps == 0) {
#pragma unroll
            for (int i = 0; i < TileN / 2; i++) {
                // a branch and no selection in each step
                sums[i] = ptx::opaque_zero();
            }
        }
        float inverses[halves][2];
        auto address = shared.inverses(count % slots) + row * 4;
#pragma unroll
        for (int half = 0; half < halves; half++) {
            inverses[half][0] = ptx::load(address + half * tile_m * 4);
            inverses[half][1] = ptx::load(address + half * tile_m * 4 + 8 * 4);
        }
        ptx::barrier_wait(shared.weight_full(halves * stage.index + 1), stage.parity);
        auto weight_empty = shared.weight_empty(halves * stage.index);
        auto rows_empty = shared.rows_empty(count % slots);
        auto ends_rows = work.ends_rows(parameters);
        steps++;
        auto ends_tile = steps == parameters.steps;
        count++;
        stage.advance();
        if (ends_tile) {
            count -= ends_rows ? 0 : steps;
            upcoming.next(parameters);
        }
        auto exists = !upcoming.done();
        auto weight_full = shared.weight_full(halves * stage.index);

        ptx::products_wait<1>();
        add(high_sums, inverses[0], 1);
        start_high(1);
        ptx::products_wait<1>();
        add(low_sums, inverses[0], 1 / Mode::low_scale);
        if (lane == 0) {
            ptx::barrier_arrive(weight_empty);
        }
        start_low(1);
        ptx::barrier_wait_if(exists, weight_full, stage.parity);
        ptx::barrier_wait_if(exists, shared.rows_full(count % slots), count / slots % 2);
        locate();
        ptx::pin(rows_address);
        ptx::pin(weight_address);
        ptx::products_wait<1>();
        add(high_sums, inverses[1], 1);
        ptx::products_wait<0>();
        add(low_sums, inverses[1], 1 / Mode::low_scale);
        // after the loads of all lanes
        __syncwarp();
        if (lane == 0) {
            ptx::barrier_arrive(weight_empty + 8);
            if (ends_rows) {
                ptx::barrier_arrive(rows_empty);
            }
        }

        if (ends_tile) {
            store<Mode, TileN>(parameters, work.tile_row, work.tile_column, row, lane, sums);
            work = upcoming;
            steps = 0;
        }
    }
}

template <typename Mode, int TileN>
__global__ void __launch_bounds__(threads, 1) multiply_kernel(
    const __grid_constant__ CUtensorMap rows_map, const __grid_constant__ Parameters parameters
) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    auto work = Tiles(parameters);
    auto shared = Shared<TileN>(memory);
    auto warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    auto lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        shared.init_barriers();
    }
    __syncthreads();
    ptx::previous_kernel_wait();
    if (warp < 8) {
        ptx::give_registers<40>();
        if (warp < slicing_warps) {
            slice<Mode, TileN>(shared, &rows_map, work, parameters, warp, lane);
        } else if (lane == 0) {
            load_weight<TileN>(shared, &rows_map, work, parameters);
        }
    } else {
        ptx::take_registers<216>();
        consume<Mode, TileN>(shared, work, parameters);
    }
#else
    // the host does not launch it
    __trap();
#endif
}

} // namespace metatomic_tc::wgmma::shared_slices
