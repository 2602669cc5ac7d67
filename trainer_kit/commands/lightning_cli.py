"""``LightningCLI``: Lightning's class for a command line, over the parser of `tk.cli`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import jsonargparse
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_kit.commands._plateau import ReduceLROnPlateau
from trainer_kit.commands.arguments import (
    Arguments,
    Extension,
    Parsed,
    add_schedule_arguments,
    class_of,
    use_optimizer,
)
from trainer_kit.commands.cli import SaveConfigCallback
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import seed_everything
from trainer_kit.core.signatures import check_overrides
from trainer_kit.core.types import Function, Keywords
from trainer_kit.trainer import Trainer

__all__ = ["ArgsType", "LightningArgumentParser", "LightningCLI", "instantiate_class"]

# jsonargparse does not annotate the constructor of the class, which strict checks of callers refuse.
_Namespace: Function = jsonargparse.Namespace
ArgsType: TypeAlias = list[str] | dict[str, Any] | jsonargparse.Namespace | None
"""The type of a `LightningCLI`'s ``args``."""
_Kind: TypeAlias = type[object] | tuple[type[object], ...]
"""A class, or base classes among whose subclasses ``class_path`` chooses."""


class LightningArgumentParser(jsonargparse.ArgumentParser):
    """The parser that `LightningCLI.add_arguments_to_parser` receives."""

    def __init__(
        self, *args: Any, env_prefix: str | bool = "PL", **kwargs: Any
    ) -> None:
        # PL is Lightning's prefix of environment variables: PL_TRAINER__MAX_EPOCHS.
        super().__init__(*args, env_prefix=env_prefix, **kwargs)
        self.callback_keys: list[str] = []
        self.chosen: dict[type[object], dict[str, tuple[_Kind, str]]] = {
            Optimizer: {},
            LRScheduler: {},
        }

    def dump(
        self, cfg: Any, *args: Any, skip_none: bool | None = None, **kwargs: Any
    ) -> str:
        """Return a configuration as text; ``skip_none`` is the former name of ``skip_unset``."""
        if skip_none is not None:
            kwargs["skip_unset"] = skip_none
        return cast(str, super().dump(cfg, *args, **kwargs))

    def add_lightning_class_args(
        self,
        lightning_class: Function,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a callback, a module or a datamodule; the Trainer receives the callback.

        Args:
            lightning_class: a class, or a function that is annotated with the class that it returns.
            nested_key: the prefix of the options.
            subclass_mode: whether ``class_path`` chooses a subclass.
            required: whether one must be chosen.
        """
        component = class_of(lightning_class)
        # Callbacks are made apart from the Trainer's own option, and `instantiate_trainer` collects them by these keys.
        if issubclass(component, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(
                component, nested_key, fail_untyped=False, required=required
            )
            return cast(list[str], added)
        return cast(
            list[str],
            self.add_class_arguments(component, nested_key, fail_untyped=False),
        )

    def add_optimizer_args(
        self,
        optimizer_class: _Kind = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of an optimizer; with a tuple, the user chooses one of its classes.

        Args:
            optimizer_class: a class, or a tuple of base classes.
            nested_key: the prefix of the options.
            link_to: an argument that receives ``class_path`` and ``init_args``, for `instantiate_class`; by default the
                module's ``configure_optimizers`` is replaced.
        """
        self._add_chosen(Optimizer, optimizer_class, nested_key, link_to, "params")

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: _Kind = (LRScheduler,),
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a scheduler; see `add_optimizer_args`."""
        self._add_chosen(
            LRScheduler, lr_scheduler_class, nested_key, link_to, "optimizer"
        )

    def _add_chosen(
        self, role: type[object], kind: _Kind, key: str, link_to: str, skipped: str
    ) -> None:
        # They are made after the module, from its parameters, which no option can hold.
        options: Keywords = {
            "instantiate": False,
            "fail_untyped": False,
            "skip": {skipped},
        }
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, key, **options)
        else:
            self.add_class_arguments(kind, key, **options)
        self.chosen[role][key] = (kind, link_to)

    def link_chosen(self) -> None:
        """Link optimizers and schedulers to the arguments that take them."""
        for choices in self.chosen.values():
            for key, (kind, link_to) in choices.items():
                if link_to != "AUTOMATIC":
                    self.link_arguments(
                        key, link_to, compute_fn=partial(_plain_choice, kind)
                    )

    def automatic(self, role: type[object], values: jsonargparse.Namespace) -> Any:
        """The choice that replaces ``configure_optimizers``, or None.

        Raises:
            ConfigurationError: there are several.
        """
        kinds = {
            key: kind
            for key, (kind, link_to) in self.chosen[role].items()
            if link_to == "AUTOMATIC"
        }
        # Which one would configure the module is not decided by any order that a user could see.
        if len(kinds) > 1:
            raise ConfigurationError(
                f"{role.__name__} is set by several options",
                found=", ".join(kinds),
                fix="pass link_to= for each, and create them in configure_optimizers with instantiate_class",
            )
        for key, kind in kinds.items():
            return _with_class_path(kind, values[key])
        return None


def _with_class_path(kind: _Kind, value: Any) -> Any:
    """The choice of a class: its options, with the class's path if the option does not choose one."""
    # With a single class the options are its arguments, without class_path and init_args around them.
    if isinstance(kind, tuple) or value is None:
        return value
    return _Namespace(
        class_path=f"{kind.__module__}.{kind.__qualname__}", init_args=value
    )


def _plain_choice(kind: _Kind, value: object) -> object:
    choice = _with_class_path(kind, value)
    # The argument that it is linked to is typed as a dict, and saved with the module's hyperparameters.
    if choice is None:
        return None
    return choice.as_dict()


def instantiate_class(args: object, init: Mapping[str, Any]) -> Any:
    """Make an object from ``class_path`` and ``init_args``, with one or several positional arguments.

    Args:
        args: the positional argument, or a tuple of them.
        init: what `LightningArgumentParser.add_optimizer_args` links to an argument.

    Example:
        >>> from torch import nn
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
        >>> instantiate_class(nn.Linear(2, 1).parameters(), init).defaults["lr"]
        0.5
    """
    if not isinstance(args, tuple):
        args = (args,)
    return class_of(init["class_path"])(*args, **dict(init.get("init_args") or {}))


class LightningCLI:
    """The command line of Lightning's class of the same name; `tk.cli` offers it as one function.

    Options, files and checks are those of `tk.cli`. A subclass may override `add_arguments_to_parser`,
    `before_instantiate_classes`, `after_instantiate_classes`, `instantiate_trainer`, `configure_optimizers`, and define
    ``before_fit``, ``fit``, ``after_fit``, and the same for each command.

    Args:
        model_class: the module's class, or a function that returns one; None: any, chosen by ``--model``.
        datamodule_class: likewise; None: any, chosen by ``--data``, or none.
        save_config_callback: saves the configuration; None: it is not saved.
        save_config_kwargs: arguments of ``save_config_callback``.
        trainer_class: a subclass of the Trainer, or a function that returns a Trainer.
        trainer_defaults: arguments of the Trainer; ``callbacks`` are added to those of the command line.
        seed_everything_default: an int; True is 0; False seeds nothing.
        parser_kwargs: arguments of the parser; under a command's name, those of that command's parser.
        parser_class: a subclass of `LightningArgumentParser`.
        subclass_mode_model: ``--model`` chooses a subclass.
        subclass_mode_data: ``--data`` chooses a subclass.
        args: words in place of ``sys.argv[1:]``, or values as a dict or namespace.
        run: True runs the command; False only creates the objects, and there are no commands.
        auto_configure_optimizers: add ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: without effect: a checkpoint holds what `save_hyperparameters` was given.

    With ``--ckpt_path`` the arguments of the module that are not given come from the hyperparameters in the checkpoint,
    and a line says which.

    Raises:
        SystemExit: with 2 for a wrong call.
        ConfigurationError: a subclass overrides a method that is never called.

    Example:
        >>> from trainer_kit.testing import TinyModule
        >>> cli = LightningCLI(TinyModule, run=False, args=["--model.lr=0.5", "--trainer.max_epochs=1"])
        >>> cli.model.lr, cli.trainer.max_epochs, cli.config.model.lr
        (0.5, 1, 0.5)
    """

    never_called: ClassVar[Mapping[str, str]] = {
        "subcommands": "use run=False and call the method of made.trainer",
        **dict.fromkeys(
            ("init_parser", "setup_parser"), "pass parser_kwargs= or parser_class="
        ),
        **dict.fromkeys(
            (
                "add_default_arguments_to_parser",
                "add_core_arguments_to_parser",
                "link_optimizers_and_lr_schedulers",
            ),
            "override add_arguments_to_parser",
        ),
        "parse_arguments": "pass args=",
    }
    """Methods of Lightning's class that this one does not call: by name, the replacement."""

    config_init: Any = None
    """The configuration with its objects; None until they are created."""

    def __init__(
        self,
        model_class: Function | None = None,
        datamodule_class: Function | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None,
        trainer_class: Function = Trainer,
        trainer_defaults: Mapping[str, object] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, object] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        # First: a subclass that overrides `subcommands` would otherwise run with its method ignored.
        check_overrides(type(self), object)
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        self.trainer_class = trainer_class
        self.trainer_defaults = dict(trainer_defaults or {})
        self.auto_configure_optimizers = auto_configure_optimizers
        # Default callbacks are added to those of the command line, so they are no default of an option; objects that
        # no option can hold are added when the Trainer is made.
        plain_defaults = {
            name: value
            for name, value in self.trainer_defaults.items()
            if _is_plain(value) and name != "callbacks"
        }
        arguments = Arguments(
            class_of(model_class or TrainModule),
            class_of(datamodule_class or DataModule),
            choose_model=subclass_mode_model or model_class is None,
            choose_data=subclass_mode_data or datamodule_class is None,
            needs_data=datamodule_class is not None,
            trainer_defaults=plain_defaults,
            extension=Extension(
                trainer=trainer_class,
                commands=run,
                instantiates_trainer=False,
                optimizers=False,
                seed=seed_everything_default,
                extend=self._extend,
                parser=parser_class,
                parser_options=parser_kwargs or {},
            ),
        )
        self._parsed = self._parse(arguments, args)
        self.subcommand = self._parsed.command or None
        self.parser = arguments.parser
        self.config = self._with_command(self._parsed.values)
        # Before any object exists: weights and random splits of the data depend on it.
        if self._parsed.seed is not None:
            seed_everything(self._parsed.seed)
        try:
            self.before_instantiate_classes()
            self.instantiate_classes()
            self.after_instantiate_classes()
        # A wrong value of an option that only the constructor refuses: one line and exit code 2, as for the parser's
        # own errors.
        except ConfigurationError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from error
        if self.subcommand is not None:
            self._run(self.subcommand)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add arguments, defaults and links to the parser of each command; nothing by default.

        Args:
            parser: the parser of one command: its ``add_argument``, ``add_lightning_class_args``, ``set_defaults`` and
                ``link_arguments`` change it.
        """

    def before_instantiate_classes(self) -> None:
        """Called when `config` is known; nothing by default."""

    def after_instantiate_classes(self) -> None:
        """Called when `model`, `datamodule` and `trainer` exist; nothing by default."""

    def instantiate_classes(self) -> None:
        """Make `datamodule`, `model` and `trainer`."""
        objects = self._parsed.instantiate()
        self.config_init = self._with_command(objects)
        self.datamodule, self.model = objects.get("data"), objects["model"]
        self.trainer = self.instantiate_trainer()
        if not self.auto_configure_optimizers:
            return
        parser = cast(LightningArgumentParser, self._parsed.parser)
        values = self._parsed.values
        choices = _Namespace(
            optimizer=parser.automatic(Optimizer, values),
            lr_scheduler=parser.automatic(LRScheduler, values),
            lr_scheduler_interval=values.lr_scheduler_interval,
            lr_scheduler_monitor=values.lr_scheduler_monitor,
        )
        # The default of this class has no interval of the scheduler, which `use_optimizer` puts in by itself.
        compose = None
        if type(self).configure_optimizers is not LightningCLI.configure_optimizers:
            compose = self.configure_optimizers
        use_optimizer(self.model, choices, self.trainer.print, compose)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer.

        Args:
            kwargs: arguments that override all others.
        """
        # A subclass may call it in `before_instantiate_classes`.
        if self.config_init is None:
            objects = self._parsed.instantiate()
        else:
            objects = self._get(self.config_init)
        options = objects["trainer"]
        arguments = {**options.as_dict(), **self._object_defaults(options), **kwargs}
        parser = cast(LightningArgumentParser, self._parsed.parser)
        callbacks = [
            *_several(arguments.get("callbacks")),
            *(objects[key] for key in parser.callback_keys),
        ]
        callbacks += _several(self.trainer_defaults.get("callbacks"))

        if self.save_config_callback is not None:
            callbacks.append(
                self.save_config_callback(
                    parser, self._parsed.values, **self.save_config_kwargs
                )
            )
        return cast(
            Trainer, self.trainer_class(**{**arguments, "callbacks": callbacks})
        )

    @staticmethod
    def configure_optimizers(
        lightning_module: TrainModule,
        optimizer: Optimizer,
        lr_scheduler: Any = None,
    ) -> Any:
        """What the module's ``configure_optimizers`` returns for the chosen options; override it to change that.

        Args:
            lightning_module: the module, whose ``configure_optimizers`` this replaces.
            optimizer: the optimizer of the options.
            lr_scheduler: the scheduler of the options, or None.

        Returns:
            What ``configure_optimizers`` of a module may return.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            config = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": config}
        return [optimizer], [lr_scheduler]

    def _object_defaults(self, values: jsonargparse.Namespace) -> Keywords:
        """The Trainer defaults that are objects, which no option can hold, except those that the options override."""
        default = self._parsed.parser.get_default
        return {
            name: value
            for name, value in self.trainer_defaults.items()
            if not _is_plain(value)
            and name != "callbacks"
            # The only sign that the user has set the option: jsonargparse does not record where a value comes from.
            and values.get(name) == default(f"trainer.{name}")
        }

    def _extend(self, parser: LightningArgumentParser) -> None:
        # The program's own options come first: an optimizer that it adds replaces the automatic option.
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.chosen[Optimizer]:
                parser.add_optimizer_args()
            if not parser.chosen[LRScheduler]:
                parser.add_lr_scheduler_args()
            add_schedule_arguments(parser)
        # Links need both of their options.
        parser.link_chosen()

    @staticmethod
    def _parse(arguments: Arguments, args: ArgsType) -> Parsed:
        if args is None:
            return arguments.parse(sys.argv[1:])
        if isinstance(args, list):
            return arguments.parse(args)
        return arguments.parse_values(args)

    def _with_command(self, values: jsonargparse.Namespace) -> Any:
        # As in Lightning, whose programs read `made.config.fit.model` with commands and `made.config.model` without.
        name = self.subcommand
        if name is None:
            return values
        return _Namespace(subcommand=name, **{name: values})

    def _get(self, config: Any, key: str | None = None, default: object = None) -> Any:
        if self.subcommand is not None:
            config = config[self.subcommand]
        if key is None:
            return config
        return config.get(key, default)

    def _run(self, command: str) -> None:
        if self._parsed.checkpoint_line:
            self.trainer.say(self._parsed.checkpoint_line)
        getattr(self, f"before_{command}", _nothing)()
        # A subclass may define `fit` and the others in place of the Trainer's methods.
        call = getattr(self, command, getattr(self.trainer, command))
        call(
            self.model,
            datamodule=self.datamodule,
            **self._parsed.entry_point_arguments(),
        )
        getattr(self, f"after_{command}", _nothing)()


def _nothing() -> None: ...


def _several(value: object) -> list[object]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, Mapping))
