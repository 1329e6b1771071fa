"""Phase a: claim a run for one evaluation. Also: renew the claim, and let it go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, select, update

from watchstep_services.database.clock import now_ns, read_clock
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Project, Run
from watchstep_services.points import reach
from watchstep_services.stores.place import StorePlace


@dataclass(frozen=True)
class Claim:
    """The right to evaluate a run until the lease ends or another takes it.

    Attributes:
        run_id: in the database.
        project: the project's name.
        run: the run's name.
        place: of the project.
        epoch: the fence: a commit with an older one changes nothing.
        cursor: as it was at the claim, canonical text.
        journal: position that the next segment takes.
        tick: number of this evaluation, should it judge.
        now_ns: the tick's clock.
        hints: how many hints of work had come; those that come later are not lost.
        state: of the run.
        attempt: the run's newest.
    """

    run_id: int
    project: str
    run: str
    place: StorePlace
    epoch: int
    cursor: str
    journal: int
    tick: int
    now_ns: int
    hints: int
    state: str
    attempt: str


def claim(database: Database, run_id: int, lease_ns: int) -> Claim | None:
    """Claim a run; None where another holds it, or there is none."""
    reach("evaluate.claiming", run_id)
    with database.once() as session:
        epoch = session.execute(
            update(Run)
            .where(Run.id == run_id, Run.lease_until_ns <= now_ns())
            .values(epoch=Run.epoch + 1, lease_until_ns=now_ns() + lease_ns)
            .returning(Run.epoch)
            .execution_options(synchronize_session=False)
        ).scalar_one_or_none()
    if epoch is None:
        return None
    with database.read() as session:
        run, project = session.execute(
            select(Run, Project).join(Project, Project.name == Run.project).where(Run.id == run_id)
        ).one()
        return Claim(
            run_id=run_id,
            project=run.project,
            run=run.run,
            place=project.place,
            epoch=epoch,
            cursor=run.cursor,
            journal=run.journal,
            tick=run.ticks,
            now_ns=read_clock(session),
            hints=run.hints,
            state=run.state,
            attempt=run.attempt,
        )


def renew(database: Database, held: Claim, lease_ns: int) -> bool:
    """Hold a claim for longer; False where another has taken the run."""
    with database.once() as session:
        return _changed(
            session.execute(
                update(Run)
                .where(Run.id == held.run_id, Run.epoch == held.epoch)
                .values(lease_until_ns=now_ns() + lease_ns)
                .execution_options(synchronize_session=False)
            )
        )


def release(database: Database, held: Claim, due_ns: int | None) -> bool:
    """Let a run go without a change, unless another has taken it.

    Args:
        database: the database.
        held: the claim.
        due_ns: when to look again without a hint.

    Returns:
        Whether a hint came while it was held, whose message may have found it held: it is to be looked at again.
    """
    with database.once() as session:
        hints = session.execute(
            update(Run)
            .where(Run.id == held.run_id, Run.epoch == held.epoch)
            .values(lease_until_ns=0, due_ns=due_unless_hinted(held, due_ns), asked_ns=asked_if_hinted(held))
            .returning(Run.hints)
            .execution_options(synchronize_session=False)
        ).scalar_one_or_none()
    return hints is not None and hints != held.hints


def due_unless_hinted(held: Claim, due_ns: int | None) -> Any:
    """SQL: when to look again; at once where a hint came while the run was held."""
    return case((Run.hints == held.hints, due_ns), else_=now_ns())


def asked_if_hinted(held: Claim) -> Any:
    """SQL: when a message was last sent; now where a hint came meanwhile, for then whoever lets the run go sends one."""
    return case((Run.hints == held.hints, Run.asked_ns), else_=now_ns())


def _changed(result: Any) -> bool:
    return bool(result.rowcount == 1)
