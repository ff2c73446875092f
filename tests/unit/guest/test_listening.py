"""The kernel's table of sockets, as a sandbox may have written it."""

from __future__ import annotations

from atoll.guest.socket_tables import MAX_PORTS, parse

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000  1000        0"


def test_only_sockets_that_listen_are_found_with_their_address() -> None:
    table = (
        f"{HEAD}   0: 0100007F:1F90 00000000:0000 0A {REST} 4242 1 0000 100 0 0 10 0\n"
        f"   1: 0100007F:1F91 0100007F:C350 01 {REST} 4243 1 0000 100 0 0 10 0\n"
        f"   2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A {REST} 4244 1\n"
    )
    assert [(each.address, each.port, each.inode) for each in parse(table)] == [
        ("127.0.0.1", 8080, "4242"),
        ("::1", 80, "4244"),
    ]


def test_what_makes_no_sense_is_left_out_and_a_long_table_is_cut() -> None:
    assert parse("0: ZZ\n" + "x" * 100_000 + f"\n0: 01:1F90 0:0000 0A {REST} 1 \n: : :\n") == []
    row = f"0: 0100007F:1F90 00000000:0000 0A {REST} 4242 1\n"
    assert len(parse(row * (MAX_PORTS + 100))) == MAX_PORTS
