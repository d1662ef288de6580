"""The simulator: drives the pure machines through interleavings and crashes, and checks what must always hold.

Knows `protocol` and `model`; nothing that runs in production knows it.
"""
