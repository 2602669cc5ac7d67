import pytest
import torch

from trainer_kit.callbacks.checkpoint_name import CheckpointName
from trainer_kit.core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("template", "insert", "values", "expected"),
    [
        (None, True, {"step": 1200}, "step-00001200"),
        (
            "{epoch}-{val_loss:.2f}",
            True,
            {"epoch": 3, "val_loss": torch.tensor(0.1234)},
            "epoch=3-val_loss=0.12",
        ),
        ("{epoch:03d}", True, {"epoch": 5}, "epoch=005"),
        (
            "epoch={epoch}-loss={val/loss:.3f}",
            False,
            {"epoch": 2, "val/loss": 0.5},
            "epoch=2-loss=0.500",
        ),
        ("{val/acc:.2f}", True, {"val/acc": 0.5}, "val_acc=0.50"),
        (
            "{a.b:.1f}-{epoch_test}-{epoch}",
            True,
            {"a.b": 1.0, "epoch_test": 7, "epoch": 1},
            "a.b=1.0-epoch_test=7-epoch=1",
        ),
        ("{n:02d}", True, {"n": torch.tensor(4.0)}, "n=04"),
        ("best", True, {}, "best"),
        ("{loss:.2f}", True, {"loss": torch.tensor(float("nan"))}, "loss=nan"),
        ("{loss:02d}-{n:d}", False, {"loss": float("nan"), "n": 2.7}, "nan-3"),
    ],
)
def test_templates(template, insert, values, expected):
    assert CheckpointName(template, insert)(values) == expected


def test_a_missing_value_is_zero_and_warns_once():
    name = CheckpointName("{val_los:.1f}")
    with pytest.warns(
        UserWarning,
        match="uses 'val_los', which was not logged.*did you mean 'val_loss'",
    ):
        assert name({"val_loss": 1.0}) == "val_los=0.0"
    assert name({"val_loss": 1.0}) == "val_los=0.0"


@pytest.mark.parametrize(
    "template",
    [
        "",
        "runs/{epoch}",
        ".hidden",
        "{}",
        "{epoch",
        "{epoch!r}",
        "a\\b",
        "{step:s}",
        "{a:x}",
    ],
)
def test_a_template_that_is_not_one_directory_is_refused(template):
    with pytest.raises(ConfigurationError, match="filename"):
        CheckpointName(template)
