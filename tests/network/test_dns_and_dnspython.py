"""What the resolver reads and writes, compared with what dnspython makes of the same bytes."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import strategies as st

from atoll.model.addresses import Address
from atoll.network.gateway import dns as ours
from atoll.network.gateway.dns import Answer, BadMessageError
from differential import explore, mutated, runs

LABELS = st.one_of(
    st.sampled_from((b"allowed", b"test", b"a", b"A", b"x" * 63, b"\xc0", b"a.b", b"\0", b"_tcp", b"xn--a")),
    st.binary(min_size=1, max_size=63),
)
NUMBERS = st.integers(0, 65535)
KINDS = st.sampled_from(("A", "AAAA", "CNAME", "HTTPS", "ANY", "TXT", "PTR"))
TOKENS = st.one_of(
    st.binary(min_size=1, max_size=3),
    st.integers(0, 80).map(lambda at: struct.pack("!H", 0xC000 | at)),
    st.sampled_from((b"\xc0\x0c", b"\x40", b"\x80", b"\xff\xff", b"\0\0", b"\0\1\0\1", b"\0\5\0\1", b"\0\4")),
)


@st.composite
def names(draw: st.DrawFn) -> dns.name.Name:
    labels = draw(st.lists(LABELS, max_size=6))
    while sum(len(label) + 1 for label in labels) > 254:
        labels.pop()
    return dns.name.Name([*labels, b""])


def spelled(name: dns.name.Name) -> str:
    """The name as the resolver has it."""
    return ".".join(label.decode("latin-1").lower().replace(".", "\0") for label in name.labels[:-1])


@st.composite
def questions(draw: st.DrawFn) -> bytes:
    family = draw(st.sampled_from(("IN",) * 6 + ("CH", "ANY")))
    edns = draw(st.sampled_from((None, 0)))
    query = dns.message.make_query(draw(names()), draw(KINDS), family, use_edns=edns, id=draw(NUMBERS))
    query.flags ^= draw(st.sampled_from((0, 0, 0, 0, int(dns.flags.RD), int(dns.flags.CD), int(dns.flags.QR))))
    return query.to_wire()


def same_question(message: bytes) -> None:
    try:
        found = ours.read_question(message)
    except BadMessageError:
        return
    theirs = dns.message.from_wire(message, question_only=True)
    (asked,) = theirs.question
    assert (found.number, found.name, found.kind) == (theirs.id, spelled(asked.name), asked.rdtype)
    assert asked.rdclass == dns.rdataclass.IN
    assert found.recursion == bool(theirs.flags & dns.flags.RD)
    same_answer_as_given(found, asked, Answer(ours.NXDOMAIN))
    same_answer_as_given(found, asked, Answer(ours.NOERROR, (IPv4Address("192.0.2.1"), IPv6Address("::1")), 60))


def same_answer_as_given(question: ours.Question, asked: dns.rrset.RRset, given: Answer) -> None:
    answer = dns.message.from_wire(ours.write_answer(question, given))
    assert (answer.id, answer.rcode()) == (question.number, given.code)
    assert answer.flags & (dns.flags.QR | dns.flags.AA | dns.flags.TC | dns.flags.RA) == dns.flags.QR | dns.flags.RA
    assert bool(answer.flags & dns.flags.RD) == question.recursion
    (repeated,) = answer.question
    assert repeated.name.labels == asked.name.labels, "in its own spelling"
    assert (repeated.rdtype, repeated.rdclass) == (asked.rdtype, asked.rdclass)
    assert [(each.name, each.ttl, rdata.address) for each in answer.answer for rdata in each] == [
        (asked.name, given.ttl, str(address)) for address in given.addresses
    ]


@runs
def test_a_question_is_the_same_to_both(times: int) -> None:
    explore(same_question, questions(), examples=150, times=times)


@runs
def test_a_damaged_question_is_refused_or_the_same_to_both(times: int) -> None:
    explore(same_question, mutated(questions(), TOKENS), examples=400, times=times)


@runs
def test_a_plain_question_is_accepted(times: int) -> None:
    def check(name: dns.name.Name, kind: str) -> None:
        assert ours.read_question(dns.message.make_query(name, kind).to_wire()).name == spelled(name)

    explore(check, names(), KINDS, examples=100, times=times)


@runs
def test_a_question_that_is_written_is_the_same_to_dnspython(times: int) -> None:
    def check(number: int, labels: list[str], kind: int) -> None:
        name = ".".join(labels)[:253].strip(".")
        read = dns.message.from_wire(ours.write_question(number, name, kind))
        assert (read.id, read.question[0].name, read.question[0].rdtype) == (number, dns.name.from_text(name), kind)

    label = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
    number, kind = st.integers(0, 65535), st.sampled_from((ours.A, ours.AAAA))
    explore(check, number, st.lists(label, min_size=1, max_size=8), kind, examples=100, times=times)


NAME, ALIAS, OTHER = "allowed.test", "alias.allowed.test", "other.test"
OWNERS = st.sampled_from((NAME, NAME, ALIAS, ALIAS, "Allowed.TEST", OTHER))
TTLS = st.sampled_from((0, 1, 60, 3600, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
RECORDS = st.one_of(
    st.tuples(OWNERS, TTLS, st.just("A"), st.sampled_from(("192.0.2.1", "192.0.2.2", "0.0.0.0", "127.0.0.1"))),
    st.tuples(OWNERS, TTLS, st.just("AAAA"), st.sampled_from(("::1", "2001:db8::1", "::ffff:192.0.2.1"))),
    st.tuples(OWNERS, TTLS, st.just("CNAME"), st.sampled_from((ALIAS, NAME, OTHER)).map(lambda name: f"{name}.")),
    st.tuples(OWNERS, TTLS, st.just("TXT"), st.just('"192.0.2.9"')),
    st.tuples(OWNERS, TTLS, st.just("MX"), st.just(f"10 {NAME}.")),
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, int, str]:
    """An answer to a question about NAME, its number and kind."""
    kind = draw(st.sampled_from(("A", "AAAA")))
    query = dns.message.make_query(draw(st.sampled_from((NAME, NAME, NAME, OTHER))), kind, id=draw(NUMBERS))
    answer = dns.message.make_response(query)
    for owner, ttl, type_, text in draw(st.lists(RECORDS, max_size=5)):
        record = dns.rrset.from_text(f"{owner}.", 0, "IN", type_, text)
        record.ttl = ttl
        answer.answer.append(record)
    answer.set_rcode(dns.rcode.Rcode(draw(st.sampled_from((0, 0, 0, 2, 3)))))
    answer.flags |= draw(st.sampled_from((0, 0, 0, int(dns.flags.TC))))
    return answer.to_wire(), query.id, kind


def addresses_by_dnspython(message: bytes, kind: str) -> tuple[list[Address], int]:
    """The addresses of NAME, following the aliases in their order, and the shortest time one of them is good for."""
    # The other sections are not looked at here. Records of other kinds that make no sense are passed over.
    alone = message[:8] + bytes(4) + message[12:]
    read = dns.message.from_wire(alone, one_rr_per_rrset=True, ignore_trailing=True, continue_on_error=True)
    aliases, found, ttls = {dns.name.from_text(NAME)}, [], []
    for each in read.answer:
        if each.name in aliases and each.rdclass == dns.rdataclass.IN and each:
            if each.rdtype == dns.rdatatype.CNAME:
                aliases.add(each[0].target)
            elif dns.rdatatype.to_text(each.rdtype) == kind:
                found.append(ip_address(each[0].address))
                ttls.append(each.ttl)
    return list(dict.fromkeys(found)), min(ttls, default=0)


def same_answer(given: tuple[bytes, int, str]) -> None:
    message, number, kind = given
    try:
        found = ours.read_answer(message, number, NAME, dns.rdatatype.from_text(kind))
    except BadMessageError:
        return
    theirs = dns.message.from_wire(message, question_only=True)
    assert theirs.id == number
    assert theirs.flags & dns.flags.QR
    (asked,) = theirs.question
    assert (spelled(asked.name), dns.rdatatype.to_text(asked.rdtype), asked.rdclass) == (NAME, kind, 1)
    assert found.truncated == bool(theirs.flags & dns.flags.TC)
    if not found.truncated:
        assert found.code == theirs.flags & 0xF
    if not found.truncated and found.code == 0:
        assert (list(found.addresses), found.ttl) == addresses_by_dnspython(message, kind)


@runs
def test_an_answer_has_the_same_addresses_to_both(times: int) -> None:
    explore(same_answer, answers(), examples=150, times=times)


@runs
def test_a_damaged_answer_is_refused_or_the_same_to_both(times: int) -> None:
    @st.composite
    def damaged(draw: st.DrawFn) -> tuple[bytes, int, str]:
        message, number, kind = draw(answers())
        return message[:2] + draw(mutated(st.just(message[2:]), TOKENS)), number, kind

    explore(same_answer, damaged(), examples=400, times=times)


@runs
def test_an_answer_of_one_address_is_understood(times: int) -> None:
    def check(record: tuple[str, int, str, str]) -> None:
        _, _, kind, text = record
        query = dns.message.make_query(NAME, kind)
        answer = dns.message.make_response(query)
        answer.answer = [
            dns.rrset.from_text(f"{NAME}.", 60, "IN", "CNAME", f"{ALIAS}."),
            dns.rrset.from_text(f"{ALIAS}.", 50, "IN", kind, text),
        ]
        found = ours.read_answer(answer.to_wire(), query.id, NAME, dns.rdatatype.from_text(kind))
        assert (found.addresses, found.ttl) == ((ip_address(text),), 50)

    explore(check, RECORDS.filter(lambda record: record[2] in ("A", "AAAA")), examples=30, times=times)


HEAD = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0)
ENDLESS = {
    "itself": b"\xc0\x0c",
    "each other": b"\xc0\x0e\xc0\x0c",
    "a label before itself": b"\1a\xc0\x0c",
    "forwards": b"\xc0\x12\0\1\0\1\1a\0",
    "the header": b"\xc0\x04",
    "beyond the end": b"\xff\xff",
}


@pytest.mark.parametrize("name", ENDLESS.values(), ids=ENDLESS)
def test_a_pointer_leads_only_back_to_a_name(name: bytes) -> None:
    """A pointer into the header would mean another name in the answer, which has another header."""
    with pytest.raises(BadMessageError):
        ours.read_question(HEAD + name + b"\0\1\0\1")


@pytest.mark.parametrize(("last", "accepted"), [(61, True), (62, False)])
def test_a_name_has_up_to_255_bytes(last: int, accepted: bool) -> None:
    """With the empty label at its end, which counts."""
    name = b"".join(bytes((length,)) + b"x" * length for length in (63, 63, 63, last)) + b"\0"
    message = HEAD + name + b"\0\1\0\1"
    if accepted:
        assert len(name) == 255
        ours.read_question(message)
        return
    with pytest.raises(BadMessageError):
        ours.read_question(message)
    with pytest.raises(dns.exception.DNSException):
        dns.message.from_wire(message)


@pytest.mark.parametrize("opcode", range(16))
def test_an_answer_answers_a_question_and_nothing_else(opcode: int) -> None:
    """The records of an update, for example, have other meanings."""
    message = struct.pack("!6H", 7, 0x8000 | opcode << 11, 1, 0, 0, 0) + b"\1a\0\0\1\0\1"
    if opcode == 0:  # the control
        assert ours.read_answer(message, 7, "a", ours.A) == Answer(ours.NOERROR)
        return
    with pytest.raises(BadMessageError):
        ours.read_answer(message, 7, "a", ours.A)


def test_an_alias_ends_with_its_record() -> None:
    records = b"\xc0\x0c\0\5\0\1\0\0\0\0\0\2\1b\0"
    message = struct.pack("!6H", 7, 0x8000, 1, 1, 0, 0) + b"\1a\0\0\1\0\1" + records
    with pytest.raises(BadMessageError):
        ours.read_answer(message, 7, "a", ours.A)
