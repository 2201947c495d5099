//! Builds that end early leave no process, no half image, and nothing that the next build does not remove.

use std::{fs, path::Path, process::Stdio, sync::Arc, thread};

use prorl_sandbox::images::{Cancel, ImageBuilder, ImageError, Quiet};

use super::{Bench, Held, are_there, beside, names, release, request, with_script};
use crate::support::{alone, assert_passed, is_alone, is_root, skip};

const PROGRAMS: [&str; 2] = ["apptainer", "mksquashfs"];

/// A script that holds a pipe, with a child in another session that no signal but one ends, and never ends.
fn stubborn(folder: &Path) -> String {
    format!(
        "    exec 9>{}/held\n    setsid sh -c 'trap \"\" HUP INT TERM; echo >&9; sleep 1000; sleep 1000' &\n    sleep 1000",
        folder.display()
    )
}

#[test]
fn a_build_that_is_cancelled_leaves_nothing() {
    let Some(bench) = Bench::if_there("a_build_that_is_cancelled_leaves_nothing", &PROGRAMS) else { return };
    let held = bench.fifo("held");
    let request = bench.with_script(&stubborn(bench.folder.path()));
    let cancel = Cancel::default();
    let (ended, mut held) = thread::scope(|scope| {
        let build = scope.spawn(|| bench.builder.build(&request, &cancel, &Quiet));
        let held = Held::wait(&held);
        cancel.cancel();
        (build.join().unwrap(), held)
    });
    assert!(matches!(ended, Err(ImageError::Cancelled)), "{ended:?}");
    assert!(held.ends());
    assert_eq!(bench.outputs(), Vec::<String>::new());
}

#[tokio::test]
async fn a_build_whose_future_is_dropped_leaves_nothing() {
    let Some(bench) = Bench::if_there("a_build_whose_future_is_dropped_leaves_nothing", &PROGRAMS) else { return };
    let held = bench.fifo("held");
    let request = bench.with_script(&stubborn(bench.folder.path()));
    let mut running = tokio::task::spawn_blocking(move || Held::wait(&held));
    let mut held = tokio::select! {
        ended = bench.builder.build_async(request, Arc::new(Quiet)) => panic!("{ended:?}"),
        held = &mut running => held.unwrap(),
    };
    assert!(tokio::task::spawn_blocking(move || held.ends()).await.unwrap());
    // The next build of the output waits until the last is gone.
    let next = bench.plain();
    bench.builder.build_async(next, Arc::new(Quiet)).await.unwrap();
    assert_eq!(bench.outputs(), ["image.sif"]);
}

const KILLED: &str = "build::ending::a_builder_that_is_killed_leaves_nothing_that_stays";

#[test]
fn a_builder_that_is_killed_leaves_nothing_that_stays() {
    if let (true, Ok(folder)) = (is_alone(KILLED), std::env::var("PRORL_TEST_FOLDER")) {
        let folder = Path::new(&folder);
        let request = request(&with_script(&stubborn(folder)), folder.join("out/image.sif"));
        beside(folder).build(&request, &Cancel::default(), &Quiet).unwrap();
        return;
    }
    let Some(bench) = Bench::if_there("a_builder_that_is_killed_leaves_nothing_that_stays", &PROGRAMS) else { return };
    let held = bench.fifo("held");
    let mut builder = alone(KILLED, &[]);
    builder.env("PRORL_TEST_FOLDER", bench.folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut builder = builder.spawn().unwrap();
    let mut held = Held::wait(&held);
    assert_eq!(names(&bench.path("state/trees")).len(), 1);
    builder.kill().unwrap();
    builder.wait().unwrap();
    assert!(held.ends());
    assert_eq!(names(&bench.path("out")).iter().filter(|name| !name.starts_with('.')).count(), 0);
    // Whoever comes next, for whatever output, waits for nobody, and removes what is left.
    assert_eq!(names(&bench.path("state/owners")).len(), 2);
    bench.build(&request("Bootstrap: none\n", bench.path("out/other.sif"))).unwrap_err();
    assert_eq!(bench.outputs(), Vec::<String>::new());
    assert_eq!(names(&bench.path("state/owners")).len(), 1);
    assert_eq!(bench.reason(&bench.plain()), "built: there was no image yet");
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn what_ended_processes_have_left_is_swept_and_nothing_else() {
    let bench = Bench::new();
    let living = names(&bench.path("state/owners")).remove(0);
    let make = |token: &str, part: &str| {
        let tree = bench.path(&format!("state/trees/0123abcd.{token}-7"));
        fs::create_dir_all(tree.join("build-temp/rootfs")).unwrap();
        let part = bench.path(part);
        fs::write(&part, "half").unwrap();
        fs::write(tree.join("part"), part.as_os_str().as_encoded_bytes()).unwrap();
        fs::write(bench.path(&format!("state/records/0123abcd.{token}-7")), "{").unwrap();
    };
    make(&living, &format!("out/.living.sif.{living}-7.part"));
    fs::write(bench.path("state/records/0123abcd.json"), "{}").unwrap();
    assert_eq!(bench.builder.sweep().unwrap(), 0);
    make("gone-1-2-0", "out/.gone.sif.gone-1-2-0-7.part");
    // One whose file is none of a build is not believed.
    make("odd-1-2-0", "out/odd.sif");
    assert_eq!(bench.builder.sweep().unwrap(), 5);
    let left = |folder: &str| names(&bench.path(folder));
    assert_eq!(left("out"), [format!(".living.sif.{living}-7.part"), "odd.sif".to_owned()]);
    assert_eq!(left("state/trees"), [format!("0123abcd.{living}-7")]);
    let mut records = left("state/records");
    records.sort_by_key(|name| name != "0123abcd.json"); // the machine's name may begin with a capital letter
    assert_eq!(records, ["0123abcd.json".to_owned(), format!("0123abcd.{living}-7")]);
    // The next builder removes what the last has left, by itself.
    let folder = bench.folder;
    drop(bench.builder);
    let next = beside(folder.path());
    assert_eq!(names(&folder.path().join("out")), ["odd.sif"]);
    assert_eq!(names(&folder.path().join("state/trees")), Vec::<String>::new());
    assert_eq!(next.sweep().unwrap(), 0);
}

#[test]
fn what_a_build_that_has_ended_leaves_running_is_ended() {
    let Some(bench) = Bench::if_there("what_a_build_that_has_ended_leaves_running_is_ended", &PROGRAMS) else { return };
    let (held, go) = (bench.fifo("held"), bench.fifo("go"));
    let request = bench.with_script(&format!(
        "    setsid sh -c 'trap \"\" HUP INT TERM; exec 9>{}; echo >&9; sleep 1000' >/dev/null 2>&1 &\n    read line < {}",
        held.display(),
        go.display()
    ));
    let (built, mut held) = thread::scope(|scope| {
        let build = scope.spawn(|| bench.build(&request));
        let held = Held::wait(&held);
        release(&go);
        (build.join().unwrap(), held)
    });
    built.unwrap();
    assert!(held.ends());
}

#[test]
fn a_script_that_fails_is_told_by_its_last_lines() {
    let Some(bench) = Bench::if_there("a_script_that_fails_is_told_by_its_last_lines", &PROGRAMS) else { return };
    bench.reason(&bench.plain());
    let before = fs::read(bench.output()).unwrap();
    let script = "    set -x\n    seq 1 100\n    echo 'no such \x1b[31mthing' >&2\n    exit 3";
    let error = bench.build(&bench.with_script(script)).unwrap_err();
    assert!(matches!(&error, ImageError::Program { .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("no such thing\n") && said.contains("\n100\n"), "{said}");
    assert!(!said.contains("\n50\n") && !said.contains("\n+ "), "{said}");
    assert!(said.find("\nFATAL: ").unwrap() < said.find("\n100\n").unwrap(), "{said}");
    assert!(said.contains("while it built ") && said.contains("from test.def"), "{said}");
    // The image that was there is there.
    assert_eq!(bench.outputs(), ["image.sif"]);
    assert_eq!(fs::read(bench.output()).unwrap(), before);
    assert!(bench.reason(&bench.plain()).starts_with("rebuilt: that is what"));
}

#[test]
fn programs_that_are_missing_are_told() {
    let bench = Bench::with(|config| {
        config.apptainer = Some("/nonexistent/apptainer".into());
        config.mksquashfs = Some("/nonexistent/mksquashfs".into());
    });
    let said = bench.build(&bench.with_script("true")).unwrap_err().to_string();
    assert_eq!(said, "/nonexistent/apptainer is not there; install Apptainer or name its path");
    let said = bench.build(&bench.plain()).unwrap_err().to_string();
    assert!(said.starts_with("/nonexistent/mksquashfs is not there; install squashfs-tools"), "{said}");
    // One that is there and cannot be executed.
    let other = bench.path("mksquashfs");
    fs::write(&other, "no program").unwrap();
    let other = Bench::with(|config| config.mksquashfs = Some(other));
    let said = other.build(&other.plain()).unwrap_err().to_string();
    assert!(said.contains("mksquashfs did not start: failed to execute program"), "{said}");
    assert_eq!(other.outputs(), Vec::<String>::new());
}

#[test]
fn a_file_that_cannot_be_read_is_not_left_out() {
    let test = "a_file_that_cannot_be_read_is_not_left_out";
    let Some(bench) = Bench::if_there(test, &["mksquashfs"]) else { return };
    if is_root() {
        return skip(test, "root reads every file");
    }
    let secret = bench.base().join("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
    let said = bench.build(&bench.plain()).unwrap_err().to_string();
    assert!(said.contains("secret"), "{said}");
    assert_eq!(bench.outputs(), Vec::<String>::new());
}

const FULL: &str = "build::ending::a_full_disk_is_told_and_nothing_is_left";

#[test]
fn a_full_disk_is_told_and_nothing_is_left() {
    let test = "a_full_disk_is_told_and_nothing_is_left";
    if let (true, Ok(folder)) = (is_alone(FULL), std::env::var("PRORL_TEST_FOLDER")) {
        let bench = Bench::new();
        // What no compression makes smaller.
        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            for shift in [13, -7, 17] {
                state ^= if shift > 0 { state << shift } else { state >> -shift };
            }
            state.to_le_bytes()
        });
        let noise: Vec<u8> = noise.take(1 << 17).flatten().collect();
        fs::write(bench.base().join("noise"), noise).unwrap();
        let mut request = bench.plain();
        request.output = Path::new(&folder).join("image.sif");
        let said = bench.build(&request).unwrap_err().to_string();
        assert!(said.contains("No space left on device") && said.contains("free space there"), "{said}");
        assert_eq!(names(Path::new(&folder)), Vec::<String>::new());
        assert_eq!(bench.outputs(), Vec::<String>::new());
        return;
    }
    if !are_there(test, &["mksquashfs", "unshare"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = format!("mount -t tmpfs -o size=256k none '{}' && exec \"$@\"", folder.path().display());
    let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", &script, "sh"];
    let mut full = alone(FULL, &wrapper);
    let output = full.env("PRORL_TEST_FOLDER", folder.path()).output().unwrap();
    if String::from_utf8_lossy(&output.stderr).contains("unshare failed") {
        return skip(test, "no user namespaces here");
    }
    assert_passed(&output);
}

#[test]
fn a_builder_needs_a_state_folder_that_it_can_write() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let config = prorl_sandbox::images::BuilderConfig::new("/guest", file.join("state"));
    let said = ImageBuilder::new(config).unwrap_err().to_string();
    assert!(said.starts_with("failed to make ") && said.contains("state"), "{said}");
}
