"""A plan as text and as JSON, for `anabranch plan`."""

from __future__ import annotations

from typing import Any

from anabranch.flow.plan import Channel, Plan, Planned, describe


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "flow": plan.name,
        "fingerprint": plan.fingerprint,
        "stages": plan.depth + 1,
        "operators": [
            {**describe(p.node), "depth": p.depth, "region": p.region, "ordered": p.ordered}
            for p in plan.operators
        ],
        "channels": [
            {
                "number": c.number,
                "kind": c.kind,
                "from": c.producer,
                "from_stage": c.start,
                "to_stage": c.end,
                "keys": list(c.keys),
                "combined_for": c.combine,
            }
            for c in plan.channels
        ],
    }


def as_text(plan: Plan) -> str:
    """The stages from input to output, with what runs in each and what travels between them."""
    lines = [f"flow {plan.name}  fingerprint {plan.fingerprint[:16]}"]
    for depth in range(plan.depth + 1):
        lines.append("")
        lines.append(f"stage {depth}")
        lines += [f"  {_operator(plan, planned)}" for planned in plan.stage(depth)]
        lines += [f"  ↓ {_channel(channel)}" for channel in plan.leaving(depth)]
    return "\n".join(lines)


def _operator(plan: Plan, planned: Planned) -> str:
    node = planned.node
    feeds = ", ".join(feed if isinstance(feed, str) else f"channel {feed}" for feed in planned.feeds)
    parts = [f"{node.id} ({node.kind})"]
    if feeds:
        parts.append(f"← {feeds}")
    if planned.region is not None:
        parts.append(f"region {planned.region}")
    columns = ", ".join(f"{name}: {dtype}" for name, dtype in node.schema.items())
    parts.append(f"[{columns}]")
    return "  ".join(parts)


def _channel(channel: Channel) -> str:
    what = f"by {', '.join(channel.keys)}" if channel.kind == "exchange" else "stays on its worker"
    combined = f", combined for {channel.combine}" if channel.combine else ""
    return f"channel {channel.number} to stage {channel.end}: {channel.producer} {what}{combined}"
