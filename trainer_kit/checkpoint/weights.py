"""Weights from wherever they come: our checkpoints, safetensors, ``torch.save``, Lightning, DeepSpeed."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_kit.checkpoint.codec import decode
from trainer_kit.checkpoint.deepspeed import find_deepspeed
from trainer_kit.checkpoint.deepspeed_content import deepspeed_weights
from trainer_kit.checkpoint.files import read_tensors
from trainer_kit.checkpoint.huggingface import find_weight_files, holds_weight_files, read_weight_files
from trainer_kit.checkpoint.layout import Chunk, TensorLayout, read_layout, tensors_in
from trainer_kit.checkpoint.manifest import DOCUMENT, check_content, check_files, is_sharded, read_manifest, shards_of
from trainer_kit.checkpoint.pickles import EXTRA_STATE, tensors_of, torch_load
from trainer_kit.checkpoint.read import descriptions, read_checkpoint, read_trees
from trainer_kit.checkpoint.remote import fetched
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, locate

__all__ = ["map_weights", "read_module", "read_weights", "weight_layout", "weight_shapes"]

_ZIP, _PICKLE, _JSON = b"PK", b"\x80", b"{"


def read_weights(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A module's tensors by name, for ``module.load_state_dict``.

    Args:
        path: a checkpoint directory of ours (its part ``model``); a safetensors file, or a directory of them as Hugging
            Face writes it; a ``torch.save`` file that holds a state_dict; or a Lightning ``.ckpt`` (its
            ``state_dict``); or a directory of DeepSpeed's, universal or without ZeRO. The content decides, not the
            suffix.
        device: where the tensors go.

    Raises:
        CheckpointError: for anything else. ``torch.save`` files are read with ``weights_only=True`` and no other way:
            one that needs more could run code, and is refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, f"{directory}/old.ckpt")
        ...     read_weights(f"{directory}/old.ckpt")
        {'w': tensor([1., 1.])}
    """
    file = locate(path)
    if isinstance(file, Path) and holds_weight_files(file):
        return read_weight_files(find_weight_files(file), device)
    if isinstance(file, Path) and (theirs := find_deepspeed(file)) is not None:
        return deepspeed_weights(theirs, device)
    if file.is_dir():
        return tensors_of(file, read_checkpoint(file, parts=["model"], device=device)["model"])
    if isinstance(file, RemotePath):
        with fetched(file.parent, [file.name]) as here:
            return read_weights(here / file.name, device)
    start = _start(file)
    if start[8:] == _JSON:  # behind the length of the header
        return read_tensors(file, device)
    if start.startswith((_ZIP, _PICKLE)):
        return tensors_of(file, _state_dict(torch_load(file, device)), file.stat().st_size)
    raise CheckpointError(
        file,
        None,
        "this is neither a checkpoint directory, nor safetensors, nor a torch.save file",
        fix="check how it was written, and whether it was copied in full",
    )


def weight_shapes(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """As `read_weights`, on torch's ``meta`` device: only headers are read, whatever the size.

    Raises:
        CheckpointError: for anything but a checkpoint directory of ours, a safetensors file, or a directory of them.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     weight_shapes(write_checkpoint(f"{directory}/step-3", {"model": {"w": torch.ones(2, 3)}}))
        {'w': tensor(..., device='meta', size=(2, 3))}
    """
    return {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in weight_layout(path)[1].items()
    }


def weight_layout(
    path: str | os.PathLike[str], *, index: Path | None = None, verify: bool = False
) -> tuple[Path, dict[str, TensorLayout]]:
    """Where each tensor of a module lies, for reading one at a time: a directory, and chunks of its files.

    Args:
        path: as for `weight_shapes`.
        index: the index of safetensors files, where there are several.
        verify: compare the checksums of a checkpoint of ours; other files have none.

    Raises:
        CheckpointError: as for `weight_shapes`; a file is damaged, or two hold the same name.
    """
    file = locate(path)
    if isinstance(file, RemotePath):
        raise CheckpointError(file, None, "headers are read on this machine", fix="copy it here first")
    if holds_weight_files(file):
        whole: dict[str, TensorLayout] = {}
        for one in find_weight_files(file, index):
            found = tensors_in(one)
            if twice := whole.keys() & found:
                raise CheckpointError(one, min(twice), "another file of this directory holds it too")
            whole |= found
        return file, whole
    if not file.is_dir():
        return file.parent, tensors_in(file)
    manifest = read_manifest(file)
    if "model" not in manifest["parts"]:
        raise CheckpointError(file, "model", "this checkpoint holds no weights")
    names = shards_of(manifest, "model")
    if verify:
        check_files(file, manifest)
        check_content(file, manifest, [*descriptions(manifest), *names])
    if is_sharded(manifest):
        layout = dict(read_layout(file, manifest)["model"])
    else:
        layout = {key: one for name in names for key, one in tensors_in(file / name).items()}
    held = {key: torch.empty(one.shape, dtype=one.dtype, device="meta") for key, one in layout.items()}
    keys = {tensor.untyped_storage()._cdata: key for key, tensor in held.items()}
    tree = read_trees(file, ["model"])["model"]  # it knows the names, and dtypes that safetensors does not hold
    weights = {}
    for name, tensor in tensors_of(file, decode(tree, held, at="model", file=file / DOCUMENT)).items():
        key = keys[tensor.untyped_storage()._cdata]
        weights[name] = layout[key] if tensor.dtype == held[key].dtype else _carried(layout[key], tensor)
    return file, weights


def _carried(stored: TensorLayout, tensor: Tensor) -> TensorLayout:
    """A tensor that is stored flat in another dtype."""
    shape = tuple(tensor.shape)
    chunks = [Chunk((0,) * len(shape), shape, chunk.file, chunk.key) for chunk in stored.chunks]
    return TensorLayout(tensor.dtype, shape, tuple(chunks))


def map_weights(file: Path) -> dict[str, Tensor]:
    """The state_dict of a ``torch.save`` file, of which nothing is read before it is used.

    Raises:
        CheckpointError: as for `read_weights`. Files of torch before 1.6 are read whole.
    """
    return tensors_of(file, _state_dict(torch_load(file, "cpu", mapped=zipfile.is_zipfile(file))), file.stat().st_size)


def _start(file: Path) -> bytes:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(file, None, "this is not a regular file")
        with open(file, "rb") as stream:
            return stream.read(9)
    except OSError as error:
        raise CheckpointError(file, None, f"it cannot be read: {error.strerror}") from error


def _state_dict(content: Any) -> Any:
    nested = content.get("state_dict") if isinstance(content, dict) else None
    return nested if isinstance(nested, dict) else content


def read_module(path: str | os.PathLike[str], whole: bool = False) -> dict[str, Any]:
    """A module's ``state_dict`` and ``hyper_parameters`` (empty where there are none), for ``load_from_checkpoint``.

    Args:
        path: as for `read_weights`; of a checkpoint of ours also what modules keep as extra state.
        whole: everything else of a checkpoint, too, ours or Lightning's: what ``on_load_checkpoint`` looks for.

    Raises:
        CheckpointError: as for `read_weights`.
    """
    file = locate(path)
    content: dict[str, Any] = {}
    if isinstance(file, Path) and (holds_weight_files(file) or find_deepspeed(file) is not None):
        content["state_dict"] = read_weights(file)
    elif file.is_dir():
        known = read_manifest(file)["parts"]
        content = read_checkpoint(file, parts=known if whole else ["model", *{"hyper_parameters"} & set(known)])
        if "model" not in content:
            raise CheckpointError(file, "model", "this checkpoint holds no weights")
        content["state_dict"] = _with_extra_state(file, content.pop("model"))
    elif isinstance(file, RemotePath):
        with fetched(file.parent, [file.name]) as here:
            return read_module(here / file.name, whole)
    elif (start := _start(file))[8:] != _JSON and start.startswith((_ZIP, _PICKLE)):
        loaded = torch_load(file, "cpu")
        weights = _state_dict(loaded)
        beside = {} if weights is loaded else loaded
        content = {name: beside[name] for name in (beside if whole else beside.keys() & {"hyper_parameters"})}
        content["state_dict"] = tensors_of(file, weights, file.stat().st_size)
    else:
        content["state_dict"] = read_weights(file)
    kept = content.setdefault("hyper_parameters", {})
    if not isinstance(kept, Mapping):
        raise CheckpointError(file, "hyper_parameters", f"a {type(kept).__name__}, not a dict")
    return content


def _with_extra_state(file: Location, content: Any) -> dict[str, Any]:
    weights: dict[str, Any] = dict(tensors_of(file, content))
    return {**weights, **{name: value for name, value in content.items() if str(name).endswith(EXTRA_STATE)}}
