"""`pack`: documents of a stream in rows of one length, whose loss and attention stay inside each document."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from trainer_kit.core.arguments import typed_function
from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError
from trainer_kit.data.source import kind_of
from trainer_kit.data.streams import (
    Cursor,
    CursorState,
    Draw,
    ReplayedCursor,
    Sample,
    Stream,
    as_stream,
    integers_from_bytes,
    integers_to_bytes,
)

__all__ = ["pack"]

_Method: TypeAlias = Literal["fit", "cut"]
_Ids: TypeAlias = Literal["document", "row"]
_Row: TypeAlias = dict[str, Tensor]
_INTERVAL: Final = 64
"""Documents between two positions of the stream from which a resume may read again."""
_OLDEST: Final = 64
"""A row is yielded, full or not, after this many documents for each open row, so that a resume reads no more again."""


@typed_function
def pack(
    stream: object,
    tokens: int = 4096,
    *,
    method: _Method = "fit",
    ids: _Ids = "document",
    key: str = "input_ids",
    shift: bool = True,
    pad: int = 0,
    ignore: int = -100,
    open_rows: int = 64,
) -> Stream:
    """Return a stream of rows of ``tokens`` tokens, each with several documents.

    A row is a dict of int64 tensors of shape (tokens,): ``input_ids``, ``labels``, ``position_ids``, which begin at 0
    in each document, and ``document_ids``, which number the documents of the row. Give the model a mask of the document
    ids (`trainer_kit.data.document_mask`), or a Hugging Face model the positions: then a document does not see the
    others. No label crosses a border between documents, and each token with a predecessor in its document is a label
    once.

    Args:
        stream: yields documents: sequences of token ids, or dicts with them under ``key``. A dict may have ``labels``
            for its tokens (not shifted; ``ignore`` where a token is not to be learned).
        tokens: the length of a row (``seq_len``, ``block_size``).
        method: ``"fit"`` (best-fit packing): whole documents, each in the open row in which it leaves the least space;
            a row ends with padding, and only documents longer than a row are cut. ``"cut"`` (wrapped packing,
            concatenation and chunking): one document after the other, cut where a row ends, without padding except in
            the last row.
        ids: ``"document"``; ``"row"``: positions run through the row, without document ids, so that documents of a row
            see each other.
        key: where a dict has its tokens.
        shift: ``labels[t]`` is the token after t, for ``cross_entropy(logits, labels)``, also under context
            parallelism. False: ``labels[t]`` is token t, for models that shift themselves, as those of Hugging Face do.
        pad: the token that fills a row. Padding is a document of its own, without labels.
        ignore: the label without a loss.
        open_rows: rows that ``"fit"`` fills at the same time. More of them need less padding, and a resume reads more
            documents again: at most 65 for each row.

    Returns:
        A stream for a ``DataLoader``. Its state holds the positions of the documents in open rows.

    Raises:
        DataError: an unknown method, fewer than 2 tokens or 1 row; while reading: a sample that is no document.

    Example:
        >>> rows = list(pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], tokens=6))
        >>> [row["input_ids"].tolist() for row in rows]
        [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
        >>> rows[0]["labels"].tolist(), rows[0]["position_ids"].tolist(), rows[0]["document_ids"].tolist()
        ([2, 3, -100, 5, -100, -100], [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2])
        >>> [row["input_ids"].tolist() for row in pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], tokens=4, method="cut")]
        [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    """
    if method not in ("fit", "cut") or ids not in ("document", "row"):
        raise DataError(
            "documents are packed by fit or cut, with ids of each document or of the row",
            found=f"method={method!r}, ids={ids!r}",
            fix='pass method="fit" or "cut", ids="document" or "row"',
        )
    if tokens < 2 or open_rows < 1:
        raise DataError(
            "a row has at least 2 tokens, and at least one row is open",
            found=f"tokens={tokens}, open_rows={open_rows}",
        )
    layout = _Layout(
        tokens=tokens,
        ids=ids,
        key=key,
        shift=shift,
        pad=pad,
        ignore=ignore,
    )
    source = as_stream(stream)
    if method == "cut":
        return _CutStream(source, layout)
    return _FitStream(
        source,
        layout,
        open_rows,
    )


@final
@dataclass(
    frozen=True,
    kw_only=True,
)
class _Layout:
    """How a row is made of documents; `pack` documents the attributes."""

    tokens: int
    ids: _Ids
    key: str
    shift: bool
    pad: int
    ignore: int
    reported_keys: set[str] = field(
        default_factory=set,
        compare=False,
    )
    """Keys of documents that were named in a warning."""

    def document(self, draw: Draw) -> _Document:
        """Load a document.

        Raises:
            DataError: the sample is no sequence of token ids.
        """
        sample = draw()
        tokens = sample
        labels = None
        if isinstance(sample, Mapping):
            if self.key not in sample:
                raise DataError(
                    f"a document has no {self.key!r}",
                    found=f"a dict with {', '.join(map(str, sample))}",
                    fix="pass key=, the name of its tokens",
                )
            tokens = sample[self.key]
            labels = sample.get("labels")
            self._report_keys(sample)
        token_ids = _token_ids(tokens)
        if labels is None:
            return _Document(token_ids, token_ids)
        label_ids = _token_ids(labels)
        if len(label_ids) != len(token_ids):
            raise DataError(
                "a document needs one label for each token",
                found=f"{plural(len(token_ids), 'token')}, {plural(len(label_ids), 'label')}",
                fix=f"pass labels that are not shifted, with {self.ignore} where a token is not to be learned",
            )
        return _Document(token_ids, label_ids)

    def _report_keys(self, sample: Mapping[str, Sample]) -> None:
        """Warn once of each key of a document that rows do not have."""
        # Every worker packs all documents: one of them tells.
        worker_info = get_worker_info()
        if worker_info is not None and worker_info.id > 0:
            return
        left_out = sample.keys() - {self.key, "labels"} - self.reported_keys
        if not left_out:
            return
        self.reported_keys.update(left_out)
        names = ", ".join(sorted(map(str, left_out)))
        warnings.warn(
            f"packed rows leave out {names} of the documents: they have tokens, labels, positions and document ids",
            stacklevel=2,
        )

    def row(self, pieces: list[_Piece]) -> _Row:
        """Return the tensors of a row."""
        # NumPy, since torch takes several times as long for small arrays.
        tokens = np.full(
            self.tokens,
            self.pad,
            np.int64,
        )
        labels = np.full(
            self.tokens,
            self.ignore,
            np.int64,
        )
        positions = np.arange(self.tokens)
        documents = np.full(self.tokens, len(pieces))
        first = 0
        for number, piece in enumerate(pieces):
            after = first + piece.length
            tokens[first:after] = piece.tokens()
            targets = piece.targets(self.shift)
            # The first token of a piece would be predicted from another document.
            target_place = first
            if not self.shift:
                target_place = first + 1
            labels[target_place : target_place + len(targets)] = targets
            documents[first:after] = number
            positions[first:after] -= first
            first = after
        positions[first:] -= first
        arrays = {"input_ids": tokens, "labels": labels}
        if self.ids == "row":
            arrays["position_ids"] = np.arange(self.tokens)
        else:
            arrays["position_ids"] = positions
            arrays["document_ids"] = documents
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _token_ids(values: Sample) -> np.ndarray:
    token_ids = np.asarray(values)
    # An empty list becomes an array of floats.
    holds_integers = token_ids.dtype.kind in "iu" or not token_ids.size
    if token_ids.ndim != 1 or not holds_integers:
        raise DataError(
            "a document is a sequence of token ids",
            found=f"{kind_of(values)} of shape {token_ids.shape}, {token_ids.dtype}",
            fix="tokenize in the dataset, and yield one document at a time, without a batch dimension",
        )
    return token_ids


class _Document(NamedTuple):
    tokens: np.ndarray
    labels: np.ndarray
    """Of the tokens, not shifted."""


class _Piece(NamedTuple):
    """A span of a document in a row."""

    document: _Document
    position: int
    """Of the document in the stream."""
    start: int
    length: int

    def tokens(self) -> np.ndarray:
        return self.document.tokens[self.start : self.start + self.length]

    def targets(self, shift: bool) -> np.ndarray:
        """Return the labels of the tokens that follow one in the piece; with ``shift``, in the document."""
        after = self.start + self.length
        if shift:
            after += 1
        return self.document.labels[self.start + 1 : after]


def _cut_piece(
    document: _Document,
    position: int,
    start: int,
    length: int,
) -> _Piece:
    """Return at most ``length`` tokens of a document."""
    length = min(length, len(document.tokens) - start)
    return _Piece(
        document,
        position,
        start,
        length,
    )


def _remainder(
    document: _Document,
    position: int,
    start: int,
) -> _Piece | None:
    """Return the tokens of a document from ``start`` on; None if there are none."""
    length = len(document.tokens) - start
    if not length:
        return None
    return _Piece(
        document,
        position,
        start,
        length,
    )


@final
class _CutStream(Stream):
    """Rows of documents that are cut where a row ends."""

    def __init__(
        self,
        source: Stream,
        layout: _Layout,
    ) -> None:
        super().__init__(source)
        self.source = source
        self.layout = layout

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        return _CutCursor(
            self,
            epoch,
            state,
        )


@final
class _CutCursor(Cursor):
    def __init__(
        self,
        stream: _CutStream,
        epoch: int,
        state: CursorState,
    ) -> None:
        self._layout = stream.layout
        source_state = None
        self._start = 0
        self._document: _Document | None = None
        if state is not None:
            source_state = state["source"]
            self._start = state["start"]
        self._source = ReplayedCursor(
            stream.source,
            epoch,
            _INTERVAL,
            source_state,
        )
        self._position = self._source.read
        # The document that the last row has cut.
        for position, draw in self._source.draws.items():
            self._position = position
            self._document = self._layout.document(draw)

    def __next__(self) -> Draw:
        pieces: list[_Piece] = []
        space = self._layout.tokens
        while space:
            piece = self._next_piece(space)
            if piece is None:
                break
            pieces.append(piece)
            space -= piece.length
        if not pieces:
            raise StopIteration
        return partial(self._layout.row, pieces)

    def _next_piece(self, space: int) -> _Piece | None:
        """Return the next tokens of the current document, or of the next one that is not empty."""
        while self._document is None or self._start >= len(self._document.tokens):
            # The document before it is used up.
            self._position = self._source.read
            draw = self._source.take(self._position)
            if draw is None:
                self._document = None
                return None
            self._document = self._layout.document(draw)
            self._start = 0
        piece = _cut_piece(
            self._document,
            self._position,
            self._start,
            space,
        )
        self._start += piece.length
        return piece

    def state(self) -> CursorState:
        needed = []
        earliest = self._source.read
        if self._document is not None and self._start < len(self._document.tokens):
            earliest = self._position
            needed.append(earliest)
        source_state = self._source.state(needed, earliest)
        return {"source": source_state, "start": self._start}


@final
class _FitStream(Stream):
    """Rows of whole documents."""

    def __init__(
        self,
        source: Stream,
        layout: _Layout,
        open_rows: int,
    ) -> None:
        super().__init__(source)
        self.source = source
        self.layout = layout
        self.open_rows = open_rows

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        return _FitCursor(
            self,
            epoch,
            state,
        )


@final
@dataclass
class _OpenRow:
    """A row that has space for further documents."""

    pieces: list[_Piece] = field(default_factory=list)
    space: int = 0

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.space -= piece.length


@final
class _FitCursor(Cursor):
    """Puts each document into the fullest row with enough space; yields the fullest row where none has."""

    def __init__(
        self,
        stream: _FitStream,
        epoch: int,
        state: CursorState,
    ) -> None:
        self._layout = stream.layout
        self._open_rows = stream.open_rows
        source_state = None
        if state is not None:
            if state["tokens"] != self._layout.tokens:
                raise DataError(
                    "a position among packed rows is known for rows of one length",
                    found=f"tokens={self._layout.tokens}, and tokens={state['tokens']} in the state",
                    fix="resume with the former tokens=, or from the end of an epoch",
                )
            source_state = state["source"]
        self._source = ReplayedCursor(
            stream.source,
            epoch,
            _INTERVAL,
            source_state,
        )
        # By number, the oldest first.
        self._rows: dict[int, _OpenRow] = {}
        self._next_row = 0
        # (space, number) of every row, in order.
        self._spaces: list[tuple[int, int]] = []
        # What is not in a row yet of a document that is longer than one.
        self._remainder: _Piece | None = None
        if state is not None:
            self._restore(state)

    def __next__(self) -> Draw:
        while True:
            oldest = next(iter(self._rows.values()), None)
            if oldest is not None and self._is_stale(oldest):
                return self._close(next(iter(self._rows)))
            piece = self._next_piece()
            if piece is None:
                break
            draw = self._place(piece)
            if draw is not None:
                return draw
        if not self._rows:
            raise StopIteration
        return self._close(next(iter(self._rows)))

    def _is_stale(self, row: _OpenRow) -> bool:
        age = self._source.read - row.pieces[0].position
        return age > _OLDEST * self._open_rows

    def _next_piece(self) -> _Piece | None:
        while self._remainder is None:
            position = self._source.read
            draw = self._source.take(self._earliest())
            if draw is None:
                return None
            document = self._layout.document(draw)
            self._remainder = _remainder(
                document,
                position,
                0,
            )
        remainder = self._remainder
        piece = _cut_piece(
            remainder.document,
            remainder.position,
            remainder.start,
            self._layout.tokens,
        )
        self._remainder = _remainder(
            remainder.document,
            remainder.position,
            remainder.start + piece.length,
        )
        return piece

    def _earliest(self) -> int:
        """Return the position of the first document that is still needed; without one, the next position."""
        oldest = next(iter(self._rows.values()), None)
        if oldest is not None:
            return oldest.pieces[0].position
        if self._remainder is not None:
            return self._remainder.position
        return self._source.read

    def _place(self, piece: _Piece) -> Draw | None:
        """Put a piece into a row, and return a row that is full, or that made space for a new one."""
        length = piece.length
        if length == self._layout.tokens:
            return partial(self._layout.row, [piece])
        place_index = bisect_left(self._spaces, (length, -1))
        if place_index < len(self._spaces):
            number = self._spaces[place_index][1]
            row = self._take_out(number)
            row.add(piece)
            if not row.space:
                del self._rows[number]
                return partial(self._layout.row, row.pieces)
            self._put_back(number, row)
            return None
        closed_row = None
        if len(self._rows) == self._open_rows:
            closed_row = self._close(self._spaces[0][1])
        self._open(piece)
        return closed_row

    def _open(self, piece: _Piece) -> None:
        row = _OpenRow(space=self._layout.tokens)
        row.add(piece)
        self._rows[self._next_row] = row
        insort(self._spaces, (row.space, self._next_row))
        self._next_row += 1

    def _take_out(self, number: int) -> _OpenRow:
        row = self._rows[number]
        index = bisect_left(self._spaces, (row.space, number))
        del self._spaces[index]
        return row

    def _put_back(
        self,
        number: int,
        row: _OpenRow,
    ) -> None:
        insort(self._spaces, (row.space, number))

    def _close(self, number: int) -> Draw:
        row = self._take_out(number)
        del self._rows[number]
        return partial(self._layout.row, row.pieces)

    def state(self) -> CursorState:
        pieces = []
        rows = []
        for number, row in self._rows.items():
            pieces += row.pieces
            rows += [number] * len(row.pieces)
        if self._remainder is not None:
            pieces.append(self._remainder)
            rows.append(-1)
        positions = [piece.position for piece in pieces]
        starts = [piece.start for piece in pieces]
        return {
            "source": self._source.state(positions, self._earliest()),
            "rows": integers_to_bytes(rows),
            "starts": integers_to_bytes(starts),
            "next_row": self._next_row,
            "tokens": self._layout.tokens,
        }

    def _restore(self, state: CursorState) -> None:
        documents = {}
        for position, draw in self._source.draws.items():
            documents[position] = self._layout.document(draw)
        positions = integers_from_bytes(state["source"]["needed"])
        starts = integers_from_bytes(state["starts"])
        numbers = integers_from_bytes(state["rows"])
        for position, start, number in zip(
            positions,
            starts,
            numbers,
            strict=True,
        ):
            document = documents[position]
            if number < 0:
                self._remainder = _remainder(
                    document,
                    position,
                    start,
                )
                continue
            length = self._layout.tokens
            piece = _cut_piece(
                document,
                position,
                start,
                length,
            )
            row = self._rows.setdefault(number, _OpenRow(space=length))
            row.add(piece)
        for number, row in self._rows.items():
            insort(self._spaces, (row.space, number))
        self._next_row = state["next_row"]
