"""Every option of a configuration file: its name, what it may be, and where it stands. The names are Accelerate's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from trainer_kit.core.configuration_sources import is_true

__all__ = ["ENGINES", "ENGINE_WORDS", "SECTIONS", "TOP", "Option", "all_options", "positive", "several_on"]

_FALSE: Final = ("false", "no", "off", "0", "n")


def _boolean(text: str) -> bool:
    if is_true(text) or text.lower() in _FALSE:
        return is_true(text)
    raise ValueError("is true or false")


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,15}", text):
        raise ValueError("is a whole number")
    return int(text)


def _natural(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise ValueError("is a whole number, 0 or more")
    return number


def positive(text: str) -> int:
    """The number that a text is.

    Raises:
        ValueError: it is none of 1 or more; the message completes "NAME ...".

    Example:
        >>> positive("12")
        12
    """
    number = _integer(text)
    if number < 1:
        raise ValueError("is a whole number, 1 or more")
    return number


def _number(text: str) -> float:
    if len(text) > 30 or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text):
        raise ValueError("is a number")
    return float(text)


def _automatic(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """DeepSpeed fills in ``auto`` itself, and ``none`` is nothing."""

    def convert(text: str) -> Any:
        word = text.lower()
        return word if word == "auto" else None if word == "none" else read(text)

    return convert


def _seconds(text: str) -> float:
    seconds = _number(text)
    if seconds <= 0:
        raise ValueError("is a number of seconds above 0")
    return seconds


def _streams(text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d{1,5}:[0-3](,\d{1,5}:[0-3])*", text):
        raise ValueError("is 0 to 3 (none, stdout, stderr, both), or RANK:NUMBER of each local rank such as 0:1,1:3")
    return text


def _port(text: str) -> int:
    number = _integer(text)
    if not 0 <= number < 65536:
        raise ValueError("is a port, 0 to 65535")
    return number


@final
@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: its name on the command line; in a file, that of its section may be left out.
        read: turns the text of a file, a flag or a variable into a value, or raises a ValueError that says what it is.
        section: the mapping of a file it stands in; empty for none.
        words: what it may be, where that is a choice.
        aliases: other names for it.
        many: whether it is a list.
        free: whether it is a mapping or a list of anything.
    """

    name: str
    read: Callable[[str], Any] = str
    section: str = ""
    words: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    many: bool = False
    free: bool = False

    def value(self, text: str) -> Any:
        """The value that ``text`` stands for.

        Raises:
            ValueError: when it stands for none; the message completes "NAME ...".

        Example:
            >>> TOP["mixed_precision"].value("BF16"), TOP["distributed_type"].value("FSDP")
            ('bf16', 'FSDP')
            >>> SECTIONS["fsdp_config"]["fsdp_sharding_strategy"].value("2")
            'SHARD_GRAD_OP'
        """
        if not self.words:
            return self.read(text)
        by_word = {word.lower(): word for word in self.words}
        found = by_word.get(text.lower())
        # Numbers are those of torch's enumerations, which count from 1.
        if self.section == "fsdp_config" and re.fullmatch("[1-9]", text) and int(text) <= len(self.words):
            found = self.words[int(text) - 1]
        if text.lower() == "false":  # JSON's, of somebody whose YAML said: no
            found = by_word.get("no")
        if found is None:
            raise ValueError(f"is one of {', '.join(self.words)}")
        return found


ENGINES: Final = {"TP": "tensor parallelism"}
"""The kinds of run that load and cannot be started yet."""

ENGINE_WORDS: Final[Mapping[str, str | None]] = {
    "use_ddp": None,
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
}
"""The options that choose how a model is held, and the ``distributed_type`` of each; None: every process holds all."""

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
    """The kind of a run on several devices of this type, as torch calls it.

    Example:
        >>> several_on("npu"), several_on("cuda")
        ('MULTI_NPU', 'MULTI_GPU')
    """
    kind = f"MULTI_{device.upper()}"
    return kind if kind in _KINDS else "MULTI_GPU"


def _table(*options: Option) -> dict[str, Option]:
    return {option.name: option for option in options}


def _section(section: str, prefix: str, *options: Option) -> dict[str, Option]:
    """Options of a mapping. Their names on the command line begin with ``prefix``, which a file may leave out."""
    made = {}
    for option in options:
        aliases = (option.name, *(f"{prefix}{alias}" for alias in option.aliases), *option.aliases)
        name = f"{prefix}{option.name}"
        made[name] = Option(
            name, option.read, section, option.words, tuple(a for a in aliases if a != name), option.many, option.free
        )
    return made


TOP: Final[Mapping[str, Option]] = _table(
    Option("compute_environment", words=("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    Option("distributed_type", words=_KINDS),
    Option("mixed_precision", words=("no", "fp16", "bf16", "fp8")),
    Option("num_processes", _integer),
    Option("num_machines", positive),
    Option("machine_rank", _natural),
    Option("main_process_ip"),
    Option("main_process_port", _port),
    Option("main_training_function"),
    Option("use_cpu", _boolean, aliases=("cpu",)),
    Option("gpu_ids"),
    Option("multi_gpu", _boolean),
    Option("tpu", _boolean),
    *(Option(name, _boolean) for name in ENGINE_WORDS),
    Option("use_parallelism_config", _boolean),
    Option("debug", _boolean),
    Option("gradient_accumulation_steps", _automatic(positive)),
    Option("num_cpu_threads_per_process", positive),
    Option("max_restarts", _natural),
    Option("rdzv_backend", words=("static", "c10d")),
    Option("rdzv_conf"),
    Option("monitor_interval", _seconds),
    Option("role"),
    Option("tee", _streams),
    Option("log_dir"),
    Option("same_network", _boolean),
    Option("enable_cpu_affinity", _boolean),
    Option("downcast_bf16", _boolean),
    Option("tpu_name"),
    Option("tpu_zone"),
    Option("tpu_use_cluster", _boolean, aliases=("tpu_cluster",)),
    Option("tpu_use_sudo", _boolean),
    Option("tpu_vm", many=True, aliases=("vm",)),
    Option("tpu_env", many=True),
    Option("tpu_config_file"),
    Option("environment", free=True, aliases=("env",)),
    Option("command_file"),
    Option("commands", many=True),
    Option("fp16", _boolean),
    Option("ec2_instance_type"),
    Option("iam_role_name"),
    Option("image_uri"),
    Option("profile"),
    Option("region"),
    Option("base_job_name"),
    Option("pytorch_version"),
    Option("transformers_version"),
    Option("py_version"),
    Option("sagemaker_inputs_file"),
    Option("sagemaker_metrics_file"),
    Option("additional_args", free=True),
)

_More = Mapping[str, Mapping[str, Any]]
_TRUTH: Final[Mapping[str, Any]] = {"read": _boolean}
_WHOLE: Final[Mapping[str, Any]] = {"read": _integer}
_DECIMAL: Final[Mapping[str, Any]] = {"read": _number}
_FREE: Final[Mapping[str, Any]] = {"free": True}
_TEXT: Final[Mapping[str, Any]] = {}


def _options(more: _More, *names: str) -> Iterator[Option]:
    for name in names:
        yield Option(name, **more.get(name, {}))


_DYNAMO_OPTIONS: Final = (
    Option("backend", words=_DYNAMO),
    Option("mode", words=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    Option("use_fullgraph", _boolean),
    Option("use_dynamic", _boolean),
    Option("use_regional_compilation", _boolean),
)
_FSDP_OPTIONS: Final = (
    Option("version", _integer),
    Option(
        "sharding_strategy", words=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    ),
    # In version 1 this was the strategy.
    Option("reshard_after_forward"),
    Option("offload_params", _boolean),
    Option("min_num_params", _integer),
    Option("auto_wrap_policy", words=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    Option("transformer_layer_cls_to_wrap"),
    Option(
        "backward_prefetch",
        words=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        aliases=("backward_prefetch_policy",),
    ),
    Option("state_dict_type", words=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
    Option("forward_prefetch", _boolean),
    Option("use_orig_params", _boolean),
    Option("cpu_ram_efficient_loading", _boolean),
    Option("sync_module_states", _boolean),
    Option("activation_checkpointing", _boolean),
    Option("activation_checkpointing_offload", _boolean),
    Option("ignored_modules"),
)
_DEEPSPEED: Final[_More] = {
    "deepspeed_multinode_launcher": {
        "words": ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"),
    },
    "zero_stage": {"read": _automatic(_integer)},
    "offload_optimizer_device": {"words": ("none", "cpu", "nvme")},
    "offload_param_device": {"words": ("none", "cpu", "nvme")},
    "gradient_accumulation_steps": {"read": _automatic(_integer)},
    "gradient_clipping": {"read": _automatic(_number)},
    "zero3_init_flag": _TRUTH,
    "zero3_save_16bit_model": _TRUTH,
}
_MEGATRON: Final[_More] = {
    **dict.fromkeys(
        ("tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers", "expert_model_parallel_size",
         "context_parallel_size", "expert_tensor_parallel_size", "decoder_last_pipeline_num_layers"), _WHOLE),
    **dict.fromkeys(
        ("sequence_parallelism", "recompute_activations", "use_distributed_optimizer", "use_custom_fsdp",
         "no_load_optim", "eod_mask_loss", "no_save_optim", "optimizer_cpu_offload", "use_precision_aware_optimizer",
         "overlap_cpu_optimizer_d2h_h2d", "attention_softmax_in_fp32", "calculate_per_token_loss",
         "use_rotary_position_embeddings"), _TRUTH),
    **dict.fromkeys(("gradient_clipping", "attention_dropout", "hidden_dropout"), _DECIMAL),
    **dict.fromkeys(("recompute_granularity", "recompute_method", "attention_backend"), _TEXT),
}  # fmt: skip
_FP8: Final[_More] = {
    "backend": {"words": ("TE", "MSAMP", "AO")},
    "use_autocast_during_eval": _TRUTH,
    "margin": _WHOLE,
    "interval": _WHOLE,
    "fp8_format": {"words": ("E4M3", "HYBRID", "E5M2"), "aliases": ("format",)},
    "amax_history_len": {"read": _integer, "aliases": ("amax_history_length",)},
    "amax_compute_algo": {"words": ("max", "most_recent"), "aliases": ("amax_compute_algorithm",)},
    "override_linear_precision": _FREE,
    "opt_level": {"words": ("O1", "O2"), "aliases": ("optimization_level",)},
    "enable_fsdp_float8_all_gather": _TRUTH,
    "pad_inner_dim": _TRUTH,
}
_PARALLEL: Final[_More] = {
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "sp_seq_length"), _WHOLE),
    "cp_backend": _TEXT,
    "cp_comm_strategy": _TEXT,
    "sp_backend": _TEXT,
    "sp_seq_length_is_variable": _TRUTH,
    "sp_attn_implementation": _TEXT,
}

SECTIONS: Final[Mapping[str, Mapping[str, Option]]] = {
    "dynamo_config": _section("dynamo_config", "dynamo_", *_DYNAMO_OPTIONS),
    "fsdp_config": _section("fsdp_config", "fsdp_", *_FSDP_OPTIONS),
    "deepspeed_config": _section(
        "deepspeed_config",
        "",
        *_options(
            _DEEPSPEED, *_DEEPSPEED, "offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_config_file",
            "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
            "deepspeed_moe_layer_cls_names",
        ),
    ),
    "megatron_lm_config": _section("megatron_lm_config", "megatron_lm_", *_options(_MEGATRON, *_MEGATRON)),
    "fp8_config": {
        f"fp8_{option.name.removeprefix('fp8_')}": Option(
            f"fp8_{option.name.removeprefix('fp8_')}", option.read, "fp8_config", option.words,
            (option.name, *option.aliases), free=option.free,
        )
        for option in _options(_FP8, *_FP8)
    },
    "parallelism_config": _section("parallelism_config", "parallelism_config_", *_options(_PARALLEL, *_PARALLEL)),
    "mpirun_config": _section("mpirun_config", "mpirun_", Option("hostfile"), Option("ccl")),
    "ipex_config": _section("ipex_config", "", Option("ipex", _boolean), Option("use_xpu", _boolean)),
}  # fmt: skip
"""The mappings of a file, and their options by their names on the command line."""


def all_options() -> dict[str, Option]:
    """Every option by its name on the command line; one of no section comes before one of a section.

    Example:
        >>> len(all_options()) > 100
        True
    """
    found: dict[str, Option] = {}
    for section in reversed(list(SECTIONS.values())):
        found.update(section)
    return {**found, **TOP}
