#pragma once

#include <functional>
#include <memory>

#include <ATen/ATen.h>

namespace metatomic_tc {

/// What a function does on a GPU, to be done again by one launch.
class CudaGraph {
  public:
    /// "" where graphs can be captured, else why not.
    static const char *why_not();

    /// Calls `work`, whose kernels do not run yet. What it allocates stays allocated as long as the
    /// graph; what it reads must stay where it is.
    ///
    /// @param work must have run before, so that everything is loaded, and must not wait for the
    /// GPU
    /// @throws std::exception if that is not so
    CudaGraph(const at::Device &device, const std::function<void()> &work);
    ~CudaGraph();

    /// On the current stream.
    void replay();

  private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation;
};

} // namespace metatomic_tc
