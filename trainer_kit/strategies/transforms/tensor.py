"""Tensor parallelism: each rank of the axis holds some columns or rows of a weight, and computes with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.tensors import local, map_leaves, map_tensors
from trainer_kit.strategies.transforms.pipeline_stages import StandIn, submodule_names
from trainer_kit.strategies.transforms.transform import Transform

__all__ = [
    "TensorParallel",
    "check_replicated_gradients",
    "complete_gradients",
    "find_plans",
    "find_replicated",
    "gather_outputs",
    "named_style",
    "preset",
    "return_copies",
]


_HEADS = ("num_attention_heads", "num_key_value_heads")


@final
class TensorParallel(Transform):
    """torch's ``parallelize_module`` by a plan (Shoeybi et al., 2019; sequences: Korthikanti et al., 2022).

    A module that is already split is not changed. Parameters that the plan does not name are replicated on every rank.
    Split parameters have no storage afterwards, so that no rank ever holds the shards of others:
    `trainer_kit.strategies.rank_sync.InitialWeights` provides the values. Parameters that several layers share remain
    shared.

    Args:
        plan: the plan of the module, or the user's.
        copies: make the module return copies instead of views: FSDP, which wraps it later, loses its hooks on views.
    """

    axis = "tp"

    def __init__(self, plan: ParallelPlan, copies: bool = False) -> None:
        self.plan = plan
        self.copies = copies

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Split the layers of the plan in place.

        Args:
            module: the root module.
            mesh: the tensor axis.

        Raises:
            StrategyError: the plan is missing, it has an unknown name or word, or the axis does not divide a size.
        """
        if (before := module.__dict__.get("_split_over", mesh.size())) != mesh.size():
            raise StrategyError(
                "the module is already split over a different number of ranks",
                found=f"tp={before} before, tp={mesh.size()} now",
                fix="create a new module, and load a checkpoint into it",
            )
        if (
            "_split_over" not in module.__dict__
        ):  # otherwise an earlier fit has split it
            self._split(module, mesh)
        if self.copies:
            return_copies(module)

    def _split(self, module: nn.Module, mesh: DeviceMesh) -> None:
        owners = _shared(module)
        styles = self.styles(module)
        _share(styles, owners)
        _check(module, styles, mesh.size())
        for name, style in styles.items():
            layer = module.get_submodule(name)
            _empty(layer)
            frozen = {key for key, p in layer.named_parameters() if not p.requires_grad}
            parallelize_module(layer, mesh, style, src_data_rank=None)
            for key, parameter in layer.named_parameters():
                parameter.requires_grad_(key not in frozen)
            if self.plan.sequence_parallel and isinstance(layer, nn.Embedding):
                layer.register_forward_pre_hook(partial(_check_sequence, mesh.size()))
        for places in owners:
            _tie(module, places)
        module.__dict__["_split_over"] = mesh.size()

    def bind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Complete the outputs of a step: a split layer returns before its collective has ended."""
        return gather_outputs(method)

    def bind_evaluation(
        self, step: Callable[..., Any], whole: bool
    ) -> Callable[..., Any]:
        """Run the step with loss parallelism if the plan uses it."""
        return loss_parallel()(step) if self.plan.loss_parallel else step

    def computing(self, first: bool) -> AbstractContextManager[Any]:
        """Return the context of loss parallelism if the plan uses it."""
        return loss_parallel() if self.plan.loss_parallel else nullcontext()

    def check_gradients(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse replicated parameters whose gradients differ over the axis."""
        check_replicated_gradients(module.named_parameters(), mesh)

    def styles(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """The style of each split layer, by name."""
        given = self.plan.tensor
        if given is None:
            given = find_plans(module)
            if not given:
                raise StrategyError(
                    f"{type(module).__name__} has no plan for tensor parallelism",
                    found="no configure_parallel, and no submodule with a plan",
                    fix="define configure_parallel(self, mesh): return ParallelPlan(tensor={'net.0': 'colwise', ...}), "
                    "or MeshStrategy(tp=..., plan=ParallelPlan(tensor='llama' | 'gpt' | 'mlp'))",
                )
        plan: Mapping[str, Any] = (
            preset(module, self.plan) if isinstance(given, str) else given
        )
        names = submodule_names(
            module
        )  # a plan may also name layers of other pipeline stages
        here = {
            name
            for name, part in module.named_modules()
            if not isinstance(part, StandIn)
        }
        found: dict[str, ParallelStyle] = {}
        for pattern, value in plan.items():
            style = named_style(pattern, value)
            expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            matching = [name for name in names if expression.fullmatch(name)]
            if not matching and self.plan.tensor is not None:
                raise StrategyError(
                    "the plan names a layer that the module does not have",
                    found=repr(pattern),
                    fix=did_you_mean(pattern, names),
                )
            found.update(
                {name: style for name in matching if style is not None and name in here}
            )
        return found


def _empty(layer: nn.Module) -> None:
    """Release the storage of parameters, except tensor subclasses of other libraries, which are split with values."""
    for key, parameter in layer._parameters.items():
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
            shape = torch.empty_like(parameter, device="meta")
            layer._parameters[key] = nn.Parameter(
                shape, requires_grad=parameter.requires_grad
            )


def _shared(module: nn.Module) -> list[list[tuple[str, str]]]:
    """Return, for each parameter that several layers share, its (layer, name) pairs."""
    places: dict[int, list[tuple[str, str]]] = {}
    for name, layer in module.named_modules():
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, key))
    return [found for found in places.values() if len(found) > 1]


def _share(
    styles: dict[str, ParallelStyle], owners: list[list[tuple[str, str]]]
) -> None:
    """Refuse a layer that shares its weight with a split layer but is not in the plan."""
    for places in owners:
        missing = [layer for layer, _ in places if layer not in styles]
        if missing and len(missing) < len(places):
            raise StrategyError(
                "the plan must name all layers that share a parameter, or none of them",
                found=f"{', '.join(f'{layer}.{key}' for layer, key in places)}; in the plan: "
                + ", ".join(layer for layer, _ in places if layer in styles),
                fix=f"add {missing[0]!r} to the plan ('embedding_rowwise' for an embedding, 'colwise_rep' for a head)",
            )


def _tie(module: nn.Module, places: list[tuple[str, str]]) -> None:
    layers = [(module.get_submodule(layer), key) for layer, key in places]
    first = layers[0][0]._parameters[layers[0][1]]
    for layer, key in layers[1:]:
        other = layer._parameters[key]
        if (
            isinstance(first, DTensor)
            and isinstance(other, DTensor)
            and first.placements != other.placements
        ):
            raise StrategyError(
                "layers that share a parameter split it differently",
                found=f"{places[0][0]}: {first.placements}, {places[1][0]}: {other.placements}",
                fix="use 'embedding_rowwise' and 'colwise_rep', which split an embedding and a head in the same way",
            )
        layer._parameters[key] = first


def _check(module: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Refuse layers that torch would split unevenly, or that would fail in the first forward."""
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            continue
        if isinstance(layer, nn.Linear):
            what = (
                "out_features" if isinstance(style, ColwiseParallel) else "in_features"
            )
        elif isinstance(layer, nn.Embedding):
            what = (
                "embedding_dim"
                if isinstance(style, ColwiseParallel)
                else "num_embeddings"
            )
        else:
            raise StrategyError(
                "only linear layers and embeddings can be split by columns or rows",
                found=f"{name} is a {type(layer).__name__}",
                fix=f"leave it out of the plan, or replace it by an nn.Linear; 'replicate' keeps {name} whole",
            )
        _divides(f"{name}.{what}", getattr(layer, what), size, "pad it to a multiple")
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        if any(layer.startswith(f"{name}." if name else "") for layer in styles):
            for what in _HEADS:
                if isinstance(getattr(config, what, None), int):
                    _divides(
                        f"{name}.config.{what}",
                        getattr(config, what),
                        size,
                        "another number of heads",
                    )


def _divides(what: str, value: int, size: int, fix: str) -> None:
    if value % size:
        fits = [n for n in range(2, size) if value % n == 0]
        raise StrategyError(
            f"{what} cannot be divided among {size} ranks",
            found=f"{what} = {value}, tp={size}",
            fix=f"use tp={fits[-1]}, or {fix}" if fits else f"use another tp, or {fix}",
        )


def _check_sequence(size: int, layer: nn.Module, given: tuple[Any, ...]) -> None:
    """Refuse batches whose sequences the axis does not divide: torch would gather their parts incorrectly."""
    if given and given[0].shape[1] % size:
        raise StrategyError(
            "sequence parallelism needs sequence lengths that are divisible by tp",
            found=f"length {given[0].shape[1]}, tp={size}",
            fix=f"pad sequences to a multiple of {size}, or use sequence_parallel=False",
        )


def find_replicated(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are replicated over an axis of their mesh: their gradients may be partial sums."""
    return [
        parameter
        for parameter in module.parameters()
        if isinstance(parameter, DTensor) and Replicate() in parameter.placements
    ]


def complete_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum partial gradients over the ranks: of replicated parameters that are applied to a part of the activations."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(
            placement.is_partial() for placement in gradient.placements
        ):
            assert isinstance(parameter, DTensor)
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def check_replicated_gradients(
    named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh
) -> None:
    """Refuse a first step in which ranks have different gradients for a replicated parameter.

    This happens if a parameter outside of the plan is applied to a part of the activations: each rank then has the
    gradient of its part only.

    Args:
        named: parameters by name, with their gradients; those that are split over the axis are ignored.
        mesh: the tensor axis.
    """
    axis = (mesh.mesh_dim_names or ("",))[0]
    whole = [
        (name, local(p.grad).detach())
        for name, p in named
        if p.grad is not None
        and not (
            isinstance(p, DTensor) and axis in (p.device_mesh.mesh_dim_names or ())
        )
    ]
    group, size = mesh.get_group(), mesh.size()
    if (
        not whole or dist.get_backend(group) == "fake"
    ):  # torch's fake ranks have no separate gradients
        return
    mine = torch.cat([gradient.reshape(-1).float() for _, gradient in whole])
    mean = mine.clone()
    dist.all_reduce(mean, group=group)
    mean /= size
    lengths = [gradient.numel() for _, gradient in whole]
    far = torch.stack(
        [
            (one - both).norm()
            / (both.norm() + one.norm()).clamp_min(torch.finfo(torch.float32).tiny)
            for one, both in zip(
                torch.split(mine, lengths), torch.split(mean, lengths), strict=True
            )
        ]
    )
    dist.all_reduce(far, dist.ReduceOp.MAX, group=group)
    different = [
        name for (name, _), off in zip(whole, far.tolist(), strict=True) if off > 0.05
    ]  # sync point: once
    if different:
        raise StrategyError(
            "the ranks of the tensor axis have different gradients for a replicated parameter",
            found=", ".join(different),
            fix=f"if it is applied to a part of the activations, add {different[0].rpartition('.')[0]!r} to the plan as"
            " 'sequence_parallel' or 'replicated_with_grad_allreduce'; else random layers differ between the ranks",
        )


def gather_outputs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step so that it gathers sharded losses and logits in its result, and waits for collectives under way."""

    def whole(output: Any) -> Tensor:
        # Return copies: FSDP warns about views, and only a copy waits for the collective, which C++ code would not.
        copied: Tensor = (
            output.full_tensor() if isinstance(output, DTensor) else output
        ).clone()
        return copied

    @functools.wraps(method)  # a compiled step stays recognizable
    def step(*arguments: Any) -> Any:
        return map_leaves(method(*arguments), whole, (DTensor, AsyncCollectiveTensor))

    return step


def return_copies(module: nn.Module) -> None:
    """Make a module return copies of views, which split layers return: FSDP loses its hooks on views."""

    def copy(called: nn.Module, arguments: Any, output: Any) -> Any:
        return map_tensors(output, lambda t: t.clone() if t._is_view() else t)

    module.register_forward_hook(copy)


_WHOLE: Final = Replicate()


@final
class _SummedGradient(ParallelStyle):
    """For replicated parameters that are applied to a part of the activations: sums their gradients over the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(
                parameter.data, device_mesh, [_WHOLE], run_check=False
            )
            module.register_parameter(
                name, nn.Parameter(whole, requires_grad=parameter.requires_grad)
            )
        lent: dict[str, nn.Parameter] = {}

        def lend(part: nn.Module, _: Any) -> None:
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    lent[name] = parameter
                    part._parameters[name] = parameter.to_local(
                        grad_placements=[Partial()]
                    )  # type: ignore[assignment]

        def take_back(part: nn.Module, *_: Any) -> None:
            part._parameters.update(lent)
            lent.clear()

        module.register_forward_pre_hook(lend)
        module.register_forward_hook(take_back, always_call=True)
        return module


_WORDS: Final[Mapping[str, Callable[[], ParallelStyle | None]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=_WHOLE),
    "colwise_rep": partial(ColwiseParallel, output_layouts=_WHOLE),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=_WHOLE),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=_WHOLE),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=_WHOLE),
    "replicate": lambda: None,
    "replicated_with_grad_allreduce": _SummedGradient,
    "sequence_parallel": SequenceParallel,
}


def named_style(name: str, value: Any) -> ParallelStyle | None:
    """Convert a word of a plan to a style; a style is returned itself, and None means a replicated layer.

    Args:
        name: the name of the layer, for the error.
        value: the plan's entry.
    """
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]()
    raise StrategyError(
        f"{name}: unknown tensor-parallel style",
        found=repr(value),
        fix=did_you_mean(value, _WORDS)
        if isinstance(value, str)
        else "pass a name, or a ParallelStyle of torch",
    )


def find_plans(module: nn.Module) -> dict[str, str]:
    """The plans of the Hugging Face models inside a module, by the names of their layers in the module."""
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if any(known.startswith(prefix) for known in found):
            continue  # inside of a model that has a plan
        own = getattr(part, "_tp_plan", None) or getattr(
            getattr(part, "config", None), "base_model_tp_plan", None
        )
        if isinstance(own, Mapping):
            found.update({f"{prefix}{layer}": style for layer, style in own.items()})
    return found


def preset(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """Create the plan of a preset: the style of each of the module's layers that it splits."""
    makers = {"llama": _llama, "gpt": _gpt, "mlp": _mlp}
    if plan.tensor not in makers:
        raise StrategyError(
            "unknown preset",
            found=repr(plan.tensor),
            fix=did_you_mean(str(plan.tensor), makers),
        )
    if plan.tensor != "llama" and (plan.sequence_parallel or plan.loss_parallel):
        raise StrategyError(
            f"the preset {plan.tensor!r} does not support sequence or loss parallelism",
            found=f"sequence_parallel={plan.sequence_parallel}, loss_parallel={plan.loss_parallel}",
            fix="name the style of each layer in ParallelPlan(tensor={...})",
        )
    found: dict[str, Any] = makers[str(plan.tensor)](module, plan)
    if not found:
        raise StrategyError(
            f"the preset {plan.tensor!r} matches no layer of this module",
            found=", ".join(
                name
                for name, part in module.named_modules()
                if isinstance(part, nn.Linear)
            )
            or "no layers",
            fix="name the layers: ParallelPlan(tensor={'net.0': 'colwise', 'net.2': 'rowwise'})",
        )
    return found


def _by_last_name(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """Match each pattern with the last components of layer names."""
    patterns = [
        (re.compile(rf"(?:.*\.)?(?:{pattern})"), style)
        for pattern, style in styles.items()
    ]
    found = {}
    for name, _ in module.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                found[name] = style
                break
    return found


def _llama(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """The plan for layers with Llama's names, of Hugging Face or Meta."""
    logits = Shard(-1) if plan.loss_parallel else _WHOLE
    split = Shard(1) if plan.sequence_parallel else _WHOLE
    styles: dict[str, Any] = {
        "q_proj|k_proj|v_proj|gate_proj|up_proj|wq|wk|wv|w1|w3": "colwise",
        "o_proj|down_proj|wo|w2": RowwiseParallel(output_layouts=split),
        "embed_tokens|tok_embeddings": RowwiseParallel(
            input_layouts=_WHOLE, output_layouts=split
        ),
        "lm_head|output": ColwiseParallel(
            input_layouts=split,
            output_layouts=logits,
            use_local_output=not plan.loss_parallel,
        ),
        "q_norm|k_norm": "replicated_with_grad_allreduce",
    }
    if plan.sequence_parallel:
        styles[
            "input_layernorm|post_attention_layernorm|attention_norm|ffn_norm|norm"
        ] = "sequence_parallel"
        # Gathers an activation passed by position, or by keyword as in Hugging Face's blocks.
        styles["self_attn|attention|mlp|feed_forward"] = _GatherSequence()
    return _by_last_name(module, styles)


@final
class _GatherSequence(ParallelStyle):
    """Gathers the first input of a block of layers along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(
            part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            if given:
                return (whole(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": whole(named["hidden_states"])}

        def whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                value = DTensor.from_local(
                    value, device_mesh, [Shard(1)], run_check=False
                )
            return value.redistribute(placements=[_WHOLE])

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _gpt(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """The plan for layers with GPT's names. A fused projection of queries, keys and values is split by rows of its
    weight and its output is gathered, so that every rank computes the whole attention."""
    fused = {
        name
        for name, _ in module.named_modules()
        if re.search(r"(^|\.)(c_attn|qkv|qkv_proj)$", name)
    }
    after = "rowwise_rep" if fused else "rowwise"
    return _by_last_name(
        module,
        {
            "c_attn|qkv|qkv_proj": "colwise_rep",
            r"q|k|v|query|key|value|q_proj|k_proj|v_proj|c_fc|fc1|fc_in": "colwise",
            r"(?:attn|attention|self_attn)\.(?:c_proj|proj|o|out_proj|out)": after,
            r"mlp\.c_proj|fc2|fc_out": "rowwise",
            "wte|tok_emb|token_embedding|embed_tokens": "rowwise_rep",
            "lm_head|head": "colwise_rep",
        },
    )


def _mlp(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """The plan for pairs of linear layers in a sequence with only elementwise functions between them."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if not isinstance(part, nn.Sequential):
            continue
        first: str | None = None
        for inner, layer in part.named_children():
            full = f"{name}.{inner}" if name else inner
            if type(layer) is nn.Linear:
                if first is None:
                    first = full
                else:
                    found[first], found[full], first = "colwise", "rowwise", None
            elif not isinstance(layer, _ELEMENTWISE):
                first = None
    return found


_ELEMENTWISE: Final = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softplus,
    ),
    *(nn.Hardtanh, nn.Hardswish, nn.Dropout, nn.Identity),
)
