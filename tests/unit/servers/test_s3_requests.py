"""What an S3 server is asked, and how: the requests as they leave, with nobody at the other end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import EndpointConnectionError
from botocore.httpsession import URLLib3Session

from gym_servers.stack.settings import S3Settings
from gym_servers.storage import s3
from gym_servers.storage.s3 import S3Credentials, S3Store
from gym_servers.storage.store import StorageError

ENDPOINT = "http://minio.storage:9000"
ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE")
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class Body(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AWSPreparedRequest]:
    """The requests that were sent; each is answered with success."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    found: list[AWSPreparedRequest] = []

    def send(_: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        found.append(request)
        body = LISTING if "list-type" in request.url else b"bytes" if request.method == "GET" else b""
        return AWSResponse(request.url, 200, {"Content-Length": str(len(body))}, Body(body))

    monkeypatch.setattr(URLLib3Session, "send", send)
    return found


def use(**settings: Any) -> None:
    """Everything that a store does."""
    store = S3Store(S3Settings(bucket="gym", **settings), "team", S3Credentials("key", "secret"))
    store.create("a", b"bytes")
    store.replace("a", b"bytes")
    assert store.get("a") == b"bytes"
    store.fingerprint("a")
    store.list("")
    store.delete("a")


def checksums(requests: list[AWSPreparedRequest]) -> set[str]:
    """Headers by which newer clients say, or ask for, a checksum of what is sent."""
    names = {name.lower() for request in requests for name in request.headers}
    return {name for name in names if "checksum" in name or name in ("x-amz-trailer", "content-encoding")}


@pytest.mark.parametrize("variable", [None, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_s2_whoever_is_not_aws_is_asked_for_no_new_checksums(
    asked: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """Nor where not the spec but the environment names the server, which boto3 follows."""
    if variable is None:
        use(endpoint=ENDPOINT)
    else:
        monkeypatch.setenv(variable, ENDPOINT)
        use()
    assert {urlsplit(request.url).netloc for request in asked} == {"minio.storage:9000"}
    assert len(asked) == 6
    assert checksums(asked) == set()


@pytest.mark.parametrize(("region", "host"), [("eu-west-1", "eu-west-1.amazonaws.com"), ("cn-north-1", "com.cn")])
def test_s2_aws_is_told_the_checksum_of_what_it_stores(
    asked: list[AWSPreparedRequest], region: str, host: str
) -> None:
    use(region=region)
    assert all(str(urlsplit(request.url).hostname).endswith(host) for request in asked)
    assert any(name.startswith("x-amz-checksum-") for name in checksums(asked))


@pytest.mark.parametrize(
    ("settings", "host", "path"),
    [
        ({}, "gym.s3.amazonaws.com", "/team/a"),
        ({"region": "eu-west-1"}, "gym.s3.eu-west-1.amazonaws.com", "/team/a"),
        ({"addressing_style": "path", "region": "eu-west-1"}, "s3.eu-west-1.amazonaws.com", "/gym/team/a"),
        ({"endpoint": ENDPOINT}, "minio.storage", "/gym/team/a"),
        ({"endpoint": ENDPOINT, "region": "RegionOne"}, "minio.storage", "/gym/team/a"),
        ({"endpoint": ENDPOINT, "addressing_style": "path"}, "minio.storage", "/gym/team/a"),
        ({"endpoint": ENDPOINT, "addressing_style": "virtual"}, "gym.minio.storage", "/team/a"),
    ],
)
def test_s3_region_and_addressing_are_as_set_and_else_as_the_server_knows_them(
    asked: list[AWSPreparedRequest], settings: dict[str, str], host: str, path: str
) -> None:
    use(**settings)
    for request in asked:
        where = urlsplit(request.url)
        assert where.hostname == host
        assert where.path == path or "list-type" in where.query
        assert f"/{settings.get('region', 'us-east-1')}/s3/" in str(request.headers["Authorization"])


@pytest.mark.parametrize(
    ("settings", "variables", "named"),
    [
        ({"endpoint": ENDPOINT}, {}, ENDPOINT),
        ({"region": "eu-west-1"}, {}, "https://s3.eu-west-1.amazonaws.com"),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://me:hidden@elsewhere:9000"}, "http://elsewhere:9000"),
    ],
)
def test_the_address_that_was_asked_is_named_where_nobody_answers(
    asked: list[AWSPreparedRequest],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    variables: dict[str, str],
    named: str,
) -> None:
    def send(_: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        raise EndpointConnectionError(endpoint_url=request.url)

    monkeypatch.setattr(URLLib3Session, "send", send)
    monkeypatch.setattr(s3, "REQUEST_TRIES", 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError) as error:
        use(**settings)
    assert f"the endpoint {named} cannot be reached; check `endpoint`" in str(error.value)
    assert "hidden" not in str(error.value)
