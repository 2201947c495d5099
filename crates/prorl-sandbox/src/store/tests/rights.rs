//! Stores of root, whose sandboxes belong to another user.

use std::os::unix::fs::{MetadataExt as _, chown};

use super::*;

#[test]
fn an_image_of_another_user_is_made_again_when_nobody_uses_it() {
    if !nix::unistd::geteuid().is_root() {
        return skip("an_image_of_another_user_is_made_again_when_nobody_uses_it", "only root can give files away");
    }
    let folder = open_folder();
    let dir = folder.path().join("store");
    let name = "python".to_owned().try_into().unwrap();
    let (one, two) = (open_for(&dir, 65_533), open_for(&dir, 65_532));
    let used = ensure(&one, 1);
    one.set_name(&name, &digest(1)).unwrap();
    chown(used.root(), Some(65_535), Some(65_533)).unwrap();
    let refused = [
        two.image(&digest(1)).unwrap_err(),
        two.named(&name).unwrap_err(),
        of_store(two.ensure(&key(1), &|| false, &|_| {}, |root| fill(root, 1)).unwrap_err()),
    ];
    for error in refused {
        let text = error.to_string();
        assert!(matches!(error, StoreError::OtherOwner { .. }), "{text}");
        assert!(text.contains("65535") && text.contains("65534") && text.contains("--sandbox-user"), "{text}");
    }
    // Whose store says nothing about users takes it as it is.
    assert_whole(open(&dir).image(&digest(1)).unwrap().unwrap().root());
    assert_whole(used.root());
    drop(used);
    let again = ensure(&two, 1);
    let meta = fs::metadata(again.root()).unwrap();
    assert_eq!((again.is_new(), meta.uid(), meta.gid()), (true, 65_534, 65_532));
    assert!(!hit(&two, 1).is_new());
    assert_eq!(two.named(&name).unwrap().unwrap(), again);
}

#[test]
fn a_store_that_the_user_of_sandboxes_cannot_get_to_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    let dir = closed.join("store");
    let owner = Some(SandboxUser { uid: 65_534, gid: 65_533 });
    let reopened = || ImageStore::open(StoreConfig { owner, ..StoreConfig::new(&dir) }).unwrap().check_way();
    drop(open(&dir));
    if !nix::unistd::geteuid().is_root() {
        // Nobody else has sandboxes of another user.
        reopened().unwrap();
        return skip("a_store_that_the_user_of_sandboxes_cannot_get_to_is_seen", "only root gives files away");
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let set = |mode| fs::set_permissions(&closed, fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o700, 0o770, 0o754] {
        set(mode);
        let error = reopened().unwrap_err();
        assert!(matches!(&error, StoreError::Closed { folder, .. } if folder.ends_with("closed")), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("65534") && text.contains("--store"), "{text}");
    }
    set(0o751);
    reopened().unwrap();
    set(0o750);
    chown(&closed, None, Some(65_533)).unwrap();
    reopened().unwrap();
    drop(open(&dir));
}
