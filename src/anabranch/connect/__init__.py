"""Sources and sinks.

Knows `anabranch.model` and `anabranch.errors` only.  `source.py` and `sink.py` are the contracts.
"""
