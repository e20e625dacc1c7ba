"""The rate of a pull, with a clock of its own."""

from __future__ import annotations

from moec.shipping.pull.fetch import MAX_RANGE_BYTES, FetchOptions, RateLimit, split_ranges


def test_bytes_take_the_time_of_the_rate() -> None:
    now, waits = [100.0], list[float]()

    def pause(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    limit = RateLimit(1000, pause, lambda: now[0])
    for _ in range(10):
        limit.take(500)
    assert now[0] == 105.0 and waits == [0.5] * 10
    now[0] += 60  # time in which nothing is read is not saved up
    limit.take(1000)
    assert waits[-1] == 1.0


def test_no_rate_no_wait() -> None:
    def never(seconds: float) -> None:
        raise AssertionError("waits")

    RateLimit(None, never).take(1 << 40)


def test_a_low_rate_has_one_connection_and_short_ranges() -> None:
    assert FetchOptions(4).used_connections == 4 and FetchOptions(4).range_bytes == MAX_RANGE_BYTES
    assert FetchOptions(4, 1 << 20).used_connections == 1 and FetchOptions(4, 1 << 20).range_bytes == 1 << 20
    assert FetchOptions(4, 10).range_bytes == 64 << 10
    assert FetchOptions(4, 1 << 30).used_connections == 4 and FetchOptions(4, 1 << 30).range_bytes == MAX_RANGE_BYTES


def test_ranges_are_split() -> None:
    assert split_ranges(3, 10, 4) == [(3, 7), (7, 10)]
    assert split_ranges(3, 3, 4) == []
