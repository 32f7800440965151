"""``torch.ops.fusedmlp``: schema, fakes, autograd, autocast and lowering.

Importing this room registers the operators.
"""

import torch

from fusion_backend.operators import cpu_calls, gpu_calls, sharing
from fusion_backend.operators.activated import ActivatedLinear
from fusion_backend.operators.chain import Chain
from fusion_backend.operators.implementation import implement
from fusion_backend.operators.mlp import Mlp
from fusion_backend.operators.towers import Towers

_LIBRARY = torch.library.Library("fusedmlp", "DEF")
MLP, ACTIVATED_LINEAR, CHAIN = Mlp(_LIBRARY), ActivatedLinear(_LIBRARY), Chain(_LIBRARY)
#: What ``torch.ops.fusedmlp`` has of whole MLPs and chains.
OPERATORS = (MLP, ACTIVATED_LINEAR, CHAIN)
for _operator in OPERATORS:
    implement(_LIBRARY, _operator)
TOWERS = Towers(_LIBRARY, CHAIN)
gpu_calls.register(_LIBRARY)
cpu_calls.register(_LIBRARY)
sharing.register(_LIBRARY)
