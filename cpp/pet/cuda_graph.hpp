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

    /// Calls `work` where graphs are captured, so that what PyTorch keeps for that stream is there
    /// before, and waits for it.
    static void prepare(const at::Device &device, const std::function<void()> &work);

    /// Calls `work`, whose kernels do not run yet. What it reads and writes must stay where it is.
    /// What it allocates lies in memory that all graphs of the device share.
    ///
    /// @param work must have run in `prepare`, so that everything is loaded, must not wait for the
    /// GPU and
    ///     must keep nothing that it allocates
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
