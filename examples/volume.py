"""Keeps a cache of downloads in a named volume, so that the second sandbox finds what the first one fetched."""

from __future__ import annotations

from atoll import Sandbox, Volumes

FETCH = """
if test -e /cache/data.csv; then echo found; else echo 'a,b' > /cache/data.csv && echo fetched; fi
"""


def main() -> None:
    for _ in range(2):
        with Sandbox(volumes={"downloads": "/cache"}) as sandbox:
            print(sandbox.exec(FETCH).stdout.strip())
    Volumes.snapshot("downloads", "downloads-monday")
    Volumes.remove("downloads")
    Volumes.copy("downloads-monday", "downloads")
    with Sandbox(volumes={"downloads": "/cache:ro"}) as sandbox:
        print(sandbox.exec("cat /cache/data.csv").stdout.strip())
    for name in ("downloads", "downloads-monday"):
        Volumes.remove(name)


if __name__ == "__main__":
    main()
