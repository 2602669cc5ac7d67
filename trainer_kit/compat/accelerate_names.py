"""The module paths and names of Hugging Face Accelerate, and where each name is defined here."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import locate_names
from trainer_kit.loggers.table import LOGGER_ROWS, service_packages

__all__ = ["ARGUMENTS", "ELSEWHERE", "LIBRARY", "PATHS"]

LIBRARY: Final = "Accelerate"
ARGUMENTS: Final[dict[str, dict[str, object]]] = {}

# One text instead of fifty entries: their functions are made from the tables of `accelerate_probes`.
_PROBES: Final = (
    "4bit_bnb 8bit_bnb amdsmi bf16 bitsandbytes_multi_backend boto3 cuda datasets deepspeed fp16 fp8 hpu import_timer "
    "lomo matplotlib megatron_lm mlu mps msamp musa neuron npu numpy pandas peft pippy pynvml pytest rich rocm "
    "sagemaker schedulefree sdaa tensorboard timm torch_distributed torchao torchdata torchdata_stateful_dataloader "
    "torchvision tqdm transformer_engine transformers triton weights_only xccl xpu"
)
_TRACKERS: Final = " ".join(row.accelerate_name for row in LOGGER_ROWS)
_HOMES: Final[dict[str, str]] = {
    "accelerator": "Accelerator PartialState broadcast broadcast_object_list gather gather_object pad_across_processes "
    "reduce synchronize_rng_states",
    "accelerator.batch_size": "clear_device_cache find_executable_batch_size release_memory",
    "accelerator.generators": "set_seed",
    "accelerator.launchers": "debug_launcher notebook_launcher",
    "accelerator.loader": "skip_first_batches",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.logs": "get_logger MultiProcessAdapter=RankLogger",
    "accelerator.optimizer": "AcceleratedOptimizer AcceleratedScheduler",
    "accelerator.processes": "DistributedType",
    "accelerator.samplers": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler",
    "accelerator.script_names": f"{_TRACKERS} AcceleratorState "
    "DataLoaderAdapter=PreparedLoaderType DataLoaderDispatcher DataLoaderShard "
    "DataLoaderStateMixin=PreparedLoaderType GatheredParameters GradientState SkipDataLoader "
    "compile_regions copy_tensor_to_devices extract_model_from_parallel get_active_deepspeed_plugin "
    "get_mixed_precision_context_manager get_sampler is_initialized load_fsdp_model merge_fsdp_weights "
    "prepare_data_loader save save_fsdp_model synchronize_rng_state tqdm wait_for_everyone",
    "accelerator.trackers": "GeneralTracker LoggerType on_main_process register_tracker_class",
    "commands.checkpoint": "merge_command merge_command_parser",
    "commands.config": "write_basic_config",
    "commands.main": "main",
    "compat.accelerate_modules": "AlignDevicesHook CpuOffload ModelHook OffloadedWeightsLoader PrefixedDataset "
    "SequentialHook add_hook_to_module align_module_device calculate_maximum_sizes check_tied_parameters_in_config "
    "check_tied_parameters_on_same_device extract_submodules_state_dict find_tied_parameters get_max_layer_size "
    "has_offloaded_params load_offloaded_weight load_offloaded_weights load_state_dict named_module_tensors "
    "offload_state_dict offload_weight remove_hook_from_module remove_hook_from_submodules retie_parameters "
    "save_offload_index set_module_tensor_to_device",
    "compat.accelerate_probes": "compare_versions deepspeed_required is_bnb_available is_habana_gaudi1 "
    "is_torch_version is_torch_xla_available is_transformer_engine_mxfp8_available torchao_required "
    + " ".join(
        f"is_{feature}_available" for feature in (*_PROBES.split(), *service_packages())
    ),
    "compat.accelerate_utilities": "BaseEnum CPUInformation CannotPadNestedTensorWarning ComputeEnvironment "
    "CustomDtype DynamoBackend EnumWithContains=BaseEnum FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME "
    "FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME PrecisionType "
    "RNGType RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME "
    "SAMPLER_NAME SCALER_NAME SCHEDULER_NAME SageMakerDistributedType TORCH_DISTRIBUTED_OPERATION_TYPES "
    "TORCH_DYNAMO_MODES TensorInformation WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME "
    "are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support check_os_kernel "
    "clean_state_dict_for_safetensors clear_environment concatenate convert_bytes convert_dict_to_env_variables "
    "convert_file_size_to_int convert_outputs_to_fp32 convert_to_fp32 disable_fsdp_ram_efficient_loading "
    "dtype_byte_size enable_fsdp_ram_efficient_loading find_batch_size find_device get_cpu_distributed_information "
    "get_current_device_type get_data_structure get_free_port get_gpu_info get_grad_scaler get_int_from_env "
    "get_model_tp_size get_module_children_bottom_up get_pretty_name get_shape has_compiled_regions honor_type "
    "id_tensor_storage ignorant_find_batch_size initialize_tensors is_compiled_module is_namedtuple is_peft_model "
    "is_port_in_use is_tensor_information listify load merge_dicts model_has_dtensor pad_input_tensors "
    "parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment recursive_getattr "
    "recursively_apply send_to_device slice_tensors str_to_bool",
    "options.deepspeed": "DeepSpeedPlugin DummyOptim DummyScheduler MegatronLMDummyScheduler=DummyScheduler",
    "options.fp8": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    "options.megatron": "MegatronLMPlugin",
    "options.records": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
    "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler "
    "ProfileKwargs ProjectConfiguration TorchDynamoPlugin",
    "options.parallelism": "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig "
    "TorchTensorParallelPlugin",
    "core.devices": "should_reduce_batch_size=ran_out_of_memory",
    "core.errors": "DistributedOperationException=RankError",
    "core.tensors": "is_torch_tensor=is_tensor",
    "inference.device_map": "compute_module_sizes get_balanced_memory get_max_memory infer_auto_device_map",
    "inference.dispatch": "UserCpuOffloadHook check_device_map cpu_offload cpu_offload_with_hook disk_offload "
    "dispatch_model",
    "inference.loading": "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model",
    "inference.pipeline": "prepare_pippy",
    "inference.quantization": "BnbQuantizationConfig load_and_quantize_model",
    "launch.configuration": "load_config_from_file=read_configuration",
}
"""The names of each module here; ``accelerate_name=name`` where the names differ."""


_NAMES: Final = locate_names(_HOMES)
_MODULES: Final = (
    "accelerator big_modeling checkpointing commands commands.accelerate_cli commands.config "
    "commands.config.config_args commands.config.default commands.estimate commands.launch commands.merge commands.tpu "
    "data_loader hooks inference launchers local_sgd logging memory_utils optimizer parallelism_config scheduler state "
    "tracking utils utils.ao utils.bnb utils.constants utils.dataclasses utils.deepspeed utils.environment "
    "utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling utils.offload "
    "utils.operations utils.other utils.random utils.torch_xla utils.tqdm utils.transformer_engine utils.versions"
)
PATHS: Final[dict[str, dict[str, str]]] = {
    path: dict(_NAMES) for path in _MODULES.split()
}
"""The names at each module path: a name means the same at each path, so each path has all of them."""
PATHS[""] = {"is_rich_available": "compat.accelerate_probes:is_rich_available"}
# `tk.optimizer` and `utils.tqdm` are functions as well as modules, so these modules can be called.
PATHS["optimizer"]["__call__"] = "precision.optimizers:make_optimizer"
PATHS["utils.tqdm"]["__call__"] = "accelerator.script_names:tqdm"

_INSTEAD: Final = {
    "MegatronLMPlugin(...) with a model of megatron-core, and your own loop": "AbstractTrainStep BertTrainStep "
    "GPTTrainStep T5TrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMOptimizerWrapper "
    "MegatronLMSchedulerWrapper add_model_config_to_megatron_parser avg_losses_across_data_parallel_group "
    "gather_across_data_parallel_groups megatron_lm_initialize megatron_lm_prepare_data_loader "
    "megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler",
    "call prepare(), which does all of it": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper "
    "DeepSpeedSchedulerWrapper map_pytorch_optim_to_deepspeed compile_regions_deepspeed compile_regions_fsdp2 "
    "fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model "
    "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler ensure_weights_retied patch_optimizer_step "
    "get_parameters_from_modules",
    "accelerator.save_state(directory), accelerator.load_state(directory)": "save_fsdp_optimizer load_fsdp_optimizer "
    "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
    "dispatch_model, cpu_offload or disk_offload, which attach the hooks of all layers": "attach_align_device_hook "
    "attach_align_device_hook_on_blocks attach_execution_device_hook",
    'trainer-kit launch, or notebook_launcher; subprocess.run(["trainer-kit", "launch", ...]) in a program': ""
    "PrepareForLaunch launch_command launch_command_parser simple_launcher multi_gpu_launcher deepspeed_launcher "
    "tpu_launcher tpu_pod_launcher prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_simple_launcher_cmd_env "
    "prepare_tpu test_launch _filter_args TORCH_LAUNCH_PARAMS",
    'Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(...)])': "apply_fp8_autowrap "
    "contextual_fp8_autocast convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers "
    "filter_linear_layers has_ao_layers has_transformer_engine_layers",
    "trainer-kit config, or write_basic_config()": "get_user_input config_command config_command_parser "
    "get_cluster_input default_config_command ClusterConfig BaseConfig default_config_file default_json_config_file "
    "default_yaml_config_file",
    "trainer-kit estimate-memory MODEL": "estimate_command estimate_command_parser create_empty_model gather_data "
    "estimate_training_usage",
    "SageMaker's own estimator, with `trainer-kit launch` as its entry point": "SageMakerConfig sagemaker_launcher "
    "prepare_sagemager_args_inputs",
    "load_and_quantize_model(model, config, ...)": "has_4bit_bnb_layers get_keys_to_not_convert",
    "numactl --cpunodebind=... around the launch": "set_numa_affinity override_numa_affinity",
    "leave the comparison out: torch is newer here": "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION "
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "load the model in the dtype in which it computes": "attach_layerwise_casting_hooks LayerwiseCastingHook",
    "leave it out: each Accelerator has its own state": "SharedDict ThreadLocalSharedDict",
    "LoggerType, which has the names": "LOGGER_TYPE_TO_CLASS get_available_trackers filter_trackers",
    "ParallelismConfig(cp_size=...) with accelerator.maybe_context_parallel(...)": "DeepSpeedSequenceParallelConfig",
    "DeepSpeedPlugin(hf_ds_config=...), which has get_value and is_auto": "HfDeepSpeedConfig",
    'leave it out: strategy="xla" reads ahead by itself': "MpDeviceLoaderWrapper",
    "skip_first_batches(loader, n)": "SkipBatchSampler",
    "transformers.get_scheduler, or torch.optim.lr_scheduler": "get_scheduler",
    "pip install torch_xla, in the version of torch": "install_xla",
    "import rich.traceback; rich.traceback.install()": "rich utils.rich",
    "trainer_kit.testing, with your own data and models": "test_utils",
}


def _list_replacements() -> dict[str, str]:
    replacements: dict[str, str] = {}
    for replacement, names in _INSTEAD.items():
        replacements.update(dict.fromkeys(names.split(), replacement))
    return replacements


ELSEWHERE: Final = _list_replacements()
"""Names that are missing here, and what to use."""
