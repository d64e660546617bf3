"""Codecs for the messages of followers: that of the settings page, and wrong ones."""

from __future__ import annotations

from cryptography.fernet import Fernet


class FernetCodec:
    def __init__(self, key: bytes) -> None:
        self._fernet = Fernet(key)

    def encode(self, data: bytes) -> bytes:
        return self._fernet.encrypt(data)

    def decode(self, data: bytes) -> bytes:
        return self._fernet.decrypt(data)


fernet = FernetCodec(b"MDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDA=")
another = FernetCodec(b"MTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTE=")


class Failing:
    def encode(self, data: bytes) -> bytes:
        raise OSError("the key server does not answer")

    def decode(self, data: bytes) -> bytes:
        return data


class Texts:
    def encode(self, data: bytes) -> str:
        return data.hex()

    def decode(self, data: bytes) -> bytes:
        return data
