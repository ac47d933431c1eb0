# Defines the target `metatomic_tc`: the operator library and its headers, with the PyTorch of the
# same Python environment.
find_package(Python REQUIRED COMPONENTS Interpreter)
list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
include(FindPythonPackage)
find_package(Torch REQUIRED MODULE)

get_filename_component(metatomic_tc_directory "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET metatomic_tc)
    add_library(metatomic_tc SHARED IMPORTED)
    set_target_properties(metatomic_tc PROPERTIES
        IMPORTED_LOCATION "${metatomic_tc_directory}/lib/libmetatomic_tc.so"
        INTERFACE_INCLUDE_DIRECTORIES "${metatomic_tc_directory}/include"
        INTERFACE_COMPILE_FEATURES cxx_std_20
    )
    target_link_libraries(metatomic_tc INTERFACE torch)
endif()
