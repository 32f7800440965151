"""Benchmarks of single MLPs: every installed way to run one, side by side in one process.

cells      what is measured: forms, sizes, precisions, and the grids
peers      who is measured: eager, Inductor, libraries, fusedmlp
measuring  how: interleaved, weights from device memory, errors against float64
roofline   what the hardware allows
results    the JSON file, continued after every cell, and its summary
warm_up    compiling in parallel before the timing
tables     results as text
plots      results as PNG
"""
