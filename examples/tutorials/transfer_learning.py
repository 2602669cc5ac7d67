"""Transfer learning for images: train a network on one task, and fine-tune it on another with few labels.

    python examples/tutorials/transfer_learning.py

The data comes with scikit-learn: images of handwritten digits. The network is trained on clean scans, and
then has to read noisy photographs, with four labeled images per digit. Nothing is downloaded; the script takes a few
seconds.
"""

# %% [markdown]
# ## Two tasks
#
# The first task has 900 labeled images and plays the role of ImageNet. The second has forty; its images have half the
# contrast, and noise. No image is used in both tasks.

# %%
from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.callbacks import BackboneFinetuning

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
LABELED = 4  # images of each digit, in the second task


def loader(images: Tensor, labels: Tensor, shuffle: bool = False) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=shuffle)


generator = torch.Generator().manual_seed(1)
noisy = 0.5 * images + 0.5 * torch.rand(images.shape, generator=generator)
order = torch.randperm(len(images), generator=generator)
first, second = order[:900], order[900:]
places = [second[labels[second] == digit] for digit in range(10)]
few = torch.cat([place[:LABELED] for place in places])
rest = torch.cat([place[LABELED:] for place in places])

# %% [markdown]
# ## The module
#
# The reused part is named `backbone`, which the callback below looks for; `head` is new for each task. With torchvision
# a backbone takes two lines: `backbone = torchvision.models.resnet18(weights="DEFAULT")`, and `backbone.fc =
# nn.Identity()`, which leaves 512 features for the head.
#
# The optimizer gets only the parameters that require gradients; the callback adds the backbone's parameters when it
# unfreezes them.


# %%
def features() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(),
    )  # fmt: skip


class Classifier(tk.TrainModule):
    def __init__(self, backbone: nn.Module, lr: float) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(64, 10)
        self.lr = lr

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("test_acc", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


# %% [markdown]
# ## The first task
#
# In your project, pretrained weights that you download replace this step.

# %%
tk.seed_everything(0)
backbone = features()
trainer = tk.Trainer(max_epochs=6, logger=False, enable_checkpointing=False)
trainer.fit(
    Classifier(backbone, lr=2e-3), loader(images[first], labels[first], shuffle=True)
)
pretrained = {name: value.clone() for name, value in backbone.state_dict().items()}

# %% [markdown]
# ## The second task, three times
#
# The three runs are: training from scratch; a frozen backbone, where only the head is trained; and a backbone that is
# frozen for 20 epochs and then trained with a twentieth of the head's learning rate. The head is trained first because
# its random weights would send large gradients into the backbone and destroy the pretrained features.


# %%
def second_task(start: dict[str, Tensor] | None, callback: tk.Callback | None) -> float:
    tk.seed_everything(0)
    backbone = features()
    if start is not None:
        backbone.load_state_dict(start)
    trainer = tk.Trainer(
        max_epochs=40,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callback,
        log_every_n_steps=1,
    )
    module = Classifier(backbone, lr=1e-2)
    trainer.fit(module, loader(noisy[few], labels[few], shuffle=True))
    (values,) = trainer.test(module, loader(noisy[rest], labels[rest]), verbose=False)
    return values["test_acc"]


never, after_20 = 1000, 20
results = {
    "from scratch": second_task(None, None),
    "frozen backbone": second_task(pretrained, BackboneFinetuning(never)),
    "fine-tuned": second_task(
        pretrained,
        BackboneFinetuning(
            after_20, lambda_func=lambda epoch: 1.0, backbone_initial_ratio_lr=0.05
        ),
    ),
}
for name, accuracy in results.items():
    print(f"{name}: accuracy {accuracy:.3f} on {len(rest)} images")

# %% [markdown]
# On your data, choose by validation score: with few labels a frozen backbone is hard to beat; with more labels
# fine-tuning is better. If the tasks have little in common, training from scratch can be better than both.
# `LayerWiseUnfreezing` trains one named part after the other ([freeze layers](../howto/freeze-layers.md)).
