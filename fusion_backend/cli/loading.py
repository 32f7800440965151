"""From `package.module:factory` on the command line to a model with its arguments."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusion_backend.compat.tracing import tree_map
from fusion_backend.errors import CommandError, OptionError
from fusion_backend.options import PREFIX, nearest, split_options
from fusion_backend.planning.gpus import gpu_named

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model and one call of it: `model(*args, **kwargs)`."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Loaded:
        """The model and its tensors on `device`; floating-point ones as `dtype` unless None."""

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        return Loaded(
            self.model.to(device, dtype), tree_map(move, self.args), tree_map(move, self.kwargs)
        )


@contextmanager
def of_the_command_line() -> Iterator[None]:
    """Let a wrong option be an error of the command line, which gave it."""
    try:
        yield
    except OptionError as error:
        raise CommandError(str(error)) from error


def check_folder(path: Path, flag: str) -> None:
    """Refuse a file that cannot be written, before anything is compiled or measured.

    Raises:
        CommandError: there is no such folder, or the file is one.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"{flag} must name a file in a folder that there is, got {path}")


def load_for(arguments: argparse.Namespace) -> Loaded:
    """The model of a command line, on its device and in its dtype.

    Raises:
        CommandError: the device or the GPU to plan for is not there, or :func:`load` fails.
    """
    if getattr(arguments, "target", None) is not None:
        with of_the_command_line():
            gpu_named(arguments.target)  # refused before the model is made
    device = choose_device(arguments.device)
    with torch.device("meta") if device.type == "meta" else nullcontext():
        loaded = load(arguments.factory)
    return loaded.to(device, choose_dtype(arguments.dtype))


def load(target: str) -> Loaded:
    """Import the factory that `target` names, and call it; what they print goes to stderr.

    Raises:
        CommandError: there is no such module or factory, it raised, or it returned something else
            than (model, args) or (model, args, kwargs).

    """
    with redirect_stdout(sys.stderr):
        factory = find_factory(target)
        try:
            made = factory()
        except Exception as error:
            raise CommandError(f"{target} raised {type(error).__name__}: {error}") from error
    return check_result(target, made)


def find_factory(target: str) -> Callable[[], Any]:
    """The callable that `target` names.

    Raises:
        CommandError: it does not name one.

    """
    place, separator, name = target.rpartition(":")
    if not (separator and place and name):
        raise CommandError(
            f"the model must be given as package.module:factory or file.py:factory, got {target!r}"
        )
    module = import_file(Path(place)) if place.endswith(".py") else import_name(place)
    if not hasattr(module, name):
        names = named_functions(module)
        has = ", ".join(names) or "no functions of its own"
        raise CommandError(f"{place} has no {name!r}{nearest(name, names)}; it has {has}")
    factory = getattr(module, name)
    if not callable(factory):
        raise CommandError(f"{target} must be a function, got {type(factory).__name__}")
    return factory  # type: ignore[no-any-return]


def import_name(name: str) -> ModuleType:
    """Import a module by its dotted name, from the current directory too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise CommandError(
                f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
            ) from error
        raise CommandError(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise CommandError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def import_file(path: Path) -> ModuleType:
    """Import a file as a module; its own directory is on the path, as with `python file.py`."""
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    # The name must not shadow an installed module: files named profile.py are common.
    name = f"fusedmlp_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dynamo and pickling look a function's module up by its name.
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def named_functions(module: ModuleType) -> list[str]:
    """The public functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]


def check_result(target: str, made: Any) -> Loaded:
    """What a factory returned, as a `Loaded`."""
    wanted = "(model, args) or (model, args, kwargs)"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CommandError(f"{target} must return {wanted}, got {type(made).__name__}")
    model, args, kwargs = (*made, {}) if len(made) == 2 else made
    if not isinstance(model, torch.nn.Module):
        raise CommandError(
            f"{target} must return {wanted} with a torch.nn.Module, got {type(model).__name__}"
        )
    if not isinstance(args, tuple | list):
        raise CommandError(f"the args of {target} must be a tuple, got {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise CommandError(f"the kwargs of {target} must be a dict, got {type(kwargs).__name__}")
    return Loaded(model, tuple(args), kwargs)


def choose_device(asked: str | None) -> torch.device:
    """The device that was asked for, or a GPU if there is one.

    Raises:
        CommandError: a GPU was asked for by name and there is none.

    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: PyTorch finds no GPU (`fusedmlp doctor` says why)")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_dtype(asked: str | None) -> torch.dtype | None:
    """The dtype of that name, None for none."""
    return None if asked is None else DTYPES[asked]


def choose_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Options for `torch.compile`; those of the environment stay in force where none is given.

    Raises:
        CommandError: one has a value that it cannot take, such as a form that there is not.

    """
    given = {name: getattr(arguments, name) for name in ("policy", "exclude", "disable_forms")}
    options = {f"{PREFIX}{name}": value for name, value in given.items() if value is not None}
    with of_the_command_line():
        split_options(options)
    return options
