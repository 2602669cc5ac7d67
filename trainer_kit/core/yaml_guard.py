"""Checks a text before it is read as YAML: whether it is valid, and how large it is with aliases expanded."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import yaml

from trainer_kit.core.display import plural

__all__ = ["YamlProblem", "guarded_events", "guarded_root"]

_LONG: Final = 200
"""The number of characters of a scalar that count as one value."""


@final
class YamlProblem(Exception):
    """A text that is invalid YAML, or too large.

    Args:
        line: the line of the problem, from 1.
        reason: the problem.
        too_much: whether the text is valid YAML, but too large.
    """

    def __init__(self, line: int, reason: str, too_much: bool = False) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason
        self.too_much = too_much


def guarded_events(text: str, most: int = 5_000, deepest: int = 16) -> list[yaml.Event]:
    """Parse a YAML text into events, without constructing values.

    Nested aliases can expand to more values than memory holds, so each alias counts with its expanded size.

    Args:
        text: the whole text.
        most: the maximum number of values with aliases expanded; a long scalar counts as several.
        deepest: the maximum depth of mappings and lists.

    Raises:
        YamlProblem: the text is invalid or too large.

    Example:
        >>> len(guarded_events("lr: 0.1"))
        8
        >>> guarded_events("a: &a [1, 1, 1]\\nb: &b [*a, *a]\\nc: [*b, *b]", most=12)
        Traceback (most recent call last):
        trainer_kit.core.yaml_guard.YamlProblem: more than 12 values, aliases written out
    """
    import yaml

    events: list[yaml.Event] = []
    size = _Sizes(most, deepest)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            events.append(event)
            size.add(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1
        if mark is not None:
            line = mark.line + 1
        problem = error.problem or error.context or "cannot be read"
        raise YamlProblem(line, problem.replace("\n", " ")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(
            line, f"character {chr(error.character)!r} cannot be in YAML"
        ) from None
    except (ValueError, OverflowError) as error:
        # An escape of a character code that does not exist.
        raise YamlProblem(1, f"cannot be read: {error}") from None
    return events


def guarded_root(
    text: str,
    most: int = 5_000,
    deepest: int = 16,
    tags: Container[str | None] | None = None,
) -> yaml.Node | None:
    """The root node of a YAML text, or None if it is empty; no value is constructed.

    Args:
        text: the whole text.
        most: see `guarded_events`.
        deepest: see `guarded_events`.
        tags: the allowed tags; None allows all.

    Raises:
        YamlProblem: the text is invalid or too large, or has another tag or a second document.

    Example:
        >>> guarded_root("lr: 0.1").value[0][1].value
        '0.1'
    """
    import yaml

    for event in guarded_events(text, most, deepest):
        if not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            continue
        if tags and event.tag not in tags:
            raise YamlProblem(_line(event), f"{event.tag}: tags are not read")
    roots = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    if len(roots) > 1:
        raise YamlProblem(
            roots[1].start_mark.line + 1,
            "a second document begins here; a configuration has one",
        )
    if not roots:
        return None
    return roots[0]


def _line(event: yaml.Event) -> int:
    if event.start_mark is None:
        return 1
    return event.start_mark.line + 1


@final
class _Sizes:
    """Counts the values in each open collection and each anchor."""

    def __init__(self, most: int, deepest: int) -> None:
        self.most = most
        self.deepest = deepest
        # The size of each anchor that is complete; of each open collection, its anchor and its size so far.
        self.anchors: dict[str, int] = {}
        self.open: list[tuple[str | None, int]] = []

    def _names(self) -> set[str]:
        return {
            *self.anchors,
            *(anchor for anchor, _ in self.open if anchor is not None),
        }

    def add(self, event: yaml.Event) -> None:
        import yaml

        line = _line(event)
        if isinstance(event, yaml.DocumentStartEvent):
            # An alias refers to an anchor in the same document.
            self.anchors.clear()
        if (
            isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
            and event.anchor in self._names()
        ):
            raise YamlProblem(line, f"&{event.anchor} is set twice")
        if isinstance(event, yaml.CollectionStartEvent):
            if len(self.open) == self.deepest + 1:
                raise YamlProblem(
                    line, f"nested deeper than {self.deepest} levels", too_much=True
                )
            self.open.append((event.anchor, 1))
            return
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise YamlProblem(line, f"*{event.anchor} refers to nothing before it")
            anchor = None
            size = self.anchors[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
            size = 1 + len(event.value) // _LONG
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = self.open.pop()
        else:
            return
        if anchor is not None:
            self.anchors[anchor] = size
        if self.open:
            outer, before = self.open[-1]
            size += before
            self.open[-1] = outer, size
        if size > self.most:
            raise YamlProblem(
                line,
                f"more than {plural(self.most, 'value')}, aliases written out",
                too_much=True,
            )
