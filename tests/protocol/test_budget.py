"""The budget follows the length of steps: grows while nobody notices, shrinks when somebody would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol.budget import LEAST, REST_EVERY, START, Budget, shares

KNOWN = Budget(baseline=(0.1, 0.1, 0.1))


def test_without_a_baseline_the_target_is_the_limit() -> None:
    assert Budget(target_seconds=0.2).limit_seconds == 0.2


@pytest.mark.parametrize(
    ("baseline", "limit"),
    [
        ((0.04,), 0.07),  # short steps: a quarter and a little more
        ((0.19,), 0.2375),  # just below the target: a quarter
        ((1.0,), 1.25),  # beyond the target already: a quarter
        ((0.1, 9.0, 0.1), 0.145),  # one that was stuck does not count
    ],
)
def test_the_limit_comes_from_steps_without_state(baseline: tuple[float, ...], limit: float) -> None:
    assert Budget(baseline=baseline, target_seconds=0.2).limit_seconds == pytest.approx(limit)


def test_grows_by_half_while_steps_stay_short() -> None:
    assert KNOWN.told(START, 0.12).bytes == START * 3 // 2


def test_is_careful_once_a_step_was_too_long() -> None:
    budget = replace(KNOWN, bytes=3 * START).told(3 * START, 0.3)
    assert budget.bytes == 2 * START
    assert budget.told(budget.bytes, 0.12).bytes == budget.bytes * 6 // 5
    assert budget.told(budget.bytes, 0.3).bytes == budget.bytes * 3 // 4


def test_shrinks_but_not_for_ever() -> None:
    budget = KNOWN
    for _ in range(20):
        budget = budget.told(budget.bytes, 0.3)
    assert budget.bytes == LEAST


def test_a_step_that_hardly_used_it_does_not_let_it_grow() -> None:
    assert KNOWN.told(START // 3, 0.1).bytes == START
    assert KNOWN.told(START // 3, 0.5).bytes == START * 2 // 3


def test_rests_one_step_in_eight() -> None:
    budget, rested = KNOWN, []
    for _ in range(3 * REST_EVERY):
        rested.append(budget.rests)
        budget = budget.told(0 if budget.rests else budget.bytes, 0.1)
    assert rested == ([False] * (REST_EVERY - 1) + [True]) * 3


def test_knows_how_long_steps_last_after_three_without_state() -> None:
    budget, known = Budget(), []
    for seconds in (0.1, 9.0, 0.1, 0.1):
        known.append(budget.knows)
        budget = budget.told(0, seconds)
    assert known == [False, False, False, True]
    assert budget.limit_seconds == pytest.approx(0.145)
    assert Budget(1000, fixed=True).knows


def test_a_fixed_one_stays() -> None:
    budget = Budget(1000, fixed=True)
    for seconds in (0.01, 9.0) * 10:
        budget = budget.told(1000, seconds)
    assert (budget.bytes, budget.rests) == (1000, False)


def test_finds_what_a_machine_can_take() -> None:
    """A step of 0.1 s that ships 100 MB/s has room for 4.5 MB; the budget goes beyond that once, and then stays below."""
    budget = KNOWN
    seen = []
    for _ in range(100):
        moved = 0 if budget.rests else budget.bytes
        budget = budget.told(moved, 0.1 + moved / 100e6)
        seen.append(moved)
    assert 4.5e6 < max(seen) < 4.5e6 * 1.5
    assert sum(moved > 4.5e6 for moved in seen) == 1
    assert sum(seen) / 100 > 2.5e6


def test_once_careful_it_stays_where_a_step_is_near_its_limit() -> None:
    budget = replace(KNOWN, bytes=START, careful=True)
    assert budget.told(START, 0.13).bytes == START
    assert budget.told(START, 0.12).bytes == START * 6 // 5


def test_follows_a_load_that_changes() -> None:
    budget = KNOWN
    for _ in range(200):
        budget = budget.told(0 if budget.rests else budget.bytes, 0.5)
    assert budget.limit_seconds == pytest.approx(0.625)


@given(st.integers(0, 10**9), st.dictionaries(st.integers(0, 9), st.integers(0, 10**9), max_size=6))
def test_shares(budget: int, needs: dict[int, int]) -> None:
    given_ = shares(budget, needs)
    assert given_.keys() == needs.keys()
    assert all(0 <= given_[name] <= needs[name] for name in needs)
    assert sum(given_.values()) <= budget
    # Nothing is kept back from those who need it, but what cannot be divided evenly.
    assert sum(given_.values()) >= min(budget, sum(needs.values())) - len(needs)
    unsatisfied = [given_[name] for name in needs if given_[name] < needs[name]]
    assert not unsatisfied or max(unsatisfied) - min(unsatisfied) <= 1
