"""Programs that call submodules of the watched model and never the model: what is recorded at which step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, recorded, watching
from watchstep import Cadence, CaptureConfig, Collection, Hook

NAN = math.nan
OBSERVED, BATCH, EPOCHS = 64, 16, 2
STEPS = EPOCHS * (OBSERVED // BATCH)


class Agent(nn.Module):
    """An actor and a critic, which the program calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        together: Tensor = self.actor(x).sum() + self.critic(x).sum()
        return together


def watched(folder: Path, config: CaptureConfig = EVERY_STEP) -> tuple[Agent, torch.optim.Optimizer, Hook]:
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    hook = watching(folder, agent, optimizer, run="r", config=config)
    return agent, optimizer, hook


def rows(hook: Hook, name: str) -> list[tuple[int, str, int]]:
    """Step, mode and count of each row of a tensor."""
    table = recorded(hook).tensor(name).statistics().to_pylist()
    return [(row["step"], row["mode"], row["count"]) for row in table]


def minibatches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        yield from torch.randperm(OBSERVED, generator=generator).split(BATCH)


def ppo(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    actor: Callable[[Tensor], Tensor],
    critic: Callable[[Tensor], Tensor],
    iterations: int = 1,
    after_epoch: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """A rollout, call by call, and then minibatches of it."""
    losses = []
    for _ in range(iterations):
        with torch.no_grad():
            observed = torch.randn(OBSERVED, 4, generator=torch.Generator().manual_seed(1))
            old = torch.cat([actor(observation[None]).log_softmax(-1)[:, 0] for observation in observed])
            returns = torch.cat([critic(observation[None]) for observation in observed]) + 1
        for chosen in minibatches():
            x = observed[chosen]
            ratio = (actor(x).log_softmax(-1)[:, 0] - old[chosen]).exp()
            loss = -ratio.mean() + (critic(x) - returns[chosen]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            optimizer.step()
            losses.append(loss.detach())
        after_epoch()
    return losses


def test_a_loop_of_ppo_records_each_minibatch_at_its_own_step(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)
    losses = ppo(agent, optimizer, agent.actor, agent.critic, iterations=2)
    expected = [(step, "train", 8 * BATCH) for step in range(2 * STEPS)]
    run = recorded(hook)
    for name in ("actor.0:output", "critic.0:output"):
        table = run.tensor(name).statistics().to_pylist()
        assert [(row["step"], row["mode"], row["count"]) for row in table] == expected
    assert run.tensor("loss").statistics()["mean"].to_pylist() == [float(loss) for loss in losses]
    assert run.tensor("actor.0.weight:gradient").statistics()["step"].to_pylist() == list(range(2 * STEPS))


def test_what_is_recorded_of_a_step_is_what_its_own_pass_gave(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)
    means = []
    for step in range(4):
        out = agent.actor(torch.full((3, 4), float(step)))
        means.append(float(out.detach().mean()))
        out.sum().backward()
        optimizer.step()
    table = recorded(hook).tensor("actor.2:output").statistics()
    assert table["mean"].to_pylist() == pytest.approx(means, rel=1e-6)


def test_training_is_bit_identical(tmp_path: Path) -> None:
    agent = Agent()
    plain = ppo(agent, torch.optim.Adam(agent.parameters(), lr=1e-2), agent.actor, agent.critic, 2)
    watched_agent, optimizer, hook = watched(tmp_path)
    assert ppo(watched_agent, optimizer, watched_agent.actor, watched_agent.critic, 2) == plain
    hook.close()
    for plain_parameter, watched_parameter in zip(
        agent.parameters(), watched_agent.parameters(), strict=True
    ):
        assert torch.equal(plain_parameter, watched_parameter)


def test_calls_of_one_part_in_a_step_are_one_row(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)
    for _ in range(3):
        (agent.actor(torch.ones(2, 4)).sum() + agent.actor(torch.zeros(5, 4)).sum()).backward()
        agent.actor(torch.ones(1, 4)).sum().backward()  # another micro-batch
        optimizer.step()
    assert rows(hook, "actor.0:output") == [(step, "train", 8 * 8) for step in range(3)]


@pytest.mark.parametrize("part_first", [True, False])
def test_nothing_counts_twice_where_the_model_is_called_too(tmp_path: Path, part_first: bool) -> None:
    agent, optimizer, hook = watched(tmp_path)
    whole, part = torch.ones(2, 4), torch.ones(3, 4)
    for _ in range(3):
        calls: list[Callable[[], Tensor]] = [lambda: agent(whole), lambda: agent.actor(part).sum()]
        loss = sum(call() for call in (reversed(calls) if part_first else calls))
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    run = recorded(hook)
    for name, count in (("actor.0:output", 8 * 5), ("critic.0:output", 8 * 2)):
        table = run.tensor(name).statistics().to_pylist()
        assert [(row["step"], row["count"]) for row in table] == [(step, count) for step in range(3)]


def test_passes_of_an_evaluation_are_rows_of_its_own_mode(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)

    def evaluate() -> None:
        agent.eval()
        with torch.no_grad():
            agent.actor(torch.ones(7, 4))
        agent.train()

    ppo(agent, optimizer, agent.actor, agent.critic, 2, after_epoch=evaluate)
    found = rows(hook, "actor.0:output")
    assert [row for row in found if row[1] == "train"] == [
        (step, "train", 8 * BATCH) for step in range(2 * STEPS)
    ]
    assert [row for row in found if row[1] != "train"] == [
        (STEPS - 1, "eval", 8 * 7),
        (2 * STEPS - 1, "eval", 8 * 7),
    ]


def test_of_a_long_rollout_in_another_mode_only_the_first_pass_is_measured(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path, CaptureConfig(system=None))
    for _ in range(2):
        hook.mode = "predict"
        with torch.no_grad():
            for _ in range(50):
                agent.actor(torch.ones(1, 4))
                agent.critic(torch.ones(1, 4))
        hook.mode = "train"
        (agent.actor(torch.ones(2, 4)).sum() + agent.critic(torch.ones(2, 4)).sum()).backward()
        optimizer.step()
    found = [row for row in rows(hook, "critic.2:output") if row[1] == "predict"]
    assert {count for _, _, count in found} == {1}


@pytest.mark.parametrize("logs", [True, False])
def test_a_program_that_skips_every_bad_loss_makes_no_progress(tmp_path: Path, logs: bool) -> None:
    agent, optimizer, hook = watched(tmp_path)
    for step in range(60):
        optimizer.zero_grad()
        loss = agent.actor(torch.ones(2, 4)).sum() * (NAN if step >= 3 else 1)
        if logs:
            hook.log(loss=loss)
        else:
            loss.backward()
        if not torch.isfinite(loss):
            continue
        if logs:
            loss.backward()
        optimizer.step()
    table = recorded(hook).tensor("updates:missing").statistics().to_pylist()
    assert max(row["mean"] for row in table) >= 50


def test_outputs_of_a_bad_pass_of_parts_are_recorded_where_nothing_is_due(tmp_path: Path) -> None:
    rare = {"activations": Collection(Cadence(every=10)), "losses": Collection()}
    agent, optimizer, hook = watched(
        tmp_path, CaptureConfig(collections=rare, system=None, overhead_budget=None)
    )
    for step in range(21):
        with torch.no_grad():  # of a rollout, and of a target within the pass: neither is trained
            agent.actor(torch.ones(5, 4))
        hidden = agent.actor[:2](torch.full((3, 4), NAN if step == 17 else 1.0))
        with torch.no_grad():
            agent.critic(torch.ones(7, 4))
        optimizer.zero_grad()
        agent.actor[2](hidden).sum().backward()
        optimizer.step()
    run = recorded(hook)
    hidden_rows = run.tensor("actor.1:output").statistics().to_pylist()
    assert [(row["step"], row["count"], row["nan"]) for row in hidden_rows if row["step"] in {0, 10, 17}] == [
        (0, 24, 0),
        (10, 24, 0),
        (17, 24, 24),
    ]
    assert {row["step"] for row in hidden_rows} <= {0, 10, 17, 18, 19, 20}  # after a bad step too
    assert "critic.2:output" not in run.tensors()


def test_where_the_program_states_where_passes_begin_only_that_counts(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)
    for _ in range(3):
        hook.begin_pass()
        agent.actor(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        agent.actor(torch.ones(3, 4))  # observed after the update
    assert rows(hook, "actor.0:output") == [(step, "train", 8 * 5) for step in range(3)]


def test_parts_of_two_models_with_optimizers_of_their_own(tmp_path: Path) -> None:
    """As in SAC: the critic is updated by the second optimizer, within the steps that the first counts."""
    agent = Agent()
    actor = torch.optim.Adam(agent.actor.parameters(), lr=1e-2)
    critic = torch.optim.Adam(agent.critic.parameters(), lr=1e-2)
    hook = Hook(tmp_path, run="r", config=EVERY_STEP)
    hook.watch(agent.actor, actor, name="actor")
    hook.watch(agent.critic, critic, name="critic")
    for _ in range(3):
        agent.critic[0](torch.ones(5, 4)).sum().backward()
        critic.step()
        agent.actor[0](torch.ones(2, 4)).sum().backward()
        actor.step()
    run = recorded(hook)
    for name, count in (("actor.0:output", 8 * 2), ("critic.0:output", 8 * 5)):
        table = run.tensor(name).statistics().to_pylist()
        assert sum(row["count"] for row in table) == 3 * count
    assert run.tensor("actor.0:output").statistics()["step"].to_pylist() == [0, 1, 2]


@pytest.mark.ci
def test_a_compiled_part_and_an_eager_one(tmp_path: Path) -> None:
    agent, optimizer, hook = watched(tmp_path)
    compiled: Any = torch.compile(agent.actor, backend="eager")
    ppo(agent, optimizer, compiled, agent.critic)
    run = recorded(hook)
    assert "actor.0:output" not in run.tensors()
    assert run.tensor("critic.0:output").statistics()["count"].to_pylist() == [8 * BATCH] * STEPS
    assert run.tensor("critic.0:output").statistics()["step"].to_pylist() == list(range(STEPS))


def test_a_part_within_distributed_data_parallel(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        agent, optimizer, hook = watched(tmp_path)
        actor = nn.parallel.DistributedDataParallel(agent.actor)
        ppo(agent, optimizer, actor, agent.critic)
    finally:
        dist.destroy_process_group()
    assert rows(hook, "actor.0:output") == [(step, "train", 8 * BATCH) for step in range(STEPS)]
