"""The family ``rows``: on the CPU, blocks of rows through all layers in one parallel region.

rows.h      products, panels of weights, blocks of rows, shares of hidden features
printed     an activation expression as C++
source      the whole of a kernel's C++
compiling   Inductor's C++ compiler and its cache
cutting     how the work of a call is cut
launch      calls
"""
