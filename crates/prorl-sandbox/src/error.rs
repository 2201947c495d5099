use std::{io, path::PathBuf, time::Duration};

use prorl_core::FailureClass;

/// Why there is no sandbox, or why it is not known to be gone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// A value of the spec that no sandbox can have.
    #[error("invalid {what}: {reason}")]
    Invalid {
        /// The field of the spec.
        what: &'static str,
        /// What is wrong with it. Never a variable's value.
        reason: String,
    },
    /// The guest's program is missing or cannot be read.
    #[error("failed to open guest {path}")]
    Guest {
        /// The path in the spec.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The image is missing, no directory, or closed to the sandbox's user.
    #[error("failed to open image {path}")]
    Image {
        /// The path in the spec.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The source of a bind is missing or closed to the sandbox's user.
    #[error("failed to open bind source {path}")]
    Bind {
        /// The path in the spec.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The guest's program could not be executed.
    #[error("failed to execute guest {path}")]
    Spawn {
        /// The path in the spec.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The folder in which a node keeps what it owns cannot be used.
    #[error("folder {path} {problem}; {advice}")]
    Folder {
        /// The folder, or a file in it.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What its user can do.
        advice: String,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The guest sent no hello in time. It has been killed.
    #[error("guest not ready after {waited:?}{}", Said(output))]
    NotReady {
        /// How long it had.
        waited: Duration,
        /// The last lines of its launcher, if there was one and it said something.
        output: String,
    },
    /// The program that is to be Apptainer or Singularity is missing, or something else.
    #[error("failed to use {path} as Apptainer or Singularity")]
    Program {
        /// The path in the configuration, or the names that were looked for.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: io::Error,
    },
    /// Apptainer or Singularity failed before the guest was started.
    #[error("{program} failed: {cause}; {advice}{}", Said(output))]
    Launcher {
        /// Its path.
        program: PathBuf,
        /// What kind of thing was in the way.
        fault: LauncherFault,
        /// What was in the way.
        cause: String,
        /// What can be done about it.
        advice: String,
        /// Its own last lines, at most 2 KiB.
        output: String,
    },
    /// The guest ended, or closed its channel, before its hello.
    #[error("guest ended before its hello ({how})")]
    Ended {
        /// Its exit status, or that it had to be killed.
        how: String,
    },
    /// The guest speaks another protocol, or none.
    #[error("guest does not speak our protocol: {reason}")]
    Protocol {
        /// What it said.
        reason: String,
    },
    /// The machine forbids user namespaces, or makes them useless.
    #[error("no sandbox can be made on this machine: {cause}; {advice}")]
    UserNamespaces {
        /// The setting that is in the way.
        cause: String,
        /// What its administrator can do.
        advice: String,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The machine ran out of something: memory, processes, open files, space.
    #[error("machine ran out of something at: {step} {target}")]
    Exhausted {
        /// What was being done.
        step: String,
        /// The thing it was done to; may be empty.
        target: String,
        /// The system's word, which says what ran out.
        #[source]
        source: io::Error,
    },
    /// The machine has less free than the node leaves to others, and had so for as long as the start might take.
    #[error("no room for a sandbox: {} of {what} free, and {} are to stay so", Mebibytes(*free_bytes), Mebibytes(*needed_bytes))]
    NoRoom {
        /// What there is too little of, in words.
        what: &'static str,
        /// How much of it is free, in bytes.
        free_bytes: u64,
        /// How much has to be, in bytes.
        needed_bytes: u64,
    },
    /// Another step of the set-up failed.
    #[error("failed to set up the sandbox at: {step} {target}")]
    Setup {
        /// What was being done.
        step: String,
        /// The thing it was done to; may be empty.
        target: String,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// Something of the sandbox was still there after it was killed.
    #[error("sandbox not gone: {what}")]
    Left {
        /// What is left.
        what: String,
    },
}

/// What kept a launcher from starting its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LauncherFault {
    /// The image: missing, closed, or none at all.
    Image,
    /// The source of a bind.
    Bind,
    /// User namespaces, which this machine forbids.
    UserNamespaces,
    /// FUSE, which this machine forbids or lacks a program for.
    Fuse,
    /// The range of ids of a fake root.
    FakeRoot,
    /// Space, memory or processes: this machine has no more.
    Exhausted,
    /// Something that is not known here.
    Other,
}

/// A launcher's last lines, as the end of a message on one line.
struct Said<'a>(&'a str);

impl std::fmt::Display for Said<'_> {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut before = "; it said last: ";
        for line in self.0.lines().map(str::trim).filter(|line| !line.is_empty()) {
            write!(to, "{before}{line}")?;
            before = " | ";
        }
        Ok(())
    }
}

/// Bytes, as people read them.
struct Mebibytes(u64);

impl std::fmt::Display for Mebibytes {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{} MiB", self.0 >> 20)
    }
}

impl SandboxError {
    /// Returns who failed, in the words of a job's outcome.
    pub fn failure_class(&self) -> FailureClass {
        match self {
            // A handler made the spec, and another attempt makes the same one.
            Self::Invalid { .. } | Self::Bind { .. } => FailureClass::Handler,
            Self::Launcher { fault, .. } => match fault {
                LauncherFault::Image => FailureClass::Image,
                LauncherFault::Bind => FailureClass::Handler,
                LauncherFault::Exhausted => FailureClass::Resource,
                LauncherFault::UserNamespaces
                | LauncherFault::Fuse
                | LauncherFault::FakeRoot
                | LauncherFault::Other => FailureClass::Sandbox,
            },
            Self::Image { .. } => FailureClass::Image,
            Self::Exhausted { .. } | Self::NoRoom { .. } => FailureClass::Resource,
            Self::Guest { .. } | Self::Protocol { .. } => FailureClass::Internal,
            Self::Spawn { source, .. } | Self::Folder { source, .. } if is_exhaustion(source) => FailureClass::Resource,
            Self::Spawn { .. }
            | Self::Folder { .. }
            | Self::NotReady { .. }
            | Self::Program { .. }
            | Self::Ended { .. }
            | Self::UserNamespaces { .. }
            | Self::Setup { .. }
            | Self::Left { .. } => FailureClass::Sandbox,
        }
    }

    /// Names the step of the host's own work that failed.
    pub(crate) fn at(step: &'static str, source: io::Error) -> Self {
        let (step, target) = (step.to_owned(), String::new());
        if is_exhaustion(&source) {
            Self::Exhausted { step, target, source }
        } else {
            Self::Setup { step, target, source }
        }
    }
}

/// Tells whether an error says that the machine, or the user's share of it, is used up.
pub(crate) fn is_exhaustion(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOSPC
                | libc::EDQUOT
                | libc::ENOMEM
                | libc::EMFILE
                | libc::ENFILE
                | libc::EAGAIN
                // More files of this user are on their way through sockets than it may have open: starts send some.
                | libc::ETOOMANYREFS
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_machine_can_run_out_of_is_its_resources() {
        for number in
            [libc::ENOSPC, libc::EDQUOT, libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::ETOOMANYREFS]
        {
            let system = || io::Error::from_raw_os_error(number);
            let error = SandboxError::at("send the guest its files", system());
            assert!(matches!(error, SandboxError::Exhausted { .. }), "{error:?}");
            assert_eq!(error.failure_class(), FailureClass::Resource, "{error:?}");
            let spawn = SandboxError::Spawn { path: PathBuf::from("/guest"), source: system() };
            assert_eq!(spawn.failure_class(), FailureClass::Resource, "{spawn:?}");
        }
        let error = SandboxError::at("send the guest its files", io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(error.failure_class(), FailureClass::Sandbox);
    }
}
