#pragma once

// The instructions of compute capability 9.0a that CUDA C++ has no functions for: barriers of
// shared memory that count bytes, bulk copies, and the asynchronous products of a warpgroup.
#include <cstdint>

#include <cuda.h>

namespace metatomic_tc::wgmma::ptx {

__device__ inline uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives, and tells the barrier to wait for `bytes` of copies as well.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/// Waits until the phase of this parity is complete, if `condition`; a branch between products
/// would make the compiler wait for them.
__device__ inline void barrier_wait_if(bool condition, uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred asked, done;\n"
                 "setp.ne.b32 asked, %2, 0;\n"
                 "@!asked bra end;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "end:\n"
                 "}\n" ::"r"(barrier),
                 "r"(parity),
                 "r"(static_cast<int>(condition))
                 : "memory");
}

__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    barrier_wait_if(true, barrier, parity);
}

/// Copies a box of a two-dimensional tensor; elements outside of the tensor become zero.
__device__ inline void
copy_box(uint32_t destination, const CUtensorMap *map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
                 "l"(map),
                 "r"(column),
                 "r"(row),
                 "r"(barrier)
                 : "memory");
}

/// Brings a box to the L2 cache.
__device__ inline void prefetch_box(const CUtensorMap *map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(column),
                 "r"(row)
                 : "memory");
}

/// Copies contiguous bytes, a multiple of 16.
__device__ inline void
copy_bytes(uint32_t destination, const void *source, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source),
                 "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

template <int Registers> __device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers> __device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

/// Barrier `id` (1 or 2) among the 128 threads of a warpgroup.
__device__ inline void warpgroup_barrier(int id) {
    if (id == 1) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}

/// Waits until the kernel before this one, which may have let this one start early, has ended.
__device__ inline void previous_kernel_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Lets the next kernel start, up to where it waits for this one.
__device__ inline void next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Orders the registers written before against the products that follow.
__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits for all products but those of the last `Pending` commits.
template <int Pending> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Makes what this thread has written to shared memory visible to products.
__device__ inline void products_read_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void load4(uint32_t address, float *values) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline float load(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ inline void store4(uint32_t address, const uint4 &value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(value.x),
                 "r"(value.y),
                 "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

__device__ inline void store_global4(float *target, const float4 &value) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target),
                 "f"(value.x),
                 "f"(value.y),
                 "f"(value.z),
                 "f"(value.w)
                 : "memory");
}

__device__ inline void store(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

/// Keeps the compiler from using `value` earlier, or its register for something else.
__device__ inline void pin(float &value) {
    asm volatile("" : "+f"(value)::"memory");
}

__device__ inline void pin(uint32_t &value) {
    asm volatile("" : "+r"(value)::"memory");
}

/// A zero that the compiler does not recognise as one, so that it does not write it again.
__device__ inline float opaque_zero() {
    float value;
    asm volatile("mov.f32 %0, 0f00000000;" : "=f"(value));
    return value;
}

enum class Element { tf32, f16, bf16 };

#define METATOMIC_TC_D8(d, i)                                                                      \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define METATOMIC_TC_D32(d, i)                                                                     \
    METATOMIC_TC_D8(d, i), METATOMIC_TC_D8(d, i + 8), METATOMIC_TC_D8(d, i + 16),                  \
        METATOMIC_TC_D8(d, i + 24)

#define METATOMIC_TC_WGMMA_N64(types, tail)                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned." types " "                                         \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "     \
                 "%31}, {%32, %33, %34, %35}, %36, p, 1, 1" tail ";\n}\n"                          \
                 : METATOMIC_TC_D32(d, 0)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Accumulate))

#define METATOMIC_TC_WGMMA_N128(types, tail)                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned." types " "                                         \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "     \
                 "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "     \
                 "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, "     \
                 "%61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1" tail ";\n}\n"                \
                 : METATOMIC_TC_D32(d, 0), METATOMIC_TC_D32(d, 32)                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Accumulate))

#define METATOMIC_TC_WGMMA_SHARED_N128                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "                            \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "     \
                 "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "     \
                 "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, "     \
                 "%61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                   \
                 : METATOMIC_TC_D32(d, 0), METATOMIC_TC_D32(d, 32)                                 \
                 : "l"(a), "l"(b), "n"(Accumulate))

/// d[64,N] (+)= a·bᵀ over 32 bytes of K (8 TF32 or 16 sixteen-bit numbers), of one warpgroup: `a`
/// in registers, `b` the descriptor of N rows of shared memory. Without `Accumulate`, d is
/// overwritten.
template <Element E, int N, bool Accumulate>
__device__ inline void multiply(float (&d)[N / 2], const uint32_t *a, uint64_t b) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64) {
        if constexpr (E == Element::tf32) {
            METATOMIC_TC_WGMMA_N64("m64n64k8.f32.tf32.tf32", "");
        } else if constexpr (E == Element::f16) {
            METATOMIC_TC_WGMMA_N64("m64n64k16.f32.f16.f16", ", 0");
        } else {
            METATOMIC_TC_WGMMA_N64("m64n64k16.f32.bf16.bf16", ", 0");
        }
    } else {
        if constexpr (E == Element::tf32) {
            METATOMIC_TC_WGMMA_N128("m64n128k8.f32.tf32.tf32", "");
        } else if constexpr (E == Element::f16) {
            METATOMIC_TC_WGMMA_N128("m64n128k16.f32.f16.f16", ", 0");
        } else {
            METATOMIC_TC_WGMMA_N128("m64n128k16.f32.bf16.bf16", ", 0");
        }
    }
}

/// The same for 16 FP16 numbers of K with `a` in shared memory, too: the descriptor of 64 rows.
template <int N, bool Accumulate>
__device__ inline void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b) {
    static_assert(N == 128);
    METATOMIC_TC_WGMMA_SHARED_N128;
}

#undef METATOMIC_TC_WGMMA_SHARED_N128
#undef METATOMIC_TC_WGMMA_N128
#undef METATOMIC_TC_WGMMA_N64
#undef METATOMIC_TC_D32
#undef METATOMIC_TC_D8

} // namespace metatomic_tc::wgmma::ptx
