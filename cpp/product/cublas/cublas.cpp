// cuBLASLt with explicit compute types. The library is the one PyTorch already loaded, found at run
// time, so that this library has no CUDA dependency of its own and loads on machines without a GPU.
#include "cublas.hpp"

#include <array>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "product/nonfinite.hpp"

namespace metatomic_tc::cublas {

namespace {

// cuBLAS 12.9 brought this compute type; its number lets older headers compile this file.
constexpr auto compute_bf16x9 = static_cast<cublasComputeType_t>(78);
constexpr auto capability_emulation = static_cast<cublasLtMatmulAlgoCapAttributes_t>(22);

void *open_library() {
    auto candidates = {"libcublasLt.so.13", "libcublasLt.so.12"};
    for (auto flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
        for (auto name : candidates) {
            if (auto *handle = dlopen(name, flags)) {
                return handle;
            }
        }
    }
    throw std::runtime_error(
        "No cuBLASLt library (libcublasLt.so.13 or .12) was found in this process; install a CUDA "
        "build of PyTorch, or use the CPU."
    );
}

/// The functions of cuBLASLt used here, with the types of its header.
struct Api {
    void *library = open_library();

    template <typename Function> Function *find(const char *name) const {
        auto *symbol = dlsym(library, name);
        if (symbol == nullptr) {
            throw std::runtime_error(
                std::string("cuBLASLt in this process has no function ") + name +
                "; install the CUDA version that PyTorch was built for."
            );
        }
        return reinterpret_cast<Function *>(symbol);
    }

#define METATOMIC_TC_FUNCTION(name) decltype(::name) *name = find<decltype(::name)>(#name)
    METATOMIC_TC_FUNCTION(cublasLtCreate);
    METATOMIC_TC_FUNCTION(cublasLtGetCudartVersion);
    METATOMIC_TC_FUNCTION(cublasLtGetStatusString);
    METATOMIC_TC_FUNCTION(cublasLtMatmul);
    METATOMIC_TC_FUNCTION(cublasLtMatmulAlgoCapGetAttribute);
    METATOMIC_TC_FUNCTION(cublasLtMatmulAlgoGetHeuristic);
    METATOMIC_TC_FUNCTION(cublasLtMatmulDescInit_internal);
    METATOMIC_TC_FUNCTION(cublasLtMatmulDescSetAttribute);
    METATOMIC_TC_FUNCTION(cublasLtMatmulPreferenceInit_internal);
    METATOMIC_TC_FUNCTION(cublasLtMatmulPreferenceSetAttribute);
    METATOMIC_TC_FUNCTION(cublasLtMatrixLayoutInit_internal);
#undef METATOMIC_TC_FUNCTION

    void check(cublasStatus_t status, const char *what) const {
        if (status != CUBLAS_STATUS_SUCCESS) {
            throw std::runtime_error(
                std::string("cuBLASLt failed in ") + what + ": " + cublasLtGetStatusString(status)
            );
        }
    }
};

const Api &api() {
    static const Api instance;
    return instance;
}

/// One handle per device for the life of the process: destroying them at exit would race with the
/// end of the CUDA driver.
cublasLtHandle_t handle(int device) {
    static std::mutex mutex;
    static auto &handles = *new std::map<int, cublasLtHandle_t>();
    auto lock = std::lock_guard(mutex);
    auto &handle = handles[device];
    if (handle == nullptr) {
        api().check(api().cublasLtCreate(&handle), "cublasLtCreate");
    }
    return handle;
}

struct Description {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t weights, input, output;
};

/// Row-major C = A·B is column-major Cᵀ = Bᵀ·Aᵀ: cuBLAS's first operand is our B.
Description describe(cublasComputeType_t compute_type, const Gemm &problem) {
    const auto &lt = api();
    auto result = Description();
    lt.check(
        lt.cublasLtMatmulDescInit_internal(
            &result.operation, sizeof(result.operation), compute_type, CUDA_R_32F
        ),
        "cublasLtMatmulDescInit"
    );
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        lt.check(
            lt.cublasLtMatmulDescSetAttribute(&result.operation, attribute, &value, sizeof(value)),
            "cublasLtMatmulDescSetAttribute"
        );
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, problem.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (problem.bias != nullptr) {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, problem.bias);
    }
    auto layout =
        [&](cublasLtMatrixLayoutOpaque_t &matrix, int64_t rows, int64_t cols, int64_t ld) {
            lt.check(
                lt.cublasLtMatrixLayoutInit_internal(
                    &matrix, sizeof(matrix), CUDA_R_32F, rows, cols, ld
                ),
                "cublasLtMatrixLayoutInit"
            );
        };
    if (problem.transpose_b) {
        layout(result.weights, problem.K, problem.N, problem.ldb);
    } else {
        layout(result.weights, problem.N, problem.K, problem.ldb);
    }
    layout(result.input, problem.K, problem.M, problem.lda);
    layout(result.output, problem.N, problem.M, problem.ldc);
    return result;
}

uint32_t alignment(const void *pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    return address == 0 ? 256 : static_cast<uint32_t>(std::min<uintptr_t>(address & -address, 256));
}

bool emulates(const cublasLtMatmulAlgo_t &algorithm) {
    int32_t value = 0;
    size_t written = 0;
    auto status = api().cublasLtMatmulAlgoCapGetAttribute(
        &algorithm, capability_emulation, &value, sizeof(value), &written
    );
    return status == CUBLAS_STATUS_SUCCESS && value != 0;
}

cublasLtMatmulAlgo_t
find_algorithm(int device, const Plan &plan, const Gemm &problem, Description &matmul) {
    const auto &lt = api();
    cublasLtMatmulPreferenceOpaque_t preference;
    lt.check(
        lt.cublasLtMatmulPreferenceInit_internal(&preference, sizeof(preference)),
        "cublasLtMatmulPreferenceInit"
    );
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        lt.check(
            lt.cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
            "cublasLtMatmulPreferenceSetAttribute"
        );
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(plan.workspace_size));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(problem.B));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(problem.A));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(problem.C));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(problem.C));

    auto eager = plan.kernel == Kernel::cublas_bf16x9_eager;
    auto candidates = std::vector<cublasLtMatmulHeuristicResult_t>(eager ? 64 : 1);
    auto found = 0;
    auto status = lt.cublasLtMatmulAlgoGetHeuristic(
        handle(device),
        &matmul.operation,
        &matmul.weights,
        &matmul.input,
        &matmul.output,
        &matmul.output,
        &preference,
        static_cast<int>(candidates.size()),
        candidates.data(),
        &found
    );
    if (status == CUBLAS_STATUS_SUCCESS) {
        for (int i = 0; i < found; i++) {
            if (!eager || emulates(candidates[i].algo)) {
                return candidates[i].algo;
            }
        }
    }
    throw std::runtime_error(
        "cuBLASLt has no algorithm " + plan.name() + " for M = " + std::to_string(problem.M) +
        ", N = " + std::to_string(problem.N) + ", K = " + std::to_string(problem.K) +
        "; use another mode for this layer."
    );
}

/// The heuristic takes as long as a small product, so its answers are kept.
cublasLtMatmulAlgo_t
cached_algorithm(int device, const Plan &plan, const Gemm &problem, Description &matmul) {
    using Key = std::array<int64_t, 14>;
    static std::mutex mutex;
    static auto &algorithms = *new std::map<Key, cublasLtMatmulAlgo_t>();
    constexpr std::size_t capacity = 4096;

    auto key = Key{
        device,
        static_cast<int64_t>(plan.kernel),
        problem.M,
        problem.N,
        problem.K,
        problem.lda,
        problem.ldb,
        problem.ldc,
        problem.transpose_b,
        problem.bias != nullptr,
        alignment(problem.A),
        alignment(problem.B),
        alignment(problem.C),
        alignment(problem.bias),
    };
    auto lock = std::lock_guard(mutex);
    auto entry = algorithms.find(key);
    if (entry != algorithms.end()) {
        return entry->second;
    }
    if (algorithms.size() >= capacity) {
        algorithms.clear();
    }
    auto algorithm = find_algorithm(device, plan, problem, matmul);
    algorithms.emplace(key, algorithm);
    return algorithm;
}

cublasComputeType_t compute_type(Kernel kernel) {
    switch (kernel) {
    case Kernel::cublas_fp32:
        return CUBLAS_COMPUTE_32F;
    case Kernel::cublas_tf32:
        return CUBLAS_COMPUTE_32F_FAST_TF32;
    case Kernel::cublas_bf16x9_performant:
    case Kernel::cublas_bf16x9_eager:
        return compute_bf16x9;
    default:
        throw std::logic_error(to_string(kernel) + " is not a kernel of cuBLAS.");
    }
}

} // namespace

int cuda_version() {
    return static_cast<int>(api().cublasLtGetCudartVersion());
}

void gemm(const Plan &plan, const Gemm &problem, void *workspace, void *stream) {
    const auto &lt = api();
    auto device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        throw std::runtime_error("No current CUDA device was found for a cuBLAS product.");
    }
    auto matmul = describe(compute_type(plan.kernel), problem);
    auto algorithm = cached_algorithm(device, plan, problem, matmul);
    auto one = 1.0f;
    auto zero = 0.0f;
    lt.check(
        lt.cublasLtMatmul(
            handle(device),
            &matmul.operation,
            &one,
            problem.B,
            &matmul.weights,
            problem.A,
            &matmul.input,
            &zero,
            problem.C,
            &matmul.output,
            problem.C,
            &matmul.output,
            &algorithm,
            workspace,
            plan.workspace_size,
            static_cast<cudaStream_t>(stream)
        ),
        "cublasLtMatmul"
    );
    if (compute_type(plan.kernel) == compute_bf16x9) {
        nonfinite::repair(problem, nullptr, static_cast<cudaStream_t>(stream));
    }
}

} // namespace metatomic_tc::cublas
