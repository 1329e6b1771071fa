"""Every Amazon rule accepts all of Amazon's parameters with their defaults, as documented."""

from __future__ import annotations

import pytest

from docs import tables
from watchstep_rules.registry import RULES
from watchstep_rules.rule_files.presets import AMAZONS_RULES, AmazonsRule

SCOPE: dict[str, object] = {"collection_names": None, "tensor_regex": None}
SCAN: dict[str, object] = {"scan_interval_us": 60_000_000}
DOCUMENTED: dict[str, dict[str, object]] = {
    "VanishingGradient": {"threshold": 1e-7},
    "ExplodingTensor": {**SCOPE, "only_nan": False},
    "PoorWeightInitialization": {
        "activation_inputs_regex": ".*relu_input",
        "threshold": 10,
        "distribution_range": 0.001,
        "patience": 5,
        "steps": 10,
    },
    "SaturatedActivation": {
        "collection_names": None,
        "tensor_regex": ".*tanh_input|.*sigmoid_input",
        "threshold_tanh_min": -9.4999,
        "threshold_tanh_max": 9.4999,
        "threshold_sigmoid_min": -23,
        "threshold_sigmoid_max": 16.99999,
        "threshold_inactivity": 1.0,
        "threshold_layer": 50,
    },
    "DeadRelu": {"tensor_regex": ".*relu_output", "threshold_inactivity": 1.0, "threshold_layer": 50},
    "WeightUpdateRatio": {"num_steps": None, "large_threshold": 10, "small_threshold": 1e-8, "epsilon": 1e-9},
    "AllZero": {**SCOPE, "threshold": 100},
    "UnchangedTensor": {**SCOPE, "num_steps": 3, "rtol": 1e-5, "atol": 1e-8, "equal_nan": False},
    "TensorVariance": {**SCOPE, "max_threshold": None, "min_threshold": None},
    "LossNotDecreasing": {
        **SCOPE,
        "use_losses_collection": True,
        "num_steps": 10,
        "diff_percent": 0.1,
        "increase_threshold_percent": 5,
        "mode": None,
    },
    "Overfit": {"tensor_regex": None, "start_step": 0, "patience": 1, "ratio_threshold": 0.1},
    "Overtraining": {"patience_train": 5, "patience_validation": 10, "delta": 0.01},
    "SimilarAcrossRuns": {**SCOPE, "other_trials": "required"},
    "StalledTrainingRule": {
        "threshold": 1800,
        "stop_training_on_fire": False,
        "training_job_name_prefix": "",
    },
    "ClassImbalance": {
        "threshold_imbalance": 10,
        "threshold_misprediction": 0.7,
        "samples": 500,
        "argmax": False,
        "labels_regex": (".*labels",),
        "predictions_regex": (".*predictions",),
    },
    "Confusion": {
        "category_no": None,
        "labels": "labels",
        "predictions": "predictions",
        "labels_collection": "labels",
        "predictions_collection": "predictions",
        "min_diag": 0.9,
        "max_off_diag": 0.1,
    },
    "CheckInputImages": {
        "threshold_mean": 0.2,
        "threshold_samples": 500,
        "regex": ".*hybridsequential0_input_0",
        "channel": 1,
    },
    "NLPSequenceRatio": {
        "tensor_regex": ".*embedding0_input_0",
        "token_values": (0,),
        "token_thresholds_percent": (50, 50),
    },
    "TreeDepth": {"depth": 4},
    "FeatureImportanceOverweight": {
        "threshold": 0.8,
        "nfeatures": 3,
        "tensor_regex": (".*feature_importance/weight",),
    },
    "CreateXgboostReport": {},
    "BatchSize": {
        "cpu_threshold_p95": 70,
        "gpu_threshold_p95": 70,
        "gpu_memory_threshold_p95": 70,
        "patience": 1000,
        "window": 500,
        **SCAN,
    },
    "CPUBottleneck": {"threshold": 50, "gpu_threshold": 10, "cpu_threshold": 90, "patience": 1000, **SCAN},
    "IOBottleneck": {"threshold": 50, "gpu_threshold": 10, "io_threshold": 50, "patience": 1000, **SCAN},
    "LowGPUUtilization": {"threshold_p95": 70, "threshold_p5": 10, "window": 500, "patience": 1000, **SCAN},
    "GPUMemoryIncrease": {"increase": 5, "patience": 1000, "window": 10, **SCAN},
    "LoadBalancing": {"threshold": 0.5, "patience": 1000, **SCAN},
    "StepOutlier": {"stddev": 3, "mode": None, "n_outliers": 10, **SCAN},
    "MaxInitializationTime": {"threshold": 20, **SCAN},
    "Dataloader": {"min_threshold": 70, "max_threshold": 200, **SCAN},
    "OverallSystemUsage": SCAN,
    "OverallFrameworkMetrics": SCAN,
    "ProfilerReport": {"opt_out_telemetry": False},
}
"""Parameters and defaults, by the developer guide and smdebug-rulesconfig."""

REPORTED = (
    "BatchSize", "CPUBottleneck", "Dataloader", "GPUMemoryIncrease", "IOBottleneck", "LoadBalancing", "LowGPUUtilization",
    "MaxInitializationTime", "StepOutlier",
)  # fmt: skip
DOCUMENTED["ProfilerReport"] |= {
    f"{rule}_{name}": default for rule in REPORTED for name, default in DOCUMENTED[rule].items()
}

BY_TYPE = {
    ("PoorWeightInitialization", "activation_inputs_regex"),
    ("SaturatedActivation", "tensor_regex"),
    ("DeadRelu", "tensor_regex"),
    ("CheckInputImages", "regex"),
    ("NLPSequenceRatio", "tensor_regex"),
}
"""Where Amazon's default is an expression that hopes for a name, and here layers are found by type."""


def test_all_33_are_there_each_once_and_no_rule_is_forgotten() -> None:
    assert [amazons_rule.name for amazons_rule in AMAZONS_RULES] == list(DOCUMENTED)
    assert len(DOCUMENTED) == 33
    assert {amazons_rule.rule for amazons_rule in AMAZONS_RULES} == {
        name for name in RULES if name.startswith("sagemaker_")
    }


OWN = {
    "SimilarAcrossRuns": {"reference", "elementwise", "save_interval"},
    "UnchangedTensor": {"full_tensors", "save_interval"},
    "WeightUpdateRatio": {"full_tensors", "save_interval"},
}
"""Parameters that Amazon's rules do not have: what is stored when an attempt begins, and full tensors."""


@pytest.mark.parametrize("amazons_rule", AMAZONS_RULES, ids=lambda amazons_rule: amazons_rule.name)
def test_parameters_and_defaults_are_amazons(amazons_rule: AmazonsRule) -> None:
    fields = amazons_rule.implementation.params_type.model_fields
    documented, own = DOCUMENTED[amazons_rule.name], OWN.get(amazons_rule.name, set())
    assert fields.keys() == documented.keys() | own
    assert all(field.description for field in fields.values())
    for name, field in fields.items():
        if name in own:
            assert field.default in ({}, False, 500)
            continue
        if (amazons_rule.name, name) in BY_TYPE:
            assert field.default is None
            assert "found by" in amazons_rule.how
        elif documented[name] != "required":
            assert field.default == documented[name]


def test_the_table_in_the_docs_says_of_each_what_it_takes_and_whether_it_differs() -> None:
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in tables.sagemaker().splitlines()[2:]}
    page = (tables.FOLDER / "guides" / "rules-sagemaker.md").read_text(encoding="utf-8")
    assert tables.sagemaker() in page
    for amazons_rule in AMAZONS_RULES:
        row = rows[amazons_rule.name]
        assert all(f"`{name}`" in row for name in DOCUMENTED[amazons_rule.name])
        assert ("*differs*" in row) is (amazons_rule.agreement == "differs")
