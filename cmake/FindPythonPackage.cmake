# find_python_package(NAME RESULT) sets RESULT to the directory of the Python package NAME, or to
# RESULT-NOTFOUND. The package is never imported. METATOMIC_TC_SITE_PACKAGES is searched first, then
# the environment of the Python interpreter: with -I, so that pip's build isolation, which works
# through PYTHONPATH, does not hide the packages installed there.
function(find_python_package name result)
    foreach(directory IN LISTS METATOMIC_TC_SITE_PACKAGES)
        if(EXISTS "${directory}/${name}")
            set(${result} "${directory}/${name}" PARENT_SCOPE)
            return()
        endif()
    endforeach()
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -I -c "
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(list(spec.submodule_search_locations)[0] if spec else '')" ${name}
        OUTPUT_VARIABLE directory OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    )
    if(directory)
        set(${result} "${directory}" PARENT_SCOPE)
    else()
        set(${result} "${result}-NOTFOUND" PARENT_SCOPE)
    endif()
endfunction()
