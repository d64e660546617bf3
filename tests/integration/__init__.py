"""Tests through the public API, on apps whose broker needs no server."""
