"""The step without torch's wrappers updates as the optimizer's own method, and gives way to whoever listens."""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    _use_grad_for_differentiable,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

import trainer_kit as tk
from tests.calls import python_calls
from trainer_kit.strategies.gathered_step import find_gathered_update
from trainer_kit.strategies.optimizer_step import direct_step, drop_gradients_of

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, amsgrad=True),
    "adamw": lambda weights: torch.optim.AdamW(weights),
    "adamw fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, centered=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights),
    "adadelta": lambda weights: torch.optim.Adadelta(weights),
    "radam": lambda weights: torch.optim.RAdam(weights),
    "rprop": lambda weights: torch.optim.Rprop(weights),
    "adafactor": lambda weights: torch.optim.Adafactor(weights),
    "no_grad": lambda weights: Lion(weights),
    "subclass": lambda weights: Noted(weights, lr=0.1),
}


class Lion(Optimizer):
    """A third-party optimizer: it turns gradients off with the public decorator."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad.sign(), alpha=-group["lr"])
        return 7


class Noted(torch.optim.SGD):
    """A subclass that steps by its parent's method."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def make(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return net, OPTIMIZERS[kind](net.parameters())


def backward(net: nn.Module) -> None:
    torch.manual_seed(1)
    net(torch.randn(5, 4)).square().sum().backward()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_bit_identical(kind: str) -> None:
    nets = []
    for direct in (False, True):
        net, optimizer = make(kind)
        step, drop = optimizer.step, optimizer.zero_grad
        if direct:
            step = direct_step(optimizer)
            drop = lambda: drop_gradients_of(optimizer)  # noqa: B023, E731 - called in this turn only
        for _ in range(4):
            drop()
            backward(net)
            returned = step()
            assert torch.is_grad_enabled()
        assert returned == (7 if kind == "no_grad" else None)
        nets.append((net, optimizer))
    (plain, plain_optimizer), (fast, fast_optimizer) = nets
    for expected, weight in zip(plain.parameters(), fast.parameters(), strict=True):
        assert torch.equal(expected, weight)
    assert str(plain_optimizer.state_dict()) == str(fast_optimizer.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adamw", "no_grad"])
def test_it_makes_fewer_python_calls(kind: str) -> None:
    net, optimizer = make(kind)
    backward(net)
    step = direct_step(optimizer)
    step()
    assert python_calls(step) < python_calls(optimizer.step) - 4


def test_a_closure_runs_with_gradients() -> None:
    net, optimizer = make("sgd")
    step = direct_step(optimizer)
    modes = []

    def closure() -> float:
        modes.append(torch.is_grad_enabled())
        backward(net)
        return 3.0

    assert step(closure=closure) == 3.0
    assert modes == [True]


def test_gradients_are_on_again_after_an_error() -> None:
    net, optimizer = make("sgd")
    backward(net)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        direct_step(optimizer)()
    assert torch.is_grad_enabled()
    with torch.no_grad(), pytest.raises(TypeError):
        direct_step(optimizer)()
    assert torch.is_grad_enabled()


def test_hooks_that_are_registered_later_are_called() -> None:
    net, optimizer = make("sgd")
    backward(net)
    step = direct_step(optimizer)
    step()
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_post_hook(note("all after")),
    ]
    for handle in handles:
        step()
        handle.remove()
    expected = ["all before", "before", "after", "all after"]
    assert calls == [*expected, *expected[1:], *expected[2:], *expected[3:]]
    step()
    assert len(calls) == 10


def test_a_profiler_sees_the_step() -> None:
    net, optimizer = make("sgd")
    backward(net)
    step = direct_step(optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        drop_gradients_of(optimizer)
    names = {event.key for event in profiler.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names


def test_a_scheduler_knows_that_the_optimizer_has_stepped() -> None:
    net, optimizer = make("sgd")
    backward(net)
    step = direct_step(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    # It is still the shorter way.
    assert python_calls(step) < python_calls(optimizer.step) - 4


def test_a_step_that_other_code_replaces_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, optimizer = make("sgd")
    backward(net)
    step = direct_step(optimizer)
    step()
    optimizer.step = lambda closure=None: "of the object"  # type: ignore[method-assign, assignment]
    assert step() == "of the object"
    del optimizer.step
    assert step() is None
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: "of the class")
    assert step() == "of the class"


def test_a_differentiable_step_stays_in_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    copy = weight.clone()
    optimizer = torch.optim.SGD([copy], lr=0.5, differentiable=True)
    copy.grad = weight * 2
    direct_step(optimizer)()
    copy.sum().backward()
    assert weight.grad is not None


def test_zeros_and_replaced_methods_of_zero_grad() -> None:
    net, optimizer = make("sgd")
    backward(net)
    drop_gradients_of(optimizer, set_to_none=False)
    assert all(weight.grad.abs().sum() == 0 for weight in net.parameters())
    calls: list[Any] = []
    optimizer.zero_grad = lambda *arguments: calls.append(arguments)  # type: ignore[method-assign, assignment]
    drop_gradients_of(optimizer)
    assert calls == [(True,)]


GATHERED: dict[str, Make] = {
    "loop sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.1),
    "loop momentum": lambda weights: torch.optim.SGD(
        weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "loop dampening": lambda weights: torch.optim.SGD(
        weights, lr=0.1, momentum=0.9, dampening=0.3, maximize=True
    ),
    "loop adam": lambda weights: torch.optim.Adam(weights, weight_decay=0.1),
    "loop adamw": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "loop maximize": lambda weights: torch.optim.AdamW(weights, maximize=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True),
    "momentum": lambda weights: torch.optim.SGD(
        weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True, weight_decay=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "amsgrad": lambda weights: torch.optim.AdamW(weights, fused=True, amsgrad=True),
    "maximize": lambda weights: torch.optim.Adam(weights, fused=True, maximize=True),
}


def train_gathered(kind: str, direct: bool) -> tuple[list[Tensor], str, list[int]]:
    """Weights, states and calls of each step, while much of what may happen to an optimizer happens."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    parts = [
        {"params": net[0].parameters()},
        {"params": net[2].parameters(), "lr": 0.05},
    ]
    optimizer = GATHERED[kind](parts)
    step = direct_step(optimizer) if direct else optimizer.step
    calls = []
    for turn in range(16):
        optimizer.zero_grad()
        backward(net)
        if turn == 4:
            optimizer.param_groups[0]["lr"] = 0.02
        if turn == 5:
            net[0].bias.grad = None
        if turn == 7:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if turn == 9:
            extra = nn.Parameter(torch.ones(2))
            optimizer.add_param_group({"params": [extra]})
        if turn >= 9:
            extra.grad = torch.ones(2)
        if turn == 12:
            for state in optimizer.state.values():
                state.update(
                    {
                        name: value.clone()
                        for name, value in state.items()
                        if value is not None
                    }
                )
        if turn == 14:
            optimizer.param_groups[1]["lr"] = torch.tensor(0.01)
        calls.append(python_calls(step))
    weights = [weight.detach() for weight in [*net.parameters(), extra]]
    return weights, str(optimizer.state_dict()), calls


@pytest.mark.parametrize("kind", GATHERED)
def test_steps_on_gathered_lists_are_bit_identical_whatever_changes(kind: str) -> None:
    expected, expected_state, _ = train_gathered(kind, direct=False)
    weights, state, calls = train_gathered(kind, direct=True)
    assert state == expected_state
    for before, weight in zip(expected, weights, strict=True):
        assert torch.equal(before, weight)
    # The shorter way in the usual step; torch's own where a gradient is missing, and with a tensor as learning rate.
    assert calls[3] < calls[5]
    assert calls[3] < calls[15]
    assert calls[3] == calls[4] == calls[6]


def test_fused_kernels_divide_by_a_scale_in_torchs_own_step() -> None:
    net, optimizer = make("adamw fused")
    before = [weight.detach().clone() for weight in net.parameters()]
    step = direct_step(optimizer)
    for _ in range(2):
        backward(net)
        step()
    after = [weight.detach().clone() for weight in net.parameters()]
    assert not torch.equal(before[0], after[0])
    # As a gradient scaler does whose gradients have overflowed.
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    step()
    for expected, weight in zip(after, net.parameters(), strict=True):
        assert torch.equal(expected, weight)


def stepped(
    kind: str, change: Callable[[Optimizer, Any], None], direct: bool
) -> tuple[Any, str]:
    """One weight after three steps, a change, and two more."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = GATHERED[kind]([weight])
    step = direct_step(optimizer) if direct else optimizer.step
    for turn in range(5):
        weight.grad = torch.full((2,), 0.5 + turn)
        if turn == 3:
            change(optimizer, weight)
        step()
    return weight.detach(), str(optimizer.state_dict())


CHANGES: dict[str, Callable[[Optimizer, Any], None]] = {
    "states are cleared": lambda optimizer, weight: optimizer.state.clear(),
    "a state is replaced": lambda optimizer, weight: optimizer.state.__setitem__(
        weight,
        {
            name: torch.zeros_like(value)
            for name, value in optimizer.state[weight].items()
        },
    ),
    "momentum is switched on": lambda optimizer, weight: optimizer.param_groups[
        0
    ].update(momentum=0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "kind", ["sgd", "momentum", "adamw", "loop sgd", "loop momentum", "loop adamw"]
)
def test_states_that_other_code_changes_are_used(kind: str, change: str) -> None:
    """The lists were gathered before: an update of what nobody has any more would be lost in silence."""
    if kind in ("sgd", "loop sgd") and change == "a state is replaced":
        pytest.skip("plain SGD has no state")
    expected, expected_state = stepped(kind, CHANGES[change], direct=False)
    weight, state = stepped(kind, CHANGES[change], direct=True)
    assert torch.equal(expected, weight)
    assert state == expected_state


def test_a_parameter_that_other_code_replaces_in_its_list_is_updated() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = GATHERED["adamw"]([first])
    step = direct_step(optimizer)
    for turn in range(4):
        first.grad = second.grad = torch.ones(2)
        if turn == 2:
            before = first.detach().clone()
            optimizer.param_groups[0]["params"][0] = second
        step()
    assert torch.equal(first, before)
    assert not torch.equal(second, torch.ones(2))


LOOPS = [kind for kind in GATHERED if kind.startswith("loop")]


def train_long(kind: str, dtype: torch.dtype, direct: bool) -> tuple[Any, str, int]:
    """Weights, states, and calls of the last of 500 steps with a schedule, odd sizes and another memory format."""
    torch.manual_seed(0)
    image = torch.randn(5, 3, 3, 3).to(memory_format=torch.channels_last)
    tensors = [image, torch.randn(7, 5).t(), torch.randn(17), torch.tensor(0.5)]
    weights = [nn.Parameter(tensor.to(dtype)) for tensor in tensors]
    optimizer = GATHERED[kind]([{"params": weights[:3]}, {"params": weights[3:]}])
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 500)
    step = direct_step(optimizer) if direct else optimizer.step
    for turn in range(499):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() * (turn + 1))
        step()
        scheduler.step()
    return weights, str(optimizer.state_dict()), python_calls(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LOOPS)
def test_500_steps_of_small_parameters_are_bit_identical(
    kind: str, dtype: torch.dtype
) -> None:
    expected, expected_state, expected_calls = train_long(kind, dtype, direct=False)
    weights, state, calls = train_long(kind, dtype, direct=True)
    assert all(map(torch.equal, expected, weights))
    assert state == expected_state
    assert calls < expected_calls


def steps_as_torch(
    monkeypatch: pytest.MonkeyPatch, weights: list[nn.Parameter], **options: Any
) -> bool:
    """Whether the fourth step of these weights is torch's own; all of them are bit-identical to it."""
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = torch.optim.AdamW(weights, **options)
    plain = torch.optim.AdamW(copies, **options)
    gather = torch.optim.AdamW._init_group  # type: ignore[attr-defined]
    groups: list[Any] = []

    def noted(self: Any, group: Any, *arguments: Any) -> Any:
        groups.append(group)
        return gather(self, group, *arguments)

    step = direct_step(optimizer)
    for turn in range(4):
        for weight, copied in zip(weights, copies, strict=True):
            weight.grad = torch.sin(weight.detach() * (turn + 1))
            copied.grad = weight.grad.clone()
        plain.step()
        if turn == 3:
            monkeypatch.setattr(torch.optim.AdamW, "_init_group", noted)
        step()
    assert all(map(torch.equal, weights, copies))
    return bool(groups)


def test_only_small_parameters_are_updated_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large ones would leave the cache between two kernels, and need memory for a temporary of each."""
    small = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    assert not steps_as_torch(monkeypatch, small)
    large = [nn.Parameter(torch.ones(2**18)), nn.Parameter(torch.ones(1))]
    assert steps_as_torch(monkeypatch, large)


def test_small_parameters_are_updated_all_at_once_after_something_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler wraps a method of torch's optimizers, in the whole process, when it is first used."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2, 2))
    assert not steps_as_torch(monkeypatch, [nn.Parameter(torch.ones(3))])


def test_a_maximum_is_kept_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_as_torch(monkeypatch, [nn.Parameter(torch.ones(3))], amsgrad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_updated_by_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Its functions of lists round the factor of a product to the type of the weights, and its loop does not."""
    weights = [nn.Parameter(torch.randn(9).to(dtype))]
    assert steps_as_torch(monkeypatch, weights, lr=0.1)


def test_parameters_that_share_memory_are_updated_in_turn() -> None:
    results = []
    for direct in (False, True):
        whole = torch.ones(4)
        weights = [nn.Parameter(whole[:3]), nn.Parameter(whole[1:])]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.5)
        step = direct_step(optimizer) if direct else optimizer.step
        for turn in range(5):
            for weight in weights:
                weight.grad = torch.full((3,), 1.0 + turn)
            step()
        results.append(whole.clone())
    assert torch.equal(*results)


def no_momentum(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    optimizer.state[weights[1]]["momentum_buffer"] = None


def no_momenta(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        del optimizer.state[weight]["momentum_buffer"]


def cleared_states(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        optimizer.state[weight].clear()


def one_count(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        optimizer.state[weight]["step"] = optimizer.state[weights[0]]["step"]


def narrow_weights(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data = weight.data.bfloat16()
        weight.grad = weight.grad.bfloat16()


def narrow_momentum(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def narrow_gradients(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        gradient, weight.grad = weight.grad, None
        weight.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
        weight.grad = gradient.bfloat16()


def tied_data(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    weights[1].data = weights[0].data


def gradient_is_a_weight(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    weights[1].grad = weights[0].detach()


def sparse_gradient(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    weights[1].grad = weights[1].grad.to_sparse()


def lists_of_torch(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    # Then torch changes the gradients as well.
    optimizer.param_groups[0].update(foreach=True, weight_decay=0)


def numbers_as_tensors(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    optimizer.param_groups[0].update(momentum=torch.tensor(0.7))


def entry_of_the_user(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = "mine"


def other_class(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    class Signs(torch.optim.SGD):
        step = step_by_signs

    # torch wraps the step of a class where its first optimizer is made.
    Signs([nn.Parameter(torch.ones(1))])
    optimizer.__class__ = Signs


def other_step_of_the_class(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    torch.optim.SGD.step = step_by_signs  # type: ignore[method-assign]
    torch.optim.SGD([nn.Parameter(torch.ones(1))])


def other_lists(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    gather = optimizer._init_group  # type: ignore[attr-defined]

    def clipped(group: Any, parameters: Any, gradients: Any, *lists: Any) -> Any:
        is_sparse = gather(group, parameters, gradients, *lists)
        gradients[:] = [gradient.clamp(-0.1, 0.1) for gradient in gradients]
        return is_sparse

    optimizer._init_group = clipped  # type: ignore[attr-defined]


@_use_grad_for_differentiable
def step_by_signs(self: Optimizer, closure: Any = None) -> None:
    for group in self.param_groups:
        for weight in group["params"]:
            weight.sub_(weight.grad.sign(), alpha=0.01)


Interfere = Callable[[Optimizer, list[nn.Parameter]], None]
INTERFERENCES: list[tuple[str, Interfere]] = [
    ("loop momentum", no_momentum),
    ("momentum", no_momenta),
    ("loop momentum", cleared_states),
    ("loop adam", cleared_states),
    ("adamw", cleared_states),
    ("loop adam", one_count),
    ("loop sgd", narrow_weights),
    ("loop momentum", narrow_weights),
    ("loop momentum", narrow_momentum),
    ("loop sgd", narrow_gradients),
    ("loop dampening", narrow_gradients),
    ("loop sgd", tied_data),
    ("loop adamw", tied_data),
    ("loop adam", gradient_is_a_weight),
    ("loop sgd", gradient_is_a_weight),
    ("loop dampening", sparse_gradient),
    ("loop momentum", lists_of_torch),
    ("loop momentum", numbers_as_tensors),
    ("loop momentum", entry_of_the_user),
    ("momentum", entry_of_the_user),
    ("loop sgd", other_class),
    ("loop sgd", other_step_of_the_class),
    ("sgd", other_class),
    ("loop sgd", other_lists),
]


def interfered(kind: str, interfere: Interfere, direct: bool) -> tuple[Any, str]:
    """Two weights, gradients and states after nine steps, the last six with the interference."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(8, generator=generator)) for _ in range(2)]
    optimizer = GATHERED[kind](weights)
    step = direct_step(optimizer) if direct else lambda: optimizer.step()
    for turn in range(9):
        for weight in weights:
            gradient = torch.randn(8, generator=generator)
            weight.grad = gradient.to(getattr(weight, "grad_dtype", weight.dtype))
        if turn == 3 or (turn > 3 and interfere in IN_EVERY_STEP):
            interfere(optimizer, weights)
        step()
    values = [weight.detach() for weight in weights]
    gradients = [weight.grad.to_dense() for weight in weights]
    return values + gradients, str(optimizer.state_dict())


# What belongs to the gradients of one step.
IN_EVERY_STEP = (gradient_is_a_weight, sparse_gradient)


@pytest.mark.parametrize(("kind", "interfere"), INTERFERENCES)
def test_whatever_other_code_does_the_result_is_that_of_torchs_step(
    kind: str, interfere: Interfere, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back after the test, and between the runs.
    original = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", original)
    expected, expected_state = interfered(kind, interfere, direct=False)
    monkeypatch.setattr(torch.optim.SGD, "step", original)
    weights, state = interfered(kind, interfere, direct=True)
    assert all(map(torch.equal, expected, weights))
    assert state == expected_state


def test_a_sparse_gradient_is_refused_before_anything_is_changed() -> None:
    states = []
    for direct in (False, True):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight])
        step = direct_step(optimizer) if direct else optimizer.step
        for _ in range(3):
            weight.grad = torch.ones(3)
            step()
        weight.grad = torch.ones(3).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            step()
        states.append(str(optimizer.state_dict()))
    assert states[0] == states[1]


def first_steps(make_weights: Callable[[], list[Any]], direct: bool) -> list[Tensor]:
    weights = make_weights()
    optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.5)
    step = direct_step(optimizer) if direct else optimizer.step
    for turn in range(4):
        for index, weight in enumerate(weights):
            weight.grad = weight.detach() * (0.1 + turn + index)
        step()
    return [weight.detach().to_dense() for weight in weights]


def aliases() -> list[nn.Parameter]:
    values = torch.arange(4.0).numpy()
    return [nn.Parameter(torch.from_numpy(values)) for _ in range(2)]


def empty_ones() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in (0, 0, 3)]


@pytest.mark.parametrize(
    "make_weights",
    [
        aliases,
        empty_ones,
        lambda: [nn.Parameter(torch.eye(3).to_sparse())],
    ],
)
def test_weights_without_memory_of_their_own(
    make_weights: Callable[[], list[Any]],
) -> None:
    expected = first_steps(make_weights, direct=False)
    weights = first_steps(make_weights, direct=True)
    assert all(map(torch.equal, expected, weights))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_mkldnn"])
def test_other_layouts_are_left_to_torch(layout: str) -> None:
    if layout == "to_mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("without mkldnn")
    weight = nn.Parameter(getattr(torch.eye(3), layout)())
    assert find_gathered_update(torch.optim.SGD([weight], lr=0.1)) is None


def test_a_step_that_was_replaced_before_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", step_by_signs)
    expected, _ = interfered("loop sgd", lambda *_: None, direct=False)
    weights, _ = interfered("loop sgd", lambda *_: None, direct=True)
    assert all(map(torch.equal, expected, weights))


def test_a_function_of_torch_that_was_replaced_before_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sgd_module = importlib.import_module("torch.optim.sgd")
    update, calls = sgd_module.sgd, []

    def noted(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        update(*arguments, **options)

    monkeypatch.setattr(sgd_module, "sgd", noted)
    interfered("loop momentum", lambda *_: None, direct=True)
    assert len(calls) == 9


def test_a_wrapper_of_the_class_with_torchs_marks_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(self, *arguments, **options)

    net, optimizer = make("sgd")
    backward(net)
    step = direct_step(optimizer)
    step()
    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    step()
    direct_step(optimizer)()
    assert calls == [1, 1]


def test_a_patch_of_every_zero_grad_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        Optimizer, "zero_grad", lambda self, set_to_none=True: calls.append(1)
    )
    _, optimizer = make("sgd")
    drop_gradients_of(optimizer)
    assert calls == [1]


def test_options_that_a_closure_changes_are_used_in_its_step() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(10)]
    optimizer = torch.optim.SGD(
        [{"params": [weight], "meta": {"layer": 1}} for weight in weights], lr=0.1
    )

    def closure() -> float:
        for group, weight in zip(optimizer.param_groups, weights, strict=True):
            group["lr"] = 1.0
            weight.grad = torch.ones(1)
        return 0.0

    step = direct_step(optimizer)
    step(closure)
    assert [weight.item() for weight in weights] == [0.0] * 10
    # An entry that cannot be a key, such as the dict above, is no obstacle.
    step()
    assert [weight.item() for weight in weights] == [-1.0] * 10


class Regression(tk.TrainModule):
    """Registers a step hook in the middle of a run, and replaces the step later."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.seen: list[str] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        if batch_idx == 2:
            optimizer.register_step_post_hook(lambda *_: self.seen.append("hook"))
        if batch_idx == 4:
            optimizer.step = lambda closure=None: self.seen.append("mine")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_calls_what_is_registered_while_it_runs() -> None:
    module = Regression()
    trainer = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, list(torch.randn(6, 2, 4)))
    assert module.seen == ["hook", "hook", "mine", "mine"]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw fused", "adamw foreach"])
def test_groups_with_equal_options_are_stepped_as_one(kind: str) -> None:
    """Bit-identical, with a state dict that knows nothing of it; options that a scheduler tells apart stay apart."""
    results = []
    for direct in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 2)) for _ in range(40)]
        groups = [
            {"params": [weight], "weight_decay": 0.1 * (index % 2)}
            for index, weight in enumerate(weights)
        ]
        optimizer = OPTIMIZERS[kind](groups)
        scheduler = lr_scheduler.LambdaLR(
            optimizer,
            [lambda step, part=part: 1 / (1 + step * part) for part in [1, 2] * 20],
        )
        step = direct_step(optimizer) if direct else optimizer.step
        for turn in range(4):
            for index, weight in enumerate(weights):
                # One weight has no gradient in some steps.
                weight.grad = None
                if index or turn % 2:
                    weight.grad = torch.sin(weight.detach() * (turn + 1))
            step()
            scheduler.step()
        results.append((weights, optimizer))
        assert len(optimizer.param_groups) == 40
    (plain, plain_optimizer), (joined, joined_optimizer) = results
    expected, state = plain_optimizer.state_dict(), joined_optimizer.state_dict()
    assert expected["param_groups"] == state["param_groups"]
    # The order in which weights got their state is no promise.
    assert str(sorted(expected["state"].items())) == str(sorted(state["state"].items()))
    for before, weight in zip(plain, joined, strict=True):
        assert torch.equal(before, weight)


def test_equal_groups_take_one_call_of_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as there are different options, and one each again where a hook listens."""
    weights = [nn.Parameter(torch.randn(2)) for _ in range(30)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight], "betas": [0.9, 0.1 + 0.1 * (index % 3)]}
            for index, weight in enumerate(weights)
        ]
    )
    for weight in weights:
        weight.grad = torch.ones(2)
    sizes: list[int] = []
    # The name in the package is the class's.
    adam_module = importlib.import_module("torch.optim.adam")
    update = adam_module.adam

    def note(parameters: list[torch.Tensor], *arguments: Any, **options: Any) -> None:
        sizes.append(len(parameters))
        update(parameters, *arguments, **options)

    monkeypatch.setattr(adam_module, "adam", note)
    step = direct_step(optimizer)
    step()
    assert sizes == [10, 10, 10]
    optimizer.register_step_post_hook(lambda *_: None)
    step()
    assert sizes[3:] == [1] * 30
