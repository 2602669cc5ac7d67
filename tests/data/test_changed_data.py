"""A checkpoint inside an epoch of other data: the next epoch, or a line that says what has changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Sees(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, batch.flatten().tolist()))
        return self.layer(batch / 20).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(self.count).float().unsqueeze(1)

    def __len__(self) -> int:
        return self.count


def data(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).unsqueeze(1), batch_size=2, **options)  # type: ignore[arg-type]


def resumed(
    first: Any, second: Any, path: Path, **options: Any
) -> list[tuple[int, list[float]]]:
    """The batches of a run of two epochs that continues after two batches of ``first``."""
    trainer = tk.Trainer(**OPTIONS, max_steps=2)
    trainer.fit(Sees(), first)
    trainer.save_checkpoint(path)
    module = Sees()
    tk.Trainer(**OPTIONS, max_epochs=2, **options).fit(module, second, ckpt_path=path)
    return module.seen


@pytest.mark.parametrize("name", ["fewer", "as many as were read", "a limit", "a list"])
def test_an_epoch_that_is_over_now_counts_as_complete(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    first: Any = data(8)
    second: Any = data(8)
    options: dict[str, Any] = {}
    if name == "fewer":
        second = data(2)
    elif name == "as many as were read":
        second = data(4)
    elif name == "a limit":
        options = {"limit_train_batches": 1}
    else:
        first, second = list(data(8)), list(data(2))
    seen = resumed(first, second, tmp_path / "state", **options)
    assert {epoch for epoch, _ in seen} == {1}
    assert seen[0][1] == [0.0, 1.0]
    assert "training continues with epoch 1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
def test_a_stream_that_is_over_now(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has ended before batch 2"):
        seen = resumed(
            DataLoader(Stream(8), batch_size=2),
            DataLoader(Stream(2), batch_size=2),
            tmp_path / "state",
        )
    assert seen == [(1, [0.0, 1.0])]


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (data(8), data(12), "the training data have 12 samples, and had 8"),
        (
            data(8),
            data(8, shuffle=True),
            "in the order of RandomSampler, and were in that of SequentialSampler",
        ),
        (
            DataLoader(Stream(8), batch_size=2),
            DataLoader(Stream(12), batch_size=2),
            "the training data have 12 samples, and had 8",
        ),
    ],
)
def test_a_change_inside_an_epoch_gets_a_line(
    first: Any, second: Any, line: str, tmp_path: Path, capsys: Any
) -> None:
    seen = resumed(first, second, tmp_path / "state")
    assert seen[0][0] == 0
    output = capsys.readouterr().out
    assert line in output
    assert output.count("may repeat samples or leave some out") == 1


def test_the_same_data_get_no_line(tmp_path: Path, capsys: Any) -> None:
    seen = resumed(data(8, shuffle=True), data(8, shuffle=True), tmp_path / "state")
    assert len(seen) == 6
    output = capsys.readouterr().out
    assert "may repeat" not in output
    assert "continues with epoch" not in output


def test_a_checkpoint_without_these_facts_is_read(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from trainer_kit.data import Feed

    monkeypatch.setattr(Feed, "facts", None)
    assert len(resumed(data(8), data(8), tmp_path / "state")) == 6


class Unsized(Stream):
    __len__ = None  # type: ignore[assignment]


class Resumable(Unsized):
    """With torchdata's state."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at - 1.0])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
@pytest.mark.parametrize("kind", [Unsized, Resumable])
def test_an_unsized_stream_that_is_over_now_gets_a_line(
    kind: Any, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        seen = resumed(
            DataLoader(kind(8), batch_size=2),
            DataLoader(kind(2), batch_size=2),
            tmp_path / "state",
        )
    assert seen == [(1, [0.0, 1.0])]
    assert (
        sum("has ended before batch 2, at which" in str(line.message) for line in lines)
        == 1
    )


@pytest.mark.parametrize("kind", [Unsized, Resumable])
def test_a_stream_that_ends_where_the_checkpoint_is_gets_no_line(
    kind: Any, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        resumed(
            DataLoader(kind(4), batch_size=2),
            DataLoader(kind(4), batch_size=2),
            tmp_path / "state",
        )
    assert not any("has ended before" in str(line.message) for line in lines)


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (data(8), data(12), "the training data have 12 samples, and had 8"),
        (
            data(8),
            data(2),
            "batch 2 of epoch 0, which has 1 now: the loader yields no batches",
        ),
        (
            data(8),
            data(8, shuffle=True),
            "in the order of RandomSampler, and were in that of Seq",
        ),
        (
            DataLoader(Stream(8), batch_size=2),
            DataLoader(Stream(12), batch_size=2),
            "the training data have 12 samples, and had 8",
        ),
        (data(8), data(8), None),
        (data(4), data(4), None),
    ],
)
def test_the_accelerator_says_so_too(
    first: Any, second: Any, line: str | None, tmp_path: Path, capsys: Any
) -> None:
    accelerator = tk.Accelerator(cpu=True)
    loader = accelerator.prepare(first)
    for index, _ in enumerate(loader):
        if index == 1:
            accelerator.save_state(tmp_path / "state")
            position = loader.state_dict()
            break
    again = tk.Accelerator(cpu=True)
    other = again.prepare(second)
    again.load_state(tmp_path / "state")
    output = capsys.readouterr().out
    assert output.count("may repeat samples") + output.count(
        "yields no batches"
    ) == bool(line)
    assert (line or "") in output
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        other.load_state_dict(position)
    assert [line in str(warning.message) for warning in lines] == [True] * bool(line)


@pytest.mark.parametrize("kind", [Unsized, Resumable])
@pytest.mark.parametrize("count", [2, 8])
def test_an_accelerator_reads_a_stream_that_is_over_now(
    kind: Any, count: int, tmp_path: Path
) -> None:
    accelerator = tk.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(kind(8), batch_size=2))
    for index, _ in enumerate(loader):
        if index == 1:
            accelerator.save_state(tmp_path / "state")
            break
    again = tk.Accelerator(cpu=True)
    other = again.prepare(DataLoader(kind(count), batch_size=2))
    again.load_state(tmp_path / "state")
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        assert len(list(other)) == (2 if count == 8 else 0)
    assert any("has ended before" in str(line.message) for line in lines) == (
        count == 2
    )


def weights_of_old(drawn: int) -> dict[str, float]:
    return {"web": 3, "code": 1}


def weights_of_new(drawn: int) -> dict[str, float]:
    return {"web": 1, "code": 1}


def mixture(weights: Any = None, web: int = 16, **options: Any) -> Any:
    """Samples from 0 on are of ``web``, and from 100 on of ``code``."""
    sources = {
        "web": torch.arange(float(web)).unsqueeze(1),
        "code": torch.arange(100.0, 116.0).unsqueeze(1),
    }
    return tk.data.mix(sources, weights or {"web": 3, "code": 1}, **options)


def mixed(*arguments: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(mixture(*arguments, **options), batch_size=4)


OF_WEIGHTS = (
    "the weights of the mixture are web 0.5, code 0.5, and were web 0.75, code 0.25 in the checkpoint: each source"
    " continues from its saved position, the new weights hold from there on, and the rest of epoch 0 may repeat samples"
    " or leave some out"
)
OF_SIZE = (
    "the source web of the mixture has 24 samples, and had 16 in the checkpoint: each source continues from its saved"
    " position, the next pass over web begins with its new size, and the rest of epoch 0 may repeat samples or"
    " leave some out"
)


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        (mixed(), mixed({"web": 1, "code": 1}), [OF_WEIGHTS]),
        (mixed(), mixed(web=24), [OF_SIZE]),
        (mixed(), mixed({"web": 2, "code": 2}, 24), [OF_WEIGHTS, OF_SIZE]),
        (
            mixed(weights_of_old),
            mixed(weights_of_new),
            ["are those of weights_of_new, and were those of weights_of_old"],
        ),
        (
            mixed(),
            mixed(weights_of_new),
            ["are those of weights_of_new, and were web 0.75, code 0.25 in"],
        ),
        # Only their ratio counts.
        (mixed({"web": 0.7, "code": 0.3}), mixed({"web": 7, "code": 3}), []),
        (mixed(weights_of_old), mixed(weights_of_old), []),
        (mixed(), mixed(), []),
    ],
)
def test_a_changed_mixture_gets_a_line(
    first: Any, second: Any, lines: list[str], tmp_path: Path, capsys: Any
) -> None:
    resumed(first, second, tmp_path / "state")
    output = capsys.readouterr().out
    for line in lines:
        assert line in output
    assert output.count("may repeat samples or leave some out") == len(lines)


def test_sources_continue_from_their_positions_with_the_new_weights(
    tmp_path: Path,
) -> None:
    # Two batches have read 6 samples of web and 2 of code.
    seen = resumed(mixed(), mixed({"web": 1, "code": 1}), tmp_path / "state")
    rest = [sample for epoch, batch in seen if epoch == 0 for sample in batch]
    web = [sample for sample in rest if sample < 100]
    code = [sample for sample in rest if sample >= 100]
    # The batch before the position is drawn again, with the new weights.
    assert abs(web[0] - 6) <= 1
    assert abs(code[0] - 102) <= 1
    assert web == list(range(int(web[0]), int(web[0]) + len(web)))
    assert code == list(range(int(code[0]), int(code[0]) + len(code)))
    assert abs(len(web) - len(code)) <= 1


@pytest.mark.parametrize("kind", ["shuffled", "inner"])
def test_a_mixture_below_another_stream_gets_a_line(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    def loader(weights: Any) -> DataLoader[Any]:
        stream = mixture(weights, until=None)
        if kind == "shuffled":
            stream = tk.data.shuffle(stream, buffer=4)
        else:
            stream = tk.data.mix({"only": stream})
        return DataLoader(stream, batch_size=4)

    resumed(
        loader(None),
        loader({"web": 1, "code": 1}),
        tmp_path / "state",
        limit_train_batches=4,
    )
    output = capsys.readouterr().out
    assert OF_WEIGHTS in output
    assert output.count("may repeat samples or leave some out") == 1


def test_a_checkpoint_without_the_facts_of_a_mixture_is_read(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from trainer_kit.data.mixture import Mixture

    with monkeypatch.context() as patch:
        # As older versions saved it.
        patch.setattr(Mixture, "describe_mixtures", lambda mixture: [])
        trainer = tk.Trainer(**OPTIONS, max_steps=2)
        trainer.fit(Sees(), mixed())
        trainer.save_checkpoint(tmp_path / "state")
    module = Sees()
    tk.Trainer(**OPTIONS, max_epochs=1).fit(
        module, mixed({"web": 1, "code": 1}), ckpt_path=tmp_path / "state"
    )
    assert module.seen
    assert "may repeat" not in capsys.readouterr().out


def test_a_refused_batch_size_of_a_stream_does_not_announce_a_position(
    tmp_path: Path, capsys: Any
) -> None:
    larger = DataLoader(mixture(), batch_size=8)
    with pytest.raises(tk.TrainerKitError, match="the position in the stream is known"):
        resumed(mixed(), larger, tmp_path / "state")
    assert "continuing at batch" not in capsys.readouterr().out


def test_another_batch_size_of_a_stream_announces_its_position(
    tmp_path: Path, capsys: Any
) -> None:
    smaller = DataLoader(mixture(), batch_size=2)
    seen = resumed(mixed(), smaller, tmp_path / "state")
    expected = list(DataLoader(mixture(), batch_size=2))[4:]
    epoch = [batch for number, batch in seen if number == 0]
    assert epoch == [batch.flatten().tolist() for batch in expected]
    assert capsys.readouterr().out.count("continuing at batch 4 of the epoch") == 1
