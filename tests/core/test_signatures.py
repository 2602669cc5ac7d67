"""Misspelled hooks are refused when the class is created; other mistakes in hooks when a Trainer is given an object."""

from __future__ import annotations

import pytest

from trainer_kit import Callback, DataModule, Trainer, TrainModule
from trainer_kit.core.errors import HookError
from trainer_kit.core.hooks import DataHooks, ModuleHooks
from trainer_kit.core.signatures import check_hooks, takes
from trainer_kit.testing import TinyModule


def test_an_unknown_hook_of_a_callback_is_refused_with_the_nearest():
    with pytest.raises(
        HookError,
        match=r"(?s)Misspelled.on_train_epoch_ends is not a hook.*'on_train_epoch_end'",
    ):

        class Misspelled(Callback):
            def on_train_epoch_ends(self, trainer, module): ...


def test_an_unknown_hook_of_a_module_is_refused():
    with pytest.raises(HookError, match="'on_train_start'"):

        class Misspelled(TrainModule):
            def on_training_start(self): ...


@pytest.mark.parametrize("name", ["traning_step", "validaton_step"])
def test_misspelled_steps_are_refused(name):
    with pytest.raises(
        HookError,
        match=rf"(?s)Old.{name} is not a hook.*did you mean '(training|validation)_step'",
    ):
        type("Old", (TrainModule,), {name: lambda self, *arguments: None})


def use(cls):
    """Hand an object of the class to a Trainer, at its first entry point."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    if issubclass(cls, Callback):
        Trainer(callbacks=cls(), fast_dev_run=True, **quiet)
    elif issubclass(cls, DataModule):
        Trainer(fast_dev_run=True, **quiet).fit(TinyModule(), datamodule=cls())
    else:
        Trainer(fast_dev_run=True, **quiet).validate(cls(), [])


@pytest.mark.parametrize(
    ("base", "name", "fix"),
    [
        (
            TinyModule,
            "training_epoch_end",
            "define on_train_epoch_end .*keep them on self",
        ),
        (TinyModule, "validation_epoch_end", "define on_validation_epoch_end "),
        (TinyModule, "training_step_end", "define on_train_batch_end$"),
        (TinyModule, "validation_step_end", "define on_validation_batch_end$"),
        (TinyModule, "on_epoch_end", "define on_train_epoch_end$"),
        (TinyModule, "on_val_epoch_end", "did you mean 'on_validation_epoch_end'"),
        (Callback, "on_batch_start", "define on_train_batch_start$"),
        (Callback, "on_something", "use one of: on_"),
        (DataModule, "on_data", "use one of: on_"),
    ],
)
def test_unknown_hooks_of_other_owners_are_refused(base, name, fix):
    old = type(
        "Old", (base,), {name: lambda self, *arguments: None}
    )  # a package may define it and not use it
    with pytest.raises(HookError, match=rf"(?s)Old.{name} is not a hook.*fix:   {fix}"):
        use(type("Derived", (old,), {}))


def test_a_subclass_puts_a_hook_right():
    class Old(Callback):
        def on_train_start(self): ...

    class New(Old):
        def on_train_start(self, trainer, module): ...

    use(New)


@pytest.mark.parametrize(
    "name",
    [
        "train_step",
        "pretraining_step",
        "retraining_step",
        "training_step_2",
        "best_step",
    ],
)
def test_methods_of_one_s_own_are_left_alone(name):
    type("Mine", (TrainModule,), {name: lambda self, *arguments: None})


def test_an_unknown_hook_of_a_datamodule_is_refused():
    with pytest.raises(HookError, match="on_exception"):

        class Misspelled(DataModule):
            def on_exceptions(self, exception): ...


def test_too_few_parameters_are_refused_with_the_right_ones():
    class Short(Callback):
        def on_train_start(self): ...

    with pytest.raises(
        HookError,
        match=r"(?s)found: def on_train_start\(self\).*on_train_start\(self, trainer, pl_module\)",
    ):
        use(Short)


def test_too_many_parameters_are_refused():
    class Long(TinyModule):
        def on_train_batch_end(self, outputs, batch, batch_idx, dataloader_idx): ...

    with pytest.raises(HookError, match="has the wrong parameters"):
        use(Long)


def test_keyword_only_parameters_are_refused():
    class ByName(Callback):
        def on_train_start(self, *, trainer, module): ...

    with pytest.raises(HookError, match="has the wrong parameters"):
        use(ByName)


def test_names_of_parameters_are_free():
    class FromLightning(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, i): ...

    use(FromLightning)


def test_star_arguments_and_defaults_fit_every_hook():
    class Loose(Callback):
        def on_train_batch_end(self, *args, **kwargs): ...
        def on_train_start(self, trainer, module, extra=None): ...

    use(Loose)


def test_an_optional_last_parameter_may_be_left_out():
    class Loaders(Callback):
        def on_validation_batch_end(
            self, trainer, module, outputs, batch, batch_idx
        ): ...

    class One(TinyModule):
        def on_validation_batch_start(self, batch, batch_idx): ...

    use(Loaders)
    use(One)


def test_methods_with_other_names_are_ignored():
    class Free(Callback):
        def one_epoch(self): ...
        def _on_something(self): ...

    use(Free)


def test_attributes_that_are_not_functions_are_not_hooks():
    class Free(TinyModule):
        on_device = True

    use(Free)


def test_a_method_of_a_protocol_that_is_not_a_hook_is_checked_too():
    class Old(DataModule):
        def setup(self): ...

    with pytest.raises(HookError, match="setup"):
        use(Old)


def test_takes_counts_positional_arguments():
    def two(a, b): ...
    def optional(a, b=0): ...

    assert [takes(two, n) for n in (1, 2, 3)] == [False, True, False]
    assert [takes(optional, n) for n in (0, 1, 2, 3)] == [False, True, True, False]
    assert takes(lambda *a: None, 9)


def test_modules_and_callbacks_know_the_same_moments():
    """But for modes and gradients around an evaluation, which only a module has, and the sanity check."""
    of_callbacks = {name for name in vars(Callback) if name.startswith("on_")}
    of_modules = {
        name
        for name in {**vars(ModuleHooks), **vars(DataHooks)}
        if name.startswith("on_")
    }
    modes = {
        f"on_{kind}_model_{to}"
        for kind in ("validation", "test", "predict")
        for to in ("eval", "train")
    }
    modes |= {"on_validation_model_zero_grad"}
    assert of_modules - of_callbacks == modes | {
        "on_before_batch_transfer",
        "on_after_batch_transfer",
    }
    assert of_callbacks - of_modules == {"on_sanity_check_start", "on_sanity_check_end"}


@pytest.mark.parametrize("cls", [Callback, ModuleHooks, DataHooks])
def test_every_hook_documents_when_it_is_called(cls):
    hooks = [
        value
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    ]
    assert [
        hook.__name__
        for hook in hooks
        if not hook.__doc__ and hook.__name__ not in ("state_dict",)
    ] == []


def test_a_name_of_an_earlier_hook_is_free_for_a_method_that_the_class_calls():
    class Base(TrainModule):
        def on_epoch_end(self): ...

        def on_train_epoch_end(self):
            self.on_epoch_end()

    class Extended(Base):
        def on_epoch_end(self):
            super().on_epoch_end()

    class Alone(TrainModule):
        def on_epoch_end(self):
            super().on_epoch_end()

    check_hooks(Extended, ModuleHooks, DataHooks)
    with pytest.raises(HookError, match="on_epoch_end is not a hook"):
        check_hooks(Alone, ModuleHooks, DataHooks)
