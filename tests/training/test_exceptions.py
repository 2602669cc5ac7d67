"""Whatever is raised, wherever: it arrives unchanged, everybody is told, everything is torn down, and one may go on."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.tiny import Recorder, Tiny
from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.core.hooks import DataHooks, ModuleHooks
from trainer_kit.precision import MixedPrecision

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
TOLD = ["C1", "C2", "late", "M", "D"]
TORN_DOWN = ["D", "C1", "C2", "late", "M"]


class Boom(Exception):
    pass


CALLBACK = [
    name for name in vars(Callback) if name.startswith("on_") or name == "setup"
]
MODULE = [
    *(name for name in vars(ModuleHooks) if name.startswith("on_")),
    *(
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "backward",
        "loss_weight",
    ),
    *(
        "configure_callbacks",
        "configure_model",
        "configure_optimizers",
        "configure_gradient_clipping",
    ),
    *(
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "prepare_data",
        "setup",
    ),
]
DATA = [
    name for name in vars(DataHooks) if not name.startswith("__") and name != "teardown"
]
PLACES = (
    [("C1", name) for name in CALLBACK]
    + [("M", name) for name in MODULE]
    + [("D", name) for name in DATA]
)
PLACES = [place for place in PLACES if place[1] != "on_exception"]
PLACES_BY_KIND = [(*place, kind) for place in PLACES for kind in (Boom, StopIteration)]
# Weights are asked for while a window is loaded, where Python itself turns a StopIteration into a RuntimeError.
PLACES_BY_KIND.remove(("M", "loss_weight", StopIteration))
SLOW = {
    Boom: (),
    StopIteration: pytest.mark.slow,
}  # `make test-quick` has every place, with one kind


class Asks(Callback):
    def on_train_step_end(self, trainer, module):
        trainer.request_checkpoint("so that on_save_checkpoint is heard")


def fit(module=None, batches=3, *callbacks, **options):
    trainer = Trainer(
        max_epochs=1, logger=False, callbacks=list(callbacks), **{**QUIET, **options}
    )
    trainer.fit(module or Tiny(), [torch.ones(2, 2)] * batches)
    return trainer


def call(trainer, cast, hook, tmp_path):
    """The verb in which ``hook`` is heard."""
    verb = next((verb for verb in ("test", "predict") if f"{verb}_" in hook), "fit")
    options = {"ckpt_path": tmp_path / "before"} if hook == "on_load_checkpoint" else {}
    getattr(trainer, verb)(cast.module, datamodule=cast.data, **options)


def notes(error):
    """Without the one that names the step and its batch."""
    return [
        note for note in getattr(error, "__notes__", []) if "_step; batch" not in note
    ]


@pytest.mark.parametrize(
    ("who", "hook", "kind"),
    [pytest.param(*place, marks=SLOW[place[2]]) for place in PLACES_BY_KIND],
)
def test_an_exception_anywhere_arrives_unchanged_and_everything_is_undone(
    make_cast, tmp_path, who, hook, kind
):
    cast, logger = make_cast(), Recorder()
    if hook == "on_load_checkpoint":
        other = make_cast()
        before = Trainer(max_steps=1, logger=False, callbacks=other.callbacks, **QUIET)
        before.fit(other.module, datamodule=other.data)
        before.save_checkpoint(tmp_path / "before")
    trainer = Trainer(
        max_epochs=2,
        logger=logger,
        callbacks=[
            *cast.callbacks,
            *(
                [Asks()]
                if hook in ("on_save_checkpoint", "on_checkpoint_committed")
                else []
            ),
        ],
        deterministic=True,
        precision="bf16-mixed",
        **QUIET,
    )
    given = list(trainer.callbacks)
    trap = cast.log.traps[who, hook] = kind("a reason")
    with pytest.raises(kind) as caught:
        call(trainer, cast, hook, tmp_path)

    assert caught.value is trap
    assert trap.args == ("a reason",)
    assert notes(trap) == []
    assert trap.__cause__ is None
    assert traceback.extract_tb(trap.__traceback__)[-1].name == "note"
    assert cast.log.who("on_exception") == TOLD
    assert cast.log.who("teardown") == TORN_DOWN
    heard = [name for name, _ in cast.log]
    assert heard.index("on_exception") < heard.index("teardown")
    assert logger.finalized == ["failed"]
    assert trainer.state_verb == ""
    assert not trainer.sanity_checking
    assert cast.module.training
    assert not cast.module.asleep.training
    assert cast.module.layer.training
    assert trainer.callbacks == given
    assert all(parameter.requires_grad for parameter in cast.module.parameters())

    cast.log.clear()
    cast.log.traps.clear()
    trainer.fit(cast.module, datamodule=cast.data)
    assert trainer.global_step == 6
    assert cast.log.who("on_exception") == []
    assert logger.finalized == ["failed", "success"]


@pytest.mark.parametrize("batches", [1, 2])
def test_stop_iteration_of_a_loss_weight_does_not_pass_for_the_end_of_the_epoch(
    batches,
):
    class Fails(Tiny):
        def loss_weight(self, batch):
            if batch[0, 0] == 3.0:
                raise trap
            return 1.0

    trap = StopIteration("a reason")
    trainer = Trainer(
        max_epochs=1, logger=False, accumulate_grad_batches=batches, **QUIET
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Fails(), [torch.full((2, 2), float(n)) for n in range(6)])
    assert caught.value.__cause__ is trap
    assert trainer.progress.batch == 3 // batches * batches


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize(
    "hook",
    ["setup", "on_sanity_check_start", "on_train_batch_end", "on_validation_end"],
)
def test_base_exceptions_are_passed_on_too(make_cast, tmp_path, hook, kind):
    cast, logger = make_cast(), Recorder()
    trainer = Trainer(max_epochs=2, logger=logger, callbacks=cast.callbacks, **QUIET)
    trap = cast.log.traps["C1", hook] = kind("a reason")
    with pytest.raises(kind) as caught:
        call(trainer, cast, hook, tmp_path)
    assert caught.value is trap
    assert cast.log.who("on_exception") == TOLD
    assert cast.log.who("teardown") == TORN_DOWN
    assert logger.finalized == [
        "interrupted" if kind is KeyboardInterrupt else "failed"
    ]


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("who", TORN_DOWN)
def test_an_exception_in_teardown_arrives_when_all_others_were_torn_down(
    make_cast, verb, who
):
    cast, logger = make_cast(), Recorder()
    trainer = Trainer(max_epochs=1, logger=logger, callbacks=cast.callbacks, **QUIET)
    trap = cast.log.traps[who, "teardown"] = Boom("late")
    with pytest.raises(Boom) as caught:
        getattr(trainer, verb)(cast.module, datamodule=cast.data)
    assert caught.value is trap
    assert cast.log.who("teardown") == TORN_DOWN
    assert cast.log.who("on_exception") == TOLD
    assert logger.finalized == ["failed"]
    assert trainer.state_verb == ""


@pytest.mark.parametrize("who", TOLD)
def test_a_second_exception_becomes_a_note_of_the_first(make_cast, who):
    cast, logger = make_cast(), Recorder()
    trainer = Trainer(max_epochs=1, logger=logger, callbacks=cast.callbacks, **QUIET)
    first = cast.log.traps["C2", "on_train_batch_end"] = Boom("first")
    cast.log.traps[who, "on_exception"] = ValueError("second")
    cast.log.traps[who, "teardown"] = StopIteration("third")
    with pytest.raises(Boom) as caught:
        trainer.fit(cast.module, datamodule=cast.data)
    assert caught.value is first
    second, third = notes(first)
    assert "ValueError: second" in second
    assert "StopIteration: third" in third
    assert cast.log.who("on_exception") == TOLD
    assert cast.log.who("teardown") == TORN_DOWN
    assert logger.finalized == ["failed"]


def test_a_hook_that_raises_the_very_exception_again_adds_no_note(make_cast):
    class Raises(Callback):
        def on_exception(self, trainer, module, exception):
            raise exception

    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            raise Boom("once")

    with pytest.raises(Boom) as caught:
        fit(Fails(), 1, Raises())
    assert notes(caught.value) == []


def test_on_exception_is_given_the_exception_and_sees_the_trainer_at_work():
    given = []

    class Listens(Callback):
        def on_exception(self, trainer, module, exception):
            given.append((exception, trainer.state_verb, trainer.global_step))

    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise trap
            return super().training_step(batch, batch_idx)

    trap = Boom("here")
    with pytest.raises(Boom):
        fit(Fails(), 3, Listens())
    assert given == [(trap, "fit", 2)]


def test_the_hook_that_restores_modes_never_hides_the_first_exception():
    class Fails(Tiny):
        def validation_step(self, batch, batch_idx):
            raise Boom("first")

        def on_validation_model_train(self):
            raise ValueError("second")

    with pytest.raises(Boom) as caught:
        Trainer(logger=False, **QUIET).validate(Fails(), [torch.ones(2, 2)])
    assert any("ValueError: second" in note for note in notes(caught.value))


def test_modes_are_restored_when_the_hook_that_sets_them_fails_halfway():
    class Fails(Tiny):
        def on_validation_model_eval(self):
            self.eval()
            raise Boom("halfway")

    module = Fails()
    with pytest.raises(Boom):
        Trainer(logger=False, **QUIET).validate(module, [torch.ones(2, 2)])
    assert module.training
    assert module.layer.training


def test_every_logger_is_finalized_although_one_fails_to(capsys):
    class Fails(Recorder):
        def finalize(self, status):
            raise OSError("disk full")

    last = Recorder()
    trainer = Trainer(max_epochs=1, logger=[Fails(), last], **QUIET)
    trainer.fit(Tiny(), [torch.ones(2, 2)])
    assert "Fails: OSError: disk full; training continues" in capsys.readouterr().out
    assert last.finalized == ["success"]
    assert trainer.state_verb == ""


@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_switches_of_torch_hold_during_the_fit_only(deterministic):
    seen = []

    class Looks(Tiny):
        def training_step(self, batch, batch_idx):
            seen.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    torch.is_anomaly_enabled(),
                    torch.backends.cudnn.benchmark,
                )
            )
            raise Boom("inside")

    with pytest.raises(Boom):
        fit(
            Looks(), 1, deterministic=deterministic, detect_anomaly=True, benchmark=True
        )
    assert seen == [(True, deterministic == "warn", True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert not torch.backends.cudnn.benchmark


def test_signal_handlers_are_the_users_own_again():
    def mine(number, frame):
        raise AssertionError("nobody sent one")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, mine) for number in numbers]
    inside = []

    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            inside.extend(signal.getsignal(number) is mine for number in numbers)
            raise Boom("inside")

    try:
        with pytest.raises(Boom):
            fit(Fails(), 1)
        assert inside == [False, False]
        assert [signal.getsignal(number) for number in numbers] == [mine, mine]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_fit_outside_the_main_thread_leaves_signals_alone():
    seen = []

    class Looks(Tiny):
        def training_step(self, batch, batch_idx):
            seen.append(signal.getsignal(signal.SIGTERM))
            return super().training_step(batch, batch_idx)

    thread = threading.Thread(target=fit, args=(Looks(), 1))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


class Toggles(TrainModule):
    """Two parts, trained by turns."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        for optimizer, part in zip(self.optimizers(), self.parts, strict=True):
            self.toggle_optimizer(optimizer)
            loss = part(batch).pow(2).mean()
            if batch_idx == self.fails_at:
                raise Boom("between toggle and untoggle")
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.parts]


def test_an_optimizer_that_was_toggled_is_untoggled():
    module = Toggles(fails_at=1)
    with pytest.raises(Boom):
        fit(module, 2)
    assert all(parameter.requires_grad for parameter in module.parameters())
    module.fails_at = None
    assert fit(module, 2).global_step == 2


class KeepsOptimizer(Tiny):
    """The same optimizer object in every fit."""

    def __init__(self):
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.made


@pytest.mark.parametrize(
    "where", ["on_before_optimizer_step", "on_after_backward", "optimizer_step"]
)
def test_an_exception_between_unscaling_and_stepping_does_not_scale_the_next_fit(where):
    def fails(self, *given, **options):
        if self.fails:
            raise Boom(where)
        return getattr(Tiny, where)(self, *given, **options)

    broken = type("Broken", (KeepsOptimizer,), {where: fails, "fails": True})()
    whole = KeepsOptimizer()
    whole.load_state_dict(broken.state_dict())
    broken_trainer, whole_trainer = (
        Trainer(
            max_epochs=1,
            logger=False,
            plugins=MixedPrecision(torch.float16, "cpu", scaler),
            **QUIET,
        )
        for scaler in (
            torch.amp.GradScaler("cpu", init_scale=256.0),
            torch.amp.GradScaler("cpu", init_scale=256.0),
        )
    )
    with pytest.raises(Boom):
        broken_trainer.fit(broken, [torch.ones(2, 2)])
    broken.fails = False
    broken_trainer.fit(broken, [torch.ones(2, 2)] * 3)
    whole_trainer.fit(whole, [torch.ones(2, 2)] * 3)
    assert torch.equal(broken.layer.weight, whole.layer.weight)


def test_a_trainer_trains_like_a_new_one_after_a_failed_fit():
    class Fails(Tiny):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and batch_idx == 2:
                self.trainer.stop("never granted, never forgotten?")
                raise Boom("once")
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

    torch.manual_seed(0)
    broken, whole = Fails(), Fails()
    data = DataLoader(
        torch.arange(24.0).reshape(12, 2) / 24, batch_size=2, shuffle=True
    )
    trainer = Trainer(max_epochs=2, logger=False, seed=5, **QUIET)
    start = {name: value.clone() for name, value in broken.state_dict().items()}
    with pytest.raises(Boom):
        trainer.fit(broken, data)
    broken.load_state_dict(start)
    whole.load_state_dict(start)
    broken.fails = whole.fails = False
    trainer.fit(broken, data)
    other = Trainer(max_epochs=2, logger=False, seed=5, **QUIET)
    other.fit(whole, data)
    assert trainer.global_step == other.global_step == 12
    assert torch.equal(broken.layer.weight, whole.layer.weight)
    assert trainer.callback_metrics == other.callback_metrics


def test_an_exception_in_the_data_arrives_unchanged():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 4:
                raise trap
            return torch.ones(2)

    trap = Boom("sample 4")
    trainer = Trainer(max_epochs=1, logger=False, **QUIET)
    with pytest.raises(Boom) as caught:
        trainer.fit(Tiny(), DataLoader(Data(), batch_size=2))
    assert caught.value is trap
    assert trainer.global_step == 2


def test_an_exception_in_validate_alone_arrives(make_cast):
    cast = make_cast()
    trap = cast.log.traps["M", "validation_step"] = Boom("validate alone")
    trainer = Trainer(logger=False, callbacks=cast.callbacks, **QUIET)
    with pytest.raises(Boom) as caught:
        trainer.validate(cast.module, datamodule=cast.data)
    assert caught.value is trap
    assert cast.log.who("on_exception") == TOLD
    assert cast.log.who("teardown") == TORN_DOWN
    assert cast.module.training
    assert torch.is_grad_enabled()


def test_save_on_exception_saves_the_completed_steps(tmp_path):
    from trainer_kit.callbacks import ModelCheckpoint

    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise Boom("third batch")
            return super().training_step(batch, batch_idx)

    keeper = ModelCheckpoint(dirpath=tmp_path / "kept", save_on_exception=True)
    with pytest.raises(Boom) as caught:
        fit(Fails(), 3, keeper, enable_checkpointing=True)
    assert notes(caught.value) == []
    assert [path.name for path in (tmp_path / "kept").glob("step-*")] == [
        "step-00000002"
    ]


@pytest.mark.parametrize(
    "hook", ["training_step", "on_after_backward", "on_before_optimizer_step"]
)
def test_a_window_that_failed_runs_again_after_a_resume(tmp_path, hook):
    from trainer_kit.callbacks import ModelCheckpoint

    class Fails(Tiny):
        """Fails once, in the second half of the second window."""

        def __init__(self):
            super().__init__()
            nn.init.ones_(self.layer.weight)
            nn.init.ones_(self.layer.bias)
            self.fails, self.seen = False, []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch_idx)
            self.fail("training_step")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            self.fail("on_after_backward")

        def on_before_optimizer_step(self, optimizer):
            self.fail("on_before_optimizer_step")

        def fail(self, where):
            if self.fails and where == hook and len(self.seen) == 4:
                raise Boom("once")

    data = list(torch.arange(20.0).reshape(5, 2, 2) / 20)
    options = {"max_epochs": 1, "logger": False, "accumulate_grad_batches": 2, **QUIET}
    whole, broken, resumed = Fails(), Fails(), Fails()
    Trainer(**options).fit(whole, data)
    broken.fails = True
    with pytest.raises(Boom):
        Trainer(
            callbacks=ModelCheckpoint(
                dirpath=tmp_path / "kept", save_on_exception=True
            ),
            **{**options, "enable_checkpointing": True},
        ).fit(broken, data)
    Trainer(**options).fit(resumed, data, ckpt_path=tmp_path / "kept" / "step-00000001")
    assert resumed.seen == [2, 3, 4]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("fails", [True, False])
def test_a_fit_releases_its_batches_when_it_ends(fails):
    """Whoever catches an error to try again with less needs the memory, and not when the collector comes by."""
    held = []

    class Holds(Tiny):
        def training_step(self, batch, batch_idx):
            held.append(weakref.ref(batch))
            if fails and batch_idx == 1:
                raise MemoryError("too large")
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=1, logger=False, **QUIET)
    gc.disable()
    try:
        with suppress(MemoryError):
            trainer.fit(Holds(), DataLoader(torch.ones(6, 2), batch_size=2))
        assert [batch() for batch in held] == [None] * (2 if fails else 3)
    finally:
        gc.enable()
