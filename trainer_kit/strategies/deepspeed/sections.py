"""The optimizer and the scheduler that DeepSpeed's JSON names: torch's, and DeepSpeed's own schedules."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.strategies.deepspeed.library import deepspeed_of, quiet

__all__ = ["Sections"]

_ADAM: Final = ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "bias_correction")
_OPTIMIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
_WARMUP: Final = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
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
    """``"optimizer"`` and ``"scheduler"`` of DeepSpeed's JSON.

    Args:
        config: the JSON.

    Raises:
        StrategyError: for a type or an option whose meaning is not plain.

    Example:
        >>> sections = Sections({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
        >>> made = sections.make_optimizer(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> type(made).__name__, made.defaults["lr"], made.defaults["weight_decay"]
        ('AdamW', 0.1, 0.0)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.optimizer = _read(config, "optimizer", _OPTIMIZERS)
        self.scheduler = _read(config, "scheduler", _SCHEDULERS)

    def make_optimizer(self, parameters: Iterable[Any], **said: Any) -> Optimizer:
        """That of the JSON; ``said`` is what its ``"auto"`` stands for."""
        assert self.optimizer is not None
        kind, options = self.optimizer[0], _without_auto("optimizer", self.optimizer, said)
        options.setdefault("lr", 1e-3)  # DeepSpeed's
        if kind == "SGD":
            return torch.optim.SGD(parameters, **options)
        if options.pop("bias_correction", True) is not True:
            raise StrategyError("torch's Adam corrects its bias", found="bias_correction: false", fix="take it out")
        # As DeepSpeed reads them: Adam decays as AdamW does unless adam_w_mode is false; nothing decays by default.
        by_torch, decoupled = options.pop("torch_adam", False), options.pop("adam_w_mode", True) or kind == "AdamW"
        options.setdefault("weight_decay", 1e-2 if by_torch and decoupled else 0.0)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **options)

    def make_scheduler(self, optimizer: Optimizer, device: torch.device, **said: Any) -> Any:
        """That of the JSON, DeepSpeed's own, which advances once an optimizer step; ``said`` as above."""
        assert self.scheduler is not None
        rates = [float(group["lr"]) for group in optimizer.param_groups]  # sync point: before the first step
        known = {"warmup_min_lr": 0.0, "warmup_max_lr": max(rates), **said}
        options = _without_auto("scheduler", self.scheduler, known)
        deepspeed_of(device)
        schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
        with quiet():
            return getattr(schedules, self.scheduler[0])(optimizer, **options)

    def refuse_both(self, section: str, own: Any) -> None:
        """The JSON says one thing, and the script another."""
        if getattr(self, section) is not None:
            raise StrategyError(
                f"DeepSpeed's JSON names the {section}, and so does the script",
                found=f"{getattr(self, section)[0]!r}, and {type(own).__name__}",
                fix=f'take "{section}" out of the JSON; or configure none, or Dummy{_DUMMY[section]}, in the script',
            )


_DUMMY: Final = {"optimizer": "Optim", "scheduler": "Scheduler"}


def _read(
    config: Mapping[str, Any], name: str, known: Mapping[str, tuple[str, ...]]
) -> tuple[str, dict[str, Any]] | None:
    section = config.get(name)
    if section is None:
        return None
    kind = section.get("type") if isinstance(section, Mapping) else section
    by_lower = {word.lower(): word for word in known}
    if not isinstance(kind, str) or kind.lower() not in by_lower or not isinstance(section, Mapping):
        raise StrategyError(
            f"this {name} of DeepSpeed's JSON is not made here",
            found=repr(kind),
            fix=f"{', '.join(known)}; or take the section out, and make the {name} in the script",
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


def _without_auto(name: str, section: tuple[str, dict[str, Any]], said: Mapping[str, Any]) -> dict[str, Any]:
    kind, written = section
    options = dict(written)
    for key, value in written.items():
        if value != "auto":
            continue
        if said.get(key) is None:
            raise StrategyError(
                f'nobody says what "auto" stands for in DeepSpeed\'s {kind}',
                found=f"{name}.params.{key}",
                fix=f"write a number, or say it in Dummy{_DUMMY[name]}",
            )
        options[key] = said[key]
    return options
