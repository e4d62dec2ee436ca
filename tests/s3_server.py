"""A local S3 server in a process of its own: ``s3_server.py PORT FAILURES DELAY``.

Every FAILURES-th request is answered with an error 503, as an overloaded server does; 0 for
none. Every request takes DELAY seconds. Buckets are kept in the memory of the server.
"""

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

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

    def list(self, prefix: str) -> set[str]:
        """Return the names of all files below a prefix."""
        pages = self._client().get_paginator("list_objects_v2")
        listed = pages.paginate(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"] for page in listed for each in page.get("Contents", ())}

    def make_bucket(self) -> None:
        """Create the bucket."""
        self._client().create_bucket(Bucket=BUCKET)

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )

    def end(self) -> None:
        """End the server: connections are refused."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def serving(*, failures: int = 0, delay: float = 0.0) -> Iterator[Server]:
    """Start a server with an empty bucket."""
    port = free_port()
    arguments = [str(port), str(failures), str(delay)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stderr=subprocess.DEVNULL
    )
    server = Server(process, port)
    try:
        _wait(server)
        server.make_bucket()
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


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = DomainDispatcherApplication(create_backend_app)
    every, delay, count = int(sys.argv[2]), float(sys.argv[3]), itertools.count(1)

    def answer(environ, start_response):
        time.sleep(delay)
        if every and next(count) % every == 0:
            start_response("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"Please reduce your request rate."]
        return application(environ, start_response)

    run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True)


if __name__ == "__main__":
    main()
