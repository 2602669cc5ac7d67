"""Loaders of other libraries resume as the table of the guide says, with the real packages (`make test-data`)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from trainer_kit.testing import check_loader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Of the libraries themselves, and found again when their workers start.
    pytest.mark.filterwarnings("ignore"),
]
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "streams.md"
COUNT = 26
MakeLoader = Callable[[Path, int], Any]


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of libraries would start a thread that never ends."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def hf_dataset(first: int = 0) -> Any:
    datasets = pytest.importorskip("datasets")
    numbers = list(range(first, first + COUNT))
    return datasets.Dataset.from_dict({"x": numbers}).with_format("torch")


def hf_map_style(root: Path, workers: int) -> Any:
    return DataLoader(hf_dataset(), batch_size=3, shuffle=True, num_workers=workers)


def hf_stream(root: Path, workers: int) -> Any:
    stream = hf_dataset().to_iterable_dataset(num_shards=4)
    return DataLoader(stream, batch_size=3, num_workers=workers)


def hf_shuffle_buffer(root: Path, workers: int) -> Any:
    stream = hf_dataset().to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=3, buffer_size=5)
    return DataLoader(stream, batch_size=3, num_workers=workers)


def hf_interleaved(root: Path, workers: int) -> Any:
    datasets = pytest.importorskip("datasets")
    streams = [
        hf_dataset(first).to_iterable_dataset(num_shards=4) for first in (0, 100)
    ]
    mixed = datasets.interleave_datasets(streams, probabilities=[0.5, 0.5], seed=1)
    return DataLoader(mixed, batch_size=3, num_workers=workers)


def stateful_loader(root: Path, workers: int) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(
        list(range(COUNT)), batch_size=3, shuffle=True, num_workers=workers
    )


def nodes(root: Path, workers: int) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    node = nodes.SamplerWrapper(SequentialSampler(range(COUNT)))
    node = nodes.Batcher(node, 3, drop_last=False)
    if workers:
        node = nodes.ParallelMapper(
            node, torch.tensor, num_workers=workers, method="thread"
        )
    else:
        node = nodes.Mapper(node, torch.tensor)
    return nodes.Loader(node)


def grain_dataset(root: Path, workers: int) -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(COUNT).shuffle(seed=3).batch(3).to_iter_dataset()


def web_dataset(root: Path, workers: int) -> Any:
    webdataset = pytest.importorskip("webdataset")
    shards = [root / f"{number}.tar" for number in range(4)]
    if not shards[0].exists():
        for number, shard in enumerate(shards):
            with webdataset.TarWriter(str(shard)) as writer:
                for index in range(number, COUNT, 4):
                    sample = {"__key__": f"{index:04}", "x.pth": torch.tensor([index])}
                    writer.write(sample)
    dataset = webdataset.WebDataset(
        list(map(str, shards)),
        shardshuffle=False,
        nodesplitter=webdataset.split_by_node,
    )
    dataset = dataset.decode().to_tuple("x.pth")
    return DataLoader(dataset, batch_size=3, num_workers=workers)


def lit_data(root: Path, workers: int) -> Any:
    litdata = pytest.importorskip("litdata")
    if not any(root.iterdir()):
        cache = litdata.streaming.Cache(str(root), chunk_size=4)
        for index in range(COUNT):
            cache[index] = torch.tensor([index])
        cache.done()
        cache.merge()
    dataset = litdata.StreamingDataset(str(root), shuffle=True, seed=1)
    return litdata.StreamingDataLoader(dataset, batch_size=3, num_workers=workers)


def mosaic_streaming(root: Path, workers: int) -> Any:
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("streaming is not installed")
    _stand_in_for_torchvision()
    import streaming

    data = root / "mds"
    if not data.exists():
        with streaming.MDSWriter(out=str(data), columns={"x": "int"}) as writer:
            for index in range(COUNT):
                writer.write({"x": index})
    dataset = streaming.StreamingDataset(
        local=str(data),
        shuffle=True,
        shuffle_seed=3,
        batch_size=3,
        num_canonical_nodes=1,
    )
    return streaming.StreamingDataLoader(dataset, batch_size=3, num_workers=workers)


def _stand_in_for_torchvision() -> None:
    """It imports three names for data sets of images; torchvision's own wheel needs another build of torch."""
    # First: transformers would look into the stand-in.
    import transformers.feature_extraction_utils  # noqa: F401

    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module: Any = ModuleType(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.VisionDataset = object
        module.to_tensor = None
        sys.modules.setdefault(module.__name__, module)


LOADERS: dict[str, MakeLoader] = {
    "Hugging Face `datasets`, map-style": hf_map_style,
    "Hugging Face stream": hf_stream,
    "Hugging Face stream with `shuffle(buffer_size=)`": hf_shuffle_buffer,
    "Hugging Face `interleave_datasets`": hf_interleaved,
    "torchdata `StatefulDataLoader`": stateful_loader,
    "torchdata `nodes.Loader`": nodes,
    "Grain `IterDataset`": grain_dataset,
    "WebDataset": web_dataset,
    "litdata `StreamingDataLoader`": lit_data,
    "MosaicML `StreamingDataLoader`": mosaic_streaming,
}


def verdicts() -> dict[str, list[str]]:
    """The columns of the guide's table: without workers, with 2 of them, and another number of ranks."""
    table = GUIDE.read_text().partition("## Data loaders of other libraries")[2]
    rows = {}
    for line in table.splitlines():
        if line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.removesuffix("|").strip()] = cells[:3]
    return {name: rows[name] for name in rows if name in LOADERS}


def test_every_library_has_a_row() -> None:
    assert list(verdicts()) == list(LOADERS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("library", LOADERS)
def test_a_library_resumes_as_the_guide_says(
    library: str, workers: int, tmp_path: Path
) -> None:
    verdict = verdicts()[library][int(workers > 0)]
    if verdict == "–":
        pytest.skip("no such workers")
    # Waits for the other ranks in its constructor.
    processes = library.startswith("MosaicML")
    if processes:
        pytest.importorskip("transformers")
    report = check_loader(
        Maker(library, tmp_path),
        workers=[workers],
        positions=1,
        processes=processes,
        ranks=[1, 2],
    )
    failures = "\n".join(map(str, report.failures))
    assert verdict == ("not exact" if failures else "exact"), failures
    for check in report.checks:
        if check.name == "other ranks" and verdict == "exact":
            expected = {"yes": "ok", "refused": "refused"}[verdicts()[library][2]]
            assert check.status == expected, check


class Maker:
    """Can be pickled for the processes of ranks."""

    def __init__(self, library: str, root: Path) -> None:
        self.library = library
        self.root = root

    def __call__(self, workers: int) -> Any:
        return LOADERS[self.library](self.root, workers)
