#include "packed_weights.hpp"

#include <map>
#include <mutex>
#include <tuple>

namespace metatomic_tc {

namespace {

/// All that the packed form depends on besides B.
using Form = std::tuple<Kernel, int, int64_t, int64_t, int64_t, Direction, Activation>;

struct Weight {
    /// how many PackedWeights have it
    int users = 0;
    std::map<Form, at::Tensor> packed;
};

struct Known {
    std::mutex mutex;
    std::map<const void *, Weight> weights;
};

Known &known() {
    // never destroyed: at the end of the process CUDA may be gone already
    static auto &result = *new Known();
    return result;
}

} // namespace

PackedWeights::PackedWeights(const std::vector<at::Tensor> &candidates) {
    auto lock = std::lock_guard(known().mutex);
    for (const auto &weight : candidates) {
        if (weight.is_cuda() && weight.scalar_type() == at::kFloat && weight.dim() == 2) {
            // a handle of its own, which stays where it is when the module moves
            weights.push_back(weight.detach());
            known().weights[weight.const_data_ptr()].users++;
        }
    }
}

PackedWeights::~PackedWeights() {
    auto lock = std::lock_guard(known().mutex);
    for (const auto &weight : weights) {
        auto found = known().weights.find(weight.const_data_ptr());
        if (--found->second.users == 0) {
            known().weights.erase(found);
        }
    }
}

void *PackedWeights::find(
    const Plan &plan, const Gemm &operands, const at::Tensor &weight, void *stream
) {
    if (plan.packed_size == 0 || !plan.keeps_packed) {
        return nullptr;
    }
    auto lock = std::lock_guard(known().mutex);
    auto found = known().weights.find(operands.B);
    if (found == known().weights.end()) {
        return nullptr;
    }
    const auto &problem = plan.problem;
    auto form = Form(
        plan.kernel,
        plan.tile_n,
        problem.N,
        problem.K,
        operands.ldb,
        problem.direction,
        problem.activation
    );
    auto &forms = found->second.packed;
    auto packed = forms.find(form);
    if (packed == forms.end()) {
        if (is_captured(stream)) {
            return nullptr;
        }
        auto size = static_cast<int64_t>(plan.packed_size);
        auto memory = at::empty({size}, weight.options().dtype(at::kByte));
        gemm_pack(plan, operands, memory.mutable_data_ptr(), stream);
        packed = forms.emplace(form, memory).first;
    }
    return packed->second.mutable_data_ptr();
}

} // namespace metatomic_tc
