//! Who may start now: places among the starting, and room on the machine.
//!
//! Limits are ceilings: sixty sandboxes of four gibibytes each are usual on a machine of sixty-four, because hardly one uses a
//! tenth of that. So nothing is set aside for them. What is held is a floor: while the machine has less memory or disk free than
//! that, nothing more starts, so that those which stand, and the rest of the machine, have it.

use std::{
    fmt, fs,
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::sys::statvfs::statvfs;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::{SandboxError, limits::memory_total};

const MIB: u64 = 1 << 20;

/// Disk that is left to others where nothing else is said.
pub(super) const MIN_FREE_DISK: u64 = 64 * MIB;

/// How often is looked again for room that something else than a sandbox of this node may have made.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Returns how much memory is left to others where nothing else is said: 2 % of the machine's, at least 256 MiB and at most
/// 2 GiB, but never more than a quarter of the machine's.
pub(super) fn min_free_memory(total: u64) -> u64 {
    (total / 50).clamp(256 * MIB, 2048 * MIB).min(total / 4)
}

/// What a machine has free. Nothing is what is not known.
pub(super) trait Room: fmt::Debug + Send + Sync {
    /// Bytes of memory that programs could get without anything being swapped or killed; `enough` or more where that is cheaper to
    /// tell than how many.
    fn free_memory(&self, enough: u64) -> Option<u64>;

    /// Bytes of disk where the node writes.
    fn free_disk(&self) -> Option<u64>;
}

/// This machine.
#[derive(Debug)]
pub(super) struct Machine {
    folder: PathBuf,
    groups: Vec<MemoryGroup>,
}

impl Machine {
    /// This machine, with the disk that a folder is on.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), groups: MemoryGroup::around_this_process() }
    }
}

impl Room for Machine {
    fn free_memory(&self, enough: u64) -> Option<u64> {
        free_memory(&self.groups, enough)
    }

    fn free_disk(&self) -> Option<u64> {
        statvfs(&self.folder).ok().map(|stat| stat.blocks_available() * stat.fragment_size())
    }
}

/// Returns how much memory is free for this process and its sandboxes.
pub(crate) fn free_memory_here() -> Option<u64> {
    free_memory(&MemoryGroup::around_this_process(), u64::MAX)
}

fn free_memory(groups: &[MemoryGroup], enough: u64) -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let total = memory_total();
    groups.iter().filter_map(|group| group.free(total, enough)).chain(machine).min()
}

/// Reads what the kernel believes to be available.
fn available(meminfo: &str) -> Option<u64> {
    let kibibytes = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kibibytes.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group of either version that bounds the memory of this process, and so of its sandboxes.
#[derive(Debug, PartialEq, Eq)]
struct MemoryGroup {
    folder: PathBuf,
    /// Its files of the limit and of what is used.
    files: [&'static str; 2],
    /// How `memory.stat` calls file pages of it and of the groups below it, which the kernel takes back when it needs memory.
    cache: [&'static str; 2],
}

impl MemoryGroup {
    /// Returns this process's group and those above it, as far as they can be seen.
    fn around_this_process() -> Vec<Self> {
        let [mountinfo, cgroup] =
            ["/proc/self/mountinfo", "/proc/self/cgroup"].map(|path| fs::read_to_string(path).unwrap_or_default());
        Self::of(&mountinfo, &cgroup)
    }

    fn of(mountinfo: &str, cgroup: &str) -> Vec<Self> {
        let mut found = Vec::new();
        for line in mountinfo.lines() {
            let Some((mount, kind)) = line.split_once(" - ") else { continue };
            let (fields, kind): (Vec<_>, Vec<_>) = (mount.split(' ').collect(), kind.split(' ').collect());
            let ([_, _, _, root, target, ..], [kind, _, options, ..]) = (fields.as_slice(), kind.as_slice()) else {
                continue;
            };
            let is_memory = |names: &str| names.split(',').any(|name| name == "memory");
            let own = cgroup.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let (names, path) = (parts.next()?, parts.next()?);
                let is_it = match *kind {
                    "cgroup2" => names.is_empty(),
                    "cgroup" => is_memory(options) && is_memory(names),
                    _ => false,
                };
                is_it.then_some(path)
            });
            let (files, cache) = if *kind == "cgroup2" {
                (["memory.max", "memory.current"], ["inactive_file ", "active_file "])
            } else {
                (["memory.limit_in_bytes", "memory.usage_in_bytes"], ["total_inactive_file ", "total_active_file "])
            };
            let Some(below) = own.and_then(|own| Path::new(own).strip_prefix(root).ok()) else { continue };
            if below.components().all(|part| matches!(part, Component::Normal(_))) {
                let top = Path::new(target);
                let folders = below.ancestors().map(|above| top.join(above));
                found.extend(folders.map(|folder| Self { folder, files, cache }));
            }
        }
        found
    }

    /// Returns what is left below its limit, or a lower bound that is `enough`; nothing where it has no limit below the machine's
    /// `total`.
    fn free(&self, total: u64, enough: u64) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let [limit, used] = self.files;
        let limit = number(limit).filter(|limit| *limit < total)?;
        let used = number(used)?;
        let left = limit.saturating_sub(used);
        if left >= enough {
            return Some(left);
        }
        // The kernel adds up for a while before it tells this.
        let stat = read("memory.stat").unwrap_or_default();
        let of = |name: &&str| stat.lines().find_map(|line| line.strip_prefix(*name)?.parse::<u64>().ok());
        let cache: u64 = self.cache.iter().filter_map(of).sum();
        Some(limit.saturating_sub(used.saturating_sub(cache)))
    }
}

/// The entry of a node.
#[derive(Debug)]
pub(super) struct Admission {
    starting: Arc<Semaphore>,
    room: Box<dyn Room>,
    min_free_memory: u64,
    min_free_disk: u64,
    /// Told when a sandbox is over.
    freed: Notify,
}

impl Admission {
    /// Lets so many start at once, while `room` has so many bytes of memory and disk free.
    pub(super) fn new(max_starting: usize, room: Box<dyn Room>, min_free_memory: u64, min_free_disk: u64) -> Self {
        let starting = Arc::new(Semaphore::new(max_starting.min(Semaphore::MAX_PERMITS)));
        Self { starting, room, min_free_memory, min_free_disk, freed: Notify::new() }
    }

    /// Waits for a place, in order of asking, and then for up to `patience` until there is room.
    pub(super) async fn admit(&self, patience: Duration) -> Result<Permit, SandboxError> {
        let place = Arc::clone(&self.starting).acquire_owned().await;
        let permit = Permit { _place: place.expect("the semaphore is never closed") };
        let begun = Instant::now();
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable(); // so that no end between the look and the wait is missed
            let Some(lack) = self.lack() else { return Ok(permit) };
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(lack);
            }
            let _ = timeout_at(Instant::now() + left.min(LOOK_AGAIN), freed).await;
        }
    }

    /// Tells that a sandbox is over.
    pub(super) fn freed(&self) {
        self.freed.notify_waiters();
    }

    /// Says what there is too little of.
    fn lack(&self) -> Option<SandboxError> {
        let lack = |what, free: Option<u64>, needed_bytes| {
            let free_bytes = free.filter(|free| *free < needed_bytes)?;
            Some(SandboxError::NoRoom { what, free_bytes, needed_bytes })
        };
        lack("memory", self.room.free_memory(self.min_free_memory), self.min_free_memory)
            .or_else(|| lack("disk", self.room.free_disk(), self.min_free_disk))
    }
}

/// A place among the sandboxes that are starting; freed when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _place: OwnedSemaphorePermit,
}

/// Returns the floor of this machine's memory.
pub(super) fn default_min_free_memory() -> u64 {
    min_free_memory(memory_total())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use prorl_core::FailureClass;

    use super::*;

    /// A machine with so much of memory and of disk.
    #[derive(Clone, Debug)]
    struct Fake(Arc<[AtomicU64; 2]>);

    impl Fake {
        fn new(free: [u64; 2]) -> Self {
            Self(Arc::new(free.map(AtomicU64::new)))
        }

        fn set(&self, idx: usize, bytes: u64) {
            self.0[idx].store(bytes, Ordering::Relaxed);
        }

        fn admission(&self) -> Admission {
            Admission::new(1, Box::new(self.clone()), 100 * MIB, 10 * MIB)
        }
    }

    impl Room for Fake {
        fn free_memory(&self, _: u64) -> Option<u64> {
            Some(self.0[0].load(Ordering::Relaxed))
        }

        fn free_disk(&self) -> Option<u64> {
            Some(self.0[1].load(Ordering::Relaxed))
        }
    }

    const PATIENCE: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn what_is_short_is_told_when_it_stays_so() {
        for (idx, what, least) in [(0, "memory", 100 * MIB), (1, "disk", 10 * MIB)] {
            let machine = Fake::new([100 * MIB, 10 * MIB]);
            let admission = machine.admission();
            drop(admission.admit(PATIENCE).await.unwrap());
            machine.set(idx, least - 1);
            let begun = Instant::now();
            let error = admission.admit(PATIENCE).await.unwrap_err();
            assert_eq!(begun.elapsed(), PATIENCE);
            assert_eq!(error.failure_class(), FailureClass::Resource);
            let text = error.to_string();
            assert!(text.contains(&format!("{} MiB of {what} free", (least >> 20) - 1)), "{text}");
            // The place went back.
            machine.set(idx, least);
            drop(admission.admit(PATIENCE).await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_sandbox_lets_the_next_in_at_once() {
        let machine = Fake::new([0, 10 * MIB]);
        let admission = machine.admission();
        let begun = Instant::now();
        let ends = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            machine.set(0, 100 * MIB);
            admission.freed();
        };
        let (admitted, ()) = tokio::join!(admission.admit(PATIENCE), ends);
        admitted.unwrap();
        assert!(begun.elapsed() < Duration::from_millis(20), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn room_that_others_make_is_found() {
        let machine = Fake::new([0, 10 * MIB]);
        let admission = machine.admission();
        let begun = Instant::now();
        let others = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            machine.set(0, 100 * MIB);
        };
        let (admitted, ()) = tokio::join!(admission.admit(PATIENCE), others);
        admitted.unwrap();
        assert!(begun.elapsed() <= Duration::from_secs(3) + LOOK_AGAIN, "{:?}", begun.elapsed());
    }

    #[test]
    fn the_floor_fits_the_machine() {
        let gib = 1024 * MIB;
        let floors = [gib / 2, 2 * gib, 24 * gib, 64 * gib, 1024 * gib].map(|total| min_free_memory(total) / MIB);
        assert_eq!(floors, [128, 256, 491, 1310, 2048]);
    }

    #[test]
    fn what_is_available_is_read() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   24040 kB\n"), Some(24040 * 1024));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        let machine = Machine::new(Path::new("/"));
        assert!(machine.free_memory(u64::MAX).unwrap() <= memory_total());
        assert!(machine.free_disk().is_some());
    }

    #[test]
    fn the_limits_of_groups_around_this_process_count() {
        let top = tempfile::tempdir().unwrap();
        let own = top.path().join("job/step");
        fs::create_dir_all(&own).unwrap();
        let fill = |folder: &Path, limit: &str, used: u64, cache: u64| {
            fs::write(folder.join("memory.max"), limit).unwrap();
            fs::write(folder.join("memory.current"), used.to_string()).unwrap();
            let stat = format!("anon 5\nfile 9\nactive_file {cache}\ninactive_file 1000\nx_active_file 7\n");
            fs::write(folder.join("memory.stat"), stat).unwrap();
        };
        fill(&own, "max\n", 1, 0);
        fill(own.parent().unwrap(), "1000000\n", 900_000, 500);
        let mountinfo = format!("1 0 0:1 / {} rw - cgroup2 cgroup2 rw\n", top.path().display());
        let groups = MemoryGroup::of(&mountinfo, "0::/job/step\n");
        assert_eq!(groups.len(), 3);
        let told = |total, enough| groups.iter().filter_map(|group| group.free(total, enough)).collect::<Vec<_>>();
        assert_eq!(told(u64::MAX, u64::MAX), [101_500]);
        assert_eq!(told(u64::MAX, 100_000), [100_000], "its cache does not matter");
        assert_eq!(told(1_000_000, u64::MAX), Vec::<u64>::new(), "the machine has no more");
        assert_eq!(free_memory(&groups, u64::MAX), Some(101_500));
        assert_eq!(MemoryGroup::of(&mountinfo, "0::/../x\n"), []);
    }

    #[test]
    fn groups_of_the_first_version_count_too() {
        let mountinfo = "1 0 0:1 /docker /m rw - cgroup cgroup rw,memory\n2 0 0:2 / /p rw - cgroup cgroup rw,pids\n";
        let groups = MemoryGroup::of(mountinfo, "5:pids:/x\n4:memory:/docker/one\n0::/\n");
        let folders: Vec<_> = groups.iter().map(|group| group.folder.to_str().unwrap()).collect();
        assert_eq!(folders, ["/m/one", "/m/"]);
        assert!(groups.iter().all(|group| group.files[0] == "memory.limit_in_bytes"));
    }
}
