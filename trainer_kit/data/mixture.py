"""`mix`: several streams as one, in shares that hold at every sample and that may change on a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, SupportsFloat, TypeAlias, final

from trainer_kit.core.arguments import typed_function
from trainer_kit.core.errors import (
    CheckpointError,
    DataError,
)
from trainer_kit.core.types import JsonObject
from trainer_kit.data.division import divide_by_itself
from trainer_kit.data.order import derive_seed
from trainer_kit.data.source import kind_of
from trainer_kit.data.streams import (
    Cursor,
    CursorState,
    Draw,
    Sample,
    Stream,
    as_stream,
    passed_objects,
    size_below,
)

__all__ = ["Mixture", "mix"]

_Weights: TypeAlias = Mapping[str, float]
_WeightSchedule: TypeAlias = Callable[[int], _Weights]
"""Called with the number of samples that the mixture has drawn in this epoch."""
_Until: TypeAlias = "Literal['first', 'all'] | int | None"
_ENDS: Final = ("first", "all")


@typed_function
def mix(
    sources: Mapping[str, object],
    weights: Mapping[str, SupportsFloat]
    | Callable[[int], Mapping[str, float]]
    | None = None,
    *,
    seed: int = 0,
    until: _Until = "first",
    key: str | None = None,
) -> Mixture:
    """Return a stream that reads several sources in given shares.

    The next sample comes from the source that is furthest behind its share, so no prefix of the order depends on luck:
    after any number of samples a source has less than one sample more than its share, and less than ``1 + ln(n)`` fewer
    (n sources). With weights 0.7 and 0.3, the first 10 samples have 7 and 3. The order is a function of the arguments
    and the epoch, whatever the number of ranks.

    A source that ends begins again, with ``set_epoch`` one higher, if it has that method. The state holds three numbers
    for each source beside the source's own position.

    Args:
        sources: by name. A stream of this library, a map-style dataset or list (read in order: use
            `trainer_kit.data.shuffle` around it), or an iterable. An iterable continues from its own position if it has
            ``state_dict`` and ``load_state_dict``; otherwise a resume reads it from its start.
        weights: by name, not negative; only their ratios matter. None: equal. A function of the number of samples that
            were drawn returns weights that change: it must be at the top of a module where workers are spawned.
        seed: decides between sources that are equally far behind.
        until: where an epoch ends. ``"first"``: after the last sample of any source (``first_exhausted`` of Hugging
            Face's ``stopping_strategy``); ``"all"``: when each source was read at least once (``all_exhausted``); a
            number: after this many samples; None: never (use ``max_steps`` or ``limit_train_batches``). That an
            iterable or a packed stream has ended is known only when it is asked for another sample.
        key: the key under which each sample, a dict, gets the name of its source, for logs and losses by source.

    Returns:
        A stream for a ``DataLoader``, or for another function of `trainer_kit.data`.

    Raises:
        ConfigurationError: an argument of another type, such as a name that is no string.
        DataError: no sources, weights for other names or with a wrong value, one iterable in two sources; while
            reading: an empty source, or sources of which only some divide themselves among the ranks.

    Example:
        >>> mixture = mix({"web": ["w0", "w1", "w2"], "code": ["c0"]}, weights={"web": 3, "code": 1}, until=8)
        >>> list(mixture)
        ['w0', 'c0', 'w1', 'w2', 'w0', 'c0', 'w1', 'w2']
        >>> mixture.counts, mixture.epochs
        ({'web': 6, 'code': 2}, {'web': 1, 'code': 1})
    """
    if not sources:
        raise DataError(
            "a mixture needs at least one source",
            found="none",
        )
    is_number = isinstance(until, int) and until >= 0
    if until is not None and until not in _ENDS and not is_number:
        raise DataError(
            "an epoch of a mixture ends with the first or all of its sources, or after a number of samples",
            found=f"until={until!r}",
            fix='pass until="first", "all", a number, or None for no end',
        )
    streams = {name: as_stream(source) for name, source in sources.items()}
    _refuse_shared(streams)
    mixture = Mixture(
        streams,
        _as_floats(weights, streams),
        seed=seed,
        until=until,
        key=key,
    )
    shares = mixture.shares(0)
    # A schedule may raise the weight later; a constant weight of 0 would make the epoch endless.
    if until == "all" and not callable(weights) and 0 in shares.values():
        raise DataError(
            'with until="all" every source must be read',
            found=f"weights={weights}",
            fix="leave out the source with weight 0",
        )
    return mixture


def _as_floats(
    weights: Mapping[str, SupportsFloat] | _WeightSchedule | None, names: Iterable[str]
) -> _Weights | _WeightSchedule:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if callable(weights):
        return weights
    # A weight may be a tensor of one number.
    return {name: float(weight) for name, weight in weights.items()}


def _refuse_shared(streams: Mapping[str, Stream]) -> None:
    # Two sources would move one position.
    owners: dict[int, str] = {}
    for name, stream in streams.items():
        for source in passed_objects(stream):
            owner = owners.setdefault(id(source), name)
            if owner != name:
                raise DataError(
                    "two sources of a mixture read one object, which has one position and one epoch",
                    found=f"one {kind_of(source)} in {owner} and in {name}",
                    fix="make a dataset for each of them",
                )


@final
class Mixture(Stream):
    """The result of `mix`.

    Args:
        sources: the streams by name.
        weights: as in `mix`, for every source; a constant weight is a float.
        seed: as in `mix`.
        until: as in `mix`.
        key: as in `mix`.

    Attributes:
        sources: the streams by name.

    Example:
        >>> mixture = mix({"web": ["w0", "w1"], "code": ["c0"]}, weights={"web": 2, "code": 1}, until=3)
        >>> type(mixture).__name__, list(mixture)
        ('Mixture', ['w0', 'c0', 'w1'])
    """

    def __init__(
        self,
        sources: Mapping[str, Stream],
        weights: _Weights | _WeightSchedule,
        *,
        seed: int,
        until: _Until,
        key: str | None,
    ) -> None:
        super().__init__(*sources.values())
        self.sources = sources
        self.weights = weights
        self.seed = seed
        self.until = until
        self.key = key
        # As a list, in which a feed looks for sources that divide the data among ranks.
        self.datasets = list(sources.values())
        self._cursor: _MixtureCursor | None = None

    def __getstate__(self) -> dict[str, object]:
        # Without the newest pass, whose iterators cannot be pickled.
        return super().__getstate__() | {"_cursor": None}

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        self._check_divisions()
        # Kept for `counts` and `epochs`, which describe the newest pass.
        self._cursor = _MixtureCursor(
            self,
            epoch,
            state,
        )
        return self._cursor

    def _check_divisions(self) -> None:
        # At each pass: a dataset may read its rank only after the process group is there.
        divided = []
        for name, stream in self.sources.items():
            if divide_by_itself(stream) is not None:
                divided.append(name)
        undivided = [name for name in self.sources if name not in divided]
        if divided and undivided:
            raise DataError(
                "either all sources of a mixture shard themselves across ranks, or none",
                found=f"{', '.join(divided)} sharded, {', '.join(undivided)} read by every rank",
                fix="leave sharding to this library, or shard all of them",
            )

    def describe_mixtures(self) -> list[JsonObject]:
        shares: object = None
        if callable(self.weights):
            # An object that is called has no name of its own, and its repr contains its address.
            kind = type(self.weights)
            shares = getattr(self.weights, "__qualname__", kind.__qualname__)
        else:
            shares = self.shares(0)
        sizes = {name: size_below(stream) for name, stream in self.sources.items()}
        return [{"shares": shares, "sizes": sizes}, *super().describe_mixtures()]

    @property
    def counts(self) -> dict[str, int]:
        """Samples of each source in this pass: all that were drawn, for any worker.

        Workers count in their own processes: there, `key` shows the source of each sample.
        """
        if self._cursor is None:
            return dict.fromkeys(self.sources, 0)
        return self._cursor.counts()

    @property
    def epochs(self) -> dict[str, int]:
        """How often each source began again in this pass."""
        if self._cursor is None:
            return dict.fromkeys(self.sources, 0)
        return self._cursor.epochs()

    def shares(self, drawn: int) -> dict[str, float]:
        """Return the share of each source, from 0 to 1, after a number of samples.

        Args:
            drawn: samples of this pass.

        Raises:
            DataError: weights for other names, negative or not finite weights, or a sum of zero.
        """
        weights = self.weights
        if callable(weights):
            weights = weights(drawn)
        values = list(weights.values())
        wrong_value = any(not math.isfinite(value) or value < 0 for value in values)
        # Also for each result of a schedule: a wrong one is an error at the sample where it happens.
        if weights.keys() != self.sources.keys() or wrong_value or not sum(values):
            names = ", ".join(self.sources)
            raise DataError(
                "a mixture needs a weight for each source, not negative, and one above zero",
                found=f"weights={dict(weights)} for the sources {names}",
                fix="pass one weight for each source",
            )
        total = sum(values)
        return {name: weights[name] / total for name in self.sources}


@final
class _MixedSource:
    """One source in a pass of a mixture.

    Attributes:
        count: its samples so far.
        behind: by how many samples it is behind its share.
        epochs: how often it began again.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        state: CursorState,
    ) -> None:
        self.stream = stream
        self.count = 0
        self.behind = 0.0
        self.epochs = 0
        cursor_state = None
        if state is not None:
            self.count = state["count"]
            self.behind = state["behind"]
            self.epochs = state["epochs"]
            cursor_state = state["cursor"]
        self._epoch = epoch
        # Each pass of a source has its own epoch, so a small source is shuffled again each time.
        self._cursor = stream.open(epoch + self.epochs, cursor_state)

    def take(self) -> Draw | None:
        """Return the next draw, or None at the end of the source."""
        draw = next(self._cursor, None)
        if draw is not None:
            self.count += 1
            self.behind -= 1
        return draw

    def has_ended(self) -> bool:
        """Whether its pass has ended; a source without samples has not."""
        return self.count > 0 and self._cursor.has_ended()

    def was_read_once(self) -> bool:
        return self.epochs > 0 or self.has_ended()

    def begin_again(self) -> None:
        self.epochs += 1
        self._cursor = self.stream.open(self._epoch + self.epochs)

    def fall_behind(self, share: float) -> None:
        """Add the source's share of the next sample."""
        self.behind += share

    def state(self) -> CursorState:
        return {
            "count": self.count,
            "behind": self.behind,
            "epochs": self.epochs,
            "cursor": self._cursor.state(),
        }


@final
class _MixtureCursor(Cursor):
    def __init__(
        self,
        mixture: Mixture,
        epoch: int,
        state: CursorState,
    ) -> None:
        self._mixture = mixture
        self._drawn = 0
        states: Mapping[str, CursorState] = dict.fromkeys(mixture.sources)
        if state is not None:
            self._drawn = state["drawn"]
            states = state["sources"]
        # In any order: states are found by name.
        if states.keys() != mixture.sources.keys():
            raise CheckpointError(
                "loaders",
                None,
                f"the mixture has the sources {', '.join(mixture.sources)}, and had {', '.join(states)}",
                fix="resume with the same sources; a new one may begin with the next epoch",
            )
        self._sources = {}
        for name, stream in mixture.sources.items():
            self._sources[name] = _MixedSource(
                stream,
                epoch,
                states[name],
            )
        # The order of names decides between equals.
        names = list(mixture.sources)
        # A new ranking each epoch: with equal weights the same source would otherwise always come first.
        keys = [
            derive_seed(
                mixture.seed,
                epoch,
                number,
            )
            for number in range(len(names))
        ]
        self._ranking = [
            name
            for _, name in sorted(
                zip(
                    keys,
                    names,
                    strict=True,
                )
            )
        ]
        self._shares: dict[str, float] = {}
        if not callable(mixture.weights):
            self._shares = mixture.shares(0)
        ended = [name for name in names if self._sources[name].has_ended()]
        self._is_over = any(self._ends_with(name) for name in ended)

    def counts(self) -> dict[str, int]:
        return {name: source.count for name, source in self._sources.items()}

    def epochs(self) -> dict[str, int]:
        return {name: source.epochs for name, source in self._sources.items()}

    def has_ended(self) -> bool:
        until = self._mixture.until
        if isinstance(until, int):
            # A resumed mixture may have been longer.
            return self._drawn >= until
        return self._is_over

    def __next__(self) -> Draw:
        if self.has_ended():
            raise StopIteration
        # Asked for each sample only where weights are a function.
        shares = self._shares or self._mixture.shares(self._drawn)
        # The source that is furthest behind its share: counts never differ from the shares by a whole round, as random
        # draws would. A source whose weight a schedule has set to zero is not read, however far behind it is.
        name = max(
            self._ranking,
            key=lambda name: (
                shares[name] > 0,
                self._sources[name].behind + shares[name],
            ),
        )
        # Before the shares are added: at the end of the data nothing has changed.
        draw = self._take(name)
        for source_name, source in self._sources.items():
            source.fall_behind(shares[source_name])
        self._drawn += 1
        source = self._sources[name]
        self._is_over = source.has_ended() and self._ends_with(name)
        key = self._mixture.key
        if key is None:
            return draw
        return _NamedDraw(
            draw,
            key,
            name,
        )

    def _take(self, name: str) -> Draw:
        """Return the next draw of a source, from its start if it has ended."""
        source = self._sources[name]
        draw = source.take()
        if draw is not None:
            return draw
        # Without this check an empty source would begin again for ever.
        if not source.count:
            raise DataError(
                "a source of this mixture has no samples",
                found=f"{name}: {kind_of(source.stream)}",
                fix="leave it out",
            )
        if self._ends_with(name):
            raise StopIteration
        source.begin_again()
        draw = source.take()
        if draw is None:
            raise DataError(
                "a source of this mixture has no samples in its next epoch",
                found=f"{name}, epoch {source.epochs}",
                fix="pass an iterable that starts a new pass in __iter__",
            )
        return draw

    def _ends_with(self, name: str) -> bool:
        """Whether the pass ends, now that a source has ended."""
        if self._mixture.until == "first":
            return True
        if self._mixture.until != "all":
            return False
        unread = []
        for other_name, source in self._sources.items():
            if other_name != name and not source.was_read_once():
                unread.append(other_name)
        return not unread

    def state(self) -> CursorState:
        sources = {name: source.state() for name, source in self._sources.items()}
        return {"drawn": self._drawn, "sources": sources}


@final
class _NamedDraw:
    """Adds the name of its source to a sample."""

    def __init__(
        self,
        draw: Draw,
        key: str,
        name: str,
    ) -> None:
        self._draw = draw
        self._key = key
        self._name = name

    def __call__(self) -> Sample:
        sample = self._draw()
        if not isinstance(sample, Mapping):
            raise DataError(
                f"key={self._key!r} adds the name of its source to each sample, which must be a dict",
                found=f"{kind_of(sample)} from {self._name}",
                fix="leave key= out, or yield dicts",
            )
        return {**sample, self._key: self._name}
