"""Assert that every spelling of a target meets the rule of its canonical form, and no other."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectora_jail.netnames import (
    TargetError,
    address_host,
    classify_address,
    embedded_ipv4,
    normalise_host,
    parse_authority,
)
from vectora_jail.netplan import plan_names, proxy_environment
from vectora_jail.netrules import NetRules, RuleError, find_conflicts, parse_pin, parse_rule

RULES = NetRules.build(
    allow=[
        "*.ex.com",
        "API.Foo.io",
        "10.0.0.5",
        "git.ex.org:22",
        "bücher.example",
        "localhost:5432",
        "8.8.8.0/24:53",
        "[2606:4700::1111]:443",
        "db.test:5432",
        "*.wide.net:8443",
        "10.9.0.0/16",
        "0.0.0.0/0:7000",
        "169.254.0.0/16",
        "100.100.100.200:80",
    ],
    deny=["telemetry.ex.com", "*.bad.ex.com:443", "8.8.8.9", "localhost:6000", "10.9.9.0/24"],
    hosts={"db.test": "10.0.0.7"},
    private_addresses=True,
)

# (target, port, action): the case table of wildcard, address and spelling errors that other proxies had.
TABLE = [
    # labels
    ("a.ex.com", 443, "allow"),
    ("a.ex.com", 80, "allow"),
    ("b.a.ex.com", 443, "allow"),
    ("ex.com", 443, "ask"),
    ("notex.com", 443, "ask"),
    ("ex.com.evil", 443, "ask"),
    ("a.ex.com.evil.io", 443, "ask"),
    (".ex.com", 443, "deny"),
    ("a..ex.com", 443, "deny"),
    ("A.EX.COM.", 443, "allow"),
    ("a.ex.com..", 443, "deny"),
    ("a.ex.com", 22, "ask"),
    ("a.ex.com", 0, "deny"),
    ("a.ex.com", 65536, "deny"),
    ("*.ex.com", 443, "deny"),
    ("-a.ex.com", 443, "deny"),
    ("a-.ex.com", 443, "deny"),
    ("_dmarc.ex.com", 443, "allow"),
    ("api.foo.io", 443, "allow"),
    ("x.api.foo.io", 443, "ask"),
    ("xapi.foo.io", 443, "ask"),
    ("git.ex.org", 22, "allow"),
    ("git.ex.org", 443, "ask"),
    ("a.wide.net", 8443, "allow"),
    ("a.wide.net", 443, "ask"),
    # deny beats allow
    ("telemetry.ex.com", 443, "deny"),
    ("TELEMETRY.ex.com.", 80, "deny"),
    ("telemetry.ex.com", 9999, "deny"),
    ("x.telemetry.ex.com", 443, "allow"),
    ("x.bad.ex.com", 443, "deny"),
    ("x.bad.ex.com", 80, "allow"),
    ("bad.ex.com", 443, "allow"),
    ("8.8.8.9", 53, "deny"),
    ("8.8.8.8", 53, "allow"),
    ("8.8.8.8", 54, "ask"),
    # IDNA
    ("bücher.example", 443, "allow"),
    ("xn--bcher-kva.example", 443, "allow"),
    ("XN--BCHER-KVA.EXAMPLE.", 443, "allow"),
    ("BÜCHER.example", 443, "allow"),
    ("ａ.ｅｘ.com", 443, "allow"),
    ("a。ex。com", 443, "allow"),
    ("straße.ex.com", 443, "deny"),
    ("a.ex.com\u200d", 443, "deny"),
    ("①②⑦.0.0.1", 80, "deny"),
    ("１２７.0.0.1", 80, "deny"),
    # characters
    ("a.ex.com\0", 443, "deny"),
    ("a.ex.com\0.evil.io", 443, "deny"),
    ("evil.io\0.ex.com", 443, "deny"),
    ("a.ex.com ", 443, "deny"),
    (" a.ex.com", 443, "deny"),
    ("a%2eex.com", 443, "deny"),
    ("a.ex.com%00", 443, "deny"),
    ("user@a.ex.com", 443, "deny"),
    ("a.ex.com@evil.io", 443, "deny"),
    ("a.ex.com/", 443, "deny"),
    ("a.ex.com#x", 443, "deny"),
    ("a.ex.com\\evil.io", 443, "deny"),
    ("a.ex.com:443", 443, "deny"),
    ("", 443, "deny"),
    (".", 443, "deny"),
    ("a" * 64 + ".ex.com", 443, "deny"),
    ("a." * 123 + "ex.com", 443, "allow"),
    ("a." * 124 + "ex.com", 443, "deny"),
    (b"a.ex.com\xff", 443, "deny"),
    (b"A.ex.com", 443, "allow"),
    # one address, many spellings
    ("10.0.0.5", 443, "allow"),
    ("10.0.0.5.", 443, "allow"),
    ("0x0a000005", 443, "allow"),
    ("0X0A.0.0.5", 443, "allow"),
    ("10.5", 443, "allow"),
    ("10.0.5", 443, "allow"),
    ("012.0.0.05", 443, "allow"),
    ("167772165", 443, "allow"),
    ("[::ffff:10.0.0.5]", 443, "allow"),
    ("::ffff:a00:5", 443, "allow"),
    ("[::ffff:0:10.0.0.5]", 443, "deny"),
    ("[2002:0a00:0005::]", 443, "ask"),
    ("10.0.0.6", 443, "ask"),
    ("10.0.0.5", 22, "ask"),
    ("10.0.0.256", 443, "deny"),
    ("10.0.0.0.5", 443, "deny"),
    ("08.0.0.1", 443, "deny"),
    ("0x", 443, "deny"),
    ("4294967296", 443, "deny"),
    ("a.10", 443, "deny"),
    ("[10.0.0.5]", 443, "deny"),
    ("[2606:4700::1111]", 443, "allow"),
    ("2606:4700:0:0::1111", 443, "allow"),
    ("[2606:4700::1111%eth0]", 443, "deny"),
    ("[2606:4700::1111", 443, "deny"),
    ("fe80::1%1", 443, "deny"),
    # special addresses
    ("127.0.0.1", 80, "deny"),
    ("127.1", 80, "deny"),
    ("127.0.0.2", 5432, "ask"),
    ("0.0.0.0", 5432, "deny"),
    ("0", 5432, "deny"),
    ("[::]", 5432, "deny"),
    ("[::7f00:1]", 5432, "deny"),
    ("255.255.255.255", 80, "deny"),
    ("224.0.0.1", 80, "deny"),
    ("[ff02::1]", 80, "deny"),
    ("169.254.169.254", 80, "deny"),
    ("[::ffff:169.254.169.254]", 80, "deny"),
    ("0xa9fea9fe", 80, "deny"),
    ("169.254.3.3", 80, "allow"),
    ("100.100.100.200", 80, "allow"),
    ("10.9.1.1", 80, "allow"),
    ("10.9.9.1", 80, "deny"),
    ("10.1.1.1", 7000, "deny"),
    ("1.1.1.1", 7000, "allow"),
    # localhost
    ("localhost", 5432, "allow"),
    ("LOCALHOST.", 5432, "allow"),
    ("127.0.0.1", 5432, "allow"),
    ("[::1]", 5432, "allow"),
    ("localhost", 80, "ask"),
    ("localhost", 6000, "deny"),
    ("127.0.0.9", 6000, "deny"),
    ("a.localhost", 5432, "deny"),
    ("localhost.ex.com", 443, "allow"),
    # pins
    ("db.test", 5432, "allow"),
    ("DB.TEST.", 5432, "allow"),
    ("db.test", 443, "ask"),
]


@pytest.mark.parametrize(("target", "port", "action"), TABLE, ids=[f"{t!r}:{p}"[:60] for t, p, _ in TABLE])
def test_bc_101_spelling(target: str | bytes, port: int, action: str) -> None:
    """Assert that each spelling of a target gets the decision of the documented table."""
    decision = RULES.decide(target, port)
    assert decision.action == action, decision


def test_the_table_is_large_enough() -> None:
    """Assert that at least sixty different spellings are held."""
    assert len({target for target, _, _ in TABLE}) >= 60


PRIVATE = [
    "127.0.0.2", "10.0.0.1", "172.16.3.4", "192.168.1.1", "100.64.0.1", "169.254.1.1", "169.254.169.254",
    "fd00::1", "fe80::1", "fec0::1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::", "::ffff:192.168.0.1",
    "0.0.0.0", "::", "::1", "ff02::1", "224.0.0.1", "240.0.0.1", "168.63.129.16", "fd00:ec2::254",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2a00::5efe:10.0.0.1", "::10.0.0.1", "198.18.0.1", "4000::1",
]  # fmt: skip


@pytest.mark.parametrize("text", PRIVATE)
def test_an_allowed_name_never_leads_to_a_special_address(text: str) -> None:
    """Assert that a special address is refused behind an allowed name, with and without consent."""
    address = ipaddress.ip_address(text)
    for consent in (False, True):
        rules = NetRules.build(["a.ex.com", "*.ex.com"], private_addresses=consent)
        matched = rules.decide("a.ex.com", 443).matched
        assert matched is not None
        assert not rules.address_ok(address, matched, None, 443)


@pytest.mark.parametrize("text", ["1.1.1.1", "2606:4700::1111", "64:ff9b::101:101", "2002:101:101::1"])
def test_a_public_address_behind_an_allowed_name_passes(text: str) -> None:
    """Assert that public addresses, also those that carry a public IPv4 address, are connected to."""
    rules = NetRules.build(["a.ex.com"])
    assert rules.address_ok(ipaddress.ip_address(text), rules.allow[0], None, 443)


def test_a_pin_is_what_permits_a_private_address() -> None:
    """Assert that a pin needs the ceiling's consent, an allow rule, and holds for exactly its address."""
    pin = {"db.test": "10.0.0.7"}
    assert NetRules.build(["db.test:1"], hosts=pin).decide("db.test", 1).action == "deny"
    rules = NetRules.build(["db.test:1"], hosts=pin, private_addresses=True)
    decision = rules.decide("db.test", 1)
    assert (decision.action, str(decision.pin)) == ("allow", "10.0.0.7")
    assert not rules.address_ok(ipaddress.ip_address("10.0.0.8"), decision.matched, decision.pin, 1)
    assert NetRules.build([], hosts=pin, private_addresses=True).decide("db.test", 1).action == "ask"
    refused = NetRules.build(["db.test:1"], ["10.0.0.0/8"], pin, private_addresses=True)
    assert refused.decide("db.test", 1).rule == "10.0.0.0/8"


def test_a_deny_rule_about_addresses_counts_behind_a_name() -> None:
    """Assert that a resolved address inside a denied range is refused, also inside a translated one."""
    rules = NetRules.build(["a.ex.com"], ["9.9.9.0/24", "1.1.1.1:80"])
    for text, port, ok in [
        ("9.9.9.9", 443, False), ("64:ff9b::909:909", 443, False),
        ("1.1.1.1", 80, False), ("1.1.1.1", 443, True),
    ]:  # fmt: skip
        assert bool(rules.address_ok(ipaddress.ip_address(text), rules.allow[0], None, port)) is ok


def test_a_refusal_names_the_rule_that_would_allow_it() -> None:
    """Assert that `rule_needed` of every undecided target parses and, once added, allows the target."""
    for target, port, action in TABLE:
        decision = RULES.decide(target, port)
        if action != "ask" and not decision.rule_needed:
            continue
        grant = parse_rule(decision.rule_needed)
        assert RULES.decide(target, port, [grant]).action == "allow", (target, decision)


def test_deny_beats_a_grant() -> None:
    """Assert that a run-time grant cannot undo a deny rule."""
    assert RULES.decide("telemetry.ex.com", 443, [parse_rule("telemetry.ex.com")]).action == "deny"


BAD_RULES = [
    "", "*", "*:443", "https://pypi.org", "http://pypi.org:80/path", "pypi.org/path", "u@pypi.org",
    "pypi.org:", "pypi.org:0", "pypi.org:65536", "pypi.org:https", "pypi.org:*", "pypi.org:80-90",
    "pypi.org:080", "a*.pypi.org", "*pypi.org", "a.*.org", "*.*.org", "*.", "pypi..org", "pypi.org..",
    "-x.org", "py pi.org", "pypi.org\0", "localhost", "a.localhost", "*.localhost", "*.10.0.0.1",
    "0x0a000005", "10.5", "010.0.0.1", "[::ffff:10.0.0.5]:1", "10.0.0.1/8", "10.0.0.5/32", "10.0.0.0/33",
    "0.0.0.0", "[::]:80", "224.0.0.1", "224.0.0.0/8", "255.255.255.255", "::ffff:0:0/97", "[10.0.0.1]:80",
    "[fd00::1", "[fd00::]/8:1", "fd00::1::2", "straße.de", 5, None, ["x"],
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_RULES, ids=repr)
def test_a_wrong_rule_is_refused_with_a_reason(text: object) -> None:
    """Assert that a rule which means nothing or can never match is an error that quotes it."""
    with pytest.raises(RuleError) as caught:
        parse_rule(text)
    assert caught.value.problem
    assert repr(text)[:20].strip("'\"") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "canonical", "ports"),
    [
        ("PyPI.org", "pypi.org", (80, 443)),
        ("pypi.org.:443", "pypi.org:443", (443,)),
        ("*.NPMjs.org:443", "*.npmjs.org:443", (443,)),
        ("fd00::1", "fd00::1", (80, 443)),
        ("[fd00::1]", "fd00::1", (80, 443)),
        ("[fd00::1]:8", "[fd00::1]:8", (8,)),
        ("fd00::/8", "fd00::/8", (80, 443)),
        ("[fd00::/8]:443", "[fd00::/8]:443", (443,)),
        ("10.0.0.0/8:1", "10.0.0.0/8:1", (1,)),
        ("LOCALHOST:5432", "localhost:5432", (5432,)),
        ("bücher.example:1", "xn--bcher-kva.example:1", (1,)),
    ],
)
def test_a_rule_has_one_canonical_text(text: str, canonical: str, ports: tuple[int, ...]) -> None:
    """Assert that a rule's text is canonical, stable, and carries its ports."""
    rule = parse_rule(text)
    assert (str(rule), rule.ports) == (canonical, ports)
    assert parse_rule(canonical) == rule


def test_which_rules_need_the_ceilings_consent() -> None:
    """Assert that rules about private addresses ask for consent, names and localhost ports do not."""
    need = ["10.0.0.5", "127.0.0.1:1", "192.168.0.0/16", "fd00::1", "64:ff9b::a00:1", "169.254.169.254"]
    free = ["a.ex.com", "*.ex.com", "localhost:1", "8.8.8.8", "0.0.0.0/0", "8.8.0.0/16"]
    assert all(parse_rule(text).needs_private for text in need)
    assert not any(parse_rule(text).needs_private for text in free)


@pytest.mark.parametrize(
    ("name", "address"),
    [("10.0.0.1", "10.0.0.2"), ("a.test", "b.test"), ("localhost", "10.0.0.1"), ("a.localhost", "10.0.0.1"),
     ("a.test", "10.5"), ("a.test", "0.0.0.0"), ("a b", "10.0.0.1"), ("a.test", 5), ("a.test", "")],
)  # fmt: skip
def test_a_wrong_pin_is_refused(name: object, address: object) -> None:
    """Assert that `hosts` takes names to address literals only."""
    with pytest.raises(RuleError):
        parse_pin(name, address)


def test_bc_99_entries_that_can_never_match_are_found() -> None:
    """Assert that allow rules which deny shadows, and pins that no rule names, are reported."""
    rules = NetRules.build(
        ["a.x.org:443", "b.x.org", "*.y.org", "10.1.0.0/16", "ok.org", "c.z.org:1"],
        ["*.x.org", "*.y.org", "10.0.0.0/8", "ok.org:443", "c.z.org:2"],
        {"lost.test": "10.0.0.1", "ok.org": "10.0.0.2"},
    )
    assert [entry for entry, _ in find_conflicts(rules)] == [
        "a.x.org:443", "b.x.org", "*.y.org", "10.1.0.0/16", "lost.test",
    ]  # fmt: skip


def test_the_plan_gives_each_exact_name_a_door() -> None:
    """Assert that exact rules get an address, localhost ports both loopbacks, and the proxy comes first."""
    rules = NetRules.build(
        [
            "pypi.org:443",
            "pypi.org:80",
            "a.test",
            "*.w.org",
            "localhost:5432",
            "10.0.0.5:1",
            "no.org",
            "x.io:3128",
        ],
        ["no.org", "a.test:80"],
    )
    plan = plan_names(rules)
    assert plan.proxy_port == 3129
    assert plan.hosts_lines == ("127.77.0.1 pypi.org", "127.77.0.2 a.test", "127.77.0.3 x.io")
    assert plan.listen == (
        ("127.0.0.1", 3129), ("::1", 3129), ("127.0.0.1", 5432), ("::1", 5432),
        ("127.77.0.1", 80), ("127.77.0.1", 443), ("127.77.0.2", 443), ("127.77.0.3", 3128),
    )  # fmt: skip
    assert plan.doors["127.77.0.2", 443] == ("a.test", 443)
    assert plan.doors["::1", 5432] == ("localhost", 5432)
    assert ("127.0.0.1", 3129) not in plan.doors
    assert plan.proxy_only == ("*.w.org", "10.0.0.5:1")
    assert plan == plan_names(rules)


def test_the_plan_is_bounded() -> None:
    """Assert that a thousand names get no thousand listeners, and that the rest is named."""
    plan = plan_names(NetRules.build([f"h{n}.test:443" for n in range(1000)]))
    assert len(plan.listen) == 256
    assert len(plan.proxy_only) == 1000 - 254
    assert len({line.split()[0] for line in plan.hosts_lines}) == 254


def test_proxy_variables() -> None:
    """Assert that both cases are set, by address, SOCKS with remote names, and no proxy for loopback."""
    env = proxy_environment(3128)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        assert env[name] == "http://127.0.0.1:3128"
    assert env["ALL_PROXY"] == env["all_proxy"] == "socks5h://127.0.0.1:3128"
    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,127.0.0.1,::1"
    assert env["NODE_USE_ENV_PROXY"] == "1"
    assert "-Dhttps.proxyPort=3128" in env["JAVA_TOOL_OPTIONS"]


@pytest.mark.parametrize(
    "text",
    ["a.ex.com", "[::1]", "a:", ":1", "a:b:1", "u@a:1", "[::1]x:1", "a:1:2", "a:-1", "a:１", "a:+1", "a: 1"],
)
def test_an_authority_without_one_reading_is_refused(text: str) -> None:
    """Assert that CONNECT targets need a host and a plain decimal port."""
    with pytest.raises(TargetError):
        parse_authority(text)


NAMES = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\A[a-zA-Z0-9._-]{1,30}\Z"),
    st.from_regex(r"\A(0[xX])?[0-9a-f]{1,9}(\.(0x)?[0-9]{1,4}){0,4}\.?\Z"),
    st.ip_addresses().map(str),
    st.binary(max_size=30),
)


@given(NAMES)
def test_normalisation_is_idempotent(text: str | bytes) -> None:
    """Assert that a canonical name normalises to itself, so that a second reader cannot disagree."""
    try:
        host = normalise_host(text)
    except TargetError:
        return
    assert normalise_host(host.name) == host
    assert host.name.isascii()
    assert host.name == host.name.lower()


@given(st.ip_addresses(v=4))
def test_every_spelling_of_an_ipv4_address_is_that_address(address: ipaddress.IPv4Address) -> None:
    """Assert that decimal, octal, hexadecimal, short and mapped forms all mean the same address."""
    value = int(address)
    a, b, c, d = address.packed
    spellings = [
        str(address), f"{address}.", str(value), hex(value), f"0{value:o}", f"{a}.{value & 0xFFFFFF}",
        f"{a:#x}.0{b:o}.{c << 8 | d}", f"[::ffff:{address}]", f"::FFFF:{value >> 16:x}:{value & 0xFFFF:x}",
    ]  # fmt: skip
    assert {normalise_host(text) for text in spellings} == {address_host(address)}


@given(st.ip_addresses(v=6))
def test_carried_addresses_never_make_an_address_better(address: ipaddress.IPv6Address) -> None:
    """Assert that no IPv6 address is public while an IPv4 address inside it is not."""
    if classify_address(address) == "public":
        assert all(classify_address(inner) == "public" for inner in embedded_ipv4(address))


@given(NAMES, st.integers(-1, 70000))
def test_decide_never_raises_and_never_allows_what_no_rule_names(text: str | bytes, port: int) -> None:
    """Assert that random targets are decided without an exception and not allowed by another rule."""
    rules = NetRules.build(["only.this.example:443"])
    decision = rules.decide(text, port)
    allowed = decision.action == "allow"
    assert not allowed or (decision.host is not None and decision.host.name == "only.this.example")
