# Stands for find_package(Python) where headers are all that there is of a Python: the one that runs CMake has another
# version, or is for another processor. On Linux an extension needs nothing else.
#
# MOEC_PYTHON_HEADERS: folder with Python.h and pyconfig.h.
# MOEC_PYTHON_VERSION: for example 3.10. From 3.12 on the extension has the stable ABI.
# SKBUILD_SOABI: middle of the extension's name, for example cpython-310-aarch64-linux-gnu.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(Python_VERSION ${MOEC_PYTHON_VERSION})
set(Python_INCLUDE_DIRS ${MOEC_PYTHON_HEADERS})
set(SKBUILD_SOSABI abi3)
add_library(Python::Module INTERFACE IMPORTED)
if(NOT Python_VERSION VERSION_LESS 3.12)
  add_library(Python::SABIModule INTERFACE IMPORTED)
endif()

# Debian's pyconfig.h includes <aarch64-linux-gnu/python3.11/pyconfig.h>, which is next to the folder. The folder above may
# be /usr/include, whose other headers are those of another C library.
get_filename_component(above ${MOEC_PYTHON_HEADERS} DIRECTORY)
get_filename_component(name ${MOEC_PYTHON_HEADERS} NAME)
set(divided ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
if(EXISTS ${above}/${divided}/${name}/pyconfig.h)
  set(links ${CMAKE_BINARY_DIR}/python-headers/${Python_VERSION})
  file(MAKE_DIRECTORY ${links})
  file(CREATE_LINK ${above}/${divided} ${links}/${divided} SYMBOLIC)
  list(APPEND Python_INCLUDE_DIRS ${links})
endif()
