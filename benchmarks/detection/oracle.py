"""Which symptoms full tensors of every step show: ``python -m benchmarks.detection.oracle [--only NAME …]``.

It writes ``published/measured.json``, {program: {seed: [symptom, …]}}. Symptoms beyond a program's truth that it saw in
any seed are neither rewarded nor punished. It uses no code of Watchstep, and thresholds of its own: they are meant to be
generous, for a symptom that is arguably there is no false alarm. Twins are judged too, as a check on the programs: the
file keeps what was seen, and scoring takes no notice of it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.detection.witness import Seen, Witness

SEEDS = (0, 1, 2)
WINDOW = 20


def nan_or_inf(seen: Seen) -> bool:
    """Any number that is none."""
    return bool(seen.not_finite)


def exploding_gradient(seen: Seen) -> bool:
    """A gradient of NaN or infinity; ten times the weight, or a hundred times its own past median, in three steps."""
    if seen.not_finite:
        return True
    for name, values in seen.gradient.items():
        gradient, weight = np.array(values), np.array(seen.weight[name])
        held = gradient[~np.isnan(gradient)]
        if len(held) < 10 or not name.endswith("weight"):
            continue
        median = np.array([np.median(held[: i + 1]) for i in range(len(held))])
        if (gradient > 10 * np.maximum(weight, 0.1)).sum() >= 3 or (held > 100 * median).sum() >= 3:
            return True
    return False


def vanishing_gradient(seen: Seen) -> bool:
    """For a window of steps a weight's mean gradient is below 1e-7, or a 10,000th of the largest other weight's."""
    names = [name for name in seen.smallest_gradient if name.endswith("weight")]
    if not names:
        return False
    rows = np.array([seen.smallest_gradient[name] for name in names])
    low = (rows < 1e-7) | (rows < 1e-4 * rows.max(0, keepdims=True))
    return any(_run(row) >= WINDOW for row in low)


def dead_relu(seen: Seen) -> bool:
    """A third of a layer's units are zero for every example of a window of steps."""
    for steps in seen.dead.values():
        for end in range(WINDOW, len(steps) + 1, 5):
            if float(torch.stack(steps[end - WINDOW : end]).all(0).float().mean()) >= 1 / 3:
                return True
    return False


def saturated_activation(seen: Seen) -> bool:
    """Nearly half of a layer's outputs are within a hundredth of a bound, over a window of steps."""
    return any(_run(np.array(shares) > 0.45) >= WINDOW for shares in seen.saturated.values())


def poor_initialization(seen: Seen) -> bool:
    """Identical units; spreads of layers that differ by a factor of 100; a first loss three times a guess's."""
    spread = np.array([value for value in seen.spread.values() if math.isfinite(value)])
    if seen.identical or (len(spread) and spread.max() > 100 * max(float(spread.min()), 1e-30)):
        return True
    counts = np.array(list(seen.labels.values()), dtype=float)
    if len(counts) < 2 or not seen.loss:
        return False
    shares = counts / counts.sum()
    return not seen.loss[0] < 3 * float(-(shares * np.log(shares)).sum())


def loss_not_decreasing(seen: Seen) -> bool:
    """Over a third of the run the loss falls by less than 2 %, and it has not come below a tenth of where it began."""
    loss = np.array(seen.loss)
    if not np.isfinite(loss).all():
        return True
    third = len(loss) // 3
    for start in (0, third, 2 * third):
        part = loss[start : start + third]
        first, last = part[: third // 3].mean(), part[-third // 3 :].mean()
        if last > 0.98 * first and last > 0.1 * loss[:5].mean():
            return True
    return False


def weight_not_updating(seen: Seen) -> bool:
    """For two windows of steps a weight changes by less than a millionth of itself a step, while the loss is high."""
    loss = np.array(seen.loss)
    for name, values in seen.update.items():
        if not name.endswith("weight"):
            continue
        update, weight = np.array(values), np.array(seen.weight[name])
        still = (update <= 1e-6 * weight) & (loss[: len(update)] > 0.1 * loss[:5].mean())
        if _run(still) >= 2 * WINDOW:
            return True
    return False


def overfit(seen: Seen) -> bool:
    """The validation loss ends a tenth above its least, and half above the training loss."""
    values = np.array([value for _, value in seen.validation])
    if len(values) < 8 or not np.isfinite(values).all():
        return False
    least, end = values.min(), values[-4:].mean()
    return bool(end > 1.1 * least and end > 1.5 * np.mean(seen.loss[-WINDOW:]))


def class_imbalance(seen: Seen) -> bool:
    """The most frequent class comes ten times as often as the least."""
    counts = list(seen.labels.values())
    return len(counts) > 1 and max(counts) >= 10 * min(counts)


def oscillating_loss(seen: Seen) -> bool:
    """In half of the windows the loss ranges over half its mean or more, and does not fall by as much."""
    loss = np.array(seen.loss)
    if not np.isfinite(loss).all():
        return True
    swings = []
    for start in range(0, len(loss) - 2 * WINDOW + 1, WINDOW):
        part = loss[start : start + 2 * WINDOW]
        fall = part[:WINDOW].mean() - part[WINDOW:].mean()
        width = 2 * part.std()
        high = part.mean() > 0.1 * loss[:5].mean()
        swings.append(high and width > 0.5 * part.mean() and abs(fall) < width)
    return len(swings) > 0 and float(np.mean(swings)) >= 0.4


def slow_convergence(seen: Seen) -> bool:
    """At the end the loss has fallen by less than a half."""
    loss = np.array(seen.loss)
    return bool(not np.isfinite(loss).all() or loss[-WINDOW:].mean() > 0.5 * loss[:5].mean())


TESTS: tuple[Callable[[Seen], bool], ...] = (
    vanishing_gradient,
    exploding_gradient,
    nan_or_inf,
    dead_relu,
    saturated_activation,
    poor_initialization,
    loss_not_decreasing,
    weight_not_updating,
    overfit,
    class_imbalance,
    oscillating_loss,
    slow_convergence,
)


def _run(flags: np.ndarray) -> int:
    """The longest run of true."""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


def symptoms(task: tuple[str, int]) -> tuple[list[str], str]:
    """What one training shows, and its losses in a few words."""
    from benchmarks.detection.published import PROGRAMS

    torch.set_num_threads(1)
    name, seed = task
    witness = Witness()
    PROGRAMS[name].train(witness, seed, witness)
    seen = witness.seen
    words = " ".join(
        f"{seen.loss[int(at * (len(seen.loss) - 1))]:.3g}" for at in (0, 0.1, 0.25, 0.5, 0.75, 1)
    )
    if seen.validation:
        words += " | " + " ".join(
            f"{seen.validation[int(at * (len(seen.validation) - 1))][1]:.3g}" for at in (0, 0.5, 1)
        )
    return [test.__name__ for test in TESTS if test(seen)], words


def by_line(found: dict[str, dict[str, list[str]]]) -> str:
    """JSON with a line for each program, so that a change of one is a change of one line."""
    lines = [f"{json.dumps(name)}: {json.dumps(seeds)}" for name, seeds in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(given: Sequence[str] | None = None) -> None:
    """Judge all programs, print what differs from the truth, and write the file."""
    from benchmarks.detection.published import PROGRAMS
    from benchmarks.detection.published.pairs import MEASURED

    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection.oracle", description=__doc__)
    parser.add_argument("--only", nargs="+", help="these programs only; of others the file keeps what it has")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args(given)
    names = options.only or list(PROGRAMS)
    tasks = [(name, seed) for name in names for seed in options.seeds]
    found: dict[str, dict[str, list[str]]] = {}
    kept = json.loads(MEASURED.read_text()) if options.only and MEASURED.exists() else {}
    with multiprocessing.get_context("spawn").Pool() as pool:
        for (name, seed), (seen, words) in zip(tasks, pool.imap(symptoms, tasks), strict=True):
            found.setdefault(name, {})[str(seed)] = seen
            lacking = sorted(PROGRAMS[name].truth - set(seen))
            print(
                f"{name} {seed}: {words}: {', '.join(seen)}" + (f"; LACKS {lacking}" if lacking else ""),
                flush=True,
            )
    held = {**kept, **found}
    MEASURED.write_text(by_line({name: held[name] for name in PROGRAMS if name in held}))


if __name__ == "__main__":
    main()
