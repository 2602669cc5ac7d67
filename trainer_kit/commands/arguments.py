"""The arguments of a training script: typed by signatures, read from options and files, refused in one line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NoReturn, final

import jsonargparse
import yaml
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

__all__ = ["Arguments", "Parsed"]

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
class Parsed:
    """A parsed command line.

    Args:
        command: fit, validate, test or predict.
        parser: of the command.
        values: as parsed, before objects are made.
    """

    def __init__(self, command: str, parser: jsonargparse.ArgumentParser, values: jsonargparse.Namespace) -> None:
        self.command, self._parser, self._values = command, parser, values

    @property
    def seed(self) -> int | None:
        """For `seed_everything`; None for no seeding."""
        seed = self._values.seed_everything
        return None if seed is False or seed is None else int(seed)

    def entry_point_arguments(self) -> dict[str, Any]:
        """The arguments of the entry point itself."""
        return {name: self._values[name] for name in ("ckpt_path", "load_weights_only") if name in self._values}

    def configuration(self) -> dict[str, Any]:
        """The configuration as ``--config`` reads it, under any command that has its keys."""
        text = self._parser.dump(self._values, skip_unset=False)
        plain: dict[str, Any] = yaml.safe_load(text)
        if not plain.get("load_weights_only"):
            plain.pop("load_weights_only", None)  # only fit has it
        return plain

    def instantiate(self) -> dict[str, Any]:
        """Make Trainer, module and data, in this order; the module has the chosen optimizer.

        Raises:
            ConfigurationError: the choices contradict each other.
        """
        made = self._parser.instantiate(self._values)
        _use_optimizer(made["model"], self._values, made["trainer"].print)
        return {name: made[name] for name in ("trainer", "model", "data") if name in made}


@final
class Arguments:
    """A parser for four commands.

    Args:
        module: the module's class.
        data: the datamodule's class, or None.
        choose_model: whether ``class_path`` chooses a subclass.
        choose_data: the same for the data.
        trainer_defaults: override the defaults of the Trainer.
    """

    def __init__(
        self,
        module: type[Any],
        data: type[Any] | None,
        *,
        choose_model: bool,
        choose_data: bool,
        trainer_defaults: Mapping[str, Any],
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
        self._defaults = {f"trainer.{name}": value for name, value in trainer_defaults.items()}
        text = inspect.getdoc(module) if module.__doc__ else None
        self._parser = _make_parser(description=text and text.partition("\n\n")[0])
        subcommands = self._parser.add_subcommands(required=True, dest="subcommand")
        self._parsers = {name: self._make_command(name) for name in _COMMANDS}
        for name, parser in self._parsers.items():
            subcommands.add_subcommand(name, parser, help=_COMMANDS[name])

    def _make_command(self, command: str) -> jsonargparse.ArgumentParser:
        parser = _make_parser(description=_COMMANDS[command])
        parser.add_argument(
            "--config", action="config", help="a YAML file of these options; may be given several times"
        )
        parser.add_argument(
            "--seed_everything",
            type=int | bool,
            default=0,
            help="seed of Python, NumPy, torch and the order of the data; false seeds none",
        )
        parser.add_class_arguments(Trainer, "trainer", skip=set(_PARTS))
        for name, (kind, default, text) in _PARTS.items():
            parser.add_argument(f"--trainer.{name}", type=kind, default=default, help=text)
        for name, kind in self._kinds.items():
            if name == "trainer.callbacks" or name in _OPTIMIZERS:
                continue
            if self._choose[name]:
                parser.add_subclass_arguments(kind, name, required=True, fail_untyped=False)
            else:
                parser.add_class_arguments(kind, name, fail_untyped=False)
        _add_optimizer_arguments(parser)
        parser.add_argument("--ckpt_path", type=str | None, default=None, help='a path, a URL, "last" or "best"')
        if command == "fit":
            parser.add_argument("--load_weights_only", type=bool, default=False, help="take only the weights from it")
        parser.set_defaults(self._defaults)
        return parser

    def parse(self, words: Sequence[str]) -> Parsed:
        """Read a command line.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one; 0 after ``--help`` and ``--print_config``.
        """
        # The shell does not expand a tilde after "=".
        words = [f"{_CONFIG}{os.path.expanduser(w[len(_CONFIG) :])}" if w.startswith(_CONFIG) else w for w in words]
        files = _config_files(words)
        command = next((word for word in words if word in self._parsers), "fit")
        prog = f"{os.path.basename(sys.argv[0])}{f' {command}' if command in words else ''}"
        early = words[0].partition("=")[0] if words else ""
        if early.startswith("--") and early != "--help":
            _refuse(f"{prog}: {early}: options stand after the command: {', '.join(_COMMANDS)}")
        known = [option for option in self._parsers[command]._option_string_actions if option.startswith("--")]
        try:
            for file in files:
                check_file(file)
            check_words(prog, words)
            check_keys(prog, words, files, known, self._kinds)
            found = self._parser.parse_args(list(words))
            check_keys(prog, words, files, known, self._kinds)  # parsing has imported more classes
        except FileProblem as problem:
            _refuse(str(problem))
        except jsonargparse.ArgumentError as error:
            _refuse(complaint(str(error), prog, words, files, known, self._kinds))
        return Parsed(found.subcommand, self._parsers[found.subcommand], found[found.subcommand])


def _make_parser(description: str | None) -> jsonargparse.ArgumentParser:
    # With abbreviations a misspelt option could match another option.
    return jsonargparse.ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def _config_files(words: Sequence[str]) -> list[str]:
    after = [value for word, value in pairwise(words) if word == "--config"]
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
    parser.add_argument(
        "--lr_scheduler_interval", type=Literal["epoch", "step"], default="epoch", help="when the scheduler advances"
    )
    parser.add_argument(
        "--lr_scheduler_monitor", type=str | None, default=None, help="the logged value that ReduceLROnPlateau looks at"
    )


def _use_optimizer(module: Any, values: Any, show: Callable[[str], None]) -> None:
    """Replace ``configure_optimizers`` of a module by the chosen optimizer and scheduler, if any.

    Args:
        module: the module.
        values: as parsed.
        show: prints a line.

    Raises:
        ConfigurationError: a scheduler without an optimizer, or without a monitored value.
    """
    optimizer, scheduler = values.optimizer, values.lr_scheduler
    interval, monitor = values.lr_scheduler_interval, values.lr_scheduler_monitor
    if optimizer is None:
        if scheduler is not None:
            raise ConfigurationError("--lr_scheduler needs --optimizer", fix="name the optimizer whose rate it sets")
        return
    plateau = scheduler is not None and issubclass(_imported(scheduler), ReduceLROnPlateau)
    if plateau and monitor is None:
        raise ConfigurationError("ReduceLROnPlateau needs --lr_scheduler_monitor", fix="name a value that is logged")
    if is_overridden("configure_optimizers", module, TrainModule):
        show(f"--optimizer counts: {type(module).__name__}.configure_optimizers is not called")

    def configure_optimizers() -> Any:
        made = _imported(optimizer)(module.parameters(), **_init_args(optimizer))
        if scheduler is None:
            return made
        config = {"scheduler": _imported(scheduler)(made, **_init_args(scheduler)), "interval": interval}
        return {"optimizer": made, "lr_scheduler": {**config, "monitor": monitor} if plateau else config}

    module.configure_optimizers = configure_optimizers


def _imported(named: Any) -> Any:
    path, _, name = named.class_path.rpartition(".")
    return getattr(importlib.import_module(path), name)


def _init_args(named: Any) -> dict[str, Any]:
    return dict(named.init_args.as_dict()) if "init_args" in named else {}
