"""Compiled submodules leave no trace in saved names, and compiled and plain models load each other; `strict=False`."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch import nn

import trainer_kit as tk
from trainer_kit.callbacks import EMAWeightAveraging
from trainer_kit.checkpoint import export, read_checkpoint, read_weights

BATCHES = [torch.full((2, 4), float(i)) / 4 for i in range(1, 5)]
NAMES = ["net.0.bias", "net.0.weight", "net.1.inner.bias", "net.1.inner.weight"]


class Outer(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        inner = nn.Linear(4, 1)
        self.inner = torch.compile(inner, backend="eager") if compiled else inner

    def forward(self, x):
        return self.inner(x)


class Net(tk.TrainModule):
    """With a compiled submodule inside a compiled submodule."""

    def __init__(self, compiled=False, name="net"):
        super().__init__()
        self.save_hyperparameters()
        net = nn.Sequential(nn.Linear(4, 4), Outer(compiled))
        self.add_module(name, torch.compile(net, backend="eager") if compiled else net)
        self.name = name

    def training_step(self, batch, batch_idx):
        return self.get_submodule(self.name)(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(module, steps=2, ckpt_path=None, callbacks=(), **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = tk.Trainer(
        **{
            **quiet,
            "devices": 1,
            "max_steps": steps,
            "callbacks": list(callbacks),
            **options,
        }
    )
    trainer.fit(module, BATCHES, ckpt_path=ckpt_path)
    return trainer


def make(compiled, seed=0):
    torch.manual_seed(seed)
    return Net(compiled)


def weights_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal_weights(first, second):
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_and_plain_modules_continue_each_other(compiled, tmp_path):
    module = make(compiled)
    fit(module, callbacks=[EMAWeightAveraging(decay=0.5)]).save_checkpoint(
        tmp_path / "c"
    )
    state = read_checkpoint(tmp_path / "c")
    assert "_orig_mod" not in (tmp_path / "c" / "state.json").read_text()
    assert sorted(state["model"]) == NAMES
    assert sorted(state["optimizer_states"][0]["state"]) == NAMES
    export(tmp_path / "c", tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert sorted(file.keys()) == NAMES
    loaded = Net.load_from_checkpoint(tmp_path / "c", compiled=not compiled)
    assert_equal_weights(loaded.parameters(), module.parameters())
    whole, resumed = make(compiled), make(not compiled, seed=1)
    fit(whole, 4, callbacks=[EMAWeightAveraging(decay=0.5)])
    fit(resumed, 4, tmp_path / "c", callbacks=[EMAWeightAveraging(decay=0.5)])
    assert_equal_weights(resumed.parameters(), whole.parameters())


def test_a_checkpoint_with_the_names_of_wrappers_is_continued(tmp_path):
    fit(make(False)).save_checkpoint(tmp_path / "c")
    state = read_checkpoint(tmp_path / "c")

    def wrapped(name):
        return name.replace("net.", "net._orig_mod.").replace(
            "inner.", "inner._orig_mod."
        )

    [optimizer] = state["optimizer_states"]
    optimizer["state"] = {
        wrapped(name): value for name, value in optimizer["state"].items()
    }
    for group in optimizer["param_groups"]:
        group["params"] = [wrapped(name) for name in group["params"]]
    state["model"] = {wrapped(name): value for name, value in state["model"].items()}
    tk.checkpoint.write_checkpoint(
        tmp_path / "old", state, info={"step": 2, "epoch": 0}
    )
    for compiled in (True, False):
        whole, resumed = make(False), make(compiled, seed=1)
        fit(whole, 4)
        fit(resumed, 4, tmp_path / "old")
        assert_equal_weights(resumed.parameters(), whole.parameters())
    export(state["model"], tmp_path / "w.safetensors")
    assert sorted(read_weights(tmp_path / "w.safetensors")) == NAMES


def test_a_compiled_train_module_is_fitted_and_its_step_is_compiled(tmp_path):
    plain = make(False)
    fit(plain)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    module = make(False)
    compiled = torch.compile(module, backend=backend)
    trainer = fit(compiled)
    assert trainer.lightning_module is module
    assert graphs
    assert_equal_weights(module.parameters(), plain.parameters())
    trainer.save_checkpoint(tmp_path / "c")
    assert sorted(read_checkpoint(tmp_path / "c")["model"]) == NAMES
    trainer.validate(
        torch.compile(Validates(), backend="eager"), BATCHES, verbose=False
    )
    assert trainer.callback_metrics["val"] == 1.0
    fit(module)  # later fits of the plain module do not compile
    assert trainer.explain(compiled, BATCHES)


class Validates(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)


@pytest.mark.world_size(2)
def test_names_under_ddp_and_fsdp(tmp_path):
    for strategy in ("ddp", "fsdp"):
        module = make(True)
        fit(module, strategy=strategy, devices=2).save_checkpoint(tmp_path / strategy)
        assert sorted(read_checkpoint(tmp_path / strategy)["model"]) == NAMES
        resumed, whole = make(False, seed=1), make(False)
        fit(resumed, 4, tmp_path / strategy, strategy=strategy, devices=2)
        fit(whole, 4, strategy=strategy, devices=2)
        for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one, other)


# torch warns of the hook that checks the first call of a prepared model, if another one is compiled before that call.
@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global hooks on modules"
)
def test_an_accelerator_saves_plain_names_and_loads_them(tmp_path):
    for compiled in (True, False):
        accelerator = tk.Accelerator(cpu=True)
        model = accelerator.prepare(make(compiled))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        accelerator.backward(model.training_step(BATCHES[0], 0))
        optimizer.step()
        accelerator.save_model(model, tmp_path / f"model-{compiled}")
        accelerator.save_state(tmp_path / f"state-{compiled}")
        assert sorted(read_weights(tmp_path / f"model-{compiled}")) == NAMES
        assert sorted(accelerator.get_state_dict(model)) == NAMES
        assert (
            "_orig_mod"
            not in (tmp_path / f"state-{compiled}" / "state.json").read_text()
        )
        accelerator.free_memory()
        other = accelerator.prepare(make(not compiled, seed=1))
        accelerator.prepare(torch.optim.AdamW(other.parameters(), lr=0.1))
        accelerator.load_state(tmp_path / f"state-{compiled}")
        assert_equal_weights(other.parameters(), model.parameters())
        other = make(not compiled, seed=2)
        tk.load_checkpoint_in_model(other, tmp_path / f"model-{compiled}", strict=True)
        assert_equal_weights(other.parameters(), model.parameters())
        accelerator.free_memory()


# -- strict=False ------------------------------------------------------------------------------------------------------

DIFFERENCE = (
    r"strict=False; not in the checkpoint, so the module keeps its own values: new\.0\.bias, new\.0\.weight,"
    r" new\.1\.inner\.bias, new\.1\.inner\.weight \(keys: 4\); only in the checkpoint, so not loaded: net\.0\.bias"
)


class Loose(Net):
    strict_loading = False


def test_weights_that_are_not_loaded_are_named_wherever_loading_is_not_strict(tmp_path):
    trainer = fit(make(False))
    trainer.save_checkpoint(tmp_path / "c")
    with pytest.warns(UserWarning, match=DIFFERENCE):
        Net.load_from_checkpoint(tmp_path / "c", strict=False, name="new")
    with pytest.warns(UserWarning, match=DIFFERENCE):
        trainer.fit(
            Loose(name="new"), BATCHES, ckpt_path=tmp_path / "c", load_weights_only=True
        )
    with pytest.warns(UserWarning, match=DIFFERENCE):
        trainer.predict(Predicts(name="new"), BATCHES, ckpt_path=tmp_path / "c")
    accelerator = tk.Accelerator(cpu=True)
    accelerator.prepare(Net(name="net"))
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(Net(name="new"))
    with pytest.warns(UserWarning, match=DIFFERENCE):
        accelerator.load_state(tmp_path / "state", strict=False)
    accelerator.free_memory()
    fabric = tk.Fabric(accelerator="cpu", devices=1)
    fabric.save(tmp_path / "fabric", {"model": fabric.setup(Net(name="net"))})
    with pytest.warns(UserWarning, match=DIFFERENCE):
        fabric.load(
            tmp_path / "fabric", {"model": fabric.setup(Net(name="new"))}, strict=False
        )


class Predicts(Loose):
    def predict_step(self, batch, batch_idx):
        return 0


def test_the_line_is_bounded_and_there_is_none_if_all_weights_are_loaded(
    tmp_path, recwarn
):
    fit(make(False)).save_checkpoint(tmp_path / "c")
    Net.load_from_checkpoint(tmp_path / "c", strict=False)
    assert not recwarn.list
    many = Net()
    many.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(50))
    trainer = fit(many)
    trainer.save_checkpoint(tmp_path / "many")
    with pytest.warns(UserWarning, match=r"and 95 more \(keys: 100\)") as caught:
        Net.load_from_checkpoint(tmp_path / "many", strict=False)
    assert len(str(caught[0].message)) < 400


@pytest.mark.world_size(2)
def test_names_are_reported_under_fsdp(tmp_path):
    fit(make(False), strategy="fsdp", devices=2).save_checkpoint(tmp_path / "c")
    rank = torch.distributed.get_rank()
    module = Loose()
    module.head = nn.Linear(1, 1)
    if rank == 0:
        with pytest.warns(
            UserWarning,
            match=r"keeps its own values: head\.bias, head\.weight \(keys: 2\)",
        ):
            trained(module, tmp_path / "c")
    else:
        trained(module, tmp_path / "c")


def trained(module, path):
    trainer = tk.Trainer(
        strategy="fsdp",
        devices=2,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, BATCHES, ckpt_path=path, load_weights_only=True)
