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
    product/cublas/cublas.cpp
    product/cutlass/3xtf32.cpp
    product/cutlass/3xtf32_plain.cu
    product/cutlass/3xtf32_transposed.cu
    product/gemm_cuda.cpp
    product/mma/bf16.cpp
    product/mma/bf16x6_plain.cu
    product/mma/bf16x6_transposed.cu
    product/mma/bf16x9_plain.cu
    product/mma/bf16x9_transposed.cu
    product/nonfinite.cu
    linear/kernels/glu_backward.cu
    pet/kernels/attention_backward_double.cu
    pet/kernels/attention_backward_float.cu
    pet/kernels/attention_forward_double.cu
    pet/kernels/attention_forward_float.cu
    pet/kernels/attention_tf32x3.cu
    pet/kernels/rows.cu
    product/wgmma/wgmma.cpp
    product/wgmma/bf16x6.cu
    product/wgmma/bf16x6_two_parts.cu
    product/wgmma/bf16x9.cu
    product/wgmma/bf16x9_two_parts.cu
    product/wgmma/fp16x3.cu
    product/wgmma/fp16x3_shared.cu
    product/wgmma/tf32x3.cu
    product/wgmma/tf32x3_two_parts.cu
)
target_include_directories(metatomic_tc PRIVATE
    ${CUTLASS_INCLUDE_DIR} ${CUBLASLT_INCLUDE_DIR})
target_link_libraries(metatomic_tc PRIVATE CUDA::cudart_static)
target_compile_options(metatomic_tc PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
set_source_files_properties(product/gemm_cuda.cpp PROPERTIES
    COMPILE_DEFINITIONS "METATOMIC_TC_CUDA_ARCHITECTURES=\"${architectures}\"")
# in machine code for other architectures, and in PTX, these kernels are empty
if(architectures MATCHES "90a")
    set_source_files_properties(product/wgmma/wgmma.cpp PROPERTIES
        COMPILE_DEFINITIONS METATOMIC_TC_WGMMA)
endif()
# linked by the C++ compiler: nvcc's link line can bring a static libstdc++, which does not mix with
# PyTorch's shared one
set_target_properties(metatomic_tc PROPERTIES
    CUDA_RUNTIME_LIBRARY None
    CUDA_STANDARD 17
    LINKER_LANGUAGE CXX
)
