"""Arguments of Lightning's constructors and methods that are missing here, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainer_kit.core.arguments import Replaced

__all__ = ["ARGUMENTS"]

_CHECKPOINTS = "leave it out: checkpoints are directories, also at any fsspec URL"
_ENVIRONMENT = "leave it out: torchrun, SLURM and MPI are found by their variables"
_ITS_DEVICES = (
    "Trainer(devices=...) or Fabric(devices=...); the strategy gets its device there"
)
_NVME = "leave it out: checkpoints do not support state that is offloaded to NVMe"
_BY_THE_RUN = "leave it out: devices and precision of the run set it"
_FSDP1 = "leave it out: it is an option of FSDP1, and this strategy is torch's FSDP2"


def _key(section: str, name: str, *same: object) -> Replaced:
    """The row for an argument that is a key of DeepSpeed's JSON."""
    # Braces of the JSON are doubled, because the text goes through str.format, which puts in the value.
    entry = f'{{{{"{name}": {{value}}}}}}'
    sections = []
    if section:
        sections = section.split(".")
    for outer in reversed(sections):
        entry = f'{{{{"{outer}": {entry}}}}}'
    return Replaced(f"config={entry}", same)


_DEEPSPEED: Final = {
    **{
        name: _key("zero_optimization", name)
        for name in (
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "sub_group_size",
        )
    },
    **{
        name: _key("activation_checkpointing", name, False)
        for name in (
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "partition_activations",
            "synchronize_checkpoint_boundary",
        )
    },
    **{
        name: _key("fp16", name)
        for name in (
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        )
    },
    # Options of DeepSpeed's NVMe offloading and of its asynchronous I/O library.
    **dict.fromkeys(
        (
            "block_size",
            "max_in_cpu",
            "nvme_path",
            "optimizer_buffer_count",
            "overlap_events",
            "params_buffer_count",
            "params_buffer_size",
            "queue_depth",
            "single_submit",
            "thread_count",
        ),
        Replaced(_NVME),
    ),
    "exclude_frozen_parameters": Replaced(
        "leave it out: a checkpoint holds all parameters, so that it loads by itself",
        (False,),
    ),
    "load_full_weights": Replaced(
        "leave it out: a checkpoint holds whole tensors, which load at every stage"
    ),
    "logging_batch_size_per_gpu": Replaced(
        "leave it out: the loader defines the batch size", ("auto",)
    ),
    "logging_level": Replaced('logging.getLogger("DeepSpeed").setLevel({value})'),
    # "cpu" passes: it is what offload_optimizer=True does here.
    "offload_optimizer_device": Replaced(_NVME, ("cpu", None)),
    "offload_params_device": Replaced(_NVME, ("cpu", None)),
    "pin_memory": _key("zero_optimization.offload_optimizer", "pin_memory", False),
    "remote_device": Replaced(
        "leave it out: configure_model builds each layer in its parts"
    ),
    "zero_allow_untested_optimizer": _key("", "zero_allow_untested_optimizer"),
    "zero_optimization": Replaced("stage=0 turns ZeRO off", (True,)),
}

ARGUMENTS: Final[Mapping[str, Mapping[str, Replaced]]] = {
    "AdvancedProfiler": {
        "dump_stats": Replaced(
            "leave it out: the statistics are always written, as .prof", (True,)
        )
    },
    "DDPStrategy": {
        **dict.fromkeys(
            (
                "check_reduction",
                "delay_all_reduce_named_params",
                "device_ids",
                "device_mesh",
                "dim",
                "mixed_precision",
                "output_device",
                "param_to_hook_all_reduce",
                "skip_all_reduce_unused_params",
            ),
            Replaced(_BY_THE_RUN),
        ),
        "batched_grad_copy": Replaced(
            "leave it out: gradient_as_bucket_view=True, the default, copies no gradients",
            (False,),
        ),
        "bucket_cap_mb_list": Replaced(
            "bucket_cap_mb=..., one size for all buckets", (None,)
        ),
        "forward_sync_buffers": Replaced("broadcast_buffers={value}", (True, None)),
        "init_sync": Replaced(
            "leave it out: rank 0's weights are always broadcast", (True,)
        ),
        "model_averaging_period": Replaced(
            "local_sgd=PostLocalSGD(period={value}, ...)", (None,)
        ),
        "start_method": Replaced(
            'leave it out: the Trainer starts processes; Fabric(strategy="ddp_fork") forks',
            ("popen",),
        ),
    },
    "DeepSpeedStrategy": _DEEPSPEED,
    "FSDPStrategy": {
        **dict.fromkeys(
            (
                "backward_prefetch",
                "device_id",
                "forward_prefetch",
                "ignored_parameters",
                "limit_all_gathers",
                "param_init_fn",
                "process_group",
                "sync_module_states",
                "use_orig_params",
            ),
            Replaced(_FSDP1),
        ),
        "activation_checkpointing": Replaced(
            "activation_checkpointing_policy={value}", (None,)
        ),
        "ignored_states": Replaced("ignored_modules={value}", (None,)),
        # Either value passes: what is stored does not depend on it here.
        "state_dict_type": Replaced(
            "leave it out: checkpoints in shards load under any strategy, and trainer-kit checkpoint"
            " export writes one file",
            ("full", "sharded"),
        ),
    },
    "MixedPrecision": {
        "precision": Replaced("dtype=torch.float16 or dtype=torch.bfloat16"),
        "device": Replaced("device_type={value}"),
    },
    "ModelPruning": {
        "make_pruning_permanent": Replaced(
            "leave it out: checkpoints hold plain pruned weights; masks are in the callback's state",
            (True,),
        ),
        "prune_on_train_epoch_end": Replaced(
            "leave it out: weights are pruned at the end of training epochs, before a validation"
            " at the end of the epoch",
            (True,),
        ),
        "resample_parameters": Replaced(
            "leave it out: the lottery ticket hypothesis takes the first values; override"
            " on_train_epoch_end in a Callback after this one to draw others",
            (False,),
        ),
    },
    "PyTorchProfiler": {
        "emit_nvtx": Replaced(
            "with torch.autograd.profiler.emit_nvtx(): trainer.fit(...)", (False,)
        ),
        "export_to_chrome": Replaced(
            "leave it out: a Chrome trace is always written", (True,)
        ),
        "group_by_input_shapes": Replaced(
            "record_shapes={value} in the trace; prof.key_averages(group_by_input_shape=True) is"
            " torch's table",
            (False,),
        ),
        "record_module_names": Replaced("with_modules={value}"),
        "table_kwargs": Replaced("row_limit= and sort_by_key=", (None,)),
    },
    "SimpleProfiler": {
        "extended": Replaced(
            "leave it out: the table has calls, means and percentages", (True,)
        )
    },
    "SpikeDetection": {
        "finite_only": Replaced(
            'leave it out: a loss that is not finite ends the run; NaNGuard("skip") trains without'
            " its step",
            (True,),
        ),
    },
    "Strategy": {
        "accelerator": Replaced(
            "Trainer(accelerator=...) or Fabric(accelerator=...)", (None,)
        ),
        "checkpoint_io": Replaced(_CHECKPOINTS, (None,)),
        "cluster_environment": Replaced(_ENVIRONMENT, (None,)),
        "parallel_devices": Replaced(_ITS_DEVICES, (None,)),
        "precision": Replaced("Trainer(precision={value})", (None,)),
        "precision_plugin": Replaced("Trainer(plugins={value})", (None,)),
    },
    "ThroughputMonitor": {
        "separator": Replaced("leave it out: names have a slash", ("/",)),
        "window_size": Replaced(
            "Trainer(log_every_n_steps={value}): rates are of the steps since the last ones"
        ),
    },
    "Trainer.save_checkpoint": {
        "storage_options": Replaced(
            "leave it out: fsspec reads credentials from its configuration and variables",
            (None,),
        ),
    },
    "TransformerEnginePrecision": {
        "fallback_compute_dtype": Replaced(
            'base="bf16-mixed" or a precision object', (None,)
        ),
        "weights_dtype": Replaced('base="bf16-true" or "16-true"'),
    },
    "WandbLogger": {
        "add_file_policy": Replaced(
            "leave it out: wandb copies the files of a checkpoint before it uploads them",
            ("mutable",),
        ),
    },
    "XLAStrategy": {
        "debug": Replaced("PT_XLA_DEBUG=1 in the environment", (False,)),
        "sync_module_states": Replaced(
            "leave it out: rank 0's weights are always sent", (True,)
        ),
    },
}
"""By class or method: by argument what to write instead; of a base class also for its subclasses."""
