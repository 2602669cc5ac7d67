"""Data for the steps: order and division of samples among ranks, and their transfer to the device.

For users: `shuffle`, `mix` and `pack` make streams of streams whose position is saved exactly,
and `token_budget` makes batches of about equal cost.
"""

from trainer_kit.data.budget import TokenBudget, token_budget
from trainer_kit.data.combined import MODES, CombinedLoader, is_tree, read_together
from trainer_kit.data.document_masks import document_mask, document_offsets
from trainer_kit.data.feed import Ahead, Feed
from trainer_kit.data.inexact import warn_if_inexact
from trainer_kit.data.mixture import Mixture, mix
from trainer_kit.data.order import EMPTY, MISSING
from trainer_kit.data.packing import pack
from trainer_kit.data.shuffled import shuffle
from trainer_kit.data.sizes import EpochLength, epoch_length, limit_batches
from trainer_kit.data.streams import Stream

__all__ = [
    "EMPTY",
    "MISSING",
    "MODES",
    "Ahead",
    "CombinedLoader",
    "EpochLength",
    "Feed",
    "Mixture",
    "Stream",
    "TokenBudget",
    "document_mask",
    "document_offsets",
    "epoch_length",
    "is_tree",
    "limit_batches",
    "mix",
    "pack",
    "read_together",
    "shuffle",
    "token_budget",
    "warn_if_inexact",
]
