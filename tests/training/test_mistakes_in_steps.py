"""What users get wrong in a step: the error names it, and the user's own exception is unchanged but for a note."""

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.testing import TinyModule

OFF = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    False,
)
GOOD, WRONG = [torch.randn(4, 32)] * 2, [torch.randn(4, 32), torch.randn(4, 7)]


class Net(TinyModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Identity(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        return super().training_step(
            batch["x"] if isinstance(batch, dict) else batch, batch_idx
        )


def notes(error):
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("stage", ["fit", "sanity", "validate", "test", "predict"])
def test_a_wrong_shape_names_the_layer_and_the_batch(stage):
    trainer, module = tk.Trainer(max_epochs=1, **OFF), Net()
    run = {
        "fit": lambda: trainer.fit(module, WRONG),
        "sanity": lambda: trainer.fit(module, GOOD, WRONG),
    }.get(stage, lambda: getattr(trainer, stage)(module, WRONG))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        run()
    step = {"fit": "training", "sanity": "validation", "validate": "validation"}.get(
        stage, stage
    )
    (note,) = notes(error)
    assert note.startswith(
        f"in Net.{step}_step, module 'layer.1': Linear(in_features=32, out_features=2, bias=True); "
    )
    assert note.endswith("float32 (4, 7)")
    assert "batch 1: " in note or stage == "predict"
    assert type(error.value) is RuntimeError


def test_a_nested_batch_is_described():
    batch = {
        "x": torch.randn(4, 7),
        "more": (torch.zeros(2, dtype=torch.int64), "text"),
        "none": None,
    }
    with pytest.raises(RuntimeError) as error:
        tk.Trainer(max_epochs=1, **OFF).fit(Net(), [batch])
    described = (
        "{'x': float32 (4, 7), 'more': tuple of 2: (int64 (2,), str), 'none': NoneType}"
    )
    assert notes(error)[0].endswith(f"; batch 0: {described}")


def test_an_error_of_the_users_own_in_the_step():
    class Raises(Net):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        tk.Trainer(max_epochs=1, **OFF).fit(Raises(), GOOD)
    assert notes(error) == ["in Raises.training_step; batch 0: float32 (4, 32)"]


def test_a_layer_that_cannot_be_described_does_not_hide_the_error():
    class Odd(nn.Linear):
        def extra_repr(self):
            raise ValueError("not now")

    module = Net()
    module.layer = Odd(32, 2)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        tk.Trainer(max_epochs=1, **OFF).fit(module, WRONG)
    assert notes(error) == []


def test_library_errors_and_interrupts_are_not_wrapped():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("x", torch.ones(2))

    with pytest.raises(tk.LogError) as error:
        tk.Trainer(max_epochs=1, **OFF).fit(Logs(), GOOD)
    assert notes(error) == []


@pytest.mark.world_size(2)
def test_a_wrong_shape_on_two_ranks():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        tk.Trainer(
            max_epochs=1, devices=2, strategy="ddp", accelerator="cpu", **OFF
        ).fit(Net(), [torch.randn(4, 7)] * 4)
    assert "module 'layer.1'" in notes(error)[0]
    assert notes(error)[0].endswith("float32 (4, 7)")


class Backward(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss


class ManualTwice(TinyModule):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        self.manual_backward(loss)


class KeepsGraph(TinyModule):
    kept = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept = loss if self.kept is None else self.kept + loss
        return self.kept


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Backward, "remove backward() from the step"),
        (
            ManualTwice,
            "ManualTwice.training_step calls backward on one loss more than once",
        ),
        (KeepsGraph, "detach what the module keeps"),
    ],
)
def test_a_backward_that_has_run_already(module, said):
    with pytest.raises(RuntimeError, match="a second time") as error:
        tk.Trainer(max_epochs=1, **OFF).fit(module(), GOOD)
    assert said in notes(error)[-1]


@pytest.mark.parametrize("value", ["text", "3.5", b"x"])
def test_text_is_not_logged(value):
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("note", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises(tk.LogError) as error:
        tk.Trainer(max_epochs=1, **OFF).fit(Logs(), GOOD)
    assert error.value.problem == "'note' is not a number"
    assert repr(value) in error.value.found
    assert "use self.print" in error.value.fix


@pytest.mark.parametrize("later", [False, True])
def test_a_loss_without_a_graph(later):
    """In the first step, and in a later one, whose result is no longer looked at closely where it is a tensor."""

    class Detached(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if later and not batch_idx:
                return loss
            return loss.detach()

    error = tk.ConfigurationError if not later else RuntimeError
    with pytest.raises(error, match=r"requires? a? ?grad") as caught:
        tk.Trainer(max_epochs=1, **OFF).fit(Detached(), GOOD)
    assert later or "without .detach()" in str(caught.value)
