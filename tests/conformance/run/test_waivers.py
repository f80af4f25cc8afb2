"""Waivers: what a file may say, which claims it covers, and when the waivers themselves fail a run."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.conditions import read_condition
from fx_quant_conformance.conformance.run.waivers import (
    BY_RULE,
    Ruling,
    WaiverEntry,
    WaiverError,
    Waivers,
    load_waivers,
)
from fx_quant_conformance.reports.schema import Waiver
from fx_quant_conformance.reports.verdicts import Verdict

TODAY = date(2026, 6, 30)
NUM_03 = "NUM-03"
LEVEL, TORCH = "avx512_vnni", "2.13.0+cpu"
LINEAR = "nn.Linear/static:in=quint8[0..127],w=qint8,b=*/ptq/per_tensor"
POOLS = [f"nn.MaxPool{n}d/static:in=quint8,out=quint8/ptq/no_weight" for n in (1, 2, 3)]
IDS = [LINEAR, *POOLS]
WHOLE = """
[[waiver]]
claim = "nn.Linear/static:in=quint8[0..127],w=qint8,b=*/ptq/per_tensor"
verdict = "REFUTED"
rule = "NUM-03"
reason = "saturates"
url = "https://example.org/1"
max_lsb = 18

[[waiver]]
glob = "nn.MaxPool?d/*"
verdict = "CRASHED"
reason = "no kernel"
expires = 2026-06-30
"""
LEAST = {
    "claim": f"'{LINEAR}'",
    "verdict": "'REFUTED'",
    "rule": "'NUM-03'",
    "reason": "'why'",
    "url": "'https://a.b'",
}


def written(folder: Path, text: str) -> Path:
    path = folder / "npu.waivers.toml"
    path.write_text(text, encoding="utf-8")
    return path


def table(without: str = "", **changes: str) -> str:
    """A waiver of the least that is needed, changed; values are TOML."""
    values = {key: value for key, value in (LEAST | changes).items() if key != without}
    return "\n".join(["[[waiver]]", *(f"{key} = {value}" for key, value in values.items())]) + "\n"


def refusal(folder: Path, text: str) -> str:
    """The one line that a file is refused with, without the file's name."""
    path = written(folder, text)
    with pytest.raises(WaiverError) as caught:
        load_waivers(path, LEVEL, TORCH)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


def waiver(number: int = 1, **changes: object) -> WaiverEntry:
    values = {"verdict": Verdict.REFUTED, "rules": (NUM_03,), "reason": "why", "url": "https://a.b"}
    return WaiverEntry(file=Path("f.toml"), number=number, **(values | changes))  # type: ignore[arg-type]


def ruling(
    *waivers: WaiverEntry,
    verdict: str = "REFUTED",
    rules: set[str] | None = None,
    max_lsb: float | None = None,
    claim: str = LINEAR,
    failing: dict[str, str] | None = None,
) -> Ruling:
    """The ruling on a claim; without ``rules`` it breaks that of the waivers, if its verdict has one."""
    own = {NUM_03} if Verdict(verdict) in BY_RULE else set()
    return Waivers(waivers, TODAY).judge(claim, Verdict(verdict), own if rules is None else rules, max_lsb, failing)


def problems(*waivers: WaiverEntry, complete: bool = True, **judged: str) -> list[str]:
    """The problems of a run that gave LINEAR and the pools (p1, p2, p3) these verdicts, or none."""
    names = dict(zip(("linear", "p1", "p2", "p3"), IDS, strict=True))
    verdicts = {names[name]: Verdict(verdict) for name, verdict in judged.items()}
    return Waivers(waivers, TODAY, complete).problems(IDS, verdicts)


def test_a_file_says_all_that_a_waiver_can(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    linear, pools = load_waivers(path, LEVEL, TORCH)
    assert linear == WaiverEntry(
        file=path,
        number=1,
        claim=LINEAR,
        verdict=Verdict.REFUTED,
        rules=("NUM-03",),
        reason="saturates",
        url="https://example.org/1",
        max_lsb=18.0,
    )
    assert (pools.glob, pools.verdict, pools.expires) == ("nn.MaxPool?d/*", Verdict.CRASHED, TODAY)
    assert linear.to_row() == Waiver(reason="saturates", url="https://example.org/1", expires=None, max_lsb=18.0)
    assert waiver(max_lsb=math.inf).to_row().max_lsb == "inf", "JSON has no infinity"
    assert pools.to_row() == Waiver(reason="no kernel", url=None, expires="2026-06-30", max_lsb=None)


def test_a_file_without_waivers_waives_nothing(tmp_path: Path) -> None:
    assert load_waivers(written(tmp_path, "# none yet\n"), LEVEL, TORCH) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[waiver]\n", "is not TOML: Expected ']]' at the end of an array declaration (at line 1"),
        ("waivers = []\n", "unknown key 'waivers'; the file holds [[waiver]] tables and nothing else"),
        (table().replace("[[waiver]]", "[waiver]"), "found [waiver]; write [[waiver]], with two brackets"),
        ("waiver = [3]\n", "waiver 1: found 3; a waiver is a table: [[waiver]]"),
        (table() + table(reasn="'x'"), "waiver 2: unknown key 'reasn'; did you mean 'reason'?"),
        (
            table(why="'x'"),
            "waiver 1: unknown key 'why'; known: 'claim', 'glob', 'verdict', 'rule', 'reason', 'url', 'expires'",
        ),
        (table(glob="'nn.*'"), "waiver 1: found claim and glob; give either claim ="),
        (table("claim"), "waiver 1: found no claim and no glob; give either claim ="),
        (table("verdict"), "waiver 1: found no verdict; give the verdict that is waived"),
        (table("reason"), "waiver 1: found no reason; say what is wrong"),
        (table("url"), "waiver 1: found no url and no expires; give the url of a ticket, or the date"),
        (table(reason="' '"), "waiver 1: reason is ' '; give a text that is not empty"),
        (table(claim="7"), "waiver 1: claim is 7; give a text that is not empty"),
        (table("claim", glob="'nn.Linear'"), "waiver 1: glob is 'nn.Linear'; a glob has *, ? or [; name a single"),
        (table(verdict="'refuted'"), "waiver 1: verdict is 'refuted'; did you mean 'REFUTED'?"),
        (table(verdict="'UNSHOWN'"), "waiver 1: verdict is 'UNSHOWN'; UNSHOWN cannot be waived"),
        (table(verdict="'VERIFIED'"), "waiver 1: verdict is 'VERIFIED'; known: 'CRASHED', 'TIMEOUT', 'REFUTED', "),
        (table("rule"), 'waiver 1: found no rule; give the one by which the claim fails, such as rule = "NUM-03"'),
        (table(rule="'NUM-3'"), "waiver 1: rule is 'NUM-3'; did you mean 'NUM-03'?"),
        (table(rule="['NUM-07', 'NUM-3']"), "waiver 1: rule is ['NUM-07', 'NUM-3']; did you mean 'NUM-03'?"),
        (table(rule="[]"), "waiver 1: rule is []; give a text that is not empty"),
        (table(url="'javascript:x'"), "waiver 1: url is 'javascript:x'; give an address that begins with https://"),
        (table(expires="'2027-01-31'"), "waiver 1: expires is '2027-01-31'; give a date without quotes"),
        (table(expires="2027-01-31T00:00:00"), "waiver 1: expires is datetime.datetime(2027, 1, 31, 0, 0); give a"),
        (table(max_lsb="true"), "waiver 1: max_lsb is True; give a number of LSB above 0"),
        (table(max_lsb="0"), "waiver 1: max_lsb is 0; give a number"),
        (table(max_lsb="nan"), "waiver 1: max_lsb is nan; give a number"),
        (table(isa="'avx2'"), "waiver 1: isa is 'avx2'; give a list of levels"),
        (table(isa="[]"), "waiver 1: isa is []; give a list of levels"),
        (table(may_pass="false"), "waiver 1: may_pass is False; give true, or leave it out"),
        (table(isa="['avx2', 'avx1*']"), "waiver 1: isa is ['avx2', 'avx1*']; no level is 'avx1*'; expected of sse41"),
        (table(findings="'a.md'"), "waiver 1: findings is 'a.md'; give a list of Markdown files"),
        (
            table(findings="['a.md', 'a.txt#1']"),
            "waiver 1: findings is ['a.md', 'a.txt#1']; 'a.txt#1' names no Mark",
        ),
        (table(torch="'new'"), "waiver 1: torch is 'new'; give releases of torch as pip takes them, such as"),
        (table(torch="2.10"), "waiver 1: torch is 2.1; give a text that is not empty"),
        (table() + table(), f"waiver 2: waiver 1 is about the same claim '{LINEAR}'; keep one"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(tmp_path, text).startswith(said)


def test_a_waiver_is_there_at_the_levels_that_it_names(tmp_path: Path) -> None:
    path = written(tmp_path, table(isa="['avx2*', 'amx']") + table(claim="'nn.ReLU'") + table(isa="['avx512']"))
    found = {
        level: [str(waiver.number) for waiver in load_waivers(path, level, TORCH)]
        for level in ("avx2", "avx2_on_avx512_vnni", "avx512", "avx512_vnni", "amx", "aarch64")
    }
    assert found == {
        "avx2": ["1", "2"],
        "avx2_on_avx512_vnni": ["1", "2"],
        "avx512": ["2", "3"],
        "avx512_vnni": ["2"],
        "amx": ["1", "2"],
        "aarch64": ["2"],
    }
    with pytest.raises(WaiverError, match="waiver 2: waiver 1 is about the same claim"):
        load_waivers(written(tmp_path, table(isa="['avx2']") + table()), "avx2", TORCH)


@pytest.mark.parametrize(
    ("torch", "numbers"),
    [("2.9.1+cu128", [2]), ("2.10.0", [1, 2]), ("2.13.0+cpu", [1, 2]), ("2.14.0", [2, 3]), ("2.15.0a0+git1", [2, 3])],
)
def test_a_waiver_is_there_for_the_releases_that_it_names(tmp_path: Path, torch: str, numbers: list[int]) -> None:
    text = table(torch="'>=2.10,<2.14'") + table(claim="'nn.ReLU'") + table(torch="'>=2.14'")
    assert [waiver.number for waiver in load_waivers(written(tmp_path, text), LEVEL, torch)] == numbers


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WaiverError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_waivers(tmp_path / "nowhere.toml", LEVEL, TORCH)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(WaiverError, match=r"latin\.toml: is not TOML: 'utf-8' codec"):
        load_waivers(tmp_path / "latin.toml", LEVEL, TORCH)


def test_an_exact_id_is_no_glob() -> None:
    known = waiver(claim=LINEAR)
    assert ruling(known).waived
    assert ruling(known, claim=LINEAR.replace("b=*", "b=float32")) == Ruling()
    assert waiver(glob=LINEAR.replace("[", "[[]")).matches(LINEAR)


def test_brackets_in_a_glob_may_stand_for_themselves() -> None:
    """Before, a glob that was the beginning of an ID matched nothing: its brackets were a set."""
    assert waiver(glob=LINEAR).matches(LINEAR)
    assert waiver(glob=f"{LINEAR.partition(']')[0]}]*").matches(LINEAR)
    assert waiver(glob="nn.[LM]*").matches(LINEAR), "a set all the same"
    assert not waiver(glob=LINEAR.replace("]", "]x")).matches(LINEAR)


@pytest.mark.parametrize(
    ("verdict", "waived", "why"),
    [
        ("REFUTED", True, ""),
        ("CRASHED", False, "covers REFUTED, but the claim is CRASHED: it got worse"),
        ("FALLBACK", False, "covers REFUTED, but the claim is FALLBACK: the waiver is out of date"),
        ("TOLERATED", False, "covers REFUTED, but the claim is TOLERATED: the waiver is out of date"),
        ("VERIFIED", False, ""),
    ],
)
def test_a_waiver_covers_its_verdict_alone(verdict: str, waived: bool, why: str) -> None:
    found = ruling(waiver(claim=LINEAR), verdict=verdict)
    assert found.waived is waived
    assert found.problem == (f"f.toml: waiver 1 ({LINEAR}): {why}" if why else "")


@pytest.mark.parametrize(
    ("verdict", "waived"), (("CRASHED", True), ("REFUTED", True), ("TIMEOUT", False), ("FALLBACK", False))
)
def test_what_crashes_by_chance_is_covered_where_it_is_only_wrong(verdict: str, waived: bool) -> None:
    """If the waiver names the rule by which it then fails."""
    assert not ruling(waiver(claim=LINEAR, verdict=Verdict.CRASHED, rules=()), verdict="REFUTED").waived
    assert ruling(waiver(claim=LINEAR, verdict=Verdict.CRASHED, rules=()), verdict="CRASHED").waived
    crash = waiver(claim=LINEAR, verdict=Verdict.CRASHED)
    assert ruling(crash, verdict=verdict).waived is waived
    assert "but the claim is off by 2 LSB" in ruling(crash, verdict="REFUTED", max_lsb=2.0).problem


def test_a_waiver_covers_its_rules_alone() -> None:
    """Before, a waiver of a wrong number covered the refusal of the whole op, and one of a refusal a wrong number."""
    known = waiver(claim=LINEAR, rules=("NUM-03", "NUM-07"), max_lsb=math.inf)
    for rules in ({"NUM-03"}, {"NUM-07"}, {"NUM-03", "NUM-07"}):
        assert ruling(known, rules=rules, max_lsb=3.0).waived
    found = ruling(known, rules={"NUM-03", "LOW-01"})
    assert not found.waived
    assert found.problem == (
        f"f.toml: waiver 1 ({LINEAR}): covers NUM-03 and NUM-07, but the claim breaks LOW-01 too: it is another "
        "deviation"
    )
    partly = Waivers((known,), TODAY, complete=False)
    assert not partly.judge(LINEAR, Verdict.REFUTED, {"LOW-01"}, None).waived


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("allowed", "measured", "waived"),
    [
        (18.0, 18.0, True),
        (18.0, 18.5, False),
        (18.0, None, True),
        (None, 1.0, True),
        (None, 1.5, False),
        (0.6, 0.8, False),
        (255.0, math.nan, False),
        (255.0, math.inf, False),
        (math.inf, math.inf, True),
    ],
)
def test_a_waiver_covers_errors_up_to_its_own(allowed: float | None, measured: float | None, waived: bool) -> None:
    found = ruling(waiver(claim=LINEAR, max_lsb=allowed), max_lsb=measured)
    assert found.waived is waived
    assert bool(found.problem) is not waived


def test_a_wrong_number_under_a_waiver_without_one_is_named() -> None:
    found = ruling(waiver(claim=LINEAR), max_lsb=120)
    assert found.problem.endswith("names no max_lsb, so it covers errors up to 1 LSB, but the claim is off by 120 LSB")
    found = ruling(waiver(claim=LINEAR, max_lsb=18), max_lsb=120)
    assert found.problem.endswith("covers errors up to 18 LSB, but the claim is off by 120 LSB")


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        ({"a": "{'groups': 10}", "b": "{'groups': 12, 'shape': (1, 12)}"}, ""),
        ({"a": "{'groups': 10}", "b": "{'groups': 9}"}, "covers cases where groups > 9, but 'b' fails too"),
        ({"a": "{'groups'"}, "covers cases where groups > 9, but 'a' fails too"),  # it cannot be read
        ({"a": "{'shape': (1,)}"}, "covers cases where groups > 9, but 'a' fails too"),  # nothing is known of it
        ({"a": "{'groups': 10}", "": "{}"}, "covers cases where groups > 9, but the claim fails as a whole"),
        ({}, "covers cases where groups > 9, but the claim fails as a whole"),
    ],
)
def test_a_waiver_of_cases_hides_only_what_it_names(failing: dict[str, str], why: str) -> None:
    found = ruling(waiver(claim=LINEAR, where=read_condition("groups > 9")), failing=failing)
    assert found.waived is (not why) and found.problem.endswith(why)


def test_a_waiver_holds_on_its_last_day_and_fails_the_run_after() -> None:
    last = waiver(claim=LINEAR, expires=TODAY)
    assert ruling(last).waived and problems(last, linear="REFUTED") == []
    past = waiver(claim=LINEAR, expires=date(2026, 6, 29))
    why = f"f.toml: waiver 1 ({LINEAR}): expired on 2026-06-29; fix the deviation, or renew the date and the reason"
    assert ruling(past) == Ruling(entry=past, problem=why)
    assert problems(past, linear="REFUTED") == problems(past, complete=False) == [why]


def test_an_exact_waiver_goes_before_a_glob() -> None:
    exact, wide = waiver(1, claim=POOLS[0], max_lsb=3), waiver(2, glob="nn.MaxPool*")
    assert ruling(wide, exact, claim=POOLS[0]).entry is exact
    assert ruling(wide, exact, claim=POOLS[1]).entry is wide
    assert Waivers((wide, exact), TODAY).find_covered(IDS) == {wide: POOLS[1:], exact: POOLS[:1]}
    assert problems(wide, exact, p1="REFUTED", p2="REFUTED", p3="REFUTED") == []


def test_two_globs_on_one_claim_are_an_error() -> None:
    one, other = waiver(1, glob="nn.MaxPool*"), waiver(2, glob="*2d/*")
    said = f"f.toml: waiver 1 (nn.MaxPool*): waiver 2 (*2d/*) matches {POOLS[1]} too; narrow one of the two globs"
    assert ruling(one, other, claim=POOLS[1]) == Ruling(problem=said)
    unused = f"{other}: every claim that it matches has another waiver; remove this one"
    assert problems(one, other, complete=False) == [said, unused]


def test_a_waiver_that_matches_nothing_names_the_nearest() -> None:
    typo = waiver(claim=POOLS[1].replace("nn.", "mm."))
    for complete in (True, False):
        assert problems(typo, complete=complete) == [
            f"{typo}: matches no claim of the backend; did you mean {POOLS[1]!r}?"
        ]


def test_a_glob_under_which_a_claim_passes_is_too_wide() -> None:
    wide = waiver(glob="nn.MaxPool*")
    assert problems(wide, p1="VERIFIED", p2="REFUTED", p3="TOLERATED") == [
        f"{wide}: {POOLS[0]}, {POOLS[2]} now pass; narrow the glob"
    ]


def test_a_claim_may_pass_where_the_waiver_says_so() -> None:
    """What lies in memory decides about a read out of bounds: the waiver failed each run in which nothing showed."""
    assert problems(waiver(glob="nn.MaxPool*", may_pass=True), p1="VERIFIED", p2="REFUTED", p3="TOLERATED") == []


def test_many_passing_claims_are_counted() -> None:
    ids = [f"add{number}" for number in range(10, 18)]
    found = Waivers((waiver(glob="add*"),), TODAY).problems(ids, dict.fromkeys(ids, Verdict.VERIFIED))
    assert found[0].endswith(": add10, add11, add12, add13, add14 and 3 more now pass; narrow the glob")


@pytest.mark.parametrize(
    ("complete", "judged"), [(False, {"linear": "VERIFIED"}), (True, {}), (True, {"linear": "FALLBACK"})]
)
def test_a_pass_counts_only_where_every_case_was_tried(complete: bool, judged: dict[str, str]) -> None:
    assert problems(waiver(claim=LINEAR), complete=complete, **judged) == []


@pytest.mark.parametrize(
    ("verdict", "is_waived"), (("TOLERATED", True), ("FALLBACK", True), ("REFUTED", True), ("CRASHED", False))
)
def test_a_run_that_does_not_try_all_cases_may_find_something_milder(verdict: str, is_waived: bool) -> None:
    partly = Waivers((waiver(claim=LINEAR, verdict=Verdict.REFUTED),), TODAY, complete=False)
    assert partly.judge(LINEAR, Verdict(verdict), {NUM_03}, None).waived is is_waived
    assert ruling(waiver(claim=LINEAR, verdict=Verdict.REFUTED), verdict="FALLBACK").waived is False


def test_a_waiver_of_a_model_that_is_not_handed_in_is_no_problem_also_beside_one_that_is() -> None:
    others = waiver(glob="model/own/torchvision:mobilenet_v2/*")
    for ids in ((), ("model/own/nets:make/ptq/quint8/per_tensor_symmetric",)):
        assert Waivers((others,), TODAY).problems(ids, dict.fromkeys(ids, Verdict.VERIFIED)) == []
