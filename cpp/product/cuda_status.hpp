#pragma once

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>

namespace metatomic_tc {

/// @throws std::runtime_error saying that `what` failed, and why.
inline void check(cudaError_t status, const std::string &what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(
            "CUDA failed in " + what + ": " + cudaGetErrorString(status) + "."
        );
    }
}

/// A value for each device, which is found once; for any number of threads.
template <typename T> class PerDevice {
  public:
    /// The value for the current device, by `find(device)` at the first call.
    template <typename Find> T operator()(Find find) {
        auto device = 0;
        check(cudaGetDevice(&device), "asking for the current device");
        auto lock = std::lock_guard<std::mutex>(mutex_);
        auto found = values_.find(device);
        if (found == values_.end()) {
            found = values_.emplace(device, find(device)).first;
        }
        return found->second;
    }

  private:
    std::mutex mutex_;
    std::map<int, T> values_;
};

} // namespace metatomic_tc
