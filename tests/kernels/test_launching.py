"""What the driver gets from our own launches, in the version of Triton that is installed.

The GPU on which all else is tested has another version. A stub in place of the driver keeps what
kernels are launched with: their parameters are those of the kernel's code, in its order.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from stub_driver import needs_stub, printed

STREAM = 77
OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SCRATCH = [0, 0]

pytestmark = needs_stub


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The launches of each launcher, and the addresses of their tensors."""
    return printed("recorded_launches.py", tmp_path_factory.mktemp("driver"))


def launches(recorded, name):
    """The launches, with the names of tensors for their addresses."""
    names = {address: tensor for tensor, address in recorded[name]["addresses"].items()}
    found = recorded[name]["launches"]
    for launch in found:
        assert launch["stream"] == STREAM
        values = launch["parameters"]
        launch["parameters"] = [names.get(value, value % (1 << 32)) for value in values]
    return found


def matrix(name, rows, columns):
    """The parameters for a tensor descriptor: the descriptor, sizes, strides."""
    return [name, rows, columns, columns, 1]


def test_first_layers_of_gated_mlps(recorded):
    (launch,) = launches(recorded, "epilogue")
    assert launch["kernel"] == "fusedmlp_epilogue_hopper"
    assert (launch["programs"], launch["threads"], launch["attribute"]) == (128, 384, OVERLAPS)
    assert launch["parameters"] == [
        *matrix("x", 500, 1024),
        *matrix("weight_gate", 2048, 1024),
        "bias_gate",
        *matrix("weight_up", 2048, 1024),
        *matrix("y", 500, 2048),
        500,
        *SCRATCH,
    ]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("plain", [*matrix("weight_up", 3072, 768), "bias_up"]),
        ("transposed", matrix("weight_up", 768, 3072)),
    ],
)
def test_first_layers_of_plain_mlps(recorded, name, layer):
    (launch,) = launches(recorded, name)
    assert launch["kernel"] == "fusedmlp_epilogue_hopper"
    assert (launch["programs"], launch["threads"], launch["attribute"]) == (132, 384, OVERLAPS)
    assert launch["parameters"] == [
        *matrix("x", 8192, 768),
        *layer,
        *matrix("y", 8192, 3072),
        8192,
        *SCRATCH,
    ]


def test_last_layers_and_the_sums_that_follow(recorded):
    (launch,) = launches(recorded, "last")
    assert launch["kernel"] == "fusedmlp_epilogue_hopper"
    assert (launch["programs"], launch["threads"], launch["attribute"]) == (132, 384, OVERLAPS)
    assert launch["parameters"] == [
        *matrix("x", 8192, 3072),
        *matrix("weight_up", 768, 3072),
        *("bias_up", "residual"),
        *matrix("y", 8192, 768),
        8192,
        *SCRATCH,
    ]


def pair(name, rows, columns):
    """The parameters for two matrices that lie side by side; of the second the address varies."""
    return [[name, rows, columns, 2 * columns, 1], [rows, columns, 2 * columns, 1]]


def test_first_layers_that_save_pre_activations_side_by_side(recorded):
    (launch,) = launches(recorded, "saving")
    addresses, parameters = recorded["saving"]["addresses"], launch["parameters"]
    gate, up = pair("preacts", 500, 2048)
    assert launch["kernel"] == "fusedmlp_epilogue_hopper"
    assert parameters[:25] == [
        *matrix("x", 500, 1024),
        *matrix("weight_gate", 2048, 1024),
        *matrix("weight_up", 2048, 1024),
        *matrix("y", 500, 2048),
        *gate,
    ]
    assert parameters[25] == (addresses["preacts"] + 2 * 2048) % (1 << 32)
    assert parameters[26:] == [*up, 500, *SCRATCH]


def test_gradients_of_pre_activations_side_by_side(recorded):
    (launch,) = launches(recorded, "hidden_gradient")
    addresses, parameters = recorded["hidden_gradient"]["addresses"], launch["parameters"]
    assert launch["kernel"] == "fusedmlp_hidden_gradient_hopper"
    grad_output = matrix("x", 500, 768)
    assert parameters[:15] == [*grad_output, *grad_output, *matrix("weight_down", 768, 2048)]
    for start, name in ((15, "preacts"), (25, "grads")):
        gate, up = pair(name, 500, 2048)
        assert parameters[start : start + 5] == gate
        assert parameters[start + 5] == (addresses[name] + 2 * 2048) % (1 << 32)
        assert parameters[start + 6 : start + 10] == up
    assert parameters[35:] == [*matrix("y", 500, 2048), "sums", 500, *SCRATCH]


def test_gradients_that_take_the_memory_of_two_pre_activations(recorded):
    (launch,) = launches(recorded, "hidden_gradient_in_place")
    both = [*matrix("gate", 500, 2048), *matrix("up", 500, 2048)]
    assert launch["parameters"] == [
        *matrix("x", 500, 768),
        *matrix("weight_down", 768, 2048),
        *both,
        *both,
        *matrix("y", 500, 2048),
        500,
        *SCRATCH,
    ]


def test_the_input_gradient_of_two_matrices(recorded):
    (launch,) = launches(recorded, "input_gradient")
    assert launch["kernel"] == "fusedmlp_epilogue_hopper"
    assert launch["parameters"] == [
        *matrix("gate", 500, 2048),
        *matrix("up", 500, 2048),
        *matrix("weight_gate", 2048, 1024),
        *matrix("weight_up", 2048, 1024),
        *matrix("y", 500, 1024),
        500,
        *SCRATCH,
    ]


def test_narrow_mlps(recorded):
    (launch,) = launches(recorded, "back_to_back")
    assert launch["kernel"] == "fusedmlp_back_to_back_hopper"
    assert (launch["programs"], launch["threads"], launch["attributes"]) == (27, 384, 0)
    assert launch["parameters"] == [
        "x",
        *matrix("weight_up", 256, 64),
        *matrix("weight_down", 64, 256),
        *("bias_up", "bias_down", "y"),
        *(5000, 64 // 8),
        *SCRATCH,
    ]


@pytest.mark.parametrize(
    ("name", "x", "added"), [("summed", "x", ["residual"]), ("summed_with_x", "residual", [])]
)
def test_narrow_mlps_with_what_is_around_them(recorded, name, x, added):
    """A residual that is x is not passed; both are named by the last name of the address."""
    (launch,) = launches(recorded, name)
    assert launch["kernel"] == "fusedmlp_back_to_back_hopper"
    assert launch["parameters"] == [
        x,
        *matrix("weight_up", 256, 64),
        *matrix("weight_down", 64, 256),
        *(*added, "norm_weight", "y"),
        *(5000, 64 // 8),
        *SCRATCH,
    ]


def test_the_overlapping_pair(recorded):
    first, second = launches(recorded, "stream")
    assert [each["attribute"] for each in (first, second)] == [OVERLAPS, OVERLAPS]
    assert first["kernel"] == "fusedmlp_stream_hopper_hidden"
    assert second["kernel"] == "fusedmlp_stream_hopper_out"
    hidden = first["parameters"][3]
    assert first["parameters"] == ["x", "weight_gate", "weight_up", hidden, 16, 768 // 8, *SCRATCH]
    assert second["parameters"] == [hidden, "weight_down", "bias_down", "y", 16, *SCRATCH]


@pytest.mark.parametrize(
    "name",
    ["epilogue", "plain", "transposed", "last", "back_to_back", "summed_with_x", "stream"],
)
def test_what_is_launched_was_compiled_in_threads_when_it_was_prepared(recorded, name):
    threads = recorded[name]["compiled_by"]
    assert len(threads) == len(recorded[name]["launches"])
    assert "MainThread" not in threads
