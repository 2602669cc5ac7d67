"""``Fabric``: Lightning's class for custom training loops, built on the `Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.accelerator.fabric_module import (
    FabricModule,
    prepared_module,
    serve_module,
)
from trainer_kit.accelerator.wrapping import under_precision
from trainer_kit.build import STRATEGY_REGISTRY, accelerator_word, refuse_checkpoint_io
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.files import torch_load
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.weights import check_exists, read_weights
from trainer_kit.core.arguments import as_list, known_arguments
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.devices import count_accelerators
from trainer_kit.core.display import plural
from trainer_kit.core.empty_init import EmptyInit
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    did_you_mean,
)
from trainer_kit.core.location import locate
from trainer_kit.core.seed import seed_everything
from trainer_kit.core.tensors import map_leaves, map_tensors, move_to_device
from trainer_kit.core.types import (
    Function,
    Keywords,
    Loaders,
    Nested,
    SavedState,
    StateDict,
)
from trainer_kit.launch import run_agent, run_forked
from trainer_kit.loggers.bounded import BoundedCalls
from trainer_kit.options.records import FullyShardedDataParallelPlugin
from trainer_kit.strategies.gathering import TensorGroup, gather_with_gradients
from trainer_kit.strategies.single import SingleDeviceStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer_kit.compat.accelerators import LightningAccelerator
    from trainer_kit.precision.precision import Precision
    from trainer_kit.strategies.strategy import Strategy

__all__ = ["Fabric"]

_T = TypeVar("_T")

_REDUCTIONS: Final = ("mean", "sum", "max", "min")
_CHOSEN_BY_PROCESSES: Final = ("auto", "ddp", "ddp_find_unused_parameters_false")
_FORKED: Final = ("ddp_fork", "ddp_notebook", "ddp_spawn")
_REPLACEMENTS: Final = {
    "_accelerator": "fabric.accelerator is an Accelerator; fabric.device is the device",
    "_callbacks": "fabric.callbacks",
    "_connector": "fabric.strategy and fabric.device show the selection",
    "_launched": "fabric.launch() may be called again; it does not start processes twice",
    "_loggers": "fabric.loggers",
    "_models_setup": "count them where you call fabric.setup",
    "_precision": "fabric.accelerator.precision",
    "_strategy": "fabric.strategy",
    "run": "write the loop as a function that takes the Fabric first, and call fabric.launch(loop)",
}
"""The replacements of private and former attributes of Lightning's Fabric, by name."""


class Fabric:
    """Device, precision, processes and files for a custom training loop, under the names of Lightning's Fabric.

    ``trainer-kit launch``, ``torchrun`` or `launch` starts the processes. ``fabric.accelerator`` is the underlying
    `Accelerator`.

    Args:
        accelerator: ``"cpu"``; ``"auto"``, another name for the accelerator of this machine, or an accelerator object.
        strategy: a word of ``Trainer(strategy=...)``, such as ``"auto"``, ``"ddp"`` or ``"fsdp"``, or an object.
        devices: how many processes run on each machine; ``"auto"``: those that a launcher started, else one for each
            accelerator of this machine, or a single one on the CPU.
        num_nodes: accepted: the launcher sets the number of nodes.
        precision: as for the Trainer.
        plugins: a precision object.
        callbacks: objects whose methods `call` invokes.
        loggers: one logger or several, for `log`.

    Raises:
        ConfigurationError: this machine or launch does not support an argument.

    Example:
        >>> fabric = Fabric(accelerator="cpu")
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> fabric.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()
    """

    def __init__(
        self,
        *,
        accelerator: str | LightningAccelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | Precision | None = None,
        plugins: object = None,
        callbacks: object = None,
        loggers: object = None,
    ) -> None:
        refuse_checkpoint_io(plugins)
        if precision is not None and plugins is not None:
            raise ConfigurationError(
                "the precision is set twice", fix="pass precision= or plugins="
            )
        device_type = accelerator_word(accelerator)
        self._forks = strategy in _FORKED
        # Lightning's default. None would take the launcher's precision, as an Accelerator does.
        if precision is None and plugins is None:
            precision = "32-true"
        self._options: Keywords = {
            "cpu": device_type == "cpu",
            "mixed_precision": precision or plugins,
            "gradient_accumulation_steps": 1,
            **_engine_arguments(strategy),
        }
        self._device_type = device_type
        self._devices = devices
        self._num_nodes = num_nodes
        self.callbacks = as_list(callbacks)
        self.loggers = as_list(loggers)
        self._calls = BoundedCalls(print, one_thread=True)
        environment = Environment.detect()
        count = _device_count(devices)
        if count is None:
            count = _default_count(device_type, strategy, count_accelerators())
        # A script starts processes on its own machine only, so for several nodes a launcher must have started them.
        is_launched = environment.launched or num_nodes > 1
        self._processes_to_start = 0 if is_launched or count == 1 else count
        # Otherwise `launch` builds in the processes that it starts: a process that has used its device cannot be
        # forked.
        if not self._processes_to_start:
            self._build()

    def _build(self) -> None:
        """Make the Accelerator of this process, and compare the arguments with the processes and the device."""
        self.accelerator = Accelerator(**self._options)
        count = _device_count(self._devices)
        nodes = self._num_nodes
        if count is not None and count * nodes != self.world_size:
            raise ConfigurationError(
                "the number of processes differs from devices=",
                found=f"devices={self._devices!r} on {plural(nodes, 'node')}, {plural(self.world_size, 'process')}",
                fix=f"trainer-kit launch --num_processes {count * nodes} SCRIPT, or torchrun",
            )
        requested = self._device_type
        device = self.device.type
        if requested in ("auto", device):
            return
        # "gpu" is any accelerator.
        if requested != "gpu" or device == "cpu":
            raise ConfigurationError(
                "this machine has no such device", found=f"accelerator={requested!r}"
            )

    # A type checker knows all attributes, and must report others.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only until `_build` has set it, after `launch`.
            if name == "accelerator" and self.__dict__.get("_processes_to_start"):
                raise ConfigurationError(
                    "the processes of this Fabric are not started yet",
                    found=f"devices={self._devices!r} in a process that no launcher started",
                    fix="call fabric.launch() first; or start the script with trainer-kit launch or torchrun",
                )
            public_names = [each for each in dir(type(self)) if each[0] != "_"]
            fix = _REPLACEMENTS.get(name) or did_you_mean(name, public_names)
            problem = ConfigurationError(f"Fabric has no attribute {name!r}", fix=fix)
            raise AttributeError(str(problem))

    # -- processes -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def node_rank(self) -> int:
        """The index of this machine."""
        return self.accelerator.environment.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._processes_to_start or self.accelerator.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self.accelerator.is_main_process

    @property
    def strategy(self) -> Strategy:
        """The strategy that wraps modules."""
        return self.accelerator.strategy

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0]

    def launch(
        self, function: Function | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Start the processes, unless a launcher has done so, and call ``function(fabric, ...)`` in each.

        With ``devices=2`` in a process that no launcher started, this runs the script again from its start, once in
        each process, and ends this process when they end. With ``strategy="ddp_fork"``, ``"ddp_spawn"`` or
        ``"ddp_notebook"`` it forks this process instead, and returns what the function returns on rank 0.

        Args:
            function: called with this Fabric; required where processes are forked.
            args: its further arguments.
            kwargs: its arguments by name.

        Raises:
            ConfigurationError: processes are to be forked, and there is no function.
        """
        count = self._processes_to_start
        if count and not self._forks:
            # This call runs the script again in each process, and does not return.
            run_agent(count)
        if not count:
            return None if function is None else function(self, *args, **kwargs)
        if function is None:
            raise ConfigurationError(
                "forked processes need a function to call",
                found="fabric.launch()",
                fix="fabric.launch(train)",
            )

        def on_rank(rank: int) -> object:
            # First: until then `world_size` is the number of processes to start, which `_build` would compare with
            # itself.
            self._processes_to_start = 0
            self._build()
            value = function(self, *args, **kwargs)
            # Only the result of rank 0 is returned to the caller, so only it has to be picklable.
            return value if rank == 0 else None

        return run_forked(on_rank, count)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process.

        Args:
            name: accepted for compatibility with Lightning, without effect.
        """
        self.accelerator.wait_for_everyone()

    def print(self, *values: object, **options: Any) -> None:
        """Print on the first process of a machine.

        Args:
            values: the objects to print.
            options: of ``print``: ``sep``, ``end``, ``file``, ``flush``.
        """
        self.accelerator.print(*values, **options)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Return the object of process ``src`` on every process; collective call.

        Args:
            obj: an object that can be pickled; only that of process ``src`` is sent.
            src: the rank of the sender.
        """
        value: _T = self.accelerator.strategy.broadcast(obj, src)
        return value

    def all_gather(
        self,
        data: Nested,
        group: ProcessGroup | None = None,
        sync_grads: bool = False,
    ) -> Nested:
        """Stack every tensor over the processes to shape (processes, *shape); a single process returns it unchanged.

        Args:
            data: a tensor, a number, or a pytree of them.
            group: torch's group of the processes that take part and make this call; None: all of them.
            sync_grads: let gradients flow back to the tensors of all processes.
        """
        data = self._as_tensors(data)
        if self.world_size == 1:
            return data
        ranks = self.accelerator.world if group is None else TensorGroup(group)
        if sync_grads:
            return map_tensors(data, partial(gather_with_gradients, group=ranks))
        if group is not None:
            return map_tensors(data, ranks.all_gather)
        # `gather` concatenates along the first dimension: a new one in front of it makes this a stack.
        return self.accelerator.gather(map_tensors(data, lambda tensor: tensor[None]))

    def all_reduce(
        self,
        data: Nested,
        group: ProcessGroup | None = None,
        reduce_op: str = "mean",
    ) -> Nested:
        """Reduce every tensor over the processes; a single process returns it unchanged.

        Args:
            data: a tensor, a number, or a pytree of them.
            group: torch's group of the processes that take part and make this call; None: all of them.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        """
        data = self._as_tensors(data)
        # torch calls it "avg".
        reduction = "mean" if reduce_op == "avg" else reduce_op
        if group is None or self.world_size == 1:
            return self.accelerator.reduce(data, reduction)
        _refuse(
            reduction not in _REDUCTIONS,
            f"unknown reduction {reduce_op!r}",
            str(_REDUCTIONS),
        )
        return map_tensors(data, partial(TensorGroup(group).all_reduce, op=reduction))

    def _as_tensors(self, data: Nested) -> Nested:
        """Return a pytree with a tensor in the place of each number."""

        def make_tensor(number: float) -> Tensor:
            return torch.tensor(number, device=self.device)

        return map_leaves(data, make_tensor, (int, float))

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Run the block on rank 0 before the other processes.

        Args:
            local: True: the first process of each machine goes first, in place of rank 0 alone.
        """
        if local:
            return self.accelerator.local_main_process_first()
        return self.accelerator.main_process_first()

    @staticmethod
    def seed_everything(
        seed: int | None = None, workers: bool | None = None, verbose: bool = True
    ) -> int:
        """Seed Python, NumPy and torch, as `trainer_kit.seed_everything` does.

        Args:
            seed: 0 to 2**32 - 1; None draws one from the system.
            workers: accepted for compatibility with Lightning: workers of loaders are always seeded.
            verbose: accepted for compatibility with Lightning: nothing is printed.

        Returns:
            The seed.
        """
        return seed_everything(seed, workers=bool(workers))

    # -- preparing -------------------------------------------------------------------------------------------------

    @known_arguments(
        {
            "model": "pass it without a name: fabric.setup(model, optimizer)",
            "_reapply_compile": "leave it out, and compile what fabric.setup returns",
        }
    )
    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: object = None,
        move_to_device: bool = True,
    ) -> Any:
        """Prepare a module and its optimizers; return them in this order, and the scheduler unchanged.

        The module is a `FabricModule`: its attributes and methods are the given module's, ``.module`` is that module,
        and the steps of a `TrainModule` and the methods that ``mark_forward_method`` marks synchronize gradients.

        Args:
            module: the module; one that was set up before is not wrapped again.
            optimizers: optimizers of its parameters.
            scheduler: a learning-rate scheduler, which is returned as it is: step it yourself.
            move_to_device: whether the module is moved to the device.

        Raises:
            ConfigurationError: an argument is not a module or not an optimizer.
        """
        are_optimizers = all(isinstance(each, Optimizer) for each in optimizers)
        _refuse(
            not isinstance(module, nn.Module) or not are_optimizers,
            "setup takes a module and its optimizers",
            "fabric.setup(module, optimizer)",
        )
        # A module that was set up before is not wrapped a second time.
        objects = [prepared_module(module), *optimizers]
        prepared = self.accelerator.prepare(
            *objects, device_placement=[move_to_device] * len(objects)
        )
        if not optimizers:
            # A single object comes without a tuple.
            prepared = [prepared]
        results = [self._wrap(module, prepared[0]), *prepared[1:]]
        if scheduler is not None:
            results.append(scheduler)
        return results[0] if len(results) == 1 else tuple(results)

    def _wrap(self, module: nn.Module, prepared: nn.Module) -> FabricModule:
        user_module: nn.Module = self.accelerator.unwrap_model(module)
        serve_module(user_module, self)
        in_precision = partial(under_precision, precision=self.accelerator.precision)
        return FabricModule(user_module, prepared, in_precision)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True
    ) -> FabricModule:
        """Prepare a module without its optimizers.

        Args:
            module: the module.
            move_to_device: whether it is moved to the device.
        """
        prepared = self.accelerator.prepare_model(
            prepared_module(module), device_placement=move_to_device
        )
        return self._wrap(module, prepared)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare the optimizers of a prepared module.

        Args:
            optimizers: optimizers of the parameters of that module.

        Returns:
            The prepared optimizers in the same order; a single one without a tuple.
        """
        prepared = [
            self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers
        ]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def setup_dataloaders(
        self,
        *dataloaders: Loaders,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """Prepare loaders: each process gets its shard of the samples, on its device.

        Samples are divided as by torch's ``DistributedSampler``: process r of n gets the samples r, r + n, ..., and
        only where their number is no multiple of n, the first samples are repeated. A stream is not repeated on each
        process: the main process reads it, and its batches are divided.

        Args:
            dataloaders: the loaders.
            use_distributed_sampler: False: each process gets all batches of its own loader, which is sharded already.
            move_to_device: whether batches are moved to the device of this process.
        """
        prepared = self.accelerator.prepared
        loaders = [
            prepared.prepare_loader(
                loader,
                move_to_device,
                shard=use_distributed_sampler,
                interleave=True,
            )
            for loader in dataloaders
        ]
        return loaders[0] if len(loaders) == 1 else loaders

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create layers on the device and in the dtype of the run.

        Args:
            empty_init: True: layers are not initialized, and no random numbers are drawn, for weights that a checkpoint
                replaces. Layers of a sharded model are always initialized.
        """
        with ExitStack() as stack:
            stack.enter_context(self.accelerator.strategy.init_context())
            stack.enter_context(self.accelerator.precision.init_context())
            if empty_init and not self.accelerator.strategy.sharded:
                stack.enter_context(EmptyInit())
            yield

    sharded_model = init_module

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Create tensors on the device and in the dtype of the run."""
        with torch.device(self.device), self.accelerator.precision.init_context():
            yield

    def to_device(self, obj: Nested) -> Nested:
        """Move a module, tensor or batch to the device of this process.

        Args:
            obj: a module, a tensor, or nested lists, tuples and dicts of tensors.
        """
        if isinstance(obj, nn.Module):
            return obj.to(self.device)
        return move_to_device(obj, self.device)

    # -- the loop --------------------------------------------------------------------------------------------------

    def backward(
        self,
        tensor: Tensor,
        *args: object,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the backward pass; use this in place of ``loss.backward()``.

        Args:
            tensor: the loss, a scalar.
            args: refused: pass options by name.
            model: accepted for compatibility with Lightning, without effect.
            kwargs: options of ``Tensor.backward``, such as ``retain_graph=True``.

        Raises:
            ConfigurationError: an option is passed without its name.
        """
        _refuse(
            bool(args), "backward takes options by name", "pass retain_graph= by name"
        )
        self.accelerator.backward(tensor, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of a module by value or by norm.

        Args:
            module: the prepared module whose gradients are clipped.
            optimizer: accepted for compatibility with Lightning, without effect.
            clip_val: the largest absolute value of an element; None: clip by norm.
            max_norm: the largest total norm; None: clip by value.
            norm_type: the order of the norm; ``inf`` for the largest element.
            error_if_nonfinite: with ``max_norm``: raise an error if the norm is NaN or infinite, which waits for the
                device.

        Returns:
            The norm before clipping, a scalar tensor; None when clipped by value.

        Raises:
            ConfigurationError: both limits are given, or none.
            NonFiniteError: the norm is not finite.
        """
        _refuse(
            (clip_val is None) == (max_norm is None),
            "gradients are clipped by value or by norm",
            "pass one of them",
        )
        if max_norm is None:
            return self.accelerator.clip_grad_value_(module.parameters(), clip_val)  # type: ignore[func-returns-value,arg-type]
        norm = self.accelerator.clip_grad_norm_(
            module.parameters(), max_norm, norm_type
        )
        if not error_if_nonfinite or norm is None:
            return norm
        # Sync point: the caller asked for it.
        if not torch.isfinite(norm):
            raise NonFiniteError(
                "the norm of the gradients is not finite",
                fix="pass error_if_nonfinite=False",
            )
        return norm

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the precision."""
        return self.accelerator.autocast()

    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Skip the gradient reduction over the processes in this block, for gradient accumulation.

        Args:
            module: a prepared module. The first backward outside the block reduces the gradients of all micro-batches.
            enabled: False: the block has no effect, as in the last micro-batch of a window.
        """
        if not enabled:
            return nullcontext()
        return self.accelerator.no_sync(prepared_module(module))

    def call(self, hook_name: str, *args: object, **kwargs: object) -> None:
        """Call the method ``hook_name`` of each callback that has it, in order; results are discarded.

        Args:
            hook_name: the name of the method.
            args: its arguments.
            kwargs: its arguments by name.
        """
        for callback in self.callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **kwargs)

    def log(self, name: str, value: object, step: int | None = None) -> None:
        """Log a value with every logger, on rank 0.

        Args:
            name: the name of the value.
            value: a number or a tensor of one element.
            step: the step of the value; None: the logger decides.

        Raises:
            ConfigurationError: a tensor has several elements.
        """
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Log values with every logger, on rank 0; tensors of one element become numbers, which is a sync point.

        A logger that has not returned for 10 seconds is left out until it does.

        Args:
            metrics: numbers and tensors of one element, by name.
            step: the step of the values; None: the logger decides.

        Raises:
            ConfigurationError: a tensor has several elements.
        """
        if not self.is_global_zero:
            return
        # Once for all loggers, because each conversion waits for the device.
        numbers = map_tensors(metrics, _as_number)
        for logger in self.loggers:
            log_metrics = partial(logger.log_metrics, metrics=numbers, step=step)
            self._calls.call(logger, "log_metrics", log_metrics, None)

    # -- files -----------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, object],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write modules, optimizers and plain values as a checkpoint directory; collective call.

        Args:
            path: the directory; an existing checkpoint is replaced.
            state: objects by name; an object with a ``state_dict`` method is saved through it.
            filter: by name, functions that select the entries of a ``state_dict``.

        Raises:
            ConfigurationError: a name in ``filter`` is not in ``state``.
        """
        filters = filter or {}
        unknown = sorted(filters.keys() - state.keys())
        _refuse(
            bool(unknown),
            f"filter= names {unknown}, which state does not have",
            f"its names: {list(state)}",
        )
        checkpoint: StateDict = {}
        for name, value in state.items():
            # On every process: the states of sharded modules and optimizers are gathered.
            entry = self._collect_state(value)
            selects = filters.get(name)
            if selects is not None:
                entry = {key: item for key, item in entry.items() if selects(key, item)}
            checkpoint[name] = entry
        on_rank_zero(
            self.accelerator.world,
            lambda: str(write_checkpoint(path, checkpoint, overwrite=True)),
        )

    def _collect_state(self, value: object) -> Any:
        if isinstance(value, nn.Module):
            return self.accelerator.get_state_dict(prepared_module(value))
        if isinstance(value, Optimizer):
            from torch.distributed.tensor import DTensor

            self._refuse_engine_optimizer()
            # Every process gathers, for each has a shard.
            return map_leaves(
                value.state_dict(), lambda shard: shard.full_tensor().cpu(), DTensor
            )
        return value.state_dict() if hasattr(value, "state_dict") else value

    def _refuse_engine_optimizer(self) -> None:
        _refuse(
            self.accelerator.strategy.owns_step,
            "the engine keeps the state of this optimizer",
            "fabric.accelerator.save_state(directory), load_state",
        )

    def load(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, object] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> StateDict:
        """Load a checkpoint of `save`, or a ``torch.save`` file, into the objects of ``state``.

        Args:
            path: the directory or the file.
            state: objects by name, which are changed in place: modules, optimizers and others with ``load_state_dict``;
                a plain value is replaced in this dict. None: load nothing into objects.
            strict: every name of ``state`` must be in the checkpoint, and the parameter names of modules must match.
            weights_only: accepted for compatibility with Lightning, without effect: nothing is ever unpickled.

        Returns:
            The entries of the checkpoint whose names are not in ``state``.

        Raises:
            CheckpointError: with ``strict``, a name of ``state`` is missing; or the file holds pickled classes.
            MissingCheckpointError: nothing is at ``path``; it is also a ``FileNotFoundError``.
        """
        file = locate(path)
        check_exists(file)
        checkpoint: StateDict
        if file.is_dir():
            checkpoint = dict(read_checkpoint(path))
        else:
            # `torch_load` declares local paths only.
            checkpoint = dict(torch_load(file, "cpu"))  # type: ignore[arg-type]
        if state is None:
            return checkpoint
        for name, value in state.items():
            if name in checkpoint:
                entry = checkpoint.pop(name)
                if not self._load_into(value, entry, strict):
                    state[name] = entry
            elif strict:
                raise CheckpointError(
                    path,
                    name,
                    "it is not in this checkpoint",
                    fix="pass strict=False",
                )
        return checkpoint

    def _load_into(self, value: object, entry: Any, strict: bool) -> bool:
        """Load an entry of a checkpoint into an object; return False for a plain value, which has no state."""
        if isinstance(value, nn.Module):
            self._load_module(value, entry, strict)
        elif isinstance(value, Optimizer):
            self._load_optimizer(value, entry)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(entry)
        else:
            return False
        return True

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load a file that holds one ``state_dict`` into a module or an optimizer.

        Args:
            path: the file.
            obj: the module or optimizer, prepared or not, which is changed in place.
            strict: for a module: the parameter names must match.
            weights_only: accepted for compatibility with Lightning, without effect: nothing is ever unpickled.

        Raises:
            MissingCheckpointError: nothing is at ``path``; it is also a ``FileNotFoundError``.
            ConfigurationError: an engine such as DeepSpeed keeps the state of the object.
        """
        check_exists(locate(path))
        if isinstance(obj, nn.Module):
            self._load_module(obj, read_weights(path), strict)
        else:
            self._load_optimizer(obj, torch_load(locate(path), "cpu"))  # type: ignore[arg-type]

    def _load_module(
        self, module: nn.Module, weights: SavedState, strict: bool
    ) -> None:
        _refuse(
            self.accelerator.strategy.owns_step,
            "the engine keeps the weights of this module",
            "fabric.accelerator.load_state(directory)",
        )
        self.accelerator.strategy.load_module_state(
            self.accelerator.unwrap_model(module), weights, strict
        )

    def _load_optimizer(self, optimizer: Optimizer, state: StateDict) -> None:
        """Load the state of full parameters; where they are sharded, a process loads its shards."""
        from torch.distributed.tensor import DTensor

        self._refuse_engine_optimizer()
        user_optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)
        parameters: list[nn.Parameter] = []
        for group in user_optimizer.param_groups:
            parameters.extend(group["params"])
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            # By its own method: a user's class may have more state than torch's.
            optimizer.load_state_dict(state)
            return
        saved_groups = state["param_groups"]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(group["params"]) for group in user_optimizer.param_groups]
        _refuse(
            saved_sizes != sizes,
            f"the saved optimizer has {saved_sizes} parameters in its groups, and this one {sizes}",
            "make the same groups as when it was saved",
        )
        options = []
        for group in saved_groups:
            group_options = dict(group)
            del group_options["params"]
            options.append(group_options)
        # torch numbers the parameters of a saved state over all groups, in the order of the groups.
        states = {
            parameters[index]: parameter_state
            for index, parameter_state in state["state"].items()
        }
        self.accelerator.strategy.load_optimizer_state(user_optimizer, options, states)


def _default_count(
    accelerator: str, strategy: str | Strategy, accelerators: int
) -> int:
    """Return the number of processes for ``devices="auto"`` on a machine with this number of accelerators."""
    if accelerator == "cpu" or isinstance(strategy, SingleDeviceStrategy):
        return 1
    return max(accelerators, 1)


def _device_count(devices: object) -> int | None:
    """Return the number of devices that an argument asks for; None: as many as the machine has."""
    if devices in ("auto", -1, "-1"):
        return None
    # The ranks of a machine take its devices in this order.
    if isinstance(devices, list) and devices == list(range(len(devices))):
        return len(devices)
    if isinstance(devices, int) or (isinstance(devices, str) and devices.isdigit()):
        return int(devices)
    raise ConfigurationError(
        "devices= must be a number",
        found=f"devices={devices!r}",
        fix="pass how many to use; CUDA_VISIBLE_DEVICES selects which ones",
    )


def _engine_arguments(strategy: str | Strategy) -> Keywords:
    """Return the arguments of the Accelerator for a strategy.

    Raises:
        ConfigurationError: no strategy has this name.
    """
    if not isinstance(strategy, str):
        return {"strategy": strategy}
    if strategy in _CHOSEN_BY_PROCESSES or strategy in _FORKED:
        return {}
    if strategy == "fsdp":
        return {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    if strategy not in STRATEGY_REGISTRY:
        raise ConfigurationError(
            "this strategy is not available in Fabric",
            found=repr(strategy),
            fix=did_you_mean(strategy, STRATEGY_REGISTRY.available_strategies()),
        )
    return {"strategy": STRATEGY_REGISTRY.get(strategy)}


def _as_number(tensor: Tensor) -> float:
    _refuse(
        tensor.numel() != 1,
        f"a logged tensor has one element, not shape {tuple(tensor.shape)}",
        "log its .mean()",
    )
    # Sync point: the caller logs it.
    return float(tensor.detach())


def _refuse(is_invalid: bool, problem: str, fix: str) -> None:
    if is_invalid:
        raise ConfigurationError(problem, fix=fix)
