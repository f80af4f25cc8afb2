"""Two models of a user's own, and functions that make no model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fx_quant_conformance import GivenModel
from fx_quant_conformance.refimpl import QConfigMapping, get_default_qconfig_mapping


class Small(nn.Module):
    """Two convolutions, the second of stride 2, an op that no config claims, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()
        self.down, self.bend, self.classify = nn.Conv2d(8, 8, 3, stride=2), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give the scores of four classes, (N, 4)."""
        x = self.bend(self.down(self.relu(self.stem(x))))
        return self.classify(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Rows(nn.Module):
    """Two linears; the second argument is left out as a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """Take rows (N, 8); give (N, 4)."""
        if added is not None:
            x = x + added
        return self.second(F.relu(self.first(x)))


def small() -> GivenModel:
    """The images are of noise; the right class is the one that the float model gives."""
    model = Small().eval()
    images = torch.randn(12, 3, 9, 9)
    labels = model(images).argmax(1)

    def evaluate(side: nn.Module) -> dict[str, float]:
        return {"top-1": float((side(images).argmax(1) == labels).float().mean()), "sum": float(side(images).sum())}

    batches = [(images[:6],), (images[6:],)]
    return GivenModel(model=model, example_inputs=(images[:2],), calibration=batches, evaluate=evaluate)


def rows() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The short form: a model and its example inputs."""
    return Rows(), (torch.randn(5, 8),)


def partly() -> GivenModel:
    """A model whose own mapping leaves the first linear in float."""
    mapping: QConfigMapping = get_default_qconfig_mapping("qnnpack").set_module_name("first", None)
    return GivenModel(model=Rows(), example_inputs=(torch.randn(5, 8),), qconfig_mapping=mapping)


def narrow() -> GivenModel:
    """A mapping with ranges of 7 bits, as fbgemm's default has them."""
    mapping: QConfigMapping = get_default_qconfig_mapping("fbgemm")
    return GivenModel(model=Rows(), example_inputs=(torch.randn(5, 8),), qconfig_mapping=mapping)


class Unknown(Rows):
    """A float op of which the suite does not know the exact result, between two linears."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """Take rows (N, 8); give (N, 4)."""
        return self.second(torch.special.bessel_j0(self.first(x)))


def unknown() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Its outputs cannot be judged end to end."""
    return Unknown(), (torch.randn(5, 8),)


class Shifting(nn.Module):
    """A model that changes its input, and takes any number of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, *inputs: Tensor) -> Any:
        """Take rows (N, 8); give (N, 4)."""
        return self.second(self.first(inputs[0].add_(1.0)))


def shifting() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The inputs are used more than once."""
    return Shifting(), (torch.randn(5, 8),)


def generated() -> GivenModel:
    """Its calibration can be read once: rows a hundred times as large as the example's."""
    rows = torch.randn(5, 8)
    return GivenModel(model=Rows(), example_inputs=(rows,), calibration=((100 * rows,) for _ in range(2)))  # type: ignore[arg-type]


def infinite() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A weight that is no number."""
    model = Rows()
    model.first.weight.data[0, 0] = torch.nan
    return model, (torch.randn(5, 8),)


def double() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in float64."""
    return Rows().double(), (torch.randn(5, 8).double(),)


def slow() -> GivenModel:
    """Its evaluation takes longer than a job may."""

    def evaluate(side: nn.Module) -> dict[str, float]:
        time.sleep(60)
        return {}

    return GivenModel(model=Rows(), example_inputs=(torch.randn(5, 8),), evaluate=evaluate)


class Endless(Rows):
    """A model that torch.export does not come to the end of."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """Take rows (N, 8); give (N, 4)."""
        if torch.compiler.is_exporting():
            time.sleep(1000)
        return super().forward(x, added)


def endless() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """It runs, and cannot be captured."""
    return Endless(), (torch.randn(5, 8),)


def larger() -> GivenModel:
    """Its evaluation runs another batch than the examples."""
    rows = torch.randn(5, 8)

    def evaluate(side: nn.Module) -> dict[str, float]:
        return {"sum": float(side(torch.cat([rows, rows])).sum())}

    return GivenModel(model=Rows(), example_inputs=(rows,), evaluate=evaluate)


def spoils() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """It changes its process."""
    torch.set_default_dtype(torch.float64)
    return Rows().float(), (torch.randn(5, 8).float(),)


class Table(nn.Module):
    """A linear, to which what another one makes of entries of a table is added as the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(8, 4), nn.Linear(2, 4)
        self.table = nn.Parameter(torch.randn(6, 2))
        self.index = nn.Buffer(torch.tensor([4]))

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 8); give (N, 4)."""
        return self.layer(x) + self.shift(self.table[self.index])


def table() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One of its patterns reads no data."""
    return Table(), (torch.randn(5, 8),)


class Attending(nn.Module):
    """Attention between two linears; torch.fx sees one module, and torch.export its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        """Take sequences (N, 3, 8); give (N, 12)."""
        x = self.first(x)
        return self.last(self.attend(x, x, x, need_weights=False)[0]).view(x.shape[0], -1)


def attending() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Some of its ops are called by no function that a config could name."""
    return Attending(), (torch.randn(4, 3, 8),)


def _change_flow(name: str, change: Callable[[Any], object]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Change what a step of the flow makes, in the judge's process, which imports this. Returns a model."""
    from fx_quant_conformance.conformance.stages import bench
    from fx_quant_conformance.conformance.whole_models import units

    owner: Any = {"prepare_fx": units, "convert": bench.Bench}[name]
    honest = getattr(owner, name)

    def step(*arguments: Any, **keywords: Any) -> Any:
        made = honest(*arguments, **keywords)
        change(made)
        return made

    setattr(owner, name, step)
    return Rows(), (torch.randn(5, 8),)


def _shift(model: Any) -> None:
    model.second.bias = nn.Parameter(model.second.bias.detach() + 1)


def _turn(model: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().flip(0))


def prepared_otherwise() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Prepare gives a layer another bias."""
    return _change_flow("prepare_fx", _shift)


def converted_otherwise() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Convert gives a layer another bias."""
    return _change_flow("convert", _shift)


def weighted_otherwise() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Convert turns the rows of a weight around."""
    return _change_flow("convert", _turn)


def normed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Its weights are computed: one by a class that torch makes while running, one by a hook."""
    model = Rows()
    parametrizations.weight_norm(model.first)
    prune.l1_unstructured(model.second, "weight", 0.5)  # type: ignore[no-untyped-call]
    return model, (torch.randn(5, 8),)


class Named(Rows):
    """Rows that gives what ``how`` makes of it."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """Take rows (N, 8); give what is made of (N, 4)."""
        return self.how(super().forward(x, added))


def by_name() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two outputs by name."""
    return Named(lambda x: {"scores": x, "best": x.relu()}), (torch.randn(5, 8),)


def list_of_one() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One output in a list."""
    return Named(lambda x: [x]), (torch.randn(5, 8),)


class Casting(nn.Module):
    """A factor of another float dtype, which is cast where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.register_buffer("factor", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.first(x) * self.get_buffer("factor").to(x.dtype)
        return scaled


def casts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Casting(), (torch.randn(5, 8),)


def watched() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A hook that no other process finds, on an op that stays float."""
    bend = nn.GELU()
    bend.register_forward_hook(lambda *_: None)
    return nn.Sequential(nn.Linear(8, 8), bend, nn.Linear(8, 4)), (torch.randn(5, 8),)


def partly_normed() -> GivenModel:
    """A layer that stays float is of a class that torch makes while running."""
    model, inputs = normed()
    mapping: QConfigMapping = get_default_qconfig_mapping("qnnpack").set_module_name("first", None)
    return GivenModel(model=model, example_inputs=inputs, qconfig_mapping=mapping)


def locked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """It holds what cannot be copied."""
    model = Rows()
    vars(model)["lock"] = threading.Lock()
    return model, (torch.randn(5, 8),)


def sparse() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Its input is no plain tensor."""
    return Rows(), (torch.randn(5, 8).to_sparse(),)


class Branching(nn.Module):
    """A model whose way depends on its data."""

    def forward(self, x: Tensor) -> Any:
        """Take rows; give rows."""
        return x if x.sum() > 0 else -x


def branching() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """It cannot be traced."""
    return Branching(), (torch.ones(2, 3),)


class Padding(Rows):
    """A model whose way depends on the shape of its input."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """Take rows (N, at most 8); give (N, 4)."""
        missing = max(8 - x.shape[1], 0)
        return super().forward(F.pad(x, (0, missing)) if missing > 0 else x, added)


def padding() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """torch.fx cannot trace it, and torch.export takes it."""
    return Padding(), (torch.randn(5, 7),)


def misfit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The inputs do not fit the model."""
    return nn.Linear(3, 4), (torch.ones(2, 5),)


def number() -> int:
    """No model."""
    return 3


def bare() -> tuple[nn.Module, Tensor]:
    """The inputs are no tuple."""
    return nn.Linear(3, 4), torch.ones(2, 3)


def raises() -> None:
    """It fails."""
    raise RuntimeError("no weights here")


def evaluation_of_no_mapping() -> GivenModel:
    """The evaluation gives no names."""
    return GivenModel(model=Rows(), example_inputs=(torch.randn(5, 8),), evaluate=lambda side: 3)  # type: ignore[arg-type,return-value]


def evaluation_fails() -> GivenModel:
    """The metrics cannot be had of any side."""

    def evaluate(side: nn.Module) -> dict[str, float]:
        raise LookupError("no labels")

    return GivenModel(model=Rows(), example_inputs=(torch.randn(5, 8),), evaluate=evaluate)


something = 5
