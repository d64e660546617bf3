"""``celery unique manifest``: the Open Job Spec's manifest."""

from __future__ import annotations

import json

import click

from celery_unique.operations.manifest import manifest
from celery_unique.operations.select import installed_state


@click.command("manifest", short_help="Print the Open Job Spec's manifest.")
@click.option("--json", "as_json", is_flag=True, help="In one line; it is JSON either way.")
@click.pass_context
def manifest_command(ctx: click.Context, /, as_json: bool) -> None:
    """Print the Open Job Spec's conformance manifest, with the strength of the store in use."""
    document = manifest(installed_state(ctx.obj.app).app)
    click.echo(json.dumps(document, indent=None if as_json else 2))
