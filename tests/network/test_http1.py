"""Requests that two programs could read differently: refused, or written so that there is one reading."""

from __future__ import annotations

import pytest

from atoll.network.gateway.http1 import BadRequestError, read_request


def head(*lines: str, host: str = "allowed.test") -> bytes:
    return "\r\n".join(["GET / HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize("port", ["080", "0", "00", "65536", "99999", "+80", "8_0", "", " 80", "8 0", "\xb2"])
def test_a_port_has_one_spelling(port: str) -> None:
    with pytest.raises(BadRequestError):
        read_request(head(host=f"allowed.test:{port}"))


@pytest.mark.parametrize("host", ["allow\xaded.test", "\xaballowed.test", "allowed\xb7test"])
def test_a_host_with_other_letters_than_ascii_is_no_name(host: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        read_request(head(host=host)).destination()


@pytest.mark.parametrize("line", ["Content_Length: 5", "Transfer.Encoding: chunked", "CONTENT_LENGTH: 0", "Ho_st: x"])
def test_the_framing_has_no_disguise(line: str) -> None:
    if line.startswith("Ho_st"):  # the control: not every name with an underscore is one
        assert read_request(head(line))
        return
    with pytest.raises(BadRequestError, match="mistaken for a framing header"):
        read_request(head(line))


@pytest.mark.parametrize("name", ["X-Api-Key", "x-api-key", "X_Api_Key", "X-Api_Key", "X.Api.Key", "x~api!key"])
def test_a_header_that_is_added_stands_alone(name: str) -> None:
    """Servers that make variables of headers would join them, or let the last one win."""
    request = read_request(head(f"{name}: mine", "X-Api-Keys: other"))
    request.added = [(b"X-Api-Key", b"SECRET")]
    written = request.write(keep_upgrade=False)
    assert b"mine" not in written
    assert written.endswith(b"X-Api-Keys: other\r\nX-Api-Key: SECRET\r\n\r\n")


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("Transfer-Encoding: CHUNKED", b"Transfer-Encoding: chunked"),
        ("content-length:\t007 ", b"content-length: 7"),
        ("Content-Length: 00000000000000000", b"Content-Length: 0"),
    ],
)
def test_the_framing_is_written_in_one_spelling(line: str, written: bytes) -> None:
    """Not every server compares the coding as it should, and a leading zero could mean an octal number."""
    assert read_request(head(line)).write(keep_upgrade=False).splitlines()[2] == written
