"""A program: launch a kernel repeatedly on a machine without a GPU, and print what was made anew.

    python tests/kernels/repeated_launches.py DIRECTORY

DIRECTORY as for ``recorded_launches.py``. No memory is read, so addresses are numbers that we make
up. For each step the launches, the tensor maps made for it and the calls of hooks are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from recorded_launches import Driver, pretend_there_is_a_gpu
from triton import knobs
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusion_backend.compat import triton_launches

BLOCK = (64, 32)
PARAMETERS = 14  # two descriptors of five, an address, a number, and what Triton adds
SOURCE, TARGET, OTHER, COUNTER = (0x1000 * number for number in range(1, 5))
OF_SOURCE, OF_TARGET = (SOURCE, 256, 128, 128), (TARGET, 256, 128, 128)


@triton.jit
def copied(source, target, counter, rows, nothing, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    tl.atomic_add(counter, rows)
    for column in range(0, 128, COLUMNS):
        target.store([row, column], source.load([row, column]))


def compiled(dtype: torch.dtype) -> Any:
    described = TensorDescriptor(MockTensor(dtype), [256, 128], [128, 1], list(BLOCK))
    counter = MockTensor(torch.int32)
    return copied.warmup(described, described, counter, 256, None, *BLOCK, grid=(1,))


class Steps:
    """What each step did."""

    def __init__(self, driver: Driver) -> None:
        self.found: dict[str, Any] = {}
        self.called: list[Any] = []
        self._driver = driver

    def run(self, name: str, launch: Callable[..., None], *matrices: Any, rows: int = 256) -> None:
        before = self._driver.made
        self.called.clear()
        self._driver.expect(PARAMETERS)
        source, target = matrices or (OF_SOURCE, OF_TARGET)
        launch(4, source, target, COUNTER, rows, None)
        self.found[name] = {
            "launches": self._driver.launched(),
            "made": self._driver.made - before,
            "hooks": list(self.called),
        }

    def enter(self, metadata: Any) -> None:
        self.called.append(("enter", metadata.get()["name"], metadata.get()["stream"]))

    def leave(self, metadata: Any) -> None:
        self.called.append(("exit", metadata.get()["name"], metadata.get()["stream"]))


def alternate(steps: Steps, launch: Callable[..., None]) -> None:
    steps.run("first", launch)
    steps.run("again", launch)
    steps.run("other address", launch, (OTHER, 256, 128, 128), OF_TARGET)
    steps.run("fewer rows", launch, (SOURCE, 192, 128, 128), OF_TARGET, rows=192)
    steps.run("other stride", launch, (SOURCE, 256, 128, 160), OF_TARGET)
    steps.run("fewer columns", launch, (SOURCE, 256, 96, 128), OF_TARGET)
    steps.run("number alone", launch, rows=100)
    steps.run("first again", launch)


def on_another_stream(steps: Steps, launch: Callable[..., None], current: dict[str, int]) -> None:
    current["stream"] = 78
    steps.run("other stream", launch)
    del current["stream"]


def with_hooks(steps: Steps, launch: Callable[..., None]) -> None:
    runtime = knobs.runtime
    runtime.launch_enter_hook.add(steps.enter)
    runtime.launch_exit_hook.add(steps.leave)
    steps.run("chains of hooks", launch)
    runtime.launch_enter_hook.remove(steps.enter)
    runtime.launch_exit_hook.remove(steps.leave)
    steps.run("no hooks again", launch)
    chains = runtime.launch_enter_hook, runtime.launch_exit_hook
    runtime.launch_enter_hook, runtime.launch_exit_hook = steps.enter, None
    steps.run("a function as a hook", launch)
    runtime.launch_enter_hook, runtime.launch_exit_hook = chains


def with_few_kept(steps: Steps, kernel: Any) -> None:
    triton_launches.KEPT_LAUNCHES = triton_launches.KEPT_MAPS = 2
    launch = triton_launches.prepared(kernel, BLOCK, 0)
    for address in (SOURCE, OTHER, TARGET):
        steps.run(f"of few, {address}", launch, (address, 256, 128, 128), OF_TARGET)
    steps.run("forgotten", launch)


def by_triton(steps: Steps, kernel: Any) -> None:
    """Interfaces that are not as they were seen, and kernels that need more than parameters."""
    utilities: Any = triton.runtime.driver.active.utils
    name = "fill_tma_descriptor"
    name = name if hasattr(utilities, name) else f"{name}_tiled"
    for what, of, attribute, value in (
        ("unknown version", triton, "__version__", "3.99.0"),
        ("unknown metadata", kernel, "metadata", None),
        ("scratch memory", kernel.run, "profile_scratch_size", 16),
    ):
        usual = getattr(of, attribute)
        setattr(of, attribute, value)
        launch = triton_launches.prepared(kernel, BLOCK, 0)
        setattr(of, attribute, usual)
        steps.run(what, launch)
        steps.run(f"{what}, again", launch)
    makes = getattr(utilities, name)
    delattr(utilities, name)
    launch = triton_launches.prepared(kernel, BLOCK, 0)
    setattr(utilities, name, makes)
    steps.run("unknown functions", launch)
    steps.run("unknown functions, again", launch)


def main() -> int:
    driver = Driver(Path(sys.argv[1], "libcuda.so.1"))
    pretend_there_is_a_gpu()
    private: Any = torch._C
    usual, current = private._cuda_getCurrentRawStream, {}
    private._cuda_getCurrentRawStream = lambda device: current.get("stream", usual(device))
    steps, kernel = Steps(driver), compiled(torch.bfloat16)
    launch = triton_launches.prepared(kernel, BLOCK, 0)
    alternate(steps, launch)
    on_another_stream(steps, launch, current)
    with_hooks(steps, launch)
    steps.run("float16", triton_launches.prepared(compiled(torch.float16), BLOCK, 0))
    by_triton(steps, kernel)
    with_few_kept(steps, kernel)
    print(json.dumps(steps.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
