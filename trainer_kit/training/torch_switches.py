"""Sets torch's process-wide switches for one entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trainer_kit.core.devices import deterministic_products

__all__ = ["set_switches"]


def set_switches(
    switches: Mapping[str, bool | str | None],
) -> Callable[[BaseException | None], None]:
    """Set torch's switches to the Trainer's arguments of their names; returns a function that restores them."""
    # The switches are the process's: what runs after this entry point, such as another Trainer, must find its own.
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled()
    benchmark = torch.backends.cudnn.benchmark
    restore_products: Callable[[], None] | None = None
    if switches["deterministic"]:
        restore_products = deterministic_products()
        torch.use_deterministic_algorithms(
            True, warn_only=switches["deterministic"] == "warn"
        )
    # None leaves the process's own setting.
    if switches["benchmark"] is not None:
        torch.backends.cudnn.benchmark = bool(switches["benchmark"])
    if switches["detect_anomaly"]:
        torch.autograd.set_detect_anomaly(True)

    def restore(error: BaseException | None) -> None:
        if restore_products is not None:
            restore_products()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)

    return restore
