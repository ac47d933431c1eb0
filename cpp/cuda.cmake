# The CUDA kernels, in the target metatomic_tc_kernels. cudart is linked statically and cuBLASLt is found at
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

# add_kernel(NAME HEADER NAMESPACE DECLARATION...): a file with explicit instantiations, on its own so
# that the many kernels compile side by side and a change compiles few of them
function(add_kernel name header namespace)
    set(statements "")
    foreach(declaration IN LISTS ARGN)
        string(APPEND statements "template ${declaration};\n")
    endforeach()
    set(file "${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.cu")
    file(CONFIGURE OUTPUT "${file}" @ONLY CONTENT
        "#include \"@header@\"\n\nnamespace @namespace@ {\n@statements@}\n")
    target_sources(metatomic_tc_kernels PRIVATE "${file}")
endfunction()

foreach(transposed IN ITEMS false true)
    add_kernel(cutlass_3xtf32_${transposed} product/cutlass/3xtf32_kernel.cuh metatomic_tc::cutlass_3xtf32
        "void run_layout<${transposed}>(Kernel, const Gemm &, int *, cudaStream_t)")
    foreach(products IN ITEMS 6 9)
        add_kernel(mma_bf16x${products}_${transposed} product/mma/bf16_kernel.cuh metatomic_tc::mma_bf16
            "void run_layout<${products}, ${transposed}>(Kernel, const Gemm &, int *, cudaStream_t)")
    endforeach()
endforeach()
set(list product/wgmma/kernels.inc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
file(STRINGS ${list} kernels REGEX "^WGMMA_KERNEL")
foreach(kernel IN LISTS kernels)
    string(REGEX MATCH "^WGMMA_KERNEL.[a-z0-9_]+, ([A-Za-z0-9]+),.*, (true|false)" match "${kernel}")
    set(mode ${CMAKE_MATCH_1})
    set(declarations "")
    foreach(tile_n IN ITEMS 64 128)
        if(tile_n EQUAL 128 OR CMAKE_MATCH_2)
            list(APPEND declarations
                "void pack<${mode}, ${tile_n}>(const Plan &, const Gemm &, void *, cudaStream_t)"
                "void launch<${mode}, ${tile_n}>(const Plan &, const Gemm &, void *, void *, cudaStream_t)")
        endif()
    endforeach()
    add_kernel(wgmma_${mode} product/wgmma/launch.cuh metatomic_tc::wgmma ${declarations})
endforeach()

foreach(type IN ITEMS float double)
    foreach(direction IN ITEMS Attention AttentionBackward)
        add_kernel(${direction}_${type} pet/kernels/attention_kernel.cuh metatomic_tc::pet
            "void launch_attention(const ${direction}<${type}> &, void *)")
    endforeach()
endforeach()

target_sources(metatomic_tc_kernels PRIVATE
    linear/kernels/glu_backward.cu
    pet/kernels/attention_tf32x3.cu
    pet/kernels/rows.cu
    product/cublas/cublas.cpp
    product/cutlass/3xtf32.cpp
    product/gemm_cuda.cpp
    product/mma/bf16.cpp
    product/nonfinite.cu
    product/wgmma/wgmma.cpp
)
target_include_directories(metatomic_tc_kernels PRIVATE
    ${CUTLASS_INCLUDE_DIR} ${CUBLASLT_INCLUDE_DIR})
target_link_libraries(metatomic_tc_kernels PUBLIC CUDA::cudart_static)
target_compile_options(metatomic_tc_kernels PRIVATE
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
set_target_properties(metatomic_tc_kernels PROPERTIES
    CUDA_RUNTIME_LIBRARY None
    CUDA_STANDARD 17
)
set_target_properties(metatomic_tc PROPERTIES LINKER_LANGUAGE CXX)
