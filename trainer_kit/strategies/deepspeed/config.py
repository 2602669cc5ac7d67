"""DeepSpeed's JSON: what its ``"auto"`` stands for in this run, and what in it contradicts the run."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer_kit.core.errors import ConfigurationError, StrategyError

__all__ = ["RunFacts", "filled", "from_launcher", "read_config", "with_arguments"]

_BF16: Final = ("bf16-mixed", "bf16-true")
_FP16: Final = ("16-mixed", "16-true")
_OURS: Final = ("optimizer", "scheduler")  # which are made from it, and handed over


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the run says about the values that stand in DeepSpeed's JSON.

    Attributes:
        world: number of data ranks.
        precision: its word, e.g. ``"bf16-mixed"``.
        batch_size: samples of one micro-batch on one rank; None where nobody knows.
        accumulation: micro-batches of an optimizer step.
        clip: (value, algorithm), or None.
        hidden_size: of the model, for the sizes of buckets; None where it has none.
    """

    world: int = 1
    precision: str = "32-true"
    batch_size: int | None = None
    accumulation: int = 1
    clip: tuple[float, str] | None = None
    hidden_size: int | None = None


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON as a dict of its own.

    Args:
        config: a path, a mapping, or None.

    Raises:
        ConfigurationError: no such file, or no JSON object in it.

    Example:
        >>> read_config({"zero_optimization": {"stage": 3}})
        {'zero_optimization': {'stage': 3}}
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigurationError("DeepSpeed's configuration is a path or a dict", found=f"config={config!r}")
    path = os.path.expanduser(config)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}", fix="pass the path of DeepSpeed's JSON, or a dict"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} holds no JSON object", found=type(found).__name__)
    return found


def from_launcher(told: Mapping[str, str], config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of the strategy from the keys of ``deepspeed_config`` in a file of Accelerate's.

    Args:
        told: the texts of what the launcher was given; the file ``deepspeed_config_file`` comes first, and the other
            keys must agree with it.
        config: the JSON, in place of that file.

    Example:
        >>> from_launcher({"zero_stage": "3", "offload_param_device": "cpu"})["offload_parameters"]
        True
    """
    config = read_config(told.get("deepspeed_config_file")) if config is None else config
    zero = config.setdefault("zero_optimization", {})
    if "gradient_clipping" in told:
        clip = _parsed("gradient_clipping", told["gradient_clipping"], float)
        written = config.get("gradient_clipping", "auto")
        if written not in ("auto", clip):
            raise _contradiction([("gradient_clipping", written, "the launcher", clip)])
        config["gradient_clipping"] = clip
    for key in ("offload_optimizer", "offload_param"):
        if told.get(f"{key}_device") == "nvme":
            zero[key] = {"device": "nvme"}
    if "deepspeed_moe_layer_cls_names" in told:
        names = [name.strip() for name in told["deepspeed_moe_layer_cls_names"].split(",")]
        zero.setdefault("leaf_module", {"classes": names})
    return {
        "stage": _parsed("zero_stage", told["zero_stage"], int) if "zero_stage" in told else None,
        "offload_optimizer": told.get("offload_optimizer_device") == "cpu",
        "offload_parameters": told.get("offload_param_device") == "cpu",
        "config": config,
    }


def _parsed(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)  # no sync point: a text
    except ValueError:
        raise ConfigurationError(f"DeepSpeed's {name} is a number", found=f"{name}={text!r}") from None


def with_arguments(
    config: dict[str, Any], stage: int | None, offload_optimizer: bool, offload_parameters: bool
) -> dict[str, Any]:
    """The JSON with the strategy's arguments in it; an argument is an error where the JSON says something else.

    Args:
        config: as `read_config` returns it.
        stage: 0 to 3; None for the JSON's, or 2.
        offload_optimizer: to the host's memory.
        offload_parameters: to the host's memory; stage 3 only.

    Example:
        >>> with_arguments({}, 1, False, False)["zero_optimization"]
        {'stage': 1}
    """
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigurationError("zero_optimization is an object", found=repr(zero), fix='{"stage": 2}')
    written = zero.get("stage", "auto")
    if stage is not None and written not in ("auto", stage):
        raise _contradiction([("zero_optimization.stage", written, "DeepSpeedStrategy(stage=...)", stage)])
    zero["stage"] = chosen = (2 if stage is None else stage) if written == "auto" else written
    if type(chosen) is not int or not 0 <= chosen <= 3:
        raise ConfigurationError(
            "the stage of ZeRO is 0, 1, 2 or 3", found=f"stage={chosen!r}", fix="stage=2 suits most"
        )
    for wanted, key in ((offload_optimizer, "offload_optimizer"), (offload_parameters, "offload_param")):
        section = zero.get(key)
        if isinstance(section, dict) and section.get("device") == "auto":
            section["device"] = "cpu" if wanted else "none"
        if wanted and section is None:
            zero[key] = {"device": "cpu"}
        device = (zero.get(key) or {}).get("device", "none")
        if wanted and device == "none":
            raise _contradiction([(f"zero_optimization.{key}.device", device, "DeepSpeedStrategy", f"{key}=True")])
        if device == "nvme":
            raise StrategyError(
                "what is offloaded to NVMe cannot be saved in our checkpoints",
                found=f'zero_optimization.{key}.device is "nvme"',
                fix='use "cpu"',
            )
        if device != "none" and key == "offload_param" and chosen != 3:
            raise StrategyError(
                "only stage 3 has parameters to offload",
                found=f"stage {chosen}",
                fix="stage=3, or offload_optimizer=True",
            )
        if device != "none" and chosen == 0:
            raise StrategyError("stage 0 has nothing to offload", found=key, fix="stage=2")
    return config


def filled(config: Mapping[str, Any], facts: RunFacts) -> dict[str, Any]:
    """What `deepspeed.initialize` is given: every ``"auto"`` replaced, and nothing left that the run contradicts.

    The run owns windows: DeepSpeed is told of one micro-batch a step, and of the boundary of each window.

    Args:
        config: as `with_arguments` returns it.
        facts: of the run.

    Raises:
        StrategyError: the JSON says one thing and the run another; all of them, both named.

    Example:
        >>> made = filled({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}, RunFacts(batch_size=4))
        >>> made["train_micro_batch_size_per_gpu"], made["bf16"]["enabled"]
        (4, False)
    """
    made = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    _compare(made, facts)
    size = facts.batch_size
    if size is None:
        size = _number(made.get("train_micro_batch_size_per_gpu")) or 1
    made["train_micro_batch_size_per_gpu"] = size
    made["gradient_accumulation_steps"] = 1
    made["train_batch_size"] = size * facts.world
    if made.get("gradient_clipping", "auto") == "auto":
        made["gradient_clipping"] = 0.0  # the Trainer's reaches each step by itself
    for key, words in (("bf16", _BF16), ("fp16", _FP16)):
        enabled = facts.precision in words
        if enabled or key in made:
            made[key] = {**made.get(key, {}), "enabled": enabled}
    _fill_buckets(made["zero_optimization"], facts.hidden_size)
    for name, default in (("zero_allow_untested_optimizer", True), ("zero_force_ds_cpu_optimizer", False)):
        if made.get(name, "auto") == "auto":
            made[name] = default
    said: dict[str, Any] = _without_auto(made)
    return said


def _compare(config: Mapping[str, Any], facts: RunFacts) -> None:
    total = None if facts.batch_size is None else facts.batch_size * facts.accumulation * facts.world
    clip = None if facts.clip is None else facts.clip[0]
    pairs = [
        ("train_micro_batch_size_per_gpu", "the loader's batch_size", facts.batch_size),
        ("gradient_accumulation_steps", "accumulate_grad_batches", facts.accumulation),
        ("train_batch_size", "samples of an optimizer step", total),
        ("gradient_clipping", "gradient_clip_val", clip),
    ]
    found: list[tuple[str, Any, str, Any]] = []
    for key, name, ours in pairs:
        theirs = _number(config.get(key))
        if theirs is not None and ours is not None and theirs != ours:
            found.append((key, theirs, name, ours))
    for key, words in (("bf16", _BF16), ("fp16", _FP16)):
        enabled = config.get(key, {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != (facts.precision in words):
            found.append((f"{key}.enabled", enabled, "precision", facts.precision))
    if found:
        raise _contradiction(found)
    if facts.clip is not None and facts.clip[1] != "norm":
        raise StrategyError(
            "DeepSpeed clips by norm only",
            found=f"gradient_clip_algorithm={facts.clip[1]!r}",
            fix='gradient_clip_algorithm="norm"',
        )


def _contradiction(found: list[tuple[str, Any, str, Any]]) -> StrategyError:
    return StrategyError(
        "DeepSpeed's JSON and the run contradict each other",
        found="; ".join(f"{key}: {theirs!r}, but {name}: {ours!r}" for key, theirs, name, ours in found),
        fix=f'write "auto" in the JSON ({", ".join(key for key, *_ in found)}), or change the other',
    )


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _fill_buckets(zero: dict[str, Any], hidden: int | None) -> None:
    """The sizes that Hugging Face's integration derives from the model, in elements."""
    if hidden is None:
        return  # DeepSpeed's own defaults
    for key, size in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
        ("stage3_param_persistence_threshold", 10 * hidden),
    ):
        if zero.get(key) == "auto":
            zero[key] = size


def _without_auto(value: Any) -> Any:
    """What nobody knows better than DeepSpeed is left to its defaults."""
    if isinstance(value, dict):
        return {key: _without_auto(part) for key, part in value.items() if part != "auto"}
    return value
