"""The directories of saved states: which one a call means, what hooks write into it, and which old ones are deleted."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final, final

from trainer_kit.accelerator.processes import Processes
from trainer_kit.checkpoint.commit import (
    clean_incomplete,
    io_failure,
    remove_checkpoint,
    stage,
)
from trainer_kit.checkpoint.manifest import check_content, read_manifest
from trainer_kit.checkpoint.read import missing_checkpoint
from trainer_kit.checkpoint.store import checkpoints, newest_verified, similar
from trainer_kit.core.collective_errors import fail_together, on_rank_zero
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import absolute
from trainer_kit.options.records import ProjectConfiguration

__all__ = [
    "StateDirectories",
    "local_directory",
    "stage_state",
    "verified_hook_directory",
]

_Path = str | os.PathLike[str]

_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
_NUMBER_IN_USE: Final = re.compile(r"checkpoint_(\d+)(?:\..*)?")
"""Also of a checkpoint that was set aside as damaged, or of files beside one."""


@final
class StateDirectories:
    """Chooses and deletes the directories of states.

    Args:
        processes: the processes of the run; the main one decides.
        project: the configuration of the project's directories; it counts the saves.
    """

    def __init__(self, processes: Processes, project: ProjectConfiguration) -> None:
        self._processes = processes
        self._world = processes.world
        self._project = project

    @property
    def iteration(self) -> int:
        """The number of the next automatically named state."""
        return self._project.iteration

    def count_save(self) -> None:
        """Give the next state the next number."""
        self._project.iteration += 1

    def continue_after(self, path: Path, saved_iteration: int) -> None:
        """Number the next state after one that was loaded.

        Args:
            path: the loaded state; its name has its number if it was named automatically.
            saved_iteration: the number that the state itself contains.
        """
        match = _NUMBERED.fullmatch(path.name)
        iteration = saved_iteration if match is None else int(match[1])
        self._project.iteration = iteration + 1

    def target(self, output_dir: _Path | None) -> Path:
        """Return the directory of the next save; collective call."""
        if output_dir is None or self._project.automatic_checkpoint_naming:
            output_dir = self._next_path()
        return self._path_of_main_process(output_dir)

    def source(self, input_dir: _Path | None) -> Path:
        """Return the directory to load, by default the project's newest intact one; collective call.

        Raises:
            CheckpointError: there is no such directory.
        """
        if input_dir is not None:
            path = self._path_of_main_process(input_dir)
            fail_together(self._world, lambda: _check_exists(path))
            return path
        root = self._root(
            "load_state", "pass it, or the project's: Accelerator(project_dir=...)"
        )
        newest = on_rank_zero(self._world, lambda: self._newest_intact(root))
        return Path(newest)

    def prune(self, newest: Path) -> None:
        """Delete the oldest checkpoints beyond the limit, except ``newest``; called when that one is durable."""
        limit = self._project.total_limit
        if limit is None or not self._project.automatic_checkpoint_naming:
            return
        earlier_states = []
        for record in checkpoints(newest.parent):
            name = record.path.name
            if _NUMBERED.fullmatch(name) and name != newest.name:
                earlier_states.append(record.path)
        # `newest` counts too, and stays whatever the limit is.
        excess = len(earlier_states) + 1 - max(1, limit)
        for path in earlier_states[: max(0, excess)]:
            remove_checkpoint(path)
            shutil.rmtree(_legacy_hook_directory(Path(str(path))), ignore_errors=True)

    def _path_of_main_process(self, path: _Path) -> Path:
        # A script may have made a temporary directory on each process.
        return Path(on_rank_zero(self._world, lambda: str(local_directory(path))))

    def _root(self, call: str, fix: str) -> Path:
        """Return the directory of the project's checkpoints."""
        if self._project.project_path is None:
            raise ConfigurationError(f"{call} needs a directory", fix=fix)
        return local_directory(self._project.project_path) / "checkpoints"

    def _newest_intact(self, root: Path) -> str:
        newest, damaged = newest_verified(root)
        for path, problem in damaged:
            self._processes.print(
                f"checkpoint {path.name} rejected: {problem.reason}; falling back to {newest and newest.name}"
            )
        if newest is None:
            raise missing_checkpoint(
                root, "this directory contains no checkpoint that can be loaded"
            )
        return str(newest)

    def _next_path(self) -> Path:
        root = self._root(
            "save_state", "pass it, or let Accelerator(project_dir=...) name it"
        )

        def next_number() -> int:
            matches = map(_NUMBER_IN_USE.fullmatch, _entries(root))
            free_numbers = [int(match[1]) + 1 for match in matches if match is not None]
            return max([self._project.iteration, *free_numbers])

        # Of the main process: others may see an older listing of a shared file system.
        self._project.iteration = on_rank_zero(self._world, next_number)
        return root / f"checkpoint_{self._project.iteration}"


def local_directory(path: _Path) -> Path:
    """Return a local directory; hooks write their files next to the state, which a URL does not support."""
    location = absolute(path)
    if not isinstance(location, Path):
        raise ConfigurationError(
            "an Accelerator saves to local directories only",
            found=str(location),
            fix="save to a local path; a Trainer can save checkpoints to a URL",
        )
    return location


def stage_state(target: Path) -> Path:
    """Make the directory in which hooks write; it replaces an empty directory that the user made for the state."""
    try:
        if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            target.rmdir()
        # Processes that were killed during a save leave incomplete directories.
        clean_incomplete(target.parent)
    except OSError as error:
        raise io_failure(target, error, 0) from error
    return stage(target)


def verified_hook_directory(path: Path) -> Path:
    """Verify the files that hooks wrote, and return their directory."""
    manifest = read_manifest(path)
    check_content(path, manifest, list(manifest.get("extra", ())))
    if "extra" in manifest:
        return path
    legacy = _legacy_hook_directory(path)
    return legacy if legacy.is_dir() else path


def _legacy_hook_directory(path: Path) -> Path:
    """Return the directory in which older versions stored the files of hooks."""
    return path.with_name(f"{path.name}.files")


def _check_exists(path: Path) -> None:
    if path.is_dir():
        return
    reason = "this path contains no checkpoint"
    if path.exists():
        reason = "this is a file, not a directory of a state"
    raise missing_checkpoint(path, reason, fix=similar(path))


def _entries(root: Path) -> list[str]:
    # Before the first save there is no directory.
    return os.listdir(root) if root.is_dir() else []
