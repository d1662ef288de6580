"""`anabranch run | status | rescale | layout | hosts | steps | checkpoint | stop | plan | output`."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Sequence

from anabranch.cli import checkpoints, commands, hosts, layout, rescale, steps
from anabranch.errors import AnabranchError
from anabranch.runtime.jobhandle import STRATEGIES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0; 1 for an error, which is shown in one line; 130 when interrupted.  A wrong call ends
        the process with 2.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.WARNING,
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    # It would log every call into the JVM, hundreds of lines a step.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A bar, an arrow or a row that the terminal's encoding does not have is no reason to fail.
            stream.reconfigure(errors="replace")
    try:
        status = int(options.command(options))
        sys.stdout.flush()
        return status
    except AnabranchError as error:
        return _fail(error, options.verbose)
    except KeyboardInterrupt:
        sys.stderr.write("anabranch: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); there is nobody to tell.
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard_output()
        sys.stderr.write(f"anabranch: the output cannot be written: {error.strerror}\n")
        return 1


def _discard_output() -> None:
    """What is left of the output would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: AnabranchError, verbose: bool) -> int:
    if verbose:
        logging.getLogger(__name__).exception("failed")
    sys.stderr.write(f"anabranch: {error}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anabranch", description="Elastic, exactly-once, stateful stream processing for PySpark."
    )
    parser.add_argument("--verbose", action="store_true", help="log what happens, with stack traces")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    _run(
        verbs.add_parser(
            "run",
            help="run a flow, or go on with it",
            description="Run a flow in a job directory. A directory that has run it before goes on where it "
            "stopped.",
        )
    )
    _status(verbs.add_parser("status", help="what a job is doing"))
    _rescale(
        verbs.add_parser(
            "rescale",
            help="give a running job more workers or fewer, or other hosts",
            description="Rescale a running job while it goes on.",
        )
    )
    _layout(verbs.add_parser("layout", help="which worker and host has which shards"))
    _hosts(verbs.add_parser("hosts", help="the hosts that a job uses or could use"))
    _steps(verbs.add_parser("steps", help="which input went into which step, and what came out"))
    _checkpoint(verbs.add_parser("checkpoint", help="make a checkpoint now, or list those there are"))
    _stop(verbs.add_parser("stop", help="stop a running job in an orderly way"))
    _plan(verbs.add_parser("plan", help="show a flow's stages, regions and fingerprint"))
    _output(verbs.add_parser("output", help="read an output of a job"))
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("flow", metavar="FLOW.py[:name]", help="the file that builds the flow, and the flow's variable")
    add("--dir", required=True, help="job directory; made if it does not exist")
    add("--workers", type=int, help="partitions of every stage (default: what the job had, or one per core)")
    add("--hosts", type=int, help="embedded: logical hosts with their own state directories (default: 1)")
    add("--master", default="local[*]", help="Spark master (default: embedded, local[*])")
    add(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_setting,
        help="a Spark setting; may be repeated",
    )
    add("--shards", type=int, help="fixed number of shards for a new job (default: about 16 per worker)")
    add("--state-dir", help="where hosts keep shards (default: in the job directory)")
    add("--step-ms", type=float, default=200.0, help="how long a step should last (default: 200)")
    add("--max-step-rows", type=int, default=20_000_000, help="most rows of a step (default: 20000000)")
    add("--max-step-mb", type=int, default=256, help="most megabytes of input of a step (default: 256)")
    add(
        "--checkpoint-every",
        action="append",
        metavar="30s|500steps|never",
        type=_interval,
        help="make a checkpoint when the last one is so old, in time or in steps; may be given twice (default: 30s)",
    )
    add("--recovery-partitions", type=int, help="parts of a checkpoint, for a new job (default: 32)")
    add("--retain-steps", type=int, help="delete outputs of steps older than so many (default: keep all)")
    add("--until-idle", action="store_true", help="stop when all input there is has been read")
    add("--steps", type=int, help="stop after so many steps")
    add("--ui", action="store_true", help="keep Spark's web page reachable")
    add("--json", action="store_true", help="one JSON object a line for each event")
    parser.set_defaults(command=commands.run)


def _status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=commands.status)


def _rescale(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", help="job directory")
    add("--workers", type=int, help="how many workers (default: as many as there are)")
    add(
        "--hosts",
        type=_hosts_wanted,
        metavar="N|H1,H2,…",
        help="the hosts, or, embedded, how many (default: those there are)",
    )
    add("--strategy", choices=STRATEGIES, default="auto", help="how state moves (default: auto)")
    add("--budget", type=_bytes, metavar="BYTES", help="most bytes that a step moves, like 512k or 4m")
    add(
        "--remove-host",
        action="append",
        default=[],
        metavar="HOST",
        help="empty this host, so that it can be shut down; may be repeated",
    )
    add("--cancel", action="store_true", help="turn the rescaling under way back")
    add(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to wait until it is done (default) or only until it is accepted",
    )
    add("--timeout", type=_wait, help="most seconds to wait (default: as long as it takes)")
    add("--json", action="store_true", help="one JSON object at the end")
    parser.set_defaults(command=rescale.rescale)


def _layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("--history", action="store_true", help="list every layout that the job has had")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=layout.layout)


def _hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=hosts.hosts)


def _steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("--first", type=int, help="begin with this step (default: the newest are shown)")
    parser.add_argument("--limit", type=int, help="most steps to show (default: 20; with --json, all)")
    parser.add_argument("--ranges", action="store_true", help="show all ranges, however many a step has")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each step")
    parser.set_defaults(command=steps.steps)


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("--list", action="store_true", help="only list the versions, with their storage")
    parser.add_argument("--timeout", type=_wait, default=300.0, help="seconds to wait (default: 300)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=checkpoints.checkpoint)


def _stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument(
        "--force", action="store_true", help="do not wait for a final checkpoint; nothing is lost"
    )
    parser.add_argument("--timeout", type=_wait, default=300.0, help="seconds to wait (default: 300)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=commands.stop)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flow", metavar="FLOW.py[:name]")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=commands.plan)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="job directory")
    parser.add_argument("name", nargs="?", help="the output; left out, the outputs are listed")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="all changes added up (the default)")
    form.add_argument("--changes", action="store_true", help="the changes, with their step and weight")
    parser.add_argument("--limit", type=int, help="most rows to print (default: 50; with --json, all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each row")
    parser.set_defaults(command=commands.output)


def _interval(text: str) -> tuple[str, float]:
    """`30s`, `5m`, `500steps` or `never` as (unit, count)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|steps)", text)
    if text != "never" and (found is None or float(found[1]) <= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 30s, 5m, 1h, 500steps or never")
    if found is None:
        return "never", 0.0
    if found[2] == "steps" and "." in found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: steps are whole")
    scale = {"s": 1, "m": 60, "h": 3600, "steps": 1}[found[2]]
    return ("steps" if found[2] == "steps" else "seconds"), float(found[1]) * scale


def _bytes(text: str) -> int:
    """`4096`, `512k`, `4m` or `1g`, in powers of 1,024 as the other sizes of the command line are."""
    found = re.fullmatch(r"(\d+)([kmg]?)b?", text.lower())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 65536, 512k or 4m")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]


def _hosts_wanted(text: str) -> int | list[str]:
    """A number of hosts, or their names."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, nor names like host-0,host-1")
    return names


def _wait(text: str) -> float:
    """Seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


if __name__ == "__main__":
    sys.exit(main())
