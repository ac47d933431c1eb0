#pragma once

// C = rows · weightᵀ in slices, for compute capability 9.0a. One block per multiprocessor works
// through tiles of 128 rows: a warpgroup whose first thread keeps a ring of steps of K filled, and
// two warpgroups with 64 rows each, which slice the rows in registers and multiply them by the
// packed weight. While the Tensor Cores work on one step, the next one is sliced.
//
// The Tensor Cores of Hopper cut sums off after 25 bits, so their accumulator is added to one in
// FP32 after each step of K ("promotion": Ootomo and Yokota, arXiv 2203.03341).
#include <type_traits>

#include "fp32_element.cuh"
#include "metatomic_tc/gemm.hpp"
#include "wgmma_slices.cuh"

namespace metatomic_tc::wgmma {

constexpr int tile_m = 128;
constexpr int threads = 384;
constexpr int consumer_warps = 8;
constexpr int rows_bytes = tile_m * step_k * 4;
/// Steps of K, 512 elements, whose sum is kept apart: a sum of many steps loses accuracy.
constexpr int long_steps = 16;
/// Tiles of rows that run at about the same time, to share what they read of the weight.
constexpr int raster_rows = 8;

/// Shape and pointers of a launch.
struct Parameters {
    Gemm problem;
    /// Packed weight: tiles of N, in them steps of K.
    const unsigned char *weight;
    /// Inverse scale of each row of the weight, for the modes that scale it.
    const float *weight_scales;
    int tiles_m;
    int tiles_n;
    /// Steps of K.
    int steps;
    /// Parts that K is cut into, each the work of one block.
    int splits;
    /// Sums of the parts, [tiles, splits, values of a tile], and for each half of a tile the number
    /// of parts that are there; unused with one part.
    float *partial_sums;
    unsigned *finished_parts;
    /// [blocks, values of a tile]: sums of the steps before the last `long_steps`; unused where
    /// there are no more steps.
    float *long_sums;
    /// All rows of C, bias and pre-activation are aligned to 16 bytes, and N to 4.
    bool aligned;
};

template <typename Mode, int TileN> constexpr int stage_bytes() {
    return rows_bytes + TileN * Mode::weight_row_bytes;
}

/// Shared memory of a block; its alignment to 1024 bytes is part of it.
template <typename Mode, int TileN> constexpr int shared_bytes() {
    return Mode::stages * stage_bytes<Mode, TileN>() + 2 * Mode::stages * 8 + 1024;
}

/// The work of a block, one item after another: a part of K of a tile.
struct Work {
    int item;
    int tile_row, tile_column, split;
    int first_step, steps;

    __device__ explicit Work(const Parameters &parameters) : item(blockIdx.x) {
        locate(parameters);
    }

    __device__ bool done(const Parameters &parameters) const {
        return item >= parameters.tiles_m * parameters.tiles_n * parameters.splits;
    }

    __device__ void next(const Parameters &parameters) {
        item += gridDim.x;
        locate(parameters);
    }

  private:
    __device__ void locate(const Parameters &parameters) {
        auto index = item;
        split = 0;
        first_step = 0;
        steps = parameters.steps;
        if (parameters.splits > 1) {
            index = item / parameters.splits;
            split = item % parameters.splits;
            first_step = split * parameters.steps / parameters.splits;
            steps = (split + 1) * parameters.steps / parameters.splits - first_step;
        }
        auto group_size = raster_rows * parameters.tiles_n;
        auto group = index / group_size;
        // past the end, the numbers do not matter
        auto rows = max(min(parameters.tiles_m - group * raster_rows, raster_rows), 1);
        tile_column = index % group_size / rows;
        tile_row = group * raster_rows + index % group_size - tile_column * rows;
    }
};

/// Position in the ring of stages.
template <int Stages> struct Ring {
    int index = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        index++;
        if (index == Stages) {
            index = 0;
            parity ^= 1;
        }
    }
};

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
#pragma unroll
        for (int j = 0; j < 2; j++) {
            // the swizzle of the copy engine
            auto piece = (2 * (lane % 4) + j) ^ (row & 7);
            auto address = shared.rows(stage) + (row + 8 * i) * 128 + piece * 16;
            auto *value = values[i] + 4 * j;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                         : "r"(address)
                         : "memory");
        }
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

/// First column of C, bias and weight that belongs to the group `group` of 16 columns of a tile,
/// and that of the quad's thread `t` in it, of four. For SwiGLU the groups alternate between value
/// and gate, which a thread has to have both.
template <int TileN>
__host__ __device__ inline int64_t
first_column(Activation activation, int64_t N, int tile, int group, int t) {
    if (activation == Activation::swiglu) {
        return (group % 2) * (N / 2) + tile * (TileN / 2) + 16 * (group / 2) + 4 * t;
    }
    return static_cast<int64_t>(tile) * TileN + 16 * group + 4 * t;
}

/// End of the columns of a group: N, or for SwiGLU that of its half.
__host__ __device__ inline int64_t last_column(Activation activation, int64_t N, int group) {
    return activation == Activation::swiglu ? (group % 2 + 1) * (N / 2) : N;
}

/// Four values from `column` on; with `Whole` all of them exist and are aligned to 16 bytes.
template <bool Whole>
__device__ inline float4 load4(const float *values, int64_t column, int64_t end, float otherwise) {
    if constexpr (Whole) {
        return __ldg(reinterpret_cast<const float4 *>(values + column));
    }
    auto at = [&](int i) { return column + i < end ? __ldg(values + column + i) : otherwise; };
    return {at(0), at(1), at(2), at(3)};
}

template <bool Whole>
__device__ inline void store4(float *values, int64_t column, int64_t end, const float4 &value) {
    if constexpr (Whole) {
        *reinterpret_cast<float4 *>(values + column) = value;
        return;
    }
    const float elements[] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (column + i < end) {
            values[column + i] = elements[i];
        }
    }
}

__device__ inline float sigmoid(float x) {
    return __fdividef(1, 1 + expf(-x));
}

/// Adds NaN to `check` when a value is Inf or NaN, else zero.
__device__ inline void check_finite(const float4 &value, float &check) {
    check = fmaf(value.x, 0, check);
    check = fmaf(value.y, 0, check);
    check = fmaf(value.z, 0, check);
    check = fmaf(value.w, 0, check);
}

/// Where a warp stored Inf or NaN in its 16 rows: does these elements again in FP32, since slices
/// of Inf, or of numbers close to the largest one, give NaN where FP32 may not.
template <int TileN>
__device__ void repair(const Gemm &problem, int64_t first_row, int tile, int lane) {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * TileN; i += 32) {
        auto row = first_row + i / TileN;
        auto in_tile = i % TileN;
        auto swiglu = problem.activation == Activation::swiglu;
        if (swiglu && in_tile >= TileN / 2) {
            continue;
        }
        auto column = static_cast<int64_t>(tile) * (swiglu ? TileN / 2 : TileN) + in_tile;
        auto columns = swiglu ? problem.N / 2 : problem.N;
        if (row >= problem.M || column >= columns) {
            continue;
        }
        auto &output = problem.C[row * problem.ldc + column];
        auto *kept =
            problem.pre_activation == nullptr ? nullptr : problem.pre_activation + row * problem.N;
        auto kept_is_finite = kept == nullptr || (isfinite(kept[column]) &&
                                                  (!swiglu || isfinite(kept[column + columns])));
        if (isfinite(output) && kept_is_finite) {
            continue;
        }
        auto value = fp32_element(problem, row, column);
        auto gate = swiglu ? fp32_element(problem, row, column + columns) : value;
        output = problem.activation == Activation::none ? value : value * sigmoid(gate);
        if (kept != nullptr) {
            kept[column] = value;
            if (swiglu) {
                kept[column + columns] = gate;
            }
        }
    }
}

/// Bias, activation and stores of a thread's sums. `Whole`: the tile is inside of C, and aligned.
/// Returns 0, or NaN when a value was not finite.
template <typename Mode, int TileN, Activation A, bool Whole>
__device__ float store_tile(
    const Parameters &parameters,
    int tile_column,
    int64_t first_row,
    int t,
    const float (&sums)[TileN / 2]
) {
    const auto &problem = parameters.problem;
    auto check = 0.0f;
    // four columns of a row of the thread, in the order of the packing, with scale and bias
    auto pre_activation = [&](int group, int i, const float4 &scale, const float4 &bias) {
        const auto *s = sums + 8 * group + 2 * i;
        auto v = float4{s[0], s[1], s[4], s[5]};
        if constexpr (Mode::scaled) {
            v = {v.x * scale.x, v.y * scale.y, v.z * scale.z, v.w * scale.w};
        }
        v = {v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w};
        check_finite(v, check);
        return v;
    };
    auto load_scale = [&](int64_t column, int64_t end) {
        return Mode::scaled ? load4<Whole>(parameters.weight_scales, column, end, 1)
                            : float4{1, 1, 1, 1};
    };
    auto load_bias = [&](int64_t column, int64_t end) {
        return problem.bias == nullptr ? float4{0, 0, 0, 0}
                                       : load4<Whole>(problem.bias, column, end, 0);
    };
    auto multiply = [](const float4 &value, const float4 &gate) {
        return float4{
            value.x * sigmoid(gate.x),
            value.y * sigmoid(gate.y),
            value.z * sigmoid(gate.z),
            value.w * sigmoid(gate.w),
        };
    };
    auto *kept = problem.pre_activation;

    constexpr auto groups = A == Activation::swiglu ? 2 : 1;
    auto end = A == Activation::swiglu ? problem.N / 2 : problem.N;
#pragma unroll
    for (int group = 0; group < TileN / 16; group += groups) {
        auto column = first_column<TileN>(A, problem.N, tile_column, group, t);
        auto scale = load_scale(column, end), bias = load_bias(column, end);
        auto gate_scale = groups == 2 ? load_scale(column + end, problem.N) : scale;
        auto gate_bias = groups == 2 ? load_bias(column + end, problem.N) : bias;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            auto row = first_row + 8 * i;
            if (!Whole && row >= problem.M) {
                continue;
            }
            auto value = pre_activation(group, i, scale, bias);
            if constexpr (A != Activation::none) {
                auto gate = value;
                if (kept != nullptr) {
                    store4<Whole>(kept + row * problem.N, column, end, value);
                }
                if constexpr (A == Activation::swiglu) {
                    gate = pre_activation(group + 1, i, gate_scale, gate_bias);
                    if (kept != nullptr) {
                        store4<Whole>(kept + row * problem.N, column + end, problem.N, gate);
                    }
                }
                value = multiply(value, gate);
            }
            store4<Whole>(problem.C + row * problem.ldc, column, end, value);
        }
    }
    return check;
}

/// Stores a warpgroup's sums.
template <typename Mode, int TileN>
__device__ void store(
    const Parameters &parameters,
    const Work &work,
    int row_in_tile,
    int lane,
    const float (&sums)[TileN / 2]
) {
    const auto &problem = parameters.problem;
    auto first_row = static_cast<int64_t>(work.tile_row) * tile_m + row_in_tile;
    auto swiglu = problem.activation == Activation::swiglu;
    auto whole = parameters.aligned && (work.tile_row + 1) * tile_m <= problem.M &&
                 (work.tile_column + 1) * TileN <= (swiglu ? problem.N / 2 * 2 : problem.N);
    auto store_as = [&](auto activation) {
        constexpr auto A = decltype(activation)::value;
        return whole ? store_tile<Mode, TileN, A, true>(
                           parameters, work.tile_column, first_row, lane % 4, sums
                       )
                     : store_tile<Mode, TileN, A, false>(
                           parameters, work.tile_column, first_row, lane % 4, sums
                       );
    };
    auto check = 0.0f;
    if (problem.activation == Activation::none) {
        check = store_as(std::integral_constant<Activation, Activation::none>());
    } else if (problem.activation == Activation::silu) {
        check = store_as(std::integral_constant<Activation, Activation::silu>());
    } else {
        check = store_as(std::integral_constant<Activation, Activation::swiglu>());
    }
    if (__any_sync(0xffffffffu, check != 0)) {
        repair<TileN>(problem, first_row - lane / 4, work.tile_column, lane);
    }
}

/// Writes a thread's sums, neighbouring threads next to each other. `memory` is that of a tile.
template <int TileN>
__device__ void put_sums(float *memory, int thread, const float (&sums)[TileN / 2]) {
    auto *values = reinterpret_cast<float4 *>(memory) + thread;
#pragma unroll
    for (int i = 0; i < TileN / 8; i++) {
        __stcg(values + i * 256, {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    }
}

/// Adds what `put_sums` has written.
template <int TileN>
__device__ void add_sums(const float *memory, int thread, float (&sums)[TileN / 2]) {
    const auto *values = reinterpret_cast<const float4 *>(memory) + thread;
#pragma unroll
    for (int i = 0; i < TileN / 8; i++) {
        auto value = __ldcg(values + i * 256);
        sums[4 * i] += value.x;
        sums[4 * i + 1] += value.y;
        sums[4 * i + 2] += value.z;
        sums[4 * i + 3] += value.w;
    }
}

/// Adds up the parts of K in their order, so that the result does not depend on which block is
/// last. Returns false in all warpgroups but the last one of a tile, which goes on with the sums.
template <int TileN>
__device__ bool join_parts(
    const Parameters &parameters,
    const Work &work,
    int warpgroup,
    int thread,
    float (&sums)[TileN / 2]
) {
    __shared__ int arrivals[2];
    constexpr int64_t values = tile_m * TileN;
    auto tile = static_cast<int64_t>(work.item / parameters.splits);
    auto *parts = parameters.partial_sums + tile * parameters.splits * values;
    put_sums<TileN>(parts + work.split * values, thread, sums);
    __threadfence();
    ptx::warpgroup_barrier(1 + warpgroup);
    if (thread % 128 == 0) {
        // the last one sets it to 0 again
        arrivals[warpgroup] = static_cast<int>(atomicInc(
            parameters.finished_parts + 2 * tile + warpgroup,
            static_cast<unsigned>(parameters.splits) - 1
        ));
        __threadfence();
    }
    ptx::warpgroup_barrier(1 + warpgroup);
    if (arrivals[warpgroup] != parameters.splits - 1) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < TileN / 2; i++) {
        sums[i] = 0;
    }
#pragma unroll 1
    for (int split = 0; split < parameters.splits; split++) {
        add_sums<TileN>(parts + split * values, thread, sums);
    }
    return true;
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
        ptx::products_wait();
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
                store<Mode, TileN>(parameters, work, row, lane, sums);
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
    ptx::products_wait();
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
