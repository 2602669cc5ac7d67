"""Names that Accelerate scripts import besides the `Accelerator`: functions that need no Accelerator, and types."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from trainer_kit.accelerator.accelerator import Accelerator, forget_newest, newest
from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.accumulation import GradientState as GradientView
from trainer_kit.accelerator.generators import each_epoch
from trainer_kit.accelerator.loader import LaterLoader, PreparedLoader
from trainer_kit.accelerator.loader_division import prepare_loader
from trainer_kit.accelerator.model_weights import write_object
from trainer_kit.accelerator.prepared import Parameters
from trainer_kit.accelerator.processes import PartialState, synchronize_rng_states
from trainer_kit.accelerator.trackers import GeneralTracker, LoggerTracker, Trackers
from trainer_kit.accelerator.wrapping import compiled, uncompiled, unwrap
from trainer_kit.checkpoint.weights import read_weights
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.display import bar_class
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.seed import order_seed
from trainer_kit.core.types import Function, Loaders
from trainer_kit.data import warn_if_inexact
from trainer_kit.loggers.table import LOGGER_ROWS
from trainer_kit.options.deepspeed import DeepSpeedPlugin
from trainer_kit.options.records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from trainer_kit.options.refusals import refused
from trainer_kit.strategies.transforms.blocks import Compile, units

__all__ = [
    "AcceleratorState",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "GatheredParameters",
    "GradientState",
    "PreparedLoaderType",
    "SkipDataLoader",
    "compile_regions",
    "copy_tensor_to_devices",
    "extract_model_from_parallel",
    "get_active_deepspeed_plugin",
    "get_mixed_precision_context_manager",
    "get_sampler",
    "is_initialized",
    "load_fsdp_model",
    "merge_fsdp_weights",
    "prepare_data_loader",
    "save",
    "save_fsdp_model",
    "synchronize_rng_state",
    "tqdm",
    "wait_for_everyone",
]


# -- the state ---------------------------------------------------------------------------------------------------------


class _Recognized(type):
    """A metaclass for classes without instances: ``isinstance`` calls ``recognizes``; a call forwards or raises."""

    def __instancecheck__(cls, instance: object) -> bool:
        return bool(cls.recognizes(instance))  # type: ignore[attr-defined]


@final
class AcceleratorState(metaclass=_Recognized):
    """A call returns the newest Accelerator, which has every attribute of Accelerate's state.

    Args:
        mixed_precision: for a new Accelerator, if there is none.
        cpu: for a new Accelerator, if there is none.
        options: further arguments of the new Accelerator.

    Raises:
        ConfigurationError: the existing Accelerator has another precision.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> AcceleratorState() is accelerator
        True
    """

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is an Accelerator."""
        return isinstance(instance, Accelerator)

    def __new__(
        cls, mixed_precision: str | None = None, cpu: bool = False, **options: Any
    ) -> Any:
        accelerator = newest()
        if accelerator is None:
            return Accelerator(mixed_precision=mixed_precision, cpu=cpu, **options)
        current = accelerator.mixed_precision
        if mixed_precision is not None and mixed_precision != current:
            raise ConfigurationError(
                "the Accelerator was created with a different precision",
                found=f"{mixed_precision!r} after {current!r}",
                fix="create it with this precision, or call AcceleratorState._reset_state() before creating another",
            )
        return accelerator

    _reset_state = staticmethod(forget_newest)


@final
class GradientState(metaclass=_Recognized):
    """A call returns the `Accelerator.gradient_state` of the newest Accelerator."""

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is the state of an accumulation."""
        return isinstance(instance, GradientView)

    def __new__(cls, gradient_accumulation_plugin: object = None) -> Any:
        accelerator = newest()
        if accelerator is None:
            return GradientView(_window())
        return accelerator.gradient_state

    @staticmethod
    def _reset_state() -> None:
        """Accepted, without effect: each Accelerator has its own state."""


def _window() -> Accumulation:
    """Return the accumulation of the newest Accelerator; without one, a window of one micro-batch."""
    world = PartialState().world
    accelerator = newest()
    if accelerator is None:
        return Accumulation(1, world, world)
    return accelerator.accumulation


def is_initialized() -> bool:
    """Whether the script has an Accelerator."""
    return newest() is not None


def get_active_deepspeed_plugin(
    state: Accelerator | PartialState,
) -> DeepSpeedPlugin | None:
    """Return the active DeepSpeed plugin of an Accelerator or its state."""
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    return plugin


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Return the autocast context of the newest Accelerator; without ``native_amp`` one that does nothing."""
    accelerator = newest() if native_amp else None
    if accelerator is None:
        return nullcontext()
    return accelerator.autocast(autocast_kwargs)


def GatheredParameters(
    params: Parameters,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[object]:
    """Gather parameters that DeepSpeed shards in this context; without its stage 3 this does nothing.

    Args:
        params: a parameter, or several.
        modifier_rank: the process whose changes are kept.
        fwd_module: the module whose forward uses the parameters.
        enabled: False: do nothing.
    """
    accelerator = newest()
    plugin = None if accelerator is None else accelerator.deepspeed_plugin
    if plugin is None or plugin.get_value("zero_optimization.stage") != 3:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(
        params, modifier_rank, fwd_module, enabled
    )
    return context


# -- processes ---------------------------------------------------------------------------------------------------------


def wait_for_everyone() -> None:
    """Wait until every process makes this call."""
    PartialState().wait_for_everyone()


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of ``tqdm``, on the first process of each machine.

    Args:
        args: of ``tqdm.tqdm``.
        main_process_only: False: every process shows one.
        kwargs: of ``tqdm.tqdm``.

    Raises:
        ConfigurationError: the first argument is a bool, which old scripts passed for ``main_process_only``.

    Example:
        >>> list(tqdm([1, 2], disable=True))
        [1, 2]
    """
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            "the first argument of tqdm must be the iterable that it counts",
            found=str(args[0]),
            fix="pass main_process_only= by name",
        )
    shows = not main_process_only or PartialState().is_local_main_process
    disable = kwargs.pop("disable", False) or not shows
    return bar_class()(*args, disable=disable, **kwargs)


def synchronize_rng_state(
    rng_type: object = None, generator: torch.Generator | None = None
) -> None:
    """Copy one random state of the main process to every process; see `synchronize_rng_states`."""
    synchronize_rng_states([rng_type], generator)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Send the tensor of the one process that has a tensor to every process.

    Args:
        tensor: the tensor; None on all other processes.

    Raises:
        ConfigurationError: not exactly one process has a tensor.
    """
    state = PartialState()
    owners = state.collectives.gather_object([tensor is not None])
    count = owners.count(True)
    if count != 1:
        raise ConfigurationError(
            "exactly one process must pass the tensor", found=f"{count} have one"
        )
    source = owners.index(True)
    # The other processes know neither shape nor dtype.
    header = None if tensor is None else (tensor.shape, tensor.dtype)
    shape, dtype = state.world.broadcast(header, source)
    if tensor is None:
        copied = torch.empty(shape, dtype=dtype)
    else:
        copied = tensor.detach().clone()
    received: Tensor = state.world.broadcast(copied.to(state.device), source)
    return received


def save(
    obj: object,
    f: str | os.PathLike[str],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """``torch.save`` on the main process; see `Accelerator.save`.

    Args:
        obj: the object to save.
        f: the file.
        save_on_each_node: the first process of each machine writes.
        safe_serialization: write a dict of tensors as safetensors.
    """
    state = PartialState()
    writes = state.is_main_process
    if save_on_each_node:
        writes = state.is_local_main_process
    if writes:
        write_object(obj, f, safe_serialization)


# -- models ------------------------------------------------------------------------------------------------------------


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Return the user's model; see `Accelerator.unwrap_model`.

    Args:
        model: a prepared model, or any other.
        keep_fp32_wrapper: keep the precision of the model's forward.
        keep_torch_compile: keep a compiled model compiled.
        recursive: unwrap its submodules too.
    """
    user_model = unwrap(model, keep_fp32_wrapper)
    if recursive:
        for name, child in user_model.named_children():
            unwrapped = extract_model_from_parallel(
                child, keep_fp32_wrapper, False, True
            )
            setattr(user_model, name, unwrapped)
    inner = uncompiled(model)
    is_compiled = inner is not model
    if not keep_torch_compile or not is_compiled:
        return user_model
    if inner is user_model:
        return model
    return compiled(user_model, TorchDynamoPlugin(backend="inductor"))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each block of a model separately, in place; compile a model without repeated blocks as a whole.

    Args:
        module: the model, which is also returned.
        compile_kwargs: arguments of ``torch.compile``.
    """
    if units(module, None):
        Compile(options=compile_kwargs, lasting=True).apply(module)
    else:
        module.compile(**compile_kwargs)
    return module


def save_fsdp_model(
    fsdp_plugin: object,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Write the full weights of an FSDP model as safetensors to ``pytorch_model_fsdp_<index>/``.

    Args:
        fsdp_plugin: accepted, without effect.
        accelerator: the Accelerator that prepared the model.
        model: the model; collective call.
        output_dir: the parent directory.
        model_index: the index in the directory's name.
        adapter_only: refused: filter ``accelerator.get_state_dict(model)``.

    Raises:
        ConfigurationError: ``adapter_only`` is True.
    """
    _refuse_adapters(adapter_only)
    accelerator.save_model(model, _fsdp_directory(output_dir, model_index))


def load_fsdp_model(
    fsdp_plugin: object,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load the weights that `save_fsdp_model` wrote; the arguments are the same."""
    _refuse_adapters(adapter_only)
    weights = read_weights(_fsdp_directory(input_dir, model_index))
    accelerator.strategy.load_module_state(unwrap(model), weights, True)
    accelerator.wait_for_everyone()


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the weights of a directory into ``model.safetensors`` in another one; see ``trainer-kit merge-weights``.

    Args:
        checkpoint_dir: a directory from `save_fsdp_model`, or any checkpoint that `read_weights` reads.
        output_path: a directory; it is created if missing.
        safe_serialization: False writes ``pytorch_model.bin``.
        remove_checkpoint_dir: delete the first directory afterwards.

    Raises:
        CheckpointError: the weights are missing, or the files are damaged.
    """

    def write() -> None:
        weights = read_weights(checkpoint_dir)
        Path(output_path).mkdir(parents=True, exist_ok=True)
        name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        write_object(weights, Path(output_path) / name, safe_serialization)
        if remove_checkpoint_dir:
            shutil.rmtree(checkpoint_dir)

    on_rank_zero(PartialState().world, write)


def _fsdp_directory(parent: str | os.PathLike[str], index: int) -> Path:
    return Path(parent) / f"pytorch_model_fsdp_{index}"


def _refuse_adapters(adapter_only: bool) -> None:
    if adapter_only:
        raise ConfigurationError(
            "filtering adapter weights is not supported",
            found="adapter_only=True",
            fix="call peft's save_pretrained with state_dict=",
        )


# -- loaders -----------------------------------------------------------------------------------------------------------


class _LoaderType(_Recognized):
    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigurationError(
            f"a {cls.__name__} is created by prepare", fix="accelerator.prepare(loader)"
        )


class PreparedLoaderType(metaclass=_LoaderType):
    """Every loader that `prepare` returns."""

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is such a loader."""
        return isinstance(instance, PreparedLoader)


class DataLoaderShard(metaclass=_LoaderType):
    """A loader from `prepare`; each process reads its own shard."""

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is such a loader."""
        return isinstance(instance, PreparedLoader) and instance.dispatch is None


class DataLoaderDispatcher(metaclass=_LoaderType):
    """A loader from `prepare` that the main process reads for all processes."""

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is such a loader."""
        return isinstance(instance, PreparedLoader) and instance.dispatch is not None


class SkipDataLoader(metaclass=_LoaderType):
    """A loader that `skip_first_batches` returns."""

    @staticmethod
    def recognizes(instance: object) -> bool:
        """Whether an object is such a loader."""
        return isinstance(instance, LaterLoader)


def prepare_data_loader(
    dataloader: Loaders,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[object] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: object = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: object = None,
) -> PreparedLoader:
    """Shard a loader over the processes, like `Accelerator.prepare_data_loader`.

    Args:
        dataloader: the loader.
        device: the device of batches, with ``put_on_device``; by default the process's device.
        num_processes: if given, the number of processes of the run.
        process_index: if given, the rank of this process.
        split_batches: as for `DataLoaderConfiguration`.
        put_on_device: whether batches are moved.
        rng_types: as for `Accelerator`.
        dispatch_batches: as for `DataLoaderConfiguration`.
        even_batches: as for `DataLoaderConfiguration`.
        slice_fn_for_dispatch: refused: no batch is sliced.
        use_seedable_sampler: as for `DataLoaderConfiguration`.
        data_seed: as for `DataLoaderConfiguration`.
        non_blocking: as for `DataLoaderConfiguration`.
        use_stateful_dataloader: as for `DataLoaderConfiguration`.
        torch_device_mesh: refused: prepare the loader with an Accelerator.

    Raises:
        ConfigurationError: ``num_processes`` or ``process_index`` is not the run's, or an argument is refused.
    """
    if slice_fn_for_dispatch is not None:
        raise refused("slice_fn_for_dispatch", "slice_fn_for_dispatch=...")
    state = PartialState()
    size = state.num_processes
    rank = state.process_index
    requested_size = num_processes
    if requested_size is None:
        requested_size = size
    requested_rank = process_index
    if requested_rank is None:
        requested_rank = rank
    is_same = requested_size == size and requested_rank == rank
    if not is_same or torch_device_mesh is not None:
        mesh = "" if torch_device_mesh is None else ", torch_device_mesh"
        raise ConfigurationError(
            "a loader is always sharded over the running processes",
            found=f"process {requested_rank} of {requested_size} in process {rank} of {size}{mesh}",
            fix="accelerator.prepare(loader); for another part of the samples, a BatchSamplerShard",
        )
    config = DataLoaderConfiguration(
        split_batches,
        dispatch_batches,
        even_batches,
        use_seedable_sampler,
        data_seed,
        non_blocking,
        use_stateful_dataloader,
    )
    seed = order_seed() if data_seed is None else data_seed
    # All processes need one order, and each may have another seed.
    seed = state.world.broadcast(seed)
    batch_device = None
    if put_on_device:
        batch_device = state.device if device is None else torch.device(device)
    prepared = prepare_loader(
        dataloader,
        state.world,
        state.world,
        batch_device,
        _window(),
        config,
        seed,
        before_epoch=each_epoch(state.world, rng_types, state.device),
    )
    if state.world.rank == 0:
        warn_if_inexact(prepared.feed)
    return prepared


def get_sampler(dataloader: Loaders) -> Any:
    """Return the sampler that yields a loader's indices."""
    batches = getattr(dataloader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(dataloader, "sampler", None)


# -- trackers ----------------------------------------------------------------------------------------------------------


class _TrackerType(_Recognized):
    name: str

    def __call__(
        cls,
        run_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> GeneralTracker:
        project = ProjectConfiguration(logging_dir=logging_dir)
        return Trackers([cls.name], PartialState(), project).make_tracker(
            cls.name, run_name, options
        )

    def recognizes(cls, instance: object) -> bool:
        return isinstance(instance, LoggerTracker) and instance.name == cls.name


def _tracker(kind: str, name: str) -> Function:
    text = f"The tracker {name!r}: a call makes one for a run, and ``isinstance`` finds those of an Accelerator."
    return _TrackerType(
        kind, (), {"name": name, "__doc__": text, "__module__": __name__}
    )


for _row in LOGGER_ROWS:
    if _row.accelerate_name:
        globals()[_row.accelerate_name] = _tracker(_row.accelerate_name, _row.names[0])
