"""What Megatron's optimizer keeps, by the module's parameters, and their places among the tensor ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer_kit.strategies.gradients import local
from trainer_kit.strategies.state import part_of

__all__ = ["TensorParts", "keep_state", "kept_state"]


@final
class TensorParts:
    """Knows what a tensor rank's part is a part of.

    Args:
        ranks: of a tensor parallel group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._mesh: Any = None

    def placed(self, value: Tensor, parameter: Any) -> Tensor:
        """The value with its place among the tensor ranks, where ``parameter``, whose it is, is a part."""
        if self._ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return value
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), value.device.type)
        return DTensor.from_local(value.detach(), self._mesh, [Shard(parameter.partition_dim)], run_check=False)


def kept_state(
    stepper: Any, parameters: Iterable[nn.Parameter], parts: TensorParts
) -> dict[nn.Parameter, dict[str, Any]]:
    """What Megatron's optimizer keeps of each parameter; masters of half precision are among it.

    Args:
        stepper: Megatron's, around one of torch's.
        parameters: the module's.
        parts: their places.
    """
    scaler, found = getattr(stepper, "grad_scaler", None), {}
    for parameter in parameters:
        main = getattr(parameter, "main_param", parameter)
        own = dict(stepper.optimizer.state.get(main, {}))
        if main is not parameter and own:
            own["main_param"] = main
        if own and scaler is not None:
            own["grad_scaler"], scaler = scaler.state_dict(), None  # one is enough
        if own:
            found[parameter] = {
                name: parts.placed(value, parameter) if _is_part(value, main) else value for name, value in own.items()
            }
    return found


def keep_state(stepper: Any, state: Mapping[nn.Parameter, Mapping[str, Any]], parts: TensorParts, scales: bool) -> None:
    """Each rank takes its parts of what `kept_state` found.

    Args:
        stepper: as there.
        state: as there, of any layout.
        parts: as there.
        scales: whether losses are scaled now.
    """
    for parameter, saved in state.items():
        main = getattr(parameter, "main_param", parameter)
        whole = parts.placed(main.detach(), parameter)
        own = {name: local(part_of(v, whole)) if isinstance(v, Tensor) else v for name, v in saved.items()}
        if (scale := own.pop("grad_scaler", None)) is not None and scales:
            stepper.grad_scaler.load_state_dict(scale)
        with torch.no_grad():
            if (kept := own.pop("main_param", None)) is not None and main is not parameter:
                main.copy_(kept)
        stepper.optimizer.state[main] = {
            name: v.to(main.device) if isinstance(v, Tensor) and v.dim() else v for name, v in own.items()
        }


def _is_part(value: Any, of: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == of.shape
