#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace metatomic_tc {

/// The current stream of the CUDA device of `tensor`, a `cudaStream_t`; through the device
/// interface of c10, which needs no CUDA headers.
inline void *stream_of(const at::Tensor &tensor) {
    return c10::impl::VirtualGuardImpl(tensor.device().type())
        .getStream(tensor.device())
        .native_handle();
}

} // namespace metatomic_tc
