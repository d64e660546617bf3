"""Settings: read from a real Celery configuration, checked, and unknown names told."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_unique.config import settings as settings_module
from celery_unique.config.settings import (
    DEFAULT_SETTINGS,
    SETTINGS,
    UniqueSettings,
    check_setting_names,
    read_settings,
    warn_unknown_settings,
)
from celery_unique.exceptions import ConfigurationError, UniqueSettingsWarning
from celery_unique.policy.option_names import OPTION_FIELDS
from celery_unique.policy.states import STATES


@pytest.fixture(autouse=True)
def nothing_was_warned_about() -> Iterator[None]:
    settings_module._warned.clear()
    yield
    settings_module._warned.clear()


def app_with(**conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    return app


def test_nothing_set_gives_the_defaults():
    assert read_settings(app_with()) == UniqueSettings()


def test_the_defaults():
    expected = UniqueSettings(
        store_url=None,
        namespace="",
        queue_lease=timedelta(hours=24),
        run_lease=timedelta(seconds=60),
        publish_grace=timedelta(seconds=30),
        retention=timedelta(days=1),
        store_timeout=timedelta(seconds=2),
        gate_timeout=timedelta(milliseconds=250),
        on_store_error="raise",
        eager=False,
        key_secret=None,
        conceal_holder=False,
        idempotency_scope="task",
        app_defaults={},
    )

    assert UniqueSettings() == expected
    assert {name: setting.default for name, setting in SETTINGS.items()} == {
        f"unique_{field.name}": getattr(expected, field.name)
        for field in fields(UniqueSettings)
        if field.name != "app_defaults"
    }


def test_every_option_has_a_setting_for_its_default():
    assert list(DEFAULT_SETTINGS.values()) == list(OPTION_FIELDS)
    assert set(DEFAULT_SETTINGS) == {
        "unique_default_for",
        "unique_default_on",
        "unique_default_by",
        "unique_default_meta",
        "unique_default_key",
        "unique_default_states",
        "unique_default_on_conflict",
        "unique_default_max_wait",
        "unique_default_identity_strategy",
        "unique_default_label",
        "unique_default_limit",
        "unique_default_max_queue",
        "unique_default_group",
        "unique_default_merge",
        "unique_default_merge_max_bytes",
    }


def test_every_setting_is_read():
    app = app_with(
        unique_store_url="redis://localhost/1",
        unique_namespace="shop:prod",
        unique_queue_lease=3600,
        unique_run_lease="PT10S",
        unique_publish_grace=timedelta(seconds=5),
        unique_retention="P7D",
        unique_store_timeout=0.5,
        unique_gate_timeout=0.1,
        unique_on_store_error="publish",
        unique_eager=True,
        unique_key_secret="geheim",
        unique_conceal_holder=True,
        unique_idempotency_scope="app",
        unique_default_for="PT1H",
        unique_default_on="shop_id",
        unique_default_by=["args", "queue"],
        unique_default_states="window",
        unique_default_on_conflict="replace",
        unique_default_max_wait=60,
        unique_default_identity_strategy="always_unique",
    )

    assert read_settings(app) == UniqueSettings(
        store_url="redis://localhost/1",
        namespace="shop:prod",
        queue_lease=timedelta(hours=1),
        run_lease=timedelta(seconds=10),
        publish_grace=timedelta(seconds=5),
        retention=timedelta(days=7),
        store_timeout=timedelta(milliseconds=500),
        gate_timeout=timedelta(milliseconds=100),
        on_store_error="publish",
        eager=True,
        key_secret=b"geheim",
        conceal_holder=True,
        idempotency_scope="app",
        app_defaults={
            "unique_for": timedelta(hours=1),
            "unique_on": ("shop_id",),
            "unique_by": ("type", "queue", "args"),
            "unique_states": STATES,
            "unique_on_conflict": "replace",
            "unique_max_wait": timedelta(seconds=60),
            "identity_strategy": "always_unique",
        },
    )


def test_none_is_not_set():
    names = {**SETTINGS, **DEFAULT_SETTINGS}

    assert read_settings(app_with(**dict.fromkeys(names))) == UniqueSettings()


def test_repr_shows_neither_the_secret_nor_a_password():
    app = app_with(unique_key_secret="geheim", unique_store_url="redis://:hunter2@host/0")

    shown = repr(read_settings(app))

    assert "geheim" not in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    "conf",
    [
        {"unique_default_max_wait": 60},  # for the tasks that replace
        {"unique_default_meta": "tenant"},  # brings its dimension into the key
        {"unique_default_by": ["args", "meta"]},  # the tasks name the headers
        {"unique_default_key": "{shop_id}"},
        {"unique_key_secret": b"geheim"},
        {"unique_namespace": "a-b_c.d:e/f@g+h"},
    ],
)
def test_it_is_accepted(conf):
    read_settings(app_with(**conf))


REFUSED = [
    ({"unique_store_url": "localhost"}, "unique_store_url", "write one such as 'redis://"),
    ({"unique_store_url": ""}, "unique_store_url", "write one such as 'redis://"),
    ({"unique_store_url": 6379}, "unique_store_url", "write one such as 'redis://"),
    ({"unique_namespace": "{a}"}, "unique_namespace", "letters, digits and any of"),
    ({"unique_namespace": "a b"}, "unique_namespace", "letters, digits and any of"),
    ({"unique_namespace": "a" * 101}, "unique_namespace", "at most 100"),
    ({"unique_namespace": 1}, "unique_namespace", "letters, digits and any of"),
    ({"unique_run_lease": "1m"}, "unique_run_lease", "ISO 8601 duration ('PT10M')"),
    ({"unique_run_lease": 0}, "unique_run_lease", "at least one millisecond"),
    ({"unique_on_store_error": "rise"}, "unique_on_store_error", "Did you mean 'raise'?"),
    ({"unique_on_store_error": True}, "unique_on_store_error", "Use 'raise' or 'publish'"),
    ({"unique_eager": "false"}, "unique_eager", "set True or False"),
    ({"unique_eager": 0}, "unique_eager", "set True or False"),
    ({"unique_key_secret": ""}, "unique_key_secret", "give a long random text"),
    ({"unique_key_secret": b""}, "unique_key_secret", "give a long random text"),
    ({"unique_idempotency_scope": "tasks"}, "unique_idempotency_scope", "Did you mean 'task'?"),
    ({"unique_default_for": "1m"}, "unique_default_for", "ISO 8601 duration ('PT10M')"),
    ({"unique_default_states": "windw"}, "unique_default_states", "Did you mean 'window'?"),
    (
        {"unique_default_on": "a", "unique_default_key": "{a}"},
        "unique_default_key",
        "give only one of them",
    ),
    (
        {"unique_default_on": "a", "unique_default_by": "type"},
        "unique_default_on",
        "add 'args' to keys",
    ),
    (
        {"unique_default_meta": "a", "unique_default_by": "type"},
        "unique_default_meta",
        "add 'meta' to keys",
    ),
]


@pytest.mark.parametrize(("conf", "setting", "cure"), REFUSED, ids=[str(c) for c, *_ in REFUSED])
def test_it_is_refused_with_the_setting_and_the_cure(conf, setting, cure):
    with pytest.raises(ConfigurationError) as raised:
        read_settings(app_with(**conf))

    assert raised.value.setting == setting
    assert str(raised.value).startswith(f"{setting}: ")
    assert cure in str(raised.value)


def test_a_wrong_secret_is_not_shown():
    with pytest.raises(ConfigurationError, match="list is not str or bytes") as raised:
        read_settings(app_with(unique_key_secret=["geheim"]))

    assert "geheim" not in repr(raised.value)


def test_a_password_in_something_that_is_no_url_is_not_shown():
    with pytest.raises(ConfigurationError, match="'host:6379' is not a URL") as raised:
        read_settings(app_with(unique_store_url="me:hunter2@host:6379"))

    assert "hunter2" not in repr(raised.value)


# -- Where settings come from ----------------------------------------------------------------------


def django_like(**names: Any) -> Any:
    return types.SimpleNamespace(CELERY_BROKER_URL="memory://", **names)


def with_namespace(source: Any, namespace: str = "CELERY") -> Celery:
    app = Celery("shop", set_as_current=False)
    app.config_from_object(source, namespace=namespace)
    return app


def test_settings_come_from_behind_a_namespace():
    app = with_namespace(django_like(CELERY_UNIQUE_RUN_LEASE=5, CELERY_UNIQUE_DEFAULT_FOR="PT1H"))

    settings = read_settings(app)

    assert settings.run_lease == timedelta(seconds=5)
    assert settings.app_defaults == {"unique_for": timedelta(hours=1)}


def test_settings_come_from_djangos_settings():
    django_conf = pytest.importorskip("django.conf")
    source = django_conf.LazySettings()
    source.configure(CELERY_UNIQUE_NAMESPACE="shop", CELERY_UNIQUE_EAGR=True)
    app = with_namespace(source)

    assert read_settings(app).namespace == "shop"
    with pytest.warns(UniqueSettingsWarning, match="CELERY_UNIQUE_EAGR .* 'CELERY_UNIQUE_EAGER'"):
        warn_unknown_settings(app)


def test_a_setting_made_on_the_app_wins_over_one_behind_a_namespace():
    app = with_namespace(django_like(CELERY_UNIQUE_NAMESPACE="a"))

    app.conf.update(unique_namespace="b")

    assert read_settings(app).namespace == "b"


# -- Names that nothing reads ----------------------------------------------------------------------


def warned(app: Celery) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_unknown_settings(app)
    assert all(warning.category is UniqueSettingsWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", [*SETTINGS, *DEFAULT_SETTINGS])
def test_a_setting_of_ours_is_not_warned_about(name):
    assert warned(app_with(**{name: None})) == []
    assert warned(with_namespace(django_like(**{f"CELERY_{name.upper()}": None}))) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("unique_stor_url", "unique_store_url"),
        ("unique_queue_leese", "unique_queue_lease"),
        ("unique_default_state", "unique_default_states"),
        ("UNIQUE_STORE_URL", "unique_store_url"),
        ("UNIQUE_STOR_URL", "unique_store_url"),
        ("CELERY_UNIQUE_STORE_URL", "unique_store_url"),  # without a namespace nothing reads it
    ],
)
def test_a_name_that_nothing_reads_is_told_with_the_nearest(name, meant):
    assert warned(app_with(**{name: 1})) == [
        f"{name} is not a setting, and nothing reads it. Did you mean {meant!r}?"
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CELERY_UNIQUE_STOR_URL", "CELERY_UNIQUE_STORE_URL"),
        ("UNIQUE_STORE_URL", "CELERY_UNIQUE_STORE_URL"),
        ("UNIQUE_STOR_URL", "CELERY_UNIQUE_STORE_URL"),
    ],
)
def test_behind_a_namespace_the_nearest_is_spelled_with_it(name, meant):
    assert warned(with_namespace(django_like(**{name: 1}))) == [
        f"{name} is not a setting, and nothing reads it. Did you mean {meant!r}?"
    ]


def test_another_namespace_is_respected():
    app = with_namespace({"SHOP_UNIQUE_EAGR": 1, "SHOP_UNIQUE_RUN_LEASE": 5}, namespace="SHOP")

    assert read_settings(app).run_lease == timedelta(seconds=5)
    assert warned(app) == [
        "SHOP_UNIQUE_EAGR is not a setting, and nothing reads it. Did you mean 'SHOP_UNIQUE_EAGER'?"
    ]


def test_a_name_near_to_none_lists_them_all():
    (message,) = warned(app_with(unique_xyzzy=1))

    assert all(name in message for name in (*SETTINGS, *DEFAULT_SETTINGS))


def test_a_name_that_several_begin_with_lists_those():
    (message,) = warned(app_with(unique_default=60))

    assert message == (
        "unique_default is not a setting, and nothing reads it. Use "
        "'unique_default_by', 'unique_default_on', 'unique_default_meta', 'unique_default_for', "
        "'unique_default_states', 'unique_default_on_conflict', 'unique_default_key', "
        "'unique_default_max_wait', 'unique_default_identity_strategy', 'unique_default_label', "
        "'unique_default_limit', 'unique_default_max_queue', 'unique_default_group', "
        "'unique_default_merge' or 'unique_default_merge_max_bytes'"
    )
    with pytest.raises(ConfigurationError, match=r"not a setting\. Use 'unique_default_by'"):
        check_setting_names(["unique_default"])


def test_settings_of_others_are_left_alone():
    assert warned(with_namespace(django_like(UNIQUE_VISITORS=1, UNIQUELY="x"))) == []
    assert warned(app_with(uniqueness=1, my_unique_id=2)) == []


def test_it_is_told_once():
    app = app_with(unique_stor_url=1)

    assert len(warned(app)) == 1
    assert warned(app) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("unique_stor_url", "unique_store_url"), ("store_url", "unique_store_url"), ("xyzzy", "Use ")],
)
def test_a_wrong_name_given_by_hand_is_an_error(name, meant):
    with pytest.raises(ConfigurationError, match=f"{name} is not a setting") as raised:
        check_setting_names(["unique_eager", name])

    assert meant in str(raised.value)
    assert raised.value.setting == name


def test_importing_policies_options_and_settings_loads_nothing_slow():
    code = (
        "import sys, celery_unique.config.settings, celery_unique.config.store_url; "
        "print({'celery', 'kombu', 'isodate', 'difflib', 'redis'} & sys.modules.keys())"
    )

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout.strip() == "set()"
