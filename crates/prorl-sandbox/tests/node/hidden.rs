//! Sandboxes of an ordinary user from whom `/proc` hides processes, as many shared machines have it (`hidepid=2`).

use std::{
    fs,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};

use crate::{
    crash::reap_all,
    sandboxes::{Server, has_ended, squash},
    support::{alone, assert_passed, folder, is_alone, names, skip},
};

/// Runs the rest of `test` as an ordinary user in a pid namespace whose `/proc` hides processes, as its process 1, which
/// adopts whatever loses its parent; there it returns the folder.
fn hidden(test: &str, prepare: impl FnOnce(&std::path::Path) -> Result<(), String>) -> Option<PathBuf> {
    if let Some(dir) = is_alone(test) {
        assert!(fs::read("/proc/1/stat").is_ok(), "this process is another's");
        return Some(dir);
    }
    if !geteuid().is_root() {
        skip(test, "only root can mount a /proc that hides processes from an ordinary user");
        return None;
    }
    let dir = folder();
    if let Err(why) = prepare(dir.path()) {
        skip(test, &why);
        return None;
    }
    // The program may be in a folder that is closed to others.
    let script = "mount -t proc -o hidepid=2 proc /proc && cp \"$1\" \"$PRORL_TEST_FOLDER/../me\" && shift
        chmod 755 \"$PRORL_TEST_FOLDER/..\" \"$PRORL_TEST_FOLDER/../me\" && chown 65534 \"$PRORL_TEST_FOLDER\"
        exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$PRORL_TEST_FOLDER/../me\" \"$@\"";
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "sh", "-c", script, "sh"];
    let work = dir.path().join("work");
    fs::create_dir_all(&work).unwrap();
    assert_passed(&alone(test, &work, &wrapper).output().unwrap());
    None
}

/// Tells whether the kernel gives each process's handles an inode of their own, by which a hidden one can be proven.
fn inodes_are_told(handles: &[OwnedFd; 2]) -> bool {
    let inode = |handle: &OwnedFd| fs::File::from(handle.try_clone().unwrap()).metadata().unwrap().ino();
    inode(&handles[0]) != inode(&handles[1])
}

/// Kills a server whose sandbox does not end by itself. Its keeper has to end that, or to leave what it cannot prove.
fn end_frozen(server: Server, dir: &std::path::Path) {
    let is_hidden = |pid: i32| fs::read(format!("/proc/{pid}/stat")).is_err();
    assert!(is_hidden(server.outer), "there is nothing to test");
    server.freeze();
    let handles = server.handles();
    let pids = [server.outer, server.inner];
    server.kill();
    for handle in &handles {
        poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], 15_000_u16).unwrap();
    }
    if inodes_are_told(&handles) {
        assert!(handles.iter().all(has_ended));
    } else {
        // Of a launcher's sandbox process 1 is known: it was executed in a user namespace of this user's.
        assert!(!has_ended(&handles[0]), "killed without a proof");
        assert_eq!(names(&dir.join("nodes")).len(), 1, "what is there is not said to be gone");
        for pid in pids {
            let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
        }
        drop(prorl_sandbox::Node::open(crate::support::config(dir)).unwrap());
    }
    reap_all();
    assert!(!names(dir).contains(&"nodes".to_owned()));
}

#[test]
fn a_sandbox_stands_and_is_ended() {
    let Some(dir) = hidden("hidden::a_sandbox_stands_and_is_ended", |_| Ok(())) else { return };
    end_frozen(Server::start(&dir), &dir);
}

#[test]
fn a_launchers_sandbox_stands_and_is_ended() {
    let test = "hidden::a_launchers_sandbox_stands_and_is_ended";
    let Some(dir) = hidden(test, |dir| {
        fs::create_dir(dir.join("work")).unwrap();
        squash(&dir.join("work"))
    }) else {
        return;
    };
    end_frozen(Server::start(&dir), &dir);
}
