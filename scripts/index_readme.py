"""Build hook: README.md for the page of a package index, which knows no other file.

Links into the repository get the address in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

INTO_THE_REPOSITORY = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        files = f"{metadata['urls']['Source']}/blob/main"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": INTO_THE_REPOSITORY.sub(rf"]({files}/\1)", text),
        }
