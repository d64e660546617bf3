from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support import TcpProxy, eventually

StartProxy = Callable[[int], TcpProxy]


class EchoServer:
    """Answers every line with itself, and remembers what reached it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.received = b""
        self._connection: socket.socket | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def say(self, words: bytes) -> None:
        """Without being asked, to whom it has heard last."""
        assert self._connection is not None
        self._connection.sendall(words)

    def _echo(self, connection: socket.socket) -> None:
        self._connection = connection
        with connection:
            while chunk := connection.recv(1024):
                self.received += chunk
                connection.sendall(chunk)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    echo = EchoServer()
    yield echo
    echo.close()


@pytest.fixture
def proxy(server: EchoServer, start_proxy: StartProxy) -> TcpProxy:
    return start_proxy(server.port)


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
        connection.sendall(b"hello")
        assert connection.recv(1024) == b"hello"
        yield connection


def test_a_cut_ends_open_connections_and_refuses_new_ones(proxy, client):
    proxy.cut()

    assert client.recv(1024) == b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as refused:
        assert refused.recv(1024) == b""
    assert proxy.connections == 0


def test_a_restored_proxy_accepts_again(proxy, client):
    proxy.cut()
    proxy.restore()

    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as again:
        again.sendall(b"again")
        assert again.recv(1024) == b"again"


def test_a_stall_holds_requests_back_until_it_is_over(proxy, client, server):
    proxy.stall()
    client.sendall(b"later")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1024)
    assert server.received == b"hello"

    proxy.restore()
    client.settimeout(5)

    assert client.recv(1024) == b"later"


def test_stalled_replies_let_the_request_through(proxy, client, server):
    proxy.stall_replies()
    client.sendall(b"done")
    client.settimeout(0.2)

    with pytest.raises(TimeoutError):
        client.recv(1024)

    eventually(lambda: server.received == b"hellodone")


def test_stalled_requests_let_the_replies_through(proxy, client, server):
    proxy.stall_requests()
    client.sendall(b"later")
    server.say(b"news")

    client.settimeout(5)
    assert client.recv(1024) == b"news"
    assert server.received == b"hello"


def test_what_was_held_back_is_lost_with_its_connection(proxy, client, server):
    proxy.stall_requests()
    client.sendall(b"lost")
    eventually(lambda: proxy.connections == 1)

    proxy.cut()
    proxy.restore()

    client.settimeout(5)
    assert client.recv(1024) == b""
    eventually(lambda: proxy.connections == 0)
    assert server.received == b"hello"


def test_a_url_is_led_through_the_proxy(proxy):
    assert proxy.url_of("redis://user:secret@db.example:6379/3?x=1") == (
        f"redis://user:secret@127.0.0.1:{proxy.port}/3?x=1"
    )
