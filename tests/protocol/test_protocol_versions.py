"""The order of versions, the choice of one, and the words when there is none."""

from __future__ import annotations

import itertools

from anabranch.model.ids import WorkerId
from anabranch.protocol.versions import LIVE, Answer, Version, explain_nothing_common, newest_common

W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)


def test_live_is_above_every_number() -> None:
    ordered = [Version(0), Version(7), Version(10), LIVE]
    assert all(sorted(shuffled) == ordered for shuffled in itertools.permutations(ordered))
    assert not LIVE < LIVE
    assert str(LIVE) == "the live state"
    assert str(Version(7)) == "version 7"


def test_the_maximum_of_the_intersection() -> None:
    sets = [[LIVE, Version(3), Version(2)], [Version(3), Version(2)], [LIVE, Version(2), Version(3)]]
    assert newest_common({WorkerId(i): Answer.of(has) for i, has in enumerate(sets)}) == Version(3)
    assert newest_common({W0: Answer.of([LIVE, Version(1)]), W1: Answer.of([Version(1), LIVE])}) == LIVE
    assert newest_common({W0: Answer.of([LIVE, Version(1)]), W1: Answer.of([Version(2)])}) is None


def test_an_answer_does_not_depend_on_order() -> None:
    one = Answer.of([Version(1), LIVE], {Version(3): "a", Version(2): "b"})
    assert one == Answer.of([LIVE, Version(1)], {Version(2): "b", Version(3): "a"})


def test_the_explanation_names_what_each_has_what_is_in_the_way_and_what_to_do() -> None:
    missing = "checkpoints/000000007/part-00003.parquet is missing"
    damaged = "checkpoints/000000006/part-00001.parquet has 120 bytes, 4096 were written"
    text = explain_nothing_common(
        {
            W0: Answer.of([LIVE, Version(7), Version(6)]),
            W1: Answer.of([Version(7)], {Version(6): damaged}),
            W2: Answer.of([Version(6)], {Version(7): missing}),
        }
    )
    assert "worker 0 can open: the live state, version 7, version 6" in text
    assert f"in the way of version 7: worker 2: {missing}" in text
    assert f"in the way of version 6: worker 1: {damaged}" in text
    assert "in the way of the live state: worker 1, 2: it is not there" in text
    assert "bring back what worker 2 lacks of version 7" in text
    # The least to repair comes first.
    assert text.index("in the way of version 7") < text.index("in the way of the live state")


def test_what_is_in_the_way_of_several_is_said_once() -> None:
    answers = {worker: Answer.of([], {Version(1): "trimmed"}) for worker in (W0, W1, W2)}
    text = explain_nothing_common(answers)
    assert text.count("trimmed") == 1
    assert "in the way of version 1: worker 0, 1, 2: trimmed" in text


def test_the_explanation_when_nobody_has_anything() -> None:
    text = explain_nothing_common({W0: Answer.of([]), W1: Answer.of([])})
    assert "worker 1 can open: nothing" in text
    assert "What to do: bring back the checkpoints folder" in text
