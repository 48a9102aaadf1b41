"""The texts of docs/performance/accuracy.md, from two Debian packages and the Python library:

    apt-get download r-cran-janeaustenr installation-guide-amd64
    for package in *.deb; do dpkg-deb -x $package packages; done
    python bench/texts.py packages texts

Writes austen.txt (Emma), python.txt (asyncio/base_events.py), german.txt and chinese.txt (the installation guide from its first
section on); and calibration.txt (Pride and Prejudice), which caches are calibrated on.
"""

import asyncio.base_events
import gzip
import struct
import sys
import zlib
from pathlib import Path

NOVELS = {"austen": b"EMMA", "calibration": b"PRIDE AND PREJUDICE"}
GUIDES = {"german": ("de", "\n1.1. Was ist Debian?"), "chinese": ("zh_CN", "\n1.1. 什么是 Debian？")}


def novels(data):
    """The texts in the data of an R package: its length and a zlib stream for each, of strings with a tag and a length."""
    while data:
        stream = zlib.decompressobj()
        raw, lines, at = stream.decompress(data[4:]), [], 0
        data = stream.unused_data
        while (at := raw.find(b"\0\4\0\t", at)) >= 0:
            (count,) = struct.unpack(">i", raw[at + 4 : at + 8])
            lines.append(raw[at + 8 : at + 8 + max(count, 0)])
            at += 8 + max(count, 0)
        yield b"\n".join(lines)


def main(packages, folder):
    packages, folder = Path(packages), Path(folder)
    folder.mkdir(exist_ok=True)
    data = (packages / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    for name, title in NOVELS.items():
        (folder / f"{name}.txt").write_bytes(next(text for text in novels(data) if text.startswith(title)))
    (folder / "python.txt").write_bytes(Path(asyncio.base_events.__file__).read_bytes())
    for name, (language, start) in GUIDES.items():
        path = packages / f"usr/share/doc/installation-guide-amd64/{language}/install.{language}.txt.gz"
        text = gzip.decompress(path.read_bytes()).decode()
        (folder / f"{name}.txt").write_text(text[text.rindex(start) + 1 :], "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
