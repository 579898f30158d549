"""Times, sizes and numbers of command lines, and the axes that show shares."""

import pytest

from ft.base import quantities
from ft.show.axes import Percents


def test_times():
    texts = ("250ms", "10s", "2.5m", "2 min", "12h", "90d", "1e3s", ".5s", "0", "0s")
    expected = [0.25, 10.0, 150.0, 120.0, 43200.0, 7776000.0, 1000.0, 0.5, 0.0, 0.0]
    assert [quantities.seconds(text, 0.0) for text in texts] == expected
    assert quantities.seconds("12", bare=60.0) == 720.0 and quantities.seconds("12h", bare=60.0) == 43200.0


@pytest.mark.parametrize("text", ["10", "50000", "1,5s", "-1s", "1w", "s", "", "nan", "inf", "1e999s", True, "1 S"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError):
        quantities.seconds(text)


def test_sizes_rates_and_numbers():
    assert [quantities.size(text) for text in ("80GB", "1.5 GiB", "3k", "12")] == [80e9, 1.5 * 2**30, 3e3, 12.0]
    assert [quantities.amount(text) for text in ("350M", "70B", "12")] == [350e6, 70e9, 12.0]
    assert [quantities.gigabytes_per_second(text) for text in ("25", "25GB/s", "12.5 GB/s")] == [25.0, 25.0, 12.5]
    assert [quantities.whole(0)(text) for text in ("0", "98,304", 7, "1000000")] == [0, 98304, 7, 1000000]
    for read, text in (
        *((quantities.size, text) for text in ("0GB", "80 apples", "-1GB", "")),
        *((quantities.whole(1), text) for text in ("0", "-5", "1,2", "1.5", "", "9" * 40, True)),
        *((quantities.amount, text) for text in ("0B", "much", "-3")),
        (quantities.positive, "0"),
        (quantities.between(0.0, 1.0), "nan"),
    ):
        with pytest.raises(ValueError):
            read(text)
    with pytest.raises(ValueError, match="a size has a unit"):
        quantities.size("100", bare=None)


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        ([0.0, 0.5, 1.0], ["0%", "50%", "100%"]),
        ([0.98, 0.985, 0.99], ["98.0%", "98.5%", "99.0%"]),
        ([0.9975, 1.0], ["99.75%", "100.00%"]),
        ([0.7 + 0.1, 0.9], ["80%", "90%"]),
    ],
)
def test_ticks_of_an_axis_can_be_told_apart(shares, shown):
    assert Percents().format_ticks(shares) == shown
