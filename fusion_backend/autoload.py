"""What ``import torch`` calls in an environment that has this package.

PyTorch calls the entry points of the group ``torch.backends`` when it is imported, unless the
variable ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0.
"""

from __future__ import annotations

import contextlib


def register_operators_on_first_use() -> None:
    """Let the first use of ``torch.ops.fusedmlp`` register its operators.

    A program that was exported after fusion names them, so it loads without an import of this
    package. Nothing else of the package is imported here, and nothing is raised: it would make
    ``import torch`` fail.
    """
    with contextlib.suppress(Exception):
        from fusion_backend.compat.operator_namespace import import_on_first_use

        import_on_first_use("fusedmlp", "fusion_backend.operators")
