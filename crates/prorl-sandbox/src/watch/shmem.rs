//! How much shared memory the whole machine has that is in no file which somebody bounds. What grows in it and is in no process
//! is somebody's who hides it.

use std::os::fd::OwnedFd;

use rustix::{
    fd::AsFd,
    fs::{Mode, OFlags, fstat, fstatfs, open},
};

/// What marks a file system in memory.
const TMPFS: u64 = 0x0102_1994;

/// Where a machine has file systems in memory. Other places are not looked for: finding the way to one may wait for a network.
const PLACES: [&str; 5] = ["/dev/shm", "/tmp", "/run", "/var/tmp", "/dev"];

/// How much more or less the machine may have before files are looked at again, in bytes.
const STEP: u64 = 1 << 20;

/// The file systems in memory that the host has, and what was last found.
#[derive(Debug)]
pub(super) struct Shmem {
    host: Vec<OwnedFd>,
    /// What the machine had, and what of it was in files.
    last: Option<(u64, u64)>,
}

impl Shmem {
    pub(super) fn open() -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut host: Vec<(u64, OwnedFd)> = Vec::new();
        for place in PLACES {
            let Ok(fd) = open(place, flags, Mode::empty()) else { continue };
            let Ok(stat) = fstat(&fd) else { continue };
            if used(&fd).is_some() && !host.iter().any(|(device, _)| *device == stat.st_dev) {
                host.push((stat.st_dev, fd));
            }
        }
        Self { host: host.into_iter().map(|(_, fd)| fd).collect(), last: None }
    }

    /// Returns how much of `all` shared memory is in no file, in bytes. `of_sandboxes` sums up what is in those of sandboxes.
    pub(super) fn outside_files(&mut self, all: u64, of_sandboxes: impl FnOnce() -> u64) -> u64 {
        let (then, in_files) = match self.last {
            Some(last) if all.abs_diff(last.0) < STEP => last,
            _ => (all, self.host.iter().filter_map(used).fold(of_sandboxes(), u64::saturating_add)),
        };
        self.last = Some((then, in_files));
        all.saturating_sub(in_files)
    }
}

/// Returns how much is in a file system in memory, in bytes. Nothing of any other.
pub(super) fn used(fd: impl AsFd) -> Option<u64> {
    let stat = fstatfs(fd).ok()?;
    let is_in_memory = u64::try_from(stat.f_type).is_ok_and(|kind| kind == TMPFS);
    let blocks = stat.f_blocks.saturating_sub(stat.f_bfree);
    is_in_memory.then(|| blocks.saturating_mul(u64::try_from(stat.f_bsize).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_looked_at_when_enough_has_changed() {
        let mut shmem = Shmem { host: Vec::new(), last: None };
        assert_eq!(shmem.outside_files(10 * STEP, || 4 * STEP), 6 * STEP);
        assert_eq!(shmem.outside_files(10 * STEP + 5, || panic!("looked")), 6 * STEP + 5);
        assert_eq!(shmem.outside_files(11 * STEP - 1, || panic!("looked")), 7 * STEP - 1);
        assert_eq!(shmem.outside_files(11 * STEP, || 5 * STEP), 6 * STEP);
        assert_eq!(shmem.outside_files(STEP, || 5 * STEP), 0);
    }
}
