"""Convert Lightning's ``.ckpt`` files to checkpoints, and checkpoints to ``.ckpt`` files.

Both hold weights, hyperparameters, optimizers, schedulers, the loss scale, and how far training is. Lightning keeps
optimizer state by the position of a parameter; here it has the parameter's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.files import EXTRA_STATE, tensors_of, torch_load
from trainer_kit.checkpoint.read import RUN_PARTS
from trainer_kit.checkpoint.torch_plain import as_plain
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location
from trainer_kit.core.state_names import without_wrappers

__all__ = ["BY_POSITION", "import_lightning", "lightning_hparams", "to_lightning"]

BY_POSITION: Final = "by_position"
"""Marks the state of an optimizer whose parameters have no names: ``group<g>.<i>`` is the i-th of group g."""
_VERSION: Final = "pytorch-lightning_version"
_WRITTEN_AS: Final = "2.5.0"
_SCALE: Final = ("MixedPrecision", "native_amp_scaling_state")
_LIGHTNINGS: Final = frozenset(
    (
        *(
            "epoch",
            "global_step",
            _VERSION,
            "state_dict",
            "loops",
            "callbacks",
            "optimizer_states",
            "lr_schedulers",
        ),
        *("hparams_name", "hparams_type", "hyper_parameters", *_SCALE),
        *(
            "datamodule_hparams_name",
            "datamodule_hparams_type",
            "datamodule_hyper_parameters",
        ),
    )
)
_COUNTS: Final = ("ready", "started", "processed", "completed")


def import_lightning(
    file: str | os.PathLike[str], target: str | os.PathLike[str] | None = None
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
    content = torch_load(source, "cpu")
    if not isinstance(content, dict) or not {_VERSION, "state_dict"} <= content.keys():
        raise CheckpointError(
            source,
            None,
            f"not a checkpoint of Lightning: it has no {_VERSION!r}",
            fix="read it with read_weights",
        )
    weights = without_wrappers(content["state_dict"])
    extra = {
        name: value
        for name, value in weights.items()
        if str(name).endswith(EXTRA_STATE)
    }
    state: dict[str, Any] = {
        "model": {**tensors_of(source, weights, source.stat().st_size), **extra},
        "hyper_parameters": lightning_hparams(content),
        "epoch": content.get("epoch", 0),
        "global_step": content.get("global_step", 0),
        **{name: value for name, value in content.items() if name not in _LIGHTNINGS},
    }
    if "optimizer_states" in content:
        state |= _run_parts(source, content)
    progress = state.get(
        "progress", {"epoch": state["epoch"], "step": state["global_step"]}
    )
    info = {
        "epoch": progress["epoch"],
        "step": progress["step"],
        "left_out": sorted(content.get("callbacks") or ()),
    }
    return write_checkpoint(
        source.with_suffix("") if target is None else target, state, info=info
    )


def lightning_hparams(content: Mapping[str, Any]) -> Any:
    """The hyperparameters of a file as constructor arguments; a mapping that was the only argument gets its name."""
    hparams, name = content.get("hyper_parameters", {}), content.get("hparams_name")
    return hparams if name in (None, "kwargs") else {name: hparams}


def _run_parts(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
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
    return {
        "optimizer_states": [
            _optimizer_by_group(one) for one in content["optimizer_states"]
        ],
        "lr_schedulers": content.get("lr_schedulers", []),
        "precision": next((content[name] for name in _SCALE if name in content), {}),
        "progress": progress,
        "datamodule_hyper_parameters": content.get("datamodule_hyper_parameters", {}),
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
    batches, epochs = (
        loop["epoch_loop.batch_progress"],
        loop["epoch_progress"]["current"],
    )
    running = epochs["processed"] < epochs["started"]
    ended = running and batches["is_last_batch"]
    automatic = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"][
        "step"
    ]["total"]["completed"]
    manual = loop["epoch_loop.manual_optimization.optim_step_progress"]["total"][
        "completed"
    ]
    return {
        "epoch": epochs["processed"] + int(ended),
        "batch": batches["total"]["processed"],
        "step": batches["total"]["processed"]
        if manual and not automatic
        else automatic,
        "epoch_batch": batches["current"]["processed"] if running and not ended else 0,
    }


def _optimizer_by_group(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Torch's ``state_dict`` of an optimizer with ``group<g>.<i>`` in place of a number."""
    groups, names = [], {}
    for number, group in enumerate(saved["param_groups"]):
        own = {
            parameter: f"group{number}.{i}"
            for i, parameter in enumerate(group["params"])
        }
        names.update(own)
        groups.append({**group, "params": list(own.values())})
    state = {names[parameter]: dict(one) for parameter, one in saved["state"].items()}
    return {"state": state, "param_groups": groups, BY_POSITION: True}


def to_lightning(state: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a Lightning file: ``load_from_checkpoint`` and ``fit(ckpt_path=...)`` of Lightning 2 read it.

    Objects become plain data, and classes and functions their import path, so that ``torch.load(weights_only=True)``
    reads the file.

    Args:
        state: the parts of a checkpoint, with its weights under ``state_dict``; weights alone are enough.
    """
    hparams = {
        k: v for k, v in state.get("hyper_parameters", {}).items() if not _is_masked(v)
    }
    content: dict[str, Any] = {
        "epoch": state.get("epoch", 0),
        "global_step": state.get("global_step", 0),
        _VERSION: _WRITTEN_AS,
        **{name: value for name, value in state.items() if name not in RUN_PARTS},
        "hparams_name": "kwargs",
        "hyper_parameters": hparams,
    }
    if "optimizer_states" in state:
        content |= {
            "loops": {
                "fit_loop": _loop(state["progress"]),
                "validate_loop": {},
                "test_loop": {},
                "predict_loop": {},
            },
            "callbacks": {},
            "optimizer_states": [
                _optimizer_by_number(one) for one in state["optimizer_states"]
            ],
            "lr_schedulers": state["lr_schedulers"],
            "datamodule_hyper_parameters": state.get("datamodule_hyper_parameters", {}),
            **({_SCALE[0]: state["precision"]} if state["precision"] else {}),
            **{
                name: state[name]
                for name in ("averaging_state", "current_model_state")
                if name in state
            },
        }
    return {
        name: part if name == "state_dict" else as_plain(part)
        for name, part in content.items()
    }


def _is_masked(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"repr"}


def _loop(done: Mapping[str, int]) -> dict[str, Any]:
    """The state of Lightning's training loop between two batches; it takes no loop's state that is missing."""

    def counts(number: int, begun: int = 0) -> dict[str, int]:
        return {
            name: number + (begun if name in _COUNTS[:2] else 0) for name in _COUNTS
        }

    epoch, batch = done["epoch"], done["epoch_batch"]
    epochs = counts(epoch, begun=1 if batch else 0)
    step = {"total": counts(done["step"]), "current": counts(0)}
    return {
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
        "epoch_loop.state_dict": {"_batches_that_stepped": done["step"]},
        "epoch_loop.batch_progress": {
            "total": counts(done["batch"]),
            "current": counts(batch),
            "is_last_batch": not batch,
        },
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": step, "zero_grad": step}
        },
        "epoch_loop.manual_optimization.optim_step_progress": step,
    }


def _optimizer_by_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    number = count()
    groups, numbers = [], {}
    for group in saved["param_groups"]:
        own = {name: next(number) for name in group["params"]}
        numbers.update(own)
        groups.append({**group, "params": list(own.values())})
    state: dict[int, dict[str, Tensor]] = {
        numbers[n]: one for n, one in saved["state"].items() if n in numbers
    }
    return {"state": state, "param_groups": groups}
