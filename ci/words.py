"""Refuses words that send readers back to the start of a sentence, in pages, comments, docstrings, help and error texts.

    python ci/words.py        # the files that git knows

Prints file, line, the words, and what to write instead. `ci/lint.sh` runs it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What to write instead, by the words that are refused. A blank is also a line's end.
WORDS = {
    r"(?<!left )(?<!stays )\b(?i:behind)\b": "after N tokens; later; before the window",
    r"\b(?i:beside)\b": "next to; compared with; besides; with",
    r"\bin \d\.\d+ of (?:the|its) time\b|\btakes? (?:only )?\d\.\d+ (?:to \d\.\d+ )?of\b|(?<![\d.])0\.\d+ (?:to 0\.\d+ )?of "
    r"(?:the|that|those|its|what|plain)\b": "10 % faster, 90 % of; or a table whose header says what is 1",
    r"\b[Ss]o (?:many|much)\b": "the number's name: `count` rows; this number of",
    r'(?:^|[.:;!?]"? |\n\n)Of (?!course)': "the subject first: INT4 keys have ..., not: Of INT4 ...",
    r"(?<![Tt]here )(?<!where )\b(?:is|are|was|were) no(?:ne)?\b(?! (?:longer|more|less|one)\b)": "is not a ...",
    r"\b(?:has|have|had) none\b|\bno file of\b": "does not have ...; is not a file of ...",
}
EXCEPTIONS = [
    r"Belongs to the commit \w+, \".*?\"",  # a subject of that day
    r"left something behind",
    r"0\.95 of the time of vectors",  # what tests/repository/test_architecture.py finds
]

STRING = r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
PROSE = {  # the parts of a file that people read
    ".md": r"(?s:```.*?```)|[^`]+",
    ".toml": r"#[^\n]*",
    ".sh": r"#[^\n]*",
    **dict.fromkeys((".h", ".c", ".cpp"), r'(?s:/\*.*?\*/)|//[^\n]*|"(?:\\.|[^"\\\n])*"'),
    **dict.fromkeys((".py", ".pyi", ".pyx", ".pxd"), rf"(?s:{STRING})|#[^\n]*(?:\n[ \t]*#[^\n]*)*"),
}
FOLDERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "docs", "kvfast", "bench", "tests", "ci")


def found(text, kind):
    """(line, words, what to write instead) of a text with this suffix."""
    for part in re.finditer(PROSE[kind], text):
        words = part[0]
        for pattern in EXCEPTIONS:
            words = re.sub(pattern, lambda match: re.sub(r"\S", "_", match[0]), words, flags=re.DOTALL)
        words = re.sub(r"\n[ \t]*(?:#|\*|>)? *", "\n", re.sub(r"^(?:/\*+|//|#|\"+|') *", "", words))
        for pattern, instead in WORDS.items():
            for match in re.finditer(pattern.replace(" ", r"\s"), words):
                line = text.count("\n", 0, part.start()) + words.count("\n", 0, match.start()) + 1
                yield line, " ".join(match[0].split()), instead


def main():
    names = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    bad = 0
    for path in (ROOT / name for name in names if Path(name).suffix in PROSE and Path(name).stem not in ("words", "test_words")):
        for line, words, instead in found(path.read_text("utf-8"), path.suffix):
            print(f"{path.relative_to(ROOT)}:{line}: {words!r}: write {instead}")
            bad += 1
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
