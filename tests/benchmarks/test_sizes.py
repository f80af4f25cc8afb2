"""Functions and files stay as short as the house wants them."""

from __future__ import annotations

import pytest

from benchmarks import sizes


def test_functions_are_short_in_the_median_and_at_the_ninetieth_percentile() -> None:
    lengths = [length for package in sizes.PACKAGES for length, _ in sizes.functions(package)]
    count, median, ninetieth, longest = sizes.summary(lengths)
    assert count > 1000 and median <= 12 and ninetieth <= 30 and longest <= 60


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    folders = (*sizes.PACKAGES, "tests", "examples", "benchmarks", "docs")
    lines = {path: path.read_text().count("\n") for folder in folders for path in sizes.files(folder)}
    assert len(lines) > 100
    assert not {path.name: count for path, count in lines.items() if count > 400}


def test_the_script_prints_a_row_for_each_package(capsys: pytest.CaptureFixture[str]) -> None:
    sizes.main()
    printed = capsys.readouterr().out
    assert all(f"\n{package} " in printed for package in (*sizes.PACKAGES, "all"))


def test_the_ninetieth_percentile_is_what_a_tenth_exceeds() -> None:
    assert sizes.summary(list(range(1, 11))) == (10, 5.5, 10, 10)
    assert sizes.summary(list(range(1, 21))) == (20, 10.5, 19, 20)
