use std::{
    os::fd::OwnedFd,
    os::unix::net::UnixStream as StdStream,
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicU64, Ordering},
};

use async_trait::async_trait;
use nix::unistd::{User, geteuid};
use prorl_core::{
    frame,
    hello::{Greeting, Hello, PROTOCOL},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    process::Command,
    time::timeout,
};

use crate::{
    Facts, Runtime, Sandbox, SandboxError, SandboxSpec, SandboxUser, diagnosis, sandbox::Processes, setup::Setup,
};

/// The user id of `nobody` where no such user is known.
const NOBODY: u32 = 65534;

/// A hello is small; a guest that announces more is no guest of ours.
const MAX_GREETING_BYTES: usize = 64 * 1024;

/// How a [`NamespaceRuntime`] works.
#[derive(Clone, Debug, Default)]
pub struct NamespaceConfig {
    /// The host user that sandboxes run as when they are started by root; `nobody` by default. An ordinary user's
    /// sandboxes run as that user, whatever is said here.
    pub sandbox_user: Option<SandboxUser>,
}

/// Sandboxes made from the kernel's namespaces alone: nothing to install, no privilege needed.
///
/// The guest makes its own namespaces, mounts and limits, because a program with threads cannot enter a user namespace. What
/// is started is one process that waits outside the new pid namespace, and the guest itself as process 1 inside. When
/// either dies, or the channel to the host closes, everything inside dies.
#[derive(Debug)]
pub struct NamespaceRuntime {
    config: NamespaceConfig,
}

impl NamespaceRuntime {
    /// Makes a runtime. It holds nothing of the system until the first start.
    pub fn new(config: NamespaceConfig) -> Self {
        Self { config }
    }

    /// Returns the user to become: nobody else as an ordinary user, never 0 as root.
    fn become_user(&self) -> Result<Option<SandboxUser>, SandboxError> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let user = self.config.sandbox_user.unwrap_or_else(|| match User::from_name("nobody") {
            Ok(Some(user)) => SandboxUser { uid: user.uid.as_raw(), gid: user.gid.as_raw() },
            Ok(None) | Err(_) => SandboxUser { uid: NOBODY, gid: NOBODY },
        });
        if user.uid == 0 || user.gid == 0 {
            let reason = format!("{}:{} would be root on the host", user.uid, user.gid);
            return Err(SandboxError::Invalid { what: "sandbox_user", reason });
        }
        Ok(Some(user))
    }
}

#[async_trait]
impl Runtime for NamespaceRuntime {
    fn name(&self) -> &'static str {
        "namespace"
    }

    async fn start(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        let setup = spec.to_setup(self.become_user()?)?;
        let (mut channel, mut processes) = spawn(&spec.guest)?;
        let greeted = timeout(spec.start_timeout, greet(&mut channel, &setup)).await;
        // From here on an early return may not leave anything: `Processes` kills when dropped, and waits when asked.
        let hello = match greeted {
            Ok(Ok(hello)) => hello,
            Ok(Err(refusal)) => {
                let status = processes.collapse().await;
                return Err(match refusal {
                    Refusal::Error(error) => error,
                    Refusal::Ended => SandboxError::Ended { how: status },
                });
            }
            Err(_elapsed) => {
                processes.collapse().await;
                return Err(SandboxError::NotReady { waited: spec.start_timeout });
            }
        };
        if let Err(error) = processes.adopt(hello.host_pid) {
            let status = processes.collapse().await;
            return Err(error.unwrap_or(SandboxError::Ended { how: status }));
        }
        let facts = Facts { hello, outer_pid: processes.outer_pid() };
        tracing::debug!(id = processes.id(), guest = facts.hello.host_pid, "sandbox stands");
        Ok(Sandbox::new(facts, channel, processes))
    }
}

/// Starts the guest with one end of a fresh socket pair as its standard input and nothing else of ours.
fn spawn(guest: &Path) -> Result<(UnixStream, Processes), SandboxError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);

    // Both ends are close-on-exec, so no other child of this process can hold one.
    let (ours, theirs) = StdStream::pair().map_err(|source| SandboxError::at("create channel", source))?;
    let register = |source| SandboxError::at("watch channel", source);
    ours.set_nonblocking(true).map_err(register)?;
    let line = ours.try_clone().map_err(register)?;
    let channel = UnixStream::from_std(ours).map_err(register)?;
    // A bare name would be looked for along PATH.
    let program = std::path::absolute(guest).map_err(|source| SandboxError::at("find guest", source))?;
    let child = Command::new(program)
        .arg0("prorl-guest")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0) // a terminal's C-c is for the host alone
        .spawn()
        .map_err(|source| SandboxError::Spawn { path: guest.to_owned(), source })?;
    let id = format!("ns-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    Ok((channel, Processes::new(id, child, line)?))
}

enum Refusal {
    Error(SandboxError),
    Ended,
}

impl From<std::io::Error> for Refusal {
    /// Whatever goes wrong on a socket pair means that the other end is gone.
    fn from(_: std::io::Error) -> Self {
        Self::Ended
    }
}

fn foreign(reason: impl Into<String>) -> Refusal {
    Refusal::Error(SandboxError::Protocol { reason: reason.into() })
}

/// Tells the guest what to build and reads its hello, and not a byte more: what follows is for the tools.
async fn greet(channel: &mut UnixStream, setup: &Setup) -> Result<Hello, Refusal> {
    let order = frame::encode(setup).map_err(|error| {
        Refusal::Error(SandboxError::Invalid { what: "env", reason: format!("too large for one frame: {error}") })
    })?;
    // A guest that gives up while we still write has a reason to tell; so a failed write is left to the read.
    let _ = channel.write_all(&order).await;
    let mut header = [0; frame::HEADER_BYTES];
    channel.read_exact(&mut header).await?;
    let len = frame::body_len(header).map_err(|error| foreign(error.to_string()))?;
    if len > MAX_GREETING_BYTES {
        return Err(foreign(format!("hello of {len} bytes")));
    }
    let mut body = vec![0; len];
    channel.read_exact(&mut body).await?;
    match frame::decode(&body).map_err(|error| foreign(error.to_string()))? {
        Greeting::Ready(hello) if hello.protocol == PROTOCOL => Ok(hello),
        Greeting::Ready(hello) => Err(foreign(format!("version {} instead of {PROTOCOL}", hello.protocol))),
        Greeting::Failed(failure) => Err(Refusal::Error(diagnosis::explain(Path::new("/proc"), failure))),
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
            let config = NamespaceConfig { sandbox_user: Some(SandboxUser { uid, gid }) };
            let error = NamespaceRuntime::new(config).become_user().unwrap_err();
            assert!(matches!(error, SandboxError::Invalid { what: "sandbox_user", .. }));
        }
    }
}
