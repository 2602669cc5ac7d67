"""Models of several kinds, their plans, and the CPU allocator's own record of a real fit."""

import ctypes
import functools
import multiprocessing.forkserver
import os
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import trainer_kit as tk
from trainer_kit.planning.candidates import axes_of, strategy_for
from trainer_kit.planning.measure import measure
from trainer_kit.planning.traffic import TrafficCounter
from trainer_kit.testing import run_distributed


class Measured(tk.TrainModule):
    """A module with a model, its loss, and AdamW."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.ln_1(x)
        split = [
            layer(normed).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ln_2(x))))


class GPT(nn.Module):
    """A decoder whose head shares its weight with the embedding."""

    def __init__(self, width=256, depth=4, vocabulary=1024, heads=8, tied=True):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(Measured):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_parallel(self, mesh):
        tensor = {}
        for index in range(len(self.net.blocks)):
            block = f"net.blocks.{index}"
            tensor |= {
                f"{block}.{name}": "colwise"
                for name in ("query", "key", "value", "fc1")
            }
            tensor |= {f"{block}.{name}": "rowwise" for name in ("out", "fc2")}
        return tk.ParallelPlan(tensor=tensor)


class Recurrent(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.cell = nn.LSTM(64, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 64)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Convolutions(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        stages = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(4):
            stages += [
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
            ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        conv = lambda i, o: nn.Sequential(  # noqa: E731
            nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU()
        )
        self.down = nn.ModuleList([conv(3, width), conv(width, 2 * width)])
        self.middle = nn.Sequential(
            conv(2 * width, 2 * width), conv(2 * width, 2 * width)
        )
        self.up = nn.ModuleList([conv(4 * width, width), conv(2 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = [
            (
                nn.GroupNorm(8, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
            )
            for _ in range(2)
        ]
        self.body = nn.Sequential(*(layer for one in layers for layer in one))

    def forward(self, x):
        return x + self.body(x)


class ResNet(nn.Module):
    """Residual blocks with group normalization, and a convolution that halves the image between its three stages."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        stages = [nn.Conv2d(3, width, 3, padding=1)]
        for index in range(3):
            stages += [Residual(width << index) for _ in range(depth)]
            stages += (
                [nn.Conv2d(width << index, width << index + 1, 3, 2, 1)]
                if index < 2
                else []
            )
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        parts = lambda size, inner: nn.Sequential(  # noqa: E731
            nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size)
        )
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = parts(tokens, 2 * tokens), parts(width, 4 * width)

    def forward(self, x):
        x = x + self.tokens(self.ln_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.ln_2(x))


class Mixer(nn.Module):
    """MLP-Mixer: layers that mix the patches of an image, then the channels of each patch."""

    def __init__(self, width=128, depth=6):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(64, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Recommender(nn.Module):
    """DLRM: bags of categories and dense numbers, the products of all their vectors, and a perceptron on top.

    A sample is 13 numbers, then 4 categories for each of 8 tables.
    """

    def __init__(self, width=64, tables=8, rows=2000):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()
        )
        self.out = nn.Linear(256, 1)

    def forward(self, x):
        dense = self.bottom(x[:, :13].float() / 1000)
        bags = [
            table(part)
            for table, part in zip(
                self.tables, x[:, 13:].chunk(len(self.tables), 1), strict=True
            )
        ]
        vectors = torch.stack([dense, *bags], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.triu_indices(len(bags) + 1, len(bags) + 1, 1)
        return self.out(self.top(torch.cat([dense, products[:, rows, columns]], 1)))


class Volumes(nn.Module):
    """Convolutions in three dimensions, down and up again."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv3d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()),
            *(
                nn.Conv3d(width, 2 * width, 3, 2, 1),
                nn.BatchNorm3d(2 * width),
                nn.SiLU(),
            ),
            *(nn.Conv3d(2 * width, 2 * width, 3, padding=1), nn.SiLU()),
            *(nn.ConvTranspose3d(2 * width, width, 2, 2), nn.SiLU()),
            nn.Conv3d(width, 1, 1),
        )

    def forward(self, x):
        return self.net(x)


class Translator(nn.Module):
    """An LSTM that reads, and one that writes, which begins with the state of the first."""

    def __init__(self, width=128, vocabulary=1000):
        super().__init__()
        self.source, self.target = (nn.Embedding(vocabulary, width) for _ in range(2))
        self.reader, self.writer = (
            nn.LSTM(width, width, num_layers=2, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        _, state = self.reader(self.source(tokens))
        return self.head(self.writer(self.target(tokens), state)[0])


class Ranker(nn.Module):
    """A GRU over the items of a session; a sample's items, a good and a bad one share one table."""

    def __init__(self, width=128, items=10_000):
        super().__init__()
        self.table = nn.Embedding(items, width)
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, items):
        states, _ = self.cell(self.table(items))
        good, bad = self.table(items[:, 0]), self.table(items[:, 1])
        return (states[:, -1] * (good - bad)).sum(-1)


class Scan(nn.Module):
    """A state space model, whose state is computed from one step of the sequence to the next."""

    def __init__(self, width=64, state=8):
        super().__init__()
        self.sizes = [state, state, width]
        self.inner, self.parts = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, sum(self.sizes)),
        )
        self.decay = nn.Parameter(torch.rand(width, state))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        values, gate = self.inner(x).chunk(2, -1)
        into, out_of, steps = self.parts(values).split(self.sizes, -1)
        steps = F.softplus(steps)
        state = x.new_zeros(len(x), *self.decay.shape)
        seen = []
        for at in range(x.shape[1]):
            kept = torch.exp(-steps[:, at, :, None] * self.decay) * state
            state = kept + (steps[:, at] * values[:, at])[..., None] * into[:, at, None]
            seen.append((state * out_of[:, at, None]).sum(-1))
        return x + self.out(torch.stack(seen, 1) * F.silu(gate))


def _mlp():
    parts = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        for _ in range(4)
    ]
    return Measured(nn.Sequential(*parts))


class Perceptron(Measured):
    """Linear pairs are sharded."""

    def configure_parallel(self, mesh):
        return tk.ParallelPlan(tensor="mlp")


class Encoder(Measured):
    """Its MLPs are sharded; torch's attention packs query, key and value in one weight."""

    def configure_parallel(self, mesh):
        return tk.ParallelPlan(
            tensor={
                "net.layers.*.linear1": "colwise",
                "net.layers.*.linear2": "rowwise",
            }
        )


class Rows(nn.Module):
    """A second layer computes only the rows that the first one chooses."""

    def __init__(self, width=256):
        super().__init__()
        self.first, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.second = nn.Linear(2 * width, 2 * width)

    def forward(self, x):
        x = self.first(x)
        rows = (x.mean(-1) > -1).nonzero().flatten()
        return self.out(x.index_add(0, rows, self.second(x[rows]).relu()))


class LogsValue(Measured):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("value", loss.item())
        return loss


class Optimized(Measured):
    """A perceptron with an optimizer of another library."""

    def __init__(self, make):
        super().__init__(_mlp().net)
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


class ReadsGradients(torch.optim.Optimizer):
    """Keeps a moment in 16 bits, and leaves out gradients that are not finite."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if not parameter.grad.abs().max().isfinite().item():
                continue
            state = self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["moment"].lerp_(parameter.grad.bfloat16(), 0.1)
            parameter.add_(state["moment"], alpha=-1e-3)


def _adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


def _torchao(name):
    def make(parameters):
        import torchao.optim

        return getattr(torchao.optim, name)(parameters, lr=1e-3)

    return make


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    return Llama(MixtralForCausalLM(config))


def _deep():
    return Measured(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(24))
        )
    )


def _perceptron():
    return Perceptron(_mlp().net)


def _encoder():
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return Encoder(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    return Llama(LlamaForCausalLM(config))


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_labels=10,
    )
    return Vision(ViTForImageClassification(config))


class Vision(Measured):
    def training_step(self, batch, batch_idx):
        return self.net(pixel_values=batch).logits.square().mean()

    def configure_parallel(self, mesh):
        tensor = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {
            "o_proj": "rowwise"
        }
        tensor = {f"attention.{name}": style for name, style in tensor.items()}
        tensor |= {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        return tk.ParallelPlan(
            tensor={f"net.vit.layers.*.{name}": style for name, style in tensor.items()}
        )


class Llama(Measured):
    def training_step(self, batch, batch_idx):
        inputs = batch if isinstance(batch, dict) else {"input_ids": batch}
        return self.net(**inputs, labels=inputs["input_ids"]).loss


class Together(Measured):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)


MODELS = {
    "foreach": (lambda: Together(_mlp().net), (256,), False),
    "mlp": (_perceptron, (256,), False),
    "deep": (_deep, (512,), False),
    "cnn": (lambda: Measured(Convolutions()), (3, 32, 32), False),
    "encoder": (_encoder, (64, 128), False),
    "gpt": (lambda: LanguageModel(GPT()), (128,), True),
    "lstm": (lambda: Measured(Recurrent()), (64, 64), False),
    "unet": (lambda: Measured(UNet()), (3, 64, 64), False),
    "volumes": (lambda: Measured(Volumes()), (1, 16, 16, 16), False),
    "translator": (lambda: Measured(Translator()), (40,), True),
    "ranker": (lambda: Measured(Ranker()), (32,), True),
    "nonzero": (lambda: Measured(Rows()), (256,), False),
    "logs a value": (lambda: LogsValue(_mlp().net), (256,), False),
    "optimizer that reads": (lambda: Optimized(ReadsGradients), (256,), False),
    "adafactor": (lambda: Optimized(_adafactor), (256,), False),
    "torchao 8-bit": (lambda: Optimized(_torchao("AdamW8bit")), (256,), False),
    "torchao 4-bit": (lambda: Optimized(_torchao("AdamW4bit")), (256,), False),
    "mixtral": (_mixtral, (64,), True),
    "scan": (lambda: Measured(nn.Sequential(Scan(), Scan())), (32, 64), False),
    "llama": (_llama, (128,), True),
    "vit": (_vit, (3, 32, 32), False),
    "resnet": (lambda: Measured(ResNet()), (3, 32, 32), False),
    "mixer": (lambda: Perceptron(Mixer()), (3, 32, 32), False),
    "recommender": (lambda: Perceptron(Recommender()), (13 + 8 * 4,), True),
}
"""By name: how the module is made, the shape of a sample, whether samples are tokens."""
READ = ("nonzero", "mixtral")
"""Models whose memory depends on the values of a batch: theirs are those of the real fit."""
COMPILED = ("torchao 8-bit", "torchao 4-bit")
"""Models whose step compiles: threads, variables and paths of the compiler stay in the process."""
_COUNTED = 5
"""Steps of a real fit whose peak is taken."""


def made(name, samples):
    """The module and a batch."""
    torch.manual_seed(0)
    build, shape, tokens = MODELS[name]
    batch = (
        torch.randint(0, 1000, (samples, *shape))
        if tokens
        else torch.randn(samples, *shape)
    )
    return build(), batch


class _Peaks(tk.callbacks.Callback):
    """The most that each step held, from the third on."""

    def __init__(self):
        self.found = []

    def on_train_step_end(self, trainer, module):
        if trainer.global_step > 2:
            self.found.append(_held("most_bytes"))
        ctypes.CDLL(None).forget_most()


def _held(which):
    function = getattr(ctypes.CDLL(None), which)
    function.restype = ctypes.c_long
    return function()


def traced(name, candidate, **options):
    """The peak of a real step in bytes, as the CPU allocator sees it; runs on each rank.

    It is the least of several steps: a thread of gloo may hold the blocks of a collective after its end, by chance.
    """
    before = _held("held_bytes")
    module, batch = made(name, candidate.micro_batch)
    options.setdefault(
        "strategy", strategy_for(candidate) if candidate.world > 1 else "auto"
    )
    peaks = _Peaks()
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=candidate.world,
        precision=candidate.precision,
        accumulate_grad_batches=candidate.accumulate,
        activation_checkpointing=candidate.activation_checkpointing,
        max_steps=2 + _COUNTED,
        callbacks=[peaks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, [batch] * (2 + _COUNTED) * candidate.accumulate)
    return min(peaks.found) - before


class _Sees(TorchDispatchMode):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.counter.see(func, args, out)
        return out


class _Counts(tk.callbacks.Callback):
    """Counts the collectives of the third step."""

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2:
            self.counter = TrafficCounter(axes_of(trainer.strategy))
            self.mode = _Sees(self.counter)
            self.mode.__enter__()
        elif trainer.global_step == 3:
            self.mode.__exit__(None, None, None)


def sent(name, candidate):
    """The collectives of a real fit's third step; runs on each rank."""
    module, batch = made(name, candidate.micro_batch)
    counts = _Counts()
    trainer = tk.Trainer(
        strategy=strategy_for(candidate),
        accelerator="cpu",
        devices=candidate.world,
        max_steps=3,
        callbacks=[counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, [batch] * 5)
    return [
        (one.kind, one.axis, one.count, one.bytes) for one in counts.counter.traffic()
    ]


@functools.cache
def counting_library():
    """The allocator's counter, compiled."""
    made = Path(tempfile.mkdtemp()) / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True
    )
    return str(made)


_server = multiprocessing.forkserver._forkserver
_counting = []
"""The PID of the fork server that preloads the allocator's counter, if it runs."""


def start_counting():
    """Start the fork server that preloads the allocator's counter, unless it is running."""
    if _server._forkserver_pid in _counting:
        return
    _server._stop()
    with mock.patch.dict(os.environ, LD_PRELOAD=counting_library()):
        # The server imports torch first; a port that is chosen before that may be taken when the ranks use it.
        run_distributed(os.getpid, 1, process_group=False)
    _counting[:] = [_server._forkserver_pid]


def stop_counting():
    """Stop that server; the next ranks come from a plain one."""
    if _server._forkserver_pid in _counting:
        _server._stop()
    _counting.clear()


def planned(name, candidate):
    """What a plan measures."""
    module, batch = made(name, max(2, candidate.micro_batch) if name in READ else 2)
    return measure(module, batch, candidate, accelerator="cpu")


def compared(name, candidate, **options):
    """The measured peak, and that of the rank that needs most in a real fit."""
    start_counting()
    if name in COMPILED:
        (found,) = run_distributed(planned, 1, name, candidate, process_group=False)
    else:
        found = planned(name, candidate)
    return found, max(
        run_distributed(
            traced, candidate.world, name, candidate, process_group=False, **options
        )
    )
