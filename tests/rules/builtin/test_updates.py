"""Rules over updates of weights and over hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from tests.rules.builtin.losses import Curve, falling, noisy
from tests.rules.recording import EVERYTHING, evaluate_training
from tests.rules.runs import all_at_once, first_message, found_by, in_steps, steps_of
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.training import batches, small_model
from watchstep import Hook, open_run
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding

# weight_not_updating


LOSS = tensor("loss", "losses", shape=())


def updates(name: str, ratios: Sequence[float], *, order: int = 0, dtype: str = "float32") -> list[Row]:
    """A layer's updates, by their root mean square over that of a weight of one; a hundred elements each."""
    info = replace(tensor(f"{name}.weight:update", "updates", order=order), module=name, dtype=dtype)
    return [
        Row(step, info, [ratio] * 100, probes={"update_ratio": ratio}) for step, ratio in enumerate(ratios)
    ]


def gradients(name: str, sizes: Sequence[float], *, order: int = 0) -> list[Row]:
    return [Row(step, gradient(name, order=order), [size] * 4) for step, size in enumerate(sizes)]


def losses(values: Sequence[float]) -> list[Row]:
    return [Row(step, LOSS, [value]) for step, value in enumerate(values)]


def outputs(name: str, *, order: int, kind: str = "Linear") -> list[Row]:
    info = replace(
        tensor(f"{name}:output", "activations", order=order), module=name, module_type=kind, role="output"
    )
    return [Row(0, info, [1.0])]


def not_updating(*layers: list[Row], name: str = "a", **params: object) -> list[int]:
    config = RuleConfig.model_validate({"rule": "weight_not_updating", "params": params})
    return steps_of(all_at_once(config, in_steps(*layers)), f"{name}.weight:update")


def test_an_optimizer_that_stops_is_found_and_one_that_continues_is_not() -> None:
    alive = gradients("a", [0.1, 0.12, 0.09, 0.1, 0.11])
    assert not_updating(updates("a", [1e-3, 1e-3, 0.0, 0.0, 0.0]), alive) == [2, 3, 4]
    assert not_updating(updates("a", [1e-3] * 5), alive) == []


def test_a_learning_rate_that_a_schedule_brings_to_zero_is_fine() -> None:
    cosine = [1e-3 * (20 - step) ** 2 / 400 for step in range(20)] + [0.0] * 4
    assert not_updating(updates("a", cosine), gradients("a", [0.1] * 24)) == []


def test_a_schedule_that_ends_long_before_the_training_is_found() -> None:
    falling = [10.0**-step for step in range(2, 9)] + [0.0] * 30
    assert not_updating(updates("a", falling), gradients("a", [0.1] * 37)) == list(range(25, 37))


def test_a_rate_that_ran_down_long_before_the_end_is_found() -> None:
    falling = [10.0 ** -(2 + step / 2) for step in range(10)] + [3e-7] * 40
    alive, high = gradients("a", [0.1] * 50), losses([2.3] * 50)
    assert not_updating(updates("a", falling), alive, high)[0] == 17
    assert not_updating(updates("a", falling), alive, losses([2.3] * 8 + [0.5] * 42)) == []
    assert not_updating(updates("a", falling), gradients("a", [0.1] * 8 + [1e-6] * 42), high) == []
    assert not_updating(updates("a", falling), alive, high, ran_down=1e-7) == []


def test_a_schedule_that_ends_at_nothing_with_the_training_is_fine() -> None:
    ends = [1e-3 * (100 - step) / 100 for step in range(100)] + [1e-7] * 12
    assert not_updating(updates("a", ends), gradients("a", [0.1] * 112), losses([2.3] * 112)) == []


def test_updates_that_are_too_small_from_the_start_are_found_unless_they_grow_or_the_loss_falls() -> None:
    alive, high = gradients("a", [0.1] * 90), losses([2.3] * 90)
    small = updates("a", [3e-7, 5e-7] * 45)
    assert not_updating(small, alive, high) == list(range(50, 90))
    assert not_updating(updates("a", [3e-6] * 90), alive, high) == []
    assert not_updating(small, alive, losses([2.3] * 8 + [0.5] * 82)) == []
    momentum = [5e-7 * (1 - 0.9 ** (step + 1)) for step in range(90)]
    assert not_updating(updates("a", momentum), alive, high)[0] == 50
    warmed_up = [2e-8 * (step + 1) for step in range(90)]
    assert not_updating(updates("a", warmed_up), alive, high) == []


def test_occasional_zero_gradients_are_no_evidence_about_other_steps() -> None:
    seldom = gradients("a", [0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    still = updates("a", [1e-3, 1e-3, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert not_updating(still, seldom) == []
    assert not_updating(still, gradients("a", [0.1] * 8)) == [3, 4, 5, 6, 7]


def not_in_optimizer(
    name: str, changed: Sequence[float], *, order: int, size: float = 0.1, wide: int = 8
) -> list[Row]:
    info = replace(
        tensor(
            f"{name}.weight:not_in_optimizer",
            "not_in_optimizer",
            role="not_in_optimizer",
            order=order,
            shape=(8, wide),
        ),
        module=name,
    )
    return [Row(step, info, [size] * 4, probes={"changed": flag}) for step, flag in enumerate(changed)]


def left_out(*layers: list[Row], name: str) -> list[int]:
    outcome = all_at_once(RuleConfig(rule="weight_not_updating"), in_steps(*layers))
    return steps_of(outcome, f"{name}.weight:not_in_optimizer")


def test_forgotten_weights_of_no_optimizer_are_found() -> None:
    trunk = updates("a", [1e-3] * 3, order=1)
    assert left_out(trunk, not_in_optimizer("b", [0.0] * 3, order=2), name="b") == [0, 1, 2]
    assert left_out(trunk, not_in_optimizer("b", [0.0, 1.0, 1.0], order=2), name="b") == [0]
    assert left_out(trunk, not_in_optimizer("b", [0.0] * 3, order=2, size=0.0), name="b") == []
    nothing = not_in_optimizer("b", [0.0] * 3, order=0), not_in_optimizer("c", [0.0] * 3, order=1)
    assert left_out(*nothing, name="b") == left_out(*nothing, name="c") == [0, 1, 2]


def test_weights_that_are_omitted_on_purpose_are_fine() -> None:
    head = updates("b", [1e-3] * 3, order=2)
    assert left_out(head, not_in_optimizer("a", [0.0] * 3, order=1), name="a") == []
    adapter = updates("b", [1e-3] * 3, order=2)
    assert left_out(adapter, not_in_optimizer("c", [0.0] * 3, order=3, wide=32), name="c") == []


def test_a_converged_training_is_fine() -> None:
    decay = [10.0**-step for step in range(6)]
    assert not_updating(updates("a", [*decay[:4], 0.0, 0.0]), gradients("a", decay)) == []
    assert not_updating(updates("a", [1e-3, 0.0, 0.0]), gradients("a", [0.1, 0.0, 0.0])) == []


def test_a_layer_that_stalls_beside_others_is_the_authors_choice() -> None:
    still, moves = updates("a", [0.0] * 4), updates("b", [1e-3] * 4, order=1)
    assert not_updating(still, moves, gradients("a", [0.1] * 4), gradients("b", [0.1] * 4, order=1)) == []


def test_weights_that_never_change_are_found_unless_there_is_no_loss() -> None:
    never = updates("a", [0.0] * 3), gradients("a", [0.0] * 3)
    assert not_updating(*never) == [0, 1, 2]
    assert not_updating(*never, losses([8.0] * 3)) == [0, 1, 2]
    assert not_updating(*never, losses([0.0] * 3)) == []


def test_what_half_precision_rounds_away_is_found() -> None:
    for dtype, steps in (("bfloat16", [1, 2]), ("float32", [])):
        lost = updates("a", [1e-3, 1e-5, 1e-5], dtype=dtype)
        lost = [replace(row, values=[*[0.0] * 999, 1e-3] if row.step else row.values) for row in lost]
        moves = updates("b", [1e-3] * 3, order=1)
        assert (
            not_updating(lost, moves, gradients("a", [0.1] * 3), gradients("b", [0.1] * 3, order=1)) == steps
        )


def gains(dtype: str, values: Sequence[Sequence[float]]) -> list[Row]:
    """Updates of the gains of a normalization layer."""
    info = tensor("norm.weight:update", "updates", shape=(4,))
    info = replace(info, module="norm", module_type="LayerNorm", dtype=dtype)
    return [
        Row(step, info, list(value), probes={"update_ratio": float(np.sqrt(np.mean(np.square(value))))})
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("dtype", "moves_at", "warms_up", "found"),
    [
        ("bfloat16", (), False, True),
        ("float32", (), False, False),
        ("bfloat16", (3,), False, False),  # stochastic rounding moves some
        ("bfloat16", (), True, False),
    ],
)
def test_gains_that_never_move_are_found(
    dtype: str, moves_at: Sequence[int], warms_up: bool, found: bool
) -> None:
    still = gains(dtype, [[0.0078 * (step in moves_at), 0, 0, 0] for step in range(60)])
    moving = updates("b", [1e-3 * (1 + step if warms_up else 1) for step in range(60)], order=1)
    config = RuleConfig.model_validate({"rule": "weight_not_updating"})
    learning = gradients("norm", [0.1] * 60) + gradients("b", [0.1] * 60, order=1)
    outcome = all_at_once(config, in_steps(still, moving, learning))
    assert bool(steps_of(outcome, "norm.weight:update")) == found


def test_layers_that_are_cut_off_from_the_loss_are_found() -> None:
    still, moves = updates("a", [0.0] * 3, order=1), updates("b", [1e-3] * 3, order=2)
    learns = gradients("b", [0.1] * 3, order=2)
    assert not_updating(still, moves, learns, outputs("a", order=1)) == [0, 1, 2]
    assert not_updating(still, moves, learns, outputs("a.base", order=2)) == [
        0,
        1,
        2,
    ]  # an adapter around a frozen layer
    assert not_updating(still, moves, learns, outputs("ab", order=2)) == []
    assert not_updating(still, moves, learns) == []  # never computed: nothing was expected of it


def test_an_unused_output_is_not_a_detached_layer() -> None:
    first, unused = updates("a", [1e-3] * 3, order=1), updates("b", [0.0] * 3, order=2)
    last = updates("c", [1e-3] * 3, order=3)
    learn = gradients("a", [0.1] * 3, order=1) + gradients("c", [0.1] * 3, order=3)
    assert not_updating(first, unused, last, learn, outputs("b", order=2), name="b") == []


def test_a_gradient_that_is_masked_is_found_and_a_layer_without_any_is_not() -> None:
    def bias(size: float) -> list[Row]:
        info = tensor("b.bias:gradient", "gradients", role="gradient", order=2, shape=(8,))
        return [Row(step, info, [size]) for step in range(3)]

    first, masked = updates("a", [1e-3] * 3, order=1), updates("b", [0.0] * 3, order=2)
    given = gradients("a", [0.1] * 3, order=1) + gradients("b", [0.0] * 3, order=2)
    assert not_updating(first, masked, given, bias(0.1), name="b") == [1, 2]
    assert not_updating(first, masked, given, bias(0.0), name="b") == []
    assert (
        not_updating(masked, gradients("b", [0.0] * 3, order=2), losses([0.0] * 3), bias(0.1), name="b") == []
    )


def vector(name: str, kind: str, *, order: int) -> list[Row]:
    info = tensor(f"{name}.weight:update", "updates", order=order, shape=(8,))
    info = replace(info, module=name, module_type=kind)
    return [Row(step, info, [1e-3], probes={"update_ratio": 1e-3}) for step in range(2)]


def test_normalisation_that_alone_learns_is_found() -> None:
    layers = outputs("first", order=1) + outputs("last", order=3)
    assert not_updating(vector("a", "BatchNorm1d", order=2), layers) == [0, 1]
    assert not_updating(vector("a", "BatchNorm1d", order=2), vector("last", "Linear", order=3), layers) == []
    assert not_updating(vector("a", "Scales", order=2), layers) == []


def test_the_finding_states_what_was_seen() -> None:
    block = in_steps(updates("a", [1e-3, 0.0]), gradients("a", [0.1, 0.1]))
    (finding,) = all_at_once(RuleConfig(rule="weight_not_updating"), block).findings
    assert finding.message == (
        "a.weight:update is 0 of the weight, no update up to 1e-08: no weight changes, though there are gradients"
    )


# optimizer_not_stepping


RULE = "optimizer_not_stepping"
OVERDUE = tensor("updates:overdue", "metrics", shape=())
UPDATED = 12


def trained_until(
    hook: Hook,
    *,
    passes: int = 230,
    updates: int = UPDATED,
    micro_batches: int = 1,
    logs: bool = True,
    by_hand: bool = False,
    factor: float = 1.0,
    again: int = 0,
) -> None:
    """``updates`` steps, then only passes, and ``again`` more steps."""
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    hook.watch(model, optimizer)
    for number, (x, y) in enumerate(batches(updates * micro_batches + passes + again)):
        loss = nn.functional.cross_entropy(model(x), y)
        if number >= updates * micro_batches:
            loss = loss * factor
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if logs:
            hook.log(loss=loss)
        past, rest = divmod(number + 1, micro_batches)
        if past <= updates or number >= updates * micro_batches + passes:
            if rest == 0:
                optimizer.step()
        elif by_hand:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad, alpha=-1e-3)
        optimizer.zero_grad()


@pytest.mark.ci
def test_a_loop_whose_optimizer_steps_no_more(tmp_path: Path) -> None:
    (finding,) = evaluate_training(trained_until, RULE, tmp_path)
    assert (finding.step, finding.tensor, finding.value) == (UPDATED, "updates:overdue", 200.0)
    assert finding.message == (
        f"updates:overdue: 200 backward passes since step {UPDATED - 1}, and a training loss is logged for them, but no "
        "optimizer has stepped and no weight changes"
    )


@pytest.mark.ci
def test_the_alert_ends_when_the_optimizer_steps_again(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERYTHING) as hook:
        trained_until(hook, again=3)
    assert not hook.health["faults"]
    block = open_run(hook.run_url).rows()
    (metric,) = (number for number, info in enumerate(block.catalogue) if info.name == OVERDUE.name)
    rows = block.where(block.tensor == metric)
    assert rows.step.tolist() == [UPDATED, UPDATED + 1]
    assert rows.statistics.mean.tolist() == [200.0, 0.0]


@pytest.mark.ci
@pytest.mark.parametrize(
    "how",
    [
        {"logs": False},
        {"by_hand": True},
        {"passes": 190},
        {"factor": float("nan")},
        {"updates": 0},
        {"micro_batches": 5},
    ],
    ids=str,
)
def test_loops_that_do_so_on_purpose(tmp_path: Path, how: dict[str, float]) -> None:
    assert evaluate_training(lambda hook: trained_until(hook, **how), RULE, tmp_path) == []  # type: ignore[arg-type]


def test_only_rows_of_the_metric_that_are_over_the_limit_count() -> None:
    other = tensor("overdue", "metrics", shape=())
    rows = [
        Row(3, OVERDUE, [200.0]),
        Row(4, OVERDUE, [0.0]),
        Row(5, other, [900.0]),
        Row(6, OVERDUE, [400.0]),
    ]
    config = RuleConfig(rule=RULE, params={"passes": 300})
    assert [finding.step for finding in all_at_once(config, in_steps(rows)).findings] == [6]
    changes = all_at_once(RuleConfig(rule=RULE), in_steps(rows[:2])).transitions
    assert [(change.step, change.phase) for change in changes] == [(3, "firing"), (4, "resolved")]


# weight_update_ratio


UPDATE = tensor("a.weight:update", "updates")
OF_BIAS = tensor("a.bias:update", "updates", shape=(8,))
NAN = float("nan")


@pytest.mark.parametrize(
    ("ratio", "limits"), [(10.1, [10.0]), (10.0, []), (1e-3, []), (1e-8, []), (0.9e-8, [1e-8]), (NAN, [])]
)
def test_far_too_large_or_small_is_found(ratio: float, limits: list[float]) -> None:
    outcome = all_at_once(
        RuleConfig(rule="weight_update_ratio"),
        block_of([Row(0, UPDATE, [1.0], probes={"update_ratio": ratio})]),
    )
    assert [finding.threshold for finding in outcome.findings] == limits


def test_vectors_are_judged_only_if_requested() -> None:
    block = block_of([Row(0, OF_BIAS, [1.0], probes={"update_ratio": 99.0})])
    for least, number in ((2, 0), (1, 1)):
        config = RuleConfig(rule="weight_update_ratio", params={"min_dimensions": least})
        assert len(all_at_once(config, block).findings) == number


def test_without_the_probe_nothing_is_reported() -> None:
    assert (
        all_at_once(RuleConfig(rule="weight_update_ratio"), block_of([Row(0, UPDATE, [1.0])])).findings == []
    )


# learning_rate_scale


LAYERS = [tensor(f"{name}.weight:update", "updates", order=order) for order, name in enumerate("abc")]


def ratios_run(*ratios: float, records: int = 6) -> Block:
    return block_of(
        [
            Row(step, info, [1.0], probes={"update_ratio": ratio})
            for step in range(records)
            for info, ratio in zip(LAYERS, ratios, strict=False)
        ]
    )


def off_scale(block: Block) -> list[Finding]:
    return all_at_once(RuleConfig(rule="learning_rate_scale"), block).findings


@pytest.mark.parametrize(
    ("ratios", "tensor_name", "threshold"),
    [
        ((0.5, 0.2, 3.0), "b.weight:update", 0.1),
        ((1e-7, 3e-6, 2e-9), "b.weight:update", 1e-5),
        ((1e-2, 1e-3, 1e-6), "c.weight:update", 1e-5),
    ],
    ids=["all large", "all small", "apart"],
)
def test_rates_far_from_usual_or_from_each_other_are_found(
    ratios: tuple[float, ...], tensor_name: str, threshold: float
) -> None:
    outcome = off_scale(ratios_run(*ratios))
    assert [(finding.step, finding.tensor) for finding in outcome] == [(4, tensor_name), (5, tensor_name)]
    assert outcome[0].threshold == pytest.approx(threshold)


@pytest.mark.parametrize(
    "ratios", [(1e-3, 1e-3, 1e-3), (0.5, 0.05, 0.5), (1e-6, 1e-4, 1e-6), (1e-2, 1e-4, 1e-5), (0.0, 0.0, 0.0)]
)
def test_what_is_usual_for_some_layer_is_fine(ratios: tuple[float, ...]) -> None:
    assert off_scale(ratios_run(*ratios)) == []


def test_too_few_records_are_inconclusive() -> None:
    assert off_scale(ratios_run(0.5, 0.5, 0.5, records=4)) == []


def test_biases_and_embeddings_are_no_layers() -> None:
    block = ratios_run(0.5, 0.5, 0.5)
    for change in ({"shape": (8,)}, {"module_type": "Embedding"}):
        catalogue = tuple(replace(info, **change) for info in block.catalogue)
        assert off_scale(replace(block, catalogue=catalogue)) == []


# hyperparameter_jump


RATE = tensor("optimizer:learning_rate/0", "metrics", shape=())
SOUND = noisy(falling(2.0, 0.4, 300, 30.0), 0.05)


def jumped(losses: Curve, rates: dict[int, float], **params: object) -> list[int]:
    rows = [Row(step, LOSS, [float(value)]) for step, value in enumerate(losses)]
    changes = [Row(step, RATE, [value]) for step, value in rates.items()]
    return found_by("hyperparameter_jump")(in_steps(rows, changes), **params)


def hurt(since: int, height: float = 1.0) -> Curve:
    curve: Curve = SOUND.copy()
    curve[since:] += height
    return curve


def test_a_jump_that_harms_and_its_twins() -> None:
    assert jumped(hurt(101), {0: 1e-3, 100: 0.1})[0] == 108
    assert jumped(SOUND, {0: 1e-3, 100: 0.1}) == []
    assert jumped(hurt(101), {0: 1e-3, 100: 5e-3}) == []
    assert jumped(hurt(101), {0: 0.1, 50: 1e-3, 100: 0.1}) == [], "it was as high before"
    assert jumped(hurt(101), {0: 1e-5, 5: 1e-3}) == [], "a warm-up of stages"
    assert jumped(hurt(101), {0: 0.0, 100: 1e-3}) == [], "zero has no multiple"
    assert jumped(hurt(250), {0: 1e-3, 100: 0.1}, patience=100) == []


def test_a_rate_that_grows_by_a_tenth_at_each_step() -> None:
    rates = {0: 1e-3} | {step: 1e-3 * 1.1 ** (step - 149) for step in range(150, 200)}
    assert jumped(hurt(180), rates)[0] == 187
    assert jumped(SOUND, rates) == []
    linear = {step: 1e-5 * (step + 1) for step in range(250)}
    assert jumped(hurt(180), linear) == [], "a warm-up"


def test_a_loss_that_is_no_number_has_suffered() -> None:
    losses = SOUND.copy()
    losses[101:] = np.nan
    assert jumped(losses, {0: 1e-3, 100: 0.1})[0] == 108


def test_the_message_names_value_step_and_harm() -> None:
    rows = [Row(step, LOSS, [1.0 if step <= 50 else 3.0]) for step in range(60)]
    changes = [Row(0, RATE, [1e-3]), Row(50, RATE, [0.1])]
    assert first_message("hyperparameter_jump", in_steps(rows, changes)) == (
        "optimizer:learning_rate/0 went to 0.1 at step 50, 100 times its largest before; loss is 3, 8 of the last 10 are above "
        "1.2, and it was 1 before"
    )


Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def trained_with_schedule(
    hook: Hook, optimizer: str, schedule: Schedule | None = None, jump: str = "", step: int = 100
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    chosen: torch.optim.Optimizer
    if optimizer == "SGD":
        chosen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    else:
        chosen = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = None if schedule is None else schedule(chosen)
    hook.watch(model, chosen)
    for number, (x, y) in enumerate(Task(1).batches(steps=240)):
        if jump and number == step:
            for group in chosen.param_groups:
                group[jump] *= 100
        chosen.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        chosen.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_trainings_whose_learning_rate_or_weight_decay_jumps(optimizer: str, tmp_path: Path) -> None:
    for jump, latest in (("lr", 110), ("weight_decay", 239)):
        steps = [
            finding.step
            for finding in evaluate_training(
                lambda hook, jump=jump: trained_with_schedule(hook, optimizer, jump=jump),  # type: ignore[misc]
                "hyperparameter_jump",
                tmp_path / jump,
                config=EVERYTHING,
            )
        ]
        if (optimizer, jump) != ("AdamW", "weight_decay"):  # 2e-3 of a weight a step: a third takes 180 steps
            assert steps, jump
            assert 100 <= steps[0] <= latest


SCHEDULES: dict[str, Schedule] = {
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40, eta_min=1e-7),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=240),
    "cyclical": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 1e-5, 0.1, step_size_up=30, cycle_momentum=False
    ),
    "warm-up from zero": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 60)),
    "warm-up in stages": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: 10.0 ** min(0, step // 40 - 3)
    ),
    "decay in stages": lambda optimizer: lr_scheduler.StepLR(optimizer, 50, 0.1),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.ci if name in {"one-cycle", "warm restarts"} else pytest.mark.release
        )
        for name in sorted(SCHEDULES)
    ],
)
def test_schedules_are_ignored(name: str, tmp_path: Path) -> None:
    outcome = evaluate_training(
        lambda hook: trained_with_schedule(hook, "SGD", SCHEDULES[name]),
        "hyperparameter_jump",
        tmp_path,
        config=EVERYTHING,
    )
    assert outcome == []
