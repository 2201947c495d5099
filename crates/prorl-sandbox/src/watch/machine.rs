//! What the whole machine did since the last round, which bounds what any one sandbox can have done.

use std::{fs::File, os::unix::fs::FileExt as _};

use nix::unistd::{SysconfVar, sysconf};

use super::{shmem::Shmem, status::number};

/// A page in bytes, where the system does not tell.
const PAGE: u64 = 4096;

/// More than `/proc/vmstat` has; its first third is what counts.
const ROOM: usize = 16 * 1024;

/// The files that tell of the machine, open. What cannot be opened tells nothing, and then every sandbox is looked at.
#[derive(Debug)]
pub(super) struct Machine {
    memory: Option<File>,
    load: Option<File>,
    shmem: Shmem,
    page: u64,
    buffer: Vec<u8>,
}

/// What they told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Bytes of memory that the kernel has handed out since boot, for whatever. A process cannot have got a page that is not
    /// among them, whether it was handed back before or since.
    pub(super) handed_out: Option<u64>,
    /// Bytes of shared memory that are in no file of a sandbox or of the host.
    pub(super) shared: Option<u64>,
    /// Threads that run or want to, this one among them.
    pub(super) running: Option<u32>,
    /// The number that was given to a process or thread last. All of a sandbox get one from the same row, one after the other.
    pub(super) last_number: Option<u32>,
}

impl Machine {
    pub(super) fn open() -> Self {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| u64::try_from(bytes).ok());
        Self {
            memory: File::open("/proc/vmstat").ok(),
            load: File::open("/proc/loadavg").ok(),
            shmem: Shmem::open(),
            page: page.unwrap_or(PAGE),
            buffer: vec![0; ROOM],
        }
    }

    /// Reads all of it. `in_files` sums up the bytes in the file systems that sandboxes have in memory.
    pub(super) fn read(&mut self, in_files: impl FnOnce() -> u64) -> News {
        let vmstat = read(self.memory.as_ref(), &mut self.buffer);
        let (handed_out, shared) = vmstat.map_or((None, None), pages);
        let bytes = |pages: u64| pages.saturating_mul(self.page);
        let (handed_out, shared) = (handed_out.map(bytes), shared.map(bytes));
        let shared = shared.map(|all| self.shmem.outside_files(all, in_files));
        let (running, last_number) = read(self.load.as_ref(), &mut self.buffer).and_then(load).unzip();
        News { handed_out, shared, running, last_number }
    }
}

/// Returns the number that was given to a process or thread last, if that is told.
pub(super) fn last_number() -> Option<u32> {
    load(&std::fs::read("/proc/loadavg").ok()?).map(|(_running, last)| last)
}

fn read<'a>(file: Option<&File>, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let n_read = file?.read_at(buffer, 0).ok()?;
    buffer.get(..n_read)
}

/// Returns how many pages were handed out in all zones, and how many are of shared memory, those in files among them.
fn pages(vmstat: &[u8]) -> (Option<u64>, Option<u64>) {
    let (mut handed_out, mut shared) = (None, None);
    for line in vmstat.split(|byte| *byte == b'\n') {
        if let Some(zone) = line.strip_prefix(b"pgalloc_") {
            let count = zone.iter().position(|byte| *byte == b' ').and_then(|blank| number(&zone[blank..]));
            // One that cannot be read makes the sum unknown, whatever comes after.
            let so_far = handed_out.unwrap_or(Some(0_u64));
            handed_out = Some(so_far.zip(count).map(|(sum, count)| sum.wrapping_add(count)));
        } else if handed_out.is_some() {
            break; // the zones follow one another, and are all that is left to know
        } else if let Some(count) = line.strip_prefix(b"nr_shmem ") {
            shared = number(count);
        }
    }
    (handed_out.flatten(), shared)
}

/// Returns how many threads want to run, and which number was given out last.
fn load(loadavg: &[u8]) -> Option<(u32, u32)> {
    let mut fields = std::str::from_utf8(loadavg).ok()?.split_ascii_whitespace().skip(3);
    let (running, _all) = fields.next()?.split_once('/')?;
    Some((running.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Returns the size of an error that a count of a process's memory can have, in bytes: how much of it each processor may still
/// keep to itself.
pub(super) fn lag() -> u64 {
    let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    let n_processors = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().and_then(|n| u64::try_from(n).ok());
    lag_of(release.as_deref().unwrap_or_default(), n_processors.unwrap_or(1).max(1))
}

fn lag_of(release: &str, n_processors: u64) -> u64 {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or_default());
    match (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default()) {
        // Whoever reads sums up what all processors have.
        (major, minor) if (major, minor) >= (6, 17) => 0,
        // Each processor keeps up to a batch of each of two kinds.
        (major, minor) if (major, minor) >= (6, 2) => 2 * PAGE * n_processors * (2 * n_processors).max(32),
        // Each thread keeps 64 faults. Those of one process that has many threads are bounded by what it was seen with before.
        _ => 2 * PAGE * 64 * n_processors,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_out_is_summed_over_zones() {
        let vmstat =
            b"nr_free 5\nnr_shmem_hugepages 7\nnr_shmem 21\npgalloc_dma 1\npgalloc_dma32 20\npgalloc_normal 300\nx 9\n";
        assert_eq!(pages(vmstat), (Some(321), Some(21)));
        assert_eq!(pages(b"nr_free 5\nnr_shmem x\n"), (None, None));
        assert_eq!(pages(b"pgalloc_dma x\npgalloc_normal 3\n"), (None, None));
        assert_eq!(pages(b""), (None, None));
    }

    #[test]
    fn load_is_read_and_nonsense_is_none() {
        assert_eq!(load(b"3.73 2.23 2.38 6/152 2491\n"), Some((6, 2491)));
        for text in [&b""[..], b"1 2 3", b"1 2 3 4 5", b"1 2 3 a/4 5", b"1 2 3 4/5 \xff"] {
            assert_eq!(load(text), None);
        }
    }

    #[test]
    fn this_machine_tells_of_itself() {
        let mut machine = Machine::open();
        let before = machine.read(|| 0);
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = machine.read(|| 0);
        let (Some(before), Some(after)) = (before.handed_out, after.handed_out) else { return };
        assert!(after - before >= block.len() as u64, "{before} {after}");
    }

    #[test]
    fn the_lag_of_counts_is_that_of_the_kernel() {
        assert_eq!(lag_of("6.18.44-fc", 2), 0);
        assert_eq!(lag_of("6.17.0", 128), 0);
        assert_eq!(lag_of("6.8.0-31-generic", 2), 2 * 4096 * 2 * 32);
        assert_eq!(lag_of("6.1.0", 2), 2 * 4096 * 64 * 2);
        assert_eq!(lag_of("", 1), 2 * 4096 * 64);
    }
}
