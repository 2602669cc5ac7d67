"""The arguments of a training script: typed by signatures, read from options and files, refused in one line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, NoReturn, final

import jsonargparse
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit import callbacks as _callbacks
from trainer_kit.commands.complaint import FileProblem, check_file, check_keys, check_words, complaint
from trainer_kit.core.errors import ConfigurationError, printable
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Logger
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.trainer import Trainer

__all__ = ["Arguments", "Extension", "Parsed", "add_schedule_arguments", "class_of", "use_optimizer"]

# Instantiate no class for an argument without a type, and none of the classes that jsonargparse denies by itself.
jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])

_CONFIG = "--config="
_COMMANDS = {
    "fit": "Train.",
    "validate": "Validate.",
    "test": "Test.",
    "predict": "Predict.",
}


_OPTIMIZERS: Final[Mapping[str, type[Any]]] = {"optimizer": Optimizer, "lr_scheduler": LRScheduler}
"""The base class of what each option chooses."""


class _LoggerClass(ABC):  # noqa: B024  (jsonargparse needs a class, but a logger need not inherit from one)
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Logger)


_PARTS: Mapping[str, tuple[Any, Any, str]] = {
    "strategy": (Strategy | str, "auto", "a word such as ddp, or a class"),
    "precision": (Precision | str | int | None, None, "a word such as bf16-mixed, or a class"),
    "logger": (
        bool | _LoggerClass | str | list[_LoggerClass | str] | None,
        None,
        "true, false, a word such as csv, a class, or several",
    ),
    "callbacks": (Callback | list[Callback] | None, None, "one or several classes"),
    "plugins": (Precision | list[Precision] | None, None, "a precision's class"),
}


@final
@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a `LightningCLI` changes in a command line.

    Attributes:
        trainer: makes the Trainer; its arguments become options.
        commands: whether there are commands, or options only.
        instantiates_trainer: whether `Parsed.instantiate` makes the Trainer, or returns its arguments.
        optimizers: whether ``--optimizer`` and ``--lr_scheduler`` are options.
        seed: the default of ``--seed_everything``.
        extend: adds arguments to the parser of each command.
        parser: the class of the parsers.
        parser_options: keyword arguments of the parser; under a command's name, those of that command's parser.
    """

    trainer: Any = Trainer
    commands: bool = True
    instantiates_trainer: bool = True
    optimizers: bool = True
    seed: int | bool = 0
    extend: Callable[[Any], None] = lambda parser: None
    parser: type[jsonargparse.ArgumentParser] = jsonargparse.ArgumentParser
    parser_options: Mapping[str, Any] = field(default_factory=dict)


@final
class Parsed:
    """A parsed command line.

    Args:
        command: fit, validate, test or predict; or "".
        parser: the command's parser.
        values: the parsed values, before objects are made.
    """

    def __init__(self, command: str, parser: jsonargparse.ArgumentParser, values: jsonargparse.Namespace) -> None:
        self.command, self.parser, self.values = command, parser, values

    @property
    def seed(self) -> int | None:
        """The seed, or None. True gives 0: ranks that another launcher starts cannot agree on a random seed."""
        seed = self.values.seed_everything
        return None if seed is False or seed is None else 0 if seed is True else int(seed)

    def entry_point_arguments(self) -> dict[str, Any]:
        """The arguments of the entry point itself."""
        return {name: self.values[name] for name in ("ckpt_path", "load_weights_only") if name in self.values}

    def instantiate(self) -> Any:
        """Make the Trainer, the module, the data and all other objects with options, except optimizers."""
        return self.parser.instantiate(self.values)


@final
class Arguments:
    """The parser of a training script, with its four commands or without commands.

    Attributes:
        parser: the whole parser.

    Args:
        module: the module's class.
        data: the datamodule's class, or None.
        choose_model: whether ``class_path`` chooses a subclass.
        choose_data: the same for the data.
        needs_data: whether data must be chosen.
        trainer_defaults: override the defaults of the Trainer.
        extension: what a `LightningCLI` changes.
    """

    def __init__(
        self,
        module: type[Any],
        data: type[Any] | None,
        *,
        choose_model: bool,
        choose_data: bool,
        needs_data: bool = True,
        trainer_defaults: Mapping[str, Any],
        extension: Extension = Extension(),
    ) -> None:
        for name in _callbacks.__all__:  # import them, so that their bare names are known
            getattr(_callbacks, name)
        self._kinds: dict[str, type[Any]] = {
            "trainer.callbacks": Callback,
            "model": module,
            **({"data": data} if data is not None else {}),
            **_OPTIMIZERS,
        }
        self._choose = {"model": choose_model, "data": choose_data}
        self._needs_data = needs_data
        self._defaults = {f"trainer.{name}": value for name, value in trainer_defaults.items()}
        text = inspect.getdoc(module) if module.__doc__ else None
        description = text and text.partition("\n\n")[0]
        self._extension = extension
        if not extension.commands:
            self._parsers = {"": self._make_command("", description)}
            self.parser = self._parsers[""]
            return
        self.parser = self._make_parser("", description)
        subcommands = self.parser.add_subcommands(required=True, dest="subcommand")
        self._parsers = {name: self._make_command(name, about) for name, about in _COMMANDS.items()}
        for name, parser in self._parsers.items():
            subcommands.add_subcommand(name, parser, help=_COMMANDS[name])

    def _make_parser(self, command: str, description: str | None) -> jsonargparse.ArgumentParser:
        given = self._extension.parser_options
        options = given.get(command, {}) if command else {k: v for k, v in given.items() if k not in _COMMANDS}
        # With abbreviations a misspelt option could match another option.
        standard = {"description": description, "exit_on_error": False, "allow_abbrev": False}
        return self._extension.parser(**{**standard, **options})

    def _make_command(self, command: str, description: str | None) -> jsonargparse.ArgumentParser:
        parser, more = self._make_parser(command, description), self._extension
        parser.add_argument(
            *("-c", "--config"), action="config", help="a YAML file of these options; may be given several times"
        )
        parser.add_argument(
            "--seed_everything",
            type=int | bool,
            default=more.seed,
            help="seed of Python, NumPy, torch and the order of the data; false seeds none",
        )
        parser.add_class_arguments(
            class_of(more.trainer), "trainer", skip=set(_PARTS), instantiate=more.instantiates_trainer
        )
        for name, (kind, default, text) in _PARTS.items():
            parser.add_argument(f"--trainer.{name}", type=kind, default=default, help=text)
        for name, kind in self._kinds.items():
            if name == "trainer.callbacks" or name in _OPTIMIZERS:
                continue
            if self._choose[name]:
                needed = name == "model" or self._needs_data
                parser.add_subclass_arguments(kind, name, required=needed, fail_untyped=False)
            else:
                parser.add_class_arguments(kind, name, fail_untyped=False)
        if command:
            parser.add_argument("--ckpt_path", type=str | None, default=None, help='a path, a URL, "last" or "best"')
        if command == "fit":
            parser.add_argument("--load_weights_only", type=bool, default=False, help="take only the weights from it")
        parser.set_defaults(self._defaults)
        more.extend(parser)
        if more.optimizers:
            _add_optimizer_arguments(parser)
        return parser

    def parse(self, words: Sequence[str]) -> Parsed:
        """Read a command line.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one; 0 after ``--help`` and ``--print_config``.
        """
        # The shell does not expand a tilde after "=".
        words = [f"{_CONFIG}{os.path.expanduser(w[len(_CONFIG) :])}" if w.startswith(_CONFIG) else w for w in words]
        files = _config_files(words)
        alone = not self._extension.commands
        command = "" if alone else next((word for word in words if word in self._parsers), "fit")
        prog = f"{os.path.basename(sys.argv[0])}{f' {command}' if command in words else ''}"
        early = words[0].partition("=")[0] if words else ""
        if not alone and early.startswith("-") and early not in ("-h", "--help"):
            _refuse(f"{prog}: {early}: options stand after the command: {', '.join(_COMMANDS)}")
        known = [option for option in self._parsers[command]._option_string_actions if option.startswith("--")]
        try:
            for file in files:
                check_file(file)
            check_words(prog, words)
            check_keys(prog, words, files, known, self._kinds)
            found = self.parser.parse_args(list(words))
            check_keys(prog, words, files, known, self._kinds)  # parsing has imported more classes
        except FileProblem as problem:
            _refuse(str(problem))
        except jsonargparse.ArgumentError as error:
            _refuse(complaint(str(error), prog, words, files, known, self._kinds))
        return self._parsed(found)

    def parse_values(self, values: Any) -> Parsed:
        """Read a dict or a namespace in place of command-line words; with commands, ``subcommand`` names one.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one.
        """
        try:
            return self._parsed(self.parser.parse_object(values))
        except (jsonargparse.ArgumentError, KeyError, TypeError, ValueError) as error:
            _refuse(" ".join(str(error).split()))

    def _parsed(self, found: Any) -> Parsed:
        command = found.subcommand if self._extension.commands else ""
        return Parsed(command, self._parsers[command], found[command] if command else found)


def _config_files(words: Sequence[str]) -> list[str]:
    after = [value for word, value in pairwise(words) if word in ("-c", "--config")]
    return [*after, *(word.partition("=")[2] for word in words if word.startswith("--config="))]


def _refuse(line: str) -> NoReturn:
    print(printable(line), file=sys.stderr)
    raise SystemExit(2)


def _add_optimizer_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Add ``--optimizer`` and ``--lr_scheduler``, both optional."""
    # They are made after the module's weights are on their device, not with the other classes.
    later: dict[str, Any] = {"instantiate": False, "fail_untyped": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, **later)
    parser.add_subclass_arguments(LRScheduler, "lr_scheduler", skip={"optimizer"}, **later)
    add_schedule_arguments(parser)


def add_schedule_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Add the options of the scheduler's interval and of the value that it monitors."""
    parser.add_argument(
        "--lr_scheduler_interval", type=Literal["epoch", "step"], default="epoch", help="when the scheduler advances"
    )
    parser.add_argument(
        "--lr_scheduler_monitor", type=str | None, default=None, help="the logged value that ReduceLROnPlateau looks at"
    )


def use_optimizer(
    module: Any, values: Any, show: Callable[[str], None], compose: Callable[[Any, Any, Any], Any] | None = None
) -> None:
    """Replace ``configure_optimizers`` of a module by the chosen optimizer and scheduler, if any.

    Args:
        module: the module.
        values: as parsed: ``optimizer``, ``lr_scheduler``, ``lr_scheduler_interval`` and ``lr_scheduler_monitor``.
        show: prints a line.
        compose: returns what ``configure_optimizers`` returns, from module, optimizer, and scheduler or None.

    Raises:
        ConfigurationError: a scheduler without an optimizer, or without a monitored value.
    """
    optimizer, scheduler = values.optimizer, values.lr_scheduler
    interval, monitor = values.lr_scheduler_interval, values.lr_scheduler_monitor
    if optimizer is None:
        if scheduler is not None:
            raise ConfigurationError(
                "--lr_scheduler needs --optimizer", fix="add --optimizer: the scheduler sets its learning rate"
            )
        return
    plateau = scheduler is not None and issubclass(class_of(scheduler.class_path), ReduceLROnPlateau)
    if plateau and monitor is None and compose is None:
        raise ConfigurationError(
            "ReduceLROnPlateau needs --lr_scheduler_monitor", fix="pass the name of a logged value"
        )
    if is_overridden("configure_optimizers", module, TrainModule):
        show(f"--optimizer counts: {type(module).__name__}.configure_optimizers is not called")

    def configure_optimizers() -> Any:
        made = class_of(optimizer.class_path)(module.parameters(), **_init_args(optimizer))
        schedule = None if scheduler is None else class_of(scheduler.class_path)(made, **_init_args(scheduler))
        if compose is not None:
            return compose(module, made, schedule)
        if schedule is None:
            return made
        config = {"scheduler": schedule, "interval": interval}
        return {"optimizer": made, "lr_scheduler": {**config, "monitor": monitor} if plateau else config}

    module.configure_optimizers = configure_optimizers


def class_of(maker: Any) -> Any:
    """Return a class, the class at a path, or a class with the arguments of a function."""
    if isinstance(maker, str):
        module, _, name = maker.rpartition(".")
        return getattr(importlib.import_module(module), name)
    return maker if isinstance(maker, type) else jsonargparse.class_from_function(maker)  # type: ignore[attr-defined]


def _init_args(named: Any) -> dict[str, Any]:
    return dict(named.init_args.as_dict()) if "init_args" in named else {}
