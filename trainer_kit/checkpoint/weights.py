"""Read weights by name from any supported file, and export them for other programs."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from trainer_kit.checkpoint.deepspeed import deepspeed_weights, find_deepspeed
from trainer_kit.checkpoint.encoding import decode
from trainer_kit.checkpoint.files import (
    EXTRA_STATE,
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
    Chunk,
    TensorLayout,
    check_cover,
    layouts_of,
    tensors_in,
)
from trainer_kit.checkpoint.lightning import lightning_hparams, to_lightning
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
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
from trainer_kit.checkpoint.store import similar
from trainer_kit.checkpoint.trees import holds_record
from trainer_kit.core.atomic_files import hidden_path, sync_directory
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, RemotePath, absolute, locate
from trainer_kit.core.state_names import without_wrappers

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
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
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
    found = _read(locate(path), device, ())["state_dict"]
    return {
        name: value for name, value in found.items() if isinstance(value, Tensor)
    }  # without extra state


def _read(
    file: Location, device: torch.device | str, parts: Collection[str] | None
) -> dict[str, Any]:
    """Return a ``state_dict``, and these ``parts`` of the other content of a checkpoint, if it has them; None: all."""
    if isinstance(file, Path) and holds_weight_files(file):
        if (sharded := _find_torch_sharded(file)) is not None:
            return {"state_dict": _read_torch_sharded(sharded, device)}
        return {
            "state_dict": _joined(
                _find_weight_files(file), partial(read_tensors, device=device)
            )
        }
    if isinstance(file, Path) and (theirs := find_deepspeed(file)) is not None:
        return {"state_dict": deepspeed_weights(theirs, device)}
    if file.is_dir():
        more = (
            []
            if parts == ()
            else [
                one
                for one in read_manifest(file)["parts"]
                if parts is None or one in parts
            ]
        )
        content = read_checkpoint(file, dict.fromkeys(["model", *more]), device=device)
        held = content.pop("model")
        weights = tensors_of(file, held)
        extra = {
            name: value
            for name, value in held.items()
            if str(name).endswith(EXTRA_STATE)
        }
        return {**content, "state_dict": {**weights, **extra}}
    if isinstance(file, RemotePath):
        with fetch_files(file.parent, [file.name]) as here:
            return _read(here / file.name, device, parts)
    if weight_format(file) == "safetensors":
        return {"state_dict": read_tensors(file, device)}
    loaded = torch_load(file, device)
    weights = _state_dict(loaded)
    other = (
        {}
        if weights is loaded
        else {name: loaded[name] for name in loaded if parts is None or name in parts}
    )
    return {**other, "state_dict": tensors_of(file, weights, file.stat().st_size)}


_Held = TypeVar("_Held")


def _joined(
    files: list[Path], read: Callable[[Path], dict[str, _Held]]
) -> dict[str, _Held]:
    """Return what all files hold, by name; CheckpointError if two hold the same name."""
    whole: dict[str, _Held] = {}
    for file in files:
        found = read(file)
        if twice := whole.keys() & found:
            raise CheckpointError(
                file, min(twice), "another file of this directory holds it too"
            )
        whole |= found
    return whole


def check_exists(path: Location) -> None:
    """Raise `MissingCheckpointError`, which names the checkpoints near ``path``, if nothing is there."""
    with named_failure(path, "it cannot be reached"):
        present = path.exists()
    if not present:
        raise missing_checkpoint(path, "does not exist", fix=similar(path))


def weight_format(file: Path) -> Literal["safetensors", "torch"]:
    """Return the format of a file, from its first bytes.

    Raises:
        CheckpointError: the file is in neither format, not a regular file, or cannot be read.
    """
    check_exists(file)
    with named_failure(file, "it cannot be read"):
        if not stat.S_ISREG(file.stat().st_mode):  # the read of a pipe would block
            raise CheckpointError(file, None, "this is not a regular file")
        with open(file, "rb") as stream:
            start = stream.read(9)
    if start[8:] == b"{":  # the JSON header follows its length
        return "safetensors"
    if start.startswith(
        (b"PK", b"\x80")
    ):  # a zip file, or a pickle of torch before 1.6
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
    return {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta")
        for name, one in weight_layout(path)[1].items()
    }


def weight_layout(
    path: str | os.PathLike[str], *, index: Path | None = None, verify: bool = False
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
        return file, _joined(_find_weight_files(file, index), tensors_in)
    if not file.is_dir():
        return file.parent, tensors_in(file)
    manifest = read_manifest(file)
    if "model" not in manifest["parts"]:
        raise CheckpointError(file, "model", "this checkpoint holds no weights")
    if verify:
        check_files(file, manifest)
        check_content(file, manifest, files_for(manifest, ["model"]))
    layout = layouts_of(file, manifest, ["model"])["model"]
    held = {
        key: torch.empty(one.shape, dtype=one.dtype, device="meta")
        for key, one in layout.items()
    }
    keys = {tensor.untyped_storage()._cdata: key for key, tensor in held.items()}
    # The tree has the names, and the dtypes that safetensors does not hold: decode it with meta tensors.
    tree = read_trees(file, ["model"])["model"]
    weights = {}
    for name, tensor in tensors_of(
        file, decode(tree, held, at="model", file=file / DOCUMENT)
    ).items():
        key = keys[tensor.untyped_storage()._cdata]
        same = tensor.dtype == held[key].dtype
        weights[name] = (
            layout[key]
            if same
            else layout[key].viewed_as(tensor.dtype, tuple(tensor.shape))
        )
    return file, weights


def map_weights(file: Path) -> dict[str, Tensor]:
    """Map the state_dict of a ``torch.save`` file: a tensor is read when it is used.

    Raises:
        CheckpointError: as for `read_weights`. Files of torch before 1.6 are read whole.
    """
    return tensors_of(
        file,
        _state_dict(torch_load(file, "cpu", mapped=zipfile.is_zipfile(file))),
        file.stat().st_size,
    )


def _state_dict(content: Any) -> Any:
    nested = content.get("state_dict") if isinstance(content, dict) else None
    return nested if isinstance(nested, dict) else content


def read_module(path: str | os.PathLike[str], whole: bool = False) -> dict[str, Any]:
    """Return a module's ``state_dict`` and ``hyper_parameters`` (possibly empty), for ``load_from_checkpoint``.

    Args:
        path: as for `read_weights`; from a checkpoint of ours the extra state of modules is read too.
        whole: also return the other content of a checkpoint, ours or Lightning's, for ``on_load_checkpoint``.

    Raises:
        CheckpointError: as for `read_weights`.
    """
    file = locate(path)
    content = _read(
        file, "cpu", None if whole else {"hyper_parameters", "hparams_name"}
    )
    kept = content["hyper_parameters"] = lightning_hparams(content)
    if not isinstance(kept, Mapping):
        raise CheckpointError(
            file, "hyper_parameters", f"a {type(kept).__name__}, not a dict"
        )
    for part in ("hyper_parameters", "datamodule_hyper_parameters"):
        if isinstance(content.get(part), Mapping):
            content[part] = {
                name: _object_or_repr(value) for name, value in content[part].items()
            }
    return content


def _object_or_repr(value: Any) -> Any:
    """A hyperparameter; its repr if its class is not imported, for the caller to pass it."""
    return {"repr": repr(value)} if holds_record(value) else value


_INDEX: Final = ".safetensors.index.json"
_MOST: Final = 64 << 20


def holds_weight_files(path: Path) -> bool:
    """Whether this is a directory of weights for `_find_weight_files`, and not a checkpoint of ours, whole or not."""
    if not path.is_dir() or any(
        os.path.lexists(path / name) for name in (MANIFEST, DOCUMENT, LAYOUT)
    ):
        return False
    signs = ("*.safetensors", f"*{_INDEX}", ".metadata", "*/.metadata")
    return any(True for sign in signs for _ in path.glob(sign))


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
    indices = [index] if index is not None else sorted(directory.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise CheckpointError(
            directory,
            None,
            f"several indices: {', '.join(index.name for index in indices)}",
        )
    if not indices:
        found = sorted(
            path
            for path in directory.glob("*.safetensors")
            if not path.name.startswith(".")
        )
        if not found:
            raise CheckpointError(
                directory, None, "neither a checkpoint, nor safetensors files"
            )
        return found
    places = read_index(indices[0])
    files = [directory / name for name in sorted(set(places.values()))]
    held = {name: file.name for file in files for name in read_header(file)}
    for name, file_name in places.items():
        if held.get(name) != file_name:
            reason = f"{indices[0].name} lists this weight here, but the file does not hold it"
            raise CheckpointError(directory / file_name, name, reason)
    return files


def read_index(index: Path) -> dict[str, str]:
    """Return, for each weight, the name of its file in the directory of ``index``.

    Raises:
        CheckpointError: ``index`` is not an index of weights, or names a file that is missing or elsewhere.
    """
    try:
        content = read_json(index, _MOST)
        places: dict[str, str] = content.get("weight_map", content)
        names = sorted(set(places.values()))
        if not all(
            isinstance(name, str)
            and name == os.path.basename(name)
            and name not in ("", "..")
            for name in names
        ):
            raise CheckpointError(
                index, "weight_map", "a file that is not one of this directory"
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            index, "weight_map", "this is not an index of weights"
        ) from error
    for name in names:
        if not (index.parent / name).is_file():
            raise CheckpointError(
                index.parent / name,
                None,
                f"{index.name} lists it, but it does not exist",
            )
    return places


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
        target: the file or directory to make; missing parents are made.
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
    kind, limit = (
        _choose(path, format),
        in_bytes(max_shard_size, "max_shard_size", least=1),
    )
    if os.path.lexists(path):
        raise CheckpointError(
            path, None, "it exists already", fix="use another name, or delete it first"
        )
    weights: dict[str, Any]
    if kind == "lightning":
        held = (
            {"state_dict": checkpoint}
            if isinstance(checkpoint, Mapping)
            else _read(locate(checkpoint), "cpu", None)
        )
        held["state_dict"] = without_wrappers(held["state_dict"])
        weights = to_lightning(held)
    else:
        found = (
            checkpoint if isinstance(checkpoint, Mapping) else read_weights(checkpoint)
        )
        weights = dict(without_wrappers(found))
    if kind in ("huggingface", "safetensors"):
        _check_dtypes(
            "the weights" if isinstance(checkpoint, Mapping) else checkpoint, weights
        )
    work = hidden_path(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(work, kind, weights, limit)
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


def _choose(path: Path, format: str | None) -> str:
    chosen = _SUFFIXES.get(path.suffix.lower()) if format is None else format
    if chosen is None or chosen not in get_args(ExportFormat):
        raise ConfigurationError(
            "the export format is ambiguous",
            found=f"format={format!r}, target {path.name!r}",
            fix=f"pass format as one of {', '.join(get_args(ExportFormat))}",
        )
    return chosen


def _check_dtypes(checkpoint: object, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise CheckpointError(
                checkpoint,
                name,
                f"safetensors files do not hold {tensor.dtype}",
                fix='export with format="torch"',
            )


def _write(work: Path, kind: str, weights: dict[str, Any], limit: int) -> None:
    if kind == "safetensors":
        write_file(work, safetensors_bytes(weights)[1])
    elif kind in ("lightning", "torch"):
        with open(work, "xb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        if kind == "lightning":
            torch_load(
                work, "cpu", mapped=True
            )  # a hyperparameter may be of a class that torch refuses to read
    else:
        work.mkdir()
        _write_shards(work, weights, limit)
        sync_directory(work)


def _write_shards(work: Path, weights: Mapping[str, Tensor], limit: int) -> None:
    """Layout: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_of: dict[str, dict[str, Tensor]] = {}
    tied = tied_names(weights)
    filled = total = 0
    for name, tensor in weights.items():
        if name in tied:  # the metadata of its file lists the name; the index does not
            shard_of[tied[name]][name] = tensor
            continue
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shard_of[name] = shards[-1]
        shards[-1][name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        write_file(work / "model.safetensors", safetensors_bytes(shards[0])[1])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(work / file, safetensors_bytes(shard)[1])
        places.update({name: file for name in shard if name not in tied})
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
    content = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(work / "model.safetensors.index.json", [content.encode()])


_METADATA: Final = ".metadata"
_MOST_METADATA: Final = 256 << 20
_RECORDS: Final = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
        ),
        *("TensorProperties", "TensorStorageMetadata"),
    },
}


def _word(value: Any) -> Any:
    """A text or number as it is: the text of a nested list can be longer than the memory."""
    if not isinstance(value, (str, int)):
        raise TypeError(f"a {type(value).__name__} is neither text nor a number")
    return value


_VALUES: Final[Mapping[tuple[str, str], Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _word,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _word,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
}
"""What stands in the place of the functions that these files call."""


@final
class _Reader(pickle.Unpickler):
    """Creates plain records for torch's classes, and refuses every other name, so that no other code runs."""

    def __init__(self, content: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._file = file
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return self._records.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            self._file.parent,
            None,
            f"{module}.{name} does not belong in a torch distributed checkpoint; its .metadata is a pickle,"
            " which can run "
            "any code when it is read",
            fix="if you trust its author, convert it yourself: python -m torch.distributed.checkpoint.format_utils "
            "dcp_to_torch DIRECTORY FILE.pt",
        )


class _Record(SimpleNamespace):
    """One of torch's records: its attributes, or the tuple that it is pickled as."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # keys of a dict are filled before they have attributes

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"values": state})


def _find_torch_sharded(directory: Path) -> Path | None:
    """Return the torch distributed checkpoint of a model at, or directly inside of, a directory; None without one.

    Raises:
        CheckpointError: there are several.
    """
    found = [
        file.parent
        for file in (directory / _METADATA, *sorted(directory.glob(f"*/{_METADATA}")))
        if file.is_file()
    ]
    models = [one for one in found if not one.name.startswith("optimizer")] or found
    if len(models) > 1:
        names = ", ".join(one.name for one in models)
        raise CheckpointError(
            directory,
            None,
            f"several torch distributed checkpoints: {names}",
            fix="name one of them",
        )
    return models[0] if models else None


def _read_torch_sharded(
    directory: Path, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return the tensors of a torch distributed checkpoint, whole, by name.

    Args:
        directory: with a ``.metadata`` and its ``.distcp`` files.
        device: the device of the tensors.

    Returns:
        By name; of ``{"model": state}``, as Accelerate writes it, the names in ``state``.

    Raises:
        CheckpointError: the files are damaged, or name a class that does not belong in such a checkpoint.
    """
    file = directory / _METADATA
    with named_failure(file, "it cannot be read"):
        if file.stat().st_size > _MOST_METADATA:
            raise CheckpointError(
                file, None, f"it has more than {_MOST_METADATA} bytes"
            )
        content = file.read_bytes()
    try:
        metadata = _Reader(content, file).load()
        places = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }
        tensors = {
            name: _tensor(directory, name, one, places).to(device)
            for name, one in metadata.state_dict_metadata.items()
            if hasattr(one, "chunks")  # else it is a pickled value
        }
    except CheckpointError:
        raise
    except Exception as error:  # a hostile file can cause any error
        raise CheckpointError(
            file,
            None,
            f"it does not describe tensors ({type(error).__name__}: {error})",
        ) from error
    inside = all(name.startswith("model.") for name in tensors)
    return {
        name.removeprefix("model.") if inside else name: tensor
        for name, tensor in tensors.items()
    }


def _tensor(
    directory: Path,
    name: str,
    one: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> Tensor:
    dtype, shape = one.properties.values[0], tuple(one.size)
    parts = [
        (tuple(chunk.offsets), tuple(chunk.sizes))
        for chunk in one.chunks
        if math.prod(chunk.sizes)
    ]
    chunks = [
        Chunk(offsets, sizes, places[name, offsets].relative_path, name)
        for offsets, sizes in parts
    ]
    check_cover(directory / _METADATA, name, TensorLayout(dtype, shape, tuple(chunks)))
    for chunk in chunks:
        file = directory / chunk.file
        bytes_of = math.prod(chunk.sizes) * dtype.itemsize
        if (
            chunk.file != os.path.basename(chunk.file)
            or not file.is_file()
            or bytes_of > file.stat().st_size
        ):
            raise CheckpointError(file, name, "it does not hold this tensor")
    whole = torch.empty(shape, dtype=dtype)
    for chunk in chunks:
        place, target = places[name, chunk.offsets], whole
        for dim, (start, size) in enumerate(
            zip(chunk.offsets, chunk.sizes, strict=True)
        ):
            target = target.narrow(dim, start, size)
        with open(directory / chunk.file, "rb") as stream:
            stream.seek(place.offset)
            content = io.BytesIO(stream.read(place.length))
        try:
            part = torch_load(content, "cpu")
        except CheckpointError as error:
            raise CheckpointError(directory / chunk.file, name, error.reason) from error
        target.copy_(part.reshape(chunk.sizes))
    return whole
