"""Plans of how a module may be split over processes. The strategy decides over how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

__all__ = ["ContextPlan", "ParallelPlan", "PipelinePlan", "is_divided"]


def is_divided(module: nn.Module) -> bool:
    """Whether parameters are sharded (``DTensor`` or DeepSpeed), so that a forward needs every rank.

    Example:
        >>> is_divided(nn.Linear(1, 1))
        False
    """
    # By attributes, since neither DTensor nor DeepSpeed is imported for the question.
    return any(
        hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id")
        for parameter in module.parameters()
    )


@final
@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """The sequence dimensions of a batch, along which each context rank gets its part.

    Parts are contiguous: the part of rank r of n starts at position ``r * length / n``. Shift next-token targets in the
    data, not in the step: a part does not contain the first token of the next part.

    Args:
        dims: the sequence dimension of every tensor that has it; or one by key (for a dict) or index (for a tuple or
            list), and then every rank gets all other tensors whole.
        positions: the key of a dict batch under which the module expects the positions, int64, shape (1, part's
            length); filled in if the batch has none. A module that computes positions itself gets the first one of
            its part from the mesh passed to ``configure_parallel``.

    Example:
        >>> ContextPlan(dims={"input_ids": 1, "labels": 1}, positions="position_ids").positions
        'position_ids'
    """

    dims: int | Mapping[Any, int] = 1
    positions: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The result of ``TrainModule.configure_parallel``: how the module is split.

    Args:
        tensor: for tensor parallel: how each layer is split, by its name in the module (``*`` matches one
            component of a name, as in ``"net.blocks.*.q"``). Values are words, or styles of
            ``torch.distributed.tensor.parallel``; the words are those of Hugging Face's plans: ``"colwise"``,
            ``"rowwise"``, ``"colwise_rep"`` (its output is gathered), ``"rowwise_rep"`` (its input is replicated, as an
            embedding's is), ``"sequence_parallel"`` (a norm), ``"replicated_with_grad_allreduce"`` (applied to a part
            of the activations). Or the name of a preset: ``"llama"``, ``"gpt"``, ``"mlp"``. None: a Hugging Face
            model's own plan.
        sequence_parallel: shard activations between the split layers along the sequence; for presets.
        loss_parallel: keep logits sharded over the vocabulary, also in the cross entropy; for presets.
        context: for context parallel: the sequence dimensions of a batch.
        pipeline: for pipeline parallel: how the model is split into stages.

    Example:
        >>> ParallelPlan(tensor={"net.0": "colwise", "net.2": "rowwise"}).sequence_parallel
        False
    """

    tensor: Mapping[str, object] | str | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False
    context: ContextPlan | None = None
    pipeline: PipelinePlan | None = None


@final
@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How a model is split into pipeline stages. Its ``forward`` and the module's steps do not change.

    The model runs its blocks in sequence, each once (a ``ModuleList`` or ``Sequential``); the modules around them
    belong to the first stage (embeddings) or to the last (norm, head).

    Args:
        model: the submodule to split; "" for the module itself, None for the only one with parameters.
            A step calls it as a whole, once.
        split_points: names in the model of the blocks at which the second and later stages begin, as in
            ``["layers.4"]``; ``"auto"`` divides the largest list of blocks by number of parameters.
        first: names of modules defined after the blocks but executed before them.
        last: names of modules defined before the blocks but executed after them.
        everywhere: names of modules without trainable parameters that every stage needs (such as rotary embeddings).

    Example:
        >>> PipelinePlan(model="net", split_points=["layers.2", "layers.4"]).first
        ()
    """

    model: str | None = None
    split_points: Sequence[str] | str = "auto"
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    everywhere: Sequence[str] = ()
