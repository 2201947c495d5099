//! The control group of one sandbox.

use std::{
    fs::{self, File},
    io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use nix::sys::uio::pread;
use tokio::{io::Interest, runtime::Handle as Runtime};

use super::{PROCS, end, is_gone, kill, remove_empty, write};
use crate::{Exceeded, SandboxSpec, node::Reach, sys};

/// What the guest's two processes have of memory, and the kernel for all of them: page tables, pipes, sockets.
const OWN_BYTES: u64 = 64 << 20;

/// What a launcher and the programs that serve its image have of memory.
const LAUNCHER_BYTES: u64 = 256 << 20;

/// Threads of the guest's two processes.
const OWN_PIDS: u32 = 66;

/// Threads of a launcher, of the programs that serve its image, and of their owner.
const LAUNCHER_PIDS: u32 = 128;

/// The most that the kernel takes for a limit.
const MOST_PIDS: u32 = 4 << 20;

/// Microseconds in which a share of the processors is measured: the kernel's own default.
const PERIOD: f64 = 100_000.0;

/// What a sandbox's group may have at most: the hard end of what its limits promise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ceilings {
    memory_bytes: Option<u64>,
    pids: Option<u32>,
    cpus: Option<f64>,
    /// What its tasks are told, whose own limit of processes is a little lower.
    task_pids: Option<u32>,
}

impl Ceilings {
    /// Returns those of a sandbox. What it writes to its disk is memory too, and charged to the same group.
    pub(crate) fn of(spec: &SandboxSpec, reach: Reach) -> Self {
        let (bytes, pids) = match reach {
            Reach::PidNamespace => (OWN_BYTES, OWN_PIDS),
            Reach::Session => (OWN_BYTES + LAUNCHER_BYTES, OWN_PIDS + LAUNCHER_PIDS),
        };
        let disk = spec.layer_bytes.saturating_add(spec.tmp_bytes.saturating_mul(2)); // `/dev/shm` is as large as `/tmp`
        let memory = |limit: u64| limit.saturating_add(disk).saturating_add(bytes);
        Self {
            memory_bytes: spec.limits.memory_bytes.map(memory),
            pids: spec.limits.pids.map(|limit| limit.saturating_add(pids)),
            cpus: spec.limits.cpus,
            task_pids: spec.limits.pids,
        }
    }

    /// Returns which file of the group says what, where there are these controllers.
    fn files(&self, controllers: &[&str]) -> Vec<(&'static str, String)> {
        let mut files = Vec::new();
        if let Some(bytes) = self.memory_bytes.filter(|_| controllers.contains(&"memory")) {
            files.push(("memory.max", bytes.to_string()));
            files.push(("memory.swap.max", "0".to_owned()));
        }
        if let Some(pids) = self.pids.filter(|_| controllers.contains(&"pids")) {
            files.push(("pids.max", pids.min(MOST_PIDS).to_string()));
        }
        if let Some(cpus) = self.cpus.filter(|_| controllers.contains(&"cpu")) {
            files.push(("cpu.max", format!("{:.0} {PERIOD}", cpus * PERIOD)));
        }
        files
    }
}

/// A sandbox's group. It outlives this value: whoever knows that the sandbox is over [ends](end) it.
#[derive(Debug)]
pub(crate) struct Group {
    path: PathBuf,
    ceilings: Ceilings,
    /// What of the kernel's counts was told: processes killed, and refused.
    told: [AtomicU64; 2],
}

impl Group {
    /// Makes it, empty. What fails leaves none.
    pub(super) fn make(path: PathBuf, ceilings: Ceilings, controllers: &[&str]) -> io::Result<Self> {
        fs::create_dir(&path)?;
        for (name, text) in ceilings.files(controllers) {
            match write(&path, name, &text) {
                // A kernel without swap has no limit of it.
                Err(error) if name == "memory.swap.max" && is_gone(&error) => {}
                Err(error) => {
                    let _ = remove_empty(&path);
                    return Err(error);
                }
                Ok(()) => {}
            }
        }
        Ok(Self { path, ceilings, told: [0, 0].map(AtomicU64::new) })
    }

    /// Moves a process into it. What that starts from then on is in it too.
    ///
    /// The kernel may take some ten milliseconds for the first of several in a row, unless the hierarchy is mounted with
    /// `favordynmods`; they are spent here, as those of the process's start were.
    pub(crate) fn add(&self, pid: u32) -> io::Result<()> {
        write(&self.path, PROCS, &pid.to_string())
    }

    /// Kills whatever is in it.
    pub(crate) fn kill(&self) {
        kill(&self.path);
    }

    /// Kills what is left and removes it; tells whether it is gone.
    pub(crate) fn end(&self) -> io::Result<bool> {
        end(&self.path)
    }

    /// Returns what the kernel has held it to since this was last asked.
    pub(crate) fn take_exceeded(&self) -> Vec<Exceeded> {
        let counted = [("memory.events", "oom_kill"), ("pids.events", "max")]
            .map(|(file, name)| fs::read_to_string(self.path.join(file)).map_or(0, |events| count(&events, name)));
        let news = |idx: usize| counted[idx].saturating_sub(self.told[idx].fetch_max(counted[idx], Ordering::Relaxed));
        let mut exceeded = Vec::new();
        if let (Some(limit_bytes), killed @ 1..) = (self.ceilings.memory_bytes, news(0)) {
            let killed = u32::try_from(killed).unwrap_or(u32::MAX);
            exceeded.push(Exceeded::MemoryAndDisk { limit_bytes, killed });
        }
        if let (Some(limit), 1..) = (self.ceilings.task_pids, news(1)) {
            exceeded.push(Exceeded::Pids { limit, killed: 0 });
        }
        exceeded
    }

    /// Resolves when nothing is in it any more. To be called when all that is known to be in it has ended.
    ///
    /// # Errors
    /// When that cannot be watched, as outside of a tokio runtime.
    pub(crate) async fn emptied(&self) -> io::Result<()> {
        if Runtime::try_current().is_err() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let events = match File::open(self.path.join("cgroup.events")) {
            Err(error) if is_gone(&error) => return Ok(()),
            opened => sys::watch_news(opened?.into())?,
        };
        let mut text = [0; 256];
        loop {
            let n_read = match pread(events.get_ref(), &mut text, 0).map_err(io::Error::from) {
                Err(error) if is_gone(&error) => return Ok(()),
                read => read?,
            };
            if count(&String::from_utf8_lossy(&text[..n_read]), "populated") == 0 {
                return Ok(());
            }
            // What has changed since then is told.
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }
}

/// Returns the number behind a name.
fn count(events: &str, name: &str) -> u64 {
    let mut pairs = events.lines().filter_map(|line| line.split_once(' '));
    pairs.find(|(key, _)| *key == name).and_then(|(_, number)| number.trim().parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    const ALL: &[&str] = &["memory", "pids", "cpu"];

    #[test]
    fn a_group_may_have_what_its_sandbox_is_promised() {
        let limits = Limits { memory_bytes: Some(1 << 30), pids: Some(100), cpus: Some(1.5), ..Limits::NONE };
        let spec = SandboxSpec { limits, layer_bytes: 2 << 20, tmp_bytes: 1 << 20, ..SandboxSpec::new("/guest") };
        let files = Ceilings::of(&spec, Reach::PidNamespace).files(ALL);
        let memory = ((1_u64 << 30) + (4 << 20) + OWN_BYTES).to_string();
        let expected = [
            ("memory.max", memory.as_str()),
            ("memory.swap.max", "0"),
            ("pids.max", "166"),
            ("cpu.max", "150000 100000"),
        ];
        assert_eq!(files.iter().map(|(name, text)| (*name, text.as_str())).collect::<Vec<_>>(), expected);
        let launched = Ceilings::of(&spec, Reach::Session).files(&["pids"]);
        assert_eq!(launched, [("pids.max", "294".to_owned())]);
        let least = Ceilings { cpus: Some(0.01), memory_bytes: None, pids: None, task_pids: None };
        assert_eq!(least.files(ALL), [("cpu.max", "1000 100000".to_owned())]); // less is refused by the kernel
    }

    #[test]
    fn what_is_not_limited_is_not_written() {
        let spec = SandboxSpec { limits: Limits::NONE, ..SandboxSpec::new("/guest") };
        assert_eq!(Ceilings::of(&spec, Reach::Session).files(ALL), []);
        let huge = Limits { memory_bytes: Some(u64::MAX), pids: Some(u32::MAX), ..Limits::NONE };
        let spec = SandboxSpec { limits: huge, ..SandboxSpec::new("/guest") };
        let files = Ceilings::of(&spec, Reach::Session).files(ALL);
        assert_eq!([&files[0].1, &files[2].1], [&u64::MAX.to_string(), "4194304"]);
    }

    #[test]
    fn what_the_kernel_did_is_told_once() {
        let limits = Limits { memory_bytes: Some(1 << 30), pids: Some(100), ..Limits::NONE };
        let spec = SandboxSpec { limits, layer_bytes: 2 << 20, tmp_bytes: 1 << 20, ..SandboxSpec::new("/guest") };
        let folder = tempfile::tempdir().unwrap();
        let ceilings = Ceilings::of(&spec, Reach::PidNamespace);
        let group = Group { path: folder.path().to_owned(), ceilings, told: [0, 0].map(AtomicU64::new) };
        assert_eq!(group.take_exceeded(), []);
        let happens = |killed: u32, refused: u32| {
            fs::write(folder.path().join("memory.events"), format!("oom 9\noom_kill {killed}\n")).unwrap();
            fs::write(folder.path().join("pids.events"), format!("max {refused}\n")).unwrap();
            group.take_exceeded()
        };
        let memory = |killed| Exceeded::MemoryAndDisk { limit_bytes: (1 << 30) + (4 << 20) + OWN_BYTES, killed };
        let pids = Exceeded::Pids { limit: 100, killed: 0 };
        assert_eq!(happens(2, 0), [memory(2)]);
        assert_eq!(happens(2, 0), []);
        assert_eq!(happens(3, 70), [memory(1), pids.clone()]);
        assert_eq!(happens(3, 71), [pids]);
    }

    #[test]
    fn events_are_counted_by_their_whole_names() {
        let events = "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 0\n";
        assert_eq!([count(events, "oom_kill"), count(events, "oom"), count(events, "kill")], [3, 4, 0]);
    }
}
