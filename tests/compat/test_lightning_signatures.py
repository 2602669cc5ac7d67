"""Every argument of Lightning's public classes: taken, or refused in words that name what to write here."""

from __future__ import annotations

import functools
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.lazy import argument_rows
from trainer_kit.testing import TinyModule

RECORDED = json.loads(Path(__file__).with_name("lightning_signatures.json").read_text())
"""Read with ``inspect.signature`` from the version of Lightning that the file names."""


def names_of(function: Any, *without: str) -> list[str]:
    return [
        name
        for name in inspect.signature(function).parameters
        if name not in ("self", *without)
    ]


WHAT_KEYWORDS_ARE = {
    "DDPStrategy": names_of(DistributedDataParallel.__init__, "module"),
    "EMAWeightAveraging": [],
    "FSDPStrategy": names_of(FullyShardedDataParallel.__init__, "module"),
    "ModelSummary": [],
    "ReduceLROnPlateau": names_of(
        torch.optim.lr_scheduler.ReduceLROnPlateau, "optimizer"
    ),
    "RichModelSummary": ["header_style"],
    "ThroughputMonitor": ["window_size", "separator"],
    "WeightAveraging": names_of(AveragedModel, "model"),
    "XLAStrategy": [],
}
"""What Lightning's class takes as ``**kwargs``, where the class here has no such argument."""
ANOTHER_ORDER = {
    "DDPStrategy": "the device is the first argument of strategies here; all others go by name",
    "DeepSpeedStrategy": "likewise",
    "FSDPStrategy": "likewise",
    "MixedPrecision": "it takes a dtype in place of a word",
    "TransformerEnginePrecision": "it takes a precision for the other layers in place of a dtype",
}


def resolve(path: str) -> Any:
    """The class or method here under Lightning's path."""
    if ".Tuner." in path:  # whose methods are these functions, of its Trainer
        return getattr(tk.tuner, path.rpartition(".")[2])
    module, *rest = path.rsplit(".", 2 if path.split(".")[-2][0].isupper() else 1)
    return functools.reduce(getattr, rest, import_module(f"trainer_kit.{module}"))


def taken_by(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("path", RECORDED["constructors"])
def test_each_argument_of_a_constructor_is_taken_or_refused_in_words(path: str) -> None:
    cls = resolve(path)
    taken = taken_by(cls)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    recorded = RECORDED["constructors"][path].split()
    keywords = any(name.startswith("**") for name in recorded)
    recorded = [name for name in recorded if not name.startswith("*")]
    if keywords and not takes_any:
        recorded += WHAT_KEYWORDS_ARE[cls.__name__]
    bases = inspect.getmro(cls) if inspect.isclass(cls) else (cls,)
    rows = argument_rows("trainer_kit", [base.__name__ for base in bases])
    for name in recorded:
        if name in taken or (takes_any and name not in rows):
            assert name not in rows
            continue
        with pytest.raises(
            ConfigurationError, match=f"has no argument '{name}'"
        ) as raised:
            cls(**{name: object()})
        assert "\n  fix:   " in str(raised.value)


@pytest.mark.parametrize("path", RECORDED["constructors"])
def test_arguments_without_a_name_have_lightnings_order(path: str) -> None:
    cls = resolve(path)
    positional = [
        name
        for name, each in taken_by(cls).items()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    recorded = [
        name for name in RECORDED["constructors"][path].split() if name[0] != "*"
    ]
    shared = min(len(positional), len(recorded))
    assert (positional[:shared] != recorded[:shared]) == (
        cls.__name__ in ANOTHER_ORDER and shared > 0
    )


@pytest.mark.parametrize("path", RECORDED["methods"])
def test_each_argument_of_a_method_is_taken(path: str) -> None:
    method = resolve(path)
    taken = taken_by(method)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    recorded = [name for name in RECORDED["methods"][path].split() if name[0] != "*"]
    refused = {"_reapply_compile"}  # of Fabric.setup, below
    assert takes_any or set(recorded) - refused <= taken.keys()


def test_values_that_ask_for_what_happens_anyway_are_taken() -> None:
    from trainer_kit import callbacks, strategies

    pruning = callbacks.ModelPruning(
        "l1_unstructured",
        make_pruning_permanent=True,
        resample_parameters=False,
        prune_on_train_epoch_end=True,
    )
    assert pruning.amount == 0.5
    strategy = strategies.DDPStrategy(
        accelerator=None, checkpoint_io=None, start_method="popen"
    )
    assert strategy.name == "ddp"
    with pytest.raises(
        ConfigurationError, match=r"(?s)'start_method'.*found: .*'spawn'.*ddp_fork"
    ):
        strategies.DDPStrategy(start_method="spawn")
    with pytest.raises(ConfigurationError, match=r'config=\{"aio"|offloaded to NVMe'):
        strategies.DeepSpeedStrategy(thread_count=2)
    fix = r'config=\{"zero_optimization": \{"allgather_bucket_size": 1000\}\}'
    with pytest.raises(ConfigurationError, match=fix):
        strategies.DeepSpeedStrategy(allgather_bucket_size=1000)


def test_a_subclass_of_a_users_passes_its_arguments_on() -> None:
    class Strategy(tk.strategies.DDPStrategy):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    assert Strategy(precision_plugin=None).name == "ddp"
    with pytest.raises(
        ConfigurationError, match=r"(?s)'precision_plugin'.*Trainer\(plugins="
    ):
        Strategy(precision_plugin="16-mixed")


def test_save_checkpoint_takes_its_storage_from_fsspec(tmp_path: Path) -> None:
    trainer = tk.Trainer(max_steps=1, barebones=True, accelerator="cpu", devices=1)
    trainer.fit(TinyModule(), [torch.ones(2, 32)])
    trainer.save_checkpoint(tmp_path / "saved", storage_options=None)
    assert (tmp_path / "saved").is_dir()
    with pytest.raises(
        ConfigurationError, match=r"(?s)'storage_options'.*fsspec reads"
    ):
        trainer.save_checkpoint(tmp_path / "other", storage_options={"key": "secret"})
    with pytest.raises(
        ConfigurationError, match=r"(?s)'_reapply_compile'.*compile what"
    ):
        tk.Fabric(accelerator="cpu").setup(TinyModule(), _reapply_compile=False)
    with pytest.raises(AttributeError, match=r"(?s)LitLogger.*WandbLogger"):
        _ = tk.loggers.LitLogger
