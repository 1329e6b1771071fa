"""Credentials of a process that runs inside of the cluster: a token and a certificate in files."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubernetes.config import incluster_config

from tests.launch.backends.kubernetes.double import TOKEN, running_double
from watchstep_launch.backend import BackendDownError
from watchstep_launch.backends.kubernetes.backend import Kubernetes


def certificate(folder: Path) -> Path:
    """Key and certificate of 127.0.0.1, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "double")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "certificate.pem"
    file.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return file


def test_a_service_inside_of_the_cluster_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, token = certificate(tmp_path), tmp_path / "token"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(file))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with running_double(context) as double:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", double.url.rpartition(":")[2])
        with pytest.raises(BackendDownError, match="no cluster is configured"):
            Kubernetes().jobs()
        token.write_text(TOKEN)
        assert Kubernetes().jobs() == []
        (tmp_path / "another").mkdir()
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate(tmp_path / "another")))
        with pytest.raises(BackendDownError, match=r"(?i)certificate"):
            Kubernetes().jobs()
