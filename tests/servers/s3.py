"""An S3 server for tests: moto's, in a separate process, over HTTP.

It holds its objects in memory and loses them when it ends. It accepts a signature with any key, until `add_user` has
created users and `require_signatures` makes it verify every request against their keys and policies.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, urlencode

from coranto.cluster.processes import ChildProcess, free_port, wait_ready
from coranto.fragments.store_endpoints import VARIABLE

REGION = "us-east-1"
_READY_SECONDS = 60.0
_STOP_SECONDS = 5.0
_ANY_SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=anonymous/20200101/us-east-1/{}/aws4_request, SignedHeaders=host, Signature=none"
)


@dataclass(frozen=True, slots=True)
class AwsKey:
    """The key of a client's signatures."""

    id: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make stores of this process, or of a child, sign with the key."""
        return {"AWS_ACCESS_KEY_ID": self.id, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_REGION": REGION}


ANY_KEY = AwsKey("any-key-id", "any-secret")


class S3Server:
    """The server, with its log in `folder`; a context manager.

    `page_size` is the number of keys per page of a listing. Start it on a thread that outlives it (see `ChildProcess`).
    """

    def __init__(self, folder: Path, *, page_size: int = 1000, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._host = host
        self._page_size = page_size
        self._process: ChildProcess | None = None
        self.endpoint = ""
        """`http://host:port`, which stays the same over restarts of the server."""

    def start(self) -> None:
        """Start the server, and return when it is ready."""
        port = free_port(int(self.endpoint.rpartition(":")[2] or 0))
        self.endpoint = f"http://{self._host}:{port}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(
            "S3 server",
            [sys.executable, "-P", "-m", "moto.server", "-H", self._host, "-p", str(port)],
            log=self._folder / "s3.log",
            cwd=self._folder,
            environment={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(self._page_size)},
        )
        wait_ready(self._process, self._serves, timeout_seconds=_READY_SECONDS, cancelled=lambda: False)

    def stop(self) -> None:
        """End the server. All its objects are lost."""
        if self._process is not None:
            self._process.stop(_STOP_SECONDS)

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that allow this process, or a child, to use stores whose URLs name the server."""
        return {VARIABLE: self.endpoint}

    @property
    def process(self) -> ChildProcess:
        assert self._process is not None
        return self._process

    def create_bucket(self, name: str) -> None:
        self._call("PUT", f"/{name}", service="s3")

    def store_url(self, bucket: str, prefix: str = "", **arguments: str) -> str:
        """Return the URL of a fragment store in a bucket; `prefix` is empty or ends in `/`."""
        arguments = {"region": REGION, "endpoint": self.endpoint, **arguments}
        return f"s3://{bucket}/{prefix}?{urlencode(arguments)}"

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._call("PUT", f"/{bucket}/{quote(key)}", content, service="s3")

    def headers(self, bucket: str, key: str) -> Mapping[str, str]:
        return self._call("HEAD", f"/{bucket}/{quote(key)}", service="s3")[0]

    def acl(self, bucket: str, key: str) -> str:
        return self._call("GET", f"/{bucket}/{quote(key)}?acl", service="s3")[1].decode()

    def add_user(self, name: str, *actions: str) -> AwsKey:
        """Add a user who may do the given actions (such as `s3:GetObject`) on every resource, and return its key."""
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
        self._iam(Action="CreateUser", UserName=name)
        self._iam(Action="PutUserPolicy", UserName=name, PolicyName="only", PolicyDocument=json.dumps(policy))
        answer = ElementTree.fromstring(self._iam(Action="CreateAccessKey", UserName=name))
        found = {element.tag.rpartition("}")[2]: element.text or "" for element in answer.iter()}
        return AwsKey(found["AccessKeyId"], found["SecretAccessKey"])

    def require_signatures(self, required: bool = True) -> None:
        """Turn the verification of requests on or off."""
        self._call("POST", "/moto-api/reset-auth", b"0" if required else b"inf")

    def _iam(self, **parameters: str) -> bytes:
        return self._call("POST", "/", urlencode({**parameters, "Version": "2010-05-08"}).encode(), service="iam")[1]

    def _call(
        self, method: str, path: str, body: bytes | None = None, *, service: str = ""
    ) -> tuple[Mapping[str, str], bytes]:
        # Without a service, the request is for moto's own interface, in plain text.
        headers = {"Authorization": _ANY_SIGNATURE.format(service)} if service else {"Content-Type": "text/plain"}
        if service == "s3" and body is not None:
            headers["Content-Type"] = "application/octet-stream"  # moto discards the content of forms.
        request = urllib.request.Request(self.endpoint + path, body, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return response.headers, response.read()

    def _serves(self) -> bool:
        try:
            self._call("GET", "/moto-api/data.json")
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
