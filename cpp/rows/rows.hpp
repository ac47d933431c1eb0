#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#define METATOMIC_TC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define METATOMIC_TC_HOST_DEVICE inline
#endif

/// In front of a loop over columns that adds to the variables named: a CPU, which has one lane, may
/// add several columns at once.
#ifdef __CUDACC__
#define METATOMIC_TC_ADDS_TO(...)
#else
#define METATOMIC_TC_PRAGMA(text) _Pragma(#text)
#define METATOMIC_TC_ADDS_TO(...) METATOMIC_TC_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#endif

/// Row operations, each written once for the CPU and for CUDA: a functor is called for every row
/// with the lanes that share it, one on the CPU and a warp on the GPU. Sums have one fixed order
/// per device, so that results are bit-identical from run to run.
namespace metatomic_tc::rows {

/// Reads what the operation does not write. On a GPU such reads need not wait for earlier writes,
/// which could be to the same place for all that the compiler knows.
template <class T> METATOMIC_TC_HOST_DEVICE T read(const T *from) {
#ifdef __CUDA_ARCH__
    return __ldg(from);
#else
    return *from;
#endif
}

/// e^x. In FP32 on a CPU it is arithmetic that compilers vectorise, to 2 units in the last place: 0
/// below -87, and infinite above 88.
template <class T> METATOMIC_TC_HOST_DEVICE T exponential(T x) {
#ifndef __CUDA_ARCH__
    if constexpr (std::is_same_v<T, float>) {
        constexpr auto lowest = -87.0f, highest = 88.0f;
        auto within = x < lowest ? lowest : x > highest ? highest : x;
        // x = power log(2) + rest, with log(2) in two parts of which the products with the first
        // are exact; and the Taylor series of the rest
        auto power = static_cast<int>(within * 1.44269504f + (within < 0.0f ? -0.5f : 0.5f));
        auto rest = within - power * 0.693145752f - power * 1.42860677e-6f;
        auto series = 1 / 5040.0f;
        series = series * rest + 1 / 720.0f;
        series = series * rest + 1 / 120.0f;
        series = series * rest + 1 / 24.0f;
        series = series * rest + 1 / 6.0f;
        series = series * rest + 1 / 2.0f;
        series = series * rest * rest + rest + 1;
        auto bits = static_cast<uint32_t>(power + 127) << 23;
        float factor;
        std::memcpy(&factor, &bits, sizeof(factor));
        auto result = series * factor;
        result = x < lowest ? 0.0f : result;
        return x > highest ? std::numeric_limits<float>::infinity() : result;
    }
#endif
    return std::exp(x);
}

/// 1 / (1 + exp(-x)), on a GPU without the branches of a division, which keep the compiler from
/// reading ahead. The epilogue in product/wgmma has one of its own, whose division rounds more
/// coarsely: to change either would change results in their last bits.
template <class T> METATOMIC_TC_HOST_DEVICE T sigmoid(T x) {
    auto denominator = 1 + exponential(-x);
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same_v<T, float>) {
        float result;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(denominator));
        auto refined = fmaf(result, fmaf(-denominator, result, 1.0f), result);
        return result == 0.0f ? result : refined;
    }
#endif
    return 1 / denominator;
}

/// What works on a row on the CPU.
struct OneLane {
    static constexpr int count = 1;

    METATOMIC_TC_HOST_DEVICE int index() const {
        return 0;
    }

    /// The sum over the lanes, the same in each of them.
    template <class T> METATOMIC_TC_HOST_DEVICE T sum(T value) const {
        return value;
    }

    METATOMIC_TC_HOST_DEVICE int maximum(int value) const {
        return value;
    }

    /// How many lanes before this one have the flag; `total` is how many lanes have it.
    METATOMIC_TC_HOST_DEVICE int rank(bool flag, int &total) const {
        total = flag ? 1 : 0;
        return 0;
    }

    /// Has memory begin to bring a row that is read only after sums over the lanes; null for none.
    template <class T> METATOMIC_TC_HOST_DEVICE void prefetch(const T *, int) const {}
};

#ifdef __CUDACC__
/// What works on a row on the GPU. The same functions as in `OneLane`.
struct Warp {
    static constexpr int count = 32;

    __device__ int index() const {
        return threadIdx.x % 32;
    }

    template <class T> __device__ T sum(T value) const {
        for (int step = 16; step > 0; step /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, step);
        }
        return value;
    }

    __device__ int maximum(int value) const {
        for (int step = 16; step > 0; step /= 2) {
            value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
        }
        return value;
    }

    __device__ int rank(bool flag, int &total) const {
        auto lanes = __ballot_sync(0xffffffffu, flag);
        total = __popc(lanes);
        return __popc(lanes & ((1u << index()) - 1));
    }

    template <class T> __device__ void prefetch(const T *row, int width) const {
        constexpr int line = 128 / sizeof(T);
        for (int c = line * index(); row != nullptr && c < width; c += line * count) {
            asm volatile("prefetch.global.L2 [%0];" : : "l"(row + c));
        }
    }
};
#endif

/// Writes the sums over the lanes of `values`.
template <int Count, class T, class Lanes>
METATOMIC_TC_HOST_DEVICE void store_sums(const T (&values)[Count], T *output, Lanes lanes) {
    for (int k = 0; k < Count; k++) {
        auto sum = lanes.sum(values[k]);
        if (lanes.index() == 0) {
            output[k] = sum;
        }
    }
}

/// Calls `rows(row, Warp())` for `count` rows on the current CUDA device.
/// @throws std::runtime_error if CUDA fails, or this build has no CUDA kernels
template <class Rows> void launch_rows(const Rows &rows, int64_t count, void *stream);

} // namespace metatomic_tc::rows
