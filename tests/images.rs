//! Images from the outside: `prorl image`, and jobs that name one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Serve, alive, call, descendants, finish, gone, image, mock, note, prorl, signal, until};
use tokio::{process::Command, task::JoinSet, time::timeout};

/// More than anything here takes.
const LONG: Duration = Duration::from_mins(3);

/// A folder of a test's own, with a store in it.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: image::open_temp() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(prorl());
        command.args(args).current_dir(self.folder.path()).env("PRORL_STORE", self.store());
        command.env("TMPDIR", self.folder.path()).stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    async fn run(&self, args: &[&str]) -> Output {
        timeout(LONG, self.command(args).output()).await.expect("it ends").unwrap()
    }

    /// Runs a command that succeeds and tells JSON.
    async fn told(&self, args: &[&str]) -> Value {
        let out = self.run(args).await;
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("no JSON: {}", text(&out.stdout)))
    }

    /// Packs a folder, if the machine can.
    fn pack(&self, tree: &Path, name: &str) -> Option<PathBuf> {
        let file = self.path(name);
        let mut pack = std::process::Command::new("mksquashfs");
        pack.arg(tree).arg(&file).args(["-all-root", "-comp", "zstd", "-Xcompression-level", "1", "-quiet"]);
        let packed = pack.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success());
        packed.then_some(file)
    }

    /// Returns what is in the store beside its marks: images, layers, and what is on its way.
    fn kept(&self) -> BTreeSet<PathBuf> {
        kept(&self.store())
    }
}

fn kept(store: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for folder in ["images", "layers", "staging", "claims", "trash"] {
        let entries = fs::read_dir(store.join(folder)).into_iter().flatten().flatten();
        found.extend(entries.map(|entry| PathBuf::from(folder).join(entry.file_name())));
    }
    found
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const NO_MKSQUASHFS: &str = "skipped: mksquashfs is not installed";

#[tokio::test]
async fn an_image_is_unpacked_once_found_by_name_and_collected() {
    let (place, tree) = (Place::new(), image::image());
    fs::write(tree.path().join("etc/image"), "of the image\n").unwrap();
    let Some(file) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };

    let first = place.told(&["image", "unpack", file.to_str().unwrap(), "--json"]).await;
    assert_eq!((&first["name"], &first["unpacked"]), (&json!("shell"), &json!(true)), "{first}");
    let root = Path::new(first["path"].as_str().unwrap());
    assert_eq!(fs::read_to_string(root.join("etc/image")).unwrap(), "of the image\n");
    let again = place.told(&["image", "unpack", "shell.squashfs", "--name", "also", "--json"]).await;
    assert_eq!((&again["digest"], &again["unpacked"]), (&first["digest"], &json!(false)), "{again}");

    let listed = place.told(&["image", "list", "--json"]).await;
    let images = listed["images"].as_array().unwrap();
    assert_eq!((images.len(), &images[0]["names"]), (1, &json!(["also", "shell"])), "{listed}");
    let table = text(&place.run(&["image", "list"]).await.stdout);
    assert!(table.contains("also shell") && table.contains("shell.squashfs"), "{table}");

    for name in ["shell", "also"] {
        let out = place.run(&["sandbox", "exec", name, "--", "cat", "/etc/image"]).await;
        assert_eq!(text(&out.stdout), "of the image\n", "{}", text(&out.stderr));
    }
    // A packed file needs no FUSE and no Apptainer: it is unpacked, or was.
    let out = place.run(&["sandbox", "exec", "shell.squashfs", "--", "cat", "/etc/image"]).await;
    assert_eq!(text(&out.stdout), "of the image\n", "{}", text(&out.stderr));

    let dry = place.told(&["image", "gc", "shell", "--dry-run", "--json"]).await;
    assert_eq!((&dry["removed"][0], place.kept().len()), (&first["digest"], 1), "{dry}");
    assert_eq!((&dry["layers"], &dry["leftovers"]), (&json!([]), &json!(0)), "{dry}");
    let dry = text(&place.run(&["image", "gc", "shell", "--dry-run"]).await.stdout);
    let (line, total) = dry.split_once('\n').unwrap();
    let short = &first["digest"].as_str().unwrap()["sha256:".len()..][..12];
    assert!(line.starts_with(&format!("would remove also shell  {short}  ")), "{dry}");
    assert!(line.ends_with("shell.squashfs") && total.starts_with("would remove 1 image, "), "{dry}");
    let done = place.told(&["image", "gc", "shell", "--json"]).await;
    assert_eq!(done["removed"], json!([first["digest"]]), "{done}");
    assert!(place.kept().is_empty(), "{:?}", place.kept());
    let out = place.run(&["sandbox", "exec", "shell", "--", "true"]).await;
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("shell"), "{}", text(&out.stderr));
}

#[tokio::test]
async fn an_image_in_use_is_not_collected() {
    let (place, tree) = (Place::new(), image::image());
    let Some(file) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    place.told(&["image", "unpack", file.to_str().unwrap(), "--json"]).await;
    let mut user =
        place.command(&["sandbox", "exec", "shell", "--", "bash", "-c", "echo up; read line; cat /etc/passwd"]);
    let mut user = user.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = tokio::io::BufReader::new(user.stdout.take().unwrap());
    let mut line = String::new();
    tokio::io::AsyncBufReadExt::read_line(&mut lines, &mut line).await.unwrap();
    assert_eq!(line, "up\n");

    let out = place.run(&["image", "gc", "shell"]).await;
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    assert!(text(&out.stderr).contains("is in use"), "{}", text(&out.stderr));
    let out = place.told(&["image", "gc", "--max-size", "0", "--unused-for", "0s", "--json"]).await;
    assert_eq!(out["removed"], json!([]), "{out}");
    drop(user.stdin.take()); // the program inside reads on, from an image that is still there
    assert!(timeout(LONG, user.wait()).await.unwrap().unwrap().success());
    let out = place.told(&["image", "gc", "--max-size", "0", "--json"]).await;
    assert_eq!(out["removed"].as_array().unwrap().len(), 1, "{out}");
}

#[tokio::test]
async fn many_processes_unpack_an_image_once() {
    let (place, tree) = (Place::new(), image::image());
    let Some(_) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    let mut running = JoinSet::new();
    for _ in 0..12 {
        let mut command = place.command(&["image", "unpack", "shell.squashfs", "--json"]);
        running.spawn(async move { command.output().await.unwrap() });
    }
    let mut n_unpacked = 0;
    while let Some(out) = running.join_next().await {
        let out = out.unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        n_unpacked += usize::from(told["unpacked"] == true);
    }
    assert_eq!((n_unpacked, place.kept().len()), (1, 1), "{:?}", place.kept());
}

#[tokio::test]
async fn a_data_file_is_fetched_told_and_gone_on_with() {
    let (place, tree) = (Place::new(), image::image());
    let Some(_) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    fs::write(place.path("broken.sif"), "no image at all").unwrap();
    let rows = [
        json!({"prompt": "none is named"}),
        json!({"image": "shell.squashfs"}),
        json!({"instance": {"image": "shell.squashfs"}, "group_id": "g"}),
        json!({"image": "host"}),
        json!({"image": "nowhere.sif"}),
        json!({"image": "broken.sif"}),
        json!({"image": tree.path()}),
        json!({"image": "my/app:1.0"}),
    ];
    let rows: Vec<_> = rows.iter().map(ToString::to_string).collect();
    fs::write(place.path("data.jsonl"), rows.join("\n")).unwrap();
    let out = place.run(&["image", "prefetch", "--data", "data.jsonl", "--json"]).await;
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    let told: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&told["images"], &told["unpacked"], &told["present"]), (&json!(5), &json!(1), &json!(1)), "{told}");
    let missing: Vec<_> =
        told["missing"].as_array().unwrap().iter().map(|row| (&row["image"], &row["lines"])).collect();
    assert_eq!(missing, [(&json!("my/app:1.0"), &json!([8])), (&json!("nowhere.sif"), &json!([5]))]);
    assert_eq!(
        (&told["failed"][0]["image"], &told["failed"][0]["lines"]),
        (&json!("broken.sif"), &json!([6])),
        "{told}"
    );

    let again = place.run(&["image", "prefetch", "--data", "data.jsonl"]).await;
    let said = text(&again.stdout);
    assert!(said.contains("5 images: 2 were there, 0 unpacked, 2 missing, 1 failed"), "{said}");
    assert!(said.contains("missing: nowhere.sif (line 5)"), "{said}");
    let absent = place.run(&["image", "prefetch", "--data", "none.jsonl"]).await;
    assert!(text(&absent.stderr).contains("none.jsonl"), "{}", text(&absent.stderr));
}

/// Makes what `docker save` writes of a folder.
fn save(place: &Place, tree: &Path, name: &str) {
    let folder = place.path("saved");
    fs::create_dir_all(&folder).unwrap();
    let tar = |from: &Path, file: &Path, what: &str| {
        let mut tar = std::process::Command::new("tar");
        assert!(tar.arg("-C").arg(from).arg("-cf").arg(file).arg(what).status().unwrap().success());
    };
    tar(tree, &folder.join("layer.tar"), ".");
    let sum = std::process::Command::new("sha256sum").arg(folder.join("layer.tar")).output().unwrap();
    let layer = format!("sha256:{}", &text(&sum.stdout)[..64]);
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [layer]}});
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let manifest = json!([{"Config": "config.json", "RepoTags": ["saved:1"], "Layers": ["layer.tar"]}]);
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    tar(&folder, &place.path(name), ".");
    fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn a_fetch_takes_no_name_away_and_names_only_what_needs_one() {
    let (place, tree) = (Place::new(), image::image());
    let Some(_) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    let first = place.told(&["image", "unpack", "shell.squashfs", "--name", "a", "--json"]).await;
    fs::write(tree.path().join("etc/image"), "another\n").unwrap();
    for folder in ["one", "two"] {
        fs::create_dir(place.path(folder)).unwrap();
    }
    place.pack(tree.path(), "one/a.squashfs").unwrap();
    place.pack(tree.path(), "a").unwrap();
    save(&place, tree.path(), "two/a.tar");
    save(&place, tree.path(), "b.tar");
    let images = ["a", "./a", "one/a.squashfs", "docker-archive:two/a.tar", "docker-archive:b.tar"];
    let rows: Vec<_> = images.iter().map(|image| json!({"image": image}).to_string()).collect();
    fs::write(place.path("data.jsonl"), rows.join("\n")).unwrap();
    for is_first in [true, false] {
        let out = place.run(&["image", "prefetch", "--data", "data.jsonl", "--jobs", "1", "--json"]).await;
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(told["unpacked"].as_u64().unwrap() > 0, is_first, "{told}");
        let failed = told["failed"].as_array().unwrap();
        assert_eq!((failed.len(), &failed[0]["image"]), (1, &json!("docker-archive:two/a.tar")), "{told}");
        let expected = "the name a is another image's: unpack it by `prorl image unpack --name`";
        assert_eq!(failed[0]["problem"], expected, "{told}");
        let listed = place.told(&["image", "list", "--json"]).await;
        let mut found = BTreeSet::new();
        for image in listed["images"].as_array().unwrap() {
            let names = image["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned());
            found.extend(names.map(|name| (name, image["digest"] == first["digest"])));
        }
        assert_eq!(found, BTreeSet::from([("a".to_owned(), true), ("b".to_owned(), false)]), "{listed}");
    }
}

#[tokio::test]
async fn a_name_that_moves_is_told() {
    let (place, tree) = (Place::new(), image::image());
    let Some(_) = place.pack(tree.path(), "one.squashfs") else { return note(NO_MKSQUASHFS) };
    fs::write(tree.path().join("etc/image"), "another\n").unwrap();
    place.pack(tree.path(), "two.squashfs").unwrap();
    let unpack = |file: &'static str, name: &'static str| ["image", "unpack", file, "--name", name, "--json"];
    let one = place.told(&unpack("one.squashfs", "x")).await;
    let same = place.told(&unpack("one.squashfs", "x")).await;
    assert_eq!((&one["moved_from"], &same["moved_from"]), (&Value::Null, &Value::Null));
    let two = place.run(&unpack("two.squashfs", "x")).await;
    let said = text(&two.stderr);
    let digest = one["digest"].as_str().unwrap();
    assert!(said.contains(&format!("the name x was that of {digest}, which keeps no name")), "{said}");
    let two: Value = serde_json::from_slice(&two.stdout).unwrap();
    assert_eq!(two["moved_from"], one["digest"]);
    place.told(&unpack("two.squashfs", "y")).await;
    let out = place.run(&["image", "unpack", "one.squashfs", "--name", "x"]).await;
    assert!(text(&out.stderr).contains("which keeps others: y"), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains(" of data\n"), "{}", text(&out.stdout));
}

#[tokio::test]
async fn a_look_at_a_store_that_is_not_there_makes_none() {
    let place = Place::new();
    let out = place.run(&["image", "list"]).await;
    assert!(out.status.success() && text(&out.stderr).contains("holds no image"), "{}", text(&out.stderr));
    let listed = place.told(&["image", "list", "--json"]).await;
    assert_eq!(listed, json!({"store": place.store(), "images": [], "layers": 0}));
    let out = place.run(&["image", "gc", "--dry-run"]).await;
    assert!(text(&out.stdout).starts_with("would remove 0 images, "), "{}", text(&out.stdout));
    let out = place.run(&["image", "gc", "python", "--dry-run"]).await;
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    assert!(text(&out.stderr).contains("has no image python"), "{}", text(&out.stderr));
    assert!(!place.store().exists());
}

#[tokio::test]
async fn without_a_store_packed_images_go_to_apptainer_as_they_are() {
    let (place, tree) = (Place::new(), image::image());
    for args in [
        &["image", "list"][..],
        &["image", "gc"],
        &["image", "unpack", "x.sif"],
        &["image", "prefetch", "--data", "x"],
        &["image", "build", "minimal"],
    ] {
        let out = place.run(&[args, &["--store", "none"]].concat()).await;
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
        assert!(text(&out.stderr).contains("--store none"), "{args:?}: {}", text(&out.stderr));
    }
    fs::write(tree.path().join("etc/image"), "of the image\n").unwrap();
    let Some(file) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    let exec = ["sandbox", "exec", "shell.squashfs", "--store", "none", "--", "cat", "/etc/image"];
    let out = place.run(&exec).await;
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("mounts no image files"), "{}", text(&out.stderr));
    if image::has_apptainer() {
        let out = place.run(&[&exec[..3], &["--runtime", "singularity"], &exec[3..]].concat()).await;
        assert_eq!(text(&out.stdout), "of the image\n", "{}", text(&out.stderr));
        let mock = policy("cat /etc/image").await;
        let serve = Serve::in_open_folder(&["--store", "none"], &mock).await;
        let (_, result) = serve.post("/process", &job(&json!({"image": file}))).await;
        assert!(observation(&result).contains("of the image"), "{result}");
        assert_eq!(fs::read_dir(serve.store.path()).unwrap().count(), 0);
        serve.stop().await;
        mock.shutdown().await.unwrap();
    } else {
        note("skipped: apptainer is not installed");
    }
    assert!(!place.store().exists() && !place.path("none").exists());
}

#[tokio::test]
async fn what_is_no_image_is_refused_by_name_and_leaves_nothing() {
    let (place, tree) = (Place::new(), image::image());
    let Some(file) = place.pack(tree.path(), "good.squashfs") else { return note(NO_MKSQUASHFS) };
    let whole = fs::read(&file).unwrap();
    fs::write(place.path("cut.squashfs"), &whole[..whole.len() / 2]).unwrap();
    fs::write(place.path("empty"), "").unwrap();
    fs::write(place.path("text.sif"), "hello").unwrap();
    fs::create_dir(place.path("bare")).unwrap();
    for (source, parts) in [
        ("cut.squashfs", &["cut.squashfs"][..]),
        ("empty", &["empty"]),
        ("text.sif", &["text.sif"]),
        ("bare", &["bare"]),
        ("none.sif", &["none.sif"]),
        ("docker-archive:text.sif", &["text.sif"]),
        ("oci:bare", &["bare"]),
    ] {
        let out = place.run(&["image", "unpack", source]).await;
        assert_eq!(out.status.code(), Some(1), "{source}: {}", text(&out.stdout));
        let said = text(&out.stderr);
        assert!(parts.iter().all(|part| said.contains(part)) && said.starts_with("error: "), "{source}: {said}");
        assert!(place.kept().is_empty(), "{source}: {:?}", place.kept());
    }
    for wrong in [
        &["image", "unpack", "ftp://x"][..],
        &["image", "unpack", "a", "--name", "../x"],
        &["image", "unpack", "good.squashfs", "--refresh"],
        &["image", "gc", "--max-size", "x"],
    ] {
        let out = place.run(wrong).await;
        assert_eq!(out.status.code(), Some(2), "{wrong:?}: {}", text(&out.stderr));
    }
    // One that holds too much is refused while it is unpacked, and the next try with more room works.
    let out = place.run(&["image", "unpack", "good.squashfs", "--max-files", "5"]).await;
    assert!(text(&out.stderr).contains("the limit is 5"), "{}", text(&out.stderr));
    assert!(place.kept().is_empty(), "{:?}", place.kept());
    assert!(place.run(&["image", "unpack", "good.squashfs"]).await.status.success());
}

#[tokio::test]
async fn a_store_that_is_not_one_is_refused_by_name() {
    let place = Place::new();
    fs::create_dir(place.store()).unwrap();
    fs::write(place.path("store/letters"), "dear diary").unwrap();
    let out = place.run(&["image", "list"]).await;
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains(place.store().to_str().unwrap()), "{}", text(&out.stderr));
    assert_eq!(fs::read_dir(place.store()).unwrap().count(), 1, "nothing was put there");

    fs::remove_file(place.path("store/letters")).unwrap();
    fs::write(place.path("store/store.json"), "{\"format\": 1000}").unwrap();
    let out = place.run(&["image", "list"]).await;
    assert!(text(&out.stderr).contains("1000"), "{}", text(&out.stderr));
}

#[tokio::test]
async fn an_unpacking_that_is_killed_leaves_nothing_half_made() {
    let (place, tree) = (Place::new(), image::image());
    for n in 0..300 {
        fs::create_dir_all(tree.path().join(format!("data/{n}"))).unwrap();
        for m in 0..20 {
            fs::write(tree.path().join(format!("data/{n}/{m}")), vec![b'x'; 20_000]).unwrap();
        }
    }
    let Some(_) = place.pack(tree.path(), "big.squashfs") else { return note(NO_MKSQUASHFS) };
    for kill in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut child = place.command(&["image", "unpack", "big.squashfs"]).stderr(Stdio::piped()).spawn().unwrap();
        let pid = child.id().unwrap();
        let staged = || place.kept().iter().any(|path| path.starts_with("staging"));
        until("the unpacking", || {
            let ended = child.try_wait().unwrap().is_some();
            std::future::ready(staged() || ended)
        })
        .await;
        let ours = descendants(pid);
        if child.try_wait().unwrap().is_none() {
            signal(pid, kill);
        }
        timeout(LONG, child.wait()).await.unwrap().unwrap();
        gone(&ours, Duration::from_secs(5)).await;
        assert!(alive(&ours).is_empty());
        let listed = place.told(&["image", "list", "--json"]).await;
        for image in listed["images"].as_array().unwrap() {
            assert_eq!(image["entries"].as_u64().unwrap(), count(Path::new(image["path"].as_str().unwrap())));
        }
    }
    let told = place.told(&["image", "unpack", "big.squashfs", "--json"]).await;
    assert!(Path::new(told["path"].as_str().unwrap()).join("data/299/19").is_file());
    place.told(&["image", "gc", "--json"]).await;
    assert_eq!(place.kept().len(), 1, "{:?}", place.kept());
}

/// Counts everything below a folder.
fn count(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().flatten();
    entries.map(|entry| 1 + if entry.file_type().unwrap().is_dir() { count(&entry.path()) } else { 0 }).sum()
}

/// A policy that looks at what its sandbox was prepared with.
async fn policy(look: &str) -> prorl_llm::mock::MockLlm {
    mock(&json!({"default": {"turns": [call("execute_bash", &json!({"command": look})), finish("4")]}})).await
}

fn job(fields: &Value) -> Value {
    let mut instance =
        json!({"data_source": "math", "prompt": "2 + 2", "ground_truth": "4", "tools": ["execute_bash", "finish"]});
    instance.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({"instance": instance, "sampling_params": {}, "retries": 0})
}

fn observation(result: &Value) -> String {
    let messages = result["messages"].as_array().unwrap_or_else(|| panic!("{result}"));
    let tool = messages.iter().find(|message| message["role"] == "tool");
    tool.unwrap_or_else(|| panic!("no tool message: {result}"))["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn jobs_get_images_by_name_and_packed_ones_without_apptainer() {
    let (place, tree) = (Place::new(), image::image());
    fs::write(tree.path().join("etc/image"), "of the image\n").unwrap();
    let Some(file) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    let mock = policy("cat /etc/image").await;
    let serve = Serve::without_programs(&mock).await;

    let (status, refused) = serve.post("/process", &job(&json!({"image": "shell"}))).await;
    assert_eq!(status, 400, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("shell"), "{refused}");
    // By its path first, which unpacks it; then by the name that it is given.
    let (_, result) = serve.post("/process", &job(&json!({"image": file}))).await;
    assert!(observation(&result).contains("of the image"), "{result}");
    let store = serve.store.path().to_str().unwrap();
    place.told(&["image", "unpack", "shell.squashfs", "--store", store, "--json"]).await;
    let (_, result) = serve.post("/process", &job(&json!({"image": "shell"}))).await;
    assert_eq!((&result["reward"], &result["image"]), (&json!(1.0), &json!("shell")), "{result}");

    fs::write(place.path("broken.sif"), "no image at all").unwrap();
    let (_, result) = serve.post("/process", &job(&json!({"image": place.path("broken.sif")}))).await;
    assert_eq!((&result["outcome"]["failure_class"], &result["reward"]), (&json!("image"), &Value::Null), "{result}");
    assert!(result["error"].as_str().unwrap().contains("broken.sif"), "{result}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_group_is_prepared_once_and_the_others_are_forked() {
    let mock = policy("cat /workspace/id /opt/new/file; wc -l < /workspace/log").await;
    let serve = Serve::in_open_folder(&[], &mock).await;
    let setup = "cat /proc/sys/kernel/random/uuid > /workspace/id; echo done >> /workspace/log; mkdir -p /opt/new; echo of the setup > /opt/new/file";
    let n_jobs = 8;
    let mut running = JoinSet::new();
    for n in 0..n_jobs {
        let mut request = job(&json!({"setup": setup}));
        request["group_id"] = json!(if n < n_jobs - 1 { "one" } else { "other" });
        let address = serve.address.clone();
        running.spawn(async move {
            let response = reqwest::Client::new().post(format!("{address}/process")).json(&request);
            response.send().await.unwrap().json::<Value>().await.unwrap()
        });
    }
    let mut seen = std::collections::BTreeMap::<String, BTreeSet<String>>::new();
    while let Some(result) = running.join_next().await {
        let result = result.unwrap();
        assert_eq!(result["reward"], 1.0, "{result}");
        let told = observation(&result);
        assert!(told.contains("of the setup") && told.lines().any(|line| line.trim() == "1"), "{told}");
        let id = told.lines().next().unwrap().to_owned();
        seen.entry(result["group_id"].as_str().unwrap().to_owned()).or_default().insert(id);
    }
    let n_ids: Vec<_> = seen.values().map(BTreeSet::len).collect();
    assert_eq!(n_ids, [1, 1], "one setup for each group: {seen:?}");
    assert!(seen["one"].is_disjoint(&seen["other"]), "{seen:?}");
    until("the end of the layers", || std::future::ready(kept(serve.store.path()).is_empty())).await;

    // What is wrong with the shared work is told to each job by itself.
    let mut running = JoinSet::new();
    for _ in 0..3 {
        let mut request = job(&json!({"setup": "echo no such thing >&2; exit 3"}));
        request["group_id"] = json!("broken");
        let address = serve.address.clone();
        running.spawn(async move {
            let response = reqwest::Client::new().post(format!("{address}/process")).json(&request);
            response.send().await.unwrap().json::<Value>().await.unwrap()
        });
    }
    let mut ids = BTreeSet::new();
    while let Some(result) = running.join_next().await {
        let result = result.unwrap();
        assert_eq!((&result["reward"], &result["outcome"]["stage"]), (&Value::Null, &json!("init")), "{result}");
        assert!(result["error"].as_str().unwrap().contains("no such thing"), "{result}");
        ids.insert(result["job_id"].as_str().unwrap().to_owned());
    }
    assert_eq!(ids.len(), 3);
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn the_smallest_template_is_built_used_again_and_run() {
    if !image::has_apptainer() {
        return note("skipped: apptainer is not installed");
    }
    if !["/bin/busybox", "/usr/bin/busybox"].iter().any(|path| Path::new(path).exists()) {
        return note("skipped: busybox is not installed");
    }
    let place = Place::new();
    let first = place.run(&["image", "build", "minimal", "--json"]).await;
    assert!(first.status.success(), "{}", text(&first.stderr));
    let first: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(first["reused"], false, "{first}");
    let again = place.told(&["image", "build", "minimal", "--json"]).await;
    assert_eq!((&again["reused"], &again["digest"]), (&json!(true), &first["digest"]), "{again}");
    let scratch = place.told(&["image", "build", "minimal", "--cache", "scratch", "--json"]).await;
    assert_eq!(scratch["reused"], false, "{scratch}");
    let out = place.run(&["sandbox", "exec", "minimal.sif", "--", "busybox", "echo", "hello"]).await;
    assert_eq!(text(&out.stdout), "hello\n", "{}", text(&out.stderr));
    let left: BTreeSet<_> =
        fs::read_dir(place.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, BTreeSet::from(["minimal.sif".into(), "store".into()]));
    let templates = text(&place.run(&["image", "build", "--templates"]).await.stdout);
    assert!(["minimal", "python", "swe", "qemu"].iter().all(|name| templates.contains(name)), "{templates}");
    let out = place.run(&["image", "build", "python", "--set", "nonsense=1"]).await;
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("nonsense"), "{}", text(&out.stderr));
}

#[tokio::test]
async fn files_of_an_image_are_the_users_own_and_lead_nowhere() {
    let (place, tree) = (Place::new(), image::image());
    symlink("/etc/passwd", tree.path().join("etc/link")).unwrap();
    fs::write(tree.path().join("bin/risky"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(tree.path().join("bin/risky"), fs::Permissions::from_mode(0o6755)).unwrap();
    let Some(_) = place.pack(tree.path(), "shell.squashfs") else { return note(NO_MKSQUASHFS) };
    let told = place.told(&["image", "unpack", "shell.squashfs", "--json"]).await;
    let root = Path::new(told["path"].as_str().unwrap());
    assert_eq!(fs::read_link(root.join("etc/link")).unwrap(), Path::new("/etc/passwd"));
    let meta = fs::metadata(root.join("bin/risky")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o755);
    assert!(told["notes"].to_string().contains("bin/risky"), "{told}");
    let owner = fs::metadata(root.join("bin/bash")).unwrap().uid();
    assert_ne!(owner, 0, "root's images belong to the sandboxes' user");
}
