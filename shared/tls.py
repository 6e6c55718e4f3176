"""TLS of the server, from PEM files."""

import ssl
from pathlib import Path

import grpc

from shared.errors import StartupError
from shared.settings import ServerSettings


def credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """What the server shows its callers, and asks of them where tls_client_ca is set; None where TLS is off.

    Raises StartupError for a file that is missing or holds something else.
    """
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        return None
    _check(cert, key, client_ca)
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())],
        root_certificates=client_ca.read_bytes() if client_ca else None,
        require_client_auth=client_ca is not None,
    )


def _check(cert: Path, key: Path, client_ca: Path | None) -> None:
    # gRPC itself would only log that a handshaker could not be made, and name no file.
    files = {"tls_cert": cert, "tls_key": key} | ({"tls_client_ca": client_ca} if client_ca else {})
    for name, path in files.items():
        try:
            path.read_bytes()
        except OSError as error:
            raise StartupError(f"{name} {path} cannot be read: {error.strerror}.") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The answer to the passphrase question: without it, OpenSSL would ask on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"tls_cert {cert} and tls_key {key} are not a PEM certificate and its unencrypted key."
        ) from error
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise StartupError(f"tls_client_ca {client_ca} holds no PEM certificate.") from error
