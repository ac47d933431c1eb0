#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "rows.hpp"
#include "stream.hpp"

/// Runs row operations on tensors.
namespace metatomic_tc::rows {

#ifdef __x86_64__
/// Calls `work(begin, end)`, with all that it calls compiled for AVX2.
template <class Work>
[[gnu::target("avx2,fma"), gnu::flatten]] void
with_avx2(const Work &work, int64_t begin, int64_t end) {
    work(begin, end);
}
#endif

/// Calls `work(begin, end)` for parts of 0 to `count` on all cores of the CPU, with the widest
/// vectors that it is compiled for.
template <class Work> void run_on_cpu(const Work &work, int64_t count, int64_t grain_size) {
    at::parallel_for(0, count, grain_size, [&](int64_t begin, int64_t end) {
#ifdef __x86_64__
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            with_avx2(work, begin, end);
            return;
        }
#endif
        work(begin, end);
    });
}

/// Calls `rows(row, lanes)` for `count` rows on the device of `tensor`.
template <class Rows> void run(const Rows &rows, int64_t count, const at::Tensor &tensor) {
    if (tensor.is_cuda()) {
        launch_rows(rows, count, stream_of(tensor));
        return;
    }
    auto work = [&](int64_t begin, int64_t end) {
        for (auto row = begin; row < end; row++) {
            rows(row, OneLane());
        }
    };
    run_on_cpu(work, count, 16);
}

template <class T> const T *pointer(const at::Tensor &tensor) {
    return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

template <class T> T *output(const at::Tensor &tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
}

/// With data of which 16 bytes can be read at once.
inline at::Tensor aligned(const at::Tensor &tensor) {
    auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return address % 16 == 0 ? tensor : tensor.clone();
}

} // namespace metatomic_tc::rows
