"""A stand-in for megatron-core, which needs CUDA: it records what it is told, and trains."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Calls = list[Any]


class Model(nn.Module):
    """What of a GPTModel a strategy looks at."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        usual = {"bf16": False, "fp16": False, "num_moe_experts": None, "mtp_num_layers": None}
        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        self.config = SimpleNamespace(
            **{**usual, **sizes, "sequence_parallel": False, "grad_scale_func": None, **config}
        )
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def set_input_tensor(self, tensor: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Wrapper(nn.Module):
    """Megatron's: gradients go to buffers of its own."""

    def __init__(self, calls: Calls, config: Any, settings: Any, module: nn.Module) -> None:
        super().__init__()
        self.config, self.module, self.calls = config, module, calls
        calls.append(("wrap", vars(settings), config.calculate_per_token_loss))
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(_keep)

    def no_sync(self) -> Any: ...

    def forward(self, *args: Any) -> Any:
        self.calls.append("forward")
        return self.module(*args)

    def broadcast_params(self) -> None:
        self.calls.append("broadcast_params")

    def zero_grad_buffer(self) -> None:
        self.calls.append("zero_grad_buffer")
        for parameter in self.parameters():
            parameter.main_grad.zero_()


def _keep(parameter: Any) -> None:
    parameter.main_grad += parameter.grad
    parameter.grad = None


class Stepper:
    """Megatron's optimizer around torch's; it steps with the wrapper's gradients, and clips by its configuration."""

    def __init__(self, calls: Calls, config: Any, chunks: list[Any], config_overrides: Any) -> None:
        calls.append(("optimizer", vars(config), config_overrides))
        self.calls, self.config = calls, config
        parameters = [{"params": [p for p in chunks[0].parameters() if p.requires_grad]}]
        self.optimizer = torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay
        )
        self.chained_optimizers, self.param_groups = [self], self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def reload_model_params(self) -> None: ...

    def step(self) -> tuple[bool, None, None]:
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        if self.config.clip_grad > 0:
            nn.utils.clip_grad_norm_(parameters, self.config.clip_grad)
        self.calls.append(("step", self.config.clip_grad, self.param_groups[0]["lr"]))
        self.optimizer.step()
        return True, None, None


def schedule(calls: Calls, **said: Any) -> None:
    """As Megatron's without a pipeline: forward, the loss function, backward; in the end gradients are finalised."""
    (chunk,) = said["model"]
    calls.append(("schedule", {k: v for k, v in said.items() if isinstance(v, (int, bool))}))
    for _ in range(said["num_microbatches"]):
        output, loss_func = said["forward_step_func"](said["data_iterator"], chunk)
        loss, tokens, _ = loss_func(output)
        assert (tokens.dtype, tokens.shape) == (torch.int, ())
        loss.backward()
    chunk.config.finalize_model_grads_func([chunk], tokens, pg_collection="groups", force_all_reduce=False)


def finalize(calls: Calls, model: list[Any], tokens: Any, **said: Any) -> None:
    calls.append(("finalize", len(model), tokens, said))
    for parameter in model[0].parameters():
        if not model[0].config.calculate_per_token_loss:
            parameter.main_grad /= dist.get_world_size()
        dist.all_reduce(parameter.main_grad)


def install() -> Calls:
    """The stand-in, in a process of its own."""
    made: Calls = []
    core, state, tensor, distributed, optimizer, pipeline, transformer, module = (
        ModuleType(f"megatron.core{name}")
        for name in (
            "", ".parallel_state", ".tensor_parallel", ".distributed", ".optimizer", ".pipeline_parallel",
            ".transformer", ".transformer.module",
        )
    )  # fmt: skip
    root = ModuleType("megatron")
    root.__spec__ = importlib.util.spec_from_loader("megatron", None)
    vars(core).update(parallel_state=state, tensor_parallel=tensor)
    vars(state).update(
        model_parallel_is_initialized=lambda: False,
        initialize_model_parallel=lambda **said: made.append(("initialize", said)),
        get_data_parallel_group=lambda: None,
    )
    vars(tensor).update(
        model_parallel_cuda_manual_seed=lambda seed: made.append("seed"),
        set_defaults_if_not_set_tensor_model_parallel_attributes=lambda parameter: None,
    )
    vars(distributed).update(
        DistributedDataParallel=partial(Wrapper, made),
        DistributedDataParallelConfig=SimpleNamespace,
        finalize_model_grads=partial(finalize, made),
    )
    vars(optimizer).update(OptimizerConfig=SimpleNamespace, get_megatron_optimizer=partial(Stepper, made))
    vars(pipeline).update(get_forward_backward_func=lambda: partial(schedule, made))
    vars(module).update(Float16Module=None)
    for one in (root, core, state, tensor, distributed, optimizer, pipeline, transformer, module):
        sys.modules[one.__name__] = one
    torch.cuda.is_available = lambda: True
    return made
