"""The job directory that a command was pointed at."""

from __future__ import annotations

from anabranch.runtime.jobdir import JobDir


def open_job(where: str) -> JobDir:
    """A job that exists; raises JobDirError."""
    jobdir = JobDir(where)
    jobdir.job()
    return jobdir
