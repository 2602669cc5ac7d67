"""Read weights by name from any supported file, and export them for other programs."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch import Tensor

from trainer_kit.checkpoint.deepspeed import deepspeed_weights, find_deepspeed
from trainer_kit.checkpoint.encoding import decode
from trainer_kit.checkpoint.files import (
    TENSOR_DTYPES,
    in_bytes,
    named_failure,
    read_header,
    read_tensors,
    safetensors_bytes,
    tensors_of,
    tied_names,
    torch_load,
    write_file,
)
from trainer_kit.checkpoint.layout import (
    TensorLayout,
    layouts_of,
    tensors_in,
)
from trainer_kit.checkpoint.lightning import (
    datamodule_hparams,
    lightning_hparams,
    to_lightning,
)
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
    Manifest,
    check_content,
    check_files,
    read_json,
    read_manifest,
)
from trainer_kit.checkpoint.read import (
    files_for,
    missing_checkpoint,
    read_checkpoint,
    read_trees,
)
from trainer_kit.checkpoint.remote import fetch_files
from trainer_kit.checkpoint.store import refuse_directory_of_checkpoints, similar
from trainer_kit.checkpoint.torch_distributed import (
    find_torch_distributed,
    read_torch_distributed,
)
from trainer_kit.checkpoint.trees import holds_record
from trainer_kit.core.atomic_files import hidden_path, sync_directory
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, RemotePath, absolute, locate
from trainer_kit.core.state_names import without_wrappers
from trainer_kit.core.torch_private import EXTRA_STATE, storage_key

__all__ = [
    "ExportFormat",
    "check_exists",
    "export",
    "holds_weight_files",
    "map_weights",
    "read_index",
    "read_module",
    "read_weights",
    "weight_format",
    "weight_layout",
    "weight_shapes",
]


def read_weights(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return a module's tensors by name, for ``module.load_state_dict``.

    Args:
        path: a checkpoint directory of ours (its part ``model``); a safetensors file, or a directory of safetensors in
            Hugging Face's layout; a ``torch.save`` file of a state_dict; a Lightning ``.ckpt`` (its ``state_dict``);
            a DeepSpeed directory, universal or without ZeRO; or a torch distributed checkpoint. The content decides,
            not the suffix.
        device: the device of the tensors.

    Raises:
        CheckpointError: ``path`` is none of these. ``torch.save`` files are read only with ``weights_only=True``: a
            file that needs more could run code, and is refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, f"{directory}/old.ckpt")
        ...     read_weights(f"{directory}/old.ckpt")
        {'w': tensor([1., 1.])}
    """
    state = _read(locate(path), device, ())["state_dict"]
    # Without the extra state of modules.
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _read(
    file: Location,
    device: torch.device | str,
    parts: Collection[str] | None,
) -> dict[str, Any]:
    """Return a ``state_dict``, and these ``parts`` of the other content of a checkpoint, if it has them; None: all."""
    # Directories of other libraries first: each has files by which it is recognized. What remains is one of ours,
    # whole or damaged, and its error says what is wrong with it.
    if isinstance(file, Path) and holds_weight_files(file):
        return {"state_dict": _read_weight_files(file, device)}
    if isinstance(file, Path):
        files = find_deepspeed(file)
        if files is not None:
            return {"state_dict": deepspeed_weights(files, device)}
    if file.is_dir():
        refuse_directory_of_checkpoints(file)
        return _read_checkpoint(file, device, parts)
    if isinstance(file, RemotePath):
        with fetch_files(file.parent, [file.name]) as directory:
            return _read(directory / file.name, device, parts)
    if weight_format(file) == "safetensors":
        return {"state_dict": read_tensors(file, device)}
    content = torch_load(file, device)
    weights = _nested_state_dict(content)
    state: dict[str, Any] = {}
    # Otherwise the content is the state_dict itself, and has no other entries.
    if weights is not content:
        state = {name: content[name] for name in _select(content, parts)}
    state["state_dict"] = tensors_of(file, weights, file.stat().st_size)
    return state


def _select(names: Iterable[Any], parts: Collection[str] | None) -> list[Any]:
    """Those of the names that are among the parts; all if ``parts`` is None."""
    return [name for name in names if parts is None or name in parts]


def _read_weight_files(
    directory: Path,
    device: torch.device | str,
) -> dict[str, Tensor]:
    distributed = find_torch_distributed(directory)
    if distributed is not None:
        return read_torch_distributed(distributed, device)
    files = _find_weight_files(directory)
    return _merge_files(files, partial(read_tensors, device=device))


def _read_checkpoint(
    path: Location,
    device: torch.device | str,
    parts: Collection[str] | None,
) -> dict[str, Any]:
    """Like `_read`, of a checkpoint of ours; its weights include the extra state of modules."""
    names = ["model"]
    # With no parts to select, the manifest is read only once.
    if parts is None or parts:
        names += _select(read_manifest(path)["parts"], parts)
    content = read_checkpoint(path, dict.fromkeys(names), device=device)
    model = content.pop("model")
    extra_state = {
        name: value for name, value in model.items() if str(name).endswith(EXTRA_STATE)
    }
    content["state_dict"] = {**tensors_of(path, model), **extra_state}
    return content


_Entry = TypeVar("_Entry")


def _merge_files(
    files: list[Path],
    read: Callable[[Path], dict[str, _Entry]],
) -> dict[str, _Entry]:
    """Return what all files hold, by name; CheckpointError if two hold the same name."""
    merged: dict[str, _Entry] = {}
    for file in files:
        entries = read(file)
        repeated = merged.keys() & entries
        # Which of the two counts would depend on the order of the files.
        if repeated:
            raise CheckpointError(
                file, min(repeated), "another file in this directory contains it too"
            )
        merged |= entries
    return merged


def check_exists(path: Location) -> None:
    """Raise `MissingCheckpointError`, which names the checkpoints near ``path``, if nothing is there."""
    with named_failure(path, "it cannot be reached"):
        exists = path.exists()
    if not exists:
        raise missing_checkpoint(path, "does not exist", fix=similar(path))


def weight_format(file: Path) -> Literal["safetensors", "torch"]:
    """Return the format of a file, from its first bytes.

    Raises:
        CheckpointError: the file is in neither format, not a regular file, or cannot be read.
    """
    check_exists(file)
    with named_failure(file, "it cannot be read"):
        # The read of a pipe would block.
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(file, None, "this is not a regular file")
        with open(file, "rb") as stream:
            # The length of a safetensors header takes 8 bytes, and the JSON header follows it.
            start = stream.read(9)
    if start[8:] == b"{":
        return "safetensors"
    # A zip file, or a pickle of torch before 1.6.
    if start.startswith((b"PK", b"\x80")):
        return "torch"
    raise CheckpointError(
        file,
        None,
        "this is neither a checkpoint directory, nor safetensors, nor a torch.save file",
        fix="check how it was written, and whether it was copied completely",
    )


def weight_shapes(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Like `read_weights`, but on the meta device: only headers are read.

    Raises:
        CheckpointError: ``path`` is not a checkpoint directory of ours, a safetensors file, or a directory of them.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     weight_shapes(write_checkpoint(f"{directory}/step-3", {"model": {"w": torch.ones(2, 3)}}))
        {'w': tensor(..., device='meta', size=(2, 3))}
    """
    _, layouts = weight_layout(path)
    return {name: _meta_tensor(layout) for name, layout in layouts.items()}


def _meta_tensor(layout: TensorLayout) -> Tensor:
    return torch.empty(layout.shape, dtype=layout.dtype, device="meta")


def weight_layout(
    path: str | os.PathLike[str],
    *,
    index: Path | None = None,
    verify: bool = False,
) -> tuple[Path, dict[str, TensorLayout]]:
    """Return a directory and the layouts of a module's tensors in its files, to read tensors one at a time.

    Args:
        path: as for `weight_shapes`.
        index: the index of the safetensors files, if there are several indices.
        verify: compare the checksums of a checkpoint of ours; other files have no checksums.

    Raises:
        CheckpointError: as for `weight_shapes`; or a file is damaged, or two files hold the same name.
    """
    file = locate(path)
    if isinstance(file, RemotePath):
        raise CheckpointError(
            file, None, "headers are read on this machine", fix="copy it here first"
        )
    if holds_weight_files(file):
        return file, _merge_files(_find_weight_files(file, index), tensors_in)
    if not file.is_dir():
        return file.parent, tensors_in(file)
    # Of a checkpoint of ours only the part with the weights is looked at.
    manifest = read_manifest(file)
    if "model" not in manifest["parts"]:
        raise CheckpointError(file, "model", "this checkpoint holds no weights")
    if verify:
        check_files(file, manifest)
        check_content(file, manifest, files_for(manifest, ["model"]))
    return file, _checkpoint_layout(file, manifest)


def _checkpoint_layout(path: Path, manifest: Manifest) -> dict[str, TensorLayout]:
    """The layouts of the weights in a checkpoint of ours, by their names in the module."""
    part_names = ["model"]
    layouts = layouts_of(path, manifest, part_names)["model"]
    stored = {key: _meta_tensor(layout) for key, layout in layouts.items()}
    # Decoding returns these tensors or views of them, which share the storage.
    keys = {_storage_id(tensor): key for key, tensor in stored.items()}
    # The tree has the names, and the dtypes that safetensors does not hold: decode it with meta tensors.
    tree = read_trees(path, part_names)["model"]
    model = decode(tree, stored, at="model", file=path / DOCUMENT)
    weights = {}
    for name, tensor in tensors_of(path, model).items():
        key = keys[_storage_id(tensor)]
        layout = layouts[key]
        dtype = tensor.dtype
        if dtype != stored[key].dtype:
            shape = tuple(tensor.shape)
            layout = layout.viewed_as(dtype, shape)
        weights[name] = layout
    return weights


def _storage_id(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def map_weights(file: Path) -> dict[str, Tensor]:
    """Map the state_dict of a ``torch.save`` file: a tensor is read when it is used.

    Raises:
        CheckpointError: as for `read_weights`. Files of torch before 1.6 are read whole.
    """
    content = torch_load(file, "cpu", mapped=zipfile.is_zipfile(file))
    return tensors_of(file, _nested_state_dict(content), file.stat().st_size)


def _nested_state_dict(content: Any) -> Any:
    """The ``state_dict`` inside a Lightning file; any other content as it is."""
    nested = None
    if isinstance(content, dict):
        nested = content.get("state_dict")
    # A module may have a parameter of this name: then the content is its state_dict.
    if isinstance(nested, dict):
        return nested
    return content


def read_module(
    path: str | os.PathLike[str],
    whole: bool = False,
) -> dict[str, Any]:
    """Return a module's ``state_dict`` and ``hyper_parameters`` (possibly empty), for ``load_from_checkpoint``.

    Args:
        path: as for `read_weights`; from a checkpoint of ours the extra state of modules is read too.
        whole: also return the other content of a checkpoint, ours or Lightning's, for ``on_load_checkpoint``.

    Raises:
        CheckpointError: as for `read_weights`.
    """
    file = locate(path)
    parts: set[str] | None = {"hyper_parameters", "hparams_name"}
    if whole:
        parts = None
    content = _read(file, "cpu", parts)
    hparams = lightning_hparams(content)
    if not isinstance(hparams, Mapping):
        raise CheckpointError(
            file, "hyper_parameters", f"a {type(hparams).__name__}, not a dict"
        )
    content["hyper_parameters"] = hparams
    if content.get("datamodule_hyper_parameters"):
        content["datamodule_hyper_parameters"] = datamodule_hparams(content)
    for part_name in ("hyper_parameters", "datamodule_hyper_parameters"):
        values = content.get(part_name)
        if isinstance(values, Mapping):
            content[part_name] = {
                name: _object_or_repr(value) for name, value in values.items()
            }
    return content


def _object_or_repr(value: object) -> object:
    """A hyperparameter; its repr if its class is not imported, for the caller to pass it."""
    if holds_record(value):
        return {"repr": repr(value)}
    return value


_INDEX: Final = ".safetensors.index.json"
_MAX_INDEX_BYTES: Final = 64 << 20


def holds_weight_files(path: Path) -> bool:
    """Whether this is a directory of weights for `_find_weight_files`, and not a checkpoint of ours, whole or not."""
    if not path.is_dir():
        return False
    for name in (MANIFEST, DOCUMENT, LAYOUT):
        if os.path.lexists(path / name):
            return False
    for pattern in ("*.safetensors", f"*{_INDEX}", ".metadata", "*/.metadata"):
        if next(path.glob(pattern), None) is not None:
            return True
    return False


def _find_weight_files(directory: Path, index: Path | None = None) -> list[Path]:
    """Return the safetensors files of ``directory``, or only those that its index names.

    Args:
        directory: the directory.
        index: the index to use, if there are several.

    Raises:
        CheckpointError: the files are missing; the index names a missing file or a file elsewhere; or the directory is
            a torch distributed checkpoint, of which no single tensor is read.
    """
    for metadata in (directory / ".metadata", *sorted(directory.glob("*/.metadata"))):
        if os.path.lexists(metadata):
            raise CheckpointError(
                metadata.parent,
                None,
                "single tensors of a torch distributed checkpoint cannot be read",
                fix="run trainer-kit merge-weights DIRECTORY model.safetensors first",
            )
    indices = sorted(directory.glob(f"*{_INDEX}"))
    if index is not None:
        indices = [index]
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise CheckpointError(directory, None, f"several indices: {names}")
    if not indices:
        files = sorted(directory.glob("*.safetensors"))
        # The pattern matches hidden files too, such as one that is being written.
        visible = [file for file in files if not file.name.startswith(".")]
        if not visible:
            raise CheckpointError(
                directory, None, "neither a checkpoint, nor safetensors files"
            )
        return visible
    return _indexed_files(directory, indices[0])


def _indexed_files(directory: Path, index: Path) -> list[Path]:
    """The files that an index names; CheckpointError if one does not hold a weight that is listed for it."""
    listed = read_index(index)
    files = [directory / name for name in sorted(set(listed.values()))]
    # An index may be older than the files beside it: each weight must be in the file that is listed for it.
    stored = {}
    for file in files:
        stored.update(dict.fromkeys(read_header(file), file.name))
    for name, file_name in listed.items():
        if stored.get(name) != file_name:
            reason = (
                f"{index.name} lists this weight here, but the file does not hold it"
            )
            raise CheckpointError(directory / file_name, name, reason)
    return files


def read_index(index: Path) -> dict[str, str]:
    """Return, for each weight, the name of its file in the directory of ``index``.

    Raises:
        CheckpointError: ``index`` is not an index of weights, or names a file that is missing or elsewhere.
    """
    try:
        content = read_json(index, _MAX_INDEX_BYTES)
        listed: dict[str, str] = content.get("weight_map", content)
        names = sorted(set(listed.values()))
        if not all(map(_is_file_name, names)):
            raise CheckpointError(
                index, "weight_map", "a file that is not one of this directory"
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            index, "weight_map", "this is not an index of weights"
        ) from error
    for name in names:
        file = index.parent / name
        if not file.is_file():
            raise CheckpointError(
                file, None, f"{index.name} lists it, but it does not exist"
            )
    return listed


def _is_file_name(name: object) -> bool:
    """Whether a name leads to no other directory."""
    if not isinstance(name, str) or name in ("", ".."):
        return False
    return name == os.path.basename(name)


ExportFormat = Literal["huggingface", "lightning", "safetensors", "torch"]
_SUFFIXES: Final[dict[str, ExportFormat]] = {
    "": "huggingface",
    ".safetensors": "safetensors",
    ".bin": "torch",
    ".ckpt": "torch",
    ".pt": "torch",
    ".pth": "torch",
}


def export(
    checkpoint: str | os.PathLike[str] | Mapping[str, Tensor],
    target: str | os.PathLike[str],
    format: ExportFormat | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the weights of a checkpoint for other programs; the target is complete and durable, or absent.

    Args:
        checkpoint: a checkpoint of ours, which is verified first; or anything else that
            `trainer_kit.checkpoint.weights.read_weights` reads; or the weights by name.
        target: the file or directory to create; missing parents are created.
        format: ``"safetensors"``: one file. ``"huggingface"``: a directory with ``model.safetensors``, or, if it
            would be larger than a shard, ``model-00001-of-0000n.safetensors`` and ``model.safetensors.index.json``.
            ``"torch"``: a ``torch.save`` file (a zip file with a pickle, for ``torch.load(weights_only=True)``).
            ``"lightning"``: such a file that Lightning reads, with hyperparameters, optimizers and progress too. None:
            by the suffix of ``target``; without a suffix Hugging Face's. A tied weight is stored once, under its first
            name.
        max_shard_size: bytes, or ``"5GB"``, ``"200MB"``, ``"1GiB"``; a single tensor may be larger.

    Returns:
        ``target``, absolute.

    Raises:
        CheckpointError: the checkpoint is damaged, the target exists or cannot be written, a tensor has a dtype
            that safetensors does not hold.
        ConfigurationError: the format or the size is invalid.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/step-3", {"model": {"w": torch.ones(2), "v": torch.ones(3)}})
        ...     _ = export(path, f"{directory}/hub", max_shard_size=12)
        ...     sorted(file.name for file in Path(f"{directory}/hub").iterdir())
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    path = absolute(target)
    if isinstance(path, RemotePath):
        raise ConfigurationError(
            "weights are exported to local paths only",
            found=str(path),
            fix="export to a local path, and copy it there",
        )
    export_format = _choose_format(path, format)
    max_bytes = in_bytes(max_shard_size, "max_shard_size", least=1)
    if os.path.lexists(path):
        raise CheckpointError(
            path, None, "it exists already", fix="use another name, or delete it first"
        )
    content = _content_to_export(checkpoint, export_format)
    if export_format in ("huggingface", "safetensors"):
        source: object = checkpoint
        if isinstance(checkpoint, Mapping):
            source = "the weights"
        _check_dtypes(source, content)
    # The target gets its name only when it is whole.
    work = hidden_path(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(work, export_format, content, max_bytes)
        os.rename(work, path)
        sync_directory(path.parent)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):
            work.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(
                path, None, f"could not be written: {error.strerror or error}"
            ) from error
        raise
    return path


def _content_to_export(
    checkpoint: str | os.PathLike[str] | Mapping[str, Tensor],
    export_format: str,
) -> dict[str, Any]:
    """The weights by name; for Lightning the content of its file."""
    if export_format != "lightning":
        if not isinstance(checkpoint, Mapping):
            checkpoint = read_weights(checkpoint)
        return dict(without_wrappers(checkpoint))
    state: dict[str, Any] = {"state_dict": checkpoint}
    if not isinstance(checkpoint, Mapping):
        state = _read(locate(checkpoint), "cpu", None)
    state["state_dict"] = without_wrappers(state["state_dict"])
    return to_lightning(state)


def _choose_format(path: Path, format: str | None) -> str:
    export_format = format
    if format is None:
        export_format = _SUFFIXES.get(path.suffix.lower())
    if export_format is None or export_format not in get_args(ExportFormat):
        raise ConfigurationError(
            "the export format is ambiguous",
            found=f"format={format!r}, target {path.name!r}",
            fix=f"pass format as one of {', '.join(get_args(ExportFormat))}",
        )
    return export_format


def _check_dtypes(checkpoint: object, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise CheckpointError(
                checkpoint,
                name,
                f"safetensors files do not hold {tensor.dtype}",
                fix='export with format="torch"',
            )


def _write(
    work: Path,
    export_format: str,
    content: dict[str, Any],
    max_bytes: int,
) -> None:
    if export_format == "safetensors":
        _, buffers = safetensors_bytes(content)
        write_file(work, buffers)
    elif export_format in ("lightning", "torch"):
        with open(work, "xb") as file:
            torch.save(content, file)
            file.flush()
            # Before the rename gives it its name.
            os.fsync(file.fileno())
        if export_format == "lightning":
            # A hyperparameter may be of a class that torch refuses to read.
            torch_load(work, "cpu", mapped=True)
    else:
        work.mkdir()
        _write_shards(work, content, max_bytes)
        sync_directory(work)


def _write_shards(
    work: Path,
    weights: Mapping[str, Tensor],
    max_bytes: int,
) -> None:
    """Layout: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints."""
    tied = tied_names(weights)
    shards: list[dict[str, Tensor]] = [{}]
    shards_by_name: dict[str, dict[str, Tensor]] = {}
    shard_bytes = 0
    total_bytes = 0
    for name, tensor in weights.items():
        # It goes where its first name is, whose file lists both in its metadata; the index does not list it.
        if name in tied:
            shards_by_name[tied[name]][name] = tensor
            continue
        if shards[-1] and shard_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shards_by_name[name] = shards[-1]
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    if len(shards) == 1:
        _, buffers = safetensors_bytes(shards[0])
        write_file(work / "model.safetensors", buffers)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _, buffers = safetensors_bytes(shard)
        write_file(work / file, buffers)
        weight_map.update({name: file for name in shard if name not in tied})
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    content = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(work / f"model{_INDEX}", [content.encode()])
