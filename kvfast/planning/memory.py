"""The memory that this process can still use."""

import os


def available_memory(root="/"):
    """Available bytes of memory, within the limits of the cgroup. Cached pages of files count as available.

    None if the system does not report it. Linux does, and other systems do if they have ``SC_AVPHYS_PAGES``. `root` holds
    ``proc`` and ``sys``.
    """
    root = os.fspath(root).rstrip("/")
    found = [_of_system(root), *_of_cgroups(root)]
    found = [one for one in found if one is not None]
    return max(0, min(found)) if found else None


def _of_system(root):
    for line in _text(f"{root}/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_cgroups(root):
    """Available bytes in each cgroup of this process, and in their parents."""
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, limit, used, reclaimable = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([root, mount, *parts[:depth]])
            try:
                free = int(_text(f"{folder}/{limit}")) - int(_text(f"{folder}/{used}"))
            except ValueError:  # no such file, or the word max
                continue
            stat = dict(row.split()[:2] for row in _text(f"{folder}/memory.stat").splitlines() if len(row.split()) == 2)
            yield free + int(stat.get(reclaimable, 0))


def _text(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
