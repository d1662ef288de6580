"""When a checkpoint takes it for granted that most keys have changed."""

from __future__ import annotations

from anabranch.runtime.density import Density


def checkpoint(density: Density, undo_bytes: int, dense: bool) -> bool:
    """One that would find what `dense` says; whether it took it for granted."""
    density.undo_bytes += undo_bytes
    expected = density.begin()
    density.learn(None if expected else dense)
    return expected


def test_it_looks_first_then_expects_it_for_a_while_and_looks_again() -> None:
    density = Density()
    assert [checkpoint(density, 1000, True) for _ in range(12)] == [
        False,
        *[True] * 8,
        False,
        *[True] * 2,
    ]


def test_fewer_bytes_than_then_are_no_reason() -> None:
    density = Density()
    assert [checkpoint(density, size, True) for size in (1000, 1000, 870, 900)] == [False, True, False, True]


def test_many_bytes_of_few_keys_are_no_reason() -> None:
    density = Density()
    assert not any(checkpoint(density, 1000, False) for _ in range(3))
    assert [checkpoint(density, 1000, dense) for dense in (True, True)] == [False, True]
    for _ in range(8):
        checkpoint(density, 1000, False)
    assert not checkpoint(density, 1000, False)
