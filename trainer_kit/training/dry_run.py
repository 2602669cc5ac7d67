"""Encodes the state of a fit before its first step, so that state that cannot be saved is an error then."""

from __future__ import annotations

from typing import Protocol

from trainer_kit.checkpoint.encoding import encode
from trainer_kit.core.collective_errors import fail_together, on_rank_zero
from trainer_kit.state.collect import SavedState, collect, plain_hparams
from trainer_kit.step.run import Fit
from trainer_kit.training.session import Session

__all__ = ["check_saveable"]


class _HasState(Protocol):
    """A callback or a datamodule."""

    def state_dict(self) -> SavedState: ...


def check_saveable(trainer: Session, run: Fit) -> None:
    """Raise an error for state that no checkpoint can hold.

    This does not call ``on_save_checkpoint``, whose source is read, and does not see state that only training creates.
    """
    callbacks = [callback for callback in trainer.callbacks if _has_state(callback)]
    datamodule = None
    if _has_state(trainer.datamodule):
        datamodule = trainer.datamodule
    state = collect(
        run, callbacks, datamodule, trainer.data_seed, weights_only=False, hooks=False
    )

    def encode_state(state: SavedState) -> None:
        if run.strategy.sharded:
            # Rank 0 alone has the entries of all ranks.
            fail_together(
                run.strategy.world,
                lambda: bool(encode(state, {}, copy=False, sharded=True)),
            )
            return
        # Rank 0 writes; an engine that gathers its state has it only there.
        on_rank_zero(run.strategy.world, lambda: bool(encode(state, {}, copy=False)))

    owners = [*trainer.callbacks, trainer.datamodule, trainer.module]
    owners = [owner for owner in owners if owner is not None]
    trainer.unsaveable.check(state, owners, encode_state)
    run.windows.feed.loader_state.check_first(
        lambda first: encode({"loaders": first}, {}, copy=False)
    )
    refused = plain_hparams(trainer.module.hparams)[1]
    if refused:
        trainer.say(
            f"hyperparameters that a checkpoint holds by their repr only: {', '.join(refused)}"
            " (load_from_checkpoint will ask for them)"
        )


def _has_state(owner: _HasState | None) -> bool:
    try:
        return bool(owner is not None and owner.state_dict())
    # Of any class, from the user's code; the first save raises it again.
    except Exception:
        return False
