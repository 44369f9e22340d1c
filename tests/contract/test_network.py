"""The allowlist from inside a jail: proxy, transparent names, localhost both ways, grants at run time."""

from __future__ import annotations

import http.server
import shutil
import socket
import threading
import urllib.request

import pytest

from vectora_jail import Policy, UnsupportedPolicy
from vectora_jail.policy import Network

pytestmark = pytest.mark.kernel


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every request with the Host it was asked for."""

    def do_GET(self):
        body = f"served {self.headers.get('Host')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A web server on the host's loopback; its port."""
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd.server_address[1]
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def allow(*rules, **hosts):
    return Policy(
        network=Network(
            mode="allowlist", allow=rules, hosts={k.replace("_", "."): v for k, v in hosts.items()}
        )
    )


FETCH = "import urllib.request as u, sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
RAW = (
    "import socket, sys\n"
    "s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)\n"
    "s.sendall(b'GET / HTTP/1.0\\r\\nHost: raw\\r\\n\\r\\n')\n"
    "d = b''\n"
    "while p := s.recv(999): d += p\n"
    "print(d.decode())\n"
)


def test_name_by_proxy_and_without(ws, open_jail, server):
    """Assert that an allowed name is reached by proxy variables and by a program that knows no proxy."""
    jail = open_jail(ws, policy=allow(f"api.test:{server}", api_test="127.0.0.1"))
    result = jail.exec(["python3", "-c", FETCH, f"http://api.test:{server}/"])
    assert f"served api.test:{server}" in result.stdout_text, result.text
    result = jail.exec(["python3", "-c", RAW, "api.test", str(server)])
    assert "served raw" in result.stdout_text, result.text


def test_denied_names_are_reported(ws, open_jail, server):
    """Assert that a name that is not listed is refused, and the call's result says which rule it would need."""
    jail = open_jail(ws, policy=allow(f"api.test:{server}", api_test="127.0.0.1"))
    result = jail.exec(["python3", "-c", FETCH, f"http://other.test:{server}/"])
    assert result.exit_code != 0
    assert "403" in result.text
    assert [(v.kind, v.what) for v in result.violations] == [("network", f"other.test:{server}")]
    assert f"other.test:{server}" in result.violations[0].hint
    for target in (
        f"http://127.0.0.1:{server}/",
        f"http://localhost:{server}/",
        f"http://0x7f000001:{server}/",
    ):
        assert jail.exec(["python3", "-c", FETCH, target]).exit_code != 0


def test_curl(ws, open_jail, server):
    """Assert that curl reaches the allowed name and gets a 403 for another (BC-95)."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    jail = open_jail(ws, policy=allow(f"api.test:{server}", api_test="127.0.0.1"))
    assert "served" in jail.exec(f"curl -s http://api.test:{server}/").stdout_text
    assert jail.exec(f"curl -s -o /dev/null -w '%{{http_code}}' http://no.test:{server}/").stdout == b"403"
    assert (
        jail.exec(
            f"curl -s -x $http_proxy http://api.test:{server}/ -H 'Host: no.test' -o /dev/null -w '%{{http_code}}'"
        ).stdout
        != b"200"
    )


def test_localhost_is_a_grant(ws, open_jail, server):
    """Assert that a granted port of the host's loopback is there on the same port, else not (BC-99)."""
    jail = open_jail(ws, policy=allow(f"localhost:{server}"))
    assert "served" in jail.exec(["python3", "-c", RAW, "localhost", str(server)]).stdout_text
    assert "served" in jail.exec(["python3", "-c", RAW, "127.0.0.1", str(server)]).stdout_text
    other = open_jail(ws, policy=allow())
    assert other.exec(["python3", "-c", RAW, "127.0.0.1", str(server)]).exit_code != 0


def test_grant_at_run_time(ws, open_jail, server):
    """Assert that allow() opens one more target, and needs an allowlist."""
    jail = open_jail(ws, policy=allow())
    assert jail.exec(["python3", "-c", RAW, "localhost", str(server)]).exit_code != 0
    jail.allow(f"localhost:{server}")
    assert "served" in jail.exec(["python3", "-c", RAW, "localhost", str(server)]).stdout_text
    with pytest.raises(UnsupportedPolicy, match="allowlist"):
        open_jail(ws, policy=Policy()).allow("x.test:443")


def test_no_resolver_inside(ws, open_jail):
    """Assert that nothing resolves names inside, and lookups fail at once (BC-97)."""
    jail = open_jail(ws, policy=allow("api.test:443"))
    code = (
        "import socket, time\nb = time.time()\n"
        "try: socket.getaddrinfo('secret.evil.test', 80)\n"
        "except OSError: print('no', time.time() - b < 2)"
    )
    assert jail.exec(["python3", "-c", code]).stdout_text.strip() == "no True"


def test_expose(ws, open_jail):
    """Assert that a server inside is reached on a host port, by several clients, until the jail ends (BC-99)."""
    jail = open_jail(ws)
    (ws / "page").write_text("from inside")
    process = jail.spawn(["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1"])
    assert b"Serving" in process.read(timeout=10)
    port = jail.expose(8000)
    for _ in range(5):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=10) as answer:
            assert answer.read() == b"from inside"
    with jail.expose(8000, listen=False) as sock:
        sock.setblocking(True)
        sock.sendall(b"GET /page HTTP/1.0\r\n\r\n")
        data = b""
        while piece := sock.recv(4096):
            data += piece
        assert data.endswith(b"from inside")
    with pytest.raises(ConnectionRefusedError):
        jail.expose(8001)
    jail.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 2).recv(1)
        raise ConnectionRefusedError


def test_host_network_needs_to_be_asked_for(ws, open_jail, server):
    """Assert that mode "host" shares the host's loopback, and the default does not."""
    assert open_jail(ws).exec(["python3", "-c", RAW, "127.0.0.1", str(server)]).exit_code != 0
    jail = open_jail(ws, policy=Policy(network=Network(mode="host")))
    assert "served" in jail.exec(["python3", "-c", RAW, "127.0.0.1", str(server)]).stdout_text
