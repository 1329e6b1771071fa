"""Where the default of each parameter comes from, of rules that judge by default: the table in ``rules.md``.

A rule's docstring has the formula and the argument; here is a line of it. *Ours* is a choice of this project, with what
it rests on.
"""

from __future__ import annotations

SOURCES: dict[str, dict[str, str]] = {
    "nan_or_inf": {
        "steps_without_update": "ours: three times the skips with which a gradient scaler comes down from 2^16",
    },
    "non_finite_values": {
        "max_elements": "SageMaker's ExplodingTensor: one is enough",
        "only_nan": "SageMaker's ExplodingTensor",
        "allow_infinity_in": "ours: masks and log-probabilities hold infinity on purpose",
        "judge_inputs": "ours: a model may fill gaps in its data",
        "whole_steps": "ours; by default yes, so that `nan_or_inf` keeps it quiet",
    },
    "exploding_gradient": {
        "growth": "ours: more than clipping at 1 or a restart of the rate makes (after Pascanu et al. 2013)",
        "window": "ours: twenty records, so that the median follows a layer and not a batch",
        "warmup": "ours: norms settle within the first records",
        "loss_growth": "ours: a saddle that is left lets the loss fall, a divergence does not",
        "overwrites": "ours: an update as large as its weight; SageMaker's WeightUpdateRatio holds 10 for large",
    },
    "vanishing_gradient": {
        "threshold": "SageMaker's VanishingGradient",
        "relative": "AutoTrainer (Zhang et al., ICSE 2021): ratio of the first to the last layer",
        "converged": "ours: a classifier that is nearly always right and sure; AutoTrainer asks for its accuracy",
        "settling": "ours: queries and keys of attention begin with hardly any gradient; sizes near the limit wait",
        "min_dimensions": "by construction: gradients of biases before normalisation are zero",
    },
    "dead_relu": {
        "share": "ours: healthy sparse networks reach 0.8 (Glorot, Bordes and Bengio 2011); SageMaker has 0.5",
        "silent_share": "SageMaker's DeadRelu, here only where no weight has a gradient",
        "steps": "ours: not one batch alone",
        "examples": "ours: small batches must agree over 32 values of each channel",
        "converged": "ours: a loss down to a tenth has nothing left to learn",
    },
    "saturated_activation": {
        "slope": "ours: a tenth of the gradient passes (after Glorot and Bengio 2010)",
        "share": "SageMaker's SaturatedActivation: half of the nodes",
        "steps": "ours: not one batch alone",
        "examples": "ours: small batches must agree over 32 values of each channel",
        "converged": "ours: units that become switches while the loss halves are what the network learnt",
        "stuck": "ours: the output of a classifier that is sure lies at a bound too, and a loss with smoothed labels may never halve",
    },
    "poor_initialization": {
        "large": "ours: twice what keeps a signal's size (1.41, He et al. 2015) and more",
        "growth": "ours: a signal that grows tenfold through the large layers",
        "small": "ours: a sixth of PyTorch's own gain of 0.58",
        "shrinkage": "ours: a thousandth of the signal is left",
        "spread": "ours: SageMaker's PoorWeightInitialization has 10 in variances, which default weights reach",
        "above_guess": "ours, after Karpathy (A Recipe for Training Neural Networks, 2019): the first loss is a guess's",
    },
    "weight_not_updating": {
        "threshold": "SageMaker's WeightUpdateRatio",
        "rounded": "ours: a hundredth of the elements that change is as good as none",
        "patience": "ours: so many records at a rate of nothing are no end of a schedule",
        "ran_down": "ours: a thousandth of what trainings that work take (Karpathy 2019)",
        "alive": "ours: below a thousandth of its largest a gradient has converged",
    },
    "class_imbalance": {
        "ratio": "SageMaker's ClassImbalance",
        "deviations": "three standard deviations of a count's root (Anscombe 1948)",
        "misprediction": "not judged by default; SageMaker's ClassImbalance has 0.7",
        "examples": "ours: with fewer a share says little",
    },
    "loss_not_decreasing": {
        "patience": "ours: longer than plateaus of small networks; lengthen it with your warm-up",
        "warmup": "ours: the median of ten losses, so that no single batch is the start",
        "min_fall": "ours: half of what separates a network that shifts its output's bias from one that uses its input",
        "growth": "ours: twice its start is no noise",
        "far": "ours: one easy batch at first is not a tenth of what follows",
        "certainty": "ours: by simulation, few losses that fall by 2 to 5 % in some hundred steps are taken to stay",
    },
    "slow_convergence": {
        "patience": "as of `loss_not_decreasing`",
        "warmup": "as of `loss_not_decreasing`",
        "max_fall": "ours: in a hundred steps trainings that work have come further",
        "small_update": "ours: half of the 1e-3 that trainings that work take (Karpathy 2019)",
        "modest_update": "ours: twice that, where the loss falls steadily",
    },
    "oscillating_loss": {
        "window": "ours: eight swings of five losses",
        "swing": "ours: more than batches scatter around what the model is worth",
        "above_labels": "ours: a model is worth more than saying the same for every example",
        "above_first": "ours: without labels the start is a poorer measure, so it must be much more",
        "alternation": "ours: independent losses have 1/sqrt(40) = 0.16; 0.7 is more than four times that",
    },
    "overfit": {
        "patience": "ours, after Prechelt (Early stopping, but when?, 1998)",
        "rise": "ours: twice SageMaker's ratio of 0.1",
        "of_first": "ours: close to zero a few doubtful examples double a loss",
        "train_fall": "ours: the textbook's sign (Goodfellow et al. 2016, 7.8) is that training goes on falling",
        "window": "ours: the mean of twenty batches",
    },
    "loss_spike": {
        "window": "ours: so many losses before it say where the loss was",
        "lasting": "ours: one odd batch does not last",
        "exploded": "ours: what is ten times its beginning needs no more",
        "deviations": "ours: at 6, twice as many sound trainings are reported (decision 124); Hampel 1974 takes three for outliers",
        "rise": "ours: twice its level is no noise",
        "of_first": "ours: nearly back where it began, as a guess may be below the first losses; PaLM's spikes (2022) are less",
        "far": "as of `loss_not_decreasing`",
    },
    "lost_progress": {
        "window": "ours: the mean of twenty batches",
        "warmup": "as of `loss_not_decreasing`",
        "fallen": "ours: half of the loss was learnt",
        "back": "ours: a guess may begin somewhat above what a constant gives",
        "lasting": "ours: or as long as it took to learn at first",
    },
    "validation_loss_jump": {
        "window": "ours: enough to say where the loss was, and few enough for a run of ten evaluations",
        "lasting": "ours: a spike of a healthy recurrent network took two; or as many as it took to learn at first",
        "warmup": "ours: two of them say how the loss scatters",
        "fallen": "as of `lost_progress`",
        "rise": "ours: of 786 healthy trainings, high rates, restarts of the rate and batches of one among them, 25 came so far, for two evaluations at most",
        "of_first": "ours: a loss close to zero may be many times its level and still be learned",
        "falls": "ours: a recovery falls by more from evaluation to evaluation",
    },
    "scaler_skips": {
        "skips": "`torch.amp.GradScaler`: 17 halvings bring its first scale, 2^16, below one",
        "window": "ours: a twentieth of the 2000 good steps after which it doubles the scale",
    },
    "frozen_batch_norm": {
        "records": "ours: not one batch alone",
        "batches": "ours: running statistics move at the first batch, unless their momentum is zero",
        "drift": "ours: three times what layers before it that learn on make of it in healthy fine-tuning (3.5)",
    },
    "running_statistics_frozen": {
        "records": "as of `frozen_batch_norm`",
    },
    "starved_expert": {
        "records": "ours: with 64 experts of equal share, 50 batches of 32 examples leave one out by chance in about one of 10^9 windows",
    },
    "symmetric_units": {
        "share": "ours: between what rounding parts (1e-6) and what learning parts (1)",
        "records": "ours: not one update alone",
    },
    "optimizer_not_stepping": {
        "passes": "ours: an accumulation of so many micro-batches does not begin in the middle of a run",
    },
    "missing_zero_grad": {
        "records": "ours: two or three steps on one gradient may be on purpose",
    },
    "unlike_earlier_runs": {
        "baseline": "from the project's earlier runs",
        "min_magnitude": "ours: far below what float32 training distinguishes from zero",
    },
    "absent_from_optimizer": {
        "records": "ours: 75 steps, for what moves seldom",
        "strict": "ours: a head that is trained alone is no fault",
    },
    "gradients_cease": {
        "records": "ours: chance takes a layer at one step, not the first ones at four",
        "warmup": "ours: what was there at eight records is no matter of chance",
    },
    "hyperparameter_jump": {
        "factor": "ours: a decade; an alarm needs harm besides",
        "warmup": "ours: as many losses as a robust spread needs",
        "patience": "ours: a weight decay of 1 at a rate of 1e-3 takes a third of a weight in 400 steps",
        "deviations": "Hampel 1974; 8 of 10 losses above three deviations are no noise",
        "rise": "ours: a fifth",
        "large": "Karpathy 2015 and 2019: 1e-3 is usual; ours: two and a half decades above",
        "shrunk": "ours: a third",
    },
}
"""By rule and parameter."""
