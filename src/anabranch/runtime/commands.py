"""What the control endpoint's commands do, on the step loop's thread."""

from __future__ import annotations

from typing import Any

from anabranch.errors import ConfigError
from anabranch.runtime.rescaling import Rescaler
from anabranch.runtime.standing import Standing
from anabranch.runtime.targets import RescaleRequest


def obey(path: str, body: dict[str, Any], rescaler: Rescaler, standing: Standing) -> dict[str, Any]:
    """Do what somebody asked for; returns the answer.

    Raises:
        ConfigError: it cannot be had.
    """
    match path:
        case "/rescale":
            return rescaler.ask(RescaleRequest.from_json(body), standing)
        case "/rescale/cancel":
            return rescaler.cancel()
        case "/weigh":
            rescaler.scales.wanted = True
            return {}
        case "/hosts":
            return {"hosts": describe_hosts(rescaler, standing)}
    raise ConfigError(f"there is no {path}")


def describe_hosts(rescaler: Rescaler, standing: Standing) -> list[dict[str, Any]]:
    """The hosts that the flow uses, and those that it could use."""
    placement, alive, sizes = standing.placement, rescaler.alive(), rescaler.scales.sizes
    hosts = []
    for host in dict.fromkeys([*placement.layout.hosts, *(alive or ())]):
        copies = placement.copies_at(host)
        known = [sizes[copy.shard] * copy.share for copy in copies if copy.shard in sizes]
        hosts.append(
            {
                "host": host,
                "workers": list(placement.layout.workers_of(host)),
                "shards": len(copies),
                "bytes": round(sum(known)) if len(known) == len(copies) else None,
                "alive": alive is None or host in alive,
                "used": host in placement.layout.workers,
            }
        )
    return hosts
