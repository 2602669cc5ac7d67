"""Writes the pages of docs/reference that are tables of the code, for ``make docs``.

``index.md`` has every public name, ``commands.md`` every command and option, ``configuration.md`` every key of the
files of ``trainer-kit launch``, ``script-files.md`` every key of the files of ``tk.cli``. The other pages are
directives for mkdocstrings, which reads the docstrings when the site is built.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import click

from trainer_kit import callbacks, loggers
from trainer_kit.commands.arguments import Arguments
from trainer_kit.commands.main import main
from trainer_kit.core import lazy
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Duration
from trainer_kit.launch.options import SECTIONS, TOP, Option, positive
from trainer_kit.strategies.megatron.config import _REFUSED as MEGATRON_REFUSED

PAGES = Path(__file__).with_name("reference")
DIRECTIVE: Final = re.compile(r"^::: (trainer_kit\.[\w.]+)$", re.M)
MARK: Final = (
    "<!-- Written by docs/generate_reference.py; `make docs` writes it again. -->"
)


def directives() -> Iterator[tuple[Path, str]]:
    """The name of every mkdocstrings directive, with its page."""
    for page in sorted(PAGES.glob("*.md")):
        for name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            yield page, name


def resolve(name: str) -> Any:
    """The object of a dotted name."""
    value: Any = importlib.import_module("trainer_kit")
    for attribute in name.split(".")[1:]:
        if not hasattr(value, attribute):
            importlib.import_module(f"{value.__name__}.{attribute}")
        value = getattr(value, attribute)
    if isinstance(
        value, lazy._Names
    ):  # `trainer_kit.cli`, after Lightning's module of that path was imported
        value = lazy._FINDERS["trainer_kit"].get(value.__name__, "__call__")
    return value


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


def index() -> str:
    """Every public name, what it is, and where it is described."""
    rows = []
    for page, name in sorted(
        directives(), key=lambda each: each[1].rpartition(".")[2].lower()
    ):
        lines = (inspect.getdoc(resolve(name)) or "").partition("\n\n")[0]
        short = name.removeprefix("trainer_kit.")
        rows.append(f"| [`{short}`]({page.name}#{name}) | {_cell(lines)} |")
    pages = []
    for page in sorted(PAGES.glob("*.md")):
        if page.name != "index.md":
            title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            pages.append(f"- [{title}]({page.name})")
    return "\n".join(
        [
            "# Reference",
            "",
            MARK,
            "",
            "Find a name in the table below, or use the search. Arguments and methods are documented with their class;",
            "[hooks](../hooks.md) are listed with their place in the loop.",
            "",
            *pages,
            "",
            "## Every public name",
            "",
            "`import trainer_kit as tk`; a name below is an attribute of `tk`.",
            "",
            "| name | what it is |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _context(command: click.Command, **options: Any) -> click.Context:
    """With the names of the help option: click keeps the option that a command's first context makes."""
    return click.Context(
        command, help_option_names=main.context_settings["help_option_names"], **options
    )


def all_commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """A command and its subcommands, depth first, with what a user types."""
    path = (*path, command.name or "")
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name in command.list_commands(_context(command)):
            found = command.get_command(_context(command), name)
            assert found is not None
            yield from all_commands(found, path)


def _usage(typed: str, command: click.Command) -> str:
    pieces = command.collect_usage_pieces(_context(command, info_name=typed))
    return " ".join([typed, *pieces])


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    kind = (
        ""
        if option.is_flag or option.count
        else option.make_metavar(click.Context(click.Command("x")))
    )
    default = (
        option.default
        if isinstance(option.default, (str, int, float)) and not option.is_flag
        else ""
    )
    return f"| {names} | {_cell(kind)} | {f'`{default}`' if default != '' else ''} | {_cell(option.help or '')} |"


def commands() -> str:
    """Every command with its options."""
    main.name = "trainer-kit"
    parts = [
        "# Commands\n",
        MARK + "\n",
        "To launch a run or manage its files from a shell, use `trainer-kit`, or `python -m trainer_kit`."
        " [The command line](../guide/command-line.md) explains each command.\n",
    ]
    for typed, command in all_commands(main):
        parts += [f"## `{typed}`\n", f"```text\n{_usage(typed, command)}\n```\n"]
        parts.append(
            inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "")
            + "\n"
        )
        shown = [each for each in command.params if isinstance(each, click.Option)]
        listed = [each for each in shown if not each.hidden]
        if listed:
            rows = [_option(option) for option in listed]
            parts.append(
                "\n".join(
                    [
                        "| option | value | default | what it does |",
                        "|---|---|---|---|",
                        *rows,
                        "",
                    ]
                )
            )
        if len(listed) < len(shown):
            text = "Every key of [a configuration file](configuration.md) that has a flag there is an option too."
            parts.append(text + "\n")
    return "\n".join(parts)


_KINDS: Final[dict[Callable[[str], Any], str]] = {
    str: "text",
    positive: "an integer ≥ 1",
}


def _kind(option: Option) -> str:
    if option.words:
        return ", ".join(f"`{word}`" for word in option.words)
    if option.free:
        return "a mapping or a list"
    if option.switch or option.read.__name__ == "_boolean":
        return "`true`, `false`"
    kind = _KINDS.get(option.read, "an integer" if option.whole else "a number")
    if option.read.__name__ == "_streams":
        kind = "0 to 3, or `RANK:NUMBER`"
    if option.read.__name__ == "convert":
        kind = "a number, `auto` or `none`"
    return f"a list of {kind}" if option.many else kind


# Sentences for the keys that have none in the table of `trainer_kit/launch/options.py`: that text is for `--help`.
_TEXTS: Final = {
    "compute_environment": "Where the run is; `AMAZON_SAGEMAKER` is printed as a job, and not started.",
    "distributed_type": "How the model is distributed, and on which devices; `TP` is refused.",
    "main_training_function": "no effect: the script is run, with its main part",
    "use_parallelism_config": "Whether a size in `parallelism_config` is above 1; refused where none is.",
    "rdzv_backend": "`static`; `c10d` has no effect, because machines meet in a store of this launcher.",
    "rdzv_conf": "`timeout=SECONDS`: how long machines wait for each other.",
    "monitor_interval": "Seconds between two looks at the processes, 0.1 by default.",
    "role": "The word before the rank in the lines that `tee` prints.",
    "tee": "Outputs of each rank that go to a file and to the console: 1 stdout, 2 stderr, 3 both.",
    "log_dir": "The directory of these files; a new temporary one by default.",
    "same_network": "no effect: `main_process_ip` is enough",
    "tpu_use_cluster": "Refused with TPUs: the machines of a pod are not started from here.",
    "tpu_use_sudo": "no effect: the machines of a TPU pod are not started from here",
    "tpu_env": "Variables for the script, each as `NAME=TEXT`.",
    "tpu_config_file": "A file in the same directory whose `tpu_...` keys are added.",
    "environment": "Variables for the script, as a mapping; they also apply when devices are counted.",
    "command_file": "A file with the commands of `tpu-config`, one on each line.",
    "commands": "The commands of `tpu-config`.",
    "fp16": "`true` is `mixed_precision: fp16`, as in old files.",
    "ec2_instance_type": "The type of the machines; required.",
    "iam_role_name": "The role of the job; required.",
    "image_uri": "The container image, in place of the one of the versions below.",
    "profile": "The profile in `~/.aws/credentials`.",
    "region": "The AWS region, `us-east-1` by default.",
    "base_job_name": "The first part of the job's name.",
    "pytorch_version": "The version of PyTorch in the image.",
    "transformers_version": "The version of transformers in the image.",
    "py_version": "The version of Python in the image, such as `py310`.",
    "sagemaker_inputs_file": "A file with tabs: the names of the job's inputs, and where they are.",
    "sagemaker_metrics_file": "A file with tabs: metrics, and the expressions that find them in the log.",
    "additional_args": "Further arguments of SageMaker's estimator.",
    "aws_access_key_id": "Refused: other users of the machine see a command line; use `profile`.",
    "aws_secret_access_key": "Refused, as `aws_access_key_id`.",
    "dynamo_mode": "The `mode` of `torch.compile`.",
    "dynamo_use_fullgraph": "Raise an error where the graph breaks.",
    "dynamo_use_dynamic": "Compile for changing shapes.",
    "dynamo_use_regional_compilation": "Compile each repeated block once, instead of the whole model.",
    "fsdp_version": "no effect: this is FSDP2",
    "fsdp_sharding_strategy": "What is sharded, and over which ranks, in the words of FSDP1.",
    "fsdp_reshard_after_forward": "Free gathered parameters after the forward; or a sharding strategy, as in FSDP1.",
    "fsdp_offload_params": "Keep shards, gradients and optimizer states in host memory.",
    "fsdp_min_num_params": "The smallest unit for `SIZE_BASED_WRAP`, 100,000,000 parameters by default.",
    "fsdp_auto_wrap_policy": "How units are chosen: by class, by size, or the whole model as one.",
    "fsdp_transformer_layer_cls_to_wrap": "The classes of the units, with commas between them.",
    "fsdp_backward_prefetch": "no effect: FSDP2 gathers the next unit ahead by itself",
    "fsdp_state_dict_type": "no effect: a checkpoint loads under any strategy",
    "fsdp_forward_prefetch": "no effect: FSDP2 gathers the next unit ahead by itself",
    "fsdp_use_orig_params": "no effect: parameters keep their names and objects",
    "fsdp_cpu_ram_efficient_loading": "no effect: FSDP2 needs no switch for it",
    "fsdp_sync_module_states": "no effect: all ranks start with the weights of rank 0",
    "fsdp_activation_checkpointing": "Recompute the activations of the units in the backward pass.",
    "fsdp_activation_checkpointing_offload": "Keep the inputs of these units in host memory until the backward pass.",
    "fsdp_ignored_modules": "A regular expression of the names of modules that are not sharded.",
    "zero_stage": "The stage of ZeRO, 0 to 3; 2 by default.",
    "offload_optimizer_device": "Where optimizer states are kept; `nvme` is refused.",
    "offload_param_device": "Where parameters are kept under stage 3; `nvme` is refused.",
    "gradient_accumulation_steps": "Micro-batches of an optimizer step, in place of the key of the top level.",
    "gradient_clipping": "The largest gradient norm of every step.",
    "zero3_init_flag": "Shard models of transformers while they are created.",
    "offload_optimizer_nvme_path": "Refused, as `nvme` is.",
    "offload_param_nvme_path": "Refused, as `nvme` is.",
    "deepspeed_config_file": "DeepSpeed's own JSON file.",
    "deepspeed_moe_layer_cls_names": "Classes of expert layers, with commas between; each is gathered as one unit.",
    "megatron_lm_tp_degree": "The ranks that split each layer.",
    "megatron_lm_sequence_parallelism": "These ranks also split norms and dropout along the sequence.",
    "megatron_lm_use_distributed_optimizer": "Shard the optimizer over the data ranks.",
    "megatron_lm_gradient_clipping": "The largest gradient norm, 1 by default; 0 for none.",
    "megatron_lm_calculate_per_token_loss": "no effect: losses are always weighted by their terms",
    "fp8_backend": "The library of fp8: `AO` (torchao) by default, `TE` (Transformer Engine); `MSAMP` is refused.",
    "fp8_use_autocast_during_eval": "Transformer Engine: compute in fp8 in evaluation too.",
    "fp8_margin": "Transformer Engine: the margin of the scales, in powers of two.",
    "fp8_interval": "no effect: Transformer Engine updates the scales in each step",
    "fp8_format": "Transformer Engine: `HYBRID` or `E4M3`.",
    "fp8_amax_history_len": "Transformer Engine: the steps whose largest values are kept.",
    "fp8_amax_compute_algo": "Transformer Engine: how a scale is computed from them.",
    "fp8_override_linear_precision": "Transformer Engine: three values, of which none may be true.",
    "fp8_opt_level": "Of MS-AMP, which is refused.",
    "fp8_pad_inner_dim": "torchao: pad batches whose number of rows is not a multiple of 16.",
    "parallelism_config_dp_replicate_size": "Replicas of all the axes below.",
    "parallelism_config_dp_shard_size": "Ranks that shard parameters, gradients and optimizer states.",
    "parallelism_config_tp_size": "Ranks that split each layer (tensor parallelism).",
    "parallelism_config_cp_size": "Ranks that split each sequence (context parallelism).",
    "parallelism_config_sp_size": "Refused above 1: use `cp_size`.",
    "parallelism_config_sp_seq_length": "no effect: `sp_size` is refused",
    "parallelism_config_cp_backend": "`torch`; others are refused.",
    "parallelism_config_cp_comm_strategy": "no effect: the number of heads decides how sequences are exchanged",
    "parallelism_config_sp_backend": "no effect: `sp_size` is refused",
    "parallelism_config_sp_attn_implementation": "no effect: `sp_size` is refused",
    "parallelism_config_sp_seq_length_is_variable": "no effect: `sp_size` is refused",
}


def _text(option: Option) -> str:
    """What a key does, in a sentence; for those that Megatron refuses, what to use instead."""
    if option.ignored:
        return f"no effect: {option.ignored}"
    instead = MEGATRON_REFUSED.get(option.name)
    return option.help or (
        f"Refused, unless it is off or 1: {instead}."
        if instead
        else _TEXTS[option.name]
    )


def _key(option: Option) -> str:
    flags = (f"--{option.name}",) if option.flags is None else option.flags
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    return f"| {names} | {', '.join(f'`{flag}`' for flag in flags)} | {_cell(_kind(option))} | {_cell(_text(option))} |"


def configuration() -> str:
    """Every key of a configuration file."""
    head = ["| key | flag | value | what it does |", "|---|---|---|---|"]
    parts = [
        "# Keys of configuration files\n",
        MARK + "\n",
        "To launch a script with a configuration file, pass the file to `trainer-kit launch --config_file FILE`, or"
        " write the default file with `trainer-kit config`. Keys are Accelerate's, so its files work unchanged."
        " [The command line](../guide/command-line.md#configuration-files) says"
        " which file is read, and the precedence of options.\n",
        "Configuration files for a script's own command line (`tk.cli`, `LightningCLI`) have"
        " [other keys](script-files.md).\n",
        "## Top level\n",
        "The keys from `ec2_instance_type` on describe"
        " [a job on SageMaker](../guide/command-line.md#a-job-on-sagemaker). `commands` and `command_file` are for"
        " [`trainer-kit tpu-config`](../guide/command-line.md#trainer-kit-tpu-config-the-command-for-a-tpu-pod).\n",
        "\n".join([*head, *(_key(option) for option in TOP.values()), ""]),
    ]
    for section, options in SECTIONS.items():
        parts += [
            f"## `{section}`\n",
            "\n".join([*head, *(_key(option) for option in options.values()), ""]),
        ]
    return "\n".join(parts)


# What a value of a type is in a file; the members of a union are listed one after the other.
_VALUES: Final = {
    bool: "`true`, `false`",
    int: "an integer",
    float: "a number",
    str: "text",
    NoneType: "`null`",
    Any: "text, a number, a list or a mapping",
    Mapping: "a mapping",
    Collection: "a list",
    timedelta: "",  # as text
    Callable: "",  # in code only
    type: "",
}


def _values(kind: Any) -> list[str]:
    if kind in _VALUES:
        return [_VALUES[kind]] if _VALUES[kind] else []
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [f"`{word}`" for word in members]
    if origin is None:
        return (
            [] if kind in (Duration, os.PathLike) else ["`class_path` and `init_args`"]
        )
    if isinstance(origin, type) and origin in _VALUES:
        return _values(origin)
    if isinstance(origin, type) and issubclass(origin, Collection):
        return _values(Collection)
    if origin is os.PathLike:
        return []
    words = dict.fromkeys(word for member in members for word in _values(member))
    return [
        *(word for word in words if word != "`null`"),
        *(["`null`"] if "`null`" in words else []),
    ]


def script_keys() -> dict[str, tuple[Any, list[str]]]:
    """Every key of a file for ``tk.cli``: the option of the parser, and the commands that have it."""
    made = Arguments(
        TrainModule,
        DataModule,
        choose_model=True,
        choose_data=True,
        trainer_defaults={},
    )
    found: dict[str, tuple[Any, list[str]]] = {}
    for command, parser in made._parsers.items():
        for action in parser._actions:
            # Those without a type are --help, --config and --print_config, which no file has, and `trainer`, a section.
            if getattr(
                action, "_typehint", None
            ) is not None and not action.dest.endswith(".help"):
                found.setdefault(action.dest, (action, []))[1].append(command)
    return found


def script_files() -> str:
    """Every key of a configuration file of a script."""
    head = ["| key | value | default | |", "|---|---|---|---|"]
    texts = {
        "model": "Arguments of your module; with `subclass_mode_model=True` the class too.",
        "data": "Arguments of your datamodule; with `subclass_mode_data=True` the class too.",
        "optimizer": "The optimizer of all parameters, if the module has no `configure_optimizers`.",
        "lr_scheduler": "The scheduler of that optimizer.",
    }
    rows: dict[bool, list[str]] = {True: [], False: []}
    for key, (action, commands) in script_keys().items():
        text = texts.get(key, action.help)
        if len(commands) == 1:
            text = f"{text}; for `{commands[0]}` only"
        default = "" if action.default is None else f"`{json.dumps(action.default)}`"
        values = (
            ", ".join(_values(action._typehint))
            if key not in ("model", "data")
            else "a mapping"
        )
        rows[key.startswith("trainer.")].append(
            f"| `{key.removeprefix('trainer.')}` | {_cell(values)} | {default} | {_cell(text)} |"
        )
    names = {
        room.__name__.rpartition(".")[2]: ", ".join(
            f"`{name}`" for name in room.__all__ if _is_chosen(room, name)
        )
        for room in (callbacks, loggers)
    }
    return "\n".join(
        [
            "# Keys of a script's files\n",
            MARK + "\n",
            "To set the arguments of a script in a YAML file, use `tk.cli` or `LightningCLI` in the script:"
            " `python train.py fit --config FILE`. Each key is an option too: `--trainer.max_epochs=3`."
            " [Command-line arguments for your script](../guide/cli.md) explains both; `trainer-kit launch` files have"
            " [other keys](configuration.md).\n",
            "## Top level\n",
            "\n".join([*head, *rows[False], ""]),
            "Under `model` and `data` the keys are the arguments of your classes. A chosen class is a mapping:"
            " `class_path` names it, `init_args` has its arguments. `LightningCLI` has the keys that"
            " `add_arguments_to_parser` adds, too.\n",
            "## `trainer`\n",
            "The arguments of the [`Trainer`](trainer.md).\n",
            "\n".join([*head, *rows[True], ""]),
            "## Classes by their names\n",
            f"As items of `trainer.callbacks` these need no module in `class_path`: {names['callbacks']}.\n",
            f"As `trainer.logger`, with `trainer_kit.loggers.` before the name: {names['loggers']}.\n",
        ]
    )


def _is_chosen(room: Any, name: str) -> bool:
    """Whether a name of a package is a class to be made, not one to be extended."""
    value = getattr(room, name)
    return (
        inspect.isclass(value)
        and not name.startswith("Base")
        and value not in (callbacks.Callback, loggers.Logger)
    )


WRITTEN: Final = {
    "commands.md": commands,
    "configuration.md": configuration,
    "index.md": index,
    "script-files.md": script_files,
}

if __name__ == "__main__":
    for name, render in WRITTEN.items():
        (PAGES / name).write_text(render(), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
