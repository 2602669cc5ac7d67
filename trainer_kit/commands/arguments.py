"""The arguments of a training script: typed from signatures, from options and files, wrong ones told in one line."""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn, final

import jsonargparse
import yaml

from trainer_kit import callbacks as _callbacks
from trainer_kit.commands.complaint import FileProblem, check_file, check_keys, check_words, complaint
from trainer_kit.commands.optimizers import KINDS, add_optimizer_arguments, use_optimizer
from trainer_kit.core.errors import printable
from trainer_kit.core.hooks import Callback
from trainer_kit.trainer import Trainer

__all__ = ["Arguments", "Parsed"]

# No class for an argument that has no type, and none of the classes that jsonargparse knows to run what they are given.
jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])

_CONFIG = "--config="
_VERBS = {
    "fit": "Train.",
    "validate": "Validate.",
    "test": "Test.",
    "predict": "Predict.",
}


class _LoggerClass(ABC):  # noqa: B024  (by structure: jsonargparse wants a class, and a logger need not inherit)
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "log_metrics")


class _StrategyClass(ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "forward_backward")


class _PrecisionClass(ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "forward_context")


_PARTS: Mapping[str, tuple[Any, Any, str]] = {
    "strategy": (_StrategyClass | str, "auto", "a word such as ddp, or a class"),
    "precision": (_PrecisionClass | str | int | None, None, "a word such as bf16-mixed, or a class"),
    "logger": (
        bool | _LoggerClass | str | list[_LoggerClass | str] | None,
        None,
        "true, false, a word such as csv, a class, or several",
    ),
    "callbacks": (Callback | list[Callback] | None, None, "one or several classes"),
    "plugins": (_PrecisionClass | list[_PrecisionClass] | None, None, "a precision's class"),
}


@final
class Parsed:
    """What a command line says.

    Args:
        command: the verb.
        parser: of the verb.
        values: as parsed; nothing is made of them yet.
    """

    def __init__(self, command: str, parser: jsonargparse.ArgumentParser, values: jsonargparse.Namespace) -> None:
        self.command, self._parser, self._values = command, parser, values

    @property
    def seed(self) -> int | None:
        """For `seed_everything`; None for no seeding."""
        seed = self._values.seed_everything
        return None if seed is False or seed is None else int(seed)

    def verb_arguments(self) -> dict[str, Any]:
        """What goes to the verb itself."""
        return {name: self._values[name] for name in ("ckpt_path", "weights_only") if name in self._values}

    def configuration(self) -> dict[str, Any]:
        """Everything, as ``--config`` takes it back under any verb where it can."""
        text = self._parser.dump(self._values, skip_unset=False)
        plain: dict[str, Any] = yaml.safe_load(text)
        if not plain.get("weights_only"):
            plain.pop("weights_only", None)  # only fit knows it
        return plain

    def instantiate(self) -> dict[str, Any]:
        """Trainer, module and data, made in this order; the module has the optimizer that was named.

        Raises:
            ConfigurationError: what was named does not go together.
        """
        made = self._parser.instantiate(self._values)
        use_optimizer(made["model"], self._values, made["trainer"].print)
        return {name: made[name] for name in ("trainer", "model", "data") if name in made}


@final
class Arguments:
    """A parser for four verbs.

    Args:
        module: the module's class.
        data: the datamodule's class, or None.
        choose_model: a subclass is chosen by ``class_path``.
        choose_data: the same of the data.
        trainer_defaults: in place of the Trainer's own.
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
        for name in _callbacks.__all__:  # so that they go by their bare names
            getattr(_callbacks, name)
        self._kinds: dict[str, type[Any]] = {
            "trainer.callbacks": Callback,
            "model": module,
            **({"data": data} if data is not None else {}),
            **KINDS,
        }
        self._choose = {"model": choose_model, "data": choose_data}
        self._defaults = {f"trainer.{name}": value for name, value in trainer_defaults.items()}
        about = inspect.getdoc(module) if module.__doc__ else None
        self._parser = _make_parser(description=about and about.partition("\n\n")[0])
        subcommands = self._parser.add_subcommands(required=True, dest="subcommand")
        self._verbs = {name: self._make_verb(name) for name in _VERBS}
        for name, parser in self._verbs.items():
            subcommands.add_subcommand(name, parser, help=_VERBS[name])

    def _make_verb(self, verb: str) -> jsonargparse.ArgumentParser:
        parser = _make_parser(description=_VERBS[verb])
        parser.add_argument(
            "--config", action="config", help="a YAML file of these options; may be given several times"
        )
        parser.add_argument(
            "--seed_everything",
            type=int | bool,
            default=0,
            help="of Python, NumPy, torch and the order of the data; false leaves them alone",
        )
        parser.add_class_arguments(Trainer, "trainer", skip=set(_PARTS))
        for name, (kind, default, text) in _PARTS.items():
            parser.add_argument(f"--trainer.{name}", type=kind, default=default, help=text)
        for name, kind in self._kinds.items():
            if name == "trainer.callbacks" or name in KINDS:
                continue
            if self._choose[name]:
                parser.add_subclass_arguments(kind, name, required=True, fail_untyped=False)
            else:
                parser.add_class_arguments(kind, name, fail_untyped=False)
        add_optimizer_arguments(parser)
        parser.add_argument("--ckpt_path", type=str | None, default=None, help='a path, a URL, "last" or "best"')
        if verb == "fit":
            parser.add_argument("--weights_only", type=bool, default=False, help="take only the weights from it")
        parser.set_defaults(self._defaults)
        return parser

    def parse(self, words: Sequence[str]) -> Parsed:
        """Read a command line.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one; 0 after ``--help`` and ``--print_config``.
        """
        # The shell leaves a tilde behind "=" alone.
        words = [f"{_CONFIG}{os.path.expanduser(w[len(_CONFIG) :])}" if w.startswith(_CONFIG) else w for w in words]
        files = _config_files(words)
        verb = next((word for word in words if word in self._verbs), "fit")
        prog = f"{os.path.basename(sys.argv[0])}{f' {verb}' if verb in words else ''}"
        early = words[0].partition("=")[0] if words else ""
        if early.startswith("--") and early != "--help":
            _refuse(f"{prog}: {early}: options stand behind the command: {', '.join(_VERBS)}")
        known = [option for option in self._verbs[verb]._option_string_actions if option.startswith("--")]
        try:
            for file in files:
                check_file(file)
            check_words(prog, words)
            check_keys(prog, words, files, known, self._kinds)
            found = self._parser.parse_args(list(words))
            check_keys(prog, words, files, known, self._kinds)  # classes that were imported meanwhile
        except FileProblem as problem:
            _refuse(str(problem))
        except jsonargparse.ArgumentError as error:
            _refuse(complaint(str(error), prog, words, files, known, self._kinds))
        return Parsed(found.subcommand, self._verbs[found.subcommand], found[found.subcommand])


def _make_parser(description: str | None) -> jsonargparse.ArgumentParser:
    # Abbreviated options would take a misspelt one for another.
    return jsonargparse.ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def _config_files(words: Sequence[str]) -> list[str]:
    after = [value for word, value in pairwise(words) if word == "--config"]
    return [*after, *(word.partition("=")[2] for word in words if word.startswith("--config="))]


def _refuse(line: str) -> NoReturn:
    print(printable(line), file=sys.stderr)
    raise SystemExit(2)
