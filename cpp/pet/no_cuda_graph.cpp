#include "cuda_graph.hpp"

namespace metatomic_tc {

struct CudaGraph::Implementation {};

const char *CudaGraph::why_not() {
    return "metatomic-tc was built for a PyTorch without CUDA";
}

void CudaGraph::prepare(const at::Device &, const std::function<void()> &work) {
    work();
}

CudaGraph::CudaGraph(const at::Device &, const std::function<void()> &) {
    TORCH_CHECK(false, "There are no CUDA graphs: ", why_not(), ".");
}

CudaGraph::~CudaGraph() = default;

void CudaGraph::replay() {}

} // namespace metatomic_tc
