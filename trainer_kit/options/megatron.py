"""Megatron's options with Hugging Face Accelerate's names.

The record is outside the engine's package because `Accelerator` takes it with or without the engine; it imports the
engine on use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, final

from trainer_kit.core.configuration_sources import variable
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.core.types import Keywords
from trainer_kit.strategies.strategy import Strategy

__all__ = ["MegatronLMPlugin"]

_MODEL: Final = (
    "build the model with this setting: GPTModel(TransformerConfig(...), ...)"
)
_SCHEDULE: Final = "prepare a scheduler of torch.optim.lr_scheduler"
_DATA: Final = "prepare a DataLoader"
_LOOP: Final = "set it in your training loop"
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_split_rank", "other_megatron_args",
         "custom_model_provider_function", "custom_prepare_model_function", "return_logits"), _MODEL),
    **dict.fromkeys(
        ("train_iters", "train_samples", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay",
         "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
         "lr_warmup_fraction", "min_lr", "lr_mult", "no_wd_decay_cond", "scale_lr_cond"), _SCHEDULE),
    **dict.fromkeys(
        ("consumed_samples", "megatron_dataset_flag", "seq_length", "encoder_seq_length", "decoder_seq_length",
         "is_train_batch_min", "custom_get_batch_function", "custom_megatron_datasets_provider_function"), _DATA),
    **dict.fromkeys(
        ("eval_iters", "eval_interval", "custom_train_step_class", "custom_train_step_kwargs",
         "custom_loss_function"), _LOOP),
    **dict.fromkeys(("tensorboard_dir", "set_all_logging_options"), 'Accelerator(log_with="tensorboard")'),
}  # fmt: skip
"""Options that Accelerate passes to Megatron-LM's own training script, and what to use instead."""


@final
@dataclass(init=False)
class MegatronLMPlugin:
    """Options of Megatron, for ``Accelerator(megatron_lm_plugin=...)``; the launcher's values are the defaults.

    Build the model from megatron-core's layers after the Accelerator, which creates Megatron's process groups.
    `MegatronStrategy` documents what is supported.

    Args:
        tp_degree: the number of ranks that split each layer.
        recompute_activations: True is refused; set it in the model's own configuration.
        sequence_parallelism: these ranks also split norms and dropout along the sequence.
        gradient_clipping: the maximum total gradient norm, by default 1; 0 disables clipping.
        pp_degree: must be 1; `MeshStrategy` has pipelines.
        use_distributed_optimizer: shard the optimizer over the data ranks.
        num_micro_batches: must be 1; use ``gradient_accumulation_steps`` and ``accumulate``.
        others: keys of ``megatron_lm_config`` and of Accelerate's plugin; each is refused with its replacement.

    Raises:
        ConfigurationError: for an option that is set elsewhere or not supported.
        TypeError: for a name that Accelerate's plugin does not have.

    Example:
        >>> MegatronLMPlugin(pp_degree=2)
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: megatron_lm_pp_degree is not an option of MegatronStrategy
          found: megatron_lm_pp_degree: 2
          fix:   use MeshStrategy(pp=)
    """

    serves_alone: ClassVar[bool] = True
    options: Keywords
    """Arguments of `MegatronStrategy`."""

    def __init__(
        self,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        num_micro_batches: int | None = None,
        gradient_clipping: float | None = None,
        sequence_parallelism: bool | None = None,
        recompute_activations: bool | None = None,
        use_distributed_optimizer: bool | None = None,
        **others: object,
    ) -> None:
        from trainer_kit.strategies.megatron.config import KEYS, from_launcher

        arguments = {
            "tp_degree": tp_degree,
            "pp_degree": pp_degree,
            "num_micro_batches": num_micro_batches,
            "gradient_clipping": gradient_clipping,
            "sequence_parallelism": sequence_parallelism,
            "recompute_activations": recompute_activations,
            "use_distributed_optimizer": use_distributed_optimizer,
        }
        # As texts, under the launcher's keys: one function checks both sources, and its errors name the keys.
        options: dict[str, str] = {}
        for key in KEYS:
            setting = variable(key)
            if setting is not None:
                options[key] = str(setting.value)
        for name, value in {**arguments, **others}.items():
            key = f"megatron_lm_{name}"
            # As Python does for a name that the signature lacks, also where the value is None.
            if key not in KEYS and name not in _ELSEWHERE:
                raise TypeError(f"MegatronLMPlugin got an unexpected argument {name!r}")
            # None means "not set" in Accelerate's plugin.
            if value is None:
                continue
            if key not in KEYS:
                raise ConfigurationError(
                    f"{name} is an option of Megatron-LM's own training script, which does not run here",
                    found=f"{name}={value!r}",
                    fix=_ELSEWHERE[name],
                )
            options[key] = str(value)
        self.options = from_launcher(options)

    def make_strategy(
        self, process_group_backend: str | None = None, **options: object
    ) -> Strategy:
        """Create the `MegatronStrategy` of these options.

        Args:
            process_group_backend: must be None: Megatron creates its own groups.
            options: further arguments of the strategy, such as ``device``.

        Raises:
            ConfigurationError: a backend is given.
            StrategyError: megatron-core is not installed.
        """
        if process_group_backend is not None:
            raise ConfigurationError(
                "Megatron creates its own groups",
                found=f"backend={process_group_backend!r}",
            )
        strategy: Strategy = STRATEGIES.get("megatron")(**self.options, **options)
        return strategy
