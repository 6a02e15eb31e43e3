#!/usr/bin/env python3
"""Builds what a release consists of. Each command runs here as it runs in .github/workflows/release.yml; none needs a network
beyond the package registries, and none uploads anything.

    .ci/release.py version [v0.1.0]     print the version; with a tag, fail unless all files and the changelog agree with it
    .ci/release.py notes                print the changelog's section of this version
    .ci/release.py images OUT           all images for amd64 and arm64 as OCI layouts: OUT/shmesh-plugin, OUT/shmesh-sidecar, OUT/shmesh-bridge
    .ci/release.py chart OUT            the chart as OUT/shmesh-VERSION.tgz, and as an OCI layout: OUT/shmesh-chart
    .ci/release.py krew OUT             OUT/kubectl-shmesh_VERSION_linux_ARCH.tar.gz, and the manifest OUT/shmesh.yaml for krew
    .ci/release.py debian OUT           OUT/NAME_VERSION_ARCH.deb of shmesh (command, sidecar), shmesh-bridge and libshmesh-dev (C libraries)

Crates and wheels need no command of their own: `cargo publish --workspace` and `maturin build` (see docs/releasing.md).
On one machine the same commit gives the same bytes: archives are sorted and have the time of the commit (SOURCE_DATE_EPOCH).
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART_FILES = ("Chart.yaml", "README.md", "values.yaml", "values.schema.json", "templates", "dashboards", "policy")
ARCHITECTURES = ("amd64", "arm64")
# Of the package `shmesh`: what the tutorial runs.
PROGRAMS = ("shmesh", "shmesh-sidecar")
IMAGES = {
    "plugin": "Device plugin, identity service and injection webhook of shmesh",
    "sidecar": "Keeps a pod's shared-memory links and brokers device memory; contains the shmesh command",
    "bridge": "Carries the messages of shmesh links to other nodes",
}


class ReleaseError(Exception):
    """Why a release cannot be built, and what to change."""


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, cwd=ROOT, **options)


def output(*command):
    return run(*command, stdout=subprocess.PIPE, text=True).stdout.strip()


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def commit_time():
    return int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))


def find(pattern, text, path):
    found = re.search(pattern, text, re.MULTILINE)
    if not found:
        raise ReleaseError(f"{path} has no line that matches {pattern!r}")
    return found[1]


def workspace_version(cargo):
    return find(r'^\[workspace\.package\]\nversion = "([^"]+)"$', cargo, "Cargo.toml")


def disagreements(version, cargo, bridge, chart, changelog, tag):
    """What must change before `version` can be released under `tag`."""
    found = []
    for name, other in re.findall(r'^(shmesh[a-z-]*) = \{ path = "[^"]+", version = "([^"]+)"', cargo, re.MULTILINE):
        if other != version:
            found.append(f"Cargo.toml: the dependency {name} has version {other}, the workspace {version}")
    # A workspace of its own.
    other = find(r'^version = "([^"]+)"$', bridge, "lib/bridge/Cargo.toml")
    if other != version:
        found.append(f"lib/bridge/Cargo.toml: version is {other}, the workspace has version {version}")
    for key in ("version", "appVersion"):
        other = find(rf"^{key}: (\S+)$", chart, "helm/Chart.yaml").strip('"')
        if other != version:
            found.append(f"helm/Chart.yaml: {key} is {other}, the workspace has version {version}")
    if tag is not None:
        if tag != f"v{version}":
            found.append(f"the tag is {tag}, and the version {version} needs the tag v{version}")
        if section(changelog, version) is None:
            found.append(f'docs/changelog.md has no section "## {version}"')
    return found


def section(changelog, version):
    """The text below the heading of `version`; None without a heading or text."""
    found = re.search(rf"^## {re.escape(version)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return (found[1].strip() or None) if found else None


def version_command(tag):
    cargo = read("Cargo.toml")
    version = workspace_version(cargo)
    bridge, chart, changelog = map(read, ("lib/bridge/Cargo.toml", "helm/Chart.yaml", "docs/changelog.md"))
    found = disagreements(version, cargo, bridge, chart, changelog, tag)
    if found:
        raise ReleaseError("\n".join(found))
    print(version)


def notes_command():
    version = workspace_version(read("Cargo.toml"))
    changelog = read("docs/changelog.md")
    text = section(changelog, version) or section(changelog, "Unreleased")
    if text is None:
        raise ReleaseError(f'docs/changelog.md has neither a section "## {version}" nor "## Unreleased"')
    # Links of the changelog are relative to docs/.
    print(re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](docs/\1)", text))


def add_tree(archive, root, name, mtime):
    """Adds `root` as `name`: sorted, owned by root, without times of its own."""

    def plain(member):
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = mtime
        return member

    archive.add(root, name, recursive=False, filter=plain)
    if root.is_dir() and not root.is_symlink():
        for child in sorted(root.iterdir()):
            add_tree(archive, child, f"{name}/{child.name}" if name != "." else child.name, mtime)


def packed(entries, mtime):
    """A gzipped tar of (path, name) entries, and the sha256 of the tar."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, name in entries:
            add_tree(archive, path, name, mtime)
    return gzip.compress(plain.getvalue(), 9, mtime=0), hashlib.sha256(plain.getvalue()).hexdigest()


class Layout:
    """An OCI image layout: https://github.com/opencontainers/image-spec/blob/main/image-layout.md"""

    def __init__(self, root):
        self.root = Path(root)
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "blobs" / "sha256").mkdir(parents=True)
        self.write("oci-layout", {"imageLayoutVersion": "1.0.0"})

    def write(self, name, value):
        (self.root / name).write_text(json.dumps(value, sort_keys=True), encoding="utf-8")

    def blob(self, media_type, data, **more):
        """Adds a blob, and returns its descriptor."""
        if not isinstance(data, bytes):
            data = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data), **more}

    def manifest(self, config, layers, annotations, **more):
        media_type = "application/vnd.oci.image.manifest.v1+json"
        manifest = {"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers}
        return self.blob(media_type, {**manifest, "annotations": annotations}, **more)

    def index(self, manifests):
        return {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": manifests,
        }

    def finish(self, top, tag):
        top = {**top, "annotations": {"org.opencontainers.image.ref.name": tag}}
        self.write("index.json", self.index([top]))


def labels(title, description, version):
    return {
        "org.opencontainers.image.title": title,
        "org.opencontainers.image.description": description,
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": output("git", "rev-parse", "HEAD"),
        "org.opencontainers.image.licenses": "Apache-2.0",
    }


def image_layout(out, image, roots, version, mtime):
    """One image of `roots`: a dictionary from the architecture to the root file system."""
    title = f"shmesh-{image}"
    annotations = labels(title, IMAGES[image], version)
    created = datetime.fromtimestamp(int(mtime), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    layout = Layout(Path(out) / title)
    manifests = []
    for architecture, root in sorted(roots.items()):
        entries = [(child, child.name) for child in sorted(Path(root).iterdir())]
        layer, diff_id = packed(entries, mtime)
        config = {
            "architecture": architecture,
            "os": "linux",
            "created": created,
            "config": {"User": "65532:65532", "Entrypoint": [f"/usr/bin/{title}"], "Labels": annotations},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
            "history": [{"created": created, "created_by": "helm/images/build"}],
        }
        manifests.append(
            layout.manifest(
                layout.blob("application/vnd.oci.image.config.v1+json", config),
                [layout.blob("application/vnd.oci.image.layer.v1.tar+gzip", layer)],
                annotations,
                platform={"architecture": architecture, "os": "linux"},
            )
        )
    media_type = "application/vnd.oci.image.index.v1+json"
    layout.finish(layout.blob(media_type, {**layout.index(manifests), "annotations": annotations}), version)
    return layout.root


def images_command(out, architectures):
    version, mtime = workspace_version(read("Cargo.toml")), commit_time()
    roots = {image: {} for image in IMAGES}
    for architecture in architectures:
        built = ROOT / "target" / "images" / architecture
        run("helm/images/build", architecture, built)
        # A workspace of its own.
        run("helm/images/build", architecture, built, "bridge")
        for image in IMAGES:
            roots[image][architecture] = built / image
    for image in IMAGES:
        print(image_layout(out, image, roots[image], version, mtime))


def chart_command(out):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    version, mtime = workspace_version(read("Cargo.toml")), commit_time()
    chart = read("helm/Chart.yaml")
    entries = [(ROOT / "helm" / name, f"shmesh/{name}") for name in CHART_FILES]
    archive, _ = packed(entries, mtime)
    (out / f"shmesh-{version}.tgz").write_bytes(archive)
    layout = Layout(out / "shmesh-chart")
    description = find(r"^description: (.+)$", chart, "helm/Chart.yaml")
    # Helm reads name and version from the layer; registries show the rest from here.
    config = {"apiVersion": "v2", "name": "shmesh", "version": version, "appVersion": version, "type": "application"}
    config["description"] = description
    layout.finish(
        layout.manifest(
            layout.blob("application/vnd.cncf.helm.config.v1+json", config),
            [layout.blob("application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)],
            labels("shmesh", description, version),
        ),
        version,
    )
    print(out / f"shmesh-{version}.tgz", layout.root, sep="\n")


def krew_manifest(template, version, repository, archives):
    """The manifest of the plugin for krew; `archives` has the bytes of each architecture's archive."""
    for architecture, archive in archives.items():
        template = template.replace(f"@SHA256_{architecture}@", hashlib.sha256(archive).hexdigest())
    text = template.replace("@VERSION@", version).replace("@REPOSITORY@", repository.rstrip("/"))
    if "@" in text:
        raise ReleaseError(f"the manifest for krew lacks {find(r'(@[A-Za-z0-9_]+@?)', text, 'manifests/krew/shmesh.yaml')}")
    return text


def krew_command(out, architectures, repository):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    version, mtime = workspace_version(read("Cargo.toml")), commit_time()
    archives = {}
    for architecture in architectures:
        built = ROOT / "target" / "krew" / architecture
        run("helm/images/build", architecture, built, "kubectl")
        archives[architecture], _ = packed([(ROOT / "LICENSE", "LICENSE"), (built / "kubectl-shmesh", "kubectl-shmesh")], mtime)
        path = out / f"kubectl-shmesh_{version}_linux_{architecture}.tar.gz"
        path.write_bytes(archives[architecture])
        print(path)
    # A manifest has all architectures.
    if set(archives) == set(ARCHITECTURES):
        text = krew_manifest(read("manifests/krew/shmesh.yaml"), version, repository, archives)
        (out / "shmesh.yaml").write_text(text, encoding="utf-8")
        print(out / "shmesh.yaml")


def control(package, version, architecture, description, **more):
    fields = {
        "Package": package,
        "Version": version.replace("-", "~"),
        "Architecture": architecture,
        "Maintainer": "shmesh maintainers <maintainers@shmesh.invalid>",
        "Section": "libdevel" if package.endswith("-dev") else "utils",
        "Priority": "optional",
        **more,
        "Description": description,
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items())


def debian_package(out, root, text):
    package, architecture = find(r"^Package: (.+)$", text, "control"), find(r"^Architecture: (.+)$", text, "control")
    document = root / "usr" / "share" / "doc" / package
    document.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", document / "copyright")
    for path in root.rglob("*"):
        os.utime(path, (commit_time(), commit_time()), follow_symlinks=False)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(text, encoding="utf-8")
    path = Path(out) / f"{package}_{find(r'^Version: (.+)$', text, 'control')}_{architecture}.deb"
    # dpkg-deb takes the times in the archive from this variable.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_time())}
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, path, env=environment, stdout=subprocess.DEVNULL)
    print(path)


def strip(*paths):
    for path in paths:
        run("strip", "--strip-unneeded", path)


def numbers(version):
    """(2, 36) for "2.36"."""
    return tuple(map(int, version.split(".")))


def depends(*paths, newest=None):
    """The packages that ELF files need: glibc in the version of their newest symbol, which `newest` limits, and the library of the unwinder."""
    text = "".join(output("objdump", "-p", path) for path in paths)
    versions = [numbers(found) for found in re.findall(r"GLIBC_([0-9.]+)", text)]
    libraries = set(re.findall(r"NEEDED +(\S+)", text))
    unknown = {name for name in libraries if not name.startswith(("libc.", "libm.", "libdl.", "librt.", "libpthread.", "ld-linux", "libgcc_s."))}
    unknown -= {path.name for path in paths} | {f"lib{name}.so" for name in ("shmesh", "shmesh_nvipc", "nvipc", "nvlog")}
    if unknown or not versions:
        raise ReleaseError(f"{paths[0].name}: needs {sorted(unknown)}, which no package is known for; add it to depends()")
    glibc = max(versions)
    if newest and glibc > newest:
        found, limit = (".".join(map(str, version)) for version in (glibc, newest))
        raise ReleaseError(f"{paths[0].name} needs glibc {found}, newer than {limit}: build on a distribution that has an older one")
    packages = [f"libc6 (>= {'.'.join(map(str, glibc))})"]
    return ", ".join(packages + ["libgcc-s1"] * any(name.startswith("libgcc_s.") for name in libraries))


def debian_command(out, newest):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    version, architecture = workspace_version(read("Cargo.toml")), output("dpkg", "--print-architecture")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    run("cargo", "build", "--release", "--locked", "-p", "shmesh-cli", "-p", "shmesh-sidecar")
    with tempfile.TemporaryDirectory() as folder:
        command, library = Path(folder) / "command", Path(folder) / "library"
        programs = [command / "usr" / "bin" / program for program in PROGRAMS]
        programs[0].parent.mkdir(parents=True)
        for program in programs:
            shutil.copy(target / "release" / program.name, program)
        strip(*programs)
        run(programs[0], "man", command / "usr" / "share" / "man" / "man1")
        for shell, path in (
            ("bash", "usr/share/bash-completion/completions/shmesh"),
            ("zsh", "usr/share/zsh/vendor-completions/_shmesh"),
            ("fish", "usr/share/fish/vendor_completions.d/shmesh.fish"),
        ):
            (command / path).parent.mkdir(parents=True)
            (command / path).write_text(output(programs[0], "completions", shell) + "\n", encoding="utf-8")
        debian_package(
            out,
            command,
            control(
                "shmesh",
                version,
                architecture,
                "keep, look at, measure and clean up shared-memory links",
                Depends=depends(*programs, newest=newest),
                Suggests="shmesh-bridge",
            ),
        )
        # The static program of the image: it needs no library.
        run("helm/images/build", architecture, folder, "bridge")
        program = Path("usr/bin/shmesh-bridge")
        bridge = Path(folder) / "bridge-package"
        (bridge / program).parent.mkdir(parents=True)
        shutil.copy(Path(folder) / "bridge" / program, bridge / program)
        debian_package(out, bridge, control("shmesh-bridge", version, architecture, "carry shared-memory links to another machine"))
        run("lib/capi/install", "/usr", env={**os.environ, "DESTDIR": str(library)})
        libraries = [path for path in (library / "usr" / "lib").glob("*.so*") if not path.is_symlink()]
        strip(*libraries)
        # The static ones keep the symbols that a linker needs.
        for path in (library / "usr" / "lib").glob("*.a"):
            run("strip", "--strip-debug", "--enable-deterministic-archives", path)
        debian_package(
            out,
            library,
            control(
                "libshmesh-dev",
                version,
                architecture,
                "shared-memory links for C and C++, and NVIPC's interface",
                Depends=depends(*libraries, newest=newest),
            ),
        )


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version").add_argument("tag", nargs="?")
    commands.add_parser("notes")
    for name in ("images", "krew"):
        static = commands.add_parser(name)
        static.add_argument("out", type=Path)
        static.add_argument("--architecture", action="append", choices=ARCHITECTURES)
        if name == "krew":
            static.add_argument("--repository", required=True, help="URL of the repository whose releases have the archives")
    commands.add_parser("chart").add_argument("out", type=Path)
    debian = commands.add_parser("debian")
    debian.add_argument("out", type=Path)
    debian.add_argument("--newest-glibc", type=numbers, metavar="VERSION", help="fail if the packages would need a newer glibc")
    given = parser.parse_args(arguments)
    try:
        if given.command == "version":
            version_command(given.tag)
        elif given.command == "notes":
            notes_command()
        elif given.command == "images":
            images_command(given.out, given.architecture or ARCHITECTURES)
        elif given.command == "krew":
            krew_command(given.out, given.architecture or ARCHITECTURES, given.repository)
        elif given.command == "chart":
            chart_command(given.out)
        else:
            debian_command(given.out, given.newest_glibc)
    except (ReleaseError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"release.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
