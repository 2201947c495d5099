//! What instances leave behind whose server and keeper are both dead.

use std::{fs, path::PathBuf};

use nix::fcntl::FlockArg;
use prorl_core::frame;
use tempfile::TempDir;

use super::{Outer, is_empty, open};
use crate::node::{
    Reach,
    endings::Endings,
    folder::{self, Origin},
    host::origin,
    process::Process,
    reconcile,
    record::{self, Event},
};

/// An instance folder as a server and a keeper leave it that are both killed.
struct Left {
    dir: TempDir,
    instance: PathBuf,
}

impl Left {
    fn by(origin: &Origin) -> Self {
        let left = Self::unfinished();
        fs::write(left.instance.join(folder::ORIGIN), frame::encode(origin).unwrap()).unwrap();
        left
    }

    /// As one whose keeper was killed too early to say whose it is.
    fn unfinished() -> Self {
        let dir = tempfile::tempdir().unwrap();
        folder::make(&dir.path().join("nodes"), 0o700 | folder::OURS).unwrap();
        let instance = dir.path().join("nodes").join("node-1-2-0");
        for name in [folder::BOXES, folder::RUN] {
            fs::create_dir_all(instance.join(name)).unwrap();
        }
        Self { dir, instance }
    }

    fn with_box(self, id: &str, record: &[Event]) -> Self {
        let bytes: Vec<u8> = record.iter().flat_map(|event| frame::encode(event).unwrap()).collect();
        fs::write(folder::record(&self.instance, id), bytes).unwrap();
        fs::create_dir(self.instance.join(folder::RUN).join(id)).unwrap();
        fs::write(self.instance.join(folder::RUN).join(id).join("file"), "x").unwrap();
        self
    }

    fn reconcile(&self) {
        reconcile::others(&self.dir.path().join("nodes"), &self.dir.path().join("nodes/node-own"), &origin().unwrap());
    }
}

fn spawned(outer: &Outer) -> [Event; 1] {
    [Event::Spawned { outer: outer.process(), reach: Reach::PidNamespace }]
}

#[test]
fn what_a_dead_instance_left_is_ended_and_removed() {
    let [outer, mut bystander] = std::array::from_fn(|_| Outer::start());
    let ended = outer.handle();
    let real = bystander.process();
    let other_start = Process { started: real.started.map(|started| started - 1), ..real };
    let reused = Event::Spawned { outer: other_start, reach: Reach::Session };
    let left = Left::by(&origin().unwrap())
        .with_box("namespace-7-0", &spawned(&outer))
        .with_box("namespace-7-1", &[reused])
        .with_box("namespace-7-2", &[Event::Claimed { runtime: "namespace".to_owned() }])
        .with_box("namespace-7-3", &[]);
    fs::write(folder::record(&left.instance, "namespace-7-4"), [0xab; 999]).unwrap();
    left.reconcile();
    assert!(ended.has_ended() && bystander.is_alive());
    assert!(is_empty(&left.dir));
}

#[test]
fn opening_a_node_reconciles() {
    let left = Left::by(&origin().unwrap());
    let node = open(&left.dir);
    assert!(!left.instance.exists());
    drop(node);
    assert!(is_empty(&left.dir));
}

#[test]
fn of_another_boot_only_the_files_are_removed() {
    let mut outer = Outer::start();
    let there = Origin { boot_id: "another".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && is_empty(&left.dir));
}

#[test]
fn what_is_recorded_in_another_pid_namespace_is_left_to_somebody_there() {
    let mut outer = Outer::start();
    let there = Origin { pid_namespace: 1, host: "a-container".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && folder::boxes(&left.instance).unwrap() == ["namespace-7-0"]);
    // Without a record there is nothing to end.
    folder::remove_box(&left.instance, "namespace-7-0").unwrap();
    left.reconcile();
    assert!(is_empty(&left.dir));
}

#[test]
fn what_another_machine_has_is_left_alone() {
    let mut outer = Outer::start();
    let there = Origin { boot_id: "another".to_owned(), host: "elsewhere".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && folder::boxes(&left.instance).unwrap() == ["namespace-7-0"]);
    assert!(left.instance.join(folder::RUN).join("namespace-7-0/file").exists());
}

#[test]
fn what_a_living_process_has_is_left_alone() {
    let mut outer = Outer::start();
    let left = Left::by(&origin().unwrap()).with_box("namespace-7-0", &spawned(&outer));
    let lock = folder::lock(&left.instance, FlockArg::LockSharedNonblock).unwrap().unwrap();
    left.reconcile();
    assert!(outer.is_alive() && folder::boxes(&left.instance).unwrap() == ["namespace-7-0"]);
    drop(lock);
    left.reconcile();
    assert!(!outer.is_alive() && is_empty(&left.dir));
}

#[test]
fn an_unfinished_instance_is_removed() {
    let left = Left::unfinished();
    fs::write(left.instance.join(folder::NEW_ORIGIN), "").unwrap();
    left.reconcile();
    assert!(is_empty(&left.dir));
    // The disk has lost what it wrote, all of it or a part, or has made something else of it.
    let whole = frame::encode(&origin().unwrap()).unwrap();
    for bytes in [&b""[..], &whole[..whole.len() / 2], &[0; 64], b"not a frame at all"] {
        let left = Left::unfinished();
        fs::write(left.instance.join(folder::ORIGIN), bytes).unwrap();
        fs::write(left.instance.join(folder::GUEST), "x").unwrap();
        left.reconcile();
        assert!(is_empty(&left.dir), "{bytes:?}");
    }
    // Killed even before the first file.
    folder::make(left.instance.parent().unwrap(), 0o700 | folder::OURS).unwrap();
    fs::create_dir(&left.instance).unwrap();
    left.reconcile();
    assert!(is_empty(&left.dir));
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let left = Left::unfinished().with_box("1.jpg", &[]);
    fs::write(left.instance.join(folder::ORIGIN), "not a frame at all").unwrap();
    let unsaid = Left::unfinished();
    fs::write(unsaid.instance.join("letter"), "x").unwrap();
    unsaid.reconcile();
    assert!(unsaid.instance.join("letter").exists() && unsaid.instance.join(folder::BOXES).exists());
    let nodes = left.dir.path().join("nodes");
    fs::create_dir_all(nodes.join("photos/boxes")).unwrap();
    fs::write(nodes.join("photos/boxes/1.jpg"), "x").unwrap();
    // One that has the name only, and one with a file more than ours have.
    fs::create_dir_all(nodes.join("node-js/src")).unwrap();
    let more = nodes.join("node-1-3-0");
    fs::create_dir(&more).unwrap();
    fs::write(more.join(folder::ORIGIN), frame::encode(&origin().unwrap()).unwrap()).unwrap();
    fs::write(more.join("letter"), "x").unwrap();
    std::os::unix::fs::symlink(nodes.join("photos"), nodes.join("node-1-4-0")).unwrap();
    left.reconcile();
    assert_eq!(folder::boxes(&left.instance).unwrap(), ["1.jpg"]);
    assert!(nodes.join("photos/boxes/1.jpg").exists() && nodes.join("node-js/src").exists());
    assert!(more.join("letter").exists() && nodes.join("node-1-4-0").exists());
}

#[test]
fn ids_are_names_and_never_paths() {
    let left = Left::by(&origin().unwrap());
    fs::write(left.dir.path().join("letter"), "x").unwrap();
    let mut endings = Endings::new(left.instance.clone(), std::time::Duration::ZERO);
    for id in ["", ".", "..", "../../letter", "../../../letter", "/etc/passwd"] {
        endings.add(id.to_owned());
    }
    assert!(endings.is_empty());
    assert!(record::create(&folder::record(&left.instance, "a/b"), &spawned(&Outer::start())[0]).is_err());
}
