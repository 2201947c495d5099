use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use super::*;
use crate::store::{
    Collect,
    hold::{self, Removal, Thing},
};

#[test]
fn a_process_has_one_reference_however_many_handles() {
    let (_folder, store) = fresh();
    let first = ensure(&store, 1);
    let refs = || names(&store, &format!("refs/{}", digest(1).hex())).len();
    let other = open(store.dir());
    let all = [first.clone(), hit(&store, 1), store.image(&digest(1)).unwrap().unwrap()];
    assert_eq!(refs(), 1);
    let theirs = hit(&other, 1);
    assert_eq!((refs(), store.list().unwrap()[0].n_refs), (2, 2));
    drop((all, first));
    assert_eq!(refs(), 1);
    drop(theirs);
    assert_eq!(refs(), 0);
}

#[test]
fn handles_outlive_the_store_that_gave_them() {
    let (folder, store) = fresh();
    let image = ensure(&store, 1);
    drop(store);
    let store = open(&folder.path().join("store"));
    let wanted = Collect { remove: vec![digest(1)], ..Collect::default() };
    assert_eq!(store.collect(&wanted).unwrap().in_use, [digest(1)]);
    assert_eq!(names(&store, "owners").len(), 2);
    drop(image);
    assert_eq!(names(&store, "owners").len(), 1);
    assert_eq!(store.collect(&wanted).unwrap().removed, [digest(1)]);
}

/// How long those who use an image leave it alone, so that it is removed now and then.
const BREATH: Duration = Duration::from_millis(1);

/// Says that it is over when it is dropped, also by a failure.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_is_removed_while_it_is_taken_is_taken_or_not_there() {
    let (_folder, store) = fresh();
    let (is_over, n_taken) = (AtomicBool::new(false), AtomicU32::new(0));
    let (n_made, mut n_removed) = (AtomicU32::new(0), 0);
    let (remover, maker) = (open(store.dir()), open(store.dir()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let _over = Over(&is_over);
                while !is_over.load(Ordering::Relaxed) {
                    if let Some(image) = store.image(&digest(1)).unwrap() {
                        for _ in 0..3 {
                            assert_whole(image.root());
                        }
                        n_taken.fetch_add(1, Ordering::Relaxed);
                    }
                    thread::park_timeout(BREATH);
                }
            });
        }
        scope.spawn(|| {
            let _over = Over(&is_over);
            while !is_over.load(Ordering::Relaxed) {
                let image = maker.ensure(&key(1), &|| false, &|_| {}, |root| {
                    n_made.fetch_add(1, Ordering::Relaxed);
                    fill(root, 1)
                });
                assert_whole(image.unwrap().root());
                thread::park_timeout(BREATH);
            }
        });
        let thing = Thing::image(&digest(1));
        let _over = Over(&is_over);
        while !is_over.load(Ordering::Relaxed) && (n_removed < 60 || n_taken.load(Ordering::Relaxed) < 60) {
            if let Removal::Aside(path) = hold::set_aside(&remover.inner.disk, &thing).unwrap() {
                n_removed += 1;
                fs::remove_dir_all(path).unwrap();
            }
        }
    });
    assert!(n_made.into_inner() >= n_removed);
    assert_tidy(&store);
}

#[test]
fn what_a_living_process_removes_cannot_be_taken_and_a_dead_one_removes_nothing() {
    let (_folder, store) = fresh();
    drop(ensure(&store, 1));
    let thing = Thing::image(&digest(1));
    let refs = thing.refs(&store.inner.disk);
    let removing = refs.join("removing");
    foreign_mark(&removing);
    let error = store.image(&digest(1)).unwrap_err().to_string();
    assert!(error.ends_with(" on elsewhere is removing it, and stands still"), "{error}");
    assert_eq!(names(&store, &format!("refs/{}", digest(1).hex())), ["removing"]);
    age(&removing, Duration::from_secs(62));
    let image = hit(&store, 1);
    assert_eq!(hold::set_aside(&store.inner.disk, &thing).unwrap(), Removal::InUse);
    drop(image);
    assert!(matches!(hold::set_aside(&store.inner.disk, &thing).unwrap(), Removal::Aside(_)));
    assert!(!refs.exists());
}

#[cfg(feature = "init")]
#[test]
fn a_forked_copy_drops_nothing_of_its_maker() {
    use nix::sys::{
        signal::{Signal, raise},
        wait::{WaitStatus, waitpid},
    };

    let test = "references::a_forked_copy_drops_nothing_of_its_maker";
    let Some(folder) = told_folder() else {
        let folder = tempfile::tempdir().unwrap();
        return assert_passed(&alone(test, folder.path(), &[]).output().unwrap());
    };
    let store = open(&folder.join("store"));
    let (image, layer) = (ensure(&store, 1), super::layers::publish(&store, &[]));
    let staging = store.stage_layer().unwrap();
    let refs = || names(&store, &format!("refs/{}", digest(1).hex()));
    let before = refs();
    match crate::sys::fork().unwrap() {
        crate::sys::Fork::Child => {
            let refused = store.image(&digest(1));
            let is_refused = matches!(refused, Err(StoreError::Forked { .. }));
            drop((image, layer, staging, store));
            raise(if is_refused { Signal::SIGKILL } else { Signal::SIGABRT }).unwrap();
        }
        crate::sys::Fork::Parent(child) => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Signaled(child, Signal::SIGKILL, false));
            assert_eq!((refs(), names(&store, "owners").len()), (before, 1));
            assert!(layer.root().is_dir() && staging.root().is_dir());
            drop((image, layer, staging));
            assert!(refs().is_empty());
        }
    }
}

#[test]
fn a_pulse_that_others_have_removed_is_there_again_when_it_is_needed() {
    let (_folder, store) = fresh();
    drop(ensure(&store, 1));
    let owner = names(&store, "owners").remove(0);
    fs::remove_file(store.dir().join("owners").join(&owner)).unwrap();
    let image = hit(&store, 1);
    assert_eq!(names(&store, "owners"), [owner]);
    assert_eq!(store.list().unwrap()[0].n_refs, 1);
    drop(image);
}
