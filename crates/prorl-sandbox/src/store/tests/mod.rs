//! Stores with images that are a few files.

mod collecting;
mod crash;
mod hits;
mod layers;
mod once;
mod opening;
mod references;
mod rights;
mod trees;
mod trouble;

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, SystemTime},
};

use tempfile::TempDir;

use super::{Digest, EnsureError, Filled, ImageStore, SourceKey, StoreConfig, StoreError, StoredImage};
use crate::SandboxUser;

/// How many files an image of these tests has.
const N_FILES: u32 = 20;

/// A folder in which a store may be, and a store in it.
fn fresh() -> (TempDir, ImageStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("store"));
    (folder, store)
}

fn open(dir: &Path) -> ImageStore {
    ImageStore::open(StoreConfig::new(dir)).unwrap()
}

/// A folder that every user may pass.
fn open_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Opens a store for sandboxes of user 65534 and a group.
fn open_for(dir: &Path, gid: u32) -> ImageStore {
    let owner = Some(SandboxUser { uid: 65_534, gid });
    ImageStore::open(StoreConfig { owner, ..StoreConfig::new(dir) }).unwrap()
}

fn digest(number: u32) -> Digest {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&number.to_le_bytes());
    Digest::from_bytes(hash)
}

fn key(number: u32) -> SourceKey {
    SourceKey::new(format!("image {number}"))
}

fn filled(number: u32) -> Filled {
    Filled {
        digest: digest(number),
        source: format!("{number}.sif"),
        entries: u64::from(N_FILES),
        bytes: u64::from(N_FILES) * 2,
        env: vec![("NUMBER".to_owned(), number.to_string())],
        notes: Vec::new(),
    }
}

/// Fills an image's root.
fn fill(root: &Path, number: u32) -> io::Result<Filled> {
    for file in 0..N_FILES {
        fs::write(root.join(file.to_string()), "ok")?;
    }
    Ok(filled(number))
}

/// Asserts that an image's root has everything.
fn assert_whole(root: &Path) {
    for file in 0..N_FILES {
        assert_eq!(fs::read_to_string(root.join(file.to_string())).unwrap(), "ok");
    }
}

/// Makes an image, or finds it.
fn ensure(store: &ImageStore, number: u32) -> StoredImage {
    store.ensure(&key(number), &|| false, &|_| {}, |root| fill(root, number)).unwrap()
}

/// Tries to make an image that is known to be there.
fn hit(store: &ImageStore, number: u32) -> StoredImage {
    store.ensure(&key(number), &|| false, &|_| {}, |_| Err("made again")).unwrap()
}

/// Takes the store's part of an error.
fn of_store<E: std::fmt::Debug>(error: EnsureError<E>) -> StoreError {
    match error {
        EnsureError::Store(error) => error,
        other => panic!("not the store's: {other:?}"),
    }
}

/// The names in a folder of the store.
fn names(store: &ImageStore, folder: &str) -> Vec<String> {
    let mut names = super::list::list(&store.dir().join(folder)).unwrap();
    names.sort();
    names
}

/// Asserts that nothing half made or half removed is there, after what is being removed.
fn assert_tidy(store: &ImageStore) {
    store.inner.janitor.wait(&store.inner.disk);
    for folder in ["staging", "trash", "claims"] {
        assert_eq!(names(store, folder), Vec::<String>::new(), "{folder}");
    }
}

/// Sets a file's times back.
fn age(path: &Path, by: Duration) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

/// A mark as a process of another machine would have made it.
fn foreign_mark(path: &Path) {
    let owner = super::owner::Owner::this().unwrap();
    let mut owner = serde_json::to_value(&owner).unwrap();
    owner["host"] = "elsewhere".into();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, owner.to_string()).unwrap();
}

/// Tells on the test's own output why nothing was tested.
fn skip(test: &str, why: &str) {
    let mut out = io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}

/// Tells a copy of this program which folder it is to work in.
const FOLDER: &str = "PRORL_TEST_STORE";

/// The folder that this copy of the program was told.
fn told_folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// A command that runs one of these tests in a process of its own, in a folder, through `wrapper` if there is one.
fn alone(test: &str, folder: &Path, wrapper: &[&str]) -> Command {
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper.split_first() {
        Some((program, args)) => {
            let mut command = Command::new(program);
            command.args(args).arg(folder).arg(me);
            command
        }
        None => Command::new(me),
    };
    let name = format!("store::tests::{test}");
    command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(FOLDER, folder);
    command
}

/// Runs one of these tests in a mount namespace of its own, after the command `prepare`, whose `$1` is the folder. Tells why
/// not where the system forbids it.
fn in_namespace(test: &str, folder: &Path, prepare: &str) -> bool {
    let unshare = |script: &str| {
        let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh"];
        alone(test, folder, &wrapper).output().unwrap()
    };
    if !unshare(prepare).status.success() {
        skip(test, "this user may not make such mounts");
        return false;
    }
    assert_passed(&unshare(&format!("{prepare}; shift; exec \"$@\"")));
    true
}

fn assert_passed(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}
