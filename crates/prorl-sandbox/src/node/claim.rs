//! A sandbox's place in its node: its name, its folder, its record.

use std::{
    io,
    path::PathBuf,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use super::{
    Node, folder,
    process::{self, Handle, Maker, Process},
    record::{self, Event, Reach, Record, Standing},
    sweep,
};
use crate::cgroup::{Ceilings, Group};

/// One sandbox's place in its node, from before its first process until nothing is left of it.
///
/// [`settle`](Self::settle) ends it when the sandbox is known to be gone. Dropped without that, it is handed to the node's
/// keeper, which waits for the sandbox's own end, kills what does not end, and then removes its files.
#[derive(Debug)]
pub(crate) struct Claim {
    node: Node,
    id: String,
    record: Mutex<Record>,
    run_dir: Mutex<Option<PathBuf>>,
    group: OnceLock<Group>,
    is_settled: AtomicBool,
    maker: Maker,
}

impl Claim {
    pub(super) fn new(node: Node, runtime: &str) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);

        let id = format!("{runtime}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        record::create(&folder::record(node.folder(), &id), &Event::Claimed { runtime: runtime.to_owned() })?;
        let (record, run_dir) = (Mutex::new(Record::default()), Mutex::new(None));
        let (group, is_settled) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Self { node, id, record, run_dir, group, is_settled, maker: Maker::this() })
    }

    /// Returns the sandbox's name: the runtime's, this process's number and a count.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the sandbox's own folder, made on first use. A sandbox user may pass through it but not list or write it.
    pub(crate) fn run_dir(&self) -> io::Result<PathBuf> {
        let mut made = self.run_dir.lock();
        if let Some(path) = &*made {
            return Ok(path.clone());
        }
        let path = self.node.folder().join(folder::RUN).join(&self.id);
        folder::make(&path, folder::open_mode())?;
        Ok(made.insert(path).clone())
    }

    /// Returns the sandbox's own folder if it has been made.
    pub(crate) fn made_run_dir(&self) -> Option<PathBuf> {
        self.run_dir.lock().clone()
    }

    /// Makes the sandbox's control group, if the node has such. To be called before there is a process.
    pub(crate) fn limit(&self, ceilings: &Ceilings) -> io::Result<()> {
        let Some(path) = self.node.groups().path_of(&self.id) else { return Ok(()) };
        // Written down first, or nobody would know of it.
        self.note(Event::Grouped { path: path.clone().into() })?;
        let group = self.node.groups().make(path, ceilings)?;
        let _ = self.group.set(group); // there is one start of each sandbox
        Ok(())
    }

    /// Returns the sandbox's control group, if it has one.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.group.get()
    }

    /// Writes down the outer process and moves it into the sandbox's control group: an unreaped child of this one. To be called before the process is told what to do: one
    /// that is not written down yet must be one that ends by itself when this process is killed.
    pub(crate) fn spawned(&self, outer_pid: u32, reach: Reach) -> io::Result<()> {
        let outer = Process::of(outer_pid)?.ok_or(io::Error::from_raw_os_error(libc::ESRCH))?;
        self.note(Event::Spawned { outer, reach })?;
        self.group().map_or(Ok(()), |group| group.add(outer_pid))
    }

    /// Writes down what came with the hello, while both the outer process and process 1 are known to be there.
    pub(crate) fn stands(&self, inner: Process, user_namespaces: Vec<u64>) -> io::Result<()> {
        self.note(Event::Stands(Standing { inner, at: process::now()?, user_namespaces }))
    }

    fn note(&self, event: Event) -> io::Result<()> {
        let mut record = self.record.lock();
        record::extend(&folder::record(self.node.folder(), &self.id), &event)?;
        record.apply(event);
        Ok(())
    }

    /// Kills whatever is proven to be left of the sandbox; returns handles of what was killed. Blocks for a look at `/proc`
    /// at most.
    pub(crate) fn kill_rest(&self) -> io::Result<Vec<Handle>> {
        let record = self.record.lock().clone();
        sweep::kill(&record)
    }

    /// Tells whether it was settled.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Relaxed)
    }

    /// Removes the sandbox's control group, folder and record, once nothing of it runs any more. Once is enough.
    pub(crate) fn settle(&self) {
        if self.is_settled.swap(true, Ordering::Relaxed) {
            return;
        }
        self.node.freed();
        let group = self.group().map_or(Ok(true), Group::end);
        let group = group.and_then(|is_gone| if is_gone { Ok(()) } else { Err(io::ErrorKind::ResourceBusy.into()) });
        if let Err(error) = group.and_then(|()| folder::remove_box(self.node.folder(), &self.id)) {
            tracing::warn!(id = self.id, %error, "files of a sandbox were left to the node's keeper");
            self.node.hand_over(&self.id);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_settled() || !self.maker.is_here() {
            return;
        }
        if self.record.get_mut().spawned.is_none() {
            self.settle(); // no process was ever written down
        } else {
            self.node.freed(); // or soon
            self.node.hand_over(&self.id);
        }
    }
}
