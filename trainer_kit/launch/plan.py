"""The plan of a launch: processes, machines, and the variables of the script."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from trainer_kit.core.configuration_sources import ORIGINS
from trainer_kit.core.display import plural
from trainer_kit.core.environment import (
    Environment,
    available_devices,
    preserved_variables,
)
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.configuration import Resolved
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.options import ENGINES, SECTIONS, TOP
from trainer_kit.launch.sagemaker import is_sagemaker, refusal

__all__ = ["Plan", "plan"]

_PASSED: Final = ("mixed_precision", "gradient_accumulation_steps", "use_cpu", "debug")
_VISIBLE: Final = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}
_OF_THE_AGENT: Final = ("tee", "log_dir", "role", "monitor_interval", "max_restarts")
"""The options that need an agent process."""
_PORT: Final = 29500
_OURS: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Plan:
    """What to start on this machine.

    Attributes:
        processes: how many to start on this machine.
        machines: all machines of the run.
        in_place: whether a launcher has already started this process as a rank, so that it only runs the script.
        environ: variables for the script.
        max_restarts: how often the ranks are restarted.
        supervised: whether an agent supervises the ranks, even a single one.
        ignored: configured options without an effect, each with the reason.
        through: a module that runs the script, as ``("-m", "module")``; empty to run it directly.
    """

    processes: int
    machines: Machines
    in_place: bool
    environ: Mapping[str, str]
    max_restarts: int
    supervised: bool
    ignored: Mapping[str, str]
    through: tuple[str, ...] = ()


def plan(options: Resolved, here: Environment) -> Plan:
    """Work out what to start.

    Args:
        options: every option.
        here: the environment of an outer launcher: SLURM, MPI or torchrun.

    Raises:
        ConfigurationError: for options that contradict each other, and for options that are not supported yet.
    """
    _refuse(options)
    if options["distributed_type"] in _XLA:
        return _on_xla(options)
    with _visible(options):
        return _on_devices(options, here)


@contextmanager
def _visible(options: Resolved) -> Iterator[None]:
    """Count devices as the script will see them: with the variables that it receives."""
    with preserved_variables():
        os.environ.update(_variables(options))
        yield


def _uses_accelerator(options: Resolved) -> bool:
    """Whether the processes compute on an accelerator.

    Raises:
        ConfigurationError: the options ask for one, and this machine has none.
    """
    if options["use_cpu"] or options["distributed_type"] == "MULTI_CPU":
        return False
    if _accelerator() is not None:
        return True
    # The option that asks for it, which the error names.
    name = None
    if options["multi_gpu"]:
        name = "multi_gpu"
    elif str(options["distributed_type"]).startswith("MULTI_"):
        name = "distributed_type"
    if name is not None:
        raise options.wrong(
            "this machine has no accelerator",
            name,
            fix="add --cpu, or choose another configuration",
        )
    return False


def _on_devices(options: Resolved, here: Environment) -> Plan:
    accelerated = _uses_accelerator(options)
    ids = None
    devices = 1
    if accelerated:
        ids = _gpu_ids(options)
        # Counted with the variables of the script, so those that hide devices count.
        if ids is None:
            devices = available_devices()
        else:
            devices = len(ids)
    machines = _machines(options, here)
    # Processes that SLURM, MPI or torchrun has started; a single task is the place of an agent.
    around = None
    if here.launched and here.world_size > 1:
        around = here.world_size
    total = _total(options, around, devices, machines.count)
    processes = total // machines.count
    if accelerated and processes > devices:
        raise ConfigurationError(
            "there are more processes than devices on this machine",
            found=f"{processes} here, {plural(devices, 'device')}",
            fix=f"use --num_processes {devices * machines.count}, or --cpu",
        )
    if around is not None and around != total and here.local_world_size > 1:
        raise ConfigurationError(
            "the outer launcher starts a different number of processes",
            found=f"{around} ({here.source}), {options.describe('num_processes')}",
            fix="start one task on each machine, or as many as --num_processes",
        )
    # Then this process is a rank already, and there is no agent to tee its output or to restart it.
    in_place = around == total
    needs_agent = any(options[name] for name in _OF_THE_AGENT)
    ignored: dict[str, str] = {}
    if in_place:
        reason = f"{here.source} has started the processes"
        ignored = dict.fromkeys(_OF_THE_AGENT, reason)
    if machines.count == 1:
        ignored["rdzv_conf"] = "a single machine has no rendezvous"
    if options["rdzv_backend"] == "c10d":
        ignored["rdzv_backend"] = "the agents use their own rendezvous"
    return Plan(
        processes=processes,
        machines=machines,
        in_place=in_place,
        environ=_environ(options, ids),
        max_restarts=options["max_restarts"],
        supervised=not in_place
        and (needs_agent or processes > 1 or machines.count > 1),
        ignored=_ignored(options, ignored),
    )


def _ignored(options: Resolved, more: Mapping[str, str]) -> dict[str, str]:
    """The configured options without an effect: those that the option table marks, and ``more`` of this plan."""
    reasons = dict(more)
    for table in (TOP, *SECTIONS.values()):
        reasons |= {
            option.name: option.ignored for option in table.values() if option.ignored
        }
    return {name: reason for name, reason in reasons.items() if options[name]}


def _on_xla(options: Resolved) -> Plan:
    """One process that drives all devices of this machine; several: torch_xla starts one for each device."""
    if options["num_machines"] > 1:
        raise _pod(options, "num_machines")
    several = (options["num_processes"] or 1) > 1
    ignored = {"rdzv_conf": "a single machine has no rendezvous"}
    # Accelerate imports the script and calls this function.
    if options["main_training_function"] != "main":
        ignored["main_training_function"] = "the script is run, with its main part"
    if not several:
        return Plan(
            processes=1,
            machines=Machines(),
            in_place=False,
            environ=_environ(options, None),
            max_restarts=options["max_restarts"],
            supervised=any(options[name] for name in _OF_THE_AGENT),
            ignored=_ignored(options, ignored),
        )
    ignored |= dict.fromkeys(_OF_THE_AGENT, "torch_xla starts the processes")
    # `each_device` compares it with the number of devices: torch_xla starts no other number of processes.
    environ = {"TRAINER_KIT_NUM_PROCESSES": str(options["num_processes"])}
    return Plan(
        processes=1,
        machines=Machines(),
        in_place=True,
        environ={**environ, **_environ(options, None)},
        max_restarts=0,
        supervised=False,
        ignored=_ignored(options, ignored),
        through=("-m", "trainer_kit.launch.each_device"),
    )


def _pod(options: Resolved, name: str) -> ConfigurationError:
    return options.wrong(
        "TPU pods are not supported yet",
        name,
        fix="set tpu_use_cluster: false and num_machines: 1, on one machine",
    )


def _machines(options: Resolved, here: Environment) -> Machines:
    patience = _patience(options)
    # The outer launcher knows the machines, and has given each process its rank.
    if here.launched and here.world_size > 1:
        if here.num_nodes <= 1:
            return Machines()
        return Machines(
            here.num_nodes,
            here.node_rank,
            here.master_addr,
            here.master_port,
            patience,
        )
    count = options["num_machines"]
    rank = options["machine_rank"]
    address = options["main_process_ip"]
    port = options["main_process_port"]
    if not 0 <= rank < count:
        raise options.wrong(
            "the rank of this machine is out of range",
            "machine_rank",
            "num_machines",
            fix="count machines from 0",
        )
    if count == 1:
        return Machines(port=port or 0)
    if not options.is_set("main_process_ip"):
        raise ConfigurationError(
            "several machines need the address of the first",
            fix="add --main_process_ip, the same on every machine",
        )
    return Machines(count, rank, address, port or _PORT, patience)


def _patience(options: Resolved) -> float:
    """Seconds to wait for the other machines, from ``rdzv_conf``."""
    pairs = dict(
        pair.partition("=")[::2]
        for pair in str(options["rdzv_conf"] or "").split(",")
        if pair.strip()
    )
    # The two names that torch's rendezvous has for this limit; the last one counts.
    for name, seconds in pairs.items():
        if name.strip() not in ("timeout", "join_timeout") or not re.fullmatch(
            r"\d{1,9}(\.\d+)?", seconds.strip()
        ):
            raise options.wrong(
                "machines rendezvous in a store of this launcher, not by torch's rendezvous",
                "rdzv_conf",
                fix="set timeout=SECONDS, how long a machine waits for the others",
            )
    if not pairs:
        return Machines.PATIENCE
    return float(list(pairs.values())[-1])


def _total(
    options: Resolved, launched: int | None, devices: int, num_machines: int
) -> int:
    """The number of processes of the whole run."""
    total = options["num_processes"]
    if total == -1 and options.file is not None:
        raise options.wrong(
            "this configuration does not set the number of processes",
            "num_processes",
            fix="add --num_processes",
        )
    single = options["distributed_type"] == "NO"
    if total is None:
        total = devices * num_machines
        if single:
            total = num_machines
        # If an outer launcher has started several tasks on a machine, they are the processes.
        if launched is not None:
            total = max(launched, total)
    elif (
        single and total > 1 and not options.origin("num_processes").startswith("flag")
    ):
        raise options.wrong(
            "one process cannot be distributed",
            "distributed_type",
            "num_processes",
            fix="set MULTI_CPU or MULTI_GPU, or num_processes: 1",
        )
    if total < 1 or total % num_machines:
        raise ConfigurationError(
            "every machine must start the same number of processes",
            found=f"{options.describe('num_processes')}, num_machines={num_machines}",
            fix="pass a multiple of num_machines: num_processes counts the processes of all machines",
        )
    if (
        total == 1
        and options["multi_gpu"]
        and options.origin("multi_gpu").startswith("flag")
    ):
        raise ConfigurationError(
            "--multi_gpu needs at least two processes",
            found="1 process",
            fix="leave it out",
        )
    return int(total)


def _accelerator() -> str | None:
    from trainer_kit.core.devices import present_accelerator

    accelerator = present_accelerator()
    if accelerator is None:
        return None
    return accelerator.type


def _gpu_ids(options: Resolved) -> list[str] | None:
    text = str(options["gpu_ids"] or "all").strip()
    if text == "all":
        return None
    ids = [index.strip() for index in text.split(",") if index.strip()]
    if not ids or len(set(ids)) < len(ids):
        raise options.wrong("gpu_ids are different devices, such as 0,1", "gpu_ids")
    return ids


_SEQUENCES: Final = "parallelism_config_sp_size"
_XLA: Final = ("TPU", "XLA")


def _environ(options: Resolved, gpu_ids: list[str] | None) -> dict[str, str]:
    passed = [*_PASSED, *SECTIONS["dynamo_config"], *SECTIONS["parallelism_config"]]
    # The section of the chosen engine alone: other sections of the file are of engines that this run does not use.
    engine = SECTIONS.get(f"{options['distributed_type']}_config".lower())
    if engine is not None:
        passed += ["distributed_type", *engine]
    elif options["distributed_type"] in _XLA:
        passed.append("distributed_type")
    if options["mixed_precision"] == "fp8":
        passed += [
            name
            for name, option in SECTIONS["fp8_config"].items()
            if not option.ignored
        ]
    environ = _variables(options)
    # Errors in the script name the flag or the line of the file that set a value, not the variable.
    origins: dict[str, str] = {}
    for name in passed:
        value = options[name]
        if options.is_set(name) and value is not None and value != "auto":
            environ[f"TRAINER_KIT_{name.upper()}"] = _text(value)
            origins[name] = options.origin(name)
    if options["distributed_type"] == "MULTI_CPU":
        environ["TRAINER_KIT_USE_CPU"] = "1"
        origins.setdefault("use_cpu", options.origin("distributed_type"))
    environ[ORIGINS] = json.dumps(origins)
    visible = _VISIBLE.get(_accelerator() or "")
    if gpu_ids is not None and visible is not None:
        visible_ids = ",".join(gpu_ids)
        if environ.get(visible, visible_ids) != visible_ids:
            raise ConfigurationError(
                "the devices of this machine are set twice",
                found=f"{options.describe('gpu_ids')}, {visible}={environ[visible]} ({options.origin('environment')})",
            )
        environ[visible] = visible_ids
    if options.is_set("num_cpu_threads_per_process"):
        environ["OMP_NUM_THREADS"] = str(options["num_cpu_threads_per_process"])
    return environ


def _variables(options: Resolved) -> dict[str, str]:
    """The variables for the script from ``environment:``, ``tpu_env:`` and ``--env``.

    Raises:
        ConfigurationError: a pair without ``=``, an invalid name, or a variable that this launcher sets.
    """
    variables, overridden = options["environment"] or {}, {}
    if not isinstance(variables, Mapping):
        raise options.wrong(
            "environment: is a mapping of variables to texts", "environment"
        )
    # `tpu_env` and the flag come second, so they win over `environment`.
    pairs = [("environment", name, value) for name, value in variables.items()]
    for pair in options["tpu_env"] or ():
        name, equals, text = pair.partition("=")
        value = None
        if equals:
            value = text
        pairs.append(("tpu_env", name, value))
    for option, name, value in pairs:
        found_at = f"{name} ({options.origin(option)})"
        if not isinstance(value, str) or not re.fullmatch(
            "[A-Za-z_][A-Za-z0-9_]*", name
        ):
            raise ConfigurationError(
                "a variable is written as NAME=TEXT",
                found=found_at,
                fix="write --env NCCL_DEBUG=INFO",
            )
        if name in _OURS or name.startswith(("TRAINER_KIT_", "TORCHELASTIC_")):
            raise ConfigurationError(
                "launch sets this variable itself",
                found=found_at,
                fix="use its option; trainer-kit explain lists them",
            )
        overridden[name] = value
    return overridden


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    # The script reads 1 and 0, as for variables that a user sets.
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


def _refuse(options: Resolved) -> None:
    """Refuse options that can be read but not run yet."""
    if options["aws_access_key_id"] or options["aws_secret_access_key"]:
        raise ConfigurationError(
            "AWS keys are not read from a command line, which other users of this machine can see",
            fix="set profile: NAME in the configuration file, with the keys in ~/.aws/credentials",
        )
    if is_sagemaker(options):
        raise refusal(options)
    # Wizards write every size as 1; only another number asks for an axis.
    parallel = [
        name
        for name in SECTIONS["parallelism_config"]
        if name.endswith("_size") and (options[name] or 1) != 1
    ]
    unsupported = {"distributed_type": ENGINES.get(options["distributed_type"] or "")}
    if _SEQUENCES in parallel:
        unsupported[_SEQUENCES] = "dividing sequences by DeepSpeed"
    for name, feature in unsupported.items():
        if feature is not None:
            raise options.wrong(
                f"{feature} is not supported yet",
                name,
                fix="train data parallel (--multi_gpu, --cpu), or set it in the script: Trainer(strategy=...)",
            )
    if parallel and options["distributed_type"] in ("DEEPSPEED", "MEGATRON_LM"):
        raise options.wrong(
            "this engine does not support a device mesh",
            "distributed_type",
            parallel[0],
            fix="leave parallelism_config out, or set FSDP, MULTI_GPU or MULTI_CPU",
        )
    # Without TPUs the key of a file has no effect; a flag asks for a pod now.
    on_tpu = options["distributed_type"] in _XLA or options.origin(
        "tpu_use_cluster"
    ).startswith("flag")
    if options["tpu_use_cluster"] and on_tpu:
        raise _pod(options, "tpu_use_cluster")
    # Replication is what DDP does, so that axis contradicts nothing.
    divided = [
        name for name in parallel if name != "parallelism_config_dp_replicate_size"
    ]
    if options["use_ddp"] and divided:
        raise options.wrong("only one kind of run can be chosen", "use_ddp", divided[0])
    wants_mesh = options["use_parallelism_config"]
    if wants_mesh is not None and wants_mesh != bool(parallel):
        raise options.wrong(
            "a parallelism_config needs an axis above 1",
            "use_parallelism_config",
            *parallel,
            fix="pass --parallelism_config_tp_size 2 or another _size, or leave use_parallelism_config out",
        )
