"""What everything here is compared with: a small module, its batches, and the loop that people write by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import add_note

Batch = tuple[Tensor, Tensor]
QUIET = {
    "barebones": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""A Trainer with all checks and callbacks that prints nothing."""


def make_batches(
    count: int, size: int = 6, last: int | None = None, seed: int = 1
) -> list[Batch]:
    """Batches of a classification task with 8 features and 4 classes; ``last`` is the size of the last one."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [size if last is None else last]
    return [
        (torch.randn(n, 8, generator=draw), torch.randint(4, (n,), generator=draw))
        for n in sizes
    ]


def doubled(batches: Iterable[Batch]) -> list[Batch]:
    return [(x.double(), y) for x, y in batches]


def merged(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def make_net(seed: int = 0, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(
        nn.Linear(8, 16), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


class Classifier(tk.TrainModule):
    """``net`` and a cross entropy; ``optimizers`` makes what ``configure_optimizers`` returns."""

    def __init__(
        self, net: nn.Module, configure: Callable[[nn.Module], Any] = sgd
    ) -> None:
        super().__init__()
        self.net, self.configure = net, configure

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.configure(self.net)


def train(
    module: tk.TrainModule, batches: Any, val: Any = None, **options: Any
) -> tk.Trainer:
    """One fit with nothing around it."""
    options = {
        "max_epochs": 1,
        "barebones": True,
        "accelerator": "cpu",
        "devices": 1,
        **options,
    }
    trainer = tk.Trainer(**options)
    trainer.fit(module, batches, val)
    return trainer


def ddp(
    module: tk.TrainModule, data: Any, val: Any = None, **options: Any
) -> tk.Trainer:
    """One fit on the ranks of this test; all of them end with the same weights (not the same running statistics)."""
    options = {"strategy": "ddp", "devices": dist.get_world_size(), **options}
    trainer = train(module, data, val, **options)
    assert trainer.world_size == dist.get_world_size()
    for name, value in module.named_parameters():
        theirs = trainer.strategy.world.all_gather(value)
        assert all(torch.equal(theirs[0], other) for other in theirs), (
            f"{name} differs from rank to rank"
        )
    return trainer


@contextmanager
def case(**values: Any) -> Iterator[None]:
    """One of several cases of a test: starting ranks for each would take most of the time."""
    try:
        yield
    except BaseException as error:
        add_note(error, f"case: {values}")
        raise


def plain_loop(
    net: nn.Module,
    epochs: Iterable[Iterable[Batch]],
    optimizer: torch.optim.Optimizer,
    *,
    by_step: Any = None,
    by_epoch: Callable[[], None] | None = None,
    clip: Callable[[Iterable[nn.Parameter]], Any] | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> int:
    """The loop as torch's own tutorials have it. Returns how many steps were skipped for overflow."""
    skipped = 0
    for batches in epochs:
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast) if autocast else nullcontext():
                loss = F.cross_entropy(net(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(net.parameters())
            before = 0.0 if scaler is None else scaler.get_scale()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            overflowed = scaler is not None and scaler.get_scale() < before
            skipped += overflowed
            if by_step is not None and not overflowed:
                by_step.step()
        if by_epoch is not None:
            by_epoch()
    return skipped


def assert_same(
    one: nn.Module | dict[str, Any], other: nn.Module | dict[str, Any]
) -> None:
    """Equal in every bit."""
    left, right = (
        m.state_dict() if isinstance(m, nn.Module) else m for m in (one, other)
    )
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, {
        name: (left[name] - right[name]).abs().max().item() for name in different
    }


def same_state(one: Any, other: Any, at: str = "") -> None:
    """Nested states, equal in every bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            same_state(one[key], other[key], f"{at}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            same_state(left, right, f"{at}[{i}]")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), at
    elif isinstance(one, np.ndarray):
        assert (one == other).all(), at
    else:
        assert one == other or (one != one and other != other), f"{at}: {one} {other}"


def assert_close(one: nn.Module, other: nn.Module, rtol: float = 1e-12) -> None:
    """Equal up to the order of sums in float64."""
    left, right = one.state_dict(), other.state_dict()
    for name in left:
        if left[name].is_floating_point():
            assert left[name].dtype == torch.float64
        torch.testing.assert_close(
            left[name],
            right[name],
            rtol=rtol,
            atol=rtol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_changed(net: nn.Module, start: nn.Module) -> None:
    """Every parameter was trained: what is compared is not the start."""
    for (name, now), then in zip(
        net.named_parameters(), start.parameters(), strict=True
    ):
        assert not torch.equal(now, then), name


def copy_of(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net)
