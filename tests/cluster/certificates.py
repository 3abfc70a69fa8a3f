"""Certificates for tests, made by openssl because the standard library cannot make them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from banksman.testing.nats_servers import Tls

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def certificate(folder: Path, name: str = "server") -> Tls:
    """Return a self-signed certificate for 127.0.0.1.

    It serves as a server's, as a client's, and as the authority that either is checked by.
    """
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return Tls(str(cert), str(key))
