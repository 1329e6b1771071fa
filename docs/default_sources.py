"""Sources of the default parameters of the default rules, for the table in ``rules.md``.

Each source is one line. The docstring of the rule contains the formula and the argument. *Ours* marks a choice of this project, and is
followed by its reason.
"""

from __future__ import annotations

SOURCES: dict[str, dict[str, str]] = {
    "nan_or_inf": {
        "steps_without_update": "ours: three times the skips that a gradient scaler needs to come down from 2^16",
    },
    "non_finite_values": {
        "max_elements": "SageMaker's ExplodingTensor: one is enough",
        "only_nan": "SageMaker's ExplodingTensor",
        "allow_infinity_in": "ours: masks and log-probabilities contain infinity by design",
        "judge_inputs": "ours: a model may fill gaps in its data itself",
        "whole_steps": "ours: on by default, so that `nan_or_inf` can inhibit the rule",
    },
    "exploding_gradient": {
        "growth": "ours: above the growth that clipping at 1 or a learning rate restart causes (after Pascanu et al. 2013)",
        "window": "ours: the median of twenty records follows the layer, not single batches",
        "warmup": "ours: norms settle within the first records",
        "loss_growth": "ours: the loss falls after a saddle point, and does not fall in a divergence",
        "overwrites": "ours: an update as large as its weight; SageMaker's WeightUpdateRatio uses 10",
    },
    "vanishing_gradient": {
        "starved": "ours: a discriminator is far ahead at times, at the start of healthy trainings",
        "threshold": "SageMaker's VanishingGradient",
        "relative": "AutoTrainer (Zhang et al., ICSE 2021): ratio of the first to the last layer",
        "converged": "ours: the loss of a classifier that is almost always right and certain; AutoTrainer uses its accuracy",
        "settling": "ours: queries and keys of attention begin with very small gradients; until then they must be below a tenth of the threshold",
        "min_dimensions": "by construction: gradients of biases before a normalization are zero",
    },
    "dead_relu": {
        "share": "ours: healthy sparse networks reach 0.8 (Glorot, Bordes and Bengio 2011); SageMaker has 0.5",
        "silent_share": "SageMaker's DeadRelu, here only for layers without a nonzero weight gradient",
        "steps": "ours: a single batch is not sufficient",
        "examples": "ours: small batches must agree over 32 values of each channel",
        "converged": "ours: at a tenth of the first loss, little is left to learn",
    },
    "saturated_activation": {
        "slope": "ours: a tenth of the gradient passes (after Glorot and Bengio 2010)",
        "share": "SageMaker's SaturatedActivation: half of the nodes",
        "steps": "ours: a single batch is not sufficient",
        "examples": "ours: small batches must agree over 32 values of each channel",
        "converged": "ours: units that saturate while the loss halves are what the network learned",
        "stuck": "ours: the output of a certain classifier is at a bound too, and a loss with smoothed labels may never halve",
    },
    "poor_initialization": {
        "large": "ours: more than twice the gain that preserves a signal (1.41, He et al. 2015)",
        "growth": "ours: a signal that grows tenfold through the layers with large weights",
        "small": "ours: a sixth of PyTorch's default gain of 0.58",
        "shrinkage": "ours: a thousandth of the signal remains",
        "spread": "ours: SageMaker's PoorWeightInitialization uses a ratio of variances of 10, which default weights exceed",
        "above_guess": "ours, after Karpathy (A Recipe for Training Neural Networks, 2019): the first loss is that of a guess",
    },
    "weight_not_updating": {
        "threshold": "SageMaker's WeightUpdateRatio",
        "rounded": "ours: if only a hundredth of the elements changes, the update has no effect",
        "patience": "ours: a schedule does not end with this many records at a learning rate of zero",
        "ran_down": "ours: a thousandth of the usual update ratio of healthy trainings (Karpathy 2019)",
        "alive": "ours: a gradient below a thousandth of its largest value has converged",
    },
    "class_imbalance": {
        "ratio": "SageMaker's ClassImbalance",
        "deviations": "three standard deviations of the square root of a count (Anscombe 1948)",
        "misprediction": "off by default; SageMaker's ClassImbalance uses 0.7",
        "examples": "ours: the share of fewer examples is not reliable",
    },
    "invalid_objective": {
        "fall": "ours: a loss that is never below zero has no reason to reach twice its first magnitude below it",
        "rise": "ours: a classifier's first losses are those of a guess; three times as much is worse than any guess",
        "endless": "ours: gains and log-likelihoods do not grow a thousandfold, and exponentially",
    },
    "loss_not_decreasing": {
        "patience": "ours: longer than plateaus of small networks; increase it with a longer learning rate warm-up",
        "warmup": "ours: the median of ten losses does not depend on a single batch",
        "min_fall": "ours: half of the difference between a network that only shifts its output's bias and one that uses its input",
        "growth": "ours: noise does not double the first loss",
        "far": "ours: the loss of an easy first batch is more than a tenth of the later losses",
        "certainty": "ours: in simulations, few losses that fall by 2 to 5 % in some hundred steps are classified as constant",
    },
    "slow_convergence": {
        "patience": "as in `loss_not_decreasing`",
        "warmup": "as in `loss_not_decreasing`",
        "max_fall": "ours: the loss of healthy trainings falls further in a hundred steps",
        "small_update": "ours: half of the usual 1e-3 of healthy trainings (Karpathy 2019)",
        "modest_update": "ours: twice the usual 1e-3, if the loss falls steadily",
    },
    "oscillating_loss": {
        "window": "ours: eight swings of five losses",
        "swing": "ours: above the scatter of single batches around the model's loss",
        "above_labels": "ours: a useful model has a lower loss than a constant prediction",
        "above_first": "ours: without labels the first loss is a less reliable reference, so the factor is larger",
        "alternation": "ours: independent losses have 1/sqrt(40) = 0.16; 0.7 is more than four times that value",
    },
    "overfit": {
        "patience": "ours, after Prechelt (Early stopping, but when?, 1998)",
        "rise": "ours: twice SageMaker's ratio of 0.1",
        "of_first": "ours: close to zero, a few ambiguous examples double a loss",
        "train_fall": "ours: in the textbook's definition (Goodfellow et al. 2016, 7.8) the training loss continues to fall",
        "window": "ours: the mean of twenty batches",
    },
    "loss_spike": {
        "window": "ours: this many earlier losses define the level of the loss",
        "lasting": "ours: a single unusual batch does not last",
        "exploded": "ours: ten times the first loss needs no further evidence",
        "deviations": "ours: at 6, twice as many healthy trainings are reported (decision 124); Hampel 1974 uses three for outliers",
        "rise": "ours: noise does not double the level",
        "of_first": "ours: almost back at the first losses, because a guess may be below them; PaLM's spikes (2022) are smaller",
        "far": "as in `loss_not_decreasing`",
    },
    "lost_progress": {
        "window": "ours: the mean of twenty batches",
        "warmup": "as in `loss_not_decreasing`",
        "fallen": "ours: a loss that has halved shows progress",
        "back": "ours: the first loss may be slightly above that of a constant prediction",
        "lasting": "ours: or as long as the first fall of the loss took",
    },
    "validation_loss_jump": {
        "window": "ours: enough to define the level of the loss, and few enough for a run of ten evaluations",
        "lasting": "ours: a spike of a healthy recurrent network lasted two; or as many as the first fall of the loss took",
        "warmup": "ours: two of them define the scatter of the loss",
        "fallen": "as in `lost_progress`",
        "rise": "ours: 25 of 786 healthy trainings exceeded it, for at most two evaluations; they include high learning rates, restarts and batches of one",
        "of_first": "ours: a loss close to zero may rise to many times its level without a loss of what was learned",
        "falls": "ours: in a recovery the loss falls by more between two evaluations",
    },
    "scaler_skips": {
        "skips": "`torch.amp.GradScaler`: 17 halvings bring its first scale, 2^16, below one",
        "window": "ours: a twentieth of the 2000 good steps after which it doubles the scale",
    },
    "frozen_batch_norm": {
        "records": "ours: a single batch is not sufficient",
        "batches": "ours: running statistics change at the first batch, unless their momentum is zero",
        "drift": "ours: three times the drift that trainable layers before it cause in healthy fine-tuning (3.5)",
    },
    "running_statistics_frozen": {
        "records": "as in `frozen_batch_norm`",
    },
    "starved_expert": {
        "records": "ours: with 64 experts of equal share, 50 batches of 32 examples omit one by chance in about one of 10^9 windows",
    },
    "representation_collapse": {
        "share": "ours: a fifth of the smallest share that lasts in healthy trainings of embeddings (0.005)",
        "records": "ours: a single batch is not sufficient",
        "steps": "ours: embeddings contract at the start of a training with hard negatives, and spread afterwards",
        "features": "ours: outputs with fewer are values and scores, which may be constant",
    },
    "symmetric_units": {
        "share": "ours: between differences by rounding (1e-6) and by learning (1)",
        "records": "ours: a single update is not sufficient",
    },
    "optimizer_not_stepping": {
        "passes": "ours: an accumulation of this many micro-batches does not begin in the middle of a run",
    },
    "missing_zero_grad": {
        "records": "ours: two or three steps with one gradient may be intentional",
    },
    "training_hangs": {
        "seconds": "ours: an evaluation or a checkpoint moves; a single call of this length seldom returns",
    },
    "recompute_mismatch": {
        "difference": "ours: ten times the resolution of bfloat16; other dropout masks differ by about 1",
        "records": "ours: a single difference may be an accident of a device",
    },
    "unlike_earlier_runs": {
        "baseline": "from the project's earlier runs",
        "min_magnitude": "ours: far below the smallest value that float32 training distinguishes from zero",
    },
    "absent_from_optimizer": {
        "records": "ours: 75 steps, for weights that change rarely",
        "strict": "ours: training only a head is not a fault",
    },
    "gradients_cease": {
        "records": "ours: by chance a layer has no gradient at one step, but not the first layers at four steps",
        "warmup": "ours: a gradient in eight records is not there by chance",
    },
    "resume_mismatch": {
        "factor": "ours: above the change of a schedule within the ten steps of a loose match, below a decade of a decayed rate",
        "scale": "ours: three halvings, which a scaler makes within some steps",
        "losses": "ours: a median that two odd batches do not move",
        "deviations": "Hampel 1974: three are unusual; ours: twice that, because other batches follow",
        "rise": "ours: half",
        "reference": "set when an attempt begins",
    },
    "hyperparameter_jump": {
        "factor": "ours: a factor of ten; an alert also requires damage",
        "warmup": "ours: the number of losses that a robust spread needs",
        "patience": "ours: a weight decay of 1 at a learning rate of 1e-3 reduces a weight by a third in 400 steps",
        "deviations": "Hampel 1974; 8 of 10 losses above three deviations are not noise",
        "rise": "ours: a fifth",
        "large": "Karpathy 2015 and 2019: 1e-3 is usual; ours: two and a half decades above",
        "shrunk": "ours: a third",
    },
}
"""By rule and parameter."""
