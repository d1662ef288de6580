"""`python -m chaos --seed 1 --rounds 10`: random flows under random faults; see `make chaos`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from chaos.actions import ACTIONS
from chaos.round import DID
from chaos.run import Options, play

_SHOWN = (
    "rounds",
    "failed",
    "kills",
    "restarts",
    "refused",
    "damages",
    "repairs",
    "rescales",
    "finished",
    "cancelled",
    "given_up",
    "steps",
    "rows",
    "changes",
)


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when nothing was lost or doubled and every round got to its end."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    add = parser.add_argument
    add(
        "--seed", type=int, default=int(time.time()), help="of everything that is random (default: the clock)"
    )
    add("--rounds", type=int, default=10, help="how many jobs (default: 10)")
    add("--first", type=int, default=0, help="number of the first round, to repeat one")
    add("--kills", type=int, help="stop after the round in which so many kills were reached")
    add("--harms", type=int, default=25, help="actions in each round (default: 25)")
    add("--actions", type=_actions, default=list(ACTIONS), help=f"among {','.join(ACTIONS)} (default: all)")
    add("--cluster", type=float, default=0.08, help="share of rounds on a cluster (default: 0.08)")
    add("--run-args", default="", help="more arguments for `anabranch run`")
    add("--dir", type=Path, help="where rounds are kept (default: a temporary directory)")
    add("--verbose", action="store_true", help="print every action")
    add("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args(arguments)
    began = time.monotonic()

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    say(f"seed {options.seed}")
    counts = play(
        Options(
            seed=options.seed,
            rounds=options.rounds,
            actions=options.actions,
            harms=options.harms,
            cluster=options.cluster,
            run_args=options.run_args.split(),
            directory=options.dir,
            kills=options.kills,
            first=options.first,
        ),
        say,
        say if options.verbose else lambda what: None,
    )
    seconds = time.monotonic() - began
    names = (*_SHOWN, "lost", "doubled")
    done = {name: counts[DID + name] for name in options.actions}
    if options.json:
        result = {name: counts[name] for name in names}
        print(json.dumps({"seed": options.seed, **result, "actions": done, "seconds": round(seconds)}))
    else:
        for name in names:
            print(f"{name:10} {counts[name]:>10,}")
        print(f"{'seconds':10} {seconds:>10,.0f}")
        print(f"{'actions':10} {', '.join(f'{times} {name}' for name, times in done.items())}")
    return 1 if counts["failed"] or counts["lost"] or counts["doubled"] else 0


def _actions(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in ACTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no action is called {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
