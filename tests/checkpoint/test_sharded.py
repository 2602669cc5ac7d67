"""What several ranks wrote together loads into any other layout, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_kit.checkpoint import (
    checkpoints,
    diff,
    export,
    read_checkpoint,
    read_sharded,
    read_weights,
    shard_plan,
    take_sharded_snapshot,
    verify_checkpoint,
    write_checkpoint,
    write_sharded,
    write_sharded_snapshot,
)
from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.commit import remove_checkpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import run_distributed

SAVED_AFTER = 2
INFO = {"step": SAVED_AFTER}


def build(layout, seed=0):
    """A model whose rows do not divide evenly, and its optimizer, in one of four layouts."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(16, 34),
        nn.Tanh(),
        nn.Linear(34, 5),
        nn.BatchNorm1d(5, dtype=torch.float64),
    )
    module = module.double()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(
            module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    elif layout == "fsdp":
        fully_shard(module[0])
        fully_shard(module)
    elif layout == "hsdp":
        mesh = init_device_mesh(
            "cpu",
            (2, dist.get_world_size() // 2),
            mesh_dim_names=("replicate", "shard"),
        )
        fully_shard(module, mesh=mesh)
    elif layout == "both":
        mesh = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor")
        )
        parallelize_module(
            module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        fully_shard(module, mesh=mesh["data"])
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def step(module, optimizer, number):
    """The same batch on every rank, so that every layout takes the same step."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (8,), generator=generator)
    F.cross_entropy(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value):
    """As plain arrays, which travel between processes."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().clone().numpy()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def save(path, layout):
    module, optimizer = build(layout)
    for number in range(SAVED_AFTER):
        step(module, optimizer, number)
    model, optim = get_state_dict(module, optimizer)
    extra = {
        "name": "run",
        "betas": (0.9, 0.999),
        "array": np.arange(3),
        5: float("inf"),
    }
    write_sharded(
        path,
        {
            "model": model,
            "optim": optim,
            "step": torch.tensor(SAVED_AFTER),
            "extra": extra,
        },
        info=INFO,
    )
    state = whole({"model": model, "optim": optim})
    step(module, optimizer, SAVED_AFTER)
    return state, whole(dict(module.state_dict()))


def load(path, layout):
    module, optimizer = build(layout, seed=1)
    model, optim = get_state_dict(module, optimizer)
    state = {
        "model": model,
        "optim": optim,
        "step": torch.tensor(0),
        "extra": {"name": "", "betas": None, 5: 0.0},
    }
    said = read_sharded(path, state)
    assert state["step"] == SAVED_AFTER
    assert state["extra"] == {"name": "run", "betas": (0.9, 0.999), 5: float("inf")}
    loaded = whole({"model": state["model"], "optim": state["optim"]})
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    step(module, optimizer, SAVED_AFTER)
    return said, loaded, whole(dict(module.state_dict()))


def equal(a, b):
    """Bit by bit; in arrays by value too, for the report."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / f"step-{SAVED_AFTER}"
    first, second = run_distributed(save, 2, str(path), "fsdp")
    assert equal(first, second)
    return path, *first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, "fsdp"),
        (2, "fsdp"),
        (3, "fsdp"),
        (4, "fsdp"),
        (2, "tp"),
        (4, "both"),
        (4, "hsdp"),
        (2, "plain"),
        (0, "plain"),
    ],
)
def test_a_checkpoint_of_two_ranks_resumes_on_any_layout(by_two, ranks, layout):
    path, state, after = by_two
    results = (
        run_distributed(load, ranks, str(path), layout)
        if ranks
        else [load(path, layout)]
    )
    for said, loaded, end in results:
        assert said == (None if ranks == 2 else f"resharding 2 → {ranks or 1}")
        assert equal(loaded, state)
        for name, value in after.items():
            np.testing.assert_allclose(end[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "then", "into"),
    [
        (4, "fsdp", 2, "fsdp"),
        (2, "tp", 2, "fsdp"),
        (4, "both", 3, "fsdp"),
        (4, "hsdp", 2, "tp"),
        (2, "plain", 4, "both"),
    ],
)
def test_any_layout_loads_into_any_other(tmp_path, ranks, layout, then, into):
    state, after = run_distributed(save, ranks, str(tmp_path / "c"), layout)[0]
    assert verify_checkpoint(tmp_path / "c")["shards"] == ranks
    for _, loaded, end in run_distributed(load, then, str(tmp_path / "c"), into):
        assert equal(loaded, state)
        for name, value in after.items():
            np.testing.assert_allclose(end[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_loads_into_shards(tmp_path):
    module, optimizer = build("plain")
    for number in range(SAVED_AFTER):
        step(module, optimizer, number)
    model, optim = get_state_dict(module, optimizer)
    extra = {"name": "run", "betas": (0.9, 0.999), 5: float("inf")}
    write_checkpoint(
        tmp_path / "c",
        {
            "model": model,
            "optim": optim,
            "step": torch.tensor(SAVED_AFTER),
            "extra": extra,
        },
    )
    said, loaded, _ = run_distributed(load, 3, str(tmp_path / "c"), "fsdp")[2]
    assert said == "resharding 1 → 3"
    assert equal(loaded, whole({"model": model, "optim": optim}))


@pytest.mark.slow
def test_the_other_commands_work_on_it(by_two, tmp_path):
    path, state, _ = by_two
    assert [(record.step, record.info) for record in checkpoints(path.parent)] == [
        (SAVED_AFTER, INFO)
    ]
    manifest = verify_checkpoint(path)
    assert (manifest["version"], manifest["shards"]) == (2, 2)
    assert manifest["parts"]["model"] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    read = read_checkpoint(path)
    assert equal(whole({"model": dict(read["model"]), "optim": read["optim"]}), state)
    assert equal(
        whole(read["extra"]),
        {"name": "run", "betas": (0.9, 0.999), "array": np.arange(3), 5: float("inf")},
    )
    plain = write_checkpoint(tmp_path / "plain", read, info=INFO)
    assert diff(path, plain) == []
    weights = read_weights(path)
    assert equal(whole(weights), state["model"])
    assert equal(
        whole(load_file(export(path, tmp_path / "one.safetensors"))), state["model"]
    )
    assert equal(
        whole(torch.load(export(path, tmp_path / "one.pt"), weights_only=True)),
        state["model"],
    )
    hub = export(path, tmp_path / "hub", max_shard_size=2000)
    index = json.loads((hub / "model.safetensors.index.json").read_text())["weight_map"]
    assert equal(
        {name: whole(load_file(hub / file)[name]) for name, file in index.items()},
        state["model"],
    )
    assert len(set(index.values())) > 1


def test_alone_without_a_group(tmp_path, same, make_state):
    path = write_sharded(tmp_path / "c", make_state(), info=INFO)
    assert same(read_checkpoint(path), make_state())
    assert sorted(file.name for file in path.iterdir()) == [
        "layout.json",
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "optimizers-00001-of-00001.safetensors",
        "rng-00001-of-00001.safetensors",
        "state.json",
    ]
    state = make_state(seed=5)
    tensor = state["model"]["0.weight"]
    assert read_sharded(path, state) is None
    assert state["model"]["0.weight"] is tensor  # in place
    assert same(state, make_state())


DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(
        torch.float8_e8m0fnu,
        torch.float8_e4m3fnuz,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.uint8,
    ),
    torch.bool,
]


def kinds():
    """Whole tensors, with the dimension in which they are split; None: every rank has all of it."""
    found = {}
    for dtype in DTYPES:
        values = torch.arange(20).reshape(5, 4) % 7
        found[str(dtype)] = (values.to(torch.float32).to(dtype), 0)
    found["columns"] = (torch.arange(35.0).reshape(5, 7), 1)
    found["fewer rows than ranks"] = (torch.arange(4.0).reshape(2, 2), 0)
    found["empty"] = (torch.empty(0, 3), 0)
    found["scalar"] = (torch.tensor(7), None)
    found["replicated"] = (torch.arange(6.0).reshape(2, 3), None)
    found["conjugate"] = (torch.tensor([1 + 2j, 3 - 1j]).conj().resolve_conj(), 0)
    found["three dimensions"] = (torch.arange(120.0).reshape(4, 5, 6), 2)
    return found


def spread(tensors, empty=False):
    """Each on all ranks; the local parts are neither contiguous nor at the start of their memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, (tensor, dim) in tensors.items():
        value = torch.zeros(tensor.shape).to(tensor.dtype) if empty else tensor
        if dim is None:
            state[name] = (
                DTensor.from_local(value.clone(), mesh, [Replicate()])
                if value.dim()
                else value.clone()
            )
            continue
        size = -(-value.shape[dim] // mesh.size())
        start = min(mesh.get_rank() * size, value.shape[dim])
        local = value.narrow(dim, start, min(size, value.shape[dim] - start)).clone()
        local = local.transpose(0, -1).contiguous().transpose(0, -1)
        if name == "conjugate":
            local = local.conj().clone().conj()
        state[name] = DTensor.from_local(
            local,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return state


def save_kinds(path):
    write_sharded(path, {"a part/of its own": spread(kinds()), "none": {}})


def load_kinds(path):
    state = {"a part/of its own": spread(kinds(), empty=True)}
    read_sharded(path, state)
    expected = spread(kinds())
    for name, value in state["a part/of its own"].items():
        local, wanted = (
            v.to_local() if isinstance(v, DTensor) else v
            for v in (value, expected[name])
        )
        local, wanted = (
            v.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
            for v in (local, wanted)
        )
        assert local == wanted, name


@pytest.mark.slow
def test_every_dtype_and_split(tmp_path, same):
    run_distributed(save_kinds, 3, str(tmp_path / "c"))
    whole_ones = {name: tensor for name, (tensor, _) in kinds().items()}
    assert same(
        read_checkpoint(tmp_path / "c"), {"a part/of its own": whole_ones, "none": {}}
    )
    plain = {
        "a part/of its own": {
            name: torch.zeros_like(tensor) for name, tensor in whole_ones.items()
        }
    }
    read_sharded(tmp_path / "c", plain)
    assert same(plain["a part/of its own"], whole_ones)
    for ranks in (2, 3):
        run_distributed(load_kinds, ranks, str(tmp_path / "c"))
    write_checkpoint(tmp_path / "plain", {"a part/of its own": whole_ones})
    run_distributed(load_kinds, 2, str(tmp_path / "plain"))


def save_alike(path):
    write_sharded(
        path, {"model": {f"w{i}": torch.full((100,), float(i)) for i in range(8)}}
    )


def test_replicated_values_are_written_once_and_shared_over_ranks(tmp_path):
    run_distributed(save_alike, 2, str(tmp_path / "c"))
    sizes = [
        len(load_file(tmp_path / "c" / f"model-0000{rank}-of-00002.safetensors"))
        for rank in (1, 2)
    ]
    assert sizes == [4, 4]


def save_stages(path):
    """As the stages of a pipeline: each has other layers, and what is replicated comes from the first."""
    rank = dist.get_rank()
    model = {f"layer{rank}.weight": torch.full((2,), float(rank))}
    write_sharded(
        path, {"model": model, "progress": {"step": 3 + rank, f"only{rank}": rank}}
    )


def load_stages(path):
    state = {"model": {f"layer{1 - dist.get_rank()}.weight": torch.zeros(2)}}
    read_sharded(path, state)
    return state["model"][f"layer{1 - dist.get_rank()}.weight"].tolist()


@pytest.mark.slow
def test_ranks_with_other_keys_make_one_state(tmp_path, same):
    run_distributed(save_stages, 2, str(tmp_path / "c"))
    assert same(
        read_checkpoint(tmp_path / "c"),
        {
            "model": {"layer0.weight": torch.zeros(2), "layer1.weight": torch.ones(2)},
            "progress": {"step": 3, "only0": 0, "only1": 1},
        },
    )
    assert run_distributed(load_stages, 2, str(tmp_path / "c")) == [
        [1.0, 1.0],
        [0.0, 0.0],
    ]


def refuse(path):
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    said = []
    states = [
        {"model": {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}},
        {"model": {"w": torch.ones(2), "f": len if rank == 1 else None}},
        {"model": {"w": torch.ones(2 + rank)}},
    ]
    for state in states:
        with pytest.raises(CheckpointError) as caught:
            write_sharded(path, state)
        said.append((caught.value.key, caught.value.reason))
    return said


@pytest.mark.slow
def test_a_value_that_cannot_be_saved_is_named_on_every_rank(tmp_path):
    first, second = run_distributed(refuse, 2, str(tmp_path / "c"))
    assert first == second
    assert first[0][0] == "model.w"
    assert "Partial" in first[0][1]
    assert first[1] == (
        "model.f",
        "rank 1: a value of type builtin_function_or_method cannot be saved",
    )
    assert first[2] == ("model.w", "float32 [3] on one rank, float32 [2] on another")
    assert list(tmp_path.iterdir()) == []


def watch(path):
    seen, watching = [], [False]

    def hook(event, arguments):
        if watching[0] and event in ("pickle.find_class", "marshal.loads"):
            seen.append((event, arguments))

    sys.addaudithook(hook)
    state = {
        "model": spread({"w": (torch.arange(6.0).reshape(3, 2), 0)}),
        "extra": {"a": (1, b"x")},
    }
    write_sharded(path, state)  # imports what it needs
    watching[0] = True
    write_sharded(path, state, overwrite=True)
    read_sharded(path, state)
    read_checkpoint(path)
    watching[0] = False
    return seen


@pytest.mark.slow
def test_nothing_is_pickled(tmp_path):
    assert run_distributed(watch, 2, str(tmp_path / "c")) == [[], []]
    for file in (tmp_path / "c").iterdir():
        assert file.suffix in (".json", ".safetensors")


def save_behind(path):
    """The second half runs in a thread, over a group of its own, while the main thread computes and communicates."""
    background = dist.new_group(backend="gloo")
    weight = torch.full((50, 3), float(dist.get_rank()))
    state = {
        "model": {
            "w": DTensor.from_local(weight, init_device_mesh("cpu", (2,)), [Shard(0)])
        }
    }
    snapshot = take_sharded_snapshot(state, info=INFO, copy=HostBuffers())
    writer = threading.Thread(
        target=write_sharded_snapshot,
        args=(path, snapshot),
        kwargs={"group": background},
    )
    writer.start()
    for _ in range(50):
        weight += 1
        dist.all_reduce(weight)
    writer.join()


@pytest.mark.slow
def test_a_snapshot_is_written_while_training_continues(tmp_path, same):
    run_distributed(save_behind, 2, str(tmp_path / "c"))
    expected = torch.cat([torch.zeros(50, 3), torch.ones(50, 3)])
    assert same(read_checkpoint(tmp_path / "c"), {"model": {"w": expected}})


def test_entries_that_do_not_match_the_state_are_named(tmp_path):
    path = write_sharded(
        tmp_path / "c",
        {"model": {"w": torch.ones(2, 3), "name": "x", "l": [torch.ones(1)]}},
    )
    cases = [
        ({"modle": {}}, "modle", "no such part"),
        ({"model": {"v": torch.ones(2, 3)}}, "model.v", "not in the checkpoint"),
        (
            {"model": {"w": torch.ones(3, 2)}},
            "model.w",
            r"\[2, 3\] is stored, the state has \[3, 2\]",
        ),
        (
            {"model": {"name": torch.ones(2)}},
            "model.name",
            "where the checkpoint has none",
        ),
        (
            {"model": {"l": [torch.ones(1)] * 2}},
            "model.l",
            "1 items are stored, the state has 2",
        ),
        ({"model": {"w": torch.ones(2, 3, device="meta")}}, "model.w", "no memory"),
    ]
    for state, key, said in cases:
        with pytest.raises(CheckpointError, match=said) as caught:
            read_sharded(path, state)
        assert caught.value.key == key
    state = {"model": None}
    read_sharded(path, state)
    assert torch.equal(state["model"]["w"], torch.ones(2, 3))


def test_at_a_url(same, make_state, request):
    url = f"memory://{request.node.name}/step-2"
    for seed in (1, 0):
        write_sharded(url, make_state(seed), info=INFO, overwrite=True)
    assert same(read_checkpoint(url), make_state())
    state = make_state(seed=5)
    read_sharded(url, state)
    assert same(state, make_state())
    assert verify_checkpoint(url)["shards"] == 1
    remove_checkpoint(url)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_sharded(url, state)


@pytest.mark.slow
def test_at_a_url_together(tmp_path):
    run_distributed(save_kinds, 2, f"file://{tmp_path}/c")
    run_distributed(load_kinds, 3, f"file://{tmp_path}/c")


def interleave(path):
    """Each rank holds every other row of its half: no box, though torch's planner takes it for one."""
    mesh = init_device_mesh("cpu", (2, 2))
    row = mesh.get_coordinate()[0] * 4 + mesh.get_coordinate()[1]
    local = torch.tensor([[float(row)], [row + 2.0]])
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    mine = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=(8, 1), stride=(1, 1)
    )
    if dist.get_rank() == 0:
        write_checkpoint(
            f"{path}/alone", {"model": {"w": torch.arange(8.0).reshape(8, 1)}}
        )
    dist.barrier()
    said = []
    for act in (write_sharded, read_sharded):
        with pytest.raises(CheckpointError, match="overlap") as caught:
            act(
                f"{path}/alone" if act is read_sharded else f"{path}/c",
                {"model": {"w": mine}},
            )
        said.append(caught.value.key)
    return said


@pytest.mark.slow
def test_a_placement_that_is_not_a_box_is_refused(tmp_path):
    assert run_distributed(interleave, 4, str(tmp_path)) == [["model.w", "model.w"]] * 4


def save_and_load_in_part(path):
    """Two of three ranks; the first of the group is not the first of all."""
    group = dist.new_group([1, 2], backend="gloo")
    if dist.get_rank() == 0:
        return None
    state = {
        "model": {"w": torch.ones(3), "h": torch.tensor(1 / 3, dtype=torch.float64)}
    }
    write_sharded(path, state, group=group)
    other = {"model": {"w": torch.zeros(3), "h": torch.tensor(0.0)}}
    return (
        read_sharded(path, other, group=group),
        other["model"]["w"].tolist(),
        other["model"]["h"].item(),
    )


@pytest.mark.slow
def test_a_group_of_some_ranks_is_enough_and_tensors_keep_their_dtype(tmp_path):
    found = (None, [1.0] * 3, torch.tensor(1 / 3).item())
    assert run_distributed(save_and_load_in_part, 3, str(tmp_path / "c")) == [
        None,
        found,
        found,
    ]


def test_a_state_is_described_once_however_many_parts_it_has(monkeypatch):
    """Its tensors were listed once for each part, and again for each description."""
    listed = []
    name_of = shard_plan.dtype_name
    monkeypatch.setattr(
        shard_plan, "dtype_name", lambda dtype: listed.append(dtype) or name_of(dtype)
    )
    state = {f"part {part}": {"w": torch.ones(2)} for part in range(20)}
    local = shard_plan.LocalState(state, None, first=True)
    trees, tensors, boxes = local.describe({})
    assert (len(trees), len(tensors), len(boxes)) == (20, 20, 20)
    assert local.describe(local.digests)[:2] == ({}, [])
    assert local.digests is local.digests
    assert len(listed) == 20


@pytest.mark.slow
def test_the_planner_is_imported_when_it_is_needed():
    code = "import sys, trainer_kit.checkpoint; print('torch.distributed.checkpoint' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
