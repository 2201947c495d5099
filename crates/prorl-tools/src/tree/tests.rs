use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use proptest::prelude::*;
use prorl_core::frame;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::*;

fn bytes(text: &str) -> Bytes {
    Bytes(text.as_bytes().to_vec())
}

fn folder(path: &str) -> Entry {
    Entry::Folder { path: bytes(path), mode: 0o755 }
}

fn file(path: &str, size: u64) -> Entry {
    Entry::File { path: bytes(path), mode: 0o644, size }
}

fn data(text: &str) -> Entry {
    Entry::Data(bytes(text))
}

fn link(path: &str, target: &str) -> Entry {
    Entry::Link { path: bytes(path), target: bytes(target) }
}

/// Returns records and their right end, which may lie about what is in them.
fn records(entries: &[Entry], lie: impl FnOnce(&mut TreeSummary)) -> Vec<u8> {
    let mut records: Vec<u8> = entries.iter().flat_map(|entry| frame::encode(entry).unwrap()).collect();
    let mut end = nothing();
    end.sha256 = Sha256::digest(&records).into();
    for entry in entries {
        let size = if let Entry::File { size, .. } = entry { Some(*size) } else { None };
        if !matches!(entry, Entry::Data(_)) {
            count(&mut end, &TreeLimits { max_bytes: u64::MAX, ..TreeLimits::default() }, size).unwrap();
        }
    }
    lie(&mut end);
    records.extend(frame::encode(&Entry::End(end)).unwrap());
    records
}

/// Makes what the records say at `to`.
fn make(to: &Path, records: &[u8], if_present: IfPresent, limits: TreeLimits) -> Result<TreeSummary, TreeError> {
    let mut writer = TreeWriter::begin(to, if_present, limits)?;
    writer.push(records)?;
    writer.finish()
}

/// Returns what is in a folder and below, but for the folder itself.
fn names(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(inside) = left.pop() {
        for entry in fs::read_dir(inside).unwrap() {
            let path = entry.unwrap().path();
            found.push(path.strip_prefix(folder).unwrap().display().to_string());
            if path.symlink_metadata().unwrap().is_dir() {
                left.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read_all(root: &Path, limits: TreeLimits) -> Result<(Vec<u8>, TreeSummary), TreeError> {
    let mut reader = TreeReader::open(root, limits)?;
    let mut records = Vec::new();
    while let Some(piece) = reader.next_piece()? {
        records.extend(piece);
    }
    Ok((records, reader.summary()))
}

/// Says why records are refused, of which nothing may be left.
fn refused(entries: &[Entry]) -> String {
    let place = TempDir::new().unwrap();
    let limits = TreeLimits { max_entries: 20, max_bytes: 100, ..TreeLimits::default() };
    let err = make(&place.path().join("above/x"), &records(entries, |_| {}), IfPresent::Refuse, limits).unwrap_err();
    assert_eq!(names(place.path()), [""; 0]);
    err.told()
}

#[test]
fn nobody_leaves_the_place() {
    let root = folder("");
    for path in ["..", "../x", "/x", "a/../x", "./x", ".", "a//x", "a/", "x\0y"] {
        let said = refused(&[root.clone(), folder("a"), file(path, 0)]);
        assert!(said.starts_with("no path: ") || said.starts_with("no folder for "), "{path}: {said}");
    }
    assert!(refused(&[root.clone(), link("a", "b"), file("a/x", 0)]).starts_with("no folder for a/x"));
    assert!(refused(&[root.clone(), link("a", "b"), folder("a")]).contains("came twice"));
    assert!(refused(&[root.clone(), link("a", "b"), file("a", 1), data("x")]).contains("came twice"));
    assert!(refused(&[root.clone(), folder("a"), folder("b"), file("a/x", 0)]).contains("no folder"));
    assert!(refused(&[root.clone(), folder("a"), folder("b"), folder("a")]).contains("came twice"));
    assert!(refused(&[link("", "/etc")]).contains("root"));
    assert!(refused(&[root.clone(), root.clone()]).contains("second root"));
    assert!(refused(&[file("", 0), file("x", 0)]).contains("no folder"));
    assert!(refused(&[file("x", 0)]).contains("no folder"));
}

#[test]
fn links_that_may_lead_outside_are_refused_unless_they_are_wanted() {
    let below = |target: &str| [folder(""), folder("a"), folder("a/b"), link("a/b/l", target)];
    for target in ["/etc", "../../..", "../../../etc", "../c/..", "x/../../../..", "./../../../x"] {
        assert!(refused(&below(target)).contains("may be outside"), "{target}");
    }
    for target in ["../..", "../../x", "x/y", ".", "./x", "..x/y"] {
        let place = TempDir::new().unwrap();
        make(&place.path().join("x"), &records(&below(target), |_| {}), IfPresent::Refuse, TreeLimits::default())
            .unwrap();
        assert_eq!(fs::read_link(place.path().join("x/a/b/l")).unwrap(), Path::new(target));
    }
    let place = TempDir::new().unwrap();
    let limits = TreeLimits { outside_links: OutsideLinks::Keep, ..TreeLimits::default() };
    make(&place.path().join("x"), &records(&below("/etc"), |_| {}), IfPresent::Refuse, limits).unwrap();
    assert_eq!(fs::read_link(place.path().join("x/a/b/l")).unwrap(), Path::new("/etc"));
}

#[test]
fn what_is_not_whole_or_too_much_is_refused() {
    let root = folder("");
    assert!(refused(&[root.clone(), file("a", 2), data("a")]).contains("shorter"));
    assert!(refused(&[root.clone(), file("a", 2), data("abc")]).contains("longer"));
    assert!(refused(&[root.clone(), file("a", 1), data("")]).contains("longer"));
    assert!(refused(&[root.clone(), data("abc")]).contains("no file"));
    assert!(refused(&[root.clone(), file("a", 101)]).contains("more than 100 bytes"));
    assert!(refused(&[root.clone(), file("a", u64::MAX)]).contains("more than 100 bytes"));
    let many: Vec<Entry> = std::iter::once(root.clone()).chain((0..20).map(|n| file(&n.to_string(), 0))).collect();
    assert!(refused(&many).contains("more than 20 files"));
    let mut deep = vec![root.clone()];
    deep.extend((1..=MAX_DEPTH + 1).map(|depth| folder(&vec!["d"; depth].join("/"))));
    let limits = TreeLimits::default();
    let place = TempDir::new().unwrap();
    let to = place.path().join("x");
    let made = make(&to, &records(&deep, |_| {}), IfPresent::Refuse, limits).unwrap_err();
    assert!(made.told().starts_with("no folder for"), "{made:?}");

    let whole = records(&[root, file("a", 2), data("ab")], |_| {});
    for lie in [|end: &mut TreeSummary| end.n_bytes = 3, |end: &mut TreeSummary| end.sha256[0] ^= 1] {
        let lies = records(&[folder(""), file("a", 2), data("ab")], lie);
        assert!(make(&to, &lies, IfPresent::Refuse, limits).unwrap_err().told().contains("not what was sent"));
    }
    for cut in 0..whole.len() {
        assert!(make(&to, &whole[..cut], IfPresent::Refuse, limits).unwrap_err().told().contains("too early"), "{cut}");
    }
    let more = [whole.as_slice(), &whole].concat();
    assert!(make(&to, &more, IfPresent::Refuse, limits).unwrap_err().told().contains("follows the end"));
    assert!(make(&to, &[255; 64], IfPresent::Refuse, limits).unwrap_err().told().contains("too long"));
    assert_eq!(names(place.path()), [""; 0]);
    make(&to, &whole, IfPresent::Refuse, limits).unwrap();
    assert_eq!(names(place.path()), ["x", "x/a"]);
}

#[test]
fn a_folder_goes_into_one_that_is_there_or_not_at_all() {
    let place = TempDir::new().unwrap();
    let to = place.path().join("x");
    let put = |entries: &[Entry], if_present| make(&to, &records(entries, |_| {}), if_present, TreeLimits::default());
    let at = |path: &str| fs::read_to_string(to.join(path)).unwrap();
    fs::create_dir_all(to.join("sub/own")).unwrap();
    fs::write(to.join("sub/old"), "old").unwrap();
    let new = [folder(""), folder("new"), file("new/a", 1), data("a"), folder("sub"), file("sub/old", 3), data("new")];
    assert!(put(&new, IfPresent::Refuse).unwrap_err().told().contains("sub/old is there already"));
    assert_eq!(names(&to), ["sub", "sub/old", "sub/own"]);
    assert_eq!(at("sub/old"), "old");
    put(&new, IfPresent::Replace).unwrap();
    assert_eq!(names(&to), ["new", "new/a", "sub", "sub/old", "sub/own"]);
    assert_eq!(at("sub/old"), "new");
    // A folder is replaced by nothing, and nothing but a file by a file.
    for odd in [
        &[folder(""), file("a", 0), file("sub", 0)][..],
        &[folder(""), folder("sub"), folder("sub/old")],
        &[file("", 0)],
    ] {
        assert!(put(odd, IfPresent::Replace).unwrap_err().told().contains("is there already"));
    }
    // Links that are there are not followed.
    std::os::unix::fs::symlink("sub", to.join("way")).unwrap();
    let through = [folder(""), folder("way"), file("way/x", 0)];
    assert!(put(&through, IfPresent::Replace).unwrap_err().told().contains("way is there already"));
    assert_eq!(names(place.path()).len(), 7);

    let one = to.join("sub/old");
    let file = records(&[file("", 1), data("f")], |_| {});
    assert!(make(&one, &file, IfPresent::Refuse, TreeLimits::default()).unwrap_err().told().contains("already"));
    make(&one, &file, IfPresent::Replace, TreeLimits::default()).unwrap();
    assert_eq!(at("sub/old"), "f");
    assert!(make(&one, &records(&[folder("")], |_| {}), IfPresent::Replace, TreeLimits::default()).is_err());
}

#[test]
fn folders_get_their_permissions_in_the_end() {
    let place = TempDir::new().unwrap();
    let to = place.path().join("x");
    let locked = |path| Entry::Folder { path: bytes(path), mode: 0o7500 };
    let entries = [locked(""), locked("a"), locked("a/b"), Entry::File { path: bytes("a/b/c"), mode: 0o4711, size: 0 }];
    make(&to, &records(&entries, |_| {}), IfPresent::Refuse, TreeLimits::default()).unwrap();
    let mode = |path: &str| fs::metadata(to.join(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(["", "a", "a/b", "a/b/c"].map(mode), [0o500, 0o500, 0o500, 0o711]);
    // For whoever is no root to remove it.
    for path in ["", "a", "a/b"] {
        fs::set_permissions(to.join(path), fs::Permissions::from_mode(0o700)).unwrap();
    }
}

#[test]
fn what_cannot_be_sent_is_said() {
    let place = TempDir::new().unwrap();
    let path = |name: &str| place.path().join(name);
    let limits = TreeLimits { max_bytes: 300_000, max_entries: 3, ..TreeLimits::default() };
    let said = |name: &str| read_all(&path(name), limits).unwrap_err().told();
    assert!(said("none").contains("cannot open") && said("none").contains("No such file"));
    fs::create_dir(path("folder")).unwrap();
    let pipe = path("folder/pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(said("folder").contains("pipe is neither a file"));
    assert!(said("folder/pipe").contains("pipe is neither a file"));
    fs::remove_file(pipe).unwrap();
    for n in 0..2 {
        fs::write(path("folder").join(n.to_string()), "").unwrap();
    }
    assert_eq!(read_all(&path("folder"), limits).unwrap().1.n_entries, 3);
    fs::write(path("folder/more"), "").unwrap();
    assert!(said("folder").contains("more than 3 files"));

    fs::write(path("long"), vec![b'x'; 300_000]).unwrap();
    let mut reader = TreeReader::open(&path("long"), limits).unwrap();
    assert!(reader.next_piece().unwrap().is_some());
    fs::write(path("long"), "").unwrap();
    assert!(reader.next_piece().unwrap_err().told().contains("become shorter"));
    fs::write(path("long"), vec![b'x'; 300_001]).unwrap();
    assert!(said("long").contains("more than 300000 bytes"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn trees_survive_any_cutting(
        paths in proptest::collection::btree_map("[a-c](/[a-c]){0,4}", proptest::collection::vec(any::<u8>(), 0..300), 0..8),
        cut in 1_usize..200,
    ) {
        let place = TempDir::new().unwrap();
        let from = place.path().join("from");
        fs::create_dir(&from).unwrap();
        for (path, content) in &paths {
            // Some are in the way of others, and then are not made.
            let path = from.join(path);
            if fs::create_dir_all(path.parent().unwrap()).is_ok() {
                let _made = fs::write(path, content);
            }
        }
        let (records, summary) = read_all(&from, TreeLimits::default()).unwrap();
        let to = place.path().join("to");
        let mut writer = TreeWriter::begin(&to, IfPresent::Refuse, TreeLimits::default()).unwrap();
        for piece in records.chunks(cut) {
            writer.push(piece).unwrap();
        }
        prop_assert_eq!(writer.finish().unwrap(), summary);
        prop_assert_eq!(names(&from), names(&to));
        prop_assert_eq!(read_all(&to, TreeLimits::default()).unwrap().0, records);
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let place = TempDir::new().unwrap();
        prop_assert!(make(&place.path().join("x"), &bytes, IfPresent::Refuse, TreeLimits::default()).is_err());
        prop_assert_eq!(names(place.path()), [""; 0]);
    }
}
