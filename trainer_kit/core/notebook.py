"""What a notebook shows: where its output goes, its progress bars, and objects as small tables."""

from __future__ import annotations

import dataclasses
import multiprocessing
import reprlib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from inspect import signature
from itertools import islice
from types import MappingProxyType
from typing import Final, TextIO, TypeAlias

from trainer_kit.core.display import MASK, holds_secret, mask_text

__all__ = [
    "html_arguments",
    "html_page",
    "html_table",
    "in_notebook",
    "message_stream",
    "widget_bar_class",
]

_LockArguments: TypeAlias = tuple[bool | None, float | None] | tuple[bool | None] | None
_LONGEST_CELL: Final = 300
"""Characters of a value that a table shows."""
_NO_VALUE: Final = ("", "''", "b''", "None")
"""Texts of values that are no secret, whatever their name."""
_CELL: Final = 'style="text-align:left;vertical-align:top;white-space:pre-wrap"'


def in_notebook() -> bool:
    """Whether output goes to the cells of a notebook, not to a terminal or a file.

    Example:
        >>> in_notebook()
        False
    """
    # Not the builtin of this name, which exists only while a cell runs. Only the shell of a notebook has a kernel.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and hasattr(get_shell(), "kernel")


def message_stream() -> TextIO:
    """Where bars and summaries are written: standard error; in a notebook standard output.

    A notebook shows standard error in red, and as a separate output each time that it alternates with standard output.
    """
    if in_notebook():
        return sys.stdout
    return sys.stderr


def widget_bar_class() -> type | None:
    """The class of tqdm's bars for notebooks, or None outside a notebook and where widgets cannot be shown.

    ``tqdm.auto`` decides: it chooses text without ipywidgets, and in consoles. A forked process has no connection to
    the notebook but standard output, so it gets None as well.
    """
    if not in_notebook() or multiprocessing.parent_process() is not None:
        return None
    return _import_widget_bar()


@cache
def _import_widget_bar() -> type | None:
    with warnings.catch_warnings():
        # tqdm warns where ipywidgets is missing; a line of text shows the same, so nothing is lost.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
        from tqdm.notebook import tqdm_notebook
    if not issubclass(tqdm, tqdm_notebook):
        return None

    class WidgetBar(tqdm_notebook):  # type: ignore[type-arg]  # generic only for type checkers
        # One process draws: it needs no monitor thread.
        monitor_interval = 0

        def refresh(
            self, nolock: bool = False, lock_args: _LockArguments = None
        ) -> None:
            bar = self.container.children[1]
            # The total changes between training and validation; a bar without a total is shown full.
            bar.set_trait("max", self.total or 1)
            # Without a delay tqdm would take the bar for one that its constructor has displayed.
            self.delay = 1e-9
            super().refresh(nolock, lock_args)

        def close(self) -> None:
            if not self.leave:
                # Hidden, not closed: a notebook that is saved and opened again would show an error in its place.
                self.container.layout.set_trait("display", "none")
            # tqdm's own `close` marks a bar red that is not full: a fit may stop inside an epoch.
            self.disable = True

    return WidgetBar


def html_table(
    title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()
) -> str:
    """A small table of HTML for ``_repr_html_``; everything is escaped, and long values are cut.

    Args:
        title: above the table.
        rows: the values of each row; the first one is shown as its name unless there are ``heads``.
        heads: the names of the columns.

    Example:
        >>> html_table("Fit", [("steps", 3)])
        '<table><caption ...><b>Fit</b></caption><tr><th ...>steps</th><td ...>3</td></tr></table>'
    """
    caption = f'<caption style="text-align:left"><b>{escape(title)}</b></caption>'
    lines = []
    if heads:
        lines.append("".join(_cell("th", head) for head in heads))
    for row in rows:
        cells = [_cell("td", value) for value in row]
        if not heads:
            cells[0] = _cell("th", row[0])
        lines.append("".join(cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{caption}{body}</table>"


def _cell(tag: str, value: object) -> str:
    text = str(value)
    if len(text) > _LONGEST_CELL:
        text = f"{text[:_LONGEST_CELL]}…"
    return f"<{tag} {_CELL}>{escape(text)}</{tag}>"


class _CellTexts(reprlib.Repr):
    """Short texts of values: a few items of each container, the shape of a tensor, and secrets masked."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 12

    def name_value(self, name: str, value: object) -> str:
        """The text of a value with a name."""
        if isinstance(value, str):
            return _mask_named(name, mask_text(value))
        return _mask_named(name, self.repr(value))

    def repr_str(self, x: str, level: int) -> str:
        return repr(mask_text(x)[:_LONGEST_CELL])

    def repr_dict(self, x: Mapping[object, object], level: int) -> str:
        # Not that of reprlib, which sorts all names.
        if level <= 0:
            return "{...}"
        items = []
        inner = level - 1
        for name in islice(x, self.maxdict):
            key = self.repr1(name, inner)
            text = self.repr1(x[name], inner)
            text = _mask_named(str(name), text)
            items.append(f"{key}: {text}")
        if len(x) > self.maxdict:
            items.append("...")
        return f"{{{', '.join(items)}}}"

    def repr_set(self, x: set[object] | frozenset[object], level: int) -> str:
        if not x:
            return repr(x)
        # Not that of reprlib, which sorts all items.
        items = self._repr_first(x, level)
        return f"{{{items[1:-1]}}}"

    repr_frozenset = repr_set

    def repr_instance(self, x: object, level: int) -> str:
        shape = _shape_text(x)
        if shape is not None:
            return shape
        fields = _named_fields(x)
        if isinstance(fields, Mapping):
            return self.repr_dict(fields, level)
        if isinstance(x, (list, tuple, set, frozenset)):
            return self._repr_first(x, level)
        if level == self.maxlevel:
            return mask_text(str(x))
        return mask_text(repr(x))

    def _repr_first(self, items: Iterable[object], level: int) -> str:
        first = islice(items, self.maxlist + 1)
        return self.repr_list(list(first), level)


def _mask_named(name: str, text: str) -> str:
    """``text``, unless ``name`` is that of a secret and has a value."""
    if text not in _NO_VALUE and holds_secret("text", name):
        return MASK
    return text


def _shape_text(value: object) -> str | None:
    """The text of a tensor or an array, whose numbers may be many and on another device; None for anything else."""
    # Messages of processes without torch pass through this file too.
    from numpy import ndarray
    from torch import Tensor
    from torch.nn.parameter import is_lazy

    if not isinstance(value, (Tensor, ndarray)):
        return None
    kind = type(value).__name__
    if isinstance(value, Tensor) and is_lazy(value):
        return f"{kind}, not initialized"
    return f"{kind} of shape {tuple(value.shape)}"


def _named_fields(value: object) -> object:
    """A mapping of the fields of a named tuple or of a dataclass; anything else is returned as it is."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    contents = {}
    for field in dataclasses.fields(value):
        # A field that ``__init__`` does not take may have no value yet.
        contents[field.name] = getattr(value, field.name, None)
    return contents


def html_arguments(
    instance: object, hparams: Mapping[str, object] = MappingProxyType({})
) -> str:
    """The table of an object: the arguments of its class, with the values that the object has for them.

    Args:
        instance: its attributes have the names of the arguments, or these with an underscore before them.
        hparams: values of arguments that are no attributes.

    Example:
        >>> class Every:
        ...     def __init__(self, steps=3):
        ...         self._steps = steps
        >>> html_arguments(Every())
        '<table><caption ...><b>Every</b></caption><tr><th ...>steps</th><td ...>3</td></tr></table>'
    """
    values = {**hparams, **vars(instance)}
    texts = _CellTexts()
    rows = []
    for name in signature(type(instance)).parameters:
        for attribute in (name, f"_{name}"):
            if attribute in values:
                rows.append((name, texts.name_value(name, values[attribute])))
                break
    return html_table(type(instance).__name__, rows)


def html_page(page: str, height: int = 600) -> str:
    """A whole page of HTML inside a cell.

    Its scripts run without access to the notebook.

    Args:
        page: the text of the page.
        height: of the frame, in pixels.

    Example:
        >>> html_page("<p>hello</p>", 100)
        '<iframe sandbox="allow-scripts" width="100%" height="100" ... srcdoc="&lt;p&gt;hello&lt;/p&gt;"></iframe>'
    """
    options = f'sandbox="allow-scripts" width="100%" height="{height}" style="border:0"'
    return f'<iframe {options} srcdoc="{escape(page)}"></iframe>'
