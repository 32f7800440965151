"""The launches of Triton's kernels by name, for benchmarks, tests and whoever tries a kernel.

    epilogue          first product(s) and activation
    linear            the second product, and the sum that follows it
    hidden_gradient   gradient of the pre-activations
    back_to_back      a whole narrow MLP
    narrow_gradient   its backward pass
    stream            a whole MLP of few rows, in two launches, which overlap where they can

The package itself calls them through the families in ``registry``.
"""

from fusion_backend.kernels.back_to_back.launch import back_to_back as back_to_back
from fusion_backend.kernels.back_to_back.launch import narrow_gradient as narrow_gradient
from fusion_backend.kernels.epilogue.gradient_launch import (
    hidden_and_operand_gradients as hidden_and_operand_gradients,
)
from fusion_backend.kernels.epilogue.gradient_launch import hidden_gradient as hidden_gradient
from fusion_backend.kernels.epilogue.gradient_launch import (
    summed_hidden_gradient as summed_hidden_gradient,
)
from fusion_backend.kernels.epilogue.launch import epilogue as epilogue
from fusion_backend.kernels.epilogue.launch import linear as linear
from fusion_backend.kernels.stream.launch import stream as stream
