# Turns .metal files into one C++ string, their own headers put in place, each once: for compilation on the user's machine,
# where newLibrary(source) sees no headers but Metal's own.
#   cmake -DOUTPUT=<file> -DFUNCTION=<name> "-DSOURCES=a.metal;b.metal" -P embed_kernels.cmake
cmake_minimum_required(VERSION 3.22)

# Lines hold semicolons and brackets, which CMake's lists take for their own.
function(protect text_out text)
  string(REPLACE ";" "@semicolon@" text "${text}")
  string(REPLACE "[" "@open@" text "${text}")
  string(REPLACE "]" "@close@" text "${text}")
  set(${text_out} "${text}" PARENT_SCOPE)
endfunction()

# Appends the file to `text`, with each header where it is first included; `seen` has the headers so far.
function(append_file path)
  file(READ ${path} content)
  protect(content "${content}")
  string(REPLACE "\n" ";" lines "${content}")
  get_filename_component(folder ${path} DIRECTORY)
  foreach(line IN LISTS lines)
    if(line MATCHES "^#include \"(.*)\"$")
      get_filename_component(header ${folder}/${CMAKE_MATCH_1} ABSOLUTE)
      if(NOT header IN_LIST seen)
        list(APPEND seen ${header})
        append_file(${header})
      endif()
    elseif(NOT line MATCHES "^#pragma once")
      string(APPEND text "${line}\n")
    endif()
  endforeach()
  set(text "${text}" PARENT_SCOPE)
  set(seen "${seen}" PARENT_SCOPE)
endfunction()

set(text "")
set(seen "")
foreach(source IN LISTS SOURCES)
  append_file(${source})
endforeach()
string(REPLACE "@semicolon@" ";" text "${text}")
string(REPLACE "@open@" "[" text "${text}")
string(REPLACE "@close@" "]" text "${text}")

# Compilers limit the length of one literal; adjacent literals are joined.
set(literal "")
string(LENGTH "${text}" length)
set(at 0)
while(at LESS length)
  string(SUBSTRING "${text}" ${at} 8000 piece)
  string(APPEND literal "R\"MSL(${piece})MSL\"\n")
  math(EXPR at "${at} + 8000")
endwhile()
file(WRITE ${OUTPUT} "// Generated from kernels/ by embed_kernels.cmake.
#include \"backend/metal/kernel_sources.h\"

namespace calla::metal {

const char* ${FUNCTION}() {
  return
${literal};
}

}  // namespace calla::metal
")
