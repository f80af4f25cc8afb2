"""The reproducer of a failing claim, and its graphs, rebuilt if its process died before sending them.

The claim's case is built again, up to the reference model: the flow is seeded case by case, so that this is the case
that failed. Nothing is built again of a claim whose process died or hung in building it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.pipeline.claim_run import find_case, rebuild
from fx_quant_conformance.conformance.pipeline.graph_text import graphs_of
from fx_quant_conformance.conformance.reproducers.script import Failure, format_heading, script_of
from fx_quant_conformance.conformance.reproducers.spelling import NoScriptError, format_pattern
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.fuse import FUSES_NOTHING
from fx_quant_conformance.conformance.stages.state import CaseState
from fx_quant_conformance.conformance.vectors.graph_data import describe_model
from fx_quant_conformance.conformance.vectors.recording import name_case
from fx_quant_conformance.conformance.vectors.replay import ReplayBackend
from fx_quant_conformance.refimpl.fuse.fuse import trace_and_fuse
from fx_quant_conformance.reports.results import leading_check
from fx_quant_conformance.reports.schema import Check, ClaimResult, Where
from fx_quant_conformance.reports.verdicts import Verdict

SCRIPTED = frozenset({"lower", "execution", "numerics"})
"""The stages whose faults show in one run of the lowered model."""
UNSAFE = frozenset({"config", "fuse", "prepare", "convert"})
"""The stages that would also kill or hang the process of the tests, if a child died or hung there."""


def with_reproducer(bench: Bench, claim: Claim, result: ClaimResult, checks: Sequence[Check]) -> ClaimResult:
    """Return a failing claim's result with the op of the case that is shown, a script and graphs.

    There is a script if the fault shows in one run of the lowered model; if none can be written, a comment says why.
    Nothing that fails here costs the claim its verdict.
    """
    lead = leading_check(checks)
    if lead is None or (lead.verdict in (Verdict.CRASHED, Verdict.TIMEOUT) and lead.stage in UNSAFE):
        return result
    where = lead.evidence.get("where", Where())
    result = replace(result, op=format_op(bench, claim, where)) if where.case else result
    needs_script = lead.stage in SCRIPTED and lead.failed
    if result.graphs and not needs_script:
        return result
    try:
        state = rebuild(bench, claim, where)
        if not result.graphs:
            result = replace(result, graphs=graphs_of(claim, state))
        return replace(result, script=_write_script(bench, lead, state)) if needs_script else result
    except (NoScriptError, NoOracleError, FaultFound) as error:
        reason = " ".join(str(error).split())
    except Exception as error:
        reason = f"a bug of the suite: {format_error(error)}"
    return replace(result, script=f"# no script: {reason}\n") if needs_script else result


def format_op(bench: Bench, claim: Claim, where: Where) -> str:
    """Spell the pattern of a case as Python; "" for a model that cannot be built or traced."""
    try:
        model = trace_and_fuse(find_case(bench, claim, where).build(), FUSES_NOTHING, leaves=claim.vendor_modules)
        return format_pattern(model)
    except Exception:  # the stages report faults; an op that is not shown costs no verdict
        return ""


def _write_script(bench: Bench, check: Check, state: CaseState) -> str:
    """Write the script of a case that fails as the check says. Raises NoScriptError for files that were handed in."""
    if isinstance(bench.backend, ReplayBackend):
        name = name_case(check.claim, describe_model(state.reference))
        ends = f"It runs the device's command on case {name} again, and ends with status 1."
        heading = format_heading(bench, check.claim, check.message, ends)
        if script := bench.backend.source.format_script(check.claim, name, heading):
            return script
        raise NoScriptError(f"the model ran on a device; case {name} of the bundle has it, with its inputs")
    where = check.evidence.get("where", Where())
    batches = dict(state.inputs)
    batch = batches.get(where.input, state.inputs[0].tensors)
    failure = Failure(model=state.reference, batch=batch, check=check)
    return script_of(failure, bench, name=check.claim, message=check.message)
