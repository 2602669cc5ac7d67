"""Loops of other kinds: a GAN and an actor-critic on two processes as on one, launchers, a kill, traces, names."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, PrecisionError, StrategyError

pytestmark = pytest.mark.slow  # programs are started

ROOT = Path(__file__).resolve().parents[2]
REAL = torch.randn(
    64, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)
NOISE = torch.randn(
    64, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64
)


def layers(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)
    ).double()


def weights(*models):
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


def gan(accelerator=None, steps=1):
    torch.manual_seed(3)
    generator, critic = layers(3, 2), layers(2, 1)
    step_g, step_d = (
        torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic)
    )
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(REAL, NOISE),
        batch_size=8 if accelerator is None else 8 // accelerator.num_processes,
    )
    backward = torch.Tensor.backward
    if accelerator is not None:
        generator, step_g, data, critic, step_d = accelerator.prepare(
            generator, step_g, data, critic, step_d
        )
        backward = accelerator.backward
    for _ in range(2):
        for real, noise in data:
            step_d.zero_grad()
            fake = generator(noise)
            backward(
                nn.functional.softplus(critic(fake.detach())).mean()
                + nn.functional.softplus(-critic(real)).mean()
            )
            step_d.step()
            step_g.zero_grad()
            backward(nn.functional.softplus(-critic(fake)).mean())
            step_g.step()
    return weights(generator, critic)


@pytest.mark.world_size(2)
def test_a_gan_on_two_processes_is_that_of_one():
    assert_close(gan(tk.Accelerator(cpu=True)), gan())


def actor_critic(accelerator=None):
    """Episodes of a corridor: each process plays every second one, and both learn from all of them."""
    torch.manual_seed(4)
    actor, critic = layers(4, 2), layers(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (actor, critic)]
    rank, size, backward = 0, 1, torch.Tensor.backward
    if accelerator is not None:
        actor, critic, *optimizers = accelerator.prepare(actor, critic, *optimizers)
        rank, size, backward = (
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.backward,
        )
    returns = []
    for update in range(6):
        losses = []
        for episode in range(4):
            if episode % size != rank:
                continue
            draw = torch.Generator().manual_seed(100 * update + episode)
            place, logs, values, rewards = 0, [], [], []
            for _ in range(5):
                seen = nn.functional.one_hot(torch.tensor([place]), 4).double()
                chances = actor(seen).log_softmax(1)
                action = int(torch.rand((), generator=draw) < chances[0, 1].exp())
                logs.append(chances[0, action])
                values.append(critic(seen)[0, 0])
                place = min(3, max(0, place + 2 * action - 1))
                rewards.append(float(place == 3))
            gains = torch.tensor(rewards, dtype=torch.float64).flip(0).cumsum(0).flip(0)
            advantage = gains - torch.stack(values)
            losses.append(
                -(torch.stack(logs) * advantage.detach()).mean()
                + advantage.square().mean()
            )
            returns.append(sum(rewards))
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(torch.stack(losses).mean())
        for optimizer in optimizers:
            optimizer.step()
    return weights(actor, critic)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:.*unused:UserWarning")
def test_an_actor_critic_on_two_processes_is_that_of_one():
    # A model is called many times before its backward: buffers are not sent again in between.
    handler = tk.DistributedDataParallelKwargs(broadcast_buffers=False)
    assert_close(
        actor_critic(tk.Accelerator(cpu=True, kwargs_handlers=[handler])),
        actor_critic(),
    )


@pytest.mark.world_size(2)
def test_a_gan_in_fp16_and_bf16_is_in_step_on_both():
    for precision in ("bf16", "fp16"):
        accelerator = tk.Accelerator(cpu=True, mixed_precision=precision)
        for weight in gan(accelerator):
            one, two = accelerator.gather(weight.unsqueeze(0))
            assert torch.equal(one, two)


KILLED = """
import sys, os, signal, torch, json
import trainer_kit as tk
tk.set_seed(5)
accelerator = tk.Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir="project")
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=4, shuffle=True, num_workers=1
)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
if os.path.isdir("project/checkpoints"):
    accelerator.load_state()
seen = 0
while data.iteration < 3 or data._resume is not None:
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.save_state()
        seen += 1
        if seen == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps([p.flatten().tolist() for p in model.parameters()]))
"""


@pytest.mark.slow
def test_a_killed_loop_resumes_in_the_middle_of_an_epoch(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(directory, kill):
        directory.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, str(script), str(kill)],
            cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    whole = start(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    for _ in range(3):
        assert start(tmp_path / "killed", 8).returncode == -signal.SIGKILL
    last = start(tmp_path / "killed", -1)
    assert last.returncode == 0, last.stderr
    assert json.loads(last.stdout.splitlines()[-1]) == json.loads(
        whole.stdout.splitlines()[-1]
    )


def _forked(path):
    accelerator = tk.Accelerator()
    total = accelerator.reduce(
        torch.tensor([accelerator.process_index + 1.0]), "sum"
    ).item()
    if accelerator.is_main_process:
        Path(path).write_text(
            json.dumps([total, accelerator.num_processes, accelerator.mixed_precision])
        )
    return total


@pytest.mark.slow
def test_launchers(tmp_path):
    before = dict(os.environ)
    tk.debug_launcher(_forked, (tmp_path / "debug",))
    assert json.loads((tmp_path / "debug").read_text()) == [3.0, 2, "no"]
    os.environ["TRAINER_KIT_USE_CPU"] = "1"
    try:
        found = tk.notebook_launcher(
            _forked,
            (tmp_path / "note",),
            num_processes=2,
            mixed_precision="bf16",
            use_port=1,
        )
    finally:
        del os.environ["TRAINER_KIT_USE_CPU"]
    assert found == 3.0
    assert json.loads((tmp_path / "note").read_text()) == [3.0, 2, "bf16"]
    assert dict(os.environ) == before
    with pytest.raises(ConfigurationError, match="its own machine only"):
        tk.notebook_launcher(_forked, num_nodes=2)


def test_the_global_batch_is_kept():
    tried = []

    @tk.find_executable_batch_size(starting_batch_size=24, keep_global_batch=True)
    def train(batch_size, steps):
        tried.append((batch_size, steps))
        if batch_size > 5:
            raise MemoryError
        return batch_size * steps

    assert train() == 24
    assert tried == [(24, 1), (12, 2), (6, 4), (3, 8)]


def test_a_trace(tmp_path):
    handler = tk.ProfileKwargs(
        activities=["cpu"],
        record_shapes=True,
        output_trace_dir=str(tmp_path / "traces"),
    )
    accelerator = tk.Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(nn.Linear(3, 1))
    with accelerator.profile() as profiler:
        accelerator.backward(model(torch.ones(2, 3)).mean())
    assert "aten::linear" in profiler.key_averages().table(row_limit=50)
    trace = json.loads((tmp_path / "traces" / "profile_0.json").read_text())
    assert trace["traceEvents"]


def test_a_logger_for_several_processes(caplog, monkeypatch):
    logger = tk.get_logger("some.name", log_level="DEBUG")
    try:
        logger.debug("from %s", "here", main_process_only=False)
        logger.info("in turn", in_order=True)
        for _ in range(2):
            logger.warning_once("once")
        for name, value in {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        logger.warning("not on this one")
        logger.warning("everywhere", main_process_only=False)
    finally:
        logging.getLogger().setLevel(logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == [
        "from here",
        "in turn",
        "once",
        "everywhere",
    ]
    assert {Path(record.pathname).name for record in caplog.records} == {
        "test_scripts.py"
    }


@pytest.mark.world_size(2)
def test_generators_are_made_the_same():
    tk.set_seed(1, device_specific=True)
    accelerator = tk.Accelerator(cpu=True)
    one, two = accelerator.gather(torch.rand(1)).tolist()
    assert one != two
    own = torch.Generator().manual_seed(accelerator.process_index)
    tk.synchronize_rng_states(["torch", "python", "numpy", "generator"], own)
    one, two = accelerator.gather(torch.rand(1)).tolist()
    assert one == two
    one, two = accelerator.gather(torch.rand(1, generator=own)).tolist()
    assert one == two
    with pytest.raises(ConfigurationError, match="unknown kind of generator 'tourch'"):
        tk.synchronize_rng_states(["tourch"])


def test_names_used_by_scripts_exist():
    """Names of Accelerate's that have one answer here."""
    accelerator = tk.Accelerator(cpu=True, mixed_precision="bf16", rng_types=["torch"], kwargs_handlers=[
        tk.AutocastKwargs(enabled=False), tk.InitProcessGroupKwargs(), tk.GradScalerKwargs(),
    ])  # fmt: skip
    state = accelerator.state
    assert (
        state.num_processes,
        state.mixed_precision,
        state.deepspeed_plugin,
        state.backend,
    ) == (
        1,
        "bf16",
        None,
        None,
    )
    assert state.initialized
    assert not state.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    assert not accelerator.fp8_enabled
    assert accelerator.native_amp
    assert accelerator.rng_types == ["torch"]
    assert accelerator.distributed_type == tk.DistributedType.NO == "NO"
    assert (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank) == (0, 0)
    assert not accelerator.multi_device
    assert accelerator.dispatch_batches is None
    assert not accelerator.non_blocking
    assert accelerator.use_seedable_sampler
    assert accelerator.use_stateful_dataloader
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32, (
            "AutocastKwargs(enabled=False)"
        )
    with accelerator.autocast(tk.AutocastKwargs()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    model = nn.Linear(1, 1)
    assert not accelerator.verify_device_map(model)
    model.hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model)
    gradient = accelerator.gradient_state
    assert (
        gradient.sync_gradients,
        gradient.num_steps,
        gradient.in_dataloader,
        gradient.remainder,
    ) == (
        True,
        1,
        False,
        -1,
    )
    data = accelerator.prepare(torch.utils.data.DataLoader(range(4)))
    for _ in data:
        assert gradient.active_dataloader is data
    assert not gradient.end_of_dataloader
    with accelerator.maybe_context_parallel(buffers=[]):
        pass
    with pytest.raises(ConfigurationError, match="LOMO"):
        accelerator.lomo_backward(torch.ones(()), 0.1)
    with pytest.raises(PrecisionError):
        tk.Accelerator(cpu=True, mixed_precision="fp9")
    state = tk.PartialState(cpu=True)
    state.set_device()
    assert state.default_device == torch.device("cpu")


@pytest.mark.parametrize("backend", ["eager", "EAGER"])
def test_prepared_models_are_compiled(backend):
    accelerator = tk.Accelerator(
        cpu=True, dynamo_plugin=tk.TorchDynamoPlugin(backend=backend, fullgraph=True)
    )
    own = nn.Linear(2, 1)
    model = accelerator.prepare(own)
    assert model is not own
    assert accelerator.unwrap_model(model) is own
    assert accelerator.prepare(model) is accelerator.prepare(own) is model
    x = torch.ones(3, 2)
    assert torch.equal(model(x), own(x))


def test_each_block_is_compiled_separately():
    plugin = tk.TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = tk.Accelerator(cpu=True, dynamo_plugin=plugin)
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = accelerator.prepare(own)
    assert model is own
    assert model[0]._compiled_call_impl is not None
    assert model._compiled_call_impl is None
    with pytest.raises(StrategyError, match="no blocks to compile separately"):
        accelerator.prepare(nn.Linear(2, 1))


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of the compiler, which leaves a profiler's mark out
def test_a_compiled_model_skips_gradient_exchange_on_request():
    accelerator = tk.Accelerator(
        cpu=True, dynamo_backend="eager", gradient_accumulation_steps=2
    )
    own = nn.Linear(2, 1, bias=False)
    model = accelerator.prepare(own)
    assert accelerator.prepare(own) is model, "the user's own is prepared too"
    x = torch.full((1, 2), accelerator.process_index + 1.0)
    for _ in range(2):
        with accelerator.accumulate(model):
            model(x).sum().backward()
        if not accelerator.sync_gradients:
            assert own.weight.grad.tolist() == x.tolist()
    assert own.weight.grad.tolist() == [[3.0, 3.0]]
    own.weight.grad = None
    with accelerator.no_sync(model):
        loss = model(x).sum()
    with accelerator.trigger_sync_in_backward(model):
        loss.backward()
    assert own.weight.grad.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_free_memory_drops_models_and_optimizers(precision):
    accelerator = tk.Accelerator(cpu=True, mixed_precision=precision)
    own = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters()))
    accelerator.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    held = weakref.ref(own.weight), weakref.ref(optimizer.optimizer)
    model, optimizer = accelerator.free_memory(model, optimizer)
    del own
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_a_compiled_model_may_stay_compiled():
    accelerator = tk.Accelerator(cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(nn.Linear(2, 1))
    assert accelerator.unwrap_model(model, keep_torch_compile=True) is model


def test_a_state_is_loaded_into_a_model_with_more(tmp_path):
    one, two = tk.Accelerator(cpu=True), tk.Accelerator(cpu=True)
    saved = one.prepare(nn.Sequential(nn.Linear(2, 2)))
    one.save_state(tmp_path / "state", save_function=None)
    larger = two.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="Missing key"):
        two.load_state(tmp_path / "state")
    with pytest.warns(UserWarning, match="strict=False; not in the checkpoint"):
        two.load_state(tmp_path / "state", strict=False)
    assert torch.equal(larger[0].weight, saved[0].weight)


def test_a_process_knows_its_place_without_the_others(monkeypatch):
    """Who is asked alone must not wait for processes that do not come."""
    place = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    for name, value in {
        **place,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    state = tk.PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (
        4,
        2,
        0,
    )
    assert (
        state.is_main_process,
        state.is_local_main_process,
        state.is_last_process,
    ) == (
        False,
        True,
        False,
    )
    with state.split_between_processes(list(range(10))) as part:
        assert part == [6, 7]
    assert not torch.distributed.is_initialized()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_gradients_travel_in_less(hook):
    handler = tk.DistributedDataParallelKwargs(comm_hook=hook, bucket_cap_mb=1)
    accelerator = tk.Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), (1 + 2**-12) * (1 + accelerator.process_index))
    accelerator.backward(model(x).mean())
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]], (
        "rounded on the way: float32 has the rest too"
    )


@pytest.mark.slow
def test_the_debug_launcher_ignores_what_the_function_returns():
    """The truth of a tensor with several elements is an error."""
    assert tk.debug_launcher(torch.ones, (2,)) is None
    assert tk.debug_launcher(int, ("0",)) is None
