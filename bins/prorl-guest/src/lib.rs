#![doc = include_str!("../README.md")]

use std::{
    fs::{File, Permissions},
    io::{self, Read as _, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};

/// The argument at which the guest prints its version and ends, instead of looking for a host.
pub const VERSION_FLAG: &str = "--version";

/// How its answer begins.
const NAME: &str = "prorl-guest ";

/// How often a busy program is tried.
const BUSY_TRIES: u32 = 1000;

/// Returns the guest: a static executable for the machine that this library was built for.
pub fn bytes() -> &'static [u8] {
    include_bytes!(env!("PRORL_GUEST_PATH"))
}

/// The guest, ready to be executed by this process and its children until it is dropped.
#[derive(Debug)]
pub struct Guest {
    path: PathBuf,
    /// What keeps the path valid.
    _file: File,
}

impl Guest {
    /// Puts the guest where it can be executed: into memory, sealed, so that there is no file to find, change or leave
    /// behind; where the machine forbids programs in memory, into a temporary file without a name, which the kernel removes
    /// with the last process that has it open, however that ends.
    ///
    /// # Errors
    /// When the guest can be executed from neither place.
    pub fn install() -> io::Result<Self> {
        Self::in_memory().or_else(|_forbidden| Self::on_disk())
    }

    /// Returns a path for this process to execute. It means the guest in this process only (and in a child until it executes
    /// something), so it cannot be handed to another program, nor be bound into a container.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn in_memory() -> io::Result<Self> {
        // MFD_EXEC says that this is meant to be executed; kernels before 6.3 do not know the word, nor need it.
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let executable = MFdFlags::from_bits_retain(0x10);
        let writable = match memfd_create("prorl-guest", flags | executable) {
            Err(Errno::EINVAL) => memfd_create("prorl-guest", flags)?,
            made => made?,
        };
        let mut writable = File::from(writable);
        writable.write_all(bytes())?;
        fcntl(
            writable.as_fd(),
            FcntlArg::F_ADD_SEALS(
                SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE,
            ),
        )?;
        Self::reopened(writable)
    }

    fn on_disk() -> io::Result<Self> {
        let mut writable = tempfile::tempfile()?;
        writable.write_all(bytes())?;
        writable.set_permissions(Permissions::from_mode(0o500))?;
        Self::reopened(writable)
    }

    /// Opens a file once more, for reading: one that is open for writing cannot be executed.
    fn reopened(writable: File) -> io::Result<Self> {
        let readable = File::open(own_fd(&writable))?;
        drop(writable);
        Self { path: own_fd(&readable), _file: readable }.tried()
    }

    /// Executes it once: a machine may allow the file and forbid the execution.
    fn tried(self) -> io::Result<Self> {
        // A program that is open for writing cannot be executed, and a child that another thread is just starting holds a copy
        // of our writing handle until it executes its own program.
        for _ in 0..BUSY_TRIES {
            match self.ask_version() {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                Ok(answer) if answer.starts_with(NAME) => return Ok(self),
                Ok(_) => return Err(io::Error::other("guest does not run here")),
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::ExecutableFileBusy.into())
    }

    fn ask_version(&self) -> io::Result<String> {
        let mut child = Command::new(&self.path)
            .arg(VERSION_FLAG)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut answer = String::new();
        let read = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut answer));
        // Not its status but its answer tells: where this process leaves its children to the kernel there is no status.
        let _ = child.wait();
        read.transpose()?;
        Ok(answer)
    }
}

fn own_fd(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;

    #[test]
    fn memory_holds_a_program_that_nobody_can_change() {
        let guest = match Guest::in_memory() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let _said = writeln!(io::stderr(), "skipped: this machine forbids programs in memory");
                return;
            }
            made => made.unwrap(),
        };
        assert_eq!(fs::read(guest.path()).unwrap(), bytes());
        assert!(File::options().write(true).open(guest.path()).and_then(|mut file| file.write_all(b"x")).is_err());
    }

    #[test]
    fn a_file_is_private_and_has_no_name_to_be_left() {
        let guest = Guest::on_disk().unwrap();
        assert_eq!(fs::read(guest.path()).unwrap(), bytes());
        let meta = fs::metadata(guest.path()).unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.nlink()), (0o500, 0));
    }

    #[test]
    fn the_program_is_static_and_small() {
        const PT_LOAD: usize = 1;
        const PT_INTERP: usize = 3;
        let text = bytes();
        assert_eq!(&text[..5], b"\x7fELF\x02");
        let number = |at: usize, len: usize| {
            text[at..at + len].iter().rev().fold(0_usize, |number, byte| number << 8 | usize::from(*byte))
        };
        let (table, entry_bytes, n_entries) = (number(32, 8), number(54, 2), number(56, 2));
        let kinds: Vec<_> = (0..n_entries).map(|entry_idx| number(table + entry_idx * entry_bytes, 4)).collect();
        assert!(kinds.contains(&PT_LOAD), "nothing to load: {kinds:?}");
        assert!(!kinds.contains(&PT_INTERP), "asks for a dynamic loader");
        assert!(text.len() < 3 << 20, "{} bytes", text.len());
    }
}
