"""DeepSpeed's JSON: its ``"auto"`` values, contradictions with the run, and the optimizer and scheduler it names."""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainer_kit.core.errors import ConfigurationError, StrategyError, did_you_mean
from trainer_kit.core.types import JsonObject, SavedState
from trainer_kit.strategies.deepspeed.engine import import_deepspeed, quiet

__all__ = [
    "KEYS",
    "RunFacts",
    "Sections",
    "fill_config",
    "from_launcher",
    "read_config",
    "with_arguments",
]

KEYS: Final = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping",
    "deepspeed_moe_layer_cls_names",
)  # fmt: skip
"""Options of the launcher's ``deepspeed_config`` that `from_launcher` reads."""

_T = TypeVar("_T")
_HALF_PRECISIONS: Final = {
    "bf16": ("bf16-mixed", "bf16-true"),
    "fp16": ("16-mixed", "16-true"),
}
"""For each section of the JSON, the precisions of a run that enable it."""
_SECTIONS: Final = {"optimizer": "Optim", "scheduler": "Scheduler"}
"""Sections that `Sections` builds, not the engine, with the ends of the names of Accelerate's dummies."""


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
    config: str | os.PathLike[str] | SavedState | None,
) -> JsonObject:
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
            "DeepSpeed's configuration must be a path or a dict",
            found=f"config={config!r}",
        )
    path = os.path.expanduser(config)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}",
            fix="pass the path of DeepSpeed's JSON, or a dict",
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON", found=str(error)) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{path} does not contain a JSON object", found=type(content).__name__
        )
    return content


def from_launcher(
    options: Mapping[str, str], config: JsonObject | None = None
) -> JsonObject:
    """Arguments of the strategy from the launcher's ``deepspeed_config``.

    Args:
        options: the launcher's, as texts, by the names in `KEYS`; they must agree with ``deepspeed_config_file``.
        config: the JSON, in place of that file.

    Example:
        >>> from_launcher({"zero_stage": "3", "offload_param_device": "cpu"})["offload_parameters"]
        True
    """
    if config is None:
        config = read_config(options.get("deepspeed_config_file"))
    zero = config.setdefault("zero_optimization", {})
    if "gradient_clipping" in options:
        clip = _parse("gradient_clipping", options["gradient_clipping"], float)
        written = config.get("gradient_clipping", "auto")
        if written not in ("auto", clip):
            contradiction = ("gradient_clipping", written, "the launcher", clip)
            raise _contradiction([contradiction])
        config["gradient_clipping"] = clip
    # Into the JSON, where `with_arguments` refuses it with its reason: no argument of the strategy means NVMe.
    for key in ("offload_optimizer", "offload_param"):
        if options.get(f"{key}_device") == "nvme":
            zero[key] = {"device": "nvme"}
    if "deepspeed_moe_layer_cls_names" in options:
        names = [
            name.strip() for name in options["deepspeed_moe_layer_cls_names"].split(",")
        ]
        zero.setdefault("leaf_module", {"classes": names})
    stage: int | None = None
    if "zero_stage" in options:
        stage = _parse("zero_stage", options["zero_stage"], int)
    return {
        "stage": stage,
        "offload_optimizer": options.get("offload_optimizer_device") == "cpu",
        "offload_parameters": options.get("offload_param_device") == "cpu",
        "config": config,
    }


def _parse(name: str, text: str, kind: Callable[[str], _T]) -> _T:
    try:
        return kind(text)  # no sync point: a text
    except ValueError:
        raise ConfigurationError(
            f"DeepSpeed's {name} is a number", found=f"{name}={text!r}"
        ) from None


def with_arguments(
    config: JsonObject,
    stage: int | None,
    offload_optimizer: bool,
    offload_parameters: bool,
) -> JsonObject:
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
        argument = "DeepSpeedStrategy(stage=...)"
        raise _contradiction([("zero_optimization.stage", written, argument, stage)])
    if written == "auto":
        written = 2 if stage is None else stage
    zero["stage"] = written
    # By class: a bool is an int, too.
    if type(written) is not int or not 0 <= written <= 3:
        raise ConfigurationError(
            "the stage of ZeRO must be 0, 1, 2 or 3",
            found=f"stage={written!r}",
            fix="use stage=2, which suits most models",
        )
    _fill_offload(zero, "offload_optimizer", offload_optimizer)
    _fill_offload(zero, "offload_param", offload_parameters)
    return config


def _fill_offload(zero: JsonObject, key: str, wanted: bool) -> None:
    """Write into a section whether something is offloaded; refuse an offload that the stage does not have."""
    section = zero.get(key)
    # First, since what follows compares the device with the argument.
    if isinstance(section, dict) and section.get("device") == "auto":
        section["device"] = "cpu" if wanted else "none"
    if wanted and section is None:
        zero[key] = {"device": "cpu"}
    device = (zero.get(key) or {}).get("device", "none")
    if device == "none":
        if wanted:
            name = f"zero_optimization.{key}.device"
            argument = ("DeepSpeedStrategy", f"{key}=True")
            raise _contradiction([(name, device, *argument)])
        return
    if device == "nvme":
        raise StrategyError(
            "checkpoints do not support state that is offloaded to NVMe",
            found=f'zero_optimization.{key}.device is "nvme"',
            fix='use "cpu"',
        )
    if key == "offload_param" and zero["stage"] != 3:
        raise StrategyError(
            "only stage 3 has parameters to offload",
            found=f"stage {zero['stage']}",
            fix="use stage=3, or offload_optimizer=True",
        )
    if zero["stage"] == 0:
        raise StrategyError(
            "stage 0 has nothing to offload", found=key, fix="use stage=2"
        )


def fill_config(config: SavedState, facts: RunFacts) -> JsonObject:
    """The configuration for ``deepspeed.initialize``: every ``"auto"`` replaced, and checked against the run.

    The run owns accumulation windows: the engine's configuration has one micro-batch per step, and the strategy sets
    the boundary of each window.

    Args:
        config: as `with_arguments` returns it.
        facts: of the run.

    Raises:
        StrategyError: the JSON and the run contradict each other; the error lists all contradictions.

    Example:
        >>> json = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
        >>> config = fill_config(json, RunFacts(batch_size=4))
        >>> config["train_micro_batch_size_per_gpu"], config["bf16"]["enabled"]
        (4, False)
    """
    engine_config = {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if key not in _SECTIONS
    }
    # Before anything is filled in: "auto" never contradicts.
    _check_consistency(engine_config, facts)
    size = facts.batch_size
    if size is None:
        size = _as_number(engine_config.get("train_micro_batch_size_per_gpu")) or 1
    engine_config["train_micro_batch_size_per_gpu"] = size
    # DeepSpeed requires that train_batch_size is the product of the other two and the number of ranks.
    engine_config["gradient_accumulation_steps"] = 1
    engine_config["train_batch_size"] = size * facts.world
    if engine_config.get("gradient_clipping", "auto") == "auto":
        # The strategy passes the Trainer's value to each step.
        engine_config["gradient_clipping"] = 0.0
    for key, precisions in _HALF_PRECISIONS.items():
        enabled = facts.precision in precisions
        if enabled or key in engine_config:
            section = engine_config.get(key, {})
            engine_config[key] = {**section, "enabled": enabled}
    _fill_buckets(engine_config["zero_optimization"], facts.hidden_size)
    for name, default in (
        ("zero_allow_untested_optimizer", True),
        ("zero_force_ds_cpu_optimizer", False),
    ):
        if engine_config.get(name, "auto") == "auto":
            engine_config[name] = default
    return _without_auto(engine_config)  # type: ignore[no-any-return]  # a dict for a dict


def _check_consistency(config: SavedState, facts: RunFacts) -> None:
    """Refuse a JSON that differs from the run."""
    contradictions: list[_Contradiction] = []
    # All contradictions in one error: users correct the file once.
    for key, name, run_value in _values_of_run(facts):
        json_value = _as_number(config.get(key))
        if json_value is None or run_value is None:
            continue
        if json_value != run_value:
            contradictions.append((key, json_value, name, run_value))
    for key, precisions in _HALF_PRECISIONS.items():
        # "auto" follows the run.
        enabled = config.get(key, {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != (facts.precision in precisions):
            contradictions.append(
                (f"{key}.enabled", enabled, "precision", facts.precision)
            )
    if contradictions:
        raise _contradiction(contradictions)
    if facts.clip is not None and facts.clip[1] != "norm":
        raise StrategyError(
            "DeepSpeed clips by norm only",
            found=f"gradient_clip_algorithm={facts.clip[1]!r}",
            fix='use gradient_clip_algorithm="norm"',
        )


def _values_of_run(facts: RunFacts) -> list[tuple[str, str, float | None]]:
    """Keys of the JSON, with the name and the value that the run has for each; None if it is not known."""
    step_size: int | None = None
    if facts.batch_size is not None:
        step_size = facts.batch_size * facts.accumulation * facts.world
    clip = facts.clip[0] if facts.clip is not None else None
    return [
        ("train_micro_batch_size_per_gpu", "the loader's batch_size", facts.batch_size),
        ("gradient_accumulation_steps", "accumulate_grad_batches", facts.accumulation),
        ("train_batch_size", "samples of an optimizer step", step_size),
        ("gradient_clipping", "gradient_clip_val", clip),
    ]


_Contradiction: TypeAlias = tuple[str, object, str, object]
"""A key of the JSON and its value; the name of the run's argument and its value."""


def _contradiction(contradictions: Sequence[_Contradiction]) -> StrategyError:
    facts = [
        f"{key}: {json_value!r}, but {name}: {run_value!r}"
        for key, json_value, name, run_value in contradictions
    ]
    keys = ", ".join(key for key, *_ in contradictions)
    return StrategyError(
        "DeepSpeed's JSON and the arguments of the run are inconsistent",
        found="; ".join(facts),
        fix=f'write "auto" in the JSON ({keys}), or change the argument',
    )


def _as_number(value: object) -> Any:
    """The value if it is a number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _fill_buckets(zero: JsonObject, hidden: int | None) -> None:
    """Derive the bucket sizes from the model, in elements, as Hugging Face's integration does."""
    # "auto" then stays, and `_without_auto` leaves it to DeepSpeed's defaults.
    if hidden is None:
        return
    for key, size in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
        ("stage3_param_persistence_threshold", 10 * hidden),
    ):
        if zero.get(key) == "auto":
            zero[key] = size


def _without_auto(value: object) -> Any:
    """Leave each remaining ``"auto"`` to DeepSpeed's defaults."""
    if not isinstance(value, dict):
        return value
    return {
        key: _without_auto(entry) for key, entry in value.items() if entry != "auto"
    }


_ADAM_OPTIONS: Final = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "torch_adam",
    "adam_w_mode",
    "bias_correction",
)
_OPTIMIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": _ADAM_OPTIONS,
    "AdamW": _ADAM_OPTIONS,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
_WARMUP_OPTIONS: Final = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "last_batch_iteration",
)
_SCHEDULERS: Final[Mapping[str, tuple[str, ...]]] = {
    "WarmupLR": _WARMUP_OPTIONS,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP_OPTIONS),
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
        >>> optimizer = sections.make_optimizer(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> type(optimizer).__name__, optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
        ('AdamW', 0.1, 0.0)
    """

    def __init__(self, config: SavedState) -> None:
        self.optimizer = _read_section(config, "optimizer", _OPTIMIZERS)
        self.scheduler = _read_section(config, "scheduler", _SCHEDULERS)

    def make_optimizer(self, parameters: ParamsT, **values: object) -> Optimizer:
        """Build the optimizer that the JSON names; ``values`` replace its ``"auto"``."""
        assert self.optimizer is not None
        kind = self.optimizer[0]
        options = _replace_auto("optimizer", self.optimizer, values)
        options.setdefault("lr", 1e-3)  # DeepSpeed's default
        if kind == "SGD":
            return torch.optim.SGD(parameters, **options)
        if options.pop("bias_correction", True) is not True:
            raise StrategyError(
                "torch's Adam always applies bias correction",
                found="bias_correction: false",
                fix="leave it out",
            )
        # As DeepSpeed reads them: Adam decays as AdamW does unless adam_w_mode is false; nothing decays by default.
        uses_torch_adam = options.pop("torch_adam", False)
        decoupled = options.pop("adam_w_mode", True) or kind == "AdamW"
        default_decay = 1e-2 if uses_torch_adam and decoupled else 0.0
        options.setdefault("weight_decay", default_decay)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        if decoupled:
            return torch.optim.AdamW(parameters, **options)
        return torch.optim.Adam(parameters, **options)

    def make_scheduler(
        self, optimizer: Optimizer, device: torch.device, **values: object
    ) -> Any:
        """Build the scheduler that the JSON names: DeepSpeed's own, which advances once per optimizer step."""
        assert self.scheduler is not None
        groups = optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]  # sync point: before training
        values = {"warmup_min_lr": 0.0, "warmup_max_lr": max(rates), **values}
        options = _replace_auto("scheduler", self.scheduler, values)
        import_deepspeed(device)
        schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
        with quiet():
            return getattr(schedules, self.scheduler[0])(optimizer, **options)

    def refuse_both(self, section: str, from_script: object) -> None:
        """Refuse an optimizer or scheduler of the script if the JSON names one, too."""
        from_json = getattr(self, section)
        if from_json is not None:
            raise StrategyError(
                f"both DeepSpeed's JSON and the script define the {section}",
                found=f"{from_json[0]!r}, and {type(from_script).__name__}",
                fix=f'remove "{section}" from the JSON; or use none, or Dummy{_SECTIONS[section]}, in the script',
            )


def _read_section(
    config: SavedState,
    name: str,
    options_of_types: Mapping[str, tuple[str, ...]],
) -> tuple[str, JsonObject] | None:
    """The type and the options that a section names; None if the JSON has no such section."""
    section = config.get(name)
    if section is None:
        return None
    written = section.get("type") if isinstance(section, Mapping) else section
    kind: str | None = None
    if isinstance(section, Mapping) and isinstance(written, str):
        # DeepSpeed compares names without regard to case.
        by_lower = {known_type.lower(): known_type for known_type in options_of_types}
        kind = by_lower.get(written.lower())
    if kind is None:
        article = "an" if name == "optimizer" else "a"
        raise StrategyError(
            f"DeepSpeed's JSON names {article} {name} that is not supported",
            found=repr(written),
            fix=f"{', '.join(options_of_types)}; or remove the section, and create the {name} in the script",
        )
    options = dict(section.get("params") or {})
    for key in options:
        if key not in options_of_types[kind]:
            raise StrategyError(
                f"unknown option of DeepSpeed's {kind}",
                found=f"{name}.params.{key}",
                fix=did_you_mean(key, options_of_types[kind]),
            )
    return kind, options


def _replace_auto(
    name: str, section: tuple[str, JsonObject], values: SavedState
) -> JsonObject:
    kind, written = section
    options = dict(written)
    for key, value in written.items():
        if value != "auto":
            continue
        if values.get(key) is None:
            raise StrategyError(
                f'"auto" has no value in DeepSpeed\'s {kind}',
                found=f"{name}.params.{key}",
                fix=f"write a number, or pass it to Dummy{_SECTIONS[name]}",
            )
        options[key] = values[key]
    return options
