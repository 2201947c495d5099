//! What commands leave running.

use std::{fs::File, os::unix::fs::FileExt as _};

use super::procs;
use crate::wire::Background;

/// Processes told of at once.
const MOST_TOLD: usize = 8;

/// Knows which processes of a shell have been told of.
#[derive(Debug)]
pub(super) struct Left {
    /// Lists of children: the shell's own; and the guest's, to which orphans come.
    lists: [Option<File>; 2],
    known: Vec<i32>,
}

impl Left {
    /// Watches the children of this shell.
    pub(super) fn of(shell: i32) -> Self {
        let own = std::process::id().cast_signed();
        let lists = [shell, own].map(|pid| File::open(format!("/proc/{pid}/task/{pid}/children")).ok());
        Self { lists, known: Vec::new() }
    }

    /// Returns what is new: children of the shell, and orphans that started at `since` or later, in clock ticks since the machine
    /// started. An orphan may be another session's, which nothing tells.
    pub(super) fn fresh(&mut self, since: u64) -> Vec<Background> {
        let [children, orphans] = self.lists.each_ref().map(|list| list.as_ref().map(pids).unwrap_or_default());
        self.known.retain(|pid| children.contains(pid) || orphans.contains(pid));
        let mut fresh = Vec::new();
        for (pid, is_child) in children.iter().map(|pid| (*pid, true)).chain(orphans.iter().map(|pid| (*pid, false))) {
            if self.known.contains(&pid) {
                continue;
            }
            let Some(entry) = procs::entry(pid) else { continue };
            if !entry.zombie && (is_child || entry.started >= since) {
                if fresh.len() < MOST_TOLD
                    && let Some(name) = procs::name(pid)
                {
                    fresh.push(Background { pid, name });
                }
                self.known.push(pid);
            }
        }
        fresh
    }
}

/// Reads a list of processes, as many as fit in a page.
fn pids(list: &File) -> Vec<i32> {
    let mut buffer = [0; 4096];
    let n = list.read_at(&mut buffer, 0).unwrap_or(0);
    std::str::from_utf8(&buffer[..n])
        .unwrap_or_default()
        // A number at the end may be cut.
        .split_inclusive(' ')
        .filter_map(|pid| pid.strip_suffix(' ')?.parse().ok())
        .collect()
}
