"""What scripts for Hugging Face Accelerate ask for, and what is already decided here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.tracking import Tracking
from trainer_kit.accelerator.wrapping import uncompiled
from trainer_kit.compat.deepspeed import DeepSpeedPlugin
from trainer_kit.compat.parallelism import ParallelismConfig
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies.transforms.context import dividing

__all__ = ["Answers", "GradientState"]


@final
class GradientState:
    """Where accumulation stands, under Accelerate's names; a view.

    Args:
        accelerator: the Accelerator.
    """

    def __init__(self, accelerator: Answers) -> None:
        self._accelerator = accelerator

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window."""
        return self._accelerator.window.sync

    @property
    def num_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._accelerator.window.steps

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader that is read."""
        found = self._accelerator.window.batches
        return found if isinstance(found, PreparedLoader) else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is read."""
        return self._accelerator.window.batches is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        batches = self._accelerator.window.batches
        return batches is not None and batches.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the current batch, over all processes, that are not there twice; -1: all of them."""
        counts = getattr(self._accelerator.window.batches, "counts", None)
        return -1 if counts is None else sum(counts)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window."""
        return self._accelerator.window.sync_with_dataloader

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the calls inside a window."""
        return self._accelerator.accumulation.adjust_scheduler


class Answers(Tracking):
    """Attributes that have one answer on this strategy."""

    multi_device = property(lambda self: self.use_distributed)
    has_lomo_optimizer = False
    _attends = False  # attention has been looked for
    should_save_model = True
    tensor_parallel_rank = property(lambda self: self._place("tp"))
    context_parallel_rank = property(lambda self: self._place("cp"))
    pipeline_parallel_rank = property(lambda self: self._place("pp"))
    data_parallel_shard_rank = property(lambda self: self._place("dp_shard"))
    device_mesh = property(lambda self: self.torch_device_mesh)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes divide what; None where they divide only data."""
        if not self._divides_more_than_data:
            return None
        mesh: Any = self.torch_device_mesh
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        axes = {f"{axis}_size": sizes[axis] for axis in sizes}
        return ParallelismConfig(**axes, plan=self.strategy.plan)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The processes, an axis for each way in which they divide the work; None where there are no axes."""
        return self.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are divided by FSDP2."""
        return self.strategy.mesh is not None

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data is read here; on a mesh, by `parallelism_config`, which copy is trained."""
        return self._place("dp_replicate") if self._divides_more_than_data else self.strategy.data.rank

    def _place(self, axis: str) -> int:
        mesh = self.torch_device_mesh
        return 0 if mesh is None or axis not in (mesh.mesh_dim_names or ()) else mesh.get_local_rank(axis)

    @property
    def _divides_more_than_data(self) -> bool:
        """Whether the mesh has the axes of a `ParallelismConfig`."""
        mesh = self.torch_device_mesh
        return mesh is not None and "tp" in (mesh.mesh_dim_names or ())

    @property
    def gradient_state(self) -> GradientState:
        """Where accumulation stands."""
        return GradientState(self)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """One of ``Accelerator(deepspeed_plugins={name: plugin})``."""
        if name not in self.deepspeed_plugins:
            known = ", ".join(self.deepspeed_plugins) or "none"
            raise ConfigurationError(f"there is no DeepSpeed plugin {name!r}", found=known)
        found: DeepSpeedPlugin = self.deepspeed_plugins[name]
        return found

    def select_deepspeed_plugin(self, name: str) -> None:
        """Train under another one of the plugins; before a model is prepared."""
        chosen, strategy = self.get_deepspeed_plugin(name), self.strategy
        strategy.use(chosen.deepspeed_config)  # type: ignore[attr-defined]
        for plugin in self.deepspeed_plugins.values():
            plugin.selected = plugin is chosen

    @property
    def fp8_enabled(self) -> bool:
        """Whether products are in fp8."""
        return self.fp8_backend != "NO"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether Transformer Engine computes them."""
        return self.fp8_backend == "TE"

    @property
    def fp8_backend(self) -> str:
        """Whose fp8 it is, in Accelerate's words."""
        return {"fp8": "AO", "transformer-engine": "TE"}.get(self.precision.name, "NO")

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under torch's autocast."""
        return self.mixed_precision in ("fp16", "bf16")

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads, and hands batches round."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether last batches are filled up from the start of the data."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        replace(self.dataloader_config, even_batches=even)  # refuses what it does not take
        self.dataloader_config.even_batches = even

    @property
    def non_blocking(self) -> bool:
        """Whether copies to an accelerator do not wait."""
        return self.dataloader_config.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        """The order of the data is always a function of seed and epoch."""
        return True

    @property
    def use_stateful_dataloader(self) -> bool:
        """Positions of loaders are always part of a saved state."""
        return True

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the layers of a model were spread over several devices; such a model is not trained here."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(found is not None and len(set(found.values())) > 1 for found in maps)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Inside, the next backward exchanges gradients, also where its forward ran under `no_sync`."""
        model = uncompiled(model)
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> Iterator[None]:
        """One step on sequences that `ParallelismConfig(cp_size=...)` divides; without it this does nothing.

        Inside, each buffer is this process's part of it, in place; attention is over the whole sequence, and the mean
        of a cross entropy over the targets of all of it. Forward, loss and backward belong inside; targets are shifted
        before. Positions that a model counts by itself begin at 0 on each part: hand them over as a buffer.

        Args:
            buffers: tensors that have the sequence: inputs, targets, positions.
            buffer_seq_dims: which dimension of each is the sequence.
            no_restore_buffers: those that nobody needs whole afterwards.

        Raises:
            StrategyError: a sequence that cannot be divided, or no attention was called.
        """
        mesh = self.torch_device_mesh
        if mesh is None or not self._divides_more_than_data or mesh["cp"].size() == 1:
            yield
            return
        first, self._attends = not self._attends, True
        with dividing(mesh["cp"], buffers or (), buffer_seq_dims or (), no_restore_buffers or (), checked=first):
            yield

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refused.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "LOMO optimizers are not supported", fix="accelerator.backward(loss), optimizer.step()"
        )
