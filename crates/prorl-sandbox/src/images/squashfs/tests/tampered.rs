//! Right images that were cut off or changed, and a disk that is full.

use std::os::unix::fs::symlink;

use super::*;

/// A small tree with all kinds of things in it.
fn make_tree(root: &Path) {
    let mut random = Random(99);
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    for idx in 0..12 {
        fs::write(root.join(format!("a/{idx}")), random.bytes(20 * idx)).unwrap();
    }
    fs::write(root.join("a/b/large"), [random.bytes(9000), vec![0; 20_000], vec![b'x'; 30_000]].concat()).unwrap();
    fs::hard_link(root.join("a/7"), root.join("a/b/c/seven")).unwrap();
    symlink("/etc/passwd", root.join("link")).unwrap();
    let attribute = |name, value: &[u8]| {
        let _refused_by_some = rustix::fs::setxattr(root.join("a/9"), name, value, rustix::fs::XattrFlags::empty());
    };
    attribute("user.one", b"1");
    attribute("user.long", &[b'v'; 300]);
}

/// Unpacks an image that may be damaged, and looks that it did nothing outside. Returns whether it was damaged.
fn survives(dir: &Path, image: &[u8], what: &str) -> bool {
    let place = dir.join("place");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("image"), image).unwrap();
    let limits = UnpackLimits { max_entries: 500, max_bytes: 4 << 20, ..Default::default() };
    let result = Unpack { limits, ..Default::default() }.run(&place.join("image"), &place.join("root"));
    let mut beside: Vec<_> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    beside.sort();
    assert_eq!(beside, ["image", "root"], "{what}");
    assert_eq!(fs::read_dir(dir).unwrap().count(), 3, "{what}: more than the tree, the image and the place");
    fs::remove_dir_all(&place).unwrap();
    match result {
        Ok(_) => false,
        // A file may also have been given a length that the file system does not take.
        Err(
            ImageError::Damaged { .. }
            | ImageError::Refused { .. }
            | ImageError::TooLarge { .. }
            | ImageError::Io { action: "set the length of", .. },
        ) => true,
        Err(other) => panic!("{what}: {other:?}"),
    }
}

const WAYS: [&[&str]; 5] = [
    &["-comp", "gzip", "-b", "4096"],
    &["-comp", "zstd", "-b", "4096", "-Xcompression-level", "1"],
    &["-comp", "xz", "-b", "8192"],
    &["-comp", "lz4", "-b", "4096"],
    &["-noI", "-noD", "-noF", "-noX", "-b", "4096"],
];

#[test]
fn an_image_that_was_cut_off_is_damaged_wherever_that_was() {
    for args in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let (tree, file) = (dir.path().join("tree"), dir.path().join("image"));
        make_tree(&tree);
        if !mksquashfs("an_image_that_was_cut_off_is_damaged", &tree, &file, &[args, &["-nopad"]].concat()) {
            return;
        }
        let image = fs::read(&file).unwrap();
        for part in 0..60 {
            let len = image.len() * part / 60;
            assert!(survives(dir.path(), &image[..len], &format!("{args:?} at {len}")), "{args:?} at {len}");
        }
        // The same with a superblock that agrees.
        for part in 2..60 {
            let len = image.len() * part / 60;
            let mut image = image[..len].to_vec();
            image[40..48].copy_from_slice(&(len as u64).to_le_bytes());
            assert!(survives(dir.path(), &image, &format!("{args:?} at {len}")), "{args:?} at {len}");
        }
    }
}

#[test]
fn changed_bytes_do_no_harm() {
    let mut random = Random(1234);
    for args in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let (tree, file) = (dir.path().join("tree"), dir.path().join("image"));
        make_tree(&tree);
        if !mksquashfs("changed_bytes_do_no_harm", &tree, &file, &[args, &["-nopad"]].concat()) {
            return;
        }
        let image = fs::read(&file).unwrap();
        let tables = usize::try_from(u64::from_le_bytes(image[64..72].try_into().unwrap())).unwrap();
        let mut n_damaged = 0;
        for round in 0..200 {
            let mut image = image.clone();
            for _ in 0..=random.next(4) {
                // Mostly where it matters.
                let at = match random.next(8) {
                    0 => random.next(96),
                    1 => random.next(image.len()),
                    _ => tables + random.next(image.len() - tables),
                };
                image[at] = match random.next(3) {
                    0 => image[at] ^ (1 << random.next(8)),
                    1 => 0xff,
                    _ => u8::try_from(random.next(256)).unwrap(),
                };
            }
            n_damaged += u32::from(survives(dir.path(), &image, &format!("{args:?} round {round}")));
        }
        assert!(n_damaged > 40, "{args:?}: {n_damaged}");
    }
}

/// The variable that tells a copy of this program where the full disk is.
const DISK: &str = "PRORL_TEST_FULL_DISK";

#[test]
fn a_full_disk_is_told_with_the_place() {
    let test = "images::squashfs::tests::tampered::a_full_disk_is_told_with_the_place";
    if let Some(dir) = std::env::var_os(DISK).map(PathBuf::from) {
        let error = Unpack::default().run(&dir.join("image"), &dir.join("disk/root")).unwrap_err();
        let ImageError::Io { action, path, source } = error else { panic!("{error:?}") };
        assert_eq!((action, source.raw_os_error()), ("write", Some(libc::ENOSPC)));
        assert!(path.starts_with(dir.join("disk/root")), "{}", path.display());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("tree")).unwrap();
    fs::create_dir_all(dir.path().join("disk")).unwrap();
    for idx in 0..40 {
        fs::write(dir.path().join(format!("tree/{idx}")), vec![b'x'; 100_000]).unwrap();
    }
    if !mksquashfs("a_full_disk_is_told_with_the_place", &dir.path().join("tree"), &dir.path().join("image"), &[]) {
        return;
    }
    let script = "mount -t tmpfs -o size=1m none \"$1\" && exec \"$2\" --exact \"$3\" --nocapture";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    command.arg(dir.path().join("disk")).arg(std::env::current_exe().unwrap()).arg(test).env(DISK, dir.path());
    let done = match command.output() {
        Ok(done) => done,
        Err(_missing) => return skip(test, "unshare is not installed"),
    };
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    if !done.status.success() && !out.contains("running 1 test") {
        return skip(test, &format!("no file system can be mounted: {err}"));
    }
    assert!(done.status.success() && out.contains("1 passed"), "{out}{err}");
}
