//! Records of a file or folder: a first byte says how the rest is cut into reads.
//!
//! No bytes may panic, have anything made but at the place, or more than the limits say. What was made is read as records of which the
//! same is made, and of what is refused nothing is left.

#![no_main]

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process,
    sync::LazyLock,
};

use libfuzzer_sys::fuzz_target;
use prorl_tools::{
    tree::{IfPresent, TreeError, TreeLimits, TreeReader, TreeWriter},
    wire::TreeSummary,
};

/// Where all happens; in TMPDIR, for whoever set that to remove.
static PLACE: LazyLock<PathBuf> = LazyLock::new(|| {
    let place = std::env::temp_dir().join(format!("prorl-fuzz-{}", process::id()));
    fs::create_dir(&place).expect("TMPDIR takes folders");
    place
});

fuzz_target!(|data: &[u8]| {
    let [cut, records @ ..] = data else { return };
    let limits = TreeLimits { max_bytes: 10_000, max_entries: 100, ..TreeLimits::default() };
    let to = PLACE.join("to");
    let made = make(&to, records, usize::from(*cut).max(1), limits);
    let is_made = made.is_ok();
    if let Ok(made) = made {
        assert!(made.n_entries <= 100 && made.n_bytes <= 10_000, "{made:?}");
        open_up(&to);
        let again = PLACE.join("again");
        let read = read(&to, limits);
        let once_more = make(&again, &read, usize::MAX, limits).expect("what was read is right");
        assert_eq!(
            (once_more.n_files, once_more.n_entries, once_more.n_bytes),
            (made.n_files, made.n_entries, made.n_bytes)
        );
        assert_eq!(self::read(&again, limits), read);
    }
    let mut names: Vec<_> =
        fs::read_dir(&*PLACE).expect("it is there").map(|entry| entry.expect("a name").file_name()).collect();
    names.sort();
    let expected: &[&str] = if is_made { &["again", "to"] } else { &[] };
    assert_eq!(names, expected);
    for name in expected {
        let path = PLACE.join(name);
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.expect("it can be removed");
    }
});

fn make(to: &Path, records: &[u8], cut: usize, limits: TreeLimits) -> Result<TreeSummary, TreeError> {
    let mut writer = TreeWriter::begin(to, IfPresent::Refuse, limits).expect("nothing is there");
    for piece in records.chunks(cut) {
        writer.push(piece)?;
    }
    writer.finish()
}

fn read(root: &Path, limits: TreeLimits) -> Vec<u8> {
    let mut reader = TreeReader::open(root, limits).expect("it was made");
    let mut records = Vec::new();
    while let Some(piece) = reader.next_piece().expect("it was made") {
        records.extend(piece);
    }
    records
}

/// Lets everything be read and removed, for whoever is no root.
fn open_up(path: &Path) {
    let kind = fs::symlink_metadata(path).expect("it is there").file_type();
    if !kind.is_symlink() {
        fs::set_permissions(path, Permissions::from_mode(0o700)).expect("it is ours");
    }
    if kind.is_dir() {
        for entry in fs::read_dir(path).expect("it is open") {
            open_up(&entry.expect("a name").path());
        }
    }
}
