"""A TCP proxy that can cut, stall or swallow what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from tests.support.server import HOST

CHUNK = 65536


class TcpProxy:
    """Stands between a client and a server on 127.0.0.1, transparent until told otherwise.

    * ``cut()``: every connection is closed, and new ones are closed as soon as they are made;
    * ``stall()``: connections stay open and nothing passes in either direction;
    * ``stall_replies()``: requests reach the server, its answers are held back: what a client
      sees as a time-out although the command was carried out;
    * ``stall_requests()``: the other direction alone;
    * ``restore()``: all of these end; what was held back is delivered, unless ``cut()`` came
      before: then it is lost.
    """

    def __init__(self, target_port: int) -> None:
        self._target = (HOST, target_port)
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._accepting = True
        self._closed = False
        self._requests_pass = threading.Event()
        self._replies_pass = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._accept_thread = threading.Thread(target=self._accept, daemon=True)

    def start(self) -> Self:
        self.restore()
        self._accept_thread.start()
        return self

    def stop(self) -> None:
        self._closed = True
        # Closing alone would not wake the thread that waits in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()
        self.restore()
        self._accept_thread.join(5)

    def url_of(self, url: str) -> str:
        """The same URL, but through this proxy."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}{HOST}:{self.port}"))

    @property
    def connections(self) -> int:
        """How many client connections are open."""
        with self._lock:
            return len(self._sockets) // 2

    def cut(self) -> None:
        self._accepting = False
        self._close_connections()

    def stall(self) -> None:
        self._requests_pass.clear()
        self._replies_pass.clear()

    def stall_replies(self) -> None:
        self._replies_pass.clear()

    def stall_requests(self) -> None:
        self._requests_pass.clear()

    def restore(self) -> None:
        self._accepting = True
        self._requests_pass.set()
        self._replies_pass.set()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if not self._accepting:
                client.close()
                continue
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._sockets |= {client, server}
        for source, target, gate in (
            (client, server, self._requests_pass),
            (server, client, self._replies_pass),
        ):
            threading.Thread(target=self._pump, args=(source, target, gate), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK):
                # Waited for after the read, so that what arrives during a stall is held back.
                gate.wait()
                target.sendall(chunk)
        self._close(source)
        self._close(target)

    def _close_connections(self) -> None:
        with self._lock:
            open_sockets = list(self._sockets)
        for each in open_sockets:
            self._close(each)

    def _close(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(each)
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
