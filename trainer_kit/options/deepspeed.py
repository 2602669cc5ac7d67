"""DeepSpeed under an `Accelerator`, with Hugging Face Accelerate's names.

These records are outside the engine's package because `Accelerator` takes them with or without the engine; they import
the engine on use.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Final, final

from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.configuration_sources import is_true, variable
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.core.types import JsonObject, Keywords, LRSchedulerLike, ParamGroup
from trainer_kit.options.records import micro_batches
from trainer_kit.options.refusals import refused
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "active_plugin",
    "named_plugins",
    "resolve_optimizer",
    "resolve_scheduler",
]

# The launcher's name of an option, where it is not that of the field.
_VARIABLES: Final = {
    "hf_ds_config": "deepspeed_config_file",
    "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
}
# Refused together with DeepSpeed by their own checks, whose messages say more.
_NO_ENGINES: Final = ("parallelism_config", "torch_tp_plugin")
# Options with the same name in the launcher's section.
_SETTINGS: Final = (
    "zero_stage",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_param_device",
)
_HALF: Final = {"bf16": "bf16", "fp16": "fp16"}


@final
class DummyOptim:
    """A placeholder for the optimizer that DeepSpeed's JSON names; `prepare` creates it.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, where the JSON has ``"auto"``.
        weight_decay: the weight decay, where the JSON has ``"auto"``.
        kwargs: further options of the optimizer, where the JSON has ``"auto"``.

    Example:
        >>> import torch
        >>> optimizer = DummyOptim(torch.nn.Linear(2, 1).parameters(), lr=3e-4, betas=(0.9, 0.95))
        >>> optimizer.lr, optimizer.kwargs
        (0.0003, {'betas': (0.9, 0.95)})
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: object,
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


@final
class DummyScheduler:
    """A placeholder for the scheduler that DeepSpeed's JSON names; `prepare` creates it.

    Args:
        optimizer: the optimizer whose learning rates it sets, or a `DummyOptim`.
        total_num_steps: steps of the run, where the JSON has ``"auto"``. As under Accelerate they are divided by the
            number of processes, unless ``split_batches=True`` or ``scheduler_steps_per_process=False``: the engine's
            schedule advances once per optimizer step.
        warmup_num_steps: optimizer steps of warmup, where the JSON has ``"auto"``.
        lr_scheduler_callable: refused: the JSON names the scheduler.
        kwargs: further options of the scheduler, where the JSON has ``"auto"``.

    Example:
        >>> import torch
        >>> optimizer = DummyOptim(torch.nn.Linear(2, 1).parameters())
        >>> DummyScheduler(optimizer, total_num_steps=1000, warmup_num_steps=100).warmup_num_steps
        100
    """

    def __init__(
        self,
        optimizer: Optimizer | DummyOptim,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., object] | None = None,
        **kwargs: object,
    ) -> None:
        if lr_scheduler_callable is not None:
            raise refused("lr_scheduler_callable")
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


def resolve_optimizer(
    strategy: Strategy, optimizer: Optimizer | DummyOptim
) -> Optimizer:
    """Return the given optimizer; for a `DummyOptim`, the one that the strategy's JSON names. Both is an error."""
    sections = strategy.sections
    if not isinstance(optimizer, DummyOptim):
        # With an optimizer in the JSON and another one in the script, DeepSpeed would train with one and the script
        # schedule the other.
        if sections is not None:
            sections.refuse_both("optimizer", optimizer)
        return optimizer
    if sections is None or sections.optimizer is None:
        raise _missing_section("optimizer", "DummyOptim")
    optimizer_of_json: Optimizer = sections.make_optimizer(
        optimizer.params,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        **optimizer.kwargs,
    )
    return optimizer_of_json


def resolve_scheduler(
    strategy: Strategy,
    scheduler: LRSchedulerLike | DummyScheduler,
    optimizer: object,
    times: int = 1,
) -> Any:
    """Return the given scheduler; for a `DummyScheduler`, the one that the strategy's JSON names.

    Args:
        strategy: the strategy with the JSON.
        scheduler: the scheduler, or a `DummyScheduler`.
        optimizer: the optimizer that was prepared last.
        times: how often other schedulers advance per optimizer step; DeepSpeed's schedule advances once.
    """
    sections = strategy.sections
    if not isinstance(scheduler, DummyScheduler):
        if sections is not None:
            sections.refuse_both("scheduler", scheduler)
        return scheduler
    # Without a prepared optimizer there is nothing whose learning rates the schedule could set.
    if sections is None or sections.scheduler is None or optimizer is None:
        raise _missing_section("scheduler", "DummyScheduler")
    total_num_steps = scheduler.total_num_steps
    # Scripts count the steps of Accelerate's schedulers, which advance once for each process.
    if total_num_steps is not None:
        total_num_steps = math.ceil(total_num_steps / times)
    arguments = {
        "total_num_steps": total_num_steps,
        # DeepSpeed's schedules raise for 0 steps of warmup (0.19), and 0 is the default of Accelerate's DummyScheduler.
        "warmup_num_steps": max(1, scheduler.warmup_num_steps),
        **scheduler.kwargs,
    }
    return sections.make_scheduler(optimizer, strategy.device, **arguments)


def _missing_section(section: str, stand_in: str) -> ConfigurationError:
    return ConfigurationError(
        f"{stand_in} is a placeholder for the {section} in DeepSpeed's JSON, which has none",
        fix=f"create the {section} in the script, or name it in the JSON",
    )


@dataclass
class DeepSpeedPlugin:
    """Options of DeepSpeed, for ``Accelerator(deepspeed_plugin=...)``; the launcher's values are the defaults.

    Attributes:
        hf_ds_config: DeepSpeed's JSON, as a path or a dict. ``"auto"`` takes the values of the other
            arguments, the Accelerator and the loaders.
        gradient_accumulation_steps: micro-batches per optimizer step, in place of the Accelerator's.
        gradient_clipping: the maximum gradient norm of every step; ``clip_grad_norm_`` can set another for its step.
        zero_stage: 0 to 3; the JSON's by default, or 2.
        is_train_batch_min: with several loaders, pass the smallest batch size to DeepSpeed; False: the largest.
        offload_optimizer_device: "none" or "cpu".
        offload_param_device: "none" or "cpu"; stage 3 only.
        offload_optimizer_nvme_path: refused with "nvme".
        offload_param_nvme_path: refused with "nvme".
        zero3_init_flag: shard models of transformers while they are created.
        zero3_save_16bit_model: accepted without effect: weights are returned in full precision under every stage.
        enable_msamp: refused.
        msamp_opt_level: accepted without effect.
        transformer_moe_cls_names: comma-separated classes of expert layers; each layer is gathered as one unit.
        deepspeed_config: the JSON merged with all of these options; changes before ``prepare`` take effect.
        selected: with several plugins, whether this one is in use.

    Raises:
        StrategyError: the JSON and the arguments contradict each other.

    Example:
        >>> plugin = DeepSpeedPlugin({"gradient_accumulation_steps": "auto"}, zero_stage=3)
        >>> plugin.deepspeed_config["zero_optimization"], plugin.is_auto("gradient_accumulation_steps")
        ({'stage': 3}, True)
    """

    hf_ds_config: Any = None
    _: KW_ONLY
    gradient_accumulation_steps: Any = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: JsonObject = field(init=False, repr=False)
    selected: bool = field(init=False, repr=False, default=False)

    serves_alone = True

    def __post_init__(self) -> None:
        from trainer_kit.strategies.deepspeed.config import (
            from_launcher,
            read_config,
            with_arguments,
        )

        # Before the launcher's values are read: the message must name what the script passed.
        if self.enable_msamp:
            raise refused("enable_msamp")
        # The launcher's values stand in for options that the script leaves out.
        for option in fields(self):
            if not option.init or getattr(self, option.name) is not None:
                continue
            setting = variable(_VARIABLES.get(option.name, option.name))
            if setting is not None:
                setattr(self, option.name, setting.value)
        # transformers' HfDeepSpeedConfig has the JSON as an attribute.
        config = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        settings: dict[str, str] = {}
        for name in _SETTINGS:
            value = getattr(self, name)
            # "auto" is for `prepare`, which knows the Accelerator's value and the loaders.
            if value is not None and value != "auto":
                settings[name] = str(value)
        if self.transformer_moe_cls_names is not None:
            if not isinstance(self.transformer_moe_cls_names, str):
                raise ConfigurationError(
                    "the class names of expert layers are one comma-separated string",
                    found=f"transformer_moe_cls_names={self.transformer_moe_cls_names!r}",
                )
            settings["deepspeed_moe_layer_cls_names"] = self.transformer_moe_cls_names
        # The launcher's reader knows how each option changes the JSON, and refuses contradictions.
        arguments = from_launcher(settings, read_config(config))
        self.deepspeed_config = with_arguments(
            arguments["config"],
            arguments["stage"],
            arguments["offload_optimizer"],
            arguments["offload_parameters"],
        )
        # The stage of the merged JSON: scripts read it from the plugin.
        self.zero_stage = self.deepspeed_config["zero_optimization"]["stage"]
        self._merge_accumulation_steps()
        self.zero3_init_flag = bool(is_true(self.zero3_init_flag))
        # Held here, because transformers has only a weak reference to it.
        self._transformers_config: object = None
        self._configure_transformers()

    def _merge_accumulation_steps(self) -> None:
        steps_of_json = self.deepspeed_config.setdefault(
            "gradient_accumulation_steps", "auto"
        )
        steps = self.gradient_accumulation_steps
        if steps in (None, "auto"):
            self.gradient_accumulation_steps = steps_of_json
            return
        # A text counts too: the launcher's values are texts.
        try:
            self.gradient_accumulation_steps = int(steps)
        # `micro_batches` raises the error of every other way to set this number.
        except (TypeError, ValueError):
            self.gradient_accumulation_steps = micro_batches(
                steps, "DeepSpeedPlugin(gradient_accumulation_steps=...)"
            )
        if steps_of_json not in ("auto", self.gradient_accumulation_steps):
            raise ConfigurationError(
                "DeepSpeed's JSON and the plugin contradict each other",
                found=f"gradient_accumulation_steps: {steps_of_json}, and {steps}",
                fix='write "auto" in the JSON',
            )
        self.deepspeed_config["gradient_accumulation_steps"] = (
            self.gradient_accumulation_steps
        )

    def _configure_transformers(self) -> None:
        """Make ``from_pretrained`` of transformers shard weights if `is_zero3_init_enabled`; else leave them whole.

        transformers reads a configuration for as long as the object that it got exists.
        """
        if not self.is_zero3_init_enabled():
            self._transformers_config = None
            return
        try:
            integrations: Any = importlib.import_module("transformers.integrations")
        except ImportError as error:
            raise ConfigurationError(
                "zero3_init_flag needs transformers, which is not installed"
            ) from error
        # zero.Init reads the JSON before `prepare` replaces "auto", and would take the word for a number.
        explicit = {
            key: value
            for key, value in self.deepspeed_config.items()
            if value != "auto"
        }
        # zero.Init, which transformers calls, refuses a JSON without a batch size; the real one is known in prepare.
        explicit.setdefault("train_micro_batch_size_per_gpu", 1)
        self._transformers_config = integrations.HfDeepSpeedConfig(explicit)

    def show_running(self, config: dict[str, object]) -> None:
        """Describe an engine that runs already.

        Args:
            config: its own configuration, which `prepare` completes.
        """
        self.deepspeed_config = config
        self.selected = True

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are created."""
        return bool(self.zero3_init_flag) and self.zero_stage == 3

    def zero3_init_context_manager(
        self, enable: bool = False
    ) -> AbstractContextManager[None]:
        """Set in this context whether models of transformers are sharded while they are created.

        Args:
            enable: whether they are; outside of the context ``zero3_init_flag`` decides.
        """
        return self._zero3_init(enable)

    @contextmanager
    def _zero3_init(self, enable: bool) -> Iterator[None]:
        previous = self.zero3_init_flag
        self.zero3_init_flag = enable
        self._configure_transformers()
        try:
            yield
        finally:
            self.zero3_init_flag = previous
            self._configure_transformers()

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """The value in the JSON at a key such as ``"zero_optimization.stage"``.

        Args:
            ds_key_long: the keys of the sections down to the value, joined by dots.
            default: returned where the JSON has no such key.
        """
        value: Any = self.deepspeed_config
        for key in ds_key_long.split("."):
            # A section may be missing, or be a path such as "optimizer": null.
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value in the JSON is ``"auto"``.

        Args:
            ds_key_long: the keys of the sections down to the value, joined by dots; False where the JSON has no such
                key.
        """
        return bool(self.get_value(ds_key_long) == "auto")

    def accelerator_arguments(self) -> Keywords:
        """The arguments of the Accelerator that the JSON sets."""
        arguments: Keywords = {}
        if self.gradient_accumulation_steps != "auto":
            arguments["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        for key, precision in _HALF.items():
            # `is True`: "auto" takes the Accelerator's precision, and must not set it.
            if self.get_value(f"{key}.enabled") is True:
                arguments["mixed_precision"] = precision
        return arguments

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refused: the Accelerator selects one of several plugins.

        Args:
            _from_accelerator_state: not used.

        Raises:
            ConfigurationError: always.
        """
        raise refused("select")

    def batch_size(self, sizes: Sequence[int]) -> int | None:
        """The batch size for DeepSpeed, given those of the loaders.

        Args:
            sizes: samples per micro-batch and rank, of each loader.

        Returns:
            The JSON's size if a loader has it or there is no loader, else the smallest of the loaders (with
            ``is_train_batch_min=False`` the largest); None where neither has one.
        """
        size_of_json = self.deepspeed_config.get(
            "train_micro_batch_size_per_gpu", "auto"
        )
        # A size that one of the loaders has is the user's choice among them.
        if not sizes or size_of_json in sizes:
            # "auto", and no loader to take a size from.
            if not isinstance(size_of_json, int):
                return None
            return size_of_json
        if self.is_train_batch_min:
            return min(sizes)
        return max(sizes)

    def make_strategy(self, **options: object) -> Strategy:
        """Create the `DeepSpeedStrategy` of these options.

        Args:
            options: further arguments of the strategy, such as ``device``.
        """
        strategy_class = STRATEGIES.get("deepspeed")
        engine = strategy_class(config=self.deepspeed_config, **options)
        # The strategy's own object, so that changes to the plugin before `prepare` reach it.
        self.deepspeed_config = engine.config
        self.selected = True
        strategy: Strategy = engine
        return strategy


def active_plugin(plugins: Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin | None:
    """The plugin in use."""
    return next((plugin for plugin in plugins.values() if plugin.selected), None)


def named_plugins(arguments: Mapping[str, object]) -> dict[str, DeepSpeedPlugin]:
    """The DeepSpeed plugins among an Accelerator's arguments, by name; one alone, or the launcher's, is "default"."""
    single = arguments.get("deepspeed_plugin")
    several = arguments.get("deepspeed_plugins")
    if single is not None and several is not None:
        raise ConfigurationError(
            "two arguments set DeepSpeed plugins",
            found="deepspeed_plugin and deepspeed_plugins",
        )
    selection: Any = single
    if single is None:
        selection = several
    launched = variable("distributed_type")
    if selection is None and launched is not None and launched.value == "DEEPSPEED":
        # Another engine's argument has priority over the launcher's configuration.
        has_other_engine = any(
            value is not None
            for name, value in arguments.items()
            if name not in _NO_ENGINES
        )
        if not has_other_engine:
            selection = DeepSpeedPlugin()
    if selection is None:
        return {}
    # One plugin is a dict of one, so that the code that selects a plugin by name has no second case.
    plugins = {"default": selection}
    if isinstance(selection, Mapping):
        plugins = dict(selection)
    for name, plugin in plugins.items():
        if not isinstance(plugin, DeepSpeedPlugin):
            raise ConfigurationError(
                "expected a DeepSpeedPlugin", found=f"{name}: {type(plugin).__name__}"
            )
    return plugins
