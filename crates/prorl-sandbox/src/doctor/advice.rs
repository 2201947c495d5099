//! From an error to what was found and what somebody can do about it.

use std::{error::Error as _, io};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Finding, State, programs};
use crate::{LauncherFault, SandboxError};

/// What kept something from being done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) found: String,
    pub(super) remedy: String,
}

impl Trouble {
    pub(super) fn new(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { found: found.into(), remedy: remedy.into() }
    }

    /// Makes a finding of it. `meaning` says what does not work.
    pub(super) fn bad(self, meaning: impl Into<String>) -> Finding {
        Finding::not(State::Bad, self.found, meaning, self.remedy)
    }
}

impl From<SandboxError> for Trouble {
    fn from(error: SandboxError) -> Self {
        let caused = |text: String| match error.source() {
            Some(source) => format!("{text}: {source}"),
            None => text,
        };
        match &error {
            SandboxError::UserNamespaces { cause, advice, .. } => Self::new(caused(cause.clone()), advice),
            SandboxError::Folder { path, problem, advice, .. } => {
                Self::new(caused(format!("folder {} {problem}", path.display())), advice)
            }
            SandboxError::Launcher { program, fault, cause, advice, output } => {
                let lift = if *fault == LauncherFault::Exhausted { lift_limits() } else { None };
                let advice = lift.map_or_else(|| advice.clone(), |lift| format!("{lift}, or {advice}"));
                let said = gist(output);
                let said = if said.is_empty() { said } else { format!("; it said last: {said}") };
                Self::new(format!("{} failed: {cause}{said}", program.display()), advice)
            }
            SandboxError::Program { source, .. } => {
                let name = "name Apptainer's or Singularity's own program (--apptainer), or install one";
                // One that is there may be unable to answer.
                let lift = if source.kind() == io::ErrorKind::NotFound { None } else { lift_limits() };
                Self::new(
                    caused(error.to_string()),
                    lift.map_or_else(|| name.to_owned(), |lift| format!("{lift}, or {name}")),
                )
            }
            SandboxError::Invalid { what: "sandbox_user", .. } => {
                Self::new(error.to_string(), "name a user that is not root (--sandbox-user)")
            }
            SandboxError::Exhausted { source, .. }
            | SandboxError::Setup { source, .. }
            | SandboxError::Spawn { source, .. } => Self::new(caused(error.to_string()), remedy(source)),
            SandboxError::Guest { .. } | SandboxError::Protocol { .. } => {
                Self::new(caused(error.to_string()), "install prorl again: its guest is not of its version")
            }
            SandboxError::NoRoom { what, .. } => {
                Self::new(error.to_string(), format!("free some {what}, or give this machine or container more"))
            }
            SandboxError::NotReady { .. } => Self::new(error.to_string(), "see what keeps this machine so busy"),
            SandboxError::Ended { .. } => Self::new(error.to_string(), lift_limits().unwrap_or_else(see_kernel)),
            _ => Self::new(caused(error.to_string()), see_kernel()),
        }
    }
}

/// Says what to do about an error of the system's.
pub(super) fn remedy(error: &io::Error) -> String {
    let plain = match error.raw_os_error() {
        // The space of addresses is where the stack of a thread is to be, so its lack looks like that of processes.
        Some(libc::EAGAIN | libc::ENOMEM) if is_limited(Resource::RLIMIT_AS, u64::MAX) => LIFT_ADDRESS_SPACE,
        Some(libc::EAGAIN) => RAISE_PROCESSES,
        Some(libc::ENOMEM) => "free some memory, or give this container more",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (ulimit -Hn; LimitNOFILE= in systemd)",
        Some(libc::ENOSPC | libc::EDQUOT) => "make room, or name another folder (--run-dir or TMPDIR)",
        Some(libc::EFBIG) => LIFT_FILE_SIZE,
        Some(libc::EPERM | libc::EACCES) => {
            "look for a mount without programs (noexec), a security module's rule or a seccomp filter; the kernel may say \
             more (dmesg)"
        }
        _ => return lift_limits().unwrap_or_else(see_kernel),
    };
    plain.to_owned()
}

const LIFT_ADDRESS_SPACE: &str = "lift the limit of address space (ulimit -v unlimited)";

const LIFT_FILE_SIZE: &str = "lift the limit of file sizes (ulimit -f unlimited)";

const RAISE_PROCESSES: &str = "raise the limit of processes (ulimit -u; LimitNPROC= or TasksMax= in systemd)";

/// A launcher alone may take so many threads.
const FEW_PROCESSES: u64 = 64;

/// Names the limits that end programs, or do not let them start.
pub(super) fn lift_limits() -> Option<String> {
    let limits = [
        (Resource::RLIMIT_AS, u64::MAX, LIFT_ADDRESS_SPACE),
        (Resource::RLIMIT_FSIZE, u64::MAX, LIFT_FILE_SIZE),
        (Resource::RLIMIT_NPROC, FEW_PROCESSES, RAISE_PROCESSES),
    ];
    let tight = limits.into_iter().filter(|(limit, enough, _)| is_limited(*limit, *enough));
    let tight: Vec<_> = tight.map(|(_, _, remedy)| remedy).collect();
    (!tight.is_empty()).then(|| tight.join(", "))
}

fn see_kernel() -> String {
    "see what the kernel says of it (dmesg)".to_owned()
}

fn is_limited(resource: Resource, enough: u64) -> bool {
    getrlimit(resource).is_ok_and(|(soft, _)| soft != RLIM_INFINITY && soft < enough)
}

/// Returns what a failed program's words come to, short: why it crashed, or else the end.
pub(super) fn gist(words: &str) -> String {
    // As programs in Go begin; what follows is the state of everything.
    let crashes = ["fatal error: ", "runtime/cgo: ", "panic: "];
    let lines: Vec<_> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match lines.iter().find(|line| crashes.iter().any(|crash| line.starts_with(crash))) {
        Some(line) => programs::last_words(line),
        None => programs::last_words(&lines.join(" | ")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn an_errors_own_advice_is_the_remedy() {
        let source = || io::Error::from_raw_os_error(libc::ENOSPC);
        let (problem, advice) = ("has no space left".to_owned(), "make room".to_owned());
        let folder = SandboxError::Folder { path: "/x".into(), problem, advice, source: source() };
        let told = Trouble::from(folder);
        assert_eq!(told.remedy, "make room");
        assert_eq!(told.found, "folder /x has no space left: No space left on device (os error 28)");

        let (cause, advice) = ("user.max_user_namespaces is 0".to_owned(), "raise it".to_owned());
        let told = Trouble::from(SandboxError::UserNamespaces { cause, advice, source: source() });
        assert_eq!(told.remedy, "raise it");
        assert!(told.found.starts_with("user.max_user_namespaces is 0: "), "{}", told.found);

        let told = Trouble::from(SandboxError::Launcher {
            program: "/bin/apptainer".into(),
            fault: LauncherFault::Fuse,
            cause: "no FUSE".to_owned(),
            advice: "load it".to_owned(),
            output: "one\n\n two \n".to_owned(),
        });
        assert_eq!(told, Trouble::new("/bin/apptainer failed: no FUSE; it said last: one | two", "load it"));
    }

    #[test]
    fn a_crash_is_told_by_its_reason() {
        let trace = "goroutine 1 [running]:\nmain.main()\n".repeat(100);
        assert_eq!(gist(&format!("runtime: x\nfatal error: out of memory\n{trace}")), "fatal error: out of memory");
        assert_eq!(gist("WARNING: one\n\n FATAL: two \n"), "WARNING: one | FATAL: two");
        assert!(gist(&trace).len() < 500);
    }

    #[test]
    fn what_has_no_advice_of_its_own_gets_some() {
        let source = |errno| io::Error::from_raw_os_error(errno);
        let spawn = |errno| SandboxError::Spawn { path: PathBuf::from("/g"), source: source(errno) };
        for (error, part) in [
            (spawn(libc::EMFILE), "open files"),
            (spawn(libc::EFBIG), "ulimit -f"),
            (spawn(libc::EACCES), "noexec"),
            (spawn(libc::ENOSPC), "--run-dir"),
            (SandboxError::Program { path: "/nope".into(), source: source(libc::ENOENT) }, "--apptainer"),
            (SandboxError::Invalid { what: "sandbox_user", reason: String::new() }, "--sandbox-user"),
            (SandboxError::Protocol { reason: String::new() }, "install prorl again"),
            (SandboxError::NoRoom { what: "memory", free_bytes: 1, needed_bytes: 2 }, "free some memory"),
        ] {
            let told = Trouble::from(error);
            assert!(told.remedy.contains(part), "{told:?}");
        }
    }
}
