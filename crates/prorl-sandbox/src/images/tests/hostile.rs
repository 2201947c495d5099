//! Images that are made to do harm, or broken. Each is refused by name, writes nothing elsewhere, and leaves nothing.

use std::{fs, io::Write as _, process::Command};

use tar::EntryType;

use super::support::{Layout, Tar, World, chain, config, gzip, has_own_mounts, layout, saved, tree};
use crate::{
    images::{Cancel, ImageError, Quiet, Source, UnpackLimits, layers::Layers, meter::Meter, part::digest_of},
    store::{Collect, ImageStore, StoreConfig},
};

/// Asserts that a layer is refused with these words.
fn assert_layer_refused(layer: Vec<u8>, words: &[&str]) {
    let world = World::new();
    layout(&world.path("layout"), &[layer]);
    world.assert_refused("oci:@layout", words);
    // The mended one works at once.
    assert!(world.unpack_layers(&[Tar::default().file("fine", b"").end()]).is_ok());
}

#[test]
fn nothing_climbs_out() {
    for path in ["../escaped", "a/../../escaped", "..", "./../escaped", "/../escaped", "a/.."] {
        assert_layer_refused(Tar::default().file(path, b"x").end(), &["would be outside of the image"]);
        assert_layer_refused(Tar::default().folder(path, 0o755).end(), &["would be outside of the image"]);
        assert_layer_refused(Tar::default().link(path, "x").end(), &["would be outside of the image"]);
    }
    for target in ["../escaped", "../../canary/bird", ".."] {
        let layer = Tar::default().hard_link("bird", target).end();
        assert_layer_refused(layer, &["would be outside of the image"]);
    }
    for target in ["/etc/passwd", "/", "missing", ""] {
        assert_layer_refused(Tar::default().hard_link("x", target).end(), &["which is no file of it"]);
    }
    let name = Tar::default().pax(&[("path", b"a\0b")]).file("x", b"").end();
    assert_layer_refused(name, &["would be outside of the image"]);
    for path in [".wh...", ".wh..", ".wh."] {
        assert_layer_refused(Tar::default().file(path, b"").end(), &["would remove what is no file"]);
    }
}

#[test]
fn links_lead_nowhere_but_inside() {
    let world = World::new();
    let canary = world.path("canary");
    let canary = canary.to_str().unwrap();
    let up = "../".repeat(30);
    let layer = Tar::default()
        .link("etc", "/")
        .file("etc/passwd", b"inside")
        .link("up", &up)
        .file("up/escaped", b"inside")
        .link("out", canary)
        .file("out/bird", b"dead")
        .link("bird", &format!("{canary}/bird"))
        .file("bird", b"replaced")
        .link("again", &format!("{canary}/bird"))
        .hard_link("kept", "again")
        .mode_file("again", b"replaced", 0o777)
        .link("folder", canary)
        .folder("folder", 0o777)
        .file("folder/.wh.bird", b"");
    let above = Tar::default()
        .link("root", "/")
        .file("root/.wh.up", b"")
        .file("out/.wh.bird", b"")
        .file("out/.wh..wh..opq", b"");
    let image = world.unpack_layers(&[layer.end(), above.end()]).unwrap();
    world.assert_canary("links");
    let found = tree(image.root());
    for line in
        ["f 644 passwd \"inside\"", "f 644 escaped \"inside\"", "f 644 bird \"replaced\"", "f 777 again \"replaced\""]
    {
        assert!(found.iter().any(|one| one == line), "{line}: {found:#?}");
    }
    assert!(found.iter().any(|line| line == &format!("l kept -> {canary}/bird")), "{found:#?}");
    assert!(!image.root().join("up").is_symlink());
}

#[test]
fn links_in_a_circle_and_files_as_folders_are_named() {
    let circle = Tar::default().link("a", "b").link("b", "a").file("a/x", b"");
    assert_layer_refused(circle.end(), &["a/x", "links that lead in a circle"]);
    let dangling = Tar::default().link("a", "c/../a/b").file("a/x", b"");
    assert_layer_refused(dangling.end(), &["a/x", "links"]);
    let file = Tar::default().file("a", b"").file("a/x", b"");
    assert_layer_refused(file.end(), &["a/x", "no folder"]);
    assert_layer_refused(Tar::default().file("/", b"").end(), &["is no folder"]);
    let odd = Tar::default().raw(EntryType::new(b'Q'), b"odd", b"", 0o644, 0, b"");
    assert_layer_refused(odd.end(), &["odd", "kind ('Q')"]);
}

#[test]
fn devices_are_left_out_and_set_id_bits_cleared() {
    let world = World::new();
    let layer = Tar::default()
        .file("dev/replaced", b"file")
        .raw(EntryType::Char, b"dev/null", b"", 0o666, 0, b"")
        .raw(EntryType::Block, b"dev/replaced", b"", 0o666, 0, b"")
        .mode_file("su", b"", 0o6755)
        .mode_file("passwd", b"", 0o4711)
        .folder("group", 0o2775)
        .pax(&[("SCHILY.xattr.security.capability", b"\x01\0\0\x02")])
        .file("ping", b"");
    let image = world.unpack_layers(&[layer.end()]).unwrap();
    assert_eq!(
        tree(image.root()),
        ["d 755 dev", "d 775 group", "f 644 ping \"\"", "f 711 passwd \"\"", "f 755 su \"\""]
    );
    let notes = image.filled().notes.join("\n");
    for line in [
        "cleared set-id bits of 2 files, the first su",
        "left out device nodes: 2 files, the first dev/null",
        "left out capabilities of 1 file, the first ping",
    ] {
        assert!(notes.contains(line), "{notes}");
    }
}

fn limited(limits: UnpackLimits) -> World {
    let mut world = World::new();
    world.unpacker.limits = limits;
    world
}

#[test]
fn too_much_is_refused_as_soon_as_it_is() {
    let mut many = Tar::default();
    for number in 0..2000 {
        many = many.file(&format!("empty{number}"), b"");
    }
    let world = limited(UnpackLimits { max_entries: 1000, ..UnpackLimits::default() });
    layout(&world.path("layout"), &[gzip(&many.end())]);
    world.assert_refused("oci:@layout", &["1001 files", "the limit is 1000"]);

    let bomb = gzip(&Tar::default().file("zeros", &vec![0; 4 << 20]).end());
    let world = limited(UnpackLimits { max_bytes: 1 << 20, ..UnpackLimits::default() });
    layout(&world.path("layout"), std::slice::from_ref(&bomb));
    world.assert_refused("oci:@layout", &["bytes, and the limit is 1048576"]);
    // What is not written counts too: behind the end of the tar, and as data of what has none.
    let behind = gzip(&[Tar::default().file("a", b"").end(), vec![0; 4 << 20]].concat());
    fs::remove_dir_all(world.path("layout")).unwrap();
    layout(&world.path("layout"), &[behind]);
    world.assert_refused("oci:@layout", &["the limit is 1048576"]);
    let packed = gzip(&[saved(&[]).end(), vec![0; 4 << 20]].concat());
    fs::write(world.path("packed.tgz"), packed).unwrap();
    world.assert_refused("@packed.tgz", &["the limit is 1048576"]);
}

/// A gigabyte is free; this is somewhat more.
#[test]
fn a_bomb_is_refused_by_its_ratio() {
    let size: u64 = (1 << 30) + (64 << 20);
    let mut bomb = zstd::Encoder::new(Vec::new(), 1).unwrap();
    bomb.write_all(&Tar::default().raw(EntryType::Regular, b"zeros", b"", 0o644, size, b"").0).unwrap();
    let zeros = vec![0; 1 << 20];
    for _ in 0..size >> 20 {
        bomb.write_all(&zeros).unwrap();
    }
    let world = World::new();
    layout(&world.path("layout"), &[bomb.finish().unwrap()]);
    world.assert_refused("oci:@layout", &["packed ones", "the limit is 200 from one"]);
}

#[test]
fn what_is_cut_short_is_named_wherever_it_ends() {
    let text: Vec<u8> = (0..20_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let tar = Tar::default().folder("a", 0o755).file("a/b", &text).pax(&[("path", b"long")]).file("c", b"c").end();
    let world = World::new();
    for whole in [tar.clone(), gzip(&tar), zstd::encode_all(&tar[..], 3).unwrap()] {
        for at in (1..whole.len() - 1).step_by(whole.len() / 40) {
            let _ = fs::remove_dir_all(world.path("layout"));
            let mut made = Layout::new(&world.path("layout"));
            let manifest = made.manifest(std::slice::from_ref(&whole));
            made.index(manifest, None);
            let blob = world.path("layout/blobs/sha256").join(digest_of(&whole).hex());
            // First as a blob of a wrong size, then as one of the right size whose end is zeros.
            fs::write(&blob, &whole[..at]).unwrap();
            world.assert_refused("oci:@layout", &[digest_of(&whole).as_str(), "bytes, where"]);
            let mut broken = whole[..at].to_vec();
            broken.resize(whole.len(), 0);
            if broken != whole {
                fs::write(&blob, broken).unwrap();
                world.assert_refused("oci:@layout", &[digest_of(&whole).as_str()]);
            }
            // And as a layer that was cut before it was hashed.
            let _ = fs::remove_dir_all(world.path("layout"));
            layout(&world.path("layout"), &[whole[..at].to_vec()]);
            if let Err(error) = world.unpack("oci:@layout") {
                world.assert_canary(&chain(&error));
                assert!(matches!(error, ImageError::Damaged { .. }), "{error}");
            } else {
                // Only at the end of an entry does nothing tell that there was more, or in the zeros at the end of all.
                assert!(whole == tar && (at % 512 == 0 || at > tar.len() - 1024), "{at} of {}", whole.len());
                return_to_empty(&world);
            }
        }
    }
    let archive = saved(&[tar]).end();
    for at in (1..archive.len() - 1024).step_by(archive.len() / 40) {
        fs::write(world.path("saved.tar"), &archive[..at]).unwrap();
        world.assert_refused("docker-archive:@saved.tar", &["saved.tar"]);
    }
}

fn return_to_empty(world: &World) {
    let collect = Collect { unused_for: Some(std::time::Duration::ZERO), ..Collect::default() };
    world.unpacker.store.collect(&collect).unwrap();
}

#[test]
fn wrong_digests_and_names_are_found() {
    let world = World::new();
    let good = Tar::default().file("a", b"good").end();
    let bad = Tar::default().file("a", b"evil").end();
    layout(&world.path("layout"), std::slice::from_ref(&good));
    let blob = world.path("layout/blobs/sha256").join(digest_of(&good).hex());
    fs::write(&blob, &bad).unwrap();
    world.assert_refused("oci:@layout", &[digest_of(&good).as_str(), "has the digest", digest_of(&bad).as_str()]);
    fs::remove_file(&blob).unwrap();
    world.assert_refused("oci:@layout", &[digest_of(&good).as_str(), "is missing"]);
    fs::write(&blob, &good).unwrap();
    let index = fs::read(world.path("layout/index.json")).unwrap();
    fs::write(world.path("layout/index.json"), &index[..index.len() - 1]).unwrap();
    world.assert_refused("oci:@layout", &["index.json", "cannot be understood"]);
    fs::write(world.path("layout/index.json"), "[".repeat(100_000)).unwrap();
    world.assert_refused("oci:@layout", &["index.json", "cannot be understood"]);
    let climbing = String::from_utf8(index.clone()).unwrap().replace("sha256:", "../../../canary/bird:");
    fs::write(world.path("layout/index.json"), climbing).unwrap();
    world.assert_refused("oci:@layout", &["digest", "is wrong"]);
    fs::write(world.path("layout/index.json"), index).unwrap();
    assert!(world.unpack("oci:@layout").is_ok());

    let world = World::new();
    let list = |config: &str, layer: &str| {
        serde_json::to_vec(&serde_json::json!([{"Config": config, "Layers": [layer]}])).unwrap()
    };
    let config = config(&[digest_of(&good).to_string()]);
    let archive = |data: &[u8], config_name: &str, layer_name: &str| {
        let tar = Tar::default().file("c.json", &config).file("l.tar", data);
        fs::write(world.path("s.tar"), tar.file("manifest.json", &list(config_name, layer_name)).end()).unwrap();
    };
    archive(&bad, "c.json", "l.tar");
    world.assert_refused("@s.tar", &["l.tar", "has the digest"]);
    archive(&good, "c.json", "../../canary/bird");
    world.assert_refused("@s.tar", &["../../canary/bird", "is not in the archive"]);
    archive(&good, "../../canary/bird", "l.tar");
    world.assert_refused("@s.tar", &["../../canary/bird", "is missing"]);
    archive(&good, "c.json", "l.tar");
    assert!(world.unpack("@s.tar").is_ok());
}

#[test]
fn absurd_sizes_in_headers_cost_nothing() {
    for size in [u64::MAX, 1 << 62, 1 << 40] {
        let mut header = tar::Header::new_gnu();
        header.set_path("huge").unwrap();
        header.set_mode(0o644);
        header.set_size(size);
        header.set_cksum();
        for kind in [EntryType::Regular, EntryType::GNULongName, EntryType::XHeader, EntryType::XGlobalHeader] {
            header.set_entry_type(kind);
            header.set_cksum();
            let layer = [header.as_bytes().as_slice(), &[0; 4096]].concat();
            assert_layer_refused(layer, &["sha256:"]);
        }
    }
    let huge = Tar::default().pax(&[("size", b"99999999999999999999")]).file("x", b"").end();
    assert_layer_refused(huge, &["wrong number"]);
    let sparse = Tar::default().pax(&[("GNU.sparse.size", b"5"), ("GNU.sparse.map", b"0,9")]).file("x", &[0; 9]).end();
    assert_layer_refused(sparse, &["out of order"]);
    let list =
        Tar::default().pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"5")]).file("x", b"99999999\n").end();
    assert_layer_refused(list, &["sparse file"]);
    let mut extensions = Tar::default();
    for _ in 0..100 {
        extensions = extensions.pax(&[("comment", b"again")]);
    }
    assert_layer_refused(extensions.file("x", b"").end(), &["extension headers"]);
}

#[test]
fn random_damage_never_panics_or_escapes() {
    let tar = Tar::default()
        .folder("a", 0o755)
        .file("a/b", b"some text")
        .pax(&[("path", b"long name"), ("mtime", b"1.5"), ("SCHILY.xattr.user.x", b"1")])
        .file("c", b"c")
        .pax(&[("GNU.sparse.size", b"1048576"), ("GNU.sparse.map", b"524288,3")])
        .file("s", b"abc")
        .link("l", "a")
        .hard_link("h", "a/b")
        .file("l/.wh.b", b"")
        .end();
    let world = World::new();
    let limits = UnpackLimits { max_bytes: 16 << 20, max_entries: 1000, ..UnpackLimits::default() };
    let cancel = Cancel::default();
    // A generator of its own, so that a failure can be repeated.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).unwrap()
    };
    let mut n_laid = 0;
    for _ in 0..400 {
        let mut broken = tar.clone();
        let header = random(tar.len() / 512) * 512;
        for _ in 0..=random(4) {
            let at = header + random(350);
            broken[at] = u8::try_from(random(256)).unwrap();
        }
        // With a right checksum, or nothing else would be looked at.
        let sum: u32 = broken[header..header + 148]
            .iter()
            .chain(&broken[header + 156..header + 512])
            .map(|byte| u32::from(*byte))
            .sum();
        broken[header + 148..header + 156].copy_from_slice(format!("{:06o}\0 ", sum + 256).as_bytes());
        let root = world.path("random/root");
        fs::create_dir_all(&root).unwrap();
        let meter = Meter::new("random", 1 << 20, limits, &cancel, &Quiet);
        let mut layers = Layers::begin(&root, None, &meter).unwrap();
        let laid = ["lower", "upper"].map(|layer| layers.add(layer, &broken[..]).map(drop));
        if laid.iter().all(Result::is_ok) {
            n_laid += 1;
            layers.finish().unwrap();
        }
        fs::remove_dir_all(world.path("random")).unwrap();
        world.assert_canary("random");
    }
    // Some damage does no harm, such as to a time.
    assert!((1..400).contains(&n_laid), "{n_laid}");
}

#[test]
fn cancelled_work_leaves_nothing() {
    let world = World::new();
    layout(&world.path("layout"), &[Tar::default().file("a", b"a").end()]);
    let cancel = Cancel::default();
    cancel.cancel();
    let source = Source::parse(&format!("oci:{}", world.path("layout").display())).unwrap();
    let error = world.unpacker.unpack(&source, &cancel, &Quiet).unwrap_err();
    assert!(matches!(error, ImageError::Cancelled), "{error}");
    world.assert_untouched("cancelled");
    assert!(world.unpack("oci:@layout").is_ok());
}

#[test]
fn a_full_disk_is_named_and_the_next_try_works() {
    if !has_own_mounts("hostile::a_full_disk_is_named_and_the_next_try_works") {
        return;
    }
    let mut world = World::new();
    let small = world.path("small");
    fs::create_dir(&small).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&small).status().unwrap();
    assert!(mount.success());
    world.unpacker.store = ImageStore::open(StoreConfig::new(small.join("store"))).unwrap();
    fs::create_dir(world.path("folder")).unwrap();
    fs::write(world.path("folder/large"), vec![b'x'; 2 << 20]).unwrap();
    layout(&world.path("layout"), &[Tar::default().file("large", &vec![b'x'; 2 << 20]).end()]);
    fs::write(world.path("saved.tgz"), gzip(&saved(&[Tar::default().file("a", &vec![b'x'; 2 << 20]).end()]).end()))
        .unwrap();
    for source in ["@folder", "oci:@layout", "@saved.tgz"] {
        let error = chain(&world.unpack(source).unwrap_err());
        assert!(error.contains("small/store/staging") && error.contains("No space left"), "{error}");
        let left: Vec<_> = fs::read_dir(small.join("store/staging")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
    assert!(world.unpack_layers(&[Tar::default().file("fits", b"").end()]).is_ok());
    drop(world.unpacker);
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
}
