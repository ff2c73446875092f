"""An internet for tests, in network namespaces that they make: one where the gateway's connections go out, and the
world behind it. A packet capture in the world is the judge of what left a sandbox."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network import world

CONTROL_PORT = 7777
"""What tests send from themselves comes from here: the rest is the gateway's."""
EXPECTED = frozenset(
    (
        *(f"{world.WEB}.{port}" for port in (22, 80, 443, 5432, 8080, 9999)),
        *(f"{world.EVIL}.{port}" for port in (53, 80, 443)),
        f"{world.GIT}.22",
        f"{world.PRIVATE}.80",
    )
)
NEVER_ASKED = frozenset(("notallowed.test", "w.test"))
_PACKET = re.compile(r" IP6? (\S+) > (\S+): (.*)")


@dataclass
class Internet:
    folder: Path
    uplink: str
    """A path to the network namespace that the gateway goes out by."""
    world_pid: int
    forgiven: set[str] = field(default_factory=set)

    @property
    def authority(self) -> Path:
        """The certificate that signs all of the world's names."""
        return self.folder / "ca.pem"

    @property
    def web_root(self) -> Path:
        return self.folder / "web"

    def environment(self) -> dict[str, str]:
        return {
            "ATOLL_NETWORK_UPLINK": self.uplink,
            "ATOLL_NETWORK_NAMESERVERS": world.EVIL,
            "SSL_CERT_FILE": str(self.authority),
        }

    def seen(self, since: int = 0) -> list[dict[str, Any]]:
        """What the world's servers were asked."""
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()[since:]]

    def mark(self) -> tuple[int, int]:
        return len(self.seen()), len(self.packets())

    def packets(self) -> list[str]:
        """What came in from the gateway, as `DESTINATION.PORT`. A packet of our own marks where to stop reading."""
        marker = os.urandom(6).hex()
        self.inside_uplink(f"import socket; socket.socket(2, 2).sendto(b'{marker}', ('192.0.2.2', 7))")
        deadline = time.monotonic() + 20
        while True:
            text = (self.folder / "packets").read_text(errors="replace")
            if marker in text:
                break
            if time.monotonic() > deadline:
                raise TimeoutError("the capture is stuck")
            time.sleep(0.02)
        pairs = [(match[1], match[2]) for line in text.splitlines() if (match := _PACKET.search(line))]
        ours = f".{CONTROL_PORT}"
        found = [target for source, target in pairs if not source.endswith(ours)]
        return [each for each in found if not each.startswith(("192.0.2.2.7", "192.0.2.1."))]

    def unexpected(self) -> tuple[set[str], set[str]]:
        """Destinations and names that no policy of any test allows."""
        packets = {each for each in self.packets() if not each.startswith("ff02::")}
        names = {each["name"] for each in self.seen() if each["kind"] == "dns"}
        return packets - EXPECTED - self.forgiven, names - (world.NAMES.keys() - NEVER_ASKED)

    def forgive(self, destination: str) -> None:
        """What a test sent there by itself."""
        self.forgiven.add(destination)

    def inside_uplink(self, code: str) -> str:
        command = ["nsenter", f"--net={self.uplink}", sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def certificate(folder: Path) -> None:
    names = ",".join(f"DNS:{name}" for name in (*world.NAMES, "*.w.test"))

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, cwd=folder, timeout=30)

    run(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
    )
    run(
        "openssl",
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=world",
        "-keyout",
        "key.pem",
        "-out",
        "request.pem",
    )
    (folder / "names").write_text(f"subjectAltName={names}\n")
    run(
        "openssl",
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-days",
        "2",
        "-extfile",
        "names",
        "-out",
        "certificate.pem",
    )
    # As good as the other, but signed by nobody that anybody trusts.
    signed = ("-signkey", "key.pem", "-days", "2", "-extfile", "names", "-out", "stranger.pem")
    run("openssl", "x509", "-req", "-in", "request.pem", *signed)


def _sh(network: str, script: str) -> None:
    subprocess.run(["nsenter", f"--net={network}", "sh", "-ec", script], check=True, timeout=20)


def _network(resources: ExitStack) -> tuple[str, int]:
    """A network namespace, kept by a process that does nothing."""
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 100000"], stdout=subprocess.PIPE)
    resources.callback(holder.wait)
    resources.callback(holder.kill)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.stdout.close()
    return f"/proc/{holder.pid}/ns/net", holder.pid


def _capture(resources: ExitStack, network: str, folder: Path) -> None:
    packets = resources.enter_context((folder / "packets").open("w"))
    judge = subprocess.Popen(
        [
            "nsenter",
            f"--net={network}",
            "tcpdump",
            "-i",
            "wire",
            "-nn",
            "-A",
            "-U",
            "--immediate-mode",
            "-l",
            "-Q",
            "in",
            "ip or ip6 and not icmp6",
        ],
        stdout=packets,
        stderr=subprocess.PIPE,
    )
    resources.callback(judge.wait)
    resources.callback(judge.terminate)
    assert judge.stderr is not None
    resources.callback(judge.stderr.close)
    while b"listening" not in judge.stderr.readline():
        pass


@contextmanager
def offline_internet(folder: Path, *, capture: bool = True) -> Iterator[Internet]:
    with ExitStack() as resources:
        folder.mkdir()
        (folder / "web").mkdir()
        certificate(folder)
        uplink, _ = _network(resources)
        outside, pid = _network(resources)
        _sh(
            uplink,
            f"ip link set lo up; ip link add ether type veth peer name wire netns {pid}; ip link set ether up;"
            "ip addr add 192.0.2.1/24 dev ether; ip route add default via 192.0.2.2;"
            "ip -6 addr add 2001:db8::1/64 dev ether nodad; ip -6 route add default via 2001:db8::2",
        )
        addresses = [world.WEB, world.EVIL, world.GIT, world.PRIVATE, world.METADATA, "100.100.100.200", "192.0.0.192"]
        _sh(
            outside,
            "ip link set lo up; ip link set wire up; ip addr add 192.0.2.2/24 dev wire;"
            "ip -6 addr add 2001:db8::2/64 dev wire nodad; ip -6 addr add 2001:db8:66::66/128 dev lo;"
            + "".join(f"ip addr add {each}/32 dev lo;" for each in addresses),
        )
        if capture:
            _capture(resources, outside, folder)
        server = subprocess.Popen(
            [
                "nsenter",
                f"--net={outside}",
                sys.executable,
                world.__file__,
                str(folder / "log"),
                str(folder / "certificate.pem"),
                str(folder / "key.pem"),
                str(folder / "web"),
            ],
            stdout=subprocess.PIPE,
        )
        resources.callback(server.wait)
        resources.callback(server.send_signal, signal.SIGKILL)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        server.stdout.close()
        yield Internet(folder, uplink, pid)
