"""Encoded trees, looked into and merged without decoding them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer_kit.checkpoint.codecs import ObjectRecord, attributes_of
from trainer_kit.checkpoint.encoding import TAG, EnumRecord, Tree, decode
from trainer_kit.core.errors import CheckpointError

__all__ = ["children", "holds_record", "merge", "tensor_record"]


def children(
    tree: Tree,
    *,
    at: str = "",
    file: object = "state.json",
) -> Mapping[Any, Tree] | list[Tree] | None:
    """Return the encoded values of a dict by key, or the encoded items of a list or tuple; None for other trees.

    Example:
        >>> from trainer_kit.checkpoint.encoding import encode
        >>> children(encode({"a": {1: "one"}}, {}))
        {'a': {'$': 'dict', 'v': [[1, 'one']]}}
        >>> children(children(encode({"a": {1: "one"}}, {}))["a"])
        {1: 'one'}
    """
    if isinstance(tree, list):
        return tree
    if not isinstance(tree, dict):
        return None
    if TAG not in tree:
        return tree
    tag, value = tree[TAG], tree.get("v")
    # Their content is the tree of a dict.
    if tag in ("OrderedDict", "Counter"):
        return children(value, at=at, file=file)
    if not isinstance(value, list):
        return None
    if tag == "tuple":
        return value
    if tag != "dict":
        return None
    try:
        items = {}
        for key, item in value:
            items[decode(key, {}, at=at, file=file)] = item
        return items
    except (TypeError, ValueError) as error:
        reason = f"damaged record of a dict: {error}"
        raise CheckpointError(file, at or None, reason) from error


def holds_record(value: object) -> bool:
    """Whether a decoded value holds an `EnumRecord` or an `ObjectRecord` in place of an object.

    Example:
        >>> from trainer_kit.checkpoint.encoding import decode
        >>> holds_record(decode({"kind": {"$": "name", "v": "elsewhere.Kind"}}, {}))
        True
    """
    if isinstance(value, (EnumRecord, ObjectRecord)):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_record, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(holds_record, value))
    if isinstance(value, partial):
        return holds_record([value.args, value.keywords])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return holds_record(attributes_of(value))
    return False


def tensor_record(tree: object) -> Mapping[str, Any] | None:
    """Return ``tree`` if it is the record of a tensor, which has the tensor's name under ``"v"``; else None."""
    if isinstance(tree, dict) and tree.get(TAG) == "tensor":
        return tree
    return None


def merge(first: Tree, second: Tree) -> Tree:
    """Merge two encoded trees: the keys of both dicts, at any depth; elsewhere the first tree wins.

    This builds one state from ranks that hold different parts of a model, such as the stages of a pipeline.

    Example:
        >>> merge({"model": {"a": 1}, "step": 3}, {"model": {"b": 2}, "step": 4})
        {'model': {'a': 1, 'b': 2}, 'step': 3}
    """
    # Almost always: ranks differ in few parts, and comparing is faster than merging.
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        if TAG not in first and TAG not in second:
            return _merge_dicts(first, second)
        if first.get(TAG) == second.get(TAG) == "OrderedDict":
            # A state_dict: the stages of a pipeline have different entries of it.
            return {**first, "v": merge(first["v"], second["v"])}
    if isinstance(first, list) and isinstance(second, list):
        if len(first) == len(second):
            return [merge(*pair) for pair in zip(first, second, strict=True)]
    return first


def _merge_dicts(
    first: dict[str, Tree],
    second: dict[str, Tree],
) -> dict[str, Tree]:
    merged = dict(first)
    for key, value in second.items():
        if key in first:
            value = merge(first[key], value)
        merged[key] = value
    return merged
