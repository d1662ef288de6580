"""What tests share: one Spark context for all that need Spark, and small flows."""

from __future__ import annotations

import logging
import os
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pyspark import SparkContext

from anabranch.spark.session import spark_context

# How long an example takes, or making one up, depends on what else the machine does: no reason for a test to fail.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkContext]:
    """An embedded Spark, started once."""
    root: Path = tmp_path_factory.mktemp("spark")
    conf = {"spark.local.dir": str(root / "local")}
    with spark_context("tests", "local[2]", conf, root / "spark.log") as context:
        yield context


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket on a server of our own that speaks S3."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/tests", method="PUT"), timeout=30).close()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        patch.setenv("AWS_REGION", "us-east-1")
        yield "s3://tests"
    server.stop()


@pytest.fixture
def object_url(bucket: str) -> str:
    """A place of its own in the bucket."""
    return f"{bucket}/{uuid.uuid4().hex}"
