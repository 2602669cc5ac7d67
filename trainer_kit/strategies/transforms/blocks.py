"""Transforms of single blocks: activation checkpointing, regional compilation, and policies that select modules."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, final

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.signatures import takes
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["ActivationCheckpointing", "Compile", "Policy", "outer_modules", "units"]


Policy = int | str | type | Collection[str | type] | Callable[..., bool] | None
"""A number of parameters, classes or their names, a callable, or None; see `units`."""

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward, on which forward hooks never run."""


def units(module: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """Return the modules that a policy selects, by name, inner modules first; never ``module`` itself.

    Args:
        module: the root module.
        policy: None: the blocks of each outermost list or sequence that repeats a class. A number: each module with at
            least this many parameters, not counting those of selected modules inside it. Classes, or their names: all
            modules of these classes. A callable: it takes a module, or ``module``, ``recurse`` and
            ``nonwrapped_numel`` as torch's wrapping policies do, and returns whether to select the module.

    Raises:
        StrategyError: the module has no part of a given class.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 9))
        >>> list(units(net, None)), list(units(net, 30)), list(units(net, "Embedding"))
        (['1.1', '1.0'], ['2', '1', '0'], ['0'])
    """
    if not (
        policy is None or callable(policy) or isinstance(policy, (int, str, Iterable))
    ) or (isinstance(policy, int) and policy < 0):
        raise StrategyError(
            "blocks are chosen by class names, classes, a number of parameters, or a callable",
            found=repr(policy),
        )
    if policy is None:
        return dict(_inner_first(module, _repeated(module)))
    if isinstance(policy, int):
        return _by_size(module, policy)
    if callable(policy) and not isinstance(policy, type):
        wraps: Callable[..., bool] = policy
        picks = wraps if takes(wraps, 1) else partial(_as_torch_asks, wraps)
        return dict(
            _inner_first(
                module, {id(m) for m in module.modules() if _is_part(m) and picks(m)}
            )
        )
    return _by_class(
        module, [policy] if isinstance(policy, (str, type)) else list(policy)
    )


def _as_torch_asks(policy: Callable[..., bool], part: nn.Module) -> bool:
    return policy(module=part, recurse=False, nonwrapped_numel=0)


def _is_part(module: nn.Module) -> bool:
    return (
        not isinstance(module, _CONTAINERS)
        and next(module.parameters(), None) is not None
    )


def _inner_first(
    module: nn.Module, picked: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    for name, part in reversed(
        list(module.named_modules())
    ):  # in reversed order, each comes before its parent
        if part is not module and id(part) in picked:
            yield name, part


def _repeated(module: nn.Module) -> set[int]:
    """The outermost repeated blocks; blocks inside another block are not included."""
    found: set[int] = set()
    parts = [part for part in module.children() if _is_part(part)]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counts = Counter(type(part) for part in parts)
        found.update(id(part) for part in parts if counts[type(part)] > 1)
    for child in module.children():
        if id(child) not in found:
            found |= _repeated(child)
    return found


def _by_size(module: nn.Module, least: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, part in reversed(list(module.named_modules())):
        rest = [p for p in part.parameters() if id(p) not in taken]
        if (
            part is not module
            and _is_part(part)
            and sum(p.numel() for p in rest) >= least
        ):
            found[name] = part
            taken.update(map(id, rest))
    return found


def _by_class(module: nn.Module, wanted: list[Any]) -> dict[str, nn.Module]:
    parts = [part for part in module.modules() if _is_part(part)]
    picked: set[int] = set()
    for one in wanted:
        mine = {
            id(p)
            for p in parts
            if (type(p).__name__ == one if isinstance(one, str) else isinstance(p, one))
        }
        if not mine:
            name, names = (
                one if isinstance(one, str) else one.__name__,
                sorted({type(p).__name__ for p in parts}),
            )
            raise StrategyError(
                f"the module has no submodule of the class {name}",
                found=", ".join(names),
                fix=did_you_mean(name, names),
            )
        picked |= mine
    return dict(_inner_first(module, picked))


def outer_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have a forward; parameters outside of them are not sharded."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            found += outer_modules(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    owners: dict[int, nn.Module] = {}
    for root in found:
        for parameter in root.parameters():
            other = owners.setdefault(id(parameter), root)
            if other is not root:
                raise StrategyError(
                    "two separately sharded parts of the module share a parameter, which manual optimization"
                    " does not support",
                    found=f"{type(other).__name__} and {type(root).__name__}",
                    fix="use automatic optimization, or DDPStrategy",
                )
    return found


@final
class ActivationCheckpointing(Transform):
    """Applies torch's activation checkpointing to some modules: less memory, more computation (Chen et al., 2016).

    No module is wrapped, so parameters keep their names. Random layers draw the same numbers in the recomputation.

    Args:
        policy: selects the modules, see `units`.
        offload: keep the inputs of these modules, from which they are recomputed, in host memory until backward.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> ActivationCheckpointing().apply(net)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> list(net.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, policy: Policy = None, offload: bool = False) -> None:
        self.policy, self.offload = policy, offload

    def apply(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Change the modules in place; a second call changes nothing.

        The cache of keys and values of a transformers model is switched off, with a warning: a block that is computed
        again would fill it again, and torch raises an error that tensors differ.
        """
        blocks = units(module, self.policy).values()
        if blocks:
            _switch_cache_off(module)
        for part in blocks:
            if not isinstance(part.__dict__.get("forward"), _Recomputed):
                # Set on the instance, so that other instances of the class are not affected.
                part.__dict__["forward"] = _Recomputed(
                    part.forward, "forward" in part.__dict__, self.offload
                )

    def undo(self, module: nn.Module) -> None:
        """Remove activation checkpointing from all parts of the module."""
        for part in module.modules():
            recomputed = part.__dict__.get("forward")
            if isinstance(recomputed, _Recomputed):
                del part.__dict__["forward"]
                if recomputed.own:
                    part.__dict__["forward"] = recomputed.forward


def _switch_cache_off(module: nn.Module) -> None:
    # One per model and, for encoders and decoders, one per part.
    found: list[Any] = [
        part.config for part in module.modules() if hasattr(part, "config")
    ]
    caching = [
        config for config in found if getattr(config, "use_cache", False) is True
    ]
    for config in caching:
        config.use_cache = False
    if caching:
        warnings.warn(
            "activation checkpointing switches the cache of keys and values off: "
            f"{type(caching[0]).__name__}.use_cache is False from here on; set it to True again to generate",
            stacklevel=2,
        )


@final
class _Recomputed:
    """A forward that is recomputed in backward, so that its activations are not stored."""

    def __init__(self, forward: Callable[..., Any], own: bool, offload: bool) -> None:
        self.forward, self.own, self.offload = forward, own, offload

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.offload:
            return checkpoint(self.forward, *arguments, use_reentrant=False, **options)
        with save_on_cpu(
            pin_memory=torch.accelerator.is_available()
        ):  # what the checkpoint saves: its inputs
            return checkpoint(self.forward, *arguments, use_reentrant=False, **options)


@final
class Compile(Transform):
    """``torch.compile`` of each block instead of the whole step (regional compilation).

    Blocks of one class share their code, so the compiler runs once for all of them, and n blocks compile about n times
    faster. Parameters keep their names. Apply it before data sharding, which then gathers a block's parameters outside
    of the block's graph.
    Source: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.

    Args:
        policy: selects the modules, see `units`.
        options: options of ``torch.compile``.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> Compile(options={"backend": "eager"}).apply(net)
        >>> with torch.no_grad():
        ...     net(torch.ones(1, 2)).shape, list(net.state_dict())
        (torch.Size([1, 2]), ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    def __init__(
        self, policy: Policy = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.policy, self.options = policy, dict(options or {})

    def apply(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Change the modules in place; a second call changes nothing.

        Raises:
            StrategyError: the policy selects no module.
        """
        parts = units(module, self.policy).values()
        if not parts:
            raise StrategyError(
                "the module has no blocks to compile separately",
                found=f"no list or sequence in {type(module).__name__} repeats a class that has parameters",
                fix="compile the whole module: compile=True, or TorchDynamoPlugin(use_regional_compilation=False)",
            )
        for part in parts:
            if part._compiled_call_impl is None:
                part._compiled_call_impl = partial(
                    torch.compile(_block, **self.options), part
                )


def _block(part: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Call a module in a function of this file: ``part.compile()`` skips code in torch's own files.

    The module is an argument: torch 2.9 would compile a function that holds it once for each module.
    """
    call: Callable[..., Any] = part._call_impl
    return call(*arguments, **options)
