"""Landlock: the kernel takes away what a process may open, and what it may reach. For good, from itself.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from watchstep_rules.custom.sandbox.kernel import call

_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_FILE_RIGHTS = 16  # from ABI 5 on
_BIND_AND_CONNECT = 0b11
_SOCKETS_AND_SIGNALS = 0b11


def abi() -> int:
    """The version that the kernel has; 0 where it has none, or it is switched off."""
    try:
        return call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def restrict(readable: Sequence[Path]) -> int:
    """From now on this thread, and those that it starts, may open only some files and those below some folders, to read.

    Where the kernel knows how, it may not bind or connect TCP sockets either, nor signal others.

    Returns:
        The version that did it; 0 where nothing was done.
    """
    version = abi()
    if version < 1:
        return 0
    rights = (1 << _FILE_RIGHTS.get(version, _ALL_FILE_RIGHTS)) - 1
    fields = [rights]
    if version >= 4:
        fields.append(_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(_SOCKETS_AND_SIGNALS)
    attributes = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields))
    try:
        rules = call("landlock_create_ruleset", _address(attributes), 8 * len(fields), 0)
    except OSError:
        return 0
    try:
        for folder in readable:
            _allow(rules, folder)
        call("landlock_restrict_self", rules, 0)
    except OSError:
        return 0
    finally:
        os.close(rules)
    return version


def _allow(rules: int, folder: Path) -> None:
    try:
        opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there
    try:
        rights = _READ_FILE | _READ_DIR if folder.is_dir() else _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened), 12)
        call("landlock_add_rule", rules, _PATH_BENEATH, _address(rule), 0)
    finally:
        os.close(opened)


def _address(data: ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
    return ctypes.cast(data, ctypes.c_void_p)
