//! The guest's side: how a fresh process makes its own sandbox and becomes process 1 in it.
//!
//! A launcher such as Apptainer brings no more than an image: the guest is started as the launcher's *owner* ([`launch`]), and
//! once more inside the image, where it makes the same sandbox as ever.
//!
//! Two processes stay. The *outer* one waits outside the new pid namespace: when its channel to the host closes, or the
//! sandbox's life is over, it kills the *inner* one, which is process 1 inside; when the inner one ends, the kernel has
//! emptied the namespace, and the outer one ends too. Should the outer one be killed, the kernel kills the inner one.
//!
//! ```no_run
//! use prorl_sandbox::{init, setup::Order};
//!
//! let channel = init::channel()?;
//! let entered = match init::read_order(&channel) {
//!     Ok(Order::Enter(setup)) => init::enter(&channel, &setup),
//!     _ => return Ok(()), // the other roles of the program
//! };
//! // Here runs process 1 of the sandbox, or whichever process failed.
//! # Ok::<(), std::io::Error>(())
//! ```

mod binds;
mod calls;
mod clock;
mod confine;
mod etc;
mod folders;
mod freeze;
mod ipc;
mod launch;
mod lower;
mod made;
mod own;
mod proc;
mod remove;
mod rlimits;
mod root;
mod seccomp;
mod stack;
mod users;
mod words;

pub use freeze::freeze;
pub use launch::launch;
pub use own::own;
pub use remove::remove;

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::MetadataExt, net::UnixStream},
    },
    process,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, CpuSet, sched_setaffinity, unshare},
    sys::{
        prctl::{set_dumpable, set_name, set_pdeathsig},
        signal::Signal,
        stat::{Mode, umask},
        wait::waitpid,
    },
    unistd::{Gid, Pid, Uid, chdir, geteuid, pipe2, setgroups, setresgid, setresuid, setsid},
};
use prorl_core::{
    frame,
    hello::{FakeRoot, Greeting, PROTOCOL, StartFailure},
};
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

use self::clock::Clock;
use crate::{
    Network, SandboxUser, parcel,
    setup::{Answer, Chore, Counted, Image, LAUNCHED_MARK, Launch, Order, Own, Setup, Walls, step},
    sys::{self, Fork},
};

/// How long process 1 may take to end everything by itself after the channel has closed, in milliseconds.
const GRACE_MS: u16 = 200;

/// Others may read what a sandbox makes, and not write it.
const PLAIN_UMASK: Mode = Mode::S_IWGRP.union(Mode::S_IWOTH);

/// What process 1 knows of its sandbox.
#[derive(Debug)]
pub struct Facts {
    /// Inode number of the pid namespace.
    pub pid_namespace: u64,
    /// Inode number of the user namespace.
    pub user_namespace: u64,
    /// Inode number of the user namespace that a launcher made around this one, or of this one if it made no other.
    pub launcher_namespace: Option<u64>,
    /// Effective user id inside.
    pub uid: u32,
    /// What a fake root got; nothing where none was asked for.
    pub fakeroot: Option<FakeRoot>,
    /// What the host gets to see it by: its `/proc`, its writable layer and its `/tmp`; then the socket that it is to listen at,
    /// if there is to be one; then what the sandbox can be frozen by, if it can: its writable layer and its user namespace.
    pub shown: Vec<OwnedFd>,
    /// What the kernel is to hold the programs of tasks to. There is no number of processes where it cannot count those of one
    /// sandbox alone.
    pub walls: Walls,
    /// A folder of memory that nobody else can reach, for the guest's own short files.
    pub scratch: OwnedFd,
}

/// Asks the kernel for what is below a folder until it has an answer: it cannot tell where `..` leads while anything is renamed or
/// mounted anywhere, and says so.
fn patiently<T>(ask: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match ask() {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            answer => return answer,
        }
    }
}

/// Takes the channel from standard input, where the host has put it, and puts `/dev/null` there.
///
/// # Errors
/// When a descriptor cannot be copied or `/dev/null` opened.
pub fn channel() -> io::Result<OwnedFd> {
    let channel = io::stdin().as_fd().try_clone_to_owned()?; // close-on-exec, as everything that std opens
    nix::unistd::dup2_stdin(fs::File::open("/dev/null")?)?;
    Ok(channel)
}

/// Answers to the owner of the launcher that started this guest: from now on it is not the launcher that fails. What the
/// launcher has left of its standard error is closed.
///
/// # Errors
/// When the owner is gone.
pub fn announce() -> io::Result<()> {
    io::stdout().write_all(&[LAUNCHED_MARK])?;
    io::stdout().flush()?;
    Ok(nix::unistd::dup2_stderr(fs::File::options().write(true).open("/dev/null")?)?)
}

/// Reads what the host wants this process to be.
///
/// # Errors
/// When the channel ends early or carries something else.
pub fn read_order(channel: &OwnedFd) -> Result<Order, StartFailure> {
    let refused = |why: String| StartFailure { step: step::READ_SETUP.to_owned(), target: why, errno: 0 };
    let mut stream = stream(channel).map_err(|error| refused(error.to_string()))?;
    let mut header = [0; frame::HEADER_BYTES];
    stream.read_exact(&mut header).map_err(|error| refused(error.to_string()))?;
    let len = frame::body_len(header).map_err(|error| refused(error.to_string()))?;
    let mut body = vec![0; len];
    stream.read_exact(&mut body).map_err(|error| refused(error.to_string()))?;
    let order: Order = frame::decode(&body).map_err(|error| refused(error.to_string()))?;
    match &order {
        Order::Enter(Setup { protocol, .. })
        | Order::Launch(Launch { protocol, .. })
        | Order::Own(Own { protocol, .. })
        | Order::Freeze(Chore { protocol, .. })
        | Order::Remove(Chore { protocol, .. })
            if *protocol != PROTOCOL =>
        {
            Err(refused(format!("protocol {protocol} of the host is not {PROTOCOL}")))
        }
        _ => Ok(order),
    }
}

/// Sends the first frame to the host, and with it copies of `files`.
///
/// # Errors
/// When the host is gone, or when no more files can be on their way between processes, which it is told instead.
pub fn greet(channel: &OwnedFd, greeting: &Greeting, files: &[OwnedFd]) -> io::Result<()> {
    let bytes = frame::encode(greeting).map_err(io::Error::other)?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    match parcel::send(channel, &bytes, &files) {
        Ok(n_sent) => stream(channel)?.write_all(&bytes[n_sent..]),
        Err(error) if files.is_empty() => Err(error),
        Err(error) => {
            // Nothing has been sent: what holds the files back lets a word through.
            let errno = error.raw_os_error().unwrap_or_default();
            let (step, target) = ("send open files".to_owned(), String::new());
            greet(channel, &Greeting::Failed(StartFailure { step, target, errno }), &[])?;
            Err(error)
        }
    }
}

/// Tells the host what became of a chore.
///
/// # Errors
/// When the host is gone.
pub fn answer(channel: &OwnedFd, done: Result<Counted, StartFailure>) -> io::Result<()> {
    let answer = done.map_or_else(Answer::Failed, Answer::Done);
    let bytes = frame::encode(&answer).map_err(io::Error::other)?;
    stream(channel)?.write_all(&bytes)
}

fn stream(channel: &OwnedFd) -> io::Result<UnixStream> {
    Ok(UnixStream::from(channel.try_clone()?))
}

/// Makes the sandbox and enters it. Returns in process 1 of the new pid namespace, which holds no capability, cannot gain
/// one, and is not dumpable; the calling process stays outside, watches, and never returns.
///
/// The calling process must have one thread. Every file descriptor but the standard ones and `channel` is closed.
///
/// # Errors
/// The step that failed, in whichever process it failed; that process should tell the host and end.
pub fn enter(channel: &OwnedFd, setup: &Setup) -> Result<Facts, StartFailure> {
    sys::close_all_but(channel.as_fd()).at("close descriptors", "")?;
    // A program executed from memory is called by its descriptor's number otherwise.
    set_name(c"prorl-guest").at("set name", "")?;
    // The host's own would get into the modes of the folders and files that are made here.
    umask(PLAIN_UMASK);
    rlimits::forbid_cores().at("limit core dumps", "")?;
    rlimits::offer_first().at("be the first to end", "")?;
    let outside = etc::Outside::read(setup);
    if let Some(user) = setup.become_user {
        become_user(user)?;
    }
    let is_launched = setup.image == Image::Root;
    let launcher_namespace = if is_launched { Some(launcher_namespace(setup)?) } else { None };
    let fakeroot = make_namespaces(setup)?;
    if let (Some(layer), Some(FakeRoot::Single { missing })) = (&setup.needs_range, &fakeroot) {
        let why = format!("layer {layer} holds files of a fake root's other ids, and this one has one id: {missing}");
        return Err(StartFailure { step: step::LAYER_IDS.to_owned(), target: why, errno: 0 });
    }
    // That the parent keeps the writing end of a pipe is how the child knows that the parent lives: a parent-death signal
    // asked for too late never comes.
    let (alive_in, alive_out) = pipe2(OFlag::O_CLOEXEC).at("make pipe", "")?;
    match sys::fork().at("fork process 1", "")? {
        Fork::Parent(inner) => {
            drop(alive_in);
            watch(channel, inner, alive_out, setup.max_life, is_launched)
        }
        Fork::Child => {
            drop(alive_out);
            let Inside { shown, scratch, ipc_is_limited } = inside(&alive_in, setup, &outside)?;
            let walls = rlimits::limit(&setup.walls)?;
            let facts = Facts {
                pid_namespace: inode("/proc/self/ns/pid")?,
                user_namespace: inode("/proc/self/ns/user")?,
                launcher_namespace,
                uid: geteuid().as_raw(),
                fakeroot,
                shown,
                walls,
                scratch,
            };
            confine::confine(setup, facts.fakeroot.as_ref(), ipc_is_limited)?;
            Ok(facts)
        }
    }
}

/// Returns the user namespace that a launcher has made around this process.
///
/// One that made none, as a wrapper around it may have it, has not made a root file system either; and whoever took that
/// namespace for the sandbox's would take every process of the user for one of the sandbox.
fn launcher_namespace(setup: &Setup) -> Result<u64, StartFailure> {
    let own = inode("/proc/self/ns/user")?;
    if setup.outer_namespace.is_none_or(|outer| outer == own) {
        return Err(StartFailure { step: step::LAUNCHED.to_owned(), target: String::new(), errno: 0 });
    }
    Ok(own)
}

/// Gives up root for good, before anything is made.
fn become_user(user: SandboxUser) -> Result<(), StartFailure> {
    let name = format!("{}:{}", user.uid, user.gid);
    if user.uid == 0 || user.gid == 0 {
        return Err(Errno::EPERM).at(step::BECOME_USER, &name);
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    setgroups(&[]).at(step::BECOME_USER, &name)?;
    setresgid(gid, gid, gid).at(step::BECOME_USER, &name)?;
    setresuid(uid, uid, uid).at(step::BECOME_USER, &name)?;
    // A process that changed its user is not dumpable, and then its /proc/self/uid_map belongs to root.
    set_dumpable(true).at(step::BECOME_USER, &name)
}

/// Makes every namespace. Returns what a fake root got.
fn make_namespaces(setup: &Setup) -> Result<Option<FakeRoot>, StartFailure> {
    let mut kinds = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    if setup.network == Network::None {
        kinds |= CloneFlags::CLONE_NEWNET;
    }
    // A launcher's user namespace in which this process is root: the owner has seen to it that outside it is not.
    let is_root_inside = setup.image == Image::Root && geteuid().is_root();
    let no_range = setup.no_range.as_deref();
    if is_root_inside && setup.fakeroot && no_range.is_none() {
        // It has the range of ids already that a fake root is to have.
        unshare(kinds).at(step::NAMESPACES, "")?;
        return Ok(Some(users::current("the launcher's user namespace has one id")));
    }
    let users = if is_root_inside {
        users::Users::plan_again(setup.fakeroot, no_range)?
    } else {
        users::Users::plan(setup.fakeroot, no_range)?
    };
    unshare(kinds | CloneFlags::CLONE_NEWUSER).at(step::NAMESPACES, "")?;
    users.map()
}

/// The outer process: waits for the end of process 1, of the channel, of a launcher's owner or of the sandbox's life, and
/// leaves nothing.
fn watch(channel: &OwnedFd, inner: Pid, alive_out: OwnedFd, max_life: Duration, is_launched: bool) -> ! {
    // Without a handle there is no way to wait for both ends; ending here kills the child.
    let handle = rustix::process::Pid::from_raw(inner.as_raw()).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(handle)) = handle else { process::exit(1) };
    let _ = set_dumpable(false);
    let _ = confine::drop_capabilities(false);
    let _ = chdir("/");
    let life = Clock::start(max_life);
    let owner = io::stdout();
    loop {
        // No event is asked for on the channel: its bytes are process 1's; its end is always told.
        let mut fds =
            vec![PollFd::new(handle.as_fd(), PollFlags::POLLIN), PollFd::new(channel.as_fd(), PollFlags::empty())];
        if is_launched {
            fds.push(PollFd::new(owner.as_fd(), PollFlags::empty())); // a pipe that the owner reads
        }
        match poll(&mut fds, life.left()) {
            Err(Errno::EINTR) => continue,
            Ok(0) if !life.is_over() => continue,
            Ok(1..) if !ended(&fds[0]) => {
                // The host is gone or has hung up, and process 1 sees the same end. It gets a moment to end in order.
                let _ = poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], GRACE_MS);
            }
            Ok(_) | Err(_) => {}
        }
        break;
    }
    let _ = pidfd_send_signal(&handle, rustix::process::Signal::KILL);
    // Process 1 can be waited for only when every process in its namespace is gone.
    while waitpid(inner, None) == Err(Errno::EINTR) {}
    drop(alive_out);
    process::exit(0)
}

fn ended(fd: &PollFd<'_>) -> bool {
    fd.revents().is_some_and(|events| events.contains(PollFlags::POLLIN))
}

/// What the inner process has when its sandbox stands around it.
struct Inside {
    /// What the host is shown.
    shown: Vec<OwnedFd>,
    scratch: OwnedFd,
    ipc_is_limited: bool,
}

/// The inner process, up to the point where it is confined.
fn inside(alive_in: &OwnedFd, setup: &Setup, outside: &etc::Outside) -> Result<Inside, StartFailure> {
    set_pdeathsig(Signal::SIGKILL).at("ask for the parent's death signal", "")?;
    let mut fds = [PollFd::new(alive_in.as_fd(), PollFlags::empty())];
    if poll(&mut fds, PollTimeout::ZERO) != Ok(0) {
        process::exit(1); // the outer process died before the death signal was asked for
    }
    setsid().at("leave the terminal", "")?;
    // Whatever it stands for is the outer process's: the lease of an address, or the line to an owner.
    let null = fs::File::options().write(true).open("/dev/null").at("open", "/dev/null")?;
    nix::unistd::dup2_stdout(null).at("let go of standard output", "")?;
    sys::reset_signals().at("reset signals", "")?;
    let root::Built { layer, kept, scratch, ipc_is_limited } = root::build(setup, outside)?;
    let open = |path: &str| Ok(OwnedFd::from(fs::File::open(path).at("open", path)?));
    let mut shown = vec![open("/proc")?, layer, open("/tmp")?];
    if setup.network == Network::None {
        sys::up_loopback().at("bring loopback up", "lo")?;
    }
    if let Some(port) = setup.proxy_port {
        shown.push(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).at("listen", "lo")?.into());
    }
    if let Some(layer) = kept {
        shown.extend([layer, open("/proc/self/ns/user")?]);
    }
    nix::unistd::sethostname(&setup.hostname).at("set host name", &setup.hostname)?;
    // Late, as the way here is shorter where there is most room.
    run_on(&setup.walls.cpus).at("choose processors", "")?;
    Ok(Inside { shown, scratch, ipc_is_limited })
}

/// Keeps this process, and what it will start, on these processors; none are all.
fn run_on(cpus: &[u32]) -> Result<(), Errno> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(usize::try_from(*cpu).map_err(|_too_large| Errno::EINVAL)?)?;
    }
    sched_setaffinity(Pid::from_raw(0), &set)
}

fn inode(path: &str) -> Result<u64, StartFailure> {
    Ok(fs::metadata(path).at("read namespace", path)?.ino())
}

/// Names the step that an error belongs to.
trait At<T> {
    fn at(self, step: &str, target: &str) -> Result<T, StartFailure>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, step: &str, target: &str) -> Result<T, StartFailure> {
        self.map_err(|error| StartFailure {
            step: step.to_owned(),
            target: target.to_owned(),
            errno: error.into().raw_os_error().unwrap_or_default(),
        })
    }
}
