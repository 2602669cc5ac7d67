"""Accelerate's module paths and names: each has a home here, or says what to use; the helpers do what theirs do.

Known values are those of Accelerate 1.15, with which these functions were compared.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import trainer_kit as tk
from trainer_kit import Accelerator, PartialState
from trainer_kit.accelerator import samplers as loaders
from trainer_kit.accelerator import script_names
from trainer_kit.accelerator.accelerator import forget_newest
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.trackers import LoggerTracker
from trainer_kit.compat import accelerate_modules as modules
from trainer_kit.compat import accelerate_probes as probes
from trainer_kit.compat import accelerate_utilities as utilities
from trainer_kit.compat.accelerate_names import ELSEWHERE, PATHS
from trainer_kit.core.errors import ConfigurationError

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(4.0))


def parts(**options: Any) -> tuple[Accelerator, nn.Module, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return accelerator, *accelerator.prepare(
        model, optimizer, DataLoader(DATA, batch_size=2), scheduler
    )


def test_every_path_is_a_module_with_its_names() -> None:
    for path, names in PATHS.items():
        module = import_module(f"trainer_kit.{path}" if path else "trainer_kit")
        for name in names:
            assert callable(module) if name == "__call__" else hasattr(module, name), (
                path,
                name,
            )


def test_no_name_is_both_here_and_elsewhere() -> None:
    assert not ELSEWHERE.keys() & PATHS["utils"].keys()
    assert all(fix.strip() for fix in ELSEWHERE.values())


IMPORTS = """
from trainer_kit.accelerator import Accelerator as OfAccelerator
from trainer_kit.accelerator import DataLoaderConfiguration, GradientAccumulationPlugin
from trainer_kit.big_modeling import dispatch_model, init_empty_weights
from trainer_kit.commands.config.config_args import load_config_from_file
from trainer_kit.commands.config.default import write_basic_config
from trainer_kit.data_loader import DataLoaderShard, SeedableRandomSampler, prepare_data_loader
from trainer_kit.hooks import AlignDevicesHook, CpuOffload, UserCpuOffloadHook, add_hook_to_module
from trainer_kit.inference import prepare_pippy
from trainer_kit.launchers import debug_launcher, notebook_launcher
from trainer_kit.logging import MultiProcessAdapter, get_logger
from trainer_kit.optimizer import AcceleratedOptimizer as OfOptimizer
from trainer_kit.scheduler import AcceleratedScheduler as OfScheduler
from trainer_kit.state import AcceleratorState, GradientState, PartialState
from trainer_kit.tracking import GeneralTracker, WandBTracker, on_main_process
from trainer_kit.utils import DistributedType, ProjectConfiguration, gather_object, set_seed, tqdm
from trainer_kit.utils.dataclasses import DistributedType as OfDataclasses
from trainer_kit.utils.imports import is_bnb_available, is_xpu_available
from trainer_kit.utils.memory import find_executable_batch_size
from trainer_kit.utils.modeling import get_balanced_memory, set_module_tensor_to_device
from trainer_kit.utils.operations import recursively_apply, send_to_device
from trainer_kit.utils.other import extract_model_from_parallel
from trainer_kit.utils.random import synchronize_rng_states
from trainer_kit.utils.tqdm import tqdm as of_tqdm
"""


def test_imports_as_scripts_have_them() -> None:
    """Lines of real scripts after ``s/accelerate/trainer_kit/``."""
    found: dict[str, Any] = {}
    exec(IMPORTS, found)
    assert found["OfAccelerator"] is Accelerator
    assert found["OfOptimizer"] is AcceleratedOptimizer
    assert found["OfScheduler"] is AcceleratedScheduler
    assert found["OfDataclasses"] is found["DistributedType"] is tk.DistributedType
    assert (
        list(found["of_tqdm"]([1], disable=True))
        == list(found["tqdm"]([1], disable=True))
        == [1]
    )
    assert found["send_to_device"] is tk.send_to_device
    assert tk.optimizer(
        "sgd", nn.Linear(1, 1).parameters(), lr=0.1
    )  # `trainer_kit.optimizer` is a module by now


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (
            "from trainer_kit.utils import HfDeepSpeedConfig",
            "DeepSpeedPlugin(hf_ds_config=...)",
        ),
        ("from trainer_kit.utils.launch import PrepareForLaunch", "notebook_launcher"),
        ("from trainer_kit.commands.launch import launch_command", "notebook_launcher"),
        (
            "from trainer_kit.state import SharedDict",
            "each Accelerator has its own state",
        ),
        ("from trainer_kit.test_utils import RegressionModel", "trainer_kit.testing"),
        ("from trainer_kit.hooks import ModelHok", "did you mean 'ModelHook'?"),
    ],
)
def test_a_missing_name_says_what_to_use(line: str, fix: str) -> None:
    with pytest.raises(ImportError, match=re.escape(fix)):
        exec(line)


def test_nested_tensors() -> None:
    half = torch.ones(2, dtype=torch.float16)
    nested = {
        "a": [torch.arange(2), (half, "s")],
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    assert utilities.listify(nested) == {
        "a": [[0, 1], ([1.0, 1.0], "s")],
        "b": [1.0, 1.0],
    }
    structure = utilities.get_data_structure(nested)
    assert structure["b"] == utilities.TensorInformation(
        torch.Size([2]), torch.bfloat16
    )
    assert utilities.initialize_tensors(structure)["a"][0].shape == (2,)
    assert utilities.get_shape(nested)["a"][0] == [2]
    assert utilities.convert_to_fp32(nested)["a"][1][0].dtype == torch.float32
    assert utilities.find_batch_size(nested) == 2
    assert utilities.ignorant_find_batch_size({"a": "text"}) is None
    assert utilities.find_device(["text", {"x": half}]) == torch.device("cpu")
    assert utilities.find_device(3) is None
    assert utilities.concatenate([nested["a"][:1], nested["a"][:1]])[0].tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert utilities.pad_input_tensors(torch.ones(5, 2), 5, 4).shape == (8, 2)
    for wrong in ([], "text", torch.tensor(1)):
        with pytest.raises(ConfigurationError, match="one entry per sample"):
            utilities.find_batch_size(wrong)
    with pytest.raises(ConfigurationError, match="takes tensors"):
        utilities.concatenate(["a", "b"])


def test_send_to_device_leaves_skipped_keys() -> None:
    batch = {"x": torch.ones(1), "deep": [{"y": torch.ones(1), "x": torch.ones(1)}]}
    moved = utilities.send_to_device(batch, "meta", non_blocking=False, skip_keys=["y"])
    assert [
        one.device.type
        for one in (moved["x"], moved["deep"][0]["y"], moved["deep"][0]["x"])
    ] == [
        "meta",
        "cpu",
        "meta",
    ]
    assert batch["x"].device.type == "cpu"


def test_numbers_names_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [utilities.convert_bytes(size) for size in (5, 2000, 1024**6)] == [
        "5 bytes",
        "1.95 KB",
        "1024.0 PB",
    ]
    assert [
        utilities.convert_file_size_to_int(text) for text in ("3MB", "2KiB", "8Gb", 7)
    ] == [
        3_000_000,
        2048,
        10**9,
        7,
    ]
    assert [utilities.get_pretty_name(one) for one in (nn.Linear, nn.Linear(1, 1))] == [
        "Linear",
        "Linear",
    ]
    assert [utilities.str_to_bool(word) for word in ("Yes", "off")] == [1, 0]
    assert utilities.str_to_bool("t", to_bool=True) is True
    with pytest.raises(ConfigurationError, match="expected a boolean"):
        utilities.str_to_bool("maybe")
    monkeypatch.setenv("FIRST_OF_TWO", "4")
    assert utilities.get_int_from_env(["NONE_OF_TWO", "FIRST_OF_TWO"], 1) == 4
    assert utilities.parse_choice_from_env("NONE_OF_TWO", "no") == "no"
    assert utilities.DynamoBackend("INDUCTOR") is utilities.DynamoBackend.INDUCTOR
    assert str(utilities.RNGType.TORCH) == "torch"
    assert (
        pickle.loads(pickle.dumps(utilities.PrecisionType.BF16))
        is utilities.PrecisionType.BF16
    )
    assert utilities.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    port = utilities.get_free_port()
    assert 0 < port < 65536


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE_ALL", "1")
    with (
        pytest.raises(KeyError, match="NOT_THERE"),
        utilities.patch_environment(before_all=2, new_one=3),
    ):
        assert (
            os.environ.pop("BEFORE_ALL") + os.environ["NEW_ONE"]
            == os.environ["NOT_THERE"]
        )
    assert os.environ["BEFORE_ALL"] == "1"
    assert "NEW_ONE" not in os.environ
    with utilities.clear_environment():
        assert "BEFORE_ALL" not in os.environ
        os.environ["INSIDE"] = "1"
    assert os.environ["BEFORE_ALL"] == "1"
    assert "INSIDE" not in os.environ

    @utilities.purge_accelerate_environment
    class Tests:
        def test_one(self) -> None:
            os.environ["ACCELERATE_ONE"] = "1"

    Tests().test_one()
    assert "ACCELERATE_ONE" not in os.environ


def test_loading_by_one_process_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of Accelerate 1.15, which transformers reads."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "False")
    utilities.enable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    # A user's own value stays.
    assert os.environ["ACCELERATE_USE_FSDP"] == "False"
    del os.environ["ACCELERATE_USE_FSDP"]
    utilities.enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == "True"
    utilities.disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
    assert os.environ["ACCELERATE_USE_FSDP"] == "True"


def test_a_variable_that_a_shell_would_interpret_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="is left out") as told:
        lines = utilities.convert_dict_to_env_variables(
            {"A": "1", "BAD": "x; y", "EMPTY": "", "B": "2"}
        )
    assert lines == ["A=1\n", "B=2\n"]
    assert [str(warning.message) for warning in told] == [
        f"the environment variable '{name}' is left out: its name or value is empty, or has a space, a newline or one"
        " of ; < >"
        for name in ("BAD", "EMPTY")
    ]


def test_probes_report_installed_packages() -> None:
    assert probes.is_tensorboard_available()
    assert probes.is_tqdm_available()
    assert not probes.is_msamp_available()
    assert not probes.is_habana_gaudi1()
    assert probes.is_cuda_available() is torch.cuda.is_available()  # type: ignore[attr-defined]
    assert probes.is_npu_available(check_device=True) is hasattr(torch, "npu")  # type: ignore[attr-defined]
    assert not hasattr(probes, "is_nothing_available")
    assert probes.is_torch_version(">=", "2.0")
    assert not probes.compare_versions("torch", "<", "1.0")
    with pytest.raises(ConfigurationError, match="unknown comparison '=>'"):
        probes.is_torch_version("=>", "2.0")


def test_tensors_of_modules() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, bias=False)
    )
    names = [name for name, _ in modules.named_module_tensors(model, recurse=True)]
    assert names == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    modules.set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.device.type == "meta"
    assert isinstance(model[0].weight, nn.Parameter)
    with pytest.raises(ConfigurationError, match="has no values"):
        modules.set_module_tensor_to_device(model, "0.weight", "cpu")
    modules.set_module_tensor_to_device(
        model, "0.weight", "cpu", torch.ones(4, 3, dtype=torch.float64), "float16"
    )
    assert model[0].weight.dtype == torch.float16
    assert model[0].weight.requires_grad
    modules.set_module_tensor_to_device(model, "1.running_mean", "cpu", torch.ones(4))
    assert model[1].running_mean.tolist() == [1.0] * 4
    for name, value in (
        ("0.weights", None),
        ("9.weight", None),
        ("0.weight", torch.ones(1)),
    ):
        with pytest.raises(ConfigurationError):
            modules.set_module_tensor_to_device(model, name, "cpu", value)
    assert modules.get_max_layer_size(
        list(model.named_children()), {"0": 4, "1": 9, "2": 9}, []
    ) == (9, ["1", "2"])


def test_a_parameter_that_stays_on_its_device_stays_the_optimizers() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    held = list(layer.parameters())
    modules.set_module_tensor_to_device(layer, "weight", "cpu")
    with modules.align_module_device(layer, "cpu"):
        assert layer.weight is held[0]
    modules.add_hook_to_module(layer, modules.AlignDevicesHook("cpu"))
    assert all(
        one is before for one, before in zip(layer.parameters(), held, strict=True)
    )
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before - 0.5)


def test_tied_parameters_are_found_and_tied_again() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    tied = modules.find_tied_parameters(model)
    assert tied == [["a.weight", "b.weight"]]
    modules.set_module_tensor_to_device(model, "b.weight", "cpu", torch.zeros(2, 2))
    assert modules.find_tied_parameters(model) == []
    modules.retie_parameters(model, tied)
    assert model["b"].weight is model["a"].weight
    modules.check_tied_parameters_on_same_device(tied, {"": "cpu"})
    with pytest.raises(ConfigurationError, match="on several devices"):
        modules.check_tied_parameters_on_same_device(tied, {"a": 0, "b": "cpu"})


class Recorded(modules.ModelHook):
    def __init__(self, name: str, calls: list[str], no_grad: bool = False) -> None:
        self.name, self.calls, self.no_grad = name, calls, no_grad

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        self.calls.append(f"{self.name} before")
        return tuple(one + 1 for one in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append(f"{self.name} after")
        return output * 2

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append(f"{self.name} detached")
        return module


def test_hooks_of_modules() -> None:
    calls: list[str] = []
    layer = nn.Identity()
    modules.add_hook_to_module(layer, Recorded("a", calls))
    modules.add_hook_to_module(layer, Recorded("b", calls), append=True)
    assert isinstance(layer._hf_hook, modules.SequentialHook)
    assert layer(torch.ones(1)).tolist() == [12.0]
    modules.remove_hook_from_module(layer)
    assert calls == [
        "a detached",
        "a before",
        "b before",
        "a after",
        "b after",
        "a detached",
        "b detached",
    ]
    assert layer(torch.ones(1)).tolist() == [1.0]
    assert not hasattr(layer, "_hf_hook")


def test_a_hook_without_gradients_restores_them_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            raise KeyError

    model = modules.add_hook_to_module(Fails(), Recorded("a", [], no_grad=True))
    with pytest.raises(KeyError):
        model(torch.ones(1))
    assert torch.is_grad_enabled()
    linear = modules.add_hook_to_module(
        nn.Linear(1, 1), Recorded("a", [], no_grad=True)
    )
    assert not linear(torch.ones(1)).requires_grad
    assert torch.is_grad_enabled()


def test_weights_that_a_hook_offloads_are_there_in_the_forward() -> None:
    layer = nn.Linear(2, 1)
    expected, weight = layer(torch.ones(1, 2)), layer.weight.detach().clone()
    modules.add_hook_to_module(layer, modules.AlignDevicesHook("cpu", offload=True))
    assert modules.has_offloaded_params(layer)
    assert layer.weight.device.type == "meta"
    assert torch.equal(layer(torch.ones(1, 2)), expected)
    assert layer.weight.device.type == "meta"
    with modules.align_module_device(layer):
        assert torch.equal(layer.weight, weight)
    assert layer.weight.device.type == "meta"
    modules.remove_hook_from_submodules(nn.Sequential(layer))
    assert torch.equal(layer.weight, weight)
    assert layer.weight.requires_grad
    with modules.align_module_device(layer, "cpu"), torch.no_grad():
        layer.weight.zero_()
    assert not layer.weight.any()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn],
)
def test_weights_in_a_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "w": torch.tensor([[1.0, 0.0]]).to(dtype),
        "n": torch.tensor(1.0).to(dtype),
    }
    modules.offload_state_dict(tmp_path, state)
    found = modules.OffloadedWeightsLoader({"extra": torch.ones(1)}, tmp_path)
    assert sorted(found) == ["extra", "n", "w"]
    assert len(found) == 3
    for name, tensor in state.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].float(), tensor.float())
    assert [*modules.PrefixedDataset({"a.x": 1, "b.y": 2}, "a.")] == ["x"]


def test_weights_of_a_folder_go_into_a_model_on_meta(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    modules.offload_state_dict(tmp_path, layer.state_dict())
    with tk.init_empty_weights():
        empty = nn.Linear(2, 1)
    index = modules.OffloadedWeightsLoader(save_folder=tmp_path).index
    modules.load_offloaded_weights(empty, index, tmp_path)
    assert torch.equal(empty.weight, layer.weight)


def test_state_dicts_are_read_to_their_devices(tmp_path: Path) -> None:
    torch.save(
        {"a.weight": torch.ones(1), "b.weight": torch.ones(1)}, tmp_path / "weights.bin"
    )
    found = modules.load_state_dict(
        tmp_path / "weights.bin", {"a": "meta", "b": "disk"}
    )
    assert [found[name].device.type for name in ("a.weight", "b.weight")] == [
        "meta",
        "cpu",
    ]
    assert torch.equal(
        utilities.load(tmp_path / "weights.bin")["a.weight"], torch.ones(1)
    )


def test_results_of_prepare_are_recognized() -> None:
    _, _, optimizer, loader, scheduler = parts()
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert isinstance(loader, script_names.DataLoaderShard)
    assert not isinstance(loader, script_names.DataLoaderDispatcher)
    assert not isinstance(DataLoader(DATA), script_names.DataLoaderShard)
    assert isinstance(tk.skip_first_batches(loader, 1), script_names.SkipDataLoader)
    with pytest.raises(
        ConfigurationError, match="a DataLoaderShard is created by prepare"
    ):
        script_names.DataLoaderShard(DATA)


def test_the_state_is_the_newest_accelerator() -> None:
    forget_newest()
    assert not script_names.is_initialized()
    accelerator, *_ = parts(mixed_precision="bf16", gradient_accumulation_steps=2)
    state = script_names.AcceleratorState()
    assert script_names.is_initialized()
    assert state is accelerator
    assert isinstance(state, script_names.AcceleratorState)
    assert state.mixed_precision == "bf16"
    assert state.distributed_type == "NO"
    gradients = script_names.GradientState()
    assert gradients.num_steps == 2
    assert isinstance(gradients, script_names.GradientState)
    with accelerator.accumulate():
        assert not gradients.sync_gradients
    with pytest.raises(ConfigurationError, match="'fp16' after 'bf16'"):
        script_names.AcceleratorState(mixed_precision="fp16")
    for reset in (
        script_names.AcceleratorState._reset_state,
        accelerator.state._reset_state,
    ):
        script_names.AcceleratorState(cpu=True)
        reset(True)
        assert not script_names.is_initialized()
    PartialState._reset_state()
    assert script_names.AcceleratorState(cpu=True) is not accelerator
    assert isinstance(script_names.GradientState(), script_names.GradientState)


def test_models_are_unwrapped_and_saved(tmp_path: Path) -> None:
    accelerator, model, *_ = parts()
    assert script_names.extract_model_from_parallel(nn.DataParallel(model)) is model
    whole = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert isinstance(
        script_names.extract_model_from_parallel(whole, recursive=True)[0], nn.Linear
    )
    script_names.save_fsdp_model(None, accelerator, model, tmp_path)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    script_names.load_fsdp_model(None, accelerator, model, tmp_path)
    assert torch.equal(model.weight, before)
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        script_names.merge_fsdp_weights(
            tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged", safe
        )
        assert torch.equal(
            modules.load_state_dict(tmp_path / "merged" / name)["weight"], before
        )
    script_names.merge_fsdp_weights(
        tmp_path / "pytorch_model_fsdp_0",
        tmp_path / "merged",
        remove_checkpoint_dir=True,
    )
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()
    script_names.save(
        {"w": before}, tmp_path / "w.safetensors", safe_serialization=True
    )
    assert torch.equal(modules.load_state_dict(tmp_path / "w.safetensors")["w"], before)
    with pytest.raises(ConfigurationError, match="adapter_only=True"):
        script_names.save_fsdp_model(
            None, accelerator, model, tmp_path, adapter_only=True
        )


def test_trackers_by_name(tmp_path: Path) -> None:
    tracker = script_names.TensorBoardTracker("run", tmp_path)
    tracker.log({"loss": 1.0}, step=0)
    tracker.finish()
    assert isinstance(tracker, script_names.TensorBoardTracker)
    assert isinstance(tracker, LoggerTracker)
    assert not isinstance(tracker, script_names.WandBTracker)
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_shares_of_samplers_and_streams() -> None:
    def shares(total: int, **options: Any) -> list[list[list[int]]]:
        sampler = BatchSampler(
            range(total), options.pop("batch_size", 2), options.pop("drop_last", False)
        )
        made = [
            loaders.BatchSamplerShard(sampler, 2, rank, **options) for rank in (0, 1)
        ]
        found = [list(one) for one in made]
        assert [len(one) for one in found] == [len(one) for one in made]
        return found

    assert shares(5) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert shares(5, even_batches=False) == [[[0, 1], [4]], [[2, 3]]]
    assert shares(7, drop_last=True) == [[[0, 1]], [[2, 3]]]
    assert shares(3, split_batches=True) == [[[0], [2]], [[1], [0]]]
    assert shares(0) == [[], []]
    with pytest.raises(ConfigurationError, match="batch_size=3 over 2"):
        shares(3, batch_size=3, split_batches=True)
    stream = loaders.IterableDatasetShard(range(5), 2, num_processes=2, process_index=1)
    assert list(DataLoader(stream, batch_size=2))[1].tolist() == [1, 2]


def test_handlers_return_their_options() -> None:
    handler = tk.DistributedDataParallelKwargs(
        find_unused_parameters=True, comm_hook="fp16"
    )
    assert handler.to_kwargs() == {"find_unused_parameters": True}
    assert tk.GradScalerKwargs(init_scale=2.0).to_dict()["init_scale"] == 2.0
    plugin = tk.TorchDynamoPlugin(
        backend=utilities.DynamoBackend.EAGER, use_regional_compilation=True
    )
    assert plugin.to_kwargs() == {"backend": "eager"}
    tk.FullyShardedDataParallelPlugin().set_auto_wrap_policy(nn.Linear(1, 1))
    model = script_names.compile_regions(nn.Linear(1, 1), backend="eager")
    assert model(torch.ones(1)).shape == (1,)


def check_two_processes() -> None:
    rank = PartialState().process_index
    accelerator, model, _, loader, _ = parts()
    assert [len(loader), len(list(loader))] == [3, 3]
    assert isinstance(loader, script_names.DataLoaderShard)
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=1))
    assert isinstance(stream, script_names.DataLoaderDispatcher)
    assert script_names.extract_model_from_parallel(model) is model.module
    alone = script_names.prepare_data_loader(
        DataLoader(DATA, batch_size=5), None, 2, rank, put_on_device=True
    )
    assert [batch[0].flatten().tolist() for batch in alone] == [
        [5.0 * rank + i for i in range(5)]
    ]
    with pytest.raises(
        ConfigurationError, match=f"process 0 of 3 in process {rank} of 2"
    ):
        script_names.prepare_data_loader(DataLoader(DATA), None, 3, 0)
    copied = script_names.copy_tensor_to_devices(torch.tensor([7]) if rank else None)
    assert copied.tolist() == [7]
    with pytest.raises(ConfigurationError, match="2 have one"):
        script_names.copy_tensor_to_devices(torch.ones(1))
    torch.manual_seed(rank)
    script_names.synchronize_rng_state(utilities.RNGType.TORCH)
    assert len(set(tk.gather_object([torch.rand(1).item()]))) == 1
    assert list(script_names.tqdm([1, 2], file=open(os.devnull, "w"))) == [1, 2]  # noqa: SIM115
    assert script_names.tqdm([1]).disable is bool(rank)
    script_names.wait_for_everyone()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_processes() -> None:
    check_two_processes()


def test_write_basic_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainer_kit.commands.config import write_basic_config
    from trainer_kit.launch.configuration import read_configuration

    for name in ("config.yaml", "config.json"):
        path = write_basic_config("bf16", tmp_path / name)
        assert path
        assert read_configuration(path)
        assert write_basic_config("no", tmp_path / name) is False
        assert "bf16" in Path(path).read_text()
    with pytest.raises(ConfigurationError, match="'int3'"):
        write_basic_config("int3", tmp_path / "other.yaml")
