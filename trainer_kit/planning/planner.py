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
from trainer_kit.core.display import in_units, plural
from trainer_kit.core.errors import ConfigurationError, TrainerKitError, add_note
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.types import Batch, HyperParameters, Loaders
from trainer_kit.data import CombinedLoader, Feed, is_tree
from trainer_kit.data.source import (
    RandomGenerator,
    find_generators,
    generator_states,
    restore_generators,
)
from trainer_kit.planning.candidates import check_strategy_name
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
_PRECISION_NAMES: Final = {
    "32": "32-true",
    "no": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
}
"""Short names of precisions, and those of Hugging Face Accelerate."""
_QUIET: Final = 2.0
"""Seconds without a line about progress."""


def plan_fit(
    trainer: Session,
    module: TrainModule,
    loaders: object = None,
    datamodule: DataModule | None = None,
    *,
    world: int | Sequence[int],
    device: str | None = None,
    max_memory: int | None = None,
    strategies: Sequence[str] = (),
    precisions: Sequence[str] = (),
    global_batch: int | None = None,
    assumptions: Assumptions | None = None,
    arguments: Mapping[str, object] | None = None,
    script: str = "",
    say: Callable[[str], None] = nothing,
) -> Plan:
    """Plan a fit; see `Trainer.plan`.

    Args:
        trainer: the Trainer of the fit.
        module: its module.
        loaders: its training loaders.
        datamodule: provides the loaders.
        world: the numbers of ranks.
        device: a name in the device table; ``"cpu"``: this machine; None: this machine's accelerator, else its CPU.
        max_memory: bytes that a rank may use; None: the device's memory without a reserve.
        strategies: their names; empty: those that make sense.
        precisions: their names; empty: the Trainer's, and mixed precision.
        global_batch: samples of a step; None: as in the Trainer and the loaders.
        assumptions: of the estimates.
        arguments: what a captured script passed to its Trainer, which is created on one process.
        script: the command line of the script.
        say: is called with lines about the progress.
    """
    began = time.monotonic()
    worlds = _worlds(world, device, global_batch)
    # All arguments are checked before `prepare_data` runs, which may download for minutes.
    module = _check_planned_module(trainer, module)
    strategies = _unique_names("strategies", strategies, check_strategy_name)
    precisions = _unique_names("precisions", precisions, make_precision)
    # Here too: a wrong name must be an error before data is prepared.
    if device not in (None, "cpu"):
        find_device(device)
    if arguments is None:
        arguments = trainer.arguments
    batch, size = _prepare_batch(trainer, module, loaders, datamodule)
    # For the bytes that auto compares, and to choose whether to fork; the search builds copies of its own.
    built = _build_copy(module, trainer)
    notes: list[str] = []
    if global_batch is None:
        global_batch = _global_batch(trainer, arguments, size, notes)
    row, device_name = _device(device, worlds, notes)
    limit = _memory_limit(row, max_memory, notes)
    # After the device, whose data sheet decides between bfloat16 and float16.
    if not precisions:
        precisions = _precisions(arguments, row, notes)
    with _named("loss_weight counted the tokens of the first batch"):
        assumptions = _with_tokens(assumptions or Assumptions(), module, batch, size)
    notes += _estimate_notes(row, assumptions, precisions)
    question = Question(
        device=row,
        worlds=worlds,
        global_batch=global_batch,
        limit=limit,
        strategies=strategies,
        precisions=precisions,
        assumptions=assumptions,
    )

    # A short search prints its table only; a long one shows that it works.
    def say_later(text: str) -> None:
        if time.monotonic() - began > _QUIET:
            say(text)

    measure_candidate = _measure_with(
        trainer, module, batch, size, device_name, arguments
    )
    rows = search(
        question, module, measure_candidate, say_later, several=_is_large(built)
    )
    # On one rank auto has nothing to choose.
    if worlds[-1] > 1:
        notes.append(_describe_auto(built, precisions[0], row, rows))
    notes += _notes(rows, global_batch, _users_strategy(trainer, arguments))
    return Plan(
        question=question,
        rows=rows,
        device=device_name,
        script=script,
        notes=notes,
        seconds=time.monotonic() - began,
    )


def _measure_with(
    trainer: Session,
    module: TrainModule,
    batch: object,
    size: int,
    device_name: str,
    arguments: Mapping[str, object],
) -> Callable[[Candidate], Measured]:
    """A function that measures a candidate with this trainer, module and batch of ``size`` samples."""
    # Any accelerator of the table counts as CUDA: what differs is the optimizer's implementation and host memory.
    accelerator = "cuda"
    if device_name == "cpu":
        accelerator = "cpu"
    # One for all candidates, which share the real steps of a strategy.
    real_steps = RealSteps(size)
    strategy = _users_strategy(trainer, arguments)

    def measure_candidate(candidate: Candidate) -> Measured:
        measured = measure(
            module,
            batch,
            candidate,
            trainer=trainer,
            accelerator=accelerator,
            size=size,
            real=real_steps,
        )
        # Only there: other candidates are built without the user's object.
        if candidate.strategy != "ddp":
            return measured
        return replace(measured, notes=measured.notes + _uncounted(strategy))

    return measure_candidate


def _memory_limit(device: Device, max_memory: int | None, notes: list[str]) -> int:
    """The bytes that a rank may use."""
    if max_memory is None:
        limit = int(device.memory * 1e9 * (1 - _RESERVE))
        origin = f"{1 - _RESERVE:.0%} of {device.memory:.4g} GB"
    # A limit of the user is taken as it is; they know what else uses the device.
    else:
        limit = max_memory
        origin = "given"
    # First: the table is read against it.
    notes.insert(0, f"memory limit of a rank: {in_units(limit)} ({origin})")
    return limit


def _is_large(module: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in module.parameters()) > _LARGE


def _worlds(
    world: int | Sequence[int], device: str | None, global_batch: int | None
) -> tuple[int, ...]:
    """The numbers of ranks, ascending; refuses arguments of the wrong type or size."""
    # Here, because `trainer-kit plan` calls this function without `Trainer.plan`.
    check_type("Trainer.plan", "world", world, int | Sequence[int])
    check_type("Trainer.plan", "device", device, str | None)
    check_type("Trainer.plan", "global_batch_size", global_batch, int | None)
    sizes: Sequence[int] = ()
    if isinstance(world, int):
        sizes = (world,)
    else:
        sizes = world
    worlds = tuple(sorted(set(sizes)))
    if not worlds or worlds[0] < 1:
        raise ConfigurationError(
            "a plan needs at least 1 rank",
            found=f"world={world!r}",
            fix="pass world=[8, 64]",
        )
    if global_batch is not None and global_batch < 1:
        raise ConfigurationError(
            "the global batch needs at least one sample",
            found=f"global_batch={global_batch}",
        )
    return worlds


def _check_planned_module(trainer: Session, module: Any) -> Any:
    """Refuse what cannot be planned here, before data is prepared; returns the module without ``torch.compile``."""
    module = uncompiled(module)
    check_module(module, "fit")
    running = ""
    if trainer.state_verb:
        running = f"a running {trainer.state_verb}"
    # torch has one default group, and the fake world needs it.
    if dist.is_initialized():
        running = f"a process group of {plural(dist.get_world_size(), 'rank')}"
    if running:
        raise ConfigurationError(
            "a plan needs an idle process",
            found=running,
            fix="plan in a separate process, before the first fit: trainer-kit plan train.py",
        )
    return module


@contextmanager
def _named(doing: str) -> Iterator[None]:
    """Add what was tried to an exception of the user's code."""
    try:
        yield
    # An error of this library already names its cause.
    except TrainerKitError:
        raise
    except Exception as error:
        add_note(error, f"while {doing}")
        raise


def _build_copy(module: nn.Module, trainer: Session) -> nn.Module:
    """A copy without values, with the layers of ``configure_model``; without them where that needs values."""
    mode = FastFakeMode()
    copied: nn.Module = fake_module(module, mode)
    copied.trainer = trainer  # type: ignore[assignment]  # nn.Module declares tensors and modules
    # User code may raise anything; the search runs it again and reports it.
    with suppress(Exception), adapted(), mode:
        build_once(copied)
    return copied


def _unique_names(
    argument: str, names: Sequence[str], check: Callable[[str], object]
) -> tuple[str, ...]:
    """Each name once; ``check`` refuses unknown ones."""
    check_type("Trainer.plan", argument, names, Sequence[str])
    for name in names:
        check(name)
    return tuple(dict.fromkeys(names))


def _users_strategy(
    trainer: Session, arguments: Mapping[str, object]
) -> Strategy | None:
    """The strategy that the user made; None where it is a name."""
    strategy = arguments.get("strategy")
    if isinstance(strategy, Strategy):
        return strategy
    # A captured script records the class of what it passed.
    if strategy == type(trainer.strategy).__name__:
        return trainer.strategy
    return None


def _uncounted(strategy: Strategy | None) -> tuple[str, ...]:
    """Notes on what the user's DDP does in a step and a measurement leaves out."""
    if not isinstance(strategy, DDPStrategy):
        return ()
    notes: list[str] = []
    if strategy.comm_hook is not None:
        notes.append(
            "the communication hook of DDPStrategy is not counted: its buffers and state, and the bytes that it saves"
        )
    if strategy.local_sgd is not None:
        notes.append("local SGD is not counted: the measured step exchanges gradients")
    return tuple(notes)


def _prepare_batch(
    trainer: Session,
    module: TrainModule,
    loaders: object,
    datamodule: DataModule | None,
) -> tuple[object, int]:
    """Prepare the data as a fit does; returns the first batch, and the size of the loader's batches."""
    # A plan before a fit must not change the run's random numbers.
    with preserved_rng(torch.device("cpu")):
        with _named("the plan called prepare_data() and setup(), as a fit does"):
            prepare(trainer, module, datamodule)
        with _named("the plan read the first batch of the training data"):
            return _first_batch(find_loaders("fit", loaders, module, datamodule))


def _first_batch(loaders: object) -> tuple[object, int]:
    """The first batch, and the size of the loader's batches."""
    if loaders is None:
        raise ConfigurationError(
            "the plan needs training data",
            fix="pass a loader, or define train_dataloader()",
        )
    # A map-style dataset can be iterated, and would give single samples as batches.
    if isinstance(loaders, Dataset) and not isinstance(loaders, IterableDataset):
        raise ConfigurationError(
            "this is not a loader",
            found=type(loaders).__name__,
            fix="pass a DataLoader: DataLoader(dataset, batch_size=32)",
        )
    generators = _generators_of_loaders(loaders)
    # The fit after the plan must draw the same order as without it.
    states = generator_states(generators)
    # A feed counts samples as a fit does.
    feed = Feed(loaders, shard=False)
    batch, size = next(feed.sized_epoch(0), (None, 0))
    feed.close()
    restore_generators(generators, states)
    if batch is None:
        raise ConfigurationError(
            "the training loader has no batch", found=type(loaders).__name__
        )
    return batch, size


def _generators_of_loaders(loaders: Loaders) -> list[RandomGenerator]:
    """The random generators that reading a batch draws from."""
    # As the fit combines them, so that the first batch has the same structure.
    if is_tree(loaders):
        loaders = CombinedLoader(loaders, "max_size_cycle")
    single_loaders = [loaders]
    if isinstance(loaders, CombinedLoader):
        single_loaders = loaders.flattened
    owners: list[object] = []
    for loader in single_loaders:
        owners += _generator_owners(loader)
    return find_generators(*owners)


def _generator_owners(loader: object) -> list[object]:
    """The objects of a loader that may have generators."""
    # Each of them may have its own: a DataLoader passes its generator only to a sampler that it creates itself.
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [
        loader,
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "sampler", None),
        getattr(loader, "dataset", None),
    ]


def _global_batch(
    trainer: Session, arguments: HyperParameters, size: int, notes: list[str]
) -> int:
    """Samples of a step in the script's own configuration."""
    samples = trainer.settings.global_batch_size
    if samples is not None:
        notes.append(
            f"{plural(samples, 'sample')} a step, from global_batch_size; accumulation follows"
        )
        return samples
    devices = arguments.get("devices", "auto")
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    ranks = 1
    unknown = f", as devices={devices!r} gives no number"
    if str(devices).isdigit():
        # The ranks of the script's own run, which decide its global batch; not those of the plan.
        ranks = int(devices) * int(arguments.get("num_nodes", 1))
        unknown = ""
    window = trainer.accumulate_grad_batches
    # Numbers by epoch: the first epochs may differ from those that take most of the time.
    if not isinstance(window, int):
        window = 1
    samples = size * ranks * window
    notes.append(
        f"{plural(samples, 'sample')} a step, as in the script: {size} of the loader x "
        f"{plural(ranks, 'rank')}{unknown} x {window} accumulated; accumulation follows"
    )
    return samples


def _notes(rows: Sequence[Row], samples: int, strategy: Strategy | None) -> list[str]:
    """What the plan leaves out of the user's strategy, copies of weights, ranks that cannot divide the samples."""
    notes: list[str] = []
    if strategy is not None:
        notes.append(
            "strategies are planned with their defaults, without the options of this "
            f"{type(strategy).__name__}"
        )
    notes += _uncounted(strategy)
    measured = [row.measured for row in rows if row.measured is not None]
    if not all(needs.ran for needs in measured):
        notes.append(
            "a step that cannot run without data may also have a mistake: try it with Trainer(fast_dev_run=True)"
        )
    # A dict keeps the order, and each line once: candidates share most of their reasons.
    reasons: dict[str, None] = {}
    for needs in measured:
        reasons |= dict.fromkeys(needs.inexact)
    notes += [f"not exact: {reason}" for reason in reasons]
    if any(AUTOCAST_COPIES in needs.notes for needs in measured):
        notes.append(AUTOCAST_COPIES)
    samples_by_world = {
        row.candidate.world: step_samples(row.candidate)
        for row in rows
        if row.measured is not None
    }
    # Without this line a faster row could be one that trains with fewer samples.
    for world, count in samples_by_world.items():
        if count != samples:
            notes.append(
                f"{plural(world, 'rank has', 'ranks have')} {plural(count, 'sample')} a step, and not "
                f"{samples}: every rank has the same number, at least 1"
            )
    return notes


def _device(
    name: str | None, worlds: Sequence[int], notes: list[str]
) -> tuple[Device, str]:
    """The row of the device table, and the name of the device."""
    if name is None and torch.cuda.is_available():
        name = _row_of_gpu(torch.cuda.get_device_name())
    if name is None or name.lower() == "cpu":
        notes.append(
            "cpu: rates were measured here, and links are assumed to have 5 GB/s"
        )
        return _this_machine(max(worlds)), "cpu"
    row = find_device(name)
    notes.append(f"{row.name}: {row.source}; {row.system}")
    return row, row.name


def _row_of_gpu(gpu: str) -> str:
    """The name of the row in the device table with the rate of this GPU."""
    for row in known_devices().values():
        if device_peak(gpu, "16-true") == row.flops("16-true"):
            return row.name
    raise ConfigurationError(
        "this device has no known data sheet",
        found=gpu,
        fix='name a device that has one, such as device="h100"',
    )


def _this_machine(ranks: int) -> Device:
    """The CPU as a device: its share of the host's memory, and rates from a short measurement."""
    # Large enough for all cores, small enough for a millisecond. Values do not matter.
    matrix = torch.ones(768, 768)
    vector = torch.ones(1 << 22)
    matmul_seconds = _fastest(lambda: matrix @ matrix)
    copy_seconds = _fastest(vector.clone)
    memory = device_memory(torch.device("cpu"), ranks) or 8 << 30
    # Of one rank: the ranks share the cores.
    rate = 2 * 768**3 / matmul_seconds / 1e12 / ranks
    # Twice: a copy reads and writes.
    bandwidth = 2 * vector.nbytes / copy_seconds / 1e9 / ranks
    return Device(
        name="CPU",
        half=rate,
        tf32=rate,
        single=rate,
        memory=memory / 1e9,
        bandwidth=bandwidth,
        link=5,
        host=bandwidth,
        # All ranks are on this machine, whatever their number.
        group=1 << 30,
        network=5,
        system="this machine",
        source="measured here",
    )


def _fastest(call: Callable[[], object]) -> float:
    times = []
    # The fastest of five: the first call starts threads, and other programs disturb some.
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _precisions(
    arguments: Mapping[str, object], device: Device, notes: list[str]
) -> tuple[str, ...]:
    """The script's precision; with full precision also the mixed one of the device."""
    precision = arguments.get("precision")
    name = "32-true"
    if isinstance(precision, (str, int)):
        name = _PRECISION_NAMES.get(str(precision), str(precision))
    # A script that chose a low precision is not shown another one: results would differ.
    if not name.startswith("32"):
        notes.append(f"precision: the script's {name}")
        return (name,)
    mixed = "16-mixed"
    if device.bf16:
        mixed = "bf16-mixed"
    notes.append(
        f"precision: the script's {name}, and {mixed}, whose results differ by rounding: check with verify"
    )
    return name, mixed


def _with_tokens(
    assumptions: Assumptions, module: TrainModule, batch: Batch, size: int
) -> Assumptions:
    """Tokens of a sample, where the module's ``loss_weight`` counts them."""
    if assumptions.tokens is not None:
        return assumptions
    if not is_overridden("loss_weight", module, TrainModule):
        return assumptions
    weight = module.loss_weight(batch)
    return replace(assumptions, tokens=float(weight) / size)


def _describe_auto(
    module: nn.Module, precision: str, device: Device, rows: Sequence[Row]
) -> str:
    """What ``strategy="auto"`` chooses on this device, and why the table shows another choice, where it does."""
    needed = training_bytes(module, precision, True)
    memory = int(device.memory * 1e9)
    automatic = "fsdp"
    if whole_copies_fit(needed, memory):
        automatic = "ddp"
    text = (
        f'strategy="auto" takes {automatic}: '
        f"{in_units(needed)} of training state (as with Adam) in {in_units(memory)}"
    )
    tried: dict[int, set[str]] = {}
    fitting: dict[int, set[str]] = {}
    for row in rows:
        candidate = row.candidate
        if candidate.precision != precision or candidate.world == 1:
            continue
        tried.setdefault(candidate.world, set()).add(candidate.strategy)
        if row.estimate is not None:
            fitting.setdefault(candidate.world, set()).add(candidate.strategy)
    for world, strategies in tried.items():
        fits = fitting.get(world, set())
        # Only where the search has tried it: a user's list of strategies may leave it out.
        if fits and automatic in strategies - fits:
            return (
                f"{text}. On {plural(world, 'rank')} that does not fit: auto does not count "
                "activations; name a strategy"
            )
        if automatic == "fsdp" and "ddp" in fits:
            return (
                f"{text}. On {plural(world, 'rank')} ddp fits too: auto assumes Adam, and leaves a "
                "fifth for activations"
            )
    return text


def _estimate_notes(
    device: Device, assumptions: Assumptions, precisions: Sequence[str]
) -> list[str]:
    peaks = ", ".join(_describe_peak(device, precision) for precision in precisions)
    notes = [
        f"step: matmuls at {assumptions.efficiency:.0%} of peak FLOP/s, "
        f"memory and links at {assumptions.bandwidth:.0%} of theirs, "
        f"{1e6 * assumptions.latency:g} us for each collective; "
        f"launches take at least {1e6 * assumptions.launch:g} us an operator",
        f"peaks: {peaks}",
        "collectives of data ranks overlap with computation, those of other axes do not",
        f"links: {device.link:g} GB/s inside a machine, {device.network:g} GB/s for each device between machines",
    ]
    if assumptions.tokens is not None:
        notes.append(
            f"{assumptions.tokens:g} tokens a sample, as loss_weight counts them in the first batch"
        )
    return notes


def _describe_peak(device: Device, precision: str) -> str:
    peak = device.flops(precision)
    rate = "unknown"
    if peak is not None:
        rate = f"{peak / 1e12:.3g} TFLOP/s"
    if "32" not in precision:
        return f"{precision} {rate}"
    matmul = torch.get_float32_matmul_precision()
    return f"{precision} {rate} (float32 matmul precision: {matmul!r})"
