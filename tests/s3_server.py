"""A local S3 server in a process of its own, for tests: ``s3_server.py PORT FAILURES``.

Every FAILURES-th request is answered with an error 503, as an overloaded server does; 0 for
none. All buckets are kept in the memory of the server.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

BUCKET = "tests"


class Server(NamedTuple):
    """A server that is running."""

    process: subprocess.Popen
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which clients find the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        """Stop answering, with all buckets kept."""
        self.process.send_signal(19)  # SIGSTOP

    def end(self) -> None:
        """End the server: connections are refused."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def serving(*, failures: int = 0, port: int | None = None) -> Iterator[Server]:
    """Start a server with an empty bucket."""
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, __file__, str(port), str(failures)], stderr=subprocess.DEVNULL
    )
    server = Server(process, port)
    try:
        _wait(server)
        _make_bucket(server)
        yield server
    finally:
        server.end()


def _wait(server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def _make_bucket(server: Server) -> None:
    import boto3

    settings = server.environment
    client = boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = DomainDispatcherApplication(create_backend_app)
    every, count = int(sys.argv[2]), itertools.count(1)

    def answer(environ, start_response):
        if every and next(count) % every == 0:
            start_response("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"Please reduce your request rate."]
        return application(environ, start_response)

    run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True)


if __name__ == "__main__":
    main()
