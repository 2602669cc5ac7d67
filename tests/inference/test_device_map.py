"""Device maps: sizes, order, room for what comes and goes, shared weights, and errors that say what is too large."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.core.devices import free_memory
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.inference.device_map import resolve_device_map, tensor_sizes
from trainer_kit.planning import describe_module, estimate_memory

infer = tk.infer_auto_device_map


class Net(nn.Module):
    """236 bytes: 64, 72 and 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = (
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 5),
        )


class Scaled(nn.Module):
    """A block with tensors of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.inner = nn.Linear(9, 10)
        self.register_buffer("layer_scalar", torch.ones(10))
        self.inner2 = nn.Linear(9, 10)


def three() -> nn.Module:
    return nn.Sequential(OrderedDict([("a", Net()), ("b", Net()), ("c", Net())]))


def used(model: nn.Module, found: dict[str, Any], device: Any) -> int:
    sizes, seen = tensor_sizes(model), set()
    total = 0
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(),
    ]:
        key = max(
            (
                key
                for key in found
                if not key or name == key or name.startswith(f"{key}.")
            ),
            key=len,
        )
        if found[key] == device and id(tensor) not in seen:
            seen.add(id(tensor))
            total += sizes[name]
    return total


def test_accelerators_are_filled_in_order() -> None:
    assert infer(Net(), {0: 200, 1: 200}) == {
        "linear1": 0,
        "batchnorm": 0,
        "linear2": 1,
    }
    assert infer(Net(), {1: 200, 0: 236}) == {"": 0}
    assert infer(Net(), {0: 200, 1: 200}, clean_result=False) == {
        "linear1": 0,
        "batchnorm": 0,
        "linear2": 1,
    }
    assert infer(three(), {0: 500, 1: 500}) == {"a": 0, "b": 0, "c": 1}
    whole = infer(three(), {0: 400, 1: 500}, {"Net"})
    assert whole == {"a": 0, "b": 1, "c": 1}
    assert infer(
        nn.Sequential(nn.Dropout(), nn.Linear(9, 10), nn.Dropout()), {0: 0, 1: 400}
    ) == {"": 1}
    assert infer(nn.Dropout(), {"cpu": 10}) == {"": "cpu"}


def test_the_map_reserves_room_for_offloaded_layers() -> None:
    net = nn.Sequential(*[nn.Linear(9, 10) for _ in range(6)])  # 400 bytes each
    found = infer(net, {0: 1300, "cpu": 900})
    assert found == {"0": 0, "1": 0, "2": "cpu", "3": "disk", "4": "disk", "5": "disk"}
    assert infer(net, {"cpu": 900}) == {
        "0": "cpu",
        **{str(i): "disk" for i in range(1, 6)},
    }
    assert infer(net, {"cpu": "1GB"}) == {"": "cpu"}
    assert infer(net, {}) == {"": "disk"}


def test_buffers_of_offloaded_layers_stay_on_the_accelerator_unless_they_are_offloaded_too() -> (
    None
):
    net = nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10), nn.Linear(9, 10))
    for layer in net:
        layer.register_buffer("table", torch.zeros(100))  # as much again
    assert infer(net, {0: 2400, "cpu": "1GB"}) == {"": 0}
    assert infer(net, {0: 2000, "cpu": "1GB"}) == {"0": 0, "1": "cpu", "2": "cpu"}
    with pytest.warns(UserWarning, match="no layer is on 0"):
        assert infer(net, {0: 1999, "cpu": "1GB"}) == {"": "cpu"}
    assert infer(net, {0: 1700, "cpu": "1GB"}, offload_buffers=True) == {
        "0": 0,
        "1": "cpu",
        "2": "cpu",
    }


def test_tensors_that_a_divided_module_has_itself_are_in_the_map() -> None:
    net = nn.Sequential(Scaled(), Scaled())
    found = infer(net, {0: 500, 1: 500, "cpu": 2000}, clean_result=False)
    assert {
        "0.scale",
        "0.layer_scalar",
        "0.inner",
        "0.inner2",
        "1.scale",
        "1.layer_scalar",
    } <= set(found)
    assert used(net, found, 0) <= 500


def test_shared_weights_stay_together_and_count_once() -> None:
    net = Net()
    net.linear1.weight = net.linear2.weight
    assert infer(net, {0: 188, 1: 200}) == {"": 0}
    net = three()
    net.c.linear2.weight = net.a.linear2.weight
    found = infer(net, {0: 260, 1: 500})
    assert found["c.linear2"] == 0 == found.get("a", found.get("a.linear2"))
    assert used(net, found, 0) <= 260
    same = nn.Linear(9, 10)
    assert infer(nn.Sequential(same, nn.ReLU(), same), {0: 400}) == {"": 0}


@pytest.mark.parametrize("seed", range(20))
def test_no_device_gets_more_than_it_has(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    net = nn.Sequential(
        *[
            nn.Sequential(*[nn.Linear(number(1, 9), number(1, 9)) for _ in range(3)])
            for _ in range(5)
        ]
    )
    net[3][1].weight = nn.Parameter(net[0][0].weight.detach())
    net[2][2] = net[1][0]
    room = {0: number(700, 1500), 1: number(0, 1500), "cpu": number(700, 1500)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = infer(net, room, fallback_allocation=bool(seed % 2))
    away = [
        m
        for n, m in net.named_modules()
        if isinstance(m, nn.Linear) and _of(found, n) in ("cpu", "disk")
    ]
    for device, most in room.items():
        assert used(net, found, device) <= most
    computing = min((d for d in found.values() if isinstance(d, int)), default=None)
    if away and computing is not None:
        largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in away)
        assert used(net, found, computing) + largest <= room[computing]


def _of(found: dict[str, Any], name: str) -> Any:
    return found[
        max(
            (
                key
                for key in found
                if not key or name == key or name.startswith(f"{key}.")
            ),
            key=len,
        )
    ]


def test_balanced() -> None:
    net = nn.Sequential(*[nn.Linear(9, 10) for _ in range(6)])
    assert tk.get_balanced_memory(net, {0: 9999, 1: 9999, "cpu": 5}) == {
        0: 1200,
        1: 9999,
        "cpu": 5,
    }
    assert tk.get_balanced_memory(net, {0: 9999, 2: 9999, 1: 0}) == {
        0: 1200,
        1: 0,
        2: 9999,
    }
    assert tk.get_balanced_memory(net, {0: 9999, 1: 9999, 2: 9999}, low_zero=True) == {
        0: 0,
        1: 1200,
        2: 9999,
    }
    assert tk.get_balanced_memory(net, {0: 9999, 1: 800, 2: 900}, low_zero=True) == {
        0: 800,
        1: 800,
        2: 900,
    }
    assert tk.get_balanced_memory(net, {0: 800, 1: 800}) == {
        0: 800,
        1: 800,
    }  # it does not fit
    assert tk.get_balanced_memory(net, {"cpu": 9999}) == {"cpu": 9999}
    for word in ("auto", "balanced"):
        assert (
            list(resolve_device_map(net, word, {0: 9999, 1: 9999}).values()).count(0)
            == 3
        )
    assert set(
        resolve_device_map(net, "balanced_low_0", {0: 9999, 1: 9999}).values()
    ) == {1}
    assert resolve_device_map(net, "sequential", {0: 9999, 1: 9999}) == {"": 0}
    with pytest.raises(StrategyError, match="unknown device_map 'atuo'"):
        resolve_device_map(net, "atuo")


def test_dtypes() -> None:
    net = nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10))
    net.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    assert tensor_sizes(net, "bfloat16", {"0.bias": "float64"})["0.bias"] == 80
    assert tensor_sizes(net, torch.float16)["count"] == 24
    assert tensor_sizes(net, "int4")["0.weight"] == 45
    assert infer(net, {0: 424}, dtype="torch.float16") == {"": 0}
    with pytest.raises(ConfigurationError, match="unknown dtype 'flaot16'"):
        infer(net, {0: 424}, dtype="flaot16")


def test_a_layer_that_is_larger_than_every_device_is_named() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(100, 100))
    with pytest.raises(
        StrategyError,
        match=r"'1' takes 40.4 kB, more than any device has\n.*0: 30 kB, cpu: 2 kB",
    ):
        infer(net, {0: "30kB", "cpu": "2kB"})
    with pytest.raises(StrategyError, match="together with what shares its weights"):
        infer(nn.Sequential(net[1], net[0], net[1]), {0: "30kB"})


def test_an_idle_accelerator_is_reported_and_fallback_uses_it() -> None:
    inner = nn.Sequential(
        OrderedDict(one=nn.Linear(10, 4), two=nn.Linear(4, 4), three=nn.Linear(4, 8))
    )  # 176, 80, 160
    with pytest.warns(UserWarning, match=r"no layer is on 0: .* takes 176 B"):
        assert infer(inner, {0: 256}) == {"": "disk"}
    assert infer(inner, {0: 256}, fallback_allocation=True) == {
        "one": "disk",
        "two": 0,
        "three": "disk",
    }


def test_words_of_memory_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = tk.get_max_memory(
        {"cpu": "1GiB", "disk": "1TB", 1: "10GIB", 0: "1.5GB", "meta": 7}
    )
    assert list(found.items())[:3] == [(0, 1_500_000_000), (1, 10 * 2**30), ("meta", 7)]
    assert list(found)[3:] == ["cpu", "disk"]
    with pytest.raises(
        ConfigurationError, match=r"max_memory\[0\] must be a number of bytes"
    ):
        tk.get_max_memory({0: "ten"})
    with pytest.raises(StrategyError, match="'gpu' is not a device"):
        tk.get_max_memory({"gpu": 3})
    infer(Net(), {0: 200, 1: 200}, verbose=True)
    assert capsys.readouterr().out.splitlines()[-1] == "linear2: 100 B on 1"
    assert infer(Net(), {"meta": 204, "cpu": 500}) == {
        "linear1": "meta",
        "batchnorm": "cpu",
        "linear2": "cpu",
    }


def test_free_memory_is_measured_and_limited_by_the_container(tmp_path: Any) -> None:
    free = free_memory(torch.device("cpu"))
    assert free is not None
    assert free > 10**7
    told = tk.get_max_memory()
    assert 0 < told["cpu"] <= free * 1.5
    limit, used_now, table = tmp_path / "max", tmp_path / "current", tmp_path / "stat"
    limit.write_text("5000000\n")
    used_now.write_text("4000000\n")
    table.write_text("anon 1\ninactive_file 500000\n")
    names = {"_LIMITS": limit, "_USED": used_now, "_STATISTICS": table}
    with mock.patch.multiple(
        "trainer_kit.core.devices", **{key: (str(file),) for key, file in names.items()}
    ):
        assert free_memory(torch.device("cpu")) == 1_500_000
    assert resolve_device_map(Net(), "auto")[""] in ("cpu", 0)


def test_bytes_of_each_module_and_tensor():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    sizes = tk.compute_module_sizes(model)
    assert (sizes["0.weight"], sizes["0"], sizes["1.num_batches_tracked"]) == (
        48,
        64,
        8,
    )
    assert (
        sizes[""]
        == sizes["0"] + sizes["1"]
        == sum(tensor.nbytes for tensor in model.state_dict().values())
    )
    assert tk.compute_module_sizes(model, "float16")["0"] == 32
    assert {
        name
        for name in tk.compute_module_sizes(model, buffers_only=True)
        if name.startswith("0")
    } == set()


def test_a_tied_tensor_counts_once_in_each_module():
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4)),
    )
    model[1][0].weight = model[0].weight
    model[1][1].weight = model[0].weight
    sizes = tk.compute_module_sizes(model)
    assert sizes[""] == 64 + 16 == tk.utils.calculate_maximum_sizes(model)[0]
    assert (sizes["0"], sizes["1"], sizes["1.0"], sizes["1.1"]) == (
        64,
        80,
        64,
        80,
    )  # what each needs alone
    whole = tk.infer_auto_device_map(
        model, {0: 128, 1: 128}
    )  # 80 bytes in all: together, once
    assert set(whole.values()) == {0}
    assert estimate_memory(describe_module(model))[0].weights == 80
