"""List the sockets that a tree of processes listens on (Linux only)."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path


def family(root: int) -> set[int]:
    """List a process and all that it has started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    more = {root}
    while more:
        found |= more
        more = {process for process, parent in parents.items() if parent in found} - found
    return found


def listening(root: int) -> list[str]:
    """List the addresses at which a process, or one that it has started, accepts connections."""
    addresses = _listeners()
    opened = [own for process in family(root) for own in _open_files(process)]
    return [addresses[own] for own in opened if own in addresses]


def beyond_loopback(addresses: list[str]) -> list[str]:
    return [address for address in addresses if not ipaddress.ip_address(address).is_loopback]


def _open_files(process: int) -> list[str]:
    found = []
    with suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # such as the one that lists them
                found.append(os.readlink(descriptor))
    return found


def _listeners() -> dict[str, str]:
    """Map the sockets of this machine that listen, as /proc/*/fd names them, to their addresses."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                found[f"socket:[{columns[9]}]"] = _address(columns[1].partition(":")[0])
    return found


def _address(digits: str) -> str:
    """Words of 32 bits, each in the machine's order of bytes."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
