"""Convert pictures, figures, tables and histograms to forms that trackers and files take."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trainer_kit.core.display import plural
from trainer_kit.core.errors import LogError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DataFrame",
    "Figure",
    "TableRows",
    "Values",
    "as_table",
    "centers",
    "csv_text",
    "flat_values",
    "histogram",
    "numbered_key",
    "path_part",
    "picture",
    "rendered",
]


TableRows: TypeAlias = "list[list[object]]"
"""The rows of a table, each with one value for each column."""
Values: TypeAlias = "npt.NDArray[np.float64]"
"""Numbers as an array of one dimension."""


class Figure(Protocol):
    """A ``matplotlib.figure.Figure``, or another object with its ``savefig``."""

    def savefig(self, fname: IO[bytes], /, *, format: str, bbox_inches: str) -> object:
        """Write the picture to a stream."""


class _Labels(Protocol):
    def tolist(self) -> Sequence[object]: ...


class _Cells(Protocol):
    def tolist(self) -> Sequence[Sequence[object]]: ...


class DataFrame(Protocol):
    """A pandas data frame."""

    @property
    def columns(self) -> _Labels:
        """The names of the columns."""

    @property
    def values(self) -> _Cells:
        """The rows."""


def picture(image: object) -> Image:
    """Convert an image to a PIL image.

    Args:
        image: a tensor of shape (channels, height, width) or (height, width); an array of shape
            (height, width[, channels]); a PIL image, which is returned as it is; or the path of a file. 1, 3 or 4
            channels. Floats are in 0…1, integers and booleans in 0…255 and 0…1.

    Raises:
        LogError: ``image`` is none of these.

    Example:
        >>> picture(torch.zeros(3, 4, 8)).size
        (8, 4)
    """
    import PIL.Image as pil

    if isinstance(image, pil.Image):
        return image
    if isinstance(image, (str, os.PathLike)):
        with pil.open(os.fspath(image)) as file:
            copy: Image = file.copy()
        return copy
    values: npt.NDArray[np.generic]
    if isinstance(image, torch.Tensor):
        values = _channels_last(image)
    else:
        values = np.asarray(image)
    # PIL takes one channel only without its dimension.
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not _is_picture(values):
        raise LogError(
            "expected an image",
            found=f"a {type(image).__name__} of shape {tuple(getattr(image, 'shape', ()))}",
            fix="pass a tensor (channels, height, width), an array (height, width, channels), a PIL image or a path",
        )
    levels = values.astype(np.float64)
    if values.dtype.kind in "bf":
        levels = np.nan_to_num(levels).clip(0, 1) * 255
    # Rounded: `astype` cuts off, and 0.999 would become 254. Clipped: 256 would become 0.
    return pil.fromarray(levels.round().clip(0, 255).astype(np.uint8))


def _channels_last(image: torch.Tensor) -> npt.NDArray[np.generic]:
    """A picture as an array (height, width[, channels])."""
    # sync point: the user logs a picture
    tensor = image.detach().cpu()
    # NumPy has no bfloat16.
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    if tensor.ndim == 3:
        tensor = tensor.permute(1, 2, 0)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array


def _is_picture(values: npt.NDArray[np.generic]) -> bool:
    """Whether the array has two dimensions or 3 or 4 channels, and real numbers or booleans."""
    if values.dtype.kind not in "bfiu":
        return False
    if values.ndim == 3:
        return values.shape[2] in (3, 4)
    return values.ndim == 2


def rendered(figure: Figure) -> Image:
    """Render a matplotlib figure as a PIL image."""
    import PIL.Image as pil

    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight")
    with pil.open(stream) as file:
        copy: Image = file.copy()
    return copy


def numbered_key(key: str, index: int, separator: str = "/") -> str:
    """The key of picture ``index``: a list's first picture has the plain key, as a single picture has.

    Example:
        >>> numbered_key("samples", 0), numbered_key("samples", 2)
        ('samples', 'samples/2')
    """
    if index == 0:
        return key
    return f"{key}{separator}{index}"


def as_table(
    columns: Sequence[object] | None,
    data: Sequence[Sequence[object]] | None,
    dataframe: DataFrame | None = None,
) -> tuple[list[str], TableRows]:
    """The columns and rows of a table.

    Args:
        columns: column names; None for those of the data frame, or for numbers.
        data: the rows.
        dataframe: a pandas data frame instead of ``data``.

    Example:
        >>> as_table(["id", "text"], [(1, "a")])
        (['id', 'text'], [[1, 'a']])
    """
    if dataframe is not None:
        columns = dataframe.columns.tolist()
        data = dataframe.values.tolist()
    rows = [list(row) for row in data or ()]
    if columns is None:
        width = len(rows[0]) if rows else 0
        columns = range(width)
    names = [str(name) for name in columns]
    for row in rows:
        if len(row) != len(names):
            raise LogError(
                "every row of a table has one value for each column",
                found=f"a row of {plural(len(row), 'value')} for {len(names)} columns",
            )
    return names, rows


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def histogram(values: object, bins: int) -> tuple[list[int], list[float]]:
    """Count the finite values per bin; return the counts and the ``bins + 1`` edges.

    Args:
        values: a tensor, an array or numbers.
        bins: number of intervals of equal width.

    Example:
        >>> histogram([0.0, 1.0, 1.0, float("nan")], bins=2)
        ([1, 2], [0.0, 0.5, 1.0])
    """
    flat = flat_values(values)
    counts, edges = np.histogram(flat, bins=bins)
    return counts.tolist(), edges.tolist()


def centers(edges: Sequence[float]) -> list[str]:
    """The middle of each interval of a histogram, as text."""
    return [f"{(low + high) / 2:.4g}" for low, high in pairwise(edges)]


def flat_values(values: object) -> Values:
    """The finite values as an array of one dimension, float64."""
    if isinstance(values, torch.Tensor):
        # sync point: the user logs a histogram. Double on the torch side: NumPy has no bfloat16.
        values = values.detach().cpu().double()
    numbers: Values = np.asarray(values, dtype=np.float64)
    flat = numbers.reshape(-1)
    # NumPy raises for a range with NaN or infinity; a diverging run still gets its histogram.
    return flat[np.isfinite(flat)]


def path_part(name: str) -> str:
    """Turn a name into a relative path that stays inside its directory.

    Example:
        >>> path_part("val/samples 3"), path_part("../../etc"), path_part("/a")
        ('val/samples 3', 'etc', 'a')
    """
    components = []
    for component in Path(name).parts:
        # A metric's name is a user's text: it must not lead out of the directory.
        if component not in ("..", "/", "."):
            components.append(re.sub(r"[^\w \-.]", "_", component))
    return "/".join(components) or "_"
