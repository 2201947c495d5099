//! What an idle sandbox costs in memory.

use std::{fs, io};

use serde::Serialize;

use super::machine::kibibytes;

/// Memory of one sandbox's processes: the outermost, which is our child, and everything below it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Memory {
    /// How many processes there are.
    processes: usize,
    /// Each page divided by the number of processes that share it. `None` where this user may not look: the guest hides its
    /// memory from everyone but root.
    pub(super) pss_bytes: Option<u64>,
    /// Pages that no other process has.
    private_bytes: Option<u64>,
    /// Pages that are no file's. Anybody may look; those that processes share are counted once in each.
    rss_anon_bytes: u64,
}

impl Memory {
    /// Looks at a sandbox by its outermost process.
    pub(super) fn of(outer_pid: u32) -> io::Result<Self> {
        let mut sum = Self { pss_bytes: Some(0), private_bytes: Some(0), ..Self::default() };
        let mut waiting = vec![outer_pid];
        while let Some(pid) = waiting.pop() {
            waiting.extend(children(pid)?);
            sum.processes += 1;
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            sum.rss_anon_bytes += kibibytes(&status, "RssAnon").unwrap_or(0);
            let pages = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            let bytes = |name| kibibytes(&pages, name);
            let private = bytes("Private_Clean").zip(bytes("Private_Dirty")).map(|(clean, dirty)| clean + dirty);
            sum.pss_bytes = sum.pss_bytes.zip(bytes("Pss")).map(|(sum, more)| sum + more);
            sum.private_bytes = sum.private_bytes.zip(private).map(|(sum, more)| sum + more);
        }
        Ok(sum)
    }

    /// Returns the mean of several sandboxes.
    pub(super) fn mean(all: &[Self]) -> Option<Self> {
        let n = u64::try_from(all.len()).ok().filter(|n| *n > 0)?;
        let over = |pick: fn(&Self) -> Option<u64>| all.iter().map(pick).sum::<Option<u64>>().map(|sum| sum / n);
        Some(Self {
            processes: all.iter().map(|memory| memory.processes).max()?,
            pss_bytes: over(|memory| memory.pss_bytes),
            private_bytes: over(|memory| memory.private_bytes),
            rss_anon_bytes: over(|memory| Some(memory.rss_anon_bytes))?,
        })
    }
}

/// Children of every thread of a process.
pub(super) fn children(pid: u32) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let list = fs::read_to_string(thread?.path().join("children"))?;
        found.extend(list.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_hides_nothing_is_measured_whole() {
        // Not this process: other tests beside this one may just be starting programs that hide.
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let measured = Memory::of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let memory = measured.unwrap();
        let private = memory.private_bytes.unwrap();
        assert!(memory.pss_bytes.unwrap() >= private && private > 0, "{memory:?}");
        assert!(memory.processes >= 1 && memory.rss_anon_bytes > 0, "{memory:?}");
    }

    #[test]
    fn a_mean_of_what_is_not_known_is_not_known() {
        let known = Memory { processes: 2, pss_bytes: Some(10), private_bytes: Some(4), rss_anon_bytes: 6 };
        let hidden = Memory { pss_bytes: None, ..known };
        let mean = Memory::mean(&[known, hidden]).unwrap();
        assert_eq!((mean.pss_bytes, mean.private_bytes, mean.rss_anon_bytes), (None, Some(4), 6));
        assert!(Memory::mean(&[]).is_none());
    }
}
