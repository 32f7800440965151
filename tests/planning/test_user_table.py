"""The user's table: where it lies, what it is keyed on, and that no process sees half of it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from fusion_backend.inductor_pass import FusionPass
from fusion_backend.planning import user_table
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.user_table import UserTable, cache_directory

H100 = gpu_named("h100")


@pytest.fixture
def table(tmp_path, monkeypatch) -> UserTable:
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    return UserTable.of(H100)


def row(rows=16, **times):
    return {**Case.of_form("gelu", rows, 64, 256).row(), "us": times or {"inductor": 2.0}}


def test_the_directory_is_the_one_asked_for_else_that_of_caches(monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", "/somewhere")
    assert cache_directory() == Path("/somewhere")
    monkeypatch.delenv("FUSEDMLP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/fusedmlp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "fusedmlp"


def test_there_are_no_measurements_before_the_first(table):
    assert table.measurements() == ()
    assert table.rows() == []


def test_what_is_added_is_read_and_replaces_what_measured_the_same(table):
    table.add(row(16, inductor=2.0, epilogue=1.0))
    table.add(row(64, inductor=3.0))
    table.add(row(16, inductor=4.0, epilogue=1.0))
    by_rows = {measured.rows: measured for measured in table.measurements()}
    assert by_rows.keys() == {16, 64}
    assert by_rows[16].speedup("epilogue") == 4.0
    assert by_rows[16].source == "on an NVIDIA H100"
    assert json.loads(table.path.read_text())["machine"] == table.machine


@pytest.mark.parametrize("part", ["torch", "triton", "kernels", "gpu"])
def test_measurements_made_with_others_are_not_believed_but_known(table, part, monkeypatch):
    table.add(row())
    machine = user_table.machine_of(H100) | {part: "another"}
    monkeypatch.setattr(user_table, "machine_of", lambda gpu: machine)
    now = UserTable.of(H100)
    assert now.measurements() == ()
    assert now.outdated() == (table.path,)
    assert table.outdated() == ()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machine": {}, "rows": 1}'])
def test_a_file_that_is_no_table_is_kept_aside_with_a_warning_and_a_new_one_begun(table, content):
    table.path.parent.mkdir(parents=True)
    table.path.write_text(content)
    with pytest.warns(UserWarning, match=r"is no table of measurements .* is kept as"):
        assert table.measurements() == ()
    (aside,) = table.path.parent.glob("*.unreadable-*")
    assert aside.read_text() == content
    table.add(row())
    assert len(table.measurements()) == 1


def test_adding_to_a_file_that_is_no_table_keeps_it_aside_too(table):
    table.path.parent.mkdir(parents=True)
    table.path.write_text("{")
    with pytest.warns(UserWarning, match="is kept as"):
        table.add(row())
    assert len(table.measurements()) == 1
    assert len(list(table.path.parent.glob("*.unreadable-*"))) == 1


def add_rows(directory, first):
    table = UserTable(directory / "t-0.json", {"gpu": "H100"})
    for rows in range(first, first + 10):
        table.add(row(rows))


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_rows, args=(tmp_path, 1 + 10 * i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    table = UserTable(tmp_path / "t-0.json", {"gpu": "H100"})
    assert sorted(m.rows for m in table.measurements()) == list(range(1, 31))
    assert not list(tmp_path.glob("*.part"))


def test_who_waits_too_long_for_a_lock_is_told(table):
    with (
        table.locked("measure"),
        pytest.raises(TimeoutError, match=r"measure\.lock"),
        table.locked("measure", timeout=0.0),
    ):
        pass


def test_the_identity_of_what_plans_depend_on_changes_with_the_table(table, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(user_table, "gpu_of", lambda device: H100)
    before = FusionPass().uuid()
    assert FusionPass().uuid() == before
    table.add(row())
    assert FusionPass().uuid() != before
