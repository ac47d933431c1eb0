#include "packed_weights.hpp"

#include <map>
#include <mutex>
#include <tuple>

namespace metatomic_tc {

namespace {

/// All that the packed form depends on besides B.
using Form = std::tuple<Implementation, int64_t, int64_t, int64_t, bool, Activation, int>;

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
    Implementation implementation, const Gemm &problem, const at::Tensor &weight, void *stream
) {
    auto packing = gemm_packing(implementation, problem);
    if (packing == 0) {
        return nullptr;
    }
    auto lock = std::lock_guard(known().mutex);
    auto found = known().weights.find(problem.B);
    if (found == known().weights.end()) {
        return nullptr;
    }
    auto form = Form(
        implementation,
        problem.N,
        problem.K,
        problem.ldb,
        problem.transpose_b,
        problem.activation,
        packing
    );
    auto &forms = found->second.packed;
    auto packed = forms.find(form);
    if (packed == forms.end()) {
        if (is_captured(stream)) {
            return nullptr;
        }
        auto size = static_cast<int64_t>(gemm_packed_size(implementation, problem));
        auto memory = at::empty({size}, weight.options().dtype(at::kByte));
        gemm_pack(implementation, problem, memory.mutable_data_ptr(), stream);
        packed = forms.emplace(form, memory).first;
    }
    return packed->second.mutable_data_ptr();
}

} // namespace metatomic_tc
