# The CUDA kernels of the target metatomic_tc. cudart is linked statically and cuBLASLt is found at
# run time, so that the library loads on machines without CUDA too.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
        "PyTorch ${Torch_VERSION} here is a CUDA ${Torch_CUDA} build, but no CUDA compiler (nvcc) was "
        "found; install the CUDA toolkit, or build without GPU support: "
        "pip install . -C cmake.define.METATOMIC_TC_CUDA=OFF")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    # machine code for each generation that has a kernel of its own, and PTX for the others
    set(CMAKE_CUDA_ARCHITECTURES "80;90a-real;100-real")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

find_python_package(cutlass_library cutlass_directory)
find_path(CUTLASS_INCLUDE_DIR cutlass/cutlass.h
    PATHS "${cutlass_directory}/source/include" NO_CMAKE_FIND_ROOT_PATH)
if(NOT CUTLASS_INCLUDE_DIR)
    message(FATAL_ERROR
        "The CUTLASS headers were not found, but the CUDA kernels are built from them; install them: "
        "pip install --no-deps nvidia-cutlass==4.2.0.0")
endif()

find_python_package(nvidia nvidia_directory)
find_path(CUBLASLT_INCLUDE_DIR cublasLt.h
    PATHS ${CUDAToolkit_INCLUDE_DIRS}
        "${nvidia_directory}/cu13/include" "${nvidia_directory}/cublas/include")
if(NOT CUBLASLT_INCLUDE_DIR)
    message(FATAL_ERROR
        "The header cublasLt.h was found neither in the CUDA toolkit nor in the Python environment; "
        "install it: pip install --no-deps nvidia-cublas==13.0.2.14")
endif()

target_sources(metatomic_tc PRIVATE
    kernels/cublas.cpp
    kernels/cutlass_3xtf32.cpp
    kernels/cutlass_3xtf32_plain.cu
    kernels/cutlass_3xtf32_transposed.cu
    kernels/gemm_cuda.cpp
    kernels/mma_bf16.cpp
    kernels/mma_bf16x6_plain.cu
    kernels/mma_bf16x6_transposed.cu
    kernels/mma_bf16x9_plain.cu
    kernels/mma_bf16x9_transposed.cu
    kernels/nonfinite.cu
    kernels/pet/attention_backward_double.cu
    kernels/pet/attention_backward_float.cu
    kernels/pet/attention_forward_double.cu
    kernels/pet/attention_forward_float.cu
    kernels/pet/attention_tf32x3.cu
    kernels/pet/rows.cu
    kernels/wgmma.cpp
    kernels/wgmma_bf16x6.cu
    kernels/wgmma_bf16x6_two_parts.cu
    kernels/wgmma_bf16x9.cu
    kernels/wgmma_bf16x9_two_parts.cu
    kernels/wgmma_fp16x3.cu
    kernels/wgmma_fp16x3_shared.cu
    kernels/wgmma_tf32x3.cu
    kernels/wgmma_tf32x3_two_parts.cu
)
target_include_directories(metatomic_tc PRIVATE
    ${CUTLASS_INCLUDE_DIR} ${CUBLASLT_INCLUDE_DIR})
target_link_libraries(metatomic_tc PRIVATE CUDA::cudart_static)
target_compile_options(metatomic_tc PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
set_source_files_properties(kernels/gemm_cuda.cpp PROPERTIES
    COMPILE_DEFINITIONS "METATOMIC_TC_CUDA_ARCHITECTURES=\"${architectures}\"")
# in machine code for other architectures, and in PTX, these kernels are empty
if(architectures MATCHES "90a")
    set_source_files_properties(kernels/wgmma.cpp PROPERTIES
        COMPILE_DEFINITIONS METATOMIC_TC_WGMMA)
endif()
# linked by the C++ compiler: nvcc's link line can bring a static libstdc++, which does not mix with
# PyTorch's shared one
set_target_properties(metatomic_tc PROPERTIES
    CUDA_RUNTIME_LIBRARY None
    CUDA_STANDARD 17
    LINKER_LANGUAGE CXX
)
