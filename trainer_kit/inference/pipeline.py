"""Pipeline-parallel inference: each process holds some stages, through which the micro-batches of a batch pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.configuration_sources import choose, is_true
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.torch_private import (
    direct_parameters,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
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
    """Split a model's blocks over all processes; every process calls this function, and then the model.

    A call of the model uses the inputs of the main process, and computes no gradients; shapes may differ between calls.
    The last process gets the output, the others None. The weights are those of the main process; on other processes the
    model may be on the meta device.

    Args:
        model: changed in place: each process keeps its blocks, on its device.
        split_points: names of the blocks at which the second and later processes begin; ``"auto"`` divides the
            largest list of blocks by number of parameters.
        no_split_module_classes: names of classes whose modules stay on one process, as whole blocks always do.
        example_args: arguments for a first call, which shows whether the model can be split.
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
    environment = Environment.detect()
    device_name = "auto"
    if is_true(choose("use_cpu", None, False).value):
        device_name = "cpu"
    device = pick_device(device_name, environment.local_rank)
    # With fewer micro-batches than stages, some stages would always wait.
    chunks = environment.world_size
    if num_chunks is not None:
        chunks = num_chunks
    if chunks < 1:
        raise StrategyError(
            "num_chunks must be at least 1", found=f"num_chunks={num_chunks}"
        )
    if environment.world_size == 1:
        return model.to(device)
    # Before the layout is planned: it refuses parameters that stages share, since training would let their copies
    # drift apart. Inference never updates them.
    _untie_parameters(model)
    plan = PipelinePlan(model="", split_points=split_points)
    blocks = lay_out(model, plan, environment.world_size).blocks
    container = blocks[0][0].rpartition(".")[0]
    _refuse_inside(model, container, no_split_module_classes or ())
    world = join_world(device)
    pipeline = Pipeline(world, world, device, "GPipe")
    # Raises an error if another pipeline has split the model.
    pipeline.has(model)
    # The names are recorded while the model is whole: they are the same on every process. The weights are sent after
    # the split, so that a process receives only those of its blocks.
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
    """The forward of a split model."""

    def __init__(self, pipeline: Pipeline, chunks: int, gathers: bool) -> None:
        self.pipeline = pipeline
        self.chunks = chunks
        self.gathers = gathers

    def __call__(self, *args: object, **kwargs: object) -> object:
        # The main process has the inputs; the others need them for the sizes, and for arguments that no stage passes on
        # (an attention mask, for example, goes to every block).
        inputs = self.pipeline.share((args, kwargs), last=False)
        sizes = _chunk_sizes(inputs, self.chunks)
        outputs = self.pipeline.infer(_split_inputs(inputs, sizes))
        output = None
        if self.pipeline.last:
            output = _merge_outputs(outputs, sizes)
        if self.gathers:
            output = self.pipeline.share(output)
        return output


def _chunk_sizes(inputs: object, chunks: int) -> list[int]:
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
    # A batch with fewer samples than chunks has fewer micro-batches: many models fail for an empty one.
    indices = torch.arange(len(tensors[0]))
    sizes = [len(chunk) for chunk in indices.tensor_split(chunks) if len(chunk)]
    return sizes or [0]


def _split_inputs(
    inputs: tuple[tuple[object, ...], dict[str, object]], sizes: Sequence[int]
) -> list[Any]:
    """Return the inputs of each micro-batch; tensors that are not as long as the batch go to all of them."""
    if len(sizes) == 1:
        return [inputs]
    batch_size = sum(sizes)
    chunks = []
    start = 0
    for size in sizes:
        # The defaults fix the values of this turn; the loop changes the variables.
        def narrow(tensor: Tensor, start: int = start, size: int = size) -> Tensor:
            if tensor.ndim and len(tensor) == batch_size:
                return tensor.narrow(0, start, size)
            return tensor

        chunks.append(map_tensors(inputs, narrow))
        start += size
    return chunks


def _merge_outputs(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Concatenate what has one entry per sample, keep what all chunks agree on, and refuse everything else.

    A loss, for example, is a mean over its chunk: neither its first value nor the list of them is the batch's.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    merged = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        has_samples = [
            isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
        if all(has_samples):
            merged.append(torch.cat(leaves))
        # For example tables and flags.
        elif all(_are_equal(leaf, leaves[0]) for leaf in leaves):
            merged.append(leaves[0])
        else:
            raise StrategyError(
                "the outputs of the chunks cannot be concatenated",
                found=f"{[_shape_or_type(leaf) for leaf in leaves]} for parts of {list(sizes)} samples",
                fix="return outputs with one entry per sample (no loss, use_cache=False), or pass num_chunks=1",
            )
    return tree_unflatten(merged, flat[0][1])


def _shape_or_type(leaf: object) -> tuple[int, ...] | str:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return type(leaf).__name__


def _are_equal(leaf: object, other: object) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        # Sync point, which outputs with one entry per sample do not reach.
        return leaf.shape == other.shape and torch.equal(leaf, other)
    return isinstance(leaf, _PLAIN) and leaf == other


def _untie_parameters(model: nn.Module) -> None:
    """Give each layer its own object for a shared parameter: layers may be on different processes."""
    visited: set[int] = set()
    for module in model.modules():
        for name, parameter in direct_parameters(module).items():
            if parameter is None:
                continue
            if id(parameter) in visited:
                copy = nn.Parameter(parameter.detach(), parameter.requires_grad)
                direct_parameters(module)[name] = copy
            visited.add(id(parameter))


def _refuse_inside(model: nn.Module, container: str, classes: Sequence[str]) -> None:
    """Refuse to split the blocks of a module that must stay whole."""
    for name, module in model.named_modules():
        contains_blocks = not name or f"{container}.".startswith(f"{name}.")
        if contains_blocks and type(module).__name__ in classes:
            raise StrategyError(
                f"{type(module).__name__} must stay on one process, but contains the blocks to split",
                found=f"{container or type(model).__name__}, no_split_module_classes={list(classes)}",
                fix="name the class of the blocks, or give split_points",
            )
