"""Steps as long as the user wants, on machines that cost `fixed + slope · rows`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.runtime.sizing import StepSizer

FIRST = 10_000


def simulate(
    sizer: StepSizer, fixed: float, slope: float, steps: int, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, float]]:
    """Steps over an endless backlog: (rows, seconds without noise) of each."""
    rng = random.Random(seed)
    found = []
    for _ in range(steps):
        rows = sizer.next_rows()
        seconds = fixed + slope * rows
        sizer.observe(rows, seconds * (1 + noise * rng.random()))
        found.append((rows, seconds))
    return found


@pytest.mark.parametrize("fixed", [0.0, 0.01, 0.06, 0.15])
@pytest.mark.parametrize("slope", [1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_converges_to_the_target(fixed: float, slope: float, noise: float) -> None:
    sizer = StepSizer(0.2, 20_000_000)
    last = simulate(sizer, fixed, slope, 60, noise)[-20:]
    mean = sum(seconds for _, seconds in last) / len(last)
    # Where the fixed part is most of the target, rows get as much time as it takes (SIZE-2).
    wanted = max(0.2, 2 * fixed)
    assert 0.6 * wanted <= mean <= 1.5 * wanted


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("fixed", [0.0, 0.06])
def test_stays_at_the_target_for_long(fixed: float, noise: float) -> None:
    later = simulate(StepSizer(0.2, 20_000_000), fixed, 1e-6, 1000, noise)[100:]
    assert max(seconds for _, seconds in later) <= 0.5


def test_slow_rows_get_small_steps() -> None:
    last = simulate(StepSizer(0.2, 20_000_000), 0.03, 0.001, 40)[-10:]
    assert all(0.1 <= seconds <= 0.4 for _, seconds in last)


@pytest.mark.parametrize("fixed", [0.3, 1.0, 5.0])
def test_a_fixed_part_beyond_the_target_does_not_starve_the_flow(fixed: float) -> None:
    slope = 1e-6
    rows, _ = simulate(StepSizer(0.2, 20_000_000), fixed, slope, 60)[-1]
    assert rows * slope >= 0.5 * fixed


def test_grows_from_small_steps_when_the_fixed_part_dominates() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    # A trickle: ten rows at a time, and then a backlog.
    for _ in range(50):
        sizer.observe(10, 0.05)
    sizes = [rows for rows, _ in simulate(sizer, 0.05, 1e-6, 40)]
    assert sizes[0] > 10
    assert min(sizes[10:]) > 75_000


@pytest.mark.parametrize("seed", range(20))
def test_slow_first_steps_are_not_held_against_rows_for_long(seed: int) -> None:
    """A cluster was starting up: two steps in a row were held up, and then fifty had 100 rows each."""
    sizer, rng = StepSizer(0.2, 10_000), random.Random(seed)
    for seconds in (1.06, 0.66, 0.61, 0.84, 1.35):
        sizer.observe(sizer.next_rows(), seconds, 10**9)
    sizes = []
    for _ in range(60):
        sizes.append(rows := sizer.next_rows())
        sizer.observe(rows, 0.25 + 0.15 * rng.random() + 1e-6 * rows, 10**9)
    assert max(sizes[:20]) > 1_000
    assert min(sizes[-20:]) > 4_000


def test_one_step_now_and_then_tries_more_rows_and_seldom_if_they_cost_what_was_thought() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    tried = []
    for number in range(600):
        rows = sizer.next_rows()
        # What waits becomes less, so that it does not hurry.
        sizer.observe(rows, 0.05 + 1e-6 * rows, 10**9 - number)
        if rows > 250_000:
            tried.append(number)
    assert 3 <= len(tried) <= 12
    assert tried[-1] - tried[-2] > 100


def test_where_nothing_waits_nothing_is_tried() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    simulate(sizer, 0.05, 1e-6, 60)
    sizes = []
    for _ in range(60):
        sizes.append(sizer.next_rows())
        sizer.observe(100_000, 0.15, 100_000)
    assert max(sizes) < 250_000


def test_follows_a_machine_that_becomes_slower() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    simulate(sizer, 0.05, 1e-6, 60)
    _, seconds = simulate(sizer, 0.05, 1e-5, 60)[-1]
    assert 0.1 <= seconds <= 0.3


def test_a_single_step_that_was_held_up_changes_nothing() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    simulate(sizer, 0.05, 1e-6, 60)
    rows = sizer.next_rows()
    sizer.observe(rows, 2.0)
    assert sizer.next_rows() == rows
    # But two in a row do.
    sizer.observe(rows, 2.0)
    assert sizer.next_rows() < 0.7 * rows


def test_a_flow_that_loses_ground_takes_larger_steps() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    simulate(sizer, 0.05, 1e-6, 60)
    rows = sizer.next_rows()
    for more in range(1000, 5000, 1000):
        # Steps that also do something else, and leave more and more behind.
        sizer.observe(rows, 0.25, rows + more, usual=False)
    hurried = sizer.next_rows()
    assert 2 * rows < hurried
    sizer.observe(hurried, 0.5, hurried + 5000, usual=False)
    assert sizer.next_rows() < hurried, "too long a step"
    sizer.observe(hurried, 0.3, hurried, usual=False)
    assert sizer.next_rows() == rows, "nothing waits any more"


def test_an_overload_for_long_is_soon_forgotten() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    simulate(sizer, 0.05, 1e-6, 60)
    rows = sizer.next_rows()
    for number in range(5_000):
        sizer.observe(rows, 0.25, rows + number, usual=False)
    for _ in range(20):
        sizer.observe(rows, 0.5, 10 * rows, usual=False)
    assert sizer.next_rows() <= 1.3 * rows


def test_a_large_backlog_alone_does_not_make_steps_longer() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    for waiting in range(10**9, 0, -(10**7)):
        rows = sizer.next_rows()
        sizer.observe(rows, 0.05 + 1e-6 * rows, waiting)
    assert 0.1 <= 0.05 + 1e-6 * sizer.next_rows() <= 0.3


def test_a_source_without_end_does_not_make_steps_longer() -> None:
    sizer = StepSizer(0.2, 20_000_000)
    for _ in range(200):
        rows = sizer.next_rows()
        # What is waiting there is always the same, however much a step takes.
        sizer.observe(rows, 0.05 + 1e-6 * rows, 10**9)
    assert 0.1 <= 0.05 + 1e-6 * sizer.next_rows() <= 0.3


observations = st.lists(
    st.tuples(st.integers(0, 10**8), st.floats(0.0, 1e4, allow_nan=False)), min_size=0, max_size=30
)


@settings(max_examples=200)
@given(observations, st.integers(1, 10**8), st.floats(1e-3, 100.0))
def test_never_exceeds_its_limits(seen: list[tuple[int, float]], limit: int, target: float) -> None:
    sizer = StepSizer(target, limit)
    largest = FIRST
    assert 1 <= sizer.next_rows() <= min(limit, FIRST)
    for rows, seconds in seen:
        rows = min(rows, limit)
        sizer.observe(rows, seconds)
        largest = max(largest, rows)
        assert 1 <= sizer.next_rows() <= min(limit, 2 * largest)
        fixed, slope = sizer.estimate()
        assert fixed >= 0
        assert slope >= 0


def test_a_small_limit_wins() -> None:
    assert [rows for rows, _ in simulate(StepSizer(0.2, 7), 0.05, 1e-6, 5)] == [7] * 5
