"""Starts one program, outlives who asked for it, and writes down how it ended. Run as a script, with Python alone.

It reads one line of JSON: ``command``, ``environment``, ``folder``, ``log``. It answers ``{"pid": …}`` or ``{"error":
…}``, and then reads the file to write the exit code to. Should its launcher end before that, the program ends too.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Start, answer, wait, write."""
    # What the program leaves behind becomes this process's child, so that it can be found and ended.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = json.loads(sys.stdin.readline())
    try:
        with open(asked["log"], "ab") as log:  # noqa: PTH123 - start-up time matters here
            child = subprocess.Popen(  # noqa: S603 - running the user's command is what this is for
                asked["command"],
                cwd=asked["folder"],
                env=asked["environment"],
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
    place = sys.stdin.readline().rstrip("\n")
    if not place:
        os.killpg(child.pid, signal.SIGKILL)
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    _end_the_rest(child.pid)
    if not place:
        return
    # Written before the process is let go: until then its id cannot be another's.
    assert ended is not None
    _write(place, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    child.wait()


def _end_the_rest(program: int) -> None:
    """End what the program started and did not wait for: a job is over as a whole."""
    while rest := [pid for pid in _children() if pid != program]:
        for pid in rest:
            os.kill(pid, signal.SIGKILL)  # a child that is not waited for yet keeps its id
        for pid in rest:
            os.waitpid(pid, 0)


def _children() -> "list[int]":
    me = str(os.getpid())
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - as above
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == me:
            found.append(int(name))
    return found


def _answer(said: "dict[str, object]") -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _write(place: str, code: int) -> None:
    partial = f"{place}.partial"
    with open(partial, "w", encoding="ascii") as file:  # noqa: PTH123 - as above
        file.write(f"{code}\n")
    os.replace(partial, place)  # noqa: PTH105 - as above


if __name__ == "__main__":
    main()
