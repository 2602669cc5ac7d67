"""The Trainer's arguments that decide how an entry point is composed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from trainer_kit.core.configuration_sources import Chosen
from trainer_kit.strategies.transforms.blocks import Policy

__all__ = ["Arguments", "CompileOptions", "CompositionOptions"]

# Plain data of any kind, by the name of the argument.
Arguments: TypeAlias = Mapping[str, Any]

# Whatever the installed version of torch.compile takes.
CompileOptions: TypeAlias = Mapping[str, object]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CompositionOptions:
    """How the entry points of a Trainer are composed; limits and intervals are `Settings`.

    Attributes:
        arguments: the Trainer's arguments as plain data, for the run's record.
        origins: the source of each value that a launcher or a file may give.
        switches: process-wide settings of torch that an entry point sets.
        compile_options: options of ``torch.compile``; None: nothing is compiled.
        compile_regional: whether repeated blocks are compiled, not the whole step.
        captures_steps: whether forward and backward run as captured graphs.
        recomputes: the blocks with activation checkpointing; True: repeated ones, False: none.
        async_save: whether checkpoints are written in the background.
        drops_unsaveable: whether checkpoints leave out values that they cannot hold.
        optimizer_kernel: which of torch's kernels optimizers use; None: as the user made them.
        barebones: whether everything that costs time in a step is off.
        fast_dev_run: the argument of this name.
        is_silent: whether `print` and `say` print nothing, as in a trial.
    """

    arguments: Arguments
    origins: Mapping[str, Chosen] = field(default_factory=dict)
    switches: Mapping[str, bool | str | None] = field(default_factory=dict)
    compile_options: CompileOptions | None = None
    compile_regional: bool = False
    captures_steps: bool = False
    recomputes: bool | Policy = False
    async_save: bool = False
    drops_unsaveable: bool = False
    optimizer_kernel: str | None = None
    barebones: bool = False
    fast_dev_run: bool | int = False
    is_silent: bool = False
