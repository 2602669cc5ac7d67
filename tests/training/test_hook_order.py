"""Who hears what, in which order: the lists here are the contract."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.tiny import Tiny
from trainer_kit import Callback, Trainer
from trainer_kit.core.errors import ConfigurationError

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}

SET_UP = [
    "configure_callbacks M",
    "prepare_data D M",
    "setup D C1 C2 late M",
    "configure_model M",
]
TEAR_DOWN = ["teardown D C1 C2 late M"]
MOVED = [
    "on_before_batch_transfer D",
    "transfer_batch_to_device D",
    "on_after_batch_transfer D",
]


def evaluation(kind):
    """One loader with one batch."""
    return [
        f"on_{kind}_model_eval M",
        f"on_{kind}_start C1 C2 late M",
        f"on_{kind}_epoch_start C1 C2 late M",
        *MOVED,
        f"on_{kind}_batch_start C1 C2 late M",
        f"{kind}_step M",
        f"on_{kind}_batch_end C1 C2 late M",
        f"on_{kind}_epoch_end C1 C2 late M",
        f"on_{kind}_end C1 C2 late M",
        f"on_{kind}_model_train M",
    ]


def micro(first):
    """A micro-batch up to its backward; ``first`` of its window."""
    zero = ["on_before_zero_grad C1 C2 late M", "optimizer_zero_grad M"]
    return [
        *MOVED,
        "on_train_batch_start C1 C2 late M",
        "training_step M",
        *(zero if first else []),
        "on_before_backward C1 C2 late M",
        "backward M",
        "on_after_backward C1 C2 late M",
    ]


STEP = [
    "on_before_optimizer_step C1 C2 late M",
    "configure_gradient_clipping M",
    "optimizer_step M",
    "lr_scheduler_step M",
    "on_train_batch_end C1 C2 late M",
    "on_train_step_end C1 C2 late M",
]
EPOCH = [  # three batches, two a window: the last window is short
    "on_train_epoch_start C1 C2 late M",
    *micro(first=True),
    "on_train_batch_end C1 C2 late M",
    *micro(first=False),
    *STEP,
    *micro(first=True),
    *STEP,
    "on_validation_model_zero_grad M",
    *evaluation("validation"),
    "on_train_epoch_end C1 C2 M late",
]


def without_weights(lines):
    """``loss_weight`` is asked on the host batch, whenever that is read."""
    return [line for line in lines if not line.startswith("loss_weight")]


def test_fit_with_accumulation_and_validation(make_cast):
    cast = make_cast()
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=cast.callbacks, **QUIET
    )
    trainer.fit(cast.module, datamodule=cast.data)
    assert without_weights(cast.log.lines()) == [
        *SET_UP,
        "train_dataloader D",
        "configure_optimizers M",
        "val_dataloader D",
        "on_fit_start C1 C2 late M",
        "on_sanity_check_start C1 C2 late",
        *evaluation("validation"),
        "on_sanity_check_end C1 C2 late",
        "on_train_start C1 C2 late M",
        *EPOCH,
        *EPOCH,
        "on_train_end C1 C2 late M",
        "on_fit_end C1 C2 late M",
        *TEAR_DOWN,
    ]


def test_the_picture_of_the_loop_has_the_order_of_a_resumed_fit(make_cast, tmp_path):
    """docs/assets/loop.svg is drawn from these lists."""
    loop = runpy.run_path(
        str(Path(__file__).resolve().parents[2] / "docs" / "generate_loop.py")
    )
    first = make_cast()
    trainer = Trainer(max_epochs=1, callbacks=first.callbacks, **QUIET)
    trainer.fit(first.module, datamodule=first.data)
    trainer.save_checkpoint(tmp_path / "end")
    cast = make_cast()

    class Asks(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.request_checkpoint("asked", None)

    # The second epoch alone: hooks of a first fit and of a sanity check come before it.
    trainer = Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[*cast.callbacks, Asks()],
        **QUIET,
    )
    trainer.fit(cast.module, datamodule=cast.data, ckpt_path=tmp_path / "end")
    lines = [line.split()[0] for line in cast.log.lines()]
    validation = lines.index("on_validation_model_eval")
    for column, heard in (
        (loop["FIT"], lines),
        (loop["EVALUATION"], lines[validation:]),
    ):
        drawn, called = list(loop["names"](column)), list(dict.fromkeys(heard))
        assert [name for name in called if name in drawn] == [
            name for name in drawn if name in called
        ]
        assert {*drawn} - {*called} <= {
            "on_sanity_check_start",
            "on_sanity_check_end",
            "state_dict",
        }  # not spied on


def test_loss_weight_is_asked_once_a_training_batch(make_cast):
    cast = make_cast()
    trainer = Trainer(
        max_epochs=2, limit_val_batches=0, callbacks=cast.callbacks, **QUIET
    )
    trainer.fit(cast.module, datamodule=cast.data)
    assert len(cast.log.who("loss_weight")) == len(cast.log.who("training_step")) == 6


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("validate", "validation"), ("test", "test"), ("predict", "predict")],
)
def test_evaluation_never_configures_optimizers(make_cast, verb, kind):
    cast = make_cast()
    getattr(Trainer(callbacks=cast.callbacks, **QUIET), verb)(
        cast.module, datamodule=cast.data
    )
    loader = {"validate": "val"}.get(verb, verb)
    assert without_weights(cast.log.lines()) == [
        *SET_UP,
        f"{loader}_dataloader D",
        *evaluation(kind),
        *TEAR_DOWN,
    ]


def test_fast_dev_run_is_one_batch_of_everything_without_sanity_check(
    make_cast, tmp_path
):
    cast = make_cast()
    trainer = Trainer(
        fast_dev_run=True, callbacks=cast.callbacks, enable_progress_bar=False
    )
    trainer.fit(cast.module, datamodule=cast.data)
    assert without_weights(cast.log.lines()) == [
        *SET_UP,
        "train_dataloader D",
        "configure_optimizers M",
        "val_dataloader D",
        "on_fit_start C1 C2 late M",
        "on_train_start C1 C2 late M",
        "on_train_epoch_start C1 C2 late M",
        *micro(first=True),
        *STEP,
        "on_validation_model_zero_grad M",
        *evaluation("validation"),
        "on_train_epoch_end C1 C2 M late",
        "on_train_end C1 C2 late M",
        "on_fit_end C1 C2 late M",
        *TEAR_DOWN,
    ]
    assert trainer.global_step == 1
    assert list(tmp_path.iterdir()) == []


def test_code_that_uses_its_logger_runs_in_fast_dev_run(tmp_path):
    class Draws(Tiny):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_histogram(
                "weights", self.layer.weight, self.global_step
            )
            self.logger.log_hyperparams({"a": 1})
            self.logger.log_metrics({"b": 2.0}, step=1)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(fast_dev_run=True, enable_progress_bar=False)
    trainer.fit(Draws(), [torch.ones(2, 2)])
    assert trainer.global_step == 1
    assert trainer.loggers == []
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_nothing_even_when_asked(tmp_path):
    class Asks(Callback):
        def on_train_step_end(self, trainer, module):
            trainer.request_checkpoint("why not")

    Trainer(fast_dev_run=3, callbacks=Asks(), enable_progress_bar=False).fit(
        Tiny(), [torch.ones(2, 2)] * 3
    )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_taken_once_after_everything_of_its_step(make_cast, tmp_path):
    cast = make_cast()

    class Asks(Callback):
        def ask(self, trainer, *_):
            if not trainer.sanity_checking:
                trainer.request_checkpoint("asked", None)

        on_train_batch_end = on_validation_end = on_train_epoch_end = (
            lambda self, trainer, *_: self.ask(trainer)
        )

    trainer = Trainer(
        max_epochs=1, val_check_interval=2, callbacks=[*cast.callbacks, Asks()], **QUIET
    )
    trainer.fit(cast.module, datamodule=cast.data)
    heard = [line.split()[0] for line in cast.log.lines()]
    kept = (
        "training_step",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_save_checkpoint",
    )
    saved = [name for name in heard[heard.index("on_train_start") :] if name in kept]
    assert saved == [
        "training_step",
        "on_save_checkpoint",
        "training_step",
        "on_validation_end",
        "on_save_checkpoint",
        "training_step",
        "on_train_epoch_end",
        "on_save_checkpoint",
        "on_train_end",
    ]
    assert cast.log.who("on_save_checkpoint") == ["C1", "C2", "late", "M"] * 3
    assert sorted(path.name for path in tmp_path.glob("**/step-*")) == [
        f"step-{n:08d}" for n in (1, 2, 3)
    ]


def test_a_checkpoint_asked_for_at_the_very_end_is_taken(tmp_path):
    class Asks(Callback):
        def on_train_end(self, trainer, module):
            trainer.request_checkpoint("last word")

    Trainer(max_epochs=1, callbacks=Asks(), **QUIET).fit(Tiny(), [torch.ones(2, 2)] * 3)
    assert [path.name for path in tmp_path.glob("**/step-*")] == ["step-00000003"]


def test_everything_is_restored_at_one_point_before_on_fit_start(make_cast, tmp_path):
    first = make_cast()
    trainer = Trainer(max_epochs=1, callbacks=first.callbacks, **QUIET)
    trainer.fit(first.module, datamodule=first.data)
    trainer.save_checkpoint(tmp_path / "end")
    cast = make_cast()
    trainer = Trainer(max_epochs=2, callbacks=cast.callbacks, **QUIET)
    trainer.fit(cast.module, datamodule=cast.data, ckpt_path=tmp_path / "end")
    lines = without_weights(cast.log.lines())
    assert lines[: lines.index("on_train_start C1 C2 late M")] == [
        *SET_UP,
        "train_dataloader D",
        "configure_optimizers M",
        "val_dataloader D",
        "on_load_checkpoint C1 C2 late M",
        "load_state_dict C1 C1",
        "load_state_dict C2 C2",
        "load_state_dict late late",
        "on_fit_start C1 C2 late M",
    ]


def test_on_save_checkpoint_is_not_called_before_the_first_step(tmp_path):
    class Late(Callback):
        """Its state exists from the start of training on, as Lightning's own callbacks have it."""

        def on_train_start(self, trainer, module):
            self.average = torch.zeros(1)

        def state_dict(self):
            return {"average": self.average}

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["late"] = self.average

    options = {**QUIET, "enable_checkpointing": True}
    Trainer(max_epochs=1, callbacks=Late(), **options).fit(
        Tiny(), [torch.ones(2, 2)] * 3
    )
    assert [path.name for path in tmp_path.glob("**/step-*")] == ["step-00000003"]


def test_sanity_check_leaves_random_state_metrics_and_requests_alone():
    drawn = []

    class Noisy(Tiny):
        def training_step(self, batch, batch_idx):
            drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            torch.rand(7)
            self.log("val_loss", 3.0)

        def on_validation_epoch_end(self):
            assert not torch.is_grad_enabled()
            if self.trainer.sanity_checking:
                self.trainer.stop("a sanity check is no reason")

        def on_train_start(self):
            assert self.trainer.callback_metrics == {}
            assert self.training
            assert not self.trainer.sanity_checking

    seen = []
    for steps in (0, 2):
        torch.manual_seed(3)
        trainer = Trainer(max_epochs=1, num_sanity_val_steps=steps, **QUIET)
        trainer.fit(Noisy(), [torch.ones(2, 2)] * 3, [torch.ones(2, 2)] * 5)
        seen.append(list(drawn))
        drawn.clear()
        assert trainer.global_step == 3
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("steps", "ran"), [(0, 0), (2, 2), (9, 5), (-1, 5)])
def test_sanity_check_runs_so_many_batches(steps, ran):
    counted = []

    class Counts(Tiny):
        def validation_step(self, batch, batch_idx):
            if self.trainer.sanity_checking:
                counted.append(batch_idx)

    trainer = Trainer(max_steps=1, num_sanity_val_steps=steps, **QUIET)
    trainer.fit(Counts(), [torch.ones(2, 2)], [torch.ones(2, 2)] * 5)
    assert counted == list(range(ran))


class Named(Callback):
    def __init__(self, name, heard):
        self.name, self.heard = name, heard

    def on_train_start(self, trainer, module):
        self.heard.append(self.name)


class Other(Named):
    pass


def test_callbacks_of_the_module_replace_those_of_the_same_class():
    heard = []

    class Brings(Tiny):
        def configure_callbacks(self):
            return [Named("module's", heard)]

    trainer = Trainer(
        max_steps=1,
        callbacks=[Named("trainer's", heard), Other("other", heard)],
        **QUIET,
    )
    trainer.fit(Brings(), [torch.ones(2, 2)])
    assert heard == ["other", "module's"]
    heard.clear()
    trainer.fit(Tiny(), [torch.ones(2, 2)])
    assert heard == ["trainer's", "other"]


def test_one_callback_of_the_module_needs_no_list():
    heard = []

    class Brings(Tiny):
        def configure_callbacks(self):
            return Named("module's", heard)

    Trainer(max_steps=1, **QUIET).fit(Brings(), [torch.ones(2, 2)])
    assert heard == ["module's"]


def test_the_best_checkpoint_of_a_callback_that_the_module_brings_is_found_after_the_fit(
    tmp_path,
):
    from trainer_kit.callbacks import ModelCheckpoint

    class Brings(Tiny):
        def configure_callbacks(self):
            return [ModelCheckpoint(dirpath=tmp_path / "mine")]

        def test_step(self, batch, batch_idx):
            self.log("weight", self.layer.weight.sum())

    trainer = Trainer(max_steps=1, **{**QUIET, "enable_checkpointing": True})
    module = Brings()
    trainer.fit(module, [torch.ones(2, 2)])
    assert trainer.checkpoint_callback.best_model_path == str(
        tmp_path / "mine" / "step-00000001"
    )
    expected = module.layer.weight.sum().item()
    nn.init.zeros_(module.layer.weight)
    for _ in range(2):
        assert trainer.test(
            dataloaders=[torch.ones(2, 2)], ckpt_path="best", verbose=False
        ) == [{"weight": expected}]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_hooks_take_the_loader_or_leave_it(verb):
    kind = {"validate": "validation"}.get(verb, verb)
    heard = []

    def start(self, trainer, module, batch, batch_idx):
        heard.append(("start", batch_idx))

    def start_with(self, trainer, module, batch, batch_idx, dataloader_idx):
        heard.append(("start", batch_idx, dataloader_idx))

    def end(self, trainer, module, outputs, batch, batch_idx):
        heard.append(("end", outputs, batch_idx))

    def end_with(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=7):
        heard.append(("end", outputs, batch_idx, dataloader_idx))

    def make(name, *hooks):
        return type(
            name,
            (Callback,),
            dict(
                zip(
                    (f"on_{kind}_batch_start", f"on_{kind}_batch_end"),
                    hooks,
                    strict=True,
                )
            ),
        )()

    class Module(Tiny):
        pass

    setattr(
        Module,
        f"{kind}_step",
        lambda self, batch, batch_idx, dataloader_idx=0: (batch_idx, dataloader_idx),
    )
    setattr(
        Module,
        f"on_{kind}_batch_start",
        lambda self, batch, batch_idx: heard.append("module"),
    )
    loaders = [DataLoader(torch.ones(2, 2)), DataLoader(torch.ones(1, 2))]
    callbacks = [make("Without", start, end), make("With", start_with, end_with)]
    getattr(Trainer(callbacks=callbacks, **QUIET), verb)(Module(), loaders)
    expected = []
    for loader, index in ((0, 0), (0, 1), (1, 0)):
        expected += [("start", index), ("start", index, loader), "module"]
        expected += [
            ("end", (index, loader), index),
            ("end", (index, loader), index, loader),
        ]
    assert heard == expected


def test_with_one_loader_the_loader_index_is_zero():
    heard = []

    class Listens(Callback):
        def on_validation_batch_start(
            self, trainer, module, batch, batch_idx, dataloader_idx=7
        ):
            heard.append(dataloader_idx)

    Trainer(callbacks=Listens(), **QUIET).validate(Tiny(), [torch.ones(2, 2)])
    assert heard == [0]


@pytest.mark.parametrize("says", ["callback", "module"])
def test_minus_one_from_on_train_batch_start_ends_the_epoch(says):
    heard = []

    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if says == "callback" and batch_idx == 2 else None

        def on_train_epoch_end(self, trainer, module):
            heard.append(("epoch", trainer.current_epoch, trainer.global_step))

    class Module(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if says == "module" and batch_idx == 2 else None

        def on_validation_start(self):
            heard.append("validation")

    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=Ends(), **QUIET)
    trainer.fit(Module(), [torch.ones(2, 2)] * 5, [torch.ones(2, 2)])
    assert heard == ["validation", ("epoch", 0, 2), "validation", ("epoch", 1, 4)]
    assert (trainer.current_epoch, trainer.global_step, trainer.progress.batch) == (
        2,
        4,
        4,
    )


def test_every_listener_receives_the_start_of_the_batch_that_ends_the_epoch():
    heard = []

    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            heard.append("ends")
            return -1

    class Module(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            heard.append("module")

    Trainer(max_epochs=1, callbacks=Ends(), **QUIET).fit(Module(), [torch.ones(2, 2)])
    assert heard == ["ends", "module"]


def test_gradients_of_a_window_that_was_left_do_not_reach_the_next_one():
    class Module(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    batches = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]])]
    torch.manual_seed(0)
    left, plain = Module(), Tiny()
    plain.load_state_dict(left.state_dict())
    Trainer(max_epochs=2, accumulate_grad_batches=2, **QUIET).fit(left, batches)
    Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET).fit(plain, batches)
    assert torch.equal(left.layer.weight, plain.layer.weight)


def test_hooks_of_a_step_see_the_gradients_they_are_promised():
    seen = {}

    class Looks(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen["before"] = module.layer.weight.grad.norm().item()
            seen["weight"] = module.layer.weight.clone()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen["after"] = module.layer.weight.grad.norm().item()
            seen["moved"] = not torch.equal(seen["weight"], module.layer.weight)
            seen["outputs"] = outputs

    trainer = Trainer(max_steps=1, gradient_clip_val=1e-3, callbacks=Looks(), **QUIET)
    trainer.fit(Tiny(), [torch.full((2, 2), 9.0)])
    assert seen["before"] > 1e-2
    assert 0 < seen["after"] <= 1e-3
    assert seen["moved"]
    assert not seen["outputs"]["loss"].requires_grad


def test_modes_are_right_in_every_hook(make_cast):
    cast = make_cast()
    modes = {}
    note = cast.log.note

    def looking(who, hook):
        note(who, hook)
        if who == "C1":
            modes.setdefault(hook, set()).add(
                (cast.module.training, cast.module.asleep.training)
            )

    cast.log.note = looking
    trainer = Trainer(max_epochs=1, callbacks=cast.callbacks, **QUIET)
    trainer.fit(cast.module, datamodule=cast.data)
    for hook, found in modes.items():
        assert found == {("validation" not in hook, False)}, hook


def test_a_hook_sees_the_current_stage():
    states = {}

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, module):
            states["train"] = (trainer.training, trainer.evaluating, trainer.state_verb)

        def on_validation_epoch_start(self, trainer, module):
            states["validation"] = (
                trainer.training,
                trainer.evaluating,
                trainer.state_verb,
            )

    Trainer(max_steps=1, callbacks=Looks(), **QUIET).fit(
        Tiny(), [torch.ones(2, 2)], [torch.ones(2, 2)]
    )
    assert states == {"train": (True, False, "fit"), "validation": (False, True, "fit")}


def test_a_verb_inside_a_verb_is_refused():
    class Nested(Callback):
        def on_train_start(self, trainer, module):
            with pytest.raises(ConfigurationError, match="validate inside fit"):
                trainer.validate(module, [torch.ones(2, 2)])

    trainer = Trainer(max_steps=1, callbacks=Nested(), **QUIET)
    trainer.fit(Tiny(), [torch.ones(2, 2)])
    assert trainer.global_step == 1
