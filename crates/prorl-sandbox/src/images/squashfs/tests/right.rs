//! Images as they should be.

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, PermissionsExt as _, symlink},
    },
    sync::atomic::{AtomicU64, Ordering},
};

use nix::{
    sys::{
        stat::{Mode, UtimensatFlags, utimensat},
        time::TimeSpec,
    },
    unistd::mkfifo,
};
use rustix::fs::XattrFlags;

use super::*;
use crate::SandboxUser;

const KIB: usize = 1024;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn set_time(path: &Path, seconds: i64) {
    let time = TimeSpec::new(seconds, 0);
    utimensat(nix::fcntl::AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink).unwrap();
}

/// Makes a tree with something of everything in it.
fn make_tree(root: &Path) {
    let mut random = Random(7);
    let text = |len: usize| b"all work and no play ".iter().copied().cycle().take(len).collect::<Vec<_>>();
    for dir in ["empty", "many", "etc/a", "attributes"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let file = |name: &str, bytes: &[u8]| fs::write(root.join(name), bytes).unwrap();
    file("etc/none", b"");
    file("etc/one", b"1");
    for around in [4 * KIB, 128 * KIB] {
        for len in [around - 1, around, around + 1] {
            file(&format!("text-{len}"), &text(len));
            file(&format!("noise-{len}"), &random.bytes(len));
        }
    }
    file("large", &[text(3 << 20), random.bytes(1 << 20), vec![0; 3 << 20], text(12_345)].concat());
    for idx in 0..200 {
        let len = random.next(3000);
        file(&format!("many/{idx}"), &random.bytes(len));
    }
    // Holes: at the start, at the end, everywhere, and around a few bytes.
    for (name, len, at) in [("head", 4 << 20, Some((4 << 20) - 5)), ("tail", 4 << 20, Some(3)), ("all", 9 << 20, None)]
    {
        let sparse = File::create(root.join(format!("hole-{name}"))).unwrap();
        sparse.set_len(len).unwrap();
        if let Some(at) = at {
            sparse.write_all_at(b"bytes", at).unwrap();
        }
    }
    // Links of both sorts.
    symlink("/etc/one", root.join("absolute")).unwrap();
    symlink("../..//nowhere", root.join("etc/a/up")).unwrap();
    symlink("x".repeat(4000), root.join("long-link")).unwrap();
    for name in ["first", "etc/a/second", "zzz"] {
        fs::hard_link(root.join("noise-131073"), root.join(name)).unwrap();
    }
    fs::hard_link(root.join("large"), root.join("etc/large")).unwrap();
    file("same", &text(128 * KIB + 1));
    // Names.
    file(&"n".repeat(255), b"long");
    fs::write(root.join(OsStr::from_bytes(b"\xff\xfe\\ \n\"")), b"no text").unwrap();
    let deep = (0..60).fold(root.to_owned(), |path, idx| path.join(format!("deeper-{idx}-{}", "d".repeat(40))));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("treasure"), b"found").unwrap();
    mkfifo(&root.join("fifo"), Mode::from_bits_truncate(0o640)).unwrap();
    // Modes and attributes.
    for (name, mode) in [("etc/one", 0o4711), ("etc/none", 0o444), ("text-4096", 0o2755), ("text-4097", 0o666)] {
        set_mode(&root.join(name), mode);
    }
    set_mode(&root.join("empty"), 0o1777);
    set_mode(&root.join("many"), 0o2555);
    let mut attributes = |name: &str, attribute: &str, len: usize| {
        let (path, value) = (root.join(name), random.bytes(len));
        let _refused_by_some = rustix::fs::setxattr(path, attribute, &value, XattrFlags::empty());
    };
    file("attributes/file", b"has some");
    attributes("attributes/file", "user.comment", 20);
    attributes("attributes/file", "user.none", 0);
    attributes("attributes/file", "user.overlay.opaque", 1);
    attributes("attributes", "user.folder", 700);
    attributes("large", "user.large", 1000);
    fs::copy(root.join("attributes/file"), root.join("attributes/copy")).unwrap();
    // Times last.
    let mut paths: Vec<_> = look(root).into_keys().collect();
    paths.reverse(); // what is in a folder comes before it
    for (path, idx) in paths.iter().zip(0..) {
        set_time(&root.join(path), 1_000_000_000 + idx * 7);
    }
}

fn count_notes(notes: &[String]) -> usize {
    notes.iter().filter(|note| note.starts_with("cleared set-id bits of 2 files")).count()
}

#[test]
fn what_was_packed_is_what_is_unpacked() {
    let test = "what_was_packed_is_what_is_unpacked";
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    let before = kept(look(&tree));
    let ways: [&[&str]; 9] = [
        &["-comp", "gzip"],
        &["-comp", "zstd", "-Xcompression-level", "1"],
        &["-comp", "xz", "-Xbcj", "x86,arm"],
        &["-comp", "lz4"],
        &["-comp", "zstd", "-Xcompression-level", "1", "-b", "4096"],
        &["-comp", "lz4", "-b", "1M", "-always-use-fragments"],
        &["-comp", "gzip", "-Xcompression-level", "1", "-no-fragments"],
        &["-noI", "-noD", "-noF", "-noX"],
        &["-comp", "lz4", "-no-exports", "-no-duplicates"],
    ];
    for (idx, args) in ways.into_iter().enumerate() {
        if !mksquashfs(test, &tree, &image, args) {
            return;
        }
        let root = dir.path().join(format!("root-{idx}"));
        let notes = Unpack { threads: [1, 2, 7][idx % 3], ..Default::default() }.run(&image, &root).unwrap();
        assert_same(&before, &look(&root), &format!("{args:?}"));
        assert_eq!((count_notes(&notes), notes.len()), (1, 1), "{notes:?}");
        fs::remove_dir_all(&root).unwrap();
    }
}

#[test]
fn random_trees_come_back() {
    let mut random = Random(2026);
    for round in 0..6 {
        let dir = tempfile::tempdir().unwrap();
        let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
        fs::create_dir(&tree).unwrap();
        let mut folders = vec![tree.clone()];
        let mut files = Vec::new();
        for idx in 0..random.next(300) {
            let name = format!("{:x}-{idx}", random.next(1 << 20));
            let place = folders[random.next(folders.len())].join(name);
            match random.next(10) {
                0 | 1 => {
                    fs::create_dir(&place).unwrap();
                    folders.push(place);
                }
                2 => symlink("target", &place).unwrap(),
                3 if !files.is_empty() => {
                    let first: &PathBuf = &files[random.next(files.len())];
                    fs::hard_link(first, &place).unwrap();
                }
                _ => {
                    let len = if random.next(20) == 0 { random.next(1 << 20) } else { random.next(9000) };
                    let zeroes = random.next(2) * random.next(500_000);
                    fs::write(&place, [random.bytes(len / 4), vec![0; zeroes], vec![b'x'; len]].concat()).unwrap();
                    set_mode(&place, 0o400 | u32::try_from(random.next(0o1000)).unwrap());
                    files.push(place);
                }
            }
        }
        let comp = ["gzip", "zstd", "lz4", "xz"][round % 4];
        let block = ["4096", "16384", "131072"][round % 3];
        if !mksquashfs("random_trees_come_back", &tree, &image, &["-comp", comp, "-b", block]) {
            return;
        }
        let root = dir.path().join("root");
        Unpack { threads: 1 + round % 3, ..Default::default() }.run(&image, &root).unwrap();
        assert_same(&kept(look(&tree)), &look(&root), &format!("round {round}"));
    }
}

#[test]
fn devices_and_set_id_files_are_told_and_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, image, root) = (dir.path().join("tree"), dir.path().join("image"), dir.path().join("root"));
    fs::create_dir_all(tree.join("dev")).unwrap();
    fs::write(tree.join("su"), "#!").unwrap();
    let pseudo =
        ["dev/null c 666 0 0 1 3", "dev/sda b 660 0 0 8 0", "fifo i 644 0 0 f", "socket i 644 0 0 s", "su m 6755 0 0"];
    let args: Vec<_> = pseudo.iter().flat_map(|line| ["-p", line]).collect();
    if !mksquashfs("devices_and_set_id_files_are_told_and_not_made", &tree, &image, &args) {
        return;
    }
    let notes = Unpack::default().run(&image, &root).unwrap();
    let expected = [
        "cleared set-id bits of 1 file, the first su",
        "left out device nodes: 2 files, the first dev/null",
        "left out sockets: 1 file, the first socket",
    ];
    assert_eq!(notes, expected);
    let found: Vec<_> = look(&root).into_iter().map(|(path, look)| (path.display().to_string(), look.mode)).collect();
    let folder = |name: &str| (name.to_owned(), fs::metadata(tree.join(name)).unwrap().mode());
    let files = [("fifo".to_owned(), 0o010_644), ("su".to_owned(), 0o100_755)];
    assert_eq!(found, [&[folder(""), folder("dev")][..], &files].concat());
}

#[test]
fn everything_is_given_to_the_owner() {
    let test = "everything_is_given_to_the_owner";
    if !nix::unistd::geteuid().is_root() {
        return skip(test, "only root can give files away");
    }
    let dir = tempfile::tempdir().unwrap();
    let (tree, image, root) = (dir.path().join("tree"), dir.path().join("image"), dir.path().join("root"));
    make_tree(&tree);
    if !mksquashfs(test, &tree, &image, &["-comp", "lz4"]) {
        return;
    }
    let file = File::open(&image).unwrap();
    let (len, cancel) = (file.metadata().unwrap().len(), Cancel::default());
    let meter = Meter::new("test.sqfs", len, UnpackLimits::default(), &cancel, &Quiet);
    fs::create_dir(&root).unwrap();
    let owner = SandboxUser { uid: 4_000_001, gid: 4_000_002 };
    super::super::unpack(&file, 0, len, &root, Some(owner), NonZeroUsize::MIN, &meter).unwrap();
    let unpacked = look(&root);
    assert_same(&kept(look(&tree)), &unpacked, "given away");
    for path in unpacked.keys() {
        let meta = fs::symlink_metadata(root.join(path)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (owner.uid, owner.gid), "{}", path.display());
    }
}

/// Counts what it is told, and may say that it is enough.
#[derive(Default)]
struct Watch {
    total: AtomicU64,
    done: AtomicU64,
    enough: Option<Cancel>,
}

impl Progress for Watch {
    fn begin(&self, part: &str, total: Option<u64>) {
        assert_eq!(part, "unpack");
        self.total.store(total.unwrap(), Ordering::Relaxed);
    }

    fn advance(&self, n_bytes: u64) {
        self.done.fetch_add(n_bytes, Ordering::Relaxed);
        if let Some(cancel) = &self.enough {
            cancel.cancel();
        }
    }
}

#[test]
fn progress_comes_close_to_its_total_and_cancelling_ends_it_early() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    if !mksquashfs("progress_comes_close_to_its_total", &tree, &image, &["-comp", "lz4"]) {
        return;
    }
    let watch = Watch::default();
    Unpack { progress: &watch, ..Default::default() }.run(&image, &dir.path().join("root")).unwrap();
    let (total, done) = (watch.total.into_inner(), watch.done.into_inner());
    assert_eq!(total, fs::metadata(&image).unwrap().len());
    assert!((total * 9 / 10..=total).contains(&done), "{done} of {total}");

    let cancel = Cancel::default();
    let watch = Watch { enough: Some(cancel.clone()), ..Default::default() };
    let unpack = Unpack { progress: &watch, cancel, ..Default::default() };
    let error = unpack.run(&image, &dir.path().join("cancelled")).unwrap_err();
    assert!(matches!(error, ImageError::Cancelled), "{error}");
    assert!(watch.done.into_inner() < total / 2);
}

/// A part of this machine, beside the other program that unpacks.
#[test]
fn a_part_of_this_machine_is_unpacked_as_unsquashfs_does() {
    let test = "a_part_of_this_machine_is_unpacked_as_unsquashfs_does";
    let Some(tree) =
        ["/usr/share/doc", "/usr/share/terminfo", "/etc/ssl"].map(Path::new).into_iter().find(|path| path.is_dir())
    else {
        return skip(test, "none of the folders is there");
    };
    let dir = tempfile::tempdir().unwrap();
    let (image, root, other) = (dir.path().join("image"), dir.path().join("root"), dir.path().join("other"));
    // A few folders of it are enough.
    let mut sources: Vec<_> = fs::read_dir(tree).unwrap().map(|entry| entry.unwrap().path()).collect();
    sources.sort();
    sources.truncate(60);
    let (first, rest) = sources.split_first().unwrap();
    let mut args: Vec<_> = rest.iter().map(|path| path.to_str().unwrap()).collect();
    args.extend(["-comp", "zstd", "-Xcompression-level", "1", "-all-root"]);
    let mut command = Command::new("mksquashfs");
    command.arg(first).args(&args[..rest.len()]).arg(&image).args(&args[rest.len()..]);
    if command.args(["-quiet", "-no-progress"]).output().is_err() {
        return skip(test, "mksquashfs is not installed");
    }
    let Ok(done) = Command::new("unsquashfs").args(["-q", "-n", "-d"]).arg(&other).arg(&image).output() else {
        return skip(test, "unsquashfs is not installed");
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Unpack::default().run(&image, &root).unwrap();
    assert_same(&kept(look(&other)), &look(&root), "beside unsquashfs");
}
