"""The package's layout: documented import paths, entries at the root, inheritance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import celery_unique

PACKAGE = Path(celery_unique.__file__).parent

#: Module -> the names that the docs promise at this path.
DOCUMENTED = {
    "celery_unique": """
        BatchInterrupted CallOptions CeleryUniqueError ConfigurationError DuplicateTask
        IdempotencyKeyConflict IdempotencyKeyRequired InvalidPolicy Lock StoreUnavailable
        TaskOptions UniqueApp UniqueEagerResult UniqueKeyError UniquePolicy UniqueResult UniqueTask
        UnreadableRecord aio apply_many install live_locks lookup manifest release shared_task
        time_bucket unique_acquired unique_conflict unique_lost unique_released unique_store_error
        unique_superseded __version__""",
    "celery_unique.aio": "apply_async apply_many delay lookup release",
    "celery_unique.exceptions": """
        BatchInterrupted CeleryUniqueError ConfigurationError DuplicateTask IdempotencyKeyConflict
        IdempotencyKeyRequired InvalidPolicy StoreUnavailable UniqueKeyError UniquePolicyWarning
        UniqueSettingsWarning UnreadableRecord""",
    "celery_unique.testing": "UniqueLocks assert_created assert_duplicate locks_in_memory",
    "celery_unique.testing.store_contract": "LockStoreContract",
    "celery_unique.contrib.django": "",
    "celery_unique.contrib.opentelemetry": "install",
    "celery_unique.contrib.prometheus": "install",
    "celery_unique.contrib.sentry": "install",
    "celery_unique.cli": "main unique",
    "celery_unique.stores": "open_store",
    "celery_unique.stores.base": """
        Acquired Claim Finish Finished Held Holder LockStore Orphan Start Started""",
    "celery_unique.stores.acts": """
        acquire cancel complete_follower confirm finish follow followers_of forget give_back
        help_holder promote reap release renew retry settle start""",
    "celery_unique.stores.diagnosis": "Diagnosis Finding",
    "celery_unique.stores.record": "Record",
    "celery_unique.stores.sql": "SqlStore",
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_a_documented_import_path_works(module):
    imported = import_module(module)

    assert [name for name in DOCUMENTED[module].split() if not hasattr(imported, name)] == []


def test_every_public_name_is_documented_here():
    assert {*celery_unique.__all__, "__version__"} == set(DOCUMENTED["celery_unique"].split())


def test_the_root_of_the_package_has_at_most_18_entries():
    entries = {path.name for path in PACKAGE.iterdir()} - {"py.typed", "__pycache__"}

    assert len(entries) <= 18, sorted(entries)
    # A module of this name would hide the public function.
    hiding = {"install", "manifest", "release", "lookup", "apply_many"}
    assert {entry.removesuffix(".py") for entry in entries} & hiding == set()


def test_nothing_else_in_the_package_imports_the_store_contract():
    contract = PACKAGE / "testing" / "store_contract"

    importing = [
        path
        for path in PACKAGE.rglob("*.py")
        if contract not in path.parents
        if "store_contract" in path.read_text(encoding="utf-8")
    ]

    assert importing == []


def own_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path, node


def named(base: ast.expr) -> str:
    """``Base`` for each of ``Base``, ``module.Base`` and ``Base[int]``."""
    if isinstance(base, ast.Subscript):
        return named(base.value)
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def test_no_class_is_split_by_inheritance():
    """At most one class of ours above another. Stores, and the documented tree of errors, may have
    more: each of their classes is used by itself."""
    bases = {node.name: [named(base) for base in node.bases] for _, node in own_classes()}

    def chain(name: str) -> list[str]:
        above = [chain(base) for base in bases.get(name, []) if base != name]
        return [name, *max(above, key=len, default=[])] if name in bases else []

    too_long = [
        " < ".join(chain(node.name))
        for path, node in own_classes()
        if PACKAGE / "stores" not in path.parents
        if len(chain(node.name)) > 2 and chain(node.name)[-1] != "CeleryUniqueError"
    ]

    assert too_long == []
