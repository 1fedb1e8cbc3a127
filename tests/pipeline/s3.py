"""Object storage for tests: moto, or the server in EXSPEC_TEST_S3."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

VARIABLE = "EXSPEC_TEST_S3"


@contextmanager
def moto() -> Iterator[dict[str, Any]]:
    """The options of a server in this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    try:
        yield {"endpoint_url": endpoint, "key": "testkey", "secret": "testsecret"}
    finally:
        server.stop()


def external() -> dict[str, Any]:
    """Options to connect to the server. Skips the test if there is none."""
    if VARIABLE not in os.environ:
        pytest.skip(f"no other S3 server is available ({VARIABLE})")
    named = {"endpoint_url": "", "key": "_KEY", "secret": "_SECRET"}
    given = {"endpoint_url": None, "key": "testkey", "secret": "testsecret"}
    return given | {key: os.environ[name] for key, end in named.items() if (name := f"{VARIABLE}{end}") in os.environ}


def connected(options: dict[str, Any]) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(**options, skip_instance_cache=True)


def new_bucket(options: dict[str, Any], seed: object) -> str:
    name = f"exspec-{random.Random(str(seed)).randrange(10**9)}"
    connected(options).mkdir(name)
    return name


def fetch(options: dict[str, Any], bucket: str, folder: Path) -> Path:
    """The output, copied to a local folder."""
    fs = connected(options)
    folder.mkdir()
    for found in fs.ls(f"{bucket}/out", detail=True, refresh=True):
        if found["type"] == "file":
            fs.get_file(found["name"], str(folder / found["name"].rsplit("/", 1)[-1]))
    return folder
