"""DeepSpeed's JSON: its ``"auto"`` values, contradictions with the run, and the optimizer and scheduler it names."""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, StrategyError, did_you_mean
from trainer_kit.strategies.deepspeed.engine import deepspeed_of, quiet

__all__ = [
    "KEYS",
    "RunFacts",
    "Sections",
    "filled",
    "from_launcher",
    "read_config",
    "with_arguments",
]

KEYS: Final = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping",
    "deepspeed_moe_layer_cls_names",
)  # fmt: skip
"""Options of the launcher's ``deepspeed_config`` that `from_launcher` reads."""

_BF16: Final = ("bf16-mixed", "bf16-true")
_FP16: Final = ("16-mixed", "16-true")
_SECTIONS: Final = {
    "optimizer": "Optim",
    "scheduler": "Scheduler",
}  # built by `Sections`, not by the engine


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run's own values for what DeepSpeed's JSON also configures.

    Attributes:
        world: number of data ranks.
        precision: its word, e.g. ``"bf16-mixed"``.
        batch_size: samples of one micro-batch on one rank; None where it is not known.
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


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The JSON as a new dict.

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
        raise ConfigurationError(
            "DeepSpeed's configuration is a path or a dict", found=f"config={config!r}"
        )
    path = os.path.expanduser(config)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}",
            fix="pass the path of DeepSpeed's JSON, or a dict",
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{path} holds no JSON object", found=type(found).__name__
        )
    return found


def from_launcher(
    options: Mapping[str, str], config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of the strategy from the launcher's ``deepspeed_config``.

    Args:
        options: the launcher's, as texts, by the names in `KEYS`; they must agree with ``deepspeed_config_file``.
        config: the JSON, in place of that file.

    Example:
        >>> from_launcher({"zero_stage": "3", "offload_param_device": "cpu"})["offload_parameters"]
        True
    """
    config = (
        read_config(options.get("deepspeed_config_file")) if config is None else config
    )
    zero = config.setdefault("zero_optimization", {})
    if "gradient_clipping" in options:
        clip = _parsed("gradient_clipping", options["gradient_clipping"], float)
        written = config.get("gradient_clipping", "auto")
        if written not in ("auto", clip):
            raise _contradiction([("gradient_clipping", written, "the launcher", clip)])
        config["gradient_clipping"] = clip
    for key in ("offload_optimizer", "offload_param"):
        if options.get(f"{key}_device") == "nvme":
            zero[key] = {"device": "nvme"}
    if "deepspeed_moe_layer_cls_names" in options:
        names = [
            name.strip() for name in options["deepspeed_moe_layer_cls_names"].split(",")
        ]
        zero.setdefault("leaf_module", {"classes": names})
    return {
        "stage": _parsed("zero_stage", options["zero_stage"], int)
        if "zero_stage" in options
        else None,
        "offload_optimizer": options.get("offload_optimizer_device") == "cpu",
        "offload_parameters": options.get("offload_param_device") == "cpu",
        "config": config,
    }


def _parsed(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)  # no sync point: a text
    except ValueError:
        raise ConfigurationError(
            f"DeepSpeed's {name} is a number", found=f"{name}={text!r}"
        ) from None


def with_arguments(
    config: dict[str, Any],
    stage: int | None,
    offload_optimizer: bool,
    offload_parameters: bool,
) -> dict[str, Any]:
    """Write the strategy's arguments into the JSON; an argument that contradicts the JSON is an error.

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
        raise ConfigurationError(
            "zero_optimization must be a JSON object",
            found=repr(zero),
            fix='write {"stage": 2}',
        )
    written = zero.get("stage", "auto")
    if stage is not None and written not in ("auto", stage):
        raise _contradiction(
            [
                (
                    "zero_optimization.stage",
                    written,
                    "DeepSpeedStrategy(stage=...)",
                    stage,
                )
            ]
        )
    zero["stage"] = chosen = (
        (2 if stage is None else stage) if written == "auto" else written
    )
    if type(chosen) is not int or not 0 <= chosen <= 3:
        raise ConfigurationError(
            "the stage of ZeRO must be 0, 1, 2 or 3",
            found=f"stage={chosen!r}",
            fix="use stage=2, which suits most models",
        )
    for wanted, key in (
        (offload_optimizer, "offload_optimizer"),
        (offload_parameters, "offload_param"),
    ):
        section = zero.get(key)
        if isinstance(section, dict) and section.get("device") == "auto":
            section["device"] = "cpu" if wanted else "none"
        if wanted and section is None:
            zero[key] = {"device": "cpu"}
        device = (zero.get(key) or {}).get("device", "none")
        if wanted and device == "none":
            raise _contradiction(
                [
                    (
                        f"zero_optimization.{key}.device",
                        device,
                        "DeepSpeedStrategy",
                        f"{key}=True",
                    )
                ]
            )
        if device == "nvme":
            raise StrategyError(
                "checkpoints do not support state that is offloaded to NVMe",
                found=f'zero_optimization.{key}.device is "nvme"',
                fix='use "cpu"',
            )
        if device != "none" and key == "offload_param" and chosen != 3:
            raise StrategyError(
                "only stage 3 has parameters to offload",
                found=f"stage {chosen}",
                fix="use stage=3, or offload_optimizer=True",
            )
        if device != "none" and chosen == 0:
            raise StrategyError(
                "stage 0 has nothing to offload", found=key, fix="use stage=2"
            )
    return config


def filled(config: Mapping[str, Any], facts: RunFacts) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``: every ``"auto"`` replaced, and checked against the run.

    The run owns accumulation windows: the engine's configuration has one micro-batch per step, and the strategy sets
    the boundary of each window.

    Args:
        config: as `with_arguments` returns it.
        facts: of the run.

    Raises:
        StrategyError: the JSON and the run contradict each other; the error lists all contradictions.

    Example:
        >>> made = filled({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}, RunFacts(batch_size=4))
        >>> made["train_micro_batch_size_per_gpu"], made["bf16"]["enabled"]
        (4, False)
    """
    made = {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if key not in _SECTIONS
    }
    _compare(made, facts)
    size = facts.batch_size
    if size is None:
        size = _number(made.get("train_micro_batch_size_per_gpu")) or 1
    made["train_micro_batch_size_per_gpu"] = size
    made["gradient_accumulation_steps"] = 1
    made["train_batch_size"] = size * facts.world
    if made.get("gradient_clipping", "auto") == "auto":
        made["gradient_clipping"] = (
            0.0  # the strategy passes the Trainer's value to each step
        )
    for key, words in (("bf16", _BF16), ("fp16", _FP16)):
        enabled = facts.precision in words
        if enabled or key in made:
            made[key] = {**made.get(key, {}), "enabled": enabled}
    _fill_buckets(made["zero_optimization"], facts.hidden_size)
    for name, default in (
        ("zero_allow_untested_optimizer", True),
        ("zero_force_ds_cpu_optimizer", False),
    ):
        if made.get(name, "auto") == "auto":
            made[name] = default
    return _without_auto(made)  # type: ignore[no-any-return]


def _compare(config: Mapping[str, Any], facts: RunFacts) -> None:
    total = (
        None
        if facts.batch_size is None
        else facts.batch_size * facts.accumulation * facts.world
    )
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
            fix='use gradient_clip_algorithm="norm"',
        )


def _contradiction(found: list[tuple[str, Any, str, Any]]) -> StrategyError:
    return StrategyError(
        "DeepSpeed's JSON and the arguments of the run are inconsistent",
        found="; ".join(
            f"{key}: {theirs!r}, but {name}: {ours!r}"
            for key, theirs, name, ours in found
        ),
        fix=f'write "auto" in the JSON ({", ".join(key for key, *_ in found)}), or change the argument',
    )


def _number(value: Any) -> Any:
    return (
        value
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else None
    )


def _fill_buckets(zero: dict[str, Any], hidden: int | None) -> None:
    """Derive the bucket sizes from the model, in elements, as Hugging Face's integration does."""
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
    """Leave each remaining ``"auto"`` to DeepSpeed's defaults."""
    if isinstance(value, dict):
        return {
            key: _without_auto(part) for key, part in value.items() if part != "auto"
        }
    return value


_ADAM: Final = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "torch_adam",
    "adam_w_mode",
    "bias_correction",
)
_OPTIMIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
_WARMUP: Final = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "last_batch_iteration",
)
_SCHEDULERS: Final[Mapping[str, tuple[str, ...]]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration",
    ),
}  # fmt: skip


@final
class Sections:
    """The sections ``"optimizer"`` and ``"scheduler"`` of DeepSpeed's JSON: torch's optimizers, DeepSpeed's schedules.

    Args:
        config: the JSON.

    Raises:
        StrategyError: for a type or an option that is not supported.

    Example:
        >>> sections = Sections({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
        >>> made = sections.make_optimizer(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> type(made).__name__, made.defaults["lr"], made.defaults["weight_decay"]
        ('AdamW', 0.1, 0.0)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.optimizer = _read(config, "optimizer", _OPTIMIZERS)
        self.scheduler = _read(config, "scheduler", _SCHEDULERS)

    def make_optimizer(self, parameters: Iterable[Any], **values: Any) -> Optimizer:
        """Build the optimizer that the JSON names; ``values`` replace its ``"auto"``."""
        assert self.optimizer is not None
        kind = self.optimizer[0]
        options = _replace_auto("optimizer", self.optimizer, values)
        options.setdefault("lr", 1e-3)  # DeepSpeed's
        if kind == "SGD":
            return torch.optim.SGD(parameters, **options)
        if options.pop("bias_correction", True) is not True:
            raise StrategyError(
                "torch's Adam always applies bias correction",
                found="bias_correction: false",
                fix="leave it out",
            )
        # As DeepSpeed reads them: Adam decays as AdamW does unless adam_w_mode is false; nothing decays by default.
        by_torch = options.pop("torch_adam", False)
        decoupled = options.pop("adam_w_mode", True) or kind == "AdamW"
        options.setdefault("weight_decay", 1e-2 if by_torch and decoupled else 0.0)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(
            parameters, **options
        )

    def make_scheduler(
        self, optimizer: Optimizer, device: torch.device, **values: Any
    ) -> Any:
        """Build the scheduler that the JSON names: DeepSpeed's own, which advances once per optimizer step."""
        assert self.scheduler is not None
        rates = [
            float(group["lr"]) for group in optimizer.param_groups
        ]  # sync point: before the first step
        known = {"warmup_min_lr": 0.0, "warmup_max_lr": max(rates), **values}
        options = _replace_auto("scheduler", self.scheduler, known)
        deepspeed_of(device)
        schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
        with quiet():
            return getattr(schedules, self.scheduler[0])(optimizer, **options)

    def refuse_both(self, section: str, own: Any) -> None:
        """Refuse an optimizer or scheduler of the script where the JSON names one, too."""
        if getattr(self, section) is not None:
            raise StrategyError(
                f"DeepSpeed's JSON names the {section}, and so does the script",
                found=f"{getattr(self, section)[0]!r}, and {type(own).__name__}",
                fix=f'take "{section}" out of the JSON; or configure none, or Dummy{_SECTIONS[section]}, in the script',
            )


def _read(
    config: Mapping[str, Any], name: str, known: Mapping[str, tuple[str, ...]]
) -> tuple[str, dict[str, Any]] | None:
    section = config.get(name)
    if section is None:
        return None
    kind = section.get("type") if isinstance(section, Mapping) else section
    by_lower = {word.lower(): word for word in known}
    if (
        not isinstance(kind, str)
        or kind.lower() not in by_lower
        or not isinstance(section, Mapping)
    ):
        raise StrategyError(
            f"DeepSpeed's JSON names {'an' if name == 'optimizer' else 'a'} {name} that is not supported",
            found=repr(kind),
            fix=f"{', '.join(known)}; or remove the section, and create the {name} in the script",
        )
    kind = by_lower[kind.lower()]
    options = dict(section.get("params") or {})
    for key in options:
        if key not in known[kind]:
            raise StrategyError(
                f"unknown option of DeepSpeed's {kind}",
                found=f"{name}.params.{key}",
                fix=did_you_mean(key, known[kind]),
            )
    return kind, options


def _replace_auto(
    name: str, section: tuple[str, dict[str, Any]], values: Mapping[str, Any]
) -> dict[str, Any]:
    kind, options = section
    for key, value in options.items():
        if value == "auto" and values.get(key) is None:
            raise StrategyError(
                f'"auto" has no value in DeepSpeed\'s {kind}',
                found=f"{name}.params.{key}",
                fix=f"write a number, or pass it to Dummy{_SECTIONS[name]}",
            )
    return {
        key: values[key] if value == "auto" else value for key, value in options.items()
    }
