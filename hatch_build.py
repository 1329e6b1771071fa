"""Build the compiled CPU kernel and the web page into the package, where there is a C compiler and Node.js; it works without either.

`CC` names the compiler, with its arguments. `WATCHSTEP_WHEEL_PLATFORM` is the platform tag of a wheel for other machines, such as
`manylinux_2_17_aarch64` (`make wheel`); the build fails then if the kernel does not compile or there is no page.

The page is built by npm unless it is there already (`make page`). An editable installation uses what `make page` built.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("sdk/watchstep/kernels/native")
LIBRARY = FOLDER / "_statistics.so"
SOURCES = (
    "statistics.c",
    "histogram.c",
    "count_x86.c",
    "elements.c",
    "checksum.c",
    "nonfinite.c",
    "pass_plain.c",
    "pass_x86.c",
)
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-Wall", "-Wextra")

WEB = Path("web")
PAGE = Path("services/watchstep_services/page")


def _compiler() -> list[str] | None:
    """The first of `CC`, cc, gcc and clang that there is, with its arguments."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if command and (program := shutil.which(command[0])):
            return [program, *command[1:]]
    return None


class NativeKernelHook(BuildHookInterface[Any]):
    """Runs before a wheel, editable or not, is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both; without a compiler or Node.js, or where the compiler fails, warn and continue."""
        root = Path(self.root)
        self._include_page(root, version, build_data)
        (root / LIBRARY).unlink(missing_ok=True)  # never one of older sources
        wheel_platform = os.environ.get("WATCHSTEP_WHEEL_PLATFORM")
        compiler = _compiler()
        if compiler is None:
            if wheel_platform:
                raise RuntimeError("watchstep: no C compiler, and a wheel for other machines needs one")
            self.app.display_warning("watchstep: no C compiler, statistics will be computed by numpy")
            return
        command = [
            *compiler,
            *FLAGS,
            *(str(root / FOLDER / name) for name in SOURCES),
            "-lm",
            "-o",
            str(root / LIBRARY),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the sources are ours
        if done.returncode:
            if wheel_platform:
                raise RuntimeError(f"watchstep: the kernel does not compile:\n{done.stderr}")
            self.app.display_warning(
                f"watchstep: the kernel does not compile, statistics will be computed by numpy:\n{done.stderr}"
            )
            return
        # The library knows nothing of Python: one wheel a platform serves every version.
        platform = wheel_platform or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _include_page(self, root: Path, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        index = root / PAGE / "index.html"
        npm = shutil.which("npm")
        if not index.is_file() and npm is not None and (root / WEB / "package.json").is_file():
            for arguments in (("ci",), ("run", "build")):
                command = (npm, "--prefix", str(root / WEB), *arguments)
                done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the sources are ours
                if done.returncode:
                    self.app.display_warning(f"watchstep: the web page cannot be built:\n{done.stderr}")
                    break
        if index.is_file():
            build_data["artifacts"].append(f"/{PAGE}/**")
        elif os.environ.get("WATCHSTEP_WHEEL_PLATFORM"):
            raise RuntimeError(
                "watchstep: the web page is not built, and a released wheel needs it: make page"
            )
        else:
            self.app.display_warning(
                "watchstep: the service will have no web page; it needs Node.js 22.12 or newer"
            )
