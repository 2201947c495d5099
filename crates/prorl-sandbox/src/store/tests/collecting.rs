use super::*;
use crate::store::{Collect, entry::size_of};

/// Makes images whose last uses are so many hours ago.
fn unused_for(store: &ImageStore, hours: &[u64]) {
    for (number, hours) in (0..).zip(hours) {
        let place = ensure(store, number).root().parent().unwrap().to_owned();
        age(&place.join("used"), Duration::from_hours(*hours));
    }
}

fn collect(store: &ImageStore, wanted: &Collect) -> Vec<u32> {
    numbers(&store.collect(wanted).unwrap().removed)
}

fn numbers(digests: &[Digest]) -> Vec<u32> {
    digests.iter().map(|of| (0..100).find(|number| digest(*number) == *of).unwrap()).collect()
}

fn there(store: &ImageStore) -> Vec<u32> {
    let digests: Vec<_> = store.list().unwrap().into_iter().map(|entry| entry.digest).collect();
    numbers(&digests)
}

#[test]
fn the_image_unused_for_longest_goes_first_and_none_that_is_in_use() {
    let (_folder, store) = fresh();
    unused_for(&store, &[3, 5, 1, 4, 2]);
    assert_eq!(there(&store), [2, 4, 0, 3, 1], "the one used last comes first");
    let size = store.list().unwrap()[0].size;
    assert_eq!(size, size_of(filled(0).bytes, filled(0).entries));
    let held = open(store.dir()).image(&digest(1)).unwrap().unwrap();
    age(&held.root().parent().unwrap().join("used"), Duration::from_hours(5));
    let wanted = Collect { max_bytes: Some(3 * size), ..Collect::default() };
    let dry = store.collect(&Collect { dry_run: true, ..wanted.clone() }).unwrap();
    assert_eq!((numbers(&dry.removed), dry.freed_bytes), (vec![3, 0], 2 * size));
    assert_eq!(there(&store).len(), 5);
    assert_eq!(collect(&store, &wanted), [3, 0]);
    assert_eq!(collect(&store, &wanted), Vec::<u32>::new());
    assert_eq!(collect(&store, &Collect { max_bytes: Some(0), ..Collect::default() }), [4, 2]);
    assert_whole(held.root());
    drop(held);
    assert_eq!(collect(&store, &Collect { max_bytes: Some(0), ..Collect::default() }), [1]);
    assert_tidy(&store);
    assert_eq!([names(&store, "refs"), names(&store, "sources")], [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn images_are_removed_by_age_and_by_name() {
    let (_folder, store) = fresh();
    unused_for(&store, &[3, 5, 1]);
    let name = "python".to_owned().try_into().unwrap();
    store.set_name(&name, &digest(0)).unwrap();
    assert_eq!(collect(&store, &Collect { unused_for: Some(Duration::from_hours(4)), ..Collect::default() }), [1]);
    let image = store.image(&digest(0)).unwrap().unwrap();
    let wanted = Collect { remove: vec![digest(0), digest(2), digest(9)], ..Collect::default() };
    let done = store.collect(&wanted).unwrap();
    assert_eq!([done.removed, done.in_use, done.missing], [vec![digest(2)], vec![digest(0)], vec![digest(9)]]);
    assert_eq!(store.list().unwrap()[0].n_refs, 1);
    assert_eq!(store.named(&name).unwrap().unwrap(), image);
    drop(image);
    assert_eq!(collect(&store, &wanted), [0]);
    assert!(store.named(&name).unwrap().is_none() && names(&store, "names").is_empty());
    assert_whole(ensure(&store, 0).root());
}

#[test]
fn a_store_is_held_to_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let max_bytes = Some(2 * size_of(filled(0).bytes, filled(0).entries));
    let config = StoreConfig { max_bytes, ..StoreConfig::new(folder.path().join("store")) };
    let store = ImageStore::open(config).unwrap();
    unused_for(&store, &[2, 1]);
    assert_eq!(there(&store), [1, 0]);
    let held = ensure(&store, 2);
    assert_eq!(there(&store), [2, 1]);
    drop(ensure(&store, 3));
    assert_eq!(there(&store), [3, 2]);
    let too_large = store
        .ensure(&key(4), &|| false, &|_| {}, |root| fill(root, 4).map(|filled| Filled { bytes: 1 << 30, ..filled }));
    let error = of_store(too_large.unwrap_err()).to_string();
    assert_eq!(error, "4.sif takes 1073823744 bytes in the store, and the limit of the whole store is 163920");
    assert_eq!(there(&store), [3, 2]);
    assert_whole(held.root());
    drop((held, store)); // what is removed in the background is gone then
    assert_tidy(&open(&folder.path().join("store")));
}

#[test]
fn what_other_machines_have_left_is_removed_when_they_are_silent() {
    let (folder, store) = fresh();
    drop(ensure(&store, 1));
    drop(store); // waits for its own look at what others have left
    let store = open(&folder.path().join("store"));
    let dir = store.dir();
    let pulse = dir.join("owners/far-1");
    let reference = dir.join("refs").join(digest(1).hex()).join("far-1");
    let layer = dir.join("layers/0123456789abcdef");
    let staged = dir.join("staging/far-1.0");
    let half = dir.join(format!("trash/{}.far-1.1", digest(2).hex()));
    let removing = dir.join("refs").join(digest(3).hex()).join("removing");
    let marks = [&pulse, &reference, &dir.join("claims/x.1"), &dir.join("refs/0123456789abcdef/far-1"), &removing];
    for path in [&layer, &staged, &half] {
        fs::create_dir_all(path.join("root")).unwrap();
    }
    for mark in marks {
        foreign_mark(mark);
    }
    let wanted = Collect { remove: vec![digest(1)], ..Collect::default() };
    let done = store.collect(&wanted).unwrap();
    assert_eq!((done.in_use, done.n_leftovers, done.layers), (vec![digest(1)], 0, Vec::new()));
    for path in [&layer, &staged, &half] {
        assert!(path.exists(), "{}", path.display());
    }
    for mark in marks {
        age(mark, Duration::from_secs(62));
    }
    let dry = store.collect(&Collect { dry_run: true, ..wanted.clone() }).unwrap();
    assert_eq!((dry.removed, dry.n_leftovers, dry.layers.len()), (vec![digest(1)], 3, 1));
    assert!(staged.exists() && layer.exists());
    let done = store.collect(&wanted).unwrap();
    assert_eq!((done.removed, done.n_leftovers, done.layers.len()), (vec![digest(1)], 3, 1));
    assert!(done.left.is_empty(), "{:?}", done.left);
    assert_tidy(&store);
    for folder in ["images", "refs", "layers"] {
        assert_eq!(names(&store, folder), Vec::<String>::new(), "{folder}");
    }
    assert!(!pulse.exists());
}
