use std::{cell::RefCell, fs};

use super::*;
use crate::store::{ImageName, disk};

#[test]
fn an_image_is_made_once_and_found_by_source_digest_and_name() {
    let (_folder, store) = fresh();
    assert!(store.known(&key(1)).unwrap().is_none() && store.image(&digest(1)).unwrap().is_none());
    let image = ensure(&store, 1);
    assert_whole(image.root());
    assert_eq!(*image.filled(), filled(1));
    assert_eq!(hit(&store, 1), image);
    assert_eq!(hit(&open(store.dir()), 1), image);
    assert_eq!(store.known(&key(1)).unwrap().unwrap(), image);
    assert_eq!(store.image(&digest(1)).unwrap().unwrap(), image);
    assert!(store.known(&key(2)).unwrap().is_none());
    // The same content from elsewhere is one image.
    let other = store.ensure(&key(2), &|| false, &|_| {}, |root| fill(root, 1)).unwrap();
    assert_eq!(other, image);
    assert_tidy(&store);
}

#[test]
fn names_are_given_taken_over_and_taken_away() {
    let (_folder, store) = fresh();
    let [plain, path]: [ImageName; 2] = ["python", "library/python:3"].map(|name| name.to_owned().try_into().unwrap());
    let error = store.set_name(&plain, &digest(1)).unwrap_err();
    assert!(error.to_string().ends_with(&format!("has no image {}", digest(1))), "{error}");
    let [one, two] = [ensure(&store, 1), ensure(&store, 2)];
    store.set_name(&plain, &digest(1)).unwrap();
    store.set_name(&path, &digest(1)).unwrap();
    let of_one =
        |store: &ImageStore| store.list().unwrap().into_iter().find(|entry| entry.digest == digest(1)).unwrap();
    assert_eq!(of_one(&store).names, [path.clone(), plain.clone()]);
    assert_eq!(of_one(&store).root, one.root());
    assert_eq!(store.named(&path).unwrap().unwrap(), one);
    store.set_name(&plain, &digest(2)).unwrap();
    assert_eq!(store.named(&plain).unwrap().unwrap(), two);
    assert_eq!(of_one(&store).names, std::slice::from_ref(&path));
    assert!(store.remove_name(&path).unwrap());
    assert!(!store.remove_name(&path).unwrap());
    assert!(store.named(&path).unwrap().is_none());
    assert!(store.image(&digest(1)).unwrap().is_some(), "the image stays");
}

#[test]
fn a_use_is_noted_once_a_minute() {
    let (_folder, store) = fresh();
    let used = ensure(&store, 1).root().parent().unwrap().join("used");
    let time = || fs::metadata(&used).unwrap().modified().unwrap();
    age(&used, Duration::from_secs(30));
    let before = time();
    drop(hit(&store, 1));
    assert_eq!(time(), before);
    age(&used, Duration::from_secs(61));
    let before = time();
    drop(hit(&store, 1));
    assert!(time() > before);
}

#[test]
fn a_key_is_not_taken_for_another_of_the_same_hash() {
    let (_folder, store) = fresh();
    drop(ensure(&store, 1));
    let memo = |number| store.dir().join("sources").join(disk::hash(key(number).as_str()));
    fs::copy(memo(1), memo(2)).unwrap();
    assert!(store.known(&key(2)).unwrap().is_none());
    fs::write(memo(1), "{").unwrap();
    assert!(store.known(&key(1)).unwrap().is_none());
    assert_whole(ensure(&store, 1).root());
    assert!(store.known(&key(1)).unwrap().is_some());
    // As published for this hash: files of one version are found by all others.
    assert_eq!(disk::hash(""), "6c62272e07bb014262b821756295c58d");
    assert_eq!(disk::hash("a"), "d228cb696f1a8caf78912b704e4a8964");
}

#[test]
fn a_damaged_image_is_made_again() {
    let (_folder, store) = fresh();
    let place = ensure(&store, 1).root().parent().unwrap().to_owned();
    let record = place.join("image.json");
    let damages: [&dyn Fn(); 4] = [
        &|| fs::write(&record, "").unwrap(),
        &|| fs::remove_file(&record).unwrap(),
        &|| fs::remove_dir_all(place.join("root")).unwrap(),
        &|| fs::write(&record, serde_json::to_vec(&filled(2)).unwrap()).unwrap(),
    ];
    for damage in damages {
        damage();
        let error = store.image(&digest(1)).unwrap_err();
        assert!(error.to_string().contains("image.json is damaged: "), "{error}");
        assert_whole(ensure(&store, 1).root());
    }
    // Somebody uses it, so it is not replaced.
    let image = ensure(&store, 1);
    fs::write(&record, "").unwrap();
    let error = store.ensure(&key(1), &|| false, &|_| {}, |root| fill(root, 1)).unwrap_err();
    assert!(matches!(of_store(error), StoreError::Damaged { .. }));
    drop(image);
    assert_whole(ensure(&store, 1).root());
}

#[test]
fn a_hit_among_many_images_takes_no_look_at_the_others() {
    let (_folder, store) = fresh();
    drop(ensure(&store, 0));
    // If the others were looked at, this would fail.
    for number in 1..200 {
        let place = store.dir().join("images").join(digest(number).hex());
        fs::create_dir(&place).unwrap();
        fs::write(place.join("image.json"), "{").unwrap();
        foreign_mark(&store.dir().join("refs").join(digest(number).hex()).join("x"));
    }
    let told = RefCell::new(Vec::new());
    let wait = |who: &str| told.borrow_mut().push(who.to_owned());
    for _ in 0..100 {
        store.ensure(&key(0), &|| true, &wait, |_| Err("made again")).unwrap();
    }
    assert!(told.borrow().is_empty(), "{told:?}");
}
