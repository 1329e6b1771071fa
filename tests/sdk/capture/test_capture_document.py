"""Capture documents: their errors, what they change, and that configurations survive them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from watchstep import (
    Bounds,
    Cadence,
    CaptureConfig,
    Collection,
    Hook,
    Snapshots,
    SystemSampling,
    TensorLimits,
    open_run,
)
from watchstep.capture.config import ADAPTIVE, BUILT_IN, PROBES, ROLES
from watchstep.capture.document.document import (
    SMALLEST_TENSOR_MEMORY,
    changes_of,
    config_of,
    document_of,
    document_schema,
    validated,
)
from watchstep.capture.document.files import data_of, from_environment, inline, load, load_data
from watchstep.errors import ConfigError
from watchstep.format.documents import AttemptDocument
from watchstep.format.tensors import MODES

LONG = settings(max_examples=examples(150), deadline=None)
whole = st.integers(0, 2**40)
sizes = st.integers(1, 2**50)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
seconds = st.floats(0, 1e6)
modes = st.lists(st.sampled_from(MODES), unique=True).map(tuple)


@st.composite
def cadences(draw: st.DrawFn, *, adaptive: bool = True) -> Cadence:
    every = draw(st.one_of(st.none(), st.integers(1, 10**6)) if adaptive else st.integers(1, 10**6))
    start = draw(whole)
    stop = draw(st.one_of(st.none(), st.integers(start + 1, 2**41)))
    return Cadence(every, start, stop, tuple(draw(st.lists(whole, max_size=3))), draw(modes))


def parts() -> st.SearchStrategy[tuple[int, int] | None]:
    pairs = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda pair: (pair[0], sum(pair)))
    return st.one_of(st.none(), pairs)


limits = st.builds(
    TensorLimits,
    ring_bytes=st.one_of(st.none(), sizes),
    hour_bytes=st.one_of(st.none(), sizes),
    rows=parts(),
    channels=parts(),
)
patterns = st.one_of(st.none(), st.sampled_from(["", "encoder.*", r"a\.b$", "(x|y)+", "ü"]))
collections = st.builds(
    Collection,
    cadence=st.one_of(st.none(), cadences()),
    modes=st.dictionaries(st.sampled_from(MODES), st.one_of(st.none(), cadences())),
    tensors=st.one_of(st.none(), cadences(adaptive=False), st.just(Cadence(None, steps=(1, 5)))),
    tensor_limits=limits,
    include=patterns,
    exclude=patterns,
    modules=st.lists(texts, max_size=2).map(tuple),
    module_types=st.lists(texts, max_size=2).map(tuple),
    roles=st.lists(st.sampled_from(ROLES), max_size=2, unique=True).map(tuple),
)
NAMES = ("encoder", "my.own", "head_2", "x")
NEVER_SAVED = ("updates", "checksums", "confusion", "not_in_optimizer")


@st.composite
def named(draw: st.DrawFn) -> dict[str, Collection]:
    found = draw(st.dictionaries(st.sampled_from([*BUILT_IN, *NAMES]), collections, max_size=6))
    kept = {name: chosen for name, chosen in CaptureConfig().chosen.items() if draw(st.booleans())}
    return {
        name: replace(chosen, tensors=None) if name in NEVER_SAVED else chosen
        for name, chosen in {**kept, **found}.items()
    }


@st.composite
def samplings(draw: st.DrawFn) -> SystemSampling:
    interval = draw(st.floats(0.01, 100))
    share = draw(st.floats(0, 1, exclude_min=True))
    return SystemSampling(interval, interval + draw(st.floats(0, 100)), share, draw(st.booleans()))


configs = st.builds(
    CaptureConfig,
    collections=named(),
    overhead_budget=st.one_of(st.none(), st.floats(0, 1, exclude_min=True)),
    allowance_seconds=seconds,
    gate=st.booleans(),
    gradients=st.sampled_from(["after_clipping", "before_clipping"]),
    probes=st.lists(st.sampled_from([*PROBES, "inactive_units:1.0", "weight_change:3:0.5"]), max_size=4).map(
        tuple
    ),
    token_values=st.lists(st.integers(-5, 2**40), max_size=3).map(tuple),
    snapshots=st.builds(
        Snapshots, at_gate=st.booleans(), memory_bytes=st.integers(SMALLEST_TENSOR_MEMORY, 2**50)
    ),
    system=st.one_of(st.none(), samplings()),
    bounds=st.builds(
        Bounds, queue_bytes=whole, spill_bytes=whole, flush_seconds=seconds, term_seconds=seconds
    ),
)


@pytest.mark.ci
@given(configs)
@LONG
def test_a_configuration_survives_its_document_as_json_and_as_yaml(config: CaptureConfig) -> None:
    document = document_of(config)
    text = json.dumps(document)
    assert config_of(json.loads(text), "document") == config
    assert config_of(data_of(text, "document.json"), "document") == config
    assert config_of(json.loads(inline(document, "document")), "document") == config
    jsonschema.Draft202012Validator(document_schema()).validate(document)


def test_the_schema_describes_each_key() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for branch in [schema, *schema.get("anyOf", [])]:
            for key, entry in branch.get("properties", {}).items():
                found += [] if entry.get("description") else [f"{path}.{key}"]
                found += undescribed(entry, f"{path}.{key}")
        return found

    schema = document_schema()
    assert undescribed(schema, "") == []
    assert [found for name, entry in schema["$defs"].items() for found in undescribed(entry, name)] == []
    modes = schema["$defs"]["Collection"]["properties"]["modes"]["properties"]
    assert modes["eval"]["description"].startswith("Cadence in mode eval, in forward passes of this mode.")


def test_the_built_in_configuration_is_an_empty_document() -> None:
    assert document_of(CaptureConfig()) == {}
    assert config_of({}, "document") == config_of(None, "document") == CaptureConfig()


def test_a_custom_clock_is_no_part_of_a_document() -> None:
    config = CaptureConfig(clock=lambda: 0.0, overhead_budget=None)
    assert changes_of(config) == {"overhead_budget": None}
    with pytest.raises(ConfigError, match="custom clock"):
        document_of(config)


def test_an_entry_changes_the_fields_that_it_sets() -> None:
    config = config_of(
        {
            "collections": {
                "losses": {"tensors": 100},
                "checksums": {"cadence": {"every": 7, "start": 3}},
                "activations": None,
                "optimizer_state": None,
                "mine": {"roles": ["weight"], "modes": {"eval": 5, "predict": None}},
            },
            "snapshots": {"at_gate": False},
            "system": {"gpus": False},
        },
        "document",
    )
    built_in = CaptureConfig()
    assert config.chosen["losses"] == replace(built_in.chosen["losses"], tensors=Cadence(every=100))
    assert config.chosen["checksums"].cadence == Cadence(every=7, start=3)
    assert "activations" not in config.chosen
    mine = Collection(ADAPTIVE, modes={"eval": Cadence(5), "predict": None}, roles=("weight",))
    assert config.chosen["mine"] == mine
    assert config.snapshots == replace(built_in.snapshots, at_gate=False)
    assert config.system == SystemSampling(gpus=False)
    assert config.chosen["gradients"] == built_in.chosen["gradients"]


@pytest.mark.parametrize(
    ("text", "size"), [("10 GiB", 10 * 1024**3), ("1.5MB", 1_500_000), ("7 B", 7), ("42", 42)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    document = {"collections": {"weights": {"tensors": 5, "tensor_limits": {"ring_bytes": text}}}}
    assert config_of(document, "document").chosen["weights"].tensor_limits.ring_bytes == size


WRONG: dict[str, tuple[Any, str, str]] = {
    "not a mapping": ([1], r"^capture: \[1\] is not a mapping", "a mapping"),
    "unknown key": ({"colections": {}}, "^capture: colections: unknown key", "did you mean collections?"),
    "unknown key of a collection": (
        {"collections": {"a": {"tensor": 1}}},
        "collections.a.tensor: unknown key",
        "did you mean tensors",
    ),
    "unknown key of a cadence": (
        {"collections": {"a": {"cadence": {"evry": 1}}}},
        "collections.a.cadence.evry: unknown key",
        "did you mean every?",
    ),
    "number instead of a collection": (
        {"collections": {"gradients": 10}},
        "collections.gradients: 10 is not a mapping",
        "use {cadence: 10}",
    ),
    "text instead of a collection": (
        {"collections": {"gradients": "often"}},
        'collections.gradients: "often" is not a mapping',
        "use a mapping: keys with values",
    ),
    "cadence instead of a collection": (
        {"collections": {"weights": {"every": 5}}},
        "collections.weights.every: unknown key",
        "use {cadence: {every: 5}}",
    ),
    "steps instead of a collection": (
        {"collections": {"weights": {"steps": [0, 5]}}},
        "collections.weights.steps: unknown key",
        "use {cadence: {steps: [0, 5]}}",
    ),
    "unknown built-in collection": (
        {"collections": {"activation": None}},
        "collections.activation: null, but no built-in collection",
        "did you mean activations?",
    ),
    "similar to a built-in collection": (
        {"collections": {"gradient": {"cadence": 5}}},
        "collections.gradient: collection 'gradient' is not built in and selects nothing",
        "gradients",
    ),
    "unknown role": (
        {"collections": {"a": {"roles": ["weight", "weigth"]}}},
        'collections.a.roles.1: "weigth" is not a role',
        "did you mean weight?",
    ),
    "unknown mode": (
        {"collections": {"a": {"modes": {"evl": 3}}}},
        'collections.a.modes.evl: "evl" is not a mode',
        "did you mean eval?",
    ),
    "unknown mode of a cadence": (
        {"collections": {"a": {"tensors": {"every": 1, "modes": ["trian"]}}}},
        'collections.a.tensors.modes.0: "trian" is not a mode',
        "did you mean train?",
    ),
    "cadence of zero": (
        {"collections": {"encoder": {"include": "e", "tensors": {"every": 0}}}},
        "collections.encoder.tensors.every: 0 is not a whole number from 1",
        "use a number of steps from 1",
    ),
    "cadence of text": (
        {"collections": {"a": {"cadence": "often"}}},
        'collections.a.cadence: "often" is not a mapping',
        "a number for 'every', or a mapping",
    ),
    "cadence of true": ({"collections": {"a": {"cadence": True}}}, "true is not a mapping", "a number"),
    "cadence that is never due": (
        {"collections": {"a": {"cadence": {"start": 5, "stop": 5}}}},
        "collections.a.cadence.stop: 5 is not after start 5",
        "a larger stop",
    ),
    "tensors at no step": (
        {"collections": {"a": {"include": "a", "tensors": {"every": None}}}},
        "collections.a.tensors.every: null without steps",
        "add 'steps'",
    ),
    "tensors that are never saved": (
        {"collections": {"updates": {"tensors": 5}}},
        "collections.updates: .*its tensors are not saved in full",
        "weights or gradients",
    ),
    "pattern": (
        {"collections": {"a": {"include": "a.(*"}}},
        r"collections.a.include: .* is not a valid regular expression \(no argument",
        "RE2 syntax",
    ),
    "limit": (
        {"collections": {"a": {"include": "a", "tensor_limits": {"hour_bytes": 0}}}},
        "collections.a.tensor_limits.hour_bytes: 0 is not a number of bytes from 1",
        "10 GiB",
    ),
    "limit with an unknown unit": (
        {"collections": {"a": {"include": "a", "tensor_limits": {"ring_bytes": "3 gigs"}}}},
        'tensor_limits.ring_bytes: "3 gigs"',
        "10 GiB",
    ),
    "rows": (
        {"collections": {"a": {"include": "a", "tensor_limits": {"rows": [4, 1]}}}},
        r"tensor_limits.rows: \[4, 1\] is not a part",
        "[0, 4]",
    ),
    "memory too small for any tensor": (
        {"collections": {"weights": {"tensors": 5}}, "snapshots": {"memory_bytes": 10}},
        "snapshots.memory_bytes: 10 bytes are too few for any tensor",
        "remove 'tensors'",
    ),
    "budget": ({"overhead_budget": 2}, "overhead_budget: 2 is not a number above 0 up to 1", "use a number"),
    "budget of infinity": ({"overhead_budget": float("inf")}, "overhead_budget: Infinity", "use a number"),
    "flag": ({"gate": "on"}, 'gate: "on" is not true or false', "true or false"),
    "choice": ({"gradients": "clipped"}, 'gradients: "clipped" is not a choice', "after_clipping"),
    "probe": ({"probes": ["channel"]}, 'probes.0: "channel" is not a probe', "did you mean channels"),
    "arguments of a probe": ({"probes": ["inactive_units:a"]}, "probes.0: .*invalid arguments", "float"),
    "system": ({"system": {"seconds": 30.0, "row_seconds": 1.0}}, "system: invalid SystemSampling", "rows"),
    "name of a collection that is saved": (
        {"collections": {"a/b": {"include": "a", "tensors": 5}}},
        "collections.a/b: ",
        "",
    ),
    "list": ({"collections": {"a": {"modules": "encoder"}}}, 'modules: "encoder" is not a list', "[encoder"),
    "keys that are numbers": ({"collections": {7: {}}}, "collections.7: the name 7 is not text", "quotes"),
    "list instead of a mode": (
        {"collections": {"a": {"tensors": {"every": 1, "modes": [["eval"]]}}}},
        "modes.0: .* is not a mode",
        "did you mean eval?",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_path_value_and_hint(name: str) -> None:
    document, message, hint = WRONG[name]
    with pytest.raises(ConfigError, match=message) as refused:
        config_of(document, "capture")
    assert hint in refused.value.hint
    assert len(str(refused.value)) < 1000


def test_all_errors_are_found_at_once() -> None:
    document = {"gate": 1, "collections": {"a": {"roles": ["x", "y"], "cadence": 0}}, "probes": 7}
    config, problems = validated(document)
    assert config is None
    assert [problem.path for problem in problems] == [
        "gate",
        "collections.a.roles.0",
        "collections.a.roles.1",
        "collections.a.cadence.every",
        "probes",
    ]
    with pytest.raises(ConfigError, match=r"\(and 4 more: 'watchstep check-config FILE' lists all\)"):
        config_of(document, "capture")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["collections", "cadence", "tensors", "every", "modes", "system", "a"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@given(json_values)
@LONG
def test_any_data_is_a_configuration_or_has_problems(data: Any) -> None:
    config, problems = validated(data)
    assert (config is None) == bool(problems)
    if config is not None:
        assert document_of(config) is not None


def test_yaml_files_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "capture.yaml"
    path.write_text("overhead_budget: 1e-3\ncollections:\n  head: {include: 'head.*', tensors: 10}\n")
    config = load(path)
    assert (config.overhead_budget, config.chosen["head"].tensors) == (1e-3, Cadence(every=10))
    for text, message in (
        ("gate: true\ngate: false\n", "duplicate key 'gate'"),
        ('{"gate": true, "gate": false}', "duplicate key 'gate'"),
        ("collections: [\n", r"line \d+: not valid YAML"),
        ("a: !!python/object:os.system {}\n", "not valid YAML"),
        ("gate: 2026-99-99\n", "not valid YAML|gate: "),
        ("[" * 100_000, "nested too deeply|not valid YAML"),
        ("gate: perhaps\n", f'capture file {path}: gate: "perhaps" is not true or false'),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "capture.json").write_text("{'gate': true}")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(tmp_path / "capture.json")


def test_json_needs_no_yaml_package_and_yaml_says_that_it_does(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"gate": false}')
    (tmp_path / "c.yaml").write_text("gate: false\n")
    program = (
        "import sys; sys.modules['yaml'] = None\n"
        "from watchstep.capture.document.files import load\n"
        "print(load('c.json').gate)\nload('c.yaml')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n"
    assert "capture file c.yaml: not JSON, and PyYAML" in done.stderr
    assert "pip install pyyaml" in done.stderr


def test_the_environment_names_a_file_or_contains_json(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("gate: false\n")
    assert from_environment({}) is None
    for text in (str(path), ' {"gate": false}'):
        config = from_environment({"WATCHSTEP_CAPTURE": text})
        assert config is not None
        assert not config.gate
    with pytest.raises(ConfigError, match=r"^WATCHSTEP_CAPTURE: gate: 1 is not"):
        from_environment({"WATCHSTEP_CAPTURE": '{"gate": 1}'})
    with pytest.raises(ConfigError, match=r"^WATCHSTEP_CAPTURE: capture file missing.yaml: No such file"):
        from_environment({"WATCHSTEP_CAPTURE": "missing.yaml"})


def test_a_document_for_the_environment_is_short_and_expands_nowhere() -> None:
    document = {"collections": {"a": {"include": "x$(HOME)$"}}}
    text = inline(document, "document")
    assert "$" not in text
    assert "\n" not in text
    assert json.loads(text) == document
    many = {"collections": {f"c{number}": {"include": "x" * 100} for number in range(2000)}}
    with pytest.raises(ConfigError, match="more than the 100000 that a variable can hold"):
        inline(many, "document")


def test_a_hook_takes_a_file_and_the_program_precedes_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("overhead_budget: 0.25\n")
    monkeypatch.setenv("WATCHSTEP_CAPTURE", '{"overhead_budget": 0.5, "gate": false}')
    monkeypatch.delenv("WATCHSTEP_OVERHEAD_BUDGET", raising=False)

    def recorded(**arguments: Any) -> CaptureConfig:
        with Hook(tmp_path / "runs", **arguments) as hook:
            return hook.config

    assert (recorded().overhead_budget, recorded().gate) == (0.5, False)
    assert (recorded(config=path).overhead_budget, recorded(config=path).gate) == (0.25, True)
    assert recorded(config=str(path)).overhead_budget == 0.25
    assert recorded(config=CaptureConfig()).overhead_budget == 0.01
    assert recorded(overhead_budget=0.75).overhead_budget == 0.75
    monkeypatch.setenv("WATCHSTEP_OVERHEAD_BUDGET", "0.125")
    assert recorded().overhead_budget == 0.125
    assert recorded(config=path).overhead_budget == 0.25


@pytest.mark.parametrize("config", [7, {"gate": True}, b"c.yaml"])
def test_a_hook_refuses_another_configuration(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigError, match="invalid config="):
        Hook(tmp_path, config=config)


@pytest.mark.ci
def test_the_document_of_an_attempt_stays_small_enough_to_be_read(tmp_path: Path) -> None:
    many = {f"c{number}": Collection(include="x" * 100) for number in range(2000)}
    few = {"head": Collection(include="head", tensors=Cadence(every=5))}
    built_in = CaptureConfig().chosen
    for name, chosen in (("many", many), ("few", few)):
        with Hook(tmp_path, run=name, config=CaptureConfig({**built_in, **chosen})) as hook:
            hook.log(loss=1.0)
        assert [end.state for end in open_run(hook.run_url).ends()] == ["completed"]
        (path,) = (tmp_path / "default" / name / "attempts").iterdir()
        document = AttemptDocument(**json.loads(path.read_text()))
        assert path.stat().st_size < 65536
        expected = (
            {} if name == "many" else {"collections": {"head": {"include": "head", "tensors": {"every": 5}}}}
        )
        assert document.config == expected


def test_merge_keys_cannot_make_a_small_file_large(tmp_path: Path) -> None:
    keys = "".join(f"  k{number}: 0\n" for number in range(500))
    merges = "".join(f"- {{<<: *a, x{number}: 1}}\n" for number in range(500))
    file = tmp_path / "capture.yaml"
    file.write_text(f"a: &a\n{keys}b:\n{merges}", encoding="utf-8")
    with pytest.raises(ConfigError, match="aliases expand to more than"):
        load_data(file)


def test_a_large_document_is_refused_before_it_is_validated() -> None:
    document = {"collections": [{"name": "a" * 100, "nonsense": number} for number in range(30_000)]}
    with pytest.raises(ConfigError, match="bytes as JSON"):
        inline(document, "document")
