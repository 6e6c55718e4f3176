"""Addresses of services, as gRPC takes them: `host:port`, `[v6]:port`, or a target with a scheme."""

import re
from typing import Final

_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""Of gRPC's name resolvers; what follows them is left to gRPC."""
_URL: Final = re.compile(r"(https?)://(.*?)/?", re.IGNORECASE)
_HOST_AND_PORT: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+):(\d{1,5})")
_MAX_PORT: Final = 65535


def check_target(address: str) -> None:
    """Raises ValueError, with what would be right, for what gRPC can never connect to. Resolves and opens nothing."""
    if not address.strip():
        raise ValueError("it is empty: give host:port")
    if url := _URL.fullmatch(address):
        raise ValueError(f"an address has no {url[1]}:// in front: give {url[2] or 'host:port'}")
    scheme = next((scheme for scheme in _SCHEMES if address.startswith(scheme)), None)
    if scheme is not None and len(address) > len(scheme):
        return
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None:
        raise ValueError("give host:port, [v6]:port, or a gRPC target such as dns:///host:port or unix:/path")
    if not 1 <= int(match[1]) <= _MAX_PORT:
        raise ValueError(f"{match[1]} is no port: give one from 1 to {_MAX_PORT}")
