"""Translate the configuration of a job on Amazon SageMaker into the arguments of SageMaker's own estimator."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.configuration import Resolved

__all__ = ["estimator_arguments", "is_sagemaker", "refusal", "sagemaker_lines"]

_DEFAULTS: Final = {
    "region": "us-east-1",
    "base_job_name": "accelerate-sagemaker-1",
    "pytorch_version": "1.10.2",
    "transformers_version": "4.17.0",
    "py_version": "py38",
}
"""Accelerate's."""
_OF_FILE: Final = (
    "image_uri",
    "transformers_version",
    "pytorch_version",
    "py_version",
    "base_job_name",
)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def is_sagemaker(options: Resolved) -> bool:
    """Whether the options describe a job on SageMaker."""
    return bool(options["compute_environment"] == "AMAZON_SAGEMAKER")


def refusal(options: Resolved) -> ConfigurationError:
    """The error that no job is started."""
    return options.wrong(
        "this command does not start a SageMaker job, which would rent machines with your AWS account",
        "compute_environment",
        fix="pass these values to sagemaker.huggingface.HuggingFace(...) and call fit(inputs) in your own program",
    )


def sagemaker_lines(
    options: Resolved, script: str, arguments: Sequence[str]
) -> list[str]:
    """The job as lines of text: the region and profile, the estimator's arguments, and the inputs of ``fit``.

    Secrets are masked.

    Raises:
        ConfigurationError: the job is incomplete, or SageMaker cannot pass the script's arguments.
    """
    estimator, inputs = estimator_arguments(options, script, arguments)
    lines = [
        f"region: {options['region'] or _DEFAULTS['region']}",
        f"profile: {options['profile'] or 'none'}",
    ]
    lines += [
        f"estimator {name}: {json.dumps(mask_secrets(value, name))}"
        for name, value in estimator.items()
    ]
    return [*lines, f"inputs: {json.dumps(mask_secrets(inputs))}"]


def estimator_arguments(
    options: Resolved, script: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The arguments of ``sagemaker.huggingface.HuggingFace``, and the inputs of its ``fit``, as Accelerate passes them.

    Args:
        options: with ``compute_environment: AMAZON_SAGEMAKER``.
        script: a Python file.
        arguments: the script's arguments, as ``--name value``.

    Raises:
        ConfigurationError: the job is incomplete, or SageMaker cannot pass the script's arguments.
    """
    if not script.endswith(".py"):
        raise ConfigurationError(
            "SageMaker runs a Python file",
            found=script,
            fix="pass a script that ends in .py",
        )
    for name in ("ec2_instance_type", "iam_role_name"):
        if not options[name]:
            raise options.wrong(
                f"a job on SageMaker needs {name}",
                "compute_environment",
                fix=f"set {name}: ... in the file",
            )
    path = Path(script)
    distribution = None
    if options["distributed_type"] == "DATA_PARALLEL":
        distribution = {"smdistributed": {"dataparallel": {"enabled": True}}}
    metrics = _table(options, "sagemaker_metrics_file")
    definitions = None
    if metrics is not None:
        definitions = [{"Name": name, "Regex": text} for name, text in metrics]
    estimator = {name: options[name] or _DEFAULTS.get(name) for name in _OF_FILE} | {
        "entry_point": path.name,
        "source_dir": str(path.parent),
        "role": options["iam_role_name"],
        "instance_count": options["num_machines"],
        "instance_type": options["ec2_instance_type"],
        "debugger_hook_config": False,
        "distribution": distribution,
        "hyperparameters": _hyperparameters(arguments),
        "environment": _environment(options),
        "metric_definitions": definitions,
    }
    # What the user writes for the estimator itself counts more than what is derived.
    arguments_of_estimator = _merged(options["additional_args"] or {}, estimator)
    table = _table(options, "sagemaker_inputs_file")
    inputs = None
    if table is not None:
        inputs = dict(table)
    return arguments_of_estimator, inputs


def _environment(options: Resolved) -> dict[str, str]:
    """Variables for the script in Accelerate's names, which this library reads too."""
    switches = {
        name: str(bool(options[f"dynamo_{name}"]))
        for name in ("use_fullgraph", "use_dynamic")
    }
    return {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_MIXED_PRECISION": str(options["mixed_precision"]),
        "ACCELERATE_DYNAMO_BACKEND": str(options["dynamo_backend"] or "NO"),
        "ACCELERATE_DYNAMO_MODE": str(options["dynamo_mode"] or "default"),
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": switches["use_fullgraph"],
        "ACCELERATE_DYNAMO_USE_DYNAMIC": switches["use_dynamic"],
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(
            bool(options["dynamo_use_regional_compilation"])
        ),
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": str(
            options["distributed_type"] or "NO"
        ),
    }


def _hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The script's arguments by name: SageMaker passes each as ``--name value``."""
    hyperparameters: dict[str, Any] = {}
    remaining_arguments = list(arguments)
    while remaining_arguments:
        name, equals, value = remaining_arguments.pop(0).partition("=")
        # Without "=" the value is empty here, and may be the next argument.
        if not equals and remaining_arguments and _is_value(remaining_arguments[0]):
            value = remaining_arguments.pop(0)
        if not name.startswith("--") or not value:
            raise ConfigurationError(
                "SageMaker passes each argument of a script as --name value",
                found=f"{name} {value}".strip(),
                fix="give switches a value: --do_train True",
            )
        hyperparameters[name.removeprefix("--").replace("-", "_")] = _typed(value)
    return hyperparameters


def _is_value(argument: str) -> bool:
    """Whether an argument is no option; a negative number begins with a dash too."""
    return not argument.startswith("-") or _NUMBER.fullmatch(argument) is not None


def _typed(text: str) -> bool | int | float | str:
    """A hyperparameter as the value that Accelerate passes for this text."""
    if text in ("True", "False"):
        return text == "True"
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    if number.is_integer():
        return int(number)
    return number


def _table(options: Resolved, name: str) -> list[tuple[str, str]] | None:
    """The first two columns of a file with tabs, without its first line."""
    if not options[name]:
        return None
    try:
        # The first line has the names of the columns.
        lines = Path(options[name]).expanduser().read_text("utf-8").splitlines()[1:]
        return [
            (cells[0], cells[1].strip())
            for cells in (line.split("\t") for line in lines)
        ]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise options.wrong(
            f"this is not a table of names and values: {error}", name
        ) from error


def _constructed(value: Any) -> Any:
    """A list or text of the file as YAML's number, truth value or text."""
    if isinstance(value, list):
        return [_constructed(item) for item in value]
    if not isinstance(value, str):
        return value
    import yaml

    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    # Dates and nulls of YAML stay the texts that they are in the file.
    if isinstance(parsed, (bool, int, float)):
        return parsed
    return value


def _merged(more: Any, base: dict[str, Any]) -> dict[str, Any]:
    """``more`` over ``base``, mapping by mapping."""
    merged = dict(base)
    for name, text in more.items():
        value = _constructed(text)
        if isinstance(value, dict):
            inner = merged.get(name)
            if not isinstance(inner, dict):
                inner = {}
            value = _merged(value, inner)
        merged[name] = value
    return merged
