"""How a model becomes stages, and what cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from tests.parity.plain import case
from tests.strategies.pipelines import Words, Writer, stages, texts
from tests.training.test_closures import SAM
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.strategies.transforms.pipeline_stages import (
    Turn,
    lay_out,
    make_stages,
    pipelined_model,
)

CPU = torch.device("cpu")


def run(stages: list[Any], *inputs: Any) -> Any:
    handed: Any = ()
    for stage in stages:
        stage.turns = iter([Turn(inputs, {})])
        handed = stage(*handed)
    return handed


def split(model: nn.Module, count: int, plan: PipelinePlan | None = None) -> list[Any]:
    return make_stages(
        model, lay_out(model, plan or PipelinePlan(), count), range(count), CPU
    )


def test_blocks_are_divided_by_their_size_and_ends_belong_to_the_first_and_last() -> (
    None
):
    layout = lay_out(Words(blocks=8), PipelinePlan(), 4)
    assert [len(blocks) for blocks in layout.blocks] == [2, 2, 2, 2]
    assert {name: at for name, at in layout.owners.items() if "layers" not in name} == {
        "embedding": 0,
        "positions": 0,
        "norm": 3,
        "head": 3,
    }  # and a table with nothing to save on each
    big = Words(blocks=4, width=8)
    big.embedding = nn.Embedding(1000, 8)
    assert [len(blocks) for blocks in lay_out(big, PipelinePlan(), 2).blocks] == [1, 3]
    named = lay_out(
        Words(blocks=8), PipelinePlan(split_points=["layers.1", "layers.7"]), 3
    )
    assert [blocks[0] for blocks in named.blocks] == [
        "layers.0",
        "layers.1",
        "layers.7",
    ]


@pytest.mark.slow
def test_stages_one_after_the_other_are_the_model() -> None:
    batch = texts((3,))[0]
    for count in (2, 3, 5):
        model = Words(blocks=5)
        expected = model(batch)["logits"]
        stages = split(model, count)
        assert torch.equal(run(stages, batch)["logits"], expected)
        run(stages, batch)["logits"].sum()
        assert torch.equal(
            model(batch)["logits"], expected
        )  # all stages are here, and put back
        trained = [p for stage in stages for p in stage.parameters()]
        assert len({*map(id, trained)}) == len(trained) == len(list(model.parameters()))


def test_a_stage_has_nothing_of_the_others() -> None:
    model = Words(blocks=4)
    (stage,) = make_stages(model, lay_out(model, PipelinePlan(), 2), [1], CPU)
    names = list(model.state_dict())
    assert {name.split(".")[0] for name in names} == {"layers", "norm", "head"}
    assert {name.split(".")[1] for name in names if name.startswith("layers")} == {
        "2",
        "3",
    }
    assert len(model.layers) == 4
    assert len(list(stage.parameters())) == len(names)


class Mixes(nn.Module):
    """Mixes positions, as a layer of an MLP-Mixer: what it returns is transposed, as its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.transpose(1, 2)).transpose(1, 2)


def test_stages_hand_on_contiguous_tensors() -> None:
    """The first window of an MLP-Mixer ended with "input tensor has to be contiguous", which is an error of gloo."""
    model = nn.Sequential(*(Mixes() for _ in range(2)))
    x = torch.randn(2, 3, 5).transpose(1, 2)
    assert not model(x).is_contiguous()
    first, last = split(model, 2)
    first.turns = iter([Turn((x,), {})])
    (handed,) = first()
    assert handed.is_contiguous()
    last.turns = iter([Turn((x,), {})])
    torch.testing.assert_close(last(handed), model(x))


class Skips(Words):
    """What the embedding made reaches a block of another stage, or the end."""

    def __init__(self, at_end: bool) -> None:
        super().__init__(blocks=2)
        self.at_end = at_end

    def forward(self, words: Tensor, *, half: bool = False) -> dict[str, Tensor]:
        x = start = self.embedding(words)
        for layer in self.layers:
            x = layer(x, x if self.at_end else start)[0]
        return {"logits": self.head(self.norm(x)) + (start.sum() if self.at_end else 0)}


class Twice(Words):
    def forward(self, words: Tensor, *, half: bool = False) -> dict[str, Tensor]:
        x = self.embedding(words)
        for layer in [*self.layers, *self.layers]:
            x = layer(x, x)[0]
        return {"logits": self.head(self.norm(x))}


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            partial(Skips, at_end=False),
            "the input of layers.1 depends",
            id="in a block",
        ),
        pytest.param(
            partial(Skips, at_end=True),
            "what the model returns depends",
            id="at the end",
        ),
        pytest.param(
            partial(Twice, blocks=2),
            "layers.0 is called more than once|depends on what another stage",
            id="twice",
        ),
    ],
)
def test_values_that_would_have_to_cross_between_stages_are_refused(
    model: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(StrategyError, match=reason):
        run(split(model(), 2), texts((3,))[0])


@pytest.mark.slow
def test_a_head_before_its_layers_needs_a_plan() -> None:
    with pytest.raises(StrategyError, match="depends on what another stage"):
        run(split(HeadFirst(), 2), torch.ones(1, 4))
    model = HeadFirst()
    expected = model(torch.ones(1, 4))
    assert torch.equal(
        run(split(model, 2, PipelinePlan(last=["head"])), torch.ones(1, 4)), expected
    )


def test_parameters_shared_by_stages_are_found() -> None:
    layout = lay_out(Words(blocks=4, tied="ends, blocks"), PipelinePlan(), 2)
    assert layout.shared == [[("embedding.weight", 0), ("head.weight", 1)]]
    assert layout.repeated == [["layers.2.up.weight", "layers.3.up.weight"]]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"split_points": ["layers.9"]}, "no block 'layers.9'"),
        ({"split_points": []}, "names 0 blocks"),
        ({"split_points": ["layers.0"]}, "out of order"),
        ({"split_points": "even"}, 'is "auto" or names'),
        ({"last": ["heads"]}, "names 'heads'(.|\n)*'head'"),
        ({"everywhere": ["norm"]}, "has parameters to train"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit(plan: dict[str, Any], reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        lay_out(Words(blocks=4), PipelinePlan(**plan), 2)


def test_a_model_of_one_block_has_no_two_stages() -> None:
    with pytest.raises(StrategyError, match="cannot be split into 2 stages"):
        lay_out(nn.Sequential(nn.Linear(2, 2)), PipelinePlan(), 2)


def test_models_without_the_submodule_of_the_stages() -> None:
    several = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    with pytest.raises(
        StrategyError, match="the submodule that becomes the pipeline stages"
    ):
        pipelined_model(several, PipelinePlan())
    with pytest.raises(StrategyError, match="has no such submodule"):
        pipelined_model(several, PipelinePlan(model="tow"))


class Outside(Writer):
    def __init__(self) -> None:
        super().__init__(plan=PipelinePlan(model="net"))
        self.scale = nn.Linear(1, 1)


class Skipping(Writer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.net(batch)
        return None


class NotCalling(Writer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch.sum()


class CallingTwice(Writer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch)["logits"].sum() + self.net(batch)["logits"].sum()


class Listening(Writer):
    def on_after_backward(self) -> None: ...


class Sharp(Writer):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters())


class Failing(Writer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.net(batch)
        raise KeyError("mine")


def fit(make: Any) -> None:
    trainer = tk.Trainer(
        accelerator="cpu", strategy=stages(), devices=2, barebones=True, max_steps=1
    )
    trainer.fit(make(), texts((4,) * 2))


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (
            Skipping,
            StrategyError,
            "training_step returned no loss, but the other pipeline stages",
        ),
        (CallingTwice, StrategyError, "training_step calls the pipelined model twice"),
        (Failing, KeyError, "mine"),
    ],
)
@pytest.mark.slow
def test_an_error_of_the_last_stage_is_raised(make: Any, error: Any, what: str) -> None:
    from trainer_kit.testing import run_distributed

    with pytest.raises(error, match=what):
        run_distributed(fit, 2, make)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_weights_of_other_stages_are_freed_at_once() -> None:
    """Blocks that recompute hold themselves: their weights stayed until Python looked for cycles."""

    class Looking(Writer):
        def on_train_start(self) -> None:
            own = {id(parameter) for parameter in self.parameters()}
            self.left = [
                found
                for reference in before
                if (found := reference()) is not None and id(found) not in own
            ]
            assert len(own) < len(before)

    module = Looking()
    before = [weakref.ref(parameter) for parameter in module.parameters()]
    trainer = tk.Trainer(
        accelerator="cpu",
        strategy=stages(),
        devices=2,
        max_steps=1,
        activation_checkpointing=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    gc.disable()
    try:
        trainer.fit(module, texts((4,) * 2))
    finally:
        gc.enable()
    assert module.left == []


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_modules_that_have_no_place_in_a_pipeline() -> None:
    for make, what in (
        (
            Outside,
            "scale.weight lies outside the submodule that becomes the pipeline stages",
        ),
        (NotCalling, "did not call the pipelined model"),
        (Listening, "on_before_backward and on_after_backward are not supported"),
    ):
        with case(module=make.__name__), pytest.raises(StrategyError, match=what):
            fit(make)
    with pytest.raises(
        ConfigurationError,
        match=r"SAM evaluates the loss again.*each rank of a pipeline",
    ):
        fit(Sharp)
    module = Writer()
    first = tk.Trainer(
        accelerator="cpu", strategy=stages(), devices=2, barebones=True, max_steps=1
    )
    first.fit(module, texts((4,) * 2))
    own, whole = (
        sum(p.numel() for p in net.parameters()) for net in (module, Writer())
    )
    assert own < whole
    assert first.strategy.pipeline.elsewhere == whole - own
    second = tk.Trainer(accelerator="cpu", strategy=stages(), devices=2, barebones=True)
    with pytest.raises(StrategyError, match="was split by another pipeline"):
        second.predict(module, texts((4,)))
