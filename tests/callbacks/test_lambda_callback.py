import copy
import inspect
import math
import pickle

import pytest
import torch
from lightning_utilities.core.overrides import is_overridden

from tests.callbacks.fits import fit
from trainer_kit import Trainer
from trainer_kit.callbacks import Callback, FunctionCallback, LambdaCallback
from trainer_kit.core.errors import ConfigurationError, DurationError, HookError
from trainer_kit.testing import TinyModule

HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]
heard = []


def hear(trainer, module):
    heard.append((trainer, module))


def overridden(callback):
    return {name for name in HOOKS if is_overridden(name, callback, Callback)}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook(hook):
    count = len(inspect.signature(getattr(Callback, hook)).parameters) - 1
    given = []
    callback = LambdaCallback(**{hook: lambda *arguments: given.append(arguments)})
    assert isinstance(callback, LambdaCallback)
    assert isinstance(callback, Callback)
    assert overridden(callback) == {hook}
    getattr(callback, hook)(*range(count))
    assert given == [tuple(range(count))]


def test_functions_are_called_directly():
    callback = LambdaCallback(on_train_start=hear, on_fit_end=None)
    assert callback.on_train_start is hear
    assert overridden(callback) == {"on_train_start"}
    assert overridden(LambdaCallback()) == set()


def test_bound_methods_builtins_and_objects():
    class Ear:
        def __init__(self):
            self.heard = []

        def __call__(self, trainer, module):
            self.heard.append("called")

        def listen(self, trainer, module):
            self.heard.append("listened")

    ear = Ear()
    callback = LambdaCallback(on_fit_start=ear, on_fit_end=ear.listen, on_train_end=max)
    assert overridden(callback) == {"on_fit_start", "on_fit_end", "on_train_end"}
    callback.on_fit_start(None, None)
    callback.on_fit_end(None, None)
    assert ear.heard == ["called", "listened"]
    assert callback.on_train_end(1, 2) == 2


def test_unknown_hooks_and_wrong_parameters():
    with pytest.raises(
        HookError,
        match=r"unknown hook 'on_train_batch_ends'(.|\n)*did you mean 'on_train_batch_end'",
    ):
        LambdaCallback(on_train_batch_ends=hear)
    with pytest.raises(
        HookError, match=r"take \(trainer, pl_module, outputs, batch, batch_idx\)"
    ):
        LambdaCallback(on_train_batch_end=hear)
    with pytest.raises(HookError, match="give a function"):
        LambdaCallback(on_fit_start="hear")
    LambdaCallback(
        on_validation_batch_end=lambda trainer, module, outputs, batch, batch_idx: None
    )


def test_copies():
    for duplicate in (
        copy.deepcopy,
        lambda callback: pickle.loads(pickle.dumps(callback)),
    ):
        again = duplicate(LambdaCallback(on_train_start=hear))
        assert overridden(again) == {"on_train_start"}
        assert again.on_train_start is hear
        scheduled = duplicate(
            FunctionCallback("train_start", hear, every="2ep", name="x")
        )
        assert overridden(scheduled) == {"on_train_start", "on_fit_start"}
        assert (str(scheduled.every), scheduled.name, scheduled.fn) == (
            "2ep",
            "x",
            hear,
        )


# -- one function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["train_step_end", "on_train_step_end"])
def test_a_function_without_a_schedule(event):
    callback = FunctionCallback(event, hear)
    assert callback.on_train_step_end is hear
    assert "on_train_step_end" in overridden(callback)
    assert callback.state_dict() == {}


def test_setup_is_an_event_too():
    calls = []
    FunctionCallback("setup", lambda trainer, module, stage: calls.append(stage)).setup(
        None, None, "fit"
    )
    assert calls == ["fit"]


@pytest.mark.parametrize(
    ("event", "every", "fired"),
    [
        ("train_batch_end", 4, [4, 8, 12]),
        ("train_batch_end", "5ba", [5, 10]),
        ("train_step_end", 2, [4, 8, 12]),
        ("train_step_end", "30sp", [6, 12]),
        ("train_step_end", "250tok", [6, 10]),
        ("train_step_end", "0.3dur", [4, 8, 12]),
        ("train_epoch_end", 1, [4, 8, 12]),
        ("train_epoch_end", "2ep", [8]),
        ("train_epoch_end", "5ba", [8, 12]),
        ("validation_end", "3ba", [4, 8, 12]),
    ],
)
def test_the_first_event_at_or_after_each_multiple(event, every, fired):
    """Six steps of two batches, ten samples and a hundred tokens, two steps an epoch, validation at its end."""
    batches = []
    callback = FunctionCallback(
        event, lambda trainer, *_: batches.append(trainer.progress.batch), every=every
    )
    fit(
        callback,
        epochs=3,
        batch=torch.ones(5, 32),
        tokens=50,
        val=(),
        accumulate_grad_batches=2,
    )
    assert batches == fired


def test_arguments_and_result():
    given = []

    def stop_epoch(trainer, module, batch, batch_idx):
        given.append((batch.shape, batch_idx))
        return -1 if batch_idx else None

    made = fit(FunctionCallback("train_batch_start", stop_epoch, every=3), epochs=2)
    assert [index for _, index in given] == [0, 3, 3]
    assert {shape for shape, _ in given} == {torch.Size([2, 32])}
    assert made.progress.batch == 6  # -1 ended each epoch before its last batch


def test_a_function_that_leaves_out_the_loader_index():
    given = []
    callback = FunctionCallback(
        "validation_batch_start", lambda *a: given.append(len(a)), every="1ba"
    )
    short = FunctionCallback(
        "validation_batch_start",
        lambda t, m, batch, index: given.append(index),
        every="1ba",
    )
    fit(callback, short, val=())
    assert given == [5, 0]


def test_events_before_a_step_count_from_zero():
    fired = {}
    trainer = Trainer(max_epochs=4, barebones=True)
    for event, every in (
        ("train_epoch_start", 1),
        ("train_epoch_start", 3),
        ("train_epoch_end", 3),
        ("train_batch_start", 5),
        ("train_batch_end", 5),
        ("before_optimizer_step", "6st"),
        ("train_batch_start", "2ep"),
    ):
        calls = fired[event, every] = []

        def note(trainer, module, *rest, calls=calls):
            calls.append((trainer.current_epoch, trainer.progress.epoch_batch))

        trainer.on(event, every=every)(note)
    trainer.fit(TinyModule(), [torch.randn(2, 32)] * 3)
    assert fired == {
        ("train_epoch_start", 1): [(0, 0), (1, 0), (2, 0), (3, 0)],
        ("train_epoch_start", 3): [(0, 0), (3, 0)],
        ("train_epoch_end", 3): [(2, 3)],
        ("train_batch_start", 5): [(0, 0), (1, 2), (3, 1)],
        ("train_batch_end", 5): [(1, 2), (3, 1)],
        ("before_optimizer_step", "6st"): [(0, 1), (2, 1)],
        ("train_batch_start", "2ep"): [(0, 0), (2, 0)],
    }


def test_a_restart_keeps_the_schedule(tmp_path):
    fired = []

    def schedule(name):
        return FunctionCallback(
            "validation_end",
            lambda t, m: fired.append(t.progress.step),
            every="10st",
            name=name,
        )

    options = {"batches": 100, "val": (), "val_check_interval": 13}
    callback = schedule("one")
    first = fit(callback, max_steps=12, **options)
    assert callback.state_dict() == {
        "next": 10
    }  # due since step 10, and the event is yet to come
    first.save_checkpoint(tmp_path / "twelve")
    for name, expected in (("one", [13, 26]), ("another", [26])):
        fired.clear()
        callback = schedule(name)
        fit(callback, max_steps=30, ckpt_path=tmp_path / "twelve", **options)
        assert fired == expected
    fit(callback, max_steps=14, **options)  # another fit starts the schedule at step 0
    assert fired == [26, 13]


def test_two_functions_have_separate_states():
    def one(trainer, module):
        pass

    keys = {
        FunctionCallback("fit_end", one).state_key,
        FunctionCallback("fit_start", one).state_key,
        FunctionCallback("train_start", one, every="1ep").state_key,
        FunctionCallback("fit_end", one, name="other").state_key,
        FunctionCallback("fit_end", lambda trainer, module: None).state_key,
        FunctionCallback("fit_end", lambda trainer, module: None).state_key,
    }
    assert len(keys) == 6


def test_bad_events_and_intervals():
    with pytest.raises(HookError, match="did you mean 'on_train_batch_end'"):
        FunctionCallback("train_batch_ended", hear)
    with pytest.raises(HookError, match="the function for 'train_batch_end'"):
        FunctionCallback("train_batch_end", hear)
    with pytest.raises(DurationError, match="needs a unit"):
        FunctionCallback("validation_end", hear, every=10)
    with pytest.raises(ConfigurationError, match="longer than zero"):
        FunctionCallback("train_start", hear, every="0ep")
    with pytest.raises(ConfigurationError, match="is called once"):
        FunctionCallback("fit_start", hear, every="1ep")
    assert math.isinf(FunctionCallback("train_start", hear, every="1ep")._next)
