"""Start-up code of a launched Python program: waits for it to import a framework, then for its first update.

Imports little, and never raises into the program. The ``sitecustomize`` that this one hides is run as well.
"""

import _thread
import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # importing typing would slow down every process of the job
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


_ADAPTERS = {
    "torch": ("watchstep.wrapper.attach", "wait_for_first_step"),
    "jax": ("watchstep.jax.attach", "after_jax"),
    "optax": ("watchstep.jax.attach", "after_optax"),
    "keras": ("watchstep.keras.attach", "attach"),
    "tensorflow": ("watchstep.tensorflow.attach", "attach"),
    "xgboost": ("watchstep.xgboost.attach", "attach"),
    "lightgbm": ("watchstep.lightgbm.attach", "attach"),
}
"""Module and function that attach to a framework, called once after the program has imported it."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds frameworks as usual, and attaches after their import. A framework that is not imported costs nothing.

    It waits for each framework until it is imported: a program may call ``importlib.util.find_spec("torch")`` before importing it, as
    transformers does.
    """

    def __init__(self, names: "Sequence[str]") -> None:
        self._waiting = set(names)
        self._imported: list[str] = []
        self._searching: set[tuple[int, str]] = set()  # threads that are calling the other finders

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None",  # noqa: ARG002 - the interface's
        target: "ModuleType | None" = None,  # noqa: ARG002 - as above
    ) -> "importlib.machinery.ModuleSpec | None":
        if fullname not in self._waiting:
            return None
        search = (_thread.get_ident(), fullname)
        if search in self._searching:
            return None
        self._searching.add(search)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(search)
        try:
            self._attach_after(fullname, spec)
        except Exception as error:  # noqa: BLE001 - never into the program
            _report(error)
        return spec

    def _attach_after(self, name: str, spec: "importlib.machinery.ModuleSpec | None") -> None:
        """Make a framework's loader attach after it has loaded the framework."""
        if spec is None or spec.loader is None or spec.submodule_search_locations is None:
            return  # frameworks are packages: a single file is a module of the program's own
        load = spec.loader.exec_module

        def load_and_attach(module: "ModuleType") -> None:
            load(module)
            if name not in self._waiting:
                return
            self._waiting.discard(name)
            self._imported.append(name)
            if len(self._imported) == 1 and os.environ.get("WATCHSTEP_PROGRAM_PROCESS") == str(os.getpid()):
                atexit.register(_report_unrecorded, self._imported)
            if not self._waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
            try:
                adapter, function = _ADAPTERS[name]
                getattr(importlib.import_module(adapter), function)()
            except Exception as error:  # noqa: BLE001 - never into the program
                _report(error)

        spec.loader.exec_module = load_and_attach  # type: ignore[method-assign]


def _report(error: Exception) -> None:
    try:  # noqa: SIM105 - importing contextlib would cost every process of the job
        sys.stderr.write(f"watchstep: not attached: {error!r}\n")
    except Exception:  # noqa: BLE001, S110 - the program has no such stream, and nobody reads it
        pass


def _report_unrecorded(frameworks: "Sequence[str]") -> None:
    """Say at the end of the program that no process of it recorded anything, if so."""
    if os.environ.get("WATCHSTEP_PROGRAM_PROCESS") != str(os.getpid()):
        return  # a fork of the program
    try:
        from watchstep.capture.rank_claim import is_recorded

        if is_recorded():
            return
        policy = os.environ.get("WATCHSTEP_ON_NONFINITE") or "record"
        effect = "" if policy == "record" else f" (--on-nonfinite {policy} had no effect)"
        sys.stderr.write(
            f"watchstep: nothing was recorded on this machine, and nothing could stop the program{effect}: it imported"
            f" {', '.join(frameworks)}, and made no update that is observed without a change to it. Record its updates by"
            " watchstep.Hook; see docs/reference/frameworks.md\n"
        )
    except Exception:  # noqa: BLE001, S110 - never into the program
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
sys.meta_path.insert(0, _AfterImport([name for name in _ADAPTERS if name not in sys.modules]))
_run_hidden()
