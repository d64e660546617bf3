"""Diagnosis of a Redis server: its configuration, and what that means for locks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_unique.stores.diagnosis import Diagnosis, Finding
from celery_unique.stores.failover import ServerFacts

__all__ = ["QUESTIONS", "Diagnosis", "diagnosis_of", "diagnosis_of_all", "server_facts"]

#: A diagnosis is made of the replies; one may be an error, if the user lacks a permission.
QUESTIONS: tuple[tuple[str, ...], ...] = (("INFO",), ("CONFIG", "GET", "save"))

OLDEST = (6, 2)
ROLES = {"master": "primary", "slave": "replica"}


def diagnosis_of(replies: list[Any]) -> Diagnosis:
    if isinstance(replies[0], Exception):
        return Diagnosis(findings=(_not_allowed(replies[0]),))
    info = _parsed(replies[0])
    snapshots = _snapshots(replies[1])
    findings = (*_version(info), *_role(info), *_eviction(info), *_persistence(info, snapshots))
    return Diagnosis("network", _facts(info, snapshots), findings)


def diagnosis_of_all(replies: Mapping[str, list[Any]]) -> Diagnosis:
    """Of primaries that can fail over, by name. Their findings name them."""
    servers: dict[str, dict[str, str]] = {}
    found: dict[Finding, list[str]] = {}
    for name, of_one in replies.items():
        one = diagnosis_of(of_one)
        findings, servers[name] = one.findings, one.facts
        if one.facts:
            info = _parsed(of_one[0])
            facts = server_facts(name, info)
            findings += tuple(_replicas(facts))
            servers[name] = one.facts | _facts_of_a_primary(facts, info)
        for finding in findings:
            found.setdefault(finding, []).append(name)
    return Diagnosis(
        "network",
        {"servers": f"{len(servers)} {'primary' if len(servers) == 1 else 'primaries'}"},
        # A finding that several servers share is reported once.
        tuple(replace(one, message=f"{', '.join(on)}: {one.message}") for one, on in found.items()),
        servers,
    )


def server_facts(name: str, info: bytes | dict[str, str]) -> ServerFacts:
    """From a server's INFO, or its section on replication."""
    facts = _parsed(info) if isinstance(info, bytes) else info
    return ServerFacts(
        name,
        int(facts.get("connected_slaves", 0)),
        int(facts.get("second_repl_offset", -1)) >= 0,
    )


def _facts_of_a_primary(facts: ServerFacts, info: dict[str, str]) -> dict[str, str]:
    role = ROLES.get(info.get("role", ""), "?")
    return {
        "role": role + (", promoted since it was started" if facts.was_promoted else ""),
        "started": f"{timedelta(seconds=int(info.get('uptime_in_seconds', 0)))} ago",
        "replicas": ", ".join(_connected(info)) or "none is connected",
    }


def _connected(info: dict[str, str]) -> Iterator[str]:
    """The replicas, as the primary sees them: address, and state unless online."""
    for n in range(int(info.get("connected_slaves", 0))):
        replica = info.get(f"slave{n}", "")
        facts = dict(part.split("=", 1) for part in replica.split(",") if "=" in part)
        state = facts.get("state", "?")
        place = f"{facts.get('ip', '?')}:{facts.get('port', '?')}"
        yield place if state == "online" else f"{place} ({state})"


def _replicas(facts: ServerFacts) -> Iterator[Finding]:
    if not facts.replicas:
        yield Finding(
            "replicas",
            "warning",
            "no replica is connected: there is no copy of its locks, and no server can replace it",
            "start its replica, or check in that one's log why it is not connected",
        )


def _not_allowed(error: Exception) -> Finding:
    return Finding(
        "rights",
        "note",
        f"the server does not allow INFO ({error}), so eviction and persistence are not checked",
        "let the user of unique_store_url run INFO",
    )


def _parsed(info: bytes) -> dict[str, str]:
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _snapshots(reply: Any) -> bool | None:
    """Whether the server writes snapshots; None if unknown."""
    if isinstance(reply, Exception) or len(reply) < 2:
        return None
    return bool(reply[1].strip())


def _facts(info: dict[str, str], snapshots: bool | None) -> dict[str, str]:
    product = "Valkey" if "valkey_version" in info else "Redis"
    saved = {True: "snapshots", False: "nothing", None: "unknown"}[snapshots]
    return {
        "server": f"{product} {info.get('valkey_version') or info.get('redis_version', '?')}",
        "role": ROLES.get(info.get("role", ""), "?"),
        "persistence": "append-only file" if info.get("aof_enabled") == "1" else saved,
        "eviction": info.get("maxmemory_policy", "?"),
        "memory": f"{info.get('used_memory_human', '?')} used, limit {_limit(info) or 'none'}",
    }


def _limit(info: dict[str, str]) -> str:
    limit = info.get("maxmemory", "0")
    return info.get("maxmemory_human", f"{limit} bytes") if limit != "0" else ""


def _version(info: dict[str, str]) -> Iterator[Finding]:
    found = info.get("redis_version", "")  # of Valkey: the version that it is compatible with
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return
    if (major, minor) < OLDEST:
        yield Finding(
            "version",
            "error",
            f"the server is Redis {found}; the scripts need 6.2 or newer",
            "update the server",
        )


def _role(info: dict[str, str]) -> Iterator[Finding]:
    if info.get("role") == "slave":
        yield Finding(
            "role",
            "error",
            "the server is a replica: it refuses every act on a lock",
            "let unique_store_url lead to the primary",
        )


def _eviction(info: dict[str, str]) -> Iterator[Finding]:
    """Every lock expires, so the volatile policies evict them as well."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return
    limit, evicted = _limit(info), info.get("evicted_keys", "0")
    happened = f", and has evicted {evicted} keys since it started" if evicted != "0" else ""
    yield Finding(
        "eviction",
        "error" if limit else "warning",
        f"the server may evict locks (maxmemory-policy is {policy}, maxmemory "
        f"{limit or 'without a limit so far'}){happened}: an evicted lock is a key that is "
        "free while its task runs, and calls of a canvas that follow its task can be lost with it",
        "set maxmemory-policy to noeviction, or give the locks a Redis of their own "
        "(unique_store_url)",
    )


def _persistence(info: dict[str, str], snapshots: bool | None) -> Iterator[Finding]:
    if info.get("aof_enabled") == "1" or snapshots is None:
        return
    if snapshots:
        yield Finding(
            "persistence",
            "note",
            "the server writes snapshots only: after a crash, locks taken since the last one "
            "are gone, and so are parked calls and merged values, and calls of a canvas that "
            "follow a task can be",
            "switch the append-only file on (appendonly yes)",
        )
        return
    yield Finding(
        "persistence",
        "warning",
        "the server writes nothing to disk: after a restart every key is free, while tasks "
        "wait and run; parked calls and merged values are lost, and calls of a canvas that "
        "follow such a task can be",
        "switch the append-only file on (appendonly yes)",
    )
