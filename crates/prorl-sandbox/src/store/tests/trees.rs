use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::store::remove::remove_tree;

#[test]
fn a_tree_goes_whatever_is_in_it_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    let [top, outside] = ["tree", "outside"].map(|name| folder.path().join(name));
    fs::create_dir_all(outside.join("a")).unwrap();
    fs::write(outside.join("canary"), "").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o500)).unwrap();
    fs::create_dir_all(top.join("closed/a/b")).unwrap();
    fs::create_dir_all(top.join("plain/.1/.2")).unwrap();
    fs::create_dir_all(top.join(".2/x/y")).unwrap();
    fs::write(top.join(".1"), "").unwrap();
    fs::write(top.join("closed/a/b/file"), "").unwrap();
    for (at, to) in [("link", "../outside"), ("closed/a/up", "/"), ("plain/.1/l", "../../../outside"), ("none", "x")] {
        symlink(to, top.join(at)).unwrap();
    }
    nix::unistd::mkfifo(&top.join("plain/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, mode) in [("closed/a/b", 0), ("closed/a", 0o100), ("closed", 0o555), (".2/x/y", 0o444), ("", 0)] {
        fs::set_permissions(top.join(path), fs::Permissions::from_mode(mode)).unwrap();
    }
    remove_tree(&top).unwrap();
    assert!(!top.exists());
    assert!(outside.join("canary").exists() && outside.join("a").exists());
    assert_eq!(fs::metadata(&outside).unwrap().permissions().mode() & 0o777, 0o500);
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o700)).unwrap();
    remove_tree(&top).unwrap(); // gone already
    symlink(&outside, folder.path().join("link")).unwrap();
    remove_tree(&folder.path().join("link")).unwrap();
    remove_tree(&outside.join("canary")).unwrap();
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
}

#[test]
fn a_tree_may_be_deeper_than_files_can_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().join("tree");
    fs::create_dir(&top).unwrap();
    let mut here: std::os::fd::OwnedFd = File::open(&top).unwrap().into();
    for _ in 0..1500 {
        rustix::fs::mkdirat(&here, "folder with a name that makes the path too long", 0o700.into()).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY;
        here = rustix::fs::openat(&here, "folder with a name that makes the path too long", flags, 0.into()).unwrap();
    }
    remove_tree(&top).unwrap();
    assert!(!top.exists());
}

#[test]
fn what_cannot_be_removed_is_named_and_the_rest_goes() {
    let test = "trees::what_cannot_be_removed_is_named_and_the_rest_goes";
    let Some(folder) = told_folder() else {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("tree/a/mount")).unwrap();
        fs::create_dir_all(folder.path().join("tree/b/c")).unwrap();
        fs::create_dir_all(folder.path().join("tree/mount")).unwrap();
        in_namespace(
            test,
            folder.path(),
            "mount -t tmpfs none \"$1/tree/a/mount\"; mount -t tmpfs none \"$1/tree/mount\"; touch \"$1/tree/mount/kept\"",
        );
        return;
    };
    let error = remove_tree(&folder.join("tree")).unwrap_err().to_string();
    assert!(error.starts_with("failed to remove ") && error.ends_with("mount"), "{error}");
    assert!(folder.join("tree/a/mount").exists() && folder.join("tree/mount/kept").exists());
    assert!(!folder.join("tree/b").exists());
}
