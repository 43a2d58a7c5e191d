"""Number of prompt tokens between two rounds."""

from __future__ import annotations

from math import inf

from paceline.engine.reading_pace import ReadingPace


def test_a_fast_machine_feeds_the_quota_between_rounds() -> None:
    pace = ReadingPace(128)
    pace.observe(256, 0.01)
    assert pace.limit(running=True) == 128


def test_a_slow_machine_feeds_for_thirty_milliseconds_between_rounds() -> None:
    pace = ReadingPace(128)
    pace.observe(1000, 2.0)
    assert pace.limit(running=True) == 15


def test_reading_may_take_as_long_as_a_round() -> None:
    pace = ReadingPace(128)
    pace.observe(32, 0.32)
    pace.round_seconds = 0.4
    assert pace.limit(running=True) == 40


def test_a_very_slow_machine_feeds_enough_rows_to_be_efficient() -> None:
    pace = ReadingPace(128)
    pace.observe(8, 8.0)
    assert pace.limit(running=True) == 8
    assert pace.limit(running=False) == 32


def test_without_running_replies_half_a_second_is_fed() -> None:
    pace = ReadingPace(16)
    pace.observe(128, 1.0)
    assert pace.limit(running=False) == 64


def test_a_small_quota_is_respected() -> None:
    pace = ReadingPace(3)
    pace.observe(8, 8.0)
    assert pace.limit(running=True) == 3


def test_one_slow_piece_does_not_lower_the_limit() -> None:
    """The first piece of a prompt also loads its cached prefix."""
    pace = ReadingPace(128)
    pace.observe(1000, 2.0)
    pace.observe(100, 20.0)
    assert pace.limit(running=True) == 15
    for _ in range(4):
        pace.observe(100, 2.0)
    assert pace.limit(running=True) == 8


def test_the_first_piece_is_small_and_no_quota_means_no_limit() -> None:
    assert ReadingPace(128).limit(running=False) == 32
    assert ReadingPace(inf).limit(running=True) == inf


def test_reading_limits_are_whole_numbers_of_tokens() -> None:
    pace = ReadingPace(128)
    pace.observe(30, 0.7)
    assert pace.limit(running=False) == 32
    pace.observe(300, 3.1)
    assert pace.limit(running=False) == 48
