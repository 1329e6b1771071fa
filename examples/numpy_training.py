"""Record a training in NumPy, without a framework: arrays with roles, and a guard that stops the training.

    python examples/numpy_training.py

A fault to try: `--learning-rate 3`. The weights grow until they overflow, and `nan_or_inf` stops the training.
"""

import argparse

import numpy as np

import watchstep
from watchstep_rules import DEFAULT_RULES, backtest_run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
parser.add_argument("--learning-rate", type=float, default=0.05)
options = parser.parse_args()

random = np.random.default_rng(0)
w, v = random.normal(size=(8, 32)) / 3, random.normal(size=32) / 6
try:
    with watchstep.Hook(options.store, guard=True) as hook:
        for _ in range(400):
            x = random.normal(size=(64, 8))
            hidden = np.maximum(x @ w, 0)
            error = hidden @ v - np.abs(x).sum(1)
            gradients = x.T @ (np.outer(error, v) * (hidden > 0)) / 64, hidden.T @ error / 64
            hook.log(loss=np.mean(error**2))
            hook.record({"w": w, "v": v}, role="weight")
            hook.record({"w:gradient": gradients[0], "v:gradient": gradients[1]}, role="gradient")
            w, v = w - options.learning_rate * gradients[0], v - options.learning_rate * gradients[1]
            hook.step()
except watchstep.StopTraining as stop:
    print("stopped:", stop)

(attempt,) = backtest_run(hook.run_url, DEFAULT_RULES).attempts
fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
print("run:", hook.run_url)
print("rules that fired, with their first step:", fired or "none")
