"""`trainer-kit` itself."""

import pytest
import torch
from click.testing import CliRunner

import trainer_kit as tk
from trainer_kit.commands.main import main
from trainer_kit.testing import TinyModule


def test_the_version():
    shown = CliRunner().invoke(main, ["--version"])
    assert (shown.exit_code, shown.output) == (
        0,
        f"trainer-kit, version {tk.__version__}\n",
    )
    assert "--version" in CliRunner().invoke(main, ["--help"]).output


class Data(tk.DataModule):
    def train_dataloader(self):
        return [torch.randn(4, 32)] * 2


def test_a_script_finds_its_file_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("trainer:\n  max_epochs: 1\n  barebones: true\n")
    ran = tk.cli(TinyModule, Data, args=["fit", "--config=~/run.yaml"])
    assert ran.trainer.global_step == 2


def test_a_former_argument_of_the_trainer_on_a_command_line(capsys):
    with pytest.raises(SystemExit):
        tk.cli(TinyModule, Data, args=["fit", "--trainer.gpus=2"])
    assert (
        '--trainer.gpus: unknown option; instead of it: accelerator="gpu", devices=...'
        in capsys.readouterr().err
    )
