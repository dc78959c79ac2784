"""What protects a service without keys."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from workers.serve.auth import is_cross_site, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("LocalHost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("2001:db8::1", False),
        ("example.com", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("", False),
    ],
)
def test_what_is_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://elsewhere"}, False),
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "https://example.com"}, True),
        ({"origin": "null"}, True),
    ],
)
def test_which_requests_come_from_pages_of_other_sites(headers: dict[str, str], expected: bool) -> None:
    sent = {"host": "127.0.0.1:8000"} | headers
    raw = [(name.encode(), value.encode()) for name, value in sent.items()]
    assert is_cross_site(Request({"type": "http", "method": "POST", "headers": raw})) is expected
