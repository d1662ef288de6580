"""Load a flow from `FLOW.py[:name]`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from anabranch.errors import ConfigError, FlowError
from anabranch.flow.stream import Flow


def load_flow(target: str, *, for_workers: bool = False) -> Flow:
    """Run the file and take its flow: the one called `name`, or the only one there is.

    Args:
        target: `FLOW.py` or `FLOW.py:name`.
        for_workers: whether the flow will be run.  Functions of the file are then shipped by value, so that the
            file need not exist where the workers are; it costs importing Spark.

    Raises:
        ConfigError: no such file or flow, or the file raises; with the file's line.
        FlowError: the flow is wrong; with the file's line.
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
    except (FlowError, ConfigError) as error:
        raise type(error)(f"{path_text}{_line_of(error, path)}: {error}") from error
    except Exception as error:
        place = _line_of(error, path)
        raise ConfigError(f"{path_text}{place}: {type(error).__name__}: {error}") from error
    if for_workers:
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    flows = {key: value for key, value in vars(module).items() if isinstance(value, Flow)}
    if name is not None:
        if name not in flows:
            raise ConfigError(f"{path_text}: no flow is called {name!r}; it has {sorted(flows) or 'none'}")
        return flows[name]
    distinct = {id(flow): flow for flow in flows.values()}
    if len(distinct) != 1:
        many = f"has {len(distinct)} flows ({', '.join(sorted(flows))}); name one: {path_text}:NAME"
        raise ConfigError(f"{path_text} {many if flows else 'builds no flow'}")
    return next(iter(distinct.values()))


def _split(target: str) -> tuple[str, str | None]:
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return path, name
    return target, None


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the file it happened: the innermost of its own lines."""
    trace = error.__traceback__
    line = ""
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path.absolute():
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line
