"""DeepSpeed's engine: importing the library, the gradients of an accumulation window, the step and the loss scale."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit.core.errors import PrecisionError, StrategyError
from trainer_kit.core.protocols import Group
from trainer_kit.core.torch_private import norm_of_each
from trainer_kit.core.types import SavedState, StateDict

__all__ = [
    "Engine",
    "EngineScaler",
    "OpenWindow",
    "begin_window",
    "check_float16",
    "destroy_engine",
    "finish_window",
    "import_deepspeed",
    "local_rank",
    "partitioning",
    "quiet",
    "release_module",
    "round_partitions",
    "take_step",
]

Engine: TypeAlias = Any
"""DeepSpeed's engine around the user's module: the library has no types, and need not be installed."""
_DEEPSPEED_COUNTERS: Final = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


# -- the library ---------------------------------------------------------------------------------------------------


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ranks that compute on this kind of device, over the process group that exists already."""
    # DeepSpeed calls these at least once a step, and has no replacement for them yet.
    warnings.filterwarnings(
        "ignore",
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        FutureWarning,
    )
    # DeepSpeed chooses its accelerator at its first import, by the libraries that it finds: on a machine with a GPU it
    # would take that for ranks on the CPU, too.
    with _environment("DS_ACCELERATOR", device.type), quiet():
        import deepspeed

        if device.type == "cpu":
            # DeepSpeed would first compile shared-memory collectives, for minutes; only inference uses them.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        if not deepspeed.comm.is_initialized():
            with local_rank():
                deepspeed.init_distributed(
                    dist_backend=dist.get_backend(), verbose=False
                )
    return deepspeed


def check_float16(device: torch.device) -> None:
    """Raise a PrecisionError where DeepSpeed has no float16."""
    if not import_deepspeed(device).accelerator.get_accelerator().is_fp16_supported():
        raise PrecisionError(
            "DeepSpeed cannot run float16 on this device",
            found=device.type,
            fix='use precision="bf16-mixed"',
        )


@contextmanager
def partitioning(
    device: torch.device, config: SavedState, full: bool = False
) -> Iterator[None]:
    """Inside, stage 3 divides the parameters of every layer among the ranks as soon as the layer is built.

    Args:
        device: where layers are built.
        config: the JSON.
        full: build in full precision; `round_partitions` then rounds to the dtype of the engine.
    """
    deepspeed = import_deepspeed(device)
    init_config = dict(config)
    if full:
        init_config["bf16"] = {"enabled": False}
        init_config["fp16"] = {"enabled": False}
    with (
        quiet(),
        local_rank(),
        torch.device(device),
        deepspeed.zero.Init(config_dict_or_path=init_config),
    ):
        yield


def round_partitions(module: nn.Module, config: SavedState) -> None:
    """Round sharded parameters in full precision to the half precision that the JSON enables."""
    dtype: torch.dtype | None = None
    if (config.get("bf16") or {}).get("enabled"):
        dtype = torch.bfloat16
    elif (config.get("fp16") or {}).get("enabled"):
        dtype = torch.float16
    if dtype is None:
        return
    for parameter in module.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None or partition.dtype != torch.float32:
            continue
        rounded = partition.data.to(dtype)
        if partition.is_pinned():
            rounded = rounded.pin_memory()
        partition.data = rounded
        parameter.data = parameter.data.to(dtype)


def release_module(module: nn.Module) -> None:
    """Destroy the stage 3 optimizer of an earlier run; parameters stay sharded, for the next engine to take over."""
    optimizers: set[Any] = {
        getattr(parameter, "_z3_optimizer", None) for parameter in module.parameters()
    }
    optimizers.discard(None)
    with quiet():
        for optimizer in optimizers:
            optimizer._partition_all_parameters()
            optimizer.destroy()


def destroy_engine(engine: Engine) -> None:
    """Remove the engine's hooks from the module, and free what the engine holds."""
    with quiet():
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, DeepSpeed logs errors only: not every setting, and no deprecation of what it imports from torch."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def local_rank() -> Iterator[None]:
    """Inside, the environment has the local rank that DeepSpeed reads; a process without a launcher has none."""
    with _environment("LOCAL_RANK", "0"):
        yield


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    # A value of the user's or the launcher's stays.
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            del os.environ[name]


# -- gradients of an accumulation window -----------------------------------------------------------------------------


def begin_window(engine: Engine, unfinished: bool) -> None:
    """Drop all gradients of an earlier window.

    The engine overwrites what it kept only where a parameter gets a gradient: a parameter that this window does not
    use would be stepped with the gradient of an earlier window.

    Args:
        engine: DeepSpeed's.
        unfinished: whether the window before ended without a step.
    """
    optimizer = engine.optimizer
    if unfinished:
        _drop_unfinished(engine)
    # Stage 3 keeps gradients in one buffer, the others keep them on the host if they are offloaded.
    if getattr(optimizer, "grad_partitions_flat_buffer", None) is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            _zero_gradients(optimizer.fp32_partitioned_groups_flat)
    elif getattr(optimizer, "cpu_offload", False):
        for gradient in optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()
        _zero_gradients(optimizer.single_partition_of_fp32_groups)


def _drop_unfinished(engine: Engine) -> None:
    """Drop what the engine keeps of a window that ended without a step."""
    optimizer = engine.optimizer
    optimizer.zero_grad(set_to_none=True)
    # The engine adds to gradients from the second micro-batch on: the next one must be its first.
    if hasattr(optimizer, "micro_step_id"):
        first = 0 if engine.zero_optimization_stage() == 3 else -1
        optimizer.micro_step_id = first
    for name in ("all_grad_tensors", "averaged_gradients"):
        gradients = getattr(optimizer, name, None)
        if isinstance(gradients, dict):
            gradients.update(dict.fromkeys(gradients))


def _zero_gradients(masters: Sequence[Tensor]) -> None:
    for gradient in _existing_gradients(masters):
        gradient.zero_()


def finish_window(engine: Engine) -> None:
    """Reduce gradients as the engine does in the last backward of a window, where that backward did not."""
    if engine.zero_optimization_partition_gradients():
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def take_step(engine: Engine, clip: float) -> bool:
    """Clip and step; returns False where gradients overflowed and the engine skipped the step.

    Args:
        engine: DeepSpeed's.
        clip: the largest 2-norm of all gradients; 0: no limit.
    """
    engine._config.gradient_clipping = clip
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = clip
    # The engine steps only at a boundary, and counts micro-batches itself otherwise.
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return bool(engine.was_step_applied())


@final
class OpenWindow:
    """The accumulation window of a custom training loop: it begins with a backward, and the last one is unknown.

    Gradients are therefore reduced when they are read or stepped, not in the last backward.

    Attributes:
        begun: whether there is anything to step.
    """

    def __init__(self) -> None:
        self.begun = False
        self._is_complete = False
        # Whether a window was dropped whose gradients the engine still has.
        self._has_stale_gradients = False

    def backward(self, engine: Engine, loss: Tensor, retain_graph: bool) -> None:
        """Run one backward of the window; the loss is weighted already.

        Raises:
            StrategyError: the gradients so far have been clipped.
        """
        if self._is_complete:
            raise StrategyError(
                "backward was called between clipping and the optimizer step",
                fix="call clip_grad_norm_ at the end of the window: if accelerator.sync_gradients",
            )
        if not self.begun:
            if self._has_stale_gradients:
                for parameter in engine.module.parameters():
                    parameter.grad = None
            begin_window(engine, self._has_stale_gradients)
            self.begun = True
            self._has_stale_gradients = False
        if hasattr(engine.optimizer, "clear_backward_seen_flag"):
            # The engine counts forwards, and would overwrite gradients between two of them.
            engine.optimizer.clear_backward_seen_flag()
        # Never at a boundary: the engine would reduce now, and this may not be the last backward.
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def complete(self, engine: Engine) -> None:
        """Average over the ranks, and put each rank's part where the engine steps it; every rank calls it."""
        if self.begun and not self._is_complete:
            engine.set_gradient_accumulation_boundary(True)
            finish_window(engine)
            self._is_complete = True

    def drop(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the window without a step (replaces ``zero_grad``)."""
        self._has_stale_gradients = self._has_stale_gradients or self.begun
        self.end()

    def end(self) -> None:
        """Called after the engine has stepped, and dropped its gradients."""
        self.begun = False
        self._is_complete = False

    def gradients(self, engine: Engine) -> list[Tensor]:
        """This rank's part of all gradients, and the norms that the engine keeps of them to clip by."""
        self.complete(engine)
        if not self.begun:
            return []
        # The engine has norms of its own where it offloads gradients.
        norms = getattr(engine.optimizer, "norm_for_param_grads", None) or {}
        return [*_stepped_gradients(engine), *norms.values()]

    def norm(self, engine: Engine, world: Group) -> Tensor:
        """The 2-norm of all gradients of all ranks, without the scale of float16."""
        self.complete(engine)
        gradients = _stepped_gradients(engine) if self.begun else []
        total = torch.zeros((), device=engine.device)
        if gradients:
            norms = [norm.float() for norm in norm_of_each(gradients)]
            total = torch.stack(norms).square().sum().to(engine.device)
        # Each rank has a part; without ZeRO each has all gradients, and the sum would count them several times.
        if engine.zero_optimization():
            world.all_reduce(total)
        loss_scale = getattr(engine.optimizer, "loss_scale", 1.0)
        scale = float(loss_scale)  # no sync point: a number on the host
        return total.sqrt() / scale


def _stepped_gradients(engine: Engine) -> list[Tensor]:
    """This rank's gradients in the tensors from which the engine steps them; padding is zero."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        if optimizer.offload_optimizer:
            return _existing_gradients(optimizer.fp32_partitioned_groups_flat)
    elif hasattr(optimizer, "averaged_gradients"):  # stages 1 and 2
        if optimizer.cpu_offload:
            return _existing_gradients(optimizer.single_partition_of_fp32_groups)
    elif hasattr(optimizer, "fp32_groups_gradient_flat_partition"):
        # bfloat16 with sums in float32
        return list(optimizer.fp32_groups_gradient_flat_partition)
    else:
        return _existing_gradients(list(engine.module.parameters()))
    gradients: list[Tensor] = []
    for group in optimizer.averaged_gradients.values():
        gradients += group or ()
    return gradients


def _existing_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


# -- the loss scale --------------------------------------------------------------------------------------------------


@final
class EngineScaler:
    """The loss scale of the current engine in float16; its state has the keys of ``torch.amp.GradScaler``.

    The state of the last engine stays readable after the engine is gone, for a checkpoint after the run.

    Attributes:
        skipped: whether the engine skipped the last step, because gradients were not finite.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._scaler: Any = None
        # Whether the loss is scaled here, because the engine does not.
        self._scales = False

    def follow(self, engine: Engine) -> None:
        """Read the loss scale of this engine from now on."""
        self.skipped = False
        self._scaler = None
        if engine.fp16_enabled():
            self._scaler = getattr(engine.optimizer, "loss_scaler", None)
        # Without ZeRO the engine divides gradients by the scale, and does not multiply the loss by it.
        self._scales = self._scaler is None and engine.fp16_enabled()
        if self._scales:
            self._scaler = getattr(engine.optimizer, "loss_scale_config", None)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss on which the engine's backward is called."""
        if not self._scales:
            return loss
        scaled: Tensor = loss.float() * self._scaler.cur_scale
        return scaled

    def state_dict(self) -> StateDict:
        """The scale and its counters under GradScaler's keys, for any other engine, and DeepSpeed's own counters."""
        scaler = self._scaler
        if scaler is None:
            return {}
        window = int(getattr(scaler, "scale_window", None) or 2000)
        steps = _steps_since_overflow(scaler)
        counters = {key: getattr(scaler, key, None) for key in _DEEPSPEED_COUNTERS}
        return {
            "scale": float(scaler.cur_scale),  # no sync point: a number on the host
            "growth_factor": 2.0,  # fixed in the engine, as is the next one
            "backoff_factor": 0.5,
            "growth_interval": window,
            # After an overflow the engine waits for one step more than the window.
            "_growth_tracker": max(steps - 1, 0) % window,
            "deepspeed": {
                key: count for key, count in counters.items() if count is not None
            },
        }

    def load_state_dict(self, state: SavedState) -> None:
        """Restore `state_dict`, or the state of a GradScaler; a scale that the JSON fixes stays, as does its window.

        Args:
            state: empty where nothing was scaled.
        """
        scaler = self._scaler
        if scaler is None or not state or _steps_since_overflow(scaler) < 0:
            return
        scaler.cur_scale = float(state["scale"])  # no sync point: as above
        counters = state.get("deepspeed", {})
        if "last_overflow_iter" in counters:
            for key in _DEEPSPEED_COUNTERS:
                if key in counters and hasattr(scaler, key):
                    setattr(scaler, key, counters[key])
        else:
            # The scale grows after as many further steps without an overflow as under the other scaler.
            scaler.last_overflow_iter = -1
            scaler.cur_iter = int(state["_growth_tracker"]) + 1


def _steps_since_overflow(scaler: Any) -> int:
    """Steps since the last overflow; -1 where the scale is fixed."""
    last = getattr(scaler, "last_overflow_iter", None)
    if last is None:
        return -1
    return int(scaler.cur_iter - last - 1)
