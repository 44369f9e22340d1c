"""What a jail with an allowlist needs around it: addresses for its names, listeners, variables (pure).

Two doors lead to one decision. The proxy on 127.0.0.1 is found by environment variables; and every rule
that names a host and a port exactly also gets an address of 127.77/16 in the jail's ``/etc/hosts`` with a
listener on that port, so that programs which know no proxy (Node's fetch, Java, database clients, ssh)
connect by plain name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vectora_jail.netrules import NetRules

#: First choice for the proxy's port inside the jail.
PROXY_PORT = 3128
#: Listeners the plan asks for at most: the worker holds a descriptor for each.
MAX_LISTENERS = 256

Listen = tuple[str, int]


@dataclass(frozen=True, slots=True)
class EgressPlan:
    """Everything that must be in place before the first command of a jail whose network is an allowlist."""

    hosts_lines: tuple[str, ...]
    """Lines for the jail's /etc/hosts, after those of localhost."""
    listen: tuple[Listen, ...]
    """Where the worker listens, in order; the proxy's two addresses come first."""
    proxy_port: int
    doors: Mapping[Listen, Listen]
    """Local address of an accepted socket → the target it stands for; the proxy's addresses are not in it."""
    environment: Mapping[str, str]
    proxy_only: tuple[str, ...] = ()
    """Rules that only programs which use the proxy can reach (wildcards, addresses, what had no room)."""


def plan_names(rules: NetRules) -> EgressPlan:
    """Give every exact rule its own local address; the same rules always give the same plan."""
    wanted: dict[str, list[int]] = {}
    local_ports: list[int] = []
    proxy_only: list[str] = []
    for rule in rules.allow:
        if rule.kind == "localhost":
            local_ports += [port for port in rule.ports if port not in local_ports]
        elif rule.kind == "host":
            ports = wanted.setdefault(rule.name, [])
            ports += [
                port
                for port in rule.ports
                if port not in ports and rules.decide(rule.name, port).action == "allow"
            ]
        else:
            proxy_only.append(str(rule))
    taken = {port for ports in wanted.values() for port in ports} | set(local_ports)
    proxy_port = next(port for port in range(PROXY_PORT, 65536) if port not in taken)
    listen: list[Listen] = [("127.0.0.1", proxy_port), ("::1", proxy_port)]
    doors: dict[Listen, Listen] = {}
    for port in local_ports:
        if rules.decide("localhost", port).action != "allow":
            continue
        for address in ("127.0.0.1", "::1"):
            listen.append((address, port))
            doors[address, port] = ("localhost", port)
    lines: list[str] = []
    for index, (name, ports) in enumerate(((n, p) for n, p in wanted.items() if p), start=1):
        if len(listen) + len(ports) > MAX_LISTENERS:
            proxy_only.append(name)
            continue
        address = f"127.77.{index >> 8}.{index & 255}"
        lines.append(f"{address} {name}")
        for port in sorted(ports):
            listen.append((address, port))
            doors[address, port] = (name, port)
    return EgressPlan(
        tuple(lines),
        tuple(listen),
        proxy_port,
        MappingProxyType(doors),
        MappingProxyType(proxy_environment(proxy_port)),
        tuple(proxy_only),
    )


def proxy_environment(port: int) -> dict[str, str]:
    """Name the proxy in every variable that some tool reads.

    curl reads ``http_proxy`` in lower case only; ``socks5h`` leaves names to the proxy (no resolver is
    inside); 127.0.0.1 and never ``localhost``, which may be ``::1`` first; Java and Node have their own
    switches.
    """
    http = f"http://127.0.0.1:{port}"
    socks = f"socks5h://127.0.0.1:{port}"
    direct = "localhost,127.0.0.1,::1"
    java = " ".join(
        f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort={port}" for scheme in ("http", "https")
    )
    values = {"http_proxy": http, "https_proxy": http, "all_proxy": socks, "no_proxy": direct}
    return {
        **values,
        **{name.upper(): value for name, value in values.items()},
        "npm_config_proxy": http,
        "npm_config_https_proxy": http,
        "npm_config_noproxy": direct,
        "YARN_HTTP_PROXY": http,
        "YARN_HTTPS_PROXY": http,
        "CARGO_HTTP_PROXY": http,
        "NODE_USE_ENV_PROXY": "1",
        "JAVA_TOOL_OPTIONS": f"{java} -Dhttp.nonProxyHosts=localhost|127.*|[::1]",
    }
