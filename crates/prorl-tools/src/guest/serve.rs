//! The guest's main thread: takes requests in and hands them to those who work on them.

use std::{
    collections::HashMap,
    io::Read,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::ExitCode,
    sync::Arc,
    thread,
};

use parking_lot::Mutex;
use prorl_core::frame::Decoder;

use super::{
    attach, bash, editor, exec, files,
    limits::{Room, TaskLimits},
    post::{Mail, Mailbox, Post},
    probe::Programs,
    procs, python,
    reaper::Reaper,
    tree,
};
use crate::wire::{GuestFrame, HostFrame, Op, Request};

/// What every worker needs.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) post: Post,
    pub(super) reaper: Arc<Reaper>,
    pub(super) programs: Programs,
    pub(super) room: Room,
    pub(super) terms: Terms,
    pub(super) edits: Mutex<editor::History>,
}

/// What a guest has to keep to, and what it has for itself.
#[derive(Debug, Default)]
pub struct Terms {
    /// What the programs of tasks are limited to.
    pub limits: TaskLimits,
    /// A folder for its own short files, in a file system that keeps files without a name; best one that no task can fill.
    /// Without one they are anonymous memory, which a sandbox may forbid.
    pub scratch: Option<OwnedFd>,
}

/// Serves requests from the channel until it is closed, then ends everything that was started, and returns for the program
/// to exit.
///
/// Call it once, in process 1 of a pid namespace: the end of that process ends the rest. In any other process it takes the
/// place of process 1 for what it starts (as child subreaper) and kills all of that in the end. It collects every child of
/// the process, so nothing else there may wait for children.
pub fn serve(channel: OwnedFd, programs: Programs, terms: Terms) -> ExitCode {
    let is_init = std::process::id() == 1;
    if !is_init && nix::sys::prctl::set_child_subreaper(true).is_err() {
        return ExitCode::FAILURE;
    }
    let code = run(channel, programs, terms);
    if !is_init {
        end_all();
    }
    code
}

/// Kills what is below this process until nothing is left.
fn end_all() {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    loop {
        procs::kill_below(own, 0);
        // The reaper collects; a process that was killed is gone from the list only then.
        if !procs::below(own).iter().any(|one| one.parent == own || !one.zombie) {
            return;
        }
        thread::yield_now();
    }
}

fn run(channel: OwnedFd, programs: Programs, terms: Terms) -> ExitCode {
    let channel = UnixStream::from(channel);
    let prepared =
        channel.set_nonblocking(false).and_then(|()| Ok((channel.try_clone()?, Reaper::start(terms.limits)?)));
    let Ok((mut requests, reaper)) = prepared else { return ExitCode::FAILURE };
    let room = Room::new(terms.limits);
    let shared = Arc::new(Shared { post: Post::new(channel), reaper, programs, room, terms, edits: Mutex::default() });
    let mut desk = Desk { shared: Arc::clone(&shared), bash: HashMap::new(), python: HashMap::new() };
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match requests.read(&mut buffer) {
            Ok(0) => return ExitCode::SUCCESS,
            Ok(n) => decoder.push(&buffer[..n]),
            Err(err) if err.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_gone) => return ExitCode::FAILURE,
        }
        loop {
            match decoder.pop::<HostFrame>() {
                Ok(None) => break,
                Ok(Some(HostFrame::Request(request))) => desk.hand_out(request),
                Ok(Some(HostFrame::Cancel { id })) => shared.post.cancel(id),
                Ok(Some(HostFrame::Steer { id, steer })) => shared.post.steer(id, steer),
                Ok(Some(HostFrame::Shutdown)) => return ExitCode::SUCCESS,
                Err(err) => {
                    // After one bad frame there is no telling where the next begins.
                    shared.post.send(&GuestFrame::Fatal { message: format!("host sent no frame: {err}") });
                    return ExitCode::FAILURE;
                }
            }
        }
    }
}

/// Who works on what.
struct Desk {
    shared: Arc<Shared>,
    bash: HashMap<String, Arc<Mailbox>>,
    python: HashMap<String, Arc<Mailbox>>,
}

impl Desk {
    fn hand_out(&mut self, request: Request) {
        let Request { id, timeout_ms, op } = request;
        let shared = Arc::clone(&self.shared);
        let begun = match op {
            Op::Exec(exec) => {
                alone(&shared, id, move |shared, mailbox| exec::run(shared, mailbox, id, timeout_ms, &exec))
            }
            Op::Attach(spec) => {
                alone(&shared, id, move |shared, mailbox| attach::run(shared, mailbox, id, timeout_ms, &spec))
            }
            Op::Edit(edit) => alone(&shared, id, move |shared, _| editor::run(shared, id, &edit)),
            Op::Upload(upload) => {
                alone(&shared, id, move |shared, mailbox| tree::upload(shared, mailbox, id, timeout_ms, &upload))
            }
            Op::Download(download) => {
                alone(&shared, id, move |shared, mailbox| tree::download(shared, mailbox, id, timeout_ms, &download))
            }
            Op::WriteFile(write) => alone(&shared, id, move |shared, _| files::write(shared, id, &write)),
            Op::ReadFile(read) => {
                alone(&shared, id, move |shared, mailbox| files::read(&shared.post, mailbox, id, timeout_ms, &read))
            }
            Op::Bash(call) => session(&mut self.bash, &shared, &call.session.clone(), bash::run).map(|mailbox| {
                shared.post.assign(id, &mailbox);
                mailbox.put(Mail::Request(Request { id, timeout_ms, op: Op::Bash(call) }));
            }),
            Op::Ipython(call) => {
                session(&mut self.python, &shared, &call.session.clone(), python::run).map(|mailbox| {
                    shared.post.assign(id, &mailbox);
                    mailbox.put(Mail::Request(Request { id, timeout_ms, op: Op::Ipython(call) }));
                })
            }
        };
        if let Err(err) = begun {
            self.shared.post.failed(id, format!("the sandbox cannot start another worker: {err}"));
        }
    }
}

type Worker = fn(Arc<Shared>, Arc<Mailbox>);

/// Returns the mailbox of a session, starting its thread when the name is new.
fn session(
    known: &mut HashMap<String, Arc<Mailbox>>,
    shared: &Arc<Shared>,
    name: &str,
    worker: Worker,
) -> std::io::Result<Arc<Mailbox>> {
    if let Some(mailbox) = known.get(name) {
        return Ok(Arc::clone(mailbox));
    }
    if known.len() >= MAX_SESSIONS {
        return Err(std::io::Error::other(format!("it has {MAX_SESSIONS} sessions of this kind, which is the most")));
    }
    let mailbox = Mailbox::new()?;
    let (shared, own) = (Arc::clone(shared), Arc::clone(&mailbox));
    thread::Builder::new().name("session".to_owned()).stack_size(STACK_BYTES).spawn(move || worker(shared, own))?;
    known.insert(name.to_owned(), Arc::clone(&mailbox));
    Ok(mailbox)
}

/// Works on one request in a thread of its own.
fn alone(
    shared: &Arc<Shared>,
    id: u64,
    work: impl FnOnce(&Arc<Shared>, &Mailbox) + Send + 'static,
) -> std::io::Result<()> {
    let mailbox = Mailbox::new()?;
    shared.post.assign(id, &mailbox);
    let own = Arc::clone(shared);
    thread::Builder::new().name("work".to_owned()).stack_size(STACK_BYTES).spawn(move || work(&own, &mailbox))?;
    Ok(())
}

/// Sessions of a kind. Each has a thread for as long as the guest lives, and the guest's own threads are given no more room than
/// that beside what a sandbox's processes are limited to.
const MAX_SESSIONS: usize = 24;

/// Enough for the buffers that workers keep on their stack.
const STACK_BYTES: usize = 256 * 1024;
