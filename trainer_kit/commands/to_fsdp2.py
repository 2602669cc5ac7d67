"""``trainer-kit to-fsdp2``: rewrite the FSDP section of a configuration file from FSDP1's keys to FSDP2's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

__all__ = ["rewrite", "to_fsdp2"]

_SECTION: Final = "fsdp_config"
_STRATEGIES: Final = {
    "FULL_SHARD": "true",
    "SHARD_GRAD_OP": "false",
    **dict.fromkeys(("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), None),
}
"""The value of ``fsdp_reshard_after_forward``; None: FSDP2 has no value for it. FSDP1 numbers them from 1."""
_NUMBERS: Final = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)
_INSTEAD: Final = {
    "NO_SHARD": "distributed_type: MULTI_GPU, without fsdp_config",
    "HYBRID_SHARD": "fsdp_sharding_strategy: FULL_SHARD, and parallelism_config with "
    "parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size",
    "LOCAL_STATE_DICT": "fsdp_state_dict_type: SHARDED_STATE_DICT",
}
_NO_COUNTERPART: Final = "FSDP2 has no counterpart for it"
_LEFT_OUT: Final = {
    "backward_prefetch": "FSDP2 always gathers the next parameters during backward",
    "forward_prefetch": "FSDP2 has no such key; a script calls torch's set_modules_to_forward_prefetch",
    "sync_module_states": "every process gets the weights of the main process in any case",
    "use_orig_params": "FSDP2 always keeps the original parameters",
}


@final
@dataclass(frozen=True)
class _Edit:
    start: int
    stop: int
    text: str


@click.command("to-fsdp2")
@click.option(
    "--config_file",
    type=FilePath(path_type=Path),
    required=True,
    help="The file to convert.",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace the file, or the file at --output_file."
)
@click.option(
    "--output_file",
    type=FilePath(path_type=Path),
    help="The new file; by default --config_file.",
)
def to_fsdp2(config_file: Path, overwrite: bool, output_file: Path | None) -> None:
    """Convert the fsdp_config of a configuration file from FSDP1 to FSDP2; all other lines and comments are kept."""
    from trainer_kit.launch.configuration import read_configuration

    # Only for its errors, which name file and line.
    read_configuration(config_file)
    target = output_file or config_file
    if not overwrite and (output_file is None or output_file.exists()):
        fix = "pass --output_file, or add --overwrite"
        if output_file is not None:
            fix = "pass another name as --output_file"
        raise ConfigurationError(
            "an existing file is overwritten only with --overwrite",
            found=str(target),
            fix=fix,
        )
    # newline="": the positions of the edits count each character of the file, and line ends stay as they are.
    with config_file.open(encoding="utf-8", newline="") as file:
        text = file.read()
    converted, notes = rewrite(text, str(config_file))
    # A file that held secrets stays readable by its owner only.
    mode_source = config_file
    if target.exists():
        mode_source = target
    mode = mode_source.stat().st_mode & 0o7777
    try:
        replace_file(target.resolve(), converted.encode(), mode)
    except OSError as error:
        raise ConfigurationError(
            "the file cannot be written", found=f"{target}: {error.strerror}"
        ) from error
    for note in notes:
        click.echo(note)
    click.echo(f"written to {target}")


def rewrite(text: str, name: str = "configuration") -> tuple[str, list[str]]:
    """Rewrite the text of a configuration file; return it with one line for each key that is left out.

    Args:
        text: YAML, with one key on each line.
        name: the file's name, for messages.

    Raises:
        ConfigurationError: a value has no counterpart in FSDP2; names the line.

    Example:
        >>> rewrite("fsdp_config:  # of mine\\n  fsdp_sharding_strategy: FULL_SHARD\\n")
        ('fsdp_config:  # of mine\\n  fsdp_version: 2\\n  fsdp_reshard_after_forward: true\\n', [])
    """
    import yaml

    from trainer_kit.core.yaml_guard import guarded_events, guarded_root

    # Edits are made in the text, where the node behind an alias may stand outside the section.
    if any(isinstance(event, yaml.AliasEvent) for event in guarded_events(text)):
        raise ConfigurationError(
            "values behind aliases are not rewritten",
            found=name,
            fix="replace each alias with its values",
        )
    root = guarded_root(text)
    pairs: list[tuple[yaml.Node, yaml.Node]] = []
    # None: an empty file.
    if root is not None:
        pairs = root.value
    section = next((value for key, value in pairs if key.value == _SECTION), None)
    if not isinstance(section, yaml.MappingNode) or not section.value:
        return text, [f"{name}: no {_SECTION}, nothing to convert"]
    entries = {
        key.value.removeprefix("fsdp_"): (key, value) for key, value in section.value
    }
    # Converting twice must not change the file again.
    if "version" in entries and entries["version"][1].value == "2":
        return text, [
            f"{name}: {_SECTION} is FSDP2 already (fsdp_version: 2), nothing to convert"
        ]
    first = section.value[0][0]
    if section.flow_style:
        fix = "write it as YAML without braces, one key on each line"
        raise _refusal(
            "a mapping in braces is not rewritten", name, first, _SECTION, "{...}", fix
        )
    if {"sharding_strategy", "reshard_after_forward"} <= entries.keys():
        key, value = entries["reshard_after_forward"]
        fix = "keep one of it and fsdp_sharding_strategy"
        raise _refusal(
            "two keys have one meaning", name, key, key.value, value.value, fix
        )
    edits: list[_Edit] = []
    notes: list[str] = []
    # In the text and not by dumping the tree: comments and order belong to the user.
    for option, (key, value) in entries.items():
        if option in _LEFT_OUT:
            edits.append(_remove_lines(text, key, value))
            notes.append(
                f"{name}:{key.start_mark.line + 1}: {key.value}: {value.value} is left out: {_LEFT_OUT[option]}"
            )
        else:
            edits += _convert_entry(name, option, key, value)
    if "version" not in entries:
        edits.append(_insert_version(text, first))
    # From the end, so that positions stay valid; where a line is removed, the insertion follows.
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.stop), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text, notes


def _insert_version(text: str, first: yaml.Node) -> _Edit:
    """The line of the version before the section's first key, in the style of the file."""
    start = first.start_mark.index - first.start_mark.column
    line = "version: 2\n"
    # Both spellings of the keys are valid, with the prefix and without.
    if first.value.startswith("fsdp_"):
        line = f"fsdp_{line}"
    if "\r\n" in text:
        line = line.replace("\n", "\r\n")
    return _Edit(start, start, " " * first.start_mark.column + line)


def _convert_entry(
    name: str, option: str, key: yaml.Node, value: yaml.Node
) -> list[_Edit]:
    """The edits of a key that FSDP2 has, perhaps under another name."""
    if option == "version":
        return [_replace_value(value, "2")]
    # FSDP1 reads its enums in any case.
    strategy = str(value.value).upper()
    if option == "state_dict_type" and strategy == "LOCAL_STATE_DICT":
        raise _refusal(
            _NO_COUNTERPART, name, key, key.value, value.value, _INSTEAD[strategy]
        )
    if option not in ("sharding_strategy", "reshard_after_forward"):
        return []
    if strategy.isdecimal() and 0 < int(strategy) <= len(_NUMBERS):
        strategy = _NUMBERS[int(strategy) - 1]
    # true or false: reshard_after_forward has its new meaning already.
    if strategy not in _STRATEGIES:
        return []
    reshards = _STRATEGIES[strategy]
    if reshards is None:
        instead = _INSTEAD[strategy.removesuffix("_ZERO2")]
        raise _refusal(_NO_COUNTERPART, name, key, key.value, strategy, instead)
    return [
        _replace_value(
            key, key.value.replace("sharding_strategy", "reshard_after_forward")
        ),
        _replace_value(value, reshards),
    ]


def _refusal(
    problem: str, name: str, node: yaml.Node, key: str, value: object, fix: str
) -> ConfigurationError:
    return ConfigurationError(
        problem, found=f"{name}:{node.start_mark.line + 1}: {key}: {value}", fix=fix
    )


def _replace_value(node: yaml.Node, text: str) -> _Edit:
    start = node.start_mark.index
    stop = node.end_mark.index
    # An empty value begins at the colon, after which YAML needs a space.
    if start == stop:
        text = f" {text}"
    return _Edit(start, stop, text)


def _remove_lines(text: str, key: yaml.Node, value: yaml.Node) -> _Edit:
    """Remove the lines of a key and its value, with a comment after it."""
    start = key.start_mark.index - key.start_mark.column
    stop = text.find("\n", max(key.end_mark.index, value.end_mark.index)) + 1
    # The last line of a file may have no line end.
    return _Edit(start, stop or len(text), "")
