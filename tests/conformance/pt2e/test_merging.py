"""What several Quantizers of one backend amount to, as one config: dtype configs of a pattern, flows, notes."""

from __future__ import annotations

from dataclasses import replace

import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
from torch import nn

from fx_quant_conformance.conformance.pt2e.candidates import copy_entry, list_entries
from fx_quant_conformance.conformance.pt2e.derive import ProbeRow
from fx_quant_conformance.conformance.pt2e.merging import Part, merge_parts
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType
from fx_quant_conformance.refimpl.config.native import DYNAMIC_U8_S8, U8, U8_S8
from fx_quant_conformance.refimpl.config.patterns import Pattern, pattern_name

BY_PATTERN = {entry.normal_pattern: entry for entry in list_entries()}
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def make_part(name: str, claims: dict[Pattern, DTypeConfig | str], *, is_qat: bool = False, note: str = "") -> Part:
    """A part that claims each pattern with a dtype config, or does not for a reason."""
    config, rows = BackendConfig(name), list[ProbeRow]()
    for pattern, said in claims.items():
        if isinstance(said, DTypeConfig):
            config.set_backend_pattern_config(copy_entry(BY_PATTERN[pattern], is_qat=is_qat).add_dtype_config(said))
        schemes = ("per_tensor_symmetric",) if pattern in (nn.Linear, nnqat.Linear) else ()
        row = ProbeRow(pattern=pattern_name(pattern), dtypes="some", schemes=schemes, notes=(note,) if note else ())
        rows.append(row if isinstance(said, DTypeConfig) else ProbeRow(pattern=row.pattern, reason=said))
    return Part(name=name, is_qat=is_qat, config=config, rows=tuple(rows))


def merge(*parts: Part) -> tuple[dict[Pattern, BackendPatternConfig], dict[str, ProbeRow]]:
    config, rows = merge_parts("all", parts)
    assert config.name == "all"
    return {entry.normal_pattern: entry for entry in config.configs}, {row.pattern: row for row in rows}


def test_the_dtype_configs_of_a_pattern_come_together_in_the_order_of_the_parts() -> None:
    static, dynamic = (
        make_part("static", {nn.Linear: U8_S8, nn.ReLU: U8}),
        make_part("dynamic", {nn.Linear: DYNAMIC_U8_S8, nn.ReLU: "no"}),
    )
    for first, second in ((static, dynamic), (dynamic, static)):
        entries, rows = merge(first, second)
        assert entries[nn.Linear].dtype_configs == [
            first.config.configs[0].dtype_configs[0],
            second.config.configs[0].dtype_configs[0],
        ]
        assert entries[nn.ReLU].dtype_configs == [U8]
        assert " and " in rows["nn.Linear"].dtypes and not rows["nn.Linear"].notes
    assert static.config.configs[0].dtype_configs == [U8_S8], "parts stay as they are"


def test_a_config_names_the_qat_module_where_both_flows_are_the_same() -> None:
    ptq = make_part("ptq", {nn.Linear: U8_S8, nn.ReLU: U8})
    qat = make_part("qat", {nn.Linear: U8_S8, nn.ReLU: U8, nnqat.Linear: U8_S8}, is_qat=True)
    entries, _ = merge(ptq, qat)
    assert entries[nn.Linear].qat_module is nnqat.Linear
    assert list(entries) == [nn.Linear, nn.ReLU, nnqat.Linear]


def test_what_one_flow_has_alone_is_noted_or_left_out() -> None:
    ptq = make_part("ptq", {nn.Linear: U8_S8, nn.ReLU: U8, nn.Conv2d: "no"})
    dynamic = make_part("dynamic", {nn.Linear: DYNAMIC_U8_S8, nn.ReLU: "no", nn.Conv2d: "no"})
    qat = make_part(
        "qat", {nn.Linear: U8_S8, nn.ReLU: "not annotated", nn.Conv2d: U8_S8, nnqat.Linear: U8_S8}, is_qat=True
    )
    entries, rows = merge(ptq, dynamic, qat)
    assert list(entries) == [nn.Linear] and entries[nn.Linear].qat_module is None
    [note] = rows["nn.Linear"].notes
    assert note.startswith("in training: static:in=quint8")
    assert rows["nn.ReLU"].reason.startswith("in one flow only")
    assert rows["nn.Conv2d"].reason.startswith("in one flow only")
    assert rows["nnqat.Linear"].reason == "no entry names this QAT module", "else it would be claimed for PTQ"


def test_a_fused_module_has_what_both_flows_have() -> None:
    ptq = make_part("ptq", {nni.LinearReLU: U8_S8, (nn.ReLU, nn.Linear): U8_S8})
    dynamic = make_part("dynamic", {nni.LinearReLU: DYNAMIC_U8_S8, (nn.ReLU, nn.Linear): DYNAMIC_U8_S8})
    qat = make_part("qat", {nni.LinearReLU: U8_S8, nniqat.LinearReLU: U8_S8}, is_qat=True)
    entries, rows = merge(ptq, dynamic, qat)
    assert entries[nni.LinearReLU].qat_module is nniqat.LinearReLU
    assert entries[nni.LinearReLU].dtype_configs == [U8_S8]
    assert entries[nn.ReLU, nn.Linear].dtype_configs == [U8_S8, DYNAMIC_U8_S8]
    [note] = rows["nni.LinearReLU"].notes
    assert note.startswith("in PTQ: static:") and " and dynamic:" in note


def test_quantizers_that_share_in_different_ways_make_no_claim() -> None:
    first, second = make_part("first", {nn.ReLU: U8}), make_part("second", {nn.ReLU: U8})
    second.config.configs[0].set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    assert first.config.configs[0].observation_type is SHARE
    entries, rows = merge(first, second)
    assert not entries and rows["nn.ReLU"].reason == "the Quantizers observe its output in different ways"


def test_notes_and_reasons_say_whose_they_are_unless_all_have_them() -> None:
    first = make_part("first", {nn.Linear: U8_S8, nn.ReLU: "one", nn.Tanh: "no"}, note="all")
    second = make_part("second", {nn.Linear: DYNAMIC_U8_S8, nn.ReLU: "two", nn.Tanh: "no"}, note="all")
    _, rows = merge(first, second)
    assert rows["nn.Linear"].notes == ("all",)
    assert rows["nn.ReLU"].reason == "first: one; second: two" and rows["nn.Tanh"].reason == "no"
    silent = [replace(part, rows=tuple(replace(row, notes=()) for row in part.rows)) for part in (first, second)]
    assert merge(first, silent[1])[1]["nn.Linear"].notes == ("static: all",)
    assert merge(first, silent[0], silent[1])[1]["nn.Linear"].notes == ("first: all",)


def test_a_scheme_that_only_some_dtypes_have_is_noted() -> None:
    static, dynamic = make_part("static", {nn.Linear: U8_S8}), make_part("dynamic", {nn.Linear: DYNAMIC_U8_S8})
    both = replace(static, rows=tuple(replace(row, schemes=("per_channel_symmetric",)) for row in static.rows))
    _, rows = merge(static, both, dynamic)
    assert rows["nn.Linear"].schemes == ("per_channel_symmetric", "per_tensor_symmetric")
    [note] = rows["nn.Linear"].notes
    assert note.startswith("dynamic:") and note.endswith("per_tensor_symmetric only")
