"""The measured memory of a step against the CPU allocator in a real fit; what is counted, and what stays as it was."""

import copy
import dataclasses
import resource
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import BatchEncoding

import trainer_kit as tk
from tests.planning.workloads import (
    GPT,
    LanguageModel,
    Measured,
    compared,
    made,
    sent,
    stop_counting,
)
from trainer_kit.core.errors import ConfigurationError, StrategyError, TrainerKitError
from trainer_kit.planning import real_step
from trainer_kit.planning.kernel_memory import KernelMemory
from trainer_kit.planning.measure import AUTOCAST_COPIES, measure
from trainer_kit.planning.records import CATEGORIES, Candidate
from trainer_kit.strategies import FSDPStrategy, MeshStrategy
from trainer_kit.testing import TinyModule, run_distributed


@pytest.fixture(scope="module", autouse=True)
def _counted():
    """All comparisons share one fork server; starting it takes as long as many comparisons."""
    yield
    stop_counting()


def candidate(
    strategy="single_device", world=1, samples=8, precision="32-true", **options
):
    return Candidate(
        strategy=strategy,
        precision=precision,
        world=world,
        micro_batch=samples,
        **options,
    )


def on_cpu(module, batch, tried, **options):
    return measure(module, batch, tried, accelerator="cpu", **options)


def close(name, tried, within=0.05, **options):
    found, traced = compared(name, tried, **options)
    assert found.exact
    assert max(sum(role.values()) for role in found.memory) == found.peak
    assert abs(found.peak / traced - 1) < within, (
        name,
        tried,
        dict(found.memory[0]),
        traced,
    )


_LONG = [pytest.param(strategy, marks=pytest.mark.long) for strategy in ("ddp", "tp2")]

# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("mlp", False),
        ("gpt", True),
        *[
            pytest.param(name, again, marks=pytest.mark.long)
            for name, again in [
                ("mlp", True),
                ("gpt", False),
                *((n, a) for n in ("encoder", "llama") for a in (False, True)),
            ]
        ],
    ],
)
def test_one_device(name, again):
    close(name, candidate(activation_checkpointing=again), within=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*_LONG, "fsdp"])
def test_two_ranks(strategy):
    close("gpt", candidate(strategy, 2), within=0.01)


_KERNELS = ("volumes", "translator", "ranker", "scan", "lstm", "unet")


@pytest.mark.slow
@pytest.mark.parametrize("name", _KERNELS)
def test_what_kernels_allocate_inside(name):
    """Conv3d and U-Net missed 13 to 26 %, LSTMs half: copies in oneDNN's layouts, and what its LSTM saves.

    Autograd adds a gradient of a table, or of a step of a scan, in place: 3 to 20 % were too much.
    """
    close(name, candidate(samples=16), within=0.01)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("strategy", "world"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)]
)
@pytest.mark.parametrize("name", _KERNELS)
def test_what_kernels_allocate_under_every_strategy(name, strategy, world, precision):
    for samples in (3, 32):
        close(
            name,
            candidate(strategy, world, samples=samples, precision=precision),
            within=0.02,
        )


def test_a_kernel_that_needs_long_runs_on_fewer_samples():
    """The line through two smaller sizes gives what all samples need."""
    values = [torch.empty(samples, 8, 32, 32, device="meta") for samples in (4, 64)]
    weight = torch.empty(8, 8, 3, 3, device="meta")
    few, many = (
        KernelMemory().probe(
            torch.ops.aten.convolution.default,
            (value, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            {},
            flops,
        )
        for value, flops in zip(values, (1.0, 1e10), strict=True)
    )
    assert few.extra > 0
    assert 15 * few.extra < many.extra < 17 * few.extra


def test_recurrent_layers_are_not_exact_on_an_accelerator():
    module, batch = made("translator", 2)
    assert on_cpu(module, batch, candidate()).exact
    found = measure(module, batch, candidate(), accelerator="cuda")
    assert found.ran
    assert not found.exact
    assert "LSTM: measured as plain operators" in found.inexact[0]
    volumes, batch = made("volumes", 2)
    found = measure(volumes, batch, candidate(), accelerator="cuda")
    assert found.exact
    assert (
        "convolution, convolution_backward: cuda's library chooses its workspace"
        in str(found.notes)
    )


_MODELS = (
    "cnn",
    "encoder",
    "gpt",
    "llama",
    "mixer",
    "mlp",
    "recommender",
    "resnet",
    "vit",
)
_MATRIX = [
    *[
        ("single_device", 1, name)
        for name in ("cnn", "mixer", "recommender", "resnet", "vit")
    ],
    *[("ddp", 2, name) for name in _MODELS if name != "gpt"],
    *[("fsdp", world, name) for world in (2, 4) for name in _MODELS],
    *[
        ("tp2", 2, name)
        for name in ("encoder", "gpt", "llama", "mixer", "mlp", "recommender", "vit")
    ],
    *[("tp2", 4, name) for name in ("encoder", "gpt")],
    *[
        ("pp2", 2, name)
        for name in ("encoder", "gpt", "llama", "mixer", "resnet", "vit")
    ],
    *[("pp2", 4, name) for name in ("gpt", "llama")],
]


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("strategy", "world", "name"), _MATRIX)
def test_every_pair(strategy, world, name, again):
    stages = strategy == "pp2"
    samples = 512 if name == "recommender" else 4 if stages else 8
    accumulate = 4 if stages else 1
    close(
        name,
        candidate(
            strategy,
            world,
            samples=samples,
            accumulate=accumulate,
            activation_checkpointing=again,
        ),
    )


@pytest.mark.long
def test_bfloat16():
    close(
        "gpt", candidate(samples=2, precision="bf16-mixed"), within=0.01
    )  # two samples: see the next test


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("strategy", "world"), [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("tp2", 2)]
)
def test_bfloat16_of_every_strategy(strategy, world, precision):
    """Two samples: a CPU without AVX-512 takes twenty times as long for products in bfloat16 as in float32."""
    for again in (False, True):
        close(
            "gpt",
            candidate(
                strategy,
                world,
                samples=2,
                precision=precision,
                activation_checkpointing=again,
            ),
        )
    close("mlp", candidate(strategy, world, samples=2, precision=precision))


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "world"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)]
)
def test_accumulation_and_clipping(strategy, world):
    close("gpt", candidate(strategy, world, accumulate=3))
    close("gpt", candidate(strategy, world), gradient_clip_val=1.0)


@pytest.mark.long
def test_autocast_copies_all_weights_under_fsdp():
    """A real rank holds them beside its shards; units that are gathered in bfloat16 need no copies."""
    tried = candidate("fsdp", 2, samples=2, precision="bf16-mixed")
    found, copied = compared("deep", tried)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    _, gathered = compared("deep", tried, strategy=FSDPStrategy(mixed_precision=policy))
    size = 2 * 24 * 512 * 512
    assert 0.95 * size < copied - gathered < 1.1 * size
    assert AUTOCAST_COPIES in found.notes
    axes = MeshStrategy(dp_shard=2)
    _, along_an_axis = compared("deep", tried, strategy=axes)
    assert abs(along_an_axis / copied - 1) < 0.01


@pytest.mark.parametrize(
    ("strategy", "world", "copies"),
    [("tp2", 2, False), ("tp2", 4, True), ("ddp", 2, False)],
)
def test_copies_are_noted_where_a_mesh_shards_too(strategy, world, copies):
    module, batch = made("gpt", 2)
    for precision in ("32-true", "bf16-mixed"):
        found = on_cpu(module, batch, candidate(strategy, world, precision=precision))
        assert (AUTOCAST_COPIES in found.notes) == (
            copies and precision == "bf16-mixed"
        )


@pytest.mark.long
def test_autocast_copies_on_a_mesh():
    close("gpt", candidate("tp2", 4, samples=2, precision="bf16-mixed"))


def test_autocast_keeps_copies_of_weights_over_recomputation_too():
    """Its cache holds them until the forward ends, unless it is switched off."""
    module, batch = made("deep", 2)
    tried = candidate(
        "fsdp", 4, samples=2, precision="bf16-mixed", activation_checkpointing=True
    )
    cached = on_cpu(module, batch, tried)
    torch.set_autocast_cache_enabled(False)
    try:
        kept = on_cpu(module, batch, tried)
    finally:
        torch.set_autocast_cache_enabled(True)
    assert cached.peak - kept.peak > 0.7 * 2 * 24 * 512 * 512
    exact = on_cpu(
        module, batch, candidate("fsdp", 4, samples=2, activation_checkpointing=True)
    )
    assert AUTOCAST_COPIES not in exact.notes
    assert kept.peak < 1.1 * exact.peak


@pytest.mark.slow
def test_positions_that_a_batch_brings_may_pack_sequences():
    """transformers then makes a mask, with which keys and values are repeated for all heads."""
    module, tokens = made("llama", 2)
    tried = candidate()
    alone = on_cpu(module, {"input_ids": tokens}, tried)
    packed = on_cpu(
        module,
        {"input_ids": tokens, "position_ids": torch.arange(128).repeat(2, 1)},
        tried,
    )
    repeated = (
        4 * 2 * 4 * (8 * 4 * 128 * 32)
    )  # float32, keys and values of 4 layers, whose 4 heads become 8
    assert (
        repeated
        < packed.memory[0]["activations"] - alone.memory[0]["activations"]
        < 1.05 * 2 * repeated
    )
    assert not any("transformers" in note for note in alone.notes)
    assert any("position_ids" in note for note in packed.notes)


def test_categories_add_up():
    module, batch = made("mlp", 2)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    found = on_cpu(module, batch, candidate())
    assert tuple(found.memory[0]) == CATEGORIES
    assert found.memory[0]["parameters"] == found.memory[0]["gradients"] == size
    assert 2 * size <= found.memory[0]["optimizer"] < 2.01 * size
    assert found.memory[0]["gathered"] == 0
    sharded = on_cpu(module, batch, candidate("fsdp", 4))
    assert sharded.memory[0]["parameters"] == size // 4
    assert sharded.memory[0]["gathered"] > 0


def test_a_larger_batch_needs_more_activations():
    module, batch = made("encoder", 2)
    small, large = (
        on_cpu(module, batch, candidate(samples=samples)).memory[0]
        for samples in (4, 8)
    )
    assert small["parameters"] == large["parameters"]
    assert 1.9 < large["activations"] / small["activations"] < 2.1


@dataclasses.dataclass
class Sentences:
    tokens: torch.Tensor


class Movable:
    """Shows no tensors."""

    def to(self, device):
        return self


@pytest.mark.parametrize(
    "wrap",
    [BatchEncoding, lambda batch: Sentences(batch["tokens"]), lambda batch: [batch]],
)
def test_batches_of_every_kind_get_the_size_of_the_candidate(wrap):
    """A batch of transformers has a ``to`` of its own; it kept its size, and every plan was of that."""

    class Reader(tk.TrainModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 64)
            self.out = nn.Linear(64, 64)

        def training_step(self, batch, batch_idx):
            batch = batch[0] if isinstance(batch, list) else batch
            tokens = batch.tokens if isinstance(batch, Sentences) else batch["tokens"]
            return self.out(torch.tanh(self.embed(tokens))).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plain = on_cpu(
        Reader(),
        {"tokens": torch.zeros(8, 24, dtype=torch.long)},
        candidate(samples=32),
    )
    given = wrap({"tokens": torch.zeros(2, 24, dtype=torch.long)})
    found = on_cpu(Reader(), given, candidate(samples=32))
    assert found.exact, found.notes
    assert found.memory == plain.memory
    assert found.flops == plain.flops > 0


def test_a_batch_that_shows_no_tensors_is_not_measured():
    found = on_cpu(TinyModule(), [torch.zeros(2, 32), Movable()], candidate())
    assert not found.exact
    assert "a batch with a Movable cannot be resized" in found.notes[0]


def test_recomputed_activations_need_less():
    module, batch = made("encoder", 2)
    kept, again = (
        on_cpu(module, batch, candidate(activation_checkpointing=flag))
        for flag in (False, True)
    )
    assert again.peak < kept.peak
    assert again.flops > kept.flops


def test_precision_words():
    module, batch = made("mlp", 2)
    full, mixed, half = (
        on_cpu(module, batch, candidate(precision=word)).memory[0]
        for word in ("32-true", "bf16-mixed", "bf16-true")
    )
    assert full["parameters"] == mixed["parameters"] == 2 * half["parameters"]
    assert mixed["gradients"] == 2 * half["gradients"]


class Chosen(TinyModule):
    def __init__(self, optimizer, **options):
        super().__init__()
        self.optimizer, self.options = optimizer, options

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1, **self.options)


def test_optimizers():
    size = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())

    def state(optimizer, **options):
        return on_cpu(
            Chosen(optimizer, **options), torch.zeros(2, 32), candidate()
        ).memory[0]["optimizer"]

    assert state(torch.optim.SGD) == 0
    assert state(torch.optim.SGD, momentum=0.9) == size
    assert state(torch.optim.AdamW, fused=True) // size == 2
    assert state(torch.optim.AdamW, amsgrad=True) // size == 3


def test_all_tensors_are_stepped_together_on_an_accelerator():
    module, batch = made("mlp", 2)
    together, apart = (
        measure(module, batch, candidate(samples=1), accelerator=word)
        for word in ("cuda", "cpu")
    )
    assert together.peak > apart.peak + 0.7 * apart.memory[0]["parameters"]
    assert any("cuda" in note for note in together.notes)


@pytest.mark.long
def test_all_tensors_are_stepped_together_like_a_real_foreach():
    close("foreach", candidate(samples=1), within=0.01)


class TwoOptimizers(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"first": loss, "second": loss * 2}

    def configure_optimizers(self):
        first, *others = self.parameters()
        return {
            "first": torch.optim.SGD([first], lr=0.1),
            "second": torch.optim.Adam(others),
        }


def test_two_optimizers():
    found = on_cpu(TwoOptimizers(), torch.zeros(2, 32), candidate())
    assert found.exact
    _, *others = TwoOptimizers().parameters()
    assert found.memory[0]["optimizer"] >= 8 * sum(
        parameter.numel() for parameter in others
    )


def test_offload_holds_state_in_host_memory():
    module, batch = made("mlp", 2)
    kept, away = (
        measure(module, batch, candidate("fsdp", 4, offload=flag))
        for flag in (False, True)
    )
    assert kept.host == 0
    assert away.memory[0]["optimizer"] == away.memory[0]["parameters"] == 0
    assert away.host >= kept.memory[0]["optimizer"] + kept.memory[0]["parameters"]
    assert away.peak < kept.peak


def test_offload_saves_nothing_on_a_cpu():
    """A plan for a CPU took the memory of the host for another one, in which more would fit."""
    module, batch = made("mlp", 2)
    kept, away = (
        on_cpu(module, batch, candidate("fsdp", 4, offload=flag))
        for flag in (False, True)
    )
    assert away.memory == kept.memory
    assert away.host == 0
    assert any("saves nothing" in note for note in away.notes)


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_offload_is_that_of_a_real_step(world, again):
    """On a CPU the real fit holds what the device and the host would hold, together."""
    tried = candidate("fsdp", world, offload=True, activation_checkpointing=again)
    close("gpt", tried, within=0.01)
    module, batch = made("gpt", 2)
    together, divided = on_cpu(module, batch, tried), measure(module, batch, tried)
    state = (*divided.memory[0].values(), divided.host)
    assert max(divided.peak, divided.host) < together.peak <= sum(state) * 1.05


# -- large models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_billion_parameters_on_256_ranks():
    with torch.device("meta"):
        module = LanguageModel(
            GPT(width=4096, depth=20, vocabulary=40_000, heads=32, tied=False)
        )
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count > 4.3e9
    before, began = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        time.process_time(),
    )
    tried = candidate(
        "fsdp", 256, samples=1, precision="bf16-mixed", activation_checkpointing=True
    )
    found = on_cpu(module, torch.zeros(2, 1024, dtype=torch.long), tried)
    assert (
        time.process_time() - began < 60
    )  # seconds of the processor, with which a busy machine does not interfere
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000
    )  # kB; the weights are 17 GB
    assert found.exact
    assert abs(found.memory[0]["parameters"] / (4 * count / 256) - 1) < 0.01
    gathered = next(one for one in found.traffic if one.kind == "all_gather")
    assert gathered.axis == "data"
    assert gathered.bytes >= 2 * 4 * count * 0.9


class BuiltLate(Measured):
    def __init__(self):
        tk.TrainModule.__init__(self)
        self.net = None

    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def test_layers_built_in_configure_model():
    module = BuiltLate()
    found = on_cpu(module, torch.zeros(2, 256), candidate("fsdp", 2))
    assert module.net is None
    assert found.memory[0]["parameters"] == 4 * (256 * 512 * 2 + 512 + 256) // 2


# -- collectives -----------------------------------------------------------------------------------------------------


def traffic(found):
    return {(one.kind, one.axis): (one.count, one.bytes) for one in found.traffic}


def test_collectives_of_data_parallel():
    module, batch = made("mlp", 2)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    replicated = traffic(on_cpu(module, batch, candidate("ddp", 2)))
    assert replicated[("all_reduce", "data")][1] == size
    sharded = traffic(on_cpu(module, batch, candidate("fsdp", 2)))
    assert sharded[("all_gather", "data")][1] == 2 * size
    assert sharded[("reduce_scatter", "data")] == (4, size)
    alone = on_cpu(module, batch, candidate())
    assert alone.traffic == ()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*_LONG, "fsdp"])
def test_collectives_of_a_real_step(strategy):
    """They are equal, but for up to two exchanges of a few numbers, by which real ranks agree in the counted step."""
    tried = candidate(strategy, 2)
    real = run_distributed(sent, 2, "gpt", tried, process_group=False)[0]
    found = traffic(on_cpu(*made("gpt", 2), tried))
    assert found
    for kind, axis, count, size in real:
        known, counted = found.pop((kind, axis), (0, 0))
        agreed = count - known
        assert agreed in ((0, 1, 2) if kind == "all_gather" else (0,))
        assert 0 <= size - counted <= 200 * agreed
    assert not found


def test_stages_of_a_pipeline():
    module, batch = made("gpt", 2)
    found = on_cpu(module, batch, candidate("pp2", 2, samples=4, accumulate=4))
    assert found.exact
    first, last = found.memory
    whole = on_cpu(module, batch, candidate(samples=4, accumulate=4))
    head = 4 * 1024 * 256  # the tied weight, which both stages hold
    assert (
        first["parameters"] + last["parameters"] == whole.memory[0]["parameters"] + head
    )
    sent = (
        4 * 4 * 128 * 256 * 4
    )  # activations of four micro-batches, and once the gradient of the tied weight
    assert traffic(found) == {("send", "pipeline"): (5, sent + head)}
    assert whole.flops // 3 < found.flops < whole.flops


def test_buffers_are_broadcast():
    module, batch = made("cnn", 2)
    found = traffic(on_cpu(module, batch, candidate("ddp", 2)))
    assert found[("broadcast", "data")][1] == sum(
        b.numel() * b.element_size() for b in module.buffers()
    )


# -- floating-point operations ---------------------------------------------------------------------------------------


class OneLinear(Measured):
    def __init__(self):
        super().__init__(
            nn.Sequential(
                nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False)
            )
        )


def test_operations_of_linear_layers():
    found = on_cpu(OneLinear(), torch.zeros(2, 64), candidate(samples=10))
    forward = 2 * 10 * (64 * 128 + 128 * 32)
    backward = (
        forward + 2 * 10 * 128 * 32
    )  # gradients of weights, and of the input of the second layer
    assert found.flops == forward + backward
    assert (
        on_cpu(
            OneLinear(), torch.zeros(2, 64), candidate(samples=10, accumulate=3)
        ).flops
        == 3 * found.flops
    )


def test_operations_of_attention_are_divided_by_tensor_parallel():
    module, batch = made("gpt", 2)
    whole, part = (
        on_cpu(module, batch, candidate()),
        on_cpu(module, batch, candidate("tp2", 2)),
    )
    samples, length, width, depth, vocabulary = 8, 128, 256, 4, 1024
    tokens = samples * length
    linear = 2 * tokens * width * width * 12 * depth
    attention = 2 * 2 * samples * length * length * width * depth
    head = 2 * tokens * width * vocabulary
    # Backward of attention computes its scores again: 5 products after 2.
    assert whole.flops == 3 * (linear + head) + attention + attention * 5 // 2
    assert (
        part.flops == whole.flops - (3 * linear + attention + attention * 5 // 2) // 2
    )


# -- what cannot be run ----------------------------------------------------------------------------------------------


class ReadsValues(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 100 else loss * 2


def test_a_large_step_that_reads_values_is_calculated(monkeypatch):
    monkeypatch.setattr(real_step, "LARGEST", 0)
    size = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())
    found = on_cpu(ReadsValues(), torch.zeros(2, 32), candidate("ddp", 2))
    assert not found.ran
    assert found.memory[0]["parameters"] == found.memory[0]["gradients"] == size
    assert found.memory[0]["activations"] == found.flops == 0
    assert "only weights, gradients and optimizer state" in found.notes[0]
    assert "DataDependent" in found.notes[0]


def test_the_line_that_reads_a_value_is_named():
    class Reads(TinyModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log(
                "value", loss["loss"].item() if isinstance(loss, dict) else loss.item()
            )
            return loss

    line = Reads.training_step.__code__.co_firstlineno + 3
    found = on_cpu(Reads(), torch.zeros(2, 32), candidate())
    assert (
        f"DataDependentOutputException in test_measure.py, line {line}: "
        in found.notes[0]
    )


def test_engines_without_a_fake_path_are_calculated():
    found = on_cpu(
        TinyModule(),
        torch.zeros(2, 32),
        candidate("deepspeed_stage_2", 4, precision="bf16-mixed"),
    )
    size = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())
    assert not found.exact
    assert 0 < found.memory[0]["parameters"] <= size
    assert "deepspeed" in found.notes[0]
    away = on_cpu(
        TinyModule(),
        torch.zeros(2, 32),
        candidate("deepspeed_stage_2", 4, precision="bf16-mixed", offload=True),
    )
    assert away.host > 0
    assert away.memory[0]["optimizer"] == 0


@pytest.mark.parametrize(
    ("tried", "says"),
    [
        (candidate("tp3", 4), "needs 3 ranks or a multiple"),
        (candidate("nothing", 2), "nothing"),
        (candidate("ddp", 2, offload=True), "host memory"),
        (candidate(precision="12-true"), "12-true"),
    ],
)
def test_candidates_that_cannot_be_built(tried, says):
    with pytest.raises(TrainerKitError, match=says):
        on_cpu(TinyModule(), torch.zeros(2, 32), tried)


def test_no_block_to_recompute():
    with pytest.raises(ConfigurationError, match="matches no block"):
        on_cpu(
            Chosen(torch.optim.SGD),
            torch.zeros(2, 32),
            candidate(activation_checkpointing=True),
        )


# -- nothing is left behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "world"), [("single_device", 1), ("ddp", 2), ("fsdp", 4), ("tp2", 2)]
)
def test_nothing_changes(strategy, world):
    module, batch = made("gpt", 2)
    module.net.blocks[0].requires_grad_(False)
    module.eval()
    before = copy.deepcopy(module.state_dict())
    flags = [parameter.requires_grad for parameter in module.parameters()]
    hooks = [
        len(part._forward_hooks) + len(part._forward_pre_hooks)
        for part in module.modules()
    ]
    numbers, threads = torch.get_rng_state(), torch.backends.mkldnn.enabled
    resize, swap = torch.UntypedStorage.resize_, torch.utils.swap_tensors
    on_cpu(module, batch, candidate(strategy, world))
    assert all(
        torch.equal(value, before[name]) for name, value in module.state_dict().items()
    )
    assert type(next(module.parameters())) is nn.Parameter
    assert flags == [parameter.requires_grad for parameter in module.parameters()]
    assert hooks == [
        len(part._forward_hooks) + len(part._forward_pre_hooks)
        for part in module.modules()
    ]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module.training
    assert torch.equal(numbers, torch.get_rng_state())
    assert threads == torch.backends.mkldnn.enabled
    assert torch.UntypedStorage.resize_ is resize
    assert torch.utils.swap_tensors is swap
    assert not dist.is_initialized()
    assert torch.zeros(2).sum() == 0  # no mode is active


def test_nothing_is_left_after_an_error():
    with pytest.raises(TrainerKitError):
        on_cpu(
            Chosen(torch.optim.SGD),
            torch.zeros(2, 32),
            candidate("fsdp", 2, activation_checkpointing=True),
        )
    assert not dist.is_initialized()
    assert float(torch.ones(2).sum()) == 2


def test_a_rank_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StrategyError, match="a process that is not a rank"):
            on_cpu(TinyModule(), torch.zeros(2, 32), candidate("ddp", 2))
    finally:
        dist.destroy_process_group()


def test_a_fit_follows():
    module, batch = made("mlp", 2)
    on_cpu(module, batch, candidate("fsdp", 2))
    trainer = tk.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(module, [batch] * 2)
    assert trainer.global_step == 2
    with pytest.raises(TrainerKitError):
        measure(module, batch, candidate("nothing"))
    assert on_cpu(module, batch, candidate()).exact  # and a plan after a fit
