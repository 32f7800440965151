"""One truth about TF32: whoever asks gets the answer of cuBLAS, whichever interface set it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from fusion_backend.bench.precision import products_in
from fusion_backend.compat import tf32
from fusion_backend.planning.cases import Case, kind_of

CUBLAS, ONEDNN = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
SETTERS = {
    "fp32_precision": lambda on: setattr(CUBLAS, "fp32_precision", "tf32" if on else "ieee"),
    "allow_tf32": lambda on: setattr(CUBLAS, "allow_tf32", on),
    "matmul_precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Those of a new process, before and after."""
    set_as_new()
    yield
    set_as_new()


def set_as_new() -> None:
    torch.set_float32_matmul_precision("highest")
    for backend in (CUBLAS, ONEDNN, torch.backends):
        backend.fp32_precision = "none"


def answers() -> tuple[bool, ...]:
    """What kernels and tables take for true."""
    pytest.importorskip("triton")
    from fusion_backend.kernels.host.problems import precision
    from fusion_backend.kernels.host.targets import H100

    case = Case.of_form("gelu", 16, 64, 256, "ieee").setting(torch.device("cpu"))
    kernels = precision(torch.float32, H100) == "tf32x3"
    return tf32.multiplies_in_tf32(), kernels, kind_of(case).precision == "tf32"


def readable() -> list[str | None]:
    """What the older interface says, ``None`` where it raises."""
    found: list[str | None] = []
    for read in (torch.get_float32_matmul_precision, lambda: CUBLAS.allow_tf32):
        try:
            found.append(str(read()))
        except RuntimeError:
            found.append(None)
    return found


def test_it_is_not_allowed_unless_someone_says_so() -> None:
    assert not any(answers())


@pytest.mark.parametrize("first", SETTERS)
@pytest.mark.parametrize("last", SETTERS)
def test_what_was_set_last_holds_in_whichever_interface(first: str, last: str) -> None:
    for before, after in itertools.product((True, False), repeat=2):
        SETTERS[first](before)
        SETTERS[last](after)
        assert set(answers()) == {after}, (before, after)


@pytest.mark.parametrize("setter", SETTERS)
def test_what_is_set_for_all_backends_holds_until_something_is_set_for_cublas(setter: str) -> None:
    torch.backends.fp32_precision = "tf32"
    assert all(answers())
    SETTERS[setter](False)
    assert not any(answers())


def test_states_that_the_older_interface_cannot_read_have_an_answer() -> None:
    CUBLAS.fp32_precision = "tf32"
    assert readable() == [None, None]
    assert all(answers())


def test_where_nvidias_libraries_are_told_never_to_round_it_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CUBLAS.fp32_precision = "tf32"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not any(answers())


@pytest.mark.parametrize("precision", ["tf32", "float32", "bfloat16"])
def test_a_benchmark_is_computed_in_what_it_is_called(precision: str) -> None:
    with products_in(precision):
        assert set(answers()) == {precision == "tf32"}
        assert readable()[1] == str(precision == "tf32")  # Inductor asks both interfaces


STATES = {
    "of a new process": lambda: None,
    **{
        f"{name}({on})": lambda s=s, on=on: s(on)
        for name, s in SETTERS.items()
        for on in (False, True)
    },
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "for oneDNN": lambda: setattr(ONEDNN, "fp32_precision", "bf16"),
    "for cuBLAS, after the older one": lambda: (
        torch.set_float32_matmul_precision("high"),
        SETTERS["fp32_precision"](False),
    ),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("allowed", [True, False])
def test_a_benchmark_leaves_both_interfaces_as_they_were(state: str, allowed: bool) -> None:
    STATES[state]()
    before = CUBLAS.fp32_precision, ONEDNN.fp32_precision, *readable()
    with tf32.multiplying_in_tf32(allowed):
        assert tf32.multiplies_in_tf32() is allowed
    assert (CUBLAS.fp32_precision, ONEDNN.fp32_precision, *readable()) == before
