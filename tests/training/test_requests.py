"""Callbacks and users ask, the loop acts: at the end of the step, after everything of it, never before the minimum."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from torch.distributed import get_rank

from tests.training.tiny import Tiny
from trainer_kit import Callback, Trainer
from trainer_kit.core.errors import (
    ConfigurationError,
    DurationError,
    HookError,
    RankError,
)

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


class Acts(Callback):
    """Calls ``act(trainer)`` in one hook while ``when(trainer)`` holds."""

    def __init__(self, act, when=lambda trainer: True):
        self.act, self.when = act, when

    def _act(self, trainer):
        if self.when(trainer) and not trainer.sanity_checking:
            self.act(trainer)


def acting(hook, act, when=lambda trainer: True):
    takes = {"on_train_batch_start": 2, "on_train_batch_end": 3}.get(hook, 0)
    names = ", ".join(["trainer", "module", *"abc"[:takes]])
    method = eval(f"lambda self, {names}: self._act(trainer)")
    return type("Acting", (Acts,), {hook: method})(act, when)


def fit(*callbacks, batches=4, module=None, val=None, **options):
    trainer = Trainer(
        callbacks=list(callbacks), **{**QUIET, "max_epochs": 3, **options}
    )
    trainer.fit(module or Tiny(), [torch.ones(2, 2)] * batches, val)
    return trainer


def stop(trainer):
    trainer.stop("enough")


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
@pytest.mark.parametrize("val", [None, [torch.ones(1, 2)]])
def test_a_stop_before_training_trains_nothing(hook, val):
    ended = []
    callbacks = [acting(hook, stop), acting("on_train_end", ended.append)]
    trainer = fit(*callbacks, val=val, num_sanity_val_steps=2)
    assert trainer.global_step == 0
    assert ended == [trainer]


def test_a_stop_in_a_step_is_granted_at_its_end():
    def at_second(trainer):
        return trainer.global_step == 1

    for hook in (
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ):
        if hook in ("on_before_backward", "on_before_optimizer_step"):
            member = {hook: lambda self, trainer, module, thing: self._act(trainer)}
            callback = type("Acting", (Acts,), member)(stop, at_second)
        else:
            callback = acting(hook, stop, at_second)
        trainer = fit(callback, log_every_n_steps=50)
        assert (trainer.global_step, trainer.current_epoch) == (2, 0), hook


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_step_end"])
def test_a_stop_after_the_optimizer_step_is_granted_at_that_step(hook):
    trainer = fit(acting(hook, stop, lambda trainer: trainer.global_step == 2))
    assert (trainer.global_step, trainer.current_epoch) == (2, 0)


def test_a_stop_inside_a_window_waits_for_its_end():
    trainer = fit(
        acting("on_train_batch_end", stop, lambda trainer: trainer.progress.batch == 1),
        accumulate_grad_batches=3,
    )
    assert (trainer.global_step, trainer.progress.batch) == (1, 3)


def test_a_stop_at_the_start_of_an_epoch_lets_one_step_through():
    trainer = fit(
        acting("on_train_epoch_start", stop, lambda trainer: trainer.current_epoch == 1)
    )
    assert (trainer.global_step, trainer.current_epoch) == (5, 1)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_a_stop_at_the_end_of_an_epoch_counts_that_epoch(hook):
    trainer = fit(
        acting(hook, stop, lambda trainer: trainer.current_epoch == 1),
        val=[torch.ones(1, 2)],
    )
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)


def test_a_stop_from_validation_inside_an_epoch_ends_it_there():
    trainer = fit(
        acting("on_validation_end", stop), val=[torch.ones(1, 2)], val_check_interval=2
    )
    assert (trainer.global_step, trainer.current_epoch) == (2, 0)


def test_should_stop_asks_and_can_be_taken_back():
    def once(trainer):
        return trainer.global_step == 1

    reasons = []

    def ask(trainer):
        assert not trainer.should_stop
        trainer.should_stop = True
        assert trainer.should_stop
        reasons.append(trainer.requests.stop)

    assert fit(acting("on_train_batch_end", ask, once)).global_step == 1
    assert reasons == ["set by user code"]

    def take_back(trainer):
        trainer.should_stop = False

    ask_again = acting(
        "on_train_batch_end",
        lambda trainer: setattr(trainer, "should_stop", True),
        once,
    )
    assert fit(ask_again, acting("on_train_step_end", take_back)).global_step == 12


def test_the_first_reason_stays():
    seen = []
    first = acting("on_train_batch_end", lambda trainer: trainer.stop("first"))
    second = acting(
        "on_train_step_end",
        lambda trainer: (trainer.stop("second"), seen.append(trainer.requests.stop)),
    )
    fit(first, second)
    assert seen == ["first"]


@pytest.mark.parametrize(
    ("minimum", "steps", "said"),
    [
        ({"min_steps": 6}, 6, "min_steps=6"),
        ({"min_epochs": 2}, 8, "min_epochs=2"),
        ({"min_epochs": 1, "min_steps": 7}, 7, "min_epochs=1 and min_steps=7"),
    ],
)
def test_a_stop_before_the_minimum_is_printed_once_and_granted_when_it_is_reached(
    minimum, steps, said, capsys
):
    once = acting("on_train_batch_end", stop, lambda trainer: trainer.global_step == 1)
    trainer = fit(once, **minimum)
    assert trainer.global_step == steps
    assert trainer.should_stop
    assert capsys.readouterr().out.splitlines() == [
        f"stop requested at step 1: enough; training continues until {said}",
        f"stopped after step {steps}: enough",
    ]


def test_a_stop_that_waits_can_be_withdrawn():
    once = acting("on_train_batch_end", stop, lambda trainer: trainer.global_step == 1)
    for reason, steps in (("enough", 12), ("another", 6)):
        back = acting(
            "on_train_batch_end",
            lambda t, r=reason: t.withdraw_stop(r),
            lambda t: t.global_step == 3,
        )
        assert fit(once, back, min_steps=6).global_step == steps


def test_a_limit_below_the_minimum_ends_the_run_before_a_waiting_request(capsys):
    trainer = fit(acting("on_train_batch_end", stop), min_steps=9, max_steps=5)
    assert trainer.global_step == 5
    assert not trainer.should_stop
    assert "stopped after" not in capsys.readouterr().out


def test_a_resumed_run_grants_the_stop_that_waited_when_it_was_saved(tmp_path):
    once = acting("on_train_batch_end", stop, lambda trainer: trainer.global_step == 1)
    save = acting(
        "on_train_step_end",
        lambda trainer: trainer.save_checkpoint(tmp_path / "saved"),
        lambda t: t.global_step == 3,
    )
    fit(once, save, min_steps=6)
    trainer = Trainer(**{**QUIET, "max_epochs": 3, "min_steps": 6})
    trainer.fit(Tiny(), [torch.ones(2, 2)] * 4, ckpt_path=tmp_path / "saved")
    assert trainer.global_step == 6


@pytest.mark.world_size(2)
def test_a_stop_that_one_rank_asks_for_waits_for_the_minimum_on_all():
    once = acting(
        "on_train_batch_end",
        stop,
        lambda trainer: trainer.global_step == 1 and get_rank() == 1,
    )
    with redirect_stdout(StringIO()) as printed:
        trainer = fit(once, min_epochs=2, accelerator="cpu", strategy="ddp", devices=2)
    assert trainer.progress.epoch == 2
    assert printed.getvalue().count("stop requested") == (get_rank() == 0)


@pytest.mark.parametrize(
    ("minimum", "steps"),
    [
        ({"min_steps": 1}, 1),
        ({"min_steps": 6}, 6),
        ({"min_epochs": 1}, 4),
        ({"min_epochs": 2}, 8),
        ({"min_epochs": 1, "min_steps": 7}, 7),
        ({"min_epochs": 2, "min_steps": 3}, 8),
        ({"min_epochs": 2, "min_steps": 8}, 8),
        ({"min_epochs": 0, "min_steps": 0}, 1),
    ],
)
def test_a_stop_that_is_asked_for_again_is_granted_once_both_minima_are_reached(
    minimum, steps
):
    assert fit(acting("on_train_batch_end", stop), **minimum).global_step == steps


@pytest.mark.parametrize(
    ("minimum", "steps"),
    [({"min_epochs": 2}, 8), ({"min_steps": 5}, 5), ({"min_steps": 4}, 4)],
)
def test_a_stop_at_each_epoch_is_granted_when_the_minimum_is_reached(minimum, steps):
    assert fit(acting("on_train_epoch_end", stop), **minimum).global_step == steps


def test_the_minimum_does_not_lengthen_the_run():
    assert fit(min_steps=100).global_step == 12
    assert fit(min_epochs=9, max_steps=5).global_step == 5


def test_a_stop_of_an_earlier_fit_is_forgotten():
    trainer = Trainer(max_epochs=1, callbacks=acting("on_train_end", stop), **QUIET)
    for _ in range(2):
        trainer.fit(Tiny(), [torch.ones(2, 2)] * 3)
        assert trainer.global_step == 3


def validations(asking, module=None, **options):
    """At which steps validation ran."""
    ran = []
    listens = acting(
        "on_validation_start", lambda trainer: ran.append(trainer.global_step)
    )
    fit(asking, listens, val=[torch.ones(1, 2)], module=module, max_epochs=1, **options)
    return ran


def ask_validation(trainer):
    trainer.request_validation("let us see")


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_train_step_end"]
)
def test_validation_runs_at_the_end_of_the_step_that_asked(hook):
    step = 1 if hook == "on_train_batch_start" else 2
    assert validations(
        acting(hook, ask_validation, lambda trainer: trainer.global_step == step)
    ) == [2, 4]


def test_a_requested_validation_that_is_due_anyway_runs_once():
    at_end = acting(
        "on_train_batch_end", ask_validation, lambda trainer: trainer.global_step == 4
    )
    assert validations(at_end) == [4]
    assert validations(acting("on_train_epoch_end", ask_validation)) == [4]


def test_validation_asked_for_at_the_end_of_an_epoch_without_one_runs_there():
    assert validations(
        acting("on_train_epoch_end", ask_validation), check_val_every_n_epoch=2
    ) == [4]


def test_validation_asked_for_without_validation_data_is_nothing():
    trainer = fit(acting("on_train_batch_end", ask_validation))
    assert trainer.global_step == 12
    assert trainer.requests.validation is None


def test_a_requested_checkpoint_holds_the_step_that_was_finished(tmp_path):
    from trainer_kit.checkpoint.read import read_checkpoint

    weights = {}

    def ask(trainer):
        trainer.request_checkpoint("wanted")
        weights[trainer.global_step + 1] = None

    def look(trainer):
        if trainer.global_step in weights:
            weights[trainer.global_step] = trainer.module.layer.weight.detach().clone()

    asks = acting(
        "on_train_batch_start", ask, lambda trainer: trainer.global_step in (1, 3)
    )
    fit(asks, acting("on_train_batch_end", look), max_epochs=1)
    for step in (2, 4):
        state = read_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert state["progress"]["step"] == step
        assert torch.equal(state["model"]["layer.weight"], weights[step])
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


def test_a_request_with_a_path_is_notified_of_its_save(tmp_path):
    class Request:
        reason, path, weights_only = "mine", tmp_path / "mine", True
        told = ()

        def saved(self, path):
            assert (path / "manifest.json").exists()
            self.told += (path,)

    request = Request()
    ask = acting(
        "on_train_batch_end",
        lambda trainer: trainer.request_checkpoint("mine", request),
    )
    fit(ask, max_steps=1)
    assert request.told == (tmp_path / "mine",)


class Named:
    """A request with a path of its own."""

    reason = "mine"

    def __init__(self, path, weights_only=False):
        self.path, self.weights_only = path, weights_only
        self.told = []

    def saved(self, path):
        self.told.append(path)


def test_a_request_without_a_path_marks_no_checkpoint_of_another_request(tmp_path):
    from trainer_kit.checkpoint.store import lookup

    def ask(trainer):
        trainer.request_checkpoint("wanted")
        trainer.request_checkpoint(
            "weights", Named(tmp_path / "elsewhere" / "weights", weights_only=True)
        )

    fit(acting("on_train_step_end", ask), max_steps=1, default_root_dir=tmp_path)
    run_checkpoint = tmp_path / "checkpoints" / "step-00000001"
    assert lookup(run_checkpoint.parent, "last") == run_checkpoint
    assert (tmp_path / "elsewhere" / "weights" / "manifest.json").exists()
    # Without an index a resume reads what the manifests say.
    assert not (tmp_path / "elsewhere" / "index.json").exists()


RANKS = {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "max_epochs": 1}


@pytest.mark.world_size(2)
def test_requests_with_and_without_a_path_are_granted_on_every_rank(tmp_path):
    """Rank 1 alone asks without a path; the names of the requests with one differ, and rank 0's counts."""
    requests = []

    def ask(trainer):
        request = Named(tmp_path / f"rank-{get_rank()}-step-{trainer.global_step}")
        requests.append(request)
        trainer.request_checkpoint("mine", request)
        if get_rank() == 1 and trainer.global_step == 2:
            trainer.request_checkpoint("alone")

    ask_each_step = acting("on_train_step_end", ask)
    fit(ask_each_step, batches=8, default_root_dir=tmp_path, **RANKS)
    assert len(requests) == 4
    for step, request in enumerate(requests, 1):
        assert request.told == [tmp_path / f"rank-0-step-{step}"]
    # The ranks agree at the end of the epoch.
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [
        "step-00000004"
    ]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("asks", [0, 1])
def test_a_request_with_a_path_of_one_rank_is_refused_where_ranks_agree(tmp_path, asks):
    alone = acting(
        "on_train_end",
        lambda trainer: trainer.request_checkpoint("mine", Named(tmp_path / "mine")),
        lambda trainer: get_rank() == asks,
    )
    with pytest.raises(RankError, match="on some ranks only") as raised:
        fit(alone, default_root_dir=tmp_path, **RANKS)
    assert f"rank {asks}: 1" in str(raised.value)


def test_a_checkpoint_inside_a_window_runs_that_window_again(tmp_path):
    class Sees(Tiny):
        def __init__(self):
            super().__init__()
            torch.nn.init.ones_(self.layer.weight)
            torch.nn.init.ones_(self.layer.bias)
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

    data = list(torch.arange(20.0).reshape(5, 2, 2) / 20)
    options = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": 2}

    def save(trainer):
        trainer.save_checkpoint(tmp_path / f"batch-{trainer.progress.batch}")

    whole = Sees()
    Trainer(callbacks=acting("on_train_batch_end", save), **options).fit(whole, data)
    for batch, first in ((1, 0), (2, 2), (3, 2), (4, 4)):
        again = Sees()
        trainer = Trainer(**options)
        trainer.fit(again, data, ckpt_path=tmp_path / f"batch-{batch}")
        assert again.seen == list(range(first, 5)), batch
        assert torch.equal(again.layer.weight, whole.layer.weight), batch
        assert (
            trainer.global_step,
            trainer.progress.batch,
            trainer.progress.samples,
        ) == (3, 5, 10)


def test_save_checkpoint_before_any_fit_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing to save"):
        Trainer(**QUIET).save_checkpoint(tmp_path / "nothing")


def test_a_function_is_called_as_the_hook_would_be():
    heard = []
    trainer = Trainer(max_epochs=2, **QUIET)

    @trainer.on("train_batch_end")
    def batch(trainer, module, outputs, batch, batch_idx):
        heard.append(
            (
                type(module).__name__,
                batch_idx,
                tuple(batch.shape),
                outputs["loss"].requires_grad,
            )
        )

    @trainer.on("on_train_epoch_end")
    def epoch(trainer, module):
        heard.append(trainer.current_epoch)

    trainer.fit(Tiny(), [torch.ones(2, 2)] * 2)
    one = [("Tiny", 0, (2, 2), False), ("Tiny", 1, (2, 2), False)]
    assert heard == [*one, 0, *one, 1]
    assert callable(batch)
    assert batch.__name__ == "batch"


@pytest.mark.parametrize(
    ("event", "every", "batches"),
    [
        ("train_batch_end", "3ba", [3, 6, 9, 12]),
        ("train_batch_end", 5, [5, 10]),
        ("train_step_end", "2st", [4, 8, 12]),
        ("train_step_end", "8sp", [4, 8, 12]),
        ("train_epoch_end", "2ep", [12]),
    ],
)
def test_a_function_is_called_every_so_often(event, every, batches):
    heard = []
    trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, **QUIET)

    @trainer.on(event, every=every)
    def note(trainer, module, *rest):
        heard.append(trainer.progress.batch)

    trainer.fit(Tiny(), [torch.ones(2, 2)] * 6)
    assert heard == batches
    heard.clear()
    trainer.fit(Tiny(), [torch.ones(2, 2)] * 6)
    assert heard == batches


def test_a_function_may_ask_as_a_callback_does():
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.on("train_step_end", every="3st")(
        lambda trainer, module: trainer.stop("third")
    )
    trainer.fit(Tiny(), [torch.ones(2, 2)] * 6)
    assert trainer.global_step == 3


def test_a_function_at_an_unknown_event_or_interval_is_refused():
    trainer = Trainer(**QUIET)
    with pytest.raises(HookError, match="on_train_batch_end"):
        trainer.on("train_batch_ends")(lambda trainer, module: None)
    with pytest.raises(HookError, match="cannot take"):
        trainer.on("train_batch_end")(lambda trainer: None)
    with pytest.raises(DurationError):
        trainer.on("train_batch_end", every="3 parsecs")(
            lambda trainer, module, outputs, batch, batch_idx: None
        )


def test_functions_cannot_be_registered_while_an_entry_point_runs():
    def register(trainer):
        with pytest.raises(ConfigurationError, match="while an entry point runs"):
            trainer.on("train_end")(lambda trainer, module: None)

    assert fit(acting("on_train_start", register), max_steps=1).global_step == 1
