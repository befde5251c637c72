# softmetal_library(NAME SOURCES a.metal ... [INCLUDES dir ...] [DEFINITIONS macro ...])
#
# Compiles Metal kernels into the program as the library NAME: host code finds it through
# newLibrary("NAME.metallib"), newDefaultLibrary(), or newLibrary(source) with the text of the .metal files.
# Link the target NAME. Behind it are two shared libraries: NAME_plain, and NAME_checked, whose loads and stores
# are seen by softmetal's checks; softmetal::Options::check (SOFTMETAL_CHECK=1) chooses at run time.
# Include this file from any folder's CMakeLists.txt; it defines the target softmetal (the runtime, with
# <Metal/Metal.hpp> and <softmetal/softmetal.h>) if it is not there yet.
include_guard(GLOBAL)
set(SOFTMETAL_DIR ${CMAKE_CURRENT_LIST_DIR} CACHE INTERNAL "")
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT TARGET softmetal)
  add_subdirectory(${SOFTMETAL_DIR}/runtime ${CMAKE_BINARY_DIR}/softmetal_runtime)
endif()

function(softmetal_library name)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  cmake_parse_arguments(ARG "" "" "SOURCES;INCLUDES;DEFINITIONS" ${ARGN})
  set(include_flags -I${SOFTMETAL_DIR}/msl)
  foreach(dir ${ARG_INCLUDES})
    get_filename_component(dir ${dir} ABSOLUTE)
    list(APPEND include_flags -I${dir})
  endforeach()
  set(define_flags)
  foreach(definition ${ARG_DEFINITIONS})
    list(APPEND define_flags -D${definition})
  endforeach()

  set(translated)
  foreach(source ${ARG_SOURCES})
    get_filename_component(path ${source} ABSOLUTE)
    get_filename_component(stem ${source} NAME_WE)
    set(output ${CMAKE_CURRENT_BINARY_DIR}/${name}/${stem}.metal.cc)
    file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/${name})
    add_custom_command(OUTPUT ${output}
      COMMAND ${Python3_EXECUTABLE} ${SOFTMETAL_DIR}/tools/translate.py ${path} --compiler ${CMAKE_CXX_COMPILER}
              --library ${name} ${include_flags} ${define_flags} --depfile ${output}.d --output ${output}
      DEPENDS ${path} ${SOFTMETAL_DIR}/tools/translate.py ${SOFTMETAL_DIR}/tools/msl_text.py
              ${SOFTMETAL_DIR}/tools/msl_table.py
      DEPFILE ${output}.d
      COMMENT "Translating ${stem}.metal"
      VERBATIM)
    list(APPEND translated ${output})
  endforeach()

  foreach(flavour plain checked)
    set(target ${name}_${flavour})
    add_library(${target} SHARED ${translated})
    target_include_directories(${target} PRIVATE ${SOFTMETAL_DIR}/msl)
    target_link_libraries(${target} PRIVATE softmetal)
    set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON)
    # No contraction: results must not depend on the machine. Symbols stay inside the library, so that the two
    # builds of one inline function never replace each other.
    target_compile_options(${target} PRIVATE -O2 -g -march=native -ffp-contract=off -fno-exceptions
      -Wall -Wextra -Wno-unused-function -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-variable)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE -fno-gnu-unique)
    endif()
    if(flavour STREQUAL "checked")
      # Instrumentation for its hooks only; softmetal defines them, the sanitizers' runtimes are not linked.
      target_compile_options(${target} PRIVATE -fsanitize=thread -fsanitize=bounds,alignment,integer-divide-by-zero)
      target_compile_definitions(${target} PRIVATE SOFTMETAL_INSTRUMENTED=true)
    else()
      target_compile_definitions(${target} PRIVATE SOFTMETAL_INSTRUMENTED=false)
    endif()
  endforeach()

  add_library(${name} INTERFACE)
  # Nothing in the program refers to the kernels by symbol; the linker must keep the libraries all the same.
  # One word, so that CMake keeps it together; the targets behind it bring the order of building and the rpath.
  target_link_libraries(${name} INTERFACE
    "-Wl,--push-state,--no-as-needed,$<TARGET_FILE:${name}_plain>,$<TARGET_FILE:${name}_checked>,--pop-state"
    ${name}_plain ${name}_checked)
endfunction()
