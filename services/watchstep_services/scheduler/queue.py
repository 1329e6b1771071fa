"""Work for the threads of one process: each run and action at most once at a time."""

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
from watchstep_services.evaluation.evaluate import Evaluation
from watchstep_services.scheduler.work import do_action, do_backtest, evaluate_longest_due
from watchstep_services.service.context import Service

_LEAST_POSTS = 4
_STOP_THREADS = 16

_log = logging.getLogger(__name__)
_Key = tuple[str, int]
_WORK: dict[str, Callable[[Service, int], object]] = {
    "run": evaluate_longest_due, "action": do_action, "backtest": do_backtest
}  # fmt: skip


class WorkQueue:
    """A pool of threads that evaluates runs and tries actions. Thread-safe; it is the service's notifier.

    A hint for something that is being worked on is done once more afterwards.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="watchstep-work")
        # What actions are about is asked of the database alone, and does not wait for any of them.
        self._actions = ThreadPoolExecutor(1, thread_name_prefix="watchstep-action")
        # A stop never waits for evaluations, which may take seconds where rules are slow, nor for another project's backend.
        self._stops = FairThreads(_STOP_THREADS, "watchstep-stop", per_project=_STOP_THREADS // 4)
        # Backtests have a thread of their own: a run that goes on never waits for one that is over. Projects take turns.
        self._backtests = FairThreads(1, "watchstep-backtest", per_project=1)
        # So has what goes out to receivers, which may take their time: no evaluation and no stop waits for them.
        # More of them, for they only wait; and no project's receivers take them all.
        posts = max(_LEAST_POSTS, 2 * threads)
        self._posts = FairThreads(posts, "watchstep-post", per_project=posts // 2, per_subject=posts // 4)
        self._condition = threading.Condition()
        self._busy: set[_Key] = set()
        self._again: set[_Key] = set()
        self._projects: dict[int, str] = {}
        self._closed = False
        self._service: Service | None = None
        self.wake = threading.Event()
        """Set when something is done that may make an action due soon."""

    def start(self, service: Service) -> None:
        """Begin to work for a service."""
        self._service = service

    def run_changed(self, run_id: int, worker: str = "") -> None:  # noqa: ARG002 - all threads hold the same
        """Have a run evaluated: this one, or the one that comes before it, whose own message evaluates this one then."""
        self._put(("run", run_id))

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """Try an action. Where it is not said whom it tells, the database is asked."""
        self._put(("action", action_id), post)

    def backtest_due(self, number: int) -> None:
        """Judge the next run of a backtest."""
        self._put(("backtest", number))

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition holds, looking after each piece of work; False if it does not in time."""
        with self._condition:
            return self._condition.wait_for(done, timeout)

    def close(self) -> None:
        """Take no more work, and end what is being done."""
        with self._condition:
            self._closed = True
            self._again.clear()
        self._backtests.shutdown()
        self._posts.shutdown()
        self._actions.shutdown(wait=True, cancel_futures=True)
        self._stops.shutdown()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.tell()

    def tell(self) -> None:
        """Let those who wait look again."""
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
        """Whose a backtest is; empty where that cannot be read now, which only changes whose turn it takes."""
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
        """Pass an action on to the threads of its kind."""
        assert self._service is not None
        try:
            post = posts_of(self._service, [key[1]]).get(key[1])
            project = project_of(self._service, key[1])
        except Exception:  # noqa: BLE001 - trying it meets the same, and says so
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
        steady = False
        try:
            done = _WORK[key[0]](service, key[1])
            steady = isinstance(done, Evaluation) and done.steady
        except WatchstepError as error:
            _log.warning("%s %d: %s", *key, error)
        except Exception:  # noqa: BLE001 - logged; the thread goes on
            _log.exception("%s %d failed; the sweep takes it up again", *key)
        finally:
            with self._condition:
                self._busy.discard(key)
                again = key in self._again
                self._again.discard(key)
                self._condition.notify_all()
            if not steady:
                self.wake.set()
            if again:
                self._put(key)
