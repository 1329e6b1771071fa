"""Record a GAN: two models, two optimizers and two named losses.

    python examples/gan.py

A step of the run is an update of the generator, the model that is watched first.

A fault to try: delete the line `generator_optimizer.zero_grad()`. The generator's gradients then accumulate, and `missing_zero_grad` fires.
"""

import argparse

import torch
from torch import Tensor, nn

import watchstep
from watchstep_rules import DEFAULT_RULES, backtest_run

NOISE, BATCH, STEPS = 8, 128, 400


def sample_ring(number: int) -> Tensor:
    """Points near a circle of radius 1, the distribution to imitate."""
    angle = 2 * torch.pi * torch.rand(number)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(number, 2)


def network(inputs: int, outputs: int) -> nn.Sequential:
    hidden = 64
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
options = parser.parse_args()

torch.manual_seed(0)
generator, discriminator = network(NOISE, 2), network(2, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

with watchstep.Hook(options.store, on_stop="raise") as hook:
    hook.watch(generator, generator_optimizer, name="generator")
    hook.watch(discriminator, discriminator_optimizer, name="discriminator")
    for _ in range(STEPS):
        fake = generator(torch.randn(BATCH, NOISE))

        discriminator_optimizer.zero_grad()
        discriminator_loss = criterion(discriminator(sample_ring(BATCH)), ones) + criterion(
            discriminator(fake.detach()), zeros
        )
        discriminator_loss.backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        generator_loss = criterion(discriminator(fake), ones)
        generator_loss.backward()
        hook.log(discriminator_loss=discriminator_loss, generator_loss=generator_loss)
        generator_optimizer.step()

with torch.no_grad():
    radius = generator(torch.randn(1000, NOISE)).norm(dim=1)
print(f"radius of generated points: {radius.mean():.2f} ± {radius.std():.2f} (data: 1.00 ± 0.05)")

(attempt,) = backtest_run(hook.run_url, DEFAULT_RULES).attempts
fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
print("run:", hook.run_url)
print("rules that fired, with their first step:", fired or "none")
