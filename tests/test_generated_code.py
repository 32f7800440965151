"""The code that Inductor writes for an H200, without a GPU: which kernels it calls for an MLP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import compiled, with_gluon
from processes import caches_in

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
    "towers": 2 * (["fusedmlp_chain_towers"],),
}


PROGRAM = """
import runpy, sys
from pathlib import Path

path = Path(sys.argv[1])
sys.path.insert(0, str(path.parent))
runpy.run_path(str(path), run_name="__main__")
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory, children):
    # There is no GPU to measure on.
    variables = {**caches_in(tmp_path_factory.mktemp("caches")), "FUSEDMLP_MEASURE": "0"}
    path = str(Path(__file__).with_name("generated_code.py"))
    printed = children.printed(PROGRAM, arguments=[path], environment=variables)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", [case for case in EXPECTED if not case.endswith(DYNAMIC)])
def test_an_mlp_is_as_many_calls_as_its_plan_has(generated, case, dynamic):
    name = case + DYNAMIC if dynamic else case
    calls = ["triton" if call.startswith("triton_") else call for call in generated[name]["calls"]]
    assert (calls, generated[name]["begun"]) == EXPECTED.get(name, EXPECTED[case])
