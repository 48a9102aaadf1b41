"""The packages of kvfast and what each imports, read from the sources.

    python docs/rooms.py

prints the floors, and what breaks the rules: a package imports only from floors below its own, and takes no private
names of another; and no files import each other, not even inside a function. `docs/pictures.py` draws the floors.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kvfast"
# From the bottom up. Packages of one floor do not import each other. `storage` is divided into rooms of its own.
FLOORS = (
    ("errors", "simd"),
    ("core",),
    ("codec",),
    ("attention",),
    ("storage.memory",),
    ("storage.tables",),
    ("storage.sequences",),
    ("storage.batches",),
    ("storage",),  # which builds these from settings
    ("files",),
    ("caches",),
    ("handles",),
    ("capi", "compression", "prompts"),
    ("planning",),
    ("__init__",),  # the public names, which is what those above use
    ("engine",),  # the names that engines use besides
    ("engines.llama_cpp", "engines.torch", "engines.vllm", "tools.llama", "tools.evaluation"),
    ("evaluation", "llama", "llama_cpp", "torch", "vllm"),  # faces: the public names of these rooms
    ("engines.transformers",),
    ("transformers",),
    ("tools.cli",),
    ("engines", "tools"),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

_IMPORT = re.compile(r"^[ \t]*from +(kvfast(?:\.\w+)*) +c?import +(\([^)]*\)|[^\n#]*)", re.MULTILINE)
_WHOLE = re.compile(r"^[ \t]*c?import +(kvfast(?:\.\w+)*)", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*cdef extern from "(\w+)/', re.MULTILINE)
_USE = re.compile(r"[\w)\]]\.(_[a-z]\w*)")
_NAMED = (
    re.compile(r"\b(?:def|class) +(_[a-z]\w*)"),
    re.compile(r"^[ \t]*c?p?def [^=\n]*?[ *](_[a-z]\w*)\(", re.MULTILINE),
    re.compile(r"[\"'](_[a-z]\w*)[\"']"),
    re.compile(r"^[ \t]*(?:cdef [^=(\n]*[ *])?(_[a-z]\w*)\b[^=\n]*(?:=|$)", re.MULTILINE),
)
_ASSIGNED = re.compile(r"^[ \t]*((?:\w+\.)?\w+(?:, *(?:\w+\.)?\w+)*)(?:: [^=\n]+)? *=", re.MULTILINE)
_FOREIGN = {"_make_subclass", "_is_stateful", "_attn_implementation"}  # PyTorch's and transformers'


def _room(parts):
    """The room of a module, given the names after ``kvfast``."""
    inner = ".".join(parts[:2])
    return inner if inner in FLOOR_OF else parts[0]


def rooms():
    """The sources of each package or module at the top of kvfast: a dict of lists of paths."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.p*")):
        room = _room([part.partition(".")[0] for part in path.relative_to(PACKAGE).parts])
        if path.suffix in (".py", ".pyx", ".pxd"):
            found.setdefault(room, []).append(path)
    return found


def imports_of(text):
    """(line number, package, names) of each import and cimport from kvfast; (line number, "simd", []) for its C files."""
    for match in _IMPORT.finditer(text):
        line, parts = text.count("\n", 0, match.start()) + 1, match[1].split(".")
        names = re.findall(r"\w+", re.sub(r"\bas +\w+", "", match[2]))
        if len(parts) > 1:
            yield line, _room(parts[1:]), names
        for name in names if len(parts) == 1 else ():
            yield line, name if name in FLOOR_OF else "__init__", []
    for match in _WHOLE.finditer(text):
        line, parts = text.count("\n", 0, match.start()) + 1, match[1].split(".")
        yield line, _room(parts[1:]) if len(parts) > 1 else "__init__", []
    for match in _INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1], []


def arrows():
    """Packages that each package imports: a dict of sorted lists."""
    return {
        room: sorted(
            {other for path in paths for _, other, _ in imports_of(path.read_text()) if other != room},
            key=lambda other: (FLOOR_OF[other], other),
        )
        for room, paths in rooms().items()
    }


def private_names(paths):
    """Names with an underscore that the sources of a package give to what is their own."""
    found = set()
    for text in (path.read_text() for path in paths):
        for pattern in _NAMED:
            found.update(pattern.findall(text))
        for assigned in _ASSIGNED.findall(text):
            found.update(re.findall(r"\b(?:self|other)\.(_\w+)", assigned))
    return found


def imports_of_files():
    """The modules of kvfast that each module imports, at its top or anywhere else: a dict of sets. A .pxd belongs to its .pyx."""
    paths = [path for one in rooms().values() for path in one]
    name_of = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    found = {name: set() for name in name_of.values()}
    for path, name in name_of.items():
        text = path.read_text()
        for match in _IMPORT.finditer(text):
            inside = {f"{match[1]}.{one}" for one in re.findall(r"\w+", match[2])} & found.keys()
            found[name] |= inside or {match[1]}
        found[name] |= set(_WHOLE.findall(text))
    return {name: others & found.keys() - {name} for name, others in found.items()}


def circles():
    """Modules that import each other, directly or through others, as sorted lists."""
    below = imports_of_files()
    changed = True
    while changed:
        reached = {name: others.union(*(below[other] for other in others)) for name, others in below.items()}
        changed, below = reached != below, reached
    return sorted({tuple(sorted(other for other in below[name] if name in below[other])) for name in below if name in below[name]})


def violations():
    """What breaks the rules, as texts."""
    wrong = []
    for room, paths in rooms().items():
        own = private_names(paths)
        for path in paths:
            text, name = path.read_text(), path.relative_to(PACKAGE.parent)
            for line, other, names in imports_of(text):
                if other != room and FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF[room]:
                    wrong.append(f"{name}:{line}: {room} imports {other}, which is not below it")
                if other != room:
                    wrong += [f"{name}:{line}: {one} is private to {other}" for one in names if one.startswith("_")]
            wrong += [
                f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]} is private to another package"
                for match in _USE.finditer(text)
                if match[1] not in own | _FOREIGN
            ]
    return wrong


if __name__ == "__main__":
    for room, others in sorted(arrows().items(), key=lambda item: FLOOR_OF[item[0]]):
        print(f"{room:12} {', '.join(others)}")
    print("\n".join([*violations(), *(f"{' and '.join(circle)} import each other" for circle in circles())]))
