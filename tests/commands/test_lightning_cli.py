"""`LightningCLI`: the programs of Lightning's documentation, with other imports."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, TensorDataset
from trainer_kit.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    SaveConfigCallback,
    instantiate_class,
)

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint
from trainer_kit.loggers import CSVLogger

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Data(tk.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        points = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(
            TensorDataset(points, points.sum(1, keepdim=True)),
            batch_size=self.batch_size,
        )

    val_dataloader = test_dataloader = train_dataloader


class Net(tk.LightningModule):
    def __init__(
        self, width: int = 4, batch_size: int = 0, optim: dict | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    test_step = validation_step


class Trained(Net):
    def configure_optimizers(self):
        if self.hparams.optim:
            return instantiate_class(self.parameters(), self.hparams.optim)
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("own", [False, True])
def test_lightnings_plateau_names_its_value(own):
    class CLI(LightningCLI):
        @staticmethod
        def configure_optimizers(lightning_module, optimizer, lr_scheduler=None):
            assert isinstance(lr_scheduler, ReduceLROnPlateau)
            return LightningCLI.configure_optimizers(
                lightning_module, optimizer, lr_scheduler
            )

    plateau = {"monitor": "val_loss", "factor": 0.25, "patience": 0, "threshold": 100.0}
    config = {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "lr_scheduler": {
            "class_path": "trainer_kit.cli.ReduceLROnPlateau",
            "init_args": plateau,
        },
        "trainer": {**QUIET, "max_epochs": 3, "logger": False},
    }
    Path("plateau.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    made = (CLI if own else LightningCLI)(
        Net, Data, args=["fit", "--config", "plateau.yaml"]
    )
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        0.1 * 0.25**3
    )


def test_values_from_the_environment(monkeypatch):
    Path("file.yaml").write_text(
        "model: {width: 5, batch_size: 6}\ntrainer: {max_epochs: 7}\n", encoding="utf-8"
    )
    monkeypatch.setenv("PL_CONFIG", "file.yaml")
    monkeypatch.setenv("PL_MODEL__WIDTH", "8")

    def made(words, **options):
        cli = LightningCLI(
            Trained,
            Data,
            run=False,
            args=words,
            trainer_defaults=QUIET,
            parser_kwargs=options,
        )
        return (
            cli.model.hparams.width,
            cli.model.hparams.batch_size,
            cli.trainer.max_epochs,
        )

    assert made(["--trainer.max_epochs=9"], default_env=True) == (8, 6, 9)
    assert made(["--trainer.max_epochs=9"]) == (4, 0, 9)
    monkeypatch.setenv("APP_MODEL__WIDTH", "3")
    assert made(["--trainer.max_epochs=9"], default_env=True, env_prefix="APP") == (
        3,
        0,
        9,
    )


@pytest.mark.parametrize("prefix", ["PL_FIT__", "PL_VALIDATE__"])
def test_values_of_a_command_from_the_environment(prefix, monkeypatch):
    class Recording(tk.Trainer):
        def fit(self, model, **given):
            seen.append((model.hparams.width, self.max_epochs))

    seen = []
    monkeypatch.setenv(f"{prefix}MODEL__WIDTH", "8")
    monkeypatch.setenv(f"{prefix}TRAINER__MAX_EPOCHS", "6")
    LightningCLI(
        Trained,
        Data,
        trainer_class=Recording,
        args=["fit"],
        parser_kwargs={"default_env": True},
    )
    assert seen == [(8, 6) if prefix == "PL_FIT__" else (4, tk.Trainer().max_epochs)]


def plain(seed=0, epochs=2, rate=0.1, decay=1.0, batch_size=4):
    """The weights after a loop by hand."""
    tk.seed_everything(seed)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for _ in range(epochs):
        for batch in Data(batch_size).train_dataloader():
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
        schedule.step()
    return module.state_dict()


def assert_equal(module, expected):
    assert all(
        torch.equal(value, expected[name])
        for name, value in module.state_dict().items()
    )


def words(*more, command="fit"):
    return [command, "--trainer.max_epochs=2", *more]


PROGRAM = """
from trainer_kit.cli import LightningCLI
from trainer_kit.demos.boring_classes import BoringDataModule, DemoModel


def cli_main():
    cli = LightningCLI(DemoModel, BoringDataModule)
    print("batches", cli.trainer.global_step)


if __name__ == "__main__":
    cli_main()
"""


@pytest.mark.slow
def test_the_program_of_the_documentation(tmp_path, programs):
    program = tmp_path / "main.py"
    program.write_text(PROGRAM)
    done = programs.run(
        program,
        "fit",
        "--trainer.limit_train_batches=3",
        "--trainer.max_epochs=1",
        "--model.out_dim=4",
    )
    assert "batches 3" in done.stdout, done.stderr
    wrong = programs.run(program, "fit", "--model.out_dims=4")
    assert wrong.returncode == 2
    assert (
        "main.py fit: --model.out_dims: unknown option, did you mean '--model.out_dim'?"
        in wrong.stderr
    )


def test_a_fit_has_the_weights_of_a_plain_loop():
    cli = LightningCLI(Trained, Data, trainer_defaults=QUIET, args=words())
    assert (cli.subcommand, cli.trainer.global_step) == ("fit", 12)
    assert_equal(cli.model, plain())


def test_an_optimizer_and_a_scheduler_are_chosen_by_options():
    options = (
        "--optimizer=SGD",
        "--optimizer.lr=0.1",
        "--lr_scheduler=ExponentialLR",
        "--lr_scheduler.gamma=0.5",
    )
    cli = LightningCLI(
        Net,
        Data,
        trainer_defaults=QUIET,
        seed_everything_default=7,
        args=words(*options),
    )
    assert_equal(cli.model, plain(seed=7, decay=0.5))


def test_classes_alone_with_run_false():
    cli = LightningCLI(
        Trained,
        Data,
        run=False,
        trainer_defaults=QUIET,
        args=["--trainer.max_epochs=2"],
    )
    assert (cli.subcommand, cli.config.trainer.max_epochs, cli.config.model.width) == (
        None,
        2,
        4,
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    assert_equal(cli.model, plain())
    assert cli.trainer.test(datamodule=cli.datamodule)[0]["val_loss"] >= 0


class MyCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(EarlyStopping, "my_early_stopping")
        parser.add_lightning_class_args(ModelCheckpoint, "my_checkpoint")
        parser.set_defaults(
            {"my_early_stopping.monitor": "val_loss", "my_early_stopping.patience": 5}
        )
        parser.set_defaults(
            {"trainer.max_epochs": 2, "my_checkpoint.filename": "mine-{epoch}"}
        )
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.add_argument("--notification_email", default="will@email.com")

    def before_instantiate_classes(self) -> None:
        self.calls = ["before_instantiate_classes"]

    def after_instantiate_classes(self) -> None:
        self.calls.append(f"model {self.model.batch_size}")

    def before_fit(self):
        self.calls.append(f"before_fit {self.config['fit']['notification_email']}")

    def after_fit(self):
        self.calls.append(f"after_fit {self.trainer.global_step}")


class Batched(Trained):
    def __init__(self, width: int = 4, batch_size: int = 0) -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.batch_size = batch_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_arguments_defaults_links_and_calls_around_a_command():
    cli = MyCLI(
        Batched, Data, trainer_defaults=QUIET, args=["fit", "--data.batch_size=8"]
    )
    assert cli.calls == [
        "before_instantiate_classes",
        "model 8",
        "before_fit will@email.com",
        "after_fit 6",
    ]
    stopping, keeper = (
        cli.trainer.early_stopping_callback,
        cli.trainer.checkpoint_callback,
    )
    assert (stopping.monitor, stopping.patience, Path(keeper.best_model_path).name) == (
        "val_loss",
        5,
        "mine-epoch=1",
    )
    assert len(cli.trainer.checkpoint_callbacks) == 1
    assert_equal(cli.model, plain(batch_size=8))


def test_an_optimizer_of_one_class_and_another_way_to_configure_it():
    class OneCLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(torch.optim.SGD)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

        @staticmethod
        def configure_optimizers(lightning_module, optimizer, lr_scheduler=None):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "interval": "epoch"},
            }

    cli = OneCLI(
        Net,
        Data,
        trainer_defaults=QUIET,
        args=words("--optimizer.lr=0.1", "--lr_scheduler.gamma=0.5"),
    )
    assert_equal(cli.model, plain(decay=0.5))


def test_an_optimizer_passed_as_an_argument():
    class LinkedCLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(
                torch.optim.SGD, nested_key="optim_one", link_to="model.optim"
            )

    cli = LinkedCLI(
        Trained, Data, trainer_defaults=QUIET, args=words("--optim_one.lr=0.2")
    )
    assert_equal(cli.model, plain(rate=0.2))


def test_two_optimizers_that_replace_the_modules_own():
    class TwoCLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(torch.optim.SGD, nested_key="one")
            parser.add_optimizer_args(torch.optim.SGD, nested_key="two")

    with pytest.raises(SystemExit) as left:
        TwoCLI(
            Net, Data, trainer_defaults=QUIET, args=words("--one.lr=1", "--two.lr=1")
        )
    assert left.value.code == 2


def cli_main(args: ArgsType = None):
    return LightningCLI(Net, Data, run=False, trainer_defaults=QUIET, args=args)


def test_values_in_place_of_words(capsys):
    cli = cli_main({"model": {"width": 5}, "trainer": {"max_epochs": 3}})
    assert (cli.model.hparams.width, cli.trainer.max_epochs) == (5, 3)
    with pytest.raises(SystemExit):
        cli_main({"model": {"widht": 5}})
    assert "widht" in capsys.readouterr().err


class NamedOnlyInTheseTests(Trained):
    """The name of a class suffices where only one class has it; other tests define a Data, too."""


def test_subclass_mode_and_data_by_choice():
    cli = LightningCLI(
        tk.LightningModule,
        subclass_mode_model=True,
        run=False,
        trainer_defaults=QUIET,
        args=[
            "--model=NamedOnlyInTheseTests",
            "--model.width=6",
            f"--data={__name__}.Data",
            "--data.batch_size=2",
        ],
    )
    found = type(cli.model), cli.model.hparams.width, cli.datamodule.batch_size
    assert found == (NamedOnlyInTheseTests, 6, 2)
    alone = LightningCLI(Trained, run=False, trainer_defaults=QUIET, args=[])
    assert alone.datamodule is None


def test_a_function_that_makes_the_module():
    def make(units: int = 4) -> Net:
        return Trained(width=units)

    cli = LightningCLI(
        make, Data, run=False, trainer_defaults=QUIET, args=["--model.units=7"]
    )
    assert cli.model.hparams.width == 7


def test_defaults_of_the_trainer_that_are_objects(tmp_path):
    stop = EarlyStopping("val_loss")
    defaults = {
        **QUIET,
        "callbacks": [stop],
        "logger": CSVLogger(tmp_path / "logs"),
        "max_epochs": 3,
    }
    cli = LightningCLI(Net, run=False, trainer_defaults=defaults, args=[])
    assert stop in cli.trainer.callbacks
    assert cli.trainer.logger is defaults["logger"]
    assert cli.trainer.max_epochs == 3
    without = LightningCLI(
        Net, run=False, trainer_defaults=defaults, args=["--trainer.logger=false"]
    )
    assert without.trainer.loggers == []


def test_a_trainer_that_a_subclass_makes():
    class Steps(LightningCLI):
        def instantiate_trainer(self, **kwargs):
            return super().instantiate_trainer(max_steps=5, **kwargs)

    class MyTrainer(tk.Trainer):
        pass

    cli = Steps(
        Trained, Data, trainer_class=MyTrainer, trainer_defaults=QUIET, args=words()
    )
    assert (type(cli.trainer), cli.trainer.global_step) == (MyTrainer, 5)


# -- the configuration ---------------------------------------------------------------------------------------------


def saved(cli):
    return sorted(path.name for path in Path(cli.trainer.log_dir).glob("*.yaml"))


def test_the_configuration_is_saved_and_read_again():
    defaults = {**QUIET, "logger": "csv"}
    first = LightningCLI(
        Trained, Data, trainer_defaults=defaults, args=words("--model.width=5")
    )
    assert saved(first) == ["config.yaml"]
    kept = Path(first.trainer.log_dir, "config.yaml")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert yaml.safe_load(kept.read_text())["seed_everything"] is True
    again = LightningCLI(
        Trained, Data, trainer_defaults=defaults, args=["fit", "-c", str(kept)]
    )
    assert_equal(again.model, first.model.state_dict())


def test_ways_to_save_the_configuration():
    class Logged(SaveConfigCallback):
        def save_config(self, trainer, pl_module, stage):
            trainer.logger.log_hyperparams(
                {"config": self.parser.dump(self.config, skip_none=False)}
            )

    defaults = {**QUIET, "logger": "csv"}
    cli = LightningCLI(
        Trained,
        Data,
        save_config_callback=Logged,
        save_config_kwargs={"config_filename": "name.yaml", "overwrite": True},
        trainer_defaults=defaults,
        args=words(),
    )
    assert saved(cli) == ["name.yaml"]
    assert "max_epochs: 2" in Path(cli.trainer.log_dir, "hparams.json").read_text()
    bare = LightningCLI(
        Trained,
        Data,
        save_config_callback=None,
        trainer_defaults=defaults,
        args=words(),
    )
    assert saved(bare) == []


def test_an_existing_file_is_kept_or_replaced(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    for options in ({}, {"overwrite": True}):
        cli = LightningCLI(
            Trained,
            Data,
            save_config_kwargs=options,
            trainer_defaults={
                **QUIET,
                "logger": False,
                "default_root_dir": str(tmp_path),
            },
            args=words(),
        )
        assert sorted(
            path.name for path in Path(cli.trainer.run_dir).glob("*.yaml")
        ) == [
            "config-2.yaml",
            "config.yaml",
        ]
    assert "max_epochs: 2" in (tmp_path / "config.yaml").read_text()


def test_a_configuration_in_several_files_is_refused():
    with pytest.raises(tk.ConfigurationError, match="one file"):
        SaveConfigCallback(None, None, multifile=True)


@pytest.mark.parametrize(
    "name", ["subcommands", "parse_arguments", "add_core_arguments_to_parser"]
)
def test_methods_that_are_never_called_are_refused(name):
    mine = type("Mine", (LightningCLI,), {name: lambda self, *args: {}})
    with pytest.raises(
        tk.ConfigurationError, match=rf"Mine\.{name} would never be called"
    ):
        mine(Net, run=False, args=[])


class Chosen(Net):
    """Lightning's documented way to take an optimizer and a schedule from the command line."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = ConstantLR,
    ) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [self.scheduler(optimizer)]


def test_an_optimizer_and_a_schedule_as_arguments():
    words = [
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.25",
        "--model.scheduler.factor=0.5",
    ]
    made = LightningCLI(
        Chosen,
        Data,
        trainer_defaults=QUIET,
        args=["fit", "--trainer.max_epochs=1", *words],
    )
    [optimizer] = made.trainer.optimizers
    assert (
        type(optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer)
        is torch.optim.SGD
    )
    assert optimizer.param_groups[0]["initial_lr"] == 0.25


class NeedsWidth(Net):
    def __init__(self, width: int) -> None:
        super().__init__()


def test_a_missing_argument_is_named_as_an_option_with_and_without_commands(capsys):
    for arguments in (
        {"run": False, "args": []},
        {"run": True, "args": ["fit"]},
    ):
        with pytest.raises(SystemExit):
            LightningCLI(NeedsWidth, trainer_defaults=QUIET, **arguments)
        assert "--model.width: required" in capsys.readouterr().err
