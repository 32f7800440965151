"""``torch.ops.fusedmlp``: schema, fakes, autograd, autocast and lowering.

Importing this room registers the operators.
"""

from fusion_backend.operators import activated as activated
from fusion_backend.operators import chain as chain
from fusion_backend.operators import mlp as mlp
