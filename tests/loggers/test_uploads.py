"""Uploads of checkpoints that are deleted or replaced meanwhile."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from trainer_kit.core.errors import LogError
from trainer_kit.loggers.run_logger import copied
from trainer_kit.loggers.uploads import CheckpointUploads


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "step"
    path.mkdir()
    return path


def fails(path):
    raise ConnectionError("no answer")


def test_each_checkpoint_is_uploaded_when_it_is_saved(checkpoint):
    uploads, uploaded = CheckpointUploads("all"), []
    uploads.saved(str(checkpoint), uploaded.append)
    uploads.ended("success", uploaded.append)
    assert uploaded == [checkpoint]


def test_existing_checkpoints_are_uploaded_at_a_successful_end(checkpoint, tmp_path):
    uploads, uploaded = CheckpointUploads(True), []
    uploads.saved(checkpoint, uploaded.append)
    uploads.saved(tmp_path / "deleted", uploaded.append)
    uploads.ended("failed", uploaded.append)
    assert not uploaded
    uploads.ended("success", uploaded.append)
    uploads.ended("success", uploaded.append)
    assert uploaded == [checkpoint]


def test_a_checkpoint_deleted_before_its_upload_is_named(tmp_path):
    with pytest.raises(LogError, match="was deleted before it was uploaded"):
        CheckpointUploads("all").saved(tmp_path / "step", fails)


def test_a_checkpoint_deleted_or_replaced_during_its_upload_is_named(
    checkpoint, tmp_path
):
    def deletes(path):
        shutil.rmtree(path)
        fails(path)

    def replaces(path):
        (tmp_path / "newer").mkdir()
        os.rename(tmp_path / "newer", path)

    for upload in (replaces, deletes):
        with pytest.raises(LogError, match="was deleted before it was uploaded"):
            CheckpointUploads("all").saved(checkpoint, upload)


def test_an_error_of_the_tracker_stays_an_error(checkpoint):
    with pytest.raises(ConnectionError):
        CheckpointUploads("all").saved(checkpoint, fails)
    uploads, uploaded = CheckpointUploads(True), []
    uploads.saved(checkpoint, fails)
    with pytest.raises(ConnectionError):
        uploads.ended("success", fails)
    uploads.ended("success", uploaded.append)  # the call is repeated
    assert uploaded == [checkpoint]


def test_the_copy_of_a_private_file_is_private(tmp_path):
    (file := tmp_path / "config.yaml").touch(0o600)
    copied(file, tmp_path / "run" / "config.yaml")
    assert stat.S_IMODE((tmp_path / "run" / "config.yaml").stat().st_mode) == 0o600
