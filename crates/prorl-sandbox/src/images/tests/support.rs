//! What the tests share: tars, layouts and archives of all kinds, right and wrong ones, and a store to unpack them into.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use prorl_guest::Guest;
use tar::{EntryType, Header};

use crate::{
    images::{Cancel, ImageError, Quiet, Source, Unpacker, part::digest_of},
    store::{ImageStore, StoreConfig, StoredImage},
};

/// A tar that is being written, byte for byte as a test wants it.
#[derive(Clone, Default)]
pub(super) struct Tar(pub(super) Vec<u8>);

impl Tar {
    /// Writes a header as it is, and the data, if the size is true.
    pub(super) fn raw(mut self, kind: EntryType, path: &[u8], link: &[u8], mode: u32, size: u64, data: &[u8]) -> Self {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        let old = header.as_old_mut();
        old.name[..path.len()].copy_from_slice(path);
        old.linkname[..link.len()].copy_from_slice(link);
        header.set_mode(mode);
        header.set_mtime(1_000_000_000);
        header.set_size(size);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(super) fn file(self, path: &str, data: &[u8]) -> Self {
        self.mode_file(path, data, 0o644)
    }

    pub(super) fn mode_file(self, path: &str, data: &[u8], mode: u32) -> Self {
        self.raw(EntryType::Regular, path.as_bytes(), b"", mode, data.len() as u64, data)
    }

    pub(super) fn folder(self, path: &str, mode: u32) -> Self {
        self.raw(EntryType::Directory, path.as_bytes(), b"", mode, 0, b"")
    }

    pub(super) fn link(self, path: &str, target: &str) -> Self {
        self.raw(EntryType::Symlink, path.as_bytes(), target.as_bytes(), 0o777, 0, b"")
    }

    pub(super) fn hard_link(self, path: &str, target: &str) -> Self {
        self.raw(EntryType::Link, path.as_bytes(), target.as_bytes(), 0o644, 0, b"")
    }

    /// Records of an extended header for the entry after it.
    pub(super) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let bare = key.len() + value.len() + 3;
            let len = (1..9).map(|digits| bare + digits).find(|len| bare + len.to_string().len() == *len).unwrap();
            data.extend_from_slice(format!("{len} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.raw(EntryType::XHeader, b"PaxHeaders/x", b"", 0o644, data.len() as u64, &data)
    }

    pub(super) fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub(super) fn gzip(data: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    to.write_all(data).unwrap();
    to.finish().unwrap()
}

pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub(super) fn config(diff_ids: &[String]) -> Vec<u8> {
    let arch = architecture();
    serde_json::to_vec(&serde_json::json!({
        "os": "linux", "architecture": arch, "config": {"Env": ["PATH=/bin", "GREETING=good day"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }))
    .unwrap()
}

/// An OCI layout that is being written.
pub(super) struct Layout {
    pub(super) dir: PathBuf,
    manifests: Vec<serde_json::Value>,
}

impl Layout {
    pub(super) fn new(dir: &Path) -> Self {
        fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
        Self { dir: dir.to_owned(), manifests: Vec::new() }
    }

    /// Writes a blob, and returns what leads to it.
    pub(super) fn blob(&self, data: &[u8], media_type: &str) -> serde_json::Value {
        let digest = digest_of(data);
        fs::write(self.dir.join("blobs/sha256").join(digest.hex()), data).unwrap();
        serde_json::json!({"mediaType": media_type, "digest": digest.to_string(), "size": data.len()})
    }

    /// Writes a manifest of these layers, packed or not, and returns what leads to it.
    pub(super) fn manifest(&self, layers: &[Vec<u8>]) -> serde_json::Value {
        let config = self.blob(&config(&[]), "application/vnd.oci.image.config.v1+json");
        let layer = |data: &Vec<u8>| self.blob(data, "application/vnd.oci.image.layer.v1.tar");
        let manifest = serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        });
        self.blob(&serde_json::to_vec(&manifest).unwrap(), "application/vnd.oci.image.manifest.v1+json")
    }

    /// Puts what leads to a manifest into the index.
    pub(super) fn index(&mut self, mut descriptor: serde_json::Value, tag: Option<&str>) {
        if let Some(tag) = tag {
            descriptor["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": tag});
        }
        self.manifests.push(descriptor);
        let index = serde_json::json!({"schemaVersion": 2, "manifests": self.manifests});
        fs::write(self.dir.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
    }
}

/// Writes a layout of one image.
pub(super) fn layout(dir: &Path, layers: &[Vec<u8>]) -> Layout {
    let mut layout = Layout::new(dir);
    let manifest = layout.manifest(layers);
    layout.index(manifest, Some("latest"));
    layout
}

/// What `docker save` used to write: a folder for each layer, in a tar.
pub(super) fn saved(layers: &[Vec<u8>]) -> Tar {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest_of(layer).to_string()).collect();
    let names: Vec<String> = (0..layers.len()).map(|number| format!("layer{number}/layer.tar")).collect();
    let manifest = serde_json::json!([{"Config": "config.json", "RepoTags": ["made:by-test"], "Layers": names}]);
    let mut tar = Tar::default().file("config.json", &config(&diff_ids));
    for (name, layer) in names.iter().zip(layers) {
        tar = tar.file(name, layer);
    }
    tar.file("manifest.json", &serde_json::to_vec(&manifest).unwrap())
}

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

/// A store in this folder, whose programs run below the guest.
pub(super) fn store_with_guest(dir: &Path) -> ImageStore {
    let guest = Some(GUEST.path().to_owned());
    ImageStore::open(StoreConfig { guest, ..StoreConfig::new(dir) }).unwrap()
}

/// A store, and a folder beside it that nothing may touch.
pub(super) struct World {
    dir: tempfile::TempDir,
    pub(super) unpacker: Unpacker,
    canary: Vec<String>,
}

impl World {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("canary")).unwrap();
        fs::write(dir.path().join("canary/bird"), "alive").unwrap();
        fs::set_permissions(dir.path().join("canary/bird"), fs::Permissions::from_mode(0o640)).unwrap();
        let canary = tree(&dir.path().join("canary"));
        let store = ImageStore::open(StoreConfig::new(dir.path().join("store"))).unwrap();
        Self { unpacker: Unpacker::new(store), dir, canary }
    }

    pub(super) fn with_guest() -> Self {
        let mut world = Self::new();
        world.unpacker.store = store_with_guest(&world.path("store"));
        world
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn unpack(&self, source: &str) -> Result<StoredImage, ImageError> {
        let source = source.replace('@', &format!("{}/", self.dir.path().display()));
        self.unpacker.unpack(&Source::parse(&source)?, &Cancel::default(), &Quiet)
    }

    /// Unpacks the layers as an image of a layout of its own.
    pub(super) fn unpack_layers(&self, layers: &[Vec<u8>]) -> Result<StoredImage, ImageError> {
        let dir = self.path("layout");
        let _ = fs::remove_dir_all(&dir);
        layout(&dir, layers);
        self.unpack("oci:@layout")
    }

    /// Asserts that there is no image and nothing half made, and that nothing was written elsewhere.
    pub(super) fn assert_untouched(&self, why: &str) {
        for folder in ["images", "staging", "claims", "names"] {
            let names = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
            let left: Vec<PathBuf> = names(self.path("store").join(folder)).collect();
            assert!(left.is_empty(), "{why}: {left:?}");
        }
        self.assert_canary(why);
    }

    pub(super) fn assert_canary(&self, why: &str) {
        assert_eq!(tree(&self.path("canary")), self.canary, "{why}");
        let names: Vec<PathBuf> = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!names.iter().any(|name| name.ends_with("escaped")), "{why}: {names:?}");
    }

    /// Unpacks what is to be refused; asserts that it is, with these words, and that nothing is left.
    pub(super) fn assert_refused(&self, source: &str, words: &[&str]) {
        let error = match self.unpack(source) {
            Ok(image) => panic!("{source} is taken: {:?}", tree(image.root())),
            Err(error) => chain(&error),
        };
        for word in words {
            assert!(error.contains(word), "{source}: {error:?} has no {word:?}");
        }
        self.assert_untouched(&error);
    }
}

/// An error with its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// All that is below a folder, a line each: kind, mode, path, and the content's start or target.
pub(super) fn tree(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let name = path.strip_prefix(root).unwrap().display();
            let mode = meta.mode() & 0o7777;
            lines.push(match meta.file_type() {
                kind if kind.is_symlink() => format!("l {name} -> {}", fs::read_link(&path).unwrap().display()),
                kind if kind.is_dir() => format!("d {mode:o} {name}"),
                kind if kind.is_file() => {
                    let mut start = Vec::new();
                    fs::File::open(&path).unwrap().take(100).read_to_end(&mut start).unwrap();
                    format!("f {mode:o} {name} {:?}", String::from_utf8_lossy(&start))
                }
                kind => format!("? {mode:o} {name} {kind:?}"),
            });
            if meta.is_dir() {
                left.push(path);
            }
        }
    }
    lines.sort();
    lines
}

/// Tells on the test's own output why nothing was tested.
pub(super) fn skip(test: &str, why: &str) {
    let mut out = std::io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}

/// The variable that tells a copy of this program that it has mounts of its own.
const ALONE: &str = "PRORL_TEST_ALONE";

/// Tells whether a test runs where it may mount things. Where not, it has been run there, or was skipped by name.
pub(super) fn has_own_mounts(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let unshare = ["--user", "--map-root-user", "--mount"];
    if !Command::new("unshare").args(unshare).arg("true").status().is_ok_and(|status| status.success()) {
        skip(test, "no user namespaces here");
        return false;
    }
    let mut again = Command::new("unshare");
    again.args(unshare).arg(std::env::current_exe().unwrap());
    again.args(["--exact", &format!("images::tests::{test}"), "--nocapture"]).env(ALONE, test);
    let output = again.output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && words.contains("1 passed"), "{output:?}");
    false
}
