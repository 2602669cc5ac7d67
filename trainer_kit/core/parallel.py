"""How a module may be split over processes. The module says how; the strategy says over how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

__all__ = ["ContextPlan", "ParallelPlan", "PipelinePlan", "is_divided"]


def is_divided(module: nn.Module) -> bool:
    """Whether a rank holds parts of parameters only, as ``DTensor`` or under DeepSpeed: a forward needs every rank.

    Example:
        >>> is_divided(nn.Linear(1, 1))
        False
    """
    return any(hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id") for parameter in module.parameters())


@final
@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """Which dimensions of a batch are the sequence: each context rank gets its part of them.

    Parts are contiguous: rank r of n has positions ``r * length / n`` and on. Targets that are the inputs moved by one
    are moved in the data, not in the step: a part does not know the first token of the next.

    Args:
        dims: the dimension of the sequence, for every tensor of a batch that has it; or by key (for a dict) or index
            (for a tuple or list), and then all others are whole on every rank.
        positions: a key of a dict batch under which the module expects the positions, int64, shape (1, part's length);
            filled in where the batch has none. Modules that count positions themselves take the part's first one from
            the mesh that ``configure_parallel`` is given.

    Example:
        >>> ContextPlan(dims={"input_ids": 1, "labels": 1}, positions="position_ids").positions
        'position_ids'
    """

    dims: int | Mapping[Any, int] = 1
    positions: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What ``TrainModule.configure_parallel`` returns.

    Args:
        tensor: for tensor parallel: how layers are split, by the name that each has in the module (``*`` matches one
            part of a name, as in ``"net.blocks.*.q"``). Values are words, or styles of
            ``torch.distributed.tensor.parallel``; the words are those of Hugging Face's plans: ``"colwise"``,
            ``"rowwise"``, ``"colwise_rep"`` (its output is gathered), ``"rowwise_rep"`` (its input is whole, as an
            embedding's is), ``"sequence_parallel"`` (a norm), ``"replicated_with_grad_allreduce"`` (used on a part of
            the activations). Or the name of a preset: ``"llama"``, ``"gpt"``, ``"mlp"``. None: a Hugging Face model's
            own plan.
        sequence_parallel: split what is between the split layers along the sequence; for presets.
        loss_parallel: leave logits split over the vocabulary, also in the cross entropy; for presets.
        context: for context parallel: where the sequence is in a batch.
        pipeline: for pipeline parallel: how the model becomes stages.

    Example:
        >>> ParallelPlan(tensor={"net.0": "colwise", "net.2": "rowwise"}).sequence_parallel
        False
    """

    tensor: Mapping[str, Any] | str | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False
    context: ContextPlan | None = None
    pipeline: PipelinePlan | None = None


@final
@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How a model becomes the stages of a pipeline. Its ``forward`` and the module's steps stay as they are.

    The model runs blocks one after the other, each once (a ``ModuleList`` or ``Sequential``); what is around them
    belongs to the first stage (embeddings) or to the last (norm, head).

    Args:
        model: the submodule that becomes stages; "" for the module itself, None for the only one with parameters.
            Steps call it as a whole, once.
        split_points: names in the model of the blocks at which the second and later stages begin, as in
            ``["layers.4"]``; ``"auto"`` divides the largest list of blocks by number of parameters.
        first: names of modules defined after the blocks but executed before them.
        last: names of modules defined before the blocks but executed after them.
        everywhere: names of modules with nothing to train that each stage needs a copy of (tables of rotations).

    Example:
        >>> PipelinePlan(model="net", split_points=["layers.2", "layers.4"]).first
        ()
    """

    model: str | None = None
    split_points: Sequence[str] | str = "auto"
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    everywhere: Sequence[str] = ()
