"""Starts one program, outlives its launcher, and records how the program ended. Runs as a script without further packages.

It reads one line of JSON: ``command``, ``environment``, ``folder``, ``log``. It answers ``{"pid": …}`` or ``{"error":
…}``, and then reads the path of the exit file. If its launcher ends before that, the program is ended too.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Start the program, answer, wait, and write the exit code."""
    # Orphans of the program become children of this process, so that it can find and end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = json.loads(sys.stdin.readline())
    try:
        with open(request["log"], "ab") as log:  # noqa: PTH123 - start-up time matters here
            child = subprocess.Popen(  # noqa: S603 - running the user's command is what this is for
                request["command"],
                cwd=request["folder"],
                env=request["environment"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        _answer({"error": str(error)})
        return
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _answer({"pid": child.pid})
    exit_file = sys.stdin.readline().rstrip("\n")
    if not exit_file:
        os.killpg(child.pid, signal.SIGKILL)
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    _end_orphans(child.pid)
    if not exit_file:
        return
    # Written before the process is reaped: until then its id cannot be reused.
    assert ended is not None
    _write(exit_file, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    child.wait()


def _end_orphans(program: int) -> None:
    """End processes that the program started and did not wait for: a job ends as a whole."""
    while rest := [pid for pid in _children() if pid != program]:
        for pid in rest:
            os.kill(pid, signal.SIGKILL)  # the id of an unreaped child cannot be reused
        for pid in rest:
            os.waitpid(pid, 0)


def _children() -> "list[int]":
    own_pid = str(os.getpid())
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - as above
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == own_pid:
            children.append(int(name))
    return children


def _answer(message: "dict[str, object]") -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _write(path: str, code: int) -> None:
    partial = f"{path}.partial"
    with open(partial, "w", encoding="ascii") as file:  # noqa: PTH123 - as above
        file.write(f"{code}\n")
    os.replace(partial, path)  # noqa: PTH105 - as above


if __name__ == "__main__":
    main()
