"""What the steps of a chain say, and which values they need."""

from __future__ import annotations

import pytest

from fusion_backend.mlp.steps import Step, Steps

BLOCK = "layer_norm(1e-05); linear; activation; linear; activation(0)"


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        f"{BLOCK}; rms_norm(1e-06); linear; activation(0, 5); linear",
        "linear; activation; linear(0, x); activation; linear(x, 0)",
    ],
)
def test_a_text_says_what_its_steps_say(text):
    layers = text.count("linear")
    assert Steps.of(text, layers).text == text


def test_without_a_text_an_activation_is_between_each_two_layers():
    assert Steps.of("", 3) == Steps.of("linear; activation; linear; activation; linear", 3)
    assert Steps.of("", 3).text == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear; softmax; linear", "got 'softmax'"),
        ("linear; activation(a); linear", "got 'activation\\(a\\)'"),
        ("linear; activation; linear; activation; linear", "as many layers as weights, 2, got 3"),
        ("linear; activation(2); linear", "step 1 must read earlier values"),
        ("linear; activation; linear(1, x)", "must be linear, linear\\(0, x\\)"),
        ("linear(0, x); activation; linear", "the first layer must read one value"),
    ],
)
def test_what_says_no_steps_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Steps.of(text, 2)


def test_steps_belong_to_the_value_of_the_layer_before_them():
    steps = Steps.of(BLOCK, 2)
    assert steps.groups == ((0,), (2,), (4,))
    assert steps.group_of == (0, 0, 1, 1, 2, 2)
    assert steps.begins == (0, 2, 4)


def test_norms_and_sums_need_whole_values_and_activations_do_not():
    steps = Steps.of(f"{BLOCK}; linear; activation; linear", 4)
    assert steps.held == {0, 2}
    assert Steps.of("", 4).held == frozenset()


def test_a_layer_that_also_reads_the_input_needs_no_whole_value_and_keeps_none():
    steps = Steps.of("linear; activation; linear(0, x); activation; linear", 3)
    assert steps.beside == ("", "before", "")
    assert steps.only_activates
    assert not steps.is_plain
    assert steps.held == frozenset()
    assert not any(steps.live())


def test_an_activation_at_the_end_needs_no_whole_value_and_a_norm_there_does():
    steps = Steps.of("linear; activation; linear; activation", 2)
    assert (steps.only_activates, steps.is_plain, steps.held) == (True, False, frozenset())
    steps = Steps.of("linear; activation; linear; rms_norm(1e-06)", 2)
    assert (steps.only_activates, steps.held) == (False, {2})


def test_a_value_is_kept_until_it_is_read_for_the_last_time():
    assert [len(live) for live in Steps.of(BLOCK, 2).live()] == [1] * 5
    assert [len(live) for live in Steps.of("linear; activation(0); linear", 2).live()] == [1, 1, 0]


def test_steps_of_a_kind_are_counted_and_both_norms_are_of_one():
    steps = Steps.of("rms_norm(1e-06); linear; activation; layer_norm(1e-05); linear", 2)
    assert [steps.ordinal(i) for i in range(5)] == [0, 0, 0, 1, 1]
    assert steps.norms == (Step("rms_norm", eps=1e-6), Step("layer_norm", eps=1e-5))
