"""The coordinator at work: planning steps, running them on Spark, committing them, stopping.

Drives `spark` and the logs.  Must not know the CLI.
"""
