"""Pipeline-parallel inference: each process holds some stages, through which the micro-batches of a batch pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trainer_kit.core.configuration_sources import choose, is_true
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.tensors import map_tensors
from trainer_kit.precision.aliases import make_precision
from trainer_kit.strategies.process_group import join_world
from trainer_kit.strategies.rank_sync import InitialWeights
from trainer_kit.strategies.transforms.pipeline import Pipeline
from trainer_kit.strategies.transforms.pipeline_stages import lay_out

__all__ = ["prepare_pippy"]

_PLAIN: Final = (int, float, str, bool, type(None))


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Divide a model's blocks among all processes; every process calls this function, and then the model.

    A call of the model uses the inputs of the main process, and computes no gradients; shapes may differ between calls.
    The last process gets the output, the others None. The weights are those of the main process; on other processes the
    model may be on the meta device.

    Args:
        model: changed in place: each process keeps its blocks, on its device.
        split_points: names of the blocks at which the second and later processes begin; ``"auto"`` divides the
            largest list of blocks by number of parameters.
        no_split_module_classes: names of classes whose modules stay on one process, as whole blocks always do.
        example_args: arguments for a first call, which shows whether the model can be divided.
        example_kwargs: keyword arguments for this call.
        num_chunks: the number of micro-batches of a batch; None: the number of processes.
        gather_output: every process gets the output.

    Returns:
        The model.

    Raises:
        StrategyError: the model cannot be split this way.

    Example:
        >>> net = prepare_pippy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), example_args=(torch.ones(3, 4),))
        >>> net(torch.ones(3, 4)).shape  # one process has it all
        torch.Size([3, 2])
    """
    here = Environment.detect()
    on_cpu = is_true(choose("use_cpu", None, False).value)
    device = pick_device("cpu" if on_cpu else "auto", here.local_rank)
    chunks = here.world_size if num_chunks is None else num_chunks
    if chunks < 1:
        raise StrategyError(
            "num_chunks must be at least 1", found=f"num_chunks={num_chunks}"
        )
    if here.world_size == 1:
        return model.to(device)
    _untie(model)
    plan = PipelinePlan(model="", split_points=split_points)
    blocks = lay_out(model, plan, here.world_size).blocks
    _refuse_inside(
        model, blocks[0][0].rpartition(".")[0], no_split_module_classes or ()
    )
    world = join_world(device)
    pipeline = Pipeline(world, world, device, "GPipe")
    pipeline.has(model)  # raises an error if another pipeline has split the model
    weights = InitialWeights(model, world)
    pipeline.divide(model, plan, make_precision("32-true", device.type))
    weights.distribute(model, device, device)
    pipeline.find_parameters(model)
    model.__dict__["hf_split_points"] = [names[0] for names in blocks[1:]]
    model.__dict__["forward"] = _Chunked(pipeline, chunks, gather_output)
    if example_args or example_kwargs:
        model(*example_args, **dict(example_kwargs or {}))
    return model


@final
class _Chunked:
    """The forward of a divided model."""

    def __init__(self, pipeline: Pipeline, chunks: int, gathers: bool) -> None:
        self.pipeline = pipeline
        self.chunks = chunks
        self.gathers = gathers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.pipeline.share((args, kwargs), last=False)
        sizes = _sizes((args, kwargs), self.chunks)
        outputs = self.pipeline.infer(_divided((args, kwargs), sizes))
        output = _together(outputs, sizes) if self.pipeline.last else None
        return self.pipeline.share(output) if self.gathers else output


def _sizes(inputs: Any, chunks: int) -> list[int]:
    """Return the sizes of the micro-batches, none of them empty; the batch is as long as its first tensor."""
    tensors = [
        leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if not tensors:
        if chunks > 1:
            raise StrategyError(
                "the inputs contain no batch to split",
                found="no tensor among the inputs",
                fix="pass num_chunks=1",
            )
        return [0]
    return [
        len(part)
        for part in torch.arange(len(tensors[0])).tensor_split(chunks)
        if len(part)
    ] or [0]


def _divided(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], sizes: Sequence[int]
) -> list[Any]:
    """Return the inputs of each micro-batch; tensors that are not as long as the batch go to all of them."""
    if len(sizes) == 1:
        return [inputs]
    whole, made, start = sum(sizes), [], 0
    for size in sizes:

        def part(tensor: Tensor, start: int = start, size: int = size) -> Tensor:
            return (
                tensor.narrow(0, start, size)
                if tensor.ndim and len(tensor) == whole
                else tensor
            )

        made.append(map_tensors(inputs, part))
        start += size
    return made


def _together(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    made = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(
            isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n
            for leaf, n in zip(leaves, sizes, strict=True)
        ):
            made.append(torch.cat(leaves))
        elif all(
            _same(leaf, leaves[0]) for leaf in leaves
        ):  # for example tables and flags
            made.append(leaves[0])
        else:
            shapes = [
                tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                for leaf in leaves
            ]
            raise StrategyError(
                "the outputs of the chunks cannot be concatenated",
                found=f"{shapes} for parts of {list(sizes)} samples",
                fix="return outputs with one entry per sample (no loss, use_cache=False), or pass num_chunks=1",
            )
    return tree_unflatten(made, flat[0][1])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(
            one, other
        )  # sync point: not for outputs of samples
    return isinstance(one, _PLAIN) and one == other


def _untie(model: nn.Module) -> None:
    """Give each layer its own object for a shared parameter: layers may be on different processes."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(
                    parameter.detach(), parameter.requires_grad
                )
            elif parameter is not None:
                seen.add(id(parameter))


def _refuse_inside(model: nn.Module, container: str, classes: Sequence[str]) -> None:
    """Refuse to divide the blocks of a module that must stay whole."""
    for name, part in model.named_modules():
        if type(part).__name__ in classes and (
            f"{container}.".startswith(f"{name}.") or not name
        ):
            raise StrategyError(
                f"{type(part).__name__} must stay on one process, but contains the blocks to split",
                found=f"{container or type(model).__name__}, no_split_module_classes={list(classes)}",
                fix="name the class of the blocks, or give split_points",
            )
