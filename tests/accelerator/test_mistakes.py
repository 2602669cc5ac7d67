"""Usual mistakes are said in words, in the first steps; debug mode says who does not take part."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import time

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, Fabric
from trainer_kit.core.errors import ConfigurationError, RankError

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _nobody_looks():
    gc.collect()  # an Accelerator looks until it is deleted or its first steps are over
    assert not _global_optimizer_pre_hooks


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "harm"),
    [
        ({"gradient_accumulation_steps": 2}, "2 micro-batches make a step"),
        ({"mixed_precision": "fp16"}, "scaled"),
    ],
)
def test_an_unprepared_optimizer_is_reported(options, harm):
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    before = model.weight.detach().clone()
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).mean())
        with pytest.raises(
            ConfigurationError, match="an unprepared optimizer"
        ) as problem:
            optimizer.step()
    assert harm in problem.value.found
    assert torch.equal(model.weight, before)
    assert not _global_optimizer_pre_hooks


def test_a_deleted_accelerator_checks_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(model(X).mean())
    assert len(_global_optimizer_pre_hooks) == 1
    del accelerator, model
    gc.collect()
    assert not _global_optimizer_pre_hooks


def test_a_collector_that_runs_inside_a_step_does_not_disturb_it():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(model(X).mean())
    collects = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    cycle = [accelerator, model]
    cycle.append(cycle)
    del accelerator, model, cycle
    sgd(nn.Linear(3, 1)).step()  # torch goes through the hooks meanwhile
    collects.remove()
    assert len(_global_optimizer_pre_hooks) == 1
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    again.backward(again.prepare(nn.Linear(3, 1))(X).mean())
    assert len(_global_optimizer_pre_hooks) == 1


def test_an_unprepared_optimizer_next_to_a_prepared_one_is_reported():
    """Its step comes when the first window ends; steps of models that are not prepared are nobody's business."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    one, two, other = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = sgd(two)
    one, first = accelerator.prepare(one, sgd(one))
    two = accelerator.prepare(two)
    with pytest.raises(ConfigurationError, match="an unprepared optimizer"):  # noqa: PT012
        for _ in range(4):
            with accelerator.accumulate(one, two):
                accelerator.backward((one(X) + two(X)).mean())
                sgd(other).step()
                first.step()
                if accelerator.sync_gradients:
                    optimizer.step()
    assert accelerator.sync_gradients


def test_harmless_calls_do_not_warn():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    model = accelerator.prepare(model)
    for _ in range(4):
        accelerator.backward(model(X).mean())
        optimizer.step()


def test_weights_that_others_change_on_purpose_are_not_a_mistake(tmp_path):
    """Clipped weights after a step of the prepared optimizer, and a state that is loaded."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.save_state(tmp_path / "state")
    for turn in range(5):
        with accelerator.accumulate(model):
            accelerator.backward(model(X).mean())
            optimizer.step()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    model.weight.clamp_(-0.01, 0.01)
            optimizer.zero_grad()
        if turn == 0:
            accelerator.load_state(tmp_path / "state")


def test_backward_without_the_scale_of_fp16():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    before = model.weight.detach().clone()
    model(X).mean().backward()
    with pytest.raises(ConfigurationError, match="not scaled for float16") as problem:
        optimizer.step()
    assert problem.value.fix == "accelerator.backward(loss)"
    assert torch.equal(model.weight, before)


def test_a_batch_on_another_device():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    with pytest.raises(ConfigurationError, match="another device") as problem:
        model(X.to("meta"))
    assert problem.value.found == "a batch on meta, Linear on cpu"

    class Lengths(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x)

    accelerator.prepare(Lengths(3, 1))(
        X, torch.ones(16, device="meta")
    )  # as lengths of sequences, which stay behind

    class Gathers(nn.Linear):
        def forward(self, x):
            return x

    offloaded = Gathers(3, 1)
    for parameter in offloaded.parameters():
        parameter.device_mesh = (
            "of devices"  # as FSDP's parts have one, which lie in the host's memory
        )
    accelerator.prepare(offloaded)(X.to("meta"))


@pytest.mark.parametrize("steps", [1, 2])
def test_no_check_remains_after_the_first_steps(steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    for _ in range(3 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(X).mean())
            optimizer.step()
    assert not accelerator.prepared.checks.active
    assert optimizer._before_first_step is None
    assert not model._forward_pre_hooks
    assert not _global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks


@pytest.mark.world_size(2)
def test_an_optimizer_of_an_unprepared_model_is_reported():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = accelerator.prepare(sgd(model))
    accelerator.backward(model(X).mean())
    with pytest.raises(RankError, match="prepared without its model"):
        optimizer.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["same", "own", "prepared"])
def test_an_unprepared_loader_is_reported(kind):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    data = DataLoader(TensorDataset(X), batch_size=4)
    if kind == "prepared":
        data = accelerator.prepare(data)
    if kind == "own":
        data = DataLoader(
            TensorDataset(X[accelerator.process_index :: 2]), batch_size=4
        )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(2):
            for (x,) in data:
                accelerator.backward(model(x).mean())
                optimizer.step()
    expected = kind == "same" and accelerator.is_main_process
    assert said.getvalue().count("every process trains on the same batch") == expected


@pytest.mark.world_size(2)
def test_debug_mode_names_the_rank_that_calls_another_collective():
    accelerator = Accelerator(cpu=True, debug=True)
    value = torch.ones(2)
    with pytest.raises(RankError, match="make different calls") as problem:
        accelerator.gather(
            value
        ) if accelerator.is_main_process else accelerator.reduce(value)
    found = problem.value.found
    assert re.search(
        r"process 0: gather\(\(2,\) float32\) at test_mistakes\.py:\d+", found
    )
    assert re.search(
        r"process 1: reduce\(\(2,\) float32\) at test_mistakes\.py:\d+", found
    )
    with pytest.raises(RankError, match="make different calls") as problem:
        accelerator.gather(
            value.to(torch.float64 if accelerator.is_main_process else torch.float32)
        )
    assert "float64" in problem.value.found
    accelerator.wait_for_everyone()
    assert accelerator.gather_for_metrics(value).shape == (4,)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_debug_mode_names_the_missing_rank(monkeypatch):
    """A collective under ``if accelerator.is_main_process``."""
    monkeypatch.setenv("TRAINER_KIT_DEBUG_TIMEOUT", "0.5")
    accelerator = Accelerator(cpu=True, debug=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with pytest.raises(
            RankError, match="make different calls: save_state"
        ) as problem:
            accelerator.save_state("never")
        assert re.search(
            r"process 1: has not come; its last call was wait_for_everyone\(\) at test_mistakes\.py:\d+",
            problem.value.found,
        )
        assert "is_main_process" in problem.value.fix


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_long_wait_prints_the_position_of_each_rank(monkeypatch):
    """The same without debug mode."""
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", "0.4")
    accelerator = Accelerator(cpu=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.wait_for_everyone()
        for call in (
            accelerator.wait_for_everyone,
            lambda: accelerator.gather(torch.ones(1)),
        ):
            if not accelerator.is_main_process:
                time.sleep(1.5)
            call()
    lines = printed.getvalue().splitlines()
    assert len(lines) == (2 if accelerator.is_main_process else 0), lines
    for line in lines:
        assert re.fullmatch(
            r"\[process 0\] waiting for more than 0\.4 s at test_mistakes\.py:\d+ in \w+ \(process 0\); "
            r"process 1 is at test_mistakes\.py:\d+; "
            r"every process must make this call: is it under `if accelerator\.is_main_process`\?",
            line,
        ), line


@pytest.mark.world_size(2)
def test_an_error_in_a_hook_is_not_taken_for_a_process_that_is_missing(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 1))
    accelerator.save_state(tmp_path / "state")

    def fail(models, directory):
        raise RuntimeError("other keys")

    accelerator.register_load_state_pre_hook(fail)
    with pytest.raises(RuntimeError, match="other keys") as caught:
        accelerator.load_state(tmp_path / "state")
    assert not any(
        "every process must make this call" in note
        for note in getattr(caught.value, "__notes__", ())
    )


@pytest.mark.world_size(2)
def test_debug_mode_reports_the_shapes_of_each_process():
    accelerator = Accelerator(
        cpu=True, debug=True, gradient_accumulation_steps=3, mixed_precision="bf16"
    )
    model = nn.Linear(3, 1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.prepare(
            model, sgd(model), DataLoader(TensorDataset(X), batch_size=4, shuffle=True)
        )
    said = printed.getvalue()
    rank = accelerator.process_index
    for line in (
        f"[process {rank}] process {rank} of 2",
        "strategy: DistributedDataParallel over 2 ranks on cpu",
        "group: gloo",
        "precision: bf16-mixed",
        "accumulation: 3 micro-batches a step",
        "model: DistributedDataParallel of Linear",
        "loader: ",
    ):
        assert line in said, said


def test_backward_of_the_loss_inside_a_window_is_reported(capsys):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    for _ in range(6):
        with accelerator.accumulate(model):
            model(X).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(
        "the gradients of 2 micro-batches are summed, not averaged"
    ) == 1
    assert "in place of accelerator.backward(loss)" in printed.out + printed.err


@pytest.mark.parametrize("wrong", [True, False])
def test_a_step_inside_a_window_that_no_context_marks_is_reported(wrong, capsys):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    for turn in range(6):
        accelerator.backward(model(X).mean())
        if wrong or turn % 2:
            optimizer.step()
            optimizer.zero_grad()
    printed = "".join(capsys.readouterr())
    assert (
        printed.count(
            "gradient_accumulation_steps=2 divides each loss, and an optimizer steps after 1"
        )
        == wrong
    )
    assert printed.count("accumulate") == wrong


def test_windows_that_are_right_print_nothing(capsys):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        model, sgd(model), DataLoader(TensorDataset(X), batch_size=8)
    )
    for (x,) in loader:  # shorter than a window
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(
        model(X).sum(), weight=len(X)
    )  # a sum is divided by its weight, not by the micro-batches
    optimizer.step()
    accelerator.gradient_accumulation_steps = 1
    model(X).mean().backward()
    optimizer.step()
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.parametrize("given", [nn.Linear, torch.optim.SGD, DataLoader])
def test_a_class_in_place_of_an_object(given):
    with pytest.raises(
        ConfigurationError, match="prepare got a class, not an object"
    ) as problem:
        Accelerator(cpu=True).prepare(given)
    assert problem.value.fix == f"create one: {given.__name__}(...)"


@pytest.mark.parametrize("given", [None, 3, {"loss": torch.ones(())}, nn.Linear(3, 1)])
def test_a_loss_that_is_no_tensor(given):
    with pytest.raises(ConfigurationError, match="backward takes a loss") as problem:
        Accelerator(cpu=True).backward(given)
    assert problem.value.found == f"a {type(given).__name__}"


def test_a_weight_that_is_no_number():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum(), weight=float("nan"))
        with pytest.raises(ConfigurationError, match="sum to zero or less"):
            optimizer.step()


@pytest.mark.parametrize("given", [None, 3, "x", nn.Linear])
def test_a_module_that_is_none(given):
    with pytest.raises(ConfigurationError):
        Fabric(accelerator="cpu", devices=1).setup(given)
    with pytest.raises(ConfigurationError, match="prepare_model takes a module"):
        Accelerator(cpu=True).prepare_model(given)
    with pytest.raises(ConfigurationError, match="this is not a path"):
        Accelerator(cpu=True).save({}, 3)


def test_objects_that_are_passed_by_name():
    model = nn.Linear(2, 2)
    with pytest.raises(
        ConfigurationError,
        match=r"Accelerator.prepare has no argument 'model'(.|\n)*without names",
    ):
        Accelerator(cpu=True).prepare(model=model)
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(
        ConfigurationError,
        match=r"Fabric.setup has no argument 'model'(.|\n)*without a name",
    ):
        fabric.setup(model=model)
    with pytest.raises(ConfigurationError, match=r"Fabric.setup needs module"):
        fabric.setup()
    assert fabric.setup(module=model).module is model
