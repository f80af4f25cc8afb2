"""The flow benchmark runs and its tables have their shape; no time is judged here."""

from __future__ import annotations

import math

import pytest
from torch.fx import symbolic_trace

from benchmarks import flow

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark collects garbage before it takes a time: here no time matters."""
    monkeypatch.setattr("benchmarks.flow.gc.collect", lambda: 0)


def test_every_stage_is_measured_on_both_sides() -> None:
    rows = flow.rows_of([3, 16], flow.KINDS, torch_cap=math.inf, small_repeats=1)
    assert [(row["observer"], row["nodes"], row["stage"]) for row in rows] == [
        (kind, nodes, stage) for kind in flow.KINDS for nodes in (3, 16) for stage in flow.STAGES
    ]
    for row in rows:
        assert row["torch / refimpl"] == pytest.approx(row["torch s"] / row["refimpl s"])
        assert row["refimpl s"] > 0


def test_torch_is_left_out_above_the_cap_and_refimpl_never() -> None:
    rows = flow.rows_of([3, 16], ("minmax",), torch_cap=0.0, small_repeats=1)
    assert {row["torch / refimpl"] for row in rows if row["nodes"] == 16} == {None}
    assert all(row["refimpl s"] > 0 for row in rows)


def test_a_real_architecture_has_a_row_for_each_stage() -> None:
    rows = flow.architecture_rows(["transformer"], 1)
    assert [(row["model"], row["observer"], row["stage"]) for row in rows] == [
        ("transformer", "x86", stage) for stage in flow.STAGES
    ]
    assert all(row["torch s"] > 0 and row["refimpl s"] > 0 for row in rows)


def test_growth_is_the_exponent() -> None:
    rows = [
        {"model": "chain", "observer": "minmax", "stage": "prepare", "nodes": n, "refimpl s": n**2}
        for n in (50, 800, 3200)
    ]
    (found,) = flow.growth(rows)
    assert (found["from"], found["to"]) == (800, 3200)
    assert found["exponent"] == pytest.approx(2.0)


def test_the_model_has_about_as_many_nodes_as_asked_for() -> None:
    assert len(symbolic_trace(flow.model_of(3)).graph.nodes) == 3
    assert len(symbolic_trace(flow.model_of(80)).graph.nodes) == 82


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    flow.with_deep_stack(
        lambda: flow.main(
            ["--nodes", "3", "16", "--observers", "minmax", "--small-repeats", "1", "--torch-cap", "inf", "--models"]
        )
    )
    printed = capsys.readouterr().out
    assert "torch / refimpl" in printed
    assert "exponent" in printed


def test_peak_memory_is_measured_in_a_process_of_its_own() -> None:
    assert flow.peak_memory("refimpl", 16) >= 0


def test_an_error_in_the_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("seeded")

    with pytest.raises(ValueError, match="seeded"):
        flow.with_deep_stack(fail)
