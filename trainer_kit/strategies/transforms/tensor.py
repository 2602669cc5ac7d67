"""Tensor parallelism: each rank of the axis holds some columns or rows of a weight, and computes with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.tensors import local, map_leaves, map_tensors
from trainer_kit.core.torch_private import direct_parameters
from trainer_kit.core.types import Keywords
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.torch_private import AsyncCollectiveTensor, is_view
from trainer_kit.strategies.transforms.pipeline_stages import StandIn, submodule_names
from trainer_kit.strategies.transforms.transform import Transform

__all__ = [
    "TensorParallel",
    "check_replicated_gradients",
    "find_plans",
    "find_replicated",
    "gather_outputs",
    "named_style",
    "preset",
    "return_copies",
    "sum_partial_gradients",
]


_Style: TypeAlias = object
"""The style of a layer: a word of `_STYLES` or a style of torch; anything else is refused."""
_Styles: TypeAlias = Mapping[str, _Style]
"""The style of each layer of a plan, by its name or a pattern."""
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
        earlier_size = module.__dict__.get("_split_over")
        if earlier_size is None:
            self._split(module, mesh)
        elif earlier_size != mesh.size():
            raise StrategyError(
                "the module is already split over a different number of ranks",
                found=f"tp={earlier_size} before, tp={mesh.size()} now",
                fix="create a new module, and load a checkpoint into it",
            )
        if self.copies:
            return_copies(module)

    def _split(self, module: nn.Module, mesh: DeviceMesh) -> None:
        # Found before the split, which gives each layer a parameter of its own.
        shared_parameters = _find_shared(module)
        styles = self.styles(module)
        for owners in shared_parameters:
            _check_owners_are_planned(styles, owners)
        _check_sizes(module, styles, mesh.size())
        for name, style in styles.items():
            layer = module.get_submodule(name)
            _release_storage(layer)
            # The parameters that parallelize_module creates are trained.
            frozen = {key for key, p in layer.named_parameters() if not p.requires_grad}
            parallelize_module(layer, mesh, style, src_data_rank=None)
            for key, parameter in layer.named_parameters():
                parameter.requires_grad_(key not in frozen)
            if self.plan.sequence_parallel and isinstance(layer, nn.Embedding):
                layer.register_forward_pre_hook(partial(_check_sequence, mesh.size()))
        # parallelize_module gives each layer its own parameter.
        for owners in shared_parameters:
            _tie_parameters(module, owners)
        module.__dict__["_split_over"] = mesh.size()

    def bind(self, method: StepMethod) -> StepMethod:
        """Complete the outputs of a step: a split layer returns before its collective has ended."""
        return gather_outputs(method)

    def bind_evaluation(self, step: StepMethod, whole: bool) -> StepMethod:
        """Run the step with loss parallelism if the plan uses it."""
        if not self.plan.loss_parallel:
            return step
        return loss_parallel()(step)

    def computing(self, first: bool) -> AbstractContextManager[object]:
        """Return the context of loss parallelism if the plan uses it."""
        if not self.plan.loss_parallel:
            return nullcontext()
        return loss_parallel()

    def check_gradients(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse replicated parameters whose gradients differ over the axis."""
        check_replicated_gradients(module.named_parameters(), mesh)

    def styles(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """The style of each split layer, by name."""
        plan = self._find_plan(module)
        # A plan may name layers of other pipeline stages.
        names = submodule_names(module)
        names_on_rank = {
            name
            for name, submodule in module.named_modules()
            if not isinstance(submodule, StandIn)
        }
        styles: dict[str, ParallelStyle] = {}
        for pattern, value in plan.items():
            style = named_style(pattern, value)
            # "*" matches one component of a name, as in the plans of Hugging Face.
            expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            matching = [name for name in names if expression.fullmatch(name)]
            if not matching and self.plan.tensor is not None:
                raise StrategyError(
                    "the plan names a layer that the module does not have",
                    found=repr(pattern),
                    fix=did_you_mean(pattern, names),
                )
            if style is not None:
                styles.update(
                    (name, style) for name in matching if name in names_on_rank
                )
        return styles

    def _find_plan(self, module: nn.Module) -> _Styles:
        """The style of each layer: the user's, a preset's, or that of the Hugging Face models inside the module."""
        plan = self.plan.tensor
        if isinstance(plan, str):
            return preset(module, self.plan)
        if plan is not None:
            return plan
        plans = find_plans(module)
        if not plans:
            raise StrategyError(
                f"{type(module).__name__} has no plan for tensor parallelism",
                found="no configure_parallel, and no submodule with a plan",
                fix="define configure_parallel(self, mesh): return ParallelPlan(tensor={'net.0': 'colwise', ...}), "
                "or MeshStrategy(tp=..., plan=ParallelPlan(tensor='llama' | 'gpt' | 'mlp'))",
            )
        return plans


def _release_storage(layer: nn.Module) -> None:
    """Release the storage of parameters, except tensor subclasses of other libraries, which are split with values."""
    parameters = direct_parameters(layer)
    for key, parameter in parameters.items():
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
            bare = torch.empty_like(parameter, device="meta")
            parameters[key] = nn.Parameter(bare, parameter.requires_grad)


_Owners: TypeAlias = list[tuple[str, str]]
"""The layers that share one parameter, and its name in each."""


def _find_shared(module: nn.Module) -> list[_Owners]:
    """The owners of each parameter that several layers share."""
    owners: dict[int, _Owners] = {}
    for name, layer in module.named_modules():
        for key, parameter in direct_parameters(layer).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, key))
    return [layers for layers in owners.values() if len(layers) > 1]


def _check_owners_are_planned(
    styles: Mapping[str, ParallelStyle], owners: _Owners
) -> None:
    """Refuse a layer that shares its weight with a split layer but is not in the plan."""
    planned = [layer for layer, _ in owners if layer in styles]
    missing = [layer for layer, _ in owners if layer not in styles]
    if planned and missing:
        names = ", ".join(f"{layer}.{key}" for layer, key in owners)
        raise StrategyError(
            "the plan must name all layers that share a parameter, or none of them",
            found=f"{names}; in the plan: {', '.join(planned)}",
            fix=f"add {missing[0]!r} to the plan ('embedding_rowwise' for an embedding, 'colwise_rep' for a head)",
        )


def _tie_parameters(module: nn.Module, owners: _Owners) -> None:
    """Give all layers that shared a parameter the one of the first layer."""
    first_name, first_key = owners[0]
    first = direct_parameters(module.get_submodule(first_name))[first_key]
    for name, key in owners[1:]:
        parameters = direct_parameters(module.get_submodule(name))
        parameter = parameters[key]
        if _are_split_differently(first, parameter):
            raise StrategyError(
                "layers that share a parameter split it differently",
                found=f"{first_name}: {_placements(first)}, {name}: {_placements(parameter)}",
                fix="use 'embedding_rowwise' and 'colwise_rep', which split an embedding and a head in the same way",
            )
        parameters[key] = first


def _placements(parameter: Tensor | None) -> object:
    return getattr(parameter, "placements", None)


def _are_split_differently(first: Tensor | None, second: Tensor | None) -> bool:
    both_split = isinstance(first, DTensor) and isinstance(second, DTensor)
    return both_split and _placements(first) != _placements(second)


def _check_sizes(
    module: nn.Module, styles: Mapping[str, ParallelStyle], size: int
) -> None:
    """Refuse layers that torch would split unevenly, or that would fail in the first forward."""
    for name, style in styles.items():
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            continue
        layer = module.get_submodule(name)
        attribute = _split_dimension(layer, isinstance(style, ColwiseParallel))
        if attribute is None:
            raise StrategyError(
                "only linear layers and embeddings can be split by columns or rows",
                found=f"{name} is a {type(layer).__name__}",
                fix=f"leave it out of the plan, or replace it with an nn.Linear; 'replicate' keeps {name} unsharded",
            )
        value = getattr(layer, attribute)
        _check_divisible(f"{name}.{attribute}", value, size, "pad it to a multiple")
    # Only configurations whose layers the plan splits: a vision tower beside a split decoder keeps its heads.
    for name, submodule in module.named_modules():
        prefix = f"{name}." if name else ""
        if not any(layer_name.startswith(prefix) for layer_name in styles):
            continue
        config = getattr(submodule, "config", None)
        for attribute in _HEADS:
            heads = getattr(config, attribute, None)
            if isinstance(heads, int):
                subject = f"{name}.config.{attribute}"
                _check_divisible(subject, heads, size, "a different number of heads")


def _split_dimension(layer: nn.Module, by_columns: bool) -> str | None:
    """The attribute with the size that is split; None if torch cannot split such a layer."""
    if isinstance(layer, nn.Linear):
        return "out_features" if by_columns else "in_features"
    if isinstance(layer, nn.Embedding):
        return "embedding_dim" if by_columns else "num_embeddings"
    return None


def _check_divisible(subject: str, value: int, size: int, fix: str) -> None:
    if value % size == 0:
        return
    divisors = [divisor for divisor in range(2, size) if value % divisor == 0]
    size_fix = f"use tp={divisors[-1]}" if divisors else "use another tp"
    raise StrategyError(
        f"{subject} cannot be split evenly over {plural(size, 'rank')}",
        found=f"{subject} = {value}, tp={size}",
        fix=f"{size_fix}, or {fix}",
    )


def _check_sequence(size: int, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Refuse batches whose sequences the axis does not divide: torch would gather their parts incorrectly."""
    if not inputs:
        return
    length = inputs[0].shape[1]
    if length % size:
        raise StrategyError(
            "sequence parallelism needs sequence lengths that are divisible by tp",
            found=f"length {length}, tp={size}",
            fix=f"pad sequences to a multiple of {size}, or use sequence_parallel=False",
        )


def find_replicated(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are replicated over an axis of their mesh: their gradients may be partial sums."""
    return [
        parameter
        for parameter in module.parameters()
        if isinstance(parameter, DTensor) and Replicate() in parameter.placements
    ]


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum partial gradients over the ranks: of replicated parameters that are applied to a part of the activations."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        if any(placement.is_partial() for placement in gradient.placements):
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
    gradients = {
        name: local(parameter.grad).detach()
        for name, parameter in named
        if parameter.grad is not None and not _is_split_over(parameter, axis)
    }
    group = mesh.get_group()
    # torch's fake ranks have no separate gradients.
    if not gradients or dist.get_backend(group) == "fake":
        return
    # One exchange for all: the distance of each rank's gradient from the mean shows whether they differ.
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients.values()])
    mean = flat.clone()
    dist.all_reduce(mean, group=group)
    mean /= mesh.size()
    # A difference of rounding is far below 5 %, a part of a gradient far above.
    lengths = [gradient.numel() for gradient in gradients.values()]
    pairs = zip(torch.split(flat, lengths), torch.split(mean, lengths), strict=True)
    distances = torch.stack([_relative_distance(*pair) for pair in pairs])
    dist.all_reduce(distances, dist.ReduceOp.MAX, group=group)
    values = distances.tolist()  # sync point: once
    different = [
        name
        for name, distance in zip(gradients, values, strict=True)
        if distance > 0.05
    ]
    if different:
        raise StrategyError(
            "the ranks of the tensor axis have different gradients for a replicated parameter",
            found=", ".join(different),
            fix=f"if it is applied to a part of the activations, add {different[0].rpartition('.')[0]!r} to the plan as"
            " 'sequence_parallel' or 'replicated_with_grad_allreduce'; else random layers differ between the ranks",
        )


def _is_split_over(parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return axis in (parameter.device_mesh.mesh_dim_names or ())


def _relative_distance(first: Tensor, second: Tensor) -> Tensor:
    scale = first.norm() + second.norm()
    tiny = torch.finfo(torch.float32).tiny  # both may be zero
    distance: Tensor = (first - second).norm() / scale.clamp_min(tiny)
    return distance


def gather_outputs(method: StepMethod) -> StepMethod:
    """Wrap a step so that it gathers sharded losses and logits in its result, and waits for collectives under way."""

    def gather(output: Tensor) -> Tensor:
        if isinstance(output, DTensor):
            output = output.full_tensor()
        # Return copies: FSDP warns about views, and only a copy waits for the collective, which C++ code would not.
        return output.clone()

    @functools.wraps(method)  # a compiled step stays recognizable
    def step(*arguments: object) -> object:
        return map_leaves(method(*arguments), gather, (DTensor, AsyncCollectiveTensor))

    return step


def return_copies(module: nn.Module) -> None:
    """Make a module return copies of views, which split layers return: FSDP loses its hooks on views."""

    def copy_view(tensor: Tensor) -> Tensor:
        return tensor.clone() if is_view(tensor) else tensor

    def copy_outputs(called: nn.Module, arguments: object, output: object) -> object:
        return map_tensors(output, copy_view)

    module.register_forward_hook(copy_outputs)


_REPLICATED: Final = Replicate()


@final
class _SumGradients(ParallelStyle):
    """For replicated parameters that are applied to a part of the activations: sums their gradients over the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = DTensor.from_local(
                parameter.data, device_mesh, [_REPLICATED], run_check=False
            )
            trained = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(replicated, trained))
        originals: dict[str, nn.Parameter] = {}

        # In its forward the layer has plain tensors, whose gradients are partial sums.
        def use_local_tensors(layer: nn.Module, _: object) -> None:
            for name, parameter in layer.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    originals[name] = parameter
                    tensor = parameter.to_local(grad_placements=[Partial()])
                    direct_parameters(layer)[name] = tensor  # type: ignore[assignment]  # not a leaf

        def restore(layer: nn.Module, *_: object) -> None:
            direct_parameters(layer).update(originals)
            originals.clear()

        module.register_forward_pre_hook(use_local_tensors)
        module.register_forward_hook(restore, always_call=True)
        return module


_STYLES: Final[Mapping[str, Callable[[], ParallelStyle | None]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=_REPLICATED),
    "colwise_rep": partial(ColwiseParallel, output_layouts=_REPLICATED),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=_REPLICATED),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=_REPLICATED),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=_REPLICATED),
    "replicate": lambda: None,
    "replicated_with_grad_allreduce": _SumGradients,
    "sequence_parallel": SequenceParallel,
}


def named_style(name: str, value: object) -> ParallelStyle | None:
    """Convert a word of a plan to a style; a style is returned itself, and None means a replicated layer.

    Args:
        name: the name of the layer, for the error.
        value: the plan's entry.
    """
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in _STYLES:
        return _STYLES[value]()
    fix: str | None = "pass a name, or a ParallelStyle of torch"
    if isinstance(value, str):
        fix = did_you_mean(value, _STYLES)
    raise StrategyError(
        f"{name}: unknown tensor-parallel style", found=repr(value), fix=fix
    )


def find_plans(module: nn.Module) -> dict[str, str]:
    """The plans of the Hugging Face models inside a module, by the names of their layers in the module."""
    styles: dict[str, str] = {}
    for name, submodule in module.named_modules():
        prefix = f"{name}." if name else ""
        if any(layer.startswith(prefix) for layer in styles):
            continue  # inside of a model that has a plan
        config = getattr(submodule, "config", None)
        plan = getattr(submodule, "_tp_plan", None)
        if not plan:
            plan = getattr(config, "base_model_tp_plan", None)
        if isinstance(plan, Mapping):
            styles.update((f"{prefix}{layer}", style) for layer, style in plan.items())
    return styles


def preset(module: nn.Module, plan: ParallelPlan) -> dict[str, _Style]:
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
    styles: dict[str, _Style] = makers[str(plan.tensor)](module, plan)
    if not styles:
        linear_layers = [
            name
            for name, submodule in module.named_modules()
            if isinstance(submodule, nn.Linear)
        ]
        raise StrategyError(
            f"the preset {plan.tensor!r} matches no layer of this module",
            found=", ".join(linear_layers) or "no layers",
            fix="name the layers: ParallelPlan(tensor={'net.0': 'colwise', 'net.2': 'rowwise'})",
        )
    return styles


def _match_last_names(module: nn.Module, styles: _Styles) -> dict[str, _Style]:
    """Match each pattern with the last components of layer names."""
    patterns = [
        (re.compile(rf"(?:.*\.)?(?:{pattern})"), style)
        for pattern, style in styles.items()
    ]
    matched: dict[str, _Style] = {}
    for name, _ in module.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                matched[name] = style
                break
    return matched


def _llama(module: nn.Module, plan: ParallelPlan) -> dict[str, _Style]:
    """The plan for layers with Llama's names, of Hugging Face or Meta."""
    logits = Shard(-1) if plan.loss_parallel else _REPLICATED
    split = Shard(1) if plan.sequence_parallel else _REPLICATED
    styles: dict[str, _Style] = {
        "q_proj|k_proj|v_proj|gate_proj|up_proj|wq|wk|wv|w1|w3": "colwise",
        "o_proj|down_proj|wo|w2": RowwiseParallel(output_layouts=split),
        "embed_tokens|tok_embeddings": RowwiseParallel(
            input_layouts=_REPLICATED, output_layouts=split
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
    return _match_last_names(module, styles)


@final
class _GatherSequence(ParallelStyle):
    """Gathers the first input of a block of layers along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather_inputs(
            layer: nn.Module, args: tuple[Any, ...], kwargs: Keywords
        ) -> tuple[tuple[Any, ...], Keywords]:
            if args:
                return (gather(args[0]), *args[1:]), kwargs
            states = gather(kwargs["hidden_states"])
            return args, {**kwargs, "hidden_states": states}

        def gather(tensor: Tensor) -> DTensor:
            if not isinstance(tensor, DTensor):
                tensor = DTensor.from_local(
                    tensor, device_mesh, [Shard(1)], run_check=False
                )
            return tensor.redistribute(placements=[_REPLICATED])

        module.register_forward_pre_hook(gather_inputs, with_kwargs=True)
        return module


def _gpt(module: nn.Module, plan: ParallelPlan) -> dict[str, _Style]:
    """The plan for layers with GPT's names. A fused projection of queries, keys and values is split by rows of its
    weight and its output is gathered, so that every rank computes the whole attention."""
    names = [name for name, _ in module.named_modules()]
    is_fused = any(re.search(r"(^|\.)(c_attn|qkv|qkv_proj)$", name) for name in names)
    output_style = "rowwise_rep" if is_fused else "rowwise"
    return _match_last_names(
        module,
        {
            "c_attn|qkv|qkv_proj": "colwise_rep",
            r"q|k|v|query|key|value|q_proj|k_proj|v_proj|c_fc|fc1|fc_in": "colwise",
            r"(?:attn|attention|self_attn)\.(?:c_proj|proj|o|out_proj|out)": output_style,
            r"mlp\.c_proj|fc2|fc_out": "rowwise",
            "wte|tok_emb|token_embedding|embed_tokens": "rowwise_rep",
            "lm_head|head": "colwise_rep",
        },
    )


def _mlp(module: nn.Module, plan: ParallelPlan) -> dict[str, _Style]:
    """The plan for pairs of linear layers in a sequence with only elementwise functions between them."""
    styles: dict[str, _Style] = {}
    for name, sequence in module.named_modules():
        if not isinstance(sequence, nn.Sequential):
            continue
        # The first layer of a pair, until its second is found.
        first: str | None = None
        for key, layer in sequence.named_children():
            layer_name = f"{name}.{key}" if name else key
            if type(layer) is not nn.Linear:
                if not isinstance(layer, _ELEMENTWISE):
                    first = None
            elif first is None:
                first = layer_name
            else:
                styles[first] = "colwise"
                styles[layer_name] = "rowwise"
                first = None
    return styles


_ELEMENTWISE: Final = (
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
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)
"""Layers that compute each feature from itself alone, so that they fit between split features."""
