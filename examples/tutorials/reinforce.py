"""Teach a policy to balance a pole: the data come from the policy that is being trained.

    python examples/tutorials/reinforce.py

It needs no package for reinforcement learning: the environment is written here. On two CPU cores it takes a few
seconds.
"""

# %% [markdown]
# ## The environment
#
# A pole stands on a cart; the policy pushes the cart to the left or to the right. The cart-pole of Barto, Sutton and
# Anderson (1983) in tensors, so that many episodes run at once. Each step that the pole stands gives a reward of 1, for
# 200 steps at most.

# %%
from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping

LIMIT = 200


def begin(episodes: int, generator: torch.Generator | None = None) -> Tensor:
    """The first states, shape (episodes, 4): position, its speed, angle, its speed."""
    return torch.rand(episodes, 4, generator=generator) * 0.1 - 0.05


def push(state: Tensor, action: Tensor) -> Tensor:
    """The states 20 ms later, when action 0 pushes to the left and 1 to the right."""
    x, v, angle, w = state.unbind(1)
    force, sin, cos = 20.0 * action - 10.0, angle.sin(), angle.cos()
    common = (force + 0.05 * w**2 * sin) / 1.1
    turning = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    moving = common - 0.05 * turning * cos / 1.1
    return torch.stack(
        [x + 0.02 * v, v + 0.02 * moving, angle + 0.02 * w, w + 0.02 * turning], dim=1
    )


def stands(state: Tensor) -> Tensor:
    return (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < math.radians(12))


@torch.no_grad()
def play(
    state: Tensor, choose: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Episodes from these states: states (steps, n, 4), actions (steps, n), and whether the pole stood (steps, n)."""
    states, actions, alive = [], [], [torch.ones(len(state), dtype=torch.bool)]
    while len(states) < LIMIT and alive[-1].any():
        action = choose(state)
        states.append(state)
        actions.append(action)
        state = push(state, action)
        alive.append(alive[-1] & stands(state))
    return torch.stack(states), torch.stack(actions), torch.stack(alive[:-1])


# %% [markdown]
# ## Data that the model makes
#
# A dataset is anything that can be iterated. This one plays 16 episodes with the policy as it is now, and gives their
# steps, each with what is still to be earned after it. An epoch is 5 such batches.


# %%
class Episodes(IterableDataset):
    def __init__(self, policy: nn.Module, episodes: int = 16, batches: int = 5) -> None:
        self.policy, self.episodes, self.batches = policy, episodes, batches

    def sample(self, state: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=self.policy(state)).sample()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self.batches):
            states, actions, alive = play(begin(self.episodes), self.sample)
            rewards = alive.float()
            returns = torch.zeros_like(rewards)
            later = torch.zeros(self.episodes)
            for step in reversed(range(len(rewards))):
                later = returns[step] = rewards[step] + 0.99 * later
            kept = returns[alive]
            yield {
                "state": states[alive],
                "action": actions[alive],
                "advantage": (kept - kept.mean()) / (kept.std() + 1e-6),
                "reward": rewards.sum(0).mean(),
            }


# %% [markdown]
# ## The module
#
# The policy gradient: actions that earned more than the average become more likely. In validation the policy takes the
# likelier action, from a fixed set of first states.


# %%
class Policy(tk.TrainModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, state: Tensor) -> Tensor:
        return self.net(state)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        chances = torch.distributions.Categorical(logits=self(batch["state"]))
        self.log("reward", batch["reward"], prog_bar=True)
        self.log("entropy", chances.entropy().mean())
        return -(chances.log_prob(batch["action"]) * batch["advantage"]).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _, _, alive = play(batch, lambda state: self(state).argmax(1))
        self.log("val_reward", alive.float().sum(0).mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


# %% [markdown]
# ## Training
#
# A loader without workers is read when its batch is needed, never ahead: each batch is played by the policy as the last
# step left it. (Workers would play with a copy of the first policy, so `num_workers` stays 0.) `batch_size=None` tells
# the DataLoader that the dataset gives whole batches.
#
# `EarlyStopping` with a threshold ends the run when the pole stands during nearly all of the 200 steps in validation.

# %%
tk.seed_everything(0)
policy = Policy()
trainer = tk.Trainer(
    accelerator="cpu",  # episodes of a few numbers each: a GPU would only wait
    max_epochs=30,
    gradient_clip_val=1.0,
    callbacks=EarlyStopping(
        "val_reward", mode="max", patience=15, stopping_threshold=195.0
    ),
    default_root_dir="runs",
    log_every_n_steps=1,
)
firsts = begin(64, torch.Generator().manual_seed(1))
evaluation = DataLoader(firsts, batch_size=64)
(before,) = trainer.validate(policy, evaluation, verbose=False)
trainer.fit(policy, DataLoader(Episodes(policy), batch_size=None), evaluation)
(after,) = trainer.validate(policy, evaluation, verbose=False)
trainer.print(
    f"steps that the pole stands: {before['val_reward']:.0f} before, {after['val_reward']:.0f} after training"
)
trainer.print(f"curves: {trainer.log_dir}/report.html")

# %% [markdown]
# *Why does the reward in the progress bar jump?* It is that of one batch of 16 episodes with sampled actions; in the
# report, set the smoothing to see its trend.
#
# *How do I use several processes?* With `devices=2` alone each process plays every batch and trains on every second
# one, as with any stream. To let each play its own episodes, pass `use_distributed_sampler=False`, and seed each
# process differently: `torch.manual_seed(self.trainer.global_rank)` in `on_train_start`. A process that has no batch
# left waits for the others with weight 0 ([streams](../guide/data.md)).
#
# *How do I write an algorithm with several losses or its own steps?* With `automatic_optimization = False`
# ([the GAN](gan.md)), or with an `Accelerator` in a loop of your own ([custom training loops](../guide/raw-loops.md)).
