"""Arguments of Lightning's Trainer that this Trainer lacks, and what to write instead."""

from __future__ import annotations

from typing import Final

__all__ = ["FORMER_ARGUMENTS"]

FORMER_ARGUMENTS: Final = {
    # devices and processes
    "gpus": 'accelerator="gpu", devices={value}',
    "auto_select_gpus": "leave it out; devices=[...] names them",
    "num_gpus": 'accelerator="gpu", devices={value}',
    "num_processes": 'accelerator="cpu", devices={value}',
    "tpu_cores": 'accelerator="tpu"',
    "num_tpu_cores": 'accelerator="tpu"',
    "ipus": "leave it out; no strategy runs on IPUs",
    "hpus": "leave it out; no strategy runs on HPUs",
    "nb_gpu_nodes": "num_nodes={value}",
    "distributed_backend": "strategy={value}",
    "replace_sampler_ddp": "use_distributed_sampler={value}",
    "prepare_data_per_node": "leave it out; prepare_data runs once on each node",
    "move_metrics_to_cpu": "leave it out; a logged value is one number on the device",
    # precision
    "amp_backend": 'leave it out; precision="16-mixed" uses torch.amp',
    "amp_level": 'leave it out; precision="16-mixed" uses torch.amp',
    "use_amp": 'precision="16-mixed"',
    # checkpoints and loggers
    "checkpoint_callback": "enable_checkpointing=True or False, or callbacks=[ModelCheckpoint(...)]",
    "resume_from_checkpoint": "trainer.fit(..., ckpt_path={value})",
    "weights_save_path": "callbacks=[ModelCheckpoint(dirpath={value})]",
    "default_save_path": "default_root_dir={value}",
    "flush_logs_every_n_steps": "log_every_n_steps; loggers write at each flush",
    "row_log_interval": "log_every_n_steps={value}",
    "log_save_interval": "log_every_n_steps; loggers write at each flush",
    "log_gpu_memory": "log torch.cuda.memory_allocated() in a callback's on_train_step_end",
    "track_grad_norm": "log the norms in on_before_optimizer_step",
    "model_registry": "leave it out; upload checkpoints in a callback or a logger's after_save_checkpoint",
    # what is shown
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate={value})]",
    "process_position": "callbacks=[TQDMProgressBar(process_position={value})]",
    "show_progress_bar": "enable_progress_bar={value}",
    "weights_summary": "enable_model_summary=True or False, or callbacks=[ModelSummary(max_depth=...)]",
    # the loop
    "early_stop_callback": 'callbacks=[EarlyStopping("val_loss")]',
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "automatic_optimization": "self.automatic_optimization = {value} in the module's __init__",
    "enable_pl_optimizer": "leave it out",
    "truncated_bptt_steps": "automatic_optimization = False, and split the sequence in training_step",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "multiple_trainloader_mode": "trainer.fit(module, CombinedLoader(loaders, mode={value}))",
    "terminate_on_nan": "leave it out: a loss that is not finite ends the run; detect_anomaly=True names the operation",
    "print_nan_grads": "detect_anomaly=True",
    "auto_lr_find": "callbacks=[LearningRateFinder()], or trainer_kit.tuner.lr_find(trainer, module)",
    "auto_scale_batch_size": "callbacks=[BatchSizeFinder()], or trainer_kit.tuner.scale_batch_size(trainer, module)",
    "overfit_pct": "overfit_batches={value}",
    "train_percent_check": "limit_train_batches={value}",
    "val_percent_check": "limit_val_batches={value}",
    "test_percent_check": "limit_test_batches={value}",
    "gradient_clip": "gradient_clip_val={value}",
    "max_nb_epochs": "max_epochs={value}",
    "min_nb_epochs": "min_epochs={value}",
    "nb_sanity_val_steps": "num_sanity_val_steps={value}",
}
"""What to write instead, by name; ``{value}`` is the given value."""
