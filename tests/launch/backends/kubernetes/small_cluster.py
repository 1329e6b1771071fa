"""A cluster with a command of its own: ``python small_cluster.py FOLDER submit|status|stop|kill|logs|jobs|find …``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from watchstep_launch.backend import JobHandle, Launch, SubmissionRejectedError
from watchstep_launch.backends.local.backend import Local


def main() -> None:
    folder, verb, *rest = sys.argv[1:]
    home = Path(folder)
    local = Local(folder=home / "jobs")
    if (home / "down").exists():
        sys.exit("cluster unreachable")
    if (home / "expired").exists():
        sys.exit("your ticket has expired")
    known = home / "known.json"
    table = json.loads(known.read_text()) if known.exists() else {}
    if verb == "submit":
        name, *command = rest
        try:
            job = local.submit(Launch(tuple(command), {}, Path.cwd()))
        except SubmissionRejectedError as error:
            sys.exit(error.what)
        table[job.id] = {"name": name, **job.as_data()}
        known.write_text(json.dumps(table))
        say(f"submitted job {job.id}")
    elif verb == "jobs":
        say("\n".join(table))
    elif verb == "find":
        say("".join(job_id for job_id, job in table.items() if job["name"] == rest[0]))
    elif rest[0] not in table:
        say("no such job")
        sys.exit(3)
    else:
        act(local, verb, JobHandle.from_data(table[rest[0]]))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def act(local: Local, verb: str, job: JobHandle) -> None:
    if verb == "logs":
        sys.stdout.buffer.write(local.logs(job).data)
        return
    status = {"status": local.status, "stop": local.stop, "kill": local.kill}[verb](job)
    say(f"state={status.state.upper()} started={job.identity['start_ticks']} code={status.exit_code}")


if __name__ == "__main__":
    main()
