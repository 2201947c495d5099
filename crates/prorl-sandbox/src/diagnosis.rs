//! From the guest's bare "this step failed with that number" to an error that says what is in the way and who can remove it.

use std::{fs, io, path::Path};

use prorl_core::hello::StartFailure;

use crate::{SandboxError, error::is_exhaustion, setup::step};

/// Turns the guest's failure into an error. `proc` is `/proc`, or a tree like it in tests.
pub(crate) fn explain(proc: &Path, failure: StartFailure) -> SandboxError {
    let StartFailure { step, target, errno } = failure;
    let source = if errno == 0 { io::Error::other("refused") } else { io::Error::from_raw_os_error(errno) };
    if let Some((cause, advice)) = blocked_by(proc, &step, errno) {
        return SandboxError::UserNamespaces { cause, advice: advice.to_owned(), source };
    }
    match step.as_str() {
        step::READ_SETUP => SandboxError::Protocol { reason: format!("guest refused its set-up: {target}") },
        step::OPEN_IMAGE | step::OPEN_LAYER => SandboxError::Image { path: target.into(), source },
        step::LAYER_IDS => SandboxError::Invalid { what: "layers", reason: target },
        step::OPEN_BIND => SandboxError::Bind { path: target.into(), source },
        _ if is_exhaustion(&source) => SandboxError::Exhausted { step, target, source },
        _ => SandboxError::Setup { step, target, source },
    }
}

/// Finds the setting that forbids user namespaces, or what they are for.
pub(crate) fn blocked_by(proc: &Path, step: &str, errno: i32) -> Option<(String, &'static str)> {
    let refused = matches!(errno, libc::EPERM | libc::EACCES);
    match step {
        step::NAMESPACES if errno == libc::ENOSPC || errno == libc::EUSERS => Some(used_up(proc)),
        step::NAMESPACES if refused => Some(refusal(proc)),
        step::NAMESPACES if errno == libc::EINVAL || errno == libc::ENOSYS => Some((
            "the kernel was built without user namespaces, or a seccomp filter hides them".to_owned(),
            "a kernel with CONFIG_USER_NS is needed, and a container that allows unshare",
        )),
        // Ubuntu lets the namespace be made and takes its capabilities away, so the next steps fail.
        step::MAP_USERS | step::MOUNT | step::MOUNT_PROC if refused && is(proc, APPARMOR, 1) => Some(apparmor()),
        step::MOUNT_PROC if refused => Some((
            "this container masks parts of /proc, so the kernel refuses a fresh /proc".to_owned(),
            "start the container with an unmasked /proc (docker: --security-opt systempaths=unmasked; \
             Kubernetes: procMount: Unmasked)",
        )),
        step::BECOME_USER => Some((
            "root here cannot become the unprivileged sandbox user".to_owned(),
            "start as an ordinary user, or with CAP_SETUID and CAP_SETGID and a sandbox user that exists here",
        )),
        _ => None,
    }
}

const USERNS_CLONE: &str = "sys/kernel/unprivileged_userns_clone";
const APPARMOR: &str = "sys/kernel/apparmor_restrict_unprivileged_userns";

fn used_up(proc: &Path) -> (String, &'static str) {
    let advice = "raise it as root (sysctl -w NAME=10000)";
    let kinds = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let zero = kinds.iter().find(|kind| is(proc, &format!("sys/user/max_{kind}_namespaces"), 0));
    match (zero, read(proc, "sys/user/max_user_namespaces")) {
        (Some(kind), _) => (format!("user.max_{kind}_namespaces is 0"), advice),
        (None, Some(limit)) => {
            (format!("user.max_user_namespaces is {limit} and used up, or namespaces nest too deep"), advice)
        }
        (None, None) => ("user.max_user_namespaces is used up".to_owned(), advice),
    }
}

fn refusal(proc: &Path) -> (String, &'static str) {
    if is(proc, USERNS_CLONE, 0) {
        return (
            "kernel.unprivileged_userns_clone is 0".to_owned(),
            "set it to 1 as root (sysctl -w kernel.unprivileged_userns_clone=1)",
        );
    }
    if is(proc, APPARMOR, 1) {
        return apparmor();
    }
    let filtered = fs::read_to_string(proc.join("self/status"))
        .is_ok_and(|status| status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"])));
    if filtered {
        return (
            "a seccomp filter refuses new namespaces".to_owned(),
            "start the container with a profile that allows unshare and mount (docker: --security-opt seccomp=FILE)",
        );
    }
    (
        "the kernel refuses new user namespaces".to_owned(),
        "look for a security module's rule, or for a chroot that this process is in",
    )
}

fn apparmor() -> (String, &'static str) {
    (
        "kernel.apparmor_restrict_unprivileged_userns is 1".to_owned(),
        "set it to 0 as root, or give the program an AppArmor profile with 'userns,'",
    )
}

fn read(proc: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(proc.join(name)).ok()?.trim().parse().ok()
}

fn is(proc: &Path, name: &str, value: u64) -> bool {
    read(proc, name) == Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(files: &[(&str, &str)], step: &str, errno: i32) -> String {
        let proc = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = proc.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let failure = StartFailure { step: step.to_owned(), target: "it".to_owned(), errno };
        explain(proc.path(), failure).to_string()
    }

    #[test]
    fn the_setting_that_forbids_namespaces_is_named() {
        /// Files below `/proc`, the step, its error, and what must be said.
        type Case = (&'static [(&'static str, &'static str)], &'static str, i32, &'static str);
        let cases: [Case; 9] = [
            (
                &[("sys/user/max_user_namespaces", "0\n")],
                step::NAMESPACES,
                libc::ENOSPC,
                "user.max_user_namespaces is 0",
            ),
            (
                &[("sys/user/max_user_namespaces", "7\n")],
                step::NAMESPACES,
                libc::ENOSPC,
                "user.max_user_namespaces is 7",
            ),
            (&[("sys/user/max_net_namespaces", "0\n")], step::NAMESPACES, libc::ENOSPC, "user.max_net_namespaces is 0"),
            (&[(USERNS_CLONE, "0\n")], step::NAMESPACES, libc::EPERM, "kernel.unprivileged_userns_clone is 0"),
            (&[(APPARMOR, "1\n")], step::NAMESPACES, libc::EACCES, "kernel.apparmor_restrict_unprivileged_userns is 1"),
            (&[(APPARMOR, "1\n")], step::MAP_USERS, libc::EPERM, "kernel.apparmor_restrict_unprivileged_userns is 1"),
            (&[("self/status", "Name:\tx\nSeccomp:\t2\n")], step::NAMESPACES, libc::EPERM, "seccomp filter"),
            (&[(USERNS_CLONE, "1\n")], step::MOUNT_PROC, libc::EPERM, "masks parts of /proc"),
            (&[], step::NAMESPACES, libc::EPERM, "security module"),
        ];
        for (files, step, errno, part) in cases {
            let text = said(files, step, errno);
            assert!(text.contains(part), "{step} {errno}: {text}");
        }
    }

    #[test]
    fn other_failures_keep_their_step_and_class() {
        use prorl_core::FailureClass::{Image, Resource, Sandbox};
        let class = |step: &str, errno| {
            let failure = StartFailure { step: step.to_owned(), target: "/x".to_owned(), errno };
            explain(Path::new("/nonexistent"), failure).failure_class()
        };
        assert_eq!(class(step::OPEN_IMAGE, libc::EACCES), Image);
        assert_eq!(class(step::MOUNT, libc::ENOMEM), Resource);
        assert_eq!(class("fork process 1", libc::EAGAIN), Resource);
        assert_eq!(class(step::MOUNT, libc::EINVAL), Sandbox);
        assert_eq!(said(&[], step::MOUNT, libc::EINVAL), "failed to set up the sandbox at: mount it");
    }
}
