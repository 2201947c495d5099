mod handmade;
mod hostile;
mod right;
mod tampered;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write as _},
    num::NonZeroUsize,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::images::{Cancel, ImageError, Progress, Quiet, UnpackLimits, meter::Meter, rules};

/// Tells on the test's own output why nothing was tested.
fn skip(test: &str, why: &str) {
    let mut out = io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}

/// Packs a folder. Returns false where the program for that is missing, which is told.
fn mksquashfs(test: &str, tree: &Path, image: &Path, args: &[&str]) -> bool {
    let mut command = Command::new("mksquashfs");
    command.arg(tree).arg(image).args(["-noappend", "-quiet", "-no-progress"]).args(args);
    match command.stdout(Stdio::null()).output() {
        Ok(done) => {
            assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
            true
        }
        Err(_missing) => {
            skip(test, "mksquashfs is not installed");
            false
        }
    }
}

/// Unpacks a whole file into a folder, which it makes.
struct Unpack<'a> {
    limits: UnpackLimits,
    threads: usize,
    cancel: Cancel,
    progress: &'a dyn Progress,
}

impl Default for Unpack<'_> {
    fn default() -> Self {
        Self { limits: UnpackLimits::default(), threads: 2, cancel: Cancel::default(), progress: &Quiet }
    }
}

impl Unpack<'_> {
    fn run(&self, image: &Path, root: &Path) -> Result<Vec<String>, ImageError> {
        let file = File::open(image).unwrap();
        let len = file.metadata().unwrap().len();
        let meter = Meter::new("test.sqfs", len, self.limits, &self.cancel, self.progress);
        fs::create_dir_all(root).unwrap();
        let threads = NonZeroUsize::new(self.threads).unwrap();
        super::unpack(&file, 0, len, root, None, threads, &meter).map(super::Notes::into_lines)
    }
}

/// What is compared of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Look {
    mode: u32,
    mtime: i64,
    /// Bytes of a file, the target of a link.
    content: Vec<u8>,
    /// The first path of the same file.
    first: PathBuf,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether it takes much less room than it is long.
    is_sparse: bool,
}

/// Looks at a tree, without its root folder's name.
fn look(root: &Path) -> BTreeMap<PathBuf, Look> {
    let (mut found, mut firsts, mut left) = (BTreeMap::new(), BTreeMap::new(), vec![PathBuf::new()]);
    while let Some(path) = left.pop() {
        let place = root.join(&path);
        let meta = fs::symlink_metadata(&place).unwrap();
        let mut content = Vec::new();
        if meta.is_dir() {
            let names = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name());
            left.extend(names.map(|name| path.join(name)));
        } else if meta.is_symlink() {
            content = fs::read_link(&place).unwrap().as_os_str().as_bytes().to_vec();
        } else if meta.is_file() {
            content = fs::read(&place).unwrap();
        }
        let first: &mut PathBuf = firsts.entry(meta.ino()).or_insert_with(|| path.clone());
        *first = path.clone().min(first.clone());
        let is_sparse = meta.is_file() && meta.blocks() * 512 + (1 << 20) < meta.len();
        let look = Look {
            mode: meta.mode(),
            mtime: meta.mtime(),
            content,
            first: PathBuf::new(),
            attributes: attributes(&place),
            is_sparse,
        };
        found.insert(path, (meta.ino(), look));
    }
    found.into_iter().map(|(path, (inode, look))| (path, Look { first: firsts[&inode].clone(), ..look })).collect()
}

/// The extended attributes that an unpacked file keeps.
fn attributes(place: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 4096];
    let Ok(len) = rustix::fs::llistxattr(place, &mut names[..]) else { return Vec::new() };
    let names = names[..len].split(|byte| *byte == 0).filter(|name| rules::keeps_attribute(name));
    let mut found: Vec<_> = names
        .map(|name| {
            let mut value = vec![0; 1 << 16];
            let len = rustix::fs::lgetxattr(place, OsStr::from_bytes(name), &mut value[..]).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect();
    found.sort();
    found
}

/// What a tree is to become.
fn kept(tree: BTreeMap<PathBuf, Look>) -> BTreeMap<PathBuf, Look> {
    let keep = |look: Look| {
        let kind = look.mode & 0o170_000;
        let mode = match kind {
            0o040_000 => rules::folder_mode(look.mode),
            0o120_000 => 0o777,
            _ => rules::file_mode(look.mode).0,
        };
        Look { mode: kind | mode, ..look }
    };
    tree.into_iter().map(|(path, look)| (path, keep(look))).collect()
}

/// Compares an unpacked tree with what it is to be, and tells the first difference shortly. There may be more holes: a packer
/// makes some of zeroes.
fn assert_same(expected: &BTreeMap<PathBuf, Look>, found: &BTreeMap<PathBuf, Look>, what: &str) {
    let (names, others): (Vec<_>, Vec<_>) = (expected.keys().collect(), found.keys().collect());
    assert_eq!(names, others, "{what}");
    for (path, expected) in expected {
        let mut found = found[path].clone();
        found.is_sparse &= expected.is_sparse;
        let is_same = *expected == found;
        let short = |look: &Look| {
            let attributes =
                look.attributes.iter().map(|(name, value)| (name.clone(), value[..value.len().min(9)].to_vec()));
            let content = look.content[..look.content.len().min(64)].to_vec();
            Look { content, attributes: attributes.collect(), ..look.clone() }
        };
        assert!(is_same, "{what}: {}:\n{:?}\n{:?}", path.display(), short(expected), short(&found));
    }
}

/// Numbers that look random and are the same each time.
struct Random(u64);

impl Random {
    fn step(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn next(&mut self, below: usize) -> usize {
        usize::try_from(self.step() >> 16).unwrap() % below
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend(self.step().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}
