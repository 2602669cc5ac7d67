"""Forecast the next day of hourly time series, and compare with a naive baseline.

    python examples/tutorials/time_series.py

It needs `pip install matplotlib` for the picture. On two CPU cores it takes about half a minute, and writes
`forecast.png`:

![Four days: the forecast is closer to the truth than the same hours of last week](../pictures/forecast.png)
"""

# %% [markdown]
# ## The data
#
# The data simulates electricity meters at twelve sites, with daily and weekly patterns, a drifting level and noise. Ten
# sites are used for training; two are held out. The last four weeks of all sites are used for testing.

# %%
from __future__ import annotations

import math
import sys

import matplotlib
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMALL = "--small" in sys.argv  # what the tests run: fewer weeks
DAY, WEEK = 24, 7 * 24
WEEKS = 26 if SMALL else 52


def sites(count: int, hours: int, generator: torch.Generator) -> Tensor:
    """Hourly values, shape (count, hours)."""

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    hour = torch.arange(hours)
    daily = draw(0.5, 1.5) * torch.sin(2 * math.pi * hour / DAY + draw(0, 6)).clamp(
        min=-0.5
    )
    weekend = -draw(0.3, 1.0) * ((hour // DAY) % 7 >= 5)
    wander = torch.randn(count, hours, generator=generator).mul(0.06).cumsum(1)
    drift = wander - wander.unfold(1, WEEK, 1).mean(2)[:, :1]
    level = draw(3, 6) + drift / (1 + drift.abs() / 2)
    return (
        level + daily + weekend + 0.15 * torch.randn(count, hours, generator=generator)
    )


values = sites(12, WEEKS * WEEK, torch.Generator().manual_seed(7))
validation_from, test_from = (WEEKS - 6) * WEEK, (WEEKS - 4) * WEEK


# %% [markdown]
# ## Windows
#
# A sample is a week of history and the following day. Training windows start at any hour. Validation and test windows
# start once a day, and their *targets* lie in their own time range, so no future value leaks into training.


# %%
class Windows(Dataset):
    def __init__(self, series: Tensor, first: int, last: int, every: int) -> None:
        self.series = series
        self.starts = range(max(first - WEEK, 0), last - WEEK - DAY + 1, every)

    def __len__(self) -> int:
        return len(self.series) * len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        site, number = divmod(index, len(self.starts))
        start = self.starts[number]
        return self.series[site, start : start + WEEK], self.series[
            site, start + WEEK : start + WEEK + DAY
        ]


class Sites(tk.DataModule):
    def setup(self, stage: str) -> None:
        known, unseen = values[:10], values[10:]
        self.train = Windows(known, 0, validation_from, every=11)
        self.later = Windows(known, validation_from, test_from, every=DAY)
        self.unseen = Windows(unseen, validation_from, test_from, every=DAY)
        self.test = Windows(values, test_from, WEEKS * WEEK, every=DAY)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=64, shuffle=True)

    def val_dataloader(self) -> list[DataLoader]:
        return [
            DataLoader(self.later, batch_size=256),
            DataLoader(self.unseen, batch_size=256),
        ]

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=256)


# %% [markdown]
# ## The module
#
# The level of each window is subtracted from the input, and the network's output is added to the naive forecast: *the
# same hours of last week*. So the network starts as good as the naive forecast and learns a correction.
#
# With several validation loaders, `validation_step` also receives the index of the loader. Each loader's metrics are
# logged separately: as `val_mae/dataloader_idx_0` and so on, or under your own names with `add_dataloader_idx=False`.


# %%
def naive(history: Tensor) -> Tensor:
    return history[:, -WEEK : -WEEK + DAY]


class Forecast(tk.TrainModule):
    def __init__(self, width: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(WEEK, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, DAY),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, history: Tensor) -> Tensor:
        return naive(history) + self.net(history - history.mean(1, keepdim=True))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        history, target = batch
        loss = (self(history) - target).abs().mean()
        self.log("train_mae", loss, prog_bar=True)
        return loss

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        history, target = batch
        name = ("val_mae", "val_mae_unseen")[dataloader_idx]
        self.log(
            name,
            (self(history) - target).abs().mean(),
            add_dataloader_idx=False,
            prog_bar=True,
        )

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        history, target = batch
        self.log("test_mae", (self(history) - target).abs().mean())
        self.log("test_mae_naive", (naive(history) - target).abs().mean())

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_mae_unseen"},
        }


# %% [markdown]
# ## Training with early stopping
#
# The learning rate is reduced when the held-out sites stop improving, and the run ends after four epochs without
# improvement. The last weights are then four epochs past the best ones, which `ModelCheckpoint` has saved.

# %%
tk.seed_everything(0)
trainer = tk.Trainer(
    max_epochs=40,
    callbacks=[
        EarlyStopping("val_mae_unseen", patience=4),
        ModelCheckpoint(monitor="val_mae_unseen"),
    ],
    default_root_dir="runs",
    log_every_n_steps=20,
)
data = Sites()
trainer.fit(Forecast(), datamodule=data)

# %% [markdown]
# ## Compare with the naive baseline
#
# A model is useful only if it beats the naive forecast. `test` loads the best checkpoint.

# %%
(results,) = trainer.test(datamodule=data, verbose=False)
trainer.print(
    f"mean absolute error {results['test_mae']:.3f}, of the naive forecast {results['test_mae_naive']:.3f}"
)

# %% [markdown]
# `predict` returns forecasts in dataset order; here, for one of the held-out sites.

# %%
days = Windows(values[11:], test_from, test_from + 4 * DAY, every=DAY)
forecast = torch.cat(
    trainer.predict(dataloaders=DataLoader(days, batch_size=64))
).flatten()
histories, truth = (torch.stack(part) for part in zip(*days, strict=True))

figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
axis.plot(truth.flatten(), color="black", linewidth=1, label="truth")
axis.plot(
    naive(histories).flatten(),
    color="tab:orange",
    linewidth=1,
    linestyle="--",
    label="same hours of last week",
)
axis.plot(forecast, color="tab:blue", label="forecast, a day at a time")
axis.set(xlabel="hours", ylabel="value", title="A site that was never seen in training")
figure.legend(loc="outside lower center", ncols=3, fontsize="small")
figure.savefig("forecast.png", dpi=80)
trainer.print(f"picture: forecast.png, curves: {trainer.log_dir}/report.html")

# %% [markdown]
# *Is `val_mae` correct although the last batch is smaller?* Yes: `self.log` weights each batch by its number of
# samples, and reduces over all processes ([logging](../guide/logging.md)).
#
# *How often should I validate?* Once an epoch is the default; `val_check_interval="200ba"` validates every 200 batches,
# and `"10min"` every ten minutes ([units](../guide/units.md)).
