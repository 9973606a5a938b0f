"""TLS before an endpoint on one machine, from files that may change at any time."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.files import digest_of, write_json
from stages.parts.base.serving_settings import AskedServing

SECRET_FILE: Final = "certificate.json"  # noqa: S105
SECRET_TYPE: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105


@dataclass(frozen=True)
class Tls:
    """A certificate, with the chain that belongs to it, and its key: PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise ConfigError if the files can't be read, or do not belong together."""
        try:
            # With a password, an encrypted key is an error; without, it would be asked for.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:  # also ssl.SSLError
            text = f"{self.certificate} and {self.key} are no certificate and its key: {error}"
            raise ConfigError(text, hint="see serving.tls_certificate and serving.tls_key") from error

    def version(self) -> str:
        """Another one whenever one of the files was changed or replaced. Empty: one of them is missing."""
        try:
            statuses = [file.stat() for file in (self.certificate, self.key)]
        except OSError:
            return ""
        return digest_of([[status.st_mtime_ns, status.st_ino, status.st_size] for status in statuses])[:12]

    def write(self, folder: Path) -> None:
        """Tell Envoy to use the files as they are now. It reads files again only if they have other names."""
        version, names = self.version(), {}
        for name, path in (("certificate_chain", self.certificate), ("private_key", self.key)):
            for link in folder.glob(f"{name}-*"):
                link.unlink()
            link = folder / f"{name}-{version}"
            link.symlink_to(path)
            names[name] = {"filename": str(link)}
        secret = {"@type": SECRET_TYPE, "name": "certificate", "tls_certificate": names}
        write_json(folder / SECRET_FILE, {"version_info": version, "resources": [secret]})


def tls_of(serving: AskedServing) -> Tls | None:
    """Return the files that are set; None if there are none, for plain HTTP. Raises ConfigError if they are no
    certificate and its key, or plain HTTP would be served to other machines."""
    if serving.tls_certificate and serving.tls_key:
        tls = Tls(Path(serving.tls_certificate), Path(serving.tls_key))
        tls.check()
        return tls
    if not serving.plain_http and not _loopback(serving.host):
        raise ConfigError(
            f"serving.host {serving.host} is reached from other machines, which would send their keys in clear text",
            hint="set serving.tls_certificate and serving.tls_key, or serving.plain_http=true behind a proxy with TLS",
        )
    return None


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
