"""The one table of devices: its rows agree with each other, and words find them."""

from __future__ import annotations

import pytest

from trainer_kit.core.device_table import _rows, device_peak, find_device, known_devices
from trainer_kit.core.errors import ConfigurationError


@pytest.mark.parametrize("word", sorted(known_devices()))
def test_each_row_is_complete_and_plausible(word):
    row = find_device(word)
    assert row.half >= row.tf32 >= row.single > 0
    assert 16 <= row.memory <= 300
    assert row.bandwidth > row.link >= row.network > 0
    assert row.host > 0
    assert row.group >= 8
    assert row.system
    assert row.source
    assert device_peak(row.name, "16-true") == row.flops("16-true"), (
        "the monitor finds the same row"
    )


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.name)
def test_rates_are_those_of_dense_products(row):
    """A sheet's rate with sparsity is twice the dense one: in one column alone it would show here."""
    assert row.half >= row.tf32 >= row.single > 0
    assert row.source
    if (
        row.tf32 > row.single
    ):  # tensor cores multiply TF32 at half the rate of 16-bit floats
        assert row.half == pytest.approx(2 * row.tf32, rel=0.03)


def test_links_are_those_of_one_direction():
    """The sheets give both: 900 GB/s of NVLink for an H100. Half of it was halved again for TPUs."""
    both = {
        "h100": 900,
        "b200": 1800,
        "a100": 600,
        "v100": 300,
        "mi300x": 896,
        "tpu-v5e": 400,
        "tpu-v5p": 1200,
        "l4": 64,
    }
    assert {word: 2 * find_device(word).link for word in both} == both


def test_words_find_their_rows():
    named = [
        "h200",
        "h100",
        "a100-80",
        "a100-40",
        "b200",
        "l40s",
        "a10g",
        "rtx4090",
        "t4",
        "v100",
        "mi300x",
    ]
    assert (
        len({find_device(word).name for word in [*named, "tpu-v5e", "tpu-v5p"]}) == 13
    )
    assert find_device("A100") is find_device("a100_80GB")
    assert find_device("nvidia-h100").memory == 80
    with pytest.raises(
        ConfigurationError, match="this device has no known data sheet\n  found: 'h210'"
    ):
        find_device("h210")


def test_precisions_of_a_device():
    h200, t4 = find_device("h200"), find_device("t4")
    assert [
        h200.flops(word) for word in ("bf16-mixed", "16-true", "64-true", "int8")
    ] == [
        989e12,
        989e12,
        None,
        None,
    ]
    assert (h200.flops("32-true", tf32=True), h200.flops("32-true", tf32=False)) == (
        494e12,
        67e12,
    )
    assert (t4.flops("bf16-mixed"), t4.flops("16-mixed")) == (None, 65e12)
