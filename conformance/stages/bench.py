"""The bench: the backend under test with its config and limits, the profile's effort, and the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Representation
from fx_quant_conformance.backends.lowering import in_form
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.effort import PROFILES
from fx_quant_conformance.conformance.claims.preparation import Preparation
from fx_quant_conformance.conformance.claims.quick import Share, shares_of
from fx_quant_conformance.conformance.oracle.grids import is_static
from fx_quant_conformance.conformance.remote.executor import executor_of
from fx_quant_conformance.refimpl import BackendConfig, convert_to_reference_decomposed_fx
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.observers.qparams import dtype_range, is_quantized_dtype


class Bench:
    """The backend under test. Equal benches give equal results, in every process and order.

    ``spec``: the backend's name on the command line. ``repro``: returns the command that runs a claim or job again, by
    its ID. ``waived``: the IDs of claims that waivers cover. ``max_examples``: random inputs of each case, with all
    directed ones, in place of the profile's. ``tries_all``: nothing is left out because of what the backend answers.
    ``runs_elsewhere``: its models are files for a device. ``executor``: how it is reached.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int,
        profile: str,
        max_examples: int | None = None,
        spec: str = "",
        repro: Callable[[str], str] = str,
        waived: Collection[str] = (),
    ) -> None:
        torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and workers share the cores
        self.backend = backend
        self.executor = executor_of(backend)
        self.tries_all = self.executor.records
        self.runs_elsewhere = self.executor.runs_elsewhere
        self.spec = spec or backend.name
        self.repro = repro
        self.waived = frozenset(waived)
        self.seed = seed
        self.profile = profile
        self.effort = PROFILES[profile] if max_examples is None else PROFILES[profile].with_examples(max_examples)
        self.capabilities = backend.capabilities()
        self.config: BackendConfig = as_backend_config(backend.backend_config())
        self.preparation = Preparation.of(backend)

    @cached_property
    def shares(self) -> dict[str, Share]:
        """Share of each claim in the cases of its op, by the claim's ID."""
        return shares_of(enumerate_claims(self.config, self.capabilities))

    def seed_for(self, *names: str) -> int:
        """Return a seed for these names, the same whatever ran before and in whichever process."""
        digest = hashlib.sha256("/".join([str(self.seed), *names]).encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def convert(self, prepared: GraphModule, *, is_bounded: bool = True) -> GraphModule:
        """Return the decomposed reference model, from which the backend's form is made as it is lowered.

        ``is_bounded``: also quantized tensors keep ranges narrower than their dtype's, as to judge a claim of such a
        range needs; else they are as users convert them. (CVT-09) Raises QConfigError also for what the backend's form
        cannot say. (CVT-10)
        """
        reference = convert_to_reference_decomposed_fx(prepared, self.preparation.convert)
        form = self.backend.representation
        if form is Representation.QUANTIZED and not is_bounded:
            _widen(reference)
        in_form(form, reference)
        return reference


def _widen(reference: GraphModule) -> None:
    """Let a reference model's values and weights have all integers of their dtypes, as quantized tensors do. (CVT-09)

    What is quantized at run time keeps its range.
    """
    for module in reference.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if is_static(node):
                    *numbers, _, _, dtype = node.args
                    node.args = (*numbers, *dtype_range(dtype), dtype)
            module.recompile()
        elif is_quantized_dtype(getattr(module, "weight_dtype", None)) and hasattr(module, "weight_quant_min"):
            held: Any = module
            held.weight_quant_min, held.weight_quant_max = dtype_range(held.weight_dtype)
