"""The mesh axes of an `Accelerator`, and the ranks on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor

from trainer_kit.compat.parallelism import ParallelismConfig
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.context import dividing

__all__ = ["ParallelRanks"]


@final
class ParallelRanks:
    """The ranks of this process on the mesh axes.

    Args:
        strategy: the strategy, which may have a mesh.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._checked = False  # whether attention was checked in a step with sharded sequences

    @property
    def config(self) -> ParallelismConfig | None:
        """The sizes of the mesh axes; None for data parallelism alone."""
        if not self._divides_more_than_data:
            return None
        mesh: Any = self._strategy.mesh
        sizes = {f"{axis}_size": size for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)}
        return ParallelismConfig(**sizes, plan=self._strategy.plan)

    @property
    def data_rank(self) -> int:
        """The data shard that this process reads; on a mesh the index of its model replica."""
        return self.rank("dp_replicate") if self._divides_more_than_data else self._strategy.data.rank

    def rank(self, axis: str) -> int:
        """Return the rank of this process on an axis; 0 if there is no such axis."""
        mesh = self._strategy.mesh
        return 0 if mesh is None or axis not in (mesh.mesh_dim_names or ()) else mesh.get_local_rank(axis)

    @property
    def _divides_more_than_data(self) -> bool:
        """Whether the mesh has the axes of a `ParallelismConfig`."""
        mesh = self._strategy.mesh
        return mesh is not None and "tp" in (mesh.mesh_dim_names or ())

    @contextmanager
    def divided_sequences(
        self, buffers: Sequence[Tensor], dims: Sequence[int], not_restored: Collection[Tensor]
    ) -> Iterator[None]:
        """Shard buffers along the context axis in this context; without such an axis, do nothing."""
        mesh = self._strategy.mesh
        if mesh is None or not self._divides_more_than_data or mesh["cp"].size() == 1:
            yield
            return
        first = not self._checked
        self._checked = True
        with dividing(mesh["cp"], buffers, dims, not_restored, checked=first):
            yield
