//! Images that lie, and some that say what no packer would for the test.

use std::os::unix::fs::FileExt as _;

use super::{
    handmade::{Handmade, NONE, reference},
    *,
};

/// The packed size of so many bytes that are not compressed.
const fn raw(len: u32) -> u32 {
    1 << 24 | len
}

/// Unpacks an image that is refused: nothing appears beside the folder that it was to go to.
fn refuse(image: &[u8], unpack: &Unpack<'_>) -> ImageError {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("image"), image).unwrap();
    fs::write(dir.path().join("canary"), "alive").unwrap();
    let error = unpack.run(&dir.path().join("image"), &dir.path().join("root")).unwrap_err();
    let mut beside: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    beside.sort();
    assert_eq!(beside, ["canary", "image", "root"], "{error}");
    assert_eq!(fs::read(dir.path().join("canary")).unwrap(), b"alive");
    error
}

/// Unpacks what `make` made: its root is a folder with the entries that `make` returns.
fn refused(make: impl FnOnce(&mut Handmade) -> Vec<(&'static [u8], u64)>) -> String {
    let mut image = Handmade::new();
    let entries = make(&mut image);
    image.root = image.folder(&entries);
    let error = refuse(&image.image(), &Unpack::default());
    assert!(matches!(error, ImageError::Damaged { .. } | ImageError::Refused { .. }), "{error:?}");
    error.to_string()
}

fn assert_has(error: &str, part: &str) {
    assert!(error.contains(part), "{error:?} does not say {part:?}");
}

#[test]
fn a_handmade_image_that_is_right_is_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let mut image = Handmade::new();
    let at = image.data(&[b'x'; 4096]);
    let tail = image.data(b"tailor");
    image.fragments.push((tail, raw(6)));
    let file = image.file(at, 8196, &[raw(4096), 0], (0, 2));
    let link = image.link(b"/etc/passwd");
    let below = image.folder(&[(b"link", link), (b"same", link)]);
    image.root = image.folder(&[(b"a", file), (b"b", below)]);
    fs::write(dir.path().join("image"), image.image()).unwrap();
    let root = dir.path().join("root");
    Unpack::default().run(&dir.path().join("image"), &root).unwrap();
    let content = [&[b'x'; 4096][..], &[0; 4096], b"ilor"].concat();
    assert_eq!(fs::read(root.join("a")).unwrap(), content);
    assert_eq!(fs::read_link(root.join("b/link")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(look(&root)[Path::new("b/same")].first, Path::new("b/link"));
}

#[test]
fn a_file_of_more_than_4_gib_has_its_bytes_where_they_were() {
    const GIB: usize = 1 << 30;
    let dir = tempfile::tempdir().unwrap();
    let mut image = Handmade::new();
    let at = image.data(&[[b'a'; 4096], [b'b'; 4096]].concat());
    let mut sizes = vec![0; 5 * GIB / 4096];
    sizes[0] = raw(4096);
    sizes[4 * GIB / 4096 + 1] = raw(4096);
    let tail = image.data(b"end");
    image.fragments.push((tail, raw(3)));
    let file = image.file(at, 5 * GIB as u64 + 3, &sizes, (0, 0));
    image.root = image.folder(&[(b"f", file)]);
    fs::write(dir.path().join("image"), image.image()).unwrap();
    Unpack::default().run(&dir.path().join("image"), &dir.path().join("root")).unwrap();

    let file = File::open(dir.path().join("root/f")).unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!(meta.len(), 5 * GIB as u64 + 3);
    assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
    for (at, expected) in
        [(0, "aaa"), (4096, "\0"), (4 * GIB + 4095, "\0bb"), (4 * GIB + 8191, "b\0"), (5 * GIB, "end")]
    {
        let mut bytes = vec![0; expected.len()];
        file.read_exact_at(&mut bytes, at as u64).unwrap();
        assert_eq!(bytes, expected.as_bytes(), "at {at}");
    }
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in [&b".."[..], b".", b"a/b", b"/etc", b"../canary", b"nul\0"] {
        let error = refused(|image| vec![(name, image.empty_file())]);
        assert_has(&error, "would be outside of the image");
        let error = refused(|image| vec![(name, image.folder(&[]))]);
        assert_has(&error, "would be outside of the image");
    }
    let long = &*Vec::leak(vec![b'n'; 256]);
    assert_has(&refused(|image| vec![(long, image.empty_file())]), "a name of 256 bytes");
}

#[test]
fn nothing_is_made_twice_nor_through_a_link() {
    assert_has(&refused(|image| vec![(b"a", image.empty_file()), (b"a", image.empty_file())]), "is there twice");
    assert_has(&refused(|image| vec![(b"a", image.folder(&[])), (b"a", image.empty_file())]), "is there twice");
    assert_has(&refused(|image| vec![(b"a", image.empty_file()), (b"a", image.link(b"x"))]), "is there twice");
    for target in [&b".."[..], b"/tmp", b"."] {
        let error = refused(|image| {
            let file = image.empty_file();
            vec![(b"a", image.link(target)), (b"a", image.folder(&[(b"intruder", file)]))]
        });
        assert_has(&error, "is there twice");
        assert_has(&refused(|image| vec![(b"a", image.link(target)), (b"a", image.empty_file())]), "is there twice");
    }
}

#[test]
fn folders_without_end_are_found() {
    let error = refused(|image| {
        let own = reference(image.inodes.len());
        let start = image.names.len();
        image.name(1, own, b"self");
        let len = image.names.len() - start;
        vec![(b"loop", image.folder_at(start, len))]
    });
    assert_has(&error, "loop/self is a folder that is elsewhere too");
    let error = refused(|image| {
        let folder = image.folder(&[]);
        vec![(b"a", folder), (b"b", folder)]
    });
    assert_has(&error, "b is a folder that is elsewhere too");
}

#[test]
fn a_path_that_no_program_could_use_is_refused() {
    let mut image = Handmade::new();
    let name = [b'd'; 250];
    let mut folder = image.folder(&[]);
    for _ in 0..17 {
        folder = image.folder(&[(&name, folder)]);
    }
    image.root = folder;
    let error = refuse(&image.image(), &Unpack::default());
    assert_has(&error.to_string(), "has a path that is too long");
}

#[test]
fn blocks_of_wrong_sizes_are_found() {
    let one = |size: u32, len: u64| {
        refused(|image| {
            let at = image.data(&[b'x'; 5000]);
            vec![(b"f", image.file(at, len, &[size], (NONE, 0)))]
        })
    };
    assert_has(&one(raw(4097), 4096), "larger than it may be");
    assert_has(&one(4097, 4096), "larger than it may be");
    assert_has(&one(raw(1000), 4096), "smaller than it must be");
    assert_has(&one(raw(101), 100), "larger than it may be");
    assert_has(&one(100, 4096), "cannot be decompressed");
    let error = refused(|image| vec![(b"f", image.file(u64::MAX - 10, 4096, &[raw(4096)], (NONE, 0)))]);
    assert_has(&error, "f lies at byte");
    let error = refused(|image| vec![(b"f", image.file(1 << 40, 4096, &[raw(4096)], (NONE, 0)))]);
    assert_has(&error, "f lies at byte 1099511627776, and the image has");
}

#[test]
fn fragments_that_are_not_there_are_found() {
    let error = refused(|image| vec![(b"f", image.file(0, 10, &[], (3, 0)))]);
    assert_has(&error, "f is in fragment 3, and there are 0");
    for (offset, size) in [(0, raw(9)), (1, raw(10)), (u32::MAX, raw(10)), (0, raw(4097)), (0, 0)] {
        let error = refused(|image| {
            let at = image.data(&[b'x'; 5000]);
            image.fragments.push((at, size));
            vec![(b"f", image.file(0, 10, &[], (0, offset)))]
        });
        assert_has(&error, "image test.sqfs is damaged: f ");
    }
    let error = refused(|image| {
        image.claimed_fragments = Some(u32::MAX);
        vec![(b"f", image.file(0, 10, &[], (u32::MAX - 1, 0)))]
    });
    assert_has(&error, "and the image has");
}

#[test]
fn lengths_that_no_bytes_stand_behind_are_found() {
    assert_has(
        &refused(|image| vec![(b"f", image.file(0, u64::MAX, &[], (NONE, 0)))]),
        "claims 18446744073709551615 bytes",
    );
    // The folder's own inode is read as sizes of the file's blocks, and then nothing is left.
    let error = refused(|image| vec![(b"f", image.file(0, 1 << 42, &[0; 50], (NONE, 0)))]);
    assert_has(&error, "f ");
    let error = refused(|image| {
        let (file, start) = (image.empty_file(), image.names.len());
        image.name(10_000_000, file, b"one");
        let len = image.names.len() - start;
        vec![(b"d", image.folder_at(start, len))]
    });
    assert_has(&error, "d claims 9999999 names in one run");
    let error = refused(|image| {
        let (file, start) = (image.empty_file(), image.names.len());
        image.name(200, file, b"one");
        let len = image.names.len() - start;
        vec![(b"d", image.folder_at(start, len))]
    });
    assert_has(&error, "d ends within a name");
    assert_has(&refused(|_image| vec![(b"f", 0xffff_ffff_0000)]), "f runs past the end of its table");
    assert_has(&refused(|_image| vec![(b"f", 8191)]), "f points behind the end of a block of metadata");
    let error = refused(|image| vec![(b"l", image.inode(3, 0o777, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f]))]);
    assert_has(&error, "l is a link to a name of 2147483647 bytes");
    assert_has(&refused(|image| vec![(b"x", image.inode(99, 0, &[]))]), "x is of the unknown kind 99");
    let error = refused(|image| vec![(b"x", image.inode(9, 0, &[&[0; 36][..], &[7, 0, 0, 0]].concat()))]);
    assert_has(&error, "x has extended attributes, and the image has none");
}

#[test]
fn a_list_of_names_ends_where_its_table_does() {
    let mut image = Handmade::new();
    let file = image.empty_file();
    let after_the_only_name_of_the_root = 12 + 8 + 1;
    let folder = image.folder_at(after_the_only_name_of_the_root, 4_000_000_000);
    image.root = image.folder(&[(b"d", folder)]);
    image.name(1, file, b"one");
    assert_has(&refuse(&image.image(), &Unpack::default()).to_string(), "d runs past the end of its table");
}

#[test]
fn limits_hold_whatever_is_claimed() {
    let mut image = Handmade::new();
    let file = image.empty_file();
    for idx in 0..3000 {
        image.name(1, file, format!("{idx}").as_bytes());
    }
    let len = image.names.len();
    image.root = image.folder_at(0, len);
    let limits = UnpackLimits { max_entries: 1000, ..Default::default() };
    let error = refuse(&image.image(), &Unpack { limits, ..Default::default() });
    assert_has(&error.to_string(), "it holds 1001 files, and the limit is 1000");

    // 2000 files of the same 16 blocks, each of which is a few bytes for 4 KiB of zeroes.
    // One literal, a match of 4088 bytes, seven literals.
    let packed = [&[0x1f, 0, 1, 0][..], &[255; 15], &[244, 0x70], &[0; 7]].concat();
    let mut image = Handmade::new();
    let at = image.data(&packed.repeat(16));
    let sizes = [u32::try_from(packed.len()).unwrap(); 16];
    let file = image.file(at, 16 * 4096, &sizes, (NONE, 0));
    for idx in 0..2000 {
        image.name(1, file, format!("{idx}").as_bytes());
    }
    let len = image.names.len();
    image.root = image.folder_at(0, len);
    let limits = UnpackLimits { max_bytes: 1 << 20, ..Default::default() };
    let error = refuse(&image.image(), &Unpack { limits, ..Default::default() });
    assert_has(&error.to_string(), "and the limit is 1048576");
}

#[test]
fn ends_of_files_count_too() {
    let mut image = Handmade::new();
    let at = image.data(&[b'x'; 4096]);
    image.fragments.push((at, raw(4096)));
    let file = image.file(0, 4000, &[], (0, 0));
    for idx in 0..300 {
        image.name(1, file, format!("{idx}").as_bytes());
    }
    let len = image.names.len();
    image.root = image.folder_at(0, len);
    let limits = UnpackLimits { max_bytes: 1 << 20, ..Default::default() };
    let error = refuse(&image.image(), &Unpack { limits, threads: 1, ..Default::default() });
    assert_has(&error.to_string(), "it holds 1052000 bytes, and the limit is 1048576");
}

#[test]
fn a_superblock_that_contradicts_itself_is_refused() {
    let mut image = Handmade::new();
    image.root = image.folder(&[]);
    let good = image.image();
    let with = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        refuse(&image, &Unpack::default()).to_string()
    };
    let far = (1u64 << 50).to_le_bytes();
    for (at, bytes, problem) in [
        (0, &b"hsqx"[..], "is not that of a squashfs"),
        (12, &[0, 8, 0, 0], "claims blocks of 2048 bytes"),
        (12, &[1, 16, 0, 0], "claims blocks of 4097 bytes"),
        (12, &[0, 0, 0, 255], "claims blocks of"),
        (22, &[200, 0], "claims blocks of 4096 bytes"),
        (20, &[2, 0], "names the compression lzma, which is not supported"),
        (20, &[3, 0], "names the compression lzo, which is not supported"),
        (20, &[77, 0], "names the compression number 77"),
        (28, &[3, 0], "is of version 3.0"),
        (40, &far, "was it copied whole?"),
        (48, &far, "names a table beyond its end"),
        (56, &far, "names a table beyond its end"),
        (64, &far, "has its tables in an impossible order"),
        (72, &[0; 8], "has its tables in an impossible order"),
        (32, &far, "/ runs past the end of its table"),
    ] {
        assert_has(&with(at, bytes), problem);
    }
    let error = refuse(&good[..50], &Unpack::default()).to_string();
    assert_has(&error, "its superblock lies at byte 0, and the image has 50");
    let mut image = Handmade::new();
    image.root = image.empty_file();
    assert_has(&refuse(&image.image(), &Unpack::default()).to_string(), "/ is no folder");
}
