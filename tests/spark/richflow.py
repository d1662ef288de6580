"""A flow with everything in it, random input for it, and what plain Python makes of that input.

Orders (with deletions) and customers; a join, aggregates, distinct, a second key, a diamond, a union of
differently keyed streams, an ordered function with state, and a stateless output.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab

Row = tuple[Any, ...]
Table = Counter[Row]


def write_input(root: Path, seed: int, orders: int = 400, files: int = 3) -> dict[str, list[dict[str, Any]]]:
    """Random orders, some deleted again later in the same file, customers, and clicks without deletions."""
    rng = random.Random(seed)
    data: dict[str, list[dict[str, Any]]] = {"orders": [], "customers": [], "clicks": []}
    for number in range(files):
        rows: list[dict[str, Any]] = []
        live: list[dict[str, Any]] = []
        for _ in range(orders // files):
            if live and rng.random() < 0.3:
                undone = live.pop(rng.randrange(len(live)))
                rows.append({**undone, "w": -undone["w"]})
                continue
            row = {
                "customer": rng.choice([None, *range(20)]),
                "item": rng.choice(["pen", "ink", "", "ünïcode", "x" * 600]),
                "price": rng.choice([0.1, 0.2, 0.3, 1e16, -1e16, 1e-8, rng.random()]),
                "w": rng.choice([1, 1, 1, 2, 3]),
            }
            rows.append(row)
            live.append(row)
        _write(root / "orders" / f"{number}.jsonl", rows)
        data["orders"] += rows
        people = [
            {"id": rng.choice([None, *range(25)]), "country": rng.choice(["AR", "DE"])} for _ in range(15)
        ]
        _write(root / "customers" / f"{number}.jsonl", people)
        data["customers"] += people
        clicks = [{"user": rng.randrange(8), "at": number * 1000 + place} for place in range(orders // files)]
        _write(root / "clicks" / f"{number}.jsonl", clicks)
        data["clicks"] += [{**click, "file": number} for click in clicks]
    return data


def build(root: Path) -> ab.Flow:
    flow = ab.Flow("rich")
    orders = flow.input(
        "orders",
        ab.files(
            root / "orders", format="jsonl", schema={"customer": int, "item": str, "price": float}, weight="w"
        ),
    )
    customers = flow.input(
        "customers", ab.files(root / "customers", format="jsonl", schema={"id": int, "country": str})
    )
    clicks = flow.input("clicks", ab.files(root / "clicks", format="jsonl", schema={"user": int, "at": int}))

    by_customer = orders.key_by("customer")
    by_customer.aggregate(
        n=ab.count(), total=ab.sum("price"), low=ab.min("price"), high=ab.max("price"), name="totals"
    ).output("totals")
    joined = by_customer.join(customers.key_by("id"), how="left", name="who")
    by_country = joined.key_by("country").count(name="by_country")
    by_country.output("by_country")
    orders.select("item").distinct(name="items").output("items")

    # A diamond over two depths: a re-keyed aggregate is joined with the stream that it was made from.
    names = orders.key_by("item").count(name="per_item")
    names.join(orders.select("item", "customer").key_by("item"), how="semi", name="sold").output("sold")
    # A union of streams of different depth and key.
    left = by_country.select(key=pl.col("country"), n=pl.col("count"))
    right = orders.select(key=pl.col("item"), n=pl.lit(1, dtype=pl.Int64))
    left.union(right).key_by("key").sum("n", name="mixed").output("mixed")

    def gaps(seen: dict[str, int] | None, click: Any) -> tuple[dict[str, int], list[int]]:
        file = str(click.at // 1000)
        before = (seen or {}).get(file)
        return {**(seen or {}), file: click.at}, [] if before is None else [click.at - before]

    clicks.key_by("user").stateful_map(gaps, schema={"gap": int}, name="gaps").output("gaps")
    clicks.filter(pl.col("user") > 5).map(lambda c: (c.user, str(c.at)), schema={"u": int, "t": str}).output(
        "plain"
    )
    return flow


def expected(data: dict[str, list[dict[str, Any]]]) -> dict[str, Table]:
    """Each output as a table, from scratch."""
    orders: Table = Counter()
    for row in data["orders"]:
        orders[(row["customer"], row["item"], row["price"])] += row["w"]
    orders = Counter({row: weight for row, weight in orders.items() if weight})
    result: dict[str, Table] = {}

    groups: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    for (customer, _, price), weight in orders.items():
        groups[customer].append((price, weight))
    result["totals"] = Counter(
        (
            customer,
            sum(w for _, w in rows),
            math.fsum(price for price, w in rows for _ in range(w)),
            min(price for price, _ in rows),
            max(price for price, _ in rows),
        )
        for customer, rows in groups.items()
    )
    people = [(person["id"], person["country"]) for person in data["customers"]]
    countries: Table = Counter()
    for (customer, _, _), weight in orders.items():
        matches = [country for key, country in people if key == customer and key is not None]
        for country in matches or [None]:
            countries[(country,)] += weight
    result["by_country"] = Counter((country, n) for (country,), n in countries.items() if n)
    items = Counter(item for (_, item, _), w in orders.items() for _ in range(w))
    result["items"] = Counter((item,) for item in items)
    result["sold"] = Counter((item, n) for item, n in items.items())
    mixed: Counter[Any] = Counter(items)
    for country, n in result["by_country"]:
        mixed[country] += n
    result["mixed"] = Counter((key, n) for key, n in mixed.items())

    gaps: Table = Counter()
    last: dict[tuple[int, int], int] = {}
    for click in data["clicks"]:
        place = (click["file"], click["user"])
        if place in last:
            gaps[(click["user"], click["at"] - last[place])] += 1
        last[place] = click["at"]
    result["gaps"] = gaps
    result["plain"] = Counter((c["user"], str(c["at"])) for c in data["clicks"] if c["user"] > 5)
    return result


def add_up(frames: list[pl.DataFrame]) -> Table:
    """Changes added up to a table."""
    table: Table = Counter()
    for frame in frames:
        columns = [name for name in frame.columns if not name.startswith("__")]
        for row, weight in zip(frame.select(columns).iter_rows(), frame["__weight"].to_list(), strict=True):
            table[row] += weight
    return Counter({row: weight for row, weight in table.items() if weight})


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
