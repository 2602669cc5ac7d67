"""Every kind of damage is noticed, and named by file and reason."""

from __future__ import annotations

import json

import pytest
import torch

from trainer_kit.checkpoint.commit import (
    write_checkpoint,
)
from trainer_kit.checkpoint.manifest import dump_manifest
from trainer_kit.checkpoint.read import (
    is_complete,
    read_checkpoint,
    read_info,
    verify_checkpoint,
)
from trainer_kit.core.errors import CheckpointError


def test_every_flipped_bit_of_a_small_checkpoint_is_noticed(tmp_path):
    path = write_checkpoint(
        tmp_path / "c",
        {"m": {"w": torch.ones(2), "é": (1,)}},
        info={"note": "é", "x": 1.5},
    )
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for index in range(len(good)):
            bad = bytearray(good)
            bad[index] ^= 1 << (index % 8)
            file.write_bytes(bad)
            with pytest.raises(CheckpointError) as caught:
                read_checkpoint(path)
            assert caught.value.file == str(file)
            assert caught.value.reason
        file.write_bytes(good)
    verify_checkpoint(path)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "state.json",
        "model.safetensors",
        "optimizers.safetensors",
        "rng.safetensors",
    ],
)
@pytest.mark.parametrize(
    "harm", ["flip", "truncate", "empty", "extend", "delete", "link", "directory"]
)
def test_damage_names_file_and_reason(saved, name, harm):
    file = saved / name
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    elif harm in ("truncate", "empty", "extend"):
        file.write_bytes(
            {"truncate": data[:-1], "empty": b"", "extend": data + b"\n"}[harm]
        )
    else:
        file.rename(saved.parent / "elsewhere")
        if harm == "link":
            file.symlink_to(saved.parent / "elsewhere")
        elif harm == "directory":
            file.mkdir()
    for check in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            check(saved)
        gone = harm == "delete" and name == "manifest.json"
        assert caught.value.file == str(saved if gone else file)
    assert is_complete(saved) == (harm == "flip" and name != "manifest.json")


@pytest.mark.parametrize("kind", ["file", "symlink", "dangling", "directory", "hidden"])
def test_foreign_entries_are_refused(saved, kind):
    extra = saved / (".extra" if kind == "hidden" else "extra.safetensors")
    if kind in ("file", "hidden"):
        extra.write_bytes(b"x")
    elif kind == "directory":
        extra.mkdir()
    else:
        extra.symlink_to(saved / "state.json" if kind == "symlink" else "nowhere")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(saved)
    assert caught.value.file == str(extra)
    assert not is_complete(saved)


def edit(path, change, *, seal):
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    change(manifest)
    if seal:
        manifest.pop("sha256")
        file.write_bytes(dump_manifest(manifest))
    else:
        file.write_text(json.dumps(manifest, indent=1) + "\n")


def test_an_edited_manifest_is_noticed(saved):
    edit(saved, lambda manifest: manifest["info"].update(step=13), seal=False)
    with pytest.raises(CheckpointError, match="changed after it was written"):
        read_info(saved)


def test_a_reformatted_manifest_is_noticed(saved):
    file = saved / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_bytes())))
    with pytest.raises(CheckpointError, match="changed after it was written"):
        verify_checkpoint(saved)


def rename_entry(name):
    return lambda manifest: manifest["files"].update(
        {name: manifest["files"].pop("rng.safetensors")}
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(version=3), "upgrade"),
        (lambda m: m.update(version=2), "without number of shards or layout"),
        (lambda m: m.update(format="other"), "not a trainer_kit checkpoint"),
        (lambda m: m.pop("files"), "no files"),
        (lambda m: m.update(files=[]), "no files"),
        (lambda m: m.update(parts=None), "no files or no parts"),
        (lambda m: m["files"].pop("state.json"), "no files"),
        (lambda m: m["files"].pop("rng.safetensors"), "not listed"),
        (
            lambda m: m["files"]["state.json"].pop("xxh3_64"),
            "without size and checksum",
        ),
        (
            lambda m: m["files"]["state.json"].update(size="1"),
            "without size and checksum",
        ),
        (lambda m: m["files"].update({"../x": {"size": 1, "xxh3_64": ""}}), "lead out"),
        (
            lambda m: m["files"].update({"/etc/passwd": {"size": 1, "xxh3_64": ""}}),
            "lead out",
        ),
        (lambda m: m["files"].update({"a\\b": {"size": 1, "xxh3_64": ""}}), "lead out"),
        (lambda m: m["files"].update({"..": {"size": 1, "xxh3_64": ""}}), "lead out"),
        (
            lambda m: m["files"].update({"manifest.json": {"size": 1, "xxh3_64": ""}}),
            "lead out",
        ),
        (lambda m: m["files"].update({"new": {"size": 1, "xxh3_64": ""}}), "missing"),
        (lambda m: m["parts"].update(more=None), "not in the file"),
        (lambda m: m["parts"].update(more=3), "not listed"),
        (lambda m: m["parts"].update(more=["x"]), "not listed"),
        (lambda m: m["parts"].update(model="state.json"), "safetensors"),
    ],
)
def test_a_hostile_manifest_with_a_valid_seal_is_refused(saved, change, said):
    edit(saved, change, seal=True)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(saved)


def test_a_hostile_document_with_a_valid_seal_is_refused(saved):
    def forge(text):
        (saved / "state.json").write_bytes(text)
        import xxhash

        entry = {"size": len(text), "xxh3_64": xxhash.xxh3_64(text).hexdigest()}
        edit(saved, lambda m: m["files"].update({"state.json": entry}), seal=True)

    for text in (
        b"[" * 200_000,
        b"[]",
        b"{}",
        b'{"model": NaN}',
        b"\xff",
        b'{"model": {"$": "tensor", "v": "x"}}',
    ):
        forge(text)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(saved, parts=["model"])
        assert caught.value.file == str(saved / "state.json")


def test_the_error_names_a_path_that_is_not_a_checkpoint(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    for name, said in [
        ("absent", "contains no checkpoint"),
        ("folder", "no manifest"),
        ("file", "not a checkpoint dir"),
    ]:
        for check in (verify_checkpoint, read_checkpoint, read_info):
            with pytest.raises(CheckpointError, match=said):
                check(tmp_path / name)
        assert not is_complete(tmp_path / name)
