"""Configuration files of all kinds, as `accelerate config` writes them or people do."""

from __future__ import annotations

PLAIN = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

SAMPLES: dict[str, str] = {
    "plain.yaml": PLAIN,
    "unquoted.yaml": "distributed_type: NO\nmixed_precision: no\ndowncast_bf16: no\nnum_processes: 1\nuse_cpu: yes\n",
    "multi_cpu.yaml": (
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmpirun_config:\n  mpirun_ccl: '1'\n"
        "  mpirun_hostfile: hostfile\nipex_config:\n  ipex: false\n"
    ),
    "multi_gpu.yaml": (
        "distributed_type: MULTI_GPU\ngpu_ids: 0,1\nmixed_precision: bf16\nnum_processes: 2\nmain_process_port: 29501\n"
    ),
    "multi_node.yaml": (
        "distributed_type: MULTI_GPU\nmachine_rank: 1\nmain_process_ip: 10.0.0.7\nmain_process_port: 8888\n"
        "num_machines: 4\nnum_processes: 16\nrdzv_backend: c10d\nsame_network: false\ngpu_ids: all\n"
    ),
    "npu.yaml": "distributed_type: MULTI_NPU\nnum_processes: 8\nmixed_precision: fp16\n",
    "fsdp.yaml": """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 8
""",
    "fsdp_numbers.yaml": """\
distributed_type: FSDP
fsdp_config:
  fsdp_backward_prefetch_policy: 2
  fsdp_auto_wrap_policy: 2
  fsdp_min_num_params: 2000
  fsdp_offload_params: true
  fsdp_sharding_strategy: 4
  fsdp_state_dict_type: 1
""",
    "fsdp2.yaml": """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing_offload: false
  fsdp_ignored_modules: null
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
  parallelism_config_cp_backend: torch
  parallelism_config_cp_comm_strategy: alltoall
  parallelism_config_sp_size: 1
  parallelism_config_sp_seq_length_is_variable: true
num_processes: 8
""",
    "fsdp_short_names.yaml": "distributed_type: FSDP\nfsdp_config: {sharding_strategy: NO_SHARD, version: 1}\n",
    "deepspeed.yaml": """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  deepspeed_hostfile: /job/hostfile
  deepspeed_exclusion_filter: none
  deepspeed_inclusion_filter: none
  deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock
  gradient_accumulation_steps: auto
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_optimizer_nvme_path: none
  offload_param_device: cpu
  offload_param_nvme_path: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
num_processes: 2
""",
    "deepspeed_file.yaml": (
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config:\n  deepspeed_config_file: zero2.json\n  zero3_init_flag: false\n"
    ),
    "megatron.yaml": """\
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: false
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
num_processes: 4
""",
    "fp8.yaml": """\
distributed_type: MULTI_GPU
fp8_config:
  amax_compute_algorithm: max
  amax_history_length: 1024
  backend: TE
  fp8_format: HYBRID
  interval: 1
  margin: 0
  override_linear_precision: [false, false, false]
  use_autocast_during_eval: false
mixed_precision: fp8
num_processes: 2
""",
    # As Accelerate's own tests/test_configs/0_34_0_fp8.yaml has it: a tuple is a text there.
    "accelerates_fp8.yaml": """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
fp8_config:
  amax_compute_algo: max
  amax_history_len: 1024
  backend: TE
  fp8_format: E4M3
  interval: 1
  margin: 0
  override_linear_precision: (false, false, false)
  use_autocast_during_eval: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
""",
    "words.yaml": (
        "use_fsdp: true\nnum_processes: 2\nenvironment:\n  CUDA_VISIBLE_DEVICES: 0,1\n  NCCL_DEBUG: INFO\n"
        "  NCCL_IB_DISABLE: 1\nuse_parallelism_config: false\n"
    ),
    "dynamo.yaml": """\
distributed_type: 'NO'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: reduce-overhead
  dynamo_use_dynamic: true
  dynamo_use_fullgraph: false
  dynamo_use_regional_compilation: true
""",
    "tpu.yaml": (
        "distributed_type: XLA\ntpu_name: pod\ntpu_zone: us-central1-a\ntpu_use_cluster: true\ntpu_use_sudo: false\n"
        "tpu_vm:\n- one\n- two\ntpu_env:\n- A=1\ncommands:\n- pip list\ncommand_file: null\ndowncast_bf16: 'yes'\n"
    ),
    "sagemaker.yaml": """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p3.2xlarge
iam_role_name: role
image_uri: null
profile: default
region: us-east-1
base_job_name: job
pytorch_version: 2.6.0
transformers_version: 4.49.0
py_version: py312
sagemaker_inputs_file: null
sagemaker_metrics_file: null
additional_args: {disable_profiler: true, tags: [one, two]}
num_machines: 1
""",
    "old.yaml": "distributed_type: 'NO'\nfp16: true\ndynamo_backend: 'NO'\nnum_processes: 1\n",
    "anchors.yaml": "num_processes: &n 2\ngradient_accumulation_steps: *n\ntpu_env: &e [A=1]\ncommands: *e\n",
    "empty_sections.yaml": "distributed_type: 'NO'\ndeepspeed_config: {}\nfsdp_config:\nmegatron_lm_config: {}\n",
    "open.yaml": "distributed_type: MULTI_GPU\nnum_processes: -1\n",
    "file.json": '{\n\t"compute_environment": "LOCAL_MACHINE",\n\t"use_cpu": true, "num_processes":2,\n'
    '\t"mixed_precision": "bf16", "fsdp_config": {}, "main_process_ip": null\n}\n',
}
