"""`check_strategy` passes who trains as one process does, and names the check that somebody else fails."""

from __future__ import annotations

import pytest

from trainer_kit.strategies import DDPStrategy
from trainer_kit.testing import check_strategy


class Doubles(DDPStrategy):  # type: ignore[misc]  # final: a wrong copy of it is wanted here
    """A strategy that is wrong about what its engine divides by."""

    @property
    def gradient_divisor(self) -> int:
        return 2 * super().gradient_divisor


@pytest.mark.slow
def test_a_wrong_strategy_is_found_out() -> None:
    with pytest.raises(AssertionError, match="not close") as caught:
        check_strategy(Doubles, only=["frozen_parts"])
    assert any("check: frozen_parts" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_a_right_one_passes() -> None:
    check_strategy(DDPStrategy, only=["frozen_parts"])
    check_strategy(DDPStrategy, only=["token_weights"], precision="32-true")
