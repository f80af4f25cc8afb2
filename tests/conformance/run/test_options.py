"""The command line: which claims are chosen, where reports go, how a claim is run again."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fx_quant_conformance.conformance.run.options import default_report_dir, read_options, register, select_ids
from tests.conformance.support.suite_runs import options

IDS = [
    "nn.Linear/static:in=quint8[0..127]/ptq/x",
    "nn.Conv2d/static:in=quint8/ptq/x",
    "nn.Conv2d/dynamic:in=*/ptq/x",
]


def repro(claim: str, **changes: object) -> str:
    """The command for a claim, of a run with these options."""
    return options(Path("r"), **changes).repro(claim)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], IDS),
        ([IDS[0]], IDS[:1]),
        ([IDS[2]], IDS[2:]),
        (["nn.Conv2d/*"], IDS[1:]),
        (["*/ptq/x"], IDS),
        (["*[[]0..127]*", IDS[1]], IDS[:2]),
        (["nn.Linear/static:in=quint8[0..127]/*"], IDS[:1]),
        (["nn.[LC]*/static*"], IDS[:2]),
    ],
)
def test_a_claim_is_chosen_by_exact_id_or_glob(wanted: list[str], chosen: list[str]) -> None:
    assert select_ids(IDS, wanted) == set(chosen)


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [("nn.Linear", IDS[0]), ("nn.Cnov2d/dynamic*", IDS[2]), ("NN.CONV2D/static:*", IDS[1])],
)
def test_a_choice_of_nothing_names_the_nearest(wanted: str, nearest: str) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        select_ids(IDS, [IDS[0], wanted])
    assert f"--claim {wanted!r} matches no claim, model or measurement; nearest: {nearest}" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("qnnpack", "qnnpack"), ("a.b:C", "a.b_C"), ("../x y:Z", "_x_y_Z"), ("..", "_"), ("C:\\x/y", "C_x_y")],
)
def test_the_default_folder_stays_under_build_where_the_run_was_started(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_report_dir(backend) == tmp_path / "build" / "conformance" / name


def test_repro_is_quoted_for_a_shell() -> None:
    claim = "F.add(a,*)/in='x'/ptq/no weight"
    words = shlex.split(repro(claim, backend="my mod:Npu", seed=-3))
    assert words == [
        "pytest",
        "--pyargs",
        "fx_quant_conformance",
        "--backend=my mod:Npu",
        "--seed=-3",
        "--claim",
        claim,
    ]


def test_repro_keeps_what_is_not_the_default() -> None:
    command = repro(IDS[1], profile="quick", max_examples=5, claim_timeout=0.5, isa="avx2")
    assert "--profile=quick --max-examples=5 --claim-timeout=0.5 --isa=avx2 --claim " in command
    assert "timeout" not in repro(IDS[1], profile="stress", claim_timeout=600.0)
    assert "--no-waivers --claim" in repro(IDS[1], no_waivers=True)
    assert "--waivers='/a b.toml' --claim" in repro(IDS[1], waivers=Path("/a b.toml"))


def parse(*words: str) -> argparse.Namespace:
    """Parse a command line of the suite's options and of pytest's own that it reads."""
    parser = pytest.Parser(_ispytest=True)
    register(parser)
    return parser.parse(words)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--max-examples=0", "expected a positive integer, found '0'"),
        ("--max-examples=1.5", "expected a positive integer, found '1.5'"),
        ("--claim-timeout=0", "expected a positive number of seconds, found '0'"),
        ("--profile=slow", "invalid choice: 'slow'"),
        ("--isa=mmx", "invalid choice: 'mmx'"),
        ("--shard=0/8", "expected K/N with 1 <= K <= N, such as 2/8, found '0/8'"),
        ("--shard=9/8", "expected K/N with 1 <= K <= N, such as 2/8, found '9/8'"),
        ("--shard=a/b", "expected K/N with 1 <= K <= N, such as 2/8, found 'a/b'"),
        ("--cache=d", "is gone: answers are not kept any more; --resume takes over"),
        ("--allow-quality", "is gone: declare Capabilities.tolerance of the ops"),
        ("--deadline=5", "is gone: stop the run with Ctrl-C or SIGTERM"),
    ],
)
def test_the_value_of_an_option_is_checked(word: str, told: str) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        parse(word)
    assert f"argument {word.partition('=')[0]}: {told}" in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [("--waivers=x", "--no-waivers"), ("--resume=x", "--failed-of=x")],
    ids=" ".join,
)
def test_of_two_options_that_contradict_each_other_one_is_to_be_given(words: tuple[str, ...]) -> None:
    config: Any = SimpleNamespace(option=parse("--backend=fakes:Good", *words))
    one, other = (word.partition("=")[0] for word in words)
    with pytest.raises(pytest.UsageError, match=f"{one} and {other}: give one"):
        read_options(config)
