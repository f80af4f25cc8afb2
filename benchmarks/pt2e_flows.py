"""Both flows, one answer: each claim of a config through FX graph mode, and through PT2E with BackendConfigQuantizer.

A claim's model is prepared, calibrated and converted twice, on the same inputs: by refimpl's FX flow to the decomposed
reference model; and exported, annotated by BackendConfigQuantizer, and prepared and converted by torchao. Compared are
the quantized ops with their qparams, the integers of the weights, and the outputs, bit for bit. A pair (pattern × dtype
config) carries over if all of its claims do. What does not must fit one of REASONS; docs/pt2e.md has the table.

    python -m benchmarks.pt2e_flows qnnpack x86     # the named configs
    python -m benchmarks.pt2e_flows --write-doc     # all seven, and the table of docs/pt2e.md
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.pt2e_reasons import REASONS, Reason, Trial, compare, find_reason, trial_of
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns

CONFIGS = ("native", "fbgemm", "x86", "qnnpack", "onednn", "tensorrt", "executorch")
DOCUMENT = Path(__file__).parent.parent / "docs" / "pt2e.md"
BEGIN, END = "<!-- table of pairs: python -m benchmarks.pt2e_flows --write-doc -->\n", "<!-- end of the table -->"


def name_backend(config: str) -> str:
    """Return the name of the reference backend with a config's claims."""
    return "reference" if config == "qnnpack" else f"reference-{config}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a claim came out: "" the same; else what differs, and the reason, if there is one."""

    claim: Claim
    difference: str
    reason: Reason | None


def compare_claims(name: str) -> Iterator[Outcome]:
    """Take the first case of each claim of a config through both flows."""
    backend = find_backend(name_backend(name))
    config, capabilities = backend.backend_config(), backend.capabilities()
    for claim in enumerate_claims(config, capabilities):
        reason = find_reason(claim)
        if reason is not None and not reason.has_form:
            yield Outcome(claim=claim, difference=reason.text, reason=reason)
            continue
        cases = plan_cases(claim, capabilities, limit=4)
        if isinstance(cases, str):
            yield Outcome(claim=claim, difference=cases, reason=None)
            continue
        difference, reason = _compare(trial_of(claim, cases[0], config), reason)
        yield Outcome(claim=claim, difference=difference, reason=reason)


def _compare(trial: Trial, reason: Reason | None) -> tuple[str, Reason | None]:
    """Say how the flows differ, and the reason if it is shown; an error is a difference without one."""
    try:
        difference, both = compare(trial)
        is_explained = bool(difference) and reason is not None and reason.is_shown(trial, both)
    except Exception as error:  # the row says it, and the claim does not carry over
        return format_error(error), None
    return difference, reason if is_explained else None


def make_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Count the pairs of a config: by what became of all claims on each."""
    pairs: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        pairs[outcome.claim.pattern, outcome.claim.dtype_config].append(outcome)
    groups = list(pairs.values())
    formless = sum(all(o.reason is not None and not o.reason.has_form for o in group) for group in groups)
    same = sum(all(not o.difference for o in group) for group in groups)
    unexplained = sum(any(o.difference and o.reason is None for o in group) for group in groups)
    having = len(groups) - formless
    return {
        "config": name,
        "pairs": len(groups),
        "without an aten form": formless,
        "carry over bit for bit": same,
        "of those with a form": f"{100 * same / max(having, 1):.0f} %",
        "with a reason": having - same - unexplained,
        "unexplained": unexplained,
        "claims": len(outcomes),
        "the same": sum(not o.difference for o in outcomes),
    }


def _compare_config(name: str) -> tuple[dict[str, Any], Counter[str], list[str]]:
    """Return a config's row, how many claims have which reason, and a line for each difference without one."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with remember_patterns():
        outcomes = list(compare_claims(name))
    found = Counter(outcome.reason.key for outcome in outcomes if outcome.reason is not None)
    differing = (outcome for outcome in outcomes if outcome.difference and outcome.reason is None)
    return make_row(name, outcomes), found, [f"{name}: {each.claim}: {each.difference[:300]}" for each in differing]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the configs; print a line for each difference, and the table. Status 1: one is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="default: all seven")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--write-doc", action="store_true", help=f"write the table into {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    names = options.configs or CONFIGS
    rows, reasons = [], Counter[str]()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row, found, texts in pool.map(_compare_config, names):
            print(*texts, tabulate([row], headers="keys"), sep="\n", flush=True)
            rows.append(row)
            reasons += found
    counted = [{"reason": reason.text, "claims": reasons[reason.key]} for reason in REASONS]
    text = "\n\n".join(tabulate(table, headers="keys", tablefmt="github") for table in (rows, counted))
    print(text)
    if options.write_doc:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}", encoding="utf-8")
    return int(any(row["unexplained"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
