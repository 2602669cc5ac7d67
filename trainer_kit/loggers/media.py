"""Convert pictures, figures, tables and histograms to forms that trackers and files take."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_kit.core.display import plural
from trainer_kit.core.errors import LogError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "as_table",
    "centers",
    "csv_text",
    "flat_values",
    "histogram",
    "path_part",
    "picture",
    "rendered",
]


def picture(image: Any) -> Image:
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
    if isinstance(image, torch.Tensor):
        tensor = image.detach().cpu()  # sync point: the user logs a picture
        values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        values = values.transpose(1, 2, 0) if values.ndim == 3 else values
    else:
        values = np.asarray(image)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if (
        values.ndim not in (2, 3)
        or (values.ndim == 3 and values.shape[2] not in (3, 4))
        or values.dtype.kind not in "bfiu"
    ):
        raise LogError(
            "this is not a picture",
            found=f"a {type(image).__name__} of shape {tuple(getattr(image, 'shape', ()))}",
            fix="pass a tensor (channels, height, width), an array (height, width, channels), a PIL image or a path",
        )
    if values.dtype.kind in "bf":
        values = np.nan_to_num(values.astype(np.float64)).clip(0, 1) * 255
    return pil.fromarray(values.round().clip(0, 255).astype(np.uint8))


def rendered(figure: Any) -> Image:
    """Render a matplotlib figure as a PIL image."""
    import PIL.Image as pil

    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight")
    with pil.open(stream) as file:
        copy: Image = file.copy()
    return copy


def as_table(
    columns: Sequence[Any] | None,
    data: Sequence[Sequence[Any]] | None,
    dataframe: Any = None,
) -> tuple[list[str], list[list[Any]]]:
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
        columns, data = dataframe.columns.tolist(), dataframe.values.tolist()
    rows = [list(row) for row in data or ()]
    names = [
        str(name)
        for name in (
            columns if columns is not None else range(len(rows[0]) if rows else 0)
        )
    ]
    for row in rows:
        if len(row) != len(names):
            raise LogError(
                "every row of a table has one value for each column",
                found=f"a row of {plural(len(row), 'value')} for {len(names)} columns",
            )
    return names, rows


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def histogram(values: Any, bins: int) -> tuple[list[int], list[float]]:
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


def flat_values(values: Any) -> Any:
    """The finite values as an array of one dimension, float64."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double()  # sync point: the user logs a histogram
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    return flat[np.isfinite(flat)]


def path_part(name: str) -> str:
    """Turn a name into a relative path that stays inside its directory.

    Example:
        >>> path_part("val/samples 3"), path_part("../../etc"), path_part("/a")
        ('val/samples 3', 'etc', 'a')
    """
    parts = [
        component for component in Path(name).parts if component not in ("..", "/", ".")
    ]
    return (
        "/".join(
            "".join(c if c.isalnum() or c in " _-." else "_" for c in component)
            for component in parts
        )
        or "_"
    )
