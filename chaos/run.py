"""Rounds of chaos: many jobs, one after the other, each from a seed of its own."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos.job import Failed
from chaos.round import Round


@dataclass(frozen=True)
class Options:
    """What a run of chaos is told."""

    seed: int
    rounds: int
    actions: list[str]
    harms: int = 25
    cluster: float = 0.08
    """The share of rounds that run on a cluster: starting one costs half a minute."""
    run_args: list[str] = field(default_factory=list)
    directory: Path | None = None
    kills: int | None = None
    """Stop after the round in which so many were reached."""
    first: int = 0


def play(options: Options, say: Callable[[str], None], tell: Callable[[str], None]) -> Counter[str]:
    """Play the rounds; `say` is told of rounds, `tell` of everything.

    Returns:
        Counts: rounds, kills, restarts, refused, damages, repairs, rescales, finished, cancelled, given_up, steps, rows,
        changes, lost, doubled, failed; and how often each action was done, as `did NAME`.
    """
    counts: Counter[str] = Counter()
    base = options.directory or Path(tempfile.mkdtemp(prefix="anabranch-chaos-"))
    for number in range(options.first, options.first + options.rounds):
        root = base / f"round-{options.seed}-{number}"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        began = time.monotonic()
        own, problems = _round(options, number, root, tell)
        counts.update(own)
        counts["rounds"] += 1
        shown = ", ".join(
            f"{own[key]} {key}"
            for key in ("kills", "restarts", "rescales", "steps", "rows", "lost", "doubled")
        )
        say(f"round {number}: {shown}, {time.monotonic() - began:.0f} s{'' if not problems else ' FAILED'}")
        if problems:
            counts["failed"] += 1
            for problem in problems:
                say(f"  {problem}")
            say(f"  kept in {root}")
            say(f"  again: make chaos SEED={options.seed} ARGS='--first {number} --rounds 1 --verbose'")
        else:
            shutil.rmtree(root, ignore_errors=True)
        if options.kills is not None and counts["kills"] >= options.kills:
            break
    if not counts["failed"]:
        shutil.rmtree(base, ignore_errors=True)
    return counts


def _round(
    options: Options, number: int, root: Path, tell: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    rng = Random(f"{options.seed}/{number}")
    on_cluster = rng.random() < options.cluster
    round_ = Round(root, rng, options.actions, options.harms, tell, options.run_args, on_cluster)
    problems: list[str] = []
    try:
        verdict = round_.play()
        counts = Counter(round_.counts)
        for name in ("steps", "rows", "changes", "lost", "doubled"):
            counts[name] += getattr(verdict, name)
        problems = verdict.problems
    except Failed as error:
        counts = Counter(round_.counts)
        counts["steps"] += len(round_.harvest)
        problems = [str(error)]
    finally:
        round_.close(keep=bool(problems))
    return counts, problems
