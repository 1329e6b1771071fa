"""Capture documents in files and in the environment: JSON, or YAML where PyYAML is installed.

``WATCHSTEP_CAPTURE`` contains the path of a file, or a JSON document that starts with ``{``. Launchers pass the content of a file, so that
a job needs neither the file nor PyYAML.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from watchstep.capture.config import CaptureConfig
from watchstep.errors import ConfigError

CAPTURE = "WATCHSTEP_CAPTURE"

MAX_BYTES = 1 << 20
"""Limit of bytes in a capture file."""

MAX_INLINE_BYTES = 100_000
"""Limit of bytes of a document in the environment. Linux limits a variable to 128 KiB."""

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
"""Floating-point numbers of YAML 1.2. YAML 1.1 reads ``1e-3`` as text."""


class _DuplicateKeyError(ValueError):
    """A mapping has a key twice."""


def load(path: str | os.PathLike[str]) -> CaptureConfig:
    """Return the configuration of a capture file.

    Raises:
        ConfigError: the file is missing or invalid, or is YAML and PyYAML is not installed.
    """
    from watchstep.capture.document.document import config_of  # loaded for programs with a document only

    return config_of(load_data(path), f"capture file {os.fspath(path)}")


def load_data(path: str | os.PathLike[str]) -> Any:
    """Return the data of a capture file, which may be an invalid document.

    Raises:
        ConfigError: the file cannot be read or parsed, or is YAML and PyYAML is not installed.
    """
    return _read(path, f"capture file {os.fspath(path)}")


def _read(path: str | os.PathLike[str], source: str) -> Any:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}", "check the path and its permissions") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not UTF-8 text", "save it as UTF-8") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{source}: more than {MAX_BYTES} bytes", "use fewer collections")
    return data_of(text, source)


def data_of(text: str, source: str) -> Any:
    """Return the data of a text, JSON or YAML.

    Raises:
        ConfigError: the text is neither, has a key twice, or is YAML and PyYAML is not installed.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise ConfigError(f"{source}: {error}", "keep one of them") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply", "use the keys of a capture document") from None
    except ValueError as error:
        if source.endswith(".json"):
            raise ConfigError(f"{source}: not valid JSON ({error})", "correct the line") from None
    return _yaml_data(text, source)


def from_environment(variables: Mapping[str, str] = os.environ) -> CaptureConfig | None:
    """Return the configuration of ``WATCHSTEP_CAPTURE``; None if it is not set.

    Raises:
        ConfigError: the document is invalid, or its file cannot be read.
    """
    text = variables.get(CAPTURE, "")
    if not text:
        return None
    from watchstep.capture.document.document import config_of

    data, source = _variable_data(text)
    return config_of(data, source)


def inline_from_environment(variables: Mapping[str, str] = os.environ) -> str:
    """Return the document of ``WATCHSTEP_CAPTURE`` for the environment of a program; empty if it is not set.

    Raises:
        ConfigError: the document is invalid or too large, or its file cannot be read.
    """
    text = variables.get(CAPTURE, "")
    return inline(*_variable_data(text)) if text else ""


def inline_file(path: str | os.PathLike[str]) -> str:
    """Return the document of a capture file for the environment of a program.

    Raises:
        ConfigError: the file is missing, or its document is invalid or too large.
    """
    return inline(load_data(path), f"capture file {os.fspath(path)}")


def inline(data: Any, source: str) -> str:
    """Return a document as one line of JSON, for the environment of a program.

    Args:
        data: the data of the document.
        source: its name in messages.

    Raises:
        ConfigError: the document is invalid or too large.
    """
    text = json.dumps({} if data is None else data, separators=(",", ":"))
    text = text.replace("$", "\\u0024")  # Kubernetes expands $(NAME) in values
    if len(text) > MAX_INLINE_BYTES:
        raise ConfigError(
            f"{source}: {len(text)} bytes as JSON, more than the {MAX_INLINE_BYTES} that a variable can hold",
            "use fewer collections, or pass the file to Hook(config=…)",
        )
    from watchstep.capture.document.document import config_of

    config_of(data, source)  # after the size, as a large document takes minutes to validate
    return text


def _variable_data(text: str) -> tuple[Any, str]:
    if text.lstrip().startswith("{"):
        return data_of(text, CAPTURE), CAPTURE
    source = f"{CAPTURE}: capture file {text}"
    return _read(text, source), source


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _DuplicateKeyError(f"duplicate key {key!r}")
        data[key] = value
    return data


def _yaml_data(text: str, source: str) -> Any:
    try:
        import yaml

        from watchstep.format.yaml_aliases import check_aliases
    except ImportError:
        raise ConfigError(
            f"{source}: not JSON, and PyYAML, which reads YAML, is not installed",
            "pip install pyyaml, or write the document as JSON",
        ) from None

    class Loader(yaml.SafeLoader):
        """Reads numbers as YAML 1.2 does, and refuses duplicate keys, of which YAML uses the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            seen: set[str] = set()
            for key in keys:
                if key in seen and key != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key!r}", node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        root = yaml.compose(text, Loader)
        if root is not None:
            check_aliases(root)
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{source}: {line}not valid YAML ({problem})", "correct the line") from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{source}: not valid YAML ({error})", "put text that looks like a number or a date in quotes"
        ) from error
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply", "use the keys of a capture document") from None
