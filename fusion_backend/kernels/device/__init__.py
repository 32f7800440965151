"""What kernels of several families are written with."""
