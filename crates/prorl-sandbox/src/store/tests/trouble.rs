//! Full disks, strangers' files, and processes that stood still.

use std::sync::mpsc;

use super::*;
use crate::store::Collect;

/// Fills a disk to the last byte.
fn fill_disk(ballast: &Path) {
    let mut file = File::create(ballast).unwrap();
    while file.write_all(&[1; 512]).is_ok() {}
    for number in 0_u32.. {
        if fs::write(ballast.with_file_name(format!("ballast.{number}")), "").is_err() {
            break;
        }
    }
}

fn assert_usable_when_full(store: &ImageStore) {
    let name = "python".to_owned().try_into().unwrap();
    let held = store.named(&name).unwrap().unwrap();
    for image in [hit(store, 1), store.image(&digest(1)).unwrap().unwrap()] {
        assert_whole(image.root());
    }
    // What is used without a mark is not removed by who uses it.
    let wanted = Collect { max_bytes: Some(0), remove: vec![digest(1)], ..Collect::default() };
    let done = store.collect(&wanted).unwrap();
    assert_eq!((done.removed, done.in_use), (vec![digest(2)], vec![digest(1)]));
    assert_whole(held.root());
    assert_eq!(names(store, "trash"), Vec::<String>::new());
    drop(held);
    assert_eq!(store.collect(&wanted).unwrap().removed, [digest(1)]);
    assert_eq!([names(store, "images"), names(store, "names")], [Vec::<String>::new(), Vec::new()]);
}

fn two_images(dir: &Path) {
    let store = open(dir);
    drop([ensure(&store, 1), ensure(&store, 2)]);
    store.set_name(&"python".to_owned().try_into().unwrap(), &digest(1)).unwrap();
}

#[test]
fn a_full_disk_gives_what_it_has_and_can_be_emptied() {
    let test = "trouble::a_full_disk_gives_what_it_has_and_can_be_emptied";
    let Some(dir) = told_folder() else {
        let folder = tempfile::tempdir().unwrap();
        in_namespace(test, folder.path(), "mount -t tmpfs -o size=1m,nr_inodes=400 none \"$1\"");
        return;
    };
    // A process that could not even say who it is, and one that could.
    for has_pulse in [false, true] {
        let dir = dir.join(format!("store-{has_pulse}"));
        two_images(&dir);
        let store = open(&dir);
        if has_pulse {
            store.inner.disk.pulse().unwrap();
        }
        fill_disk(&dir.with_file_name("ballast"));
        assert!(fs::write(dir.join("owners/x"), "x").is_err(), "it is not full");
        assert_usable_when_full(&store);
        for entry in fs::read_dir(dir.parent().unwrap()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::remove_file(path).unwrap();
            }
        }
    }
}

#[test]
fn what_was_taken_on_a_full_disk_is_marked_when_there_is_room() {
    let test = "trouble::what_was_taken_on_a_full_disk_is_marked_when_there_is_room";
    let Some(dir) = told_folder() else {
        let folder = tempfile::tempdir().unwrap();
        in_namespace(test, folder.path(), "mount -t tmpfs -o size=1m none \"$1\"");
        return;
    };
    two_images(&dir.join("store"));
    let store = open(&dir.join("store"));
    let ballast = dir.join("ballast");
    let mut file = File::create(&ballast).unwrap();
    while file.write_all(&[1; 512]).is_ok() {}
    let held = hit(&store, 1);
    let n_marks = |store| names(store, &format!("refs/{}", digest(1).hex())).len();
    assert_eq!(n_marks(&store), 0);
    fs::remove_file(ballast).unwrap();
    drop(file);
    drop(hit(&store, 1));
    assert_eq!(n_marks(&store), 1);
    let wanted = Collect { remove: vec![digest(1)], ..Collect::default() };
    assert_eq!(open(store.dir()).collect(&wanted).unwrap().in_use, [digest(1)]);
    drop(held);
    assert_eq!(open(store.dir()).collect(&wanted).unwrap().removed, [digest(1)]);
}

/// Puts files where a store has none, and spoils the marks of images 1 and 2.
fn spoil(dir: &Path) -> [PathBuf; 5] {
    let junk = ["refs/junk", "layers/junk", "images/junk"].map(|path| dir.join(path));
    for path in &junk {
        fs::write(path, "mine").unwrap();
    }
    let [one, two] = [1, 2].map(|number| dir.join("refs").join(digest(number).hex()));
    let _ = fs::remove_dir(&one);
    fs::write(&one, "mine").unwrap();
    fs::create_dir_all(two.join("removing/deep")).unwrap();
    let [refs, layers, images] = junk;
    [refs, layers, images, one, two.join("removing")]
}

#[test]
fn what_cannot_be_removed_is_told_and_keeps_nothing_else() {
    let (_folder, store) = fresh();
    for number in 1..5 {
        let place = ensure(&store, number).root().parent().unwrap().to_owned();
        age(&place.join("used"), Duration::from_hours(u64::from(10 - number)));
    }
    let name = "python".to_owned().try_into().unwrap();
    store.set_name(&name, &digest(3)).unwrap();
    store.inner.janitor.wait(&store.inner.disk);
    let spoilt = spoil(store.dir());
    let wanted = Collect { remove: (1..4).map(digest).collect(), ..Collect::default() };
    for removed in [vec![digest(3)], Vec::new()] {
        let done = store.collect(&wanted).unwrap();
        assert_eq!((done.removed, done.in_use), (removed, Vec::new()));
        for path in &spoilt {
            assert!(done.left.iter().any(|text| text.contains(&*path.to_string_lossy())), "{path:?}: {:?}", done.left);
            assert!(path.exists(), "{path:?}");
        }
        assert_eq!([names(&store, "names").len(), names(&store, "sources").len()], [0, 3]);
    }
    // So does making room.
    store.evict(1);
    assert_eq!([names(&store, "images").len(), names(&store, "sources").len()], [3, 2]);
    assert_whole(ensure(&store, 5).root());
    assert_eq!(store.collect(&Collect { max_bytes: Some(0), ..Collect::default() }).unwrap().removed, [digest(5)]);
}

#[test]
fn whoever_drops_what_is_not_finished_does_not_wait() {
    let (folder, store) = fresh();
    let (open_gate, gate) = mpsc::channel::<()>();
    store.inner.disk.worker.ask(move || assert!(gate.recv().is_err()));
    let staging = store.stage_layer().unwrap();
    let root = staging.root();
    fill(&root, 1).unwrap();
    drop(staging); // would wait for ever
    assert!(!root.exists());
    assert_eq!([names(&store, "staging").len(), names(&store, "trash").len()], [0, 1]);
    drop(open_gate);
    let unfinished = store.stage_layer().unwrap();
    drop(store);
    drop(unfinished); // the last of the store, which waits
    assert_tidy(&open(&folder.path().join("store")));
}

#[test]
fn a_process_that_was_taken_for_dead_marks_again_what_it_uses() {
    let (_folder, store) = fresh();
    let [held, gone] = [ensure(&store, 1), ensure(&store, 2)];
    let layer = layers::publish(&store, &[]);
    let pulse = store.inner.disk.pulse().unwrap();
    let refs = |id: &str| store.dir().join("refs").join(id);
    // What others do: they remove its marks, its pulse, and then what nobody seems to use.
    for id in [digest(1).hex(), digest(2).hex(), &layer.record().id] {
        fs::remove_dir_all(refs(id)).unwrap();
    }
    fs::remove_file(store.dir().join("owners").join(pulse.token())).unwrap();
    fs::remove_dir_all(gone.root().parent().unwrap()).unwrap();
    pulse.now().unwrap();
    let other = open(store.dir());
    let wanted = Collect { remove: vec![digest(1)], max_bytes: Some(0), ..Collect::default() };
    let done = other.collect(&wanted).unwrap();
    assert_eq!((done.in_use, done.layers, done.left), (vec![digest(1)], Vec::new(), Vec::new()));
    assert!(!refs(digest(2).hex()).exists());
    assert_whole(held.root());
    // A link of the file that beats no more is as good as none.
    fs::remove_file(store.dir().join("owners").join(pulse.token())).unwrap();
    pulse.now().unwrap();
    assert!(pulse.has_marked(&refs(digest(1).hex()).join(pulse.token())));
    drop((held, gone, layer));
    assert_eq!(other.collect(&wanted).unwrap().removed, [digest(1)]);
    assert_eq!(names(&store, "owners").len(), 2);
}
