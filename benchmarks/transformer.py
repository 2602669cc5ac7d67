"""What every loop of `engines.py` trains, and how: by hand, and in each library the way its documentation does."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["LOOPS", "Work"]

LETTERS = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(LETTERS, width),
            nn.ModuleList(Block(width) for _ in range(layers)),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Work:
    """One run of one loop on one rank.

    Attributes:
        engine: ddp, fsdp, deepspeed, or none.
        width: of the transformer; a multiple of 32.
        layers: of it.
        length: tokens of a text.
        batch: texts of a rank in a step.
        steps: of the run.
        starts: seconds at which each step called the model.
    """

    engine: str
    width: int
    layers: int
    length: int
    batch: int
    steps: int
    starts: list[float] = field(default_factory=list)

    def model(self) -> Transformer:
        torch.manual_seed(0)
        return Transformer(self.width, self.layers)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # A small eps would make much of the noise in small gradients; DeepSpeed decays once before the first step.
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.0)

    def loss(self, model: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
        self.starts.append(time.perf_counter())
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def loader(self, mine: bool) -> DataLoader[Any]:
        """All batches of all ranks in order, for who divides them; ``mine``: this rank's."""
        generator = torch.Generator().manual_seed(1)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        count = self.steps * world
        texts = TensorDataset(
            torch.randint(
                LETTERS, (count * self.batch, self.length + 1), generator=generator
            )
        )
        if not mine:
            return DataLoader(texts, batch_size=self.batch)
        numbers = range(rank, count, world)
        return DataLoader(
            texts,
            batch_sampler=[
                list(range(n * self.batch, (n + 1) * self.batch)) for n in numbers
            ],
        )


def by_hand(work: Work) -> nn.Module:
    dist.init_process_group("gloo")
    model = work.model()
    if work.engine == "deepspeed":
        return _by_hand_deepspeed(work, model)
    if work.engine == "ddp":
        return _train(
            work,
            model,
            nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
        )
    for block in model.blocks:
        fully_shard(block)
    return _train(work, model, fully_shard(model))


def plain(work: Work) -> nn.Module:
    model = work.model()
    return _train(work, model, model)


def _train(work: Work, model: nn.Module, forward: nn.Module) -> nn.Module:
    optimizer = work.optimizer(model.parameters())
    for (text,) in work.loader(mine=True):
        optimizer.zero_grad()
        work.loss(forward, text).backward()
        optimizer.step()
    return model


def _by_hand_deepspeed(work: Work, model: nn.Module) -> nn.Module:
    deepspeed = _deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.0,  # 1 by default
        "zero_allow_untested_optimizer": True,
    }
    optimizer = work.optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.state.clear()  # it has tried a step, which Adam would count as its first
    for (text,) in work.loader(mine=True):
        engine.backward(work.loss(engine, text))
        engine.step()
    return model


def _deepspeed() -> Any:
    import importlib

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    import deepspeed

    # Collectives through shared memory would be compiled first, for minutes.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def trainer_kit(work: Work) -> nn.Module:
    import trainer_kit

    strategy = "deepspeed_stage_2" if work.engine == "deepspeed" else work.engine
    return _trainer(work, trainer_kit, trainer_kit.TrainModule, strategy, mine=False)


def lightning(work: Work) -> nn.Module:
    import lightning.pytorch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = "deepspeed_stage_2" if work.engine == "deepspeed" else work.engine
    return _trainer(
        work, lightning.pytorch, lightning.pytorch.LightningModule, strategy, mine=True
    )


def _trainer(
    work: Work, library: Any, base: type[Any], strategy: str, mine: bool
) -> nn.Module:
    """Lightning and trainer_kit read the same script."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return work.loss(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return work.optimizer(self.parameters())

    module = Module()
    trainer = library.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=1,
        barebones=True,
        use_distributed_sampler=not mine,
    )
    trainer.fit(module, work.loader(mine))
    return module.net  # type: ignore[no-any-return]


def raw(work: Work) -> nn.Module:
    import trainer_kit

    return _accelerated(work, trainer_kit)


def accelerate(work: Work) -> nn.Module:
    import accelerate as library

    return _accelerated(work, library)


def _accelerated(work: Work, library: Any) -> nn.Module:
    """Accelerate and trainer_kit's Accelerator read the same script."""
    options: dict[str, Any] = {}
    plugins = getattr(library, "utils", library)
    if work.engine == "fsdp":
        plugin = plugins.FullyShardedDataParallelPlugin
        options["fsdp_plugin"] = plugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    elif work.engine == "deepspeed":
        options["deepspeed_plugin"] = plugins.DeepSpeedPlugin(zero_stage=2)
    accelerator = library.Accelerator(cpu=True, **options)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    forward, optimizer = accelerator.prepare(model, optimizer)
    for (text,) in work.loader(mine=True):
        optimizer.zero_grad()
        accelerator.backward(work.loss(forward, text))
        optimizer.step()
    return accelerator.unwrap_model(forward)  # type: ignore[no-any-return]


warnings.simplefilter("ignore")
LOOPS: dict[str, Callable[[Work], nn.Module]] = {
    "plain": plain,
    "by hand": by_hand,
    "trainer_kit": trainer_kit,
    "raw": raw,
    "lightning": lightning,
    "accelerate": accelerate,
}
