#include "cuda_graph.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

namespace metatomic_tc {

struct CudaGraph::Implementation {
    at::cuda::CUDAGraph graph;
};

const char *CudaGraph::why_not() {
    return "";
}

CudaGraph::CudaGraph(const at::Device &device, const std::function<void()> &work)
    : implementation(std::make_unique<Implementation>()) {
    torch::cuda::synchronize(device.index());
    // The default stream cannot be captured.
    auto stream = c10::cuda::CUDAStreamGuard(c10::cuda::getStreamFromPool(false, device.index()));
    auto &graph = implementation->graph;
    graph.capture_begin();
    try {
        work();
    } catch (...) {
        try {
            graph.capture_end();
        } catch (...) { // the capture is over, which is all that is wanted
        }
        throw;
    }
    graph.capture_end();
}

CudaGraph::~CudaGraph() = default;

void CudaGraph::replay() {
    implementation->graph.replay();
}

} // namespace metatomic_tc
