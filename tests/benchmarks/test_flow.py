"""The flow benchmark runs and its tables have their shape; no time is judged here."""

from __future__ import annotations

import pytest

from benchmarks import flow

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark collects garbage before it takes a time: here no time matters."""
    monkeypatch.setattr("benchmarks.flow.gc.collect", lambda: 0)


def test_growth_is_the_exponent() -> None:
    rows = [
        {"model": "chain", "observer": "minmax", "stage": "prepare", "nodes": n, "refimpl s": n**2}
        for n in (50, 800, 3200)
    ]
    (found,) = flow.growth(rows)
    assert (found["from"], found["to"]) == (800, 3200)
    assert found["exponent"] == pytest.approx(2.0)


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    flow.with_deep_stack(
        lambda: flow.main(
            ["--nodes", "3", "16", "--observers", "minmax", "--small-repeats", "1", "--torch-cap", "inf", "--models"]
        )
    )
    printed = capsys.readouterr().out
    assert "torch / refimpl" in printed
    assert "exponent" in printed
