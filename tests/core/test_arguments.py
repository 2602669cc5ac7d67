"""A wrong argument of a logger or a strategy is answered by its constructor, not where the value is used first."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from trainer_kit import loggers, strategies
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
    assert "LaunchError: RANK is not a whole number\n  found: RANK=x" in ended.stderr
