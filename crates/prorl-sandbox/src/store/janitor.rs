//! A thread that removes what is not needed any more, so that nobody waits for it.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;

use super::{
    StoreError,
    disk::Disk,
    hold::{self, Removal, Thing},
    remove::remove_tree_of_any,
    sweep,
};
use crate::node::Maker;

/// Starts when there is first something to do. Dropped, it finishes that, and then ends.
#[derive(Debug)]
pub(super) struct Janitor {
    at_work: Mutex<Option<(mpsc::Sender<Job>, JoinHandle<()>)>>,
    maker: Maker,
}

#[derive(Debug)]
enum Job {
    /// A thing, if nobody uses it.
    Unused(Thing),
    /// What is out of its place already.
    Aside(PathBuf),
    /// What dead processes were making or removing, and their layers.
    Unfinished,
    /// Nothing, but to say that all before is done.
    Tell(mpsc::Sender<()>),
}

impl Janitor {
    pub(super) fn new() -> Self {
        Self { at_work: Mutex::default(), maker: Maker::this() }
    }

    /// Removes a thing, unless somebody uses it.
    pub(super) fn remove_unused(&self, disk: &Arc<Disk>, thing: Thing) {
        self.ask(disk, Job::Unused(thing));
    }

    /// Removes what was set aside.
    pub(super) fn remove(&self, disk: &Arc<Disk>, aside: PathBuf) {
        self.ask(disk, Job::Aside(aside));
    }

    /// Removes what dead processes were making or removing, and layers that only they have used.
    pub(super) fn sweep(&self, disk: &Arc<Disk>) {
        self.ask(disk, Job::Unfinished);
    }

    /// Waits until all that was asked for is done.
    pub(super) fn wait(&self) {
        let told = self.at_work.lock().as_ref().map(|(jobs, _)| {
            let (tell, told) = mpsc::channel();
            let _ = jobs.send(Job::Tell(tell));
            told
        });
        if let Some(told) = told {
            let _ = told.recv();
        }
    }

    fn ask(&self, disk: &Arc<Disk>, job: Job) {
        let mut at_work = self.at_work.lock();
        if at_work.is_none() {
            let (jobs, received) = mpsc::channel();
            let disk = Arc::clone(disk);
            let work = move || received.into_iter().for_each(|job| run(&disk, &job));
            *at_work =
                thread::Builder::new().name("prorl-janitor".to_owned()).spawn(work).ok().map(|thread| (jobs, thread));
        }
        match &*at_work {
            // It ends only when this sender is dropped.
            Some((jobs, _)) => drop(jobs.send(job)),
            // Without a thread whoever asks has to wait.
            None => run(disk, &job),
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        let at_work = self.at_work.get_mut().take();
        if !self.maker.is_here() {
            std::mem::forget(at_work); // a forked process has no copy of the thread
            return;
        }
        if let Some((jobs, thread)) = at_work {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

fn run(disk: &Arc<Disk>, job: &Job) {
    let removed = match job {
        Job::Unused(thing) => remove_unused(disk, thing),
        Job::Aside(path) => remove_aside(disk, path),
        Job::Unfinished => sweep::unfinished(disk),
        Job::Tell(tell) => {
            let _ = tell.send(());
            Ok(())
        }
    };
    if let Err(error) = removed {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(store = %disk.config.dir.display(), ?job, error, "what nobody uses is left to the next collection");
    }
}

fn remove_unused(disk: &Disk, thing: &Thing) -> Result<(), StoreError> {
    match hold::set_aside(disk, thing)? {
        Removal::Aside(path) => remove_aside(disk, &path),
        Removal::InUse | Removal::Absent => Ok(()),
    }
}

/// Removes what is in the trash or was being made.
pub(super) fn remove_aside(disk: &Disk, path: &Path) -> Result<(), StoreError> {
    remove_tree_of_any(path, disk.config.guest.as_deref(), disk.config.owner)
}
