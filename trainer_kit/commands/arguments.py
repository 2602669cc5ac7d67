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
import yaml
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit import callbacks as _callbacks
from trainer_kit.commands.argument_checks import (
    Classes,
    FileProblem,
    check_file,
    check_keys,
    check_words,
    find_subclasses,
)
from trainer_kit.commands.argument_errors import describe_error
from trainer_kit.commands.checkpoint_hparams import (
    CheckpointWords,
    words_from_checkpoint,
)
from trainer_kit.core.errors import ConfigurationError, printable
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Logger
from trainer_kit.core.types import Function, Keywords
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.trainer import Trainer

__all__ = [
    "Arguments",
    "Extension",
    "Parsed",
    "add_schedule_arguments",
    "class_of",
    "use_optimizer",
]

# Instantiate no class for an argument without a type, and none of the classes that jsonargparse denies by itself.
jsonargparse.set_parsing_settings(
    instantiate_subclass_spec_in_any=False, import_path_denylist=[]
)

_CONFIG = "--config="
_COMMANDS = {
    "fit": "Train.",
    "validate": "Validate.",
    "test": "Test.",
    "predict": "Predict.",
}

_OPTIMIZERS: Final[Classes] = {
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
}


class _LoggerClass(ABC):  # noqa: B024  (jsonargparse needs a class, but a logger need not inherit from one)
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Logger)


# The Trainer's own annotations are wider: callbacks and plugins may be anything, loggers any iterable, of which
# jsonargparse could neither check a value nor offer classes.
_PARTS: Mapping[str, tuple[object, object, str]] = {
    "strategy": (Strategy | str, "auto", "a string such as ddp, or a class"),
    "precision": (
        Precision | str | int | None,
        None,
        "a string such as bf16-mixed, or a class",
    ),
    "logger": (
        bool | _LoggerClass | str | list[_LoggerClass | str] | None,
        None,
        "true, false, a string such as csv, a class, or several",
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

    trainer: Function = Trainer
    commands: bool = True
    instantiates_trainer: bool = True
    optimizers: bool = True
    seed: int | bool = 0
    extend: Callable[[Any], None] = lambda parser: None  # its class is `parser`
    parser: type[jsonargparse.ArgumentParser] = jsonargparse.ArgumentParser
    parser_options: Mapping[str, Any] = field(default_factory=dict)


@final
class Parsed:
    """A parsed command line.

    Args:
        command: fit, validate, test or predict; or "".
        parser: the command's parser.
        values: the parsed values, before objects are made.
        checkpoint_line: which of them come from the hyperparameters of a checkpoint, or "".
    """

    def __init__(
        self,
        command: str,
        parser: jsonargparse.ArgumentParser,
        values: jsonargparse.Namespace,
        checkpoint_line: str,
    ) -> None:
        self.command = command
        self.parser = parser
        self.values = values
        self.checkpoint_line = checkpoint_line

    @property
    def seed(self) -> int | None:
        """The seed, or None. True gives 0: ranks that another launcher starts cannot agree on a random seed."""
        seed = self.values.seed_everything
        if seed is None or seed is False:
            return None
        if seed is True:
            return 0
        return int(seed)

    def entry_point_arguments(self) -> Keywords:
        """The arguments of the entry point itself."""
        # Only fit has load_weights_only, and a parser without commands has neither option.
        return {
            name: self.values[name]
            for name in ("ckpt_path", "load_weights_only")
            if name in self.values
        }

    def instantiate(self) -> jsonargparse.Namespace:
        """Make the Trainer, the module, the data and all other objects with options, except optimizers."""
        objects: jsonargparse.Namespace = self.parser.instantiate(self.values)
        return objects


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
        module: type[object],
        data: type[object] | None,
        *,
        choose_model: bool,
        choose_data: bool,
        needs_data: bool = True,
        trainer_defaults: Mapping[str, object],
        extension: Extension = Extension(),
    ) -> None:
        # Import all callbacks, so that their bare names are known: jsonargparse looks among imported subclasses.
        for name in _callbacks.__all__:
            getattr(_callbacks, name)
        self._kinds: dict[str, type[object]] = {
            "trainer.callbacks": Callback,
            "model": module,
        }
        if data is not None:
            self._kinds["data"] = data
        self._kinds.update(_OPTIMIZERS)
        self._choose = {"model": choose_model, "data": choose_data}
        self._needs_data = needs_data
        self._defaults = {
            f"trainer.{name}": value for name, value in trainer_defaults.items()
        }
        description = None
        # A class without a docstring inherits that of its base in getdoc, which would describe TrainModule.
        if module.__doc__:
            description = (inspect.getdoc(module) or "").partition("\n\n")[0]
        self._extension = extension
        if not extension.commands:
            self._parsers = {"": self._make_command("", description)}
            self.parser = self._parsers[""]
            return
        self.parser = self._make_parser("", description)
        subcommands = self.parser.add_subcommands(required=True, dest="subcommand")
        self._parsers = {
            name: self._make_command(name, summary)
            for name, summary in _COMMANDS.items()
        }
        for name, parser in self._parsers.items():
            subcommands.add_subcommand(name, parser, help=_COMMANDS[name])

    def _make_parser(
        self, command: str, description: str | None
    ) -> jsonargparse.ArgumentParser:
        by_command = self._extension.parser_options
        if command:
            options = by_command.get(command, {})
        else:
            # The parser above the commands gets none of their options.
            options = {k: v for k, v in by_command.items() if k not in _COMMANDS}
        # With abbreviations a misspelled option could match another option.
        standard = {
            "description": description,
            "exit_on_error": False,
            "allow_abbrev": False,
        }
        return self._extension.parser(**{**standard, **options})

    def _make_command(
        self, command: str, description: str | None
    ) -> jsonargparse.ArgumentParser:
        parser = self._make_parser(command, description)
        extension = self._extension
        parser.add_argument(
            *("-c", "--config"),
            action="config",
            help="a YAML file of these options; may be given several times",
        )
        parser.add_argument(
            "--seed_everything",
            type=int | bool,
            default=extension.seed,
            help="seed for Python, NumPy, torch and the data order; false for no seed",
        )
        # Without _PARTS, whose annotations in the constructor are too wide.
        parser.add_class_arguments(
            class_of(extension.trainer),
            "trainer",
            skip=set(_PARTS),
            instantiate=extension.instantiates_trainer,
        )
        for name, (kind, default, text) in _PARTS.items():
            parser.add_argument(
                f"--trainer.{name}", type=kind, default=default, help=text
            )
        for name, kind in self._kinds.items():
            # Callbacks are an option of _PARTS; optimizers are added last, where the extension wants them.
            if name == "trainer.callbacks" or name in _OPTIMIZERS:
                continue
            if self._choose[name]:
                required = name == "model" or self._needs_data
                # An argument without a type takes any value, as in Lightning; `check_keys` refuses a class for it.
                parser.add_subclass_arguments(
                    kind, name, required=required, fail_untyped=False
                )
            else:
                parser.add_class_arguments(kind, name, fail_untyped=False)
        if command:
            parser.add_argument(
                "--ckpt_path",
                type=str | None,
                default=None,
                help='a path, a URL, "last" or "best"',
            )
        if command == "fit":
            parser.add_argument(
                "--load_weights_only",
                type=bool,
                default=False,
                help="take only the weights from it",
            )
        # The extension comes after: defaults that a program sets in add_arguments_to_parser override trainer_defaults.
        parser.set_defaults(self._defaults)
        extension.extend(parser)
        if extension.optimizers:
            _add_optimizer_arguments(parser)
        return parser

    def parse(self, words: Sequence[str]) -> Parsed:
        """Read a command line.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one; 0 after ``--help`` and ``--print_config``.
        """
        command_line = [_expand_config_path(argument) for argument in words]
        files = _config_files(command_line)
        command = self._find_command(command_line)
        prog = os.path.basename(sys.argv[0])
        if command in command_line:
            prog = f"{prog} {command}"
        if self._extension.commands and command_line:
            _refuse_early_option(prog, command_line[0].partition("=")[0])
        # jsonargparse has no public list of its options.
        options = [
            option
            for option in self._parsers[command]._option_string_actions
            if option.startswith("--")
        ]
        try:
            # Limits of size and depth come first: everything below reads the files and values with PyYAML.
            for file in files:
                check_file(file)
            check_words(prog, command_line)
            check_keys(prog, command_line, files, options, self._kinds)
            hparams = self._from_checkpoint(command, command_line, files, options)
            values = self.parser.parse_args([*command_line, *hparams.options])
            # Parsing has imported more classes, whose keys could not be checked before.
            check_keys(prog, command_line, files, options, self._kinds)
        except FileProblem as problem:
            _refuse(str(problem))
        except jsonargparse.ArgumentError as error:
            text = str(error)
            _refuse(
                describe_error(text, prog, command_line, files, options, self._kinds)
            )
        return self._parsed(values, hparams.line)

    def _find_command(self, command_line: Sequence[str]) -> str:
        if not self._extension.commands:
            return ""
        # Without a command the parser refuses the line; until then the options of fit, which has them all, serve.
        return next(
            (argument for argument in command_line if argument in self._parsers), "fit"
        )

    def _from_checkpoint(
        self,
        command: str,
        words: Sequence[str],
        files: Sequence[str],
        known: Sequence[str],
    ) -> CheckpointWords:
        # Without commands there is no --ckpt_path.
        if not command:
            return CheckpointWords()
        contents = []
        for file in files:
            with open(file, encoding="utf-8") as stream:
                contents.append(yaml.safe_load(stream) or {})
        kinds = None
        if self._choose["model"]:
            kinds = find_subclasses(self._kinds["model"])
        return words_from_checkpoint(words, contents, known, kinds)

    def parse_values(self, values: dict[str, Any] | jsonargparse.Namespace) -> Parsed:
        """Read a dict or a namespace in place of command-line words; with commands, ``subcommand`` names one.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one.
        """
        try:
            return self._parsed(self.parser.parse_object(values))
        # jsonargparse raises the other three for a wrong structure of the dict.
        except (jsonargparse.ArgumentError, KeyError, TypeError, ValueError) as error:
            _refuse(" ".join(str(error).split()))

    def _parsed(
        self, values: jsonargparse.Namespace, checkpoint_line: str = ""
    ) -> Parsed:
        command = ""
        if self._extension.commands:
            command = values.subcommand
            values = values[command]
        return Parsed(command, self._parsers[command], values, checkpoint_line)


def _expand_config_path(argument: str) -> str:
    """Expand a tilde after ``--config=``, which the shell leaves as it is."""
    if not argument.startswith(_CONFIG):
        return argument
    return _CONFIG + os.path.expanduser(argument.removeprefix(_CONFIG))


def _refuse_early_option(prog: str, option: str) -> None:
    """Refuse an option before the command, other than ``--help``."""
    if option.startswith("-") and option not in ("-h", "--help"):
        commands = ", ".join(_COMMANDS)
        _refuse(f"{prog}: {option}: options go after the command: {commands}")


def _config_files(words: Sequence[str]) -> list[str]:
    separate = [
        file for option, file in pairwise(words) if option in ("-c", "--config")
    ]
    joined = [
        argument.removeprefix(_CONFIG)
        for argument in words
        if argument.startswith(_CONFIG)
    ]
    return [*separate, *joined]


def _refuse(line: str) -> NoReturn:
    print(printable(line), file=sys.stderr)
    raise SystemExit(2)


def _add_optimizer_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Add ``--optimizer`` and ``--lr_scheduler``, both optional."""
    # They are made after the module's weights are on their device, not with the other classes.
    later: Keywords = {"instantiate": False, "fail_untyped": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, **later)
    parser.add_subclass_arguments(
        LRScheduler, "lr_scheduler", skip={"optimizer"}, **later
    )
    add_schedule_arguments(parser)


def add_schedule_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Add the options of the scheduler's interval and of the value that it monitors."""
    parser.add_argument(
        "--lr_scheduler_interval",
        type=Literal["epoch", "step"],
        default="epoch",
        help="when the scheduler advances",
    )
    parser.add_argument(
        "--lr_scheduler_monitor",
        type=str | None,
        default=None,
        help="the logged value that ReduceLROnPlateau monitors",
    )


def use_optimizer(
    module: TrainModule,
    values: jsonargparse.Namespace,
    show: Callable[[str], None],
    compose: Callable[[Any, Any, Any], object] | None = None,
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
    optimizer_choice, scheduler_choice = values.optimizer, values.lr_scheduler
    interval, monitor = values.lr_scheduler_interval, values.lr_scheduler_monitor
    if optimizer_choice is None:
        if scheduler_choice is not None:
            raise ConfigurationError(
                "--lr_scheduler needs --optimizer",
                fix="add --optimizer: the scheduler sets its learning rate",
            )
        return
    plateau = scheduler_choice is not None and issubclass(
        class_of(scheduler_choice.class_path), ReduceLROnPlateau
    )
    if plateau and monitor is None:
        # Lightning's subclass of the scheduler takes the monitored value itself.
        monitor = _init_args(scheduler_choice).get("monitor")
    # What `compose` returns may name the value.
    if plateau and monitor is None and compose is None:
        raise ConfigurationError(
            "ReduceLROnPlateau needs --lr_scheduler_monitor",
            fix="pass the name of a logged value",
        )
    if is_overridden("configure_optimizers", module, TrainModule):
        show(
            f"--optimizer is used: {type(module).__name__}.configure_optimizers is not called"
        )

    # A function and not an optimizer: parameters are moved or sharded between here and the call.
    def configure_optimizers() -> object:
        optimizer = _construct(optimizer_choice, module.parameters())
        scheduler = None
        if scheduler_choice is not None:
            scheduler = _construct(scheduler_choice, optimizer)
        if compose is not None:
            return compose(module, optimizer, scheduler)
        if scheduler is None:
            return optimizer
        config = {"scheduler": scheduler, "interval": interval}
        if plateau:
            config["monitor"] = monitor
        return {"optimizer": optimizer, "lr_scheduler": config}

    # On the object: another module of this class keeps its own method.
    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


def _construct(choice: jsonargparse.Namespace, argument: object) -> object:
    """Make an object of a chosen class, with one positional argument before its options."""
    return class_of(choice.class_path)(argument, **_init_args(choice))


def class_of(maker: str | Function) -> Any:
    """Return a class, the class at a path, or a class with the arguments of a function."""
    if isinstance(maker, str):
        module, _, name = maker.rpartition(".")
        return getattr(importlib.import_module(module), name)
    if isinstance(maker, type):
        return maker
    # jsonargparse documents the function but does not list it in `__all__`, which a strict checker wants.
    return jsonargparse.class_from_function(maker)  # type: ignore[attr-defined]


def _init_args(choice: jsonargparse.Namespace) -> Keywords:
    # A choice without arguments of its own is a class_path alone.
    if "init_args" not in choice:
        return {}
    return dict(choice.init_args.as_dict())
