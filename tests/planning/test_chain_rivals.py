"""A chain and what would run without it, as they are timed while compiling; here on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_backend.kernels.registry import CHAIN, REFERENCE
from fusion_backend.mlp.expression import parse
from fusion_backend.planning import chain_profit, while_compiling
from fusion_backend.planning.chain_rivals import ChainRivals, bytes_of_chain
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.user_table import UserTable
from settings import SETTING

H100 = gpu_named("h100")
BLOCKS = (
    "layer_norm(1e-05); linear; activation; linear; activation(0); "
    "rms_norm(1e-06); linear; activation; linear; activation(5)"
)
GELU, ADDED = parse("gelu(x)"), parse("x + p0")
CHAIN_SETTING = replace(
    SETTING,
    rows=100,
    in_features=32,
    hidden_features=48,
    further_features=(32, 40, 32),
    activations=(GELU, ADDED, GELU, ADDED),
    steps=BLOCKS,
    target=None,
)
NORMED = replace(
    CHAIN_SETTING,
    further_features=(32, 3),
    activations=(GELU, GELU),
    steps="linear; layer_norm(1e-05); activation; linear; rms_norm(1e-06); activation; linear",
)
JOINED = replace(
    CHAIN_SETTING,
    further_features=(24, 56, 3),
    activations=(GELU,) * 3,
    steps="linear; activation; linear; activation; linear(0, x); activation; linear",
)
PLAIN = replace(CHAIN_SETTING, activations=(GELU,) * 3, steps="")


def rivals_of(setting):
    here = replace(setting, device=torch.device("cpu"), dtype=torch.float32)
    return ChainRivals.of(here, 1 << 15)


@pytest.mark.parametrize("setting", [CHAIN_SETTING, NORMED, JOINED, PLAIN])
def test_every_candidate_computes_a_result_of_its_shape(setting, monkeypatch):
    rivals = rivals_of(setting)
    pairs = {name: dict.fromkeys(each, REFERENCE.name) for name, each in rivals._pairs.items()}
    monkeypatch.setattr(ChainRivals, "_pairs", pairs)
    for candidate in rivals.candidates([REFERENCE.name], "").values():
        y = candidate.function(*candidate.operands[0])
        assert y.shape == (100, setting.further_features[-1])
        assert y.isfinite().all()


@pytest.mark.parametrize(
    ("setting", "kernels", "in_pairs"),
    [
        (CHAIN_SETTING, 4 + 5, 2),  # products, and a kernel for each value
        (NORMED, 3 + 2, None),
        (JOINED, 4 + 3, 3),  # two pairs, and the concatenation between
        (PLAIN, 4 + 3, 3),  # two pairs, and the pointwise kernel between
    ],
)
def test_kernels_are_counted(setting, kernels, in_pairs):
    rivals = rivals_of(setting)
    assert rivals.kernels_of(INDUCTOR) == kernels
    assert rivals.kernels_of(CHAIN.name) == 1
    names = rivals.candidates([CHAIN.name], "").keys()
    assert ("pairs" in names) is (in_pairs is not None)
    if in_pairs is not None:
        assert rivals.kernels_of("pairs") == in_pairs


def test_no_random_number_of_the_program_is_drawn():
    state = torch.get_rng_state()
    rivals_of(CHAIN_SETTING)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_come_from_memory_and_not_from_a_cache():
    few = rivals_of(NORMED)
    one = sum(weight.numel() for weight in few.sets[0].weights) * 4
    assert (len(few.sets) - 1) * one < 1.5 * (1 << 15) <= len(few.sets) * one
    here = replace(NORMED, dtype=torch.float32)
    assert bytes_of_chain(here, 1 << 15) == (len(few.sets) * one, 100 * (32 + 48 + 32 + 3) * 4)


def test_a_layer_that_reads_the_input_too_has_a_wider_weight():
    rivals = rivals_of(JOINED)
    assert rivals.sets[0].weights[2].shape == (56, 24 + 32)
    here = replace(JOINED, dtype=torch.float32)
    weights = 48 * 32 + 24 * 48 + 56 * 56 + 3 * 56
    values = 32 + 48 + 24 + 32 + 56 + 3
    assert bytes_of_chain(here, 1 << 15) == (len(rivals.sets) * 4 * weights, 100 * 4 * values)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an H100 on which the chain takes 6 µs, and the chains that are timed."""
    measured = []

    def timed(setting, families, seconds):
        measured.append(setting)
        return {INDUCTOR: 20.0, "pairs": 8.0, CHAIN.name: 6.0}

    while_compiling.measured_once.cache_clear()
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusion_backend.planning.setting.gpu_of", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 36, 1 << 36))
    monkeypatch.setattr(while_compiling, "cache_of", lambda device: 50 << 20)
    monkeypatch.setattr(while_compiling, "timed", timed)
    yield measured
    while_compiling.measured_once.cache_clear()


def residual_blocks(width):
    features = {"in_features": width, "hidden_features": width, "further_features": (width,) * 3}
    return replace(CHAIN_SETTING, **features, dtype=torch.bfloat16)


def test_a_chain_of_which_the_model_is_unsure_is_timed_once(machine):
    setting = residual_blocks(128)
    verdict = chain_profit.best(setting, may_time=True)
    assert verdict.family == CHAIN.name
    assert verdict.expected_speedup == pytest.approx(8 / 6)
    assert "measured here for this chain: 6.0 µs, the unfused layers 20.0 µs" in verdict.grounds
    chain_profit.best(setting, may_time=True)
    assert len(machine) == 1
    (name,) = UserTable.of(H100).sites()
    assert "100×128→128→128→128→128" in name
    assert BLOCKS in name


def test_a_chain_that_loses_against_its_pairs_is_not_formed(machine, monkeypatch):
    times = {INDUCTOR: 20.0, "pairs": 6.0, CHAIN.name: 6.0}
    monkeypatch.setattr(while_compiling, "timed", lambda *_: times)
    assert chain_profit.best(residual_blocks(128), may_time=True).family is None


@pytest.mark.parametrize(
    ("change", "may_time"),
    [({}, False), ({"target": H100}, True)],
    ids=["switched off", "for another GPU"],
)
def test_the_model_decides_where_nothing_may_be_timed(machine, change, may_time):
    verdict = chain_profit.best(replace(residual_blocks(128), **change), may_time)
    assert "by the model" in verdict.grounds
    assert machine == []


def test_a_chain_of_which_the_model_is_sure_is_not_timed(machine):
    plain = {"activations": (GELU,) * 4, "steps": "", "further_features": (48,) * 4}
    sure = replace(residual_blocks(48), **plain)
    assert chain_profit.best(sure, may_time=True).family == CHAIN.name
    assert machine == []
