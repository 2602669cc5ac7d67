"""Transforms of single blocks: activation checkpointing, regional compilation, and policies that select modules."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from trainer_kit.core.arguments import read_again
from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.signatures import takes
from trainer_kit.core.torch_private import (
    call_block,
    get_compiled_call,
    has_compiled_call,
    remove_compiled_call,
    set_compiled_call,
)
from trainer_kit.core.types import Function
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["ActivationCheckpointing", "Compile", "Policy", "outer_modules", "units"]


Policy = int | str | type | Collection[str | type] | Callable[..., bool] | None
"""A number of parameters, classes or their names, a callable, or None; see `units`."""

_ModelConfig: TypeAlias = Any
"""A configuration of transformers, which need not be installed, or an attribute ``config`` of another library."""
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
    is_policy = (
        policy is None or callable(policy) or isinstance(policy, (int, str, Iterable))
    )
    if not is_policy or (isinstance(policy, int) and policy < 0):
        raise StrategyError(
            "blocks are chosen by class names, classes, a number of parameters, or a callable",
            found=repr(policy),
        )
    if policy is None:
        return _named_inner_first(module, _find_repeated(module))
    if isinstance(policy, int):
        return _select_by_size(module, policy)
    # A class is callable, too.
    if isinstance(policy, (str, type)):
        return _select_by_class(module, [policy])
    if callable(policy):
        return _select_by_callable(module, policy)
    return _select_by_class(module, list(policy))


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module has a forward and parameters."""
    return (
        not isinstance(module, _CONTAINERS)
        and next(module.parameters(), None) is not None
    )


def _named_inner_first(module: nn.Module, selected: set[int]) -> dict[str, nn.Module]:
    """The selected submodules by name."""
    # In reversed order, each comes before its parent.
    return {
        name: submodule
        for name, submodule in reversed(list(module.named_modules()))
        if submodule is not module and id(submodule) in selected
    }


def _find_repeated(module: nn.Module) -> set[int]:
    """The outermost repeated blocks; blocks inside another block are not included."""
    blocks: set[int] = set()
    # A class that comes once in a list, such as a final norm, is no block.
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        candidates = [child for child in module.children() if _is_candidate(child)]
        class_counts = Counter(map(type, candidates))
        for child in candidates:
            if class_counts[type(child)] > 1:
                blocks.add(id(child))
    for child in module.children():
        if id(child) not in blocks:
            blocks |= _find_repeated(child)
    return blocks


def _select_by_size(module: nn.Module, min_size: int) -> dict[str, nn.Module]:
    selected: dict[str, nn.Module] = {}
    # The parameters of selected modules: those around them count what is left.
    counted: set[int] = set()
    # From the inside out: named_modules yields a module before those inside of it.
    for name, submodule in reversed(list(module.named_modules())):
        if submodule is module or not _is_candidate(submodule):
            continue
        remaining = [p for p in submodule.parameters() if id(p) not in counted]
        if sum(p.numel() for p in remaining) >= min_size:
            selected[name] = submodule
            counted.update(map(id, remaining))
    return selected


def _select_by_callable(
    module: nn.Module, policy: Callable[..., bool]
) -> dict[str, nn.Module]:
    # A wrapping policy of torch has three parameters.
    if not takes(policy, 1):
        policy = partial(_call_wrap_policy, policy)
    candidates = [
        submodule for submodule in module.modules() if _is_candidate(submodule)
    ]
    selected = {id(submodule) for submodule in candidates if policy(submodule)}
    return _named_inner_first(module, selected)


def _call_wrap_policy(policy: Callable[..., bool], submodule: nn.Module) -> bool:
    return policy(module=submodule, recurse=False, nonwrapped_numel=0)


def _select_by_class(
    module: nn.Module, classes: Sequence[str | type]
) -> dict[str, nn.Module]:
    candidates = [
        submodule for submodule in module.modules() if _is_candidate(submodule)
    ]
    selected: set[int] = set()
    for wanted in classes:
        matching = {
            id(submodule) for submodule in candidates if _has_class(submodule, wanted)
        }
        if not matching:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            names = sorted({type(submodule).__name__ for submodule in candidates})
            raise StrategyError(
                f"the module has no submodule of the class {name}",
                found=", ".join(names),
                fix=did_you_mean(name, names),
            )
        selected |= matching
    return _named_inner_first(module, selected)


def _has_class(module: nn.Module, wanted: str | type) -> bool:
    if isinstance(wanted, str):
        return type(module).__name__ == wanted
    return isinstance(module, wanted)


def outer_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have a forward; parameters outside of them are not sharded."""
    roots: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            roots += outer_modules(child)
        elif next(child.parameters(), None) is not None:
            roots.append(child)
    # Each root gathers and frees its own parameters, at different times.
    owners: dict[int, nn.Module] = {}
    for root in roots:
        for parameter in root.parameters():
            owner = owners.setdefault(id(parameter), root)
            if owner is not root:
                raise StrategyError(
                    "two separately sharded parts of the module share a parameter, which manual optimization"
                    " does not support",
                    found=f"{type(owner).__name__} and {type(root).__name__}",
                    fix="use automatic optimization, or DDPStrategy",
                )
    return roots


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
        self.policy = read_again(policy)
        self.offload = offload

    def apply(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Change the modules in place; a second call changes nothing.

        The cache of keys and values of a transformers model is switched off, with a warning: a block that is computed
        again would fill it again, and torch raises an error that tensors differ.
        """
        blocks = units(module, self.policy).values()
        configs = _disable_caches(module) if blocks else []
        for block in blocks:
            attributes = block.__dict__
            if isinstance(attributes.get("forward"), _RecomputedForward):
                continue
            # Set on the instance, so that other instances of the class are not affected.
            was_on_instance = "forward" in attributes
            attributes["forward"] = _RecomputedForward(
                block.forward, was_on_instance, self.offload, configs
            )

    def undo(self, module: nn.Module) -> None:
        """Remove activation checkpointing from all parts of the module, and switch their model's cache on again."""
        for submodule in module.modules():
            recomputed = submodule.__dict__.get("forward")
            if not isinstance(recomputed, _RecomputedForward):
                continue
            del submodule.__dict__["forward"]
            if recomputed.was_on_instance:
                submodule.__dict__["forward"] = recomputed.forward
            for config in recomputed.configs:
                config.use_cache = True


def _disable_caches(module: nn.Module) -> list[_ModelConfig]:
    """Switch the cache of keys and values off in all configurations of transformers models, with a warning.

    Returns:
        The configurations that have changed.
    """
    # One configuration per model and, for encoders and decoders, one for each of the two.
    configs: list[_ModelConfig] = [
        m.config for m in module.modules() if hasattr(m, "config")
    ]
    with_cache = [
        config for config in configs if getattr(config, "use_cache", False) is True
    ]
    for config in with_cache:
        config.use_cache = False
    if with_cache:
        warnings.warn(
            "activation checkpointing disables the cache of keys and values: "
            f"{type(with_cache[0]).__name__}.use_cache is False as long as activations are recomputed (in a fit, or for"
            " good with an Accelerator); pass use_cache=True to generate meanwhile",
            stacklevel=2,
        )
    return with_cache


@final
class _RecomputedForward:
    """A forward that is recomputed in backward, so that its activations are not stored."""

    def __init__(
        self,
        forward: Function,
        was_on_instance: bool,
        offload: bool,
        configs: Sequence[_ModelConfig],
    ) -> None:
        self.forward = forward
        self.was_on_instance = was_on_instance
        self.offload = offload
        self.configs = configs
        """The configurations of transformers models whose cache is off meanwhile."""

    @property
    def __wrapped__(self) -> Function:
        """Gives this object the signature of the module's forward, which libraries inspect."""
        return self.forward

    def __call__(self, *arguments: object, **options: Any) -> object:
        if not self.offload:
            return checkpoint(self.forward, *arguments, use_reentrant=False, **options)
        # The checkpoint saves only its inputs.
        with save_on_cpu(pin_memory=torch.accelerator.is_available()):
            return checkpoint(self.forward, *arguments, use_reentrant=False, **options)


@final
class _TemporaryCall(partial[object]):
    """A compiled call of a block that `Compile.undo` removes; a user's own, of ``nn.Module.compile``, is none."""


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
        lasting: `undo` leaves the blocks compiled.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> Compile(options={"backend": "eager"}).apply(net)
        >>> with torch.no_grad():
        ...     net(torch.ones(1, 2)).shape, list(net.state_dict())
        (torch.Size([1, 2]), ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    def __init__(
        self,
        policy: Policy = None,
        options: Mapping[str, Any] | None = None,
        lasting: bool = False,
    ) -> None:
        self.policy = read_again(policy)
        self.options = dict(options or {})
        self.lasting = lasting

    def apply(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Change the modules in place; a second call changes nothing.

        Raises:
            StrategyError: the policy selects no module.
        """
        blocks = units(module, self.policy).values()
        if not blocks:
            raise StrategyError(
                "the module has no blocks to compile separately",
                found=f"no list or sequence in {type(module).__name__} repeats a class that has parameters",
                fix="compile the whole module: compile=True, or TorchDynamoPlugin(use_regional_compilation=False)",
            )
        kind: type[partial[object]] = _TemporaryCall
        if self.lasting:
            kind = partial
        for block in blocks:
            if not has_compiled_call(block):
                compiled = torch.compile(call_block, **self.options)
                set_compiled_call(block, kind(compiled, block))

    def undo(self, module: nn.Module) -> None:
        """Run the blocks' own code again: another run may ask for no compilation, or for other options."""
        for submodule in module.modules():
            if isinstance(get_compiled_call(submodule), _TemporaryCall):
                remove_compiled_call(submodule)
