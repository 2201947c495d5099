#![doc = include_str!("../README.md")]

use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use tempfile::TempPath;

/// The argument at which the guest prints its version and ends, instead of looking for a host.
pub const VERSION_FLAG: &str = "--version";

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
    _place: Place,
}

/// What keeps the path valid.
#[derive(Debug)]
enum Place {
    Memory { _file: OwnedFd },
    Disk { _file: TempPath },
}

impl Guest {
    /// Puts the guest where it can be executed: into memory, sealed, so that there is no file to find, change or leave
    /// behind; where the machine forbids programs in memory, into a private temporary file that goes with the value.
    ///
    /// # Errors
    /// When the guest can be executed from neither place.
    pub fn install() -> io::Result<Self> {
        Self::in_memory().or_else(|_forbidden| Self::on_disk())
    }

    /// Returns a path for this process to execute. In memory it means the guest in this process only (and in a child until
    /// it executes something), so it cannot be handed to another program, nor be bound into a container.
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
        // A file open for writing cannot be executed, so it is opened once more, for reading.
        let readable = File::open(own_fd(&writable))?;
        drop(writable);
        Self { path: own_fd(&readable), _place: Place::Memory { _file: readable.into() } }.tried()
    }

    fn on_disk() -> io::Result<Self> {
        let mut file = tempfile::Builder::new()
            .prefix("prorl-guest-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempfile()?;
        file.write_all(bytes())?;
        let file = file.into_temp_path(); // closes it
        Self { path: file.to_path_buf(), _place: Place::Disk { _file: file } }.tried()
    }

    /// Executes it once: a machine may allow the file and forbid the execution.
    fn tried(self) -> io::Result<Self> {
        // A program that is open for writing cannot be executed, and a child that another thread is just starting holds a copy
        // of our writing handle until it executes its own program.
        for _ in 0..BUSY_TRIES {
            match self.print_version() {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                Ok(status) if status.success() => return Ok(self),
                Ok(status) => return Err(io::Error::other(format!("guest does not run here: {status}"))),
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::ExecutableFileBusy.into())
    }

    fn print_version(&self) -> io::Result<ExitStatus> {
        Command::new(&self.path)
            .arg(VERSION_FLAG)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
    }
}

fn own_fd(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_a_program_that_nobody_can_change() {
        let guest = Guest::in_memory().unwrap();
        assert_eq!(fs::read(guest.path()).unwrap(), bytes());
        assert!(File::options().write(true).open(guest.path()).and_then(|mut file| file.write_all(b"x")).is_err());
    }

    #[test]
    fn a_file_is_private_and_goes_with_the_value() {
        let guest = Guest::on_disk().unwrap();
        let path = guest.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(guest);
        assert!(!path.exists());
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
