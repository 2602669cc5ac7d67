"""The table of all options of a launch: name, aliases, type, section, help, and why an option has no effect.

The names are Accelerate's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

from trainer_kit.core.configuration_sources import Chosen, is_true
from trainer_kit.core.errors import ConfigurationError

__all__ = [
    "ENGINES",
    "ENGINE_WORDS",
    "SECTIONS",
    "TOP",
    "Option",
    "all_options",
    "positive",
    "several_on",
    "with_kind",
]


def _boolean(text: str) -> bool:
    if is_true(text) or text.lower() in ("false", "no", "off", "0", "n"):
        return is_true(text)
    raise ValueError("is true or false")


def _make_integer_reader(
    kind: str = "an integer", low: float = -math.inf, high: float = math.inf
) -> Callable[[str], int]:
    """Make a reader of integers; the text of its ValueError follows the option's name.

    Example:
        >>> positive("12")
        12
    """

    def read(text: str) -> int:
        # Before int(), which takes time quadratic in the digits and also accepts underscores.
        if not re.fullmatch(r"[+-]?\d{1,15}", text):
            raise ValueError(f"is {kind}")
        number = int(text)
        if not low <= number <= high:
            raise ValueError(f"is {kind}")
        return number

    return read


_integer: Final = _make_integer_reader()
_natural: Final = _make_integer_reader("an integer ≥ 0", 0)
positive: Final = _make_integer_reader("an integer ≥ 1", 1)
_port: Final = _make_integer_reader("a port, 0 to 65535", 0, 65535)


def _number(text: str) -> float:
    if len(text) > 30 or not re.fullmatch(
        r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text
    ):
        raise ValueError("is a number")
    return float(text)


def _automatic(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader that also accepts ``auto``, which DeepSpeed replaces by a value, and ``none``."""

    def convert(text: str) -> Any:
        lower = text.lower()
        if lower == "auto":
            return "auto"
        if lower == "none":
            return None
        return read(text)

    return convert


def _seconds(text: str) -> float:
    seconds = _number(text)
    if seconds <= 0:
        raise ValueError("is a number of seconds above 0")
    return seconds


def _streams(text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d{1,5}:[0-3](,\d{1,5}:[0-3])*", text):
        raise ValueError(
            "is 0 to 3 (none, stdout, stderr, both), or RANK:NUMBER of each local rank such as 0:1,1:3"
        )
    return text


@final
@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: its name on the command line; a file may leave out the prefix of its section.
        read: turns the text of a file, a flag or a variable into a value, or raises a ValueError with the reason.
        section: the mapping of a file that contains it; empty for the top level.
        words: its possible values, for a choice.
        aliases: its other names in a file.
        many: whether it is a list.
        free: whether it is a mapping or a list of arbitrary values.
        help: its text in ``--help``, which lists only options with a text.
        flags: its names on the command line, if they differ from ``--name``; () for an option of files only.
        switch: whether its flag has no value.
        ignored: why it has no effect; empty for an option with an effect.
    """

    name: str
    read: Callable[[str], Any] = str
    section: str = ""
    words: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    many: bool = False
    free: bool = False
    help: str = ""
    flags: tuple[str, ...] | None = None
    switch: bool = False
    ignored: str = ""

    @property
    def whole(self) -> bool:
        """Whether its value is a whole number."""
        return self.read in (_integer, _natural, positive, _port)

    def value(self, text: str) -> Any:
        """Read a value from a text.

        Raises:
            ValueError: the text is not a value of this option; the message follows the option's name.

        Example:
            >>> TOP["mixed_precision"].value("BF16"), TOP["distributed_type"].value("FSDP")
            ('bf16', 'FSDP')
            >>> SECTIONS["fsdp_config"]["fsdp_sharding_strategy"].value("2")
            'SHARD_GRAD_OP'
        """
        if not self.words:
            return self.read(text)
        choices = {choice.lower(): choice for choice in self.words}
        choice = choices.get(text.lower())
        # A number refers to torch's enumeration, which counts from 1.
        if self.section == "fsdp_config" and re.fullmatch("[1-9]", text):
            if int(text) <= len(self.words):
                choice = self.words[int(text) - 1]
        # In JSON; YAML writes: no.
        if text.lower() == "false":
            choice = choices.get("no")
        if choice is None:
            raise ValueError(f"is one of {', '.join(self.words)}")
        return choice


ENGINES: Final = {"TP": "tensor parallelism"}
"""The kinds of run that can be read but not started yet."""

ENGINE_WORDS: Final[Mapping[str, str | None]] = {
    "use_ddp": None,
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
}
"""The options that choose how a model is distributed, and the ``distributed_type`` of each; None: replicated."""

_KINDS: Final = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "DEEPSPEED", "FSDP", "MEGATRON_LM", *sorted(ENGINES), "TPU", "XLA",
    "DATA_PARALLEL", "MODEL_PARALLEL",
)  # fmt: skip
_DYNAMO: Final = (
    "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT",
    "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND",
)  # fmt: skip


def several_on(device: str) -> str:
    """The ``distributed_type`` of a run on several devices of one type; takes torch's name of the type.

    Example:
        >>> several_on("npu"), several_on("cuda")
        ('MULTI_NPU', 'MULTI_GPU')
    """
    kind = f"MULTI_{device.upper()}"
    # CUDA among others: the words are Accelerate's, which calls every other device a GPU.
    if kind not in _KINDS:
        return "MULTI_GPU"
    return kind


def _each(
    read: Callable[[str], Any], *names: str, ignored: str = ""
) -> tuple[Option, ...]:
    return tuple(Option(name, read, ignored=ignored) for name in names)


def _section(section: str, prefix: str, *options: Option) -> dict[str, Option]:
    """Options of a mapping. Their names on the command line begin with ``prefix``, which a file may leave out."""
    converted = {}
    for option in options:
        name = f"{prefix}{option.name}"
        aliases = (
            option.name,
            *(f"{prefix}{alias}" for alias in option.aliases),
            *option.aliases,
        )
        converted[name] = replace(
            option,
            name=name,
            section=section,
            aliases=tuple(a for a in aliases if a != name),
        )
    return converted


_POD: Final = "the machines of a TPU pod are not started from here"
_DEEPSPEED_LAUNCHER: Final = "DeepSpeed's own launcher is not used"
_SWITCH: Final[Mapping[str, Any]] = {"read": _boolean, "switch": True}

_TOP: Final = (
    Option("use_cpu", _boolean, aliases=("cpu",), flags=("--cpu",), switch=True,
           help="Run on the CPU; keeps the engine of another flag or of the file."),
    Option("multi_gpu", **_SWITCH, help="Run on several devices of this machine."),
    Option("use_ddp", **_SWITCH, help="Use data parallelism, and ignore the engine in the file."),
    Option("use_fsdp", **_SWITCH, help="Use FSDP."),
    Option("use_deepspeed", **_SWITCH, help="Use DeepSpeed."),
    Option("use_megatron_lm", **_SWITCH, help="Use Megatron-LM."),
    Option("tpu", **_SWITCH, help="Run on the TPUs of this machine, through torch_xla."),
    Option("debug", **_SWITCH, help="Check collectives first; each process prints its own values."),
    Option("num_processes", _integer, help="Processes, on all machines together."),
    Option("mixed_precision", words=("no", "fp16", "bf16", "fp8"), help="no, fp16, bf16 or fp8."),
    Option("gradient_accumulation_steps", _automatic(positive), help="Micro-batches per optimizer step."),
    Option("gpu_ids", help='Devices of this machine: "0,1", or "all".'),
    Option("num_machines", positive, help="Machines; start this command on each."),
    Option("machine_rank", _natural, help="The number of this machine, from 0."),
    Option("main_process_ip", help="Address of machine 0."),
    Option("main_process_port", _port, help="Port of the rendezvous on machine 0."),
    Option("num_cpu_threads_per_process", positive, help="OMP_NUM_THREADS."),
    Option("max_restarts", _natural, help="How often all processes are restarted after a failure."),
    Option("compute_environment", words=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), flags=()),
    Option("distributed_type", words=_KINDS, flags=()),
    Option("main_training_function"),
    Option("use_parallelism_config", **_SWITCH),
    Option("rdzv_backend", words=("static", "c10d")),
    Option("rdzv_conf"),
    Option("monitor_interval", _seconds),
    Option("role"),
    Option("tee", _streams, flags=("--tee", "-t")),
    Option("log_dir"),
    Option("same_network", **_SWITCH),
    Option("downcast_bf16", **_SWITCH, ignored="the precision of XLA is mixed_precision"),
    Option("enable_cpu_affinity", **_SWITCH, ignored="processes are not bound to cores"),
    *_each(str, "tpu_name", "tpu_zone", ignored=f"{_POD}; tpu-config reads it"),
    Option("tpu_vm", many=True, aliases=("vm",), flags=("--tpu_vm", "--vm"), ignored=_POD),
    Option("tpu_use_cluster", **_SWITCH, aliases=("tpu_cluster",),
           flags=("--tpu_use_cluster", "--tpu_cluster/--no_tpu_cluster")),
    Option("tpu_use_sudo", **_SWITCH),
    Option("tpu_env", many=True, flags=("--tpu_env", "--env")),
    Option("tpu_config_file", flags=()),
    Option("environment", free=True, aliases=("env",), flags=()),
    Option("command_file"),
    Option("commands", many=True),
    Option("fp16", _boolean, flags=()),
    *_each(str, "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name",
           "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file"),
    Option("additional_args", free=True),
    *_each(str, "aws_access_key_id", "aws_secret_access_key"),
)  # fmt: skip
TOP: Final[Mapping[str, Option]] = {option.name: option for option in _TOP}
"""The options of the top level of a file."""

SECTIONS: Final[Mapping[str, Mapping[str, Option]]] = {
    "dynamo_config": _section(
        "dynamo_config", "dynamo_",
        Option("backend", words=_DYNAMO, help="Backend of torch.compile."),
        Option("mode", words=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
        Option("use_fullgraph", **_SWITCH),
        Option("use_dynamic", **_SWITCH),
        Option("use_regional_compilation", **_SWITCH),
    ),
    "fsdp_config": _section(
        "fsdp_config", "fsdp_",
        Option("version", _integer),
        Option("sharding_strategy",
               words=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")),
        Option("reshard_after_forward"),  # in version 1 this was the sharding strategy
        Option("offload_params", _boolean),
        Option("min_num_params", _integer),
        Option("auto_wrap_policy", words=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
        Option("transformer_layer_cls_to_wrap"),
        Option("backward_prefetch", words=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
               aliases=("backward_prefetch_policy",)),
        Option("state_dict_type", words=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
        *_each(_boolean, "forward_prefetch", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states",
               "activation_checkpointing", "activation_checkpointing_offload"),
        Option("ignored_modules"),
    ),
    "deepspeed_config": _section(
        "deepspeed_config", "",
        Option("deepspeed_multinode_launcher", ignored=_DEEPSPEED_LAUNCHER,
               words=("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")),
        *_each(str, "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
               ignored=_DEEPSPEED_LAUNCHER),
        Option("zero_stage", _automatic(_integer)),
        Option("offload_optimizer_device", words=("none", "cpu", "nvme")),
        Option("offload_param_device", words=("none", "cpu", "nvme")),
        Option("gradient_accumulation_steps", _automatic(_integer)),
        Option("gradient_clipping", _automatic(_number)),
        Option("zero3_init_flag", _boolean),
        Option("zero3_save_16bit_model", _boolean, ignored="saving does not read it"),
        *_each(str, "offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_config_file",
               "deepspeed_moe_layer_cls_names"),
    ),
    "megatron_lm_config": _section(
        "megatron_lm_config", "megatron_lm_",
        *_each(_integer, "tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers",
               "expert_model_parallel_size", "context_parallel_size", "expert_tensor_parallel_size",
               "decoder_last_pipeline_num_layers"),
        *_each(_boolean, "sequence_parallelism", "recompute_activations", "use_distributed_optimizer",
               "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "no_save_optim", "optimizer_cpu_offload",
               "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "attention_softmax_in_fp32",
               "calculate_per_token_loss", "use_rotary_position_embeddings"),
        *_each(_number, "gradient_clipping", "attention_dropout", "hidden_dropout"),
        *_each(str, "recompute_granularity", "recompute_method", "attention_backend"),
    ),
    "fp8_config": _section(
        "fp8_config", "fp8_",
        Option("backend", words=("TE", "MSAMP", "AO")),
        Option("use_autocast_during_eval", **_SWITCH),
        *_each(_integer, "margin", "interval"),
        Option("format", words=("E4M3", "HYBRID", "E5M2")),
        Option("amax_history_len", _integer, aliases=("amax_history_length",)),
        Option("amax_compute_algo", words=("max", "most_recent"), aliases=("amax_compute_algorithm",)),
        Option("override_linear_precision", free=True),
        Option("opt_level", words=("O1", "O2"), aliases=("optimization_level",)),
        Option("enable_fsdp_float8_all_gather", _boolean, ignored="torchao would replace parameters"),
        Option("pad_inner_dim", _boolean),
    ),
    "parallelism_config": _section(
        "parallelism_config", "parallelism_config_",
        *_each(_integer, "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "sp_seq_length"),
        *_each(str, "cp_backend", "cp_comm_strategy", "sp_backend", "sp_attn_implementation"),
        Option("sp_seq_length_is_variable", _boolean),
    ),
    "mpirun_config": _section(
        "mpirun_config", "mpirun_", *_each(str, "hostfile", "ccl", ignored="mpirun is not started from here")
    ),
    "ipex_config": _section("ipex_config", "", *_each(_boolean, "ipex", "use_xpu", ignored="IPEX is not used")),
}  # fmt: skip
"""The sections of a file, with their options by command-line name; an engine's section has the engine's name."""


def all_options() -> dict[str, Option]:
    """Every option by its name on the command line; the top level has priority over a section with the same name.

    Example:
        >>> len(all_options()) > 100
        True
    """
    options = dict(TOP)
    for section in SECTIONS.values():
        for name, option in section.items():
            options.setdefault(name, option)
    return options


_DEVICES: Final = ("cpu", "multi_gpu", "tpu")
_ENGINES: Final = (*(kind for kind in ENGINE_WORDS.values() if kind is not None), "TP")


def with_kind(*levels: Mapping[str, Chosen]) -> dict[str, Chosen]:
    """Merge the options of several levels, and derive ``distributed_type`` and ``use_cpu`` from them.

    Devices and engine are two choices: ``--cpu`` keeps the engine of a file, ``--use_fsdp`` keeps its devices.

    Args:
        levels: each has priority over those to its left; the first has both options. ``cpu`` may be among them.

    Raises:
        ConfigurationError: two engines, or two kinds of devices, at one level.

    Example:
        >>> defaults = {"distributed_type": Chosen(None, "default"), "use_cpu": Chosen(False, "default")}
        >>> file, flags = {"use_fsdp": Chosen(True, "a.yaml:1")}, {"cpu": Chosen(True, "flag --cpu")}
        >>> found = with_kind(defaults, file, flags)
        >>> found["distributed_type"].value, found["use_cpu"].value
        ('FSDP', True)
    """
    settings: dict[str, Chosen] = {}
    # Level by level: what a level derives is there for the next one, which may change only devices or engine.
    for level in levels:
        settings = {**settings, **level}
        settings.update(_derived(level, settings))
    # It is another word for `use_cpu`, which has been derived from it.
    settings.pop("cpu", None)
    return settings


def _derived(
    level: Mapping[str, Chosen], chosen: Mapping[str, Chosen]
) -> dict[str, Chosen]:
    """``distributed_type`` and ``use_cpu`` as the options of one level set them, else their earlier values."""
    devices = [name for name in _DEVICES if _is_on(level, name)]
    engines = [name for name in ENGINE_WORDS if _is_on(level, name)]
    earlier_kind = chosen["distributed_type"]
    kind = earlier_kind
    on_cpu = chosen["use_cpu"]
    _only_one(level, devices)
    _only_one(level, engines)
    # XLA is device and engine at once.
    if "tpu" in devices:
        _only_one(level, [*devices, *engines])
    if devices:
        on_cpu = Chosen(devices[0] == "cpu", level[devices[0]].origin)
    if engines:
        engine = ENGINE_WORDS[engines[0]]
        # At another level it is replaced; at the same level neither of the two counts more.
        contradicts = earlier_kind.value in _ENGINES and earlier_kind.value != engine
        if contradicts and "distributed_type" in level:
            _only_one(level, ["distributed_type", engines[0]])
        if engine is not None or not _on_several(earlier_kind):
            kind = Chosen(engine, level[engines[0]].origin)
    if "tpu" in devices:
        kind = Chosen("XLA", level["tpu"].origin)
    elif "cpu" in devices and kind.value not in _ENGINES:
        kind = Chosen("MULTI_CPU", level["cpu"].origin)
    elif "multi_gpu" in devices and kind.value not in _ENGINES:
        # A more exact kind, such as MULTI_NPU, stays.
        if kind.value == "MULTI_CPU" or not _on_several(kind):
            kind = Chosen("MULTI_GPU", level["multi_gpu"].origin)
    return {"distributed_type": kind, "use_cpu": on_cpu}


def _is_on(level: Mapping[str, Chosen], name: str) -> bool:
    return name in level and bool(level[name].value)


def _on_several(kind: Chosen) -> bool:
    return str(kind.value).startswith("MULTI_")


def _only_one(level: Mapping[str, Chosen], names: Iterable[str]) -> None:
    conflicting = list(names)
    if len(conflicting) > 1:
        raise ConfigurationError(
            "only one kind of run can be chosen",
            found=", ".join(
                f"{name}={level[name].value} ({level[name].origin})"
                for name in conflicting
            ),
        )
