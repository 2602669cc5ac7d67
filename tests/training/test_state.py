"""The whole state of a run as a dict, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.state.collect import plain_hparams
from trainer_kit.state.optimizer_states import (
    configured,
    optimizer_state,
    owned_parameters,
    restore_optimizer,
)
from trainer_kit.strategies import SingleDeviceStrategy
from trainer_kit.testing import TinyModule

ALONE = SingleDeviceStrategy()


class Net(TrainModule):
    def __init__(self, lr=0.1, momentum=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.log(
            "loss", loss := self.head(self.layer(batch)).pow(2).mean(), on_epoch=True
        )
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum
        )
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


class Remembers(Callback):
    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def trainer(**options):
    return Trainer(
        accelerator="cpu", barebones=True, **{"max_epochs": 2, "seed": 5, **options}
    )


def batches():
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(3, 4, 2, generator=generator))


@pytest.fixture
def saved(tmp_path):
    made = trainer(callbacks=[Remembers()])
    torch.manual_seed(0)
    made.fit(Net(), batches())
    made.save_checkpoint(tmp_path / "c")
    return made, tmp_path / "c"


def resume(path, module=None, **options):
    made = trainer(**{"max_epochs": 3, **options})
    made.fit(Net() if module is None else module, batches(), ckpt_path=path)
    return made


def test_a_checkpoint_holds_everything(saved):
    made, path = saved
    state = read_checkpoint(path)
    assert {
        "model",
        "hyper_parameters",
        "optimizer_states",
        "lr_schedulers",
        "precision",
        "progress",
        "callbacks",
        "datamodule",
        "seed",
        "rng",
        "metrics",
    } <= state.keys()
    assert state["progress"]["step"] == state["global_step"] == 6
    assert state["epoch"] == 2
    assert state["seed"] == 5
    assert state["callbacks"] == {"Remembers": {"epochs": 2}}
    assert state["hyper_parameters"] == {"lr": 0.1, "momentum": 0.9}
    assert all(
        torch.equal(state["model"][name], value)
        for name, value in made.module.state_dict().items()
    )


def test_weights_alone_hold_weights_and_hyperparameters_alone(saved, tmp_path):
    saved[0].save_checkpoint(tmp_path / "w", weights_only=True)
    assert set(read_checkpoint(tmp_path / "w")) == {
        "model",
        "hyper_parameters",
        "epoch",
        "global_step",
    }


def test_optimizer_state_goes_by_the_names_of_parameters(saved):
    state = read_checkpoint(saved[1])["optimizer_states"][0]
    trained = {"layer.weight", "layer.bias", "head.weight", "head.bias"}
    assert set(state["state"]) == trained
    assert set(state["param_groups"][0]["params"]) == trained | {
        "frozen.weight",
        "frozen.bias",
    }


def test_everything_comes_back(saved):
    made, path = saved
    seen = {}

    class Looks(Callback):
        order = "late"

        def on_fit_start(self, trainer, module):
            optimizer = trainer.optimizers[0]
            seen["momentum"] = {
                k: v["momentum_buffer"].clone() for k, v in optimizer.state.items()
            }
            seen["lr"] = optimizer.param_groups[0]["lr"]
            seen["scheduler"] = trainer.lr_scheduler_configs[0].scheduler.last_epoch
            seen["epochs"] = trainer.callbacks[0].epochs
            seen["step"] = trainer.global_step
            seen["rng"] = torch.get_rng_state()

    expected = list(made.optimizers[0].state.values())
    state = torch.get_rng_state()
    torch.manual_seed(99)
    resume(path, callbacks=[Remembers(), Looks()])
    assert (seen["lr"], seen["scheduler"], seen["epochs"], seen["step"]) == (
        0.025,
        2,
        2,
        6,
    )
    for old, new in zip(expected, seen["momentum"].values(), strict=True):
        assert torch.equal(old["momentum_buffer"], new)
    assert torch.equal(seen["rng"], state)


def test_a_resumed_run_equals_the_uninterrupted_one(saved):
    torch.manual_seed(0)
    whole = trainer(max_epochs=3)
    whole.fit(Net(), batches())
    rest = resume(saved[1])
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, rest.module.state_dict()[name]), name
    assert whole.callback_metrics["loss_epoch"] == rest.callback_metrics["loss_epoch"]


def test_a_newly_configured_option_keeps_its_new_value_and_is_reported(saved, capsys):
    made = resume(saved[1], Net(momentum=0.5))
    assert made.optimizers[0].param_groups[0]["momentum"] == 0.5
    assert made.optimizers[0].param_groups[0]["lr"] == 0.0125
    assert "momentum: 0.5 as configured now, not 0.9" in capsys.readouterr().out


def test_a_new_rate_reaches_the_schedule(saved):
    made = resume(saved[1], Net(lr=0.8))
    assert made.lr_scheduler_configs[0].scheduler.base_lrs == [0.8]


def test_the_state_of_a_removed_callback_is_skipped(saved):
    assert resume(saved[1]).global_step == 9


def test_a_callback_without_state_in_the_checkpoint_starts_fresh(saved):
    class Other(Remembers):
        pass

    made = resume(saved[1], callbacks=[Other()])
    assert made.callbacks[0].epochs == 1


def test_a_run_with_other_optimizers_is_refused(saved):
    class Two(Net):
        def configure_optimizers(self):
            return {
                "a": torch.optim.SGD(self.layer.parameters(), 0.1),
                "b": torch.optim.SGD(self.head.parameters(), 0.1),
            }

    with pytest.raises(
        CheckpointError, match="1 optimizer was saved, 2 are configured"
    ):
        resume(saved[1], Two())


def test_a_run_with_another_number_of_schedulers_is_refused(saved):
    class Unscheduled(Net):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            return made["optimizer"] if isinstance(made, dict) else made[0][0]

    with pytest.raises(
        CheckpointError, match="1 schedulers were saved, 0 are configured"
    ):
        resume(saved[1], Unscheduled())


def test_weights_that_do_not_fit_are_refused_by_name(saved):
    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"more\.weight"):
        resume(saved[1], Wider())


def test_hooks_may_add_to_a_checkpoint_and_read_it_back(tmp_path):
    seen = []

    class Adds(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"table": torch.arange(3), "name": "a"}

        def on_load_checkpoint(self, checkpoint):
            seen.append(checkpoint["mine"])

    made = trainer()
    made.fit(Adds(), batches())
    made.save_checkpoint(tmp_path / "c")
    resume(tmp_path / "c", Adds())
    assert seen[0]["name"] == "a"
    assert seen[0]["table"].tolist() == [0, 1, 2]


def test_values_that_a_checkpoint_cannot_hold_are_refused_before_the_first_step(
    tmp_path,
):
    from trainer_kit.callbacks import ModelCheckpoint

    class Holds(Remembers):
        def state_dict(self):
            return {"object": object()}

    module = Net()
    made = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Holds(), ModelCheckpoint(dirpath=tmp_path)],
    )
    with pytest.raises(CheckpointError, match=r"(?s)object"):
        made.fit(module, batches())
    assert made.global_step == 0


def test_two_callbacks_with_one_name_for_their_state_are_refused():
    with pytest.raises(ValueError, match=r"(?s)'Remembers'.*state_key"):
        trainer(callbacks=[Remembers(), Remembers()])


# -- parts ---------------------------------------------------------------------------------------------------------


def test_hyperparameters_that_cannot_be_stored_become_their_repr():
    large = torch.nn.Linear(1024, 1024)  # its weights are in the checkpoint already
    hparams = {
        "lr": 0.1,
        "shape": (1, 2),
        "activation": torch.relu,
        "load": torch.load,
        "net": large,
    }
    plain, refused = plain_hparams(hparams)
    reprs = {"load": {"repr": repr(torch.load)}, "net": {"repr": repr(large)}}
    assert plain == {"lr": 0.1, "shape": (1, 2), "activation": torch.relu, **reprs}
    assert refused == ["load", "net"]


def test_groups_and_parameters_in_another_order_get_their_own_state():
    module = Net()
    names = {id(p): name for name, p in module.named_parameters()}
    first = torch.optim.SGD(module.layer.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.layer.parameters():
        parameter.grad = torch.full_like(parameter, float(parameter.dim()))
    first.step()
    saved = optimizer_state(ALONE, first, names)
    second = torch.optim.SGD(
        list(module.layer.parameters())[::-1], lr=0.1, momentum=0.9
    )
    assert (
        restore_optimizer(
            ALONE, second, owned_parameters(ALONE, second), saved, names, print
        )
        == {}
    )
    for parameter in module.layer.parameters():
        assert torch.equal(
            second.state[parameter]["momentum_buffer"],
            first.state[parameter]["momentum_buffer"],
        )


def test_another_number_of_groups_is_refused():
    module = Net()
    one = torch.optim.SGD(module.layer.parameters(), lr=0.1)
    two = torch.optim.SGD([{"params": [p]} for p in module.layer.parameters()], lr=0.1)
    with pytest.raises(CheckpointError, match="1 group was saved, the optimizer has 2"):
        restore_optimizer(
            ALONE,
            two,
            owned_parameters(ALONE, two),
            optimizer_state(ALONE, one, {}),
            {},
            print,
        )


def test_the_state_of_another_class_is_refused_and_an_unnamed_one_is_taken():
    parameters = list(Net().layer.parameters())
    saved = optimizer_state(ALONE, torch.optim.Adam(parameters), {})
    other = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(
        CheckpointError,
        match=r"the state of Adam, but .* is SGD\n(.*\n)?  fix: +configure Adam, or start a new run from",
    ):
        restore_optimizer(
            ALONE, other, owned_parameters(ALONE, other), saved, {}, print
        )
    del saved["class"]  # as checkpoints of before have it
    adam = torch.optim.Adam(parameters)
    assert (
        restore_optimizer(ALONE, adam, owned_parameters(ALONE, adam), saved, {}, print)
        == {}
    )


def test_configured_options_are_copies():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    before = configured(optimizer)
    optimizer.param_groups[0]["lr"] = 9.0
    assert before[0]["lr"] == 0.1
    assert "params" not in before[0]


def test_a_rate_in_a_tensor_is_compared_by_value():
    parameter = nn.Parameter(torch.zeros(1))
    first = torch.optim.Adam([parameter], lr=torch.tensor(0.1))
    saved = optimizer_state(ALONE, first, {id(parameter): "p"})
    said = []
    second = torch.optim.Adam([parameter], lr=torch.tensor(0.1))
    assert (
        restore_optimizer(
            ALONE,
            second,
            owned_parameters(ALONE, second),
            saved,
            {id(parameter): "p"},
            said.append,
        )
        == {}
    )
    assert said == []


def test_a_value_that_is_not_logged_again_keeps_its_reduction_through_a_resume(
    tmp_path,
):
    class Early(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx < 2:
                self.log(
                    "early",
                    float(batch_idx + 1),
                    on_step=False,
                    on_epoch=True,
                    reduce_fx="max",
                )
            return super().training_step(batch, batch_idx)

    def trainer():
        keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
        return Trainer(
            max_epochs=1, logger=False, callbacks=[keeper], enable_progress_bar=False
        )

    trainer().fit(Early(), [torch.randn(4, 32) for _ in range(4)])
    resumed = trainer()
    resumed.fit(
        Early(),
        [torch.randn(4, 32) for _ in range(4)],
        ckpt_path=tmp_path / "step-00000003",
    )
    assert resumed.callback_metrics["early"].item() == 2.0


def test_an_epoch_that_was_left_early_is_saved_as_finished(tmp_path):
    """``on_train_batch_start`` returned -1: no window is under way any more, so nothing of it is taken back."""

    class Leaves(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    keeper = ModelCheckpoint(dirpath=tmp_path)
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        callbacks=[Leaves(), keeper],
        enable_progress_bar=False,
    )
    trainer.fit(TinyModule(), [torch.randn(4, 32) for _ in range(6)])
    saved = read_checkpoint(Path(keeper.best_model_path))["progress"]
    assert {
        name: saved[name] for name in ("epoch", "epoch_batch", "batch", "samples")
    } == {
        "epoch": 1,
        "epoch_batch": 0,
        "batch": 3,
        "samples": 12,
    }


def spread(values):
    return values.max() - values.min()


class Left(TrainModule):
    """Logs by a function of its own, in some batches of an epoch."""

    def __init__(self, *batches):
        super().__init__()
        self.weight, self.batches = nn.Parameter(torch.ones(1)), batches

    def training_step(self, batch, batch_idx):
        if batch_idx in self.batches:
            self.log(
                "range", batch.mean(), on_step=False, on_epoch=True, reduce_fx=spread
            )
        return (self.weight * batch.mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_reduction_function_missing_after_a_resume_gives_nan_and_is_reported(
    tmp_path,
):
    batches = [torch.ones(2, 1)] * 4
    trainer = Trainer(
        max_steps=2,
        barebones=True,
        accelerator="cpu",
        callbacks=[keeper := Inside(tmp_path, at=2)],
    )
    trainer.fit(Left(0), batches)
    again = Trainer(max_epochs=1, barebones=True, accelerator="cpu")
    with pytest.warns(
        UserWarning, match="'range' is NaN for this epoch: its reduce_fx is a function"
    ):
        again.fit(Left(0), batches, ckpt_path=keeper.path)
    assert again.callback_metrics["range"].isnan()


class Inside(Callback):
    """Saves at the start of a batch, or at the end of a step."""

    def __init__(self, directory, at=None, batch=None):
        self.path, self.at, self.batch = directory / "inside", at, batch

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("where", "said"), [({"batch": 3}, True), ({"at": 1}, False)])
def test_a_checkpoint_from_inside_a_step_is_reported(tmp_path, capsys, where, said):
    keeper = Inside(tmp_path, **where)
    options = {
        "max_epochs": 1,
        "barebones": True,
        "accelerator": "cpu",
        "accumulate_grad_batches": 2,
    }
    Trainer(**options, callbacks=keeper).fit(Left(), [torch.ones(2, 1)] * 4)
    module = Left()
    Trainer(**options).fit(module, [torch.ones(2, 1)] * 4, ckpt_path=keeper.path)
    assert ("taken inside step 2, which runs again" in capsys.readouterr().out) is said
    torch.testing.assert_close(module.weight.detach(), torch.tensor([0.8]))


class Hears(Callback):
    def __init__(self):
        self.heard = []

    def on_train_start(self, trainer, module):
        self.heard.append("train")
        module.log("started", torch.rand(()))

    def on_train_epoch_start(self, trainer, module):
        self.heard.append("epoch")
        module.log("begun", torch.rand(()), reduce_fx="sum")


def test_hooks_repeated_by_a_resume_have_no_side_effects(tmp_path):
    batches, ends = [torch.ones(2, 1)] * 4, []
    for ckpt in (None, tmp_path / "inside"):
        torch.manual_seed(1 if ckpt is None else 2)
        hears = Hears()
        trainer = Trainer(
            max_epochs=2,
            barebones=True,
            accelerator="cpu",
            callbacks=[hears, Inside(tmp_path, at=3)],
        )
        trainer.fit(Left(0, 3), batches, ckpt_path=ckpt)
        ends.append((trainer.callback_metrics, torch.get_rng_state().tolist()))
        assert hears.heard == ["train", "epoch", "epoch"]
    assert ends[0] == ends[1]
    assert set(ends[0][0]) == {"started", "begun", "range"}
