"""Signatures, which URLs and addresses are accepted, and when a callback is tried again."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import RequestError
from workers.callbacks.addresses import RefusedAddressError, check_addresses, refusal
from workers.callbacks.schedule import FEW_TRIES, LONGEST_PAUSE_S, Answer, Verdict, decide, retry_after
from workers.callbacks.secret_book import SecretBook
from workers.callbacks.signing import (
    CallbackSignatureError,
    key_of,
    new_secret,
    sign,
    signed_headers,
    verify_callback,
)
from workers.callbacks.urls import CallbackRules, HostRule, check_callback_url

# ---------------------------------------------------------------------------------------------------- signatures

# The published example of the scheme.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE = "msg_p5jXN8AQM9LWM0D4loKWxJek"
STAMP = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def headers(**changes: str) -> dict[str, str]:
    made = {"Webhook-Id": MESSAGE, "webhook-timestamp": str(STAMP), "WEBHOOK-SIGNATURE": SIGNATURE}
    return made | {name.replace("_", "-"): value for name, value in changes.items()}


def verify(
    given: dict[str, str], body: bytes | str = BODY, secret: object = SECRET, age: float = 0.0
) -> object:
    return verify_callback(secret, given, body, clock=lambda: STAMP + age)  # type: ignore[arg-type]


def test_the_published_vector_is_signed_and_verified() -> None:
    assert sign(SECRET, MESSAGE, STAMP, BODY) == SIGNATURE
    assert verify(headers()) == {"test": 2432232314}
    assert verify(headers(), BODY.decode()) == {"test": 2432232314}


@pytest.mark.parametrize("age", [-301.0, 301.0])
def test_a_message_from_another_time_is_refused(age: float) -> None:
    with pytest.raises(CallbackSignatureError, match="300 s old"):
        verify(headers(), age=age)
    verify(headers(), age=age - 1 if age > 0 else age + 1)


@pytest.mark.parametrize(
    ("changed", "body"),
    [
        ({}, BODY + b" "),
        ({"Webhook_Id": "msg_other"}, BODY),
        ({"webhook_timestamp": str(STAMP + 1)}, BODY),
        ({"webhook_timestamp": "soon"}, BODY),
        ({"webhook_timestamp": "²"}, BODY),
        ({"WEBHOOK_SIGNATURE": "v1,"}, BODY),
        ({"WEBHOOK_SIGNATURE": ""}, BODY),
        ({"WEBHOOK_SIGNATURE": SIGNATURE.replace("v1", "v2")}, BODY),
        ({"WEBHOOK_SIGNATURE": "v1,grün"}, BODY),
    ],
)
def test_nothing_may_be_changed(changed: dict[str, str], body: bytes) -> None:
    with pytest.raises(CallbackSignatureError):
        verify(headers(**changed), body)


@pytest.mark.parametrize("name", ["Webhook-Id", "webhook-timestamp", "WEBHOOK-SIGNATURE"])
def test_a_missing_header_is_named(name: str) -> None:
    given = headers()
    del given[name]
    with pytest.raises(CallbackSignatureError, match=name.lower()):
        verify(given)


def test_secrets_may_be_changed_on_either_side_first() -> None:
    old, new = new_secret(), new_secret()
    both = signed_headers([new, old], MESSAGE, STAMP, BODY)
    for known in (old, new, [new, old], [new_secret(), old]):
        verify(both, secret=known)
    only_old = signed_headers([old], MESSAGE, STAMP, BODY)
    verify(only_old, secret=[new, old])
    with pytest.raises(CallbackSignatureError, match="no signature fits"):
        verify(only_old, secret=new)


@pytest.mark.parametrize(
    "body",
    [
        b"[1]", b"1", b'"x"', b"null", b"", b"{", b"hello", b'{"a": 1} x',
        b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\\ud800"}', b'{"\\uDFFF": 1}',
        '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}",
        b'{"a":' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_signed_is_not_enough_to_be_an_event(body: bytes) -> None:
    with pytest.raises(CallbackSignatureError, match="no JSON object"):
        verify(signed_headers([SECRET], MESSAGE, STAMP, body), body)


def test_a_text_beyond_ascii_is_an_event_however_it_is_written() -> None:
    for body in ('{"a": "Grüße 🌍"}'.encode(), b'{"a": "Gr\\u00fc\\u00dfe \\ud83c\\udf0d"}'):
        assert verify(signed_headers([SECRET], MESSAGE, STAMP, body), body) == {"a": "Grüße 🌍"}


@pytest.mark.parametrize("odd", ["\ud800", "é", "\x00", "v1,\udfff"])
def test_what_no_sender_writes_is_refused_wherever_it_is(odd: str) -> None:
    with pytest.raises(CallbackSignatureError):
        verify(headers(), BODY.decode() + odd)
    for name in headers():
        with pytest.raises(CallbackSignatureError):
            verify(headers() | {name: odd})


@given(st.binary(max_size=80))
def test_no_body_is_another_error(body: bytes) -> None:
    given_headers = signed_headers([SECRET], MESSAGE, STAMP, body)
    with suppress(CallbackSignatureError):
        assert isinstance(verify(given_headers, body), dict)


@pytest.mark.parametrize(
    "secret", ["", "hello", "whsec_", "whsec_AAAA", "whsec_&&&&", SECRET[6:], "whsec_" + "A" * 92]
)
def test_what_is_no_secret_is_said_without_showing_it(secret: str) -> None:
    with pytest.raises(ValueError, match="tokenmill callbacks secret") as caught:
        key_of(secret)
    assert not secret or secret == "whsec_" or secret not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- URLs

HOSTS = ("hooks.example.com", ".internal.example.com", "other.example.com:8443", "93.184.216.34", "10.0.0.5")
RULES = CallbackRules(tuple(map(HostRule.parse, HOSTS)))


@pytest.mark.parametrize(
    ("text", "netloc", "target"),
    [
        ("https://hooks.example.com", "hooks.example.com", "/"),
        ("https://HOOKS.Example.com:443/a/b?c=d&e", "hooks.example.com", "/a/b?c=d&e"),
        ("https://a.internal.example.com/", "a.internal.example.com", "/"),
        ("https://a.b.internal.example.com//x", "a.b.internal.example.com", "//x"),
        ("https://other.example.com:8443/?", "other.example.com:8443", "/"),
        ("https://93.184.216.34/x", "93.184.216.34", "/x"),
    ],
)
def test_a_listed_host_is_accepted(text: str, netloc: str, target: str) -> None:
    url = check_callback_url(text, RULES)
    assert (url.netloc, url.target) == (netloc, target)
    assert url.origin == f"https://{netloc}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://hooks.example.com/", "https://"),
        ("ftp://hooks.example.com/", "https://"),
        ("//hooks.example.com/", "https://"),
        ("hooks.example.com", "https://"),
        ("https://example.com/", "not allowed"),
        ("https://evil-hooks.example.com/", "not allowed"),
        ("https://hooks.example.com.evil.org/", "not allowed"),
        ("https://internal.example.com/", "not allowed"),
        ("https://xinternal.example.com/", "not allowed"),
        ("https://hooks.example.com:8443/", "not allowed"),
        ("https://other.example.com/", "not allowed"),
        ("https://hooks.example.com:0/", "names no host"),
        ("https://hooks.example.com:99999/", "is no URL"),
        ("https://hooks.example.com:x/", "is no URL"),
        ("https://user@hooks.example.com/", "user or a password"),
        ("https://user:word@hooks.example.com/", "user or a password"),
        ("https://@hooks.example.com/", "user or a password"),
        ("https://hooks.example.com#@evil.org/", "fragment"),
        ("https://hooks.example.com/#", "fragment"),
        ("https://evil.org\\@hooks.example.com/", "characters"),
        ("https://hooks.example.com/a b", "characters"),
        ("https://hooks.example.com/\r\nx: y", "characters"),
        ("https://hööks.example.com/", "characters"),
        ("https://hooks.example.com./", "names no host"),
        ("https:///path", "names no host"),
        ("https://127.1/", "names no host"),
        ("https://2130706433/", "names no host"),
        ("https://0x7f000001/", "names no host"),
        ("https://[::1/", "is no URL"),
        ("https://10.0.0.5/", "not a public address"),
        ("https://hooks.example.com/" + "a" * 2048, "more than 2048"),
    ],
)
def test_anything_else_is_refused_with_field_and_fix(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        check_callback_url(text, RULES)
    assert caught.value.field == "callback_url"
    assert "word" not in str(caught.value).replace("password", "")


def test_without_a_list_callbacks_are_off_and_the_setting_is_named() -> None:
    with pytest.raises(RequestError, match="TOKENMILL_CALLBACK_HOSTS"):
        check_callback_url("https://hooks.example.com/", CallbackRules())


def test_development_may_use_http_and_loopback() -> None:
    rules = CallbackRules((HostRule.parse("127.0.0.1:8080"), HostRule.parse("localhost")), True, True)
    assert check_callback_url("http://127.0.0.1:8080/x", rules).port == 8080
    assert check_callback_url("http://localhost/x", rules).port == 80
    assert check_callback_url("https://localhost/x", rules).port == 443


@given(st.text(alphabet="ahtps:/.@#?[]%\\0x1 -_é\n", max_size=40))
def test_no_text_gets_past_the_list(text: str) -> None:
    try:
        url = check_callback_url(f"https://{text}", RULES)
    except RequestError:
        return
    assert any(rule.allows(url) for rule in RULES.hosts)


def test_a_host_of_its_own_secret_is_signed_for_with_that_alone() -> None:
    shared, own, below, renewed = (new_secret() for _ in range(4))
    book = SecretBook.parse(
        [shared, f"hooks.example.com={own}", f".internal.example.com={below}", f"hooks.example.com={renewed}"]
    )
    assert book.of(check_callback_url("https://hooks.example.com/", RULES)) == [own, renewed]
    assert book.of(check_callback_url("https://a.internal.example.com/", RULES)) == [below]
    assert book.of(check_callback_url("https://other.example.com:8443/", RULES)) == [shared]
    only = SecretBook.parse([f"hooks.example.com={own}"])
    assert only.of(check_callback_url("https://other.example.com:8443/", RULES)) == []
    assert own not in repr(book)
    for entry in (f"*={own}", f"={own}", "hooks.example.com=correct-horse", shared + own):
        with pytest.raises(ValueError) as caught:
            SecretBook.parse([entry])
        assert own not in str(caught.value)
        assert "horse" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- addresses

PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"]
PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "127.9.9.9", "::1", "fd00::1"]
NEVER = [
    *("0.0.0.0", "::", "169.254.169.254", "fe80::1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::a9fe:a9fe"),
]
NOT_PUBLIC = [
    *("0.1.2.3", "192.0.0.8", "192.0.0.170", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "2001::1", "2001:db8::1", "2002:7f00:1::1", "64:ff9b::a00:1", "64:ff9b::7f00:1"),
    *("64:ff9b:1::1", "100::1", "3fff::1", "5f00::1", "fec0::1", "4000::1"),
]  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_accepted(text: str) -> None:
    assert refusal(ipaddress.ip_address(text), False) is None


@pytest.mark.parametrize("text", [*PRIVATE, *NEVER, *NOT_PUBLIC])
def test_all_others_are_refused(text: str) -> None:
    assert refusal(ipaddress.ip_address(text), False) is not None


def test_development_spares_private_addresses_and_nothing_else() -> None:
    assert [text for text in PRIVATE if refusal(ipaddress.ip_address(text), True)] == []
    assert [text for text in NEVER if not refusal(ipaddress.ip_address(text), True)] == []


CLOUD = [
    *(
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fe80::a9fe:a9fe",
    ),
    *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
]


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("text", CLOUD)
def test_where_clouds_keep_credentials_nobody_is_told(text: str, allow_private: bool) -> None:
    """Nor in other clothes: mapped, 6to4, Teredo, or through any NAT64."""
    address = ipaddress.ip_address(text)
    forms = [str(address)]
    if isinstance(address, ipaddress.IPv4Address):
        high, low = divmod(int(address), 65_536)
        tail = f"{high:x}:{low:x}"
        flipped = f"{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}"
        forms += [f"::ffff:{tail}", f"::{tail}", f"64:ff9b::{tail}", f"64:ff9b:1::{tail}", f"2002:{tail}::1"]
        forms += [f"2001:0:0808:0808::{flipped}", f"fe80::5efe:{tail}"]
    assert [form for form in forms if not refusal(ipaddress.ip_address(form), allow_private)] == []
    with pytest.raises(RefusedAddressError):
        check_addresses("h", ["10.0.0.1", text], True)


def test_one_bad_address_among_good_ones_refuses_the_host() -> None:
    assert check_addresses("h", ["8.8.8.8", "2606:4700::1111"], False) == ["8.8.8.8", "2606:4700::1111"]
    for bad in ("127.0.0.1", "fe80::1%eth0", "nonsense"):
        with pytest.raises(RefusedAddressError, match="h resolves to"):
            check_addresses("h", ["8.8.8.8", bad], False)
    with pytest.raises(RefusedAddressError, match="no address"):
        check_addresses("h", [], False)


@given(st.ip_addresses(v=4))
def test_what_is_public_is_global_and_no_multicast(address: ipaddress.IPv4Address) -> None:
    if refusal(address, False) is None:
        assert address.is_global
        assert not address.is_multicast


# ------------------------------------------------------------------------------------------------------ schedule

DAY = 86_400.0


def longest(low: float, high: float) -> float:
    return high


def test_pauses_double_up_to_an_hour_and_spread_by_half() -> None:
    answer = Answer(503)
    pauses = [decide(answer, tries, 0, DAY, longest).pause_s for tries in range(1, 15)]
    assert pauses[:5] == [5, 10, 20, 40, 80]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert decide(answer, 3, 0, DAY, lambda low, high: low).pause_s == 10


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_any_2xx_is_done(status: int) -> None:
    assert decide(Answer(status), 9, DAY, DAY).verdict is Verdict.DELIVERED


@pytest.mark.parametrize(
    "answer", [Answer(301), Answer(302), Answer(308), Answer(400), Answer(401), Answer(404)]
)
def test_what_says_no_is_tried_a_few_times_whatever_was_before(answer: Answer) -> None:
    assert answer.unwanted
    for earlier in (0, 40):
        verdicts = [
            decide(answer, earlier + number + 1, 0, DAY, unwanted=number).verdict
            for number in range(FEW_TRIES)
        ]
        assert verdicts == [Verdict.RETRY] * (FEW_TRIES - 1) + [Verdict.GIVE_UP]


def test_gone_is_gone() -> None:
    assert decide(Answer(410), 1, 0, DAY).verdict is Verdict.GIVE_UP


@pytest.mark.parametrize(
    "answer",
    [
        *(Answer(408), Answer(429), Answer(500), Answer(503), Answer(error="timed out")),
        Answer(error="ours", refused=True),  # a sender with other settings may send it
    ],
)
def test_trouble_is_tried_again_until_the_time_is_over(answer: Answer) -> None:
    assert not answer.unwanted
    assert decide(answer, 50, DAY - LONGEST_PAUSE_S, DAY, longest).verdict is Verdict.RETRY
    assert decide(answer, 50, DAY - LONGEST_PAUSE_S + 1, DAY, longest).verdict is Verdict.GIVE_UP


def test_retry_after_lengthens_a_pause_within_bounds() -> None:
    assert decide(Answer(429, retry_after_s=60), 1, 0, DAY).pause_s == 60
    assert decide(Answer(429, retry_after_s=0), 1, 0, DAY, longest).pause_s == 5
    assert decide(Answer(429, retry_after_s=1e9), 1, 0, DAY).pause_s == LONGEST_PAUSE_S


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    assert retry_after("120", now) == 120
    assert retry_after("Sun, 01 Mar 2026 12:01:30 GMT", now) == 90
    assert retry_after("Sun, 01 Mar 2026 11:00:00 GMT", now) == 0
    assert retry_after(None, now) is None
    assert retry_after("later", now) is None
    assert retry_after("-5", now) is None
    assert retry_after("9" * 400, now) == 999_999_999


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 01 Mar 2026 12:00:00 +9999999999999999",
        "Sun, 01 Mar 2026 12:00:00 +" + "9" * 5000,
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Sun, 99 Mar 2026 12:00:00 GMT",
        "\x00,",
    ],
)
def test_what_a_receiver_writes_there_breaks_nothing(text: str) -> None:
    found = retry_after(text, datetime(2026, 3, 1, 12, 0, tzinfo=UTC))
    assert found is None or found >= 0


@given(st.text(alphabet="SunMar, 0123456789:+-GT\x00;()", max_size=60))
def test_no_text_there_is_an_error(text: str) -> None:
    found = retry_after(text, datetime(2026, 3, 1, 12, 0, tzinfo=UTC))
    assert found is None or found >= 0


def test_a_redirect_is_named_as_one() -> None:
    assert Answer(302).text == "HTTP 302: redirects are not followed"
    assert Answer(500).text == "HTTP 500"
