"""Which plan a legal site gets, and that profit is only believed where it was measured."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from capture import Recorder, only_site
from fusion_backend import Options, explain
from fusion_backend.fusion.settings import legal_settings
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family, TritonFamily
from fusion_backend.mlp.expression import parse
from fusion_backend.planning import (
    cost_model,
    cpu_profit,
    cpu_rates,
    discounts,
    frozen_rates,
    measurements,
    planner,
    profit,
)
from fusion_backend.planning.cases import Case
from fusion_backend.planning.cpu_rates import Cell, Rates
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import Kind, Measurement
from models import MLP, Gated, X
from settings import SETTING, symbolic

TRITON = ("back_to_back", "stream", "epilogue")
HALF = Kind(form="gelu_tanh", training=False, precision="bfloat16")


def measured(rows, width=768, kind=HALF, **microseconds):
    return Measurement(kind, rows, width, 4 * width, width, microseconds, "on an H100")


TABLE = (
    measured(16, inductor=10.0, epilogue=20.0, library=9.0),
    measured(64, inductor=10.0, epilogue=8.0, library=9.0),
    measured(1024, inductor=10.0, epilogue=9.9, library=9.8),
    measured(64, width=64, inductor=10.0, back_to_back=5.0, epilogue=8.0),
    measured(1024, width=64, inductor=10.0, back_to_back=5.0),
    measured(5000, width=64, inductor=10.0, back_to_back=5.0),
)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    """Tables speak, as they do where the cost model does not."""
    monkeypatch.setattr(profit, "shipped", lambda gpu: TABLE)
    monkeypatch.setattr(cost_model, "speaks_for", lambda setting: False)


@pytest.mark.parametrize(
    ("rows", "family"),
    [
        (1, "library"),
        (16, "library"),
        (31, "library"),
        (64, "epilogue"),
        (65, None),
        (5000, None),
    ],
)
def test_a_plan_is_taken_that_pays_at_the_measured_rows_on_both_sides(rows, family):
    verdict = profit.best(("epilogue", "library"), replace(SETTING, rows=rows))
    assert verdict.family == family


def test_only_families_that_can_run_the_site_are_considered():
    assert profit.best(("epilogue",), replace(SETTING, rows=16)).family is None
    assert profit.best(("epilogue",), replace(SETTING, rows=64)).family == "epilogue"


def test_the_nearest_measured_widths_speak_for_a_site():
    narrow = replace(SETTING, rows=64, in_features=80, hidden_features=256, further_features=(64,))
    assert profit.best(("back_to_back", "epilogue"), narrow).family == "back_to_back"


def test_the_grounds_name_the_measurement():
    verdict = profit.best(("epilogue",), replace(SETTING, rows=64))
    assert verdict.grounds == (
        "1.25 times as fast as Inductor on an H100 at 64 rows of 768→3072→768"
    )


def test_the_expected_speedup_is_that_of_the_measurement():
    assert profit.best(("epilogue",), replace(SETTING, rows=64)).expected_speedup == 1.25


@pytest.mark.parametrize(
    "changes",
    [
        {"in_features": 8192, "hidden_features": 8192, "further_features": (8192,)},
        {"training": True, "target": gpu_named("a100")},
        {"dtype": torch.float32},
    ],
)
def test_what_was_not_measured_is_left_to_the_heuristic(changes):
    verdict = profit.best(("epilogue",), replace(SETTING, **changes))
    assert verdict.family is None
    assert "nothing like it was measured" in verdict.grounds
    assert "heuristic" in verdict.grounds


def test_the_heuristic_plans_what_was_not_measured(monkeypatch):
    monkeypatch.setattr(profit, "shipped", lambda gpu: ())
    verdict = profit.best(("epilogue",), replace(SETTING, rows=16))
    assert verdict.family == "epilogue"
    assert verdict.expected_speedup > 1.03
    assert "the heuristic expects 1." in verdict.grounds
    assert "`fusedmlp tune`" in verdict.grounds


@pytest.mark.parametrize(
    ("rows", "family", "guards"), [(20, "library", 1), (100, None, 1), (5000, None, 1)]
)
def test_symbolic_rows_are_guarded_only_where_the_plan_changes(rows, family, guards):
    environment, symbol = symbolic(rows)
    verdict = profit.best(("epilogue", "library"), replace(SETTING, rows=symbol))
    assert verdict.family == family
    assert len(environment.guards) == guards


def test_symbolic_rows_take_no_plan_that_is_slower_somewhere_in_their_class():
    _, symbol = symbolic(20)
    assert profit.best(("epilogue",), replace(SETTING, rows=symbol)).family is None


def test_symbolic_rows_need_no_guard_where_the_plan_never_changes():
    environment, rows = symbolic(100)
    narrow = replace(
        SETTING, rows=rows, in_features=64, hidden_features=256, further_features=(64,)
    )
    assert profit.best(("back_to_back",), narrow).family == "back_to_back"
    assert environment.guards == []


def test_streams_are_offered_first_where_rows_are_known_to_be_few():
    pytest.importorskip("triton")
    _, symbol = symbolic(20)
    offered = [
        tuple(f for f in planner.available(replace(SETTING, **changes)) if f in TRITON)
        for changes in (
            {"rows": 1},
            {"rows": 128},
            {"rows": 129},
            {"rows": symbol},
            {"rows": 1, "training": True},
            {"rows": 1, "dtype": torch.float32},
        )
    ]
    first, last, none = ("stream", "epilogue"), ("epilogue", "stream"), ("epilogue",)
    assert offered == [first, first, none, last, none, none]


def test_what_keeps_the_input_is_not_offered_for_frozen_first_layers():
    pytest.importorskip("triton")
    narrow = {"in_features": 64, "hidden_features": 256, "further_features": (64,)}
    trained = replace(SETTING, training=True, **narrow)
    assert "back_to_back" in planner.available(trained)
    assert "back_to_back" not in planner.available(replace(trained, first_frozen=True))
    assert "back_to_back" in planner.available(replace(trained, training=False, first_frozen=True))


def test_plans_that_cannot_read_the_operands_are_not_offered():
    pytest.importorskip("triton")
    kinds = ("scalar", "vector", "elementwise", "seed")
    for setting in (replace(SETTING, rows=rows, operands=kinds) for rows in (1, 5000)):
        offered = tuple(planner.available(setting))
        assert all(registry.named(f).untaken(kinds, training=False) is None for f in offered)
        assert "library" not in offered
    assert "library" in planner.available(SETTING)


def test_an_mlp_without_operands_speaks_for_one_with_them():
    setting = replace(
        SETTING, rows=64, activations=(parse("relu(x + p0)"),), operands=("elementwise",)
    )
    assert profit.best(("epilogue",), setting).family == "epilogue"


@pytest.mark.parametrize(
    ("operands", "gated", "pays"),
    [
        (("seed",), False, True),
        (("vector",), False, True),
        (("vector",), True, False),
        (("elementwise",), False, False),
        (("seed", "scalar"), True, False),
        ((), True, True),
    ],
)
def test_training_with_operands_pays_where_their_gradients_are_cheap(
    monkeypatch, operands, gated, pays
):
    kind = replace(HALF, form="swiglu" if gated else "gelu_tanh", training=True)
    known = measured(512, kind=kind, inductor=10.0, epilogue=8.0)
    monkeypatch.setattr(profit, "shipped", lambda gpu: (known,))
    setting = replace(SETTING, rows=512, training=True, gated=gated, operands=operands)
    assert (profit.best(("epilogue",), setting).family is not None) is pays


def test_a_gpu_site_whose_operands_no_family_reads_says_so(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(Family, "untaken", lambda *arguments: 0)
    monkeypatch.setattr(TritonFamily, "untaken", lambda *arguments: 0)
    monkeypatch.setattr(type(registry.STREAM), "untaken", lambda *arguments: 0)
    assert list(planner.available(SETTING)) == []
    setting = replace(SETTING, operands=("vector", "seed"))
    assert "reads all operands" in planner.why_no_kernel(setting, {})


def test_symbolic_rows_are_streamed_where_it_was_measured_to_be_faster_for_all_of_their_class(
    monkeypatch,
):
    few = [measured(rows, inductor=10.0, epilogue=9.0, stream=5.0) for rows in (1, 64)]
    many = measured(1024, inductor=10.0, epilogue=9.0)
    monkeypatch.setattr(profit, "shipped", lambda gpu: (*few, many))
    families = ("epilogue", "stream")
    environment, symbol = symbolic(20)
    assert profit.best(families, replace(SETTING, rows=symbol)).family == "stream"
    assert len(environment.guards) == 1
    _, symbol = symbolic(100)
    assert profit.best(families, replace(SETTING, rows=symbol)).family == "epilogue"


def test_symbolic_rows_are_streamed_up_to_as_many_as_can_be_where_that_was_measured(monkeypatch):
    few = [measured(rows, inductor=10.0, epilogue=9.0, stream=5.0) for rows in (1, 64, 128)]
    many = [measured(rows, inductor=10.0, epilogue=9.0) for rows in (1024, 4096)]
    monkeypatch.setattr(profit, "shipped", lambda gpu: (*few, *many))
    for rows, family, where in (
        (20, "stream", "1 to 128 rows"),
        (100, "stream", "1 to 128 rows"),
        (500, "epilogue", "1024 to 4096 rows"),
        (5000, "epilogue", "1024 to 4096 rows"),
    ):
        environment, symbol = symbolic(rows)
        verdict = profit.best(("epilogue", "stream"), replace(SETTING, rows=symbol))
        assert verdict.family == family
        assert where in verdict.grounds
        assert len(environment.guards) == 1


def test_the_shipped_tables_are_readable():
    table = measurements.shipped(gpu_named("h100"))
    column = measurements.column(table, HALF, (768, 3072, 768))
    assert [m.rows for m in column] == sorted({m.rows for m in column})
    assert measurements.shipped(gpu_named("a100")) == ()


@pytest.mark.parametrize(
    ("gpu", "name"), [("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")]
)
def test_what_the_table_of_a_model_lacks_comes_from_its_architecture(gpu, name):
    sources = {m.cell: m.source for m in measurements.shipped(gpu_named(gpu))}
    assert {"on an NVIDIA H200", "on an NVIDIA H100 80GB HBM3"} == set(sources.values())
    own = Case.of_form("gelu_tanh", 4096, 768, 3072)
    assert sources[own.measurement.cell] == f"on an {name}"


class Conv1D(torch.nn.Module):
    """A layer of GPT-2's: its weight is stored ``(in_features, out_features)``."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(in_features, out_features))
        self.bias = torch.nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class TransposedParameter(Conv1D):
    """Its weight is a transposed view of what is stored ``(out_features, in_features)``."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.weight = torch.nn.Parameter(torch.randn(out_features, in_features).t())


class Strided(torch.nn.Linear):
    """Its weight is a part of what is stored."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.weight = torch.nn.Parameter(torch.randn(out_features, in_features + 8)[:, :-8])


def setting_of(model, x):
    with torch.no_grad():
        (graphs,) = explain(model, x).graphs
        (setting,) = legal_settings(graphs.before)
    return setting


@pytest.mark.parametrize(
    ("layer", "transposed", "strided"),
    [
        (torch.nn.Linear, False, False),
        (Conv1D, True, False),
        (TransposedParameter, False, False),
        (Strided, True, True),
    ],
)
def test_settings_say_how_weights_are_stored(layer, transposed, strided):
    model = torch.nn.Sequential(layer(16, 32), torch.nn.GELU(), layer(32, 16))
    setting = setting_of(model, torch.randn(4, 16))
    assert (setting.transposed, setting.strided) == (transposed, strided)
    assert setting.plain_layout != transposed


@pytest.mark.parametrize(
    ("x", "strided"),
    [
        (torch.randn(2, 3, 16), False),
        (torch.randn(16), False),
        (torch.randn(16, 4).t(), True),
        (torch.randn(1, 16, 4).transpose(1, 2), True),
        (torch.randn(2, 16, 4).transpose(1, 2), False),  # its rows are copied
        (torch.randn(4, 20)[:, :16], True),
        (torch.randn(4, 24)[:, :16], False),
        (torch.randn(4, 50), False),
        (torch.randn(4, 60)[:, :50], True),
    ],
)
def test_settings_say_how_rows_lie(x, strided):
    width = x.shape[-1]
    layers = torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
    model = torch.nn.Sequential(*layers)
    assert setting_of(model, x).strided == strided


class Within(torch.nn.Module):
    """An MLP that runs behind a call, and in a mode of its own."""

    def __init__(self, call, mode):
        super().__init__()
        layers = (torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        self.mlp, self.call, self.mode = torch.nn.Sequential(*layers), call, mode

    def forward(self, x):
        self.call()
        with self.mode():
            return self.mlp(x)


def test_a_call_of_unknown_effect_does_not_make_inference_a_training_step():
    model = Within(lambda: torch._C._log_api_usage_once("test"), contextlib.nullcontext)
    assert not setting_of(model, torch.randn(4, 16)).training


def test_a_graph_that_turns_gradients_on_is_a_training_step():
    assert setting_of(Within(lambda: None, torch.enable_grad), torch.randn(4, 16)).training


def test_weights_of_the_graph_are_frozen_where_all_compilations_freeze_and_no_gradients_are():
    class Given(torch.nn.Module):
        def forward(self, pair):
            x, weight = pair
            return F.linear(F.gelu(F.linear(x, weight)), weight.t())

    x, weight = torch.randn(4, 16), torch.randn(32, 16)
    assert not setting_of(MLP(F.gelu), X).frozen
    with torch._inductor.config.patch(freezing=True):
        assert setting_of(MLP(F.gelu), X).frozen
        assert not setting_of(Given(), (x, weight)).frozen
        (graphs,) = explain(MLP(F.gelu), X).graphs  # a training step
        assert [setting.frozen for setting in legal_settings(graphs.before)] == [False]


@pytest.mark.parametrize(("layer", "strided"), [(torch.nn.Linear, False), (Conv1D, True)])
def test_a_part_of_a_packed_weight_is_contiguous_only_along_its_rows(layer, strided):
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.down = layer(16, 64), torch.nn.Linear(32, 16)

        def forward(self, x):
            gate, up = self.both(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)

    setting = setting_of(Packed(), torch.randn(4, 16))
    assert setting.gated
    assert (setting.transposed, setting.strided, setting.plain_layout) == (strided, strided, False)


def test_measurements_of_weights_stored_alike_speak_for_a_site(monkeypatch):
    turned = replace(HALF, transposed=True)
    other = measured(64, kind=turned, inductor=10.0, epilogue=9.0, library=5.0)
    monkeypatch.setattr(profit, "shipped", lambda gpu: (*TABLE, other))
    families = ("epilogue", "library")
    setting = replace(SETTING, rows=64)
    assert profit.best(families, setting).family == "epilogue"
    verdict = profit.best(families, replace(setting, transposed=True))
    assert verdict.family == "library"
    assert verdict.grounds.endswith("at 64 rows of 768→3072→768, weights transposed")


GATED = replace(SETTING, gated=True, activations=(parse("silu(g) * u"),), has_bias_up=False)


@pytest.mark.parametrize(
    ("family", "setting", "changes"),
    [
        ("stream", SETTING, {"hidden_features": 3000}),
        (
            "stream",
            SETTING,
            {"in_features": 1280, "hidden_features": 5120, "further_features": (1280,)},
        ),
        ("stream", SETTING, {"operands": ("vector",)}),
        ("stream", SETTING, {"strided": True}),
        ("epilogue", GATED, {"operands": ("elementwise",)}),
        (
            "epilogue",
            GATED,
            {"in_features": 240, "hidden_features": 960, "further_features": (240,)},
        ),
    ],
)
def test_a_measurement_is_discounted_where_the_site_runs_on_other_kernels(
    monkeypatch, family, setting, changes
):
    width = 256 if changes.get("in_features") == 240 else 768
    setting = replace(
        setting, in_features=width, hidden_features=4 * width, further_features=(width,)
    )
    kind = Kind("swiglu" if setting.gated else "gelu_tanh", False, "bfloat16")
    rows = 128 if family == "stream" else 4096
    same = measured(rows, width=width, kind=kind, inductor=10.0, **{family: 8.0})
    monkeypatch.setattr(profit, "shipped", lambda gpu: (same,))
    setting = replace(setting, rows=rows)
    exact = profit.best((family,), setting)
    assert (exact.family, exact.expected_speedup) == (family, 1.25)
    assert "estimate" not in exact.grounds
    verdict = profit.best((family,), replace(setting, **changes))
    assert verdict.family is None
    assert verdict.expected_speedup < 1.0
    assert verdict.grounds.endswith(", an estimate from other kernels or another activation")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 1.25), ({"operands": ("elementwise",)}, 1.25 / 1.2), ({"transposed": True}, 1.25)],
)
def test_plain_layers_lose_less_by_other_kernels(monkeypatch, changes, expected):
    setting = replace(SETTING, rows=4096, **changes)
    kind = replace(HALF, transposed=setting.transposed)
    same = measured(4096, kind=kind, inductor=10.0, epilogue=8.0)
    monkeypatch.setattr(profit, "shipped", lambda gpu: (same,))
    assert profit.best(("epilogue",), setting).expected_speedup == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"in_features": 770}, {"hidden_features": 3075}])
@pytest.mark.parametrize("rows", [64, "symbolic"])
def test_aligned_widths_do_not_speak_for_others(monkeypatch, changes, rows):
    families = ("epilogue", "library")
    rows = symbolic(64)[1] if rows == "symbolic" else rows
    setting = replace(SETTING, rows=rows, **changes)
    verdict = profit.best(families, setting)
    assert verdict.family is None
    assert (
        verdict.grounds == "widths that are no multiples of 8 were measured in narrow layers only"
    )
    own = Measurement(HALF, 64, *setting.widths, {"inductor": 10.0, "epilogue": 5.0}, "here")
    monkeypatch.setattr(profit, "shipped", lambda gpu: (*TABLE, own))
    assert profit.best(families, setting).family == "epilogue"


@pytest.mark.parametrize(
    ("width", "speedup"), [(64, 2.0), (60, 2.0), (48, 2.0), (72, 1.0), (65, 1.0)]
)
def test_a_narrow_kernel_is_as_slow_as_the_power_of_two_that_it_pads_to(width, speedup):
    setting = replace(
        SETTING, rows=1024, in_features=width, hidden_features=4 * width, further_features=(width,)
    )
    verdict = profit.best(("back_to_back",), setting)
    assert verdict.expected_speedup == pytest.approx(speedup)


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("activation", "width", "dtype", "longer"),
    [
        ("gelu_tanh(x)", 768, FLOAT16, 1.11),
        ("mish(x)", 768, FLOAT16, 1.15),
        ("silu(x)", 128, FLOAT16, 1.18),
        ("log1p(x)", 128, FLOAT16, 1.5),
        ("relu(x)", 768, FLOAT16, 1.0),
        ("hardswish(x)", 128, FLOAT16, 1.0),
        ("leaky_relu(x, 0.1)", 768, FLOAT16, 1.0),
        ("gelu_tanh(x)", 768, BFLOAT16, 1.0),
        ("tanh(x)", 768, BFLOAT16, 1.0),
        ("log1p(x)", 768, BFLOAT16, 1.15),
        ("elu(x, 1.0, 1.0, 1.0)", 128, BFLOAT16, 1.5),
    ],
)
def test_special_functions_that_are_exact_enough_for_a_dtype_cost_more(
    monkeypatch, activation, width, dtype, longer
):
    table = measured(64, width=width, inductor=10.0, epilogue=5.0, library=8.0)
    monkeypatch.setattr(profit, "shipped", lambda gpu: (table,))
    widths = {"in_features": width, "hidden_features": 4 * width, "further_features": (width,)}
    setting = replace(SETTING, rows=64, activations=(parse(activation),), dtype=dtype, **widths)
    verdict = profit.best(("epilogue",), setting)
    assert verdict.expected_speedup == pytest.approx(2.0 / longer)
    assert ("estimate" in verdict.grounds) == (longer > 1.0)
    assert profit.best(("library",), setting).expected_speedup == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("activation", "form"),
    [("sin(30.0 * x)", "gelu"), ("x + square(cos(x))", "gelu"), ("sinh(x)", "gelu_tanh")],
)
def test_sines_count_as_much_as_error_functions(activation, form):
    """In bfloat16 they are as many instructions."""
    assert measurements.form_of(activation, gated=False) == form


def test_what_was_measured_in_float16_or_of_the_activation_itself_counts_as_it_is(monkeypatch):
    table = measured(64, inductor=10.0, epilogue=5.0)
    own = replace(table, kind=replace(HALF, precision="float16"))
    monkeypatch.setattr(profit, "shipped", lambda gpu: (table, own))
    setting = replace(SETTING, rows=64, dtype=torch.float16)
    assert profit.best(("epilogue",), setting).expected_speedup == pytest.approx(2.0)
    of_log1p = replace(table, activation="log1p(x)")
    monkeypatch.setattr(profit, "shipped", lambda gpu: (of_log1p,))
    for activation, longer in (("log1p(x)", 1.0), ("expm1(x)", 1.15)):
        setting = replace(SETTING, rows=64, activations=(parse(activation),))
        assert profit.best(("epilogue",), setting).expected_speedup == pytest.approx(2.0 / longer)


@pytest.mark.parametrize(
    ("gpu", "precision", "least"),
    [("h100", "bfloat16", 20), ("h200", "bfloat16", 20), ("h200", "float16", 15)],
)
def test_what_a_tanh_says_of_an_erf_is_about_what_was_measured(gpu, precision, least):
    known = {(m.kind, m.rows, m.widths): m for m in measurements.shipped(gpu_named(gpu))}
    compared = 0
    for (kind, *cell), erf in known.items():
        tanh = known.get((replace(kind, form="gelu_tanh"), *cell))
        said = tanh and discounts.of_erf(tanh)
        if (kind.form, kind.precision) != ("gelu", precision) or said is None:
            continue
        for family in ("stream", "epilogue", "back_to_back"):
            if family in erf.microseconds and family in said.microseconds:
                compared += 1
                assert said.speedup(family) <= 1.05 * erf.speedup(family), (erf, family)
                pays = said.speedup(family) >= measurements.WORTHWHILE
                assert erf.speedup(family) >= 1.0 or not pays, (erf, family)
    assert compared > least


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_tanh_speaks_for_an_erf_of_widths_that_were_not_measured_with_one(monkeypatch, dtype):
    precision = str(dtype).removeprefix("torch.")
    tanh, erf = (Kind(form, False, precision) for form in ("gelu_tanh", "gelu"))
    wide = measured(16, width=2048, kind=tanh, inductor=30.0, stream=20.0)
    both = [measured(16, kind=kind, inductor=30.0, stream=20.0) for kind in (tanh, erf)]
    monkeypatch.setattr(profit, "shipped", lambda gpu: (wide, *both))
    setting = replace(SETTING, rows=16, activations=(parse("gelu(x)"),), dtype=dtype)
    verdict = profit.best(("stream",), setting)
    assert (verdict.expected_speedup, "estimate" in verdict.grounds) == (1.5, False)
    widths = {"in_features": 2048, "hidden_features": 8192, "further_features": (2048,)}
    verdict = profit.best(("stream",), replace(setting, **widths))
    assert verdict.expected_speedup == pytest.approx(1.5 / 1.06)
    assert verdict.grounds.endswith(", an estimate from other kernels or another activation")
    trained = profit.best(("stream",), replace(setting, **widths, training=True))
    assert trained.family is None


def site_with_policy(model, x, policy):
    recorder = Recorder(Options(policy=policy))
    with torch.no_grad():
        torch.compile(model, backend=recorder)(x)
    (site,) = recorder.sites
    return site


@pytest.mark.usefixtures("no_cpp_compiler")
def test_on_the_cpu_auto_takes_onednn_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(cpu_profit, "onednn_is_faster", lambda *setting: True)
    site = site_with_policy(MLP(F.gelu), X, "auto")
    assert (site.fused, site.plan) == (True, "onednn")


@pytest.mark.usefixtures("no_cpp_compiler")
def test_on_the_cpu_auto_leaves_a_site_where_onednn_is_not_faster(monkeypatch):
    monkeypatch.setattr(cpu_profit, "onednn_is_faster", lambda *setting: False)
    site = site_with_policy(MLP(F.gelu), X, "auto")
    assert (site.fused, site.reason) == (False, "not-faster")


@pytest.mark.parametrize(("unfused", "family"), [(2.0, "rows"), (0.9, None)])
def test_on_the_cpu_rates_of_products_decide(monkeypatch, unfused, family):
    cells = (Cell(64, 16, {"unfused": unfused, "rows": 1.0, "onednn": 1.0}),)
    monkeypatch.setattr(cpu_rates, "DEFAULT", Rates(cells, "made up"))
    monkeypatch.setattr(cpu_profit, "onednn_is_faster", lambda *setting: False)
    cpu = replace(SETTING, device=torch.device("cpu"), target=None, dtype=torch.float32)
    verdict = profit.best(("rows", "onednn"), cpu)
    assert verdict.family == family
    assert verdict.grounds.endswith("by rates made up")


@pytest.mark.parametrize(("rows", "family", "guards"), [(2000, "rows", 1), (8, None, 1)])
def test_on_the_cpu_symbolic_rows_are_guarded_where_the_verdict_changes(
    monkeypatch, rows, family, guards
):
    cells = (
        Cell(64, 16, {"unfused": 0.9, "rows": 1.0}),
        Cell(64, 1024, {"unfused": 2.0, "rows": 1.0}),
    )
    monkeypatch.setattr(cpu_rates, "DEFAULT", Rates(cells, "made up"))
    cpu = replace(SETTING, device=torch.device("cpu"), target=None, dtype=torch.float32)
    environment, symbol = symbolic(rows)
    assert profit.best(("rows",), replace(cpu, rows=symbol)).family == family
    assert len(environment.guards) == guards


def test_on_the_cpu_symbolic_rows_need_no_guard_where_the_verdict_never_changes(monkeypatch):
    cells = (Cell(64, 16, {"unfused": 2.0, "rows": 1.0}),)
    monkeypatch.setattr(cpu_rates, "DEFAULT", Rates(cells, "made up"))
    cpu = replace(SETTING, device=torch.device("cpu"), target=None, dtype=torch.float32)
    environment, symbol = symbolic(8)
    assert profit.best(("rows",), replace(cpu, rows=symbol)).family == "rows"
    assert environment.guards == []


@pytest.mark.parametrize(("ours", "family"), [(1.0, "rows"), (3.0, None)])
def test_on_the_cpu_frozen_weights_have_rates_of_their_own(monkeypatch, ours, family):
    cells = (Cell(64, 16, {"unfused": 2.0, "rows": ours}),)
    monkeypatch.setattr(frozen_rates, "DEFAULT", Rates(cells, "made up"))
    cpu = replace(SETTING, device=torch.device("cpu"), target=None, dtype=torch.float32)
    verdict = profit.best(("rows", "onednn"), replace(cpu, frozen=True))
    assert verdict.family == family
    assert "made up" in verdict.grounds


def test_on_the_cpu_nothing_is_expected_where_onednn_may_multiply_frozen_weights_natively(
    monkeypatch,
):
    monkeypatch.setattr(frozen_rates, "multiplies_natively", lambda dtype: True)
    cpu = replace(SETTING, device=torch.device("cpu"), target=None, frozen=True)
    verdict = profit.best(("rows",), cpu)
    assert verdict.family is None
    assert "nothing says" in verdict.grounds


@pytest.mark.usefixtures("no_cpp_compiler")
def test_on_the_cpu_frozen_weights_are_left_to_inductor_without_a_kernel(monkeypatch):
    monkeypatch.setattr(cpu_profit, "onednn_is_faster", lambda *setting: True)
    with torch._inductor.config.patch(freezing=True):
        site = site_with_policy(MLP(F.gelu), X, "auto")
    assert (site.fused, site.reason) == (False, "not-faster")
    assert "frozen" in site.detail


@pytest.mark.usefixtures("no_cpp_compiler")
def test_on_the_cpu_training_has_no_kernel_without_a_compiler():
    recorder = Recorder(Options(policy="auto"))
    torch.compile(MLP(F.gelu), backend=recorder)(X)
    (site,) = recorder.sites
    assert (site.fused, site.reason) == (False, "no-kernel")
    assert "no C++ compiler" in site.detail
    assert "oneDNN runs inference only" in site.detail


def test_on_the_cpu_training_is_left_alone_where_sums_of_gradients_take_too_much(monkeypatch):
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "target": None}
    setting = replace(SETTING, rows=64, training=True, **cpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    verdict = profit.best(("rows",), setting)
    assert verdict.family is None
    assert "more memory" in verdict.grounds


@pytest.mark.usefixtures("no_cpp_compiler")
def test_on_the_cpu_an_activation_that_onednn_does_not_know_has_no_kernel():
    site = site_with_policy(MLP(torch.cos), X, "auto")
    assert (site.fused, site.reason) == (False, "no-kernel")
    assert "no C++ compiler" in site.detail


WHY = {
    "relu": (torch.relu, "oneDNN's relu turns NaN into a number"),
    "relu6": (F.relu6, "oneDNN's relu6 turns NaN into a number"),
    "squared relu": (lambda h: torch.relu(h).square(), "oneDNN has no post-operation that"),
}


@pytest.mark.usefixtures("no_cpp_compiler")
@pytest.mark.parametrize("name", WHY)
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_on_the_cpu_the_reason_is_the_real_one(name, policy):
    function, why = WHY[name]
    site = site_with_policy(MLP(function), X, policy)
    assert (site.fused, site.reason) == (False, "no-kernel")
    assert why in site.detail


@pytest.mark.usefixtures("rows_by_reference")
def test_always_takes_the_kernel_for_cpus():
    with torch.no_grad():
        assert only_site(MLP(torch.cos), X).plan == "rows"


@pytest.mark.usefixtures("no_cpp_compiler")
def test_always_takes_the_reference_where_there_is_no_kernel():
    with torch.no_grad():
        site = only_site(MLP(torch.cos), X)
        assert (site.fused, site.legal, site.plan) == (False, True, "reference")
        assert site.reason == "no-kernel"
        assert "oneDNN has no post-operation that computes cos(x); policy" in site.detail
        assert only_site(Gated(lambda g, u: F.gelu(g) * u), X).plan == "onednn"


PART = replace(SETTING, further_features=())


def test_a_part_of_an_mlp_runs_where_the_whole_is_two_products():
    assert list(planner.available(PART)) == ["epilogue", "library"]
    assert list(planner.available(replace(PART, training=True))) == ["epilogue"]
    assert list(planner.available(replace(PART, target=None, device=torch.device("cpu")))) == []


def test_a_part_of_an_mlp_is_fused_where_the_whole_was_measured_to_gain():
    assert profit.best(("epilogue",), replace(PART, rows=64)).family == "epilogue"
    assert profit.best(("epilogue",), replace(PART, rows=1024)).family is None
    assert profit.best(("epilogue",), replace(PART, rows=64, training=True)).family is None


def test_the_heuristic_does_not_speak_for_parts(monkeypatch):
    monkeypatch.setattr(profit, "shipped", lambda gpu: ())
    few = replace(SETTING, rows=64)
    assert profit.best(("epilogue",), few).family == "epilogue"
    assert profit.best(("epilogue",), replace(few, further_features=())).family is None


@pytest.mark.parametrize(
    ("name", "source", "is_its_own"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H20", "NVIDIA H200", False),
    ],
)
def test_a_table_decides_of_what_it_measured_on_the_very_kind_of_gpu(
    monkeypatch, name, source, is_its_own
):
    line = replace(measured(64, inductor=10.0, epilogue=5.0), source=f"on an {source}")
    monkeypatch.setattr(profit, "shipped", lambda gpu: (line,))
    monkeypatch.setattr(cost_model, "speaks_for", lambda setting: True)
    setting = replace(SETTING, rows=64, target=replace(gpu_named("h200"), name=name))
    grounds = profit.best(("epilogue",), setting).grounds
    assert (f"on an {source} at 64 rows" in grounds) == is_its_own
    assert ("expected by the cost model" in grounds) != is_its_own
