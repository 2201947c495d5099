//! What the tests share: copies of this program that run one test alone, and ways to look for leftovers.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    process::{Command, Output},
    sync::LazyLock,
};

use prorl_guest::Guest;
use prorl_sandbox::NodeConfig;
use tempfile::TempDir;

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

/// A node in a folder of this name, below one that belongs to the test.
pub(crate) fn config(dir: &Path) -> NodeConfig {
    NodeConfig { dir: dir.join("nodes"), ..NodeConfig::new(GUEST.path()) }
}

/// The variable that tells a copy of this program which test it runs alone.
const ALONE: &str = "PRORL_TEST_ALONE";

/// The variable that tells a copy of this program where to work.
const FOLDER: &str = "PRORL_TEST_FOLDER";

/// Returns the folder to work in if this process runs `test` alone, started by [`alone`].
pub(crate) fn is_alone(test: &str) -> Option<std::path::PathBuf> {
    std::env::var(ALONE).is_ok_and(|name| name == test).then(|| std::env::var_os(FOLDER).unwrap().into())
}

/// A command that runs one test of this program in a process of its own, through `wrapper` if there is one.
pub(crate) fn alone(test: &str, folder: &Path, wrapper: &[&str]) -> Command {
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper.split_first() {
        Some((program, args)) => {
            let mut command = Command::new(program);
            command.args(args).arg(me);
            command
        }
        None => Command::new(me),
    };
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ALONE, test).env(FOLDER, folder);
    command
}

pub(crate) fn assert_passed(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("1 passed"), "{out}\n{err}");
}

/// A wrapper that gives its command mounts of its own, which it may make; nothing where this user may not have that.
pub(crate) fn own_mounts(test: &str) -> Option<&'static [&'static str]> {
    let wrapper = &["unshare", "--user", "--map-root-user", "--mount"];
    let allowed = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
    if allowed.is_ok_and(|output| output.status.success()) {
        return Some(wrapper);
    }
    skip(test, "this user may not make mounts of its own");
    None
}

/// Names of what is in a folder.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Tells on the test's own output why nothing was tested.
pub(crate) fn skip(test: &str, why: &str) {
    let mut out = io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}
