//! What layers do to one another.

use std::{
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
};

use tar::EntryType;

use super::support::{Tar, World, gzip, tree};

/// Unpacks layers, each of which may be packed or not, and returns the tree.
fn laid(layers: &[Tar]) -> Vec<String> {
    let world = World::new();
    let layers: Vec<Vec<u8>> = layers.iter().map(|layer| layer.clone().end()).collect();
    tree(world.unpack_layers(&layers).unwrap().root())
}

#[test]
fn everything_that_a_tar_can_hold_is_made() {
    let world = World::new();
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(255));
    let layer = Tar::default()
        .folder("./", 0o700)
        .folder("./bin/", 0o755)
        .mode_file("./bin/run", b"#!", 0o755)
        .link("bin/sh", "run")
        .link("absolute", "/bin/run")
        .hard_link("bin/also", "./bin/run")
        .folder("closed", 0o000)
        .mode_file("closed/secret", b"s", 0o000)
        .folder("tmp", 0o1777)
        .raw(EntryType::Fifo, b"pipe", b"", 0o622, 0, b"")
        .file("implied/parents/file", b"x")
        .pax(&[("path", long.as_bytes()), ("mtime", b"12.5")])
        .file("short", b"long")
        .pax(&[("path", b"new\nline"), ("SCHILY.xattr.user.note", b"a\nb=c"), ("SCHILY.xattr.trusted.x", b"no")])
        .mode_file("short", b"", 0o444)
        .pax(&[("linkpath", &[b't'; 300])])
        .link("far", "short")
        .raw(EntryType::Regular, b"\xff\xfe", b"", 0o644, 1, b"b");
    let image = world.unpack_layers(&[layer.end()]).unwrap();
    let root = image.root();
    let expected = [
        "? 622 pipe FileType { is_file: false, is_dir: false, is_symlink: false, .. }".to_owned(),
        "d 1777 tmp".to_owned(),
        "d 700 closed".to_owned(),
        "d 755 bin".to_owned(),
        "d 755 implied".to_owned(),
        "d 755 implied/parents".to_owned(),
        format!("d 755 {}", "d".repeat(200)),
        "f 400 closed/secret \"s\"".to_owned(),
        "f 644 implied/parents/file \"x\"".to_owned(),
        "f 444 new\nline \"\"".to_owned(),
        format!("f 644 {long} \"long\""),
        "f 644 \u{fffd}\u{fffd} \"b\"".to_owned(),
        "f 755 bin/also \"#!\"".to_owned(),
        "f 755 bin/run \"#!\"".to_owned(),
        "l absolute -> /bin/run".to_owned(),
        "l bin/sh -> run".to_owned(),
        format!("l far -> {}", "t".repeat(300)),
    ];
    let mut found = tree(root);
    found.iter_mut().filter(|line| line.starts_with('?')).for_each(|line| {
        line.truncate("? 622 pipe".len());
    });
    let mut expected = expected.map(|line| if line.starts_with('?') { "? 622 pipe".to_owned() } else { line });
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(fs::metadata(root.join("bin/run")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(root).unwrap().mode() & 0o7777, 0o755);
    let time = fs::metadata(root.join(&long)).unwrap();
    assert_eq!((time.mtime(), time.mtime_nsec()), (12, 500_000_000));
    for folder in ["", "bin", "closed", "tmp"] {
        assert_eq!(fs::metadata(root.join(folder)).unwrap().mtime(), 1_000_000_000, "{folder}");
    }
    assert_eq!(fs::symlink_metadata(root.join("bin/sh")).unwrap().mtime(), 1_000_000_000);
    let mut value = [0; 64];
    match rustix::fs::getxattr(root.join("new\nline"), "user.note", &mut value[..]) {
        Ok(len) => assert_eq!(&value[..len], b"a\nb=c"),
        Err(_) => assert!(image.filled().notes.iter().any(|note| note.contains("attributes")), "{:?}", image.filled()),
    }
    assert!(root.join(std::ffi::OsStr::from_bytes(b"\xff\xfe")).exists());
    let variables =
        [("PATH", "/bin"), ("GREETING", "good day")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(image.filled().env, variables);
    assert_eq!(image.filled().entries, 17);
}

#[test]
fn a_layer_adds_replaces_and_removes() {
    let below = Tar::default()
        .folder("keep", 0o755)
        .file("keep/old", b"1")
        .file("keep/gone", b"1")
        .folder("becomes-file", 0o755)
        .file("becomes-file/deep/x", b"1")
        .file("becomes-folder", b"1")
        .link("becomes-real", "keep")
        .folder("removed", 0o755)
        .file("removed/x", b"1")
        .file("linked", b"1")
        .folder("mode", 0o700);
    let above = Tar::default()
        .file("keep/old", b"2")
        .file("keep/.wh.gone", b"")
        .file("keep/.wh.never", b"")
        .file("becomes-file", b"2")
        .folder("becomes-folder", 0o755)
        .file("becomes-folder/y", b"2")
        .folder("becomes-real", 0o750)
        .file(".wh.removed", b"")
        .file("missing/.wh.x", b"")
        .hard_link("second", "linked")
        .folder("mode", 0o711)
        .file("twice", b"first")
        .file("twice", b"last");
    assert_eq!(
        laid(&[below, above]),
        [
            "d 711 mode",
            "d 750 becomes-real",
            "d 755 becomes-folder",
            "d 755 keep",
            "f 644 becomes-file \"2\"",
            "f 644 becomes-folder/y \"2\"",
            "f 644 keep/old \"2\"",
            "f 644 linked \"1\"",
            "f 644 second \"1\"",
            "f 644 twice \"last\"",
        ]
    );
}

#[test]
fn whiteouts_leave_what_their_own_layer_makes_whatever_the_order() {
    let below = Tar::default()
        .file("opaque/old", b"1")
        .file("opaque/deep/old", b"1")
        .file("opaque/deep/kept", b"1")
        .file("white/old", b"1");
    let above = Tar::default()
        .file("opaque/deep/kept", b"2")
        .file("opaque/new", b"2")
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/late", b"2")
        .file("white/new", b"2")
        .file(".wh.white", b"")
        .file(".wh..wh.plnk", b"");
    let expected = [
        "d 755 opaque",
        "d 755 opaque/deep",
        "d 755 white",
        "f 644 opaque/deep/kept \"2\"",
        "f 644 opaque/late \"2\"",
        "f 644 opaque/new \"2\"",
        "f 644 white/new \"2\"",
    ];
    assert_eq!(laid(&[below.clone(), above]), expected);
    // In the lowest layer there is nothing that could be removed.
    let marked = below.file("opaque/.wh..wh..opq", b"").file(".wh.white", b"");
    assert_eq!(laid(&[marked]).iter().filter(|line| line.starts_with('f')).count(), 4);
}

#[test]
fn parents_that_are_links_lead_inside_of_the_image() {
    let below = Tar::default()
        .folder("usr/lib", 0o755)
        .link("lib", "usr/lib")
        .link("run", "/var/run")
        .link("out", "../../..")
        .link("chain", "run");
    let above = Tar::default()
        .file("lib/a.so", b"a")
        .file("chain/pid", b"1")
        .file("out/top", b"t")
        .hard_link("lib/b.so", "lib/a.so")
        .file("lib/.wh.a.so", b"");
    let found = laid(&[below, above]);
    let files: Vec<&String> = found.iter().filter(|line| line.starts_with('f')).collect();
    assert_eq!(
        files,
        ["f 644 top \"t\"", "f 644 usr/lib/a.so \"a\"", "f 644 usr/lib/b.so \"a\"", "f 644 var/run/pid \"1\""]
    );
}

#[test]
fn sparse_files_of_every_form_keep_their_holes() {
    let mut old = tar::Header::new_gnu();
    old.set_entry_type(EntryType::GNUSparse);
    old.set_path("old").unwrap();
    old.set_mode(0o644);
    old.set_mtime(1);
    old.set_size(3);
    let gnu = old.as_gnu_mut().unwrap();
    gnu.set_real_size(1 << 20);
    gnu.sparse[0].set_offset(1 << 19);
    gnu.sparse[0].set_length(3);
    gnu.sparse[1].set_offset(1 << 20);
    gnu.sparse[1].set_length(0);
    old.set_cksum();
    let mut layer = Tar::default();
    layer.0.extend_from_slice(old.as_bytes());
    layer.0.extend_from_slice(b"abc");
    layer.0.resize(layer.0.len().next_multiple_of(512), 0);
    let mut listed = b"2\n524288\n3\n1048576\n0\n".to_vec();
    listed.resize(512, 0);
    listed.extend_from_slice(b"abc");
    let layer = layer
        .pax(&[("GNU.sparse.size", b"1048576"), ("GNU.sparse.map", b"524288,3,1048576,0")])
        .file("middle", b"abc")
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"new"),
            ("GNU.sparse.realsize", b"1048576"),
        ])
        .file("GNUSparseFile.0/new", &listed);
    let world = World::new();
    let image = world.unpack_layers(&[gzip(&layer.end())]).unwrap();
    for name in ["old", "middle", "new"] {
        let data = fs::read(image.root().join(name)).unwrap();
        assert_eq!(data.len(), 1 << 20, "{name}");
        assert_eq!(&data[1 << 19..][..3], b"abc", "{name}");
        assert_eq!(data.iter().filter(|byte| **byte != 0).count(), 3, "{name}");
        let blocks = fs::metadata(image.root().join(name)).unwrap().blocks();
        assert!(blocks < 1024, "{name}: {blocks}");
    }
    assert!(image.filled().bytes < 4096, "{:?}", image.filled());
}

#[test]
fn what_was_replaced_is_not_counted() {
    let world = World::new();
    let below = Tar::default().file("a", &[b'x'; 9000]).file("deep/a/b/c", b"1");
    let above = Tar::default().file("a", b"y").file(".wh.deep", b"");
    let image = world.unpack_layers(&[below.end(), above.end()]).unwrap();
    assert_eq!((image.filled().entries, image.filled().bytes), (1, 1));
    let beside: Vec<_> =
        fs::read_dir(image.root().parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!beside.iter().any(|name| name == "removed"), "{beside:?}");
}
