"""A namespace of ``torch.ops`` whose operators are registered when one of them is looked up."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def import_on_first_use(name: str, module: str) -> None:
    """Let lookups of operators in ``torch.ops.<name>`` import a module first.

    Args:
        name: of the namespace.
        module: whose import registers the operators. It is imported by the first lookup, whose
            caller sees the errors of the import.
    """
    namespace = getattr(torch.ops, name)
    plain: Any = type(namespace)

    class OnFirstUse(plain):  # type: ignore[misc]  # a private class of torch
        __module__ = plain.__module__  # names of operators, in programs that are saved, begin so

        def __getattr__(self, operator: str) -> Any:
            # What is found is kept as an attribute: this is called once for each operator.
            if not operator.startswith("__"):
                importlib.import_module(module)
            return super().__getattr__(operator)

    namespace.__class__ = OnFirstUse
