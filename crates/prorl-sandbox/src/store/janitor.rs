//! A thread that removes what is not needed any more, so that nobody waits for it.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, mpsc},
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;

use super::{
    StoreConfig, StoreError,
    disk::Disk,
    hold::{self, Removal, Thing},
    remove::remove_tree_of_any,
    sweep,
};
use crate::node::Maker;

/// Does the work of a store's folder, one thing after the other, on a thread that starts when there is first something to do.
/// Dropped, it finishes that, and then ends.
#[derive(Debug)]
pub(super) struct Worker {
    at_work: Mutex<Option<(mpsc::Sender<Job>, JoinHandle<()>)>>,
    maker: Maker,
}

/// What is to be done. It may hold the folder only if somebody waits for it who holds that too, since a worker is its folder's.
struct Job(Box<dyn FnOnce() + Send>);

impl Worker {
    pub(super) fn new() -> Self {
        Self { at_work: Mutex::default(), maker: Maker::this() }
    }

    /// Does something later.
    pub(super) fn ask(&self, work: impl FnOnce() + Send + 'static) {
        let job = Job(Box::new(work));
        let mut at_work = self.at_work.lock();
        if at_work.is_none() {
            let (jobs, received) = mpsc::channel::<Job>();
            let work = move || received.into_iter().for_each(|job| (job.0)());
            *at_work =
                thread::Builder::new().name("prorl-janitor".to_owned()).spawn(work).ok().map(|thread| (jobs, thread));
        }
        let undone = match &*at_work {
            // It ends only when this sender is dropped.
            Some((jobs, _)) => jobs.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        drop(at_work);
        // Without a thread whoever asks has to wait.
        if let Some(job) = undone {
            (job.0)();
        }
    }

    /// Removes what is out of its place already, later.
    pub(super) fn remove(&self, config: &StoreConfig, aside: PathBuf) {
        let (guest, owner, dir) = (config.guest.clone(), config.owner, config.dir.clone());
        self.ask(move || warn(&dir, &aside, remove_tree_of_any(&aside, guest.as_deref(), owner)));
    }

    /// Waits until all that was asked for is done.
    fn wait(&self) {
        let told = self.at_work.lock().as_ref().map(|(jobs, _)| {
            let (tell, told) = mpsc::channel();
            let _ = jobs.send(Job(Box::new(move || {
                let _ = tell.send(());
            })));
            told
        });
        if let Some(told) = told {
            let _ = told.recv();
        }
    }
}

impl Drop for Worker {
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

/// Gives a store's worker its work. Dropped, it waits until that is done.
#[derive(Debug)]
pub(super) struct Janitor {
    /// Known from the first work on.
    worker: OnceLock<Arc<Worker>>,
    maker: Maker,
}

impl Janitor {
    pub(super) fn new() -> Self {
        Self { worker: OnceLock::new(), maker: Maker::this() }
    }

    /// Removes a thing, unless somebody uses it.
    pub(super) fn remove_unused(&self, disk: &Arc<Disk>, thing: Thing) {
        self.ask(disk, move |disk| warn(&disk.config.dir, &thing.place(disk), remove_unused(disk, &thing)));
    }

    /// Removes what was set aside.
    pub(super) fn remove(&self, disk: &Arc<Disk>, aside: PathBuf) {
        self.worker(disk).remove(&disk.config, aside);
    }

    /// Removes what dead processes were making or removing, and layers that only they have used.
    pub(super) fn sweep(&self, disk: &Arc<Disk>) {
        self.ask(disk, sweep::unfinished);
    }

    /// Waits until all that was asked for is done, by whomever.
    pub(super) fn wait(&self, disk: &Disk) {
        self.worker(disk).wait();
    }

    fn worker(&self, disk: &Disk) -> &Worker {
        self.worker.get_or_init(|| Arc::clone(&disk.worker))
    }

    fn ask(&self, disk: &Arc<Disk>, work: impl FnOnce(&Disk) + Send + 'static) {
        let held = Arc::clone(disk);
        self.worker(disk).ask(move || work(&held));
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // So that no work holds the disk when the store lets go of it: the last to do so must not be the worker's own thread.
        if let Some(worker) = self.worker.get().filter(|_| self.maker.is_here()) {
            worker.wait();
        }
    }
}

fn warn(store: &Path, path: &Path, removed: Result<(), StoreError>) {
    if let Err(error) = removed {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(store = %store.display(), path = %path.display(), error, "what nobody uses is left to the next collection");
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
