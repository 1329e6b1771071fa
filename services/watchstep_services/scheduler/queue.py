"""Work queue of one process's threads: each run and action is processed at most once at a time."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services.core.due_action import DeliveryKey
from watchstep_services.core.fair_threads import FairThreads
from watchstep_services.db.models import Backtest
from watchstep_services.dispatch.dispatch import posts_of, project_of
from watchstep_services.scheduler.work import Evaluated, do_action, do_backtest, evaluate_due
from watchstep_services.service.context import Service

_LEAST_POSTS = 4
_STOP_THREADS = 16

_log = logging.getLogger(__name__)
_Key = tuple[str, int]
_WORK: dict[str, Callable[[Service, int], object]] = {
    "run": evaluate_due, "action": do_action, "backtest": do_backtest
}  # fmt: skip


class WorkQueue:
    """A pool of threads that evaluates runs and tries actions. Thread-safe; it is the service's notifier.

    A hint for work in progress repeats the work once afterwards.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="watchstep-work")
        # Looking up the receivers of actions uses only the database, and waits for no action.
        self._actions = ThreadPoolExecutor(1, thread_name_prefix="watchstep-action")
        # Stops have their own threads: evaluations with slow rules take seconds, and other projects' backends may hang.
        self._stops = FairThreads(_STOP_THREADS, "watchstep-stop", per_project=_STOP_THREADS // 4)
        # Backtests have one thread, so that live runs never wait for them. Projects take turns.
        self._backtests = FairThreads(1, "watchstep-backtest", per_project=1)
        # Notifications have their own threads, because receivers may be slow. There are more, because they mostly wait, and
        # each project is limited to half of them.
        posts = max(_LEAST_POSTS, 2 * threads)
        self._posts = FairThreads(posts, "watchstep-post", per_project=posts // 2, per_subject=posts // 4)
        self._condition = threading.Condition()
        self._busy: set[_Key] = set()
        self._again: set[_Key] = set()
        self._excepted: dict[_Key, None] = {}  # runs of projects that occupied all threads but one, in order
        self._projects: dict[int, str] = {}
        self._closed = False
        self._service: Service | None = None
        self.wake = threading.Event()
        """Set after work that may make an action due soon."""

    def start(self, service: Service) -> None:
        """Set the service and begin to work."""
        self._service = service

    def run_changed(self, run_id: int, worker: str = "") -> None:  # noqa: ARG002 - all threads share the caches
        """Evaluate the runs that are due, of which this is one."""
        self._put(("run", run_id))

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """Try an action. If its receiver is not given, it is looked up in the database."""
        self._put(("action", action_id), post)

    def backtest_due(self, number: int) -> None:
        """Evaluate the next run of a backtest."""
        self._put(("backtest", number))

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition is true, checking it after each unit of work; False at the timeout."""
        with self._condition:
            return self._condition.wait_for(done, timeout)

    def close(self) -> None:
        """Accept no more work, and finish work in progress; large evaluations, which may take long, are left to the next process."""
        if self._service is not None:
            self._service.stopping.set()
        with self._condition:
            self._closed = True
            self._again.clear()
        self._backtests.shutdown()
        self._posts.shutdown()
        self._actions.shutdown(wait=True, cancel_futures=True)
        self._stops.shutdown()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.notify_waiting()

    def notify_waiting(self) -> None:
        """Wake the callers of `wait_until`, which then check their condition again."""
        with self._condition:
            self._condition.notify_all()

    def _put(self, key: _Key, post: DeliveryKey | None = None) -> None:
        project = self._project_of(key[1]) if key[0] == "backtest" else ""
        with self._condition:
            if self._closed:
                return
            if key in self._busy:
                self._again.add(key)
                return
            self._busy.add(key)
            if post is not None:
                self._posts.submit(post.project, functools.partial(self._do, key), post.receiver)
                return
            if key[0] == "action":
                self._actions.submit(self._sort, key)
            elif key[0] == "backtest":
                self._backtests.submit(project, functools.partial(self._do, key))
            else:
                self._pool.submit(self._do, key)

    def _project_of(self, backtest: int) -> str:
        """The project of a backtest; empty if it cannot be read now, which only affects fairness."""
        if backtest not in self._projects:
            assert self._service is not None
            try:
                with self._service.database.read() as session:
                    row = session.get(Backtest, backtest)
            except SQLAlchemyError as error:
                _log.warning("backtest %d: its project cannot be read: %s", backtest, error)
                return ""
            if row is None:
                return ""
            self._projects[backtest] = row.project
        return self._projects[backtest]

    def _sort(self, key: _Key) -> None:
        """Hand an action to the threads of its kind."""
        assert self._service is not None
        try:
            post = posts_of(self._service, [key[1]]).get(key[1])
            project = project_of(self._service, key[1])
        except Exception:  # noqa: BLE001 - the try itself raises and reports it
            post, project = None, ""
        work = functools.partial(self._do, key)
        with self._condition:
            if self._closed:
                self._busy.discard(key)
            elif post is None:
                self._stops.submit(project, work)
            else:
                self._posts.submit(post.project, work, post.receiver)

    def _do(self, key: _Key) -> None:
        service = self._service
        assert service is not None
        steady = was_excepted = False
        try:
            done = _WORK[key[0]](service, key[1])
            if isinstance(done, Evaluated):
                steady, was_excepted = done.steady, done.was_excepted
        except WatchstepError as error:
            _log.warning("%s %d: %s", *key, error)
        except Exception:  # noqa: BLE001 - logged; the thread continues
            _log.exception("%s %d failed; the sweep tries it again", *key)
        finally:
            with self._condition:
                self._busy.discard(key)
                again = key in self._again
                self._again.discard(key)
                following = [key] if again else []
                if key[0] == "run":
                    following += self._next_excepted(key, was_excepted=was_excepted)
                self._condition.notify_all()
            if not steady:
                self.wake.set()
            for work in following:
                self._put(work)

    def _next_excepted(self, key: _Key, *, was_excepted: bool) -> list[_Key]:
        """The run that is evaluated next, of those that were excepted. The caller holds the lock."""
        if was_excepted:
            self._excepted[key] = None
        # While other threads evaluate runs, the next of them to end continues here.
        if not self._excepted or (was_excepted and any(kind == "run" for kind, _ in self._busy)):
            return []
        following = next(iter(self._excepted))
        del self._excepted[following]
        return [following]
