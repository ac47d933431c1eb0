#include "layout.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace metatomic_tc::wgmma {

namespace {

/// For products of up to `max_tiles` tiles of 128 x 128 and `max_steps` steps of K; the first row
/// that fits counts.
struct TilingRule {
    Kernel kernel;
    int64_t max_tiles;
    int64_t max_steps;
    int tile_n;
    int splits;
};

constexpr auto no_limit = std::numeric_limits<int64_t>::max();

constexpr TilingRule tiling_rules[] = {
#include "tilings.inc"
};

/// Hands out the parts of memory, each aligned to 256 bytes.
class Allocator {
  public:
    std::size_t take(int64_t bytes) {
        auto offset = size_;
        size_ += static_cast<std::size_t>(ceil_div(bytes, 256) * 256);
        return offset;
    }

    std::size_t size() const {
        return size_;
    }

  private:
    std::size_t size_ = 0;
};

int64_t values_of_tile(const Plan &plan) {
    return int64_t(tile_m) * plan.tile_n;
}

constexpr int64_t fp32 = sizeof(float);

} // namespace

Extent::Extent(const Plan &plan) {
    const auto &problem = plan.problem;
    auto pairs = problem.activation == Activation::swiglu;
    auto kernel_step = form_of(plan.kernel).step_k;
    tiles_m = ceil_div(problem.M, tile_m);
    tiles_n = ceil_div(pairs ? problem.N / 2 : problem.N, pairs ? plan.tile_n / 2 : plan.tile_n);
    steps = ceil_div(problem.K, kernel_step);
    packed_steps = steps * (kernel_step / step_k);
}

PackedLayout::PackedLayout(const Plan &plan) {
    auto extent = Extent(plan);
    auto form = form_of(plan.kernel);
    auto allocator = Allocator();
    weight =
        allocator.take(extent.tiles_n * extent.packed_steps * plan.tile_n * form.weight_row_bytes);
    inverses = allocator.take(form.scaled ? plan.problem.N * fp32 : 0);
    // as many as any product has that finds the weight packed
    counters = 2 * std::max(most_tiles_in_parts, plan.splits > 1 ? extent.tiles() : 0);
    finished_parts = allocator.take(counters * int64_t(sizeof(unsigned)));
    size = allocator.size();
}

WorkspaceLayout::WorkspaceLayout(const Plan &plan) {
    const auto &problem = plan.problem;
    auto extent = Extent(plan);
    auto allocator = Allocator();
    auto in_parts = plan.splits > 1;
    partial_sums =
        allocator.take(in_parts ? extent.tiles() * plan.splits * values_of_tile(plan) * fp32 : 0);
    auto is_long = ceil_div(extent.steps, plan.splits) * form_of(plan.kernel).step_k > long_k;
    long_sums = allocator.take(is_long ? plan.grid * values_of_tile(plan) * fp32 : 0);
    rows_ld = ceil_div(problem.K, 4) * 4;
    rows = allocator.take(problem.aligned_a ? 0 : problem.M * rows_ld * fp32);
    size = allocator.size();
}

void choose_tiling(Plan &plan) {
    if (plan.kernel == Kernel::wgmma_fp16x3_shared_slices) {
        set_tiling(plan, 128, 1);
        return;
    }
    auto tiles = ceil_div(plan.problem.M, 128) * ceil_div(plan.problem.N, 128);
    auto steps = ceil_div(plan.problem.K, step_k);
    auto measured_for = form_of(plan.kernel).tilings;
    for (const auto &rule : tiling_rules) {
        if (rule.kernel == measured_for && tiles <= rule.max_tiles && steps <= rule.max_steps) {
            set_tiling(plan, rule.tile_n, rule.splits);
            return;
        }
    }
    throw std::logic_error("tilings.inc has no row for " + to_string(plan.kernel) + ".");
}

void set_tiling(Plan &plan, int tile_n, int splits) {
    auto shared = plan.kernel == Kernel::wgmma_fp16x3_shared_slices;
    auto too_narrow = tile_n == 64 && !form_of(plan.kernel).has_narrow_tiles;
    if (too_narrow || (shared && (plan.problem.K > shared_slices_k || splits != 1))) {
        throw std::invalid_argument(
            "The kernel " + to_string(plan.kernel) + " has tiles of 128 x 128 and takes K up to " +
            std::to_string(shared_slices_k) + " in one part, but found K = " +
            std::to_string(plan.problem.K) + ", tile_n = " + std::to_string(tile_n) +
            " and splits = " + std::to_string(splits) + "; take the kernel wgmma-fp16x3."
        );
    }
    plan.tile_n = tile_n;
    auto extent = Extent(plan);
    plan.splits = static_cast<int>(std::min<int64_t>(splits, std::max<int64_t>(extent.steps, 1)));
    plan.grid = std::min<int64_t>(extent.tiles() * plan.splits, plan.multiprocessors);
    plan.keeps_packed = plan.splits == 1 || extent.tiles() <= most_tiles_in_parts;
    plan.packed_size = PackedLayout(plan).size;
    plan.workspace_size = WorkspaceLayout(plan).size;
}

} // namespace metatomic_tc::wgmma
