#!/usr/bin/env python3
"""Checks names and prose against docs/glossary.md and the rules for plain language.

    .ci/prose.py            check the repository; exit status 1 and one line per finding
    .ci/prose.py PATH...    check these paths

It reports, in comments, strings and documents:
  who         "who" without an antecedent ("Who sends waits.", "of who came")
  pronoun     somebody, nobody and their like as the subject
  personified "is told", "hears"
  no          a string that says "is no name", "is none" or "is not there": name the mistake, or say "is not a name"
  summary     a doc comment whose summary has fewer than four words, or begins with "What" in place of a noun
  rename      in a comment, a type of this repository without backticks: a rename of the type took a plain word along
  type        a type named by a bare participle or question word (Told, Given, What)
  old name    a name that docs/glossary.md replaces
  twice       a type name of product code that is defined twice
  test name   a test whose name begins with an article, "it", "who" or "what", or contains "nobody", "seldom" or the like: begin with the subject
  link        a relative link in a document to a file or heading that does not exist, in any document of the repository; a page of docs/ without links
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SUFFIXES = {".rs", ".md", ".yaml", ".yml", ".tpl", ".txt", ".py", ".json", ".h", ".c", ".sh", ".toml"}
# Generated files, inputs of fuzz targets, and the words that this check looks for.
SKIPPED = re.compile(r"values\.schema\.json$|requirements\.txt$|install\.yaml$|^lib/fuzz/corpus/|/proptest-regressions/|^\.ci/prose")

# (rule, path, text): findings that are right as they are. No longer than a screen.
ALLOWED = [
    ("old name", r"docs/glossary\.md$", r"^\| (`|\*\*)"),  # its table of replaced names
    ("old name", r"docs/changelog\.md$", r""),  # says what was renamed
    ("type", r"^lib/proto/", r""),  # answers of the protocol are named for what was done
    ("type", r"^lib/sys/", r"struct (Awaited|Blocked|Lingering|Locked|Uncancelled)\b"),  # guards: what is so until they are dropped
]

WHO = re.compile(
    r"(?:^|[.:;] |, (?:and|but|or) )Who(?:ever)?\b(?![^.]*\?)|[:;|] who(?:ever)? [a-z](?![^.]*\?)|\b(?:of|to|for|by|than|from|with|and|or|but) who(?:ever)?\b|\b[Ww]hoever\b"
)
PRONOUN = re.compile(r"\b(?:some|no|any|every)body\b|\b(?:some|any|every)one\b", re.IGNORECASE)
TEST_NAME = re.compile(r"^(?:an?|the|it|who|whoever|whom|whose|what)_|(?:some|no|any|every)body|(?:^|_)(?:is|are)_none$|seldom")
TEST = re.compile(r"#\[(?:\w+::)?test\b[^\n]*\]\s+(?:#\[(?:[^\]]|\][^\n])*\]\s+)*(?:async )?fn (\w+)|^ *(?:async )?def test_(\w+)", re.MULTILINE)
# Comments and characters are matched so that quotes in them begin no string.
LITERAL = re.compile(
    r"//[^\n]*|'(?:[^'\\\n]|\\[^u\n])'|\br(#*)\"(?P<raw>.*?)\"\1|\"(?P<plain>(?:[^\"\\]|\\.)*)\"", re.DOTALL
)
PERSONIFIED = re.compile(r"\b(?:is|are|was|were|be) told\b|\bhears?\b")
NO = re.compile(
    r"(?<!there )(?<!There )\b(?:is|are|was|were) (?:none\b|no (?!(?:longer|more|less|different|other)\b)\w)"
    r"|\b(?:is|are|was|were) not there\b|\bstands? twice\b"
)
PARTICIPLES = "Begun Chosen Found Given Gone Held Kept Known Left Lost Made Said Seen Sent Swept Taken Told Wanted Written".split()
QUESTIONS = "How What When Where Which Who Whose Why".split()
TYPE = re.compile(r"^\s*(?:pub(?:\([a-z ]+\))? )?(?:struct|enum|union|trait|type) ([A-Z]\w*)")
REGULAR = re.compile(r"^[A-Z][a-z]+(?:[^e]ed|ing)$")
NOUNS = {"Backing", "Embed", "Feed", "Finding", "Mapping", "Need", "Ring", "Seed", "Setting", "Shared", "Speed", "Thing"}
OLD = re.compile(
    r"\b(?:seldom|Seldom|steward|Steward|sweeper|rivals|Keeper|Doctor(?!\()|unsaid)\b(?!\()|shmesh[-_]kubelet\b(?![-_]api)|shmesh[-_]gate"
    # Words of their own in a text.
    r"|\b(?:struct|enum|union|trait|type|mod|fn|let|let mut) (?:Desk|Door|Gate|Hub|Room|Slab|Stock|ToHub|desk|gate|hub|slab|stock)\b"
)
# Type names that may be defined in several places: each means the same thing in all of them.
SHARED_TYPES = set(
    # What Rust programs call these by habit.
    "Args ByReason Cli Command Config Error Event FileId Metrics Outcome Result Server Shared SideArgs SideSpec SocketFile State Status "
    # One for each vendor, ring mode, layout or transport.
    "AllocatedBy Buffers CurrentContext Driver Endpoint Pool Producer QueuedMessage RecoveryStats Region Transport Transports "
    # A thing of the glossary: in Rust, in Python, in the protocol, in a configuration.
    "BareTgid Link Loan Mapping Memory Message Op PendingReply PoolMemory Refusal Request Seat Shm Side Tap UserNamespaces".split()
)
# A name of two words or more: one word alone may begin a sentence.
COMPOUND = re.compile(r"\b(?:[A-Z][a-z0-9]+){2,}\b")
VISIBLE = r"(?:pub(?:\([^)]*\))? )?"
# An indented `type` is one of a trait's.
DEFINITION = re.compile(rf"^(?:{VISIBLE}type| *{VISIBLE}(?:struct|enum|union|trait)) ([A-Z]\w*)", re.MULTILINE)
NOT_PRODUCT = re.compile(r"(?:^|/)(?:tests?|benches|examples|fuzz|comparison|testing|proofs)(?:/|\.rs$)|tests\.rs$|^e2e/")
COMMENT = re.compile(r"^\s*(///|//!|//)( ?.*)$")


def comments_of(text):
    """Yields (line number, marker, lines) of each block of comments in Rust, without its examples."""
    block, start, marker, in_example = [], 0, None, False
    for number, line in enumerate(text.split("\n") + [""], 1):
        found = COMMENT.match(line)
        if not found or (marker and found[1] != marker):
            if block:
                yield start, marker, block
            block, marker, in_example = [], None, False
        if found:
            if marker is None:
                start, marker = number, found[1]
            content = found[2].strip()
            if content.startswith("```"):
                in_example = not in_example
                content = ""
            block.append("" if in_example else content)


def strings_of(text):
    """Yields (line number, line) of the string literals of Rust code. A line that ends with a backslash continues with the next one."""
    for found in LITERAL.finditer(text):
        literal = found["raw"] if found["raw"] is not None else found["plain"]
        if literal is not None:
            joined = re.sub(r"\\\n\s*", "", literal).replace("\\n", "\n")
            number = text.count("\n", 0, found.start()) + 1
            for line in joined.split("\n"):
                yield number, line


def findings_in_strings(text):
    """The rules for string literals, in Rust code."""
    for number, line in strings_of(text):
        # A string without a space is data, but may be shown.
        rules = findings_in_prose(line) if " " in line else (("pronoun", found[0]) for found in PRONOUN.finditer(line))
        yield from ((number, rule, found) for rule, found in rules)
        found = NO.search(re.sub(r"`[^`]*`", "`x`", line)) if " " in line else None
        if found:
            yield number, "no", found[0]


def test_names(text):
    """Names of tests that say too little."""
    for found in TEST.finditer(text):
        name = found[1] or found[2]
        if TEST_NAME.search(name):
            yield text.count("\n", 0, found.end()) + 1, "test name", name


def findings_in_prose(text):
    """The rules for sentences, in one line of text."""
    text = re.sub(r"`[^`]*`", "`x`", text)
    for rule, pattern in [("who", WHO), ("pronoun", PRONOUN), ("personified", PERSONIFIED)]:
        found = pattern.search(text)
        if found:
            yield rule, found[0].strip()


def findings_in_rust(text):
    """All rules, in a Rust source."""
    for start, marker, lines in comments_of(text):
        for offset, line in enumerate(lines):
            for rule, found in findings_in_prose(line):
                yield start + offset, rule, found
        if marker != "//":
            # As rustdoc has it: the first paragraph.
            summary = " ".join(lines).split("  ")[0].strip()
            # A name alone refers to what it names: a constant of a vendor, a message of a protocol.
            is_reference = re.fullmatch(r"(?:\[?`[^`]*`\]?(?:, | and )?)+\.?", summary)
            is_short = len(summary.split()) < 4 and not summary.startswith(("|", "#", "-"))
            if summary and not is_reference and (is_short or summary.startswith("What ")):
                yield start, "summary", summary
    for number, line in enumerate(text.split("\n"), 1):
        found = TYPE.match(line)
        if found:
            name = found[1]
            bare = name in PARTICIPLES or name in QUESTIONS or (REGULAR.match(name) and name not in NOUNS)
            if bare:
                yield number, "type", name
    yield from findings_in_strings(text)
    for number, line in enumerate(text.split("\n"), 1):
        # Strings of examples; for other comments, the rules for prose are stricter.
        if re.match(r"\s*//[/!]", line):
            for quoted in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
                for found in PRONOUN.finditer(quoted):
                    yield number, "pronoun", found[0]
    yield from test_names(text)
    yield from old_names(text)


def predicates(number, line):
    """Strings of a line of code that say "is no name"."""
    for quoted in re.findall(r'"([^" ]* (?:[^"\\]|\\.)*)"', line):
        found = NO.search(re.sub(r"`[^`]*`", "`x`", quoted))
        if found:
            yield number, "no", found[0]


def renamed_words(text, types):
    """Names of `types` that comments use as words: (line number, name)."""
    for start, _, lines in comments_of(text):
        for offset, line in enumerate(lines):
            for found in COMPOUND.finditer(re.sub(r"`[^`]*`|\[[^\]]*\]:? ?(?:\([^)]*\)|[\w:]+)?", "x", line)):
                if found[0] in types:
                    yield start + offset, found[0]


def old_names(text):
    """Names that the glossary replaces."""
    for number, line in enumerate(text.split("\n"), 1):
        found = OLD.search(line)
        if found:
            yield number, "old name", found[0]


def findings_in(path, text):
    """(line number, rule, what was found) of one file."""
    if path.suffix == ".rs":
        yield from findings_in_rust(text)
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        is_heading = lines[number : number + 1] and lines[number].startswith("|--")
        for rule, found in [] if is_heading else findings_in_prose(line):
            yield number, rule, found
        if path.suffix in {".py", ".sh", ".tpl"}:
            yield from predicates(number, line)
    if path.suffix == ".py":
        yield from test_names(text)
    yield from old_names(text)


def is_allowed(rule, path, line):
    """Whether the list of exceptions has it."""
    return any(rule == r and re.search(p, path) and re.search(t, line) for r, p, t in ALLOWED)


LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)|^\[[^\]]+\]: (\S+)")


def anchors_of(text):
    """The anchors that GitHub gives to the headings of a document."""
    anchors, in_code = [], False
    for line in text.split("\n"):
        in_code ^= line.startswith("```")
        found = re.match(r"#+ (.*)", line)
        if found and not in_code:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found[1]).strip().lower()
            anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            before = sum(1 for other in anchors if other == anchor or re.fullmatch(re.escape(anchor) + r"-\d+", other))
            anchors.append(f"{anchor}-{before}" if before else anchor)
    return set(anchors)


def broken_links(path, text):
    """Links of a document to files of the repository, or to headings in them, that do not exist. A page of docs/ links to another."""
    in_code, is_lonely = False, path.parent == ROOT / "docs"
    for number, line in enumerate(text.split("\n"), 1):
        in_code ^= line.lstrip().startswith("```")
        if in_code:
            continue
        for found in LINK.finditer(re.sub(r"`[^`]*`", "`x`", line)):
            target = found[1] or found[2]
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            is_lonely &= not name.endswith(".md")
            other = path.parent / name
            in_document = not name or other.suffix == ".md"
            if not other.exists() or (anchor and in_document and anchor not in anchors_of(other.read_text() if name else text)):
                yield number, "link", target
    if is_lonely:
        yield 1, "link", "none to another document"


def defined_twice(sources):
    """(path, line number, name) of types whose name another type of product code has, in the same crate or another.

    `sources`: (crate, path, text) of each source.
    """
    places = {}
    for crate, path, text in sources:
        for found in DEFINITION.finditer(text):
            number = text.count("\n", 0, found.start()) + 1
            places.setdefault(found[1], []).append((crate, path, number))
    for name, found in places.items():
        crates = [crate for crate, _, _ in found]
        if name not in SHARED_TYPES and len(crates) > 1:
            for _, path, number in found:
                yield path, number, name


def crate_of(name):
    """The directory of the nearest manifest."""
    return next((parent for parent in (ROOT / name).parents if (parent / "Cargo.toml").exists()), ROOT)


def files(paths):
    """Files that git tracks or does not ignore below some paths."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *paths],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()
    return [name for name in sorted(listed) if (ROOT / name).is_file()]


def main(paths):
    count = 0
    types = set()
    for name in files([]):
        if name.endswith(".rs") and not SKIPPED.search(name):
            types.update(found[1] for found in DEFINITION.finditer((ROOT / name).read_text()))
    covered = {name for name in files(paths) if (Path(name).suffix in SUFFIXES or name in paths) and not SKIPPED.search(name)}
    for name in sorted(covered | {name for name in files([]) if name.endswith(".md")}):
        path = ROOT / name
        text = path.read_text()
        lines = text.split("\n")
        findings = set(findings_in(path, text)) if name in covered else set()
        if path.suffix == ".md":
            findings.update(broken_links(path, text))
        if path.suffix == ".rs" and name in covered:
            findings.update((number, "rename", found) for number, found in renamed_words(text, types))
        for number, rule, found in sorted(findings):
            if not is_allowed(rule, name, lines[number - 1]):
                print(f"{name}:{number}: {rule}: {found}")
                count += 1
    sources = [name for name in files([]) if name.endswith(".rs") and not NOT_PRODUCT.search(name)]
    for name, number, found in sorted(defined_twice((crate_of(name), name, (ROOT / name).read_text()) for name in sources)):
        print(f"{name}:{number}: twice: {found}")
        count += 1
    if count:
        print(f"{count} findings; see docs/glossary.md and the rules in .ci/prose.py", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["."]))
