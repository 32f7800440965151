"""The family ``rows``: on the CPU, blocks of rows through all layers in one parallel region.

common.h    layers, vectors of float32 from any element type
products.h  products of rows by weights, in panels or as they are
matrix_units.h  the same in 16 bits, where the CPU has matrix units
rows.h      blocks of rows, shares of hidden features
printed     an activation expression as C++
source      the whole of a kernel's C++
compiling   Inductor's C++ compiler and its cache
cutting     how the work of a call is cut
launch      calls
"""
