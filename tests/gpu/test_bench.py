"""`fusedmlp bench` on a GPU: replays, kernels, and libraries that compute the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusion_backend.cli import main


def measured(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", "--width", "64", "--rounds", "2", "--json", *argv]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"].values()
    peers: dict[str, Any] = cell["peers"]
    return peers


def test_every_peer_is_timed_counted_and_as_exact_as_eager(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers = measured(capsys, "--rows", "1024", "--peers", "eager,bare,inductor,cublaslt,fusedmlp")
    assert peers["eager"]["kernels"] > peers["bare"]["kernels"] >= 2
    assert peers["fusedmlp"]["kernels"] <= peers["inductor"]["kernels"]
    for name, row in peers.items():
        assert row["us"] > 0, name
        assert 0 < row["floor_share"] < 1, name
        if name != "bare":
            assert row["error"] <= 1.1 * peers["eager"]["error"], name


@pytest.mark.parametrize("name", ["liger", "liger-mlp", "quack"])
def test_a_librarys_modules_compute_the_mlp(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    peers = measured(capsys, "--form", "swiglu", "--rows", "512", "--peers", f"eager,{name}")
    if "not installed" in peers[name].get("absent", ""):
        pytest.skip(peers[name]["absent"])
    assert peers[name]["error"] <= 1.5 * peers["eager"]["error"]
