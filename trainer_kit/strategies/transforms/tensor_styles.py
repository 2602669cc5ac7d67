"""How single layers are split over the tensor axis: the words of plans, the presets, Hugging Face models' own plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import ParallelPlan

__all__ = ["find_plans", "named_style", "preset"]

_WHOLE: Final = Replicate()


@final
class _SummedGradient(ParallelStyle):
    """Whole parameters that are used on a part of the activations: their gradients are added up over the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.data, device_mesh, [_WHOLE], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        lent: dict[str, nn.Parameter] = {}

        def lend(part: nn.Module, _: Any) -> None:
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    lent[name] = parameter
                    part._parameters[name] = parameter.to_local(grad_placements=[Partial()])  # type: ignore[assignment]

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
    """The style behind a word of a plan, or the style itself; None for a layer that stays whole.

    Args:
        name: of the layer, for the error.
        value: what the plan says.
    """
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]()
    raise StrategyError(
        f"{name}: this way to split a layer is not known",
        found=repr(value),
        fix=did_you_mean(value, _WORDS) if isinstance(value, str) else "use a word, or a style of torch's",
    )


def find_plans(module: nn.Module) -> dict[str, str]:
    """The plans that Hugging Face models inside of a module bring along, by the names that layers have in it."""
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if any(known.startswith(prefix) for known in found):
            continue  # a part of a model that has spoken for it
        own = getattr(part, "_tp_plan", None) or getattr(getattr(part, "config", None), "base_model_tp_plan", None)
        if isinstance(own, Mapping):
            found.update({f"{prefix}{layer}": style for layer, style in own.items()})
    return found


def preset(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """The plan behind a preset's name: which of the module's layers are split, and how."""
    makers = {"llama": _llama, "gpt": _gpt, "mlp": _mlp}
    if plan.tensor not in makers:
        raise StrategyError("no such preset", found=repr(plan.tensor), fix=did_you_mean(str(plan.tensor), makers))
    if plan.tensor != "llama" and (plan.sequence_parallel or plan.loss_parallel):
        raise StrategyError(
            f"the preset {plan.tensor!r} splits neither sequences nor losses",
            found=f"sequence_parallel={plan.sequence_parallel}, loss_parallel={plan.loss_parallel}",
            fix="give the styles of each layer in ParallelPlan(tensor={...})",
        )
    found: dict[str, Any] = makers[str(plan.tensor)](module, plan)
    if not found:
        raise StrategyError(
            f"the preset {plan.tensor!r} knows no layer of this module",
            found=", ".join(name for name, part in module.named_modules() if isinstance(part, nn.Linear))
            or "no layers",
            fix="name the layers: ParallelPlan(tensor={'net.0': 'colwise', 'net.2': 'rowwise'})",
        )
    return found


def _by_last_name(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """Each pattern is matched with the last parts of the layers' names."""
    patterns = [(re.compile(rf"(?:.*\.)?(?:{pattern})"), style) for pattern, style in styles.items()]
    found = {}
    for name, _ in module.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                found[name] = style
                break
    return found


def _llama(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """Layers named as in Llama's code: Hugging Face's names, or Meta's."""
    logits = Shard(-1) if plan.loss_parallel else _WHOLE
    split = Shard(1) if plan.sequence_parallel else _WHOLE
    styles: dict[str, Any] = {
        "q_proj|k_proj|v_proj|gate_proj|up_proj|wq|wk|wv|w1|w3": "colwise",
        "o_proj|down_proj|wo|w2": RowwiseParallel(output_layouts=split),
        "embed_tokens|tok_embeddings": RowwiseParallel(input_layouts=_WHOLE, output_layouts=split),
        "lm_head|output": ColwiseParallel(
            input_layouts=split, output_layouts=logits, use_local_output=not plan.loss_parallel
        ),
        "q_norm|k_norm": "replicated_with_grad_allreduce",
    }
    if plan.sequence_parallel:
        styles["input_layernorm|post_attention_layernorm|attention_norm|ffn_norm|norm"] = "sequence_parallel"
        # Both ways to hand the activations over: by position, and as Hugging Face's blocks do it.
        styles["self_attn|attention|mlp|feed_forward"] = _GatherSequence()
    return _by_last_name(module, styles)


@final
class _GatherSequence(ParallelStyle):
    """What a block of layers takes first is whole along the sequence inside of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if given:
                return (whole(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": whole(named["hidden_states"])}

        def whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                value = DTensor.from_local(value, device_mesh, [Shard(1)], run_check=False)
            return value.redistribute(placements=[_WHOLE])

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _gpt(module: nn.Module, plan: ParallelPlan) -> dict[str, Any]:
    """Layers named as in GPT's code. A fused projection of queries, keys and values is split by rows of its weight and
    its output gathered: attention itself is then computed on every rank."""
    fused = {name for name, _ in module.named_modules() if re.search(r"(^|\.)(c_attn|qkv|qkv_proj)$", name)}
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
    """Pairs of linear layers in a sequence, with nothing but functions of single elements between them."""
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
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus),
    *(nn.Hardtanh, nn.Hardswish, nn.Dropout, nn.Identity),
)
