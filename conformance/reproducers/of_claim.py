"""What a claim that fails shows of itself: its script, and its graphs where its process died before it told them.

Its case is built again, up to the reference model: the flow is seeded case by case, so what is built again is what
failed. Nothing is built of a claim whose process died or hung in doing so.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.discovery import told
from conformance.claims.claim import Claim
from conformance.oracle.grids import NoOracleError
from conformance.pipeline.claim_run import CaseRun
from conformance.pipeline.graph_text import graphs_of
from conformance.pipeline.workbench import Workbench
from conformance.reproducers.script import Failure, NoScriptError, script_of
from conformance.stages.backend_calls import StageError
from conformance.stages.check import Check
from reports.codec import PlainRow, decode
from reports.results import Verdict, leading_check
from reports.schema import Check as CheckRow

STAGES = frozenset({"lower", "execution", "numerics"})
"""The stages whose faults show in one run of the lowered model."""
UNSAFE = frozenset({"config", "fuse", "prepare", "convert"})
"""Where a process died or hung, to build the case again would do the same, in the process of the tests."""


def shown_of(bench: Workbench, claim: Claim, rows: Sequence[PlainRow]) -> PlainRow:
    """Return what a claim's row shows beside its verdict; ``rows`` are its checks' and its own, the last.

    There is a script where the fault shows in one run of the lowered model; where none can be written, a comment says
    why: nothing that fails here may cost the claim its verdict.
    """
    lead = leading_check([check for check in map(decode, rows) if isinstance(check, CheckRow)])
    needs_graphs = not rows[-1].get("graphs")
    needs_script = lead is not None and lead.stage in STAGES and lead.failed
    has_died = lead is not None and lead.verdict in (Verdict.CRASHED, Verdict.TIMEOUT)
    if lead is None or not (needs_graphs or needs_script) or (has_died and lead.stage in UNSAFE):
        return {}
    found: PlainRow = {}
    try:
        case_run = bench.rebuilt(claim, str(lead.evidence.get("case", "")))
        found |= {"graphs": graphs_of(claim, case_run)} if needs_graphs else {}
        return found | ({"script": _script(bench, claim, lead, case_run)} if needs_script else {})
    except (NoScriptError, NoOracleError, StageError) as error:
        reason = " ".join(str(error).split())
    except Exception as error:
        reason = f"a bug of the suite: {told(error)}"
    return found | ({"script": f"# no script: {reason}\n"} if needs_script else {})


def _script(bench: Workbench, claim: Claim, lead: CheckRow, case_run: CaseRun) -> str:
    """The script of a case that fails as the leading check says."""
    label = str(lead.evidence.get("case", ""))
    check = Check(
        stage=lead.stage, rule=lead.rule, outcome=lead.outcome, verdict=lead.verdict, message=lead.message,
        evidence=dict(lead.evidence),
    )  # fmt: skip
    batches = {f"{case_run.case.name}, {name}": batch for name, batch in case_run.drawn}
    batch = next((each for name, each in batches.items() if label.startswith(name)), case_run.drawn[0][1])
    failure = Failure(model=case_run.reference, batch=batch, check=check)
    return script_of(failure, bench, name=claim.id, message=lead.message)
