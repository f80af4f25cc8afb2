"""Plots with a point for each claim: strips of distances, one for each op, and errors against ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.numbers import Number
from reports.plots.axes import LIMIT, Axis, choose_ticks, make_distance_axis
from reports.plots.drawing import WIDTH, Link, Mark, Plot, Stroke, Text
from reports.results import counts_of
from reports.schema import Check, ClaimResult
from reports.text import cut_end, cut_middle, pluralize, spell_lsb
from reports.verdicts import Verdict

MOST_STRIPS = 40
"""Largest number of ops with a strip."""
MOST_ROWS = 100
"""Largest number of rows in the data table of errors and ranges."""
MOST_DOTS, FEWER_DOTS, MANY = 600, 200, 2000
"""Largest number of points of a drawing, and that of MANY claims; beyond it, those near each other become one."""
_STRIP, _NAMES, _RIGHT = 14, 128, 16
"""Height of a strip, and the room beside the strips, for the names of the ops and on the right."""
_HEIGHT, _LEFT, _TOP, _BOTTOM = 300, 64, 14, 46
"""Size of the plot of errors, and its margins."""
_FUSED = {
    "convbn": "conv", "convrelu": "conv", "convbnrelu": "conv", "convadd": "conv", "convaddrelu": "conv",
    "linearbn": "linear", "linearrelu": "linear", "linearleakyrelu": "linear", "lineartanh": "linear",
    "bnrelu": "batchnorm",
}  # fmt: skip
"""The op that each of torch's fused modules begins with, without their dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A claim at its place in a drawing; ``strip``: the strip that it is in, if there are strips."""

    x: float
    y: float
    claim: str
    verdict: Verdict
    lsb: Number
    strip: str = ""


Spot = tuple[_Point, ...]
"""Claims that are drawn as one point, the one with the largest distance first."""


# -- strips -----------------------------------------------------------------------------------------------------------


def name_op(pattern: str) -> str:
    """Return the op that a pattern begins with, however it is written: `nni.ConvReLU2d` and `F.conv2d` are conv2d."""
    first = pattern.partition("+")[0].partition("(")[0].strip()
    name = first.rpartition(".")[2].lower().replace("_", "") or pattern
    dimensions = name[-2:] if name[-2:] in ("1d", "2d", "3d") else ""
    kind = _FUSED.get(name.removesuffix(dimensions))
    return name if kind is None else kind if kind == "linear" else f"{kind}{dimensions}"


def plot_strips(claims: Iterable[ClaimResult]) -> Plot | None:
    """Plot the largest distance of each claim, in a strip for each op, the worst op first."""
    groups: dict[str, list[ClaimResult]] = {}
    for claim in claims:
        if claim.max_lsb is not None:
            groups.setdefault(name_op(claim.pattern), []).append(claim)
    if not groups:
        return None
    ordered = sorted(groups.items(), key=lambda group: (*_rank(group[1]), group[0]))
    drawn, others = ordered[:MOST_STRIPS], [claim for _, group in ordered[MOST_STRIPS:] for claim in group]
    top, bottom = 22.0, 22.0 + _STRIP * len(drawn)
    known = [claim for _, group in drawn for claim in group]
    axis = make_distance_axis((claim.max_lsb for claim in known if claim.max_lsb is not None), _NAMES, WIDTH - _RIGHT)
    points = [
        _Point(x=axis.place(claim.max_lsb), y=top + _STRIP * (number + 0.5), claim=claim.claim, verdict=claim.verdict,
               lsb=claim.max_lsb, strip=op)
        for number, (op, group) in enumerate(drawn) for claim in group if claim.max_lsb is not None
    ]  # fmt: skip
    spots = _merge(points)
    return Plot(
        name="strips",
        title="Largest distance of each claim, op by op",
        description=_describe_strips(len(known), axis, len(ordered), others),
        height=bottom + 44,
        columns=("op", "verdict", "LSB", "claims", "claim"),
        rows=tuple((spot[0].strip, spot[0].verdict.value, spell_lsb(spot[0].lsb), f"{len(spot):,}",
                    Link(text=spot[0].claim, target=spot[0].claim)) for spot in spots),
        texts=tuple(_label_strips([op for op, _ in drawn], axis, top)),
        lines=tuple(_rule_strips(axis, top, bottom, len(drawn))),
        dots=tuple(map(_draw, reversed(spots))),
        legend=counts_of(claim.verdict for claim in known),
        is_wide=True,
    )  # fmt: skip


def _rank(claims: Sequence[ClaimResult]) -> tuple[int, float]:
    """Rank an op: the worst verdict first, then the largest distance."""
    return min(claim.verdict.rank for claim in claims), -max(_size(claim.max_lsb) for claim in claims)


def _describe_strips(drawn: int, axis: Axis, ops: int, others: Sequence[ClaimResult]) -> str:
    text = (
        f"{pluralize(drawn, 'claim')}, each at its largest distance from the exact result, in steps of its output. "
        "Colour and shape show the verdict, which may have another cause than the distance. A point leads to its "
        f"claim. The axis is {axis.describe()}. The line at {LIMIT:g} is the limit of correct rounding; a derived "
        "slack may allow more."
    )
    if not others:
        return text
    verdicts = ", ".join(f"{number:,} {verdict}" for verdict, number in counts_of(c.verdict for c in others).items())
    largest = max((claim.max_lsb for claim in others), key=_size)
    return (
        f"{text} Of {ops:,} ops the {MOST_STRIPS} worst are drawn. The others have {pluralize(len(others), 'claim')} "
        f"({verdicts}), the largest distance of which is {spell_lsb(largest)} LSB."
    )


def _label_strips(ops: Sequence[str], axis: Axis, top: float) -> Iterator[Text]:
    bottom = top + _STRIP * len(ops)
    for number, op in enumerate(ops):
        y = top + _STRIP * (number + 0.5) + 3.5
        yield Text(x=_NAMES - 8, y=y, text=cut_end(op, 22), anchor="end", kind="strip")
    for y in (top - 6, bottom + 14):
        yield from (Text(x=x, y=y, text=text) for x, text in axis.ticks)
    yield Text(x=(_NAMES + WIDTH - _RIGHT) / 2, y=bottom + 34, text="largest distance, LSB", kind="axis")


def _rule_strips(axis: Axis, top: float, bottom: float, strips: int) -> Iterator[Stroke]:
    for x, _ in axis.ticks:
        yield Stroke(x1=x, x2=x, y1=top, y2=bottom)
    for y in (top + _STRIP * number for number in range(strips + 1)):
        yield from (Stroke(x1=panel.start, x2=panel.end, y1=y, y2=y) for panel in axis.panels)
    yield Stroke(x1=axis.place(LIMIT), x2=axis.place(LIMIT), y1=top, y2=bottom, kind="limit")


# -- errors against ranges --------------------------------------------------------------------------------------------


def plot_errors(checks: Iterable[Check]) -> Plot | None:
    """Plot the largest errors against the range of the results."""
    measured = [
        (span, check.max_lsb, check)
        for check in checks
        if check.statistics and (span := check.statistics.span_lsb) is not None and not isinstance(span, str)
        if check.max_lsb is not None
    ]
    if not measured:
        return None
    widest = max(max(span for span, _, _ in measured), 1.0)
    axis = make_distance_axis((size for _, size, _ in measured), _HEIGHT - _BOTTOM, _TOP)
    inner = WIDTH - _LEFT - _RIGHT
    points = [
        _Point(x=_LEFT + inner * span / widest, y=axis.place(size), claim=check.claim, verdict=check.verdict, lsb=size)
        for span, size, check in measured
    ]
    measured.sort(key=lambda each: -_size(each[1]))
    more = f" The table has the {MOST_ROWS} largest." if len(measured) > MOST_ROWS else ""
    ticks = [(_LEFT + inner * value / widest, f"{value:g}") for value in choose_ticks(0, widest)]
    return Plot(
        name="errors",
        title="Largest error against the range of the results",
        description=f"{pluralize(len(points), 'claim')}, each with its largest distance from the exact result and the "
        f"range of that exact result in steps of the output. The axis of distances is {axis.describe()}. Correct "
        f"kernels stay within {LIMIT:g} at any range, plus the derived slack (of a bias held in int32, or of a "
        f"function that jumps).{more}",
        height=_HEIGHT,
        columns=("claim", "verdict", "steps", "LSB"),
        rows=tuple((Link(text=check.claim, target=check.claim), check.verdict.value, f"{span:.6g}", spell_lsb(size))
                   for span, size, check in measured[:MOST_ROWS]),
        texts=tuple(_label_errors(axis, ticks)),
        lines=tuple(_rule_errors(axis)),
        dots=tuple(map(_draw, reversed(_merge(points)))),
        legend=counts_of(check.verdict for *_, check in measured),
    )  # fmt: skip


def _label_errors(axis: Axis, ticks: Iterable[tuple[float, str]]) -> Iterator[Text]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield from (Text(x=_LEFT - 5, y=y + 3.5, text=text, anchor="end") for y, text in axis.ticks)
    yield from (Text(x=x, y=_HEIGHT - _BOTTOM + 16, text=text) for x, text in ticks)
    yield Text(x=(_LEFT + WIDTH - _RIGHT) / 2, y=_HEIGHT - 8, kind="axis",
               text="steps between the lowest and the highest exact result")  # fmt: skip
    yield Text(x=12, y=middle, text="largest distance, LSB", kind="axis", turns=True)


def _rule_errors(axis: Axis) -> Iterator[Stroke]:
    right = WIDTH - _RIGHT
    yield from (Stroke(x1=_LEFT, x2=right, y1=y, y2=y) for y, _ in axis.ticks)
    yield from (Stroke(x1=_LEFT, x2=_LEFT, y1=panel.start, y2=panel.end) for panel in axis.panels)
    yield Stroke(x1=_LEFT, x2=right, y1=axis.place(LIMIT), y2=axis.place(LIMIT), kind="limit")


# -- points -----------------------------------------------------------------------------------------------------------


def _merge(points: Iterable[_Point]) -> list[Spot]:
    """Put claims of one verdict at the same place together; the nearer ones too, where there are many. Worst first."""
    ordered = sorted(points, key=lambda point: (point.verdict.rank, -_size(point.lsb)))
    most = MOST_DOTS if len(ordered) <= MANY else FEWER_DOTS
    sizes = (2**power for power in range(11))  # with the last, a verdict has one place in each strip
    return next(spots for size in sizes if len(spots := _merge_within(ordered, size)) <= most or size > WIDTH)


def _merge_within(points: Iterable[_Point], size: int) -> list[Spot]:
    """Put together what is in one square of a grid, of one verdict and strip."""
    spots: dict[tuple[Verdict, str, int, int], list[_Point]] = {}
    for point in points:
        spots.setdefault((point.verdict, point.strip, round(point.x / size), round(point.y / size)), []).append(point)
    return [tuple(spot) for spot in spots.values()]


def _draw(spot: Spot) -> Mark:
    first = spot[0]
    more = f" and {pluralize(len(spot) - 1, 'claim')} more here" if len(spot) > 1 else ""
    label = f"{first.verdict} {spell_lsb(first.lsb)} LSB: {cut_middle(first.claim, 80)}{more}"
    return Mark(x=first.x, y=first.y, verdict=first.verdict, label=label, target=first.claim)


def _size(distance: Number | None) -> float:
    """Return a distance as a number, for an order: what is not finite is above all others."""
    return -1.0 if distance is None else float("inf") if isinstance(distance, str) else distance
