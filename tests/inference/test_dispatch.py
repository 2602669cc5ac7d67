"""Spread models compute what the plain ones do, give their weights back, and refuse in words what cannot work."""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import trainer_kit as tk
from tests.inference.nets import Hard, tokens
from trainer_kit.checkpoint import export, write_checkpoint
from trainer_kit.core.errors import CheckpointError, StrategyError

MIXED = {
    "embed": "cpu",
    "blocks.0": "disk",
    "blocks.1.attention": "disk",
    "blocks.1.norm": "cpu",
    "blocks.1.scale": "disk",
    "blocks.1.shift": "cpu",
    "blocks.1.mask": "cpu",
    "recurrent": "disk",
    "lookup": "disk",
    "norm": "disk",
    "head": "disk",
}
PRELOAD = ["Lookup"]


def made(train: bool = False) -> Hard:
    torch.manual_seed(0)
    return Hard().train(train)


def outputs(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model(tokens())
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("device_map", [{"": "disk"}, MIXED], ids=["disk", "mixed"])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_the_outputs_are_those_of_the_plain_model(
    device_map: Any, offload_buffers: bool, tmp_path: Path
) -> None:
    plain, model = made(), made()
    options = {"offload_buffers": offload_buffers, "preload_module_classes": PRELOAD}
    assert (
        tk.dispatch_model(model, device_map, offload_dir=tmp_path, **options) is model
    )
    assert model.hf_device_map == device_map
    for _ in range(2):
        with torch.no_grad():
            assert same(outputs(model), outputs(plain))
    assert model.blocks[0].scale.device.type == "meta"
    assert model.head.weight is model.embed.weight
    assert (model.head.weight.device.type == "meta") is (device_map == {"": "disk"})
    assert (model.blocks[0].shift.device.type == "meta") is offload_buffers
    assert (
        model.blocks[0].mask.device.type == "cpu"
    )  # in no state_dict: it has nowhere else to be
    assert len(list(tmp_path.iterdir())) == 1


def test_running_statistics_are_kept_in_training_mode(tmp_path: Path) -> None:
    plain, model = made(train=True), made(train=True)
    tk.dispatch_model(
        model, MIXED, offload_dir=tmp_path, preload_module_classes=PRELOAD
    )
    with torch.no_grad():
        assert same(outputs(model), outputs(plain))
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)


def test_weights_come_back_whole_and_the_file_goes(tmp_path: Path) -> None:
    plain, model = made(), made()
    tk.dispatch_model(
        model, MIXED, offload_dir=tmp_path, preload_module_classes=PRELOAD
    )
    state = model.state_dict()
    assert same(dict(state), dict(plain.state_dict()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert same(outputs(twin), outputs(plain))
    assert twin.blocks[0].norm.weight is not model.blocks[0].norm.weight
    tk.dispatch_model(
        model, {"": "disk"}, offload_dir=tmp_path, preload_module_classes=PRELOAD
    )
    tk.dispatch_model(model, {"": "cpu"})
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    loss = outputs(model)["logits"].sum()
    loss.backward()  # nothing is elsewhere any more
    assert model.embed.weight.grad is not None
    model.to(torch.float64)
    del state, twin, model, loss
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_training_is_refused_unless_offloaded_weights_are_frozen(
    tmp_path: Path,
) -> None:
    model = made()
    tk.dispatch_model(
        model, MIXED, offload_dir=tmp_path, preload_module_classes=PRELOAD
    )
    found = outputs(model)
    assert found["logits"].requires_grad
    with pytest.raises(
        StrategyError, match=r"offloaded weights cannot be trained\n.*on disk"
    ):
        found["logits"].sum().backward()
    with torch.no_grad():
        assert not outputs(model)["logits"].requires_grad

    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False),
        nn.Linear(4, 4),
        nn.Linear(4, 1).requires_grad_(False),
    )
    plain = copy.deepcopy(base)
    tk.dispatch_model(
        base, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir=tmp_path
    )
    for net in (base, plain):
        net(torch.ones(2, 4)).sum().backward()
    assert torch.equal(base[1].weight.grad, plain[1].weight.grad)


def test_moving_casting_and_loading_are_answered_in_words(tmp_path: Path) -> None:
    model = made()
    state = model.state_dict()
    holder = nn.ModuleList([model])
    tk.dispatch_model(model, MIXED, offload_dir=tmp_path)
    for act in (
        lambda: model.to("cpu"),
        model.half,
        lambda: holder.to("cpu"),
        model.blocks[0].norm.double,
        lambda: tk.Accelerator(cpu=True).prepare(model),
    ):
        with pytest.raises(
            StrategyError,
            match=r"dispatched model cannot be moved or cast.*\n.*on disk",
        ):
            act()
    with pytest.raises(
        StrategyError,
        match="load_state_dict cannot change weights that are offloaded to disk",
    ):
        model.load_state_dict(state)


def test_errors_before_anything_is_moved(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(
        StrategyError,
        match=r"no device for head.weight, norm.bias, norm.num_batches_tracked and 3 more",
    ):
        tk.dispatch_model(
            model,
            {key: value for key, value in MIXED.items() if key not in ("head", "norm")},
        )
    with pytest.raises(
        StrategyError,
        match=r"(?s)no device for .*'haed' is not a module: did you mean 'head'",
    ):
        tk.dispatch_model(
            model,
            {"haed" if key == "head" else key: value for key, value in MIXED.items()},
        )
    with pytest.warns(UserWarning, match="names that are not in the model: extra"):
        tk.dispatch_model(model, {"": "cpu", "extra": "cpu"})
    with pytest.raises(
        StrategyError,
        match=r"go to disk, but no directory is given.*\n  fix:   pass offload_dir",
    ):
        tk.dispatch_model(model, MIXED)
    with pytest.raises(StrategyError, match="'gpu' is not a device"):
        tk.dispatch_model(model, {"": "gpu"})
    if not torch.accelerator.is_available():
        with pytest.raises(
            StrategyError,
            match=r"this machine has no device 0\n  found: no accelerator",
        ):
            tk.dispatch_model(model, {**MIXED, "norm": 0}, offload_dir=tmp_path)
    with tk.init_empty_weights():
        empty = made()
    with pytest.raises(
        StrategyError,
        match=r"blocks.0.attention.in_proj_bias, .* have no values: they are on the meta",
    ):
        tk.dispatch_model(empty, {"": "cpu"})
    assert not list(tmp_path.iterdir())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert not model._forward_pre_hooks
    with torch.no_grad():
        assert same(outputs(model), outputs(made()))


def test_a_model_without_values_reads_a_checkpoint_in_place(tmp_path: Path) -> None:
    plain = made()
    weights = dict(plain.state_dict())
    hub = export(weights, tmp_path / "hub", max_shard_size=500)
    ours = write_checkpoint(tmp_path / "step-3", {"model": weights})
    for directory in (hub, ours):
        before = sorted(directory.iterdir())
        with tk.init_empty_weights():
            model = made()
        model.load_state_dict(
            {k: v for k, v in weights.items() if "norm.running" in k},
            strict=False,
            assign=True,
        )
        for name, buffer in plain.named_buffers():
            model.get_buffer(name).copy_(buffer)
        tk.disk_offload(model, directory, preload_module_classes=PRELOAD)
        with torch.no_grad():
            assert same(outputs(model), outputs(plain))
        assert sorted(directory.iterdir()) == before
    with tk.init_empty_weights():
        model = made()
    files = json.loads((hub / "model.safetensors.index.json").read_text())["weight_map"]
    index = {
        name: {"safetensors_file": str(hub / file), "weight_name": name}
        for name, file in files.items()
    }
    tk.dispatch_model(
        model, {"": "disk"}, offload_index=index, preload_module_classes=PRELOAD
    )
    with torch.no_grad():
        assert same(outputs(model), outputs(plain))
    (hub / files["recurrent.bias_hh_l0"]).write_bytes(b"gone")
    with pytest.raises(CheckpointError, match="it was overwritten"), torch.no_grad():
        outputs(model)
    with tk.init_empty_weights():
        other = Hard(width=6)
    with pytest.raises(StrategyError, match="stored with another shape"):
        tk.disk_offload(other, ours)


def test_an_accelerator_is_visited_and_left_again() -> None:
    """The meta device stands in for it: what is computed has no values, but where it is can be seen."""
    model, seen = made(), []
    x = torch.ones(2, 8)
    layer = tk.cpu_offload(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), "meta"
    )
    before = [p.detach().clone() for p in layer.parameters()]
    layer[0].register_forward_pre_hook(
        lambda m, args: seen.append((m.weight.device.type, args[0].device.type))
    )
    assert layer(x.to("meta")).device.type == "meta"
    assert seen == [("meta", "meta")]
    assert layer[1].running_mean.device.type == "meta"  # buffers stay where it computes
    assert all(
        torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)
    )
    spread = {
        "embed": "meta",
        "head": "meta",
        "blocks": "cpu",
        "recurrent": "cpu",
        "lookup": "cpu",
        "norm": "cpu",
    }
    tk.dispatch_model(model, spread, preload_module_classes=PRELOAD)
    assert model.blocks[0].norm.weight.device.type == "cpu"
    assert model(tokens().to("meta"))["logits"].device.type == "meta"
    cache: dict[str, Tensor] = {}
    tk.dispatch_model(
        made(), spread, skip_keys="cache", preload_module_classes=PRELOAD
    )(tokens().to("meta"), cache=cache)
    assert cache["h"].device.type == "meta"


def test_weights_leave_after_an_error_and_inputs_without_values_are_named(
    tmp_path: Path,
) -> None:
    model = tk.disk_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 1)), tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(
        StrategyError,
        match=r"an input of 'the model' has no values\n.*\n  fix:   create inputs on 'cpu'",
    ):
        model(torch.ones(2, 4, device="meta"))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_hooks_that_a_module_had_before_use_its_weights_and_may_fail(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    normed: Any = nn.utils.weight_norm(nn.Linear(4, 5))
    pruned: Any = prune.l1_unstructured(nn.Linear(5, 6), "weight", amount=0.5)  # type: ignore[no-untyped-call]
    model = nn.Sequential(
        normed, pruned, nn.utils.spectral_norm(nn.Linear(6, 3)), nn.Linear(3, 2)
    ).eval()
    x, failing = torch.randn(2, 4), [False]

    def fail(module: nn.Module, args: Any) -> None:
        if failing[0]:
            raise ValueError("of the user")

    model.register_forward_pre_hook(fail)
    model[3].register_forward_pre_hook(fail)
    with torch.no_grad():
        expected = model(x)
        tk.disk_offload(model, tmp_path)
        for failing[0] in (False, True, True):
            if failing[0]:
                with pytest.raises(ValueError, match="of the user"):
                    model(x)
            assert {p.device.type for p in model.parameters()} == {"meta"}
        failing[0] = False
        assert torch.equal(model(x), expected)


def test_replacing_offloaded_weights_is_an_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.randn(3, 4)
    export(other.state_dict(), tmp_path / "other")
    expected = other(x)
    replaced = (
        r"'(weight|bias)' of the model was replaced after the model was dispatched\n"
        r"[^\0]*call dispatch_model again"
    )
    for device_map in (None, {"": "disk"}):
        spread = tk.disk_offload(copy.deepcopy(model), tmp_path / "offloaded")
        tk.load_checkpoint_in_model(spread, tmp_path / "other", device_map)
        with pytest.raises(StrategyError, match=replaced):
            spread(x)
        if device_map is None:  # else nothing of it is in memory
            assert torch.equal(spread.state_dict()["weight"], other.weight)
        tk.dispatch_model(spread, {"": "disk"}, offload_dir=tmp_path / "offloaded")
        assert torch.allclose(spread(x), expected)
        assert torch.equal(spread.state_dict()["weight"], other.weight)


def test_one_module_under_two_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with torch.no_grad():
        expected = model(x)
        for device_map in (
            {"": "disk"},
            {"0": "disk", "2": "cpu"},
            {"0": "disk", "2": "disk"},
            {"": "cpu"},
        ):
            tk.dispatch_model(model, device_map, offload_dir=tmp_path)
            assert torch.equal(model(x), expected)
            assert torch.equal(copy.deepcopy(model)(x), expected)
    assert layer.weight.device.type == "cpu"


def test_an_interrupted_forward_leaves_nothing_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))),
        torch.randn(3, 4),
    )
    expected = model(x).detach()
    tk.disk_offload(model.requires_grad_(False), tmp_path)

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    for copied in (model, copy.deepcopy(model)):
        inner = copied[1][0]
        for module in (inner, copied[1], copied):  # inside its forward, and behind it
            handle = module.register_forward_hook(interrupted)
            with pytest.raises(KeyboardInterrupt):
                copied(x)
            handle.remove()
            assert {p.device.type for p in copied.parameters()} == {"meta"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.functional, "linear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                inner(x)
        assert {p.device.type for p in copied.parameters()} == {"meta"}
        assert torch.equal(copied(x), expected)
    tk.dispatch_model(model, {"": "cpu"})
    assert "_call_impl" not in vars(model) | vars(model[0])


def test_a_file_that_is_written_again_is_not_read_as_if_it_were_the_same(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    file = export(model.state_dict(), tmp_path / "model.safetensors")
    whole, expected = file.read_bytes(), model(x)
    for change in (
        lambda: file.write_bytes(whole),
        lambda: os.replace(tmp_path / "new", file),
        file.unlink,
    ):
        file.write_bytes(whole)
        (tmp_path / "new").write_bytes(whole)
        spread = tk.load_checkpoint_and_dispatch(
            copy.deepcopy(model), file, {"": "disk"}
        )
        assert torch.equal(spread(x), expected)
        os.utime(file, ns=(0, 0))
        spread = tk.load_checkpoint_and_dispatch(
            copy.deepcopy(model), file, {"": "disk"}
        )
        change()
        with pytest.raises(
            CheckpointError, match=r"overwritten while a model reads|No such file"
        ):
            spread(x)
        assert {p.device.type for p in spread.parameters()} == {"meta"}


def test_two_threads_share_the_loaded_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
    tk.disk_offload(model, tmp_path)
    found: list[bool] = []

    def run() -> None:
        with torch.no_grad():
            found.extend(torch.equal(model(x), expected) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 60
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_whole_models_come_and_go() -> None:
    first, one = tk.cpu_offload_with_hook(nn.Linear(2, 3), "meta")
    second, other = tk.cpu_offload_with_hook(
        nn.Linear(3, 1), "cpu", prev_module_hook=one
    )
    one.remove()
    assert second(first(torch.ones(1, 2))).shape == (1, 1)
    assert first.weight.device.type == "cpu"
    other.offload()
    assert second.weight.device.type == "cpu"
