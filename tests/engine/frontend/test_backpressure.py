"""When to come again: the hint follows the rate at which places come free, and who came before."""

from __future__ import annotations

import random

import pytest

from millstream.engine.frontend.backpressure import PlacesComeFree

NUM_PLACES = 200


def measured(rate: float, seconds: float = 100, *, start: float = 0.0) -> PlacesComeFree:
    """An engine that was busy for so long, in which `rate` requests a second ended."""
    places = PlacesComeFree(NUM_PLACES)
    rng = random.Random(1)
    now, owed = start, 0.0
    places.note(0, busy=True, now=now)
    while now < start + seconds:
        step_s = rng.uniform(0.001, 0.05)
        now, owed = now + step_s, owed + rate * step_s
        places.note(int(owed), busy=True, now=now)
        owed -= int(owed)
    return places


@pytest.mark.parametrize("rate", [0.5, 20, 1000])
def test_the_hint_is_the_time_that_the_places_take(rate: float) -> None:
    for count in (1, 8, 25):
        wanted = min(max(count / rate, 0.05), 60)
        assert measured(rate).retry_after_s(count) == pytest.approx(wanted, rel=0.2)


def test_those_sent_away_come_one_after_another() -> None:
    places = measured(10)
    hints = [places.retry_after_s(1) for _ in range(100)]
    assert hints == sorted(hints)
    assert hints[-1] == pytest.approx(10, rel=0.1), "100 places, 10 a second"
    places.note(95, busy=True, now=100.1)  # their places came free meanwhile
    assert places.retry_after_s(1) < 1


def test_who_never_comes_back_makes_nobody_wait_for_ever() -> None:
    places = measured(100)
    hints = [places.retry_after_s(1) for _ in range(10 * NUM_PLACES)]
    assert max(hints) == pytest.approx(4 * NUM_PLACES / 100, rel=0.1), "all places, four times"
    places.note(1, busy=False, now=101.0)  # there is room: the promises are void
    places.note(0, busy=True, now=102.0)
    assert places.retry_after_s(1) < 0.2


def test_nothing_seen_yet() -> None:
    places = PlacesComeFree(NUM_PLACES)
    assert places.retry_after_s(1) == 1.0
    places.note(0, busy=True, now=5.0)
    places.note(0, busy=True, now=50.0)
    assert places.retry_after_s(1) == 1.0


def test_idle_time_does_not_count() -> None:
    places = measured(10)
    for second in range(1000):  # two a second is all that is asked of it
        places.note(2, busy=False, now=200.0 + second)
    places.note(0, busy=True, now=1300.0)
    places.note(1, busy=True, now=1300.1)
    assert places.retry_after_s(1) == pytest.approx(0.1, rel=0.1)


def test_it_follows_a_change() -> None:
    places = measured(100, seconds=60)
    for tenth in range(1, 1200):
        places.note(1 if tenth % 10 == 0 else 0, busy=True, now=60 + tenth / 10)
    assert places.retry_after_s(1) == pytest.approx(1, rel=0.5), "one a second since two minutes"


def test_hints_are_bounded() -> None:
    assert measured(0.001, seconds=5000).retry_after_s(100) == 60
    assert measured(100_000).retry_after_s(1) == 0.05
