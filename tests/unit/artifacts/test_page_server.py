"""The server of ``memlog open``: its answers, and the requests that it refuses."""

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from memlog.artifacts.server import Page, PageServer

PAGE = Page("index.html#view", {"index.html": ("text/html", b"<p>hello</p>")})


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(PAGE) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(timeout=30)


def ask(
    server: PageServer, target: str | None = None, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.putrequest(method, target or path_of(server), skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def path_of(server: PageServer) -> str:
    return "/" + server.url.split("/", 3)[3].partition("#")[0]


def test_it_serves_its_file_on_loopback_only(server: PageServer) -> None:
    status, body, headers = ask(server)
    assert (status, body) == (200, b"<p>hello</p>")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url.startswith(f"http://127.0.0.1:{server.server_port}/")
    assert server.url.endswith("/index.html#view")


def test_no_two_servers_have_the_same_path(server: PageServer) -> None:
    with PageServer(PAGE) as other:
        assert path_of(other) != path_of(server)
    assert len(path_of(server)) > 30


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1", "LOCALHOST:1"])
def test_a_forwarded_port_may_have_another_number(server: PageServer, host: str) -> None:
    assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "a@127.0.0.1",
        "",
        "localhost?.evil.example",
        "localhost:",
    ],
)
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    status, body, _ = ask(server, host=host)
    assert status == 403
    assert b"hello" not in body


@pytest.mark.parametrize(
    "request_line",
    [
        b"TRACE / HTTP/1.1\r\nHost: evil.example\r\n",
        b"GET  HTTP/1.1 x\r\n",
        b"\xff\xfe\r\n",
        b"GET / HTTP/9.9\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
    ],
)
def test_what_is_no_question_gets_a_status_and_no_word(
    server: PageServer, request_line: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(request_line + b"\r\n")
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.") or not answer
    assert body == b""
    assert b"memlog" not in answer
    assert b"evil" not in answer


def test_two_host_headers_are_refused(server: PageServer) -> None:
    request = f"GET {path_of(server)} HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(request.encode())
        assert b" 403 " in connection.makefile("rb").readline()


def test_nothing_else_is_found(server: PageServer) -> None:
    known = path_of(server)
    folder = known.removesuffix("index.html")
    for target in (
        *("/", "/index.html", "/favicon.ico", folder, f"{known}?x", f"{known}/"),
        *(f"{folder}../../etc/passwd", f"{folder}%2e%2e/index.html", "/etc/passwd", "//etc/passwd"),
        f"http://evil.example{known}",
        f"/{'x' * 22}/index.html",
    ):
        assert ask(server, target)[0] == 404, target


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(server: PageServer, method: str) -> None:
    status, body, _ = ask(server, method=method)
    assert status == 405
    assert b"hello" not in body


def test_head_has_the_headers_alone(server: PageServer) -> None:
    status, body, headers = ask(server, method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == ask(server)[2]["Content-Length"]
    assert ask(server, "/other", method="HEAD")[:2] == (404, b"")
    assert ask(server, method="HEAD", host="evil.example")[:2] == (403, b"")
