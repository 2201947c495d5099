use super::*;
use crate::store::{Base, Collect, Layer, LayerRecord, LayerUsers};

fn record(below: &[&Layer]) -> LayerRecord {
    LayerRecord {
        id: String::new(),
        base: Base::Image(digest(1)),
        below: below.iter().map(|layer| layer.record().id.clone()).collect(),
        users: LayerUsers::Own,
        entries: u64::from(N_FILES),
        bytes: 100,
    }
}

pub(super) fn publish(store: &ImageStore, below: &[&Layer]) -> Layer {
    let staging = store.stage_layer().unwrap();
    fill(&staging.root(), 1).unwrap();
    staging.publish(record(below)).unwrap()
}

#[test]
fn a_layer_is_there_for_as_long_as_somebody_has_it() {
    let (folder, store) = fresh();
    let layer = publish(&store, &[]);
    let id = layer.record().id.clone();
    assert_whole(layer.root());
    let other = open(store.dir());
    let theirs = other.layer(&id).unwrap().unwrap();
    assert_eq!((theirs.record(), theirs.root()), (layer.record(), layer.root()));
    assert_eq!(store.list_layers().unwrap()[0].n_refs, 2);
    drop((layer, store)); // waits for what is being removed
    assert_whole(theirs.root());
    let copy = theirs.clone();
    drop(theirs);
    assert_whole(copy.root());
    drop((copy, other));
    let store = open(&folder.path().join("store"));
    assert!(store.layer(&id).unwrap().is_none() && store.list_layers().unwrap().is_empty());
    assert_tidy(&store);
    assert_eq!([names(&store, "layers"), names(&store, "refs")], [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn a_layer_keeps_those_below_it() {
    let (folder, store) = fresh();
    let low = publish(&store, &[]);
    let middle = publish(&store, &[&low]);
    let high = publish(&store, &[&low, &middle]);
    let ids = high.record().below.clone();
    drop((low, middle));
    drop(store);
    let store = open(&folder.path().join("store"));
    for id in &ids {
        assert!(store.layer(id).unwrap().is_some(), "{id}");
    }
    drop((high, store));
    assert_eq!(names(&open(&folder.path().join("store")), "layers"), Vec::<String>::new());
}

#[test]
fn what_is_not_finished_is_removed() {
    let (_folder, store) = fresh();
    let staging = store.stage_layer().unwrap();
    let root = staging.root();
    fill(&root, 1).unwrap();
    assert!(store.layer(staging.id()).unwrap().is_none());
    drop(staging);
    assert!(!root.exists());
    assert_tidy(&store);
    for wrong in ["", "..", "../images", "a/b", "0"] {
        assert!(store.layer(wrong).unwrap().is_none(), "{wrong}");
    }
}

#[test]
fn a_layer_of_a_dead_process_is_collected() {
    let test = "layers::a_layer_of_a_dead_process_is_collected";
    if let Some(folder) = told_folder() {
        let store = open(&folder.join("store"));
        let _held = (publish(&store, &[]), store.stage_layer().unwrap(), ensure(&store, 1));
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    }
    let (folder, store) = fresh();
    let output = alone(test, folder.path(), &[]).output().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(9));
    assert_eq!((names(&store, "layers").len(), names(&store, "staging").len()), (1, 1));
    assert_eq!(store.list().unwrap()[0].n_refs, 0);
    let done = store.collect(&Collect::default()).unwrap();
    assert_eq!((done.layers.len(), done.n_leftovers, done.freed_bytes), (1, 1, 100 + 20 * 4096));
    assert_tidy(&store);
    assert_eq!(names(&store, "layers"), Vec::<String>::new());
    assert_eq!(names(&store, "owners").len(), 1);
    assert_whole(hit(&store, 1).root());
}

#[test]
fn roots_are_given_to_the_sandboxes_user() {
    use std::os::unix::fs::MetadataExt as _;

    if !nix::unistd::geteuid().is_root() {
        return skip("roots_are_given_to_the_sandboxes_user", "only root can give files away");
    }
    let folder = open_folder();
    let store = open_for(&folder.path().join("store"), 65_533);
    let staging = store.stage_layer().unwrap();
    let image = ensure(&store, 1);
    for root in [staging.root(), image.root().to_owned()] {
        let meta = fs::metadata(root).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (65_534, 65_533, 0o755));
    }
}
