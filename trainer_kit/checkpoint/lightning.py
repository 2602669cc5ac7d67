"""Convert Lightning's ``.ckpt`` files to checkpoints, and checkpoints to ``.ckpt`` files.

Both hold weights, hyperparameters, optimizers, schedulers, the loss scale, and how far training is. Lightning keeps
optimizer state by the position of a parameter; here it has the parameter's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.files import tensors_of, torch_load
from trainer_kit.checkpoint.read import RUN_PARTS
from trainer_kit.checkpoint.torch_plain import as_plain
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hparams import HParams
from trainer_kit.core.location import Location
from trainer_kit.core.state_names import without_wrappers
from trainer_kit.core.torch_private import EXTRA_STATE

__all__ = [
    "BY_POSITION",
    "datamodule_hparams",
    "import_lightning",
    "lightning_hparams",
    "to_lightning",
]

BY_POSITION: Final = "by_position"
"""Marks the state of an optimizer whose parameters have no names: ``group<g>.<i>`` is the i-th of group g."""
_Content = dict[str, Any]
"""The content of a Lightning file, or a part of it, by name."""
_VERSION: Final = "pytorch-lightning_version"
_WRITTEN_VERSION: Final = "2.5.0"
_SCALE_ENTRIES: Final = ("MixedPrecision", "native_amp_scaling_state")
_LIGHTNING_ENTRIES: Final = frozenset(
    (
        "epoch",
        "global_step",
        _VERSION,
        "state_dict",
        "loops",
        "callbacks",
        "optimizer_states",
        "lr_schedulers",
        "hparams_name",
        "hparams_type",
        "hyper_parameters",
        *_SCALE_ENTRIES,
        "datamodule_hparams_name",
        "datamodule_hparams_type",
        "datamodule_hyper_parameters",
    )
)
"""Entries of Lightning itself; all others are of ``on_save_checkpoint``."""


def import_lightning(
    file: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
) -> Location:
    """Write the content of a Lightning file as a checkpoint, which `fit(ckpt_path=...)` continues.

    The state of callbacks and the loops of validation and test are not taken over; ``read_info(path)["left_out"]``
    lists the callbacks. Lightning's files hold no random states and no number of samples. A file without optimizers
    (``save_weights_only=True``) becomes a checkpoint of weights.

    Args:
        file: the ``.ckpt`` file. It is read with ``torch.load(weights_only=True)``, which runs no code.
        target: the directory to write, or its URL; by default ``file`` without its suffix.

    Returns:
        ``target``, absolute.

    Raises:
        CheckpointError: ``file`` is not a file of Lightning 2, or needs classes that could run code; or ``target``
            exists.

    Example:
        >>> import tempfile, torch
        >>> content = {"pytorch-lightning_version": "2.5.0", "epoch": 2, "global_step": 8, "state_dict": {}}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.save(content, f"{directory}/last.ckpt")
        ...     sorted(path.name for path in import_lightning(f"{directory}/last.ckpt").iterdir())
        ['manifest.json', 'state.json']
    """
    source = Path(file)
    # On the CPU: the devices of the run that wrote the file may not exist here.
    content = torch_load(source, "cpu")
    if not isinstance(content, dict) or not {_VERSION, "state_dict"} <= content.keys():
        raise CheckpointError(
            source,
            None,
            f"not a checkpoint of Lightning: it has no {_VERSION!r}",
            fix="read it with read_weights",
        )
    epoch, step = content.get("epoch", 0), content.get("global_step", 0)
    state: _Content = {
        "model": _weights(source, content),
        "hyper_parameters": content.get("hyper_parameters", {}),
        **_names_of_hparams(content, "hparams_name"),
        "epoch": epoch,
        "global_step": step,
    }
    # Before the parts for resuming, which an entry of a hook must not replace.
    state |= {
        name: value for name, value in content.items() if name not in _LIGHTNING_ENTRIES
    }
    # A file of Lightning without optimizers (save_weights_only=True) becomes a checkpoint of weights.
    if "optimizer_states" in content:
        state |= _run_parts(source, content)
    progress = state.get("progress", {"epoch": epoch, "step": step})
    info = {
        "epoch": progress["epoch"],
        "step": progress["step"],
        "left_out": sorted(content.get("callbacks") or ()),
    }
    # Beside the file: the checkpoint of "last.ckpt" is the directory "last".
    if target is None:
        target = source.with_suffix("")
    return write_checkpoint(target, state, info=info)


def _weights(file: Path, content: Mapping[str, Any]) -> _Content:
    """Tensors and extra state of the module."""
    weights = without_wrappers(content["state_dict"])
    extra_state = {
        name: value
        for name, value in weights.items()
        if str(name).endswith(EXTRA_STATE)
    }
    return {**tensors_of(file, weights, file.stat().st_size), **extra_state}


def lightning_hparams(content: Mapping[str, Any]) -> Any:
    """The hyperparameters of a file as constructor arguments; a mapping that was the only argument gets its name."""
    return _as_arguments(content, "hyper_parameters", "hparams_name")


def datamodule_hparams(content: Mapping[str, Any]) -> Any:
    """The same for the datamodule of a file."""
    names = "datamodule_hyper_parameters", "datamodule_hparams_name"
    return _as_arguments(content, *names)


def _as_arguments(content: Mapping[str, Any], values: str, argument: str) -> Any:
    hparams, name = content.get(values, {}), content.get(argument)
    if name in (None, "kwargs"):
        return hparams
    # The constructor may read attributes or keys: it got a namespace or a mapping.
    if isinstance(hparams, Mapping):
        hparams = HParams(hparams)
    return {name: hparams}


def _names_of_hparams(content: Mapping[str, Any], argument: str) -> dict[str, str]:
    name = content.get(argument)
    # Lightning's word for hyperparameters that are separate arguments, which is the default here.
    if name in (None, "kwargs"):
        return {}
    return {argument: str(name)}


def _run_parts(file: Path, content: Mapping[str, Any]) -> _Content:
    """The parts that a resumed run restores."""
    try:
        progress = _progress(content["loops"]["fit_loop"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            file,
            "loops",
            f"it does not contain the progress of a Lightning 2 run ({content[_VERSION]} wrote it)",
            fix="run python -m lightning.pytorch.utilities.upgrade_checkpoint FILE, with Lightning 2, and import that",
        ) from error
    # Lightning 1 and 2 keep the loss scale under different names.
    scales = [content[name] for name in _SCALE_ENTRIES if name in content]
    optimizers = [_name_by_group(saved) for saved in content["optimizer_states"]]
    return {
        "optimizer_states": optimizers,
        "lr_schedulers": content.get("lr_schedulers", []),
        "precision": next(iter(scales), {}),
        "progress": progress,
        "datamodule_hyper_parameters": content.get("datamodule_hyper_parameters", {}),
        **_names_of_hparams(content, "datamodule_hparams_name"),
        "callbacks": {},
        "datamodule": {},
        "metrics": [{}],
        "rng": [],
    }


def _progress(loop: Mapping[str, Any]) -> dict[str, int]:
    """Our counts from those of Lightning's training loop.

    A callback saves while a batch is processed and not yet completed, so the processed ones count. An epoch whose last
    batch is processed is finished, also where Lightning's ``epoch`` still names it (in ``on_validation_end``). A
    step of manual optimization is a batch here.
    """
    # A file of Lightning 1 has other keys: the caller turns the KeyError into advice.
    batches = loop["epoch_loop.batch_progress"]
    epochs = loop["epoch_progress"]["current"]
    # Lightning counts an epoch as started before its first batch, and as processed after its last hook.
    is_running = epochs["processed"] < epochs["started"]
    has_ended = is_running and batches["is_last_batch"]
    optimizers = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    automatic_steps = optimizers["step"]["total"]["completed"]
    manual_progress = loop["epoch_loop.manual_optimization.optim_step_progress"]
    manual_steps = manual_progress["total"]["completed"]
    batch = batches["total"]["processed"]
    step, epoch_batch = automatic_steps, 0
    # Lightning's step counts each call of an optimizer's step() there, of which one batch may have several.
    if manual_steps and not automatic_steps:
        step = batch
    if is_running and not has_ended:
        epoch_batch = batches["current"]["processed"]
    return {
        "epoch": epochs["processed"] + int(has_ended),
        "batch": batch,
        "step": step,
        "epoch_batch": epoch_batch,
    }


def _name_by_group(saved: Mapping[str, Any]) -> _Content:
    """Torch's ``state_dict`` of an optimizer with ``group<g>.<i>`` in place of a number."""
    groups = []
    names: dict[int, str] = {}
    for group_index, group in enumerate(saved["param_groups"]):
        group_names = []
        for index, parameter in enumerate(group["params"]):
            # Lightning's file has numbers only; the names say that a parameter is found by its place in the optimizer.
            names[parameter] = f"group{group_index}.{index}"
            group_names.append(names[parameter])
        groups.append({**group, "params": group_names})
    state = {
        names[parameter]: dict(values) for parameter, values in saved["state"].items()
    }
    return {"state": state, "param_groups": groups, BY_POSITION: True}


def to_lightning(state: Mapping[str, Any]) -> _Content:
    """The content of a Lightning file: ``load_from_checkpoint`` and ``fit(ckpt_path=...)`` of Lightning 2 read it.

    Objects become plain data, and classes and functions their import path, so that ``torch.load(weights_only=True)``
    reads the file.

    Args:
        state: the parts of a checkpoint, with its weights under ``state_dict``; weights alone are enough.
    """
    hparams = state.get("hyper_parameters", {})
    content: _Content = {
        "epoch": state.get("epoch", 0),
        "global_step": state.get("global_step", 0),
        _VERSION: _WRITTEN_VERSION,
        **{name: value for name, value in state.items() if name not in RUN_PARTS},
        "hparams_name": state.get("hparams_name", "kwargs"),
        # Only the repr of a masked value is known, which is no argument that a constructor could use.
        "hyper_parameters": {
            name: value for name, value in hparams.items() if not _is_masked(value)
        },
    }
    if "optimizer_states" in state:
        content |= _run_entries(state)
    # The weights are tensors already; everything else may hold objects.
    for name, value in content.items():
        if name != "state_dict":
            content[name] = as_plain(value)
    return content


def _run_entries(state: Mapping[str, Any]) -> _Content:
    """What Lightning needs to continue the run."""
    loops = {"fit_loop": _fit_loop(state["progress"])}
    loops.update(validate_loop={}, test_loop={}, predict_loop={})
    entries: _Content = {
        "loops": loops,
        "callbacks": {},
        "optimizer_states": [
            _number_parameters(saved) for saved in state["optimizer_states"]
        ],
        "lr_schedulers": state["lr_schedulers"],
        "datamodule_hyper_parameters": state.get("datamodule_hyper_parameters", {}),
        "datamodule_hparams_name": state.get("datamodule_hparams_name", "kwargs"),
    }
    if state["precision"]:
        entries[_SCALE_ENTRIES[0]] = state["precision"]
    # Entries of weight averaging, under the names of Lightning's callback.
    for name in ("averaging_state", "current_model_state"):
        if name in state:
            entries[name] = state[name]
    return entries


def _is_masked(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"repr"}


def _fit_loop(progress: Mapping[str, int]) -> _Content:
    """The state of Lightning's training loop between two batches; it takes no loop's state that is missing."""
    epoch_batch = progress["epoch_batch"]
    epochs = _counts(progress["epoch"])
    # Inside an epoch, which has begun and is not processed.
    if epoch_batch:
        epochs["ready"] += 1
        epochs["started"] += 1
    # Manual steps too: Lightning reads the one that its module uses.
    step = {"total": _counts(progress["step"]), "current": _counts(0)}
    return {
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
        "epoch_loop.state_dict": {"_batches_that_stepped": progress["step"]},
        "epoch_loop.batch_progress": {
            "total": _counts(progress["batch"]),
            "current": _counts(epoch_batch),
            "is_last_batch": not epoch_batch,
        },
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": step, "zero_grad": step}
        },
        "epoch_loop.manual_optimization.optim_step_progress": step,
    }


def _counts(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), number)


def _number_parameters(saved: Mapping[str, Any]) -> _Content:
    """Torch's ``state_dict`` of an optimizer, with a number in place of each name."""
    groups = []
    numbers: dict[str, int] = {}
    count = 0
    for group in saved["param_groups"]:
        group_numbers = []
        for name in group["params"]:
            numbers[name] = count
            group_numbers.append(count)
            count += 1
        groups.append({**group, "params": group_numbers})
    state = {
        numbers[name]: values
        for name, values in saved["state"].items()
        # Without parameters that the groups no longer contain, which Lightning's optimizer would refuse.
        if name in numbers
    }
    return {"state": state, "param_groups": groups}
