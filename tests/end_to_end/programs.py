"""Training programs that know nothing of Watchstep."""

FAULTY = """
import time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    x = torch.randn(16, 8)
    if step == 50:
        x[3, 5] = float("nan")
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    step += 1
    time.sleep(0.005)
"""
"""One NaN in the inputs of step 50, and no end of its own."""

FAULTY_IN_NUMPY = """
import time
import numpy as np
import watchstep
random = np.random.default_rng(0)
w = np.ones(8)
with watchstep.Hook() as hook:
    step = 0
    while True:
        x = random.normal(size=8)
        if step == 50:
            x[5] = np.nan
        gradient = w * x**2
        w = w - 0.01 * gradient
        hook.record({"w": w}, role="weight")
        hook.record({"w:gradient": gradient}, role="gradient")
        hook.step()
        step += 1
        time.sleep(0.005)
"""
"""The same fault without a framework, whose import takes longer than the rest: for tests of how a run is stopped."""

DEAF = FAULTY.replace("step = 0", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nstep = 0", 1)
"""As the faulty one, and it ignores SIGTERM."""


def _two_ranks(program: str) -> str:
    """A program that starts another as two ranks of one machine, and ends when both have ended."""
    return f"""
import os, socket, subprocess, sys
from pathlib import Path
program = Path(sys.argv[0]).with_name("rank.py")
program.write_text({program!r})
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
many = {{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
ranks = [
    subprocess.Popen([sys.executable, program], env={{**os.environ, **many, "RANK": str(rank)}}) for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


_DISTRIBUTED = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
"""

SEVERAL_RANKS = _two_ranks(
    _DISTRIBUTED
    + FAULTY.replace("step == 50:", "step == 50 and os.environ['RANK'] == '1':").replace(
        "step += 1", "step += 1\n    dist.barrier()"
    )
)
"""The NaN is in the second rank's inputs. The ranks do each step together, as a collective makes them."""

FASTER_RANKS = _two_ranks(
    _DISTRIBUTED
    + FAULTY.replace("model = nn.Sequential(", "model = nn.parallel.DistributedDataParallel(nn.Sequential(")
    .replace("nn.Linear(16, 1))", "nn.Linear(16, 1)))")
    .replace("step == 50:", "step == 50 and os.environ['RANK'] == '1':")
    .replace("    time.sleep(0.005)\n", "")
    .replace(
        "    optimizer.zero_grad()", "    if step < 50:\n        time.sleep(0.05)\n    optimizer.zero_grad()"
    )
)
"""The ranks become fifty times as fast at the bad step: what is known of their pace is wrong from then on."""
