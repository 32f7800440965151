"""The code that Inductor writes for an H200, without a GPU: which kernels it calls for an MLP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import compiled, with_gluon

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for"),
    compiled,
    with_gluon,
]

# What is called, kernels of Triton or functions of ours, "triton" for one of Inductor's own; and
# which of ours Inductor's processes compile, where the code contains them.
DYNAMIC = ", dynamic"
EXPECTED = {
    "many rows": (["fusedmlp_epilogue", "addmm"], []),
    "many rows, transposed": (["fusedmlp_epilogue", "addmm"], []),
    "many rows, gated": (["fusedmlp_epilogue", "mm"], []),
    "by cuBLASLt": (["_addmm_activation", "addmm"], []),
    "few rows": (["fusedmlp_stream"], []),
    "few rows, gated, wide": 2 * (["fusedmlp_stream_hidden", "fusedmlp_stream_out"],),
    "narrow": (["fusedmlp_back_to_back"], []),
    "narrow, 128": 2 * (["fusedmlp_back_to_back"],),
    "many rows, norm and sum": (["triton", "fusedmlp_epilogue", "fusedmlp_epilogue"], []),
    "many rows, norm and sum, dynamic": (["triton", "fusedmlp_epilogue", "addmm", "triton"], []),
    "many rows, norm and sum, idle tiles": (["triton", "fusedmlp_epilogue", "addmm", "triton"], []),
    "narrow, norm and sum": (["fusedmlp_back_to_back"], []),
    "chain": 2 * (["fusedmlp_chain"],),
}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("caches"))
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEDMLP_CACHE_DIR")
    environment = {**os.environ, **dict.fromkeys(caches, folder)}
    program = [sys.executable, Path(__file__).with_name("generated_code.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", [case for case in EXPECTED if not case.endswith(DYNAMIC)])
def test_an_mlp_is_as_many_calls_as_its_plan_has(generated, case, dynamic):
    name = case + DYNAMIC if dynamic else case
    calls = ["triton" if call.startswith("triton_") else call for call in generated[name]["calls"]]
    assert (calls, generated[name]["begun"]) == EXPECTED.get(name, EXPECTED[case])
