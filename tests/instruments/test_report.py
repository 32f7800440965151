"""Tables: what is shown, in which units, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_backend import Comparison, Explanation, KernelCounts, Site, SiteShape
from fusion_backend.instruments.report import microseconds, table

SITE = Site(
    form="gated",
    activation="silu(g) * u",
    module="layers.0.mlp",
    shape=SiteShape("s0*128", 64, 256, 64),
    dtype="bfloat16",
    device="cuda",
    fused=True,
    plan="epilogue",
    reason=None,
    detail="two kernels",
)
ALONE = replace(
    SITE, module="", fused=False, plan=None, reason="hidden-escapes", detail="it is also returned"
)


def row(backend: str, kernels: int, wall_us: float, gpu_us: float | None = 12.0) -> KernelCounts:
    return KernelCounts(
        backend=backend,
        kernels=kernels,
        memcpys=0 if gpu_us else None,
        memsets=2 if gpu_us else None,
        gpu_us=gpu_us,
        wall_us=wall_us,
        error=2.5e-3,
        gradient_error=None,
        names={f"{backend}_kernel": kernels},
    )


def comparison(*rows: KernelCounts, notes: tuple[str, ...] = ()) -> Comparison:
    return Comparison(rows, "H100", "GPU kernels", steps=10, backward=False, notes=notes)


BOTH = comparison(row("inductor", 3, 200.0), row("fusedmlp", 2, 160.0))


def test_numbers_stand_to_the_right_and_missing_ones_are_dashes() -> None:
    text = table(["name", "number"], [["a", 1], ["b", None], ["c", 100]])
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows == [["a", "1"], ["b", "–"], ["c", "100"]]
    assert len({len(line) for line in text.splitlines()}) == 1


@pytest.mark.parametrize(
    ("time", "text"), [(1234.56, "1235"), (99.44, "99.4"), (3.14159, "3.14"), (None, None)]
)
def test_times_have_three_digits_and_no_exponent(time: float | None, text: str | None) -> None:
    assert microseconds(time) == text


def test_a_comparison_shows_counts_times_and_the_speedup_over_inductor() -> None:
    lines = str(BOTH).splitlines()
    assert lines[0].startswith("H100, forward: GPU kernels of one call, the same in each of 10")
    assert "vs inductor" in lines[2]
    assert lines[5].split() == ["fusedmlp", "2", "0", "2", "12", "160", "1.25×", "2.5e-03"]


def test_columns_without_numbers_are_left_out() -> None:
    text = str(comparison(row("inductor", 3, 200.0, gpu_us=None)))
    assert "GPU µs" not in text
    assert "memsets" not in text
    assert "gradient error" not in text


def test_speedups_refer_to_the_first_row_where_inductor_was_not_profiled() -> None:
    assert "vs eager" in str(comparison(row("eager", 3, 200.0)))


def test_the_same_kernels_are_the_same_program_whatever_their_times() -> None:
    same = replace(row("fusedmlp", 3, 90.0), names={"inductor_kernel": 3})
    compared = comparison(row("inductor", 3, 200.0), same)
    assert str(compared).splitlines()[-1].split()[-3:] == ["same", "program", "2.5e-03"]
    assert compared.runs_same_program(same)
    assert not BOTH.runs_same_program(BOTH["fusedmlp"])
    assert not BOTH.runs_same_program(BOTH["inductor"])


def test_notes_stand_below_the_table() -> None:
    assert str(comparison(row("eager", 3, 1.0), notes=("Beware.",))).endswith("\n\nNote: Beware.")


def test_fewer_kernels_are_asserted() -> None:
    BOTH.assert_fewer_kernels()


def test_the_failed_assertion_shows_the_table_and_the_differences() -> None:
    equal = comparison(row("inductor", 3, 200.0), row("fusedmlp", 3, 160.0))
    with pytest.raises(AssertionError) as failure:
        equal.assert_fewer_kernels()
    message = str(failure.value)
    assert message.startswith("fusedmlp must run fewer GPU kernels than inductor, got 3 against 3")
    assert str(equal) in message
    assert "inductor_kernel: 3 → 0" in message
    assert "fusedmlp_kernel: 0 → 3" in message


def test_an_explanation_shows_plans_reasons_and_why() -> None:
    lines = str(Explanation((SITE, ALONE), ())).splitlines()
    assert lines[0] == "1 of 2 MLPs fused"
    assert [cell.strip() for cell in lines[4].split("  ") if cell] == [
        "layers.0.mlp", "gated", "silu(g) * u", "s0*128×64→256→64", "bfloat16", "epilogue",
    ]  # fmt: skip
    assert lines[5].startswith("(model)")
    assert lines[5].endswith("hidden-escapes")
    assert lines[-1] == "- (model): it is also returned."


def test_a_site_that_no_kernels_run_is_legal_and_not_fused() -> None:
    site = replace(SITE, fused=False, plan="reference", reason="no-kernel", detail="none here")
    assert (site.legal, site.rewritten, ALONE.legal, ALONE.rewritten) == (True, True, False, False)
    lines = str(Explanation((site, ALONE, SITE), ())).splitlines()
    assert lines[0] == "1 of 3 MLPs fused; 1 is legal, not fused"
    assert lines[4].endswith("no-kernel")
    assert "- layers.0.mlp: none here." in lines


def test_sites_left_alone_for_the_same_reason_share_a_sentence() -> None:
    sites = tuple(replace(ALONE, module=f"layers.{i}.mlp") for i in range(12))
    text = str(Explanation(sites, ()))
    assert text.endswith("- layers.0.mlp, layers.1.mlp and 10 more: it is also returned.")


def test_graph_breaks_are_listed() -> None:
    text = str(Explanation((SITE,), (), graph_breaks=("print (model.py:3)",)))
    assert text.endswith("graphs:\n- print (model.py:3)")


def test_a_model_without_mlp_says_so() -> None:
    assert str(Explanation((), ())).startswith("No MLP found")
