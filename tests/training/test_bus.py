"""The bus: for each hook only those who listen, found once a run."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer_kit import Callback, DataModule, Trainer, TrainModule
from trainer_kit.callbacks import LambdaCallback
from trainer_kit.core.errors import ConfigurationError, HookError
from trainer_kit.core.hooks import HOOK_FACTS, ModuleHooks, hooks_where
from trainer_kit.step.bus import Bus, sorted_callbacks

PACKAGE = Path(__file__).parents[2] / "trainer_kit"


class Module(TrainModule):
    pass


def make_bus(*callbacks, module=None, datamodule=None):
    scope = SimpleNamespace(hook="")
    trainer = SimpleNamespace(name="trainer")
    module = module or Module()
    return (
        Bus(trainer, module, sorted_callbacks(callbacks), datamodule, scope),
        trainer,
        module,
        scope,
    )


def call(listeners, *given):
    for listener in listeners:
        listener(*given)


def test_a_hook_without_an_override_has_no_listener():
    class Idle(Callback):
        def helper(self):
            pass

    bus, *_ = make_bus(*(Idle() for _ in range(50)), datamodule=DataModule())
    assert [name for name in Bus.names() if getattr(bus, name) != ()] == []
    assert bus.on_train_epoch_end_late == ()


def test_every_hook_of_the_specification_has_a_field():
    bus, *_ = make_bus()
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    assert [*vars(bus)] == Bus.names() == [*hooks, "on_train_epoch_end_late"]


def test_the_library_asks_a_bus_for_its_hooks_only():
    """A bus has the hooks of the specification, and no list that a type checker could read."""
    asked = set()
    for path in PACKAGE.rglob("*.py"):
        asked |= set(re.findall(r"\bbus\.(on_\w+)", path.read_text(encoding="utf-8")))
    assert len(asked) >= 20
    assert asked <= set(Bus.names())


@pytest.mark.parametrize("name", sorted(vars(Callback)))
def test_a_module_has_the_hooks_of_a_callback(name):
    """With the same parameters after trainer and module, the same result, and the same text."""
    if not name.startswith("on_"):
        return
    # A sanity check is a validation for the module.
    if name in ("on_sanity_check_start", "on_sanity_check_end"):
        assert not hasattr(ModuleHooks, name)
        return
    hook, module_hook = getattr(Callback, name), getattr(ModuleHooks, name)
    lines = inspect.getdoc(hook).splitlines()
    arguments = ("    trainer: ", "    pl_module: ")
    assert len([line for line in lines if line.startswith(arguments)]) == 2
    text = "\n".join(line for line in lines if not line.startswith(arguments))
    assert text.removesuffix("\n\nArgs:") == inspect.getdoc(module_hook)
    signature = inspect.signature(hook)
    own, _, _, *parameters = signature.parameters.values()
    assert inspect.signature(module_hook) == signature.replace(
        parameters=[own, *parameters]
    )
    assert set(inspect.signature(hook).parameters) >= {"trainer", "pl_module"}


def test_facts_of_hooks():
    """What the parts of the library that treat hooks by their kind take from the specification."""
    assert set(HOOK_FACTS) == {name for name in vars(Callback) if name[:3] == "on_"}
    step = {"on_train_step_end", "on_before_optimizer_step", "on_before_zero_grad"}
    assert hooks_where(counts="st") == step
    backward = {"on_before_backward", "on_after_backward"}
    batch = {"on_train_batch_start", "on_train_batch_end"}
    assert hooks_where(counts="ba") == backward | batch
    assert hooks_where(logs="batch") == step | backward | batch
    epoch = {"on_train_epoch_start", "on_train_epoch_end"}
    assert hooks_where(counts="ep") == epoch
    assert hooks_where(inside="epoch") == epoch | batch
    assert hooks_where(inside="batch") == backward | step - {"on_train_step_end"}
    with pytest.raises(TypeError, match="HookFacts has no count"):
        hooks_where(count="st")
    ends = {"on_train_batch_end", "on_train_epoch_end", "on_train_step_end"}
    assert hooks_where(leads=True) == (
        (epoch | batch | step | backward | {"on_train_start"}) - ends
    )
    for name in hooks_where(logs="epoch"):
        assert name.startswith(
            ("on_train_start", "on_train_epoch", "on_validation", "on_test", "on_check")
        )


def test_callbacks_receive_trainer_and_module_by_position_and_precede_the_module():
    heard = []

    class Positional(Callback):
        def on_train_batch_end(self, t, pl_module, /, results, samples, number):
            heard.append((t, pl_module, results, samples, number))

    class Listening(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            heard.append((outputs, batch, batch_idx))

    bus, trainer, module, _ = make_bus(Positional(), module=Listening())
    call(bus.on_train_batch_end, "outputs", "batch", 3)
    assert heard == [(trainer, module, "outputs", "batch", 3), ("outputs", "batch", 3)]


def test_order_is_early_normal_late_and_then_the_list():
    def make(name, when):
        return type(
            name,
            (Callback,),
            {"order": when, "on_fit_start": lambda self, t, m: heard.append(name)},
        )()

    heard = []
    order = ["late", "normal", "early", "late", "early", "normal"]
    bus, *_ = make_bus(*(make(f"{when}{i}", when) for i, when in enumerate(order)))
    call(bus.on_fit_start)
    assert heard == ["early2", "early4", "normal1", "normal5", "late0", "late3"]


def test_late_callbacks_receive_the_end_of_an_epoch_after_all_others():
    heard = []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer, module):
            heard.append(self.order)

    class Late(Ends):
        order = "late"

    bus, *_ = make_bus(Late(), Ends())
    call(bus.on_train_epoch_end)
    assert heard == ["normal"]
    call(bus.on_train_epoch_end_late)
    assert heard == ["normal", "late"]


def test_the_scope_knows_the_hook_being_called():
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            seen.append(scope.hook)

        def on_validation_epoch_end(self, trainer, module):
            seen.append(scope.hook)

    bus, _, _, scope = make_bus(Looks())
    call(bus.on_train_start)
    call(bus.on_validation_epoch_end)
    assert seen == ["on_train_start", "on_validation_epoch_end"]


def test_a_hook_on_the_instance_or_a_wrapped_hook_is_called():
    heard = []

    def wrapped(method):
        @functools.wraps(method)
        def inner(self, *given):
            heard.append("around")
            return method(self, *given)

        return inner

    class Wrapped(Callback):
        @wrapped
        def on_fit_start(self, trainer, module):
            heard.append("wrapped")

    plain = Callback()
    plain.on_fit_start = lambda trainer, module: heard.append("instance")
    inherited = type("Inherited", (Wrapped,), {})()
    bus, *_ = make_bus(
        Wrapped(),
        plain,
        inherited,
        LambdaCallback(on_fit_start=lambda t, m: heard.append("lambda")),
    )
    call(bus.on_fit_start)
    assert heard == ["around", "wrapped", "instance", "around", "wrapped", "lambda"]


def test_the_datamodule_receives_only_exceptions_and_is_last():
    heard = []

    class Data(DataModule):
        def on_exception(self, exception):
            heard.append(("data", exception))

    class Hears(Callback):
        def on_exception(self, trainer, module, exception):
            heard.append(("callback", exception))

    class Listening(Module):
        def on_exception(self, exception):
            heard.append(("module", exception))

    bus, *_ = make_bus(Hears(), module=Listening(), datamodule=Data())
    error = ValueError()
    call(bus.on_exception, error)
    assert heard == [("callback", error), ("module", error), ("data", error)]


def test_a_silent_bus_has_every_field_and_no_listener():
    bus, *_ = make_bus(LambdaCallback(on_fit_start=lambda t, m: None))
    quiet = bus.silent()
    assert all(getattr(quiet, name) == () for name in Bus.names())
    assert bus.on_fit_start != ()


def test_listeners_are_named_by_class_in_order():
    class First(Callback):
        def on_train_start(self, trainer, module):
            pass

        def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx):
            pass

    class Listening(Module):
        def on_train_start(self):
            pass

    bus, *_ = make_bus(First(), module=Listening())
    assert bus.listeners("on_train_start") == ["First", "Listening"]
    assert bus.listeners("on_test_batch_end") == ["First"]
    assert bus.listeners("on_train_end") == []


def test_objects_that_are_not_callbacks_are_refused():
    with pytest.raises(ConfigurationError, match="not a callback"):
        Trainer(callbacks=[object()])
    with pytest.raises(ConfigurationError, match="not a callback"):
        Trainer(callbacks=LambdaCallback)


def test_an_unknown_order_is_refused():
    class Last(Callback):
        order = "lates"

    with pytest.raises(ConfigurationError, match="did you mean 'late'"):
        Trainer(callbacks=Last())


def test_two_states_under_one_key_are_refused_before_anything_runs():
    class Keeps(Callback):
        def state_dict(self):
            return {"n": 1}

    with pytest.raises(ConfigurationError, match="Keeps"):
        Trainer(callbacks=[Keeps(), Keeps()])

    class Idle(Callback):
        pass

    Trainer(callbacks=[Idle(), Idle()])


def test_a_misspelled_hook_fails_when_the_class_is_made():
    with pytest.raises(HookError, match="did you mean 'on_train_batch_end'"):

        class Misspelled(Callback):
            def on_train_batch_ends(self, trainer, module, outputs, batch, batch_idx):
                pass

    with pytest.raises(HookError, match="did you mean 'on_train_start'"):

        class MisspelledModule(TrainModule):
            def on_train_strat(self):
                pass

    with pytest.raises(HookError, match="did you mean"):

        class MisspelledData(DataModule):
            def on_before_batch_transfers(self, batch, dataloader_idx):
                pass


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, trainer, module, batch, batch_idx: None,
        lambda self, trainer, module, outputs, batch, batch_idx, dataloader_idx: None,
        lambda self, *, trainer, module, outputs, batch, batch_idx: None,
    ],
)
def test_a_hook_with_the_wrong_parameters_fails_when_a_trainer_is_given_it(hook):
    wrong = type("Wrong", (Callback,), {"on_train_batch_end": hook})
    with pytest.raises(
        HookError,
        match=r"def on_train_batch_end\(self, trainer, pl_module, outputs, batch, batch_idx\)",
    ):
        Trainer(callbacks=[wrong()])


def test_hooks_may_take_anything_or_have_defaults():
    heard = []

    class Loose(Callback):
        def on_train_batch_end(self, *given):
            heard.append(len(given))

        def on_fit_start(self, trainer, module, extra="default"):
            heard.append(extra)

    class Fits(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    Trainer(max_steps=1, callbacks=Loose(), barebones=True).fit(
        Fits(), [torch.ones(1, 1)]
    )
    assert heard == ["default", 5]
