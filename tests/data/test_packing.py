"""Packed rows train as the documents alone do: no token sees, or is predicted from, another document."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.core.errors import DataError
from trainer_kit.data import document_mask, document_offsets, mix, pack, shuffle
from trainer_kit.data.streams import integers_from_bytes
from trainer_kit.testing import check_loader

# Found again when torchdata's loader starts.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
VOCABULARY = 500


def documents(count: int = 40, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Of every length, some empty and some longer than a row; no two have the same tokens in one place."""
    draw = random.Random(seed)
    lengths = [0, 1, longest, *(draw.randint(0, longest) for _ in range(count - 3))]
    return [
        [draw.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths
    ]


def pieces(row: dict[str, Tensor]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of each document in a row, without its padding."""
    numbers = row["document_ids"]
    spans = []
    for number in range(int(numbers.max()) + 1):
        span = numbers == number
        assert row["position_ids"][span].tolist() == list(range(int(span.sum())))
        spans.append((row["input_ids"][span].tolist(), row["labels"][span].tolist()))
    if spans[-1][0] == [0] * len(spans[-1][0]):
        assert set(spans[-1][1]) == {-100}
        spans.pop()
    return spans


@pytest.mark.parametrize("open_rows", [1, 4, 64])
def test_fit_keeps_documents_whole(open_rows: int) -> None:
    texts = documents()
    rows = list(pack(texts, 16, open_rows=open_rows))
    expected = Counter[tuple[int, ...]]()
    for text in texts:
        expected.update(tuple(text[i : i + 16]) for i in range(0, len(text), 16))
    packed = Counter(tuple(tokens) for row in rows for tokens, _ in pieces(row))
    assert packed == expected


def test_cut_has_no_padding_before_the_last_row() -> None:
    texts = documents()
    rows = list(pack(texts, 16, method="cut"))
    tokens = torch.cat([row["input_ids"] for row in rows]).tolist()
    assert tokens[: sum(map(len, texts))] == list(chain.from_iterable(texts))
    assert set(tokens[sum(map(len, texts)) :]) <= {0}
    assert len(rows) == -(-sum(map(len, texts)) // 16)


@pytest.mark.parametrize("method", ["fit", "cut"])
def test_each_token_with_a_predecessor_is_a_label_once(method: Any) -> None:
    texts = documents()
    expected = Counter(pair for text in texts for pair in pairwise(text))
    labels = Counter[tuple[int, int]]()
    for row in pack(texts, 16, method=method):
        pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
        labels.update(pair for pair in pairs if pair[1] != -100)
    assert labels == expected


def test_labels_that_the_model_shifts_begin_ignored() -> None:
    for row in pack(documents(), 16, shift=False):
        for tokens, labels in pieces(row):
            assert labels == [-100, *tokens[1:]]


def test_labels_of_a_document_are_used() -> None:
    (row,) = pack([{"ids": [5, 6, 7], "labels": [-100, -100, 7]}], 4, key="ids")
    assert row["labels"].tolist() == [-100, 7, -100, -100]


def test_positions_of_the_row_let_documents_see_each_other() -> None:
    (row,) = pack([[5, 6], [7]], 4, ids="row")
    assert row["position_ids"].tolist() == [0, 1, 2, 3]
    assert "document_ids" not in row


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_documents_of_any_kind(kind: Any) -> None:
    (row,) = pack([kind([5, 6])], 4)
    assert row["input_ids"].tolist() == [5, 6, 0, 0]


def test_little_padding() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(5, 1, 3000).astype(int).clip(1, 4096)
    rows = list(pack([torch.ones(n, dtype=torch.int64) for n in lengths], 2048))
    tokens = sum(int(row["input_ids"].sum()) for row in rows)
    assert tokens == lengths.sum()
    assert tokens / (2048 * len(rows)) > 0.985


class Texts(IterableDataset[Any]):
    """Without a state."""

    def __iter__(self) -> Any:
        return iter(documents(25, 20))


def packed(method: Any, source: Any) -> Any:
    stream = mix({"a": source, "b": shuffle(documents(10, seed=1), 3)}, until=45)
    return pack(stream, 16, method=method, open_rows=3)


@pytest.mark.parametrize("source", [documents(25, 20), Texts()], ids=["list", "stream"])
@pytest.mark.parametrize("method", ["fit", "cut"])
def test_a_resume_is_exact(method: Any, source: Any) -> None:
    report = check_loader(
        lambda workers: DataLoader(packed(method, source), batch_size=3),
        workers=[0],
        positions=4,
    )
    report.raise_if_failed()
    assert {check.status for check in report.checks} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        pytest.param("fit", 1, marks=pytest.mark.long),
        ("fit", 2),
        ("cut", 1),
        pytest.param("cut", 2, marks=pytest.mark.long),
    ],
)
def test_a_resume_is_exact_in_workers(method: Any, ranks: int) -> None:
    report = check_loader(
        lambda workers: DataLoader(
            packed(method, Texts()), batch_size=3, num_workers=workers
        ),
        workers=[2],
        ranks=[ranks],
        positions=1,
    )
    report.raise_if_failed()


def test_a_row_is_not_open_for_ever() -> None:
    """A document that leaves no space for others would keep its position in the state."""
    texts = [[1] * 15, *([[2] * 16] * 300)]
    stream = pack(texts, 16, open_rows=1)
    rows = iter(stream)
    for _ in range(200):
        next(rows)
    source = stream.state_dict()["cursor"]["source"]
    assert integers_from_bytes(source["needed"]) == []


class Model(nn.Module):
    """Two blocks of attention with positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Embedding(64, 16)
        self.attention = nn.ModuleList([nn.Linear(16, 48) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        for attention, layer in zip(self.attention, self.layers, strict=True):
            heads = attention(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(
                *heads, attn_mask=mask, is_causal=mask is None
            )
            hidden = hidden + torch.tanh(layer(attended.transpose(1, 2).flatten(2)))
        return self.head(hidden)


def batch(tokens: int = 32) -> dict[str, Tensor]:
    texts = [text for text in documents(30, 12, seed=2) if text]
    (first, *_) = DataLoader(pack(texts, tokens), batch_size=3)
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_changes_no_bit_of_other_documents(dtype: torch.dtype) -> None:
    rows = batch()
    mask = document_mask(rows["document_ids"])
    model = Model().to(dtype)
    before = model(rows["input_ids"], rows["position_ids"], mask)
    changed = rows["input_ids"].clone()
    document = rows["document_ids"] == 1
    places = document.int().argmax(1)
    changed[torch.arange(len(changed)), places] += 1
    after = model(changed, rows["position_ids"], mask)
    assert torch.equal(before[~document], after[~document])
    assert not torch.equal(before[document], after[document])


@pytest.mark.slow
def test_a_hugging_face_model_separates_documents_by_their_positions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    rows = batch()
    options = {"position_ids": rows["position_ids"], "use_cache": False}
    before = model(input_ids=rows["input_ids"], **options).logits
    document = rows["document_ids"] == 0
    changed = rows["input_ids"].clone()
    changed[:, 0] += 1
    after = model(input_ids=changed, **options).logits
    assert torch.equal(before[~document], after[~document])
    assert not torch.equal(before[document], after[document])


def test_the_packed_loss_and_gradient_are_those_of_the_documents() -> None:
    texts = [text for text in documents(30, 16, seed=3) if text]
    model = Model().double()
    rows = torch.utils.data.default_collate(list(pack(texts, 32)))
    mask = document_mask(rows["document_ids"])
    logits = model(rows["input_ids"], rows["position_ids"], mask)
    loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for text in texts:
        tokens = torch.tensor([text])
        alone = model(tokens, torch.arange(len(text))[None])
        targets = tokens[0, 1:]
        total = total + F.cross_entropy(alone[0, :-1], targets, reduction="sum")
        count += len(targets)
    expected = total / count
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_masks_of_each_kind_are_the_same(causal: bool) -> None:
    ids = batch(128)["document_ids"]
    query, key, value = torch.randn(3, len(ids), 2, 128, 16, dtype=torch.float64)
    dense = document_mask(ids, causal=causal)
    blocks = document_mask(ids, "flex", causal=causal)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    attended = flex_attention(query, key, value, block_mask=blocks)
    torch.testing.assert_close(attended, expected)


def test_parts_of_a_mask() -> None:
    ids = batch()["document_ids"]
    masks = [document_mask(ids, part=part, parts=4) for part in range(4)]
    assert torch.equal(torch.cat(masks, 2), document_mask(ids))


def test_offsets_are_those_of_every_document() -> None:
    ids = batch()["document_ids"]
    offsets, longest = document_offsets(ids)
    lengths = [
        count
        for row in ids
        for count in torch.unique_consecutive(row, return_counts=True)[1].tolist()
    ]
    assert offsets.dtype == torch.int32
    assert offsets.diff().tolist() == lengths
    assert longest == max(lengths)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: pack([], method="best"), "method='best'"),
        (lambda: pack([], ids="none"), "ids='none'"),
        (lambda: pack([], 1), "tokens=1"),
        (lambda: pack([], open_rows=0), "open_rows=0"),
        (lambda: list(pack([{"tokens": [1]}])), "has no 'input_ids'"),
        (lambda: list(pack([[[1, 2]]])), r"shape \(1, 2\)"),
        (lambda: list(pack([[0.5]])), "float64"),
        (
            lambda: list(pack([{"input_ids": [1, 2], "labels": [1]}])),
            "2 tokens, 1 label",
        ),
        (lambda: document_mask(torch.zeros(3)), r"shape \(3,\)"),
        (lambda: document_mask(torch.zeros(1, 3), parts=2), "3 tokens, parts=2"),
        (lambda: document_mask(torch.zeros(1, 4), "flex", parts=2), "parts=2"),
        (lambda: document_mask(torch.zeros(1, 4), "varlen"), "kind='varlen'"),
        (lambda: document_mask(torch.zeros(1, 4), part=2, parts=2), "part=2, parts=2"),
        (lambda: document_mask(torch.zeros(1, 4), parts=0), "part=0, parts=0"),
    ],
)
def test_mistakes_are_errors(make: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def test_rows_of_another_length_do_not_continue_a_state() -> None:
    """Documents were cut anew: tokens were lost, and others came twice."""
    documents = [list(range(20)), list(range(100, 103)), list(range(200, 230))]
    stream = pack(documents, tokens=8)
    next(iter(stream))
    longer = pack(documents, tokens=16)
    longer.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match="tokens=16, and tokens=8 in the state"):
        next(iter(longer))


def test_keys_that_rows_do_not_have_are_named_once() -> None:
    texts = [{"input_ids": [1, 2], "labels": [1, 2], "text": "a", "source": "web"}] * 3
    with pytest.warns(UserWarning, match="leave out source, text of") as warnings:
        list(pack(texts, 4))
    assert len(warnings) == 1


@pytest.mark.parametrize(("worker", "count"), [(0, 1), (1, 0)])
def test_one_worker_names_the_keys_that_rows_do_not_have(
    worker: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(id=worker)
    monkeypatch.setattr("trainer_kit.data.packing.get_worker_info", lambda: info)
    with catch_warnings(record=True) as warnings:
        simplefilter("always")
        list(pack([{"input_ids": [1, 2], "text": "a"}] * 3, 4))
    assert len(warnings) == count


def test_a_state_within_a_long_document_is_small() -> None:
    """It held one entry for each row that the document still fills."""
    stream = pack([list(range(800))], 8)
    rows = iter(stream)
    next(rows)
    state = stream.state_dict()
    assert integers_from_bytes(state["cursor"]["starts"]) == [8]
    resumed = pack([list(range(800))], 8)
    resumed.load_state_dict(state)
    expected = [row["input_ids"].tolist() for row in rows]
    assert [row["input_ids"].tolist() for row in resumed] == expected
