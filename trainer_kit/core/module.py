"""`TrainModule`: a model together with its training code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback, DataHooks, ModuleHooks
from trainer_kit.core.hparams import (
    HParamsMixin,
    classmethod_only,
    construct,
    read_hparams,
)
from trainer_kit.core.lazy import other_names
from trainer_kit.core.notebook import html_table
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.registry import READERS
from trainer_kit.core.state_names import load_module_weights
from trainer_kit.core.types import (
    Batch,
    LoggerLike,
    MetricValue,
    Nested,
    StepOutput,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TrainModule", "build_once"]

__getattr__ = other_names(__name__)

_Module = TypeVar("_Module", bound="TrainModule")


class TrainModule(ModuleHooks, DataHooks, HParamsMixin, nn.Module):
    """A model with its steps and optimizers.

    Override ``training_step`` and ``configure_optimizers``; everything else is optional. Hooks are described in
    ``trainer_kit.core.hooks``.

    Args:
        args: for the constructor of the next class; ``nn.Module`` takes none.
        kwargs: the same by name.

    Example:
        >>> import torch
        >>> class Net(TrainModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).pow(2).mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    CHECKPOINT_HYPER_PARAMS_KEY: Final = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: Final = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: Final = "hparams_type"
    """Keys of Lightning's files; a checkpoint of this library has the first one."""
    automatic_optimization: bool = True
    """False: ``training_step`` calls ``manual_backward`` and steps the optimizers itself."""
    example_input_array: Nested = None
    """An input of ``forward`` for summaries and exports: a tensor, or a tuple or dict of arguments."""
    # TorchScript compiles every property that is not listed here, and these need a run.
    __jit_unused_properties__ = (
        "current_epoch",
        "device",
        "device_mesh",
        "dtype",
        "global_rank",
        "global_step",
        "hparams",
        "hparams_initial",
        "hparams_name",
        "local_rank",
        "logger",
        "loggers",
        "on_gpu",
        "trainer",
    )
    strict_loading: bool = True
    """Whether the keys of a checkpoint must match the module's exactly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set in __dict__, without nn.Module.__setattr__, which is slow: it is never a parameter.
        self.__dict__["_trainer"] = None

    def _repr_html_(self) -> str:
        rows = []
        for name, child in self.named_children():
            rows.append(_part_row(name, child, child.parameters()))
        # Those that the module itself holds.
        for name, parameter in self.named_parameters(recurse=False):
            rows.append(_part_row(name, parameter, [parameter]))
        return html_table(type(self).__name__, rows, ["Name", "Type", "Params"])

    # -- what users define ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Compute the loss of a micro-batch: return it, a dict with ``"loss"`` (or one per named optimizer), or None.

        None skips the batch. Define it as ``training_step(self, batch, batch_idx)``. A loss is a tensor of one element
        with a
        graph, in any floating-point dtype; its weight, the accumulation of gradients and the loss scale are applied
        after it.

        Args:
            args: ``batch``, the loader's micro-batch on the device, and ``batch_idx``, its index in the epoch, from 0.
            kwargs: none are passed.
        """
        rank_zero_warn(
            "TrainModule.training_step has no default: it returns None, and None trains nothing"
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Evaluate one validation batch, without gradients.

        Define it as ``validation_step(self, batch, batch_idx)``, with a third ``dataloader_idx`` for several loaders.
        What it
        returns is passed to ``on_validation_batch_end``; `log` records values.

        Args:
            args: ``batch``, the loader's batch on the device, ``batch_idx``, its index in the loader, from 0, and with
                several
                loaders ``dataloader_idx``, the index of the loader, from 0.
            kwargs: none are passed.
        """

    def test_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Evaluate one test batch, without gradients.

        What it returns is passed to ``on_test_batch_end``.

        Args:
            args: as in `validation_step`.
            kwargs: none are passed.
        """

    def predict_step(self, batch: Batch, *args: Any, **kwargs: Any) -> StepOutput:
        """Predict one batch; by default ``self(batch)``.

        ``Trainer.predict`` returns what it returns, in dataset order.

        Args:
            batch: the loader's batch, on the device.
            args: ``batch_idx``, the index of the batch in its loader, from 0, and with several loaders
                ``dataloader_idx``, the
                index of the loader, from 0.
            kwargs: none are passed.
        """
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return one optimizer, a list, ``([optimizers], [schedulers])``, a dict, named ``{name: ...}``, or None."""
        rank_zero_warn(
            "TrainModule.configure_optimizers has no default: it returns None, and nothing is stepped"
        )

    def configure_model(self) -> None:
        """Build layers here to create them on the right device, in the right dtype, or sharded.

        Called once for a module, by its first entry point or by `load_from_checkpoint`.
        """

    def configure_parallel(self, mesh: DeviceMesh) -> ParallelPlan | None:
        """Return how the module may be split over processes; called by strategies that split it.

        Args:
            mesh: the ``DeviceMesh``, with axes ``pp``, ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp``.

        Returns:
            The plan; None: the strategy's own, or no plan.
        """
        return None

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return the callbacks of this module; each replaces the Trainer's callbacks of the same class."""
        return []

    def loss_weight(self, batch: Batch) -> float | Tensor:
        """Return the weight of this batch's loss in the mean of a step; by default its number of samples.

        Return the number of tokens (or of unmasked targets) if the loss is a mean over them: a number, or a tensor of
        one
        element on the host. The weights of an accumulation window must sum to more than zero over all ranks. They also
        weight
        the means of logged values.

        Args:
            batch: this rank's micro-batch as the loader yields it, on the host.

        Raises:
            ConfigurationError: called through ``super()``: there is no default implementation.
        """
        # A default would hide whether the module defines it: only then are batches not weighed by their samples.
        raise ConfigurationError(
            "loss_weight has no default implementation to call through super()",
            fix="return a number, such as len(batch), or do not define loss_weight: a batch then counts its samples",
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; by default ``loss.backward()``. An override decides how.

        Args:
            loss: a tensor of one element, weighted and scaled.
            args: of ``Tensor.backward``, in its order.
            kwargs: of ``Tensor.backward``, such as ``inputs`` and ``retain_graph``, which named optimizers need.
        """
        # torch's method has no annotations.
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step one optimizer, once per accumulation window; by default ``optimizer.step(closure=optimizer_closure)``.

        Gradients are complete, unscaled, synchronized and clipped. An override that does not call ``optimizer.step``
        leaves the
        weights as they are.

        Args:
            epoch: completed epochs.
            batch_idx: the index of the window's last micro-batch in its epoch, from 0.
            optimizer: the optimizer, or a proxy of it where the strategy performs the step.
            optimizer_closure: returns the loss of the window, detached, which is already computed; None if this rank
                has none.
                It runs the window again only if weights or gradients have changed since.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: Optimizer
    ) -> None:
        """Clear the gradients of one optimizer: by default they become None.

        Called once for each accumulation window, before its first backward, so that hooks can read the gradients until
        then.

        Args:
            epoch: completed epochs.
            batch_idx: the index of the micro-batch that is running, from 0.
            optimizer: the optimizer.
        """
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance one scheduler; by default ``scheduler.step()``, with the metric where there is one.

        Args:
            scheduler: a scheduler that `configure_optimizers` returned.
            metric: the value that it monitors, as last logged; None for a scheduler without ``reduce_on_plateau``.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of one optimizer; they are unscaled and synchronized. By default `clip_gradients`.

        Args:
            optimizer: the optimizer that is about to step.
            gradient_clip_val: the Trainer's ``gradient_clip_val``; None: the Trainer does not clip.
            gradient_clip_algorithm: the Trainer's ``gradient_clip_algorithm``, ``"norm"`` or ``"value"``; None: the
                Trainer
                does not clip.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # -- logging -------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: MetricValue,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Tensor] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value; nothing is read from the device here.

        Args:
            name: the metric's name.
            value: a number, a tensor of one element, or a metric object with ``compute()``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers (default: yes).
            on_step: log the value of single steps (default: only in training hooks of a batch).
            on_epoch: log the epoch's reduction (default: everywhere but in ``training_step`` and batch hooks).
            reduce_fx: ``"mean"`` (weighted by batch size), ``"sum"``, ``"min"``, ``"max"``, or a function of the
                stacked values, shape (n,).
            enable_graph: accepted for compatibility with Lightning; values are always detached.
            sync_dist: reduce over all ranks at the flush (default); False keeps each rank's own value.
            sync_dist_group: accepted for compatibility with Lightning; the data ranks are used.
            add_dataloader_idx: append ``/dataloader_idx_N`` with several evaluation loaders.
            batch_size: the weight of this value in the mean; by default the batch's own size or ``loss_weight``.
            metric_attribute: accepted for compatibility with Lightning; not used.
            rank_zero_only: record on rank 0 only.

        Raises:
            LogError: the value is not a scalar, or the same hook logged the name with other options.
        """
        # Not ``self.trainer``, whose property raises without a Trainer; and a lookup in __dict__ is cheaper in a step.
        trainer = self.__dict__["_trainer"]
        if trainer is None:
            rank_zero_warn(
                f"log({name!r}) outside a Trainer: the value is discarded", stacklevel=5
            )
            return
        trainer.metrics.log(
            name,
            value,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist,
            add_dataloader_idx,
            batch_size,
            rank_zero_only,
        )

    def log_dict(
        self, dictionary: Mapping[str, MetricValue], *args: Any, **kwargs: Any
    ) -> None:
        """Call `log` for each entry, with the same options.

        Args:
            dictionary: values by name, each as `log` takes it.
            args: further options of `log`, in its order.
            kwargs: the same options by name, such as ``on_epoch=True``.

        Raises:
            LogError: as `log`.
        """
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on rank 0, without tearing the progress bar.

        Args:
            args: what to print.
            kwargs: options of the built-in ``print``, such as ``sep`` and ``end``.

        Raises:
            ConfigurationError: the module is not attached to a Trainer.
        """
        self.trainer.print(*args, **kwargs)

    # -- where we are --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerLike:
        """The Trainer that runs this module."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not attached to a Trainer",
                fix="call this inside a hook, or after fit()",
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: TrainerLike | None) -> None:
        for module in self.nested_train_modules():
            module.__dict__["_trainer"] = trainer

    def nested_train_modules(self) -> Iterator[TrainModule]:
        """This module and every `TrainModule` inside it; they share the Trainer, and so epoch, step and `log`."""
        return (module for module in self.modules() if isinstance(module, TrainModule))

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return torch.device("cpu")
        device: torch.device = trainer.strategy.device
        return device

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """torch's mesh of the processes, for ``configure_model``; None under a strategy without one."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return None
        return trainer.strategy.mesh

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    @property
    def global_step(self) -> int:
        """Completed optimizer steps (in manual optimization: batches)."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return 0
        return trainer.progress.step

    @property
    def current_epoch(self) -> int:
        """Completed epochs: within epoch e, counted from 0, this is e."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return 0
        return trainer.progress.epoch

    @property
    def global_rank(self) -> int:
        """This process's rank over all nodes."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return 0
        return trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return 0
        return trainer.local_rank

    @property
    def logger(self) -> LoggerLike:
        """The first logger, or None."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return None
        return trainer.logger

    @property
    def loggers(self) -> list[LoggerLike]:
        """All loggers."""
        trainer: TrainerLike | None = self.__dict__["_trainer"]
        if trainer is None:
            return []
        return trainer.loggers

    def all_gather(
        self, data: Nested, group: object = None, sync_grads: bool = False
    ) -> Nested:
        """Stack tensors over the data ranks: (ranks, *shape); with one rank unchanged. Every rank must call it.

        Args:
            data: a tensor, a number, or a pytree of them, with the same structure, shapes and dtypes on every rank.
            group: must be None: the data ranks are always used.
            sync_grads: let gradients flow back to the tensors of all ranks, as a contrastive loss needs.

        Raises:
            ConfigurationError: a group is given, or the module is not attached to a Trainer.
            RankError: on every rank, where shapes, dtypes or structure differ.
        """
        if group is not None:
            raise ConfigurationError(
                "all_gather always uses all data ranks",
                found="a group",
                fix="leave group out",
            )
        return self.trainer.all_gather(data, sync_grads=sync_grads)

    # -- optimization --------------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or a list of several. In manual optimization their ``step`` goes through the strategy.

        Args:
            use_pl_optimizer: False: in manual optimization the bare optimizers, whose ``step`` the strategy and the
                precision
                do not see. Without effect in automatic optimization.

        Raises:
            ConfigurationError: the module is not attached to a Trainer.
        """
        trainer = self.trainer
        if use_pl_optimizer:
            optimizers = trainer.manual_optimizers
        else:
            optimizers = trainer.optimizers
        # As in Lightning: a single one is not in a list.
        if len(optimizers) == 1:
            return optimizers[0]
        return list(optimizers)

    def lr_schedulers(self) -> Any:
        """The scheduler, a list of several, or None."""
        configs = self.trainer.lr_scheduler_configs
        schedulers = [config.scheduler for config in configs]
        if not schedulers:
            return None
        if len(schedulers) == 1:
            return schedulers[0]
        return schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization: weighted, scaled and synchronized as in automatic optimization.

        Args:
            loss: a tensor of one element with its graph.
            args: further arguments of `backward`.
            kwargs: further arguments of `backward`, such as ``retain_graph=True``.

        Raises:
            ConfigurationError: ``automatic_optimization`` is True, or no fit is running.
        """
        self.trainer.manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of one optimizer by ``"norm"`` or ``"value"``, over all ranks that share them.

        Scaled gradients are unscaled first.

        Args:
            optimizer: an optimizer that `optimizers` returns.
            gradient_clip_val: the largest total norm, or the largest absolute value of an element; None: the Trainer's,
                and
                nothing is clipped if that is None, too.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``; None: the Trainer's, ``"norm"`` by default.

        Raises:
            ConfigurationError: ``optimizer`` is not an optimizer, or the algorithm is unknown.
        """
        self.trainer.clip_gradients(
            optimizer, gradient_clip_val, gradient_clip_algorithm
        )

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle_optimizer`.

        A parameter that is frozen stays frozen.

        Args:
            optimizer: an optimizer that `optimizers` returns.

        Raises:
            ConfigurationError: an optimizer is already toggled.
        """
        # A second record would take the frozen state of the first toggle for the user's.
        if "_toggled" in self.__dict__:
            raise ConfigurationError(
                "an optimizer is already toggled", fix="call untoggle_optimizer first"
            )
        enabled = _collect_parameters([optimizer])
        # Each parameter's own setting is recorded: a frozen one stays frozen after the toggle.
        parameters = _collect_parameters(self.trainer.optimizers)
        self.__dict__["_toggled"] = [(p, p.requires_grad) for p in parameters]
        for parameter in parameters:
            requires_grad = parameter.requires_grad and parameter in enabled
            parameter.requires_grad_(requires_grad)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo `toggle_optimizer`: each parameter requires gradients again if it did before.

        Without a toggle nothing happens.

        Args:
            optimizer: accepted for compatibility with Lightning; not used, since only one optimizer is toggled at a
                time.
        """
        for parameter, requires_grad in self.__dict__.pop("_toggled", ()):
            parameter.requires_grad_(requires_grad)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """A context with `toggle_optimizer` at its start and `untoggle_optimizer` at its end.

        Args:
            optimizer: an optimizer that `optimizers` returns.

        Raises:
            ConfigurationError: an optimizer is already toggled.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self: _Module) -> _Module:
        """Disable gradients of all parameters, and set evaluation mode; returns the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self: _Module) -> _Module:
        """Enable gradients of all parameters, and set training mode; returns the module."""
        self.requires_grad_(True)
        return self.train()

    # -- in and out ----------------------------------------------------------------------------------------------

    @classmethod_only
    def load_from_checkpoint(
        cls: type[_Module],
        checkpoint_path: str | PathLike[str],
        map_location: Any = None,
        hparams_file: str | PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> _Module:
        """Build the module from the hyperparameters in a checkpoint, and load its weights.

        ``on_load_checkpoint`` is called with the whole checkpoint before the weights in it are loaded.

        Args:
            checkpoint_path: a checkpoint directory, a ``.safetensors`` file, or a ``state_dict`` / Lightning file
                (read without executing anything).
            map_location: the device to put the module on.
            hparams_file: a YAML, JSON or CSV file of hyperparameters, in place of the checkpoint's.
            strict: whether keys must match exactly (default: ``strict_loading``).
            weights_only: accepted for compatibility with Lightning; a file that ``torch.load(weights_only=True)``
                cannot read is refused in any case.
            kwargs: constructor arguments; they take precedence over the checkpoint's.
        """
        # Only that hook sees more of the checkpoint than weights and hyperparameters: the rest is not read without it.
        overridden = cls.on_load_checkpoint is not ModuleHooks.on_load_checkpoint
        state = READERS.get("module")(checkpoint_path, whole=overridden)
        if hparams_file is not None:
            state["hyper_parameters"] = read_hparams(hparams_file)
        module = construct(cls, state["hyper_parameters"], kwargs)
        # Before the weights: `configure_model` makes the layers that hold them, and the hook may add some.
        build_once(module)
        if overridden:
            module.on_load_checkpoint(state)
        if strict is None:
            strict = module.strict_loading
        load_module_weights(module, state["state_dict"], strict)
        if map_location is None:
            return module
        return module.to(map_location)

    def to_onnx(
        self, file_path: Any = None, input_sample: Nested = None, **kwargs: Any
    ) -> Any:
        """Export through ``torch.onnx.export`` in evaluation mode, by default with ``example_input_array``.

        Args:
            file_path: the file to write; None: none is written.
            input_sample: the arguments of ``forward``: a tensor, or a tuple of several; None: ``example_input_array``.
            kwargs: options of ``torch.onnx.export``.

        Returns:
            What ``torch.onnx.export`` returns.

        Raises:
            ConfigurationError: ``onnx`` or ``onnxscript`` is not installed, or there is no sample.
        """
        sample = self._sample(input_sample, "input_sample")
        # A tuple is a list of arguments, and anything else the only one.
        if not isinstance(sample, tuple):
            sample = (sample,)
        with torch.no_grad(), _evaluated(self):
            try:
                return torch.onnx.export(self, sample, file_path, **kwargs)
            except ModuleNotFoundError as error:
                # A package that `forward` itself imports is the user's.
                if error.name not in ("onnx", "onnxscript"):
                    raise
                raise ConfigurationError(
                    "an ONNX export needs the packages onnx and onnxscript",
                    found=str(error),
                    fix="pip install onnx onnxscript",
                ) from error

    def to_torchscript(
        self,
        file_path: str | PathLike[str] | None = None,
        method: str = "script",
        example_inputs: Nested = None,
        **kwargs: Any,
    ) -> Any:
        """Convert the module to TorchScript, in evaluation mode; new code should use ``torch.export``.

        Args:
            file_path: the file to save it to; None: do not save it.
            method: ``"script"`` compiles ``forward``, ``"trace"`` records it.
            example_inputs: for a trace; by default ``example_input_array``.
            kwargs: options of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ConfigurationError: the method is unknown, or a trace has no inputs.
        """
        if method not in ("script", "trace"):
            raise ConfigurationError(
                'method is "script" or "trace"', found=f"method={method!r}"
            )
        # Before the module is changed: without inputs, a trace is refused.
        sample = None
        if method == "trace":
            sample = self._sample(example_inputs, "example_inputs")
        # torch's functions have no annotations.
        jit: Any = torch.jit
        with torch.no_grad(), _evaluated(self), _without_run(self):
            if method == "script":
                converted = jit.script(self, **kwargs)
            else:
                converted = jit.trace(self, sample, **kwargs)
        if file_path is not None:
            jit.save(converted, str(file_path))
        return converted

    def _sample(self, inputs: Nested, name: str) -> Nested:
        sample = inputs
        if sample is None:
            sample = self.example_input_array
        if sample is None:
            raise ConfigurationError(
                "the export needs an example input",
                fix=f"pass {name} or set example_input_array",
            )
        return sample

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        # A copy of the module is not a copy of the run.
        state["_trainer"] = None
        # A compiled run overrides the method on the instance.
        state.pop("log", None)
        return state


def build_once(module: Any) -> None:
    """Call ``configure_model``, unless this module was built before: new layers would replace the trained ones.

    Args:
        module: a `TrainModule`.
    """
    # In __dict__, as "_trainer": it is never a parameter.
    if "_built" not in vars(module):
        module.configure_model()
        vars(module)["_built"] = True


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context; afterwards restore the mode of each submodule."""
    # Not ``train()`` at the end, which would also change submodules that were in evaluation mode before.
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            # As `hooks.restore_modes` does: nn.Module.__setattr__ is 20 times slower.
            vars(submodule)["training"] = training


@contextmanager
def _without_run(module: TrainModule) -> Iterator[None]:
    """Remove the attributes that are not part of the model: TorchScript inspects the type of each attribute."""
    states = [submodule.__dict__ for submodule in module.nested_train_modules()]
    names = (
        "_trainer",
        "automatic_optimization",
        "example_input_array",
        "strict_loading",
    )
    removed = []
    for state in states:
        removed.append({name: state.pop(name) for name in names if name in state})
        # The compiler reads every property, and some raise without a Trainer.
        state["_trainer"] = object()
    try:
        yield
    finally:
        for state, values in zip(states, removed, strict=True):
            state.update(values)


def _part_row(
    name: str, part: object, parameters: Iterable[nn.Parameter]
) -> tuple[str, str, str]:
    """The name, the class and the number of parameters of a part of a module."""
    kind = type(part).__name__
    count = 0
    for parameter in parameters:
        # Of a lazy layer, before its first batch.
        if is_lazy(parameter):
            return name, kind, "not initialized"
        count += parameter.numel()
    return name, kind, f"{count:,}"


def _collect_parameters(optimizers: Iterable[Optimizer]) -> set[nn.Parameter]:
    parameters: set[nn.Parameter] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update(group["params"])
    return parameters
