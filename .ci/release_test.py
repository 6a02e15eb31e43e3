#!/usr/bin/env python3
"""Tests of release.py: what it refuses, and that its archives and layouts are what registries and programs expect."""

import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import release

CARGO = '[workspace.package]\nversion = "1.2.3"\n\nshmesh-sys = { path = "lib/sys", version = "1.2.3" }\n'
BRIDGE = '[package]\nname = "shmesh-bridge"\nversion = "1.2.3"\n'
CHART = "apiVersion: v2\nversion: 1.2.3\nappVersion: 1.2.3\n"
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 1.2.3 - 2026-01-01\n\n- Old.\n\n## 1.2.2\n"


class Version(unittest.TestCase):
    def test_agreement(self):
        self.assertEqual(release.workspace_version(CARGO), "1.2.3")
        self.assertEqual(release.disagreements("1.2.3", CARGO, BRIDGE, CHART, CHANGELOG, "v1.2.3"), [])

    def test_each_disagreement_is_named(self):
        dependency = CARGO.replace('lib/sys", version = "1.2.3"', 'lib/sys", version = "1.2.2"')
        self.assertIn("shmesh-sys", release.disagreements("1.2.3", dependency, BRIDGE, CHART, CHANGELOG, None)[0])
        chart = CHART.replace("appVersion: 1.2.3", 'appVersion: "1.2.4"')
        self.assertIn("appVersion is 1.2.4", release.disagreements("1.2.3", CARGO, BRIDGE, chart, CHANGELOG, None)[0])
        bridge = BRIDGE.replace("1.2.3", "1.2.2")
        self.assertIn("lib/bridge/Cargo.toml", release.disagreements("1.2.3", CARGO, bridge, CHART, CHANGELOG, None)[0])
        self.assertIn("needs the tag v1.2.3", release.disagreements("1.2.3", CARGO, BRIDGE, CHART, CHANGELOG, "1.2.3")[0])
        empty = CHANGELOG.replace("- Old.\n", "")
        self.assertIn("no section", release.disagreements("1.2.3", CARGO, BRIDGE, CHART, empty, "v1.2.3")[0])

    def test_this_tree_agrees(self):
        cargo, bridge, chart = map(release.read, ("Cargo.toml", "lib/bridge/Cargo.toml", "helm/Chart.yaml"))
        version = release.workspace_version(cargo)
        self.assertEqual(release.disagreements(version, cargo, bridge, chart, "", None), [])

    def test_section(self):
        self.assertEqual(release.section(CHANGELOG, "1.2.3"), "- Old.")
        self.assertEqual(release.section(CHANGELOG, "Unreleased"), "- New.")
        self.assertIsNone(release.section(CHANGELOG, "1.2.2"))
        self.assertIsNone(release.section(CHANGELOG, "1.2"))


class Archives(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root = self.folder / "root"
        (self.root / "usr" / "bin").mkdir(parents=True)
        (self.root / "usr" / "bin" / "program").write_bytes(b"program")
        (self.root / "usr" / "bin" / "program").chmod(0o755)
        (self.root / "tmp").mkdir(mode=0o777)
        (self.root / "tmp").chmod(0o1777)

    def blob(self, layout, descriptor):
        algorithm, digest = descriptor["digest"].split(":")
        data = (layout / "blobs" / algorithm / digest).read_bytes()
        self.assertEqual((hashlib.sha256(data).hexdigest(), len(data)), (digest, descriptor["size"]))
        return data

    def test_same_tree_gives_the_same_bytes(self):
        entries = [(self.root, "root")]
        first = release.packed(entries, 1000)
        (self.root / "usr" / "bin" / "program").touch()
        self.assertEqual(first, release.packed(entries, 1000))
        self.assertNotEqual(first, release.packed(entries, 2000))

    def test_members_belong_to_root_and_keep_their_mode(self):
        with tarfile.open(fileobj=io.BytesIO(release.packed([(self.root, "root")], 7)[0])) as archive:
            members = {member.name: member for member in archive}
        self.assertEqual(list(members), ["root", "root/tmp", "root/usr", "root/usr/bin", "root/usr/bin/program"])
        self.assertTrue(all((m.uid, m.gid, m.uname, m.mtime) == (0, 0, "", 7) for m in members.values()))
        self.assertEqual(members["root/tmp"].mode, 0o1777)
        self.assertEqual(members["root/usr/bin/program"].mode, 0o755)

    def test_packages_of_a_program(self):
        self.assertRegex(release.depends(Path("/bin/true").resolve()), r"^libc6 \(>= 2\.\d+\)(, libgcc-s1)?$")

    def test_packages_for_an_older_distribution(self):
        symbols = "  NEEDED               libc.so.6\n    0x06 0x00 05 GLIBC_2.9\n    0x06 0x00 08 GLIBC_2.39\n"
        with mock.patch("release.output", return_value=symbols):
            self.assertEqual(release.depends(Path("program"), newest=(2, 39)), "libc6 (>= 2.39)")
            with self.assertRaisesRegex(release.ReleaseError, "program needs glibc 2.39, newer than 2.36"):
                release.depends(Path("program"), newest=(2, 36))

    def test_package_has_the_programs_of_the_tutorial(self):
        commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", release.read("docs/first-link.md"), re.MULTILINE | re.DOTALL))
        self.assertEqual(set(re.findall(r"^(shmesh[a-z-]*) ", commands, re.MULTILINE)), set(release.PROGRAMS))

    def test_image_layout(self):
        layout = release.image_layout(self.folder / "out", "sidecar", {"amd64": self.root, "arm64": self.root}, "1.2.3", 7)
        self.assertEqual(json.loads((layout / "oci-layout").read_text()), {"imageLayoutVersion": "1.0.0"})
        (top,) = json.loads((layout / "index.json").read_text())["manifests"]
        self.assertEqual(top["annotations"], {"org.opencontainers.image.ref.name": "1.2.3"})
        index = json.loads(self.blob(layout, top))
        self.assertEqual([m["platform"]["architecture"] for m in index["manifests"]], ["amd64", "arm64"])
        for descriptor in index["manifests"]:
            manifest = json.loads(self.blob(layout, descriptor))
            config = json.loads(self.blob(layout, manifest["config"]))
            self.assertEqual(config["config"]["User"], "65532:65532")
            self.assertEqual(config["config"]["Entrypoint"], ["/usr/bin/shmesh-sidecar"])
            self.assertEqual(config["created"], "1970-01-01T00:00:07Z")
            (layer,) = manifest["layers"]
            plain = gzip.decompress(self.blob(layout, layer))
            self.assertEqual(config["rootfs"]["diff_ids"], [f"sha256:{hashlib.sha256(plain).hexdigest()}"])
            with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
                self.assertIn("usr/bin/program", archive.getnames())

    def test_each_image_of_the_chart_is_built_and_published(self):
        images = {f"shmesh-{image}" for image in release.IMAGES}
        self.assertEqual(set(re.findall(r"^  image: (\S+)$", release.read("helm/values.yaml"), re.MULTILINE)), images)
        targets = re.findall(r"^FROM scratch AS (\S+)$", release.read("helm/images/Dockerfile"), re.MULTILINE)
        self.assertEqual({f"shmesh-{target}" for target in targets}, images)
        workflow = release.read(".github/workflows/release.yml")
        published = release.find(r"^ *for name in (shmesh-.+); do$", workflow, "release.yml").split()
        self.assertEqual(set(published), images | {"shmesh-chart"})
        folders = release.find(r"for folder in ([^;]+); do cp .*sbom", workflow, "release.yml").split()
        self.assertEqual({f"shmesh-{Path(folder).name}" for folder in folders}, images, "bills of materials")

    def test_all_root_file_systems_are_built_for_each_architecture(self):
        commands = []
        with (
            mock.patch("release.run", side_effect=lambda *command: commands.append([str(word) for word in command])),
            mock.patch("release.image_layout", side_effect=lambda out, image, roots, *_: (image, sorted(roots))) as layouts,
            mock.patch("release.commit_time", return_value=7),
            mock.patch("builtins.print"),
        ):
            release.images_command(self.folder, ["amd64", "arm64"])
        self.assertEqual([layout.args[1] for layout in layouts.call_args_list], list(release.IMAGES))
        for architecture in ("amd64", "arm64"):
            ours = [command[3:] for command in commands if command[1] == architecture]
            self.assertEqual(ours, [[], ["bridge"]])

    def test_krew_manifest_has_the_hash_of_each_archive(self):
        template = release.read("manifests/krew/shmesh.yaml")
        archives = {"amd64": b"one", "arm64": b"two"}
        text = release.krew_manifest(template, "1.2.3", "https://example.com/a/shmesh/", archives)
        base = "https://example.com/a/shmesh/releases/download/v1.2.3/kubectl-shmesh_1.2.3_linux_"
        for architecture, archive in archives.items():
            block = text[text.index(f"arch: {architecture}") :]
            self.assertIn(f'uri: "{base}{architecture}.tar.gz"\n', block[:400])
            self.assertIn(f'sha256: "{hashlib.sha256(archive).hexdigest()}"\n', block[:400])
        self.assertIn('\n  version: "v1.2.3"\n', text)
        with self.assertRaisesRegex(release.ReleaseError, "SHA256_arm64"):
            release.krew_manifest(template, "1.2.3", "https://example.com/a/shmesh", {"amd64": b"one"})

    def test_chart_has_all_its_files_and_nothing_else(self):
        with mock.patch("builtins.print"):
            release.chart_command(self.folder)
        version = release.workspace_version(release.read("Cargo.toml"))
        archive = (self.folder / f"shmesh-{version}.tgz").read_bytes()
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            names = set(files.getnames())
        for path in (release.ROOT / "helm" / "templates").iterdir():
            self.assertIn(f"shmesh/templates/{path.name}", names)
        self.assertIn("shmesh/Chart.yaml", names)
        self.assertFalse([name for name in names if "tests" in name.split("/")[1:2] or "images" in name])
        layout = self.folder / "shmesh-chart"
        (top,) = json.loads((layout / "index.json").read_text())["manifests"]
        manifest = json.loads(self.blob(layout, top))
        self.assertEqual(manifest["config"]["mediaType"], "application/vnd.cncf.helm.config.v1+json")
        self.assertEqual(self.blob(layout, manifest["layers"][0]), archive)


if __name__ == "__main__":
    unittest.main()
