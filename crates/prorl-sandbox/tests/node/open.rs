//! What a node needs of the machine, and what it says where that is missing.

use std::{
    error::Error as _,
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::geteuid,
};
use prorl_sandbox::{Node, NodeConfig, SandboxError, node::raise_open_files};

use crate::support::{alone, assert_passed, config, folder, is_alone, names, own_mounts};

/// Opens a node that must be refused; returns the path, the advice, and the system's word.
fn refused(config: NodeConfig) -> (PathBuf, String, io::Error) {
    match Node::open(config).unwrap_err() {
        SandboxError::Folder { path, problem, advice, source } => {
            let told = format!("{problem}; {advice}");
            assert!(advice.contains("TMPDIR"), "{told}");
            (path, told, source)
        }
        other => panic!("{other}: {:?}", other.source()),
    }
}

#[test]
fn a_link_or_a_file_is_no_folder() {
    let dir = folder();
    let real = dir.path().join("real");
    fs::create_dir(&real).unwrap();
    let config = config(dir.path());
    std::os::unix::fs::symlink(&real, &config.dir).unwrap();
    let (path, told, _) = refused(config.clone());
    assert_eq!(path, config.dir);
    assert!(told.contains("is a link or a file; remove it"), "{told}");
    assert!(names(&real).is_empty());
    fs::remove_file(&config.dir).unwrap();
    fs::write(&config.dir, "x").unwrap();
    assert!(refused(config).1.contains("is a link or a file"));
}

#[test]
fn the_folder_of_another_user_is_refused() {
    let dir = folder();
    let mut config = config(dir.path());
    let owner = if geteuid().is_root() {
        fs::create_dir(&config.dir).unwrap();
        std::os::unix::fs::chown(&config.dir, Some(65534), None).unwrap();
        65534
    } else {
        config.dir = "/usr".into();
        0
    };
    let (path, told, _) = refused(config.clone());
    assert_eq!(path, config.dir);
    assert!(told.contains(&format!("belongs to user {owner}")), "{told}");
}

#[test]
fn a_folder_that_others_can_write_is_refused() {
    let dir = folder();
    let config = config(dir.path());
    fs::create_dir(&config.dir).unwrap();
    fs::set_permissions(&config.dir, Permissions::from_mode(0o777)).unwrap();
    let (_, told, _) = refused(config.clone());
    assert!(told.contains("can be written by others (mode 777)") && told.contains("chmod go-w"), "{told}");
    assert!(names(&config.dir).is_empty());
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let dir = folder();
    let missing = NodeConfig { dir: dir.path().join("a/b"), ..config(dir.path()) };
    let (path, told, source) = refused(missing.clone());
    assert_eq!((path, source.raw_os_error()), (missing.dir, Some(libc::ENOENT)));
    assert!(told.contains("make that folder"), "{told}");
    let sealed = NodeConfig { dir: "/sys/prorl-nodes".into(), ..config(dir.path()) };
    assert!(refused(sealed).1.contains("cannot be written by this user"));
    if !geteuid().is_root() {
        fs::set_permissions(dir.path(), Permissions::from_mode(0o500)).unwrap();
        assert!(refused(config(dir.path())).1.contains("cannot be written by this user"));
    }
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_folder_of_any_name_will_do() {
    let dir = folder();
    for name in [&b"with: colons, commas\nand lines"[..], b"\xff\xfe", &[b'x'; 255]] {
        let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name);
        let node = Node::open(NodeConfig { dir: dir.path().join(name), ..config(dir.path()) }).unwrap();
        assert!(node.folder().is_dir() && node.folder().starts_with(dir.path().join(name)));
        drop(node);
        assert_eq!(names(dir.path()).len(), 0);
    }
}

#[test]
fn a_program_that_is_no_guest_is_told_from_one() {
    let dir = folder();
    let with = |guest: &str| Node::open(NodeConfig { guest: guest.into(), ..config(dir.path()) }).unwrap_err();
    let error = with("/nonexistent/guest");
    assert!(matches!(&error, SandboxError::Spawn { path, .. } if path == Path::new("/nonexistent/guest")), "{error}");
    assert!(matches!(with("/bin/true"), SandboxError::Ended { .. }));
    let script = dir.path().join("guest");
    // Another process writes it: a handle of ours could leak into a child that another test is just starting.
    let write = "printf '#!/bin/sh\\nprintf \"\\\\377\\\\377\\\\377\\\\377\" >&0\\n' > \"$1\" && chmod 755 \"$1\"";
    assert!(Command::new("sh").args(["-c", write, "sh"]).arg(&script).status().unwrap().success());
    let error = with(script.to_str().unwrap());
    assert!(matches!(error, SandboxError::Protocol { .. }), "{error}");
    assert_eq!(names(dir.path()), ["guest"]);
}

#[test]
fn nothing_half_made_stays_on_a_full_disk() {
    let test = "open::nothing_half_made_stays_on_a_full_disk";
    let Some(dir) = is_alone(test) else {
        if let Some(wrapper) = own_mounts(test) {
            let dir = folder();
            assert_passed(&alone(test, dir.path(), wrapper).output().unwrap());
        }
        return;
    };
    let mut n_refused = 0;
    // The folder itself takes the first of the files that there is room for; the next one fails, whichever it is.
    for n_files in 1..=12 {
        let options = format!("size=64k,nr_inodes={n_files}");
        mount(Some("full"), &dir, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).unwrap();
        match Node::open(config(&dir)) {
            Ok(node) => drop(node),
            Err(SandboxError::Folder { problem, source, .. }) => {
                assert_eq!((problem.as_str(), source.raw_os_error()), ("has no space left", Some(libc::ENOSPC)));
                n_refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
        assert!(names(&dir).is_empty(), "{n_files}: {:?}", names(&dir));
        nix::mount::umount(&dir).unwrap();
    }
    assert_eq!(n_refused, 5, "folder, instance, boxes, run and origin, each once");
    // Room for files, but not for a byte in them.
    mount(Some("full"), &dir, Some("tmpfs"), MsFlags::empty(), Some("size=4k")).unwrap();
    fs::write(dir.join("filler"), [0; 4096]).unwrap();
    let (_, told, _) = refused(config(&dir));
    assert!(told.contains("make room"), "{told}");
    assert_eq!(names(&dir), ["filler"]);
    fs::remove_file(dir.join("filler")).unwrap();
    let node = Node::open(config(&dir)).unwrap();
    let error = node.guest_file().unwrap_err();
    assert!(matches!(&error, SandboxError::Folder { path, .. } if path.starts_with(node.folder())), "{error}");
    assert!(!names(node.folder()).contains(&"guest".to_owned()));
}

#[test]
fn nothing_half_made_stays_where_no_file_may_grow() {
    let test = "open::nothing_half_made_stays_where_no_file_may_grow";
    let Some(dir) = is_alone(test) else {
        let dir = folder();
        assert_passed(&alone(test, dir.path(), &[]).output().unwrap());
        return;
    };
    let config = config(&dir); // puts the guest into a file of memory, which has to grow
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 0, hard).unwrap();
    let (path, _, source) = refused(config.clone());
    assert_eq!((path, source.raw_os_error()), (config.dir, Some(libc::EFBIG)));
    assert!(names(&dir).is_empty());
}

#[test]
fn only_a_named_guest_needs_a_disk_that_allows_programs() {
    let test = "open::only_a_named_guest_needs_a_disk_that_allows_programs";
    let Some(dir) = is_alone(test) else {
        if let Some(wrapper) = own_mounts(test) {
            let dir = folder();
            assert_passed(&alone(test, dir.path(), wrapper).output().unwrap());
        }
        return;
    };
    mount(Some("noexec"), &dir, Some("tmpfs"), MsFlags::MS_NOEXEC, None::<&str>).unwrap();
    let node = Node::open(config(&dir)).unwrap();
    let SandboxError::Folder { path, problem, advice, source } = node.guest_file().unwrap_err() else { panic!() };
    assert_eq!((path.as_path(), source.kind()), (node.folder(), io::ErrorKind::PermissionDenied));
    assert!(problem.contains("forbids programs") && advice.contains("noexec"), "{problem}; {advice}");
    assert!(!names(node.folder()).contains(&"guest".to_owned()));
    mount(None::<&str>, &dir, None::<&str>, MsFlags::MS_REMOUNT, None::<&str>).unwrap();
    assert!(node.guest_file().unwrap().exists(), "a remedy is enough");
}

#[test]
fn a_named_guest_is_a_file_that_anyone_can_execute() {
    let dir = folder();
    let node = Node::open(config(dir.path())).unwrap();
    let files: Vec<PathBuf> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| node.guest_file().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(files.iter().all(|file| *file == node.folder().join("guest")));
    assert_eq!(fs::read(&files[0]).unwrap(), prorl_guest::bytes());
    assert_eq!(fs::metadata(&files[0]).unwrap().permissions().mode() & 0o7777, 0o755);
    fs::remove_file(&files[0]).unwrap();
    assert!(node.guest_file().unwrap().exists(), "who tidies up may take it for an old file");
    drop(node);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn many_nodes_come_and_go_in_one_folder() {
    let dir = folder();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..25).for_each(|_| drop(Node::open(config(dir.path())).unwrap())));
        }
    });
    assert!(names(dir.path()).is_empty());
}

#[test]
fn open_files_are_raised_to_the_hard_limit() {
    let hard = raise_open_files().unwrap();
    assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    assert_eq!(raise_open_files().unwrap(), hard);
}
