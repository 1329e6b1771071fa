"""``watchstep run``: a program that knows nothing of Watchstep records itself, and otherwise runs as ever."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.sdk.event_files import accumulated
from tests.sdk.programs import Printed, record_program
from tests.services.cli.command_line import run_command
from tests.warmed import warmed
from watchstep import Run, open_run
from watchstep.format import documents, segment
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import EndDocument
from watchstep.format.layout import CONTROL_DOCUMENT, LAUNCHES, SEGMENTS, SegmentKey, end_document
from watchstep.pytorch.parameters.updates import MIN_UPDATES_OF_OTHERS
from watchstep.reading.run_documents import find_runs
from watchstep.stopping import EXIT_STOPPED
from watchstep.store.local import MARKER
from watchstep.store.store import Store

PROGRAM = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.body(x).relu())
class Unbuilt(nn.Module):
    def named_parameters(self, *arguments, **keywords):
        self.late = nn.Linear(8, 8)
        return super().named_parameters(*arguments, **keywords)
model, other = Net(), Unbuilt()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses, sys.argv[1:])
"""


def watchstep(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("watchstep"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "WATCHSTEP_OVERHEAD_BUDGET": "none", **environment},
    )


def record(
    tmp_path: Path, *command: str | Path, options: tuple[str | Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as the run "r" of a store in a folder."""
    return watchstep(
        "run", "--store", tmp_path / "runs", "--run", "r", *options, "--", *command, **environment
    )


def run_program(
    tmp_path: Path, body: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(body))
    return record(tmp_path, sys.executable, program, *arguments, options=(), **environment)


def record_attached(tmp_path: Path, body: str, *options: str | Path) -> Printed:
    """The same in a process that has imported PyTorch, for what is recorded and not for how it begins."""
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(body))
    given = ("--store", tmp_path / "runs", "--run", "r", *options)
    return record_program(program, folder=Path.cwd(), options=given, WATCHSTEP_OVERHEAD_BUDGET="none")


def recorded(tmp_path: Path) -> Run:
    return open_run(tmp_path / "runs" / "default" / "r")


ADVERSARIES = """
import torch
from torch import nn
torch.manual_seed(0)
def trained(steps):
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (second, first)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            second(first(torch.randn(8, 4)).tanh()).square().mean().backward()
            optimizer.step()
    return first(torch.ones(4)).sum() + second(torch.ones(4)).sum()
print(trained(40).item(), trained(3).item())
"""


@pytest.mark.ci
def test_models_whose_optimizers_step_beside_each_other_are_recorded(tmp_path: Path) -> None:
    done = record_attached(tmp_path, ADVERSARIES)
    assert done.output == warmed().run(tmp_path / "train.py", folder=Path.cwd())
    run = recorded(tmp_path)
    assert len(run.attempts) == 2
    assert run.collections["weights"] == ["model_2.weight", "weight"]
    assert run.tensor("weight:gradient").steps()[:3] == [0, 1, 2]
    # The step of the run ends with the first optimizer's update.
    assert run.tensor("model_2.weight:gradient").steps()[:3] == [1, 2, 3]


TRAININGS = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
if "--few" in sys.argv:
    from watchstep.wrapper import attach
    attach._MAX_TRAININGS = 2
kept = []
def trained(bad):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # it and its optimizer refer to each other
    if "--keep" in sys.argv:
        kept.append(optimizer)
    for step in range(50):
        x = torch.full((8, 4), torch.nan) if step == bad else torch.randn(8, 4)
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.weight.sum().item()
print(trained(-1), trained(-1), trained(-1 if "--healthy" in sys.argv else 20))
"""


def store_of_run(tmp_path: Path) -> Store:
    return Store.open((tmp_path / "runs" / "default" / "r").as_uri())


def ends(tmp_path: Path) -> list[EndDocument]:
    """The end of each attempt of the run."""
    keys = [end_document(attempt, 0) for attempt in recorded(tmp_path).attempts]
    return [documents.decode(EndDocument, store_of_run(tmp_path).get(key), key) for key in keys]


def steps_of(tmp_path: Path, attempt: str, name: str) -> list[int]:
    """The steps of a tensor's rows in an attempt."""
    store, steps = store_of_run(tmp_path), []
    for entry in store.entries(SEGMENTS):
        if SegmentKey.parse(entry.key).writer.attempt == attempt:
            block = segment.decode(store.get(entry.key), entry.key)
            steps += [
                step
                for step, row in zip(block.step.tolist(), range(len(block)), strict=True)
                if block.info(row).name == name
            ]
    return steps


@pytest.mark.ci
def test_trainings_one_after_another_are_attempts_and_each_is_stopped(tmp_path: Path) -> None:
    done = run_program(tmp_path, TRAININGS, WATCHSTEP_ON_NONFINITE="stop")
    assert done.returncode == EXIT_STOPPED
    first, *later = recorded(tmp_path).attempts
    assert later == [f"{first}.2", f"{first}.3"]
    assert [(end.state, end.last_step) for end in ends(tmp_path)] == [
        ("completed", 49),
        ("completed", 49),
        ("stopped", 19),
    ]
    for attempt in (first, later[0]):
        for name in ("loss", "weight:gradient"):
            assert steps_of(tmp_path, attempt, name) == list(range(50))
    assert "not_in_optimizer" not in recorded(tmp_path).collections  # the next optimizer is of another model
    assert recorded(tmp_path).outcome().last_step == 19


RESUMED = """
import torch
from torch import nn
torch.manual_seed(0)
saved = None
for part in range(2):
    model = nn.Linear(4, 1)
    if saved:
        model.load_state_dict(saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    saved = model.state_dict()
"""


@pytest.mark.ci
def test_steps_of_a_resume_in_the_same_process_follow_those_before(tmp_path: Path) -> None:
    run_program(tmp_path, RESUMED)
    assert recorded(tmp_path).tensor("weight:gradient").steps() == list(range(20))
    assert recorded(tmp_path).tensor("training:in_process").steps() == [10]
    assert [end.last_step for end in ends(tmp_path)] == [9, 19]


@pytest.mark.ci
def test_many_trainings_one_after_another_change_nothing(tmp_path: Path) -> None:
    done = run_program(tmp_path, TRAININGS, "--healthy", "--few")
    assert done.stdout == warmed().run(tmp_path / "train.py", "--healthy", folder=Path.cwd())
    _, last = ends(tmp_path)
    assert "2 are recorded" in last.health["notes"]["trainings"]


@pytest.mark.ci
def test_trainings_whose_optimizers_are_kept_are_models_of_one_attempt(tmp_path: Path) -> None:
    done = run_program(tmp_path, TRAININGS, "--keep", WATCHSTEP_ON_NONFINITE="stop")
    assert done.returncode == EXIT_STOPPED
    (end,) = ends(tmp_path)
    assert end.state == "stopped"
    assert recorded(tmp_path).collections["weights"] == ["model_2.weight", "model_3.weight", "weight"]


@pytest.mark.ci
def test_steps_are_counted_by_another_optimizer_once_the_first_one_is_gone(tmp_path: Path) -> None:
    """The inner loop of meta-learning makes an optimizer of a copy for each step."""
    run_program(tmp_path, META_LEARNING)
    run = recorded(tmp_path)
    assert run.attempts == run.attempts[:1]
    assert run.tensor("model_2.weight:gradient").steps() == list(range(1, 30))
    (end,) = ends(tmp_path)
    assert end.health["notes"]["trainings"].startswith("a SGD is of a further model; 4 are recorded")


KEPT = """
import torch
from torch import nn
torch.manual_seed(0)
kept = []
for steps in (12, 250):
    model = nn.Linear(4, 1)
    kept.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        kept[-1].zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        kept[-1].step()
"""


@pytest.mark.ci
def test_steps_are_counted_by_another_optimizer_once_the_first_one_steps_no_more(tmp_path: Path) -> None:
    run_program(tmp_path, KEPT)
    (end,) = ends(tmp_path)
    assert end.last_step == 12 + 250 - MIN_UPDATES_OF_OTHERS - 1


META_LEARNING = """
import copy
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
outer = torch.optim.Adam(model.parameters())
for _ in range(30):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    for trained, optimizer in ((fast, inner), (model, outer)):
        optimizer.zero_grad()
        trained(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.ci
def test_a_plain_program_records_itself_and_is_unchanged(tmp_path: Path) -> None:
    done = run_program(tmp_path, PROGRAM, "--lr", "1 2", "--token", "mine")
    plain = warmed().run(tmp_path / "train.py", "--lr", "1 2", "--token", "mine", folder=Path.cwd())
    assert done.stdout == plain
    notice = f"watchstep: run default/r in file://{tmp_path}/runs; no service watches the store yet: the run is recorded now, and evaluated once one does (watchstep serve)\n"
    assert done.stderr == notice
    run = recorded(tmp_path)
    assert run.steps() == list(range(20))
    assert run.losses()["value"].to_pylist() == json.loads(done.stdout.split("]")[0] + "]")
    assert run.tensors("weights") == ["body.weight", "head.weight"]
    assert run.tensor("body:output").steps() == list(range(1, 20))
    assert [end.state for end in run.ends()] == ["completed"]
    found = run.environment()
    assert found["command"].endswith("train.py --lr '1 2' --token '(hidden)'")
    assert (found["program"], found["folder"]) == ("train.py", str(Path.cwd()))


@pytest.mark.release
def test_the_environment_names_a_folder_for_event_files(tmp_path: Path) -> None:
    done = run_program(tmp_path, PROGRAM, WATCHSTEP_TENSORBOARD=str(tmp_path / "events"))
    assert done.returncode == 0, done.stderr
    events = accumulated(tmp_path / "events" / "train-0")
    assert [event.step for event in events.Scalars("loss")] == list(range(20))
    refused = run_program(tmp_path, PROGRAM, WATCHSTEP_TENSORBOARD=str(tmp_path / "train.py"))
    assert refused.returncode != 0
    assert "train.py is a file" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.release
def test_an_option_names_tools_to_mirror_into(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    mirror = ("--mirror", f"tensorboard:{tmp_path / 'live'}")
    done = record(tmp_path, sys.executable, program, options=mirror)
    assert done.returncode == 0, done.stderr
    events = accumulated(tmp_path / "live" / "watchstep")
    assert [event.step for event in events.Scalars("watchstep/train/loss")] == list(range(20))
    refused = record(tmp_path, sys.executable, program, options=("--mirror", "tensorbord"))
    assert refused.returncode != 0
    assert "invalid mirror='tensorbord'" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.release
def test_a_program_that_requests_torch_before_it_imports_it_is_recorded(tmp_path: Path) -> None:
    asks = 'import importlib.util\nassert importlib.util.find_spec("torch").name == "torch"\n'
    run_program(tmp_path, asks + textwrap.dedent(PROGRAM), "--lr", "1 2")
    assert recorded(tmp_path).steps() == list(range(20))


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_run_folder_that_is_a_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "default").mkdir(parents=True)
    (tmp_path / "runs" / "default" / "r").symlink_to(tmp_path / target)
    done = run_program(tmp_path, "print('it runs')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run default/r: its folder" in done.stderr
    assert "is a symbolic link" in done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_a_program_starts_where_the_marker_of_its_store_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / MARKER).symlink_to(MARKER)  # to itself
    done = run_program(tmp_path, "print('it runs')")
    assert (done.returncode, done.stdout) == (0, "it runs\n")
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.release
def test_an_exit_code_of_the_program_is_how_its_run_ended(tmp_path: Path) -> None:
    ending = "if __name__ == '__main__':\n    import sys\n    sys.exit(3)\n"
    assert run_program(tmp_path, PROGRAM + ending).returncode == 3
    assert [(end.state, end.reason) for end in recorded(tmp_path).ends()] == [("failed", "SystemExit: 3")]


def state_of_the_run(folder: Path) -> str:
    (entry,) = find_runs(Store.open(folder))
    return entry.state


@pytest.mark.skipif(sys.platform != "linux", reason="processes are distinguished by /proc")
def test_a_program_that_is_over_and_recorded_nothing_has_ended(tmp_path: Path) -> None:
    command: list[str | Path] = [Path(sys.executable).with_name("watchstep"), "run", "--store", tmp_path]
    command += ["--run", "r", "--", sys.executable, "-c", "input(print('up', flush=True))"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        assert state_of_the_run(tmp_path) == "created"
        program.communicate(b"\n")
    assert state_of_the_run(tmp_path) == "ended"
    store = Store.open(tmp_path).child("default/r")
    (entry,) = store.entries(LAUNCHES)
    other = {"attempt": "later", "namespace": "pid:[1]", "launched_ns": 2**62}
    elsewhere = json.loads(store.get(entry.key)) | other
    store.put(f"{LAUNCHES}later.json", json.dumps(elsewhere).encode())
    assert state_of_the_run(tmp_path) == "created"  # another machine's process cannot be seen


@pytest.mark.release
def test_a_program_that_does_not_train_is_not_affected(tmp_path: Path) -> None:
    done = run_program(tmp_path, "import torch\nprint(torch.ones(2).sum().item())")
    assert done.stdout == "2.0\n"
    assert recorded(tmp_path).steps() == []


UNOBSERVED = """
import os, subprocess, sys
import torch

weight = torch.ones(4, requires_grad=True)
(weight * float("nan")).sum().backward()
weight.data -= weight.grad
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
if os.fork() == 0:
    sys.exit()
os.wait()
sys.exit(3)
"""


@pytest.mark.ci
def test_the_end_of_a_program_states_once_that_nothing_was_recorded(tmp_path: Path) -> None:
    def said(body: str, *arguments: str) -> tuple[int, list[str]]:
        program = tmp_path / "train.py"
        program.write_text(body)
        done = record(tmp_path, sys.executable, program, *arguments, options=("--on-nonfinite", "stop"))
        return done.returncode, [line for line in done.stderr.splitlines() if "nothing was recorded" in line]

    code, lines = said(UNOBSERVED, "import torch")
    assert (code, len(lines)) == (3, 1)
    assert "--on-nonfinite stop had no effect" in lines[0]
    assert "imported torch" in lines[0]
    assert "watchstep.Hook" in lines[0]
    assert said(UNOBSERVED, "import watchstep; watchstep.Hook().close()") == (3, [])
    step = "import torch; w = torch.ones(2, requires_grad=True); w.sum().backward(); torch.optim.SGD([w], 0.1).step()"
    assert said(UNOBSERVED, step) == (3, [])
    assert said("import json, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'])") == (
        0,
        [],
    )


@pytest.mark.release
def test_a_program_with_a_hook_of_its_own_is_recorded_once(tmp_path: Path) -> None:
    own = PROGRAM.replace(
        "losses = []", "import watchstep\nhook = watchstep.Hook()\nhook.watch(model, optimizer)\nlosses = []"
    )
    assert run_program(tmp_path, own).returncode == 0
    run = recorded(tmp_path)
    assert len(run.attempts) == 1
    assert len(run.ends()) == 1
    assert run.steps() == list(range(20))


def test_a_sitecustomize_that_was_there_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'here'\n")
    done = run_program(tmp_path, "print(mine)", PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout == "here\n"


@pytest.mark.release
def test_data_loader_workers_do_not_record(tmp_path: Path) -> None:
    body = PROGRAM.replace(
        "losses = []",
        "losses = []\nfrom torch.utils.data import DataLoader\n"
        "for _ in DataLoader(list(range(8)), num_workers=2): pass",
    )
    assert run_program(tmp_path, body).returncode == 0
    assert len(recorded(tmp_path).ends()) == 1


@pytest.mark.ci
def test_torchrun_records_one_worker_a_rank(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        PROGRAM.replace(
            "model, other = Net(), Unbuilt()",
            "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
            "model, other = nn.parallel.DistributedDataParallel(Net()), Unbuilt()",
        )
        + "dist.destroy_process_group()\n"
    )
    torchrun = Path(sys.executable).with_name("torchrun")
    done = record(tmp_path, torchrun, "--standalone", "--nproc-per-node", "2", program)
    assert done.returncode == 0, done.stderr
    run = recorded(tmp_path)
    assert (run.workers, len(run.attempts), run.steps()) == ([0, 1], 1, list(range(20)))
    table = run.tensor("body.weight:gradient").statistics()
    assert set(table["replica"].to_pylist()) == {0}  # of equal replicas one records
    assert run.tensor("body:output").workers == [0, 1]
    assert set(table["stage"].to_pylist()) == {"reduced"}


def test_an_isolated_python_states_that_it_is_not_attached(tmp_path: Path) -> None:
    done = watchstep("run", "--store", tmp_path / "runs", "--", sys.executable, "-I", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "not attached: python -I" in done.stderr


def test_what_was_stopped_does_not_start_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "runs", create=True).child("default/r")
    store.put(
        CONTROL_DOCUMENT, ControlDocument().with_stop(StopRequest("a", 3, "NaN at step 2\x1b[2J\nx")).encode()
    )
    done = run_program(tmp_path, "print('started')")
    assert (done.returncode, done.stdout) == (87, "")
    first, hint = done.stderr.splitlines()
    assert "NaN at step 2" in first
    assert first.isprintable()
    assert hint.startswith("  hint: ")


@pytest.mark.release
def test_without_a_service_rules_are_retained_with_the_run(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: nan_or_inf\n")
    done = record(tmp_path, "true", options=("--rules", rules))
    assert done.returncode == 0
    assert "no service" in done.stderr
    assert [rule["rule"] for rule in recorded(tmp_path).document.rules] == ["nan_or_inf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--"], "no program"),
        (["run", "--", "no-such-program"], "'no-such-program' not found"),
        (["run", "--", "train.py"], "run it by its interpreter: python train.py"),
        (["run", "--run", "../x", "--", "true"], "run name '../x'"),
        (["run", "--store", "ftp://x", "--", "true"], "unknown scheme 'ftp'"),
        (["run", "--require-store", "--store", "/dev/null/x", "--", "true"], "cannot create the folder"),
        (["run", "--require-service", "--", "true"], "no service watches store"),
        (["run", "--rules", "missing.yaml", "--", "true"], "rule file missing.yaml"),
        (["run", "--service", "localhost:80", "--", "true"], "is not an http or https URL"),
        (
            ["run", "--require-service", "--service", "http://127.0.0.1:9", "--", "true"],
            "service http://127.0.0.1:9 does not respond",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_reported_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the program is executed"))
    (tmp_path / "train.py").touch()
    done = run_command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ci
def test_a_launch_repeats_a_registration_that_is_refused_for_now(tmp_path: Path) -> None:
    busy = [429, 429]

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status = busy.pop() if busy else 422
            detail = {429: "too many registrations", 422: "the rules are not valid"}[status]
            body = json.dumps(
                {"type": "urn:watchstep:problem:refused", "detail": detail, "hint": "none"}
            ).encode()
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        done = watchstep("run", "--store", tmp_path, "--require-service", "--service", url, "--", "true")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode != 0
    assert "the rules are not valid" in done.stderr
    assert busy == []


@pytest.mark.release
def test_a_service_that_does_not_answer_is_reported_once(tmp_path: Path) -> None:
    body = """
        import watchstep
        with watchstep.Hook() as hook:
            hook.log(loss=1.0)
        print(hook.health["faults"]["service"])
        """
    done = run_program(tmp_path, body, WATCHSTEP_SERVICE="http://127.0.0.1:9", WATCHSTEP_TOKEN="t")
    assert done.returncode == 0
    assert done.stderr.count("does not respond") == 1, done.stderr
    assert done.stderr.startswith("watchstep: service http://127.0.0.1:9 does not respond")
    assert done.stdout.startswith("UnreachableError: service http://127.0.0.1:9 does not respond")


@pytest.mark.release
def test_a_bucket_that_is_not_there(tmp_path: Path, s3: object) -> None:
    strict = watchstep("run", "--require-store", "--store", "s3://missing/runs", "--", "true")
    assert strict.returncode == 2
    assert "no such bucket" in strict.stderr
    done = watchstep("run", "--store", "s3://missing/runs", "--", "true")
    assert done.returncode == 0
    assert done.stderr.count("no such bucket") == 1
    assert "The program starts" in done.stderr


@pytest.mark.ci
def test_a_first_step_that_a_gradient_scaler_skips_is_recorded(tmp_path: Path) -> None:
    body = PROGRAM.replace("losses = []", "losses = []\nscaler = torch.amp.GradScaler('cpu', 8.0)")
    body = body.replace(
        "    loss.backward()\n    optimizer.step()",
        "    scaler.scale(loss * (torch.inf if step < 2 else 1)).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()",
    )
    record_attached(tmp_path, body)
    run = recorded(tmp_path)
    assert run.steps() == list(range(20))
    assert run.tensor("gradient_scaler:skipped").steps() == [0, 1]
    assert run.tensor("body.weight:gradient").steps() == list(range(2, 20))


@pytest.mark.release
def test_a_file_in_the_place_of_the_private_folder_does_not_end_the_program(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / f"watchstep-{os.getuid()}").write_text("")
    done = run_program(tmp_path, PROGRAM, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert "Not a directory; using /dev/shm/" in done.stderr
    run = recorded(tmp_path)
    assert run.steps() == list(range(20))
    assert "claim" in run.ends()[0].health["faults"]


@pytest.mark.release
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_does_not_mute_the_recorder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    planted = temporary / f"watchstep-{os.getuid()}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    attempt = f"a{os.getpid()}"  # claims of tests that run at the same time may share a folder
    lock = planted / f"{attempt}-0.claim"
    os.chown(planted, 12345, 12345)
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        done = run_program(tmp_path, PROGRAM, TMPDIR=str(temporary), WATCHSTEP_LAUNCHED=attempt)
    assert done.returncode == 0, done.stderr
    assert "accessible to other users or owned by another (owner 12345, mode 0777)" in done.stderr
    assert recorded(tmp_path).steps() == list(range(20))


@pytest.mark.release
def test_a_second_process_of_a_rank_states_that_it_is_not_recorded(tmp_path: Path) -> None:
    body = (
        PROGRAM
        + "import subprocess\nif not sys.argv[1:]: subprocess.run([sys.executable, __file__, 'x'], check=True)\n"
    )
    done = run_program(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert "not recording: another process records rank 0 of this attempt" in done.stderr
    assert len(recorded(tmp_path).attempts) == 1


BOOSTED = """
import numpy
import xgboost
x = numpy.random.default_rng(0).normal(size=(64, 4))
xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(x, x.sum(1)), 3)
xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(x, x.sum(1)), 3)
"""


@pytest.mark.ci
@pytest.mark.parametrize("first", ["XGBoost", "PyTorch"])
def test_a_second_framework_of_a_process_is_told_that_it_is_not_observed(tmp_path: Path, first: str) -> None:
    pytest.importorskip("xgboost")
    bodies = {"XGBoost": BOOSTED, "PyTorch": PROGRAM}
    (second,) = bodies.keys() - {first}
    done = run_program(tmp_path, bodies[first] + bodies[second])
    assert done.returncode == 0, done.stderr
    ends = "has recorded" if first == "XGBoost" else "records"
    text = f"updates of {second} are not observed, because this process {ends} those of {first}"
    assert done.stderr.count(text) == done.stderr.count("not observed") == 1
    assert "another process" not in done.stderr
    (end,) = recorded(tmp_path).ends()
    assert text in end.health["notes"].get("frameworks", "") or first == "XGBoost"


@pytest.mark.release
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (("import watchstep.hook\ndef broken(*_, **__): raise MemoryError('of the recorder')\n"
         "watchstep.hook.Hook.__init__ = broken\n"), "not recording: of the recorder"),
        (("import watchstep.hook\ndef broken(*_, **__): raise AttributeError('of an unusual model')\n"
         "watchstep.hook.Hook.watch = broken\n"), "of an unusual model"),
        (("import sys\nsys.stderr = None\nimport torch\nimport watchstep.wrapper.attach as a\n"
         "a.PrivateFolder = None\n"), ""),
        ("import sys\nsys.modules['watchstep.wrapper.attach'] = None\nsys.stderr = None\n", ""),
    ],
    ids=["hook", "watch", "no stderr", "attaching"],
)  # fmt: skip
def test_no_fault_of_the_recorder_ends_the_program(tmp_path: Path, body: str, message: str) -> None:
    done = run_program(tmp_path, body + PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
    assert message in done.stderr


@pytest.mark.release
def test_a_run_that_has_attempts_is_recorded_again_with_a_warning_unless_it_is_resumed(
    tmp_path: Path,
) -> None:
    first = run_program(tmp_path, "")
    recorded_first, again = (run_program(tmp_path, PROGRAM) for _ in range(2))
    resumed = record(tmp_path, sys.executable, tmp_path / "train.py", options=("--resume",))
    assert [done.returncode for done in (first, recorded_first, again, resumed)] == [0, 0, 0, 0]
    assert "earlier attempt" not in first.stderr + recorded_first.stderr  # the first recorded nothing
    assert again.stderr.count("run default/r has an earlier attempt") == 1
    assert "--resume" in again.stderr
    assert "earlier attempt" not in resumed.stderr


@pytest.mark.ci
def test_a_program_starts_without_a_home_folder_and_in_a_deleted_folder(
    tmp_path: Path,
) -> None:
    unknown = ("unshare", "--user", "--map-user=4321", "env", "--unset=HOME")
    if subprocess.run([*unknown, "true"], check=False, capture_output=True).returncode:
        pytest.skip("NO USER NAMESPACE HERE: unshare --user is refused")
    command = (Path(sys.executable).with_name("watchstep"), "run", "--store", tmp_path / "runs", "--")
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = ("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh")
    for before in (unknown, shell):
        ended = subprocess.run(
            [*before, *command, sys.executable, "-c", "print('ran')"],
            cwd=gone,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr
