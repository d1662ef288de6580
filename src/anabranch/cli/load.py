"""Load a flow from `FLOW.py[:name]`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from pyspark import cloudpickle

from anabranch.errors import ConfigError, UserError
from anabranch.flow.stream import Flow


def load_flow(target: str) -> Flow:
    """Run the file and take its flow: the one called `name`, or the only one there is.

    Functions of the file are shipped to workers by value, so the file itself need not exist there.
    """
    path_text, name = _split(target)
    path = Path(path_text)
    if not path.is_file():
        raise ConfigError(f"{path_text}: there is no such file; give the Python file that builds the flow")
    module_name = f"anabranch_flow_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path_text}: this is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        place = _line_of(error, path)
        raise ConfigError(f"{path_text}{place}: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    flows = {key: value for key, value in vars(module).items() if isinstance(value, Flow)}
    if name is not None:
        if name not in flows:
            raise ConfigError(f"{path_text}: no flow is called {name!r}; it has {sorted(flows) or 'none'}")
        return flows[name]
    distinct = {id(flow): flow for flow in flows.values()}
    if len(distinct) != 1:
        found = f"has {len(distinct)} flows ({', '.join(sorted(flows))}); name one: {path_text}:NAME" if flows else "builds no flow"
        raise ConfigError(f"{path_text} {found}")
    return next(iter(distinct.values()))


def _split(target: str) -> tuple[str, str | None]:
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return path, name
    return target, None


def _line_of(error: BaseException, path: Path) -> str:
    trace = error.__traceback__
    line = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line
