"""Generate a client from the OpenAPI document, and check that it covers every operation.

    python infra/client.py [DOCUMENT]     (default: docs/openapi.json)

Runs openapi-python-client, which must be installed for this interpreter (`make client`). The check fails on any warning of the
generator, on an operation that it left out, and on a generated module that cannot be imported. The client is in build/client.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "openapi.json"
FOLDER = ROOT / "build" / "client"
PACKAGE = "watchstep_api"
METHODS = frozenset({"get", "put", "post", "delete", "patch", "head", "options", "trace"})
_IMPORTS = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
"""


def documented(document: Path) -> int:
    """How many operations a document has."""
    paths = json.loads(document.read_text(encoding="utf-8"))["paths"]
    return sum(method in METHODS for item in paths.values() for method in item)


def generated(package: Path) -> int:
    """How many operations a generated client has: one module each, in a folder for each tag."""
    return sum(path.name != "__init__.py" for path in package.glob("api/*/*.py"))


def faults(document: Path, folder: Path, generator: list[str]) -> list[str]:
    """Generate a client, and return what is wrong with it.

    Args:
        document: the OpenAPI document.
        folder: where the client goes; emptied first.
        generator: the command of openapi-python-client.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "config.json"
    # No formatting of what is thrown away; pictures are bytes, for which the generator has no type of its own.
    options = {"post_hooks": [], "content_type_overrides": {"image/png": "application/octet-stream"}}
    config.write_text(json.dumps(options), encoding="utf-8")
    package = folder / PACKAGE
    command = [*generator, "generate", "--path", str(document), "--output-path", str(package)]
    command += ["--meta", "none", "--config", str(config), "--fail-on-warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"openapi-python-client warns or fails:\n{done.stdout}{done.stderr}"]
    made, needed = generated(package), documented(document)
    if made != needed:
        return [f"the client has {made} operations, the document {needed}"]
    loaded = subprocess.run(
        [sys.executable, "-c", _IMPORTS, PACKAGE], cwd=folder, capture_output=True, text=True, check=False
    )
    return [f"the client cannot be imported:\n{loaded.stderr}"] if loaded.returncode else []


def main() -> int:
    """Check the document that is named, or the repository's."""
    document = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DOCUMENT
    found = faults(document, FOLDER, [str(Path(sys.executable).with_name("openapi-python-client"))])
    for fault in found:
        print(f"client: {fault}", file=sys.stderr)
    if not found:
        print(f"client: {documented(document)} operations, no warning")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
