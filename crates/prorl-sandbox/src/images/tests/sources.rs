//! Every kind of source, right ones.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use super::support::{Layout, Tar, World, config, gzip, has_own_mounts, layout, saved, skip, tree};
use crate::{
    images::{Cancel, Progress, Quiet, Source, part::digest_of},
    store::{Collect, ImageStore, StoreConfig},
};

fn layer(text: &str) -> Vec<u8> {
    Tar::default().folder("etc", 0o755).file("etc/name", text.as_bytes()).end()
}

fn name_in(root: &Path) -> String {
    fs::read_to_string(root.join("etc/name")).unwrap()
}

#[test]
fn layouts_are_unpacked_by_their_manifest() {
    let world = World::new();
    let packed = [gzip(&layer("one")), zstd::encode_all(&Tar::default().file("two", b"2").end()[..], 1).unwrap()];
    let mut made = Layout::new(&world.path("layout"));
    let manifest = made.manifest(&packed);
    made.index(manifest.clone(), Some("v1"));
    let image = world.unpack("oci:@layout").unwrap();
    assert_eq!(tree(image.root()), ["d 755 etc", "f 644 etc/name \"one\"", "f 644 two \"2\""]);
    assert_eq!(image.filled().digest.as_str(), manifest["digest"]);
    // The same, however it is asked for: a hit, since the blobs are gone.
    for packed in packed {
        fs::remove_file(world.path("layout/blobs/sha256").join(digest_of(&packed).hex())).unwrap();
    }
    let digest = manifest["digest"].as_str().unwrap().to_owned();
    for source in ["oci:@layout:v1".to_owned(), world.path("layout").display().to_string()] {
        assert_eq!(world.unpack(&source).unwrap(), image);
    }
    let by_digest = Source::parse(&format!("oci:{}@{digest}", world.path("layout").display())).unwrap();
    assert_eq!(world.unpacker.unpack(&by_digest, &Cancel::default(), &Quiet).unwrap(), image);
}

#[test]
fn the_image_of_a_layout_is_chosen_by_tag_digest_and_platform() {
    let world = World::new();
    let mut made = Layout::new(&world.path("layout"));
    let (one, two) = (made.manifest(&[layer("one")]), made.manifest(&[layer("two")]));
    made.index(one.clone(), Some("one"));
    made.index(two, Some("two"));
    let other = |name: &str| {
        let mut manifest = one.clone();
        manifest["platform"] = serde_json::json!({"os": "linux", "architecture": name});
        manifest
    };
    let mut three = made.manifest(&[layer("three")]);
    three["platform"] = serde_json::json!({"os": "linux", "architecture": super::support::architecture()});
    let nested = serde_json::json!({"schemaVersion": 2, "manifests": [other("unknown"), other("z80"), three]});
    let nested = made.blob(&serde_json::to_vec(&nested).unwrap(), "application/vnd.oci.image.index.v1+json");
    made.index(nested, Some("many"));
    made.index(other("z80"), Some("z80"));
    for (tag, name) in [("one", "one"), ("two", "two"), ("many", "three")] {
        assert_eq!(name_in(world.unpack(&format!("oci:@layout:{tag}")).unwrap().root()), name);
    }
    for (source, words) in [
        ("oci:@layout", &["has several images", "one ", "many ", "sha256:"][..]),
        ("oci:@layout:none", &["no image of tag \"none\"", "there are one "]),
        ("oci:@layout:z80", &["is not for this machine", "linux/z80"]),
    ] {
        let error = world.unpack(source).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{source}: {error}");
    }
}

/// Packs a layout into a tar.
fn tar_of(dir: &Path) -> Tar {
    let mut tar = Tar::default();
    for line in tree(dir).iter().filter(|line| line.starts_with('f')) {
        let name = line.split(' ').nth(2).unwrap();
        tar = tar.file(name, &fs::read(dir.join(name)).unwrap());
    }
    tar
}

#[test]
fn archives_are_told_apart_by_what_is_in_them() {
    let world = World::new();
    layout(&world.path("layout"), &[layer("layout")]);
    fs::write(world.path("layout.tar"), tar_of(&world.path("layout")).end()).unwrap();
    let old = saved(&[layer("below"), Tar::default().file("top", b"t").end()]);
    fs::write(world.path("saved.tar"), old.clone().end()).unwrap();
    fs::write(world.path("saved.tgz"), gzip(&old.end())).unwrap();
    // What is written today: blobs, both lists, and a link for the layer as it used to be.
    let blob = layer("new");
    let config = config(&[digest_of(&blob).to_string()]);
    let path = |data: &[u8]| format!("blobs/sha256/{}", digest_of(data).hex());
    let list = serde_json::json!([{"Config": path(&config), "RepoTags": null, "Layers": ["old/layer.tar"]}]);
    let new = Tar::default()
        .file(&path(&blob), &blob)
        .file(&path(&config), &config)
        .link("old/layer.tar", &format!("../{}", path(&blob)))
        .file("index.json", b"not looked at")
        .file("manifest.json", &serde_json::to_vec(&list).unwrap());
    fs::write(world.path("new.tar"), new.end()).unwrap();
    for (source, name) in [
        ("@layout.tar", "layout"),
        ("oci:@layout.tar:latest", "layout"),
        ("docker-archive:@saved.tar", "below"),
        ("@saved.tar", "below"),
        ("@saved.tgz", "below"),
        ("@new.tar", "new"),
    ] {
        let image = world.unpack(source).unwrap();
        assert_eq!(name_in(image.root()), name, "{source}");
        assert_eq!(image.filled().env.len(), 2);
        let beside = fs::read_dir(image.root().parent().unwrap()).unwrap();
        assert!(!beside.map(|entry| entry.unwrap().file_name()).any(|name| name == "archive.tar"), "{source}");
    }
    assert_eq!(world.unpack("@new.tar").unwrap().filled().digest, digest_of(&config));
}

#[test]
fn a_folder_is_copied_with_all_that_is_kept() {
    let world = World::new();
    let from = world.path("folder");
    fs::create_dir_all(from.join("bin")).unwrap();
    fs::write(from.join("bin/su"), "su").unwrap();
    fs::set_permissions(from.join("bin/su"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(from.join("bin/su"), from.join("second")).unwrap();
    symlink("/etc/shadow", from.join("link")).unwrap();
    let sparse = fs::File::create(from.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", 1 << 20).unwrap();
    sparse.set_len(8 << 20).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    fs::set_permissions(from.join("bin"), fs::Permissions::from_mode(0o2711)).unwrap();
    let time = std::time::UNIX_EPOCH + Duration::new(99, 7);
    fs::File::open(from.join("bin")).unwrap().set_modified(time).unwrap();
    let image = world.unpack("@folder").unwrap();
    let root = image.root();
    let mut found = tree(root);
    found.retain(|line| !line.contains("sparse"));
    assert_eq!(found, ["d 711 bin", "f 755 bin/su \"su\"", "f 755 second \"su\"", "l link -> /etc/shadow"]);
    let meta = |name: &str| fs::metadata(root.join(name)).unwrap();
    assert_eq!(meta("second").ino(), meta("bin/su").ino());
    assert_eq!(meta("bin").modified().unwrap(), time);
    assert!(meta("sparse").len() == 8 << 20 && meta("sparse").blocks() < 4096, "{}", meta("sparse").blocks());
    assert_eq!(fs::read(root.join("sparse")).unwrap()[1 << 20..][..5], *b"data\0");
    let notes = image.filled().notes.join("\n");
    for word in ["cleared set-id bits of 1 file, the first bin/su", "sockets: 1 file, the first socket"] {
        assert!(notes.contains(word), "{notes}");
    }
    assert_eq!(world.unpack("@folder").unwrap(), image);

    // The same again elsewhere is the same image, without its times and holes; a change is another.
    let copied = Command::new("cp")
        .args(["-r", "--sparse=never", "--preserve=mode,links"])
        .arg(&from)
        .arg(world.path("copy"))
        .status()
        .unwrap();
    assert!(copied.success());
    fs::remove_file(world.path("copy/socket")).ok();
    assert_eq!(world.unpack("@copy").unwrap(), image);
    fs::write(world.path("copy/bin/su"), "SU").unwrap();
    let other = world.unpack("@copy").unwrap();
    assert_ne!(other, image);
    assert_eq!(fs::read(other.root().join("second")).unwrap(), b"SU");
}

#[test]
fn what_is_mounted_below_a_folder_is_no_part_of_it() {
    if !has_own_mounts("sources::what_is_mounted_below_a_folder_is_no_part_of_it") {
        return;
    }
    let world = World::new();
    let from = world.path("folder");
    fs::create_dir_all(from.join("mounted/below")).unwrap();
    fs::write(from.join("file"), "bound over").unwrap();
    fs::write(from.join("kept"), "kept").unwrap();
    let mount = |args: &[&str], at: &str| {
        let status = Command::new("mount").args(args).arg(from.join(at)).status().unwrap();
        assert!(status.success(), "{args:?}");
    };
    mount(&["-t", "tmpfs", "-o", "mode=755", "none"], "mounted");
    fs::write(from.join("mounted/secret"), "s").unwrap();
    // A mount of the same file system, which the number of a device does not tell.
    mount(&["--bind", world.path("canary/bird").to_str().unwrap()], "file");
    let image = world.unpack("@folder").unwrap();
    assert_eq!(tree(image.root()), ["d 755 mounted", "f 644 kept \"kept\""]);
    let note = "left out what is mounted below it: 2, the first file";
    assert!(image.filled().notes.iter().any(|line| line == note), "{:?}", image.filled().notes);
    for at in ["mounted", "file"] {
        assert!(Command::new("umount").arg(from.join(at)).status().unwrap().success());
    }
}

#[test]
fn root_gives_everything_to_the_owner() {
    if !nix::unistd::geteuid().is_root() {
        return skip("root_gives_everything_to_the_owner", "only root gives files away");
    }
    let owner = crate::SandboxUser { uid: 65534, gid: 65534 };
    let mut world = World::new();
    fs::set_permissions(world.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let config = StoreConfig { owner: Some(owner), ..StoreConfig::new(world.path("store-of-owner")) };
    world.unpacker.store = ImageStore::open(config).unwrap();
    let tar = Tar::default().folder("bin", 0o755).mode_file("bin/su", b"", 0o4755).link("link", "bin").file("a/b", b"");
    layout(&world.path("layout"), &[tar.raw(tar::EntryType::Fifo, b"pipe", b"", 0o600, 0, b"").end()]);
    fs::create_dir_all(world.path("folder/deep")).unwrap();
    fs::write(world.path("folder/deep/file"), "").unwrap();
    symlink("deep", world.path("folder/link")).unwrap();
    for source in ["oci:@layout", "@folder"] {
        let image = world.unpack(source).unwrap();
        let mut left = vec![image.root().to_owned()];
        while let Some(path) = left.pop() {
            let meta = path.symlink_metadata().unwrap();
            assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o6000), (65534, 65534, 0), "{}", path.display());
            if meta.is_dir() {
                left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            }
        }
    }
}

#[test]
fn what_is_no_image_is_refused_by_name() {
    let world = World::new();
    fs::create_dir(world.path("empty")).unwrap();
    fs::write(world.path("text"), "some text\n").unwrap();
    fs::write(world.path("nothing"), "").unwrap();
    fs::write(world.path("plain.tar"), Tar::default().file("etc/name", b"x").end()).unwrap();
    assert!(Command::new("mkfifo").arg(world.path("fifo")).status().unwrap().success());
    world.assert_refused("@empty", &["empty folder"]);
    world.assert_refused("@missing", &["missing", "No such file"]);
    world.assert_refused("oci:@missing", &["missing", "No such file"]);
    world.assert_refused("@text", &["text"]);
    world.assert_refused("@nothing", &["nothing"]);
    world.assert_refused("@fifo", &["neither a file nor a folder"]);
    world.assert_refused("@plain.tar", &["is a tar without an image in it", "manifest.json"]);
    world.assert_refused("docker-archive:@plain.tar", &["is a tar without an image in it"]);
    world.assert_refused("docker-archive:@empty", &["is a folder"]);
    world.assert_refused("oci:@empty", &["index.json", "is missing"]);
    world.assert_refused("@", &["has the store in it"]);
}

#[test]
fn a_squashfs_is_found_by_its_content() {
    let world = World::new();
    let from = world.path("tree");
    fs::create_dir_all(from.join("etc")).unwrap();
    fs::write(from.join("etc/name"), "packed").unwrap();
    let packed = world.path("image.txt");
    let mut pack = Command::new("mksquashfs");
    pack.arg(&from).arg(&packed).args(["-quiet", "-no-progress", "-all-root"]);
    if !pack.output().is_ok_and(|output| output.status.success()) {
        return skip("a_squashfs_is_found_by_its_content", "no mksquashfs here");
    }
    let image = world.unpack("@image.txt").unwrap();
    assert_eq!(name_in(image.root()), "packed");
    assert_eq!(image.filled().digest, digest_of(&fs::read(&packed).unwrap()));
    assert!(image.filled().env.is_empty());
    // Whatever its name; and a changed file is another.
    fs::rename(&packed, world.path("other")).unwrap();
    assert_eq!(world.unpack("@other").unwrap(), image);
    let mut longer = fs::read(world.path("other")).unwrap();
    longer.resize(longer.len() + 4096, 0);
    fs::write(world.path("other"), longer).unwrap();
    assert_ne!(world.unpack("@other").unwrap(), image);
}

/// Changes a file as soon as the work has begun.
struct Meddler(std::path::PathBuf);

impl Progress for Meddler {
    fn begin(&self, _part: &str, _total: Option<u64>) {
        let file = fs::File::options().append(true).open(&self.0).unwrap();
        std::io::Write::write_all(&mut &file, b"more").unwrap();
    }
}

#[test]
fn a_source_that_changes_meanwhile_is_refused() {
    let world = World::new();
    fs::create_dir(world.path("folder")).unwrap();
    fs::write(world.path("folder/log"), "text").unwrap();
    fs::write(world.path("saved.tar"), saved(&[layer("saved")]).end()).unwrap();
    for (name, changed) in [("folder", "folder/log"), ("saved.tar", "saved.tar")] {
        let source = Source::parse(world.path(name).to_str().unwrap()).unwrap();
        let meddler = Meddler(world.path(changed));
        let error = world.unpacker.unpack(&source, &Cancel::default(), &meddler).unwrap_err().to_string();
        assert!(error.contains("was changed while it was read"), "{error}");
        world.assert_untouched(&error);
        assert!(world.unpack(&format!("@{name}")).is_ok());
        world.unpacker.store.collect(&Collect { unused_for: Some(Duration::ZERO), ..Collect::default() }).unwrap();
    }
}

#[derive(Default)]
struct Heard(Mutex<(Vec<String>, u64)>);

impl Progress for Heard {
    fn begin(&self, part: &str, total: Option<u64>) {
        self.0.lock().0.push(format!("{part} {total:?}"));
    }

    fn advance(&self, n_bytes: u64) {
        self.0.lock().1 += n_bytes;
    }
}

#[tokio::test]
async fn tasks_that_ask_for_one_image_share_the_work_and_its_progress() {
    let world = World::new();
    let data = gzip(&layer("shared"));
    layout(&world.path("layout"), std::slice::from_ref(&data));
    let source = Source::parse(&format!("oci:{}", world.path("layout").display())).unwrap();
    let heard = Arc::new(Heard::default());
    let ask = || world.unpacker.unpack_async(source.clone(), Arc::clone(&heard) as Arc<dyn Progress>);
    let (one, two, three) = tokio::join!(ask(), ask(), ask());
    let one = one.unwrap();
    assert!(one == two.unwrap() && one == three.unwrap());
    let (parts, n_bytes) = &*heard.0.lock();
    let part = format!("unpack Some({})", data.len());
    assert!(parts.contains(&part), "{parts:?}");
    assert!(n_bytes.is_multiple_of(data.len() as u64) && *n_bytes > 0, "{n_bytes} of {}", data.len());
}
