//! What a keeper does with its folder: waits for the server's end, and ends every sandbox that is left.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use nix::{
    fcntl::Flock,
    sys::socket::{getsockopt, sockopt::PeerCredentials},
};
use prorl_core::frame;

use super::{endings::Endings, folder, process::Handle, wire::Request};
use crate::cgroup;

/// How long a sandbox may take to end by itself after its server. Its own processes allow themselves about two seconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves the server until it ends or hangs up, sees every recorded sandbox to its end, and removes the instance, which stays
/// locked for as long. `groups` is the server's folder of control groups, which goes too if the server is dead.
///
/// # Errors
/// When records cannot be listed, or files not be removed.
pub(super) fn attend(
    instance: &Path,
    mut server: Option<Server>,
    lock: Flock<File>,
    groups: Option<&Path>,
) -> io::Result<()> {
    let mut endings = Endings::new(instance.to_owned(), PATIENCE);
    while let Some(server) = server.as_mut().filter(|server| server.is_present) {
        endings.advance();
        let [asks, ended] = endings.wait([server.channel.as_fd(), server.process.as_fd()]);
        server.is_present = !ended && (!asks || server.read(&mut endings));
    }
    endings.add_all()?;
    loop {
        endings.advance();
        if endings.is_empty() {
            break;
        }
        endings.wait([]);
    }
    // What survives a kill keeps its record, for whoever opens a node here next.
    if endings.n_left() == 0 {
        folder::remove_instance(instance)?;
    }
    if let Some(groups) = groups {
        // Whoever opens a node with groups here next removes what cannot be removed now.
        let _ = cgroup::leave(groups);
    }
    drop(lock);
    // The channel stays open until the end, because the last user of a node waits for that.
    drop(server);
    Ok(())
}

/// The server.
pub(super) struct Server {
    /// Whether it has neither hung up nor ended.
    is_present: bool,
    channel: UnixStream,
    requests: frame::Decoder,
    /// A child that the server forks may hold its end of the channel longer than the server lives.
    process: Handle,
}

impl Server {
    /// Returns nothing of a server that has ended.
    pub(super) fn new(channel: UnixStream) -> Option<Self> {
        channel.set_nonblocking(true).ok()?;
        let pid = getsockopt(&channel, PeerCredentials).ok()?.pid();
        let process = Handle::of(pid.try_into().ok()?).ok()??;
        Some(Self { is_present: true, channel, requests: frame::Decoder::default(), process })
    }

    /// Returns the channel to it.
    #[cfg(feature = "init")]
    pub(super) fn channel(&self) -> &UnixStream {
        &self.channel
    }

    /// Takes in what the server asks for; tells whether it may ask for more.
    fn read(&mut self, endings: &mut Endings) -> bool {
        let mut bytes = [0; 4096];
        match (&self.channel).read(&mut bytes) {
            Ok(n_bytes @ 1..) => self.requests.push(&bytes[..n_bytes]),
            Ok(_) => return false,
            Err(error) => return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
        loop {
            match self.requests.pop() {
                Ok(Some(Request::End(id))) => endings.add(id),
                Ok(None) => return true,
                Err(_garbage) => return false,
            }
        }
    }
}
