"""Private names of torch: each exists in this torch, and is missed in words, or has the fallback that is written there.

``make test-nightly`` runs this file, and the tests of the rooms that use such names, on the newest torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import pkgutil
import sys
from collections import OrderedDict
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.data import DataLoader, dataloader

import trainer_kit
from trainer_kit.accelerator import torch_private as accelerator_private
from trainer_kit.checkpoint import torch_private as checkpoint_private
from trainer_kit.core import torch_private as core_private
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.data import torch_private as data_private
from trainer_kit.hang import torch_private as hang_private
from trainer_kit.launch import torch_private as launch_private
from trainer_kit.planning import torch_private as planning_private
from trainer_kit.state import torch_private as state_private
from trainer_kit.strategies import torch_private as strategies_private
from trainer_kit.verify import torch_private as verify_private

PACKAGE = Path(trainer_kit.__file__).parent
FILES = sorted(PACKAGE.glob("*/torch_private.py"))


def load(path: Path) -> ModuleType:
    """The module of a file, executed once more under another name."""
    spec = importlib.util.spec_from_file_location(f"fresh_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hide(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    """Take a name away from torch."""
    holder: Any = pkgutil.resolve_name(owner)
    try:
        monkeypatch.delattr(holder, name)
    except (AttributeError, TypeError):
        # A class of C++ keeps what it has: one that has nothing takes its place.
        above, _, last = owner.rpartition(".")
        monkeypatch.setattr(pkgutil.resolve_name(above), last, type(last, (), {}))


def looked_up() -> list[Any]:
    """File, variable and path of each name that is looked up while a module is imported."""
    rows = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.AnnAssign) or not isinstance(
                node.value, ast.Call
            ):
                continue
            if ast.unparse(node.value.func) == "find_private":
                path = node.value.args[0]
                if isinstance(path, ast.Constant):
                    variable = ast.unparse(node.target)
                    rows.append(pytest.param(file, variable, path.value, id=path.value))
    return rows


def imported() -> list[Any]:
    """File, module and name of each import that a torch_private module needs."""
    rows = []
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.With):
                continue
            for statement in node.body:
                if not isinstance(statement, ast.ImportFrom):
                    continue
                for alias in statement.names:
                    module = str(statement.module)
                    # An import finds a submodule by its file.
                    if f"{module}.{alias.name}" in sys.modules:
                        continue
                    rows.append(
                        pytest.param(
                            file, module, alias.name, id=f"{module}.{alias.name}"
                        )
                    )
    return rows


def test_without_a_function_of_lists_torchs_own_step_updates_small_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert strategies_private.has_list_functions
    hide(monkeypatch, "torch", "_foreach_addcdiv_")
    has_all = load(PACKAGE / "strategies" / "torch_private.py").has_list_functions
    assert not has_all
    monkeypatch.setattr(strategies_private, "has_list_functions", has_all)
    assert load(PACKAGE / "strategies" / "update_kernels.py").LIST_KERNELS == {}


@pytest.mark.parametrize(("file", "variable", "path"), looked_up())
def test_a_missing_name_refuses_where_it_is_used(
    file: Path, variable: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(
        pkgutil.resolve_name(path.rpartition(".")[0]), path.rpartition(".")[2]
    )
    assert getattr(load(file), variable).__name__ != "refuse"
    hide(monkeypatch, *path.rpartition(".")[::2])
    module = load(file)
    with pytest.raises(TrainerKitError) as error:
        getattr(module, variable)(torch.ones(1))
    assert f"needs {path}, a private name that this release of torch" in str(
        error.value
    )
    assert f"found: torch {torch.__version__}" in str(error.value)
    assert "install a release of torch that this was checked with" in str(error.value)


@pytest.mark.parametrize(("file", "module", "name"), imported())
def test_a_missing_import_says_what_needs_it(
    file: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file)
    hide(monkeypatch, module, name)
    with pytest.raises(TrainerKitError, match=rf"needs .*{name}.*, a private name"):
        load(file)
    # Whoever tries an import and goes on without it expects this class.
    with pytest.raises(ImportError, match=rf"needs .*{name}.*, a private name"):
        load(file)


def test_a_package_that_torch_misses_is_not_a_private_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "import a_package_of_nobody\n"
    (tmp_path / "imports_a_package.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    missing = "No module named 'a_package_of_nobody'"
    with (
        pytest.raises(ModuleNotFoundError, match=missing) as error,
        core_private.needs_private("a test"),
    ):
        importlib.import_module("imports_a_package")
    assert not isinstance(error.value, TrainerKitError)
    with pytest.raises(ModuleNotFoundError, match=missing) as error:
        core_private.find_private("imports_a_package.name", "a test")
    assert not isinstance(error.value, TrainerKitError)


def test_a_missing_name_stays_one_on_its_way_between_processes() -> None:
    with pytest.raises(core_private.MissingPrivateName) as error:
        core_private.find_private("torch._nothing", "a test")()
    copy = pickle.loads(pickle.dumps(error.value))
    assert type(copy) is core_private.MissingPrivateName
    assert (str(copy), copy.fix) == (str(error.value), error.value.fix)


def test_a_renamed_function_is_found_by_either_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions: Any = SimpleNamespace(old=len, new=sum)
    monkeypatch.setattr(torch, "_renamed", functions, raising=False)
    find = core_private.find_private
    assert find("torch._renamed.new", "x", former="torch._renamed.old") is sum
    del functions.new
    assert find("torch._renamed.new", "x", former="torch._renamed.old") is len


def fake_mesh() -> Any:
    return object.__new__(DeviceMesh)


REFUSALS: dict[str, tuple[str, str, Any]] = {
    "the store of the world": (
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        core_private.default_store,
    ),
    "joining the axes of a mesh": (
        "torch.distributed.device_mesh.DeviceMesh",
        "_flatten",
        lambda: strategies_private.flatten_mesh(fake_mesh(), "name"),
    ),
    "joining meshes": (
        "torch.distributed.device_mesh.DeviceMesh",
        "_concatenate",
        lambda: strategies_private.concatenate_meshes([]),
    ),
    "a new reducer": (
        "torch.nn.parallel.DistributedDataParallel",
        "_build_params_for_reducer",
        lambda: strategies_private.replace_reducer(
            object.__new__(DistributedDataParallel)
        ),
    ),
    "fake ranks": (
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        strategies_private.make_fake_store,
    ),
    "stages that know shapes": (
        "torch.distributed.pipelining._utils",
        "InferenceMode",
        lambda: planning_private.know_shapes(SimpleNamespace()),
    ),
    "the vote of stages": (
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule",
        planning_private.pipeline_warmup,
    ),
    "the legacy profiler": (
        "torch._C._profiler",
        "_ExperimentalConfig",
        planning_private.begin_recording,
    ),
    "process groups of threads": (
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        verify_private.new_group_function,
    ),
    "worlds of threads": (
        "torch.testing._internal.distributed.multi_threaded_pg",
        "ThreadLocalWorld",
        verify_private.worlds_of_threads,
    ),
}


@pytest.mark.parametrize("row", REFUSALS.values(), ids=list(REFUSALS))
def test_a_call_refuses_in_words_without_its_name(
    row: tuple[str, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call = row
    importlib.import_module("torch.distributed.pipelining")
    assert hasattr(pkgutil.resolve_name(owner), name)
    hide(monkeypatch, owner, name)
    with pytest.raises(
        TrainerKitError, match=f"{name}.*, a private name that this release"
    ):
        call()


def scheduler() -> StepLR:
    return StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), step_size=1)


class TestFallbacks:
    """What a module does without a name, as it says there."""

    def test_a_module_counts_as_not_compiled(self) -> None:
        module = nn.Linear(1, 1)
        assert not core_private.has_compiled_call(module)
        core_private.set_compiled_call(module, lambda value: value)
        assert core_private.has_compiled_call(module)
        assert not core_private.has_compiled_call(object())  # type: ignore[arg-type]

    def test_a_state_has_no_versions(self) -> None:
        state = nn.BatchNorm1d(1).state_dict()
        assert core_private.versions_of(state)[""]["version"] == 2
        assert core_private.versions_of(OrderedDict(state)) is None

    def test_modules_of_torch_need_their_dicts_too(self) -> None:
        for name in (
            core_private.PARAMETERS,
            core_private.BUFFERS,
            core_private.CHILDREN,
            "_non_persistent_buffers_set",
        ):
            module = nn.BatchNorm1d(1)
            assert name in vars(module)
            del module.__dict__[name]
            with pytest.raises(AttributeError, match=name):
                module.state_dict()

    def test_a_scheduler_without_the_mark_of_a_step_warns_of_nothing(self) -> None:
        plain = scheduler()
        core_private.mark_stepped(plain.optimizer)
        plain.step()

    def test_workers_are_left_to_the_garbage_collector(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loader: DataLoader[Any] = DataLoader([1], num_workers=1)
        iterator = iter(loader)
        assert data_private.has_workers(iterator)
        data_private.shut_down_workers(iterator)
        monkeypatch.delattr(dataloader, data_private.WORKER_ITERATOR)
        private = load(PACKAGE / "data" / "torch_private.py")
        assert not private.has_workers(iterator)

    def test_batches_are_not_counted(self) -> None:
        iterator = iter(DataLoader([1, 2]))
        next(iterator)
        assert data_private.batches_read(iterator) == 1
        assert data_private.batches_read(iter([1])) is None

    def test_a_loader_has_the_attributes(self) -> None:
        loader: DataLoader[Any] = DataLoader([1])
        assert data_private.kept_iterator(loader) is None
        assert data_private.MULTIPROCESSING_CONTEXT in vars(loader)
        assert data_private.iterator_method(DataLoader) is not None
        fetch = importlib.import_module("torch.utils.data._utils.fetch")
        assert str(fetch.__file__).endswith(data_private.FETCH_FILE)

    def test_no_flight_recorder_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in hang_private._DUMPS:
            monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
        assert hang_private.recorded_collectives() == []

    def test_the_agent_of_torch_waits(self) -> None:
        agent = SimpleNamespace()
        launch_private.skip_exit_barrier(agent)  # type: ignore[arg-type]
        agent_class = pkgutil.resolve_name(
            "torch.distributed.elastic.agent.server.api.SimpleElasticAgent"
        )
        assert all(callable(getattr(agent_class, name)) for name in vars(agent))

    def test_parts_of_schedulers_are_not_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = [scheduler()]
        chained = ChainedScheduler(parts)
        assert list(state_private.nested_schedulers(chained)) == parts
        monkeypatch.delattr(chained, "_schedulers")
        assert list(state_private.nested_schedulers(chained)) == []

    def test_calls_of_schedulers_are_not_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = scheduler()
        assert accelerator_private.counts_calls(plain)
        monkeypatch.delattr(plain, "_step_count")
        assert not accelerator_private.counts_calls(plain)

    def test_references_of_tensors_are_not_counted(self) -> None:
        assert planning_private.tensor_uses(object()) == 0  # type: ignore[arg-type]
        tensor = torch.ones(1)
        before = planning_private.storage_uses(tensor.untyped_storage())
        view = tensor[:]
        assert planning_private.storage_uses(view.untyped_storage()) > before

    def test_operations_are_not_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert verify_private.debug_mode() is not None
        hide(monkeypatch, "torch.utils._debug_mode", "DebugMode")
        assert verify_private.debug_mode() is None

    def test_nothing_counts_as_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("torch._dynamo.utils")
        assert hasattr(module, "counters")
        monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
        assert verify_private.compiled_frames() == 0

    def test_the_public_decorator_keeps_a_function_from_the_compiler(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hide(monkeypatch, "torch._compile", "_disable_dynamo")
        private = load(PACKAGE / "strategies" / "torch_private.py")
        assert private.excluded_from_compilation is torch.compiler.disable

    def test_the_public_timeout_of_groups_comes_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def set_timeout(timeout: timedelta, group: object) -> None:
            """As in torch 2.14, which warns of the private name."""

        monkeypatch.setattr(dist, "set_timeout", set_timeout, raising=False)
        private = load(PACKAGE / "strategies" / "torch_private.py")
        assert private.set_group_timeout is set_timeout
        monkeypatch.delattr(dist, "set_timeout")
        private = load(PACKAGE / "strategies" / "torch_private.py")
        assert private.set_group_timeout is dist.distributed_c10d._set_pg_timeout

    def test_a_layer_has_no_reset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = nn.MultiheadAttention(2, 1)
        assert strategies_private.find_reset(layer) is not None
        monkeypatch.delattr(nn.MultiheadAttention, "_reset_parameters")
        assert strategies_private.find_reset(layer) is None

    def test_files_have_the_names_of_this_torch(self) -> None:
        for module, name in (
            ("torch.distributed.checkpoint.filesystem", "STORAGE_RECORD"),
            ("torch.serialization", "LAYOUT_FUNCTION"),
            ("torch.distributed.checkpoint.metadata", "MEMORY_FORMAT"),
            ("torch.distributed.tensor.placement_types", "STRIDED_SHARD"),
        ):
            private = getattr(checkpoint_private, name)
            assert hasattr(importlib.import_module(module), private)
        importlib.import_module(checkpoint_private.MUTATION_GUARD)
        assert checkpoint_private.LAST_RATES in scheduler().state_dict()


def test_the_groups_of_the_world_have_the_name() -> None:
    assert hasattr(dist.distributed_c10d, hang_private.WORLD)
    for name in (verify_private.NEW_GROUP, verify_private.BARRIER):
        assert hasattr(dist.distributed_c10d, name)
    for name in verify_private.OPERATIONS_ALIKE:
        assert hasattr(dist.ProcessGroup, name)


def test_needed_names_that_are_there_change_nothing() -> None:
    with core_private.needs_private("a test"), nullcontext():
        assert torch._C is not None
