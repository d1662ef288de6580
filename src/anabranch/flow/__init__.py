"""The user's graph and its plan.

Knows `model`, `operators` and `connect`.  Must not know Spark, state on disk or the step loop.
"""
