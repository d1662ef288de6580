"""What the documentation says is so: its code runs, its commands parse, its links lead somewhere.

Python blocks of a file run in order, in one namespace, in a directory of their own.  A block that begins with
```` ```python no-run ```` is skipped.  Runs do without Spark, except in blocks that begin with
```` ```python spark ````, where `ab.run` gets the tests' Spark context.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sparkless import without_spark

import anabranch
from anabranch.cli.main import _parser
from anabranch.runtime.run import run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


class Block(NamedTuple):
    """A fenced block: the words after the fence, its first line's number, and its text."""

    info: list[str]
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    fence: str | None = None
    info: list[str] = []
    start, lines = 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        mark = re.match(r"(`{3,})(.*)", line)
        if fence is None and mark:
            fence, info, start, lines = mark[1], mark[2].split(), number + 1, []
        elif fence is not None and line.rstrip() == fence:
            yield Block(info, start, "\n".join(lines))
            fence = None
        elif fence is not None:
            lines.append(line)
    assert fence is None, f"{page}: a block is not closed"


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^(`{3,}).*?^\1\s*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.info[:1] == ["python"] and "no-run" not in block.info]


WITH_CODE = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=[str(page.relative_to(ROOT)) for page in WITH_CODE])
def test_code_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    found = python_blocks(page)
    # Before the directory changes: Spark's Python processes inherit it, and a relative PYTHONPATH with it.
    context = request.getfixturevalue("spark") if any("spark" in block.info for block in found) else None
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in found:
        # Compiled at its own place, so that a failure names the page and the line.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with monkeypatch.context() as patch, without_spark():
            if "spark" in block.info:
                patch.setattr(anabranch, "run", functools.partial(run, context=context), raising=False)
            exec(code, namespace)


def subcommands() -> dict[str, argparse.ArgumentParser]:
    parser = _parser()
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def all_flags() -> set[str]:
    parsers = [_parser(), *subcommands().values()]
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings}


def commands(page: Path) -> list[str]:
    """Every call of `anabranch` in the page's shell blocks, without its comment."""
    found = []
    for block in blocks(page):
        if block.info[:1] in (["sh"], ["console"]):
            text = block.text.replace("\\\n", " ")
            lines = [line.removeprefix("$ ").strip() for line in text.splitlines()]
            found += [line for line in lines if line.startswith("anabranch ")]
    return found


@every_page
def test_commands_parse(page: Path) -> None:
    for command in commands(page):
        try:
            _parser().parse_args(shlex.split(command, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{page.name}: the command line does not take: {command}")


@every_page
def test_flags_exist(page: Path) -> None:
    named = {span.split()[0].split("=")[0] for span in code_spans(page) if span.startswith("--")}
    assert named <= all_flags(), f"{page.name} names flags that do not exist"


OF_RESCALING = ("rescale", "layout", "hosts")
"""Commands that have their page in the guide; all others are on the page about running."""


def test_every_flag_is_documented() -> None:
    for name, parser in subcommands().items():
        page = ROOT / "docs/guide" / ("rescaling.md" if name in OF_RESCALING else "running.md")
        text = page.read_text()
        assert f"anabranch {name}" in text, f"{name} is not in {page.name}"
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}" in text, f"{name} {flag} is not in {page.name}"


@every_page
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [line for block in blocks(page) if block.info[:1] == ["sh"] for line in block.text.splitlines()]
    for text in [*code_spans(page), *lines]:
        if match := re.match(r"make ([a-z-]+)", text):
            assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), f"{page.name}: no target {match[1]}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in {slug(h) for h in re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)}, (
                target
            )


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@every_page
def test_named_modules_exist(page: Path) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"[a-z]+/[a-z_]+\.py", span):
            assert any((ROOT / base / span).exists() for base in ("src/anabranch", "")), (
                f"{page.name}: {span}"
            )


def test_glossary_names_its_words_once() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 30
    assert len(words) == len(set(words))
