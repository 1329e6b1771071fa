"""What a program in the sandbox cannot do: each attempt is reported as the rule's health or gets nothing; other rules continue."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.rules.custom.programs import attack, python
from tests.rules.runs import Outcome, all_at_once, in_steps, norms
from watchstep_rules.custom.sandbox.confinement import Isolation
from watchstep_rules.engine.judge import RuleHealth

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")

ROWS = in_steps(norms("first", [1.0, 1.0]))
DENIED = "PermissionError"


def outcome(body: str, file: str = "attack.py", seconds: float = 10.0) -> Outcome:
    result = all_at_once(attack(body, file, seconds), ROWS)
    calm = all_at_once(attack("return 'calm'"), ROWS)
    assert [finding.message for finding in calm.findings] == ["calm"]
    return result


def problem(body: str, file: str = "attack.py", seconds: float = 10.0) -> str:
    result = outcome(body, file, seconds)
    assert result.memory.health is RuleHealth.ERROR
    assert result.findings == []
    return result.memory.problem


def test_isolation_is_full_here_and_reported() -> None:
    state = outcome("return 'here'").memory.state
    assert state is not None
    reached = Isolation.model_validate(state["isolation"])
    assert reached.full


DENIED_CALLS: dict[str, list[str]] = {
    "reads files": [
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open(f'/proc/{os.getppid()}/environ').read()",
        "open('/proc/self/mem', 'r+b')",
        "os.listdir('/')",
        "os.listdir('/home')",
        "open(os.path.expanduser('~/.bashrc'))",
    ],
    "looks at links and file systems": [
        "return os.readlink('/proc/self/exe')",
        "return os.readlink('/proc/self/cwd')",
        "return os.readlink(os.path.join(os.path.dirname(os.__file__), '..', 'nothing'))",
        "return os.path.realpath('/etc/localtime', strict=True)",
        "return os.statvfs('/')",
        "os.open('/etc/passwd', os.O_PATH)",
        "os.getxattr('/etc/passwd', 'user.x')",
    ],
    "writes files": [
        "open('/tmp/watchstep-escape', 'w')",
        "open(np.__file__, 'a')",
        "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
        "os.memfd_create('x')",
        "os.mkfifo('/tmp/watchstep-escape')",
    ],
    "uses the network": [
        "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair()",
        "libc('syscall', 425, 8, ctypes.create_string_buffer(256))  # io_uring_setup",
    ],
    "starts processes": [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "libc('fork')",
        "libc('vfork')",
    ],
    "reaches other processes and the machine": [
        "os.kill(os.getppid(), signal.SIGTERM)",
        "os.kill(1, 0)",
        "os.kill(-1, signal.SIGTERM)",
        "os.killpg(0, signal.SIGTERM)",
        "libc('ptrace', 16, os.getppid(), 0, 0)",
        "libc('process_vm_readv', os.getppid(), None, 0, None, 0, 0)",
        "os.pidfd_open(os.getppid())",
        "import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())",
        "os.setuid(0)",
        "libc('prctl', 38, 0, 0, 0, 0)",
        "libc('unshare', 0x10000000)",
        "libc('mount', None, b'/', None, 0, None)",
        "libc('chroot', b'/')",
        "libc('sethostname', b'x', 1)",
        "libc('personality', 0)",
        "os.setpriority(os.PRIO_PROCESS, 0, -5)",
        "os.sched_setaffinity(0, [0])",
    ],
}


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=f"{what}: {body}") for what, bodies in DENIED_CALLS.items() for body in bodies],
)
def test_a_program_may_neither_read_nor_write_nor_connect_nor_start_or_reach_processes(body: str) -> None:
    assert DENIED in problem(body)
    assert not Path("/tmp/watchstep-escape").exists()


def test_the_store_is_neither_read_nor_written(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_text("secret", encoding="utf-8")
    for body in (
        f"return open({str(target)!r}).read()",
        f"open({str(target)!r}, 'w')",
        f"open({str(target)!r}, 'a')",
        f"os.unlink({str(target)!r})",
        f"os.rename({str(target)!r}, {str(tmp_path / 'x')!r})",
        f"os.chmod({str(target)!r}, 0o777)",
        f"os.truncate({str(target)!r}, 0)",
        f"os.symlink('/etc', {str(tmp_path / 'x')!r})",
        f"os.mkdir({str(tmp_path / 'x')!r})",
    ):
        assert DENIED in problem(body), body
    assert target.read_text(encoding="utf-8") == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_server_on_this_machine_gets_no_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        assert DENIED in problem(f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_limits_are_not_raised() -> None:
    body = "import resource; resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    result = problem(body)
    assert DENIED in result or "ValueError" in result


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("WATCHSTEP_TOKEN", "secret")
    result = outcome("import json; return json.dumps(sorted(os.environ))")
    names = json.loads(result.findings[0].message)
    assert set(names) <= {
        "ARROW_DEFAULT_MEMORY_POOL", "LANG", "LC_CTYPE", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    }  # fmt: skip


def test_no_descriptor_of_the_parent_is_open(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as target:
        os.set_inheritable(target.fileno(), True)
        result = outcome(
            "open_ones = []\n"
            "for number in range(64):\n"
            "    try: os.fstat(number); open_ones.append(number)\n"
            "    except OSError: pass\n"
            "return len(open_ones)"
        )
    assert int(result.findings[0].message) <= 6


@pytest.mark.ci
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("x = np.ones(8 << 30)", "MemoryError"),
        ("x = [0]\nwhile True: x = x + x", "MemoryError"),
        ("def deep(n): return deep(n + 1) + 1\ndeep(0)", "RecursionError"),
        ("while True: pass", "took more than 1 s and was ended"),
        ("import time; time.sleep(1000)", "took more than 1 s and was ended"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "took more than 1 s"),
        ("os._exit(3)", "its process ended with 3"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("ctypes.string_at(0)", "its process died of SIGSEGV"),
        ("os.abort()", "its process died of SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process died of SIGKILL"),
        ("os.kill(os.getpid(), 40)", "its process died of signal 40"),
        ("raise ValueError('my own fault')", "ValueError: my own fault (line"),
        ("raise BaseException", "BaseException"),
        ("return (None, None)", "TypeError"),
        ("return state, [1]", "AttributeError"),
    ],
    ids=lambda text: text.splitlines()[-1][:30],
)
def test_what_goes_wrong_is_reported(body: str, message: str) -> None:
    dies = "took more" in message or "its process" in message or "Memory" in message
    assert message in problem(
        body, seconds=1.0 if "took more" in message else 20.0, file=body if dies else "attack.py"
    )


@pytest.mark.ci
def test_no_thread_is_started() -> None:
    assert "can't start new thread" in problem("threading.Thread(target=len).start()", file="threads.py")


SEND = "from watchstep_rules.custom.sandbox.protocol import _HEAD as HEAD, pack\nfrom watchstep_rules.custom.sandbox.protocol import FoundRow, pack_findings\nfor number in range(3, 12):\n    try: os.write(number, {})\n    except OSError: pass\n"


@pytest.mark.release
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("b'x' * 100", "over the limit"),
        ("b'\\xff' * 12", "over the limit"),
        ("HEAD.pack(30 << 20, 0) + b'x' * 100", "over the limit"),
        ("HEAD.pack(20, 30 << 20) + b'x' * 100", "over the limit"),
        ("HEAD.pack(5, 0) + b'x' * 5", "an invalid message"),
        ("HEAD.pack(5000, 0) + b'[' * 5000", "an invalid message"),
        ("pack([])", "what is not an answer"),
        ("pack({})", "its state is no mapping"),
        ("pack({'state': {}, 'version': 1})", "no list of findings"),
        ("pack({'state': {}, 'version': 1}, [b'\\x02\\0\\0\\0'])", "cut short"),
        ("pack({'state': {}, 'version': 1}, [b'\\xff\\xff\\xff\\xff'])", "more findings than rows"),
        (
            "pack({'state': {}, 'version': 1}, [pack_findings([FoundRow(0, 1.0, 1.0, 'x')] * 9)])",
            "more findings than rows",
        ),
        (
            "pack({'state': {}, 'version': 1}, [pack_findings([FoundRow(99, 1.0, 1.0, 'x')])])",
            "not among the 2",
        ),
        (
            "pack({'state': {}, 'version': 1}, [pack_findings([FoundRow(-1, 1.0, 1.0, 'x')])])",
            "not among the 2",
        ),
        (
            "pack({'state': {}, 'version': 1}, [pack_findings([FoundRow(0, 1.0, 1.0, 'x')]) + b'y'])",
            "the length that they claim",
        ),
        (
            "pack({'state': {}, 'version': 1}, [pack_findings([FoundRow(0, 1.0, 1.0, 'xyz')])[:-1]])",
            "the length that they claim",
        ),
        ("pack({'state': {}, 'version': 10**4000})", "its state is no mapping"),
        ("pack({'state': {}, 'version': -1})", "its state is no mapping"),
        ("pack({'state': {'x': [10**4000]}, 'version': 1})", "more than 128 bits"),
        ("pack({'state': {'x': [float('nan')]}, 'version': 1})", "NaN or infinity"),
        ("pack({'state': {'x': chr(0xd800)}, 'version': 1})", "half a character"),
        ("pack({'state': {'a\\0': 1}, 'version': 1})", "half a character"),
        ("pack({'error': chr(0xd800) + 'mine'})", "?mine"),
        ("pack({'state': {'x': 'y' * (2 << 20)}, 'version': 1})", "over the limit"),
        ("pack({'state': {'x': chr(0xe9) * 180000}, 'version': 1})", "its state is larger"),
    ],
)
def test_a_forged_answer_is_validated(data: str, message: str) -> None:
    assert message in problem(SEND.format(data) + "import time; time.sleep(30)", seconds=5.0, file=data)


def test_a_message_is_cut() -> None:
    (finding,) = outcome("return 'x' * (8 << 20)").findings
    assert finding.message == "x" * 500


def test_of_a_message_only_what_can_be_kept_is_taken() -> None:
    (finding,) = outcome("return 'half ' + chr(0xd800) + ' zero ' + chr(0)").findings
    assert finding.message == "half ? zero \ufffd"


def test_printed_output_is_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    outcome("print('out' * 100000); print('err', file=sys.stderr); os.write(2, b'x')")
    assert capfd.readouterr() == ("", "")


@pytest.mark.ci
def test_a_program_that_fails_when_it_is_loaded_is_refused() -> None:
    for source, message in (
        ("import os\nos.fork()", "PermissionError"),
        ("raise ValueError('at once')", "ValueError: at once"),
        ("x = (", "SyntaxError"),
        ("Attack = 3", "no class 'Attack'"),
        ("import nothing_of_the_kind", "ModuleNotFoundError"),
        ("import os; os._exit(0)", "ended with 0"),
    ):
        with pytest.raises(ValueError, match=message):
            python(source, "Attack")
