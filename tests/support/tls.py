"""Certificates for the test run, made by openssl, and a Redis that speaks nothing but TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import urlencode

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.redis import RedisServer
from tests.support.server import HOST, find_program

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """An authority, and what it has signed: ``NAME.pem`` and ``NAME.key`` in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._openssl("req", "-x509", *NEW_KEY, "-days", "2", *self._named("ca"), "-out", "ca.pem")

    def sign(self, name: str) -> tuple[Path, Path]:
        """A certificate and its private key, for 127.0.0.1."""
        self._openssl("req", "-new", *NEW_KEY, *self._named(name), "-out", f"{name}.csr")
        (self._directory / "names.cnf").write_text(f"subjectAltName=IP:{HOST}\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        names = ("-extfile", "names.cnf", "-in", f"{name}.csr", "-out", f"{name}.pem")
        self._openssl("x509", "-req", *signed, *names)
        return self.path(f"{name}.pem"), self.path(f"{name}.key")

    def path(self, name: str) -> Path:
        return self._directory / name

    def _named(self, name: str) -> tuple[str, ...]:
        return ("-subj", f"/CN={name}", "-keyout", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        program = find_program("openssl", install_command="apt-get install openssl")
        done = subprocess.run(
            [program, *arguments], cwd=self._directory, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"openssl failed:\n{done.stderr}")


class TlsRedisServer(RedisServer):
    """Without a certificate of the authority's nobody gets in."""

    def _prepare(self) -> None:
        certificates = Certificates(self._home)
        certificates.sign("server")
        certificates.sign("client")

    def _command(self) -> list[str]:
        return [
            *super()._command(),
            *("--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"),
            *("--tls-cert-file", "server.pem", "--tls-key-file", "server.key"),
            *("--tls-ca-cert-file", "ca.pem"),
        ]

    def tls_options(self) -> dict[str, str]:
        """As they stand in a URL's query, or in ``broker_use_ssl``."""
        return {
            "ssl_ca_certs": str(self._home / "ca.pem"),
            "ssl_certfile": str(self._home / "client.pem"),
            "ssl_keyfile": str(self._home / "client.key"),
        }

    def url_for(self, user: str) -> str:
        """For ``USER:PASSWORD``."""
        return f"rediss://{user}@{HOST}:{self.port}/0?{urlencode(self.tls_options())}"

    def client(self, database: int = 0) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        options = self.tls_options()
        return redis.Redis(host=HOST, port=self.port, db=database, ssl=True, retry=retry, **options)
