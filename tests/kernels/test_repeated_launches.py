"""What launches of one kernel share, and what is made anew: see ``compat/triton_launches.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from stub_driver import needs_stub, printed

SOURCE, TARGET, OTHER, COUNTER = (0x1000 * number for number in range(1, 5))
BFLOAT16, FLOAT16 = 9, 6  # CU_TENSOR_MAP_DATA_TYPE_…

pytestmark = needs_stub


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """For each step its launch, the number of tensor maps made for it, and the calls of hooks."""
    return printed("repeated_launches.py", tmp_path_factory.mktemp("driver"))


def maps(steps, name):
    """Of the source and the target: address, rows, columns and bytes from row to row."""
    (launch,) = steps[name]["launches"]
    return [(each["address"], *each["sizes"], each["stride"]) for each in launch["maps"]]


def parameters(steps, name):
    """Those of the kernel: of numbers, the 32 bits that it reads."""
    (launch,) = steps[name]["launches"]
    return [each % (1 << 32) for each in launch["parameters"]]


def test_the_first_launch_makes_a_map_of_each_matrix(steps):
    assert steps["first"]["made"] == 2
    assert maps(steps, "first") == [(SOURCE, 256, 128, 256), (TARGET, 256, 128, 256)]
    source, target = [SOURCE, 256, 128, 128, 1], [TARGET, 256, 128, 128, 1]
    assert parameters(steps, "first") == [*source, *target, COUNTER, 256, 0, 0]


@pytest.mark.parametrize("name", ["again", "first again", "other stream", "no hooks again"])
def test_a_launch_of_the_same_makes_none(steps, name):
    assert steps[name]["made"] == 0
    assert maps(steps, name) == maps(steps, "first")
    assert parameters(steps, name) == parameters(steps, "first")


@pytest.mark.parametrize(
    ("name", "of_source"),
    [
        ("other address", (OTHER, 256, 128, 256)),
        ("fewer rows", (SOURCE, 192, 128, 256)),
        ("fewer columns", (SOURCE, 256, 96, 256)),
        ("other stride", (SOURCE, 256, 128, 320)),
    ],
)
def test_another_address_size_or_stride_makes_another_map(steps, name, of_source):
    assert steps[name]["made"] == 1
    assert maps(steps, name) == [of_source, (TARGET, 256, 128, 256)]
    address, rows, columns, stride = of_source
    assert parameters(steps, name)[:5] == [address, rows, columns, stride // 2, 1]


def test_a_kernel_for_another_dtype_has_maps_of_that(steps):
    (first,), (other,) = (steps[name]["launches"] for name in ("first", "float16"))
    assert [each["type"] for each in first["maps"]] == [BFLOAT16, BFLOAT16]
    assert [each["type"] for each in other["maps"]] == [FLOAT16, FLOAT16]


def test_a_number_alone_needs_no_other_map(steps):
    assert steps["number alone"]["made"] == 0
    assert parameters(steps, "number alone")[-3:] == [100, 0, 0]


def test_each_launch_is_on_the_current_stream(steps):
    streams = [steps[name]["launches"][0]["stream"] for name in ("again", "other stream")]
    assert streams == [77, 78]


def test_hooks_are_called_where_there_are_some(steps):
    kernel = ["copied", 77]
    assert steps["chains of hooks"]["hooks"] == [["enter", *kernel], ["exit", *kernel]]
    assert steps["a function as a hook"]["hooks"] == [["enter", *kernel]]
    assert steps["no hooks again"]["hooks"] == []
    for name in ("chains of hooks", "a function as a hook"):
        assert parameters(steps, name) == parameters(steps, "first")


@pytest.mark.parametrize(
    "name", ["unknown version", "unknown metadata", "unknown functions", "scratch memory"]
)
def test_tritons_launcher_launches_what_is_not_as_expected(steps, name):
    """It makes all maps each time."""
    for each in (name, f"{name}, again"):
        assert steps[each]["made"] == 2
        assert parameters(steps, each) == parameters(steps, "first")
        assert maps(steps, each) == maps(steps, "first")


def test_few_maps_are_kept(steps):
    assert [steps[f"of few, {address}"]["made"] for address in (SOURCE, OTHER, TARGET)] == [2, 1, 1]
    assert steps["forgotten"]["made"] == 1
    assert maps(steps, "forgotten") == maps(steps, "first")
