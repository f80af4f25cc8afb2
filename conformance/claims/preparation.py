"""How a vendor has models prepared: QConfigs of its own observers, and custom modules (rules QCM-01, CUS-01).

They hold for every claim and every model of a run. A claim that none of the QConfigs fits stays UNEXERCISED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fx_quant_conformance.backends.base import Backend
from fx_quant_conformance.refimpl import ConvertCustomConfig, FakeQuantize, PrepareCustomConfig, QConfig, QConfigError
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.config.qconfig import as_qconfig
from fx_quant_conformance.refimpl.observers.observers import Constructor
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverReader, QConfigFacts, choose_dtype_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a vendor gives for prepare and convert."""

    qconfigs: tuple[QConfig, ...] | None = None
    """QConfigs with constructors of observers; None: the suite's own QConfigs."""
    prepare: PrepareCustomConfig = field(default_factory=PrepareCustomConfig)
    """The classes of custom modules, for prepare."""
    convert: ConvertCustomConfig = field(default_factory=ConvertCustomConfig)
    """The classes of custom modules, for convert."""

    @classmethod
    def of(cls, backend: Backend) -> Preparation:
        """Ask a backend. Raises QConfigError or ConfigError for anything that is no QConfig or custom config."""
        given = backend.qconfigs()
        return cls(
            qconfigs=None if given is None else tuple(map(_read_qconfig, given)),
            prepare=PrepareCustomConfig.of(backend.prepare_custom_config()),
            convert=ConvertCustomConfig.of(backend.convert_custom_config()),
        )

    @property
    def custom_modules(self) -> frozenset[type]:
        """The float classes of custom modules."""
        return frozenset(kind for kinds in self.prepare.float_to_observed_mapping.values() for kind in kinds)

    def choose_qconfig(
        self,
        dtypes: DTypeConfig,
        qscheme: torch.qscheme | None,
        *,
        has_weight: bool,
        is_qat: bool,
        activation: Callable[..., Any] | None = None,
    ) -> QConfig:
        """Return the first QConfig that a dtype config takes, whose weight has this qscheme (None: any).

        ``activation``: what observes activations in the place of each QConfig's own. In training each observer is that
        of a fake quantize. Raises QConfigError, with the reasons, where none fits.
        """
        misfits: list[str] = []
        for number, given in enumerate(self.qconfigs or ()):
            qconfig = given if activation is None else given._replace(activation=activation)
            facts = ObserverReader().read_qconfig(qconfig, f"Backend.qconfigs()[{number}]")
            chosen, refusals = choose_dtype_config(facts, [dtypes], has_weight=has_weight)
            found = getattr(qconfig.weight(), "qscheme", None)
            if chosen is not None and qscheme in (None, found):
                return _with_fake_quantizes(qconfig, facts) if is_qat else qconfig
            reasons = map(str, refusals) if chosen is None else (f"the weight's qscheme is {found}, must be {qscheme}",)
            misfits.append(f"[{number}]: {'; '.join(reasons)}")
        raise QConfigError(f"no QConfig of Backend.qconfigs() fits: {' | '.join(misfits) or 'it returned none'}")

    def choose_input_qconfig(self, dtypes: DTypeConfig, *, is_qat: bool = False) -> QConfig:
        """Return the first QConfig that measures values of the dtype of a dtype config's input, within its range.

        Where those of that dtype are all of fixed qparams, the first of these: what stands before the op is measured
        all the same (OBS-14). Raises QConfigError where none is of that dtype.
        """
        end = dtypes.input_dtype_with_constraints
        low, high = end.quant_min_lower_bound, end.quant_max_upper_bound
        bare = type(end)(end.dtype, low, high)
        read = [(qconfig, ObserverReader().read_qconfig(qconfig)) for qconfig in self.qconfigs or ()]
        taken = [
            (qconfig, facts)
            for qconfig, facts in sorted(read, key=lambda each: each[1].activation.fixed is not None)
            if choose_dtype_config(facts, [DTypeConfig(bare, bare)], has_weight=False)[0] is not None
        ]
        if not taken:
            raise QConfigError(f"no QConfig of Backend.qconfigs() measures values of {end.dtype} from {low} to {high}")
        qconfig, facts = taken[0]
        return _with_fake_quantizes(qconfig, facts) if is_qat else qconfig


OWN_OF_THE_SUITE = Preparation()
"""With the suite's own QConfigs, and without custom modules."""


def _read_qconfig(value: object) -> QConfig:
    """Read a QConfig, refimpl's or torch's, with constructors that keywords can be bound to."""
    qconfig = as_qconfig(value, "Backend.qconfigs()")
    if qconfig is None:
        raise QConfigError("Backend.qconfigs(): found None in it; leave it out")
    return QConfig(*map(_as_constructor, qconfig))


def _as_constructor(make: Any) -> Constructor:
    bound = make if isinstance(make, partial) else getattr(make, "p", None)  # torch's with_args holds a partial
    return Constructor(bound.func, *bound.args, **bound.keywords) if isinstance(bound, partial) else Constructor(make)


def _with_fake_quantizes(qconfig: QConfig, facts: QConfigFacts) -> QConfig:
    """Return a QConfig for training: static observers inside of fake quantizes; what is one already stays."""
    return QConfig(*_wrap(qconfig, facts))


def _wrap(qconfig: QConfig, facts: QConfigFacts) -> Iterator[Constructor]:
    for make, fact in zip(qconfig, (facts.activation, facts.weight), strict=True):
        is_fake = hasattr(fact.observer_class, "enable_fake_quant")
        has_range = fact.quant_min is not None and not fact.is_dynamic
        yield FakeQuantize.with_args(observer=make) if has_range and not is_fake else make  # type: ignore[misc]
