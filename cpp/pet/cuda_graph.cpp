#include "cuda_graph.hpp"

#include <map>
#include <mutex>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

namespace metatomic_tc {

namespace {

/// The memory of all graphs of a device. What one of them leaves there is of no use to it later, so
/// they can share it as long as only one runs at a time.
struct Pool {
    std::mutex mutex;
    /// for captures, which the default stream cannot have; memory is reused on one stream only
    c10::cuda::CUDAStream stream;
    /// how many graphs there are
    int64_t graphs = 0;
    at::MempoolId_t id;
    /// the end of the last run
    c10::Event end{c10::DeviceType::CUDA};
};

Pool &pool_of(const at::Device &device) {
    static std::mutex mutex;
    // never destroyed: at the end of the process CUDA may be gone already
    static auto &pools = *new std::map<at::DeviceIndex, std::unique_ptr<Pool>>();
    auto lock = std::lock_guard(mutex);
    auto &pool = pools[device.index()];
    if (pool == nullptr) {
        pool.reset(new Pool{{}, c10::cuda::getStreamFromPool(false, device.index()), 0, {}});
    }
    return *pool;
}

/// Ends a capture that failed. Where CUDA gave it up itself, PyTorch would go on putting memory
/// aside for it.
void abandon(at::cuda::CUDAGraph &graph, const at::Device &device, at::MempoolId_t pool) {
    namespace allocator = c10::cuda::CUDACachingAllocator;
    try {
        graph.capture_end();
        return;
    } catch (const std::exception &) {
    }
    try {
        allocator::endAllocateToPool(device.index(), pool);
        allocator::releasePool(device.index(), pool);
    } catch (const std::exception &) { // it was ended
    }
}

} // namespace

struct CudaGraph::Implementation {
    at::Device device;
    at::cuda::CUDAGraph graph;
};

const char *CudaGraph::why_not() {
    return "";
}

void CudaGraph::prepare(const at::Device &device, const std::function<void()> &work) {
    torch::cuda::synchronize(device.index());
    auto stream = c10::cuda::CUDAStreamGuard(pool_of(device).stream);
    work();
    torch::cuda::synchronize(device.index());
}

CudaGraph::CudaGraph(const at::Device &device, const std::function<void()> &work)
    : implementation(new Implementation{device, {}}) {
    auto &pool = pool_of(device);
    auto lock = std::lock_guard(pool.mutex);
    torch::cuda::synchronize(device.index());
    auto stream = c10::cuda::CUDAStreamGuard(pool.stream);
    if (pool.graphs == 0) {
        // PyTorch does not let a pool be used again that no graph has used for a while.
        pool.id = at::cuda::graph_pool_handle();
    }
    auto &graph = implementation->graph;
    graph.capture_begin(pool.id, cudaStreamCaptureModeThreadLocal);
    try {
        work();
        graph.capture_end();
    } catch (...) {
        abandon(graph, device, pool.id);
        throw;
    }
    pool.graphs++;
}

CudaGraph::~CudaGraph() {
    auto &pool = pool_of(implementation->device);
    auto lock = std::lock_guard(pool.mutex);
    implementation->graph.reset();
    pool.graphs--;
}

void CudaGraph::replay() {
    auto &pool = pool_of(implementation->device);
    auto lock = std::lock_guard(pool.mutex);
    auto stream = c10::cuda::getCurrentCUDAStream(implementation->device.index());
    pool.end.block(stream);
    implementation->graph.replay();
    pool.end.record(stream);
}

} // namespace metatomic_tc
