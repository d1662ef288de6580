"""Orders joined with customers, totals by country, and each customer's running total.

Shows columnar expressions, an incremental join, several aggregates at once, a second key and a
Python function with state.

    anabranch plan examples/orders.py
    anabranch run examples/orders.py --dir job --workers 2 --until-idle
    anabranch output job by_country
"""

import polars as pl

import anabranch as ab

flow = ab.Flow("orders")

orders = flow.input(
    "orders",
    ab.generator(
        rows=200_000,
        seed=1,
        columns={
            "order": ab.index(),
            "customer": ab.uniform_int(0, 2_000),
            "cents": ab.uniform_int(100, 50_000),
        },
    ),
)
customers = flow.input(
    "customers",
    ab.generator(
        rows=2_000,
        seed=2,
        columns={"id": ab.index(), "country": ab.choice(["AR", "DE", "IN", "JP", "KE"])},
    ),
)

large = orders.filter(pl.col("cents") >= 1_000).with_columns(euros=pl.col("cents") / 100)
placed = large.key_by("customer").join(customers.key_by("id"))

by_country = placed.key_by("country").aggregate(
    orders=ab.count(), euros=ab.sum("euros"), largest=ab.max("cents")
)
by_country.output("by_country")


def running(total, order):
    total = (total or 0) + order.cents
    return total, [(order.order, total)] if total >= 4_000_000 else None


best = large.key_by("customer").stateful_map(
    running, schema={"order": int, "cents_so_far": int}, name="running"
)
best.output("best_customers", ab.jsonl())
