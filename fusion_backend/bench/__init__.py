"""Benchmarks of MLPs: every installed way to run one, side by side in one process.

cells          what is measured: forms, sizes, precisions
grids          the cells that are published
model_cells    the MLPs of a model as cells
peer           a way to run MLPs
peers          eager, the compilers, fusedmlp
library_peers  cuBLASLt, Liger, QuACK
measuring      in turns, weights from device memory, errors against float64
whole_model    the same for whole models
roofline       what the hardware allows
results        the JSON file, continued after every cell, and its summary
warm_up        compiling in parallel before the timing
tables, plots  results as text and as PNG
"""
