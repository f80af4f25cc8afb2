"""Conditions on cases, by the command: a limit keeps cases out, a waiver hides only those that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.suite_runs import Ran, run

LINEAR = "--claim=nn.Linear/static:in=quint8*/ptq/per_channel_symmetric"
CONV = "--claim=torch.conv2d/static:in=qint8*/ptq/per_tensor_symmetric"
FULL = "--profile=full"

pytestmark = pytest.mark.slow


def ran(folder: Path, backend: str, *options: str) -> Ran:
    return run(folder, f"tests.hostile.condition_backends:{backend}", *options)


def verdict(found: Ran) -> Verdict:
    [claim] = found.results.claims
    return claim.verdict


def test_cases_with_other_arguments_are_not_tried_and_the_report_says_so(tmp_path: Path) -> None:
    assert verdict(ran(tmp_path / "a", "GROUPS", CONV)) is Verdict.REFUTED
    found = ran(tmp_path / "b", "ONE_GROUP", CONV)
    assert verdict(found) is Verdict.VERIFIED and found.status == 0, found.out
    assert found.results.header.limits["torch.conv?d"] == {"where": "groups == 1"}
    assert "argument values beyond the limits that the backend declares for" in found.out
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "<li><code>torch.conv?d</code>: where groups == 1</li>" in page


def test_cases_with_other_ratios_of_scales_are_left_out_once_they_are_known(tmp_path: Path) -> None:
    assert verdict(ran(tmp_path / "a", "RATIOS", LINEAR, FULL)) is Verdict.REFUTED
    found = ran(tmp_path / "b", "COARSE", LINEAR, FULL)
    assert verdict(found) is Verdict.VERIFIED and found.status == 0, found.out
    stages = {check.stage: check for check in found.results.checks}
    shown = dict[str, object](stages["convert"].evidence)
    outside = int(str(shown["cases outside of the declared conditions"]))
    assert 0 < outside < int(stages["convert"].cases or 0)
    assert int(stages["lower"].cases or 0) == int(stages["convert"].cases or 0) - outside


def test_a_claim_of_which_no_case_is_left_is_not_verified(tmp_path: Path) -> None:
    found = ran(tmp_path, "NOTHING", LINEAR)
    [claim] = found.results.claims
    assert (claim.verdict, found.status) == (Verdict.UNEXERCISED, 1)
    assert "are outside of the conditions that the backend declares" in claim.reason


@pytest.mark.parametrize(
    ("where", "status"), [("groups > 1", 0), ("groups > 8", 1), ("s_out > 0", 0), ("s_out < 0", 1)]
)
def test_a_waiver_hides_the_cases_that_it_names_and_no_other(tmp_path: Path, where: str, status: int) -> None:
    waivers = tmp_path / "w.toml"
    waivers.write_text(
        '[[waiver]]\nglob = "torch.conv2d/*"\nverdict = "REFUTED"\nrule = "NUM-03"\nmax_lsb = 255\nreason = "groups"\n'
        f'url = "https://a.b"\nwhere = "{where}"\n'
    )
    found = ran(tmp_path, "GROUPS", CONV, f"--waivers={waivers}")
    [claim] = found.results.claims
    assert (claim.verdict, claim.waived, found.status) == (Verdict.REFUTED, not status, status), found.out
    if status:
        assert f"covers cases where {where}, but '" in claim.reason and "fails too" in claim.reason
    else:
        assert claim.waiver is not None and claim.waiver.where == where
        page = (found.folder / "report.html").read_text(encoding="utf-8")
        assert f"where <code>{where.replace('>', '&gt;')}</code>" in page
