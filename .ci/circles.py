#!/usr/bin/env python3
"""Finds circles of files: files of one crate that need each other, directly or through others.

    .ci/circles.py          check all crates of the product; exit status 1 and the lines of each circle
    .ci/circles.py CRATE... check the crates in these directories

One file needs another if it names an item that the other defines: in a `use`, or in a path such as `crate::ring::open(...)`,
`super::Error` or `wire::decode(...)`. What counts:
  - A name leads to the file that defines it, through any number of re-exports. `crate::Error`, which `lib.rs` re-exports, is in
    `error.rs`: its users need that file and not `lib.rs`.
  - A module may name its own submodules, as it declares and re-exports them: they are its parts, split off into files, and together
    they are one thing for all other files. So the parent may call what is below it, and the parts may share what is in it. But
    two parts that need each other are a circle, and so are a part and a file elsewhere.
  - A `use` of a module (`use super::wire;`) needs nothing by itself. What is named through it does.
  - Tests (`#[cfg(test)]`, and the files that are declared so) and comments do not count.
Calls of methods name no file and do not count. Doubles and test programs (TESTS_ONLY) are not checked.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TESTS_ONLY = re.compile(r"^(?:e2e|lib/(?:comparison|fuzz|testing))(?:/|$)")

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*)
    |(?P<raw>\b(?:b|c)?r(?P<hashes>\#*)"(?:.|\n)*?"(?P=hashes))
    |(?P<string>(?:b|c)?"(?:[^"\\]|\\(?:.|\n))*")
    |(?P<char>b?'(?:[^'\\\n]|\\(?:u\{[^}]*\}|x..|.))')
    |(?P<lifetime>'\w+)
    |(?P<ident>(?:r\#)?[A-Za-z_]\w*)
    |(?P<number>[0-9]\w*)
    |(?P<punct>::|.)""",
    re.VERBOSE,
)
OPEN, CLOSE = set("([{"), set(")]}")
PATH_IN_STRING = re.compile(r'"((?:[A-Za-z_]\w*::)+[A-Za-z_]\w*)"')


class Token:
    """A word or sign of Rust, with its line."""

    __slots__ = ("kind", "text", "line")

    def __init__(self, kind, text, line):
        self.kind, self.text, self.line = kind, text, line


def tokens_of(text):
    """The tokens of a source, without comments."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        if text.startswith("/*", at):
            depth, start = 0, at
            for found in re.compile(r"/\*|\*/").finditer(text, at):
                depth += 1 if found[0] == "/*" else -1
                at = found.end()
                if depth == 0:
                    break
            line += text.count("\n", start, at)
            continue
        found = TOKEN.match(text, at)
        kind = found.lastgroup if found.lastgroup != "hashes" else "raw"
        if kind != "skip":
            tokens.append(Token(kind, found[0].removeprefix("r#") if kind == "ident" else found[0], line))
        line += found[0].count("\n")
        at = found.end()
    return tokens


def end_of_group(tokens, at):
    """The index after the group that opens at `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        text = tokens[index].text
        depth += (text in OPEN) - (text in CLOSE)
        if depth == 0:
            return index + 1
    return len(tokens)


def end_of_item(tokens, at):
    """The index after the item, statement, field or arm that starts at `at`, attributes included."""
    while at < len(tokens) and tokens[at].text == "#":
        at = end_of_group(tokens, at + 1)
    words = {token.text for token in tokens[at : at + 4] if token.kind == "ident"}
    to_semicolon = words & {"use", "const", "static", "let", "type"} and not words & {"fn", "impl"}
    has_generics = words & {"fn", "impl", "struct", "enum", "union", "trait", "mod", "unsafe", "extern"}
    while at < len(tokens):
        text = tokens[at].text
        if text in CLOSE:
            return at
        if text == ";" or (text == "," and not has_generics and not to_semicolon):
            return at + 1
        if text in OPEN:
            at = end_of_group(tokens, at)
            if text == "{" and not to_semicolon:
                return at
            continue
        at += 1
    return at


def is_only_for_tests(attribute):
    """Whether an attribute's tokens are `cfg(test)`, or `cfg(all(..., test, ...))`."""
    text = "".join(token.text for token in attribute)
    return text == "cfg(test)" or bool(re.fullmatch(r"cfg\(all\((?:.*,)?test(?:,.*)?\)\)", text))


class Module:
    """A module: its names, and the paths that it uses."""

    def __init__(self, file, parent):
        self.file, self.parent = file, parent
        self.submodules = {}
        self.definitions = set()
        # Name -> (path, may be seen as an item of this module by others).
        self.imports = {}
        self.globs = []
        # (path, line, is a re-export) of each `use`, (path, line, None) of each path elsewhere.
        self.paths = []

    def ancestors(self):
        module = self
        while module:
            yield module
            module = module.parent

    def root(self):
        return list(self.ancestors())[-1]


class Crate:
    """The modules of one crate, from its root file."""

    def __init__(self, root, read=Path.read_text):
        self.read = read
        self.modules = []
        # Macros that are exported: they are named as items of the root.
        self.exported_macros = {}
        self.root = self.load(Path(root), Path(root).parent, None)

    def load(self, file, directory, parent):
        module = Module(file, parent)
        self.parse(tokens_of(self.read(file)), module, directory)
        return module

    def parse(self, tokens, module, directory):
        """Reads a module's tokens, and the files of its submodules, which are below `directory`."""
        self.modules.append(module)
        at, depth, attributes = 0, 0, []
        while at < len(tokens):
            token = tokens[at]
            following = tokens[at + 1] if at + 1 < len(tokens) else Token("end", "", token.line)
            if token.text == "#" and following.text in ("[", "!"):
                start = at + 1 + (following.text == "!")
                end = end_of_group(tokens, start)
                attribute = tokens[start + 1 : end - 1]
                if following.text == "[" and is_only_for_tests(attribute):
                    at = end_of_item(tokens, end)
                    attributes = []
                    continue
                for inner in attribute:
                    found = inner.kind == "string" and PATH_IN_STRING.fullmatch(inner.text)
                    if found:
                        module.paths.append((found[1].split("::"), inner.line, None))
                attributes.append([inner.text for inner in attribute])
                self.read_paths(attribute, module)
                at = end
                continue
            # `use<'a>` in a type lists the lifetimes that it captures.
            if token.kind == "ident" and token.text == "use" and following.text != "<":
                end = next(index for index in range(at, len(tokens)) if tokens[index].text == ";")
                is_export = at > 0 and depth == 0 and tokens[at - 1].text in ("pub", ")")
                self.read_use(tokens[at + 1 : end], [], module, is_export, depth == 0)
                at, attributes = end + 1, []
                continue
            if token.text == "mod" and following.kind == "ident" and depth == 0:
                name, after = following.text, tokens[at + 2].text
                if after == ";":
                    module.submodules[name] = self.load_submodule(name, directory, module, attributes)
                    at += 3
                else:
                    end = end_of_group(tokens, at + 2)
                    inner = Module(module.file, module)
                    module.submodules[name] = inner
                    self.parse(tokens[at + 3 : end - 1], inner, directory / name)
                    at = end
                attributes = []
                continue
            if depth == 0 and token.kind == "ident":
                if token.text in ("struct", "enum", "union", "trait", "type", "fn", "const", "static") and following.kind == "ident":
                    name = tokens[at + 2].text if following.text in ("mut", "fn") else following.text
                    module.definitions.add(name)
                elif token.text == "macro_rules":
                    name = tokens[at + 2].text
                    module.definitions.add(name)
                    if ["macro_export"] in attributes:
                        self.exported_macros[name] = module
            if token.text in OPEN:
                depth += 1
            elif token.text in CLOSE:
                depth -= 1
            if depth == 0 and (token.text == ";" or token.text == "}"):
                attributes = []
            at = self.read_path(tokens, at, module)

    def load_submodule(self, name, directory, parent, attributes):
        path = next((inner[2].strip('"') for inner in attributes if inner[:2] == ["path", "="]), None)
        if path:
            file = parent.file.parent / path
            return self.load(file, file.parent, parent)
        flat = directory / f"{name}.rs"
        try:
            return self.load(flat, directory / name, parent)
        except FileNotFoundError:
            return self.load(directory / name / "mod.rs", directory / name, parent)

    def read_use(self, tree, prefix, module, is_export, at_top):
        """Reads the tree of a `use`: `a::{b, c::d as e, self, *}`."""
        path, at = list(prefix), 0
        while at < len(tree):
            token = tree[at]
            if token.text == "{":
                end = end_of_group(tree, at)
                start, depth = at + 1, 0
                for index in range(at + 1, end):
                    text = tree[index].text
                    if depth == 0 and (text == "," or index == end - 1):
                        if index > start:
                            self.read_use(tree[start:index], path, module, is_export, at_top)
                        start = index + 1
                    depth += (text in OPEN) - (text in CLOSE)
                return
            if token.text == "*":
                module.globs.append(path)
                module.paths.append((path + ["*"], token.line, is_export))
                return
            if token.kind == "ident":
                if token.text == "self" and path:
                    pass
                elif token.text == "as":
                    break
                else:
                    path.append(token.text)
            at += 1
        renamed = tree[at + 1].text if at < len(tree) else path[-1]
        if at_top or renamed not in module.imports:
            module.imports[renamed] = path
        module.paths.append((path, tree[0].line, is_export))

    def read_paths(self, tokens, module):
        at = 0
        while at < len(tokens):
            at = self.read_path(tokens, at, module)

    def read_path(self, tokens, at, module):
        """Reads the path that starts at `at`, if one does: two names or more. Returns where to go on."""
        if tokens[at].kind != "ident" or (at > 0 and tokens[at - 1].text in (".", "::")):
            return at + 1
        path, end = [tokens[at].text], at + 1
        while end + 1 < len(tokens) and tokens[end].text == "::" and tokens[end + 1].kind == "ident":
            path.append(tokens[end + 1].text)
            end += 2
        if len(path) > 1:
            module.paths.append((path, tokens[at].line, None))
        return end

    def resolve(self, module, path, seen=()):
        """The module that defines the item of a path; None if that is outside the crate, or if the path names a module."""
        if (module, tuple(path)) in seen:
            return None
        seen = (*seen, (module, tuple(path)))
        first, rest = path[0], path[1:]
        if first == "crate":
            return self.resolve_in(module.root(), rest, seen)
        if first == "self":
            return self.resolve_in(module, rest, seen)
        if first == "super":
            return self.resolve_in(module.parent, rest, seen) if module.parent else None
        return self.resolve_in(module, path, seen)

    def resolve_in(self, module, path, seen):
        """The same, for a path that is relative to a module."""
        if not path:
            return None
        first, rest = path[0], path[1:]
        if first == "super":
            return self.resolve_in(module.parent, rest, seen) if module.parent else None
        if first == "*":
            return module
        if first in module.submodules and rest:
            found = self.resolve_in(module.submodules[first], rest, seen)
            if found or first not in module.definitions:
                return found
        if first in module.definitions:
            return module
        # `use log::log;` names a crate, not itself.
        if first in module.imports and module.imports[first][0] != first:
            return self.resolve(module, module.imports[first] + rest, seen)
        if module is self.root and first in self.exported_macros:
            return self.exported_macros[first]
        for glob in module.globs:
            found = self.resolve(module, [*glob, first], seen)
            if found:
                return found
        return None

    def needs(self):
        """{(file, other file): {(line, path)}}: which file needs which, and the lines because of which it does."""
        found = {}
        for module in self.modules:
            for path, line, is_export in module.paths:
                target = self.resolve(module, path)
                if not target or target.file == module.file:
                    continue
                if module in target.ancestors():
                    continue
                found.setdefault((module.file, target.file), set()).add((line, "::".join(path)))
        return found


def circles_of(needs):
    """The circles of a graph: sets of nodes that reach each other (Tarjan's strongly connected components)."""
    nexts = {}
    for start, end in needs:
        nexts.setdefault(start, []).append(end)
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in nexts.get(node, []):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = set()
            while node not in circle:
                circle.add(stack.pop())
            if len(circle) > 1:
                found.append(circle)

    for node in nexts:
        if node not in index:
            visit(node)
    return found


def roots_of(directory):
    """The root files of a crate's library and binaries."""
    manifest = tomllib.loads((directory / "Cargo.toml").read_text())
    named = [manifest.get("lib", {}), *manifest.get("bin", [])]
    candidates = [directory / target["path"] for target in named if "path" in target]
    candidates += [directory / "src/lib.rs", directory / "src/main.rs", *sorted(directory.glob("src/bin/*.rs"))]
    return sorted({root for root in candidates if root.exists()})


def crates():
    """The directories of all crates of the product."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", "Cargo.toml", "**/Cargo.toml"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()
    return [(ROOT / name).parent for name in sorted(listed) if (ROOT / name).exists() and not TESTS_ONLY.search(name)]


def report(circle, needs):
    """The lines of a circle: which of its files needs which, the names that it needs, and in which lines."""
    def short(file):
        return file.relative_to(ROOT) if file.is_relative_to(ROOT) else file

    yield "circle: " + ", ".join(str(short(file)) for file in sorted(circle))
    for start, end in sorted(needs):
        if start in circle and end in circle:
            names = {}
            for line, path in sorted(needs[start, end]):
                names.setdefault(path, []).append(str(line))
            listed = ", ".join(f"{path} (line {', '.join(lines)})" for path, lines in names.items())
            yield f"  {short(start)} needs of {short(end)}: {listed}"


def main(directories):
    count = 0
    for directory in [Path(name).resolve() for name in directories] or crates():
        for root in roots_of(directory):
            needs = Crate(root).needs()
            for circle in circles_of(needs):
                print("\n".join(report(circle, needs)))
                count += 1
    if count:
        print(f"{count} circle(s): move what two files need of each other to where both may take it from", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
