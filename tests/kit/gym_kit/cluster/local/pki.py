"""Keys and certificates of one cluster, made by openssl for each start and thrown away with it.

Elliptic-curve keys: seven of them take a fraction of a second, RSA keys would take seconds on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_kit.run import run

DAYS = "3650"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """`names` are subjectAltName entries such as `DNS:localhost`; a certificate without any is a client's."""

    file: str
    common_name: str
    organization: str
    names: tuple[str, ...] = ()


def extension_file(certificate: Certificate) -> str:
    """The x509 extensions in openssl's configuration syntax."""
    if certificate.names:
        return f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={','.join(certificate.names)}\n"
    return "extendedKeyUsage=clientAuth\n"


def make(folder: Path, certificates: Sequence[Certificate]) -> None:
    """Writes ca.crt, ca.key, sa.key, sa.pub and a .crt and .key for each certificate into `folder`."""
    folder.mkdir(mode=0o700, parents=True)
    # A configuration of our own: distributions add extensions in theirs, and doubled ones are refused.
    (folder / "ca.cnf").write_text(
        "[req]\ndistinguished_name=name\nx509_extensions=ca\n[name]\n[ca]\nbasicConstraints=critical,CA:TRUE\n"
        "keyUsage=critical,keyCertSign,cRLSign,digitalSignature\nsubjectKeyIdentifier=hash\n"
    )
    _openssl(
        folder, "req", "-x509", "-config", "ca.cnf", *NEW_KEY, "-subj", "/CN=gym-kit", "-days", DAYS,
        "-keyout", "ca.key", "-out", "ca.crt",
    )  # fmt: skip
    _openssl(folder, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", "sa.key")
    _openssl(folder, "pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    for certificate in certificates:
        name = certificate.file
        subject = f"/O={certificate.organization}/CN={certificate.common_name}"
        (folder / f"{name}.ext").write_text(extension_file(certificate))
        _openssl(
            folder, "req", "-config", "ca.cnf", *NEW_KEY, "-subj", subject,
            "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        _openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", DAYS, "-extfile", f"{name}.ext", "-out", f"{name}.crt",
        )  # fmt: skip


def _openssl(folder: Path, *words: str) -> None:
    run(["openssl", *words], cwd=folder, timeout=60)
