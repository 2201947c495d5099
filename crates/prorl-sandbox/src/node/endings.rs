//! Sees several recorded sandboxes to their end at once: waits for what ends by itself, kills the rest, removes the files.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    folder,
    process::{Handle, TICKS_PER_SECOND, now},
    record::Record,
    sweep,
};
use crate::cgroup;

/// How long a process may take to be gone once it is killed, in clock ticks. One in the middle of a slow disk's answer
/// takes its time.
const REAP: u64 = 30 * TICKS_PER_SECOND;

/// How long a process may take to be gone that cannot be killed for want of a proof, in clock ticks.
const UNPROVEN: u64 = 2 * TICKS_PER_SECOND;

/// How soon a thing is tried again that failed for want of something, such as open files, in milliseconds.
const RETRY_MS: u64 = 100;

/// Sandboxes that are ending.
#[derive(Debug)]
pub(crate) struct Endings {
    instance: PathBuf,
    /// Clock ticks that a sandbox has to end by itself.
    patience: u64,
    cases: Vec<Case>,
    n_left: usize,
}

#[derive(Debug)]
struct Case {
    id: String,
    record: Record,
    stage: Stage,
    /// When it is killed, and then when it is given up.
    until: u64,
}

#[derive(Debug)]
enum Stage {
    /// Nothing was done yet.
    Fresh,
    /// Its outer process was seen, and has a ladder of its own.
    Ending(Handle),
    /// It has been killed, as far as it was found.
    Killed(Vec<Handle>),
}

impl Endings {
    /// Sandboxes of this instance, which have `patience`, in whole seconds, to end by themselves.
    pub(crate) fn new(instance: PathBuf, patience: Duration) -> Self {
        let patience = patience.as_secs() * TICKS_PER_SECOND;
        Self { instance, patience, cases: Vec::new(), n_left: 0 }
    }

    /// Takes in a sandbox by its id. Once is enough.
    pub(crate) fn add(&mut self, id: String) {
        let is_name = !id.is_empty() && !id.contains('/') && id != "." && id != "..";
        if !is_name || self.cases.iter().any(|case| case.id == id) {
            return;
        }
        // A record that is gone has been settled.
        if let Ok(record) = Record::read(&folder::record(&self.instance, &id)) {
            let until = time().saturating_add(self.patience);
            self.cases.push(Case { id, record, stage: Stage::Fresh, until });
        }
    }

    /// Takes in every sandbox that has a record.
    pub(crate) fn add_all(&mut self) -> io::Result<()> {
        for id in folder::boxes(&self.instance)? {
            self.add(id);
        }
        Ok(())
    }

    /// Tells whether no sandbox is left to wait for.
    pub(crate) fn is_empty(&self) -> bool {
        self.cases.is_empty()
    }

    /// Returns how many were given up: something of them survives a kill. They keep their files.
    pub(crate) fn n_left(&self) -> usize {
        self.n_left
    }

    /// Does what can be done without waiting.
    pub(crate) fn advance(&mut self) {
        let Self { instance, cases, n_left, .. } = self;
        cases.retain_mut(|case| match case.advance().and_then(|is_over| Ok(is_over && case.leave_group()?)) {
            // A failed attempt is repeated, until its time is over.
            Ok(false) | Err(_) if time() < case.until => true,
            Err(_) | Ok(false) => {
                *n_left += 1;
                false
            }
            Ok(true) => {
                *n_left += usize::from(folder::remove_box(instance, &case.id).is_err());
                false
            }
        });
    }

    /// Waits until there may be something to do, or one of `others` has something to tell, and returns whether which has.
    pub(crate) fn wait<const N: usize>(&self, others: [BorrowedFd<'_>; N]) -> [bool; N] {
        let mut fds: Vec<_> = others.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let mut limit = None::<u64>;
        let now = time();
        for case in &self.cases {
            let handles = match &case.stage {
                Stage::Fresh => &[][..],
                Stage::Ending(outer) => std::slice::from_ref(outer),
                Stage::Killed(left) => left,
            };
            fds.extend(handles.iter().map(|handle| PollFd::new(handle.as_fd(), PollFlags::POLLIN)));
            let ms = case.until.saturating_sub(now).saturating_mul(1000 / TICKS_PER_SECOND);
            // What has nothing to wait for has failed, and is tried again.
            let ms = if handles.is_empty() { ms.min(RETRY_MS) } else { ms };
            limit = Some(limit.map_or(ms, |limit| limit.min(ms)));
        }
        let limit = limit.map_or(PollTimeout::NONE, |ms| PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX));
        // Interrupted or refused, it is as if the time were over.
        let told = poll(&mut fds, limit).is_ok();
        std::array::from_fn(|idx| told && fds[idx].any().unwrap_or(true))
    }
}

impl Case {
    /// Removes the control group of a sandbox of which nothing runs any more; tells whether it is gone.
    fn leave_group(&self) -> io::Result<bool> {
        self.record.group.as_deref().map_or(Ok(true), cgroup::end)
    }

    /// Goes on as far as possible; tells whether nothing of the sandbox runs any more.
    fn advance(&mut self) -> io::Result<bool> {
        loop {
            match &mut self.stage {
                Stage::Fresh => {
                    let Some((outer, _)) = self.record.spawned else { return Ok(true) };
                    if let Some(outer) = outer.watch()? {
                        self.stage = Stage::Ending(outer);
                        continue;
                    }
                }
                Stage::Ending(outer) => {
                    if !outer.has_ended() && time() < self.until {
                        return Ok(false);
                    }
                }
                Stage::Killed(left) => {
                    left.retain(|handle| !handle.has_ended());
                    if !left.is_empty() {
                        return Ok(false);
                    }
                }
            }
            if !matches!(self.stage, Stage::Killed(_)) {
                self.stage = Stage::Killed(Vec::new());
                self.until = time().saturating_add(REAP);
            }
            // Again and again until none is found: one that forks may have been missed.
            let left = sweep::kill(&self.record).inspect_err(|error| {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    self.until = self.until.min(time().saturating_add(UNPROVEN));
                }
            })?;
            if left.is_empty() {
                return Ok(true);
            }
            self.stage = Stage::Killed(left);
        }
    }
}

/// The time, or the end of all patience where there is none.
fn time() -> u64 {
    now().unwrap_or(u64::MAX)
}
