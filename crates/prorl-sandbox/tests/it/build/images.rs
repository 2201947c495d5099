//! What is built can be run, looked at and unpacked.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use prorl_sandbox::images::{CacheMode, Compression, Definition, ImageBuilder};
use serde_json::json;

use super::{Bench, apptainer, are_there, text};
use crate::support::{is_root, skip};

/// Unpacks an image by another's hand, and returns where to.
fn unsquash(bench: &Bench, image: &Path) -> PathBuf {
    let bytes = fs::read(image).unwrap();
    let offset = bytes.windows(4).position(|four| four == b"hsqs").unwrap().to_string();
    let target = bench.path("unpacked");
    let mut command = Command::new("unsquashfs");
    let output =
        command.args(["-q", "-n", "-no-xattrs", "-o", &offset, "-d"]).arg(&target).arg(image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

/// Tells whether a fake root of this user has more ids than one.
fn has_range() -> bool {
    let users = fs::read_to_string("/etc/subuid").unwrap_or_default();
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).unwrap();
    is_root() || user.is_some_and(|user| users.lines().any(|line| line.split(':').next() == Some(&user.name)))
}

#[test]
fn minimal_is_built_runs_and_unpacks() {
    let test = "minimal_is_built_runs_and_unpacks";
    let Some(bench) = Bench::if_there(test, &["apptainer", "mksquashfs", "unsquashfs", "busybox"]) else { return };
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists()).unwrap();
    let mut request = bench.request("");
    request.definition = Definition::Template("minimal".to_owned());
    request.variables = json!({"busybox": busybox, "env": {"GREETING": "a b"}}).as_object().unwrap().clone();
    assert_eq!(bench.reason(&request), "built: there was no image yet");
    let image = bench.output();
    assert_eq!(bench.outputs(), ["image.sif"]);
    assert_eq!(
        text(&apptainer("exec", &image, &["sh", "-c", "echo $GREETING; head -n 1 /etc/group"])),
        "a b\nroot:x:0:\n"
    );
    assert_eq!(text(&apptainer("run", &image, &["-c", "echo $((6 * 7))"])), "42\n");
    let definition = text(&apptainer("inspect --deffile", &image, &[]));
    assert!(definition.starts_with("Bootstrap: scratch\n\n%setup\n"), "{definition}");
    let root = unsquash(&bench, &image);
    let has = |name: &str| root.join(name).symlink_metadata().is_ok();
    assert!(has("bin/busybox") && has("bin/ls") && has("usr/bin/env") && has("proc"));
    assert_eq!(fs::metadata(root.join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
}

#[test]
fn an_image_file_is_a_base_too() {
    let test = "an_image_file_is_a_base_too";
    let Some(bench) = Bench::if_there(test, &["apptainer", "mksquashfs", "unsquashfs", "busybox"]) else { return };
    if !Path::new("/bin/busybox").exists() {
        return skip(test, "no /bin/busybox here");
    }
    // Apptainer helps itself otherwise by a program that this image has no libraries for.
    if !has_range() {
        return skip(test, "this user has no range of ids");
    }
    let base = bench.path("base.sif");
    let mut request = bench.request("");
    request.definition = Definition::Template("minimal".to_owned());
    request.output.clone_from(&base);
    bench.build(&request).unwrap();
    let script = "\n\n%post\n    id -u > /made-by\n    echo \"$(head -n 1 /etc/group)\" > /made-of\n";
    let mut again = bench.request(&format!("Bootstrap: localimage\nFrom: {}{script}", base.display()));
    again.mode = CacheMode::Versioned;
    bench.reason(&again);
    assert_eq!(text(&apptainer("exec", &bench.output(), &["cat", "/made-by", "/made-of"])), "0\nroot:x:0:\n");
    assert!(bench.reason(&again).starts_with(&format!("reused: {} is unchanged", base.display())));
    request.variables = json!({"env": {"X": "1"}}).as_object().unwrap().clone();
    bench.build(&request).unwrap();
    assert!(bench.reason(&again).starts_with(&format!("rebuilt: the base image {} changed", base.display())));
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn a_folder_with_metadata_is_packed_without_a_launcher() {
    let test = "a_folder_with_metadata_is_packed_without_a_launcher";
    if !are_there(test, &["mksquashfs", "unsquashfs"]) {
        return;
    }
    let bench = Bench::with(|config| config.apptainer = Some("/nonexistent/apptainer".into()));
    let base = bench.base();
    fs::write(base.join("-all"), "like an option").unwrap();
    fs::create_dir(base.join("bin")).unwrap();
    let has_busybox = Path::new("/bin/busybox").exists();
    if has_busybox {
        fs::copy("/bin/busybox", base.join("bin/busybox")).unwrap();
        std::os::unix::fs::symlink("busybox", base.join("bin/sh")).unwrap();
    }
    for folder in ["dev", "proc", "sys", "tmp", "home"] {
        fs::create_dir(base.join(folder)).unwrap();
    }
    fs::set_permissions(&base, fs::Permissions::from_mode(0o751)).unwrap();
    let definition = format!(
        "Bootstrap: localimage\nFrom: {}\n\n%environment\n    export A='x y'\n\n%runscript\n    echo ran \"$@\"\n\n\
         %labels\n    Author me\n\n%help\n    Helpful.\n",
        base.display()
    );
    bench.reason(&bench.request(&definition));
    let image = bench.output();
    assert_eq!(bench.outputs(), ["image.sif"]);
    assert_eq!(fs::metadata(&image).unwrap().permissions().mode() & 0o111, 0o111);
    let root = unsquash(&bench, &image);
    assert_eq!(fs::read_to_string(root.join("etc/settings")).unwrap(), "of the base\n");
    assert_eq!(fs::read_to_string(root.join("-all")).unwrap(), "like an option");
    assert_eq!(fs::read_to_string(root.join(".singularity.d/Singularity")).unwrap(), definition);
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o7777, 0o751);
    if !has_busybox || !are_there(test, &["apptainer"]) {
        return;
    }
    fs::set_permissions(bench.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let said = text(&apptainer("exec", &image, &["/bin/busybox", "sh", "-c", "echo $A; cat /etc/settings"]));
    assert_eq!(said, "x y\nof the base\n");
    assert_eq!(text(&apptainer("run", &image, &["1", "2"])), "ran 1 2\n");
    assert_eq!(text(&apptainer("inspect --deffile", &image, &[])).trim_end(), definition.trim_end());
    assert!(text(&apptainer("inspect --labels", &image, &[])).contains("Author: me"));
}

#[test]
fn images_are_packed_as_asked() {
    if !are_there("images_are_packed_as_asked", &["mksquashfs"]) {
        return;
    }
    for (compression, id) in
        [(Compression::Zstd(1), 6), (Compression::Gzip, 1), (Compression::Xz, 4), (Compression::Lz4, 5)]
    {
        let bench = Bench::with(|config| config.compression = compression);
        bench.reason(&bench.plain());
        let bytes = fs::read(bench.output()).unwrap();
        let start = bytes.windows(4).position(|four| four == b"hsqs").unwrap();
        assert_eq!(bytes[start + 20..start + 22], [id, 0], "{compression}");
    }
}

#[test]
fn scripts_run_in_an_image_that_is_built_on() {
    let test = "scripts_run_in_an_image_that_is_built_on";
    let Some(bench) = Bench::if_there(test, &["apptainer", "mksquashfs"]) else { return };
    if !has_range() {
        return skip(test, "this user has no range of ids");
    }
    // Made by tests/make-debian.sh.
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-data/debian");
    if fs::read_dir(base.join("etc")).is_err() {
        return skip(test, "there is no unpacked Debian in target/test-data");
    }
    let base = base.canonicalize().unwrap();
    let request = bench.request(&format!(
        "Bootstrap: localimage\nFrom: {}\n\n%post\n    cat /etc/debian_version > /made-of\n    id -u > /made-by\n\
         \x20   touch /owned\n    chown daemon /owned\n\n%runscript\n    cat /made-of /made-by\n",
        base.display()
    ));
    bench.reason(&request);
    assert_eq!(bench.outputs(), ["image.sif"]);
    let version = fs::read_to_string(base.join("etc/debian_version")).unwrap();
    assert_eq!(text(&apptainer("run", &bench.output(), &[])), format!("{version}0\n"));
}

#[test]
fn the_definition_is_handed_on_byte_for_byte() {
    let bench = Bench::new();
    let odd = b"Bootstrap: scratch\r\n# \xff {{ not mine }}\n%post\n\x00";
    let file = bench.path("custom.def");
    fs::write(&file, odd).unwrap();
    let none = json!({}).as_object().unwrap().clone();
    assert_eq!(ImageBuilder::render(&Definition::File(file.clone()), &none).unwrap(), odd);
    let some = json!({"x": 1}).as_object().unwrap().clone();
    let said = ImageBuilder::render(&Definition::File(file), &some).unwrap_err().to_string();
    assert!(said.contains("custom.def takes no variable \"x\""), "{said}");
    for name in ["own.def.j2", "own.jinja"] {
        let file = bench.path(name);
        fs::write(&file, "x={{ x }}\n").unwrap();
        assert_eq!(ImageBuilder::render(&Definition::File(file), &some).unwrap(), b"x=1\n");
    }
}

#[test]
fn examples_are_what_the_templates_make() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/images");
    let none = json!({}).as_object().unwrap().clone();
    let mut examples: BTreeSet<String> = super::names(&folder).into_iter().collect();
    assert!(examples.remove("README.md"));
    for template in ImageBuilder::templates() {
        assert!(examples.remove(&format!("{}.def", template.name)), "{}", template.name);
        let example = fs::read_to_string(folder.join(format!("{}.def", template.name))).unwrap();
        let rendered = ImageBuilder::render(&Definition::Template(template.name.to_owned()), &none).unwrap();
        // An example begins with a comment of its own.
        let own = example.find("Bootstrap:").unwrap();
        assert!(example[..own].lines().all(|line| line.is_empty() || line.starts_with('#')));
        assert_eq!(example[own..], String::from_utf8(rendered).unwrap(), "{}", template.name);
    }
    assert_eq!(examples, BTreeSet::new());
}
