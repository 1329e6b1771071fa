"""Rewards, and networks that play against each other: losses that need not fall."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.optim import Adam, RMSprop

from benchmarks.detection.data import moons, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult


class Corridor:
    """Many corridors at once: a place in [0, 1], a target, and a reward for coming nearer; an episode has 16 moves."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator
        self.place = self.goal = torch.zeros(0)
        self.reset()

    def reset(self) -> None:
        self.place = torch.rand(self.count, generator=self.generator)
        self.goal = torch.rand(self.count, generator=self.generator)

    def state(self) -> Tensor:
        return torch.stack([self.place, self.goal, self.place**2], 1)

    def move(self, action: Tensor) -> Tensor:
        before = (self.place - self.goal).abs()
        self.place = (self.place + 0.1 * (action - 1)).clamp(0, 1)
        return before - (self.place - self.goal).abs()


@difficult("ppo_of_thirty_updates", "PPO with few updates: losses are noise around zero, and returns rise")
def ppo_of_thirty_updates(run: Training) -> None:
    """30 updates of four epochs and four minibatches; actor and critic are parts of one module that is never called."""
    world = Corridor(32, run.generator())
    actor, critic = dense([3, 32, 3], nn.Tanh), dense([3, 32, 1], nn.Tanh)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = Adam(model.parameters(), 3e-3, eps=1e-5)
    run.watch(model, optimizer)
    returns = []
    for _ in range(30):
        states, actions, chances, rewards, values = [], [], [], [], []
        world.reset()
        with torch.no_grad():
            for _ in range(16):
                state = world.state()
                policy = Categorical(logits=actor(state))
                action = policy.sample()
                states.append(state)
                actions.append(action)
                chances.append(policy.log_prob(action))
                values.append(critic(state)[:, 0])
                rewards.append(10 * world.move(action))
        gains: list[Tensor] = []
        later = torch.zeros(32)
        for reward in reversed(rewards):
            later = reward + 0.9 * later
            gains.insert(0, later)
        returns.append(torch.stack(rewards).sum(0).mean().item())
        data = [torch.cat(held) for held in (states, actions, chances, gains, values)]
        for _ in range(4):
            for batch in torch.randperm(512).chunk(4):
                state, action, chance, gain, value = (held[batch] for held in data)
                policy = Categorical(logits=actor(state))
                ratio = (policy.log_prob(action) - chance).exp()
                advantage = gain - value
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value_loss = (critic(state)[:, 0] - gain).pow(2).mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                run.log(policy_loss=policy_loss, value_loss=value_loss)
                run.step()
        run.log(returns=returns[-1])
    run.improves("returns", returns[0], sum(returns[-3:]) / 3, at_least=returns[0] + 1.0)


@difficult(
    "actor_and_critic_apart",
    "a program calls actor(x) and critic(x), each with an optimizer, and one acts between updates",
)
def actor_and_critic_apart(run: Training) -> None:
    """250 updates of advantage actor-critic; the loss of the actor is around zero."""
    world = Corridor(32, run.generator())
    actor, critic = dense([3, 32, 3], nn.Tanh), dense([3, 32, 1], nn.Tanh)
    acts, values = Adam(actor.parameters(), 3e-3), Adam(critic.parameters(), 1e-2)
    run.watch(actor, acts, name="actor")
    run.watch(critic, values, name="critic")
    rewards = []
    for step in range(250):
        if step % 8 == 0:
            world.reset()
        state = world.state()
        policy = Categorical(logits=actor(state))
        action = policy.sample()
        reward = 10 * world.move(action)
        with torch.no_grad():
            target = reward + 0.8 * critic(world.state())[:, 0]
        gain = target - critic(state)[:, 0]
        values.zero_grad()
        gain.pow(2).mean().backward()
        values.step()
        acts.zero_grad()
        (-(policy.log_prob(action) * gain.detach()).mean() - 0.01 * policy.entropy().mean()).backward()
        acts.step()
        rewards.append(reward.mean().item())
        run.log(reward=rewards[-1])
        run.step()
    run.improves("reward", sum(rewards[:16]) / 16, sum(rewards[-32:]) / 32, at_least=0.25)


@difficult(
    "dqn_with_replay",
    "Q-learning from a replay buffer: the loss grows as values do, and leaps when the target is copied",
)
def dqn_with_replay(run: Training) -> None:
    """700 updates, the target network copied each 100."""
    world = Corridor(16, run.generator())
    model, target = dense([3, 48, 3]), dense([3, 48, 3])
    target.load_state_dict(model.state_dict())
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    buffer: list[tuple[Tensor, ...]] = []
    rewards = []
    for step in range(700):
        if step % 16 == 0:
            world.reset()
        state = world.state()
        with torch.no_grad():
            greedy = target(state).argmax(1)
        explore = torch.rand(16) < max(0.05, 1 - step / 300)
        action = torch.where(explore, torch.randint(0, 3, (16,)), greedy)
        reward = 10 * world.move(action)
        rewards.append(reward.mean().item())
        buffer = [*buffer[-400:], (state, action, reward, world.state())]
        chosen = [buffer[int(at)] for at in torch.randint(0, len(buffer), (4,))]
        before, taken, earned, after = (torch.cat(held) for held in zip(*chosen, strict=True))
        with torch.no_grad():
            wanted = earned + 0.9 * target(after).max(1).values
        value = model(before).gather(1, taken[:, None])[:, 0]
        loss = functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            target.load_state_dict(model.state_dict())
        run.log(loss=loss)
        run.step()
    run.improves("reward", sum(rewards[:48]) / 48, sum(rewards[-96:]) / 96, at_least=0.12)


def _distance(made: Tensor, real: Tensor) -> float:
    """Energy distance of two samples; 0 for the same distribution."""
    with torch.no_grad():
        apart = torch.cdist(made, real).mean()
        return float(2 * apart - torch.cdist(made, made).mean() - torch.cdist(real, real).mean())


@difficult(
    "dcgan_without_names",
    "a DCGAN whose losses are not logged: what backward() begins from is taken as the loss",
)
def dcgan_without_names(run: Training) -> None:
    """300 steps on 8 by 8 digits, two optimizers, BatchNorm in both networks."""
    (x, _), _ = shipped("digits", run.seed)
    real_images = ((x + 0.3) * 2 - 1).view(-1, 1, 8, 8)
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(), nn.Sigmoid()
    )
    makes = Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    judges = Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
    run.watch(critic, judges, name="critic")
    run.watch(generator, makes, name="generator")
    loss_of = nn.BCELoss()
    fixed = torch.randn(256, 16, 1, 1, generator=run.generator())

    def distance() -> float:
        generator.eval()
        with torch.no_grad():
            made = generator(fixed).flatten(1)
        generator.train()
        return _distance(made, real_images[:512].flatten(1))

    first = distance()
    order = run.generator(1)
    for _ in range(300):
        shown = real_images[torch.randint(0, len(real_images), (32,), generator=order)]
        made = generator(torch.randn(32, 16, 1, 1))
        judges.zero_grad()
        loss_of(critic(shown), torch.ones(32, 1)).backward()
        loss_of(critic(made.detach()), torch.zeros(32, 1)).backward()
        judges.step()
        makes.zero_grad()
        loss_of(critic(made), torch.ones(32, 1)).backward()
        makes.step()
        run.step()
    run.improves("distance of made from real images", first, distance(), at_most=0.6 * first)


@difficult(
    "wasserstein_with_clipping",
    "a critic's loss goes below zero and stays there; weights are clipped to 0.05",
)
def wasserstein_with_clipping(run: Training) -> None:
    """350 updates of the critic, each fifth with one of the generator, by RMSprop."""
    real, _ = moons(run.seed, 2000, 0.05)
    generator, critic = dense([4, 48, 48, 2]), dense([2, 48, 48, 1])
    makes, judges = RMSprop(generator.parameters(), 1e-3), RMSprop(critic.parameters(), 2e-3)
    run.watch(critic, judges, name="critic")
    run.watch(generator, makes, name="generator")
    fixed = torch.randn(400, 4, generator=run.generator())
    with torch.no_grad():
        first = _distance(generator(fixed), real[:400])
    for step in range(500):
        shown = real[torch.randint(0, len(real), (64,))]
        with torch.no_grad():
            made = generator(torch.randn(64, 4))
        loss = critic(made).mean() - critic(shown).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)
        run.log(critic_loss=loss)
        if step % 3 == 2:
            generator_loss = -critic(generator(torch.randn(64, 4))).mean()
            makes.zero_grad()
            generator_loss.backward()
            makes.step()
            run.log(generator_loss=generator_loss)
        run.step()
    with torch.no_grad():
        last = _distance(generator(fixed), real[:400])
    run.improves("distance of made from real points", first, last, at_most=0.5 * first)


@difficult("least_squares_gan", "two losses in one log, of which one rises while the other falls")
def least_squares_gan(run: Training) -> None:
    """400 steps on two moons; the critic is trained first, and loses ground."""
    real, _ = moons(run.seed, 2000, 0.05)
    generator = dense([4, 48, 48, 2], lambda: nn.LeakyReLU(0.2))
    critic = dense([2, 48, 48, 1], lambda: nn.LeakyReLU(0.2))
    makes, judges = (Adam(held.parameters(), 2e-3, betas=(0.5, 0.99)) for held in (generator, critic))
    run.watch(generator, makes, name="generator")
    run.watch(critic, judges, name="critic")
    fixed = torch.randn(400, 4, generator=run.generator())
    with torch.no_grad():
        first = _distance(generator(fixed), real[:400])
    for _ in range(400):
        shown, made = real[torch.randint(0, len(real), (64,))], generator(torch.randn(64, 4))
        critic_loss = (critic(shown) - 1).pow(2).mean() + critic(made.detach()).pow(2).mean()
        judges.zero_grad()
        critic_loss.backward()
        judges.step()
        generator_loss = (critic(made) - 1).pow(2).mean()
        makes.zero_grad()
        generator_loss.backward()
        makes.step()
        run.log(critic_loss=critic_loss, generator_loss=generator_loss)
        run.step()
    with torch.no_grad():
        last = _distance(generator(fixed), real[:400])
    run.improves("distance of made from real points", first, last, at_most=0.5 * first)
