"""Attention masks of packed rows: a token sees the earlier tokens of its own document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from trainer_kit.core.errors import DataError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["document_mask", "document_offsets"]


@overload
def document_mask(
    document_ids: Tensor,
    kind: Literal["dense"] = "dense",
    *,
    causal: bool = True,
    part: int = 0,
    parts: int = 1,
) -> Tensor: ...
@overload
def document_mask(
    document_ids: Tensor,
    kind: Literal["flex"],
    *,
    causal: bool = True,
    part: int = 0,
    parts: int = 1,
) -> BlockMask: ...
def document_mask(
    document_ids: Tensor,
    kind: Literal["dense", "flex"] = "dense",
    *,
    causal: bool = True,
    part: int = 0,
    parts: int = 1,
) -> Tensor | BlockMask:
    """Return the mask with which documents of a packed row do not see each other.

    Args:
        document_ids: of `trainer_kit.data.pack`, int64, shape (batch, tokens).
        kind: ``"dense"``: for ``scaled_dot_product_attention(attn_mask=)``; ``"flex"``: for ``flex_attention``, which
            skips blocks of tokens that see nothing.
        causal: a token does not see later ones.
        part: under context parallelism, this rank on the context axis; the document ids must be those of the whole
            row: ``ContextPlan(dims={"input_ids": 1, "labels": 1, "position_ids": 1})``.
        parts: number of ranks on the context axis.

    Returns:
        bool, shape (batch, 1, tokens / parts, tokens), True where a token is seen; or a ``BlockMask``.

    Raises:
        DataError: ids of another shape, a row that the parts do not divide, or a block mask of a part.

    Example:
        >>> ids = torch.tensor([[0, 0, 1]])
        >>> document_mask(ids).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    _check(document_ids)
    if kind not in ("dense", "flex"):
        raise DataError(
            "a mask of documents is dense, or has the blocks of flex_attention",
            found=f"kind={kind!r}",
            fix='pass "dense" or "flex"; varlen_attn takes the result of document_offsets',
        )
    if not 0 <= part < parts:
        raise DataError(
            "parts of a row are numbered from 0",
            found=f"part={part}, parts={parts}",
            fix="pass this rank on the context axis, and their number",
        )
    if kind == "flex":
        if parts != 1:
            raise DataError(
                "flex_attention does not compute with a part of the row",
                found=f"parts={parts}",
                fix='use kind="dense" under context parallelism',
            )
        return _block_mask(document_ids, causal)
    tokens = document_ids.shape[1]
    if tokens % parts:
        raise DataError(
            "context parallelism splits a row into equal parts",
            found=f"{tokens} tokens, parts={parts}",
            fix=f"pack rows of a multiple of {parts} tokens",
        )
    length = tokens // parts
    first = part * length
    query_ids = document_ids[:, first : first + length]
    mask = query_ids[:, :, None] == document_ids[:, None, :]
    if causal:
        positions = torch.arange(
            tokens,
            device=document_ids.device,
        )
        query_positions = positions[first : first + length]
        mask = mask & (query_positions[:, None] >= positions[None, :])
    return mask[:, None]


def _check(document_ids: Tensor) -> None:
    if document_ids.dim() != 2:
        raise DataError(
            "document ids have one row for each sample",
            found=f"shape {tuple(document_ids.shape)}",
            fix="pass a batch: shape (batch, tokens)",
        )


def _block_mask(document_ids: Tensor, causal: bool) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(
        batch: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        same_document = document_ids[batch, query] == document_ids[batch, key]
        if not causal:
            return same_document
        return same_document & (query >= key)

    rows, tokens = document_ids.shape
    return create_block_mask(
        sees,
        B=rows,
        H=None,
        Q_LEN=tokens,
        KV_LEN=tokens,
        device=str(document_ids.device),
    )


def document_offsets(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return where the documents of a batch begin, as attention of variable length takes them.

    For ``torch.nn.attention.varlen.varlen_attn`` and FlashAttention's ``varlen`` functions, with the rows of the batch
    one after the other.

    Args:
        document_ids: of `trainer_kit.data.pack`, int64, shape (batch, tokens).

    Returns:
        The first token of each document and the number of all tokens (``cu_seqlens``), int32, shape (documents + 1,);
        and the length of the longest document (``max_seqlen``).

    Raises:
        DataError: ids of another shape.

    Example:
        >>> offsets, longest = document_offsets(torch.tensor([[0, 0, 1], [0, 0, 0]]))
        >>> offsets.tolist(), longest
        ([0, 2, 3, 6], 3)
    """
    _check(document_ids)
    begins = torch.ones_like(
        document_ids,
        dtype=torch.bool,
    )
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    firsts = begins.flatten().nonzero().flatten()
    count = firsts.new_full((1,), document_ids.numel())
    offsets = torch.cat([firsts, count])
    # sync point: kernels take the length as a number
    longest = int(offsets.diff().max().item())
    return offsets.to(torch.int32), longest
