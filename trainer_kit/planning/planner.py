"""Plan a fit: its first batch, its global batch, the device, and the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from trainer_kit.core.arguments import check_type
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.device_table import (
    Device,
    device_peak,
    find_device,
    known_devices,
)
from trainer_kit.core.devices import device_memory
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import ConfigurationError, TrainerKitError, add_note
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.state_names import uncompiled
from trainer_kit.data import CombinedLoader, Feed, is_tree
from trainer_kit.data.place import generator_states, own_generators, restore_generators
from trainer_kit.planning.candidates import check_word
from trainer_kit.planning.estimate import Assumptions, step_samples
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.fake_world import adapted, fake_module
from trainer_kit.planning.measure import AUTOCAST_COPIES, measure
from trainer_kit.planning.plan import Plan
from trainer_kit.planning.real_step import RealSteps
from trainer_kit.planning.records import Candidate, Measured
from trainer_kit.planning.search import Question, Row, search
from trainer_kit.precision.aliases import make_precision
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.auto_strategy import training_bytes, whole_copies_fit
from trainer_kit.training.check_module import check_module
from trainer_kit.training.explain import prepare
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.running import nothing
from trainer_kit.training.session import Session

__all__ = ["plan_fit"]

_RESERVE: Final = 0.1
"""The share of a device's memory that is left free."""
_LARGE: Final = 100_000_000
"""Parameters above which the precisions are searched at the same time; for smaller modules that saves no second."""
_QUIET: Final = 2.0
"""Seconds without a line about progress."""


def plan_fit(
    trainer: Session,
    module: TrainModule,
    loaders: Any = None,
    datamodule: DataModule | None = None,
    *,
    world: int | Sequence[int],
    device: str | None = None,
    max_memory: int | None = None,
    strategies: Sequence[str] = (),
    precisions: Sequence[str] = (),
    global_batch: int | None = None,
    assumptions: Assumptions | None = None,
    arguments: Mapping[str, Any] | None = None,
    script: str = "",
    say: Callable[[str], None] = nothing,
) -> Plan:
    """Plan a fit; see `Trainer.plan`.

    Args:
        trainer: the Trainer of the fit.
        module: its module.
        loaders: its training loaders.
        datamodule: has the loaders.
        world: the numbers of ranks.
        device: a word of the device table; ``"cpu"``: this machine; None: this machine's accelerator, else its CPU.
        max_memory: bytes that a rank may use; None: the device's memory without a reserve.
        strategies: words; empty: those that make sense.
        precisions: words; empty: the Trainer's, and mixed precision.
        global_batch: samples of a step; None: as in the Trainer and the loaders.
        assumptions: of the estimates.
        arguments: what a captured script passed to its Trainer, which is made on one process.
        script: the command line of the script.
        say: is called with lines about the progress.
    """
    began = time.monotonic()
    worlds = _worlds(world, device, global_batch)
    module = _check_place(trainer, module)
    strategies = _words("strategies", strategies, check_word)
    precisions = _words("precisions", precisions, make_precision)
    if device not in (None, "cpu"):
        find_device(device)  # a wrong word is an error before data is prepared
    given: Mapping[str, Any] = trainer.arguments if arguments is None else arguments
    batch, size = _prepared(trainer, module, loaders, datamodule)
    built = _built(module, trainer)
    notes: list[str] = []
    samples = (
        _global_batch(trainer, given, size, notes)
        if global_batch is None
        else global_batch
    )
    row, name = _device(device, worlds, notes)
    limit = int(row.memory * 1e9 * (1 - _RESERVE)) if max_memory is None else max_memory
    kept = (
        f"{1 - _RESERVE:.0%} of {row.memory:.4g} GB" if max_memory is None else "given"
    )
    notes.insert(0, f"memory limit of a rank: {in_units(limit)} ({kept})")
    chosen = precisions or _precisions(given, row, notes)
    with _named("loss_weight counted the tokens of the first batch"):
        taken = _with_tokens(assumptions or Assumptions(), module, batch, size)
    notes += _estimate_notes(row, taken, chosen)
    question = Question(
        device=row,
        worlds=worlds,
        global_batch=samples,
        limit=limit,
        strategies=strategies,
        precisions=chosen,
        assumptions=taken,
    )

    def tell(text: str) -> None:
        if time.monotonic() - began > _QUIET:
            say(text)

    kind = "cpu" if name == "cpu" else "cuda"
    real = RealSteps(size)

    def measured(candidate: Candidate) -> Measured:
        found = measure(
            module,
            batch,
            candidate,
            trainer=trainer,
            accelerator=kind,
            size=size,
            real=real,
        )
        return _noted(found, trainer, given)

    rows = search(question, module, measured, tell, several=_is_large(built))
    if worlds[-1] > 1:
        notes.append(_auto(built, chosen[0], row, rows))
    notes += _notes(rows, samples, _own_strategy(trainer, given))
    return Plan(
        question=question,
        rows=rows,
        device=name,
        script=script,
        notes=notes,
        seconds=time.monotonic() - began,
    )


def _is_large(module: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in module.parameters()) > _LARGE


def _worlds(
    world: int | Sequence[int], device: str | None, global_batch: int | None
) -> tuple[int, ...]:
    """The numbers of ranks, ascending; refuses arguments of the wrong type or size."""
    check_type("Trainer.plan", "world", world, int | Sequence[int])
    check_type("Trainer.plan", "device", device, str | None)
    check_type("Trainer.plan", "global_batch_size", global_batch, int | None)
    worlds = tuple(sorted({world} if isinstance(world, int) else set(world)))
    if not worlds or worlds[0] < 1:
        raise ConfigurationError(
            "a plan needs at least 1 rank",
            found=f"world={world!r}",
            fix="pass world=[8, 64]",
        )
    if global_batch is not None and global_batch < 1:
        raise ConfigurationError(
            "the global batch has at least one sample",
            found=f"global_batch={global_batch}",
        )
    return worlds


def _check_place(trainer: Session, module: Any) -> Any:
    """Refuse what cannot be planned here, before data is prepared; returns the module without ``torch.compile``."""
    module = uncompiled(module)
    check_module(module, "fit")
    running = f"a running {trainer.state_verb}" if trainer.state_verb else ""
    if dist.is_initialized():
        running = f"a process group of {dist.get_world_size()} ranks"
    if running:
        raise ConfigurationError(
            "a plan needs a process in which nothing runs",
            found=running,
            fix="plan in a process of its own, before the first fit: trainer-kit plan train.py",
        )
    return module


@contextmanager
def _named(doing: str) -> Iterator[None]:
    """Add what was tried to an exception of the user's code."""
    try:
        yield
    except TrainerKitError:
        raise
    except Exception as error:
        add_note(error, f"while {doing}")
        raise


def _built(module: nn.Module, trainer: Session) -> nn.Module:
    """A copy without values, with the layers of ``configure_model``; without them where that needs values."""
    mode = FastFakeMode()
    copied: nn.Module = fake_module(module, mode)
    copied.trainer = trainer  # type: ignore[assignment]
    with suppress(Exception), adapted(), mode:  # user code, which the search runs again
        build_once(copied)
    return copied


def _words(
    name: str, words: Sequence[str], check: Callable[[str], object]
) -> tuple[str, ...]:
    """Each word once; ``check`` refuses unknown ones."""
    check_type("Trainer.plan", name, words, Sequence[str])
    for word in words:
        check(word)
    return tuple(dict.fromkeys(words))


def _own_strategy(trainer: Session, given: Mapping[str, Any]) -> Strategy | None:
    """The strategy that the user made; None where it is a word."""
    own = given.get("strategy")
    if isinstance(own, Strategy):
        return own
    return trainer.strategy if own == type(trainer.strategy).__name__ else None


def _noted(found: Measured, trainer: Session, given: Mapping[str, Any]) -> Measured:
    own = _own_strategy(trainer, given) if found.candidate.strategy == "ddp" else None
    return replace(found, notes=found.notes + _uncounted(own))


def _uncounted(own: Strategy | None) -> tuple[str, ...]:
    """A text about what the user's DDP does in a step and a measurement leaves out."""
    if not isinstance(own, DDPStrategy):
        return ()
    hook = "the communication hook of DDPStrategy is not in it: its buffers and state, and the bytes that it saves"
    local = "local SGD is not in it: the step that is measured exchanges gradients"
    return (hook,) * (own.comm_hook is not None) + (local,) * (
        own.local_sgd is not None
    )


def _prepared(
    trainer: Session, module: TrainModule, loaders: Any, datamodule: DataModule | None
) -> tuple[Any, int]:
    """Prepare the data as a fit does; returns the first batch, and the size of the loader's batches."""
    with preserved_rng(torch.device("cpu")):
        with _named("the plan called prepare_data() and setup(), as a fit does"):
            prepare(trainer, module, datamodule)
        with _named("the plan read the first batch of the training data"):
            return _first_batch(find_loaders("fit", loaders, module, datamodule))


def _first_batch(loaders: Any) -> tuple[Any, int]:
    """The first batch, and the size of the loader's batches."""
    if loaders is None:
        raise ConfigurationError(
            "the plan needs training data",
            fix="pass a loader, or define train_dataloader()",
        )
    if isinstance(loaders, Dataset) and not isinstance(loaders, IterableDataset):
        fix = "pass a DataLoader: DataLoader(dataset, batch_size=32)"
        raise ConfigurationError(
            "this is not a loader", found=type(loaders).__name__, fix=fix
        )
    whole = CombinedLoader(loaders, "max_size_cycle") if is_tree(loaders) else loaders
    parts = whole.flattened if isinstance(whole, CombinedLoader) else [whole]
    generators = own_generators(*(owner for part in parts for owner in _owners(part)))
    states = generator_states(generators)
    feed = Feed(loaders, shard=False)  # it counts samples as in a fit
    batch, size = next(feed.sized_epoch(0), (None, 0))
    feed.close()
    restore_generators(generators, states)
    if batch is None:
        raise ConfigurationError(
            "the training loader has no batch", found=type(loaders).__name__
        )
    return batch, size


def _owners(loader: Any) -> list[Any]:
    """What has generators that reading a batch draws from."""
    order = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, name, None) for name in ("sampler", "dataset")]
    return [loader, order, getattr(order, "sampler", None), *parts]


def _global_batch(
    trainer: Session, given: Mapping[str, Any], size: int, notes: list[str]
) -> int:
    """Samples of a step in the script's own configuration."""
    whole = trainer.settings.global_batch_size
    if whole is not None:
        notes.append(
            f"{whole} samples a step, as global_batch_size says; accumulation follows"
        )
        return whole
    devices, nodes = given.get("devices", "auto"), given.get("num_nodes", 1)
    devices = len(devices) if isinstance(devices, (list, tuple)) else devices
    ranks = int(devices) * int(nodes) if str(devices).isdigit() else 1
    window = (
        trainer.accumulate_grad_batches
        if isinstance(trainer.accumulate_grad_batches, int)
        else 1
    )
    unknown = (
        "" if str(devices).isdigit() else f", as devices={devices!r} gives no number"
    )
    notes.append(
        f"{size * ranks * window} samples a step, as in the script: {size} of the loader x {ranks} rank"
        f"{'s' * (ranks > 1)}{unknown} x {window} accumulated; accumulation follows"
    )
    return size * ranks * window


def _notes(rows: Sequence[Row], samples: int, own: Strategy | None) -> list[str]:
    """What the plan leaves out of the user's strategy, copies of weights, ranks that cannot divide the samples."""
    options = f"strategies are planned with their defaults, without the options of this {type(own).__name__}"
    unknown = "a step that cannot run without data may also have a mistake: try it with Trainer(fast_dev_run=True)"
    calculated = any(row.measured is not None and not row.measured.ran for row in rows)
    reasons = dict.fromkeys(
        reason
        for row in rows
        if row.measured is not None
        for reason in row.measured.inexact
    )
    copies = any(
        row.measured is not None and AUTOCAST_COPIES in row.measured.notes
        for row in rows
    )
    found = {
        row.candidate.world: step_samples(row.candidate)
        for row in rows
        if row.measured is not None
    }
    return [
        *([] if own is None else [options]),
        *_uncounted(own),
        *([unknown] if calculated else []),
        *(f"not exact: {reason}" for reason in reasons),
        *([AUTOCAST_COPIES] if copies else []),
        *(
            f"{world} ranks have {count} samples a step, and not {samples}: each has one or more, all equally many"
            for world, count in found.items()
            if count != samples
        ),
    ]


def _device(
    word: str | None, worlds: Sequence[int], notes: list[str]
) -> tuple[Device, str]:
    if word is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        rates = [
            row
            for row in known_devices().values()
            if device_peak(name, "16-true") == row.flops("16-true")
        ]
        if not rates:
            raise ConfigurationError(
                "this device has no known data sheet",
                found=name,
                fix='name a device that has one, such as device="h100"',
            )
        word = rates[0].name
    if word is None or word.lower() == "cpu":
        notes.append(
            "cpu: rates were measured here, and links are assumed to have 5 GB/s"
        )
        return _this_machine(max(worlds)), "cpu"
    row = find_device(word)
    notes.append(f"{row.name}: {row.source}; {row.system}")
    return row, row.name


def _this_machine(ranks: int) -> Device:
    """The CPU as a device: its share of the host's memory, and rates from a short measurement."""
    side = torch.ones(768, 768)
    big = torch.ones(1 << 22)
    products, copies = _fastest(lambda: side @ side), _fastest(big.clone)
    memory = (device_memory(torch.device("cpu"), ranks) or 8 << 30) / 1e9
    rate = 2 * 768**3 / products / 1e12 / ranks
    bandwidth = 2 * big.nbytes / copies / 1e9 / ranks
    return Device(
        name="CPU",
        half=rate,
        tf32=rate,
        single=rate,
        memory=memory,
        bandwidth=bandwidth,
        link=5,
        host=bandwidth,
        group=1 << 30,
        network=5,
        system="this machine",
        source="measured here",
    )


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _precisions(
    given: Mapping[str, Any], device: Device, notes: list[str]
) -> tuple[str, ...]:
    own = given.get("precision")
    own = str(own) if isinstance(own, (str, int)) else "32-true"
    own = {
        "32": "32-true",
        "no": "32-true",
        "bf16": "bf16-mixed",
        "16": "16-mixed",
        "fp16": "16-mixed",
    }.get(own, own)
    mixed = "bf16-mixed" if device.bf16 else "16-mixed"
    if own.startswith("32"):
        notes.append(
            f"precision: the script's {own}, and {mixed}, whose results differ by its rounding: check with verify"
        )
        return own, mixed
    notes.append(f"precision: the script's {own}")
    return (own,)


def _with_tokens(
    assumptions: Assumptions, module: nn.Module, batch: Any, size: int
) -> Assumptions:
    """Tokens of a sample, where the module's ``loss_weight`` counts them."""
    if assumptions.tokens is not None or not is_overridden(
        "loss_weight", module, TrainModule
    ):
        return assumptions
    weight = module.loss_weight(batch)  # type: ignore[operator]
    return replace(assumptions, tokens=float(weight) / size)


def _auto(
    module: nn.Module, precision: str, device: Device, rows: Sequence[Row]
) -> str:
    """What ``strategy="auto"`` chooses on this device, and why the table shows another choice, where it does."""
    needed, memory = training_bytes(module, precision, True), int(device.memory * 1e9)
    word = "ddp" if whole_copies_fit(needed, memory) else "fsdp"
    text = f'strategy="auto" takes {word}: {in_units(needed)} of training state (as with Adam) in {in_units(memory)}'
    tried = [
        row
        for row in rows
        if row.candidate.precision == precision and row.candidate.world > 1
    ]
    fits = {
        (row.candidate.strategy, row.candidate.world)
        for row in tried
        if row.estimate is not None
    }
    for world in dict.fromkeys(row.candidate.world for row in tried):
        own = [
            row
            for row in tried
            if row.candidate.strategy == word and row.candidate.world == world
        ]
        others = [name for name, size in fits if size == world]
        if own and others and word not in others:
            return f"{text}. On {world} ranks that does not fit: auto does not count activations; name a strategy"
        if word == "fsdp" and "ddp" in others:
            return f"{text}. On {world} ranks ddp fits too: auto assumes Adam, and leaves a fifth for activations"
    return text


def _estimate_notes(
    device: Device, taken: Assumptions, precisions: Sequence[str]
) -> list[str]:
    notes = [
        f"step: products at {taken.efficiency:.0%} of the peak, memory and links at {taken.bandwidth:.0%} of theirs, "
        f"{1e6 * taken.latency:g} us for each collective; launches take at least {1e6 * taken.launch:g} us an operator",
        f"peaks: {', '.join(_peak(device, precision) for precision in precisions)}",
        "collectives of data ranks overlap with computation, those of other axes do not",
        f"links: {device.link:g} GB/s inside a machine, {device.network:g} GB/s for each device between machines",
    ]
    if taken.tokens is not None:
        notes.append(
            f"{taken.tokens:g} tokens a sample, as loss_weight counts them in the first batch"
        )
    return notes


def _peak(device: Device, precision: str) -> str:
    peak = device.flops(precision)
    tf32 = (
        ""
        if "32" not in precision
        else f" (float32 products are {torch.get_float32_matmul_precision()!r})"
    )
    return f"{precision} {'unknown' if peak is None else f'{peak / 1e12:.3g} TFLOP/s'}{tf32}"
