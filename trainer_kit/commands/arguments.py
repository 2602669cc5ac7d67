"""The arguments of a training script: typed by signatures, read from options and files, refused in one line."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, NoReturn, final

import jsonargparse
import yaml
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit import callbacks as _callbacks
from trainer_kit.commands.checkpoint_hparams import (
    CheckpointWords,
    words_from_checkpoint,
)
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, did_you_mean, printable
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Logger
from trainer_kit.core.wings import has_wing
from trainer_kit.core.yaml_guard import YamlProblem, guarded_root
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


_OPTIMIZERS: Final[Mapping[str, type[Any]]] = {
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
}
"""The base class of what each option chooses."""


class _LoggerClass(ABC):  # noqa: B024  (jsonargparse needs a class, but a logger need not inherit from one)
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Logger)


_PARTS: Mapping[str, tuple[Any, Any, str]] = {
    "strategy": (Strategy | str, "auto", "a word such as ddp, or a class"),
    "precision": (
        Precision | str | int | None,
        None,
        "a word such as bf16-mixed, or a class",
    ),
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

    def entry_point_arguments(self) -> dict[str, Any]:
        """The arguments of the entry point itself."""
        return {
            name: self.values[name]
            for name in ("ckpt_path", "load_weights_only")
            if name in self.values
        }

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
        # Import all callbacks, so that their bare names are known.
        for name in _callbacks.__all__:
            getattr(_callbacks, name)
        self._kinds: dict[str, type[Any]] = {
            "trainer.callbacks": Callback,
            "model": module,
            **({"data": data} if data is not None else {}),
            **_OPTIMIZERS,
        }
        self._choose = {"model": choose_model, "data": choose_data}
        self._needs_data = needs_data
        self._defaults = {
            f"trainer.{name}": value for name, value in trainer_defaults.items()
        }
        text = inspect.getdoc(module) if module.__doc__ else None
        description = text and text.partition("\n\n")[0]
        self._extension = extension
        if not extension.commands:
            self._parsers = {"": self._make_command("", description)}
            self.parser = self._parsers[""]
            return
        self.parser = self._make_parser("", description)
        subcommands = self.parser.add_subcommands(required=True, dest="subcommand")
        self._parsers = {
            name: self._make_command(name, about) for name, about in _COMMANDS.items()
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
            options = {k: v for k, v in by_command.items() if k not in _COMMANDS}
        # With abbreviations a misspelt option could match another option.
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
            help="seed of Python, NumPy, torch and the order of the data; false seeds none",
        )
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
            if name == "trainer.callbacks" or name in _OPTIMIZERS:
                continue
            if self._choose[name]:
                required = name == "model" or self._needs_data
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
        options = [
            option
            for option in self._parsers[command]._option_string_actions
            if option.startswith("--")
        ]
        try:
            for file in files:
                _check_file(file)
            _check_words(prog, command_line)
            _check_keys(prog, command_line, files, options, self._kinds)
            hparams = self._from_checkpoint(command, command_line, files, options)
            values = self.parser.parse_args([*command_line, *hparams.options])
            # Parsing has imported more classes, whose keys could not be checked before.
            _check_keys(prog, command_line, files, options, self._kinds)
        except _FileProblem as problem:
            _refuse(str(problem))
        except jsonargparse.ArgumentError as error:
            text = str(error)
            _refuse(_complaint(text, prog, command_line, files, options, self._kinds))
        return self._parsed(values, hparams.line)

    def _find_command(self, command_line: Sequence[str]) -> str:
        if not self._extension.commands:
            return ""
        return next((word for word in command_line if word in self._parsers), "fit")

    def _from_checkpoint(
        self,
        command: str,
        words: Sequence[str],
        files: Sequence[str],
        known: Sequence[str],
    ) -> CheckpointWords:
        if not command:
            return CheckpointWords()
        contents = []
        for file in files:
            with open(file, encoding="utf-8") as stream:
                contents.append(yaml.safe_load(stream) or {})
        kinds = _subclasses(self._kinds["model"]) if self._choose["model"] else None
        return words_from_checkpoint(words, contents, known, kinds)

    def parse_values(self, values: Any) -> Parsed:
        """Read a dict or a namespace in place of command-line words; with commands, ``subcommand`` names one.

        Raises:
            SystemExit: 2 and one line on standard error for a wrong one.
        """
        try:
            return self._parsed(self.parser.parse_object(values))
        except (jsonargparse.ArgumentError, KeyError, TypeError, ValueError) as error:
            _refuse(" ".join(str(error).split()))

    def _parsed(self, values: Any, checkpoint_line: str = "") -> Parsed:
        command = values.subcommand if self._extension.commands else ""
        if command:
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
        _refuse(f"{prog}: {option}: options stand after the command: {commands}")


def _config_files(words: Sequence[str]) -> list[str]:
    separate = [
        file for option, file in pairwise(words) if option in ("-c", "--config")
    ]
    joined = [word.removeprefix(_CONFIG) for word in words if word.startswith(_CONFIG)]
    return [*separate, *joined]


def _refuse(line: str) -> NoReturn:
    print(printable(line), file=sys.stderr)
    raise SystemExit(2)


def _add_optimizer_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Add ``--optimizer`` and ``--lr_scheduler``, both optional."""
    # They are made after the module's weights are on their device, not with the other classes.
    later: dict[str, Any] = {"instantiate": False, "fail_untyped": False}
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
        help="the logged value that ReduceLROnPlateau looks at",
    )


def use_optimizer(
    module: Any,
    values: Any,
    show: Callable[[str], None],
    compose: Callable[[Any, Any, Any], Any] | None = None,
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
        monitor = _init_args(scheduler_choice).get("monitor")  # of Lightning's class
    if plateau and monitor is None and compose is None:
        raise ConfigurationError(
            "ReduceLROnPlateau needs --lr_scheduler_monitor",
            fix="pass the name of a logged value",
        )
    if is_overridden("configure_optimizers", module, TrainModule):
        show(
            f"--optimizer counts: {type(module).__name__}.configure_optimizers is not called"
        )

    def configure_optimizers() -> Any:
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

    module.configure_optimizers = configure_optimizers


def _construct(choice: Any, argument: Any) -> Any:
    """Make an object of a chosen class, with one positional argument before its options."""
    return class_of(choice.class_path)(argument, **_init_args(choice))


def class_of(maker: Any) -> Any:
    """Return a class, the class at a path, or a class with the arguments of a function."""
    if isinstance(maker, str):
        module, _, name = maker.rpartition(".")
        return getattr(importlib.import_module(module), name)
    if isinstance(maker, type):
        return maker
    return jsonargparse.class_from_function(maker)  # type: ignore[attr-defined]


def _init_args(named: Any) -> dict[str, Any]:
    return dict(named.init_args.as_dict()) if "init_args" in named else {}


_MOST_BYTES: Final = 1_000_000
_MOST_DEPTH: Final = 50
_MOST_VALUES: Final = 2_000  # jsonargparse copies a list once for each of its values
_UNTYPED: Final = (inspect.Parameter.empty, Any, "Any", "typing.Any", object, "object")


_NULL: Final = "tag:yaml.org,2002:null"


class _FileProblem(Exception):
    """A configuration file or value that is refused before jsonargparse reads it; its text is the line to print."""


def _check_file(path: str) -> None:
    """Refuse a file that is not YAML, or that would exhaust time or memory.

    Raises:
        _FileProblem: file, line and reason.
    """
    try:
        if not os.path.isfile(path):
            raise _FileProblem(f"{path}: the file does not exist")
        if os.path.getsize(path) > _MOST_BYTES:
            raise _FileProblem(
                f"{path}: larger than {_MOST_BYTES // 1000} kB, which no configuration is"
            )
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise _FileProblem(f"{path}: it cannot be read: {error}") from error
    try:
        root = guarded_root(text, _MOST_VALUES, _MOST_DEPTH)
    except YamlProblem as problem:
        kind = "" if problem.too_much else "this is not YAML: "
        raise _FileProblem(f"{path}:{problem.line}: {kind}{problem.reason}") from None
    _check_nodes(path, root)


def _check_words(prog: str, words: Sequence[str]) -> None:
    """Refuse values on the command line that would exhaust time or memory.

    Raises:
        _FileProblem: option and reason.
    """
    for option, value in _options_with_values(words):
        try:
            guarded_root(value, _MOST_VALUES, _MOST_DEPTH)
        except YamlProblem as problem:
            if problem.too_much:  # other values may be plain texts
                raise _FileProblem(f"{prog}: {option}: {problem.reason}") from None


def _check_keys(
    prog: str,
    words: Sequence[str],
    files: Iterable[str],
    options: Iterable[str],
    kinds: Mapping[str, type[Any]],
) -> None:
    """Refuse keys that jsonargparse would ignore: unknown ones without a value, and classes for untyped arguments.

    Raises:
        _FileProblem: place and reason.
    """
    keys = _Keys([option.removeprefix("--") for option in options], kinds)
    for file in files:
        keys.check(
            _root(file),
            "",
            lambda key, line, file=file: f"{file}:{line}: {key}",  # type: ignore[misc]
        )
    for option, value in _options_with_values(words):
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, OverflowError):
            continue
        keys.check(
            node,
            option.removeprefix("--").rstrip("+"),
            lambda key, _: f"{prog}: --{key}",
        )


def _options_with_values(words: Sequence[str]) -> list[tuple[str, str]]:
    """The options on the command line, and their values."""
    joined = [
        word.partition("=")[::2]
        for word in words
        if word.startswith("--") and "=" in word
    ]
    separate = [
        (word, value)
        for word, value in pairwise(words)
        if word.startswith("--") and "=" not in word
    ]
    return [
        (option, value)
        for option, value in [*joined, *separate]
        if option != "--config"
    ]


def _check_nodes(path: str, root: yaml.Node | None) -> None:
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise _FileProblem(f"{path}:1: there must be keys and values at the top")
    visited: set[int] = set()  # an alias of YAML repeats a node
    pending: list[yaml.Node] = [root]
    while pending:
        node = pending.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            tag = _short(node.tag.replace("tag:yaml.org,2002:", "!!"))
            raise _FileProblem(
                f"{path}:{node.start_mark.line + 1}: {tag}: this tag is not read; a class is a class_path"
            )
        if isinstance(node, yaml.MappingNode):
            _check_mapping_keys(path, node)
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    pending.append(key)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _check_mapping_keys(path: str, node: yaml.MappingNode) -> None:
    """Refuse a key that is no text, or that stands twice in one mapping."""
    keys: set[str] = set()
    for key, _ in node.value:
        is_text = isinstance(key, yaml.ScalarNode) and key.tag != _NULL
        position = f"{path}:{key.start_mark.line + 1}"
        if not is_text:
            raise _FileProblem(f"{position}: a key must be a word")
        if key.value in keys:
            raise _FileProblem(f"{position}: {_short(key.value)}: given twice")
        keys.add(key.value)


def _complaint(
    text: str,
    prog: str,
    words: Sequence[str],
    files: Sequence[str],
    options: Iterable[str],
    kinds: Mapping[str, type[Any]],
) -> str:
    """Turn a message of jsonargparse, which has many lines, into one line.

    Args:
        text: the message.
        prog: the script, and its command.
        words: the command line.
        files: configuration files in it.
        options: every option of the command.
        kinds: by key, the base class of the classes that can be chosen there.
    """
    if match := re.search(r"unrecognized arguments: (\S+)", text):
        name = match[1].partition("=")[0]
        if not name.startswith("--"):
            return f"{prog}: {_short(name)}: unexpected"
        return f"{prog}: {name}: unknown option{_suggestion(name, options)}"
    if match := re.search(
        r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*?)\)", text
    ):
        name = match[1]
        suggestion = _suggestion(name, re.findall(r"\w+", match[2]))
        return f"{prog}: {_short(name)}: unknown command{suggestion}"
    if match := re.search(r'expected "subcommand" to be one of \{(.*?)\}', text):
        commands = match[1].replace(",", ", ")
        return f"{prog}: a command is missing: {commands}; see --help"
    if match := re.search(r"does not accept option '([^']+)'", text):
        keys: set[str] = set()
        for option in options:
            keys.update(_prefixes(option.removeprefix("--")))
        prefixes = _prefixes(match[1])
        unknown = next((prefix for prefix in prefixes if prefix not in keys), match[1])
        location = _locate(unknown, prog, words, files)
        return f"{location}: unknown key{_suggestion(unknown, keys)}"
    chain = re.findall(r'Parser key "([^"]+)":', text)
    if chain:
        inner_key, problem = _inner_problem(text, chain, kinds)
        return f"{_locate(chain[0], prog, words, files, inner_key)}: {problem}"
    if match := re.search(r"the following arguments are required: (.*)", text):
        names = [name.strip() for name in match[1].split(",")]
        required = [f"--{name.partition('.')[2] or name}" for name in names]
        return f"{prog}: {', '.join(required)}: required"
    if match := re.search(r"argument (\S+?):? (expected .*)", text):
        return f"{prog}: {match[1].rstrip(':')}: {match[2]}"
    if match := re.search(r'Spaces not allowed in keys: "(.*)"', text):
        location = _locate(match[1], prog, words, files, anywhere=True)
        return f"{location}: a key must be a word"
    return f"{', '.join(files) or prog}: {_short(text, 300)}"


def _inner_problem(
    text: str, chain: Sequence[str], kinds: Mapping[str, type[Any]]
) -> tuple[str | None, str]:
    """The innermost key, and its problem."""
    classes = re.findall(r"Problem with given class_path '([^']+)'", text)
    if classes:
        problem = _class_problem(text, classes[-1])
        if problem is not None:
            return problem
    if match := re.search(r"Expected a dot import path string: (\S+)", text):
        names = [cls.__name__ for cls in _subclasses(kinds.get(chain[0]))]
        public = {name for name in names if not name.startswith("_")}
        suggestion = _suggestion(match[1], public, "write package.module.Class")
        return None, f"no class is called {match[1]!r}{suggestion}"
    value = re.search(r"Given value: (.*?)\s*$", text, re.M)
    if match := re.search(
        r"Import path (?:\S+ )?does not correspond to a subclass of (\w+)", text
    ):
        subject = _short(value[1]) if value else "this class"
        return None, f"{subject} is not a subclass of {match[1]}"
    if match := re.search(
        r"(?:No module named|module) '[^']+'(?: has no attribute '[^']+')?", text
    ):
        subject = classes[-1] if classes else chain[0]
        return None, f"{subject} cannot be imported: {match[0]}"
    key = chain[-1]
    match = re.search(r"Expected (?:an? )?(.+?)\. Got value: (.*)", text)
    if len(chain) > 1 and match:
        shown = _display_value(match[2], key)
        return key, f"{key}: expected {_type_name(match[1])}, found {shown}"
    value = value or re.search(r"Got value: (.*?)\s*$", text, re.M)
    expected = re.findall(r"Expected (?:an? )?(<class '[^']+'>)", text)
    if expected and value:
        types = " or ".join(dict.fromkeys(map(_type_name, expected)))
        return None, f"expected {types}, found {_display_value(value[1], key)}"
    return None, _short(re.sub(r'Parser key "[^"]+":', "", text), 300)


def _class_problem(text: str, path: str) -> tuple[str | None, str] | None:
    """The key and the problem of a wrong or missing argument of a class."""
    if match := re.search(r"Option '([^']+)' is not accepted", text):
        name = match[1]
        suggestion = _suggestion(name, _parameter_names(_imported(path)))
        return name, f"{path} does not take {name!r}{suggestion}"
    if match := re.search(r"following arguments are required: (.*)", text):
        return None, f"{path} needs {match[1]}"
    return None


def _type_name(text: str) -> str:
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", text)
    return "null" if name == "NoneType" else name


def _locate(
    key: str,
    prog: str,
    words: Sequence[str],
    files: Sequence[str],
    inner: str | None = None,
    anywhere: bool = False,
) -> str:
    """The option, or the line of the file, that contains ``key``."""
    for word in words:
        option = word.partition("=")[0].removeprefix("--").rstrip("+")
        if option.startswith(key):
            return f"{prog}: --{key}"
    for file in reversed(files):
        line = _find_line(file, "", key) if anywhere else _find_line(file, key, inner)
        if line is not None:
            return f"{file}:{line}: {key}"
    return f"{files[-1] if files else prog}: {key}"


def _find_line(file: str, key: str, inner: str | None) -> int | None:
    """The line of a key, or of the first ``inner`` below it; None if the file lacks it."""
    node = _root(file)
    line = None
    while key:  # a key may itself contain dots
        entries = (_entry(node, prefix) for prefix in _prefixes(key))
        entry = next(filter(None, entries), None)
        if entry is None:
            return None
        key_node, node = entry
        line = key_node.start_mark.line + 1
        key = key[len(key_node.value) + 1 :]
    pending = [node] if inner else []
    while pending:
        node = pending.pop(0)
        entry = _entry(node, inner or "")
        if entry is not None:
            return int(entry[0].start_mark.line) + 1
        pending += [value for _, value in _pairs(node)]
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
    return line


def _root(file: str) -> Any:
    with open(file, encoding="utf-8") as stream:
        return yaml.compose(stream, Loader=yaml.SafeLoader)


def _entry(node: Any, name: str) -> Any:
    return next(
        (pair for pair in _pairs(node) if f"{pair[0].value}.".startswith(f"{name}.")),
        None,
    )


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _suggestion(name: str, names: Iterable[str], otherwise: str = "see --help") -> str:
    former = name.removeprefix("--").partition("trainer.")[2]
    if former and has_wing("compat"):
        from trainer_kit.compat.lightning import FORMER_ARGUMENTS

        if former in FORMER_ARGUMENTS:
            return f"; instead of it: {FORMER_ARGUMENTS[former].format(value='...')}"
    near = did_you_mean(name, names, otherwise="")
    return f", {near}" if near else f"; {otherwise}"


def _display_value(value: str, key: str) -> str:
    """A value for the message; nested values are left out, because some may be secrets."""
    if value.startswith(("{", "[", "Namespace(", "NestedArg(")):
        return "what was given"
    return _short(mask_secrets(value, key.rpartition(".")[2]))


def _short(value: Any, max_length: int = 80) -> str:
    return printable(" ".join(str(value).split()), max_length)


@final
class _Keys:
    """Refuses unknown keys with an empty mapping, and classes for arguments without a type.

    jsonargparse drops the former, and instantiates or passes on any class for the latter.

    Args:
        options: every option, without ``--``.
        kinds: by key, the base class of what is made there.
    """

    def __init__(self, options: Iterable[str], kinds: Mapping[str, type[Any]]) -> None:
        keys = {option for option in options if not option.endswith(".help")}
        parents: set[str] = set()
        for key in keys:
            parents.update(_prefixes(key)[:-1])
        self._known_keys = keys | parents
        self._leaves = keys - parents
        self._kinds = kinds

    def check(self, node: Any, key: str, locate: Callable[[str, int], str]) -> None:
        """Check a node of PyYAML.

        Args:
            node: of a file, or of the value of an option.
            key: the path to it; empty for a whole file.
            locate: returns a text from a key and its line, from 1.

        Raises:
            _FileProblem: its place and the reason.
        """
        self._locate = locate
        outer, _, name = key.rpartition(".")
        if outer in self._kinds:
            self._check_class(self._kinds[outer], name, node, key, 1)
        self._check_below(node, key)

    def _refuse(self, key: str, line: int, reason: str) -> None:
        raise _FileProblem(f"{self._locate(key, line)}: {reason}")

    def _check_below(self, node: Any, key: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._check_below(item, key)
        pairs = _pairs(node)
        paths = (
            str(value.value) for name, value in pairs if name.value == "class_path"
        )
        path = next(paths, None)
        if path is None:
            self._check_entries(pairs, key)
            return
        kind = self._class(path)
        for name, value in pairs:
            if name.value == "init_args":
                self._check_arguments(value, key, path, kind)
            elif name.value == "dict_kwargs":
                self._check_arguments(value, key, path, None)
            else:
                self._check_below(
                    value, f"{key}.{name.value}" if key else str(name.value)
                )

    def _check_entries(self, pairs: Sequence[tuple[Any, Any]], outer: str) -> None:
        """Check the keys of a mapping that chooses no class."""
        kind = self._kinds.get(outer)
        for name, value in pairs:
            key = f"{outer}.{name.value}" if outer else str(name.value)
            line = name.start_mark.line + 1
            if _is_empty(value) and not self._is_known(key):
                near = did_you_mean(key, self._known_keys, otherwise="see --help")
                self._refuse(key, line, f"unknown key, {near}")
            if kind is not None:
                self._check_class(kind, name.value, value, key, line)
            self._check_below(value, key)

    def _is_known(self, key: str) -> bool:
        """Whether a key is one of the options, or lies inside the value of one."""
        if key in self._known_keys:
            return True
        return any(prefix in self._leaves for prefix in _prefixes(key)[:-1])

    def _check_arguments(self, node: Any, key: str, path: str, kind: Any) -> None:
        for name_node, value in _pairs(node):
            if kind is not None:
                self._check_argument(name_node, value, key, path, kind)
            self._check_below(value, key)

    def _check_argument(
        self, name_node: Any, value: Any, key: str, path: str, kind: Any
    ) -> None:
        name = name_node.value
        line = name_node.start_mark.line + 1
        if _is_empty(value) and not _takes(kind, name):
            names = _parameter_names(kind)
            near = did_you_mean(name, names, otherwise="see --help")
            self._refuse(key, line, f"{path} does not take {name!r}, {near}")
        self._check_class(kind, name, value, f"{key}.{name}", line)

    def _check_class(
        self, kind: Any, name: str, value: Any, key: str, line: int
    ) -> None:
        chooses_class = any(inner.value == "class_path" for inner, _ in _pairs(value))
        if chooses_class and _annotation(kind, name) in _UNTYPED:
            reason = f"{name!r} of {kind.__name__} has no type, so no class is made for it; annotate it with one"
            self._refuse(key, line, reason)

    def _class(self, path: str) -> Any:
        """An imported class by its path, or a known class by its bare name."""
        if "." in path:
            return _imported(path)
        for kind in self._kinds.values():
            for cls in _subclasses(kind):
                if cls.__name__ == path:
                    return cls
        return None


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _is_empty(node: Any) -> bool:
    return isinstance(node, yaml.MappingNode) and all(
        _is_empty(value) for _, value in node.value
    )


def _constructors(kind: Any) -> list[tuple[str, Mapping[str, inspect.Parameter]]]:
    """The module and the parameters of each constructor in a class's method resolution order."""
    constructors: list[tuple[str, Mapping[str, inspect.Parameter]]] = []
    for base in getattr(kind, "__mro__", ()):
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters
            constructors.append((base.__module__, parameters))
    return constructors


def _annotation(kind: Any, name: str) -> Any:
    """The annotation of an argument of a constructor; None if no constructor names it."""
    for _, parameters in _constructors(kind):
        if name in parameters:
            return parameters[name].annotation
    return None


def _takes(kind: Any, name: str) -> bool:
    # torch's constructors take any keyword only to refuse it.
    signatures = [
        parameters
        for module, parameters in _constructors(kind)
        if not module.startswith("torch.")
    ]
    if not signatures or any(name in parameters for parameters in signatures):
        return True
    outermost = signatures[-1].values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in outermost)


def _parameter_names(kind: Any) -> list[str]:
    """The parameters of the constructors of a class and of its bases."""
    names: list[str] = []
    for _, parameters in _constructors(kind):
        names += parameters
    return names


def _prefixes(key: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    names = key.split(".")
    return [".".join(names[:n]) for n in range(1, len(names) + 1)]


def _subclasses(kind: type[Any] | None) -> list[type[Any]]:
    """A class and all its imported subclasses."""
    classes: list[type[Any]] = []
    pending = [] if kind is None else [kind]
    while pending:
        cls = pending.pop()
        classes.append(cls)
        pending += cls.__subclasses__()
    return classes
