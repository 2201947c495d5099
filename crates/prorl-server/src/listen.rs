//! Where the server listens, and the listener itself.

use std::{
    fmt, fs, io,
    net::{Ipv4Addr, SocketAddr},
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    stat::{Mode, fchmod},
};
use tokio::{
    net::{TcpListener, UnixListener, UnixSocket, UnixStream},
    time::{Duration, sleep, timeout},
};

use crate::stream::Stream;

/// How many connections may wait to be accepted.
const BACKLOG: u32 = 1024;

/// How long the start waits for another one that is looking at the same socket file.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// A peer that vanished without a word (its machine died) is noticed after about `KEEPALIVE_SECS` × 4.
const KEEPALIVE_SECS: u32 = 30;

/// A place to listen: `ADDR:PORT` or `unix:PATH`.
///
/// ```
/// use prorl_server::Listen;
/// let listen: Listen = "127.0.0.1:8006".parse()?;
/// assert_eq!(listen, Listen::default());
/// assert_eq!("unix:/run/prorl.sock".parse::<Listen>()?, Listen::Unix("/run/prorl.sock".into()));
/// # Ok::<(), prorl_server::InvalidListen>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP address; port 0 lets the system choose.
    Tcp(SocketAddr),
    /// A socket file, readable and writable by its owner alone.
    Unix(PathBuf),
}

/// The longest path that a socket file can have, in bytes: the kernel's 108 with the NUL at the end.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// A text that names no place to listen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidListen {
    /// Neither an address nor a socket file.
    #[error("{0:?} is no place to listen: expected ADDR:PORT (such as 127.0.0.1:8006 or [::1]:8006) or unix:PATH")]
    Unknown(String),
    /// A socket file that the kernel could not name.
    #[error("the socket path {path} has {len} bytes: expected at most 107")]
    LongPath {
        /// The path.
        path: String,
        /// Its length, in bytes.
        len: usize,
    },
}

impl Default for Listen {
    fn default() -> Self {
        Self::Tcp((Ipv4Addr::LOCALHOST, 8006).into())
    }
}

impl FromStr for Listen {
    type Err = InvalidListen;

    fn from_str(text: &str) -> Result<Self, InvalidListen> {
        let invalid = || InvalidListen::Unknown(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.len() {
                0 => Err(invalid()),
                len if len > MAX_SOCKET_PATH_BYTES => Err(InvalidListen::LongPath { path: path.to_owned(), len }),
                _ => Ok(Self::Unix(path.into())),
            };
        }
        let numeric = match text.strip_prefix("localhost:") {
            Some(port) => format!("{}:{port}", Ipv4Addr::LOCALHOST),
            None => text.to_owned(),
        };
        numeric.parse().map(Self::Tcp).map_err(|_err| invalid())
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Listen {
    /// Tells whether it is a socket file.
    pub fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Tells whether it is a TCP address that only this machine can reach.
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => false,
        }
    }
}

/// A bound listener.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Listener {
    pub(crate) async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await?;
                // Accepted connections inherit these.
                let fd = listener.as_fd();
                setsockopt(&fd, sockopt::KeepAlive, &true)?;
                setsockopt(&fd, sockopt::TcpKeepIdle, &KEEPALIVE_SECS)?;
                setsockopt(&fd, sockopt::TcpKeepInterval, &KEEPALIVE_SECS)?;
                setsockopt(&fd, sockopt::TcpKeepCount, &3)?;
                setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
                Ok(Self::Tcp(listener))
            }
            Listen::Unix(path) => {
                let (listener, file) = bind_unix(path).await?;
                Ok(Self::Unix(listener, file))
            }
        }
    }

    pub(crate) fn local(&self) -> io::Result<Listen> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Listen::Tcp),
            Self::Unix(_, file) => Ok(Listen::Unix(file.path.clone())),
        }
    }

    /// # Cancel safety
    /// No connection is lost when it is dropped.
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(socket, _)| socket.into()),
            Self::Unix(listener, _) => listener.accept().await.map(|(socket, _)| socket.into()),
        }
    }
}

/// Our socket file, removed on drop unless another one has taken its place.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let identity = identity_of(&path)?;
        Ok(Self { path, identity })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity_of(&self.path).is_ok_and(|identity| identity == self.identity)
            && let Err(err) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), error = %err, "socket file stays");
        }
    }
}

fn identity_of(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|facts| (facts.dev(), facts.ino()))
}

/// Binds a socket file for this user alone, in the place of one that a dead server left.
async fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    // Two starts at once would each find the old file dead, and the later would remove the earlier's new one.
    let _alone = lock_folder_of(path).await?;
    remove_stale(path).await?;
    let socket = UnixSocket::new_stream()?;
    // The file gets the socket's own mode, so that there is no moment in which others can connect.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket.bind(path)?;
    let file = SocketFile::new(path)?;
    Ok((socket.listen(BACKLOG)?, file))
}

async fn lock_folder_of(path: &Path) -> io::Result<fs::File> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let folder = fs::File::open(folder)?;
    let locking = async {
        loop {
            match folder.try_lock() {
                Ok(()) => return Ok(()),
                Err(fs::TryLockError::WouldBlock) => sleep(Duration::from_millis(10)).await,
                Err(fs::TryLockError::Error(err)) => return Err(err),
            }
        }
    };
    let busy = || io::Error::new(io::ErrorKind::ResourceBusy, "another program holds a lock on the folder");
    timeout(LOCK_WAIT, locking).await.map_err(|_elapsed| busy())??;
    Ok(folder)
}

async fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(err) => return Err(err),
        Ok(facts) if !facts.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is no socket"));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        // Nobody listens: what is left of a server that was killed.
        Err(err) if err.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A full backlog is a live server's too, and one of another user refuses us.
        Ok(_) | Err(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "a live server listens there")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written_alike() {
        for text in ["127.0.0.1:8006", "[::1]:80", "0.0.0.0:0", "unix:/a/b.sock", "unix:relative"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        assert_eq!("localhost:7".parse::<Listen>().unwrap().to_string(), "127.0.0.1:7");
        for text in ["", "unix:", "8006", ":8006", "127.0.0.1", "http://127.0.0.1:1", "host:1", "127.0.0.1:99999"] {
            assert!(text.parse::<Listen>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn loopback_is_told_from_the_rest() {
        for (text, loopback) in [
            ("127.0.0.1:1", true),
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("unix:/x", false),
            ("0.0.0.0:1", false),
            ("[::]:1", false),
            ("10.0.0.1:1", false),
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().is_loopback(), loopback, "{text}");
        }
    }
}
