"""Start-up code of a launched Python program: waits for it to import PyTorch, then for its first optimizer step.

Imports little, and never raises into the program. The ``sitecustomize`` that this one hides is run as well.
"""

import _thread
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # importing typing would slow down every process of the job
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds ``torch`` as usual, and attaches after its import.

    It stays installed until then: a program may call ``importlib.util.find_spec("torch")`` before importing it, as transformers does.
    """

    def __init__(self) -> None:
        self._searching: set[int] = set()  # threads that are calling the other finders

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None",  # noqa: ARG002 - the interface's
        target: "ModuleType | None" = None,  # noqa: ARG002 - as above
    ) -> "importlib.machinery.ModuleSpec | None":
        thread = _thread.get_ident()
        if fullname != "torch" or thread in self._searching:
            return None
        self._searching.add(thread)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(thread)
        try:
            _attach_after(spec, self)
        except Exception as error:  # noqa: BLE001 - never into the program
            _report(error)
        return spec


def _attach_after(spec: "importlib.machinery.ModuleSpec | None", finder: _AfterTorch) -> None:
    """Make a module's loader attach after it has loaded the module."""
    if spec is None or spec.loader is None:
        return
    load = spec.loader.exec_module

    def load_and_attach(module: "ModuleType") -> None:
        load(module)
        if finder not in sys.meta_path:
            return
        sys.meta_path.remove(finder)
        try:
            from watchstep.wrapper.attach import wait_for_first_step

            wait_for_first_step()
        except Exception as error:  # noqa: BLE001 - never into the program
            _report(error)

    spec.loader.exec_module = load_and_attach  # type: ignore[method-assign]


def _report(error: Exception) -> None:
    try:  # noqa: SIM105 - importing contextlib would cost every process of the job
        sys.stderr.write(f"watchstep: not attached: {error!r}\n")
    except Exception:  # noqa: BLE001, S110 - the program has no such stream, and nobody reads it
        pass


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path or os.curdir)
    except OSError:  # the current directory was removed
        return path


def _run_hidden() -> None:
    """Run the next ``sitecustomize`` on the path, as Python would have done; its exceptions are raised as usual."""
    here = _absolute(os.path.dirname(__file__))
    others = [entry for entry in sys.path if _absolute(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _seed() -> None:
    """Seed the program, as ``watchstep audit --seed`` requests."""
    try:
        from watchstep.seeds import seed_all

        seed_all(int(os.environ["WATCHSTEP_AUDIT_SEED"]))
    except Exception as error:  # noqa: BLE001 - never into the program
        _report(error)


if "WATCHSTEP_AUDIT_SEED" in os.environ:
    _seed()
if "torch" not in sys.modules:
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden()
