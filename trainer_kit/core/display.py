"""Text for users: several lines, progress bars, numbers of bytes, and configuration with its secrets masked."""

from __future__ import annotations

import argparse
import dataclasses
import re
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Final, final

__all__ = [
    "MASK",
    "Svg",
    "Text",
    "bar_class",
    "holds_secret",
    "in_units",
    "mask_secrets",
    "mask_text",
    "plural",
]


@final
class Text(str):
    """A string whose ``repr`` is its text, so that an interactive session shows its lines.

    Example:
        >>> Text("two\\nlines")
        two
        lines
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@final
class Svg(str):
    """A picture as text, which a notebook shows as a picture; ``Path("mesh.svg").write_text(picture)`` keeps it.

    Example:
        >>> Svg("<svg></svg>")._repr_svg_()
        '<svg></svg>'
    """

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


@cache
def bar_class() -> Any:
    """The tqdm class, imported when the first bar is drawn, without tqdm's support for several processes.

    Example:
        >>> issubclass(bar_class(), __import__("tqdm").tqdm)
        True
    """
    from tqdm import tqdm

    # tqdm is generic only for type checkers: at run time it takes no argument.
    class Bar(tqdm):  # type: ignore[type-arg]
        # One rank draws: it needs no monitor thread, and no lock shared between processes.
        monitor_interval = 0
        _lock = threading.RLock()

    return Bar


MASK: Final = "***"
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Matched against names of lower-case words joined by "_"; a dot or a slash begins a new name. pad_token, sort_key and
# forward_pass are not secrets, so `token`, `key` and `pass` match only after a word such as `api` or `db`.
_KEY: Final = (
    r"(?:^|_)(?:password|passwd|pwd|passphrase|secrets?|credentials?|cookies?|webhooks?|authorization|api_?key"
    r"|(?:access|private|secret|auth|encryption|signing|ssh|account|storage|shared|client|license|openai|anthropic"
    r"|azure|aws|google|gcp|cohere|mistral|groq|hf|huggingface|wandb|comet|neptune|clearml|swanlab)_?key"
    r"|(?:api|access|auth|bearer|refresh|run|session|hf|hub|huggingface|github|gitlab|wandb|openai|slack|bot|jwt|csrf"
    r"|oauth|deploy|personal|security|secret|comet|neptune|swanlab)_?tokens?)(?:_|$)"
    r"|(?:^|(?:^|_)(?:db|database|user|admin|root|smtp|mail|ftp|sql|mysql|postgres|pg|redis|mongo|http|proxy|login)_)"
    r"pass$|^token$|(?:^|_)auth$"
)
# A number under such a name is a secret too.
_NUMBERS: Final = re.compile(r"pass|pwd|secret")
# Compiled at its first use: `import trainer_kit` does not need it.
_TEXT: Final = (
    r"(?-i:\bhf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,})"
    r"|\bsk-[A-Za-z0-9_\-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\bxox[a-z]-[A-Za-z0-9\-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?"
    r"|(?P<bearer>\bBearer\s+)[\w.~+/=\-]{8,}"
    r"|(?P<setting>\b(?:password|passwd|pwd|AccountKey|SharedAccessKey)\s*=\s*)[^\s;&'\"]+"
    r"|(?P<query>[?&](?:[\w\-]*(?:token|api_?key|secret|signature|credential|password)|sig|key|auth)=)[^\s&#'\"]+"
    r"|(?P<user>\b[a-zA-Z][\w+.\-]*://[^/\s:@]*:)[^/\s@]+(?=@)"
    r"|(?P<only>\bhttps?://)[^/\s:@]+(?=@)"
)
_PLAIN: Final = re.compile(r"[_\-=@]|eyJ|AKIA|ASIA|Bearer", re.IGNORECASE)
"""Matches in every text in which `_TEXT` matches, and is faster."""


@lru_cache(maxsize=4096)
def _is_secret(key: str) -> bool:
    # Of "db.api_key" the last part counts: the path before it is not what the value is.
    last = re.split(r"[./]", key)[-1] or key
    name = "_".join(_WORDS.findall(last)).lower()
    return re.search(_KEY, name) is not None


def _secret_name(key: str) -> str:
    """``key`` if values of this name are secrets, else an empty text."""
    if _is_secret(key):
        return key
    return ""


def mask_text(text: str) -> str:
    """Mask tokens, passwords and URL credentials in a text.

    Example:
        >>> mask_text("clone https://me:pw@host/x?sig=abc with Authorization: Bearer 0123456789")
        'clone https://me:***@host/x?sig=*** with Authorization: Bearer ***'
        >>> mask_text("Server=db;Password=hunter2;")
        'Server=db;Password=***;'
    """
    # Nearly every text: logged lines and messages pass here.
    if not _PLAIN.search(text):
        return text
    return re.sub(_TEXT, _masked_match, text, flags=re.IGNORECASE)


def _masked_match(match: re.Match[str]) -> str:
    # A named group of `_TEXT` is what stands before the secret; bare tokens have none.
    prefixes = [group for group in match.groups() if group is not None]
    if prefixes:
        return f"{prefixes[0]}{MASK}"
    return MASK


def mask_secrets(value: Any, key: str = "") -> Any:
    """A copy of ``value`` with everything masked that looks like a secret, also inside mappings, lists and tuples.

    Args:
        value: any value; strings are masked, and numbers if their name is that of a password.
        key: the name of the value, in any spelling: ``apiKey``, ``db.api_key``, ``API-KEY``.

    Example:
        >>> mask_secrets({"lr": 0.1, "apiKey": "abc", "store": "s3://me:pw@host/bucket", "pad_token": "<pad>"})
        {'lr': 0.1, 'apiKey': '***', 'store': 's3://me:***@host/bucket', 'pad_token': '<pad>'}
        >>> mask_secrets({"credentials": {"user": ["a", "b"]}, "db_pass": 1234})
        {'credentials': {'user': ['***', '***']}, 'db_pass': '***'}
    """
    return _mask(value, _secret_name(key), [])


def holds_secret(value: object, key: str = "") -> bool:
    """Whether `mask_secrets` would change anything.

    Example:
        >>> holds_secret({"store": {"password": "x"}}), holds_secret({"max_tokens": 3})
        (True, False)
    """
    masks: list[str] = []
    _mask(value, _secret_name(key), masks)
    return bool(masks)


def _mask(value: Any, secret: str, masks: list[str]) -> Any:
    """Return ``value`` with its secrets masked.

    Args:
        value: the value.
        secret: the name that makes every text in ``value`` a secret, or "".
        masks: gets each masked text.
    """
    if isinstance(value, str):
        masked = mask_text(value)
        # An empty text is no secret.
        if secret and value:
            masked = MASK
        if masked != value:
            masks.append(masked)
            return masked
        return value
    fields = _fields(value)
    if fields is not None:
        count = len(masks)
        masked_fields = _mask(fields, secret, masks)
        # Without a secret in it, the object itself is returned.
        if len(masks) == count:
            return value
        return masked_fields
    if isinstance(value, Mapping):
        masked_items = {}
        for name, item in value.items():
            secret_name = secret or _secret_name(str(name))
            masked_items[name] = _mask(item, secret_name, masks)
        return masked_items
    # Not their subclasses: the constructor of a named tuple takes its fields.
    if type(value) in (list, tuple):
        return type(value)(_mask(item, secret, masks) for item in value)
    if secret and type(value) in (int, bytes) and _NUMBERS.search(secret.lower()):
        masks.append(MASK)
        return MASK
    return value


def _fields(value: object) -> dict[str, object] | None:
    """The fields of a dataclass object or a namespace; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        contents = {}
        for field in dataclasses.fields(value):
            # A field that ``__init__`` does not take may have no value yet.
            contents[field.name] = getattr(value, field.name, None)
        return contents
    if type(value) in (argparse.Namespace, SimpleNamespace):
        return vars(value)
    return None


def plural(count: int, noun: str, nouns: str | None = None, *, spec: str = "") -> str:
    """Return a count with its noun, for a message.

    Args:
        count: how many.
        noun: the singular.
        nouns: an irregular plural.
        spec: how the count is formatted, such as ``","``.

    Example:
        >>> plural(1, "rank"), plural(2, "batch"), plural(3, "epoch")
        ('1 rank', '2 batches', '3 epochs')
        >>> plural(0, "entry", "entries")
        '0 entries'
    """
    if count == 1:
        return f"1 {noun}"
    if nouns is None:
        # "epoch" ends in a k sound.
        hisses = noun.endswith(("ch", "s", "x")) and not noun.endswith("epoch")
        nouns = f"{noun}s"
        if hisses:
            nouns = f"{noun}es"
    return f"{count:{spec}} {nouns}"


def in_units(size: float | None) -> str:
    """Format a number of bytes with a unit.

    Example:
        >>> in_units(3), in_units(4180), in_units(120_000_000), in_units(None)
        ('3 B', '4.18 kB', '120 MB', 'an unknown number')
    """
    if size is None:
        return "an unknown number"
    # From 999.5 on, three digits would round to 1000.
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # Not ``size < 999.5``, which is false for NaN.
        if not size >= 999.5:
            return f"{size:.3g} {unit}"
        size = size / 1000
    return f"{size:.3g} PB"
