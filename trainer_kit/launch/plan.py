"""What a launch comes to: processes, machines, and the variables the script is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from trainer_kit.core.environment import Environment, available_devices
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.origins import ORIGINS
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.options import ENGINES, SECTIONS
from trainer_kit.launch.resolve import Resolved

__all__ = ["Plan", "plan"]

_PASSED: Final = ("mixed_precision", "gradient_accumulation_steps", "use_cpu", "debug")
_VISIBLE: Final = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_NO_EFFECT: Final = (
    "downcast_bf16", "enable_cpu_affinity", "mpirun_hostfile", "mpirun_ccl", "ipex", "use_xpu",
    "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "zero3_save_16bit_model",
)  # fmt: skip
_PORT: Final = 29500


@final
@dataclass(frozen=True)
class Plan:
    """What to start on this machine.

    Attributes:
        processes: here.
        machines: of the whole run.
        in_place: whether this very process is a rank already, by its launcher's word, and only runs the script.
        environ: variables for the script.
        max_restarts: how often.
        left_out: what the configuration asks for and has no effect yet.
        through: a module that runs the script, as ``("-m", "module")``; or nothing.
    """

    processes: int
    machines: Machines
    in_place: bool
    environ: Mapping[str, str]
    max_restarts: int
    left_out: tuple[str, ...]
    through: tuple[str, ...] = ()


def plan(options: Resolved, here: Environment) -> Plan:
    """Work out what to start.

    Args:
        options: every option.
        here: what a launcher around this one has said: SLURM, MPI or torchrun.

    Raises:
        ConfigurationError: for what contradicts itself, and for what is not here yet.
    """
    _refuse(options)
    if options["distributed_type"] in _XLA:
        return _on_xla(options)
    cpu = bool(options["use_cpu"]) or options["distributed_type"] == "MULTI_CPU"
    accelerated = not cpu and _accelerator() is not None
    if (options["distributed_type"] or "").startswith("MULTI_") and not cpu and not accelerated:
        raise ConfigurationError(
            "there is no accelerator on this machine",
            found=options.said("distributed_type"),
            fix="add --cpu, or choose another configuration",
        )
    ids = _gpu_ids(options) if accelerated else None
    devices = 1 if not accelerated else available_devices() if ids is None else len(ids)
    machines = _machines(options, here)
    around = here.world_size if here.launched and here.world_size > 1 else None
    total = _total(options, around, devices, machines.count)
    processes = total // machines.count
    if accelerated and processes > devices:
        raise ConfigurationError(
            "there are more processes than devices on this machine",
            found=f"{processes} here, {devices} devices",
            fix=f"use --num_processes {devices * machines.count}, or --cpu",
        )
    if around is not None and around != total and here.local_world_size > 1:
        raise ConfigurationError(
            "the launcher around this one starts another number of processes",
            found=f"{around} ({here.source}), {options.said('num_processes')}",
            fix="start one task on each machine, or as many as --num_processes",
        )
    return Plan(
        processes=processes,
        machines=machines,
        in_place=around == total,
        environ=_environ(options, ids),
        max_restarts=options["max_restarts"],
        left_out=tuple(name for name in _NO_EFFECT if options[name]),
    )


def _on_xla(options: Resolved) -> Plan:
    """One process that drives all devices of this machine; several: torch_xla starts one for each device."""
    elsewhere = [name for name in ("tpu_use_cluster", "num_machines") if int(options[name] or 0) > (name[0] == "n")]
    if elsewhere:
        raise ConfigurationError(
            "the machines of a TPU pod are not started from here, and do not train together yet",
            found=options.said(elsewhere[0]),
            fix="tpu_use_cluster: false and num_machines: 1, on one machine",
        )
    several = (options["num_processes"] or 1) > 1
    environ = dict(pair.split("=", 1) for pair in options["tpu_env"] or () if "=" in pair)
    if several:
        environ["TRAINER_KIT_NUM_PROCESSES"] = str(options["num_processes"])
    no_effect = (*_NO_EFFECT, "tpu_name", "tpu_zone", "tpu_vm", *(("max_restarts",) if several else ()))
    return Plan(
        processes=1,
        machines=Machines(),
        in_place=several,
        environ={**environ, **_environ(options, None)},
        max_restarts=0 if several else options["max_restarts"],
        left_out=tuple(name for name in no_effect if options[name]),
        through=("-m", "trainer_kit.launch.each_device") if several else (),
    )


def _machines(options: Resolved, here: Environment) -> Machines:
    if here.launched and here.world_size > 1:
        count, rank, address, port = here.num_nodes, here.node_rank, here.master_addr, here.master_port
        return Machines(count, rank, address, port) if count > 1 else Machines()
    count, rank, address = options["num_machines"], options["machine_rank"], options["main_process_ip"]
    port = options["main_process_port"]
    if not 0 <= rank < count:
        raise ConfigurationError(
            "this machine is none of them",
            found=f"{options.said('machine_rank')}, {options.said('num_machines')}",
            fix="machines count from 0",
        )
    if count == 1:
        return Machines(port=port or 0)
    if not options.given("main_process_ip"):
        raise ConfigurationError(
            "several machines need the address of the first", fix="add --main_process_ip, the same on every machine"
        )
    return Machines(count, rank, address, port or _PORT)


def _total(options: Resolved, launched: int | None, devices: int, num_machines: int) -> int:
    """The number of processes of the whole run."""
    total = options["num_processes"]
    if total == -1 and options.file is not None:
        raise ConfigurationError(
            "this configuration leaves the number of processes open",
            found=options.said("num_processes"),
            fix="add --num_processes",
        )
    single = options["distributed_type"] == "NO"
    if total is None:
        each = 1 if single else devices
        # A launcher that has started several tasks on a machine has started the processes.
        total = each * num_machines if launched is None else max(launched, each * num_machines)
    elif single and total > 1 and not options.origin("num_processes").startswith("flag"):
        raise ConfigurationError(
            "one process is not several",
            found=f"{options.said('distributed_type')}, {options.said('num_processes')}",
            fix="say MULTI_CPU or MULTI_GPU, or num_processes: 1",
        )
    if total < 1 or total % num_machines:
        raise ConfigurationError(
            "every machine starts equally many processes",
            found=f"{options.said('num_processes')}, num_machines={num_machines}",
            fix="num_processes counts those of all machines together",
        )
    if total == 1 and options.origin("distributed_type") == "flag --multi_gpu":
        raise ConfigurationError("--multi_gpu is for several processes", found="1 process", fix="leave it out")
    return int(total)


def _accelerator() -> str | None:
    from trainer_kit.core.devices import present_accelerator

    found = present_accelerator()
    return None if found is None else found.type


def _gpu_ids(options: Resolved) -> list[str] | None:
    text = str(options["gpu_ids"] or "all").strip()
    if text == "all":
        return None
    ids = [part.strip() for part in text.split(",") if part.strip()]
    if not ids or len(set(ids)) < len(ids):
        raise ConfigurationError("gpu_ids are different devices, such as 0,1", found=options.said("gpu_ids"))
    return ids


_SEQUENCES: Final = "parallelism_config_sp_size"
_SECTIONS: Final = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
"""What of a file the ranks are told, by the kind of run."""
_XLA: Final = ("TPU", "XLA")


def _environ(options: Resolved, gpu_ids: list[str] | None) -> dict[str, str]:
    passed = [*_PASSED, *SECTIONS["dynamo_config"], *SECTIONS["parallelism_config"]]
    engine = _SECTIONS.get(options["distributed_type"] or "")
    if engine is not None:
        passed += ["distributed_type", *SECTIONS[engine]]
    elif options["distributed_type"] in _XLA:
        passed.append("distributed_type")
    found: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name in passed:
        value = options[name]
        if options.given(name) and value is not None and value != "auto":
            found[f"TRAINER_KIT_{name.upper()}"] = _text(value)
            origins[name] = options.origin(name)
    if options["distributed_type"] == "MULTI_CPU":
        found["TRAINER_KIT_USE_CPU"] = "1"
        origins.setdefault("use_cpu", options.origin("distributed_type"))
    found[ORIGINS] = json.dumps(origins)
    visible = _VISIBLE.get(_accelerator() or "")
    if gpu_ids is not None and visible is not None:
        found[visible] = ",".join(gpu_ids)
    if options.given("num_cpu_threads_per_process"):
        found["OMP_NUM_THREADS"] = str(options["num_cpu_threads_per_process"])
    return found


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _refuse(options: Resolved) -> None:
    """What loads, and cannot run yet."""
    parallel = [name for name in SECTIONS["parallelism_config"] if name.endswith("_size") and (options[name] or 1) != 1]
    wanted = {
        "compute_environment": "SageMaker" if options["compute_environment"] == "AMAZON_SAGEMAKER" else None,
        "distributed_type": ENGINES.get(options["distributed_type"] or ""),
        _SEQUENCES: "dividing sequences by DeepSpeed" if _SEQUENCES in parallel else None,
    }
    for name, what in wanted.items():
        if what is not None:
            raise ConfigurationError(
                f"{what} is not here yet",
                found=options.said(name),
                fix="train data parallel (--multi_gpu, --cpu), or say it in the script: Trainer(strategy=...)",
            )
    if parallel and options["distributed_type"] in ("DEEPSPEED", "MEGATRON_LM"):
        raise ConfigurationError(
            "an engine of its own cannot divide a mesh",
            found=f"{options.said('distributed_type')}, {options.said(parallel[0])}",
            fix="leave parallelism_config out, or say FSDP, MULTI_GPU or MULTI_CPU",
        )
    told = [name for name in SECTIONS["fp8_config"] if options.given(name)]
    if options["mixed_precision"] == "fp8" and told and (told != ["fp8_backend"] or options["fp8_backend"] != "AO"):
        raise ConfigurationError(
            "how fp8 is computed is said in the script",
            found=options.said(told[0]),
            fix="Accelerator(kwargs_handlers=[TERecipeKwargs(...)]) or AORecipeKwargs(...), and no fp8_config here",
        )
