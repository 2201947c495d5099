//! The guest's side: how a fresh process makes its own sandbox and becomes process 1 in it.
//!
//! Two processes stay. The *outer* one waits outside the new pid namespace: when its channel to the host closes, or the
//! sandbox's life is over, it kills the *inner* one, which is process 1 inside; when the inner one ends, the kernel has
//! emptied the namespace, and the outer one ends too. Should the outer one be killed, the kernel kills the inner one.
//!
//! ```no_run
//! use prorl_sandbox::init;
//!
//! let channel = init::channel()?;
//! let entered = init::read_setup(&channel).and_then(|setup| init::enter(&channel, &setup));
//! // Here runs process 1 of the sandbox, or whichever process failed.
//! # Ok::<(), std::io::Error>(())
//! ```

mod confine;
mod etc;
mod root;

use std::{
    fs,
    io::{self, Read as _, Write as _},
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
    sched::{CloneFlags, unshare},
    sys::{
        prctl::{set_dumpable, set_name, set_pdeathsig},
        signal::Signal,
        wait::waitpid,
    },
    unistd::{Gid, Pid, Uid, chdir, getegid, geteuid, pipe2, setgroups, setresgid, setresuid, setsid},
};
use prorl_core::{
    frame,
    hello::{Greeting, PROTOCOL, StartFailure},
};
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

use crate::{
    Network, SandboxUser,
    setup::{Setup, step},
    sys::{self, Fork},
};

/// How long process 1 may take to end everything by itself after the channel has closed, in milliseconds.
const GRACE_MS: u16 = 200;

/// The longest single wait of the outer process.
const LONGEST_WAIT: Duration = Duration::from_hours(24);

/// What process 1 knows of its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// This process's number as the host sees it.
    pub host_pid: u32,
    /// Inode number of the pid namespace.
    pub pid_namespace: u64,
    /// Inode number of the user namespace.
    pub user_namespace: u64,
    /// Effective user id inside.
    pub uid: u32,
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

/// Reads what the host wants built.
///
/// # Errors
/// When the channel ends early or carries something else.
pub fn read_setup(channel: &OwnedFd) -> Result<Setup, StartFailure> {
    let refused = |why: String| StartFailure { step: step::READ_SETUP.to_owned(), target: why, errno: 0 };
    let mut stream = stream(channel).map_err(|error| refused(error.to_string()))?;
    let mut header = [0; frame::HEADER_BYTES];
    stream.read_exact(&mut header).map_err(|error| refused(error.to_string()))?;
    let len = frame::body_len(header).map_err(|error| refused(error.to_string()))?;
    let mut body = vec![0; len];
    stream.read_exact(&mut body).map_err(|error| refused(error.to_string()))?;
    let setup: Setup = frame::decode(&body).map_err(|error| refused(error.to_string()))?;
    if setup.protocol != PROTOCOL {
        return Err(refused(format!("protocol {} of the host is not {PROTOCOL}", setup.protocol)));
    }
    Ok(setup)
}

/// Sends the first frame to the host.
///
/// # Errors
/// When the host is gone.
pub fn greet(channel: &OwnedFd, greeting: &Greeting) -> io::Result<()> {
    let bytes = frame::encode(greeting).map_err(io::Error::other)?;
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
    confine::forbid_cores().at("limit core dumps", "")?;
    let outside = etc::Outside::read(setup);
    if let Some(user) = setup.become_user {
        become_user(user)?;
    }
    make_namespaces(setup)?;
    // A pipe tells the child its number outside. That the parent keeps the writing end is how the child knows that the
    // parent lives: a parent-death signal asked for too late never comes.
    let (number_in, number_out) = pipe2(OFlag::O_CLOEXEC).at("make pipe", "")?;
    match sys::fork().at("fork process 1", "")? {
        Fork::Parent(inner) => {
            drop(number_in);
            watch(channel, inner, number_out, setup.max_life)
        }
        Fork::Child => {
            drop(number_out);
            inside(number_in, setup, &outside)
        }
    }
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

fn make_namespaces(setup: &Setup) -> Result<(), StartFailure> {
    let (uid, gid) = (geteuid(), getegid());
    if uid.is_root() {
        return Err(Errno::EPERM).at(step::BECOME_USER, "root"); // the map below would make root inside root outside
    }
    let mut kinds = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    if setup.network == Network::None {
        kinds |= CloneFlags::CLONE_NEWNET;
    }
    unshare(kinds).at(step::NAMESPACES, "")?;
    let shown = if setup.fakeroot { (0, 0) } else { (uid.as_raw(), gid.as_raw()) };
    for (file, line) in [
        ("/proc/self/setgroups", "deny".to_owned()), // or an ordinary user may not map a group
        ("/proc/self/uid_map", format!("{} {uid} 1", shown.0)),
        ("/proc/self/gid_map", format!("{} {gid} 1", shown.1)),
    ] {
        fs::write(file, line).at(step::MAP_USERS, file)?;
    }
    Ok(())
}

/// The outer process: waits for the end of process 1, of the channel or of the sandbox's life, and leaves nothing.
fn watch(channel: &OwnedFd, inner: Pid, number_out: OwnedFd, max_life: Option<Duration>) -> ! {
    // Without a handle there is no way to wait for both ends; ending here kills the child.
    let handle = rustix::process::Pid::from_raw(inner.as_raw()).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(handle)) = handle else { process::exit(1) };
    let _ = set_dumpable(false);
    let _ = confine::drop_capabilities(false);
    let _ = chdir("/");
    let mut number_out = fs::File::from(number_out);
    let _ = number_out.write_all(&inner.as_raw().to_le_bytes());
    let mut left = max_life;
    loop {
        // A wait has a limit (24 days, in milliseconds), so a long life takes several.
        let wait = left.map(|life| life.min(LONGEST_WAIT));
        let until = wait.map_or(PollTimeout::NONE, |wait| wait.try_into().unwrap_or(PollTimeout::MAX));
        // No event is asked for on the channel: its bytes are process 1's; its end is always told.
        let mut fds =
            [PollFd::new(handle.as_fd(), PollFlags::POLLIN), PollFd::new(channel.as_fd(), PollFlags::empty())];
        match poll(&mut fds, until) {
            Err(Errno::EINTR) => continue,
            Ok(0) if wait < left => {
                left = left.zip(wait).map(|(life, waited)| life.saturating_sub(waited));
                continue;
            }
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
    drop(number_out);
    process::exit(0)
}

fn ended(fd: &PollFd<'_>) -> bool {
    fd.revents().is_some_and(|events| events.contains(PollFlags::POLLIN))
}

/// The inner process, up to the point where tasks may run.
fn inside(number_in: OwnedFd, setup: &Setup, outside: &etc::Outside) -> Result<Facts, StartFailure> {
    set_pdeathsig(Signal::SIGKILL).at("ask for the parent's death signal", "")?;
    let mut number_in = fs::File::from(number_in);
    let mut number = [0; 4];
    number_in.read_exact(&mut number).at("learn own number", "")?;
    let mut fds = [PollFd::new(number_in.as_fd(), PollFlags::empty())];
    if poll(&mut fds, PollTimeout::ZERO) != Ok(0) {
        process::exit(1); // the outer process died before the death signal was asked for
    }
    setsid().at("leave the terminal", "")?;
    sys::reset_signals().at("reset signals", "")?;
    root::build(setup, outside)?;
    if setup.network == Network::None {
        sys::up_loopback().at("bring loopback up", "lo")?;
    }
    nix::unistd::sethostname(&setup.hostname).at("set host name", &setup.hostname)?;
    let facts = Facts {
        host_pid: u32::from_le_bytes(number),
        pid_namespace: inode("/proc/self/ns/pid")?,
        user_namespace: inode("/proc/self/ns/user")?,
        uid: geteuid().as_raw(),
    };
    confine::confine(setup)?;
    Ok(facts)
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
