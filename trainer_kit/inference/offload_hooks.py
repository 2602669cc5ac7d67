"""Hooks that bring weights to the computing device when their layer runs, and remove them afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn

from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.tensors import map_leaves, move_to_device, tensors_of
from trainer_kit.core.torch_private import (
    call_of_class,
    direct_buffers,
    direct_parameters,
)
from trainer_kit.inference.lazy_weights import OnDisk

__all__ = ["Call", "LayerHooks", "ModelHooks", "OffloadedTensor", "is_meta", "put"]

_TRAINING: Final = "offloaded weights cannot be trained"


@final
class OffloadedTensor:
    """A parameter or buffer that is on its computing device only while its layers run.

    Args:
        rest: the tensor that modules hold between forwards: the tensor in host memory, or a meta tensor.
        source: the files to read it from; None: ``rest`` has its content.
        name: its name in ``source``.
        needs_gradient: whether it required a gradient before.
    """

    def __init__(
        self, rest: Tensor, source: OnDisk | None, name: str, needs_gradient: bool
    ) -> None:
        self.rest = rest
        self.source = source
        self.name = name
        self.needs_gradient = needs_gradient
        # By device: the tensor that borrowers share, and the number of borrowers. It is removed with the last one.
        self._lent: dict[torch.device, tuple[Tensor, int]] = {}

    def borrow(self, device: torch.device, read: dict[str, Tensor]) -> Tensor:
        """Return the tensor on a device; calls before `give_back` return the same tensor.

        Args:
            device: the computing device.
            read: tensors that were already read from its source.
        """
        lent = self._lent.get(device)
        if lent is not None:
            tensor, count = lent
            self._lent[device] = (tensor, count + 1)
            return tensor
        tensor = self.content(device, read)
        if isinstance(self.rest, nn.Parameter):
            # torch selects kernels by this flag even without gradients; with gradients a graph would keep the weights.
            flag = self.needs_gradient and not torch.is_grad_enabled()
            tensor = type(self.rest)(tensor, requires_grad=flag)
        self._lent[device] = (tensor, 1)
        return tensor

    def give_back(self, device: torch.device) -> None:
        """Release the tensor of one `borrow`."""
        lent = self._lent.pop(device, None)
        if lent is None:
            return
        tensor, count = lent
        if count > 1:
            self._lent[device] = (tensor, count - 1)

    def content(
        self, device: torch.device, read: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return the tensor's values on a device, in the dtype of the forward."""
        if self.source is None:
            return self.rest.detach().to(device)
        tensors = read or {}
        if self.name not in tensors:
            tensors = self.source.read([self.name], device)
        # The file has the dtype of the checkpoint; `rest` has the one that the caller asked for.
        return tensors[self.name].to(self.rest.dtype)

    def rests_in(self, module: nn.Module, key: str) -> bool:
        """Whether a module holds this tensor, offloaded or borrowed, and not a replacement."""
        current = direct_buffers(module).get(key)
        if key not in direct_buffers(module):
            current = direct_parameters(module).get(key)
        if current is self.rest:
            return True
        return any(current is tensor for tensor, _ in self._lent.values())

    def is_lent(self, device: torch.device) -> bool:
        """Whether the tensor is borrowed on this device."""
        return device in self._lent


def put(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Make ``tensor`` the module's parameter or buffer of this name."""
    if key in direct_buffers(module):
        direct_buffers(module)[key] = tensor
    else:
        # Recurrent layers update their list of weights in __setattr__; writing into its dict would leave it stale.
        setattr(module, key, tensor)


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device."""
    return tensor.device.type == "meta"


@final
class LayerHooks:
    """Hooks around the forward of one module: inputs and weights are moved to its device, then weights are removed.

    Args:
        name: the name of the module, for messages.
        device: the computing device.
        slots: modules, names of their parameters or buffers, and the tensors for these during the forward.
        skip: names of arguments that are not moved.
        lock: the lock of the model.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        slots: Sequence[tuple[nn.Module, str, OffloadedTensor]],
        skip: Collection[str],
        lock: Lock,
    ) -> None:
        self.name = name
        self.device = device
        self.slots = list(slots)
        self.skip = frozenset(skip)
        self.lock = lock
        # Forwards of this module that are running: a module may call itself, and threads may share a model. Weights
        # arrive with the first and leave with the last of them.
        self._depth = 0
        self._borrowed: list[tuple[nn.Module, str, OffloadedTensor]] = []

    def before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Move inputs and weights before the forward."""
        if self.slots:
            with self.lock:
                self._depth += 1
                if self._depth == 1:
                    self._load_weights()
        moved = dict(kwargs)
        for key, value in kwargs.items():
            if key not in self.skip:
                moved[key] = self._move(value)
        return tuple(self._move(value) for value in args), moved

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """Remove weights after the forward, also after an error."""
        if self.slots:
            with self.lock:
                # An earlier hook may have failed, so that `before` did not run.
                self._depth = max(0, self._depth - 1)
                if self._depth == 0:
                    self._remove_weights()

    def _move(self, value: object) -> object:
        # With weights on disk, `next(model.parameters()).device` is meta, and scripts create inputs there.
        if self.device.type != "meta" and isinstance(value, Tensor) and is_meta(value):
            raise StrategyError(
                f"an input of {self.name or 'the model'!r} has no values",
                found=f"a tensor of {list(value.shape)} on the meta device",
                fix=f"create inputs on {str(self.device)!r}: parameters on disk do not show the device of the inputs",
            )
        return move_to_device(value, self.device)

    def _load_weights(self) -> None:
        # All slots are checked before the first tensor is read. Putting the offloaded tensor over a replacement would
        # discard the user's new weights silently.
        for module, key, tensor in self.slots:
            if not tensor.rests_in(module, key):
                owner = repr(self.name) if self.name else "the model"
                raise StrategyError(
                    f"{key!r} of {owner} was replaced after the model was dispatched",
                    found="a tensor other than the offloaded one",
                    fix="call dispatch_model again: it uses the current tensors",
                )
        content = self._read_missing()
        for module, key, tensor in self.slots:
            borrowed = tensor.borrow(self.device, content.get(id(tensor.source), {}))
            # Recorded before it is put: an interrupt between the two lines must not leave the tensor lent for ever.
            self._borrowed.append((module, key, tensor))
            put(module, key, borrowed)

    def _read_missing(self) -> dict[int, dict[str, Tensor]]:
        """Read all tensors of a source at once; the keys are the ids of the sources."""
        # One read per source opens each of its files once for the whole layer.
        sources: dict[int, OnDisk] = {}
        names: dict[int, list[str]] = {}
        for _, _, tensor in self.slots:
            source = tensor.source
            # A tied tensor that another layer has read already is on the device.
            if source is not None and not tensor.is_lent(self.device):
                sources[id(source)] = source
                names.setdefault(id(source), []).append(tensor.name)
        content = {}
        for key, source in sources.items():
            content[key] = source.read(names[key], self.device)
        return content

    def _remove_weights(self) -> None:
        # One at a time, each removed from the list last: after an interrupt a later call continues.
        while self._borrowed:
            module, key, tensor = self._borrowed[-1]
            put(module, key, tensor.rest)
            tensor.give_back(self.device)
            self._borrowed.pop()


@final
class Call:
    """Replaces a module's ``_call_impl``, to run the hooks also after a KeyboardInterrupt.

    torch's ``always_call`` runs hooks only after an Exception.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.hooks: list[LayerHooks | ModelHooks] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        # The class's method, because this object shadows the one of the module.
        call = call_of_class(self.module)
        try:
            return call(self.module, *args, **kwargs)
        # torch has run the hooks already.
        except Exception:
            raise
        except BaseException:
            for hooks in self.hooks:
                hooks.after(self.module, (), None)
            raise


@final
class ModelHooks:
    """Hooks around the forward of the whole model, and refusals of calls that a dispatched model does not support.

    Args:
        offloaded: its offloaded tensors.
        where: a description of the device map, for messages.
        skip: names of outputs that are not moved.
    """

    def __init__(
        self, offloaded: Iterable[OffloadedTensor], where: str, skip: Collection[str]
    ) -> None:
        self.where = where
        self.skip = frozenset(skip)
        self.trains = any(tensor.needs_gradient for tensor in offloaded)
        # A stack, because a model may call itself with inputs on another device.
        self._input_devices: list[torch.device | None] = []

    def before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record the device of the inputs."""
        self._input_devices.append(_first_device((args, kwargs)))

    def after(self, module: nn.Module, args: object, output: object) -> object:
        """Move the outputs to the device of the inputs."""
        # Empty if an earlier hook failed, so that `before` did not run.
        if not self._input_devices:
            return None
        device = self._input_devices.pop()
        if output is None:
            return None
        if device is not None:
            # In place, because an output of transformers is a dict whose class has more than its items.
            if self.skip and isinstance(output, dict):
                for key in output.keys() - self.skip:
                    output[key] = move_to_device(output[key], device)
            else:
                output = move_to_device(output, device)
        if self.trains and torch.is_grad_enabled():
            output = map_leaves(output, self._mark_untrainable)
        return output

    def _mark_untrainable(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        # Borrowed weights require no gradient (`OffloadedTensor.borrow`), so the output may have no graph: a backward
        # would do nothing, or fail in torch without the reason.
        if not leaf.requires_grad:
            leaf = leaf.detach().requires_grad_()
        marked: object = _RefuseBackward.apply(leaf, self)  # type: ignore[no-untyped-call]  # torch's
        return marked

    def refuse_training(self) -> StrategyError:
        """Return the error of a backward."""
        return StrategyError(
            _TRAINING,
            found=self.where,
            fix="put every layer that is trained on a device with room for it, or freeze what is offloaded: "
            "requires_grad_(False) before the model is dispatched",
        )

    def refuse_move(self, *args: object, **kwargs: object) -> NoReturn:
        """Replaces a module's ``_apply``, which ``to``, ``cuda``, ``half`` and similar methods call."""
        raise StrategyError(
            "a dispatched model cannot be moved or cast as a whole",
            found=self.where,
            fix='call dispatch_model with another device map, such as {"": "cpu"}; or load it with dtype=',
        )

    def refuse_loading(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse ``load_state_dict``, whose values would be lost."""
        raise StrategyError(
            "load_state_dict cannot change weights that are offloaded to disk",
            found=self.where,
            fix="use load_checkpoint_and_dispatch with the other checkpoint, on a new model",
        )


class _RefuseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hooks: ModelHooks) -> Tensor:
        ctx.hooks = hooks
        # A copy, because torch refuses in-place changes of a view that a custom function returns.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise ctx.hooks.refuse_training()


def _first_device(values: object) -> torch.device | None:
    return next((tensor.device for tensor in tensors_of(values)), None)
