"""The data plane: stages as Spark tasks, the exchange between them, placement on hosts.

Puts `flow`, `operators`, `state` and `connect` to work.  Must not know the step loop or the CLI.
"""
