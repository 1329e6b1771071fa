from __future__ import annotations

import ipaddress
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import ConfigError
from watchstep_services.core.egress import (
    AddressRefusedError,
    EgressPolicy,
    check_host,
    parse_address,
    parse_allowed,
)
from watchstep_services.core.settings import load_settings
from watchstep_services.notify.directory import egress_policy_of

REFUSED = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.0.1", "169.254.169.254", "169.254.170.2",
    "172.16.0.1", "172.31.255.255", "192.168.1.1", "192.0.0.1", "198.18.0.1", "203.0.113.5", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "100.100.100.200", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:1::1",
    "::ffff:0:10.0.0.1",
]  # fmt: skip
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.216.34",
    "2606:4700::1111",
    "2a00:1450::1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
]


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(AddressRefusedError, match="WATCHSTEP_ALLOWED_ADDRESSES"):
        EgressPolicy().addresses(address, 80, 1)
    with pytest.raises(AddressRefusedError):
        EgressPolicy(resolve=lambda *_: [address]).addresses("name.example", 80, 60)


@pytest.mark.parametrize("address", PUBLIC)
def test_what_is_public_is_not(address: str) -> None:
    assert EgressPolicy(resolve=lambda *_: [address]).addresses("name.example", 80, 60) == [address]


def test_an_address_with_a_zone_is_refused() -> None:
    with pytest.raises(AddressRefusedError):
        EgressPolicy(resolve=lambda *_: ["fe80::1%eth0"]).addresses("name.example", 80, 60)


def test_what_is_allowed_by_name_or_network() -> None:
    networks, hosts = parse_allowed(" 10.1.0.0/16, hooks.internal ,fd00::/8,169.254.0.0/16")
    reach = EgressPolicy(networks, hosts, resolve=lambda *_: ["192.168.0.1"])
    assert reach.addresses("10.1.2.3", 80, 1) == ["10.1.2.3"]
    assert reach.addresses("::ffff:10.1.2.3", 80, 1) == ["::ffff:a01:203"]
    assert reach.addresses("hooks.internal", 80, 60) == ["192.168.0.1"]
    for host in ("10.2.0.1", "other.internal", "169.254.169.254", "fd00:ec2::254"):
        with pytest.raises(AddressRefusedError):
            reach.addresses(host, 80, 60)
    credentials = EgressPolicy(hosts=frozenset({"hooks.internal"}), resolve=lambda *_: ["169.254.169.254"])
    with pytest.raises(AddressRefusedError):
        credentials.addresses("hooks.internal", 80, 60)
    named_alone, _ = parse_allowed("169.254.169.254")
    assert EgressPolicy(named_alone).addresses("169.254.169.254", 80, 1)


@pytest.mark.parametrize("text", ["10.1.0.1/16", "http://x", "a b", "10.0.0.0/33"])
def test_an_entry_that_allows_nothing_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="WATCHSTEP_ALLOWED_ADDRESSES"):
        parse_allowed(text)


def test_this_machine_is_allowed_to_its_owner_alone() -> None:
    here = ipaddress.ip_address("127.0.0.1")
    assert egress_policy_of(load_settings()).allows("localhost", here)
    elsewhere = {"public_url": "https://watch.example.com"}
    for settings in ({"host": "0.0.0.0"}, {"broker_url": "redis://redis"}, elsewhere):
        assert not egress_policy_of(load_settings(**settings)).allows("localhost", here)
        allowed = load_settings(**settings, allowed_addresses="loopback")
        assert egress_policy_of(allowed).allows("localhost", here)


@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433/", "http://0177.0.0.1/", "http://0x7f.0.0.1/", "http://0x7f000001/", "http://127.1/",
        "http://127.0.0.1.:80:80/", "http://user@host/", "http://u:p@host/", "ftp://host/", "file:///etc/passwd",
        "gopher://host/", "http://", "http:///path", "//host/", "http://ho st/", "http://host\\@evil/", "http://host\t/",
        "http://h\u00f6st/", "http://[fe80::1%25eth0]/", "http://[::1", "http://host:0/", "http://host:99999/",
        "http://host:port/", "http://-host/", "http://host%2eexample/", "http://" + "a" * 3000, "http://1.2.3/",
        "http://256.1.1.1/", "http://host/\r\nX: y", "javascript:alert(1)", "http://@host/",
    ],
)  # fmt: skip
def test_addresses_that_hide_where_they_lead_are_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
        parse_address(url)


def test_an_address_is_taken_apart() -> None:
    address = parse_address("HTTPS://Hooks.Example.:8443/a/b?c=d#e")
    assert (address.scheme, address.host, address.port) == ("https", "hooks.example", 8443)
    assert (address.target, address.authority) == ("/a/b?c=d", "hooks.example:8443")
    assert parse_address("http://[2606:4700::1111]/").authority == "[2606:4700::1111]"
    assert parse_address("http://example.org").target == "/"


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_ipv6_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    reach = EgressPolicy()
    direct = reach.allows("", address)
    for form in (f"::ffff:{address}", f"64:ff9b::{address}", f"::ffff:0:{address}"):
        assert reach.allows("", ipaddress.ip_address(form)) == direct
    assert direct <= address.is_global


@given(st.text(max_size=40))
def test_a_host_is_plain_or_refused(text: str) -> None:
    try:
        host = check_host(text)
    except ValueError:
        return
    assert host.isascii()
    assert check_host(host) == host


def test_names_that_hang_delay_the_look_ups_of_no_other_project() -> None:
    released, hung = threading.Event(), threading.Event()

    def hangs(_host: str, _port: int) -> list[str]:
        hung.set()
        released.wait(60)
        return ["93.184.216.34"]

    hanging = EgressPolicy(resolve=hangs, project="a")
    while not hung.is_set():  # a look-up that no thread has begun is cancelled
        with pytest.raises(TimeoutError):
            hanging.addresses("first.example", 80, 0.1)
    for number in range(20):
        with pytest.raises(TimeoutError):
            hanging.addresses(f"name-{number}.example", 80, 0)
    answering = EgressPolicy(resolve=lambda *_: ["93.184.216.34"], project="b")
    try:
        assert answering.addresses("name.example", 80, 10) == ["93.184.216.34"]
        assert EgressPolicy(resolve=answering.resolve).addresses("store.example", 80, 10)
    finally:
        released.set()
