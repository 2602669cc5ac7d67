"""Accelerate's own test scripts, from its wheel, after ``trainer-kit migrate``: each check on one and on two processes.

What differs is the table in docs/guide/raw-loops.md, and each of its lines is one of `DIFFERENT`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trainer_kit.commands.main import main

FOUND = importlib.util.find_spec("accelerate")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        FOUND is None,
        reason="needs the package accelerate, whose test scripts these are",
    ),
]

DRIVER = """
import importlib, os, sys, types, warnings
import torch
warnings.resetwarnings()
warnings.simplefilter("default")  # the scripts are not written for -W error
torch.set_num_threads(1)
for name in ("datasets", "evaluate"):  # of test_metrics, which uses them on GPUs alone
    made = sys.modules[name] = types.ModuleType(name)
    made.load_dataset = made.utils = None
script = importlib.import_module(sys.argv[1])
exec(sys.argv[2], vars(script))
print("passed")
"""
# Its data, its model, and what compares tensors: no part of a training script.
HELPERS = ("__init__.py", "testing.py", "training.py")
EDITS = {
    "test_ddp_comm_hook.py": {
        "        device_ids=[accelerator.local_process_index],\n": "",  # torch refuses it for a model on the CPU
        "        output_device=accelerator.local_process_index,\n": "",
    },
    "test_merge_weights.py": {
        "AcceleratorState._shared_state != {}": "False",  # private
        # Under FSDP2 the weights in a model are DTensors, which torch does not compare with tensors.
        "    for weight_1, weight_2 in zip(state_1.values(), state_2.values()):\n": (
            "    for weight_1, weight_2 in zip(state_1.values(), state_2.values()):\n"
            "        weight_1 = weight_1.full_tensor() if hasattr(weight_1, 'full_tensor') else weight_1\n"
        ),
    },
}

SCRIPT = "accelerator = Accelerator(); state = accelerator.state; "
BOTH, ONE, TWO = (1, 2), (1,), (2,)
NO_ARGUMENTS: dict[str, dict[str, tuple[int, ...]]] = {
    "test_script": {
        **dict.fromkeys(
            (
                *(
                    "init_state_check",
                    "process_execution_check",
                    "test_split_between_processes_list",
                ),
                *(
                    "test_split_between_processes_nested_dict",
                    "test_split_between_processes_tensor",
                ),
                *(
                    "test_split_between_processes_evenly",
                    "rng_sync_check",
                    "dl_preparation_check",
                ),
                *(
                    "central_dl_preparation_check",
                    "custom_sampler_check",
                    "check_seedable_sampler",
                ),
                *(
                    "check_seedable_sampler_with_data_seed",
                    "test_trigger",
                    "test_reinstantiated_state",
                ),
            ),
            BOTH,
        ),
        "check_seedable_sampler_in_batch_sampler_shard": TWO,
    },
    "test_distributed_data_loop": dict.fromkeys(
        (
            *(
                "test_default_ensures_even_batch_sizes",
                "test_can_disable_even_batches",
                "test_can_join_uneven_inputs",
            ),
            *(
                "test_join_can_override_even_batches",
                "test_join_can_override_for_mixed_type_dataloaders",
            ),
            *(
                "test_join_raises_warning_for_iterable_when_overriding_even_batches",
                "test_pickle_accelerator",
            ),
        ),
        TWO,
    ),
    "test_notebook": {
        "test_can_initialize": BOTH,
        **dict.fromkeys(
            (
                "test_clean_cuda_fork",
                "test_static_rdzv_backend",
                "test_c10d_rdzv_backend",
            ),
            TWO,
        ),
        # The last one fails under Accelerate, too, on one process.
        **dict.fromkeys(
            ("test_fault_tolerant", "test_monitoring", "test_problematic_imports"), TWO
        ),
    },
    "test_metrics": {"test_gather_for_metrics_drop_last": BOTH},
    "test_cli": {"main": BOTH},
}
OPS = "gather gather_object gather_non_contiguous broadcast pad_across_processes reduce_sum reduce_mean reduce_max "
LOADERS = {
    "shuffle": "DataLoader(DummyDataset(), shuffle={}, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)",
    "batch_sampler": "DataLoader(DummyDataset(), batch_sampler=BatchSampler(RandomSampler(DummyDataset()), "
    "batch_size=BATCH_SIZE, drop_last=False), num_workers=NUM_WORKERS)",
    "sampler": "DataLoader(DummyDataset(), sampler=BatchSampler(RandomSampler(DummyDataset()), batch_size=BATCH_SIZE, "
    "drop_last=False), batch_size=None, collate_fn=default_collate, num_workers=NUM_WORKERS)",
}
HOOKS = [
    *(("NO", "NO", {}), ("FP16", "NO", {}), ("BF16", "NO", {})),
    *(("POWER_SGD", "NO", {}), ("POWER_SGD", "FP16", {}), ("POWER_SGD", "BF16", {})),
    ("POWER_SGD", "NO", {"matrix_approximation_rank": 2}),
    *(
        ("BATCHED_POWER_SGD", "NO", {}),
        ("BATCHED_POWER_SGD", "FP16", {}),
        ("BATCHED_POWER_SGD", "BF16", {}),
    ),
]
MERGE = """
model, plugin, accelerator = setup()
path = Path("merged")
path.mkdir(exist_ok=True)
model = mock_training(accelerator, model)
accelerator.wait_for_everyone()
save_fsdp_model(plugin, accelerator, model, path)
accelerator.wait_for_everyone()
{}(model, path)
"""


def checks() -> list[tuple[str, str, int]]:
    """Script, statement and number of processes of every check that the scripts' own ``main`` calls."""
    found: list[tuple[str, str, int]] = []

    def add(script: str, statement: str, counts: tuple[int, ...] = BOTH) -> None:
        found.extend((script, statement, count) for count in counts)

    for script, names in NO_ARGUMENTS.items():
        for name, counts in names.items():
            add(script, f"{name}()", counts)
    for seedable in (False, True):
        add("test_script", f"training_check(use_seedable_sampler={seedable})")
    add("test_sync", "test_dataloader_break()")
    add("test_sync", "test_noop_sync(accelerator)", ONE)
    for name in ("test_distributed_sync", "test_distributed_sync_multiple_fwd"):
        add("test_sync", f"{name}(accelerator)", TWO)
    for options in product(
        (False, True), repeat=3
    ):  # all but the first of these need GPUs under Accelerate
        add("test_sync", f"test_gradient_accumulation{options}", TWO)
        add(
            "test_sync",
            f"test_gradient_accumulation_with_opt_and_scheduler{options}",
            TWO if any(options) else BOTH,
        )
    for name in (OPS + "op_checker copy_tensor_to_devices").split():
        add("test_ops", f"test_{name}(state)")
    other = "accelerator.state.distributed_type = DistributedType.FSDP"
    add(
        "test_distributed_data_loop",
        f"{other}; test_join_raises_warning_for_non_ddp_distributed(accelerator)",
        TWO,
    )
    for loader in (
        LOADERS["shuffle"].format(False),
        LOADERS["shuffle"].format(True),
        *list(LOADERS.values())[1:],
    ):
        add(
            "test_distributed_data_loop",
            f"test_data_loader({loader}, accelerator)",
            TWO,
        )
    for name in ("test_stateful_dataloader", "test_stateful_dataloader_save_state"):
        add("test_distributed_data_loop", f"{name}(accelerator)", TWO)
    for hook, wrapper, state in HOOKS:
        kind = "DDPCommunicationHookType"
        add(
            "test_ddp_comm_hook",
            f"test_ddp_comm_hook({kind}.{hook}, {kind}.{wrapper}, {state})",
        )
    for split, dispatch in product((True, False), repeat=2):
        config = f"DataLoaderConfiguration(split_batches={split}, dispatch_batches={dispatch})"
        add(
            "test_metrics",
            f"test_torch_metrics(Accelerator(dataloader_config={config}), 99)",
        )
    add("test_metrics", "test_torch_metrics(Accelerator(), 512)")
    for name in ("safetensors", "command_safetensors", "pytorch", "command_pytorch"):
        add("test_merge_weights", MERGE.format(f"test_merge_weights_{name}"), TWO)
    return found


def prelude(script: str) -> str:
    """What a script's ``main`` does ahead of its checks."""
    if script in (
        "test_cli",
        "test_notebook",
        "test_merge_weights",
        "test_ddp_comm_hook",
    ):
        return ""
    if script == "test_ops":
        return "state = PartialState()\n"
    if script == "test_distributed_data_loop":
        return "accelerator = create_accelerator(); torch.manual_seed(accelerator.process_index)\n"
    return "accelerator = Accelerator(); state = accelerator.state\n"


def name_of(check: tuple[str, str, int]) -> str:
    script, statement, count = check
    line = statement.strip().splitlines()[-1]
    return f"{script}-{line.replace('DDPCommunicationHookType.', '')}-{count}"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The migrated scripts beside the driver."""
    assert FOUND is not None
    assert FOUND.origin is not None
    theirs = Path(FOUND.origin).parent / "test_utils"
    place = tmp_path_factory.mktemp("scripts")
    (place / "helpers").mkdir()
    for name in HELPERS:
        text = (theirs / name).read_text("utf-8")
        text = text.replace("from ..", "from accelerate.").replace(
            "from .scripts", "# from .scripts"
        )
        (place / "helpers" / name).write_text(text, "utf-8")
    for path in (
        *theirs.glob("scripts/test_*.py"),
        theirs / "scripts" / "external_deps" / "test_metrics.py",
    ):
        shutil.copy(path, place)
    result = CliRunner().invoke(main, ["migrate", str(place), "--write"])
    assert result.exit_code == 0, result.output
    for path in place.glob("test_*.py"):
        text = path.read_text("utf-8").replace("trainer_kit.test_utils", "helpers")
        for old, new in EDITS.get(path.name, {}).items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
    (place / "driver.py").write_text(DRIVER)
    return place


DIFFERENT = {
    "test_reinstantiated_state": "DID NOT RAISE",
    "test_join_raises_warning_for_non_ddp_distributed": "",
    "test_pickle_accelerator": "AssertionError",
}
"""A part of the statement, and of the error; the guide has the reason for each."""


def different(statement: str, count: int) -> str | None:
    """The error of a check that differs here, or None."""
    return next((error for part, error in DIFFERENT.items() if part in statement), None)


def test_every_difference_is_in_the_guide() -> None:
    guide = (
        Path(__file__).resolve().parents[2] / "docs" / "guide" / "raw-loops.md"
    ).read_text("utf-8")
    found = {
        part: sum(part in statement for _, statement, _ in checks())
        for part in DIFFERENT
    }
    rows = {
        part: next((row for row in guide.splitlines() if f"`{part}` |" in row), "")
        for part in DIFFERENT
    }
    assert all(found.values()), found
    assert all(rows.values()), rows
    assert all("| private: " in row for row in rows.values()), rows
    assert (
        f"{len(checks()) - sum(found.values())} of {len(checks())} checks pass" in guide
    )


@pytest.mark.parametrize("check", checks(), ids=name_of)
def test_a_check_of_accelerate(
    check: tuple[str, str, int], scripts: Path, programs: Any
) -> None:
    script, statement, count = check
    words = (scripts / "driver.py", script, prelude(script) + statement)
    if script == "test_notebook":
        environment = {**os.environ, "ACCELERATE_NUM_PROCESSES": str(count)}
        ended = [programs.run(*words, environment=environment, timeout=60)]
    else:
        ended = programs.run_ranks(count, *words, timeout=60)
    passed = [
        each.returncode == 0 and each.stdout.endswith("passed\n") for each in ended
    ]
    text = "\n".join(each.stdout[-2000:] + each.stderr[-4000:] for each in ended)
    error = different(statement, count)
    if error is None:
        assert all(passed), text
    else:
        assert not any(passed), (
            f"this check passes now: take it out of DIFFERENT and of the guide\n{text}"
        )
        assert error in text, text
