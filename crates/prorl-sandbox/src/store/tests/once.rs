use std::{
    cell::RefCell,
    fs::File,
    process::Stdio,
    sync::{
        Barrier,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
};

use super::*;
use crate::store::disk;

#[test]
fn threads_make_an_image_once() {
    let (_folder, store) = fresh();
    let (n_made, all) = (AtomicU32::new(0), Barrier::new(32));
    thread::scope(|scope| {
        for number in 0..32 {
            // Half of them by a store of their own, which shares nothing but the folder.
            let store = if number % 2 == 0 { store.clone() } else { open(store.dir()) };
            let (n_made, all) = (&n_made, &all);
            scope.spawn(move || {
                all.wait();
                let image = store.ensure(&key(1), &|| false, &|_| {}, |root| {
                    n_made.fetch_add(1, Ordering::Relaxed);
                    fill(root, 1)
                });
                assert_whole(image.unwrap().root());
            });
        }
    });
    assert_eq!(n_made.into_inner(), 1);
    assert_tidy(&store);
}

#[test]
fn processes_make_an_image_once() {
    let test = "once::processes_make_an_image_once";
    if let Some(folder) = told_folder() {
        let store = open(&folder.join("store"));
        let image = store.ensure(&key(1), &|| false, &|_| {}, |root| {
            File::create_new(folder.join("made"))?; // the second one fails
            fill(root, 1)
        });
        return assert_whole(image.unwrap().root());
    }
    let folder = tempfile::tempdir().unwrap();
    let spawn = |_| alone(test, folder.path(), &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let children: Vec<_> = (0..50).map(spawn).collect();
    for child in children {
        assert_passed(&child.wait_with_output().unwrap());
    }
    let store = open(&folder.path().join("store"));
    assert!(folder.path().join("made").exists());
    assert_tidy(&store);
    assert_eq!(names(&store, "owners"), Vec::<String>::new(), "each has taken its own away");
    assert_whole(hit(&store, 1).root());
}

#[test]
fn whoever_fails_is_told_why_and_the_next_one_makes_it() {
    let (_folder, store) = fresh();
    let (begun, go_on) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            store.ensure(&key(1), &|| false, &|_| {}, |root| {
                fs::write(root.join("half"), "").unwrap();
                begun.wait();
                go_on.wait();
                Err::<Filled, _>("no such image")
            })
        });
        begun.wait();
        for other in [store.clone(), open(store.dir())] {
            let waiting = mpsc::channel();
            scope.spawn(move || {
                let tell = |who: &str| waiting.0.send(who.to_owned()).unwrap();
                other.ensure(&key(1), &|| false, &tell, |root| fill(root, 1)).unwrap()
            });
            let who = waiting.1.recv().unwrap();
            assert!(who.contains("process"), "{who}");
        }
        go_on.wait();
        assert!(matches!(first.join().unwrap(), Err(EnsureError::Make("no such image"))));
    });
    assert_whole(hit(&store, 1).root());
    assert!(!store.image(&digest(1)).unwrap().unwrap().root().join("half").exists());
    assert_tidy(&store);
}

#[test]
fn a_maker_that_panics_leaves_nothing_and_keeps_nobody() {
    let (_folder, store) = fresh();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        store.ensure(&key(1), &|| false, &|_| {}, |root| -> io::Result<Filled> {
            fs::write(root.join("half"), "")?;
            panic!("on purpose")
        })
    }));
    assert!(panicked.is_err());
    assert_tidy(&store);
    assert_whole(ensure(&store, 1).root());
}

#[test]
fn a_wait_ends_when_nobody_waits_any_more() {
    let (_folder, store) = fresh();
    let (begun, go_on) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            store.ensure(&key(1), &|| false, &|_| {}, |root| {
                begun.wait();
                go_on.wait();
                fill(root, 1)
            })
        });
        begun.wait();
        for other in [store.clone(), open(store.dir())] {
            let told = RefCell::new(Vec::new());
            let tell = |who: &str| told.borrow_mut().push(who.to_owned());
            let made = other.ensure(&key(1), &|| !told.borrow().is_empty(), &tell, |_| Err("made twice"));
            assert!(matches!(made, Err(EnsureError::Cancelled)), "{made:?}");
            assert_eq!(told.borrow().len(), 1, "{told:?}");
        }
        go_on.wait();
    });
    assert_whole(hit(&store, 1).root());
}

#[test]
fn a_claim_of_another_machine_is_broken_when_it_is_silent_for_a_minute() {
    let (_folder, store) = fresh();
    let stem = disk::hash(key(1).as_str());
    let claim = store.dir().join("claims").join(format!("{stem}.1"));
    foreign_mark(&claim);
    let told = RefCell::new(Vec::new());
    let tell = |who: &str| told.borrow_mut().push(who.to_owned());
    for silence in [0, 50] {
        age(&claim, Duration::from_secs(silence));
        told.borrow_mut().clear();
        let made = store.ensure(&key(1), &|| !told.borrow().is_empty(), &tell, |root| fill(root, 1));
        assert!(matches!(made, Err(EnsureError::Cancelled)), "{made:?}");
        assert!(told.borrow()[0].ends_with(" on elsewhere"), "{told:?}");
        assert_eq!(names(&store, "claims"), [format!("{stem}.1")]);
    }
    age(&claim, Duration::from_secs(62));
    assert_whole(ensure(&store, 1).root());
    assert_tidy(&store);
}

#[test]
fn a_claim_of_a_dead_process_of_this_machine_is_broken_at_once() {
    let (_folder, store) = fresh();
    let stem = disk::hash(key(1).as_str());
    let mut owner = serde_json::to_value(crate::store::owner::Owner::this().unwrap()).unwrap();
    owner["process"]["started"] = 1.into(); // another that had this number
    let claim = store.dir().join("claims").join(format!("{stem}.7"));
    fs::write(&claim, owner.to_string()).unwrap();
    assert_whole(ensure(&store, 1).root());
    assert_tidy(&store);
    // Of one that cannot be understood only the beats count.
    fs::write(&claim, "").unwrap();
    drop(store.collect(&crate::store::Collect { remove: vec![digest(1)], ..Default::default() }).unwrap());
    let told = RefCell::new(Vec::new());
    let tell = |who: &str| told.borrow_mut().push(who.to_owned());
    let made = store.ensure(&key(1), &|| !told.borrow().is_empty(), &tell, |root| fill(root, 1));
    assert!(matches!(made, Err(EnsureError::Cancelled)), "{made:?}");
    age(&claim, Duration::from_secs(62));
    assert_whole(ensure(&store, 1).root());
}

#[test]
fn of_two_claims_of_living_processes_neither_has_the_turn_until_one_is_gone() {
    use crate::store::claim::{Turn, take};

    let (_folder, store) = fresh();
    let folder = store.dir().join("claims");
    let pulse = store.inner.disk.pulse().unwrap();
    let dead = |number: u32| {
        foreign_mark(&folder.join(format!("x.{number}")));
        age(&folder.join(format!("x.{number}")), Duration::from_secs(62));
    };
    dead(3);
    let Turn::Mine(claim) = take(&pulse, &folder, "x").unwrap() else { panic!("it is dead") };
    assert_eq!(names(&store, "claims"), ["x.4"], "the dead one's is removed by who has the turn");
    // Another thread, and another process that saw no claim a moment ago.
    assert!(matches!(take(&pulse, &folder, "x").unwrap(), Turn::Of(_)));
    let other = open(store.dir()).inner.disk.pulse().unwrap();
    assert!(matches!(take(&other, &folder, "x").unwrap(), Turn::Of(_)));
    assert_eq!(names(&store, "claims"), ["x.4"]);
    // One that was taken away from us, and made anew by somebody else, is not ours to remove.
    fs::remove_file(folder.join("x.4")).unwrap();
    foreign_mark(&folder.join("x.4"));
    drop(claim);
    assert_eq!(names(&store, "claims"), ["x.4"]);
    assert!(matches!(take(&pulse, &folder, "x").unwrap(), Turn::Of(_)));
}
