"""Errors say problem, found and fix, keep that across processes, and stand in one tree."""

from __future__ import annotations

import pickle

import pytest

from trainer_kit.core import errors
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    RegistryError,
    TrainerKitError,
    add_note,
    did_you_mean,
)

CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, TrainerKitError)
]


def test_all_three_parts_are_in_the_text_and_on_the_error():
    error = ConfigurationError("too many", found="9", fix="take 3")
    assert str(error) == "too many\n  found: 9\n  fix:   take 3"
    assert (error.problem, error.found, error.fix) == ("too many", "9", "take 3")


def test_parts_that_are_not_given_leave_no_line():
    assert str(TrainerKitError("too many")) == "too many"
    assert str(TrainerKitError("too many", fix="take 3")) == "too many\n  fix:   take 3"


def test_a_wrong_call_is_a_value_error():
    with pytest.raises(ValueError, match="too many"):
        raise RegistryError("too many")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_in_the_tree_of_the_docstring_and_in_all(cls):
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__name__ in errors.__all__


@pytest.mark.parametrize(
    "cls", [c for c in CLASSES if not issubclass(c, CheckpointError)]
)
def test_every_error_survives_pickling(cls):
    error = pickle.loads(pickle.dumps(cls("problem", found="this", fix="that")))
    assert type(error) is cls
    see = ""
    if cls.see is not None:
        see = f"\n  see:   {cls.see}"
    assert str(error) == f"problem\n  found: this\n  fix:   that{see}"
    assert (error.problem, error.found, error.fix) == ("problem", "this", "that")


def test_a_checkpoint_error_names_file_key_and_reason_and_survives_pickling():
    error = pickle.loads(
        pickle.dumps(
            CheckpointError("model.safetensors", "layer.weight", "checksum differs")
        )
    )
    assert (
        str(error)
        == "model.safetensors: checksum differs\n  found: key 'layer.weight'\n"
        "  see:   troubleshooting#a-checkpoint-does-not-load"
    )
    assert (error.file, error.key, error.reason) == (
        "model.safetensors",
        "layer.weight",
        "checksum differs",
    )


def test_a_missing_checkpoint_is_also_what_the_references_raise_and_survives_pickling():
    missing = errors.MissingCheckpointError(
        "nope", "does not exist", found="runs has step-3", fix="pass runs/step-3"
    )
    error = pickle.loads(pickle.dumps(missing))
    assert (
        str(error)
        == "nope: does not exist\n  found: runs has step-3\n  fix:   pass runs/step-3\n"
        "  see:   troubleshooting#a-checkpoint-does-not-load"
    )
    assert (error.file, error.reason, error.found) == (
        "nope",
        "does not exist",
        "runs has step-3",
    )
    for kind in (CheckpointError, FileNotFoundError, ValueError):
        assert isinstance(error, kind)


def test_the_nearest_name_is_suggested():
    assert did_you_mean("dpp", ["ddp", "fsdp"]) == "did you mean 'ddp'?"


def test_without_a_near_name_all_are_listed_in_order():
    assert did_you_mean("xyz", iter(["fsdp", "ddp"])) == "use one of: ddp, fsdp"


def test_notes_stack_on_an_exception():
    error = KeyError("a")
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_notes_work_without_support_of_the_interpreter():
    class Old(Exception):
        add_note = property()  # hasattr says no, as on Python 3.10

    error = Old()
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_every_error_is_at_the_top():
    import trainer_kit as tk
    from trainer_kit.core import errors

    raised = [
        name for name in errors.__all__ if isinstance(getattr(errors, name), type)
    ]
    assert len(raised) > 10
    for name in raised:
        assert getattr(tk, name) is getattr(errors, name)
    with pytest.raises(tk.CheckpointError):
        tk.verify_checkpoint("nowhere")
