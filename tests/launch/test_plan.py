"""Which value counts, where it comes from, and what a launch makes of it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

import trainer_kit as tk
from tests.launch.configurations import SAMPLES
from trainer_kit.build import choose_strategy
from trainer_kit.core.configuration_sources import ORIGINS, Chosen, choose, variable
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, PrecisionError
from trainer_kit.launch.configuration import (
    Resolved,
    accelerates_default,
    default_file,
    our_default,
    resolve,
)
from trainer_kit.launch.plan import plan
from trainer_kit.options.fp8 import launched_recipe
from trainer_kit.strategies import MeshStrategy
from trainer_kit.strategies.megatron.config import from_launcher

ALONE = Environment()


@pytest.fixture(autouse=True)
def _no_files_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)


def flags(**given) -> dict[str, Chosen]:
    return {name: Chosen(value, f"flag --{name}") for name, value in given.items()}


def cpu(**given) -> dict[str, Chosen]:
    return flags(distributed_type="MULTI_CPU", use_cpu=True, **given)


def options(
    text: str = "",
    given: dict[str, Chosen] | None = None,
    environ: dict[str, str] | None = None,
) -> Resolved:
    path = Path("config.yaml")
    path.write_text(text)
    return resolve(given or {}, path, environ or {})


def test_each_level_wins_over_the_ones_below() -> None:
    both = {"TRAINER_KIT_MIXED_PRECISION": "fp16", "ACCELERATE_MIXED_PRECISION": "bf16"}
    found = options("", None, {})
    assert (found["mixed_precision"], found.origin("mixed_precision")) == (
        "no",
        "default",
    )
    found = options("", None, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert (found["mixed_precision"], found.origin("mixed_precision")) == (
        "bf16",
        "environment ACCELERATE_MIXED_PRECISION",
    )
    assert options("", None, both)["mixed_precision"] == "fp16"
    found = options("\nmixed_precision: bf16\n", None, both)
    assert (found["mixed_precision"], found.origin("mixed_precision")) == (
        "bf16",
        "config.yaml:2",
    )
    found = options("mixed_precision: bf16\n", flags(mixed_precision="no"), both)
    assert (found["mixed_precision"], found.origin("mixed_precision")) == (
        "no",
        "flag --mixed_precision",
    )
    assert choose("mixed_precision", "fp16", "no", both) == Chosen("fp16", "argument")


def test_the_script_receives_values_and_their_sources() -> None:
    found = plan(
        options(
            "mixed_precision: bf16\n",
            cpu(num_processes=2, gradient_accumulation_steps=4),
        ),
        ALONE,
    )
    told = dict(found.environ)
    origins = json.loads(told.pop(ORIGINS))
    assert told == {
        "TRAINER_KIT_MIXED_PRECISION": "bf16",
        "TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS": "4",
        "TRAINER_KIT_USE_CPU": "1",
    }
    assert origins["mixed_precision"] == "config.yaml:1"
    assert variable("mixed_precision", found.environ) == Chosen("bf16", "config.yaml:1")
    assert variable("gradient_accumulation_steps", found.environ) == Chosen(
        "4", "flag --gradient_accumulation_steps"
    )
    assert variable("mixed_precision", {**found.environ, ORIGINS: "[{"}) == Chosen(
        "bf16", "environment TRAINER_KIT_MIXED_PRECISION"
    )


def test_variables_are_checked() -> None:
    with pytest.raises(
        ConfigurationError,
        match="TRAINER_KIT_NUM_PROCESSES: num_processes is an integer",
    ):
        options("", None, {"TRAINER_KIT_NUM_PROCESSES": "many"})


def test_default_files() -> None:
    assert default_file() is None
    accelerates_default().parent.mkdir(parents=True)
    old = accelerates_default().with_suffix(".json")
    old.write_text('{"distributed_type": "NO"}')
    assert default_file() == old
    accelerates_default().with_suffix(".yaml").write_text(SAMPLES["multi_node.yaml"])
    assert default_file() == accelerates_default() != old
    found = resolve({}, None, {})
    assert found.file is not None
    assert found["num_machines"] == 4
    # On the CPU a configuration of something else is none: its processes were counted in devices.
    assert resolve(cpu(), None, {}).file is None
    our_default().parent.mkdir(parents=True)
    our_default().write_text(SAMPLES["multi_cpu.yaml"])
    found = resolve(cpu(), None, {})
    assert found.file is not None
    assert (found.file.path, found["num_processes"]) == (our_default(), 2)


def test_one_process_by_default() -> None:
    found = plan(options("", cpu()), ALONE)
    assert (
        found.processes,
        found.machines.count,
        found.in_place,
        found.max_restarts,
    ) == (
        1,
        1,
        False,
        0,
    )


def test_several_machines() -> None:
    given = cpu(
        num_processes=4, num_machines=2, machine_rank=1, main_process_ip="10.0.0.7"
    )
    found = plan(options("", given), ALONE)
    machines = found.machines
    assert (
        found.processes,
        machines.count,
        machines.rank,
        machines.address,
        machines.port,
    ) == (
        2,
        2,
        1,
        "10.0.0.7",
        29500,
    )
    found = plan(options(SAMPLES["multi_node.yaml"], cpu()), ALONE)
    assert (found.processes, found.machines.rank, found.machines.port) == (4, 1, 8888)


@pytest.mark.parametrize(
    ("text", "given", "problem"),
    [
        (
            "distributed_type: NO\nnum_processes: 2\n",
            {},
            "one process cannot be distributed",
        ),
        (SAMPLES["open.yaml"], cpu(), "does not set the number of processes"),
        (
            "",
            cpu(num_processes=3, num_machines=2, main_process_ip="10.0.0.7"),
            "the same number of processes",
        ),
        ("", cpu(num_processes=0), "the same number of processes"),
        (
            "",
            cpu(num_machines=2, machine_rank=2),
            "the rank of this machine is out of range",
        ),
        ("", cpu(num_processes=2, num_machines=2), "need the address of the first"),
    ],
)
def test_contradictions(text: str, given: dict[str, Chosen], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan(options(text, given), ALONE)


def test_deepspeed_reaches_the_ranks() -> None:
    made = plan(options(SAMPLES["deepspeed.yaml"]), ALONE)
    told = {
        name.removeprefix("TRAINER_KIT_").lower(): value
        for name, value in made.environ.items()
    }
    assert (made.processes, told["distributed_type"], told["zero_stage"]) == (
        2,
        "DEEPSPEED",
        "3",
    )
    assert (told["offload_param_device"], float(told["gradient_clipping"])) == (
        "cpu",
        1.0,
    )
    assert {"offload_optimizer_device", "gradient_accumulation_steps"}.isdisjoint(told)
    assert tuple(made.ignored) == (
        "deepspeed_multinode_launcher",
        "deepspeed_hostfile",
        "zero3_save_16bit_model",
    )
    assert (
        "zero_stage"
        not in plan(
            options("distributed_type: MULTI_CPU\nnum_processes: 2\n"), ALONE
        ).environ
    )


def test_megatron_reaches_the_ranks() -> None:
    made = plan(options(SAMPLES["megatron.yaml"]), ALONE)
    told = {
        name.removeprefix("TRAINER_KIT_").lower(): value
        for name, value in made.environ.items()
    }
    assert (
        made.processes,
        told["distributed_type"],
        told["megatron_lm_tp_degree"],
    ) == (
        4,
        "MEGATRON_LM",
        "2",
    )
    with pytest.raises(
        ConfigurationError,
        match="megatron_lm_num_micro_batches is not an option of MegatronStrategy",
    ):
        from_launcher(told)


def test_fsdp_reaches_the_ranks() -> None:
    made = plan(options(SAMPLES["fsdp.yaml"]), ALONE)
    told = {
        name.removeprefix("TRAINER_KIT_").lower(): value
        for name, value in made.environ.items()
    }
    assert told["distributed_type"] == "FSDP"
    assert told["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert tuple(made.ignored) == ()


def test_a_mesh_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(options(SAMPLES["fsdp2.yaml"]), ALONE)
    told = {
        name.removeprefix("TRAINER_KIT_").lower(): value
        for name, value in made.environ.items()
    }
    assert (
        made.processes,
        told["distributed_type"],
        told["parallelism_config_tp_size"],
    ) == (
        8,
        "FSDP",
        "2",
    )
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    eight = Environment(world_size=8, local_world_size=8, source="torchrun")
    strategy = choose_strategy("auto", "cpu", "auto", 1, eight)[0]
    assert isinstance(strategy, MeshStrategy)
    assert strategy.sizes == {
        "pp": 1,
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 1,
        "tp": 2,
    }
    monkeypatch.setenv("TRAINER_KIT_PARALLELISM_CONFIG_CP_SIZE", "2")
    found = tk.ParallelismConfig(tp_size=1)
    assert found.sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 1}
    assert found.cp_handler.cp_comm_strategy == "alltoall"
    mesh = "parallelism_config: {parallelism_config_tp_size: 2}\n"
    with pytest.raises(
        ConfigurationError, match="this engine does not support a device mesh"
    ):
        plan(options("distributed_type: DEEPSPEED\nnum_processes: 2\n" + mesh), ALONE)
    with pytest.raises(
        ConfigurationError, match="dividing sequences by DeepSpeed is not supported yet"
    ):
        plan(
            options(SAMPLES["fsdp2.yaml"].replace("_sp_size: 1", "_sp_size: 2")), ALONE
        )
    alone = plan(
        options("distributed_type: MULTI_CPU\nnum_processes: 2\n" + mesh), ALONE
    ).environ
    assert alone["TRAINER_KIT_PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert "TRAINER_KIT_DISTRIBUTED_TYPE" not in alone


def test_tpus_are_driven_by_one_process_or_by_one_each() -> None:
    with pytest.raises(
        ConfigurationError, match="TPU pods are not supported yet"
    ) as caught:
        plan(options(SAMPLES["tpu.yaml"]), ALONE)
    assert str(caught.value.found) == "tpu_use_cluster=True (config.yaml:4)"
    text = SAMPLES["tpu.yaml"].replace("use_cluster: true", "use_cluster: false")
    made = plan(
        options(text + "num_processes: 1\nmixed_precision: bf16\nmax_restarts: 2\n"),
        ALONE,
    )
    assert (made.processes, made.in_place, made.through, made.max_restarts) == (
        1,
        False,
        (),
        2,
    )
    assert {
        "A": "1",
        "TRAINER_KIT_DISTRIBUTED_TYPE": "XLA",
        "TRAINER_KIT_MIXED_PRECISION": "bf16",
    }.items() <= (made.environ.items())
    assert {"tpu_name", "tpu_zone", "tpu_vm", "downcast_bf16"} == set(made.ignored)
    made = plan(
        options(
            "distributed_type: TPU\nnum_processes: 1\nmain_training_function: run\n"
        ),
        ALONE,
    )
    assert tuple(made.ignored) == ("main_training_function",)
    made = plan(
        options("distributed_type: TPU\nnum_processes: 8\nmax_restarts: 2\n"), ALONE
    )
    assert (made.processes, made.in_place, made.max_restarts, tuple(made.ignored)) == (
        1,
        True,
        0,
        ("max_restarts",),
    )
    assert made.through == ("-m", "trainer_kit.launch.each_device")
    assert made.environ["TRAINER_KIT_NUM_PROCESSES"] == "8"
    with pytest.raises(ConfigurationError, match="TPU pods are not supported yet"):
        plan(
            options("distributed_type: TPU\nnum_processes: 8\nnum_machines: 2\n"), ALONE
        )


def test_a_job_on_sagemaker_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="does not start a SageMaker job"
    ) as caught:
        plan(options(SAMPLES["sagemaker.yaml"]), ALONE)
    assert "config.yaml:" in str(caught.value.found)
    assert caught.value.fix


def test_fp8_options_reach_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SAMPLES["accelerates_fp8.yaml"].replace("MULTI_GPU", "MULTI_CPU")
    found = plan(options(text), ALONE)
    told = {
        name.removeprefix("TRAINER_KIT_").lower(): value
        for name, value in found.environ.items()
    }
    assert (told["mixed_precision"], told["fp8_backend"], told["fp8_format"]) == (
        "fp8",
        "TE",
        "E4M3",
    )
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    assert launched_recipe() == tk.TERecipeKwargs(
        fp8_format="E4M3", amax_compute_algo="max"
    )
    if importlib.util.find_spec("transformer_engine") is None:
        for make in (
            tk.Accelerator,
            lambda: tk.Trainer(logger=False, enable_checkpointing=False),
        ):
            with pytest.raises(
                PrecisionError, match="this precision needs Transformer Engine"
            ):
                make()
    monkeypatch.setenv("TRAINER_KIT_FP8_BACKEND", "AO")
    assert launched_recipe() == tk.AORecipeKwargs()
    monkeypatch.setenv("TRAINER_KIT_FP8_BACKEND", "XY")
    with pytest.raises(ConfigurationError, match="fp8_backend is one of TE, MSAMP, AO"):
        launched_recipe()
    plain = plan(
        options(text.replace("mixed_precision: fp8", "mixed_precision: bf16")), ALONE
    ).environ
    assert not [name for name in plain if "FP8" in name]


def kind(
    text: str, *words: str, environ: dict[str, str] | None = None
) -> tuple[str | None, bool]:
    found = options(text, flags(**dict.fromkeys(words, True)), environ)
    return found["distributed_type"], bool(found["use_cpu"])


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        ("", (), (None, False)),
        ("", ("cpu",), ("MULTI_CPU", True)),
        ("", ("multi_gpu",), ("MULTI_GPU", False)),
        ("", ("tpu",), ("XLA", False)),
        ("", ("cpu", "use_fsdp"), ("FSDP", True)),
        ("", ("cpu", "use_deepspeed"), ("DEEPSPEED", True)),
        ("", ("cpu", "use_megatron_lm"), ("MEGATRON_LM", True)),
        ("", ("multi_gpu", "use_deepspeed"), ("DEEPSPEED", False)),
        ("", ("cpu", "use_ddp"), ("MULTI_CPU", True)),
        ("distributed_type: FSDP\n", ("cpu",), ("FSDP", True)),
        ("distributed_type: DEEPSPEED\n", ("cpu",), ("DEEPSPEED", True)),
        ("distributed_type: FSDP\n", ("multi_gpu",), ("FSDP", False)),
        ("distributed_type: FSDP\n", ("use_ddp",), (None, False)),
        ("distributed_type: FSDP\n", ("use_deepspeed",), ("DEEPSPEED", False)),
        ("distributed_type: MULTI_NPU\n", ("multi_gpu",), ("MULTI_NPU", False)),
        ("distributed_type: MULTI_NPU\n", ("cpu",), ("MULTI_CPU", True)),
        ("distributed_type: XLA\n", ("cpu",), ("MULTI_CPU", True)),
        ("distributed_type: 'NO'\n", ("multi_gpu",), ("MULTI_GPU", False)),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\n", ("use_fsdp",), ("FSDP", True)),
        ("use_fsdp: true\n", (), ("FSDP", False)),
        ("use_ddp: true\nuse_cpu: true\n", (), (None, True)),
        ("distributed_type: MULTI_GPU\nuse_ddp: true\n", (), ("MULTI_GPU", False)),
        (
            "distributed_type: MULTI_GPU\nuse_deepspeed: true\n",
            (),
            ("DEEPSPEED", False),
        ),
    ],
)
def test_devices_and_engine_are_two_choices(
    text: str, words: tuple[str, ...], found: tuple[str | None, bool]
) -> None:
    assert kind(text, *words) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("cpu", "multi_gpu")),
        ("", ("use_fsdp", "use_deepspeed")),
        ("", ("tpu", "use_fsdp")),
        ("use_fsdp: true\nuse_ddp: true\n", ()),
        ("distributed_type: FSDP\nuse_deepspeed: true\n", ()),
    ],
)
def test_one_level_asks_for_one_kind_of_run(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="only one kind of run can be chosen"):
        kind(text, *words)


def test_defaults_of_the_wizard_do_not_override_variables() -> None:
    wizards = SAMPLES["plain.yaml"] + "dynamo_backend: 'NO'\n"
    around = {
        "ACCELERATE_DEBUG_MODE": "1",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_USE_CPU": "true",
    }
    found = options(wizards, None, around)
    assert (found["debug"], found["dynamo_backend"], found["use_cpu"]) == (
        True,
        "INDUCTOR",
        True,
    )
    assert (
        found.origin("debug")
        == "environment ACCELERATE_DEBUG_MODE, before the default in config.yaml:2"
    )
    made = plan(found, ALONE).environ
    assert (made["TRAINER_KIT_DEBUG"], made["TRAINER_KIT_DYNAMO_BACKEND"]) == (
        "1",
        "INDUCTOR",
    )
    # A value that says something counts before a variable, also where that is off.
    found = options("debug: true\n", None, {"ACCELERATE_DEBUG_MODE": "0"})
    assert (found["debug"], found.origin("debug")) == (True, "config.yaml:1")
    # So does a file before what another launch has left in the environment.
    outer = plan(options("mixed_precision: bf16\nuse_cpu: true\n"), ALONE).environ
    assert (
        options("mixed_precision: 'no'\n", None, dict(outer))["mixed_precision"] == "no"
    )
    assert options(wizards, flags(debug=False), around)["debug"] is False


def test_variables_of_a_file_reach_the_script() -> None:
    text = "distributed_type: MULTI_CPU\nnum_processes: 2\nenvironment:\n  NCCL_DEBUG: INFO\n  OTHER: '1'\n"
    found = options(text, flags(tpu_env=["OTHER=2", "EMPTY="]))
    assert {"NCCL_DEBUG": "INFO", "OTHER": "2", "EMPTY": ""}.items() <= plan(
        found, ALONE
    ).environ.items()
    assert "OTHER" not in os.environ
    for wrong, problem in {
        "environment: [A]\n": "is a mapping of variables",
        "environment: {A: [1]}\n": "a variable is written as NAME=TEXT",
        "environment: {A B: x}\n": "a variable is written as NAME=TEXT",
        "tpu_env: [A]\n": "a variable is written as NAME=TEXT",
        "environment: {WORLD_SIZE: 4}\n": "launch sets this variable itself",
    }.items():
        with pytest.raises(ConfigurationError, match=problem):
            plan(options(wrong), ALONE)


def test_a_named_tpu_file_is_read(tmp_path: Path) -> None:
    Path("pod.yaml").write_text("tpu_env: [A=1]\ntpu_name: pod\ndowncast_bf16: 'yes'\n")
    found = options("num_processes: 1\ntpu_config_file: pod.yaml\n")
    assert (found["distributed_type"], found["tpu_env"], found.origin("tpu_name")) == (
        "XLA",
        ["A=1"],
        "config.yaml:2",
    )
    assert plan(found, ALONE).environ["A"] == "1"
    Path("pod.yaml").write_text("num_processes: 8\n")
    with pytest.raises(
        ConfigurationError,
        match=r"yaml:1: tpu_config_file: pod\.yaml:1: num_processes is not a TPU key",
    ):
        options("tpu_config_file: pod.yaml\n")


def test_a_mesh_that_is_asked_for_has_an_axis() -> None:
    size = "parallelism_config: {parallelism_config_tp_size: 2}\n"
    given = cpu(num_processes=2, use_parallelism_config=True)
    assert (
        plan(options(size, given), ALONE).environ[
            "TRAINER_KIT_PARALLELISM_CONFIG_TP_SIZE"
        ]
        == "2"
    )
    for text, words in (
        ("", given),
        (size, cpu(num_processes=2, use_parallelism_config=False)),
    ):
        with pytest.raises(
            ConfigurationError, match="a parallelism_config needs an axis above 1"
        ):
            plan(options(text, words), ALONE)
    with pytest.raises(ConfigurationError, match="only one kind of run can be chosen"):
        plan(options(size, cpu(num_processes=2, use_ddp=True)), ALONE)


def test_the_rendezvous_timeout_is_read() -> None:
    given = cpu(num_processes=2, num_machines=2, main_process_ip="10.0.0.7")
    assert plan(options("rdzv_conf: timeout=30\n", given), ALONE).machines.timeout == 30
    assert list(plan(options("rdzv_conf: timeout=30\n", cpu()), ALONE).ignored) == [
        "rdzv_conf"
    ]
    assert list(plan(options("rdzv_backend: c10d\n", given), ALONE).ignored) == [
        "rdzv_backend"
    ]
    with pytest.raises(ConfigurationError, match="not by torch's rendezvous"):
        plan(options("rdzv_conf: is_host=1\n", given), ALONE)


def test_options_that_need_an_agent_start_one() -> None:
    assert not plan(options("", cpu()), ALONE).supervised
    for option in (
        {"tee": "3"},
        {"log_dir": "logs"},
        {"role": "worker"},
        {"max_restarts": 1},
    ):
        assert plan(options("", cpu(**option)), ALONE).supervised
    slurm = Environment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        source="slurm",
    )
    found = plan(options("", cpu(tee="3", max_restarts=2)), slurm)
    assert (found.supervised, tuple(found.ignored)) == (False, ("tee", "max_restarts"))


def test_options_without_effect_are_named() -> None:
    found = plan(
        options(SAMPLES["multi_cpu.yaml"] + "enable_cpu_affinity: true\n"), ALONE
    )
    assert found.ignored == {
        "enable_cpu_affinity": "processes are not bound to cores",
        "mpirun_hostfile": "mpirun is not started from here",
        "mpirun_ccl": "mpirun is not started from here",
    }


def test_under_slurm_one_task_for_each_process() -> None:
    here = Environment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        source="slurm",
    )
    found = plan(options("", cpu()), here)
    assert (found.in_place, found.processes) == (True, 2)
    with pytest.raises(
        ConfigurationError, match="starts a different number of processes"
    ):
        plan(options("", cpu(num_processes=8)), here)


def test_under_slurm_one_task_on_each_machine() -> None:
    here = Environment(
        rank=1,
        world_size=2,
        local_world_size=1,
        node_rank=1,
        master_addr="node1",
        master_port=15001,
        source="slurm",
    )
    assert plan(options("", cpu()), here).in_place
    found = plan(options("", cpu(num_processes=4)), here)
    assert (found.in_place, found.processes) == (False, 2)
    machines = found.machines
    assert (machines.count, machines.rank, machines.address, machines.port) == (
        2,
        1,
        "node1",
        15001,
    )


def test_a_launcher_of_one_process_is_none() -> None:
    found = plan(options("", cpu(num_processes=2)), Environment(source="slurm"))
    assert (found.in_place, found.processes, found.machines.count) == (False, 2, 1)
