"""A certificate authority of one's own, as sites have it, made by the openssl program."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SiteAuthority:
    """The CA's certificate file for clients, and a server context for 127.0.0.1."""

    ca_file: Path
    context: ssl.SSLContext


def site_authority(folder: Path, hosts: str = "IP:127.0.0.1,DNS:localhost") -> SiteAuthority:
    """Make a CA and a certificate for ``hosts`` in ``folder``.

    Raises:
        FileNotFoundError: the openssl program is not installed.
    """
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    cert, key, request = folder / "cert.pem", folder / "cert.key", folder / "cert.csr"
    names = folder / "names.cnf"
    names.write_text(f"subjectAltName={hosts}\n")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    _openssl(f"req -x509 {curve} -days 2 -subj /CN=SiteCA -addext {usage}", keyout=ca_key, out=ca)
    _openssl(f"req {curve} -subj /CN=node", keyout=key, out=request)
    signing = {"in": request, "CA": ca, "CAkey": ca_key, "out": cert, "extfile": names}
    _openssl("x509 -req -CAcreateserial -days 2", **signing)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return SiteAuthority(ca, context)


def _openssl(words: str, **files: Path) -> None:
    command = ["openssl", *words.split()]
    for option, path in files.items():
        command += [f"-{option}", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
