//! The course of a start, which every runtime shares: a place in the node, a guest with its orders, its hello.

use std::{
    io,
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream as StdStream,
    },
    path::Path,
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::socket::{
        ControlMessageOwned, MsgFlags, Shutdown, UnixCredentials, recvmsg, setsockopt, shutdown, sockopt::PassCred,
    },
    unistd::{User, geteuid},
};
use prorl_core::{
    frame,
    hello::{FakeRoot, Greeting, Hello, PROTOCOL, StartFailure},
};
use tokio::{
    io::{AsyncWriteExt as _, Interest},
    net::UnixStream,
    process::Command,
    time::{Instant, timeout},
};

use crate::{
    Facts, Network, Sandbox, SandboxError, SandboxSpec, SandboxUser,
    cgroup::Ceilings,
    cpus::{self, Share},
    freeze::{Freezable, Layering},
    node::{Claim, Loopback, Node, Reach},
    parcel::MAX_FILES,
    sandbox::{Ground, Held, Processes},
    setup::{Order, Setup, step},
    sys,
    watch::Subject,
};

/// The user id of `nobody` where no such user is known.
const NOBODY: u32 = 65534;

/// A hello is small; a guest that announces more is no guest of ours.
const MAX_GREETING_BYTES: usize = 64 * 1024;

/// How long an owner may take to give up its launcher and tell what that said.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The variable that tells a sandbox on the host's network its own address.
const LOOPBACK_VARIABLE: &str = "PRORL_LOOPBACK";

/// What a runtime's processes are like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// The runtime's name.
    pub(crate) name: &'static str,
    /// Which processes there are beside the pid namespace.
    pub(crate) reach: Reach,
    /// How long the outer process may take to end by itself once its channel is closed.
    pub(crate) collapse: Duration,
}

/// What a guest is started with.
pub(crate) struct Orders {
    /// What is written down its channel, in this order.
    pub(crate) frames: Vec<Order>,
    /// Whether it is to own a launcher, whose last words are worth waiting for.
    pub(crate) has_launcher: bool,
    /// Makes an error of what it says instead of hello.
    pub(crate) explain: Box<dyn FnOnce(StartFailure) -> SandboxError + Send>,
}

/// Returns the host user that sandboxes belong to: nobody else for an ordinary user, the one that is asked for or `nobody` for
/// root.
///
/// # Errors
/// [`SandboxError::Invalid`] for one that would be root.
pub fn become_user(asked: Option<SandboxUser>) -> Result<Option<SandboxUser>, SandboxError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let user = asked.unwrap_or_else(|| match User::from_name("nobody") {
        Ok(Some(user)) => SandboxUser { uid: user.uid.as_raw(), gid: user.gid.as_raw() },
        Ok(None) | Err(_) => SandboxUser { uid: NOBODY, gid: NOBODY },
    });
    if user.uid == 0 || user.gid == 0 {
        let reason = format!("{}:{} would be root on the host", user.uid, user.gid);
        return Err(SandboxError::Invalid { what: "sandbox_user", reason });
    }
    Ok(Some(user))
}

/// Starts a guest and waits for its hello. `setup` was made from `spec`; `orders` turns it into what the guest is told.
///
/// # Cancel safety
/// Dropping the future kills what was started so far, or has the node's keeper do so.
pub(crate) async fn start(
    node: &Node,
    kind: Kind,
    spec: &SandboxSpec,
    mut setup: Setup,
    orders: impl FnOnce(&Claim, Setup) -> Result<Orders, SandboxError> + Send,
) -> Result<Sandbox, SandboxError> {
    // The time in this queue is not the guest's.
    let place = node.admit(spec.start_timeout).await?;
    let begun = Instant::now();
    let claim = node.claim(kind.name)?;
    let ceilings = Ceilings::of(spec, kind.reach);
    claim.limit(&ceilings).map_err(|source| SandboxError::at("make control group", source))?;
    let processors = spec.limits.cpus.map(|cpus| node.processors().share(cpus::whole(cpus)));
    setup.walls.cpus = processors.as_ref().map(Share::numbers).unwrap_or_default();
    let lease = match spec.network {
        Network::None => None,
        Network::Host => Some(Loopback::lease().map_err(|source| SandboxError::at("lease loopback address", source))?),
    };
    setup.loopback = lease.as_ref().map(Loopback::address);
    setup.env.extend(setup.loopback.map(|address| (LOOPBACK_VARIABLE.to_owned(), address.to_string())));
    let loopback = setup.loopback;
    let layering = spec.freezable.then(|| Layering::new(spec, &setup));
    let Orders { frames, has_launcher, explain } = orders(&claim, setup)?;
    let mut bytes = Vec::new();
    for order in &frames {
        bytes.extend(frame::encode(order).map_err(|error| SandboxError::Invalid {
            what: "env",
            reason: format!("too large for one frame: {error}"),
        })?);
    }

    let (mut channel, mut processes) = spawn(&spec.guest, kind, claim, lease)?;
    let greeted = timeout(spec.start_timeout, greet(&mut channel, &bytes)).await;
    // From here on an early return may not leave anything: `Processes` kills when dropped, and waits when asked.
    let (hello, files) = match greeted {
        Ok(Ok(greeting)) => greeting,
        Ok(Err(refusal)) => {
            let how = processes.collapse().await;
            return Err(match refusal {
                Refusal::Error(error) => error,
                Refusal::Failed(failure) => explain(failure),
                Refusal::Ended => SandboxError::Ended { how },
            });
        }
        Err(_elapsed) => {
            let output = if has_launcher { last_words(&mut channel).await } else { String::new() };
            processes.collapse().await;
            return Err(SandboxError::NotReady { waited: spec.start_timeout, output });
        }
    };
    if let Err(error) = processes.adopt(&hello) {
        let how = processes.collapse().await;
        return Err(error.unwrap_or(SandboxError::Ended { how }));
    }
    let shown = Shown::new(files, spec).and_then(|shown| {
        let freezable = layering.map(|layering| Freezable::new(layering, shown.kept)).transpose()?;
        let subject = Subject {
            proc: shown.proc,
            layer: shown.layer,
            tmp: shown.tmp,
            limits: spec.limits,
            guest: hello.host_pid,
            has_range: hello.fakeroot == Some(FakeRoot::Range),
        };
        Ok((node.watcher().watch(subject)?, shown.proxy, freezable))
    });
    let (watched, proxy, freezable) = match shown {
        Ok(shown) => shown,
        Err(error) => {
            processes.collapse().await;
            return Err(error);
        }
    };
    let start_time = begun.elapsed();
    drop(place);
    let facts = Facts {
        runtime: kind.name,
        outer_pid: processes.outer_pid(),
        start_time,
        loopback,
        run_dir: processes.run_dir(),
        hello,
    };
    tracing::debug!(id = processes.id(), guest = facts.hello.host_pid, "sandbox stands");
    Ok(Sandbox::new(
        facts,
        channel,
        processes,
        Held { ground: Ground::of(spec), watched, processors },
        proxy,
        freezable,
    ))
}

/// Starts the guest with one end of a fresh socket pair as its standard input, the lease of an address as its standard
/// output, and nothing else of ours.
fn spawn(
    guest: &Path,
    kind: Kind,
    claim: Claim,
    lease: Option<Loopback>,
) -> Result<(UnixStream, Processes), SandboxError> {
    // Both ends are close-on-exec, so no other child of this process can hold one.
    let (ours, theirs) = StdStream::pair().map_err(|source| SandboxError::at("create channel", source))?;
    let register = |source| SandboxError::at("watch channel", source);
    // What arrives carries the sender's number as the kernel translates it for us, wherever the sender sits.
    setsockopt(&ours, PassCred, &true).map_err(|errno| register(errno.into()))?;
    ours.set_nonblocking(true).map_err(register)?;
    let line = ours.try_clone().map_err(register)?;
    let channel = UnixStream::from_std(ours).map_err(register)?;
    // A bare name would be looked for along PATH.
    let program = std::path::absolute(guest).map_err(|source| SandboxError::at("find guest", source))?;
    // The outer process holds a copy of the lease: the address is nobody else's while the sandbox is still dying.
    let held = lease.map(|lease| lease.as_fd().try_clone_to_owned()).transpose();
    let stdout = held.map_err(|source| SandboxError::at("hand on loopback address", source))?;
    let mut command = Command::new(program);
    command
        .arg0("prorl-guest")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(stdout.map_or_else(Stdio::null, Stdio::from))
        .stderr(Stdio::null());
    match kind.reach {
        // A terminal's C-c is for the host alone.
        Reach::PidNamespace => command.process_group(0),
        // It leads a session of its own first of all, which the leader of a group cannot.
        Reach::Session => &mut command,
    };
    let child = command.spawn().map_err(|source| SandboxError::Spawn { path: guest.to_owned(), source })?;
    Ok((channel, Processes::new(claim, kind, child, line)?))
}

/// What came with a hello: its `/proc`, its disk, and what else was asked for.
struct Shown {
    proc: OwnedFd,
    layer: OwnedFd,
    tmp: OwnedFd,
    proxy: Option<TcpListener>,
    kept: Vec<OwnedFd>,
}

impl Shown {
    fn new(files: Vec<OwnedFd>, spec: &SandboxSpec) -> Result<Self, SandboxError> {
        let mut files = files.into_iter();
        let mut next = |what: &str| {
            files.next().ok_or_else(|| SandboxError::Protocol { reason: format!("hello without its {what}") })
        };
        let (proc, layer, tmp) = (next("/proc")?, next("writable layer")?, next("/tmp")?);
        let proxy = spec.proxy_port.map(|_port| next("listening socket")).transpose()?.map(TcpListener::from);
        Ok(Self { proc, layer, tmp, proxy, kept: files.collect() })
    }
}

/// Why there was no hello.
enum Refusal {
    Error(SandboxError),
    Failed(StartFailure),
    Ended,
}

impl From<io::Error> for Refusal {
    /// Whatever goes wrong on a socket pair means that the other end is gone.
    fn from(_: io::Error) -> Self {
        Self::Ended
    }
}

fn foreign(reason: impl Into<String>) -> Refusal {
    Refusal::Error(SandboxError::Protocol { reason: reason.into() })
}

/// Tells the guest what to be and takes its hello, and the open files that came with it.
async fn greet(channel: &mut UnixStream, orders: &[u8]) -> Result<(Hello, Vec<OwnedFd>), Refusal> {
    // A guest that gives up while we still write has a reason to tell; so a failed write is left to the read.
    let _ = channel.write_all(orders).await;
    let (greeting, news) = read_greeting(channel).await?;
    match greeting {
        Greeting::Ready(hello) if hello.protocol == PROTOCOL => {
            setsockopt(channel, PassCred, &false).map_err(io::Error::from)?;
            Ok((Hello { host_pid: news.sender, ..hello }, news.files))
        }
        Greeting::Ready(hello) => Err(foreign(format!("version {} instead of {PROTOCOL}", hello.protocol))),
        Greeting::Failed(failure) => Err(Refusal::Failed(failure)),
    }
}

/// What the kernel says of bytes.
#[derive(Default)]
struct News {
    /// The process id of the sender of the last of them; 0 if this process cannot see the sender.
    sender: u32,
    /// Open files that came with them.
    files: Vec<OwnedFd>,
}

/// Reads one greeting, and not a byte more: what follows is for the tools.
async fn read_greeting(channel: &UnixStream) -> Result<(Greeting, News), Refusal> {
    let mut news = News::default();
    let mut header = [0; frame::HEADER_BYTES];
    receive(channel, &mut header, &mut news).await?;
    let len = frame::body_len(header).map_err(|error| foreign(error.to_string()))?;
    if len > MAX_GREETING_BYTES {
        return Err(foreign(format!("hello of {len} bytes")));
    }
    let mut body = vec![0; len];
    receive(channel, &mut body, &mut news).await?;
    let greeting = frame::decode(&body).map_err(|error| foreign(error.to_string()))?;
    Ok((greeting, news))
}

/// Fills `bytes`, and notes what comes with them.
async fn receive(channel: &UnixStream, bytes: &mut [u8], news: &mut News) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let n_read = channel.async_io(Interest::READABLE, || receive_some(channel, &mut bytes[filled..], news)).await?;
        if n_read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += n_read;
    }
    Ok(())
}

fn receive_some(channel: &UnixStream, bytes: &mut [u8], news: &mut News) -> io::Result<usize> {
    let mut parts = [io::IoSliceMut::new(bytes)];
    let mut space = nix::cmsg_space!(UnixCredentials, [RawFd; MAX_FILES]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(channel.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let mut sender = 0;
    for control in message.cmsgs()? {
        match control {
            ControlMessageOwned::ScmCredentials(credentials) => {
                sender = u32::try_from(credentials.pid()).unwrap_or_default();
            }
            // Those that nobody expects are closed with the rest of the news.
            ControlMessageOwned::ScmRights(files) => news.files.extend(sys::received(files)),
            _ => {}
        }
    }
    news.sender = sender;
    Ok(message.bytes)
}

/// Tells an owner that nobody waits for a hello any more, and returns what its launcher said last.
async fn last_words(channel: &mut UnixStream) -> String {
    // Half of it: the answer comes by the other half.
    let _ = shutdown(channel.as_raw_fd(), Shutdown::Write);
    match timeout(LAST_WORDS, read_greeting(channel)).await {
        Ok(Ok((Greeting::Failed(failure), _))) if failure.step == step::LAUNCH => failure.target,
        Ok(_) | Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_on_the_host_is_refused_as_sandbox_user() {
        if !geteuid().is_root() {
            return;
        }
        for (uid, gid) in [(0, 5), (5, 0)] {
            let error = become_user(Some(SandboxUser { uid, gid })).unwrap_err();
            assert!(matches!(error, SandboxError::Invalid { what: "sandbox_user", .. }));
        }
    }
}
