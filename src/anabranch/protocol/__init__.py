"""The pure machines: who may run which step, from which version, and what to do when something is lost.

Nothing here does I/O, reads a clock, draws a random number or starts a thread.  Knows `model` and `errors` only.
"""
