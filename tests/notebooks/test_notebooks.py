"""A notebook is executed as Jupyter executes it: `make test-notebooks` installs what that needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.timeout(400)

SETUP = """
import torch
import trainer_kit as tk
from torch import nn
class Model(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean(), prog_bar=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = [torch.randn(8, 4)] * 4
options = {"accelerator": "cpu", "enable_checkpointing": False}
"""
CELLS = {
    "setup": SETUP,
    "epochs": """
trainer = tk.Trainer(max_epochs=400, max_steps=1502, **options)
trainer.fit(Model(), data, data)
""",
    "history": """
shown = [trainer, trainer.lightning_module, trainer.history, trainer.report, trainer.callbacks[0]]
for each in shown:
    display(each)
assert len(trainer.history.to_pandas()) == len(trainer.history)
""",
    "forked": """
tk.Trainer(max_epochs=2, devices=2, strategy="ddp_notebook", **options).fit(Model(), data)
""",
    "rich": """
bar = tk.callbacks.RichProgressBar()
tk.Trainer(max_epochs=2, callbacks=[bar], **options).fit(Model(), data)
""",
    "without ipywidgets": """
import trainer_kit.core.notebook
trainer_kit.core.notebook._import_widget_bar = lambda: None
bar = tk.callbacks.RichProgressBar()
tk.Trainer(max_epochs=20, **options).fit(Model(), data)
tk.Trainer(max_epochs=20, callbacks=[bar], **options).fit(Model(), data)
""",
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook of CELLS, executed."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    directory = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook,
        timeout=200,
        startup_timeout=200,
        resources={"metadata": {"path": str(directory)}},
    )
    return client.execute()


def outputs(notebook: Any, name: str) -> list[Any]:
    """The outputs of a cell, as a notebook shows them: adjacent texts are one. None is on standard error."""
    cell = notebook.cells[list(CELLS).index(name)]
    merged: list[Any] = []
    for output in cell.outputs:
        assert output.get("name") != "stderr", output
        if merged and {merged[-1].output_type, output.output_type} == {"stream"}:
            merged[-1].text += output.text
        else:
            merged.append(copy.deepcopy(output))
    return merged


def widget_values(notebook: Any) -> list[str]:
    """The texts of all widgets at the end."""
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]
    models = state["state"].values()
    texts = [str(model["state"].get("value", "")) for model in models]
    return [text.replace("\u2007", " ") for text in texts]


def test_a_fit_has_one_bar_between_its_summary_and_its_result(executed: Any) -> None:
    summary, sanity_check, bar, result = outputs(executed, "epochs")
    assert "5         total params" in summary["text"]
    assert "Sanity check" in sanity_check["data"]["text/plain"]
    assert "Epoch 0/399" in bar["data"]["text/plain"]
    assert result["text"].startswith("fit: 1502 steps to step 1502")
    values = widget_values(executed)
    assert "Epoch 375/399:  50%" in values
    assert any(
        "2/4" in value and "val_loss=" in value and ", loss=" in value
        for value in values
    )
    styles = [
        model["state"].get("bar_style")
        for model in executed.metadata.widgets[
            "application/vnd.jupyter.widget-state+json"
        ]["state"].values()
    ]
    assert "danger" not in styles, "a fit that stops inside an epoch has not failed"


def test_objects_are_shown_as_html(executed: Any) -> None:
    trainer, module, history, report, callback = [
        output["data"]["text/html"] for output in outputs(executed, "history")
    ]
    assert "steps" in trainer
    assert "Linear" in module
    assert "val_loss" in history
    assert report.startswith("<iframe sandbox=")
    assert "max_depth" in callback


def test_forked_processes_draw_a_line_of_text(executed: Any) -> None:
    texts = [output["text"] for output in outputs(executed, "forked")]
    text = "".join(texts)
    assert text.index("total params") < text.index("\rEpoch 0/1") < text.index("fit: ")


def test_rich_draws_a_widget(executed: Any) -> None:
    kinds = [output["output_type"] for output in outputs(executed, "rich")]
    assert kinds[0] == kinds[-1] == "stream"
    assert "display_data" in kinds
    assert len(kinds) <= 6


def test_without_ipywidgets_the_line_is_text(executed: Any) -> None:
    (output,) = outputs(executed, "without ipywidgets")
    # What a carriage return overwrites is not shown.
    shown = [line.split("\r")[-1] for line in output["text"].split("\n")]
    bars = [line for line in shown if line.startswith("Epoch")]
    assert len(bars) == 2
    for bar in bars:
        assert bar.startswith("Epoch 19/19: 100%|")
        assert "4/4" in bar
        assert "loss=" in bar
