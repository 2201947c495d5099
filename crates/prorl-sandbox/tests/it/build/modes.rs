//! When an image that is there will do, and what is said about it.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use prorl_sandbox::images::{CacheMode, Compression, Definition};

use super::{Bench, are_there, names};
use crate::support::{is_root, skip};

const PROGRAMS: [&str; 1] = ["mksquashfs"];

#[test]
fn scratch_builds_every_time() {
    let Some(bench) = Bench::if_there("scratch_builds_every_time", &PROGRAMS) else { return };
    let request = bench.plain();
    assert_eq!(bench.reason(&request), "built: there was no image yet");
    assert_eq!(bench.reason(&request), "rebuilt: that is what the mode scratch does");
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn versioned_follows_the_base() {
    let Some(bench) = Bench::if_there("versioned_follows_the_base", &PROGRAMS) else { return };
    let mut request = bench.plain();
    bench.reason(&request);
    request.mode = CacheMode::Versioned;
    // The mode scratch has taken note of the base, for this one.
    let built = bench.build(&request).unwrap();
    let start = format!("reused: {} is unchanged (sha256:", bench.base().display());
    assert!(built.reused && built.reason.starts_with(&start), "{}", built.reason);
    fs::write(bench.base().join("more"), "").unwrap();
    let said = bench.reason(&request);
    assert!(
        said.starts_with(&format!("rebuilt: the base image {} changed (sha256:", bench.base().display())),
        "{said}"
    );
    assert!(said.contains(".. is now sha256:"), "{said}");
    assert!(bench.reason(&request).starts_with("reused: "));
    // Another version of prorl.
    let records = bench.path("state/records");
    let record = records.join(&names(&records)[0]);
    let text = fs::read_to_string(&record).unwrap().replace(env!("CARGO_PKG_VERSION"), "0.0.1");
    fs::write(&record, text).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(bench.reason(&request), format!("rebuilt: prorl's version changed (0.0.1 is now {version})"));
}

#[test]
fn lock_follows_the_lock_files() {
    let Some(bench) = Bench::if_there("lock_follows_the_lock_files", &PROGRAMS) else { return };
    let mut request = bench.plain();
    request.mode = CacheMode::Lock;
    let said = bench.build(&request).unwrap_err().to_string();
    assert!(said.ends_with("is to be built in the mode lock, and no lock file is named"), "{said}");
    let locks: Vec<PathBuf> = ["a.lock", "b.lock"].iter().map(|name| bench.path(name)).collect();
    request.locks.clone_from(&locks);
    fs::write(&locks[0], "a==1\n").unwrap();
    let said = bench.build(&request).unwrap_err().to_string();
    assert_eq!(said, format!("{} is not there; it is named as a lock file", locks[1].display()));
    fs::write(&locks[1], "b==1\n").unwrap();
    assert_eq!(bench.reason(&request), "built: there was no image yet");
    // The base is none of this mode's business.
    fs::write(bench.base().join("more"), "").unwrap();
    assert_eq!(bench.reason(&request), "reused: 2 lock files are byte-identical");
    request.locks.reverse();
    assert_eq!(bench.reason(&request), "reused: 2 lock files are byte-identical");
    fs::write(&locks[1], "b==2\n").unwrap();
    let said = bench.reason(&request);
    assert!(said.starts_with(&format!("rebuilt: the lock file {} changed (sha256:", locks[1].display())), "{said}");
    request.locks.truncate(1);
    assert!(bench.reason(&request).contains("is no longer one"));
    assert_eq!(bench.reason(&request), "reused: the lock file is byte-identical");
    request.mode = CacheMode::Versioned;
    assert!(bench.reason(&request).ends_with("..)"), "the base is unchanged");
    fs::write(bench.base().join("more still"), "").unwrap();
    assert!(bench.reason(&request).starts_with("rebuilt: the base image "));
}

#[test]
fn versioned_reuses_what_builds_on_nothing() {
    let Some(bench) = Bench::if_there("versioned_reuses_what_builds_on_nothing", &["apptainer", "mksquashfs"]) else {
        return;
    };
    let mut request = bench.with_script("    true");
    bench.reason(&request);
    request.mode = CacheMode::Versioned;
    assert_eq!(bench.reason(&request), "reused: nothing that it is made from changed");
}

#[test]
fn a_folder_that_cannot_be_written_is_told_before_anything_is_built() {
    let test = "a_folder_that_cannot_be_written_is_told_before_anything_is_built";
    let Some(bench) = Bench::if_there(test, &PROGRAMS) else { return };
    if is_root() {
        return skip(test, "root writes into every folder");
    }
    let mut request = bench.plain();
    request.mode = CacheMode::Versioned;
    bench.reason(&request);
    let set = |mode| fs::set_permissions(bench.path("out"), fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    // What is there can be used.
    assert!(bench.reason(&request).starts_with("reused: "));
    fs::write(bench.base().join("more"), "").unwrap();
    let error = bench.build(&request).unwrap_err();
    set(0o755);
    let said = error.to_string();
    assert!(said.starts_with("failed to write into folder ") && said.ends_with("/out"), "{said}");
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn only_the_same_definition_and_packing_are_the_same_image() {
    let Some(bench) = Bench::if_there("only_the_same_definition_and_packing_are_the_same_image", &PROGRAMS) else {
        return;
    };
    let mut request = bench.plain();
    request.mode = CacheMode::Versioned;
    bench.reason(&request);
    let Definition::Text { text, .. } = &mut request.definition else { unreachable!() };
    text.push_str("\n%runscript\n    true\n");
    let said = bench.reason(&request);
    assert!(said.starts_with("rebuilt: the definition changed (sha256:"), "{said}");
    let gzip = Bench::with(|config| {
        config.compression = Compression::Gzip;
        config.state = bench.path("state");
    });
    let built = gzip.build(&request).unwrap();
    assert_eq!(built.reason, "rebuilt: the compression changed (zstd-1 is now gzip)");
    // Another output is another image.
    let other = bench.path("out/other.sif");
    request.output.clone_from(&other);
    assert_eq!(bench.build(&request).unwrap().reason, "built: there was no image yet");
    assert_eq!(bench.outputs(), ["image.sif", "other.sif"]);
}

#[test]
fn an_image_that_is_not_as_it_was_built_is_built_again() {
    let Some(bench) = Bench::if_there("an_image_that_is_not_as_it_was_built_is_built_again", &PROGRAMS) else { return };
    let mut request = bench.plain();
    request.mode = CacheMode::Versioned;
    let whole = bench.build(&request).unwrap();
    let mut bytes = fs::read(bench.output()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(bench.output(), &bytes).unwrap();
    let said = bench.reason(&request);
    let start = format!("rebuilt: the image was damaged or replaced (sha256:{}.. was built", &whole.digest.hex()[..12]);
    assert!(said.starts_with(&start), "{said}");
    fs::remove_file(bench.output()).unwrap();
    assert_eq!(bench.reason(&request), "rebuilt: the image was removed");
    // What is remembered may be damaged too, or gone.
    let records = bench.path("state/records");
    let record = records.join(&names(&records)[0]);
    fs::write(&record, "{\"format\": 1, ").unwrap();
    assert!(bench.reason(&request).starts_with("rebuilt: the record of the last build is damaged ("));
    fs::remove_file(&record).unwrap();
    assert!(bench.reason(&request).starts_with("rebuilt: nothing is known of how the file"));
    assert!(bench.reason(&request).starts_with("reused: "));
}

#[test]
fn a_place_that_is_none_is_told_before_anything_is_done() {
    if !are_there("a_place_that_is_none_is_told_before_anything_is_done", &PROGRAMS) {
        return;
    }
    let bench = Bench::new();
    let mut request = bench.plain();
    request.output = bench.path("out");
    let said = bench.build(&request).unwrap_err().to_string();
    assert!(said.ends_with("is a folder; an image file is built"), "{said}");
    request.output = bench.path("missing/image.sif");
    let said = bench.build(&request).unwrap_err().to_string();
    assert!(said.starts_with("failed to find folder ") && said.ends_with("/missing"), "{said}");
    request.output = bench.output();
    request.definition = Definition::Template("pyhton".to_owned());
    let said = bench.build(&request).unwrap_err().to_string();
    assert!(said.contains("\"pyhton\" is not shipped; there are minimal, python, swe, qemu"), "{said}");
    assert_eq!(bench.outputs(), Vec::<String>::new());
}
