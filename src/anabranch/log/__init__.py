"""Records that must survive: plan and commit records of steps.

Knows `model`.  Must not know what a step does.
"""
