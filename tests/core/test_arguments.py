"""A wrong argument of a logger or a strategy is answered by its constructor, not where the value is used first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from trainer_kit import callbacks, data, loggers, precision, strategies
from trainer_kit.accelerator.engine_plugins import describe_engine
from trainer_kit.core.arguments import typed_arguments
from trainer_kit.core.errors import ConfigurationError

WRONG: list[tuple[Any, dict[str, Any]]] = [
    (loggers.CSVLogger, {"save_dir": 3}),
    (loggers.CSVLogger, {"save_dir": ".", "name": 3}),
    (loggers.TensorBoardLogger, {"save_dir": ".", "log_graph": "no"}),
    (loggers.WandbLogger, {"name": 3}),
    (loggers.WandbLogger, {"offline": "no"}),
    (loggers.ClearMLLogger, {"task_name": 3}),
    (loggers.ClearMLLogger, {"offline": "no"}),
    (loggers.CometLogger, {"online": "no"}),
    (strategies.DDPStrategy, {"find_unused_parameters": "no"}),
    (strategies.DDPStrategy, {"process_group_backend": 3}),
    (strategies.FSDPStrategy, {"process_group_backend": 3}),
    (strategies.MeshStrategy, {"process_group_backend": 3}),
    (strategies.MeshStrategy, {"pp_schedule": []}),
    (strategies.MeshStrategy, {"fsdp": "x"}),
    (strategies.ModelParallelStrategy, {"process_group_backend": 3}),
]


@pytest.mark.parametrize(("kind", "arguments"), WRONG)
def test_a_wrong_argument_is_answered_at_once(
    kind: Any, arguments: dict[str, Any]
) -> None:
    wrong, value = list(arguments.items())[-1]
    with pytest.raises(ConfigurationError) as raised:
        kind(**arguments)
    assert f"{kind.__name__}({wrong}=) has the wrong type" in str(raised.value)
    assert repr(value) in str(raised.value)


def test_what_fits_is_taken() -> None:
    assert loggers.CSVLogger(".", name="a", version=np.int64(3)).version == 3
    assert strategies.DDPStrategy(find_unused_parameters=np.bool_(True)).describe()
    assert strategies.MeshStrategy(
        dp_shard=2, fsdp={"reshard_after_forward": False}
    ).describe()

    class Own(strategies.DDPStrategy.__base__):  # type: ignore[misc, name-defined]  # a user's constructor is left alone
        def __init__(self, size: int) -> None:
            self.size = size

        def start(self) -> None:
            raise NotImplementedError

    assert Own.__init__.__qualname__.endswith("Own.__init__")
    assert not hasattr(Own.__init__, "__wrapped__")


def test_a_mapping_of_any_values_is_compared_too() -> None:
    """``Mapping[str, object]`` says the same as ``Mapping[str, Any]``, and was not compared."""

    class Options:
        def __init__(self, values: Mapping[str, object], rest: object = None) -> None:
            self.values = values

    options: Any = typed_arguments(Options, Options.__init__)
    taken = object.__new__(Options)
    options(taken, {"a": object()}, rest=3)
    assert list(taken.values) == ["a"]
    with pytest.raises(ConfigurationError, match=r"Options\(values=\) has the wrong"):
        options(taken, [1])


MISSPELLED: list[tuple[Any, dict[str, Any], str]] = [
    (
        callbacks.EarlyStopping,
        {"monitor": "loss", "patiance": 3},
        "EarlyStopping.__init__() got an unexpected keyword argument 'patiance': did you mean 'patience'?",
    ),
    (callbacks.ModelCheckpoint, {"save_topk": 3}, "did you mean 'save_top_k'?"),
    (loggers.CSVLogger, {"save_dirs": "."}, "did you mean 'save_dir'?"),
    (strategies.DDPStrategy, {"find_unused": True}, "'find_unused_parameters'?"),
    (precision.MixedPrecision, {"scalr": None}, "did you mean 'scaler'?"),
    (data.shuffle, {"stream": [1], "sed": 3}, "did you mean 'seed'?"),
    (data.mix, {"sources": {}, "weight": {}}, "did you mean 'weights'?"),
    (data.token_budget, {"dataset": [], "tokns": 8}, "did you mean 'tokens'?"),
    (
        data.pack,
        {"stream": [[1]], "max_length": 8},
        "use one of: ids, ignore, key, method, open_rows, pad, shift, stream, tokens",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "fix"), MISSPELLED)
def test_a_misspelled_argument_is_answered_with_the_nearest_name(
    function: Any, arguments: dict[str, Any], fix: str
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument") as raised:
        function(**arguments)
    assert str(raised.value).endswith(fix)


def test_the_error_for_a_missing_argument_is_python_s() -> None:
    with pytest.raises(TypeError, match=r"missing 1 required .* 'monitor'"):
        callbacks.EarlyStopping()  # type: ignore[call-arg]

    class Options:
        def __init__(self, size: int, **others: object) -> None:
            self.others = others

    options: Any = typed_arguments(Options, Options.__init__)
    with pytest.raises(TypeError, match=r"missing 1 required .* 'size'"):
        options(object.__new__(Options), sizes=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: data.mix([[1], [2]]),  # type: ignore[arg-type]
            r"mix\(sources=\) .*\n  found: sources=\[\[1\], \[2\]\]\n  fix:   sources takes a dict, ",
        ),
        (
            lambda: data.mix({"a": [1]}, [1]),  # type: ignore[arg-type]
            r"mix\(weights=\) has the wrong type",
        ),
        (
            lambda: data.mix({"a": [1]}, [1] * 100),  # type: ignore[arg-type]
            r"found: weights=\[1, 1, .{190,194}\.\.\.\n",
        ),
        (
            lambda: data.pack([[1]], "8"),  # type: ignore[arg-type]
            r"pack\(tokens=\) has the wrong type\n  found: tokens='8'\n  fix:   tokens takes int",
        ),
    ],
)
def test_functions_of_data_check_the_types_of_their_arguments(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_layers_of_an_iterator_are_read_once() -> None:
    """The first reader, a description of the strategy, left no layer for those that shard."""
    names = iter(["Linear"])
    options = {"auto_wrap_policy": names, "ignored_modules": iter([])}
    mesh = strategies.MeshStrategy(dp_shard=2, fsdp=options)
    assert mesh.fsdp_options["auto_wrap_policy"] == ["Linear"]
    assert mesh.fsdp_options["ignored_modules"] == []
    sharded = strategies.FSDPStrategy(
        auto_wrap_policy=iter(["Linear"]), activation_checkpointing_policy=iter(["B"])
    )
    (plugin,) = describe_engine(sharded, sharded).values()
    assert plugin.transformer_cls_names_to_wrap == ["Linear"]
    assert sharded.options["auto_wrap_policy"] == ["Linear"]
    assert sharded.options["activation_checkpointing_policy"] == ["B"]


@pytest.mark.slow
def test_a_rank_that_is_not_a_number_is_answered_in_words() -> None:
    """The import read it first, with Python's own error."""
    code = "import trainer_kit as tk; import trainer_kit.core.hooks; tk.Trainer(accelerator='cpu', logger=False)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RANK": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "LaunchError: RANK is not an integer\n  found: RANK=x" in ended.stderr
