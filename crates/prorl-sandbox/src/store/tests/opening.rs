use std::{fs, os::unix::fs::PermissionsExt as _, thread};

use super::*;
use crate::store::Collect;

#[test]
fn a_store_is_made_where_there_is_none_and_everybody_may_pass() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("a/b/store");
    let store = open(&dir);
    for path in [dir.clone(), dir.join("images"), dir.join("layers"), dir.join("staging"), folder.path().join("a")] {
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755, "{}", path.display());
    }
    assert_eq!(fs::read_to_string(dir.join("store.json")).unwrap(), r#"{"format":1}"#);
    let image = ensure(&store, 1);
    assert_eq!(fs::metadata(image.root()).unwrap().permissions().mode() & 0o7777, 0o755);
    assert!(names(&open(&dir), "images").contains(&digest(1).hex().to_owned()));
}

#[test]
fn many_may_make_a_store_at_once() {
    let folder = tempfile::tempdir().unwrap();
    thread::scope(|scope| {
        for number in 0..16 {
            let folder = folder.path();
            scope.spawn(move || ensure(&open(&folder.join("store")), number % 2));
        }
    });
    assert_eq!(names(&open(&folder.path().join("store")), "images").len(), 2);
}

#[test]
fn what_is_no_store_of_ours_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let refused = || ImageStore::open(StoreConfig::new(folder.path())).unwrap_err().to_string();
    fs::write(folder.path().join("thesis.tex"), "").unwrap();
    assert!(refused().ends_with("is not empty and no store of images: it has no store.json"), "{}", refused());
    fs::write(folder.path().join("store.json"), r#"{"format":7,"more":[]}"#).unwrap();
    assert!(refused().ends_with("has format 7, and this version knows formats up to 1"), "{}", refused());
    for text in ["", "{}", r#"{"format":0}"#, r#"{"format":-1}"#, "[1"] {
        fs::write(folder.path().join("store.json"), text).unwrap();
        assert!(refused().contains("store.json is damaged: "), "{text}: {}", refused());
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    let file = folder.path().join("thesis.tex");
    assert!(ImageStore::open(StoreConfig::new(&file)).unwrap_err().to_string().contains("thesis.tex"));
}

#[test]
fn a_store_that_can_only_be_read_gives_what_it_has() {
    let test = "opening::a_store_that_can_only_be_read_gives_what_it_has";
    if let Some(dir) = told_folder() {
        assert!(fs::write(dir.join("x"), "").is_err(), "it can be written");
        return assert_read_only(&open(&dir));
    }
    let (folder, store) = fresh();
    let name = "python".to_owned().try_into().unwrap();
    drop(ensure(&store, 1));
    store.set_name(&name, &digest(1)).unwrap();
    let dir = store.dir().to_owned();
    drop(store);
    in_namespace(test, &dir, "mount --bind \"$1\" \"$1\"; mount -o remount,bind,ro \"$1\"");
    if nix::unistd::geteuid().is_root() {
        return;
    }
    let folders = || fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let set = |mode| {
        let paths = folders().chain([dir.clone()]);
        paths.for_each(|path| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap());
    };
    set(0o555);
    assert_read_only(&open(&dir));
    set(0o755);
    drop(folder);
}

fn assert_read_only(store: &ImageStore) {
    let name = "python".to_owned().try_into().unwrap();
    for image in [hit(store, 1), store.named(&name).unwrap().unwrap(), store.image(&digest(1)).unwrap().unwrap()] {
        assert_whole(image.root());
    }
    assert_eq!(store.list().unwrap()[0].names, std::slice::from_ref(&name));
    let not_made = store.ensure(&key(2), &|| false, &|_| {}, |root| fill(root, 2)).unwrap_err();
    let wanted = Collect { remove: vec![digest(1)], ..Collect::default() };
    let refused = [
        of_store(not_made),
        store.set_name(&name, &digest(1)).unwrap_err(),
        store.remove_name(&name).unwrap_err(),
        store.stage_layer().unwrap_err(),
        store.collect(&wanted).unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, StoreError::ReadOnly { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&*store.dir().to_string_lossy()) && text.contains("may only read the store"), "{text}");
    }
    assert_eq!(store.collect(&Collect { dry_run: true, ..wanted }).unwrap().removed, [digest(1)]);
}

#[test]
fn a_full_disk_is_named_and_nothing_is_left_of_the_image() {
    let test = "opening::a_full_disk_is_named_and_nothing_is_left_of_the_image";
    let Some(dir) = told_folder() else {
        let folder = tempfile::tempdir().unwrap();
        in_namespace(test, folder.path(), "mount -t tmpfs -o size=1m none \"$1\"");
        return;
    };
    let store = open(&dir);
    let full = store.ensure(&key(1), &|| false, &|_| {}, |root| {
        fs::write(root.join("large"), vec![1; 2 << 20])?;
        fill(root, 1)
    });
    let Err(EnsureError::Make(error)) = full else { panic!("{full:?}") };
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_tidy(&store); // what is removed later would make room
    // Full by the time that the image is to be published.
    let full = store.ensure(&key(1), &|| false, &|_| {}, |root| {
        let _ = fs::write(dir.join("ballast"), vec![1; 2 << 20]);
        Ok::<_, io::Error>(Filled {
            notes: vec!["long".repeat(2000)],
            ..filled(u32::try_from(root.as_os_str().len()).unwrap())
        })
    });
    fs::remove_file(dir.join("ballast")).unwrap();
    let error = of_store(full.unwrap_err());
    assert!(error.to_string().starts_with("failed to write ") && error.to_string().contains("/staging/"), "{error}");
    assert_eq!(names(&store, "images"), Vec::<String>::new());
    assert_tidy(&store);
    assert_whole(ensure(&store, 1).root());
}
