"""The script of a claim that fails: its case is built again, without the backend, and written down (scripts.py).

The flow is seeded case by case, so what is built again is what failed. It works for a claim whose process died as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from conformance.checks import Check
from conformance.claims import Claim
from conformance.jobs import Row
from conformance.oracle import NoOracleError
from conformance.pipeline import Workbench
from conformance.running import StageError
from conformance.scripts import Failure, NoScriptError, script_of
from reports.codec import decode
from reports.results import leading_check
from reports.schema import Check as CheckRow

STAGES = frozenset({"lower", "execution", "numerics"})
"""The stages whose faults show in one run of the lowered model."""


def claim_script(bench: Workbench, claim: Claim, rows: Sequence[Row]) -> str:
    """Return the script of a claim by its rows; "" where its fault shows in no model.

    Where none can be written, a comment says why: nothing that fails here may cost the claim its verdict.
    """
    lead = leading_check([check for check in map(decode, rows) if isinstance(check, CheckRow)])
    if lead is None or lead.stage not in STAGES or not lead.failed:
        return ""
    label = str(lead.evidence.get("case", ""))
    check = Check(
        stage=lead.stage, rule=lead.rule, outcome=lead.outcome, verdict=lead.verdict, message=lead.message,
        evidence=dict(lead.evidence),
    )  # fmt: skip
    try:
        case_run = bench.rebuilt(claim, label)
        batches = {f"{case_run.case.name}, {name}": batch for name, batch in case_run.drawn}
        batch = next((each for name, each in batches.items() if label.startswith(name)), case_run.drawn[0][1])
        failure = Failure(model=case_run.reference, batch=batch, check=check)
        return script_of(failure, bench, name=claim.id, message=lead.message)
    except (NoScriptError, NoOracleError, StageError) as error:
        return f"# no script: {' '.join(str(error).split())}\n"
    except Exception as error:
        return f"# no script, for a bug of the suite: {type(error).__name__}: {' '.join(str(error).split())}\n"
