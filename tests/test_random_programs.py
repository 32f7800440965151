"""Fused programs do what eager does: results, strides, aliases, writes, gradients, logs.

`python tests/random_programs.py --programs 5000` tries as many.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import differential
import program_activations as activations
import program_effects as effects
import program_statements as templates
from crashing import crash_at_seed_two
from differential import difference, shrunk
from fuzzing import AGREED, DIFFERS, EAGER_CRASHED, Attempt, Tally, attempts
from program_operators import LOG
from program_runs import Refused, eager, repaired
from random_programs import Program, random_program

# Seeds of the programs that are tried, so many in a test; `make test-all` tries all.
PROGRAMS, IN_ONE, QUICK = 150, 10, 10
CHUNKS = [
    pytest.param(first, marks=[pytest.mark.slow] * (first >= QUICK))
    for first in range(0, PROGRAMS, IN_ONE)
]


@pytest.mark.parametrize("first", CHUNKS)
def test_random_programs_do_what_eager_does(first):
    ran = fused = 0
    for seed in range(first, first + IN_ONE):
        try:
            program = repaired(random_program(seed))
            compared = difference(program)
        except Refused:
            continue
        found = compared.found
        assert found is None, "{}\n# {}".format(*shrunk(program, found))
        ran, fused = ran + 1, fused + compared.fused
    assert ran > IN_ONE // 2
    assert fused > IN_ONE // 4


@pytest.mark.parametrize("seed", [0, 1])
def test_a_program_depends_on_its_seed_only(seed):
    assert random_program(seed) == random_program(seed)
    assert random_program(seed) != random_program(seed + 2)


def program(*statements, results=("t",), **how):
    """A program of a few statements; ``x`` is (5, 8)."""
    usual = {
        "seed": 0,
        "leading": (5,),
        "widths": (8, 16),
        "layout": "contiguous",
        "dtype": "float32",
        "grad": False,
        "frozen": ("kept", "total"),
        "dynamic": False,
    }
    return Program(statements=statements, results=results, **(usual | how))


VALUES = ("t0 = x * 1.0", "t1 = F.linear(t0, up)", "t2 = t1.sigmoid()", "t4 = F.linear(t2, down)")
NAMES = {"h": "t1", "a": "t1", "b": "t2", "v": "t0", "w": "up", "m": "t3", "y": "t4", "c": "0.5"}
STATEMENTS = (effects.WRITES, effects.OF_MASKS, *effects.STATEMENTS)
EXPRESSIONS = (
    *(effects.WRITING_VALUES, effects.WRITING_RESULTS),
    *(activations.ACTIVATIONS, activations.CONVERSIONS, activations.GUARDS, activations.SYMBOLIC),
    *(activations.MASKS, activations.MASKED),
    *(activations.UNARY, activations.BINARY, activations.WITH_NUMBER),
    *(templates.PRODUCTS, templates.DOWN, templates.SUMS, templates.GRADIENTS, templates.BLOCKS),
)


def is_run(template, is_statement):
    """Whether eager runs a template: of a mask or a whole number, with gradients or without."""
    text = template.format(**NAMES, D=8, H=16)
    for mask in ("t2 > 0", "(t2 > 0).int() + 1"):
        for grad in (False, True):
            made = (*VALUES, f"t3 = {mask}", text if is_statement else f"t5 = {text}")
            try:
                eager(program(*made, results=("t1",) if is_statement else ("t5",), grad=grad))
            except Refused:
                continue
            return True
    return False


def test_eager_runs_every_spelling():
    statements = [(template, True) for kind in STATEMENTS for template in kind]
    expressions = [(template, False) for kind in EXPRESSIONS for template in kind]
    assert [t for t, kind in statements + expressions if not is_run(t, kind)] == []


def test_what_eager_refuses_is_left_out_with_what_reads_it():
    refused = program(*VALUES, "t5 = t4 @ t4", "t6 = t5 + 1", results=("t4", "t6"))
    assert repaired(refused) == program(*VALUES, results=("t4",))
    trained = program("t0 = x.tanh()", "t = t0.exp()", "t0.add_(1)", "t.add_(1)", grad=True)
    assert repaired(trained) == replace(trained, grad=False)  # no backward pass
    with pytest.raises(Refused):
        repaired(program("t = x @ x"))


def detached_writes(function):
    return lambda *arguments: function(*(argument.clone() for argument in arguments))


def without_log(function):
    def call(*arguments):
        results = function(*arguments)
        LOG.clear()
        return results

    return call


def changed(change):
    """A function with another first result; ``change`` takes it and the arguments."""
    return lambda function: lambda *given: (change(*function(*given), *given),)


def raising(function):
    def call(*arguments):
        raise ValueError

    return call


LAYER = program("t = F.linear(x, up)")
TRAINED = replace(LAYER, grad=True)
INFINITE = program("t = x.log()", numbers="points", widths=(1, 1), leading=(33,))
FAULTS = {
    "result value": (LAYER, changed(lambda y, x, up: y + 0.01)),
    "result class": (INFINITE, changed(lambda y, x: y.nan_to_num(0.0, torch.inf, -torch.inf))),
    "result strides": (LAYER, changed(lambda y, x, up: y.mT.contiguous().mT)),
    "result dtype or shape": (LAYER, changed(lambda y, x, up: y.double())),
    "result requires_grad": (TRAINED, changed(lambda y, x, up: y.detach())),
    "argument value": (program("kept.add_(1)", "t = x * 2"), detached_writes),
    "aliases": (program("t = x.view(-1)"), changed(lambda y, x: y.clone())),
    "gradient value": (TRAINED, changed(lambda y, x, up: y + (x - x.detach()).sum())),
    "gradient None": (
        program("t = (F.linear(x, gate) > 0) * F.linear(x, up)", grad=True),
        changed(lambda y, x, gate, up: y + 0 * gate.sum()),
    ),
    "logs missing": (program("t = x * 2", "ops.note(t)"), without_log),
    "raises ValueError": (LAYER, raising),
}


@pytest.fixture
def compiled_as(monkeypatch):
    """Lets a function stand for what the backend makes of a program."""

    def compile_as(fault):
        def compiled(function, program, options, compiler, sites):
            return fault(function) if options.policy == "always" else function

        monkeypatch.setattr(differential, "compile_program", compiled)

    return compile_as


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_each_kind_is_told(compiled_as, kind):
    faulty, fault = FAULTS[kind]
    compiled_as(lambda function: function)
    assert difference(faulty).found is None
    compiled_as(fault)
    assert difference(faulty).found.kind == kind


def test_a_number_that_is_compiled_in_is_told_by_the_next_call(compiled_as):
    def baking(function):
        numbers = []

        def call(x, s):
            numbers.append(s)
            return function(x, numbers[0])

        return call

    seed = next(i for i in range(99) if {random_s(i), random_s(i + 1)} == {0.25, 0.7})
    compiled_as(baking)
    assert difference(program("t = x * s", seed=seed)).found is None
    assert difference(program("t = x * s", seed=seed, dynamic=True)).found.kind == "result value"


def random_s(seed):
    return program("t = x * s", seed=seed).scalars["s"]


def test_a_failing_program_is_shrunk_to_what_fails(compiled_as):
    compiled_as(lambda function: lambda *given: tuple(-y for y in function(*given)))
    made = (*VALUES, "t5 = t4 + 1", "t6 = t4.relu()")
    whole = program(*made, "hook(t1)", results=("t5", "t6"), grad=True, layout="strided")
    small, found = shrunk(whole, difference(whole).found)
    assert found.kind == "result value"
    assert small == program(*made[:5], results=("t5",))


# t is 0, or as much as its terms are rounded by: eager may give 0.5 as well.
JUMP = program(
    "t = F.linear(x, up)",
    "t = t - t * 1.1 / 1.1",
    results=("t.masked_fill(t < 0, 0.5)",),
    dtype="bfloat16",
)


@pytest.mark.parametrize(("given", "is_told"), [(0.5, False), (0.3, True), (-0.5, True)])
def test_a_value_is_told_unless_a_rounding_decides_it(compiled_as, given, is_told):
    compiled_as(changed(lambda y, x, up: y.index_fill(0, torch.tensor([0]), given)))
    assert (difference(JUMP).found is not None) == is_told


def test_what_no_rounding_decides_is_told_of_narrow_values_too(compiled_as):
    exact = replace(JUMP, statements=("t = F.linear(x, up)", "t = t - t * torch.ones_like(t)"))
    compiled_as(changed(lambda y, x, up: y.index_fill(0, torch.tensor([0]), 0.5)))
    assert difference(exact).found.kind == "result value"


ROUNDED_BY_ADDING = program("t = (F.linear(x, up) + 12582912.0) - 12582912.0")
STEEP = program("t = torch.sin(F.linear(x, up) * 3e6)")


def test_what_is_exact_in_float64_is_told_where_eager_rounds_to_whole_numbers(compiled_as):
    compiled_as(changed(lambda y, x, up: torch.nn.functional.linear(x, up)))
    assert difference(ROUNDED_BY_ADDING).found.kind == "result value"


def test_what_roundings_decide_is_not_told(compiled_as):
    compiled_as(lambda f: lambda x, up: (torch.sin((x @ up.t()).double() * 3e6).float(),))
    assert difference(STEEP).found is None
    compiled_as(lambda f: lambda x, up: (2 + torch.sin(x @ up.t() * 3e6),))
    assert difference(STEEP).found.kind == "result value"


def test_sites_in_float64_are_fused():
    layers = ("t1 = F.linear(x, up)", "t = F.linear(F.gelu(t1), down)")
    assert difference(program(*layers, dtype="float64")).fused == 1


def test_programs_behind_one_that_crashes_are_tried_all_the_same():
    found = [
        (attempt.seed, attempt.outcome) for attempt in attempts(range(5), "none", crash_at_seed_two)
    ]
    assert found == [(i, EAGER_CRASHED if i == 2 else "agreed") for i in range(5)]


def test_a_summary_groups_findings_by_kind():
    total = Tally()
    for seed, kind in enumerate(("aliases", "logs missing", "aliases", "")):
        outcome = DIFFERS if kind else AGREED
        found = {
            "kind": kind,
            "signature": kind and f"{kind} [add]",
            "sites": {"fused": 2, "dtype": 1},
        }
        total.add(Attempt(seed, outcome, "none", **found))
    lines = total.summary().splitlines()
    assert lines[0] == "3 differs, 1 agreed; 8 of 12 sites fused"
    assert "2 × aliases" in lines
    assert "    2 × aliases [add]: seeds [0, 2]" in lines
