# Finds the headers and libraries of the PyTorch in the Python environment and defines the target
# `torch`. PyTorch's own CMake package asks for a complete CUDA toolkit whenever PyTorch is a CUDA
# build; nothing here needs more than its headers and shared libraries.
#
# Sets Torch_VERSION, Torch_VERSION_MAJOR, Torch_VERSION_MINOR, Torch_DIRECTORY, and Torch_CUDA: the
# CUDA version PyTorch was built for, or an empty string.
find_python_package(torch Torch_DIRECTORY)
if(NOT Torch_DIRECTORY)
    message(FATAL_ERROR
        "No PyTorch was found in the environment of ${Python_EXECUTABLE}, but metatomic-tc is built "
        "against the PyTorch it will run with; install it first: pip install torch")
endif()

file(STRINGS "${Torch_DIRECTORY}/version.py" version_line REGEX "^__version__ = ")
string(REGEX MATCH "([0-9]+)\\.([0-9]+)\\.([0-9]+)" Torch_VERSION "${version_line}")
set(Torch_VERSION_MAJOR ${CMAKE_MATCH_1})
set(Torch_VERSION_MINOR ${CMAKE_MATCH_2})
set(Torch_VERSION_PATCH ${CMAKE_MATCH_3})
file(STRINGS "${Torch_DIRECTORY}/version.py" cuda_line REGEX "^cuda")
string(REGEX MATCH "[0-9]+\\.[0-9]+" Torch_CUDA "${cuda_line}")

if(NOT TARGET torch)
    add_library(torch INTERFACE IMPORTED)
    target_include_directories(torch INTERFACE
        "${Torch_DIRECTORY}/include" "${Torch_DIRECTORY}/include/torch/csrc/api/include")
    # libtorch.so is what pulls in the CUDA backend, though nothing refers to a symbol of it
    target_link_libraries(torch INTERFACE
        "-Wl,--no-as-needed" "${Torch_DIRECTORY}/lib/libtorch.so"
        "${Torch_DIRECTORY}/lib/libtorch_cpu.so" "${Torch_DIRECTORY}/lib/libc10.so"
        "-Wl,--as-needed")
    # those libraries find the CUDA libraries that they need themselves, at run time
    target_link_options(torch INTERFACE
        "$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:-Wl,--unresolved-symbols=ignore-in-shared-libs>")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Torch
    REQUIRED_VARS Torch_DIRECTORY VERSION_VAR Torch_VERSION)
